"""Runs a query of a kind: on all shards of a table at one LSN, in bounded batches, each before a deadline.

Thread: the reader's.
Invariants: (1) the size of an argument is checked before it is decoded. (2) a batch has at most ROWS_MAX rows and
about BATCH_BYTES bytes, more only if a single row has more. (3) the caller waits at most `timeout_s` for a batch, if
the kind calls `check` in its loops.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from penstock.arguments import in_short, seconds
from penstock.errors import Invalid, WaitExpired
from penstock.host.clock import Clock
from penstock.kinds import QUERY_BYTES_MAX, QUERY_S_MAX, Queryable, as_queryable
from penstock.kinds.change_reading import QUERIES as FEED_QUERIES
from penstock.kinds.change_reading import FeedQueries
from penstock.partition.ledger_records import TableInfo
from penstock.registry import kind_named

ROWS_MAX = 65_536
BATCH_BYTES = 8 << 20


def check_query(info: TableInfo, name: Any, argument: Any, timeout_s: Any) -> Queryable:
    """Return the kind that answers a query; `Invalid` or `KindMismatch` before anything is read."""
    if type(name) is not str or type(argument) is not bytes:
        raise Invalid(f"a query is a name and bytes, not {in_short(name)} and {type(argument).__name__}")
    if len(argument) > QUERY_BYTES_MAX:
        raise Invalid(f"the argument of a query has {len(argument)} bytes: at most {QUERY_BYTES_MAX} are allowed")
    seconds(timeout_s, "timeout_s", QUERY_S_MAX, above_zero=True)
    kind = kind_named(info.kind, info.name)
    answering = FeedQueries(kind, info) if name in FEED_QUERIES else as_queryable(kind, info)
    answering.check_query(info, name, argument)
    return answering


class _Deadline:
    """The `QueryContext` of one query: its LSN and time, and the deadline of its next batch."""

    def __init__(self, info: TableInfo, lsn: int, time_us: int, clock: Clock, timeout_s: float) -> None:
        self._table = info.name
        self.lsn, self.time_us = lsn, time_us
        self._clock = clock
        self._timeout_s = timeout_s
        self._until_s = 0.0

    def begin(self) -> None:
        self._until_s = self._clock.monotonic_s() + self._timeout_s

    def check(self) -> None:
        if self._clock.monotonic_s() > self._until_s:
            raise WaitExpired(
                f"a query of table {self._table} took longer than {self._timeout_s} s for a batch: ask for less, or "
                "raise timeout_s"
            )


def run_query(
    kind: Queryable,
    info: TableInfo,
    name: str,
    argument: bytes,
    shards: Sequence[Any],
    *,
    lsn: int,
    time_us: int,
    clock: Clock,
    timeout_s: float,
) -> Iterator[Any]:
    """Yield the record batches of a query. Requires: `check_query` accepted it."""
    deadline = _Deadline(info, lsn, time_us, clock, timeout_s)
    deadline.begin()
    batches = iter(kind.query(info, name, argument, shards, deadline))
    while True:
        deadline.begin()
        batch = next(batches, None)
        if batch is None:
            return
        rows = batch.num_rows
        step = max(1, min(ROWS_MAX, rows * BATCH_BYTES // max(1, batch.nbytes)))
        for start in range(0, rows, step):
            yield batch.slice(start, step)
