"""The transactional key-value store under the manifest: named tables of sorted keys.

`LmdbEngine` (environment.py) is the real one; `penstock.testing.manifest` has one in memory. Both pass the same
contract suite. An engine knows nothing of records.

Thread: reads from any thread, each a snapshot of its own; one write transaction at a time, begun and ended by one
thread.
Invariants: when `write()` ends without an exception, all its changes are durable; with one, none was made (except
`OutcomeUnknown`, which leaves that open).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from penstock.host.clock import Clock
from penstock.host.files import FileSystem
from penstock.manifest.settings import ManifestSettings

TABLES = (
    "meta",
    "db",
    "wal_state",
    "chunk_catalog",
    "chunk_files",
    "job_queue",
    "job_pending_index",
    "metrics",
    "generation_watermarks",
)


class ReadView(Protocol):
    """A snapshot."""

    def get(self, table: str, key: bytes) -> bytes | None: ...

    def scan(self, table: str, start: bytes = b"", stop: bytes | None = None) -> Iterator[tuple[bytes, bytes]]:
        """Iterate over rows with `start <= key < stop`, by key."""


class WriteView(ReadView, Protocol):
    """A snapshot and the changes made on it."""

    def put(self, table: str, key: bytes, value: bytes) -> None: ...

    def delete(self, table: str, key: bytes) -> bool:
        """Remove a row; return whether it existed."""


class Transaction(WriteView, Protocol):
    """A write transaction of the engine."""

    def put_many(self, table: str, rows: Sequence[tuple[bytes, bytes]]) -> None:
        """Put rows, sorted by key."""


class ManifestEngine(Protocol):
    """Transactions over the tables."""

    def read(self) -> AbstractContextManager[ReadView]: ...

    def write(self) -> AbstractContextManager[Transaction]:
        """Begin a transaction: committed durably at the end of the block, rolled back by an exception."""

    def grow(self, *, for_deletes: bool) -> bool:
        """Enlarge the store after `ManifestFull`; False at the limit. Deletes may exceed it: they free space."""

    def maintain(self) -> None:
        """Do periodic work, such as to release the slots of readers that died."""

    def copy(self, target: str) -> None:
        """Write a snapshot to a new file, not yet synced."""

    def read_copy(self, path: str) -> ReadView:
        """Read and check every row of a file that `copy` wrote; `CorruptionError` if it is damaged."""

    def close(self) -> None: ...


class EngineOpener(Protocol):
    """Opens the engine of a manifest."""

    def __call__(self, path: str, settings: ManifestSettings, fs: FileSystem, clock: Clock) -> ManifestEngine: ...
