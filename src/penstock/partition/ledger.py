"""The ledger: judges every record before anyone else sees it, and remembers how.

It is a tree like any other, applied first. It holds the tokens of producers, the tables, the last epoch, and for each
record with a condition one verdict per group. A verdict is kept until its record's journal segment is gone, so that a
partition that is behind hears the same on a replay, when the tokens already say "seen".

Rows (big-endian, so that ranges are ranges):
    e                     last epoch applied
    i                     last table id given out
    k <table> ...         what the kind of a table keeps here for its conditions
    n <name>              a table, by name
    t <producer>          tokens of a producer
    v <lsn>               verdicts, one byte for each group

Thread: `judge` by the dispatcher's one thread; the rest from any.
Invariants: (1) conditions read the ledger alone. (2) a verdict never changes. (3) a failure here poisons the store: the
ledger is never paused, because nobody could be judged without it. (4) what it cannot judge or do by a mistake of ours,
now and at every replay, is refused or set aside, and never tried again: table ids follow from what was done.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Any, NamedTuple

import msgspec

from penstock.arguments import in_short, text, whole
from penstock.errors import CorruptionError, Invalid
from penstock.journal.partitions import SHARD_BITS, PartitionId, partition_id
from penstock.journal.record import JournalRecord, Section
from penstock.lsm.memtable import Edit
from penstock.lsm.rows import DELETE, NEVER, PUT, Row
from penstock.lsm.tree import Tree
from penstock.partition.aside import AsideLog, is_our_mistake

LEDGER_TABLE = 1
LEDGER = partition_id(LEDGER_TABLE, 0)
FIRST_TABLE = 2
PRODUCER_IDLE_US = 30 * 24 * 3600 * 1_000_000  # after which a producer's tokens are forgotten
PRODUCER_BYTES_MAX = 512
TOKEN_WINDOW = 1_024  # below the highest number of a producer

logger = logging.getLogger(__name__)

_U64 = struct.Struct(">Q")


class Verdict(IntEnum):
    """What became of a group."""

    ACCEPTED = 0
    DUPLICATE = 1
    TOKEN_TOO_OLD = 2
    REFUSED = 3  # by a condition of a kind


class TableInfo(msgspec.Struct, frozen=True, array_like=True):
    """A table as the ledger knows it."""

    table: int
    name: str
    kind: str
    shards: int
    options: bytes
    created_lsn: int


class Condition(msgspec.Struct, frozen=True, array_like=True):
    """On what a group depends. `others` are conditions that kinds registered: (name, argument)."""

    token: tuple[str, int] | None = None
    others: tuple[tuple[str, bytes], ...] = ()


class Create(msgspec.Struct, frozen=True, array_like=True, tag="create"):
    """Make a table if there is none of that name."""

    name: str
    kind: str
    shards: int
    options: bytes


class Drop(msgspec.Struct, frozen=True, array_like=True, tag="drop"):
    """Remove a table."""

    name: str


class ForgetVerdicts(msgspec.Struct, frozen=True, array_like=True, tag="forget"):
    """Verdicts of records below this LSN are needed no more."""

    before: int


LedgerOp = Create | Drop | ForgetVerdicts


class _Tokens(msgspec.Struct, frozen=True, array_like=True):
    highest: int
    seen: bytes  # bit i: the number `highest - 1 - i` was used
    time_us: int


_encode = msgspec.msgpack.Encoder().encode
_ops = msgspec.msgpack.Decoder(list[LedgerOp])
_condition = msgspec.msgpack.Decoder(Condition)
_tokens = msgspec.msgpack.Decoder(_Tokens)
_table = msgspec.msgpack.Decoder(TableInfo)

# A kind's condition: (argument, read the ledger, write a row of the ledger) -> what becomes of the group.
KindCondition = Callable[[bytes, Callable[[bytes], bytes | None], Callable[[bytes, bytes | None], None]], Verdict]


def encode_ops(*operations: LedgerOp) -> bytes:
    """A section for the ledger."""
    return _encode(list(operations))


def encode_condition(condition: Condition) -> bytes:
    """A group's condition."""
    return _encode(condition)


def decode_condition(data: bytes) -> Condition:
    """The condition that `encode_condition` was given; none in no bytes."""
    try:
        return _condition.decode(data) if data else Condition()
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptionError("condition", 0, f"it does not decode ({error})") from None


class Judgement(msgspec.Struct, frozen=True):
    """What the ledger made of a record."""

    verdicts: tuple[Verdict, ...]
    created: tuple[TableInfo, ...] = ()
    dropped: tuple[TableInfo, ...] = ()
    repeated: bool = False  # the record was judged before: its effects on the ledger are there already
    # Group to the index of its condition, among `others`, that refused it. Only in memory: a stored verdict has no room
    # for it, and only the writer, who waits in this process, needs it.
    refused_by: dict[int, int] = {}


class _Judged(NamedTuple):
    """A record that is judged, and what is to be written down about it."""

    lsn: int
    judgement: Judgement
    edit: Edit
    tables: Mapping[str, TableInfo]


class Ledger:
    """Judge and memory."""

    def __init__(
        self, tree: Tree, conditions: Mapping[str, KindCondition] | None = None, aside: AsideLog | None = None
    ) -> None:
        self.tree = tree
        self._aside = aside
        self._conditions = {} if conditions is None else conditions
        self._judged: _Judged | None = None  # the last record judged; by the dispatcher's thread
        self._load()

    def _load(self) -> None:
        tables = [_read_table(key, value) for key, value in self.tree.scan(prefix=b"n")]
        self._tables: Mapping[str, TableInfo] = {table.name: table for table in tables}  # replaced whole
        self.tables_by_id = {table.table: table for table in tables}

    # -- asking

    def table(self, name: str) -> TableInfo | None:
        return self._tables.get(name)

    def table_by_id(self, table: int) -> TableInfo | None:
        return self.tables_by_id.get(table)

    def tables(self) -> list[TableInfo]:
        return sorted(self._tables.values(), key=lambda table: table.name)

    def is_alive(self, partition: PartitionId) -> bool:
        """Whether a section for this partition has someone to go to."""
        return partition == LEDGER or partition >> SHARD_BITS in self.tables_by_id

    def is_token_used(self, producer: str, number: int) -> bool:
        """Whether a token is known to be used: then its batch need not be looked at again."""
        return _LedgerChanges(self, 0, self.tree.lsn + 1)._use_token(producer, number) is Verdict.DUPLICATE

    # -- judging

    def judge(self, record: JournalRecord, lsn: int) -> Judgement:
        """Judge a record and remember it; a record that was judged before is told again what it was told."""
        if lsn <= self.tree.lsn:
            refused_by: dict[int, int] = {}
            if lsn == self.tree.lsn:
                self._load()  # an interrupt may have come right behind the tree's change
                if self._judged is not None and self._judged.lsn == lsn:
                    refused_by = self._judged.judgement.refused_by
            return Judgement(self.verdicts(record, lsn), repeated=True, refused_by=refused_by)
        if _is_plain(record):
            self.tree.put(b"e", _U64.pack(record.last_epoch), lsn, record.time_us)
            return _ACCEPTED if len(record.groups) == 1 else _accepted(len(record.groups))
        # Judged once: were an interrupt to come between two steps of the tree's change, the rows would say "seen".
        if self._judged is None or self._judged.lsn != lsn:
            self._judged = self._judge(record, lsn)
        _, judgement, edit, tables = self._judged
        self.tree.apply(edit)
        if tables is not self._tables:
            self._tables = tables
            self.tables_by_id = {table.table: table for table in tables.values()}
        return judgement

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
        work.put(b"e", _U64.pack(record.last_epoch))  # every record leaves a row: what is stored is known by it
        judgement = Judgement(verdicts, tuple(work.created), tuple(work.dropped), refused_by=refused_by)
        return _Judged(lsn, judgement, work.edit(), work.tables)

    def _verdict(self, work: _LedgerChanges, condition: bytes, lsn: int) -> Verdict:
        """What becomes of a group. A condition that cannot be judged, by a mistake of ours, is not fulfilled."""
        before = dict(work._rows)
        try:
            return work.judge(condition)
        except Exception as error:
            if not is_our_mistake(error, ()):
                raise
            logger.critical("a condition of record %d cannot be judged: please report it", lsn, exc_info=error)
            work._rows = before
            return Verdict.REFUSED

    def _execute(self, work: _LedgerChanges, section: Section, lsn: int, time_us: int) -> None:
        """Do what a section asks of the ledger; if that fails, by a mistake of ours, it is set aside."""
        if self._aside is not None and self._aside.holds(LEDGER, lsn, (section,)):
            return
        before = work.saved()
        try:
            work.execute(_ops.decode(section.payload))
        except Exception as error:
            if self._aside is None or not is_our_mistake(error, ()):
                raise
            work.restore(before)
            self._aside.add("ledger", lsn, time_us, (section,), error)
            logger.critical("record %d asks for what the ledger cannot do: please report it", lsn, exc_info=error)

    def verdicts(self, record: JournalRecord, lsn: int) -> tuple[Verdict, ...]:
        """What a record was told. Requires: it was judged."""
        if not any(group.condition for group in record.groups):
            return _accepted(len(record.groups)).verdicts
        kept = self.tree.get(b"v" + _U64.pack(lsn))
        if kept is None or len(kept) != len(record.groups):
            raise CorruptionError("ledger", lsn, f"the verdicts of record {lsn} are not there any more")
        return tuple(Verdict(value) for value in kept)


class _LedgerChanges:
    """The changes of one record, on top of the ledger as it stands."""

    def __init__(self, ledger: Ledger, time_us: int, lsn: int) -> None:
        self._ledger, self._time_us, self._lsn = ledger, time_us, lsn
        self._rows: dict[bytes, bytes | None] = {}
        self._ranges: list[tuple[bytes, bytes]] = []
        self.tables = ledger._tables  # replaced, not changed
        self.created: list[TableInfo] = []
        self.dropped: list[TableInfo] = []
        self.judging: int | None = None  # the index of the condition, among `others`, that is judged or was last

    def get(self, key: bytes) -> bytes | None:
        return self._rows[key] if key in self._rows else self._ledger.tree.get(key)

    def put(self, key: bytes, value: bytes | None) -> None:
        self._rows[key] = value

    def saved(self) -> tuple[Any, ...]:
        """What it holds so far, for `restore`."""
        return dict(self._rows), list(self._ranges), self.tables, list(self.created), list(self.dropped)

    def restore(self, saved: tuple[Any, ...]) -> None:
        """As if nothing had happened since."""
        self._rows, self._ranges, self.tables, self.created, self.dropped = saved

    def judge(self, condition: bytes) -> Verdict:
        """Token first, then what kinds ask for; nothing is remembered of a group that is refused."""
        self.judging = None
        if not condition:
            return Verdict.ACCEPTED
        asked = _condition.decode(condition)
        before = dict(self._rows)
        if asked.token is not None:
            verdict = self._use_token(*asked.token)
            if verdict is not Verdict.ACCEPTED:
                return verdict
        for index, (name, argument) in enumerate(asked.others):
            self.judging = index
            if condition_table(argument) in self._ledger.tables_by_id:
                verdict = self._ledger._conditions[name](argument, self.get, self.put)
            else:
                verdict = Verdict.REFUSED  # the table was dropped: no row of it may be made
            if verdict is not Verdict.ACCEPTED:
                self._rows = before
                return verdict
        return Verdict.ACCEPTED

    def _use_token(self, producer: str, number: int) -> Verdict:
        key = b"t" + producer.encode()
        kept = self.get(key)
        tokens = _Tokens(-1, b"", 0) if kept is None else _tokens.decode(kept)
        seen = int.from_bytes(tokens.seen, "little")
        if number > tokens.highest:
            shift = number - tokens.highest
            mask = (1 << TOKEN_WINDOW) - 1
            seen = ((seen << shift) | (1 << (shift - 1))) & mask if tokens.highest >= 0 and shift <= TOKEN_WINDOW else 0
            highest = number
        elif number == tokens.highest:
            return Verdict.DUPLICATE
        else:
            place = tokens.highest - 1 - number
            if place >= TOKEN_WINDOW:
                return Verdict.TOKEN_TOO_OLD
            if seen >> place & 1:
                return Verdict.DUPLICATE
            seen |= 1 << place
            highest = tokens.highest
        self.put(key, _encode(_Tokens(highest, seen.to_bytes(TOKEN_WINDOW // 8, "little"), self._time_us)))
        return Verdict.ACCEPTED

    def execute(self, operations: list[LedgerOp]) -> None:
        for operation in operations:
            if isinstance(operation, Create):
                self._create(operation)
            elif isinstance(operation, Drop):
                self._drop(operation.name)
            else:
                self._ranges.append((b"v", b"v" + _U64.pack(operation.before)))
                self._expire_producers()

    def _expire_producers(self) -> None:
        """Forget producers that were idle for long, by the time of records: every replica forgets the same."""
        for key, value in self._ledger.tree.scan(prefix=b"t"):
            if key not in self._rows and _tokens.decode(value).time_us + PRODUCER_IDLE_US <= self._time_us:
                self.put(key, None)

    def _create(self, wanted: Create) -> None:
        if wanted.name in self.tables:
            return  # somebody was faster: both get the same table
        partition_id(FIRST_TABLE, wanted.shards - 1)  # `Invalid` before anybody relies on so many
        kept = self.get(b"i")
        table = FIRST_TABLE if kept is None else _U64.unpack(kept)[0] + 1
        info = TableInfo(table, wanted.name, wanted.kind, wanted.shards, wanted.options, self._lsn)
        self.put(b"i", _U64.pack(table))
        self.put(b"n" + wanted.name.encode(), _encode(info))
        self.tables = {**self.tables, wanted.name: info}
        self.created.append(info)

    def _drop(self, name: str) -> None:
        info = self.tables.get(name)
        if info is not None:
            self.tables = {other: table for other, table in self.tables.items() if other != name}
            self.put(b"n" + name.encode(), None)
            self.dropped.append(info)
            kept = kind_rows(info.table)
            self._rows = {key: value for key, value in self._rows.items() if not key.startswith(kept)}
            self._ranges.append((kept, kind_rows(info.table + 1)))

    def edit(self) -> Edit:
        rows: dict[bytes, Row] = {
            key: (DELETE, b"", self._lsn, NEVER) if value is None else (PUT, value, self._lsn, NEVER)
            for key, value in self._rows.items()
        }
        return Edit(lsn=self._lsn, time_us=self._time_us, rows=rows, ranges=self._ranges)


def _is_plain(record: JournalRecord) -> bool:
    """Whether a record has nothing for the ledger to judge or to do."""
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


def _read_table(key: bytes, value: bytes) -> TableInfo:
    try:
        return _table.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptionError("ledger", 0, f"the row of table {key[1:]!r} does not decode ({error})") from None


def condition_table(argument: bytes) -> int:
    """The table whose kind registered a condition: every argument begins with it."""
    return int.from_bytes(argument[:8], "big")


def kind_rows(table: int) -> bytes:
    """How the rows begin that the kind of a table keeps in the ledger."""
    return b"k" + _U64.pack(table)


def check_token(token: Any) -> tuple[str, int]:
    """A token as a user gives it: (producer, number)."""
    if not isinstance(token, tuple) or len(token) != 2:
        raise Invalid(f"a token is (producer, number), a short text and an integer from 0, not {in_short(token)}")
    producer = text(token[0], "the producer in a token (producer, number)", PRODUCER_BYTES_MAX)
    return producer, whole(token[1], "the number in a token (producer, number)", 0, (1 << 63) - 1)
