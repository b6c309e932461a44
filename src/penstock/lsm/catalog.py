"""A tree's files in the manifest: converts rows to file descriptions and back, and builds the operations of a change.

Thread: any; all state is the manifest's.
Invariant: the rows of a tree change only together with its watermarks, in one transaction.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

import msgspec

from penstock.archive.storage import PLAIN_FILES, FileStorage
from penstock.errors import CorruptionError
from penstock.lsm.index import Summary
from penstock.lsm.version import FileMeta
from penstock.manifest.keys import ChunkKey, ComponentId, WalStateKey
from penstock.manifest.manifest import Manifest
from penstock.manifest.operations import BumpGeneration, DeleteChunk, ManifestOp, PutWalState, UpsertChunk
from penstock.manifest.records import ChunkEntryRecord, Codec, Evicted, RemoteArchived, WalStateRecord


class TableDetail(msgspec.Struct, frozen=True, array_like=True):
    """The tree's part of a chunk's row."""

    shard: int
    level: int
    run: int
    start: bytes
    end: bytes
    rows: int
    deletes: int
    lsn_min: int
    lsn_max: int
    has_ranges: bool
    expires: bool
    lsn: int | None = None


class TreeProgress(msgspec.Struct, frozen=True, array_like=True):
    """The tree's part of a partition's row."""

    # The highest record time in files: rows that had expired by then stay expired, whatever the clock says.
    time_us: int = 0
    operators: tuple[int, ...] | None = None  # of all operands in files; None: not recorded


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(TableDetail)
_SEALED = b"\xc1"  # before a detail that is sealed: no MessagePack begins with it
_DETAIL = struct.Struct("<9sQQ")  # a label, the table, the chunk


class Catalog:
    """The rows of one tree: a shard of a table."""

    def __init__(
        self, manifest: Manifest, db_id: int, shard: int, folder: str, storage: FileStorage = PLAIN_FILES
    ) -> None:
        self.storage = storage
        self._manifest = manifest
        self.db_id = db_id
        self.shard = shard
        self.folder = folder  # of its files, relative to the store

    def file_name(self, chunk_id: int) -> str:
        return f"{self.folder}/{chunk_id:020d}.sst"

    def load(self) -> tuple[list[FileMeta], int, TreeProgress]:
        """Return the listed files, the LSN up to which they hold everything, and the tree's progress."""
        files: list[FileMeta] = []
        for key, row in self._manifest.scan_chunks(self.db_id):
            if row.staged:
                continue
            detail = self.detail(key.chunk_id, row)
            if detail.shard == self.shard:
                files.append(_meta(key.chunk_id, row, detail, self.storage.key))
        watermarks = self._manifest.get_wal_state(WalStateKey(self.db_id, self.shard)) or WalStateRecord()
        return files, watermarks.stored_lsn, _progress(watermarks)

    def detail(self, chunk_id: int, row: ChunkEntryRecord) -> TableDetail:
        """Return the tree's part of a row; `CorruptionError` if it does not decode with the table's key."""
        data = row.detail
        if data[:1] == _SEALED:
            opened = None
            if self.storage.sealer is not None:
                opened = self.storage.sealer.open(data[1:], self._context(chunk_id))
            if opened is None:
                raise CorruptionError(row.file_name, 0, "its row in the manifest was not sealed with the table's key")
            data = opened
        elif self.storage.sealer is not None:
            raise CorruptionError(row.file_name, 0, "its row in the manifest is not encrypted, and its table is")
        try:
            return _decoder.decode(data)
        except msgspec.DecodeError as error:
            raise CorruptionError(row.file_name, 0, f"its row in the manifest does not decode ({error})") from None

    def _context(self, chunk_id: int) -> bytes:
        return _DETAIL.pack(b"chunk row", self.db_id, chunk_id)

    def describe(self, summary: Summary, *, level: int, run: int, lsn: int | None = None) -> FileMeta:
        """Return the description of a file that was just written."""
        return FileMeta(
            chunk_id=summary.chunk_id,
            file_name=self.file_name(summary.chunk_id),
            level=level,
            run=run,
            start=summary.start,
            end=summary.end,
            rows=summary.rows,
            size_bytes=summary.file_bytes,
            deletes=summary.deletes,
            lsn_min=summary.lsn_min if lsn is None else lsn,
            lsn_max=summary.lsn_max if lsn is None else lsn,
            has_ranges=summary.range_deletes > 0,
            expires=summary.expiring > 0,
            lsn=lsn,
            key=self.storage.key,
        )

    def publish(
        self,
        added: Sequence[FileMeta],
        removed: Iterable[FileMeta] = (),
        *,
        stored: tuple[int, int] | None = None,
        operators: Iterable[int] | None = None,
    ) -> list[ManifestOp]:
        """Return the operations of one change: rows added and removed, the stored LSN and time, a new generation.

        `operators`: those of all operands in files.
        """
        generation = 1 + self._manifest.generation(ComponentId.MANIFEST)
        operations: list[ManifestOp] = [
            UpsertChunk(ChunkKey(self.db_id, meta.chunk_id), self._row(meta, generation)) for meta in added
        ]
        operations += [DeleteChunk(ChunkKey(self.db_id, meta.chunk_id)) for meta in removed]
        if stored is not None:
            lsn, time_us = stored
            progress = WalStateRecord(
                stored_lsn=lsn,
                last_applied_lsn=lsn,
                durable_lsn=lsn,
                highest_lsn=lsn,
                restart_epoch=self._manifest.restart_epoch,
                detail=_encode(TreeProgress(time_us, None if operators is None else tuple(sorted(operators)))),
            )
            operations.append(PutWalState(WalStateKey(self.db_id, self.shard), progress))
        operations.append(BumpGeneration(ComponentId.MANIFEST, 1))
        return operations

    def _row(self, meta: FileMeta, generation: int) -> ChunkEntryRecord:
        detail = TableDetail(
            self.shard, meta.level, meta.run, meta.start, meta.end, meta.rows, meta.deletes, meta.lsn_min, meta.lsn_max,
            meta.has_ranges, meta.expires, meta.lsn,
        )  # fmt: skip
        data, sealing = _encode(detail), self.storage.sealing(meta.level)
        if self.storage.sealer is not None:  # its keys are those of users
            data = _SEALED + self.storage.sealer.seal(data, self._context(meta.chunk_id))
        return ChunkEntryRecord(
            file_name=meta.file_name,
            generation=generation,
            size_bytes=meta.size_bytes,
            compression=Codec[sealing.codec.upper()],
            encrypted=sealing.keys is not None,
            wal_range=(meta.lsn_min, meta.lsn_max + 1),
            detail=data,
        )


def _progress(watermarks: WalStateRecord) -> TreeProgress:
    return msgspec.msgpack.decode(watermarks.detail, type=TreeProgress) if watermarks.detail else TreeProgress()


def _meta(chunk_id: int, row: ChunkEntryRecord, detail: TableDetail, key: int) -> FileMeta:
    return FileMeta(
        chunk_id=chunk_id,
        file_name=row.file_name,
        level=detail.level,
        run=detail.run,
        start=detail.start,
        end=detail.end,
        rows=detail.rows,
        size_bytes=row.size_bytes,
        deletes=detail.deletes,
        lsn_min=detail.lsn_min,
        lsn_max=detail.lsn_max,
        has_ranges=detail.has_ranges,
        expires=detail.expires,
        lsn=detail.lsn,
        key=key,
        object=_object(row),
    )


def _object(row: ChunkEntryRecord) -> str | None:
    match row.residency:
        case Evicted(object=key) | RemoteArchived(object=key, verified=True):
            return key
    return None
