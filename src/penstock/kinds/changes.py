"""The change feed of a shard: what each commit changed, in LSN order, in a tree beside the shard's own.

A commit is one journal record; its changes are the difference between the shard before and after it. The machine of the
shard computes them from its state before it applies a record (`Changing`), because a later state cannot tell an insert
from an update, nor what a range delete or an operand met. They are applied to the feed's tree first, then the record to
the shard's tree. Both are memory until a flush; the feed is always stored first (`Maintenance.open_companion`). So a
replay that begins where the shard's files end finds the state from which the missing changes follow, and skips those
that the feed has: a change is in the feed if and only if its record is applied, once.

Rows of the tree (numbers big-endian; see docs/format/changes.md):
    c <lsn> <part>           changes: a header, then the bytes of the kind
    d <time> <key>           a deadline: a row that expires; see `deadlines`
    f                        the floor: changes up to this LSN were trimmed

Retention is judged by records, at their time: by one without changes, and by the first of each second. So what a feed
has follows from the journal, on every member of a cluster and after a replay. The owner writes a record that changes
nothing when something is due.

Thread: `record` by the thread that applies; reads from any.
Invariant: the feed has every change of (floor, applied], and none of a later LSN that readers see.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple, Protocol, runtime_checkable

import msgspec
import numpy as np
import pyarrow as pa

from penstock.arguments import flag, in_short, seconds, whole
from penstock.errors import CorruptionError, Invalid
from penstock.host import threads
from penstock.kinds.deadlines import DEADLINE, Deadline, Deadlines, deadline_row
from penstock.lsm.maintenance import COMPANION, Maintenance
from penstock.lsm.memtable import Edit, Memtable
from penstock.lsm.rows import fixed_array
from penstock.lsm.snapshot import Snapshot
from penstock.lsm.tree import Tree
from penstock.partition.machine import PartitionDescriptor

CHANGES = "changes"  # the folder of a feed in that of its shard, and the query that reads it
AGE_S, AGE_S_MAX = 7 * 86_400.0, 1e11
BYTES_MAX = (1 << 62) - 1
PART_BYTES = 4 << 20  # of the changes that one row holds, about
LOADED_BYTES = 64 << 20  # of changes that are in memory at once, about, while they are written to files
TRIM_STEP_US = 1_000_000  # at most one record with changes trims in it
TRIM_PARTS_MAX = 50_000  # by one record, which looks at each of them while it is applied

INSERT, PREIMAGE, POSTIMAGE, REMOVAL = range(4)  # as stored
NAMES = ("insert", "update_preimage", "update_postimage", "delete")
_CHANGE, _FLOOR = b"c", b"f"
_KEY = struct.Struct(">cQI")  # b"c", lsn, part
_U64 = struct.Struct(">Q")
_HEADER = struct.Struct("<QQII")  # time, bytes of all changes so far, rows, reserved
assert (_KEY.size, _HEADER.size) == (13, 24)

OWN_COLUMNS = pa.schema(
    [
        pa.field("_change_type", pa.string(), nullable=False),
        pa.field("_commit_version", pa.uint64(), nullable=False),
        pa.field("_commit_timestamp", pa.timestamp("us", "UTC"), nullable=False),
        pa.field("_shard", pa.int32(), nullable=False),
    ]
)


class ChangeOptions(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What the change feed of a table holds, and how long; a change is deleted as soon as one of the rules applies.

    >>> options = penstock.ChangeOptions(preimages=True, age_s=86_400)
    >>> accounts = store.kv("accounts", changes=options)
    >>> epoch = accounts.put(b"ada", b"10", durable=True)
    >>> accounts.changes().to_arrow()["_change_type"].to_pylist()
    ['insert']
    """

    preimages: bool = False  # whether it has the row before an update, and all columns of a deleted row
    age_s: float | None = AGE_S  # changes older than this are deleted; None: never
    bytes_max: int | None = None  # the oldest are deleted while those of a shard take more

    def __post_init__(self) -> None:
        if self.age_s is not None:
            seconds(self.age_s, "age_s of a change feed", AGE_S_MAX, above_zero=True)
        if self.bytes_max is not None:
            whole(self.bytes_max, "bytes_max of a change feed", 1, BYTES_MAX)
        if type(self.preimages) is not bool:
            raise Invalid(f"preimages of a change feed is True or False, not {in_short(self.preimages)}")


def change_options(changes: Any) -> ChangeOptions | None:
    """Return options made of plain values: None for False; `Invalid` for what is neither a bool nor options."""
    if not isinstance(changes, ChangeOptions):
        return ChangeOptions() if flag(changes, "changes, unless it is a ChangeOptions(...),") else None
    return ChangeOptions(
        preimages=changes.preimages,
        age_s=None if changes.age_s is None else float(changes.age_s),
        bytes_max=None if changes.bytes_max is None else int(changes.bytes_max),
    )


class ChangePart(NamedTuple):
    """Changes of one commit, in the encoding of their kind."""

    rows: int
    pieces: Sequence[bytes]  # of their bytes, which are joined once
    deadlines: Sequence[Deadline] = ()  # of the new rows that expire

    @property
    def size(self) -> int:
        return sum(map(len, self.pieces))


@runtime_checkable
class Changing(Protocol):
    """Tables can have a change feed. The machines of such a kind are `FeedKeeping`."""

    def change_options(self, options: bytes) -> ChangeOptions | None:
        """Return the options of a table's change feed; None if it has none."""

    def change_schema(self, options: bytes) -> pa.Schema:
        """Return the columns that identify and hold a row: those that are not part of a delete are nullable."""

    def read_changes(self, data: bytes, options: bytes) -> tuple[Any, pa.RecordBatch]:
        """Decode a part: the type of each change (INSERT to REMOVAL, as bytes), and the rows."""

    def nothing(self) -> Any:
        """Return a section that changes nothing. It lets a shard's feed take in rows that expired."""


@runtime_checkable
class FeedKeeping(Protocol):
    """The machine of a shard that may have a change feed. A `TreeMachine` calls `Feed.record`."""

    def maintain_feed(self, now_us: int) -> bool:
        """Let the feed trim by its options; return whether it needs a record of the shard for that."""


class FeedView(Protocol):
    """The change feed of a shard as of one LSN."""

    @property
    def floor(self) -> int:
        """The LSN up to which changes were trimmed; 0 if none were."""

    @property
    def last(self) -> int:
        """The LSN of the last change, or the floor."""

    def parts(self, start: int, end: int) -> Iterator[tuple[int, int, int, bytes]]:
        """Yield (lsn, time, rows, data) of each part of the commits [start, end)."""


@runtime_checkable
class ChangingSnapshot(Protocol):
    """A shard snapshot that may have a change feed."""

    @property
    def feed(self) -> FeedView | None: ...


class _State(NamedTuple):
    """The end of a feed after a record."""

    lsn: int  # of the last change; 0: there is none
    time_us: int
    total: int  # bytes of all changes so far
    floor: int


class Feed:
    """The change feed of one shard."""

    def __init__(self, tree: Tree, maintenance: Maintenance, options: ChangeOptions) -> None:
        self.tree = tree
        self.options = options
        self._maintenance = maintenance
        newest = next(tree.scan(prefix=_CHANGE, reverse=True, limit=1), None)
        lsn, (time_us, total, _, _) = (0, (0, 0, 0, 0)) if newest is None else (_lsn_of(newest[0]), _header(newest[1]))
        self._state = _State(lsn, time_us, total, _floor_of(tree.get(_FLOOR)))
        self._next = 0, self._state  # the last record begun, and the state after it
        self._oldest: tuple[int, int] | None = None  # time and total of the first change, or of an earlier one
        self.deadlines = Deadlines(tree)

    # -- writing

    def lacks(self, lsn: int) -> bool:
        """Whether the changes of a record are to be recorded: false at a replay if the feed has them."""
        return lsn > self.tree.lsn

    def record(
        self,
        lsn: int,
        time_us: int,
        changes: Iterable[ChangePart],
        met: int = 0,
    ) -> None:
        """Add the changes of a record, which meets a number of deadlines.

        Many changes, as of a range delete with preimages, are written to files part by part: memory may not hold them.
        Requires: `lacks(lsn)`, and the record is not applied. An interrupted call is repeated.
        """
        groups = _grouped(changes)
        parts, more = next(groups, []), next(groups, None)
        if more is not None:
            everything = chain(parts, more, chain.from_iterable(groups))
            threads.run_uninterrupted(lambda: self.record_files(lsn, time_us, everything))
            return
        self._update_state()
        puts, total = _rows_of(lsn, time_us, parts, self._state.total)
        self.deadlines.add(deadline for part in parts for deadline in part.deadlines)
        ranges: list[tuple[bytes, bytes]] = []
        if met and (obsolete := self.deadlines.obsolete(met, time_us)) is not None:
            ranges.append(obsolete)
        floor, oldest = self._state.floor, self._oldest
        if not parts or self.is_trim_step(time_us):
            floor, oldest = self._due(time_us)
        if floor > self._state.floor:
            ranges.append((_KEY.pack(_CHANGE, 0, 0), _KEY.pack(_CHANGE, floor + 1, 0)))
            puts[_FLOOR] = _U64.pack(floor)
        if puts or ranges:
            last = (lsn, time_us) if parts else self._state[:2]
            self._next = lsn, _State(*last, total, floor)
            self.tree.apply(Edit(lsn=lsn, time_us=time_us, puts=puts, ranges=ranges))
            self._update_state()
        self._oldest = oldest  # last: an interrupted call is repeated, and finds the same changes due

    def record_one(self, lsn: int, time_us: int, part: ChangePart) -> None:
        """Record a single part: the fast form of `record` for the most common write."""
        self._update_state()
        state = self._state
        if time_us // TRIM_STEP_US != state.time_us // TRIM_STEP_US:
            self.record(lsn, time_us, (part,))
            return
        total = state.total + part.size
        self._next = lsn, _State(lsn, time_us, total, state.floor)
        value = b"".join((_HEADER.pack(time_us, total, part.rows, 0), *part.pieces))
        self.tree.put(_KEY.pack(_CHANGE, lsn, 0), value, lsn, time_us)
        self._update_state()

    def record_files(self, lsn: int, time_us: int, parts: Iterable[ChangePart]) -> None:
        """Add changes of any size, as those of a load, to files. Requires: as for `record`."""
        self._update_state()

        def memtables() -> Iterator[Memtable]:
            number, total = 0, self._state.total
            for group in _grouped(parts):
                puts, total = _rows_of(lsn, time_us, group, total, number)
                number += len(group)
                self._next = lsn, _State(lsn, time_us, total, self._state.floor)
                memtable = Memtable(lsn - 1)
                memtable.apply(Edit(lsn=lsn, time_us=time_us, puts=puts))
                yield memtable

        self.deadlines.forget()
        self._maintenance.append_files(self.tree, memtables(), lsn, time_us)
        self._update_state()

    def _update_state(self) -> None:
        """Set the state to that after the last record begun, if it was applied: an interrupt may have come between."""
        lsn, state = self._next
        if lsn == self.tree.lsn:
            self._state = state

    # -- retention

    def maintain(self, now_us: int, applied_us: int) -> bool:
        """Return whether a record that changes nothing is needed, to trim changes or to record rows that expired.

        `applied_us`: the time of the last record of the shard.
        """
        return self._due(now_us)[0] > self._state.floor or self.deadlines.is_due(applied_us, now_us)

    def is_trim_step(self, time_us: int) -> bool:
        """Whether a record with changes at this time also trims: it is the first of its second."""
        return time_us // TRIM_STEP_US != self._state.time_us // TRIM_STEP_US

    def _due(self, time_us: int) -> tuple[int, tuple[int, int] | None]:
        """Return the floor that retention requires at a time, and the oldest change above it, if there is one."""
        age_s, bytes_max, state = self.options.age_s, self.options.bytes_max, self._state
        oldest_us = 0 if age_s is None else time_us - int(age_s * 1e6)
        total_min = 0 if bytes_max is None else state.total - bytes_max
        floor, oldest = state.floor, self._oldest
        if oldest is not None and oldest[0] >= oldest_us and oldest[1] > total_min:
            return floor, oldest
        for number, (key, value) in enumerate(self.tree.scan(_KEY.pack(_CHANGE, floor + 1, 0), DEADLINE)):
            change_us, total, _, _ = _header(value)
            if (change_us >= oldest_us and total > total_min) or number >= TRIM_PARTS_MAX:
                return floor, (change_us, total)
            floor = _lsn_of(key)
        return floor, None

    # -- reading

    @property
    def last(self) -> int:
        """The LSN of the last change; 0 if there is none."""
        return self._state.lsn

    def snapshot(self, lsn: int) -> FeedSnapshot:
        """Return the feed up to an LSN."""
        return FeedSnapshot(self.tree.snapshot(), lsn)

    def memory_bytes(self) -> int:
        return self.tree.memory_bytes()

    def store_now(self) -> None:
        self._maintenance.flush(self.tree)


class FeedSnapshot:
    """The change feed of a shard as of one LSN."""

    __slots__ = ("_lsn", "_snapshot")

    def __init__(self, snapshot: Snapshot, lsn: int) -> None:
        self._snapshot = snapshot
        self._lsn = lsn  # a record whose apply failed may be in the feed already

    @property
    def floor(self) -> int:
        """The LSN up to which changes were trimmed; 0 if none were."""
        return _floor_of(self._snapshot.get(_FLOOR))

    @property
    def last(self) -> int:
        """The LSN of the last change, or the floor."""
        end = _KEY.pack(_CHANGE, self._lsn + 1, 0)
        newest = next(self._snapshot.scan(_CHANGE, end, reverse=True, limit=1), None)
        return self.floor if newest is None else _lsn_of(newest[0])

    def parts(self, start: int, end: int) -> Iterator[tuple[int, int, int, bytes]]:
        """Yield (lsn, time, rows, data) of each part of the commits [start, end)."""
        end = min(end, self._lsn + 1)
        if start < end:
            for key, value in self._snapshot.scan(_KEY.pack(_CHANGE, start, 0), _KEY.pack(_CHANGE, end, 0)):
                time_us, _, rows, _ = _header(value)
                yield _lsn_of(key), time_us, rows, value[_HEADER.size :]

    def close(self) -> None:
        self._snapshot.close()


def open_feed(maintenance: Maintenance, descriptor: PartitionDescriptor, tree: Tree, options: ChangeOptions) -> Feed:
    """Open the feed of a shard whose rows are in `tree`, or close that, too: the shard is opened again later."""
    table, shard = descriptor.table_id, descriptor.shard
    try:
        return Feed(
            maintenance.open_companion(table, shard, f"{descriptor.folder}/{CHANGES}", tree), maintenance, options
        )
    except BaseException:
        for number in (COMPANION + shard, shard):
            maintenance.close_tree(table, number)
        raise


def feed_schema(columns: pa.Schema) -> pa.Schema:
    """Return the Arrow schema of the change feed of a table with these columns."""
    return pa.schema([*columns, *OWN_COLUMNS])


def change_batch(kind: Changing, options: bytes, shard: int, part: tuple[int, int, int, bytes]) -> pa.RecordBatch:
    """Return a part of a feed as a record batch of its schema."""
    lsn, time_us, _, data = part
    types, rows = kind.read_changes(data, options)
    count = rows.num_rows
    numbers = fixed_array(pa.int8(), np.frombuffer(types, np.int8))
    names = pa.DictionaryArray.from_arrays(numbers, pa.array(NAMES, pa.string())).cast(pa.string())
    own = [
        names,
        pa.repeat(pa.scalar(lsn, pa.uint64()), count),
        pa.repeat(pa.scalar(time_us, OWN_COLUMNS.field(2).type), count),
        pa.repeat(pa.scalar(shard, pa.int32()), count),
    ]
    return pa.record_batch([*rows.columns, *own], schema=feed_schema(rows.schema))


def _rows_of(
    lsn: int, time_us: int, parts: Sequence[ChangePart], total: int, first: int = 0
) -> tuple[dict[bytes, bytes], int]:
    """Return the rows of parts, and the bytes of all changes with them."""
    rows: dict[bytes, bytes] = {}
    for number, part in enumerate(parts, first):
        total += part.size
        header = _HEADER.pack(time_us, total, part.rows, 0)
        rows[_KEY.pack(_CHANGE, lsn, number)] = b"".join((header, *part.pieces))
        rows.update(deadline_row(*deadline) for deadline in part.deadlines)
    return rows, total


def _grouped(parts: Iterable[ChangePart]) -> Iterator[list[ChangePart]]:
    """Yield parts in groups of about LOADED_BYTES."""
    group, size = list[ChangePart](), 0
    for part in parts:
        group.append(part)
        size += part.size
        if size >= LOADED_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def _floor_of(row: bytes | None) -> int:
    return 0 if row is None else int(_U64.unpack(row)[0])


def _lsn_of(key: bytes) -> int:
    return int(_KEY.unpack(key)[1])


def _header(value: bytes) -> tuple[int, int, int, int]:
    if len(value) < _HEADER.size:
        raise CorruptionError("a change feed", 0, "a part has no header")
    return _HEADER.unpack_from(value)
