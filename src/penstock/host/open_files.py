"""Open files within the limit of the process: a file has a descriptor while it is used, and as long as there is room.

A store keeps files "open" for as long as it likes: the growing file of every queue shard, logs, blocks of sealed
sstables. Only so many of them have a descriptor, by a budget out of the process's limit. When another is needed, the
file that was idle longest gives its descriptor up, and gets one again at its next use, by its name.

A file that was written and not synced is synced before it gives its descriptor up: Linux reports a failed write to the
descriptors that were open then, and one that is opened later may never hear of it. Should a sync fail, that one or one
that was asked for, the file remembers, and whoever uses it next is told: nothing is tried again.

When the process has no descriptor left in spite of the budget, because others took them, idle files are closed, and
after a short wait the caller gets `ProcessLimit`. An operation takes its descriptor before it does anything, so that
nothing has changed then. A caller of several operations that must not stop between them takes it first: `File.pin`.

Thread: any. One lock guards the accounts, and is never held during I/O: a file on its way in or out is `moving`, and
those who want it look again. No condition is waited for: an interrupt could leave its lock taken. The garbage
collector, which frees a file at any line of any thread, takes no lock: it makes a note, and the next call closes it.
Invariants: (1) a descriptor is closed only while nobody uses it. (2) an idle file without a descriptor is synced, or
has its failure. (3) a name that leads to another file by now is a `FileNotFoundError`, never that other file; files are
told apart by their inodes, so no name of an open file is unlinked and then given to a new one.
"""

from __future__ import annotations

import errno
import resource
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from penstock.errors import ProcessLimit
from penstock.host import threads

if TYPE_CHECKING:
    from penstock.host.files import Buffer, File, FileSystem, Folder, Lock

T = TypeVar("T")

OPEN_MIN, OPEN_MAX = 8, 1 << 16
WAIT_S = 1.0  # for a descriptor, before the caller is told that there is none
_PAUSE_S = 0.01
_MOVING_S = 0.0005  # a file is opened, or synced and closed, in about this
_SHORTAGE = (errno.EMFILE, errno.ENFILE)


def open_files_max() -> int:
    """How many files may have a descriptor: half of the process's limit. The rest is for sockets, LMDB and others."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return OPEN_MAX if soft == resource.RLIM_INFINITY else min(max(soft // 2, OPEN_MIN), OPEN_MAX)


class _Account:
    """What is known of one file."""

    __slots__ = ("closed", "dirty", "failure", "identity", "moving", "raw", "reopen", "users", "wrote")

    def __init__(self, raw: File, reopen: Callable[[], File]) -> None:
        # Guarded by the lock of `OpenFiles`, but for `dirty` and `wrote`, which change while it is used.
        self.raw: File | None = raw
        self.reopen = reopen
        self.identity = raw.identity()
        self.users = 0
        self.moving = False
        self.closed = False
        self.dirty = False  # written since the last sync
        self.wrote = False  # written at all
        self.failure: BaseException | None = None  # of a sync: it is never used again

    def sync(self, act: Callable[[], None]) -> None:
        try:
            self.dirty = False  # before the act: what is written beside it makes it dirty again
            act()
        except OSError as error:
            self.failure = error  # final: nobody syncs these bytes again, or reads what may be gone
            raise
        except BaseException:
            self.dirty = True  # interrupted: nobody knows how far it came
            raise


class OpenFiles:
    """The files of a process that have a descriptor."""

    def __init__(self, files_max: Callable[[], int] = open_files_max, *, wait_s: float = WAIT_S) -> None:
        self._files_max = files_max
        self._wait_s = wait_s
        self._abandoned: deque[_Account] = deque()  # of files that were freed and not closed; guarded by nothing
        self._forget_all()
        threads.after_fork(self, OpenFiles._forget_all)

    def _forget_all(self) -> None:
        """In a forked child too: a sync there could hide an error from the parent, so that nothing is closed there."""
        self._lock = threads.lock("host.open_files")
        self._open = 0  # guarded by _lock: how many have a descriptor
        # Guarded by _lock: those that nobody uses, the longest idle first.
        self._clean: OrderedDict[_Account, None] = OrderedDict()
        self._dirty: OrderedDict[_Account, None] = OrderedDict()
        self._abandoned.clear()

    @property
    def count(self) -> int:
        """How many files have a descriptor."""
        return self._open

    # -- opening

    def obtain(self, take: Callable[[], T]) -> T:
        """Call `take`, which takes a descriptor; where there is none, make room and call it again."""
        deadline_s = 0.0
        while True:
            try:
                return take()
            except OSError as error:
                if error.errno not in _SHORTAGE:
                    raise
                if self._close_one():
                    continue
                deadline_s = deadline_s or time.monotonic() + self._wait_s
                if time.monotonic() >= deadline_s:
                    raise ProcessLimit(
                        f"no descriptor for {error.filename or 'a file'} ({error.strerror}), nothing was changed: "
                        "close other files or sockets, or raise the limit (ulimit -n)"
                    ) from error
            time.sleep(_PAUSE_S)

    def admit(self, take: Callable[[], File], reopen: Callable[[], File]) -> _Account:
        """An account for a file that `take` opens, and `reopen` opens again."""
        self._close_abandoned()
        self._make_room()
        account = _Account(self.obtain(take), reopen)
        with self._lock:
            self._open += 1
            self._clean[account] = None
        return account

    def _make_room(self) -> None:
        while self._open >= self._files_max() and self._close_one():
            pass

    def lend(self, account: _Account, path: str, *, for_sync: bool) -> File | None:
        """The file with a descriptor, which stays until `take_back`.

        `for_sync`: None for a file that was synced when it gave its descriptor up: a sync then takes none.
        """
        mine = False
        try:
            while not mine:
                with self._lock:
                    if not account.moving:
                        self._check(account, path)
                        raw = account.raw
                        if raw is not None:
                            account.users += 1
                            self._clean.pop(account, None)
                            self._dirty.pop(account, None)
                            return raw
                        if for_sync and account.wrote:
                            return None
                        mine = account.moving = True
                if not mine:
                    time.sleep(_MOVING_S)  # somebody opens or closes it
            return self._reopen(account, path)
        finally:
            if mine:
                with self._lock:
                    account.moving = False

    def _check(self, account: _Account, path: str) -> None:
        if account.closed and account.failure is None:
            raise OSError(errno.EBADF, "the file is closed", path)
        if account.failure is not None or (account.raw is None and account.dirty):
            raise OSError(errno.EIO, f"a sync failed before ({account.failure})", path) from account.failure

    def _reopen(self, account: _Account, path: str) -> File:
        self._make_room()
        raw = self.obtain(account.reopen)
        if raw.identity() != account.identity:
            raw.close()
            raise FileNotFoundError(errno.ENOENT, "another file has its name by now", path)
        with self._lock:
            account.raw, account.users = raw, 1
            self._open += 1
        return raw

    def take_back(self, account: _Account) -> None:
        with self._lock:
            account.users -= 1
            if account.users or account.raw is None:
                return
            if not account.closed:
                (self._dirty if account.dirty else self._clean)[account] = None
                return
            raw = self._take_raw(account)
        raw.close()

    # -- closing

    def _take_raw(self, account: _Account) -> File:
        """Requires: _lock, and that nobody uses it."""
        raw, account.raw = account.raw, None
        assert raw is not None
        self._open -= 1
        self._clean.pop(account, None)
        self._dirty.pop(account, None)
        return raw

    def _close_one(self) -> bool:
        """Close the file that was idle longest, one that needs no sync if there is any; False if all are in use."""
        self._close_abandoned()
        account: _Account | None = None
        try:
            with self._lock:
                idle = self._clean or self._dirty
                if not idle:
                    return False
                account = next(iter(idle))
                account.moving = True
                raw = self._take_raw(account)
            self._sync_and_close(account, raw)
            return True
        finally:
            if account is not None:
                with self._lock:
                    account.moving = False

    def _sync_and_close(self, account: _Account, raw: File) -> None:
        try:
            if account.dirty and not account.closed:
                raw.fdatasync()
            account.dirty = False
        except OSError as error:  # told to whoever uses that file next: this caller has nothing to do with it
            account.failure = error
        except BaseException:  # an interrupt: it keeps its descriptor
            with self._lock:
                account.raw = raw
                self._open += 1
                self._dirty[account] = None
            raise
        raw.close()

    def _close_abandoned(self) -> None:
        while self._abandoned:
            with self._lock:
                raw = self._take_abandoned()
            if raw is not None:
                raw.close()

    def _take_abandoned(self) -> File | None:
        """The descriptor of a file that was freed. Requires: _lock."""
        if not self._abandoned:
            return None
        account = self._abandoned.popleft()
        account.closed = True
        account.users = 0  # nobody can use it: whoever is counted was interrupted before he could say that he is done
        return None if account.raw is None else self._take_raw(account)

    def close(self, account: _Account) -> None:
        """Close a file for good, when the last who uses it right now is done."""
        with self._lock:
            account.closed = True
            raw = None if account.raw is None or account.users else self._take_raw(account)
        if raw is not None:
            raw.close()
        self._close_abandoned()  # last: an interrupt of it must not keep this one open

    def abandon(self, account: _Account) -> None:
        """As `close`, by the garbage collector: perhaps in the middle of another call of this thread.

        It takes no lock: an interrupt right behind a try to take it would leave it taken for good, and be swallowed.
        """
        self._abandoned.append(account)


OPEN_FILES = OpenFiles()


class BoundedFile:
    """A file that has a descriptor while it is used, and perhaps between uses."""

    def __init__(self, files: OpenFiles, fs: FileSystem, path: str, *, write: bool, create: bool = False) -> None:
        self._files = files
        self._path = path
        take = (lambda: fs.create(path)) if create else (lambda: fs.open(path, write=write))
        reference = [path]  # and not `self`: the account must not keep its file alive
        self._reference = reference
        self._account = files.admit(take, lambda: fs.open(reference[0], write=write))

    @property
    def path(self) -> str:
        return self._path

    def moved(self, path: str) -> None:
        self._path = self._reference[0] = path

    @contextmanager
    def pin(self) -> Iterator[None]:
        self._lend()
        try:
            yield
        finally:
            self._files.take_back(self._account)

    def _lend(self) -> File:
        raw = self._files.lend(self._account, self._path, for_sync=False)
        assert raw is not None
        return raw

    def size(self) -> int:
        raw = self._lend()
        try:
            return raw.size()
        finally:
            self._files.take_back(self._account)

    def identity(self) -> tuple[int, int]:
        return self._account.identity

    def pread(self, size: int, offset: int) -> bytes:
        raw = self._lend()
        try:
            return raw.pread(size, offset)
        finally:
            self._files.take_back(self._account)

    def map(self, size: int) -> memoryview:
        raw = self._lend()
        try:
            return raw.map(size)
        finally:
            self._files.take_back(self._account)

    def _change(self, act: Callable[[File], None]) -> None:
        raw, account = self._lend(), self._account
        try:
            act(raw)
        finally:
            account.dirty = account.wrote = True  # after the act: a sync beside it may have missed it
            self._files.take_back(account)

    def pwrite(self, data: Buffer, offset: int) -> None:
        self._change(lambda raw: raw.pwrite(data, offset))

    def truncate(self, size: int) -> None:
        self._change(lambda raw: raw.truncate(size))

    def allocate(self, offset: int, size: int) -> None:
        self._change(lambda raw: raw.allocate(offset, size))

    def fsync(self) -> None:
        self._sync(lambda raw: raw.fsync())

    def fdatasync(self) -> None:
        self._sync(lambda raw: raw.fdatasync())

    def write_synced(self, pieces: Sequence[Buffer], offset: int) -> None:
        raw, account = self._lend(), self._account
        try:
            account.dirty = account.wrote = True
            for piece in pieces:
                raw.pwrite(piece, offset)
                offset += len(piece)
            account.sync(raw.fdatasync)
        finally:
            self._files.take_back(account)

    def _sync(self, act: Callable[[File], None]) -> None:
        account = self._account
        raw = self._files.lend(account, self._path, for_sync=True)
        if raw is None:
            return
        try:
            account.sync(lambda: act(raw))
        finally:
            self._files.take_back(account)

    def close(self) -> None:
        self._files.close(self._account)

    def __del__(self) -> None:
        if "_account" in self.__dict__:  # else it was never opened
            self._files.abandon(self._account)


class BoundedFileSystem:
    """A file system whose open files share a budget."""

    def __init__(self, inner: FileSystem, files: OpenFiles) -> None:
        self._inner = inner
        self._files = files

    def create(self, path: str) -> File:
        return BoundedFile(self._files, self._inner, path, write=True, create=True)

    def open(self, path: str, *, write: bool = False) -> File:
        return BoundedFile(self._files, self._inner, path, write=write)

    def rename(self, source: str, target: str) -> None:
        self._inner.rename(source, target)

    def unlink(self, path: str) -> None:
        self._inner.unlink(path)

    def listdir(self, path: str) -> list[str]:
        return self._files.obtain(lambda: self._inner.listdir(path))

    def exists(self, path: str) -> bool:
        return self._inner.exists(path)

    def mkdir(self, path: str) -> None:
        self._inner.mkdir(path)

    def rmdir(self, path: str) -> None:
        self._inner.rmdir(path)

    def folder(self, path: str) -> Folder:
        return self._files.obtain(lambda: self._inner.folder(path))

    def fsync_dir(self, path: str) -> None:
        with self.folder(path) as folder:
            folder.fsync()

    def free_bytes(self, path: str) -> int | None:
        return self._inner.free_bytes(path)

    def lock(self, path: str) -> Lock:
        return self._files.obtain(lambda: self._inner.lock(path))
