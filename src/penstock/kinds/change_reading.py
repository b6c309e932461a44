"""Reading the change feed of a table: the object that users get, and the queries behind it.

    changes          the changes of ranges of commits, in LSN order
    change_bounds    for each shard: the LSN up to which changes were trimmed, and that of the last change
    change_sizes     the rows and bytes of each part of ranges of commits

Thread: any.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pyarrow as pa

from penstock.arguments import whole
from penstock.errors import Invalid, KindMismatch, NotFound
from penstock.kinds.capabilities import Queryable, QueryContext
from penstock.kinds.changes import (
    CHANGES,
    Changing,
    ChangingSnapshot,
    FeedView,
    change_batch,
    feed_schema,
)
from penstock.kinds.core import InThisProcess, Kind
from penstock.kinds.port import Reading
from penstock.partition.ledger_records import TableInfo

BOUNDS, SIZES = "change_bounds", "change_sizes"
QUERIES = frozenset((CHANGES, BOUNDS, SIZES))
LSN_MAX = (1 << 62) - 1
BATCH_ROWS, BATCH_BYTES = 8_192, 8 << 20  # small commits are combined, up to about these


class FeedRequest(msgspec.Struct, frozen=True, array_like=True):
    """The commits to read: (shard, start, end) for each shard."""

    ranges: list[tuple[int, int, int]]  # start 0: from the first that is kept
    skip: bool = False  # whether trimmed changes are skipped; otherwise they are an error


_encode = msgspec.msgpack.Encoder().encode
_request = msgspec.msgpack.Decoder(FeedRequest)


def encode_request(ranges: Sequence[tuple[int, int, int]], *, skip: bool = False) -> bytes:
    """Encode the argument of the queries `changes` and `change_sizes`."""
    return _encode(FeedRequest(list(ranges), skip))


def has_feed(kind: Kind, info: TableInfo) -> bool:
    """Whether a table has a change feed."""
    return isinstance(kind, Changing) and kind.change_options(info.options) is not None


def as_changing(kind: Kind, info: TableInfo) -> Changing:
    """Return the kind if the table has a change feed, or raise `KindMismatch`."""
    if not isinstance(kind, Changing) or kind.change_options(info.options) is None:
        raise no_feed(info)
    return kind


def no_feed(info: TableInfo) -> KindMismatch:
    """Return the error for a table without a change feed."""
    return KindMismatch(
        f"table {info.name} of the kind {info.kind} has no change feed: create another one with changes=True, and copy "
        "the rows with store.load, because a table gets its feed when it is created"
    )


def check_after(info: TableInfo, after: int | None) -> None:
    """Raise `NotFound` if the changes after an LSN are not all of this table."""
    if after is not None and 0 < after < info.created_lsn:  # with 0 a reader begins
        raise NotFound(
            f"table {info.name} was created at LSN {info.created_lsn}, after LSN {after}, which is of an earlier "
            "table of this name or of another store: begin anew with changes()"
        )


class ChangeFeed(InThisProcess):
    """The changes of a table, in the order of their commits; each loop over it reads them at that moment.

    >>> cities = store.kv("cities", value="utf8", changes=True)
    >>> epoch = cities.put(b"de", "Berlin", durable=True)
    >>> epoch = cities.delete(b"de", durable=True)
    >>> changes = cities.changes().to_arrow()
    >>> changes.select(["key", "value", "_change_type"]).to_pylist()[0]
    {'key': b'de', 'value': 'Berlin', '_change_type': 'insert'}
    >>> last = changes["_commit_version"][-1].as_py()
    >>> cities.changes(after=last).to_arrow().num_rows
    0
    """

    def __init__(
        self, reading: Reading, info: TableInfo, columns: pa.Schema, after: int | None, until: int | None
    ) -> None:
        self._reading = reading
        self._info = info
        self._columns = columns  # of the table
        start = 0 if after is None else whole(after, "after", 0, LSN_MAX - 1) + 1
        end = LSN_MAX if until is None else whole(until, "until", 0, LSN_MAX - 1) + 1
        if end < start:
            raise Invalid(f"after ({after}) is above until ({until}): exchange them")
        check_after(info, after)
        self._argument = encode_request([(shard, start, end) for shard in range(info.shards)])

    def __repr__(self) -> str:
        return f"<ChangeFeed of {self._info.name!r}>"

    @property
    def schema(self) -> pa.Schema:
        """The Arrow schema: the columns of the table, then `_change_type`, `_commit_version` and others."""
        return feed_schema(self._columns)

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        """Yield record batches. `NotFound` if changes after the LSN that was given were trimmed."""
        return self._reading.query(self._info, CHANGES, self._argument)

    def to_arrow(self) -> pa.Table:
        """Return all changes as an Arrow table.

        >>> users.changes().to_arrow().column("_change_type")[0].as_py()
        'insert'
        """
        return pa.Table.from_batches(list(self), schema=self.schema)

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return pa.RecordBatchReader.from_batches(self.schema, iter(self)).__arrow_c_stream__(requested_schema)


# -- answering


class FeedQueries(Queryable):
    """Answers the queries of the change feed of a table, for every kind."""

    def __init__(self, kind: Kind, info: TableInfo) -> None:
        self._kind = as_changing(kind, info)

    def check_query(self, info: TableInfo, name: str, argument: bytes) -> None:
        if name == BOUNDS:
            if argument:
                raise Invalid(f"the query {BOUNDS} has no argument")
            return
        try:
            request = _request.decode(argument)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Invalid(f"the argument of the query {name} is ranges of commits ({error})") from None
        shards = [shard for shard, _, _ in request.ranges]
        if any(not 0 <= shard < info.shards for shard in shards) or len(set(shards)) < len(shards):
            raise Invalid(f"table {info.name} has the shards 0 to {info.shards - 1}: name each at most once")
        if any(not 0 <= start <= end <= LSN_MAX for _, start, end in request.ranges):
            raise Invalid(f"a range of commits is (shard, start, end), with 0 <= start <= end <= {LSN_MAX}")

    def query(
        self, info: TableInfo, name: str, argument: bytes, shards: Sequence[Any], context: QueryContext
    ) -> Iterator[Any]:
        feeds = [_feed(shard) for shard in shards]
        if name == BOUNDS:
            yield pa.record_batch(
                {
                    "floor": pa.array([feed.floor for feed in feeds], pa.int64()),
                    "last": pa.array([feed.last for feed in feeds], pa.int64()),
                }
            )
            return
        request = _request.decode(argument)
        ahead = max((start for _, start, _ in request.ranges), default=0) - 1
        if ahead > context.lsn:
            raise NotFound(
                f"changes of {info.name} after LSN {ahead} are not there: the store, or the snapshot, is at LSN "
                f"{context.lsn}; that LSN is of another store, or this one was restored: begin anew with changes()"
            )
        sources = [_parts(info, feeds[commits[0]], commits, skip=request.skip) for commits in request.ranges]
        merged = heapq.merge(*sources, key=lambda item: item[1][0])
        if name == SIZES:
            for shard, (lsn, _, rows, data) in merged:
                context.check()
                yield pa.record_batch({"shard": [shard], "lsn": [lsn], "rows": [rows], "bytes": [len(data)]})
            return
        batches, rows, size = list[Any](), 0, 0
        for shard, part in merged:
            context.check()
            batches.append(change_batch(self._kind, info.options, shard, part))
            rows, size = rows + batches[-1].num_rows, size + batches[-1].nbytes
            if rows >= BATCH_ROWS or size >= BATCH_BYTES:
                yield pa.concat_batches(batches)
                batches, rows, size = [], 0, 0
        if batches:
            yield pa.concat_batches(batches)


def _parts(
    info: TableInfo, feed: FeedView, commits: tuple[int, int, int], *, skip: bool
) -> Iterator[tuple[int, tuple[int, int, int, bytes]]]:
    """Return the shard and each part of the commits (shard, start, end)."""
    (shard, start, end), floor = commits, feed.floor
    if 0 < start <= floor and not skip:
        raise NotFound(
            f"changes of {info.name} up to LSN {floor} were trimmed: keep them longer (ChangeOptions), or read the "
            "table in a snapshot and go on with changes(after=snapshot.lsn)"
        )
    return ((shard, part) for part in feed.parts(max(start, floor + 1), end))


def _feed(shard: Any) -> FeedView:
    feed = shard.feed if isinstance(shard, ChangingSnapshot) else None
    assert feed is not None  # the table has one
    return feed
