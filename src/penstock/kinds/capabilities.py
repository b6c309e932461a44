"""The capabilities of kinds: what a kind may be able to do beyond its core, each a protocol.

The other packages ask for a capability through the functions at the end, never by the name of a kind.

Thread: any.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn, Protocol, cast, runtime_checkable

from penstock.errors import KindMismatch, PenstockError
from penstock.host.clock import Clock
from penstock.host.files import FileSystem
from penstock.journal.partitions import PartitionId
from penstock.kinds.core import Kind, ShardSnapshot
from penstock.kinds.port import BuildContext, Piece, Port
from penstock.manifest.records import JobKind
from penstock.partition.ledger_records import TableInfo
from penstock.partition.reference import StagedFile
from penstock.scheduler.offers import JobPart


@dataclass(frozen=True, slots=True)
class StreamColumns:
    """The columns of a streamable table that hold a row's position and its payload."""

    shard: str
    sequence: str
    payload: str
    carried: tuple[str, ...] = ()  # columns copied to a dead letter, where both tables have them


class StreamSource(Protocol):
    """A streamable table. The rows of each shard are numbered from 1."""

    def offsets(self, start: str) -> dict[int, int]:
        """Return the first sequence for each shard from the text of an option: earliest, latest, consumer:NAME."""

    def advance(self, start: dict[int, int], rows_max: int | None, bytes_max: int | None) -> dict[int, int]:
        """Return, for each shard, the end of a batch that begins at `start` and keeps within the limits."""

    def lag(self, consumer: str) -> int:
        """Return how many rows a consumer has not acknowledged."""


class BatchCounts(NamedTuple):
    """The counts that a stream reports for a batch that it commits; the owner adds them up for each consumer."""

    rows_out: int = 0  # written, dead letters apart
    dead: int = 0  # letters
    skipped: int = 0  # batches since its last commit that it found committed before


@runtime_checkable
class Streamable(Protocol):
    """Rows of a table have positions, and a group can move a consumer's position."""

    columns: StreamColumns

    def source(self, port: Port, info: TableInfo) -> StreamSource:
        """Return the table as a source for streams."""

    def sequence_key(self, sequence: int) -> bytes:
        """Return the scan key of a row's sequence."""

    def move(
        self,
        info: TableInfo,
        consumer: str,
        ranges: Sequence[tuple[int, int, int]],
        counts: BatchCounts = BatchCounts(),  # noqa: B008 - immutable
    ) -> tuple[str, bytes]:
        """Return the condition that moves a consumer from start to end in each (shard, start, end)."""


@dataclass(frozen=True, slots=True)
class PreparedRows:
    """Rows for one shard, ready to commit: an encoded section, or a file that was built."""

    partition: PartitionId
    payload: bytes = b""
    file: StagedFile | None = None
    rows: int = 0


@runtime_checkable
class Loadable(Protocol):
    """Rows can be prepared outside the owner, as sections or as files that it adopts."""

    staged_suffix: str  # of files that are built outside the owner

    def load_schema(self, input_schema: Any, options: bytes) -> Any:
        """Return the Arrow schema to cast rows of schema `input_schema` to; `Invalid` if they do not fit."""

    def load(self, batches: Iterator[Any], info: TableInfo, context: BuildContext) -> list[PreparedRows]:
        """Prepare rows outside the owner: few rows as sections, many as files."""

    def bundle(self, loads: Sequence[PreparedRows], info: TableInfo, context: BuildContext) -> list[PreparedRows]:
        """Arrange the loads of several processes for one group."""
        return list(loads)

    def check_staged(self, machine: Any, files: Sequence[StagedFile]) -> Callable[[], None] | None:
        """Raise `Invalid` if a shard's machine cannot adopt files that were built outside the owner.

        Return a function that undoes this if no record will ever name the files; None if there is nothing to undo. See
        `Kind.admit`.
        """


@runtime_checkable
class Replaceable(Protocol):
    """A load can replace all rows in a key range."""

    def inside(self, batches: Iterator[Any], start: bytes, end: bytes | None) -> Iterator[Any]:
        """Pass rows through; `Invalid` at the first whose key is outside [start, end)."""

    def bundle_in_place(
        self,
        loads: Sequence[PreparedRows],
        info: TableInfo,
        context: BuildContext,
        replaced: tuple[bytes, bytes | None],
    ) -> list[PreparedRows]:
        """Arrange loads for one group that first deletes the rows in the key range `replaced`."""


@runtime_checkable
class FileReadable(Protocol):
    """Pieces of a snapshot name files that any process with access to them can read without the owner."""

    def read_piece(
        self, piece: Piece, root: str, identity: bytes, columns: Collection[str] | None = None
    ) -> Iterator[Any] | None:
        """Return record batches, as a shard's scan does, from a piece's files; None if unreadable from here.

        Columns that are not among `columns` (None: all) may be left out, if that saves work.
        """

    def check_piece(self, piece: Piece, root: str, identity: bytes) -> list[tuple[str, str]] | None:
        """Return (path, reason) for each damaged file of a piece; None if unreadable from here."""


class OwnFile(NamedTuple):
    """A file of a shard that the manifest does not list, as far as it never changes any more."""

    path: str  # relative to the store
    size: int  # bytes that belong to it
    content: bytes | None  # None: they are in the file
    is_whole: bool  # whether the file gets no further bytes


class SealedFile(NamedTuple):
    """A file of a shard that never changes, like a chunk, but that the manifest does not list."""

    number: int  # ascending within the shard
    path: str  # relative to the store
    size: int
    rows: int
    start: bytes  # the key of its first row
    end: bytes  # all its keys are below this


@runtime_checkable
class FileKeeping(Protocol):
    """Shards keep files that the manifest does not list."""

    def own_files(self, machine: Any) -> list[OwnFile]:
        """Return the files of a shard that the manifest does not list, at one moment."""

    def sealed_files(self, machine: Any) -> list[SealedFile]:
        """Return those of them that hold rows and get no more, in order, for people to see."""

    def damaged_files(self, machine: Any) -> list[tuple[str, str]]:
        """Read all of these files; return (path, reason) for each damage."""

    def rows_in_files(self, fs: FileSystem, folder: str, identity: bytes) -> Iterator[Any]:
        """Return record batches of what can be read in the folder of a shard that cannot be opened."""


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
    def lsn(self) -> int:
        """The LSN that is read."""

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


STATISTICS = "statistics"  # the query that counts rows, files and bytes of a table, if its kind has one


@runtime_checkable
class Countable(Protocol):
    """A state machine whose rows can be counted as they are: a snapshot would freeze its memtable."""

    def present(self) -> ShardSnapshot:
        """Return the current state, which may change while it is read: for the query STATISTICS of clients."""


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

    @property
    def identity(self) -> bytes:
        """The identity in the store's files; a copy made by `restore` has the same."""

    @property
    def uuid(self) -> bytes:
        """The UUID of this store alone."""

    def machine(self, partition: PartitionId, timeout_s: float = 60.0) -> Any:
        """Return the state machine of a shard, opened on first use, and wait until it has every write so far."""

    def opened(self, partition: PartitionId) -> Any:
        """Return the state machine of a shard if it is open, else None."""

    def ledger_row(self, key: bytes) -> bytes | None:
        """Return a row of the ledger."""

    def ledger_rows(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Return the ledger rows whose keys begin with `prefix`."""

    def stream_totals(self, info: TableInfo) -> Mapping[str, Any]:
        """Return what the streams of each consumer of a queue did since the store was made."""

    def on_applied(self, act: Callable[[], None]) -> Callable[[], None]:
        """Call `act`, which must be quick, whenever records were applied. Call the result to unsubscribe."""


@runtime_checkable
class Selectable(Protocol):
    """The rows of a selector, a text of the kind's own language, can be read in ranges of keys."""

    def select_range(self, selector: str, shard: int, start: bytes, end: bytes | None) -> tuple[str, bytes]:
        """Return the query that reads the rows of a selector in [start, end) of one shard, and its argument.

        `Invalid` if it is not a selector.
        """


@runtime_checkable
class Serviced(Protocol):
    """The owner runs a service for each table."""

    read_only_calls: frozenset[str]
    repeatable_calls: frozenset[str]  # calls that a client may repeat when it got no answer

    def service(self, info: TableInfo, host: Host) -> TableService:
        """Create the service of a table."""

    def check_call(self, info: TableInfo, name: str, argument: bytes) -> Sequence[str]:
        """Return the other tables that a call writes to; `Invalid` if the call is malformed."""

    def waits(self, name: str, argument: bytes) -> bool:
        """Whether a call waits for other clients. Requires: `check_call` has passed."""


class Derivation(Protocol):
    """A planned computation of a table: calls of one function in any process, then one commit in the owner."""

    function: str  # `package.module:function`; it gets the arguments of a part and `root`, the store's folder
    parts: Sequence[JobPart]

    def commit(self, results: Sequence[Any]) -> None:
        """Write the results of all parts."""

    def close(self) -> None:
        """Release what the parts read."""


@runtime_checkable
class Derived(Protocol):
    """Tables, or indexes of tables, are computed by durable jobs of the owner."""

    derived_by: JobKind  # the kind of these jobs

    def check_source(self, name: str, options: bytes, find: Callable[[str], TableInfo | None]) -> None:
        """Raise an error if a new table cannot be computed as its options say; `find` looks up a table by name."""
        return

    def is_derived(self, info: TableInfo) -> bool:
        """Whether this table, or its index, is computed."""

    def is_due(self, info: TableInfo, host: Host) -> bool:
        """Whether to start a job: a quick check, which does not promise that there is something to compute."""
        return True

    def derive(self, info: TableInfo, host: Host) -> Derivation | None:
        """Plan the next computation of a table; None if there is nothing to compute. Repeating one is safe."""


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
    if not _answers_queries(type(kind)):
        _lacks(info, "which has no queries: scan it instead")
    return cast("Queryable", kind)


@lru_cache(64)  # a check of a protocol takes as long as a part of a small query
def _answers_queries(kind: type[Kind]) -> bool:
    return issubclass(kind, Queryable)


_row_conditional: dict[type, bool] = {}  # as above, by class


def as_row_conditional(kind: Kind) -> RowConditional | None:
    """Return the kind if its writes can depend on rows."""
    able = _row_conditional.get(type(kind))
    if able is None:
        able = _row_conditional[type(kind)] = isinstance(kind, RowConditional)
    return cast("RowConditional", kind) if able else None


def as_selectable(kind: Kind, info: TableInfo) -> Selectable:
    """Return the kind if its rows can be selected, or raise `KindMismatch`."""
    return kind if isinstance(kind, Selectable) else _lacks(info, "which has no selectors: filter its rows")


_serviced: set[type] = set()  # classes that passed the check: checking a protocol takes longer than many calls


def as_serviced(kind: Kind, info: TableInfo) -> Serviced:
    """Return the kind if its tables have services, or raise `KindMismatch`."""
    if type(kind) not in _serviced:
        if not isinstance(kind, Serviced):
            _lacks(info, "which takes no calls: read and write it")
        _serviced.add(type(kind))
    return kind  # type: ignore[return-value]


def _lacks(info: TableInfo, reason: str) -> NoReturn:
    raise KindMismatch(f"table {info.name} is of the kind {info.kind}, {reason}")
