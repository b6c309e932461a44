"""The ledger: judges every record before it reaches a partition, and stores the verdicts.

It is an ordinary tree, applied first. It holds the tokens of producers, the tables, the last epoch, and for each record
with a condition one verdict per group. A verdict is kept until its record's journal segment is deleted, so that a
partition that is behind gets the same verdict on a replay, when its tokens are already marked as used.

Rows (numbers big-endian, so that they sort by value):
    e                     last epoch applied
    i                     last table id assigned
    k <table> ...         rows of a table's kind, for its conditions
    c                     LSN of the last record that changed a table
    d <table>             a dropped table, for a while: when it was dropped, and what it was
    n <name>              a table, by name
    t <producer>          tokens of a producer
    v <lsn>               verdicts, one byte for each group

Thread: `judge` by the dispatcher's one thread; the rest from any.
Invariants: (1) conditions read the ledger alone. (2) a verdict never changes. (3) a failure here poisons the store: the
ledger is never paused, because no record could be judged without it. (4) a condition or operation that fails because of
a bug of ours is refused or set aside, now and at every replay, and never retried: table ids depend on what was done.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import msgspec

from penstock.errors import CorruptionError
from penstock.host import threads
from penstock.journal.partitions import SHARD_BITS, PartitionId, partition_id
from penstock.journal.record import JournalRecord, Section
from penstock.lsm.memtable import Edit
from penstock.lsm.rows import DELETE, NEVER, PUT, Row
from penstock.lsm.tree import Tree
from penstock.partition.aside import AsideLog, is_our_mistake
from penstock.partition.ledger_records import (
    FIRST_TABLE,
    LEDGER,
    Alter,
    Condition,
    Configure,
    Create,
    Drop,
    KindCondition,
    LedgerOp,
    Rewrap,
    SetStatus,
    TableInfo,
    Tombstone,
    Verdict,
    condition_table,
    decode_ops,
    encode_condition,
    kind_rows,
)
from penstock.partition.tokens import is_idle, use_number

__all__ = ["Condition", "Judgement", "Ledger", "encode_condition"]  # two were here before: programs outside use them

DROPPED_NAMES_MAX = 1_000
TOMBSTONE_US = 30 * 24 * 3600 * 1_000_000  # then a dropped table is forgotten
TOMBSTONES_MAX = 10_000

logger = logging.getLogger(__name__)

T = TypeVar("T")
_U64 = struct.Struct(">Q")
_encode = msgspec.msgpack.Encoder().encode
_condition = msgspec.msgpack.Decoder(Condition)
_table = msgspec.msgpack.Decoder(TableInfo)
_tombstone = msgspec.msgpack.Decoder(Tombstone)


class Judgement(msgspec.Struct, frozen=True):
    """The ledger's judgement of a record."""

    verdicts: tuple[Verdict, ...]
    created: tuple[TableInfo, ...] = ()
    dropped: tuple[TableInfo, ...] = ()
    restated: tuple[TableInfo, ...] = ()  # tables that drain from now on, or take writes again
    repeated: bool = False  # the record was judged before, and the ledger already holds its effects
    # Maps a group to the index, in `others`, of the condition that refused it. Only in memory: a stored verdict has no
    # room for it, and only the writer, which waits in this process, needs it.
    refused_by: dict[int, int] = {}


class _Judged(NamedTuple):
    """A judged record, and the edit that stores its verdicts."""

    lsn: int
    judgement: Judgement
    edit: Edit
    tables: Mapping[str, TableInfo]
    tombstones: Mapping[int, Tombstone]


class Ledger:
    """Judges records, and stores verdicts, tokens and tables."""

    def __init__(
        self, tree: Tree, conditions: Mapping[str, KindCondition] | None = None, aside: AsideLog | None = None
    ) -> None:
        self.tree = tree
        self._aside = aside
        self._conditions = {} if conditions is None else conditions
        self._judged: _Judged | None = None  # the last record judged; used by the dispatcher's thread only
        self.verdicts_from: Callable[[], int] | None = None  # verdicts from the LSN that it returns on are kept
        self._dropped: dict[int, str] = {}  # names of the last tables dropped since the opening, for messages
        self._load()

    def _load(self) -> None:
        tables = [_read_row(_table, key, value) for key, value in self.tree.scan(prefix=b"n")]
        dropped = [_read_row(_tombstone, key, value) for key, value in self.tree.scan(prefix=b"d")]
        self.tombstones: Mapping[int, Tombstone] = {one.info.table_id: one for one in dropped}  # replaced whole
        changed = self.tree.get(b"c")
        self.tables_lsn = 0 if changed is None else int(_U64.unpack(changed)[0])  # of the last change of a table
        self._tables: Mapping[str, TableInfo] = {table.name: table for table in tables}  # replaced whole
        self.tables_by_id = {table.table_id: table for table in tables}

    # -- lookups

    def table(self, name: str) -> TableInfo | None:
        return self._tables.get(name)

    def table_by_id(self, table: int) -> TableInfo | None:
        return self.tables_by_id.get(table)

    def last_table_id(self) -> int:
        """Return the highest id that a table was given."""
        last = self.tree.get(b"i")
        return FIRST_TABLE - 1 if last is None else int(_U64.unpack(last)[0])

    def dropped_name(self, table: int) -> str | None:
        """Return the name of a table that was dropped since the opening; None if it is not known."""
        return self._dropped.get(table)

    def tables(self) -> list[TableInfo]:
        return sorted(self._tables.values(), key=lambda table: table.name)

    def is_alive(self, partition: PartitionId) -> bool:
        """Whether the table of this partition exists."""
        return partition == LEDGER or partition >> SHARD_BITS in self.tables_by_id

    def is_token_used(self, producer: str, number: int) -> bool:
        """Whether a token is known to be used, so that its batch can be skipped."""
        return self.token_verdict(producer, number) is Verdict.DUPLICATE

    def token_verdict(self, producer: str, number: int) -> Verdict:
        """Return the verdict on a token, if it were used now."""
        return _LedgerChanges(self, 0, self.tree.lsn + 1)._use_token(producer, number)

    # -- judging

    def judge(self, record: JournalRecord, lsn: int) -> Judgement:
        """Judge a record and store the verdicts; a record that was judged before gets the same verdicts again."""
        if lsn <= self.tree.lsn:
            refused_by: dict[int, int] = {}
            if lsn == self.tree.lsn:
                self._load()  # an interrupt may have come right after the tree's change
                if self._judged is not None and self._judged.lsn == lsn:
                    refused_by = self._judged.judgement.refused_by
            return Judgement(self.verdicts(record, lsn), repeated=True, refused_by=refused_by)
        first = record.groups[0] if len(record.groups) == 1 and len(record.groups[0].sections) == 1 else None
        if first is not None and first.sections[0].header.partition != LEDGER:  # nearly always
            plain = not first.condition
        else:
            plain = _is_plain(record)
        if plain:
            self.tree.put(b"e", _U64.pack(record.last_epoch), lsn, record.time_us)
            return _ACCEPTED if len(record.groups) == 1 else _accepted(len(record.groups))
        # Judged only once: after an interrupt within the tree's change, the rows would already show its tokens as used.
        if self._judged is None or self._judged.lsn != lsn:
            self._judged = self._judge(record, lsn)
        _, judgement, edit, tables, tombstones = self._judged
        self.tree.apply(edit)
        if tables is not self._tables:
            self.tables_lsn = lsn
        self.tombstones = tombstones  # before the tables: a caller that misses a table finds when it was dropped
        if tables is not self._tables:
            self._note_dropped(judgement.dropped)  # first: a caller that misses the table finds its name
            self._tables = tables
            self.tables_by_id = {table.table_id: table for table in tables.values()}
        return judgement

    def _note_dropped(self, tables: tuple[TableInfo, ...]) -> None:
        for info in tables:
            self._dropped[info.table_id] = info.name
        while len(self._dropped) > DROPPED_NAMES_MAX:
            del self._dropped[next(iter(self._dropped))]

    def _judge(self, record: JournalRecord, lsn: int) -> _Judged:
        work = _LedgerChanges(self, record.time_us, lsn)
        verdicts: tuple[Verdict, ...] = ()
        refused_by: dict[int, int] = {}
        for number, group in enumerate(record.groups):
            verdicts += (self._verdict(work, group.condition, lsn),)
            if verdicts[number] is Verdict.REFUSED and work.judging is not None:
                refused_by[number] = work.judging
        for group, verdict in zip(record.groups, verdicts, strict=True):
            if verdict is Verdict.ACCEPTED:
                for section in group.sections:
                    if section.header.partition == LEDGER:
                        self._execute(work, section, lsn, record.time_us)
        if any(group.condition for group in record.groups):
            work.put(b"v" + _U64.pack(lsn), bytes(verdicts))
        if work.tables is not self._tables:
            work.put(b"c", _U64.pack(lsn))
        work.put(b"e", _U64.pack(record.last_epoch))  # every record writes a row: that is how `stored` advances
        judgement = Judgement(
            verdicts, tuple(work.created), tuple(work.dropped), tuple(work.restated), refused_by=refused_by
        )
        return _Judged(lsn, judgement, work.edit(), work.tables, work.tombstones)

    def _verdict(self, work: _LedgerChanges, condition: bytes, lsn: int) -> Verdict:
        """Return the verdict of a group. A condition that fails because of a bug of ours counts as refused."""
        before = dict(work._rows)
        try:
            return work.judge(condition)
        except Exception as error:
            threads.raise_interrupt(error)
            if not is_our_mistake(error, ()):
                raise
            logger.critical("a condition of record %d cannot be judged: please report it", lsn, exc_info=error)
            work._rows = before
            return Verdict.REFUSED

    def _execute(self, work: _LedgerChanges, section: Section, lsn: int, time_us: int) -> None:
        """Execute the operations of a section; set it aside if they fail because of a bug of ours."""
        if self._aside is not None and self._aside.holds(LEDGER, lsn, (section,)):
            return
        before = work.saved()
        try:
            work.execute(decode_ops(section.payload))
        except Exception as error:
            threads.raise_interrupt(error)
            if self._aside is None or not is_our_mistake(error, ()):
                raise
            work.restore(before)
            self._aside.add("ledger", lsn, time_us, (section,), error)
            logger.critical("the ledger cannot execute record %d: please report it", lsn, exc_info=error)

    def verdicts(self, record: JournalRecord, lsn: int) -> tuple[Verdict, ...]:
        """Return the verdicts of a record. Requires: it was judged."""
        if not any(group.condition for group in record.groups):
            return _accepted(len(record.groups)).verdicts
        stored = self.tree.get(b"v" + _U64.pack(lsn))
        if stored is None or len(stored) != len(record.groups):
            raise CorruptionError("ledger", lsn, f"the verdicts of record {lsn} are missing")
        return tuple(Verdict(value) for value in stored)


class _LedgerChanges:
    """The changes of one record, on top of the current ledger."""

    def __init__(self, ledger: Ledger, time_us: int, lsn: int) -> None:
        self._ledger, self._time_us, self._lsn = ledger, time_us, lsn
        self._rows: dict[bytes, bytes | None] = {}
        self._ranges: list[tuple[bytes, bytes]] = []
        self.tables = ledger._tables  # replaced, not changed
        self.tombstones = ledger.tombstones  # replaced, not changed
        self.created: list[TableInfo] = []
        self.dropped: list[TableInfo] = []
        self.restated: list[TableInfo] = []
        self.judging: int | None = None  # the index of the condition, among `others`, judged now or last

    def get(self, key: bytes) -> bytes | None:
        return self._rows[key] if key in self._rows else self._ledger.tree.get(key)

    def put(self, key: bytes, value: bytes | None) -> None:
        self._rows[key] = value

    def saved(self) -> tuple[Any, ...]:
        """Return a copy of the changes so far, for `restore`."""
        lists = list(self._ranges), list(self.created), list(self.dropped), list(self.restated)
        return dict(self._rows), self.tables, self.tombstones, *lists

    def restore(self, saved: tuple[Any, ...]) -> None:
        """Undo every change since `saved`."""
        self._rows, self.tables, self.tombstones, self._ranges, self.created, self.dropped, self.restated = saved

    def judge(self, condition: bytes) -> Verdict:
        """Check the token, then the conditions of kinds; a refused group leaves no change."""
        self.judging = None
        if not condition:
            return Verdict.ACCEPTED
        decoded = _condition.decode(condition)
        before = dict(self._rows)
        if decoded.token is not None:
            verdict = self._use_token(*decoded.token)
            if verdict is not Verdict.ACCEPTED:
                return verdict
        for index, (name, argument) in enumerate(decoded.others):
            self.judging = index
            if condition_table(argument) in self._ledger.tables_by_id:
                verdict = self._ledger._conditions[name](argument, self.get, self.put)
            else:
                verdict = Verdict.REFUSED  # the table was dropped: it must get no rows
            if verdict is not Verdict.ACCEPTED:
                self._rows = before
                return verdict
        return Verdict.ACCEPTED

    def _use_token(self, producer: str, number: int) -> Verdict:
        key = b"t" + producer.encode()
        verdict, row = use_number(self.get(key), number, self._time_us)
        if row is not None:
            self.put(key, row)
        return verdict

    def execute(self, operations: list[LedgerOp]) -> None:
        for operation in operations:
            if isinstance(operation, Create):
                self._create(operation)
            elif isinstance(operation, Drop):
                self._drop(operation.name)
            elif isinstance(operation, Alter):
                self._alter(operation)
            elif isinstance(operation, Configure):
                self._replace(operation.table_id, "storage", operation.storage, before=operation.before)
            elif isinstance(operation, Rewrap):
                self._rewrap(operation)
            elif isinstance(operation, SetStatus):
                info = self._replace(operation.table_id, "status", operation.status)
                self.restated += [] if info is None else [info]
            else:
                kept_from = self._ledger.verdicts_from
                before = operation.before if kept_from is None else min(operation.before, kept_from())
                self._ranges.append((b"v", b"v" + _U64.pack(before)))
                self._expire_producers()
                self._bury()

    def _expire_producers(self) -> None:
        """Delete idle producers by record time, not by a clock, so that every replica deletes the same ones."""
        for key, value in self._ledger.tree.scan(prefix=b"t"):
            if key not in self._rows and is_idle(value, self._time_us):
                self.put(key, None)

    def _create(self, operation: Create) -> None:
        if operation.name in self.tables:
            return  # another writer created it first: both get the same table
        partition_id(FIRST_TABLE, operation.shards - 1)  # raises `Invalid` if there are too many shards
        last = self.get(b"i")
        table = FIRST_TABLE if last is None else _U64.unpack(last)[0] + 1
        info = TableInfo(
            table_id=table,
            name=operation.name,
            kind=operation.kind,
            shards=operation.shards,
            options=operation.options,
            created_lsn=self._lsn,
            storage=operation.storage,
            created_us=self._time_us,
            key=operation.key,
        )
        self.put(b"i", _U64.pack(table))
        self.put(b"n" + operation.name.encode(), _encode(info))
        self.tables = {**self.tables, operation.name: info}
        self.created.append(info)

    def _drop(self, name: str) -> None:
        info = self.tables.get(name)
        if info is not None:
            self.tables = {other: table for other, table in self.tables.items() if other != name}
            self.put(b"n" + name.encode(), None)
            self.dropped.append(info)
            self.put(b"d" + _U64.pack(info.table_id), _encode(tombstone := Tombstone(info, self._time_us)))
            self.tombstones = {**self.tombstones, info.table_id: tombstone}
            if len(self.tombstones) > TOMBSTONES_MAX:
                self._bury()
            prefix = kind_rows(info.table_id)
            self._rows = {key: value for key, value in self._rows.items() if not key.startswith(prefix)}
            self._ranges.append((prefix, kind_rows(info.table_id + 1)))

    def _alter(self, operation: Alter) -> None:
        self._replace(operation.table_id, "options", operation.options, before=operation.before)

    def _rewrap(self, operation: Rewrap) -> None:
        info = next((info for info in self.tables.values() if info.table_id == operation.table_id), None)
        if info is not None and info.key is not None and info.key.version == operation.before:
            self._replace(operation.table_id, "key", operation.key)

    def _bury(self) -> None:
        """Forget tables that were dropped long ago, by record time, and the oldest above a limit."""
        surplus = len(self.tombstones) - TOMBSTONES_MAX
        tombstones = dict(self.tombstones)
        for number, (table, one) in enumerate(sorted(self.tombstones.items(), key=lambda item: item[1].dropped_us)):
            if number < surplus or one.dropped_us + TOMBSTONE_US <= self._time_us:
                del tombstones[table]
                self.put(b"d" + _U64.pack(table), None)
        if len(tombstones) < len(self.tombstones):
            self.tombstones = tombstones

    def _replace(self, table: int, field: str, value: Any, *, before: Any = None) -> TableInfo | None:
        """Change a field of a table, if the table exists and the field is still `before`; return the table then."""
        info = next((info for info in self.tables.values() if info.table_id == table), None)
        if info is not None and before in (None, getattr(info, field)):
            info = msgspec.structs.replace(info, **{field: value})
            self.put(b"n" + info.name.encode(), _encode(info))
            self.tables = {**self.tables, info.name: info}
            return info
        return None

    def edit(self) -> Edit:
        rows: dict[bytes, Row] = {
            key: (DELETE, b"", self._lsn, NEVER) if value is None else (PUT, value, self._lsn, NEVER)
            for key, value in self._rows.items()
        }
        return Edit(lsn=self._lsn, time_us=self._time_us, rows=rows, ranges=self._ranges)


def _is_plain(record: JournalRecord) -> bool:
    """Whether a record has no condition and no operation for the ledger."""
    for group in record.groups:
        if group.condition:
            return False
        for section in group.sections:
            if section.header.partition == LEDGER:
                return False
    return True


_ACCEPTED = Judgement((Verdict.ACCEPTED,))


def _accepted(groups: int) -> Judgement:
    return _ACCEPTED if groups == 1 else Judgement((Verdict.ACCEPTED,) * groups)


def _read_row(decoder: msgspec.msgpack.Decoder[T], key: bytes, value: bytes) -> T:
    try:
        return decoder.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptionError("ledger", 0, f"the row of table {key[1:]!r} does not decode ({error})") from None
