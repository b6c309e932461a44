"""What a kind of table must be, and the port through which its API reaches a store.

The API classes of a kind stand on `Port` alone, so that they are the same in the owner of a store and in a client of
it. Who opens stores, serves them or reads them from Spark knows kinds by their names in `registry` and in no other way.

A table is cut into shards, and a shard is read by ranges of keys, as bytes in their order: a kv table has its own keys,
a queue the sequences of its messages in eight bytes. What only one kind can do goes through `call`.

Thread: any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from penstock.coordinator import Acknowledgement, Epoch
from penstock.errors import PenstockError
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

Insert = Callable[[PendingDelta, PartitionId, Any, Any], object]
Filters = Sequence[tuple[str, str, Any]]  # (column, one of = > >= < <= in, value): all of them must hold
Waiting = Sequence[tuple[PendingGroup, Any]]  # sections that may not be applied yet, each with its group


@dataclass(frozen=True, kw_only=True)
class Site:
    """Where a kind's state machines live: the parts of the store they may use."""

    fs: FileSystem
    root: str
    identity: bytes
    clock: Clock
    random: Random
    manifest: Manifest
    maintenance: Maintenance
    settings: Mapping[str, Any]  # of kinds, by their names
    published: Callable[[], int]  # the last LSN of which every section is applied
    may_remove: Callable[[], bool] = lambda: True  # files: no reader elsewhere has them from before the opening


class ShardSnapshot(Protocol):
    """A shard at one moment."""

    def get(self, key: bytes) -> bytes | None: ...

    def scan(self, start: bytes, end: bytes | None, *, reverse: bool) -> Iterator[tuple[bytes, bytes]]:
        """(key, value) of [start, end)."""

    def scan_arrow(self, start: bytes, end: bytes | None) -> Iterator[Any]:
        """Record batches of [start, end)."""

    def pieces(self, count: int, start: bytes = b"", end: bytes | None = None) -> list[Piece]:
        """[start, end) in about `count` parts of about one size that a reader elsewhere can read by themselves."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Piece:
    """A range of keys of one shard, and where it can be read without the owner, if it can."""

    partition: PartitionId
    start: bytes
    end: bytes | None
    detail: bytes = b""  # the files, as the kind describes them to its own `read_piece`; empty: ask the owner
    size_bytes: int = 0  # to be read for it, about


@dataclass(frozen=True, slots=True)
class Workplace:
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
    """The state machine of a shard, and how it is read."""

    @property
    def get(self) -> Callable[[bytes], bytes | None]:
        """The value of a key in what is applied."""

    def snapshot(self) -> ShardSnapshot: ...

    def touches(self, section: Any, key: bytes) -> bool:
        """Whether a section that is not applied yet says something about a key that readers may see already."""

    def fold(self, key: bytes, waiting: Waiting, time_us: int) -> bytes | None:
        """The value of a key through sections that are not applied yet, newest first.

        They may be applied while this looks: a group's `lsn`, read after the state, tells whether the state holds it.
        """

    def overlay(self, state: Any, sections: Sequence[Any], time_us: int) -> Any:
        """A state with sections on top, oldest first."""

    def check_staged(self, files: Sequence[StagedFile]) -> None:
        """`Invalid` if files that were built elsewhere cannot be taken in."""


class TableService(Protocol):
    """What the owner does for one table beyond reading and writing. Made on first use."""

    def call(self, name: str, argument: bytes) -> bytes:
        """Answer a call of the API class of this kind."""

    def admit(self, name: str, argument: bytes) -> None:
        """Refuse a condition before anything is written, by what only the owner's memory knows."""

    def tend(self) -> None:
        """Called every now and then."""

    def engaged(self) -> bool:
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

    def remembered(self, key: bytes) -> bytes | None:
        """A row of the ledger."""

    def remembered_range(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        """The rows of the ledger that begin so."""

    def on_applied(self, act: Callable[[], None]) -> Callable[[], None]:
        """Call `act`, which must be quick, whenever records were applied; call what is returned to end that."""


class Kind(Protocol):
    """A kind of table."""

    name: str
    staged_suffix: str  # of files that are built elsewhere
    conditions: Mapping[str, KindCondition]  # what groups may depend on, beside tokens
    asking: frozenset[str]  # the calls of its service that change nothing
    repeatable: frozenset[str]  # the calls that may be made again when nobody knows whether they were answered

    def encode(self, section: Any) -> bytes:
        """A section as bytes: once, when it is flushed."""

    def decode(self, payload: bytes) -> Any:
        """The section that `encode` was given; `CorruptionError` for other bytes."""

    def weight(self, payload: bytes) -> int:
        """The memory that `receive` takes for a section, about, by a look at the counts in it; it may be malformed."""

    def receive(self, payload: bytes, options: bytes) -> Any:
        """The section that another process sent, looked at in full; `Invalid` if it breaks a rule of the API.

        `options`: of the table it is for. What passes can be applied, by any process, at any time.
        """

    def check_condition(self, info: TableInfo, condition: str, argument: bytes, *, own: bool) -> None:
        """`Invalid` if a condition is malformed, does not fit the table, or is the owner's `own` and a client sent it.

        What passes the ledger can judge: every condition is looked at here before it is written.
        """

    def check_call(self, info: TableInfo, name: str, argument: bytes) -> Sequence[str]:
        """The other tables that a call writes to; `Invalid` if it is malformed."""

    def waits(self, name: str, argument: bytes) -> bool:
        """Whether a call waits for something that others do. Requires: `check_call` has passed it."""

    def check_options(self, options: bytes) -> None:
        """`Invalid` if options are malformed: what passes decodes for ever."""

    def gives_room(self, section: Any) -> bool:
        """Whether a section may be written to a full disk, because it deletes."""

    def open_machine(self, descriptor: PartitionDescriptor, options: bytes, site: Site) -> Machine:
        """The state machine of a shard."""

    def service(self, info: TableInfo, host: Host) -> TableService:
        """The service of a table."""

    def refusal(self, condition: str, argument: bytes) -> PenstockError:
        """What to raise when the ledger refused a condition."""

    def move(self, info: TableInfo, consumer: str, ranges: Sequence[tuple[int, int, int]]) -> tuple[str, bytes]:
        """The condition that a consumer moves from start to end in each (shard, start, end)."""

    def table(self, port: Port, info: TableInfo, *, durable: bool) -> Any:
        """The API of a table."""

    def reader(self, port: Reading, info: TableInfo) -> Any:
        """The API of a table in a snapshot."""

    def schema(self, options: bytes) -> Any:
        """The Arrow schema of a table, as the world sees it."""

    def shown(self, batch: Any, options: bytes, shard: int) -> Any:
        """A record batch of a shard's scan in the table's schema."""

    def key_of(self, text: str) -> bytes:
        """A key as an option gives it, in text; `Invalid` if it is none."""

    def narrowed(self, filters: Filters, info: TableInfo, shard: int, port: Port) -> tuple[bytes, bytes | None]:
        """The range of keys outside which no row of a shard passes all filters."""

    def load_schema(self, given: Any, options: bytes) -> Any:
        """What columns rows to be written may have, as an Arrow schema; `Invalid` if `given` does not fit."""

    def load(self, batches: Iterator[Any], info: TableInfo, place: Workplace) -> list[PreparedRows]:
        """Prepare rows to be written, in another process than the owner: little as sections, much as files."""

    def bundle(
        self,
        loads: Sequence[PreparedRows],
        info: TableInfo,
        place: Workplace,
        replace: tuple[bytes, bytes | None] | None,
    ) -> list[PreparedRows]:
        """Loads of several processes as one group takes them; `replace`: in place of all rows in a range of keys."""

    def read_piece(self, piece: Piece, root: str, identity: bytes) -> Iterator[Any] | None:
        """Record batches (as of a shard's scan) read from the piece's files; None if they cannot be read here."""

    def check_piece(self, piece: Piece, root: str, identity: bytes) -> list[tuple[str, str]] | None:
        """What is wrong with the piece's files: path and reason; None if they cannot be read here."""


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

    def moment(self, partitions: Sequence[PartitionId]) -> AbstractContextManager[Reading]:
        """Several shards at one LSN: whatever is read from it before its end belongs together."""

    def pieces(self, partition: PartitionId, count: int, start: bytes = b"", end: bytes | None = None) -> list[Piece]:
        """A range of a shard in parts for several readers."""

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

    def settle(self, group: PendingGroup, size: int) -> Epoch:
        """Submit a group and wait until it is judged: `group.verdict` says how."""

    def flush(self, epoch: int | None, timeout_s: float = 60.0, *, table: int | None = None) -> Acknowledgement:
        """Wait until an epoch is durable and applied: snapshots, consumers and clients find it.

        `table`: of the epoch's write, if that is all the caller asks about.
        """

    def call(self, info: TableInfo, name: str, argument: bytes, *, wait_s: float = 0.0) -> bytes:
        """Ask the service of a table; `wait_s`: how long the call itself may wait there."""

    def create(self, name: str, kind: str, shards: int, options: bytes) -> TableInfo:
        """Make a table if it is absent."""

    def drop(self, name: str) -> None:
        """Remove a table; `NotFound` if there is none."""

    def stage(self, partition: PartitionId, count: int, lease_s: float) -> list[StagedFile]:
        """Places for files to be built elsewhere."""

    def building(self, lease_s: float) -> AbstractContextManager[Workplace]:
        """Where files for this store are built; each file waits `lease_s` seconds for its commit."""

    def accept(self, partition: PartitionId, files: Sequence[StagedFile]) -> Reference:
        """What a group says of files that were built elsewhere, checked and synced."""

    def was_used(self, token: tuple[str, int]) -> bool:
        """Whether a token is known to be used."""

    def snapshot(self) -> SnapshotReading:
        """Everything that is applied, at one LSN."""


class Conditional(Protocol):
    """A batch whose writes can depend on a condition of a kind."""

    def require(self, condition: str, argument: bytes) -> None: ...


def partitions_of(info: TableInfo) -> Sequence[PartitionId]:
    """The partitions of a table, by shard."""
    return [partition_id(info.table, shard) for shard in range(info.shards)]
