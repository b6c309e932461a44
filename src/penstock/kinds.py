"""The protocols of a kind of table: its core, its capabilities, and the port through which its API reaches a store.

A kind is a small core, `Kind`, and capabilities. The other packages ask for a capability by its protocol, through the
functions at the end of this module, and never by the name of a kind:

    Streamable     rows have positions; a consumer moves along them       Spark streams
    Loadable       rows are prepared in another process                   Spark writes, bulk loads
    Replaceable    a load replaces the rows in a range of keys            Spark overwrites
    FileReadable   ranges are read from files, without the owner          Spark reads, verify
    RowConditional writes that depend on the LSNs of rows                 compare and set
    Queryable      reads that are not by key: a selector, a top-k search  `Reading.query`
    Serviced       the owner does more for a table than read and write    leases, retention

A change feed (the records of a table in LSN order) will be one more protocol here, `Changing`.

The API classes of a kind use `Port` alone, so they are the same in the process that owns the store and in a client.
A table is divided into shards. The rows of a shard are ordered by key (bytes), so that a scan can be divided into key
ranges for several readers. In a kv table these are the user's keys; in a queue, message sequences as eight bytes.

Thread: any.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn, Protocol, TypeVar, runtime_checkable

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
QUERY_BYTES_MAX = 1 << 20  # size of a query's argument
QUERY_S, QUERY_S_MAX = 30.0, 60.0  # timeout for each batch of a query


@dataclass(frozen=True, kw_only=True)
class MachineContext:
    """The parts of a store that the state machines of a kind may use."""

    fs: FileSystem
    root: str
    identity: bytes
    clock: Clock
    random: Random
    manifest: Manifest
    maintenance: Maintenance
    settings: Any  # the kind's settings, of the type of `Kind.settings`
    published: Callable[[], int]  # the last LSN whose sections are all applied
    may_remove: Callable[[], bool] = lambda: True  # files: no reader from before the opening is left


class InThisProcess:
    """Base of objects that cannot be pickled; the error says what to do instead."""

    def __reduce__(self) -> NoReturn:
        raise Invalid(f"{self!r} cannot be pickled: call penstock.connect in the other process")


class ShardSnapshot(Protocol):
    """Read-only view of one shard at one LSN. A kind whose rows are not read by key inherits `get` and `scan`."""

    def scan_arrow(self, start: bytes, end: bytes | None) -> Iterator[Any]:
        """Return record batches of the rows with keys in [start, end)."""

    def get(self, key: bytes) -> bytes | None:
        """Return the value of a key."""
        _refuse_keys()

    def row(self, key: bytes) -> tuple[bytes, int] | None:
        """Return the value of a key and the LSN of its row."""
        _refuse_keys()

    def scan(self, start: bytes, end: bytes | None, *, reverse: bool) -> Iterator[tuple[bytes, bytes]]:
        """Return (key, value) pairs of [start, end)."""
        _refuse_keys()

    def close(self) -> None: ...


@runtime_checkable
class PieceSnapshot(Protocol):
    """A shard snapshot that can be divided into pieces. Otherwise a range is one piece, read from the owner."""

    def pieces(self, count: int, start: bytes = b"", end: bytes | None = None) -> list[Piece]:
        """Divide [start, end) into about `count` pieces of similar size."""


def _refuse_keys() -> NoReturn:
    raise KindMismatch("rows of this table are not read by key: scan it as Arrow, or use the queries of its kind")


@dataclass(frozen=True, slots=True)
class Piece:
    """A key range of one shard, and the files it can be read from without the owner, if any."""

    partition: PartitionId
    start: bytes
    end: bytes | None
    detail: bytes = b""  # the files, in the encoding of the kind's `read_piece`; empty: read from the owner
    size_bytes: int = 0  # estimated bytes to read


@dataclass(frozen=True, slots=True)
class BuildContext:
    """What a process needs to build files for a store that another process owns."""

    root: str  # the store's folder, or a local one until the files are handed over
    identity: bytes  # of the store
    reserve: Callable[[PartitionId, int], list[StagedFile]]  # reserve names for a number of files of a shard
    time_us: int  # the store's time when the work began
    maker: str  # host and process, recorded in the files
    fs: FileSystem = field(default_factory=OsFileSystem)
    hand_over: Callable[[PartitionId, StagedFile], None] = lambda *_: None  # send a finished file to the owner


@dataclass(frozen=True, slots=True)
class PreparedRows:
    """Rows for one shard, ready to commit: an encoded section, or a file that was built."""

    partition: PartitionId
    payload: bytes = b""
    file: StagedFile | None = None
    rows: int = 0


class Machine(PartitionStateMachine, Protocol):
    """The state machine of a shard, and how it is read.

    A kind whose rows are not read by key inherits `get`, `touches` and `fold`. A kind whose writes become visible only
    when they are applied inherits `overlay`.
    """

    def snapshot(self) -> ShardSnapshot: ...

    def overlay(self, state: Any, sections: Sequence[Any], time_us: int) -> Any:
        """Return the snapshot overlaid with sections that are not applied yet, oldest first."""
        return state

    def get(self, key: bytes) -> bytes | None:
        """Return the applied value of a key."""
        _refuse_keys()

    def row(self, key: bytes) -> tuple[bytes, int] | None:
        """Return the applied value of a key and the LSN of its row. Requires: nothing is being applied."""
        _refuse_keys()

    def touches(self, section: Any, key: bytes) -> bool:
        """Whether a section that is not applied yet changes a key, and readers may already see that change."""
        return False

    def touches_any(self, section: Any, keys: Collection[bytes]) -> bool:
        """Whether a section that is not applied yet changes one of the keys."""
        return any(self.touches(section, key) for key in keys)

    def fold(self, key: bytes, waiting: Waiting, time_us: int) -> bytes | None:
        """Return the value of a key, including sections that are not applied yet, newest first.

        A section may be applied meanwhile: a group's `lsn`, read after the state, says whether the state includes it.
        """
        return self.get(key)


class TableService(Protocol):
    """What the owner does for one table beyond reading and writing. Created on first use."""

    def call(self, name: str, argument: bytes) -> bytes:
        """Answer an encoded call from the kind's API class: decode, `perform`, encode."""

    def perform(self, name: str, request: Any) -> Any:
        """Answer a call whose request and reply are Python values."""

    def admit(self, name: str, argument: bytes) -> None:
        """Reject a condition before anything is written, by state that only the owner's memory has."""

    def maintain(self) -> None:
        """Do periodic work; the owner calls this from time to time."""

    def has_leases(self) -> bool:
        """Whether clients hold leases that would be lost if the owner exited."""

    def close(self) -> None:
        """Answer all waiting calls."""


class Host(Protocol):
    """What the owner provides to services."""

    @property
    def port(self) -> Port: ...

    @property
    def clock(self) -> Clock: ...

    @property
    def incarnation(self) -> int:
        """The store's incarnation: different at every opening."""

    def machine(self, partition: PartitionId) -> Any: ...

    def ledger_row(self, key: bytes) -> bytes | None:
        """Return a row of the ledger."""

    def ledger_rows(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Return the ledger rows whose keys begin with `prefix`."""

    def on_applied(self, act: Callable[[], None]) -> Callable[[], None]:
        """Call `act`, which must be quick, whenever records were applied. Call the result to unsubscribe."""


class Kind(Protocol):
    """The core of a kind of table. Kinds inherit the methods that have a body here, or override them."""

    name: str
    options_default: bytes = b""  # for a table that is created without options
    settings: Any = None  # the default; `StoreSettings(kinds=...)` takes another value of the same type
    conditions: Mapping[str, KindCondition] = {}  # what groups may depend on, besides tokens; by "kind.condition"

    # -- sections

    def encode(self, section: Any) -> bytes:
        """Encode a section. Called once, when it is flushed."""

    def decode(self, payload: bytes) -> Any:
        """Decode the bytes that `encode` returned; `CorruptionError` for other bytes."""

    def weight(self, payload: bytes) -> int:
        """Estimate the memory that `receive` needs, from the counts in a section that may be malformed."""

    def receive(self, payload: bytes, options: bytes) -> Any:
        """Decode and check a section from another process; `Invalid` if it breaks a rule of the API.

        `options` are the table's. A section that passes can be applied by any process, at any time.
        """

    def frees_space(self, section: Any) -> bool:
        """Whether a section may be written when the disk is full, because it deletes."""
        return False

    # -- tables

    def check_options(self, options: bytes) -> None:
        """Raise `Invalid` if the options of a table are malformed. Options that pass can always be decoded."""

    def open_machine(self, descriptor: PartitionDescriptor, options: bytes, site: MachineContext) -> Machine:
        """Open the state machine of a shard."""

    def table(self, port: Port, info: TableInfo, *, durable: bool) -> Any:
        """Return the API of a table."""

    def reader(self, port: Reading, info: TableInfo) -> Any:
        """Return the API of a table in a snapshot."""

    def schema(self, options: bytes) -> Any:
        """Return the Arrow schema of a table, as users see it."""

    def to_table_schema(self, batch: Any, options: bytes, shard: int) -> Any:
        """Convert a record batch of a shard's scan to the table's schema."""

    # -- ranges of keys, for readers that share a scan

    def parse_key(self, text: str) -> bytes:
        """Parse a key from the text of an option; `Invalid` if it is not a key."""

    def key_range(self, filters: Filters, info: TableInfo, shard: int, port: Port) -> tuple[bytes, bytes | None]:
        """Return a key range that holds every row of a shard that passes all filters."""
        return b"", None

    # -- conditions

    def check_condition(self, info: TableInfo, condition: str, argument: bytes, *, own: bool) -> None:
        """Raise `Invalid` if a condition is malformed or does not fit the table, or if a client may not send it.

        `own`: the owner itself set the condition. Every condition is checked here before it is written, so the ledger
        can evaluate all that are.
        """
        raise Invalid(f"a table of the kind {self.name} has no condition {condition!r}")

    def refusal(self, condition: str, argument: bytes) -> PenstockError:
        """Return the error for a condition that the ledger refused."""
        return KindMismatch(f"the condition {condition} was refused: nothing was written")


# -- capabilities


@dataclass(frozen=True, slots=True)
class StreamColumns:
    """The columns of a streamable table that hold a row's position and its payload."""

    shard: str
    sequence: str
    payload: str
    carried: tuple[str, ...] = ()  # columns copied to a dead letter, where the row has them


class StreamSource(Protocol):
    """A streamable table. The rows of each shard are numbered from 1."""

    def offsets(self, start: str) -> dict[int, int]:
        """Return the first sequence for each shard from the text of an option: earliest, latest, consumer:NAME."""

    def advance(self, places: dict[int, int], rows_max: int | None, bytes_max: int | None) -> dict[int, int]:
        """Return, for each shard, the end of a batch that begins at `places` and keeps within the limits."""

    def lag(self, consumer: str) -> int:
        """Return how many rows a consumer has not acknowledged."""


@runtime_checkable
class Streamable(Protocol):
    """Rows of a table have positions, and a group can move a consumer's position."""

    columns: StreamColumns

    def source(self, port: Port, info: TableInfo) -> StreamSource:
        """Return the table as a source for streams."""

    def sequence_key(self, sequence: int) -> bytes:
        """Return the scan key of a row's sequence."""

    def move(self, info: TableInfo, consumer: str, ranges: Sequence[tuple[int, int, int]]) -> tuple[str, bytes]:
        """Return the condition that moves a consumer from start to end in each (shard, start, end)."""


@runtime_checkable
class Loadable(Protocol):
    """Rows can be prepared outside the owner, as sections or as files that it adopts."""

    staged_suffix: str  # of files that are built outside the owner

    def load_schema(self, given: Any, options: bytes) -> Any:
        """Return the Arrow schema to cast rows of schema `given` to; `Invalid` if they do not fit."""

    def load(self, batches: Iterator[Any], info: TableInfo, place: BuildContext) -> list[PreparedRows]:
        """Prepare rows outside the owner: few rows as sections, many as files."""

    def bundle(self, loads: Sequence[PreparedRows], info: TableInfo, place: BuildContext) -> list[PreparedRows]:
        """Arrange the loads of several processes for one group."""
        return list(loads)

    def check_staged(self, machine: Any, files: Sequence[StagedFile]) -> None:
        """Raise `Invalid` if a shard's machine cannot adopt files that were built outside the owner."""


@runtime_checkable
class Replaceable(Protocol):
    """A load can replace all rows in a key range."""

    def inside(self, batches: Iterator[Any], start: bytes, end: bytes | None) -> Iterator[Any]:
        """Pass rows through; `Invalid` at the first whose key is outside [start, end)."""

    def bundle_in_place(
        self,
        loads: Sequence[PreparedRows],
        info: TableInfo,
        place: BuildContext,
        replaced: tuple[bytes, bytes | None],
    ) -> list[PreparedRows]:
        """Arrange loads for one group that first deletes the rows in the key range `replaced`."""


@runtime_checkable
class FileReadable(Protocol):
    """Pieces of a snapshot name files that any process with access to them can read without the owner."""

    def read_piece(self, piece: Piece, root: str, identity: bytes) -> Iterator[Any] | None:
        """Return record batches, as a shard's scan does, from a piece's files; None if unreadable from here."""

    def check_piece(self, piece: Piece, root: str, identity: bytes) -> list[tuple[str, str]] | None:
        """Return (path, reason) for each damaged file of a piece; None if unreadable from here."""


class ExpectedRow(NamedTuple):
    """A row that a conditional write depends on."""

    partition: PartitionId
    key: bytes
    lsn: int  # 0: the row is expected to be absent


@runtime_checkable
class RowConditional(Protocol):
    """Writes can depend on the LSNs of rows. The owner judges that before the journal: see `store.conditions`."""

    row_condition: str  # its name, one of `Kind.conditions`

    def expected_row(self, argument: bytes) -> ExpectedRow:
        """Decode the argument of a condition. Requires: `check_condition` has passed."""

    def condition_failed(self, info: TableInfo, row: ExpectedRow, lsn: int) -> PenstockError:
        """Return the error for a row that has another LSN (0: it is absent)."""


class QueryContext(Protocol):
    """What a running query may use."""

    @property
    def time_us(self) -> int:
        """The store's time at the LSN that is read."""

    def check(self) -> None:
        """Raise `WaitExpired` if the time for the next batch is over. Call it in every loop that may take long."""


@runtime_checkable
class Queryable(Protocol):
    """Reads of a whole table that are not by key."""

    def check_query(self, info: TableInfo, name: str, argument: bytes) -> None:
        """Raise `Invalid` if the query is unknown or its argument malformed. Its size was checked before."""

    def query(
        self, info: TableInfo, name: str, argument: bytes, shards: Sequence[Any], context: QueryContext
    ) -> Iterator[Any]:
        """Return record batches of one schema from the snapshots of all shards, which are at one LSN.

        Requires: `check_query` has passed.
        """


@runtime_checkable
class Serviced(Protocol):
    """The owner runs a service for each table."""

    asking: frozenset[str]  # read-only calls
    repeatable: frozenset[str]  # calls that a client may repeat when it got no answer

    def service(self, info: TableInfo, host: Host) -> TableService:
        """Create the service of a table."""

    def check_call(self, info: TableInfo, name: str, argument: bytes) -> Sequence[str]:
        """Return the other tables that a call writes to; `Invalid` if the call is malformed."""

    def waits(self, name: str, argument: bytes) -> bool:
        """Whether a call waits for other clients. Requires: `check_call` has passed."""


def as_streamable(kind: Kind, info: TableInfo) -> Streamable:
    """Return the kind if it can be streamed, or raise `KindMismatch`."""
    return kind if isinstance(kind, Streamable) else _lacks(info, "which cannot be streamed: read it instead")


def as_loadable(kind: Kind, info: TableInfo) -> Loadable:
    """Return the kind if it takes prepared rows, or raise `KindMismatch`."""
    return kind if isinstance(kind, Loadable) else _lacks(info, "which takes no loads: write through its table")


def as_replaceable(kind: Kind, info: TableInfo) -> Replaceable:
    """Return the kind if its rows can be replaced, or raise `KindMismatch`."""
    return kind if isinstance(kind, Replaceable) else _lacks(info, "which is only appended to: use mode('append')")


def as_queryable(kind: Kind, info: TableInfo) -> Queryable:
    """Return the kind if it answers queries, or raise `KindMismatch`."""
    return kind if isinstance(kind, Queryable) else _lacks(info, "which has no queries: scan it instead")


def as_serviced(kind: Kind, info: TableInfo) -> Serviced:
    """Return the kind if its tables have services, or raise `KindMismatch`."""
    return kind if isinstance(kind, Serviced) else _lacks(info, "which takes no calls: read and write it")


def _lacks(info: TableInfo, what: str) -> NoReturn:
    raise KindMismatch(f"table {info.name} is of the kind {info.kind}, {what}")


# -- stores


class Reading(Protocol):
    """A store to read from: live, or as of a snapshot."""

    def table(self, name: str) -> TableInfo | None:
        """Return a table's description; None if there is no such table."""

    def tables(self) -> list[TableInfo]:
        """Return all tables, ordered by name."""

    def lookup(self, partition: PartitionId, key: bytes) -> bytes | None:
        """Return the value of a key. A live read in the owner includes writes that are not applied yet."""

    def lookup_many(self, partition: PartitionId, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the value of each key, None where absent."""

    def lookup_row(self, partition: PartitionId, key: bytes) -> tuple[bytes, int] | None:
        """Return the value of a key and the LSN of its row, both applied.

        A live read first waits for this process's own writes to the key.
        """

    def scan(self, partition: PartitionId, start: bytes, end: bytes | None, reverse: bool) -> Iterator[Any]:
        """Return (key, value) pairs of [start, end)."""

    def scan_arrow(self, partition: PartitionId, start: bytes, end: bytes | None) -> Iterator[Any]:
        """Return record batches of [start, end)."""

    def query(self, info: TableInfo, name: str, argument: bytes, *, timeout_s: float = QUERY_S) -> Iterator[Any]:
        """Return record batches that answer a query of the table's kind, on all shards at one LSN.

        `WaitExpired` if a batch takes longer than `timeout_s` seconds.
        """

    def moment(self, partitions: Sequence[PartitionId]) -> AbstractContextManager[Reading]:
        """Return a context in which several shards are read at one LSN."""

    def pieces(self, partition: PartitionId, count: int, start: bytes = b"", end: bytes | None = None) -> list[Piece]:
        """Divide a key range of a shard into about `count` pieces for several readers."""

    def time_us(self) -> int:
        """Return the time of the store's clock."""


class SnapshotReading(Reading, Protocol):
    """A store as of one LSN."""

    @property
    def lsn(self) -> int: ...

    def close(self) -> None: ...


class Port(Reading, Protocol):
    """A store, as an API class sees it."""

    @property
    def write_bytes_max(self) -> int:
        """The largest `size` of one write or group."""

    def write(self, partition: PartitionId, insert: Insert, size: int, a: Any, b: Any) -> Epoch:
        """Add a write to the pending delta."""

    def submit(self, group: PendingGroup, size: int) -> Epoch:
        """Add a separate group to the pending delta."""

    def commit_and_wait(self, group: PendingGroup, size: int) -> Epoch:
        """Submit a group and wait until `group.verdict` is set."""

    def flush(self, epoch: int | None, timeout_s: float = 60.0, *, table: int | None = None) -> Acknowledgement:
        """Wait until an epoch is durable and applied, so that snapshots, consumers and clients see it.

        `table`: of the epoch's write; only errors of that table's writes are raised.
        """

    def call(self, info: TableInfo, name: str, argument: bytes, *, wait_s: float = 0.0) -> bytes:
        """Call the service of a table; `wait_s`: how long the call may wait there."""

    def ask(self, info: TableInfo, name: str, request: Any, reply: type[T], *, wait_s: float = 0.0) -> T:
        """Call the service of a table with a checked `request`, as `TableService.perform` of its kind takes it.

        In the owner the request is passed as it is; a client sends it as bytes and decodes the answer as a `reply`.
        """

    def create(self, name: str, kind: str, shards: int, options: bytes) -> TableInfo:
        """Create a table if it is absent."""

    def drop(self, name: str) -> None:
        """Delete a table; `NotFound` if there is none."""

    def stage(self, partition: PartitionId, count: int, lease_s: float) -> list[StagedFile]:
        """Reserve names for `count` files that are built outside the owner."""

    def building(self, lease_s: float) -> AbstractContextManager[BuildContext]:
        """Return a context in which files for this store are built; each must be committed within `lease_s`."""

    def accept(self, partition: PartitionId, files: Sequence[StagedFile]) -> Reference:
        """Check and sync files that were built outside the owner, and return the reference for a group."""

    def is_token_used(self, token: tuple[str, int]) -> bool:
        """Whether a token was already used, as far as is known."""

    def snapshot(self) -> SnapshotReading:
        """Return a snapshot of everything that is applied, at one LSN."""


@runtime_checkable
class Conditional(Protocol):
    """A batch whose writes can depend on a condition of a kind."""

    def require(self, condition: str, argument: bytes) -> None: ...


def partitions_of(info: TableInfo) -> Sequence[PartitionId]:
    """Return the partitions of a table, ordered by shard."""
    return [partition_id(info.table, shard) for shard in range(info.shards)]
