"""`Port`, the one way from a table's API to a store, and what passes through it.

Thread: any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, runtime_checkable

from penstock.archive.chunk import ChunkIdentity, Sealing
from penstock.archive.container import create_chunk, open_chunk
from penstock.archive.storage import PLAIN_FILES, FileStorage
from penstock.coordinator import Acknowledgement, Epoch
from penstock.errors import CorruptionError, Invalid, UnsupportedVersion
from penstock.host.clock import Clock, SystemClock
from penstock.host.file_operations import make_dirs
from penstock.host.files import Buffer, FileSystem
from penstock.host.os_files import OsFileSystem
from penstock.host.paths import parent
from penstock.journal.partitions import PartitionId, partition_id, table_of
from penstock.partition.ledger_records import TableInfo
from penstock.partition.pending import PendingDelta, PendingGroup
from penstock.partition.reference import StagedFile

T = TypeVar("T")
Insert = Callable[[PendingDelta, PartitionId, Any, Any], object]
QUERY_BYTES_MAX = 1 << 20  # size of a query's argument
QUERY_S, QUERY_S_MAX = 30.0, 60.0  # timeout for each batch of a query


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
    identity: bytes  # of the store's files
    reserve: Callable[[PartitionId, int], list[StagedFile]]  # reserve names for a number of files of a shard
    time_us: int  # the store's time when the work began
    maker: str  # host and process, recorded in the files
    fs: FileSystem = field(default_factory=OsFileSystem)
    clock: Clock = field(default_factory=SystemClock)  # of the process that builds
    hand_over: Callable[[PartitionId, StagedFile], None] = lambda *_: None  # send a finished file to the owner
    files_of: Callable[[int], FileStorage] = lambda table_id: PLAIN_FILES  # how the files of a table are written
    uuid: bytes = b""  # of the store; a restored copy, whose files have the same identity, has its own

    def sealing(self, partition: PartitionId) -> Sealing:
        """Return how a file of a shard is written."""
        return self.files_of(table_of(partition)).sealing(0)

    def write_file(self, partition: PartitionId, staged: StagedFile, content: Buffer) -> None:
        """Write a staged file that is not an sstable, durably."""
        path = f"{self.root}/{staged.file_name}"
        make_dirs(self.fs, parent(path))
        identity = ChunkIdentity(store=self.identity, chunk_id=staged.chunk_id)
        out = create_chunk(self.fs, path, identity, self.sealing(partition))
        try:
            out.write(content)
            out.finish()
        except BaseException:
            out.abort()
            raise


def staged_content(fs: FileSystem, path: str) -> bytes:
    """Return the content of a staged file that is not an sstable; `Invalid` if it is malformed."""
    try:
        chunk = open_chunk(fs, path)
    except (CorruptionError, UnsupportedVersion) as error:
        raise Invalid(f"{path} cannot be read ({error}): build it again") from None
    try:
        return bytes(chunk.read(0, chunk.size))
    except CorruptionError as error:
        raise Invalid(f"{path} cannot be read ({error}): build it again") from None
    finally:
        chunk.close()


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

    @property
    def uuid(self) -> bytes:
        """The UUID of the store, different for each, also for a restored copy."""

    @property
    def holder(self) -> str:
        """The name of a client, different for each connection; empty in the owner."""

    def call_at_close(self, info: TableInfo, name: str, argument: bytes) -> None:
        """Call the service of a table, once, when this client closes its connection. Nothing happens in the owner."""

    def write(self, partition: PartitionId, insert: Insert, size: int, a: Any, b: Any) -> Epoch:
        """Add a write to the pending delta."""

    def submit(self, group: PendingGroup, size: int) -> Epoch:
        """Add a separate group to the pending delta."""

    def commit_and_wait(self, group: PendingGroup, size: int) -> Epoch:
        """Submit a group and wait until `group.verdict` is set."""

    def wait_for(self, lsn: int, tables: Sequence[TableInfo], timeout_s: float) -> int:
        """Wait until tables have applied every record up to an LSN; return the LSN that all of them have reached."""

    def flush(self, epoch: int | None, timeout_s: float = 60.0, *, table: int | None = None) -> Acknowledgement:
        """Wait until an epoch is durable and applied, so that snapshots, consumers and clients see it.

        `table`: of the epoch's write; only errors of that table's writes are raised.
        """

    def now_us(self) -> int:
        """Return the time for new data without a request: the store's in the owner, a client's own elsewhere."""

    def call(self, info: TableInfo, name: str, argument: bytes, *, wait_s: float = 0.0) -> bytes:
        """Call the service of a table; `wait_s`: how long the call may wait there."""

    def ask(self, info: TableInfo, name: str, request: Any, reply: type[T], *, wait_s: float = 0.0) -> T:
        """Call the service of a table with a checked `request`, as `TableService.perform` of its kind takes it.

        In the owner the request is passed as it is; a client sends it as bytes and decodes the answer as a `reply`.
        """

    def create(
        self,
        name: str,
        kind: str,
        shards: int,
        options: bytes,
        storage: bytes = b"",
        *,
        encrypted: bool | None = None,
    ) -> TableInfo:
        """Create a table if it is absent; `encrypted`: None means as the owner's settings and `storage` say."""

    def drop(self, name: str) -> None:
        """Delete a table; `NotFound` if there is none."""

    def alter(self, info: TableInfo, options: bytes) -> TableInfo:
        """Replace the options of a table durably, unless they are no longer `info`'s; return the table after that."""

    def configure(self, info: TableInfo, storage: bytes) -> TableInfo:
        """Replace the storage options of a table durably, unless they are no longer `info`'s; return it after that."""

    def stage(self, partition: PartitionId, count: int, lease_s: float) -> list[StagedFile]:
        """Reserve names for `count` files that are built outside the owner."""

    def building(self, lease_s: float) -> AbstractContextManager[BuildContext]:
        """Return a context in which files for this store are built; each must be committed within `lease_s`."""

    def accept(self, group: PendingGroup, partition: PartitionId, files: Sequence[StagedFile]) -> None:
        """Check and sync files that were built outside the owner, and make them the section of a group.

        If that fails, the group must not be submitted.
        """

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
    return [partition_id(info.table_id, shard) for shard in range(info.shards)]
