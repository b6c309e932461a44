"""Range deletes against a naive model: one record, many records, memtables, files; and how much work they are."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import Invalid
from penstock.kv import section
from penstock.kv.section import Operation, Ranges, Rows, Section, to_edit
from penstock.lsm import memtable
from penstock.lsm.memtable import Edit, Memtable, fold_rows
from penstock.lsm.operators import check_operand
from penstock.lsm.ranges import RangeDelete, RangeDeletes, Unions
from penstock.lsm.rows import DELETE, NEVER, PUT, Row
from penstock.store.settings import StoreSettings
from penstock.store.store import Store, open_store
from penstock.testing import FakeClock, SimulatedDisk
from penstock.testing.manifest import MemoryEngine

KEYS = st.binary(min_size=1, max_size=2).map(lambda key: bytes(byte % 4 for byte in key))
BORDERS = st.lists(KEYS, min_size=2, max_size=2, unique=True).map(lambda pair: (min(pair), max(pair)))
ONE = (1).to_bytes(8, "little", signed=True)
ADD = check_operand("add_i64", ONE)
OPERATIONS: st.SearchStrategy[bytes | Operation] = st.sampled_from(
    [ONE, (DELETE, b"", NEVER), (PUT, ONE, 50), (ADD, ONE, NEVER)]
)


@st.composite
def row_sections(draw: st.DrawFn) -> Rows:
    rows = Rows()
    for key, operation in draw(st.dictionaries(KEYS, OPERATIONS, min_size=1, max_size=6)).items():
        rows[key] = operation
        rows.plain = rows.plain and isinstance(operation, bytes)
    return rows


SECTIONS = st.lists(st.one_of(row_sections(), st.lists(BORDERS, min_size=1, max_size=3).map(Ranges)), max_size=8)


def naive_rows(sections: Sequence[Section], lsn: int, time_us: int) -> dict[bytes, Row]:
    """Section by section; a range removes the rows there are."""
    rows: dict[bytes, Row] = {}
    for each in sections:
        if isinstance(each, Ranges):
            rows = {key: row for key, row in rows.items() if not any(start <= key < end for start, end in each)}
        else:
            for key, operation in each.items():
                kind, value, expires = (PUT, operation, NEVER) if isinstance(operation, bytes) else operation
                rows[key] = fold_rows(rows.get(key), (kind, value, lsn, expires), time_us)
    return rows


def rows_of(edit: Edit) -> dict[bytes, Row]:
    return {**edit.rows, **{key: (PUT, value, edit.lsn, NEVER) for key, value in edit.puts.items()}}


@given(SECTIONS)
def test_one_record(sections: list[Section]) -> None:
    edit = to_edit(sections, 7, 100)
    assert rows_of(edit) == naive_rows(sections, 7, 100)
    assert list(edit.ranges) == [border for each in sections if isinstance(each, Ranges) for border in each]


def naive_lsn(deletes: Sequence[RangeDelete], key: bytes) -> int:
    return max((lsn for start, end, lsn in deletes if start <= key < end), default=0)


ALL_KEYS = [bytes([a]) for a in range(5)] + [bytes([a, b]) for a in range(5) for b in range(5)]
DELETES = st.lists(st.tuples(BORDERS, st.integers(1, 9)).map(lambda each: (*each[0], each[1])), max_size=12)


@given(DELETES, KEYS, st.none() | KEYS)
def test_the_part_inside_a_range(deletes: list[RangeDelete], start: bytes, end: bytes | None) -> None:
    clipped = RangeDeletes.of(deletes).clip(start, end)
    for key in ALL_KEYS:
        inside = start <= key and (end is None or key < end)
        assert clipped.lsn_over(key) == (naive_lsn(deletes, key) if inside else 0)
    assert all(a < b for a, b, _ in clipped)
    assert list(clipped.starts) == sorted(clipped.starts)


@given(st.lists(DELETES.filter(bool), min_size=1, max_size=3))
def test_a_union_is_remembered_for_its_own_sources_only(parts: list[list[RangeDelete]]) -> None:
    unions, sources = Unions(), [RangeDeletes.of(part) for part in parts]
    for count in (*range(1, len(sources) + 1), *range(len(sources), 0, -1)):
        union = unions.of(sources[:count])
        assert union is unions.of(sources[:count])
        together = [each for part in parts[:count] for each in part]
        assert [union.lsn_over(key) for key in ALL_KEYS] == [naive_lsn(together, key) for key in ALL_KEYS]


@given(st.lists(st.lists(BORDERS, min_size=1, max_size=4), max_size=30))
def test_a_memtable_of_many_ranges(records: list[list[tuple[bytes, bytes]]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memtable, "RECENT_RANGES_MAX", 3)
        table, deletes = Memtable(), list[RangeDelete]()
        for lsn, borders in enumerate(records, 1):
            table.apply(Edit(lsn=lsn, time_us=1, ranges=borders))
            deletes += [(start, end, lsn) for start, end in borders]
            expected = [naive_lsn(deletes, key) for key in ALL_KEYS]
            assert [table.deleted_below(key) for key in ALL_KEYS] == expected
            assert [table.ranges.lsn_over(key) for key in ALL_KEYS] == expected
            assert table.ranges is table.ranges
        sizes = [len(folded) for folded in table._folded]
        assert all(larger > 2 * smaller for larger, smaller in pairwise(sizes))


# -- how much work it is


class Counted:
    """Counts how often a key is looked up in ranges."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lookups = 0
        lsn_over = RangeDeletes.lsn_over

        def counted(ranges: RangeDeletes, key: bytes) -> int:
            self.lookups += 1
            return lsn_over(ranges, key)

        monkeypatch.setattr(RangeDeletes, "lsn_over", counted)


def many_sections() -> list[Section]:
    sections: list[Section] = []
    for at in range(100):
        sections.append(Rows.of({b"%05d" % (at * 20 + n): b"v" for n in range(20)}))
        sections.append(Ranges([(b"%05d" % at, b"%05d" % (at + 1))]))
    return sections


def test_a_row_is_looked_up_once_however_many_ranges_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    counted, sections = Counted(monkeypatch), many_sections()
    edit = to_edit(sections, 1, 1)
    assert counted.lookups <= 2_000
    assert rows_of(edit) == naive_rows(sections, 1, 1)


def test_the_count_sees_rows_times_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: what a record cost before."""
    counted, rows = Counted(monkeypatch), dict[bytes, object]()
    for each in many_sections():
        if isinstance(each, Ranges):
            deleted = RangeDeletes.of((start, end, 1) for start, end in each)
            rows = {key: row for key, row in rows.items() if not deleted.lsn_over(key)}
        else:
            rows.update(each)
    assert counted.lookups > 10_000


# -- the whole way


def open_here(disk: SimulatedDisk, clock: FakeClock) -> Store:
    settings = StoreSettings(background=False, reserve_bytes=4096)
    return open_store("/s", fs=disk, clock=clock, random=random.Random(1), engine=MemoryEngine, settings=settings)


def differences(seed: int) -> list[str]:
    """Many writes and range deletes in few flushes, through memtables, files and compactions, against a dict."""
    chance, disk, clock = random.Random(seed), SimulatedDisk(), FakeClock()
    model: dict[bytes, bytes] = {}
    differing: list[str] = []
    store = open_here(disk, clock)
    for step in range(12):
        table = store.kv("t")
        for _ in range(chance.randrange(60)):
            a, b = sorted((b"%03d" % chance.randrange(400), b"%03d" % chance.randrange(400)))
            act = chance.randrange(4)
            if act == 0 and a < b:
                table.delete_range(a, b)
                model = {key: value for key, value in model.items() if not a <= key < b}
            elif act == 1:
                table.delete(a)
                model.pop(a, None)
            else:
                some = {b"%03d" % chance.randrange(400): b"%d" % step for _ in range(chance.randrange(1, 90))}
                table.put_many(some)
                model |= some
        for event in chance.sample(["read", "flush", "snapshot", "compact", "reopen"], 3):
            if event == "flush":
                store.flush()
            elif event == "snapshot":
                store.flush()
                store.snapshot().close()
            elif event == "compact":
                store.flush()
                store.compact("t")
            elif event == "reopen":
                store.close()
                store = open_here(disk, clock)
            table, expected = store.kv("t"), sorted(model.items())
            a, b = sorted((b"%03d" % chance.randrange(400), b"%03d" % chance.randrange(400)))
            part = [(key, value) for key, value in expected if a <= key < b]
            arrow = table.to_arrow()
            answers = {
                "scan": (list(table.scan()), expected),
                "reverse": (list(table.scan(reverse=True)), expected[::-1]),
                "part": (list(table.scan(start=a, end=b)), part),
                "arrow": (list(zip(arrow["key"].to_pylist(), arrow["value"].to_pylist(), strict=True)), expected),
                "get": ([table.get(b"%03d" % n) for n in range(400)], [model.get(b"%03d" % n) for n in range(400)]),
            }
            differing += [f"{name} after {event}" for name, (actual, correct) in answers.items() if actual != correct]
    store.close()
    return differing


@pytest.mark.parametrize("seed", range(4))
def test_reads_beside_many_range_deletes(seed: int) -> None:
    assert differences(seed) == []


def last_range_forgotten(patch: pytest.MonkeyPatch) -> None:
    union = RangeDeletes.union
    patch.setattr(RangeDeletes, "union", classmethod(lambda _, sources: union(sources[-1:])))


def part_begins_late(patch: pytest.MonkeyPatch) -> None:
    clip = RangeDeletes.clip

    def late(ranges: RangeDeletes, start: bytes, end: bytes | None) -> RangeDeletes:
        part = clip(ranges, start, end)
        return RangeDeletes(part.starts[1:], part.ends[1:], part.lsns[1:])

    patch.setattr(RangeDeletes, "clip", late)


def range_spares_its_record(patch: pytest.MonkeyPatch) -> None:
    of = RangeDeletes.of
    patch.setattr(section, "RangeDeletes", type("Seeded", (), {"of": staticmethod(lambda deletes: of(()))}))


BUGS = [last_range_forgotten, part_begins_late, range_spares_its_record]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_seeded_bug_is_seen(bug: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative controls."""
    bug(monkeypatch)
    try:
        assert any(differences(seed) for seed in range(4))
    except Invalid as error:
        assert "range deletes" in str(error)  # a merge that missed one refuses its row
