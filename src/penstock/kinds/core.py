"""The core of a kind of table: `Kind`, the state machine of a shard, and how a shard is read.

Thread: any.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, runtime_checkable

from penstock.archive.storage import PLAIN_FILES, FileStorage
from penstock.errors import Invalid, KindMismatch, PenstockError
from penstock.host.clock import Clock
from penstock.host.file_operations import remove_file
from penstock.host.files import FileSystem
from penstock.host.randomness import Random
from penstock.kinds.port import Piece, Port, Reading
from penstock.lsm.maintenance import Maintenance
from penstock.manifest.manifest import Manifest
from penstock.manifest.records import RetentionPolicy
from penstock.partition.ledger_records import KindCondition, TableInfo
from penstock.partition.machine import PartitionDescriptor, PartitionStateMachine
from penstock.partition.pending import PendingGroup
from penstock.partition.storage_options import DEFAULT, StorageOptions

Filters = Sequence[tuple[str, str, Any]]  # (column, one of = > >= < <= in, value): all of them must hold
Waiting = Sequence[tuple[PendingGroup, Any]]  # sections that may not be applied yet, each with its group


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
    may_remove: Callable[[], bool] = lambda: True  # files: no reader from before the opening is left, and no backup
    remove: Callable[[FileSystem, str], bool] = remove_file  # a file that nothing names: now, or after a backup
    options_of: Callable[[int], bytes] = lambda table_id: b""  # the options of a table, as they are now
    storage_of: Callable[[int], StorageOptions] = lambda table_id: DEFAULT  # the same, of every kind's options
    files_of: Callable[[int], FileStorage] = lambda table_id: PLAIN_FILES  # how the files of a table are written
    memory_bytes_max: int = 1 << 30  # what a kind may keep in memory of all its tables, beside rows in no file


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

    def admit(self, info: TableInfo, sections: Sequence[Any], machine: Any, time_us: int) -> Callable[[], None] | None:
        """Raise `Invalid` if the state of a shard, or the store's time, forbids sections: a limit would be passed.

        The owner asks this before a group enters the pending delta, for all sections of one shard in it together.
        Apply accepts every section. The function that is returned is called if the group is refused later and so never
        written.
        """
        return None

    def frees_space(self, section: Any) -> bool:
        """Whether a section may be written when the disk is full, because it deletes."""
        return False

    # -- tables

    def check_options(self, options: bytes) -> None:
        """Raise `Invalid` if the options of a table are malformed. Options that pass can always be decoded."""

    def check_retention(self, policy: RetentionPolicy) -> None:
        """Raise `Invalid` if tables of this kind cannot delete by these limits. Most kinds delete by none."""
        if policy != RetentionPolicy():
            raise Invalid(f"a {self.name} table has no retention: give rows a time to live, or delete ranges of them")

    def check_altered(self, info: TableInfo, options: bytes) -> None:
        """Raise `Invalid` if the options of an existing table cannot become `options`."""
        raise Invalid(f"the options of table {info.name} are fixed: create another table")

    def open_machine(self, descriptor: PartitionDescriptor, options: bytes, context: MachineContext) -> Machine:
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
