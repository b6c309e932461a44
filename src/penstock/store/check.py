"""A check of a whole store while it is open: every rule of the manifest, every byte of every file, every stray file.

Files come and go meanwhile. One that is missing, or listed nowhere, counts only if that is still so at a second
look.

Thread: any. Nothing is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from penstock.archive.container import open_chunk
from penstock.archive.table_keys import key_number
from penstock.errors import Closed, CorruptionError, NotFound, PenstockError, Restore
from penstock.host.file_errors import unreadable
from penstock.host.file_operations import walk
from penstock.kinds import FileKeeping, partitions_of
from penstock.log.damage import damaged_segments
from penstock.lsm.index import Index
from penstock.lsm.maintenance import Maintenance
from penstock.lsm.sstable import Sstable
from penstock.lsm.writer import index_path
from penstock.manifest.invariants import check_all
from penstock.manifest.keys import ChunkKey
from penstock.manifest.records import ChunkEntryRecord, Evicted
from penstock.manifest.tables import CHUNKS
from penstock.partition.aside import FOLDER as ASIDE
from penstock.partition.aside import Trouble
from penstock.partition.reference import files_of
from penstock.partition.roster import describe
from penstock.registry import kind_named
from penstock.store.archive_run import STAGING
from penstock.store.archive_url import ARCHIVE_FILE
from penstock.store.archived_tables import CACHE
from penstock.store.backup import WAIT_S, BackupSource, snapshot_folders
from penstock.store.backup_folder import CopyProgress, Progress
from penstock.store.following import RAFT_FILE
from penstock.store.object_collection import UNNEEDED_FILE
from penstock.store.reports import CheckReport, FileDamage

_ATTEMPTS = 10  # to read a log whose last segment is replaced meanwhile
_ROOT_FILES = frozenset(
    {
        *(ARCHIVE_FILE, UNNEEDED_FILE, f"{UNNEEDED_FILE}.tmp"),
        *("LOCK", "MEMBER", "OPENING", "RESERVE", "STORE", "TIME", RAFT_FILE, f"{RAFT_FILE}.new"),
    }
)
_ROOT_FOLDERS = frozenset({STAGING, "aside", CACHE, "journal", "run", "tables"})


class StoreCheck:
    """One check that is being made."""

    def __init__(
        self,
        source: BackupSource,
        maintenance: Maintenance,
        *,
        progress: Progress | None,
        stop: Callable[[], bool],
    ) -> None:
        self._source = source
        self._maintenance = maintenance
        self._progress = progress
        self._stop = stop
        self._damage: dict[tuple[str, str], FileDamage] = {}
        self._done = CopyProgress(files=0, files_total=0, bytes=0, bytes_total=0)

    def run(self, troubles: Callable[[], list[Trouble]]) -> CheckReport:
        """Check everything."""
        source = self._source
        paths = list(walk(source.fs, source.root))  # first: what is named later is not missed
        rows = source.manifest.read(lambda view: list(CHUNKS.scan(view)))
        files = [(key, row) for key, row in rows if not row.staged]
        self._done = replace(self._done, files_total=len(files), bytes_total=sum(row.size_bytes for _, row in files))
        for broken in source.manifest.read(lambda view: list(check_all(view))):
            self._add(source.manifest.path, broken)
        for key, row in files:
            self._check_sstable(key, row)
        own = set(self._check_own_files())
        self._check_snapshots()
        self._check_logs()
        orphans = self._orphans(paths, own)
        return CheckReport(
            troubles=troubles(),
            damage=list(self._damage.values()),
            orphans=orphans,
            files=self._done.files,
            bytes=self._done.bytes,
        )

    # -- sstables

    def _check_sstable(self, key: ChunkKey, row: ChunkEntryRecord) -> None:
        path, expected = f"{self._source.root}/{row.file_name}", key_number(key.db_id, row.encrypted)
        is_evicted = isinstance(row.residency, Evicted) and not self._source.fs.exists(path)
        damage: list[tuple[str, str]] = []
        try:
            if is_evicted:
                self._read_index(index_path(path), expected)
            else:
                damage = self._damage_in(path, key.chunk_id, expected)
        except FileNotFoundError as error:
            reason = "the manifest lists this file, and it is missing"
            if is_evicted:
                path, reason = index_path(path), "the index of an evicted file is missing"
            damage = [(error.filename or path, reason)]
        except CorruptionError as error:
            damage = [(error.path, _reason(error))]
        except Restore as error:
            damage = [(path, str(error))]
        except OSError as error:
            damage = [_damage_of(error, path)]
        if damage and self._source.manifest.get_chunk(key) == row:  # else it was replaced and removed meanwhile
            for where, reason in damage:
                self._add(where, reason)
        self._count(0 if is_evicted else row.size_bytes)

    def _damage_in(self, path: str, chunk_id: int, key: int) -> list[tuple[str, str]]:
        """Return what is wrong with the pages of an sstable; raise what is wrong with all of it."""
        table = Sstable.open(path, fs=self._source.fs, key=key)
        try:
            damage = [(error.path, _reason(error)) for error in table.damaged_pages()]
            if (table.summary.store, table.summary.chunk_id) != (self._source.identity, chunk_id):
                damage.append((path, f"this is not the file that the manifest lists as chunk {chunk_id}"))
        finally:
            table.close()
        return damage

    def _read_index(self, path: str, key: int) -> None:
        """Read what the folder has of an evicted file, and raise what is wrong; `verify_archive` reads its object."""
        chunk = open_chunk(self._source.fs, path, key=key)
        try:
            index = Index(chunk)
            for number in range(index.pages):
                index.recheck(number)
        finally:
            chunk.close()

    # -- files of kinds

    def _check_own_files(self) -> Iterator[str]:
        """Check the files that kinds keep beside the manifest, and yield their paths."""
        port = self._source.port
        for info in port.tables():
            kind = kind_named(info.kind, info.name)
            if not isinstance(kind, FileKeeping):
                continue
            for partition in partitions_of(info):
                try:
                    machine = port.machine(partition)
                    for where, reason in kind.damaged_files(machine):
                        self._add(where, reason)
                    for file in kind.own_files(machine):
                        yield file.path
                        self._count(file.size, more=True)
                except (PenstockError, OSError) as error:
                    if port.table_by_id(info.table_id) is not None and not isinstance(error, Closed):
                        folder = f"{self._source.root}/{info.storage_options.chunk_dir}/{info.table_id}"
                        damage = _damage_of(error, folder) if isinstance(error, OSError) else (folder, str(error))
                        self._add(*damage)

    def _check_snapshots(self) -> None:
        for info in self._source.port.tables():
            for shard in range(info.shards):
                try:
                    for error in self._source.snapshots.damaged(describe(info, shard)):
                        self._add(error.path, _reason(error))
                except OSError as error:  # its header
                    self._add(*_damage_of(error, f"{self._source.root}/{describe(info, shard).folder}"))
                self._go_on()

    # -- logs

    def _check_logs(self) -> None:
        source = self._source
        for folder in self._spill_folders():
            with source.checkpoint.held_off(WAIT_S):  # a spill is appended to by a checkpoint alone
                self._check_log(folder)
        with source.aside.unchanged:
            if source.fs.exists(f"{source.root}/{ASIDE}"):
                self._check_log(ASIDE)
        self._check_journal()

    def _check_log(self, folder: str) -> None:
        """Check a log that nobody appends to. Opening its shard meanwhile may replace its last segment."""
        for left in reversed(range(_ATTEMPTS)):
            try:
                damage = list(damaged_segments(self._source.fs, f"{self._source.root}/{folder}", self._source.identity))
            except FileNotFoundError as error:
                if left:
                    self._go_on()
                    continue
                damage = [CorruptionError(error.filename or folder, 0, "it is missing")]
            for each in damage:
                self._add(each.path, _reason(each))
            return

    def _check_journal(self) -> None:
        """Read the records that were durable when this began, except those that are dropped meanwhile."""
        consensus = self._source.consensus
        at, last = int(consensus.first), int(consensus.committed)
        while at <= last:
            try:
                for lsn, _ in consensus.records(at):
                    at = lsn + 1
                    self._go_on()
                    if at > last:
                        break
                return
            except NotFound as error:  # its beginning was dropped
                if consensus.first <= at:
                    self._add(f"{self._source.root}/journal", str(error))
                    return
                at = int(consensus.first)
            except CorruptionError as error:
                self._add(error.path, _reason(error))
                return
            except OSError as error:
                self._add(*_damage_of(error, f"{self._source.root}/journal"))
                return

    def _spill_folders(self) -> Iterable[str]:
        fs, root = self._source.fs, self._source.root
        for info in self._source.port.tables():
            for shard in range(info.shards):
                folder = describe(info, shard).log_folder
                if fs.exists(f"{root}/{folder}"):
                    yield folder

    # -- orphans

    def _orphans(self, paths: list[str], own: set[str]) -> list[str]:
        """Return the files that existed when the check began, still do, and are named by nothing."""
        source = self._source
        in_use = {chunk_id for tree, _ in self._maintenance.trees() for chunk_id in tree.use.ids()}
        rows = source.manifest.read(lambda view: [row for _, row in CHUNKS.scan(view)])
        listed = {name for row in rows for name in files_of(row.file_name)}
        snapshots = source.manifest.read(snapshot_folders)
        folders, waiting = [f"{folder}/" for folder in (*self._spill_folders(), *snapshots)], source.dropped.folders()
        return [
            path
            for path in paths
            if path not in listed
            and path not in own
            and not path.startswith((*folders, *waiting))
            and not _is_known(path, in_use)
            and source.fs.exists(f"{source.root}/{path}")
        ]

    # -- counting

    def _add(self, path: str, reason: str) -> None:
        self._damage.setdefault((path, reason), FileDamage(path, reason))

    def _count(self, size: int, *, more: bool = False) -> None:
        """Count a file; `more`: it is not in the totals yet."""
        done = self._done
        self._done = CopyProgress(
            files=done.files + 1,
            files_total=done.files_total + more,
            bytes=done.bytes + size,
            bytes_total=done.bytes_total + size * more,
        )
        if self._progress is not None:
            self._progress(self._done)
        self._go_on()

    def _go_on(self) -> None:
        if self._stop():
            raise Closed("the check was interrupted, or the store was closed: begin it again")


def _reason(error: CorruptionError) -> str:
    return f"byte {error.offset}: {error.reason}"


def _damage_of(error: OSError, path: str) -> tuple[str, str]:
    damage = unreadable(error, path)
    return damage.path, damage.reason


def _is_known(path: str, in_use: set[int]) -> bool:
    """Whether a file that no row names belongs to the store all the same."""
    first, _, rest = path.partition("/")
    if first != "tables":
        return (first in _ROOT_FOLDERS) if rest else first in _ROOT_FILES or first.startswith("manifest")
    name = path.rpartition("/")[2]
    if name.startswith("manifest."):  # of a queue
        return True
    number = name.partition(".")[0]
    return number.isdecimal() and len(number) == 20 and int(number) in in_use
