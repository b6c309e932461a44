"""The LMDB engine: one file, default durability.

A new file is created under another name, with its tables, and renamed: a file under the manifest's name is complete.
While it is open, `<path>.owner` is locked; a clean close writes a stamp of the file there. Damage in an LMDB file can
abort the process or hide rows, so a file without a stamp is examined before it is mapped (see `examine.py`), and the
pages of a file with one are compared with it before LMDB follows them (see `page_sums.py`).

Thread: any. The map may be resized only while no transaction is open in this process, so `_lock` counts readers and a
resize waits for them (new readers wait, except those nested in a `read` of the same thread, which would deadlock).
Invariants: never `sync=False`, `metasync=False` or `writemap=True`: they lose or corrupt commits at a crash.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import lmdb

from penstock.errors import (
    Backpressure,
    Closed,
    CommitFailed,
    CorruptionError,
    DiskFull,
    Invalid,
    ManifestFull,
    OutcomeUnknown,
    PenstockError,
    ProcessLimit,
)
from penstock.host import threads
from penstock.host.clock import Clock
from penstock.host.file_operations import claim
from penstock.host.files import File, FileSystem
from penstock.host.forking import close_on_exec
from penstock.host.open_files import OPEN_FILES
from penstock.host.paths import absolute, parent
from penstock.manifest.engine import TABLES, ReadView
from penstock.manifest.examine import ClosingStamp, check_file, read_stamp
from penstock.manifest.fork import ForkGuard
from penstock.manifest.memory import MemoryView, read_tables
from penstock.manifest.page_sums import FREE_PAGES, UncheckedPages
from penstock.manifest.settings import ManifestSettings

logger = logging.getLogger(__name__)

DELETE_RESERVE_BYTES = 4 << 20  # how far a delete may exceed the limit: it copies pages before it frees them
DISK_FULL_BYTES = 256 << 10  # a commit that fails with less free space has met a full disk
READERS_DRAIN_S = 5.0  # how long a full map, or a close, waits for readers
PAGES_PER_ROW_MAX = 8  # pages that a changed row can take besides its value: no tree is deeper
HEADROOM_DRAIN_S = 0.02  # how long an early resize waits: the next commit can retry
AHEAD_BYTES = 1 << 20  # how far the file is extended ahead of LMDB's last page
AHEAD_BYTES_MIN = AHEAD_BYTES // 16  # with less left, the file is extended
_OPEN = b"open"  # written at opening, replaced by the stamp of a clean close
AHEAD_CHECK_COMMITS = 8  # how often LMDB's last page is checked


class LmdbReadView:
    """A read transaction."""

    def __init__(self, transaction: Any, tables: dict[str, Any], unchecked: UncheckedPages | None) -> None:
        self._transaction = transaction
        self._tables = tables
        self._unchecked = unchecked

    def get(self, table: str, key: bytes) -> bytes | None:
        if self._unchecked is not None:
            self._unchecked.check_read(table, key, key)
        value: bytes | None = self._transaction.get(key, None, self._tables[table])
        return value

    def scan(self, table: str, start: bytes = b"", stop: bytes | None = None) -> Iterator[tuple[bytes, bytes]]:
        if self._unchecked is not None:
            self._unchecked.check_read(table, start, stop)
        with self._transaction.cursor(db=self._tables[table]) as cursor:
            if not cursor.set_range(start):
                return
            for key, value in cursor:
                if stop is not None and key >= stop:
                    return
                yield key, value


class LmdbWriteView(LmdbReadView):
    """A write transaction."""

    def __init__(self, transaction: Any, tables: dict[str, Any], unchecked: UncheckedPages | None) -> None:
        super().__init__(transaction, tables, unchecked)
        self.changed_rows = 0
        self.changed_bytes = 0

    def put(self, table: str, key: bytes, value: bytes) -> None:
        self.put_many(table, [(key, value)])

    def put_many(self, table: str, rows: Sequence[tuple[bytes, bytes]]) -> None:
        self.changed_rows += len(rows)
        self.changed_bytes += sum(len(value) for _, value in rows)
        if self._unchecked is not None:
            self._unchecked.check_table(table)
        with self._transaction.cursor(self._tables[table]) as cursor:
            cursor.putmulti(rows)

    def delete(self, table: str, key: bytes) -> bool:
        self.changed_rows += 1
        if self._unchecked is not None:
            self._unchecked.check_table(table)
        return bool(self._transaction.delete(key, db=self._tables[table]))


class LmdbEngine:
    """The manifest's engine on LMDB."""

    def __init__(self, path: str, settings: ManifestSettings, fs: FileSystem, clock: Clock) -> None:
        self._path = path = absolute(path)
        self._settings = settings
        self._fs = fs
        self._clock = clock
        self._guard = ForkGuard(path)
        self._lock = threads.condition("manifest.readers")
        self._readers = 0  # guarded by _lock
        self._resizing = False  # guarded by _lock: the map is being resized, new readers wait
        self._reading = threading.local()
        self._map_bytes = settings.map_bytes
        self._used_since_check = 0  # upper bound of bytes used by commits since the last check; writing thread only
        self._check_after_bytes = 0.0  # at which the next check is due
        self._file_bytes = 0  # the file's length at the last check
        self._commits = 0  # since the last check of the file's length
        self._panicked = False
        self._unchecked: UncheckedPages | None = None  # None: all pages were checked
        self._env: Any = None  # changed under _lock
        self._file_lock = threading.Lock()  # not _lock: readers do not wait while the file is extended
        self._file: File | None = None  # guarded by _file_lock: the same file, to extend it
        self._owner = fs.lock(_note_path(path))
        try:
            self._prepare()
            self._open_env()
            self._check_readers()
        except BaseException:
            if self._env is not None:
                self._env.close()
            self._close_file()
            if self._unchecked is not None:
                self._unchecked.close()
            self._owner.release()
            raise

    # -- transactions

    @contextmanager
    def read(self) -> Iterator[LmdbReadView]:
        self._guard.check()
        nested, counted = getattr(self._reading, "depth", 0), False
        try:
            with self._lock:
                if not nested and not self._lock.wait_for(lambda: not self._resizing, 2 * READERS_DRAIN_S):
                    raise Backpressure(f"{self._path} is being resized and this takes too long: retry")
                self._check_open()
                env, tables = self._env, self._tables
                self._readers += 1
                counted = True
            self._reading.depth = nested + 1
            with env.begin() as transaction:
                yield LmdbReadView(transaction, tables, self._unchecked)
        except lmdb.Error as error:
            raise self._translated(error) from error
        finally:
            self._reading.depth = nested
            if counted:
                with self._lock:
                    self._readers -= 1
                    if self._resizing or self._env is None:
                        self._lock.notify_all()

    @contextmanager
    def write(self) -> Iterator[LmdbWriteView]:
        self._guard.check()
        self._check_open()
        if self._panicked:
            self._reopen()
        transaction = None
        try:
            if self._unchecked is not None:
                self._unchecked.check_table(FREE_PAGES)
            transaction = self._env.begin(write=True)
            view = LmdbWriteView(transaction, self._tables, self._unchecked)
            yield view
            transaction.commit()
        except BaseException as error:
            if transaction is not None:
                transaction.abort()
            if isinstance(error, lmdb.Error) and not isinstance(error, lmdb.MapFullError) and self._has_panicked():
                with suppress(CommitFailed):  # readers are open: the next write retries
                    self._reopen()
                raise OutcomeUnknown(f"{self._path}: a commit failed in its last step: check if it happened") from error
            if isinstance(error, lmdb.Error):
                raise self._translated(error) from error
            raise
        with suppress(Exception):  # the commit is done and must not fail: resizing early is optional
            self._keep_headroom(view.changed_rows * PAGES_PER_ROW_MAX * self._page_bytes + view.changed_bytes)

    def _has_panicked(self) -> bool:
        """Return whether LMDB has panicked: it reports that at the next transaction, not at the failed commit."""
        try:
            self._env.begin(write=True).abort()
        except lmdb.PanicError:
            self._panicked = True
        except lmdb.Error:
            pass  # another error, which the next commit will report
        return self._panicked

    def _translated(self, error: Exception) -> Exception:
        if isinstance(error, lmdb.MapFullError):
            return ManifestFull(
                f"{self._path} is at its limit of {self._map_bytes} bytes: delete something or raise map_bytes_max"
            )
        if isinstance(error, lmdb.CorruptedError | lmdb.PageNotFoundError | lmdb.InvalidError):
            return CorruptionError(self._path, 0, str(error))
        if isinstance(error, lmdb.ReadersFullError):
            return Backpressure(f"{self._path} has {self._settings.readers_max} readers (readers_max): retry later")
        if isinstance(error, lmdb.BadValsizeError):
            return Invalid(f"{self._path}: a key has 1 to {self._env.max_key_size()} bytes")
        full = (self._fs.free_bytes(self._path) or DISK_FULL_BYTES) < DISK_FULL_BYTES  # a short write is an EIO here
        if isinstance(error, lmdb.DiskError) or full:
            return DiskFull(f"{self._path}: the disk is full, nothing was committed: free some space")
        return CommitFailed(f"{self._path}: nothing was committed ({error}): check the disk, then retry")

    # -- the map

    def grow(self, *, for_deletes: bool) -> bool:
        limit = self._settings.map_bytes_max
        if self._map_bytes < limit:
            size = min(self._map_bytes * 2, limit)
        else:
            size = max(limit, self._used_bytes()) + DELETE_RESERVE_BYTES
            if not for_deletes or self._map_bytes >= size:
                return False
        if getattr(self._reading, "depth", 0):
            return False  # this thread commits inside its own read: it would wait for itself
        if not self._resize_map(size, READERS_DRAIN_S):
            raise Backpressure(f"{self._path} must grow, but a read transaction is still open: end it, then retry")
        return True

    def _used_bytes(self) -> int:
        return (int(self._env.info()["last_pgno"]) + 1) * self._page_bytes

    def _keep_headroom(self, taken_bytes: int) -> None:
        """Grow early, so that commits rarely meet a full map; and shrink back from the reserve of deletes.

        LMDB is asked for its used size only when commits may have used enough since: that call releases the
        interpreter lock, too.
        """
        self._used_since_check += taken_bytes
        self._commits += 1
        if self._used_since_check < self._check_after_bytes and self._commits < AHEAD_CHECK_COMMITS:
            return
        limit, used = self._settings.map_bytes_max, self._used_bytes()
        if self._map_bytes > max(limit, used):
            self._resize_map(max(limit, used), HEADROOM_DRAIN_S)
        elif self._map_bytes < limit and used > self._map_bytes * (1.0 - self._settings.headroom_ratio):
            self._resize_map(min(self._map_bytes * 2, limit), HEADROOM_DRAIN_S)
        room = self._map_bytes * (1.0 - self._settings.headroom_ratio) - used
        self._used_since_check, self._check_after_bytes = 0, limit if self._map_bytes == limit else room
        if self._commits >= AHEAD_CHECK_COMMITS:
            self._commits = 0
            self._write_ahead(used)

    def _write_ahead(self, used: int) -> None:
        """Extend the file before LMDB does: syncing a file that grew also commits the file system's journal.

        Bytes behind the last page mean nothing to LMDB, and the next commit's sync covers them.
        """
        if used + AHEAD_BYTES_MIN <= self._file_bytes or used + AHEAD_BYTES_MIN > self._map_bytes:
            return
        with self._file_lock:  # it must not be closed meanwhile
            if self._file is not None:
                self._file_bytes = claim(self._file, self._file.size(), used, AHEAD_BYTES_MIN, AHEAD_BYTES)

    def _resize_map(self, size: int, drain_s: float) -> bool:
        if getattr(self._reading, "depth", 0):
            return False  # this thread commits inside its own read: it would wait for itself
        with self._lock:
            self._resizing = True
            try:
                if not self._lock.wait_for(lambda: self._readers == 0, drain_s):
                    return False  # a long read: the caller may get ManifestFull and retry
                self._env.set_mapsize(size)
                self._map_bytes = size
                self._check_after_bytes = 0
                return True
            finally:
                self._resizing = False
                self._lock.notify_all()

    # -- maintenance

    def maintain(self) -> None:
        try:
            self._check_rest()
        except CorruptionError:
            return  # stored: every later use raises it
        self._check_readers()

    def _check_readers(self) -> None:
        """Release the slots of readers that died."""
        with self._lock:
            self._check_open()
            if not self._panicked:  # the next write reopens it
                self._env.reader_check()

    def _check_rest(self) -> None:
        """Compare the pages that were not compared since the opening."""
        unchecked = self._unchecked
        if unchecked is not None:
            try:
                unchecked.check_rest()
            except CorruptionError as error:
                logger.error("%s", error)
                raise
            self._unchecked = None
            unchecked.close()  # another thread may still use it: every page was compared

    def copy(self, target: str) -> None:
        with self.read():  # so that the map is not resized meanwhile
            self._check_rest()
            self._env.copy(target, compact=True)

    def read_copy(self, path: str) -> ReadView:
        return MemoryView(read_tables(self._fs, path))

    def close(self) -> None:
        if self._guard.is_child():
            return  # the file and its lock are the parent's
        with self._lock:
            env, self._env = self._env, None
            if env is None:
                return
        try:
            with self._lock:
                self._lock.wait_for(lambda: self._readers == 0, READERS_DRAIN_S)
                self._close_file()
            env.close()
            self._leave_stamp()
        finally:
            if self._unchecked is not None:
                self._unchecked.close()
            self._owner.release()

    def _leave_stamp(self) -> None:
        """Write the stamp of a clean close. If that fails, the next opening examines the file."""
        if self._unchecked is not None and self._unchecked.damage is not None:
            return
        try:
            file = self._fs.open(self._path, write=True)
            try:
                file.fsync()  # the sums also cover pages that no commit synced
                stamp = ClosingStamp.of(file, self._unchecked)
            finally:
                file.close()
            _write_note(self._fs, self._path, stamp.encode())
        except Closed:  # the folder is gone: the caller that closes the store must know
            raise
        except (OSError, PenstockError) as error:
            logger.warning(
                "%s: no stamp was written at its close (%s): the next opening examines it", self._path, error
            )

    def _close_file(self) -> None:
        with self._file_lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def _check_open(self) -> None:
        if self._env is None:
            raise Closed(f"{self._path} is closed: open it again")
        if self._unchecked is not None:
            self._unchecked.raise_damage()

    # -- opening

    def _prepare(self) -> None:
        """Create the file, or check that it is safe to map."""
        noted, stamp = read_stamp(self._fs, _note_path(self._path))
        if self._fs.exists(self._path):
            self._unchecked = check_file(self._fs, self._path, stamp)
        elif noted or self._fs.exists(backup_path(self._path, 1)):
            raise CorruptionError(self._path, 0, "the file is missing, but files that belong to it exist")
        else:
            self._create()
        if noted != _OPEN:
            _write_note(self._fs, self._path, _OPEN)
            self._fs.fsync_dir(parent(self._path))

    def _create(self) -> None:
        fresh = self._path + ".new"
        self._remove(fresh)
        try:
            env = lmdb.open(fresh, subdir=False, map_size=self._map_bytes, max_dbs=len(TABLES))
            for name in TABLES:
                env.open_db(name.encode())
            env.close()
        except lmdb.Error as error:
            raise OSError(max(getattr(error, "code", 0), 0) or errno.EIO, str(error), fresh) from error
        self._fs.rename(fresh, self._path)  # LMDB has synced it
        self._fs.fsync_dir(parent(self._path))
        self._remove(fresh)

    def _remove(self, path: str) -> None:
        for name in (path, path + "-lock"):
            if self._fs.exists(name):
                self._fs.unlink(name)

    def _open_env(self) -> None:
        try:
            self._env = OPEN_FILES.with_descriptor(self._map_env)
            self._tables = {name: self._env.open_db(name.encode(), create=False) for name in TABLES}
        except lmdb.Error as error:
            if "already open in this process" in str(error):  # by the parent: a forked child cannot close it
                raise Closed(
                    f"{self._path} was open before this process was forked: use penstock.connect, or open it in a "
                    "process that is started anew"
                ) from None
            if getattr(error, "code", 0) > 0:  # a system error: the file may be intact
                raise OSError(error.code, str(error), self._path) from error
            raise CorruptionError(self._path, 0, f"LMDB cannot open it ({error})") from error
        close_on_exec(self._path)
        self._close_file()
        self._file = self._fs.open(self._path, write=True)  # now: later the name may belong to another file
        self._map_bytes = int(self._env.info()["map_size"])  # LMDB never uses less than the file needs
        self._page_bytes = int(self._env.stat()["psize"])
        self._check_after_bytes = 0
        self._panicked = False

    def _map_env(self) -> Any:
        try:
            return lmdb.open(
                self._path,
                subdir=False,
                map_size=self._map_bytes,
                max_dbs=len(TABLES),
                max_readers=self._settings.readers_max,
                max_spare_txns=16,
            )
        except lmdb.Error as error:
            code = getattr(error, "code", 0)
            if code == errno.ENOMEM:
                raise ProcessLimit(f"{self._path} cannot be mapped ({error}): raise the limit (ulimit -v)") from error
            if code > 0:  # a system error, not LMDB's: a shortage or a failing disk, not damage
                raise OSError(code, str(error), self._path) from error
            raise

    def _reopen(self) -> None:
        """Reopen after a panic, when LMDB refuses everything; the disk has a whole commit, the last or the previous."""
        with self._lock:
            self._resizing = True
            try:
                if not self._lock.wait_for(lambda: self._readers == 0, READERS_DRAIN_S):
                    raise CommitFailed(f"{self._path} must be reopened, but read transactions are still open: retry")
                self._env.close()
                self._open_env()
            finally:
                self._resizing = False
                self._lock.notify_all()


def _note_path(path: str) -> str:
    return path + ".owner"


def _write_note(fs: FileSystem, path: str, note: bytes) -> None:
    """Write the state of the file. After a crash it may be incomplete: then the file is examined."""
    file = fs.open(_note_path(path), write=True)
    try:
        file.pwrite(note, 0)
        file.truncate(len(note))
        file.fsync()
    finally:
        file.close()


def remove_stamp(fs: FileSystem, path: str) -> None:
    """Make the next opening examine the file. Requires: its owner's lock."""
    _write_note(fs, path, _OPEN)


def backup_path(path: str, age: int) -> str:
    """Return the name of a backup; 1 is the newest."""
    return f"{path}.backup-{age}"
