"""Salvage: copies what can be read of a damaged store into a new one.

The damaged store is opened on an overlay, so that nothing in its folder changes, after what would keep it from opening
was left out there: a damaged manifest is replaced by its newest valid backup; sstables that cannot be opened are
unlisted; journal records that cannot be read are replaced by empty ones, so that all others keep their LSNs. Then each
table is read range by range. A range that meets damage is divided until only what is damaged is left out.

It copies rows and messages, not history: queues number their messages anew, and consumers, tokens and expiry times are
not kept. `restore` keeps all of that; salvage is for a store without a backup.

Thread: one.
Invariant: whatever could not be copied is in the report.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import msgspec
import pyarrow as pa

from penstock.archive.container import check_blocks, open_chunk
from penstock.archive.master_keys import Keys
from penstock.archive.table_keys import key_number
from penstock.errors import Closed, CorruptionError, FixTheCall, NotFound, PenstockError, Restore
from penstock.host.clock import Clock
from penstock.host.file_locks import OsReadLock
from penstock.host.file_operations import walk
from penstock.host.files import FileSystem
from penstock.host.os_files import OsFileSystem
from penstock.host.overlay_files import OverlayFileSystem
from penstock.host.randomness import Random
from penstock.journal.partitions import PartitionId
from penstock.journal.record import JournalRecord, encode
from penstock.kinds import FileKeeping, SnapshotReading, partitions_of
from penstock.log.chain import is_segment, read_names
from penstock.log.damage import damaged_segments, readable_records
from penstock.log.record import KIND_DATA, Index, Record
from penstock.log.segment import SegmentHeader, SegmentWriter
from penstock.lsm.sstable import Sstable
from penstock.lsm.writer import index_path
from penstock.manifest.engine import EngineOpener
from penstock.manifest.environment import backup_path
from penstock.manifest.keys import WalStateKey
from penstock.manifest.memory import MemoryTables, MemoryView, ReadOnlyEngine, read_tables
from penstock.manifest.records import ChunkEntryRecord, Evicted, WalStateRecord
from penstock.manifest.recovery import RecoveredState
from penstock.manifest.settings import ManifestSettings
from penstock.manifest.tables import CHUNK_FILES, CHUNKS, WAL_STATE
from penstock.partition.extent import JOURNAL_KEY, last_known
from penstock.partition.ledger_records import LEDGER_TABLE, TableInfo
from penstock.partition.roster import describe
from penstock.registry import kind_named
from penstock.store.backup_folder import CopyProgress, Progress
from penstock.store.identity import IDENTITY_BYTES, StoreIdentity, load_identity, write_identity
from penstock.store.reports import FileDamage
from penstock.store.settings import StoreSettings
from penstock.store.store import Store

PIECES = 8  # into which a range with damage is divided
PIECE_BYTES = 64 << 20  # of stored rows that are read at once
BACKUPS_MAX = 100
GAP_MAX = 1_000_000  # LSNs in a row that are replaced by empty records


@dataclass(frozen=True, kw_only=True)
class SalvageReport:
    """What was copied from a damaged store, and what was not.

    >>> store.close()
    >>> report = penstock.salvage(store.path, "rescued")
    >>> report.rows["users"], report.lost
    (1, [])
    """

    path: str
    rows: dict[str, int]  # that were copied, by table
    lost: list[str]  # what could not be read, in words
    damage: list[FileDamage]  # the files that were not as they were written


def salvage_store(
    path: str,
    open_target: Callable[[], Store],
    *,
    clock: Clock,
    random: Random,
    keys: Keys | None = None,
    progress: Progress | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> SalvageReport:
    """Copy what can be read of the store in `path` into a new store, which is opened if there is anything to copy."""
    salvage = _Salvage(path, clock=clock, random=random, keys=keys, progress=progress, stop=stop)
    with ExitStack() as ends:
        source = salvage.open()
        ends.callback(source.close)
        target = open_target()
        ends.callback(target.close)
        salvage.copy(source, target)
    return SalvageReport(
        path=target.path, rows=salvage.rows, lost=salvage.lost, damage=list(dict.fromkeys(salvage.damage))
    )


class _SalvageEngine(MemoryTables):
    """Rows that were read before; commits stay in memory."""

    copy = ReadOnlyEngine.copy
    read_copy = ReadOnlyEngine.read_copy


class _DamagedStore(Store):
    """A store that opens although shards of it do not."""

    def _open_parts(self, engine: EngineOpener) -> None:
        super()._open_parts(engine)
        self._dispatcher.is_repairable = lambda number: True

    def _restore_registry(self, recovered: RecoveredState) -> None:
        """Leave the descriptors alone: only the ledger, damaged or not, lists the tables here."""

    def _check_keys(self) -> None:
        """Go on without the keys of some tables: the others can be copied."""

    def unreadable(self, info: TableInfo) -> PenstockError | None:
        """Return why a table cannot be decrypted; None if it can, or is not encrypted."""
        try:
            self._keys.check([info])
        except FixTheCall as error:
            return error
        return None


class _Salvage:
    def __init__(
        self,
        path: str,
        *,
        clock: Clock,
        random: Random,
        keys: Keys | None,
        progress: Progress | None,
        stop: Callable[[], bool],
    ) -> None:
        self._path = path
        self._keys = keys
        self._target: Store  # set by `copy`
        self._clock = clock
        self._random = random
        self._progress = progress
        self._stop = stop
        self._fs = OverlayFileSystem(OsFileSystem(), share_lock=OsReadLock)
        self.rows: dict[str, int] = {}
        self.lost: list[str] = []
        self.damage: list[FileDamage] = []
        self._ledger_lost = False

    def _note(self, error: PenstockError | OSError, where: str) -> None:
        path = error.path if isinstance(error, CorruptionError) else where
        self.damage.append(FileDamage(path, error.reason if isinstance(error, CorruptionError) else str(error)))

    # -- opening

    def open(self) -> _DamagedStore:
        """Open the damaged store on an overlay, without what would keep it from opening."""
        if not any(self._fs.exists(f"{self._path}/{name}") for name in ("STORE", "manifest", "journal")):
            raise NotFound(f"there is no store in {self._path}: give the folder of a damaged one")
        lock = self._fs.lock(f"{self._path}/LOCK")  # an owner may still have it
        lock.release()
        tables = self._read_manifest()
        if not self._fs.exists(f"{self._path}/manifest"):
            self._fs.create(f"{self._path}/manifest").close()  # its rows are in memory
        self._mend_identity()
        self._unlist_damaged(tables)
        self._mend_journal(tables)

        def engine(path: str, settings: ManifestSettings, fs: FileSystem, clock: Clock) -> _SalvageEngine:
            return _SalvageEngine(path, tables.tables)

        settings = StoreSettings(background=False, serve=False, reserve_bytes=0, keys=self._keys)
        return _DamagedStore(
            self._path,
            settings=settings,
            fs=self._fs,
            clock=self._clock,
            random=self._random,
            engine=engine,
            read_only=True,
        )

    def _mend_identity(self) -> None:
        """Take the identity from a segment of the journal if `STORE` is damaged."""
        try:
            self._identity = load_identity(self._fs, self._path, self._random).files
            return
        except (Restore, OSError) as error:
            self._note(error, f"{self._path}/STORE")
        for name in sorted(self._fs.listdir(f"{self._path}/journal"), reverse=True):
            if is_segment(name):
                file = self._fs.open(f"{self._path}/journal/{name}")
                try:
                    self._identity = SegmentHeader.read(file).identity
                except Restore:
                    continue
                finally:
                    file.close()
                if self._fs.exists(f"{self._path}/STORE"):
                    self._fs.unlink(f"{self._path}/STORE")
                write_identity(
                    self._fs, self._path, StoreIdentity(self._identity, self._random.randbytes(IDENTITY_BYTES))
                )
                return
        raise CorruptionError(f"{self._path}/STORE", 0, "neither it nor the journal says which store this was")

    def _read_manifest(self) -> MemoryView:
        """Return the rows of the manifest, or of its newest valid backup."""
        path = f"{self._path}/manifest"
        for candidate in (path, *(backup_path(path, age) for age in range(1, BACKUPS_MAX))):
            if candidate != path and not self._fs.exists(candidate):
                break
            try:
                view = MemoryView(read_tables(self._fs, candidate))
            except (Restore, OSError) as error:
                self._note(error, candidate)
                continue
            if candidate != path:
                self.lost.append(f"what the manifest recorded after its copy {candidate}")
            return view
        raise CorruptionError(path, 0, "neither it nor a copy of it can be read")

    def _unlist_damaged(self, view: MemoryView) -> None:
        """Forget sstables that cannot be opened: the tree reads without them."""
        for key, row in list(CHUNKS.scan(view)):
            try:
                if not row.staged:
                    self._open_file(key.db_id, row)
            except (Restore, OSError) as error:
                self._note(error, f"{self._path}/{row.file_name}")
                if key.db_id == LEDGER_TABLE:
                    self._ledger_lost = True
                    self.lost.append("parts of the ledger: tables that the journal does not create any more")
                else:
                    self.lost.append(f"the file {row.file_name}: older rows of its table may show instead")
                CHUNKS.delete(view, key)
                CHUNK_FILES.delete(view, row.file_name)

    def _open_file(self, table_id: int, row: ChunkEntryRecord) -> None:
        """Raise if a file cannot be opened. The ledger's are read at once, so no page of them may be damaged."""
        path, key = f"{self._path}/{row.file_name}", key_number(table_id, row.encrypted)
        evicted = isinstance(row.residency, Evicted) and not self._fs.exists(path)
        if key:  # its ring is in the ledger, which is not open yet
            for name in (index_path(path),) if evicted else (path, index_path(path)):
                check_blocks(self._fs, name, key)
        elif evicted:
            open_chunk(self._fs, index_path(path), key=key).close()
        else:
            table = Sstable.open(path, fs=self._fs, key=key)
            damage = table.damaged_pages() if table_id == LEDGER_TABLE else []
            table.close()
            if damage:
                raise damage[0]

    def _mend_journal(self, view: MemoryView) -> None:
        """Write the journal anew, in the overlay, with empty records in place of those that cannot be read."""
        folder = f"{self._path}/journal"
        if not self._fs.exists(folder):
            self._fs.mkdir(folder)
        if not any(map(is_segment, self._fs.listdir(folder))):
            self.lost.append("the journal: what was not stored in tables yet")
        for error in damaged_segments(self._fs, folder, self._identity):
            self._note(error, folder)
        _, _, incarnation, _ = read_names(self._fs.listdir(folder))
        records = {int(record.index): record for record in readable_records(self._fs, folder, self._identity)}
        rows = dict(WAL_STATE.scan(view))
        ledger = rows.get(WalStateKey(LEDGER_TABLE, 0))
        stored = 0 if ledger is None else ledger.stored_lsn
        if ledger is not None and self._ledger_lost and records:  # it is made anew, as far as the journal reaches
            stored = min(stored, min(records) - 1)
            behind = msgspec.structs.replace(ledger, stored_lsn=stored, last_applied_lsn=stored)
            WAL_STATE.put(view, WalStateKey(LEDGER_TABLE, 0), behind)
        first = min([*records, stored + 1])
        journal_row = rows.get(JOURNAL_KEY, WalStateRecord())
        last = max([*records, *(row.highest_lsn for row in rows.values()), last_known(journal_row), first - 1])
        missing = last - first + 1 - len(records)
        if missing > GAP_MAX:
            raise CorruptionError(folder, 0, f"{missing} records are missing, more than can be replaced")
        if missing:
            self.lost.append(f"{missing} records of the journal between LSN {first} and {last}")
        for name in self._fs.listdir(folder):
            self._fs.unlink(f"{folder}/{name}")
        self._write_journal(folder, max(1, incarnation), records, first, last)
        # What the manifest says of the journal's ends does not hold any more.
        journal_row = msgspec.structs.replace(journal_row, stored_lsn=first - 1, last_applied_lsn=first - 1, detail=b"")
        journal_row = msgspec.structs.replace(journal_row, durable_lsn=last, highest_lsn=last)
        WAL_STATE.put(view, JOURNAL_KEY, journal_row)

    def _write_journal(self, folder: str, incarnation: int, records: dict[int, Record], first: int, last: int) -> None:
        salt = int.from_bytes(self._random.randbytes(4), "little")
        header = SegmentHeader(first=first, incarnation=incarnation, salt=salt, identity=self._identity, cut=False)
        segment = SegmentWriter.create(self._fs, folder, header, (), allocate_bytes=1 << 20, index_bytes=1 << 16)
        empty = encode(JournalRecord(0, 0, ()))
        for index in range(first, last + 1):
            record = records.get(index)
            if record is None:
                record = Record(
                    index=Index(index), incarnation=incarnation, synced=Index(0), kind=KIND_DATA, flags=0, body=empty
                )
            else:
                empty = record.body[:16] + empty[16:]  # its time and epoch: they never go back
            segment.copy(record)
        segment.seal(last)
        segment.file.close()

    # -- copying

    def copy(self, source: _DamagedStore, target: Store) -> None:
        """Copy every table. Errors of the target end it; what cannot be read of the source is left out and noted."""
        self._target = target
        with source.snapshot() as snapshot:
            port = snapshot._port
            infos = port.tables()
            for number, info in enumerate(infos, 1):
                if (error := source.unreadable(info)) is not None:
                    self.rows[info.name] = 0
                    self.lost.append(f"table {info.name}: {error}")
                    continue
                self._copy_table(port, info)
                if self._progress is not None:
                    rows = sum(self.rows.values())
                    self._progress(CopyProgress(files=number, files_total=len(infos), bytes=rows, bytes_total=rows))

    def _copy_table(self, port: SnapshotReading, info: TableInfo) -> None:
        self.rows[info.name] = 0
        try:
            kind = kind_named(info.kind, info.name)
        except PenstockError as error:  # its package is not installed here
            self.lost.append(f"table {info.name}: {error}")
            return
        self._target.create(
            info.name,
            info.kind,
            shards=info.shards,
            options=info.options,
            storage=info.storage_options,
            encrypted=info.key is not None,
        )
        for shard, partition in enumerate(partitions_of(info)):
            for batches in self._rows_of(port, info, shard, partition):
                rows = pa.Table.from_batches([kind.to_table_schema(batch, info.options, shard) for batch in batches])
                try:
                    self.rows[info.name] += self._target.load(info.name, rows).rows
                except FixTheCall as error:  # the others can still be copied
                    self.lost.append(f"{rows.num_rows} rows of {info.name}, which the new store refuses: {error}")

    def _rows_of(
        self, port: SnapshotReading, info: TableInfo, shard: int, partition: PartitionId
    ) -> Iterator[list[Any]]:
        """Yield the rows of a shard, in pieces of bounded size; from its files, if it cannot be opened."""
        folder, yielded = f"{self._path}/{describe(info, shard).folder}", False
        try:
            for start, end in self._pieces(port, partition, folder):
                for batches in self._ranges(port, info, partition, start, end):
                    yielded = True
                    yield batches
        except _Interrupted:
            raise
        except (PenstockError, OSError) as error:
            self._note(error, folder)
            kind, lost = kind_named(info.kind, info.name), f"shard {shard} of {info.name}"
            if isinstance(kind, FileKeeping) and not yielded:  # else rows would be copied twice
                lost = f"parts of {lost}, and all that is not in its files"
                for batch in kind.rows_in_files(self._fs, folder, self._identity):
                    self._go_on()
                    yield [batch]
            self.lost.append(f"{lost}: {error}")

    def _pieces(self, port: SnapshotReading, partition: PartitionId, folder: str) -> list[tuple[bytes, bytes | None]]:
        """Divide a shard so that each piece fits in memory."""
        count = 1 + self._stored_bytes(folder) // PIECE_BYTES
        return (self._divided(port, partition, count, b"", None) if count > 1 else []) or [(b"", None)]

    def _stored_bytes(self, folder: str) -> int:
        size = 0
        for name in walk(self._fs, folder) if self._fs.exists(folder) else ():
            with suppress(OSError):
                file = self._fs.open(f"{folder}/{name}")
                size += file.size()
                file.close()
        return size

    def _ranges(
        self, port: SnapshotReading, info: TableInfo, partition: PartitionId, start: bytes, end: bytes | None
    ) -> Iterator[list[Any]]:
        """Yield the batches of a key range that can be read; what cannot is noted."""
        self._go_on()
        try:
            batches = [batch for batch in port.scan_arrow(partition, start, end) if batch.num_rows]
        except (Restore, OSError) as error:
            pieces = self._divided(port, partition, PIECES, start, end)
            if len(pieces) < 2:
                if not start and end is None:  # none of the shard can be read this way
                    raise
                self._note(error, self._path)
                self.lost.append(f"rows of {info.name} from key {start!r} to {end!r}: {error}")
                return
            for low, high in pieces:
                yield from self._ranges(port, info, partition, low, high)
            return
        if batches:
            yield batches

    def _divided(
        self, port: SnapshotReading, partition: PartitionId, count: int, start: bytes, end: bytes | None
    ) -> list[tuple[bytes, bytes | None]]:
        try:
            pieces = port.pieces(partition, count, start, end)
        except (Restore, OSError):
            return []
        return [(piece.start, piece.end) for piece in pieces]

    def _go_on(self) -> None:
        if self._stop():
            raise _Interrupted("the salvage was interrupted: give another target, and begin again")


class _Interrupted(Closed):
    """The caller ended the salvage."""
