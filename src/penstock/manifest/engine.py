"""The small transactional store under the manifest: named tables of sorted keys.

`LmdbEngine` (environment.py) is the real one; `penstock.testing.manifest` has one in memory. Both pass the same
contract suite. An engine knows nothing of records.

Thread: reads from any thread, each a snapshot of its own; one write transaction at a time, begun and ended by one
thread.
Invariants: when `write()` ends without an exception everything in it is durable; with one, nothing of it is there
(`OutcomeUnknown` alone leaves that open).
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
    """One snapshot."""

    def get(self, table: str, key: bytes) -> bytes | None: ...

    def scan(self, table: str, start: bytes = b"", stop: bytes | None = None) -> Iterator[tuple[bytes, bytes]]:
        """Rows with `start <= key < stop`, in the order of keys."""


class WriteView(ReadView, Protocol):
    """A snapshot and one's own changes to it."""

    def put(self, table: str, key: bytes, value: bytes) -> None: ...

    def delete(self, table: str, key: bytes) -> bool:
        """Remove a row; whether it was there."""


class Transaction(WriteView, Protocol):
    """One that the engine commits."""

    def put_many(self, table: str, rows: Sequence[tuple[bytes, bytes]]) -> None:
        """Put rows that are in the order of their keys."""


class ManifestEngine(Protocol):
    """Transactions over the tables."""

    def read(self) -> AbstractContextManager[ReadView]: ...

    def write(self) -> AbstractContextManager[Transaction]:
        """A transaction: committed durably at the end of the `with`, undone by an exception."""

    def grow(self, *, for_deletes: bool) -> bool:
        """Make room after `ManifestFull`; False at the limit. Deletes may go a little over it: they free space."""

    def tend(self) -> None:
        """Periodic care: free what dead readers hold."""

    def copy(self, target: str) -> None:
        """Write a snapshot of everything to a new file, not yet synced."""

    def close(self) -> None: ...


class EngineOpener(Protocol):
    """How `Manifest.open` gets its engine."""

    def __call__(self, path: str, settings: ManifestSettings, fs: FileSystem, clock: Clock) -> ManifestEngine: ...
