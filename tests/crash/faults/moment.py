"""What holds at any single moment of a store: a batch is there whole or not at all, sums agree with their parts.

A mark's value names the tables of its batch: "a,b,q". A row of a `put_many` has how many there are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from faults.history import MARK, WHOLE, WORK

TOTAL = "n"  # beside marks: n/<actor> counts them
WORK_TOTAL = "dn"


def number_of(text: str | None) -> int:
    """A counter's value, which is 8 bytes little-endian shown as latin-1."""
    return 0 if text is None else int.from_bytes(text.encode("latin-1"), "little", signed=True)


def find_tears(tables: Mapping[str, Mapping[str, str]], queues: Mapping[str, frozenset[str]]) -> Iterator[str]:
    """Every batch that is not whole; `queues` holds the identities of messages ("actor.number.part")."""
    for table, rows in tables.items():
        counts: dict[str, int] = defaultdict(int)
        parts: dict[str, int] = defaultdict(int)
        works = 0
        for key, value in rows.items():
            if key[0] == MARK:
                counts[key.split("/")[1]] += 1
                yield from _missing_marks(table, key, value, tables, queues)
            elif key[0] == WHOLE:
                parts[key.rpartition("/")[0] + " " + value.partition(".")[0]] += 1
            elif key.startswith(f"{WORK}/"):
                works += 1
        yield from _wrong_totals(table, rows, counts, works)
        for name, count in parts.items():
            if count != int(name.rpartition(" ")[2]):
                yield f"torn put_many: table {table} has {count} rows of {name}"


def _missing_marks(
    table: str,
    key: str,
    value: str,
    tables: Mapping[str, Mapping[str, str]],
    queues: Mapping[str, frozenset[str]],
) -> Iterator[str]:
    _, actor, number = key.split("/")
    for other in value.split(","):
        if other in tables and key not in tables[other]:
            yield f"torn batch: {key} is in {table}, not in {other}"
        if other in queues and f"{actor}.{int(number)}.0" not in queues[other]:
            yield f"torn batch: {key} is in {table}, its message is not in {other}"


def _wrong_totals(table: str, rows: Mapping[str, str], counts: Mapping[str, int], works: int) -> Iterator[str]:
    actors = {key.split("/")[1] for key in rows if key.startswith(f"{TOTAL}/")}
    for actor in sorted(actors | set(counts)):
        total = number_of(rows.get(f"{TOTAL}/{actor}"))
        if total != counts.get(actor, 0):
            yield f"wrong sum: table {table} has {counts.get(actor, 0)} marks of {actor}, counted {total}"
    if number_of(rows.get(WORK_TOTAL)) != works:
        yield f"wrong sum: table {table} has {works} results, counted {number_of(rows.get(WORK_TOTAL))}"
