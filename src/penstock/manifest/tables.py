"""The tables: the key and record types of each.

Thread: any; a table keeps no state, the view that is passed in does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from penstock.manifest.codec import VERSION, RecordCodec
from penstock.manifest.engine import ReadView, WriteView
from penstock.manifest.keys import (
    ChunkKey,
    MetricKey,
    PendingJobKey,
    WalStateKey,
    pack_component,
    pack_file_name,
    pack_id,
    pack_name,
    unpack_component,
    unpack_id,
    unpack_name,
)
from penstock.manifest.records import (
    ChunkEntryRecord,
    ChunkFileRecord,
    DbDescriptorRecord,
    DbNameRecord,
    GenerationRecord,
    JobRecord,
    ManifestRecord,
    MetricRecord,
    PendingJobRecord,
    WalStateRecord,
)

K = TypeVar("K")
R = TypeVar("R", bound=ManifestRecord)


class Table(Generic[K, R]):
    """A named table with typed keys and records."""

    def __init__(
        self,
        name: str,
        record: type[R],
        pack: Callable[[K], bytes],
        unpack: Callable[[bytes], K],
        version: int = VERSION,
    ) -> None:
        self.name = name
        self.codec = RecordCodec(name, record, version)
        self._pack = pack
        self._unpack = unpack

    def get(self, view: ReadView, key: K) -> R | None:
        """Return a record, or None."""
        return self.get_packed(view, self._pack(key))

    def get_packed(self, view: ReadView, key: bytes) -> R | None:
        """Return a record by its packed key, or None."""
        value = view.get(self.name, key)
        return None if value is None else self.codec.decode(key, value)

    def put(self, view: WriteView, key: K, record: R) -> None:
        """Write or replace a record."""
        self.put_packed(view, self._pack(key), record)

    def put_packed(self, view: WriteView, key: bytes, record: R) -> None:
        """Write or replace a record by its packed key."""
        view.put(self.name, key, self.codec.encode(key, record))

    def packed(self, key: K, record: R) -> tuple[bytes, bytes]:
        """Return a row as it is stored."""
        stored = self._pack(key)
        return stored, self.codec.encode(stored, record)

    def delete(self, view: WriteView, key: K) -> bool:
        """Remove a record; return whether it existed."""
        return view.delete(self.name, self._pack(key))

    def scan(self, view: ReadView, start: K | None = None, stop: K | None = None) -> Iterator[tuple[K, R]]:
        """Iterate over records with `start <= key < stop`, by key."""
        first = b"" if start is None else self._pack(start)
        last = None if stop is None else self._pack(stop)
        for key, value in view.scan(self.name, first, last):
            yield self._unpack(key), self.codec.decode(key, value)


DB: Table[int, DbDescriptorRecord] = Table("db", DbDescriptorRecord, pack_id, unpack_id, version=3)
DB_NAMES: Table[str, DbNameRecord] = Table("meta", DbNameRecord, pack_name, unpack_name)  # beside the schema versions
WAL_STATE: Table[WalStateKey, WalStateRecord] = Table("wal_state", WalStateRecord, WalStateKey.pack, WalStateKey.unpack)
CHUNKS: Table[ChunkKey, ChunkEntryRecord] = Table("chunk_catalog", ChunkEntryRecord, ChunkKey.pack, ChunkKey.unpack)
CHUNK_FILES: Table[str, ChunkFileRecord] = Table("chunk_files", ChunkFileRecord, pack_file_name, bytes.decode)
JOBS: Table[int, JobRecord] = Table("job_queue", JobRecord, pack_id, unpack_id)
PENDING: Table[PendingJobKey, PendingJobRecord] = Table(
    "job_pending_index", PendingJobRecord, PendingJobKey.pack, PendingJobKey.unpack
)
METRICS: Table[MetricKey, MetricRecord] = Table("metrics", MetricRecord, MetricKey.pack, MetricKey.unpack)
GENERATIONS: Table[int, GenerationRecord] = Table(
    "generation_watermarks", GenerationRecord, pack_component, unpack_component
)

ALL = (DB, WAL_STATE, CHUNKS, CHUNK_FILES, JOBS, PENDING, METRICS, GENERATIONS)


def names(view: ReadView) -> Iterator[tuple[str, DbNameRecord]]:
    """Iterate over the names of tables that are not tombstoned."""
    return DB_NAMES.scan(view, "", "\U0010ffff")


def partitions(view: ReadView, db_id: int) -> Iterator[tuple[WalStateKey, WalStateRecord]]:
    """Iterate over the `wal_state` rows of a table, by shard."""
    return WAL_STATE.scan(view, WalStateKey(db_id, 0), WalStateKey(db_id + 1, 0))


def chunks(view: ReadView, db_id: int, from_chunk_id: int = 0) -> Iterator[tuple[ChunkKey, ChunkEntryRecord]]:
    """Iterate over the chunks of a table, by id."""
    return CHUNKS.scan(view, ChunkKey(db_id, from_chunk_id), ChunkKey(db_id + 1, 0))
