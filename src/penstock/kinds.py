"""What a kind of table must be, what it may be able to do, and the port through which its API reaches a store.

A kind is a small core, `Kind`, and capabilities. The other packages ask for a capability by its protocol, through the
functions at the end of this module, and never by the name of a kind:

    Streamable     rows have positions; a consumer moves along them       Spark streams
    Loadable       rows are prepared in another process                   Spark writes, bulk loads
    Replaceable    a load takes the place of a range of rows              Spark overwrites
    FileReadable   ranges are read from files, without the owner          Spark reads, verify
    Queryable      reads that are not by key: a selector, a top-k search  `Reading.query`
    Serviced       the owner does more for a table than read and write    leases, retention

A change feed (the records of a table in LSN order) will be one more protocol here, `Changing`.

The API classes of a kind stand on `Port` alone, so that they are the same in the owner of a store and in a client of
it. A table is cut into shards. Rows of a shard have keys, bytes in their order, by which a scan is cut into ranges for
several readers: a kv table has its own keys, a queue the sequences of its messages in eight bytes.

Thread: any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol, TypeVar, runtime_checkable

from penstock.coordinator import Acknowledgement, Epoch
from penstock.errors import Invalid, KindMismatch, PenstockError
from penstock.host.clock import Clock
from penstock.host.files import FileSystem
from penstock.host.os_files import OsFileSystem
from penstock.host.randomness import Random
from penstock.journal.partitions import PartitionId, partition_id
from penstock.lsm.maintenance import Maintenance
from penstock.manifest.manifest import Manifest
from penstock.partition.ledger import KindCondition, TableInfo
from penstock.partition.machine import PartitionDescriptor, PartitionStateMachine
from penstock.partition.pending import PendingDelta, PendingGroup
from penstock.partition.reference import Reference, StagedFile

T = TypeVar("T")
Insert = Callable[[PendingDelta, PartitionId, Any, Any], object]
Filters = Sequence[tuple[str, str, Any]]  # (column, one of = > >= < <= in, value): all of them must hold
Waiting = Sequence[tuple[PendingGroup, Any]]  # sections that may not be applied yet, each with its group
QUERY_BYTES_MAX = 1 << 20  # of the argument of a query
QUERY_S, QUERY_S_MAX = 30.0, 60.0  # for each batch of a query


@dataclass(frozen=True, kw_only=True)
class MachineContext:
    """Where a kind's state machines live: the parts of the store they may use."""

    fs: FileSystem
    root: str
    identity: bytes
    clock: Clock
    random: Random
    manifest: Manifest
    maintenance: Maintenance
    settings: Any  # of the kind whose machine is opened: of the type of `Kind.settings`
    published: Callable[[], int]  # the last LSN of which every section is applied
    may_remove: Callable[[], bool] = lambda: True  # files: no reader elsewhere has them from before the opening


class InThisProcess:
    """Something that cannot be sent to another process, and says what to do instead."""

    def __reduce__(self) -> NoReturn:
        raise Invalid(f"{self!r} cannot be pickled: call penstock.connect in the other process")


class ShardSnapshot(Protocol):
    """Read-only view of one shard at one LSN. A kind whose rows are not read by key inherits `get` and `scan`."""

    def scan_arrow(self, start: bytes, end: bytes | None) -> Iterator[Any]:
        """Return record batches of the rows with keys in [start, end)."""

    def get(self, key: bytes) -> bytes | None:
        """Return the value of a key."""
        _refuse_keys()

    def scan(self, start: bytes, end: bytes | None, *, reverse: bool) -> Iterator[tuple[bytes, bytes]]:
        """Return (key, value) pairs of [start, end)."""
        _refuse_keys()

    def close(self) -> None: ...


@runtime_checkable
class PieceSnapshot(Protocol):
    """A snapshot of a shard that can be read in pieces; of any other a range is one piece, read from the owner."""

    def pieces(self, count: int, start: bytes = b"", end: bytes | None = None) -> list[Piece]:
        """Cut [start, end) into about `count` pieces of about one size."""


def _refuse_keys() -> NoReturn:
    raise KindMismatch("rows of this table are not read by key: scan it as Arrow, or use the queries of its kind")


@dataclass(frozen=True, slots=True)
class Piece:
    """A range of keys of one shard, and where it can be read without the owner, if it can."""

    partition: PartitionId
    start: bytes
    end: bytes | None
    detail: bytes = b""  # the files, as the kind describes them to its own `read_piece`; empty: ask the owner
    size_bytes: int = 0  # to be read for it, about


@dataclass(frozen=True, slots=True)
class BuildContext:
    """Where files are built for a store that somebody else owns."""

    root: str  # the store's folder, or one that stands for it until the files are handed over
    identity: bytes  # of the store
    reserve: Callable[[PartitionId, int], list[StagedFile]]  # places for so many files of a shard
    time_us: int  # the store's, when the work began
    maker: str  # host and process, for the files to tell
    fs: FileSystem = field(default_factory=OsFileSystem)
    hand_over: Callable[[PartitionId, StagedFile], None] = lambda *_: None  # a file that is built, to the owner


@dataclass(frozen=True, slots=True)
class PreparedRows:
    """Rows for one shard, ready to be committed: as a section's bytes, or as a file that was built."""

    partition: PartitionId
    payload: bytes = b""
    file: StagedFile | None = None
    rows: int = 0


class Machine(PartitionStateMachine, Protocol):
    """The state machine of a shard, and how it is read.

    A kind whose rows are not read by key inherits `get`, `touches` and `fold`; one whose writes are seen when they are
    applied, and not before, inherits `overlay`.
    """

    def snapshot(self) -> ShardSnapshot: ...

    def overlay(self, state: Any, sections: Sequence[Any], time_us: int) -> Any:
        """Return a snapshot with sections that are not applied yet on top, oldest first."""
        return state

    def get(self, key: bytes) -> bytes | None:
        """Return the applied value of a key."""
        _refuse_keys()

    def touches(self, section: Any, key: bytes) -> bool:
        """Whether a section that is not applied yet changes a key that readers may see already."""
        return False

    def fold(self, key: bytes, waiting: Waiting, time_us: int) -> bytes | None:
        """Return the value of a key through sections that are not applied yet, newest first.

        They may be applied while this looks: a group's `lsn`, read after the state, tells whether the state holds it.
        """
        return self.get(key)


class TableService(Protocol):
    """What the owner does for one table beyond reading and writing. Made on first use."""

    def call(self, name: str, argument: bytes) -> bytes:
        """Answer a call of the API class of this kind: decode, `perform`, encode."""

    def perform(self, name: str, request: Any) -> Any:
        """Answer a call as values."""

    def admit(self, name: str, argument: bytes) -> None:
        """Refuse a condition before anything is written, by what only the owner's memory knows."""

    def maintain(self) -> None:
        """Called every now and then."""

    def has_leases(self) -> bool:
        """Whether somebody holds something here that would be lost if the owner went."""

    def close(self) -> None:
        """Answer whoever waits."""


class Host(Protocol):
    """What the owner lends to services."""

    @property
    def port(self) -> Port: ...

    @property
    def clock(self) -> Clock: ...

    @property
    def incarnation(self) -> int:
        """Of the store: no two openings have the same."""

    def machine(self, partition: PartitionId) -> Any: ...

    def ledger_row(self, key: bytes) -> bytes | None:
        """A row of the ledger."""

    def ledger_rows(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        """The rows of the ledger that begin so."""

    def on_applied(self, act: Callable[[], None]) -> Callable[[], None]:
        """Call `act`, which must be quick, whenever records were applied; call what is returned to end that."""


class Kind(Protocol):
    """The core of a kind of table. What has a body here is inherited by kinds that need nothing else."""

    name: str
    options_default: bytes = b""  # of a table that is made without any
    settings: Any = None  # the default; `StoreSettings(kinds=...)` takes another value of the same type
    conditions: Mapping[str, KindCondition] = {}  # what groups may depend on, beside tokens; by "kind.condition"

    # -- sections

    def encode(self, section: Any) -> bytes:
        """Encode a section: once, when it is flushed."""

    def decode(self, payload: bytes) -> Any:
        """Return the section that `encode` was given; `CorruptionError` for other bytes."""

    def weight(self, payload: bytes) -> int:
        """Estimate the memory that `receive` takes for a section by the counts in it, which may be malformed."""

    def receive(self, payload: bytes, options: bytes) -> Any:
        """Decode and check a section from another process; `Invalid` if it breaks a rule of the API.

        `options`: of the table it is for. What passes can be applied, by any process, at any time.
        """

    def frees_space(self, section: Any) -> bool:
        """Whether a section may be written to a full disk, because it deletes."""
        return False

    # -- tables

    def check_options(self, options: bytes) -> None:
        """`Invalid` if the options of a table are malformed: what passes decodes for ever."""

    def open_machine(self, descriptor: PartitionDescriptor, options: bytes, site: MachineContext) -> Machine:
        """Open the state machine of a shard."""

    def table(self, port: Port, info: TableInfo, *, durable: bool) -> Any:
        """Return the API of a table."""

    def reader(self, port: Reading, info: TableInfo) -> Any:
        """Return the API of a table in a snapshot."""

    def schema(self, options: bytes) -> Any:
        """Return the Arrow schema of a table, as users see it."""

    def to_table_schema(self, batch: Any, options: bytes, shard: int) -> Any:
        """Return a record batch of a shard's scan in the table's schema."""

    # -- ranges of keys, for readers that share a scan

    def parse_key(self, text: str) -> bytes:
        """Parse a key that an option gives as text; `Invalid` if it is not a key."""

    def key_range(self, filters: Filters, info: TableInfo, shard: int, port: Port) -> tuple[bytes, bytes | None]:
        """Return a range of keys outside which no row of a shard passes all filters."""
        return b"", None

    # -- conditions

    def check_condition(self, info: TableInfo, condition: str, argument: bytes, *, own: bool) -> None:
        """`Invalid` if a condition is malformed, does not fit the table, or is the owner's `own` and a client sent it.

        What passes the ledger can judge: every condition is checked here before it is written.
        """
        raise Invalid(f"a table of the kind {self.name} has no condition {condition!r}")

    def refusal(self, condition: str, argument: bytes) -> PenstockError:
        """Return the error for a condition that the ledger refused."""
        return KindMismatch(f"the condition {condition} was refused: nothing was written")


# -- capabilities


@dataclass(frozen=True, slots=True)
class StreamColumns:
    """Which columns of a streamable table say where a row is and what it holds."""

    shard: str
    sequence: str
    payload: str
    carried: tuple[str, ...] = ()  # what a dead letter takes along, where the row has it


class StreamSource(Protocol):
    """A streamable table: for each shard, rows are numbered from 1 on."""

    def offsets(self, start: str) -> dict[int, int]:
        """Return for each shard the sequence to begin with, as an option names it: earliest, latest, consumer:NAME."""

    def advance(self, places: dict[int, int], rows_max: int | None, bytes_max: int | None) -> dict[int, int]:
        """Return how far a batch goes from these places, within the limits."""

    def lag(self, consumer: str) -> int:
        """Return how many rows a consumer has not acknowledged."""


@runtime_checkable
class Streamable(Protocol):
    """Rows of a table have positions, and consumers of it a place among them that a group can move."""

    columns: StreamColumns

    def source(self, port: Port, info: TableInfo) -> StreamSource:
        """Return a table as streams read it."""

    def sequence_key(self, sequence: int) -> bytes:
        """Return the key of a row's sequence, for scans."""

    def move(self, info: TableInfo, consumer: str, ranges: Sequence[tuple[int, int, int]]) -> tuple[str, bytes]:
        """Return the condition that a consumer moves from start to end in each (shard, start, end)."""


@runtime_checkable
class Loadable(Protocol):
    """Rows can be prepared outside the owner, as sections or as files that it adopts."""

    staged_suffix: str  # of files that are built elsewhere

    def load_schema(self, given: Any, options: bytes) -> Any:
        """Return the Arrow schema that rows of the schema `given` are cast to; `Invalid` if they do not fit."""

    def load(self, batches: Iterator[Any], info: TableInfo, place: BuildContext) -> list[PreparedRows]:
        """Prepare rows to be written, in another process than the owner: few as sections, many as files."""

    def bundle(self, loads: Sequence[PreparedRows], info: TableInfo, place: BuildContext) -> list[PreparedRows]:
        """Arrange the loads of several processes for one group."""
        return list(loads)

    def check_staged(self, machine: Any, files: Sequence[StagedFile]) -> None:
        """`Invalid` if a shard's machine cannot take in files that were built elsewhere."""


@runtime_checkable
class Replaceable(Protocol):
    """A load can take the place of all rows in a range of keys."""

    def inside(self, batches: Iterator[Any], start: bytes, end: bytes | None) -> Iterator[Any]:
        """Return rows to be loaded; `Invalid` at the first whose key is outside [start, end)."""

    def bundle_in_place(
        self,
        loads: Sequence[PreparedRows],
        info: TableInfo,
        place: BuildContext,
        replaced: tuple[bytes, bytes | None],
    ) -> list[PreparedRows]:
        """Arrange loads for one group that deletes the rows in a range of keys before it."""


@runtime_checkable
class FileReadable(Protocol):
    """Pieces of a snapshot name files that a process which sees them reads without the owner."""

    def read_piece(self, piece: Piece, root: str, identity: bytes) -> Iterator[Any] | None:
        """Return record batches (as of a shard's scan) from a piece's files; None if they cannot be read here."""

    def check_piece(self, piece: Piece, root: str, identity: bytes) -> list[tuple[str, str]] | None:
        """Return what is wrong with a piece's files: path and reason; None if they cannot be read here."""


class QueryContext(Protocol):
    """What a query may ask while it runs."""

    @property
    def time_us(self) -> int:
        """The store's time at the moment that is read."""

    def check(self) -> None:
        """`WaitExpired` if the time for the next batch is over: called in every loop that may take long."""


@runtime_checkable
class Queryable(Protocol):
    """Reads of a whole table that are not by key."""

    def check_query(self, info: TableInfo, name: str, argument: bytes) -> None:
        """`Invalid` if there is no such query, or its argument is malformed; its size was checked before."""

    def query(
        self, info: TableInfo, name: str, argument: bytes, shards: Sequence[Any], context: QueryContext
    ) -> Iterator[Any]:
        """Return record batches of one schema from the snapshots of all shards, which are at one LSN.

        Requires: `check_query` has passed it.
        """


@runtime_checkable
class Serviced(Protocol):
    """The owner keeps a service for each table."""

    asking: frozenset[str]  # the calls that change nothing
    repeatable: frozenset[str]  # the calls that may be made again when nobody knows whether they were answered

    def service(self, info: TableInfo, host: Host) -> TableService:
        """Make the service of a table."""

    def check_call(self, info: TableInfo, name: str, argument: bytes) -> Sequence[str]:
        """Return the other tables that a call writes to; `Invalid` if it is malformed."""

    def waits(self, name: str, argument: bytes) -> bool:
        """Whether a call waits for what others do. Requires: `check_call` has passed it."""


def as_streamable(kind: Kind, info: TableInfo) -> Streamable:
    """Return a kind that streams; `KindMismatch` if it does not."""
    return kind if isinstance(kind, Streamable) else _lacks(info, "which cannot be streamed: read it instead")


def as_loadable(kind: Kind, info: TableInfo) -> Loadable:
    """Return a kind that takes prepared rows; `KindMismatch` if it does not."""
    return kind if isinstance(kind, Loadable) else _lacks(info, "which takes no loads: write through its table")


def as_replaceable(kind: Kind, info: TableInfo) -> Replaceable:
    """Return a kind whose rows can be replaced; `KindMismatch` if they cannot."""
    return kind if isinstance(kind, Replaceable) else _lacks(info, "which is only appended to: use mode('append')")


def as_queryable(kind: Kind, info: TableInfo) -> Queryable:
    """Return a kind that answers queries; `KindMismatch` if it does not."""
    return kind if isinstance(kind, Queryable) else _lacks(info, "which has no queries: scan it instead")


def as_serviced(kind: Kind, info: TableInfo) -> Serviced:
    """Return a kind with services; `KindMismatch` if it has none."""
    return kind if isinstance(kind, Serviced) else _lacks(info, "which takes no calls: read and write it")


def _lacks(info: TableInfo, what: str) -> NoReturn:
    raise KindMismatch(f"table {info.name} is of the kind {info.kind}, {what}")


# -- stores


class Reading(Protocol):
    """A store to read from: live, or as of a snapshot."""

    def table(self, name: str) -> TableInfo | None:
        """What the store knows of a table."""

    def tables(self) -> list[TableInfo]:
        """All tables by name."""

    def lookup(self, partition: PartitionId, key: bytes) -> bytes | None:
        """The value of a key; live in the owner: one's own writes included."""

    def lookup_many(self, partition: PartitionId, keys: Sequence[bytes]) -> list[bytes | None]:
        """The value of each key."""

    def scan(self, partition: PartitionId, start: bytes, end: bytes | None, reverse: bool) -> Iterator[Any]:
        """(key, value) of a range."""

    def scan_arrow(self, partition: PartitionId, start: bytes, end: bytes | None) -> Iterator[Any]:
        """Record batches of a range."""

    def query(self, info: TableInfo, name: str, argument: bytes, *, timeout_s: float = QUERY_S) -> Iterator[Any]:
        """Return record batches that answer a query of the table's kind, on all shards at one LSN.

        Each batch is waited for at most `timeout_s` seconds: `WaitExpired`.
        """

    def moment(self, partitions: Sequence[PartitionId]) -> AbstractContextManager[Reading]:
        """Several shards at one LSN: whatever is read from it before its end belongs together."""

    def pieces(self, partition: PartitionId, count: int, start: bytes = b"", end: bytes | None = None) -> list[Piece]:
        """Cut a range of a shard into about `count` pieces for several readers."""

    def time_us(self) -> int:
        """The store's clock."""


class SnapshotReading(Reading, Protocol):
    """A store as of one LSN."""

    @property
    def lsn(self) -> int: ...

    def close(self) -> None: ...


class Port(Reading, Protocol):
    """A store, as an API class sees it."""

    def write(self, partition: PartitionId, insert: Insert, size: int, a: Any, b: Any) -> Epoch:
        """Put a write into the pending delta."""

    def submit(self, group: PendingGroup, size: int) -> Epoch:
        """Put a group of its own into the pending delta."""

    def commit_and_wait(self, group: PendingGroup, size: int) -> Epoch:
        """Submit a group and wait until it is judged: `group.verdict` says how."""

    def flush(self, epoch: int | None, timeout_s: float = 60.0, *, table: int | None = None) -> Acknowledgement:
        """Wait until an epoch is durable and applied: snapshots, consumers and clients find it.

        `table`: of the epoch's write, if that is all the caller asks about.
        """

    def call(self, info: TableInfo, name: str, argument: bytes, *, wait_s: float = 0.0) -> bytes:
        """Ask the service of a table; `wait_s`: how long the call itself may wait there."""

    def ask(self, info: TableInfo, name: str, request: Any, reply: type[T], *, wait_s: float = 0.0) -> T:
        """Ask with values whose fields were checked: `request` as `TableService.perform` of its kind takes it.

        In the owner it reaches the service as it is; from elsewhere as bytes, and the answer is decoded as a `reply`.
        """

    def create(self, name: str, kind: str, shards: int, options: bytes) -> TableInfo:
        """Make a table if it is absent."""

    def drop(self, name: str) -> None:
        """Remove a table; `NotFound` if there is none."""

    def stage(self, partition: PartitionId, count: int, lease_s: float) -> list[StagedFile]:
        """Places for files to be built elsewhere."""

    def building(self, lease_s: float) -> AbstractContextManager[BuildContext]:
        """Where files for this store are built; each file waits `lease_s` seconds for its commit."""

    def accept(self, partition: PartitionId, files: Sequence[StagedFile]) -> Reference:
        """What a group says of files that were built elsewhere, checked and synced."""

    def is_token_used(self, token: tuple[str, int]) -> bool:
        """Whether a token is known to be used."""

    def snapshot(self) -> SnapshotReading:
        """Everything that is applied, at one LSN."""


@runtime_checkable
class Conditional(Protocol):
    """A batch whose writes can depend on a condition of a kind."""

    def require(self, condition: str, argument: bytes) -> None: ...


def partitions_of(info: TableInfo) -> Sequence[PartitionId]:
    """The partitions of a table, by shard."""
    return [partition_id(info.table, shard) for shard in range(info.shards)]
