"""What the batches of each stream did: one count for each consumer that a stream moves.

A stream says with the move of its consumer how many rows it wrote; the ledger says whether it accepted the batch or
knew it already. The owner counts both when a batch is applied, and keeps the counts like all metrics (`kept_metrics`).

Thread: `note` by the thread that applies, one at a time; the rest by any.
Invariants: (1) a batch is counted at most once, as its verdict says. (2) at most STREAMS_MAX consumers have counts:
others are not counted, so that names cannot fill the memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from penstock.errors import PenstockError
from penstock.host.metrics import MetricFamily, MetricSamples, counter
from penstock.kinds import Streamable
from penstock.lsm.maintenance import COMPANION
from penstock.partition.ledger import Ledger
from penstock.partition.ledger_records import TableInfo, Verdict, decode_condition
from penstock.queue.calls import StreamTotals
from penstock.queue.positions import MOVE, Move, decode_row, parse_row_key, read_argument, rows_of
from penstock.registry import KINDS

STREAMS_MAX = 1_000
MESSAGES, CHANGES = "messages", "changes"
_MARK = MOVE.encode()
_LABELS = ("table", "consumer", "reads")
_TEXTS = {
    "batches": "Batches that a stream committed",
    "rows_in": "Messages that a stream read; of a change feed, LSNs",
    "rows_out": "Rows that a stream wrote, dead letters apart",
    "dead": "Dead letters that a stream wrote",
    "duplicates": "Batches of a stream that were committed before, and not written again",
}


class StreamKey(NamedTuple):
    """A consumer that streams move."""

    table: int
    consumer: str
    of_feed: bool  # of the change feed of a queue, beside the consumers of its messages


class StreamCounts:
    """The counts of all streams since the store was opened."""

    def __init__(self) -> None:
        self._counts: dict[StreamKey, StreamTotals] = {}  # its values are replaced whole
        self._seeded = False

    def note(self, condition: bytes, verdict: Verdict) -> None:
        """Count a group that was judged, if it moves a consumer."""
        if _MARK not in condition or verdict not in (Verdict.ACCEPTED, Verdict.DUPLICATE):
            return
        for name, argument in decode_condition(condition).others:
            if name == MOVE:
                table, move = read_argument(argument, Move)
                assert isinstance(move, Move)
                self._count(table, move, duplicate=verdict is Verdict.DUPLICATE)

    def _count(self, table: int, move: Move, *, duplicate: bool) -> None:
        key = StreamKey(table, move.consumer, any(shard >= COMPANION for shard, _, _ in move.ranges))
        now = self._counts.get(key)
        if now is None and len(self._counts) >= STREAMS_MAX:
            return
        counts, now = move.counts, now or StreamTotals()
        if duplicate:
            more = StreamTotals(duplicates=1)
        else:
            rows_in = sum(end - start for _, start, end in move.ranges)
            more = StreamTotals(1, rows_in, counts.rows_out, counts.dead, counts.skipped)
        self._counts[key] = StreamTotals(
            *(getattr(now, name) + getattr(more, name) for name in StreamTotals.__struct_fields__)
        )

    def families(self, ledger: Ledger, of: TableInfo | None = None) -> Iterator[MetricFamily]:
        """Yield the counts as metrics: of all tables, or of one."""
        if not self._seeded:
            self._seed(ledger)
        samples: dict[str, MetricSamples] = {name: {} for name in _TEXTS}
        for key, totals in list(self._counts.items()):
            info = ledger.table_by_id(key.table)
            if info is None or (of is not None and of.table_id != key.table):
                continue
            of_rows = isinstance(KINDS.get(info.kind), Streamable) and not key.of_feed
            reads = MESSAGES if of_rows else CHANGES
            for name in _TEXTS:
                samples[name][info.name, key.consumer, reads] = getattr(totals, name)
        for name, text in _TEXTS.items():
            yield counter(f"stream_{name}", text, samples[name], _LABELS)

    def _seed(self, ledger: Ledger) -> None:
        """Begin with the consumers that earlier openings counted, so that what they counted is shown at once."""
        self._seeded = True
        for info in ledger.tables():
            for key, row in ledger.tree.scan(prefix=rows_of(info.table_id)):
                try:
                    shard, consumer = parse_row_key(info.table_id, key)
                    streamed = decode_row(row).mode == "streamed"
                except (PenstockError, UnicodeDecodeError):  # reported by those who need it
                    continue
                if streamed and len(self._counts) < STREAMS_MAX:
                    self._counts.setdefault(StreamKey(info.table_id, consumer, shard >= COMPANION), StreamTotals())


def totals_by_consumer(families: Iterable[MetricFamily], table: str) -> Mapping[str, StreamTotals]:
    """Return the totals of the streams that read a table's messages, from metrics that include earlier openings."""
    counts: dict[str, dict[str, int]] = {}
    for family in families:
        name = family.name.removeprefix("stream_").removesuffix("_total")
        for (of, consumer, reads), value in family.samples.items():
            if of == table and reads == MESSAGES and isinstance(value, (int, float)):
                counts.setdefault(consumer, {})[name] = int(value)
    return {consumer: StreamTotals(**numbers) for consumer, numbers in counts.items()}
