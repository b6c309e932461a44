"""Atomic batches: writes to several tables as one group.

Thread: a batch belongs to one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, cast

from penstock.arguments import ArrowSource, whole
from penstock.arrow_input import is_arrow
from penstock.coordinator import Epoch
from penstock.errors import Invalid, NotFound, PenstockError
from penstock.journal.partitions import PartitionId, partition_id, table_of
from penstock.kinds import Port, PreparedRows
from penstock.partition.ledger_records import CONDITION_BYTES_MAX, Condition, TableInfo, Verdict, encode_condition
from penstock.partition.pending import PendingDelta, PendingGroup
from penstock.partition.reference import StagedFile, plain_files
from penstock.partition.tokens import token_too_old
from penstock.queue.table import QueueTable
from penstock.registry import QUEUE, is_row_condition, kind_named, kind_of_condition, series_kind, vector_kind
from penstock.store.kv_tables import KvOfBatch
from penstock.store.loading import LEASE_S, PreparedLoad, bundle, check_loads, prepare

if TYPE_CHECKING:  # kinds that are imported at their first use
    from penstock.series.table import SeriesTable
    from penstock.vector.table import VectorTable

CONDITION_OVERHEAD = 16  # of encoding: more than the lengths of a name and an argument take
CONDITIONS_BYTES_MAX = CONDITION_BYTES_MAX - 4_096  # a client adds a token


class StoreBatch(KvOfBatch):
    """Writes that are committed together at the end of the `with` block; an exception in the block discards them.

    >>> with store.batch(token=("loader", 17)) as batch:
    ...     epoch = batch.kv("users").put(b"bob", b"1912")
    ...     epoch = batch.queue("events").put(b"bob was added")
    >>> batch.duplicate
    False
    """

    def __init__(
        self,
        port: Port,
        *,
        token: tuple[str, int] | None,
        durable: bool,
        find: Callable[[str], TableInfo | None] | None = None,
    ) -> None:
        """`find` looks tables up by name; by default the port does."""
        self._port = port
        self._find_in_store = port.table if find is None else find
        self._writes = cast(Port, _BatchPort(self))  # raises for what a batch does not offer
        self._tables: dict[str, TableInfo] = {}  # each is looked up once
        self._looks_up = True  # a table that is not among them is looked up in the store
        self._entered = True
        self._time_us: int | None = None  # the store's, when it was first needed
        self._token = token
        self._durable = durable
        self._gathered = PendingDelta()
        self._conditions: list[tuple[str, bytes]] = []  # for the ledger, which names one that fails by its index
        self._row_conditions: list[tuple[str, bytes]] = []
        self._files: dict[PartitionId, tuple[StagedFile, ...]] = {}
        self._loads: dict[int, tuple[TableInfo, list[PreparedRows]]] = {}  # by table
        self._bytes = 0
        self._condition_bytes = 0
        self._ended = False
        self.duplicate = False
        self.epoch: Epoch | None = None

    def __repr__(self) -> str:
        token = "" if self._token is None else f", token {self._token}"
        return f"<StoreBatch, {'ended' if self._ended else 'open'}{token}>"

    def table(self, name: str) -> Any:
        """Return an existing table of any kind, whose writes join this batch."""
        info = self._info(name)
        return kind_named(info.kind, name).table(self._writes, info, durable=False)

    def queue(self, name: str) -> QueueTable:
        """Return an existing queue, whose writes join this batch.

        >>> with store.batch() as batch:
        ...     epoch = batch.queue("events").put(b"hello", key=b"ada")
        """
        return QUEUE.table(self._writes, self._info(name, QUEUE), durable=False)

    def series(self, name: str) -> SeriesTable:
        """Return an existing series table, whose writes join this batch.

        >>> with store.batch() as batch:
        ...     epoch = batch.series("metrics").write("cpu", 0.5, {"host": "a"})
        """
        return series_kind().table(self._writes, self._info(name, series_kind()), durable=False)

    def vector(self, name: str) -> VectorTable:
        """Return an existing vector table, whose writes join this batch.

        >>> with store.batch() as batch:
        ...     epoch = batch.vector("documents").upsert("a", [1.0, 0.0])
        """
        return vector_kind().table(self._writes, self._info(name, vector_kind()), durable=False)

    def _find(self, name: str) -> TableInfo | None:
        self._check_open()
        if not self._entered:
            raise Invalid("this batch was not entered: use `async with store.batch() as batch`")
        info = self._tables.get(name)
        if info is None and self._looks_up and (info := self._find_in_store(name)) is not None:
            self._tables[name] = info
        return info

    def _unknown(self, name: str) -> NotFound:
        return NotFound(f"there is no table {name}: create it before the batch")

    def wait_for_entry(self) -> None:
        """Refuse tables until `look_ahead` was called. For asyncio."""
        self._entered = False

    def look_ahead(self) -> None:
        """Learn all tables and the time, so that nothing but the commit waits for the store from here on."""
        self._check_open()
        self._tables, self._looks_up = {info.name: info for info in self._port.tables()}, False
        self.time_us()
        self._entered = True

    def time_us(self) -> int:
        """Return the store's time: one for the whole batch."""
        if self._time_us is None:
            self._time_us = self._port.time_us()
        return self._time_us

    def load(self, name: str, rows: ArrowSource | PreparedLoad | Sequence[PreparedLoad]) -> int:
        """Add many rows and return their number.

        `rows` is an Arrow table or stream, or one or several results of `store.prepare`. Of several rows of one Arrow
        stream with the same key the last wins. A batch either loads rows into a
        table or writes to it in other ways.

        >>> with store.batch() as batch:
        ...     batch.load("users", pyarrow.table({"key": [b"bob", b"eve"], "value": [b"1912", b"1990"]}))
        2
        """
        info = self._info(name)
        if self._is_used():
            return 0  # a duplicate, as the commit will report: build no file
        loads = check_loads(info, prepare(self._port, info, rows) if is_arrow(rows) else rows, self._port.uuid)
        _, parts = self._loads.setdefault(info.table_id, (info, []))
        parts += [part for load in loads for part in load.parts]
        return sum(load.rows for load in loads)

    def _is_used(self) -> bool:
        return self._token is not None and self._port.is_token_used(self._token)

    def adopt(self, name: str, files: Sequence[StagedFile], shard: int = 0) -> None:
        """Add files that were staged for a shard, built and `sealed`; they become visible together.

        >>> [file] = store.stage("users")
        >>> # build it with any tool, fill in its size and digest; then, in a batch: batch.adopt("users", [file])
        """
        info = self._info(name)
        shard = whole(shard, f"a shard of table {info.name}", 0, info.shards - 1)
        self.add_files(partition_id(info.table_id, shard), files)

    def add_files(self, partition: PartitionId, files: Sequence[StagedFile]) -> None:
        """Add files of a shard, as `adopt` does, without looking up the table."""
        self._check_open()
        self._files[partition] = plain_files([*self._files.get(partition, ()), *files])

    def add_section(self, partition: PartitionId, section: Any, size: int) -> None:
        """Add writes that were prepared elsewhere."""
        self._check_open()
        self._gathered.begin()[partition] = section
        self._gathered.open = None  # complete: the next write begins a section after it
        self._bytes += size

    def require(self, condition: str, argument: bytes) -> None:
        """Make the batch depend on a condition of a kind; the kind's own API calls this."""
        self._check_open()
        if type(condition) is not str or type(argument) is not bytes:
            raise Invalid("a condition is a name and bytes, as a kind makes them")
        size = len(condition) + len(argument) + CONDITION_OVERHEAD
        if self._condition_bytes + size > CONDITIONS_BYTES_MAX:
            raise Invalid(f"the conditions of a batch have more than {CONDITIONS_BYTES_MAX} bytes: split it")
        self._condition_bytes += size
        self._bytes += len(argument)
        if is_row_condition(condition):
            self._row_conditions.append((condition, argument))
        else:
            self._conditions.append((condition, argument))

    def __enter__(self) -> StoreBatch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None and not self._ended:
            self.commit()
        self._end()

    def _end(self) -> None:
        """Refuse more writes, and free what was gathered: the batch and its port refer to each other.

        Otherwise the rows would stay in memory until the garbage collector runs, which counts objects, not bytes.
        """
        self._ended = True
        self._gathered = PendingDelta()
        self._loads, self._files = {}, {}

    def _check_open(self) -> None:
        if self._ended:
            raise Invalid("this batch has ended: begin another")

    def commit(self) -> None:
        """Commit the batch. Afterwards `duplicate` says whether an earlier commit used its token.

        >>> batch = store.batch(token=("loader", 18))
        >>> epoch = batch.kv("users").put(b"ada", b"1815")
        >>> batch.commit()  # `with` does it
        """
        self._check_open()
        self._ended = True
        try:
            self._commit()
        finally:
            self._end()

    def _commit(self) -> None:
        if (self._files or self._loads) and self._is_used():
            self.duplicate = True  # known without reading the files
            return
        group = self._group()
        if group is None:
            return
        if not group.condition and not self._durable:
            self.epoch = self._port.submit(group, self._bytes)
            return
        self.epoch = self._port.commit_and_wait(group, self._bytes)
        if group.verdict is Verdict.TOKEN_TOO_OLD:
            raise token_too_old(self._token)
        if group.verdict is Verdict.REFUSED:
            raise self._refusal(group.refused_by)
        self.duplicate = group.verdict is Verdict.DUPLICATE

    def _refusal(self, index: int | None) -> PenstockError:
        """Return the error of the condition that refused this batch."""
        if index is None:
            return Invalid("a condition of this batch could not be judged, nothing was written: please report it")
        condition, argument = self._conditions[index]
        return kind_of_condition(condition).refusal(condition, argument)

    def _group(self) -> PendingGroup | None:
        conditions = (*self._conditions, *self._row_conditions)
        bound = self._token is not None or bool(conditions)
        condition = encode_condition(Condition(self._token, conditions)) if bound else b""
        group = PendingGroup(condition)
        for gathered in self._gathered.groups:
            for partition, section in gathered.sections.items():
                group.sections[partition] = (*group.sections.get(partition, ()), section)
        files = dict(self._files)
        for info, loaded in self._loads.values():
            self._put_load(info, loaded, group, files)
        if not group.sections.keys().isdisjoint(files):  # before files are accepted
            raise Invalid("a batch either writes to a shard or adopts files for it")
        for partition, some in files.items():
            self._port.accept(group, partition, some)
        return group if group.sections or bound else None

    def _put_load(
        self,
        info: TableInfo,
        parts: Sequence[PreparedRows],
        group: PendingGroup,
        files: dict[PartitionId, tuple[StagedFile, ...]],
    ) -> None:
        """Add the rows loaded into one table to the group."""
        if any(table_of(partition) == info.table_id for partition in (*group.sections, *self._files)):
            raise Invalid(f"this batch loads rows into table {info.name} and also writes to it: use two batches")
        with self._port.building(LEASE_S) as context:
            parts = bundle(context, info, parts)
        kind = kind_named(info.kind, info.name)
        for part in parts:
            if part.file is not None:
                files[part.partition] = plain_files([*files.get(part.partition, ()), part.file])
            else:  # decoded as from a client: another process may have prepared it
                sections = group.sections.get(part.partition, ())
                group.sections[part.partition] = (*sections, kind.receive(part.payload, info.options))
                self._bytes += len(part.payload)


class _BatchPort:
    """Collects the writes of tables for a batch; reads raise."""

    write_bytes_max = 1 << 62  # a batch is written as one, or refused when it is committed
    holder = ""

    def __init__(self, batch: StoreBatch) -> None:
        self._batch = batch

    def write(self, partition: PartitionId, insert: Any, size: int, a: Any, b: Any) -> Epoch:
        self._batch._check_open()
        insert(self._batch._gathered, partition, a, b)
        self._batch._bytes += size
        return Epoch(0)

    def submit(self, group: PendingGroup, size: int) -> Epoch:
        for partition, part in group.sections.items():
            self._batch.add_section(partition, part, 0)
        self._batch._bytes += size
        return Epoch(0)

    def require(self, condition: str, argument: bytes) -> None:
        self._batch.require(condition, argument)

    def flush(self, epoch: int | None, timeout_s: float = 0.0, *, table: int | None = None) -> None:
        """Do nothing: a batch becomes durable at its commit."""

    def time_us(self) -> int:
        return self._batch.time_us()

    def now_us(self) -> int:
        return self._batch._port.now_us()

    def table(self, name: str) -> TableInfo | None:
        return self._batch._find(name)

    def __getattr__(self, name: str) -> Any:
        return _refuse_reads


def _refuse_reads(*parts: Any, **_: Any) -> NoReturn:
    if parts[1:2] == ("append",):
        raise Invalid("append waits for a position, which a batch has only when it has ended: use put")
    raise Invalid("a batch takes writes only: read from the store's table")
