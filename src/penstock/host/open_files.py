"""A descriptor cache: open files share a limited number of descriptors.

A store keeps files open for long: the growing file of every queue shard, logs, blocks of sealed sstables. Only some of
them have a descriptor, within a budget taken from the process's limit. When another is needed, the least recently used
idle file is closed, and reopened by name at its next use.

A file with unsynced writes is synced before its descriptor is closed: Linux reports a failed write-back to descriptors
that were open at that time, and one opened later may never see the error. If that sync or any other fails, the file
keeps the error and every later use raises it: nothing is retried.

When the process has no descriptor left in spite of the budget, because other code took them, idle files are closed, and
after a short wait the caller gets `ProcessLimit`. Every operation acquires its descriptor before it changes anything. A
caller with several operations that must not stop in between acquires it first: `File.pin`.

Thread: any. One lock guards all states and is never held during I/O: a file that is being opened or closed is `moving`,
and threads that want it poll. Nothing waits on a condition, because an interrupt could leave its lock taken. The
garbage collector, which frees files at any line of any thread, takes no lock: it appends to a list, and the next call
closes.
Invariants: (1) a descriptor is closed only while nothing uses it. (2) an idle file without a descriptor is synced, or
has its error. (3) a name that leads to another file by now is a `FileNotFoundError`, never that other file. Inodes tell
files apart, and the system uses them again: so no name of an open file is unlinked and then given to a new file.
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
from penstock.host.clock import SystemClock
from penstock.host.waiting import Retries

if TYPE_CHECKING:
    from penstock.host.files import Buffer, File, FileSystem, Folder, Lock

T = TypeVar("T")

OPEN_MIN, OPEN_MAX = 8, 1 << 16
WAIT_S = 1.0  # for a descriptor, before `ProcessLimit`
_PAUSE_S = 0.01
_MOVING_S = 0.0005  # a file is opened, or synced and closed, in about this
_SHORTAGE = (errno.EMFILE, errno.ENFILE)


def open_files_max() -> int:
    """Return how many files may have a descriptor: half of the process's limit. Sockets, LMDB and others need some."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return OPEN_MAX if soft == resource.RLIM_INFINITY else min(max(soft // 2, OPEN_MIN), OPEN_MAX)


class _FileState:
    """The descriptor of one file, and what must be known without it."""

    __slots__ = ("closed", "dirty", "failure", "identity", "moving", "raw", "reopen", "users", "wrote")

    def __init__(self, raw: File, reopen: Callable[[], File]) -> None:
        # Guarded by the lock of `OpenFiles`, except `dirty` and `wrote`, which change while the file is used.
        self.raw: File | None = raw
        self.reopen = reopen
        self.identity = raw.identity()
        self.users = 0
        self.moving = False
        self.closed = False
        self.dirty = False  # written since the last sync
        self.wrote = False  # written at all
        self.failure: BaseException | None = None  # of a sync: the file is never used again

    def sync(self, act: Callable[[], None]) -> None:
        try:
            self.dirty = False  # before the act: a concurrent write makes it dirty again
            act()
        except OSError as error:
            self.failure = error  # final: these bytes are neither synced nor read again
            try:
                threads.raise_interrupt(error)  # a `TimeoutError` of an alarm: not of the disk
            except BaseException:
                self.dirty, self.failure = True, None
                raise
            raise
        except BaseException:
            self.dirty = True  # interrupted: it may not have been synced
            raise


class OpenFiles:
    """The files of a process that have a descriptor."""

    def __init__(self, files_max: Callable[[], int] = open_files_max, *, wait_s: float = WAIT_S) -> None:
        self._files_max = files_max
        self._wait_s = wait_s
        self._abandoned: deque[_FileState] = deque()  # freed without close; appended to without a lock
        self._forget_all()
        threads.after_fork(self, OpenFiles._forget_all)

    def _forget_all(self) -> None:
        """Also in a forked child, which closes nothing: a sync there could hide an error from the parent."""
        self._lock = threads.lock("host.open_files")
        self._open = 0  # guarded by _lock: how many have a descriptor
        # Guarded by _lock: unused files, least recently used first.
        self._clean: OrderedDict[_FileState, None] = OrderedDict()
        self._dirty: OrderedDict[_FileState, None] = OrderedDict()
        self._abandoned.clear()

    @property
    def count(self) -> int:
        """The number of files that have a descriptor."""
        return self._open

    # -- opening

    def with_descriptor(self, take: Callable[[], T]) -> T:
        """Call `take`, which opens a descriptor; if the process has none left, close idle files and call it again."""
        retries: Retries | None = None
        while True:
            try:
                return take()
            except OSError as error:
                if error.errno not in _SHORTAGE:
                    raise
                if self._close_one():
                    continue
                if retries is None:
                    clock = SystemClock()
                    retries = Retries(clock, clock.monotonic_s() + self._wait_s, pause_s=_PAUSE_S)
                if not retries.again():
                    raise ProcessLimit(
                        f"no descriptor for {error.filename or 'a file'} ({error.strerror}), nothing was changed: "
                        "close other files or sockets, or raise the limit (ulimit -n)"
                    ) from error

    def add(self, take: Callable[[], File], reopen: Callable[[], File]) -> _FileState:
        """Open a file by `take`, and return the state by which it is used; `reopen` opens it again later."""
        self._close_abandoned()
        self._make_room()
        state = _FileState(self.with_descriptor(take), reopen)
        with self._lock:
            self._open += 1
            self._clean[state] = None
        return state

    def _make_room(self) -> None:
        while self._open >= self._files_max() and self._close_one():
            pass

    def acquire(self, state: _FileState, path: str, *, for_sync: bool) -> File | None:
        """Return the file with a descriptor, which stays open until `release`.

        With `for_sync`, None if the file was synced when its descriptor was closed: then there is nothing to sync.
        """
        mine = False
        try:
            while not mine:
                with self._lock:
                    if not state.moving:
                        raw = state.raw
                        if raw is None or state.failure is not None or state.closed:
                            self._check(state, path)
                        if raw is not None:
                            state.users += 1
                            self._clean.pop(state, None)
                            self._dirty.pop(state, None)
                            return raw
                        if for_sync and state.wrote:
                            return None
                        mine = state.moving = True
                if not mine:
                    time.sleep(_MOVING_S)  # another thread opens or closes it
            return self._reopen(state, path)
        finally:
            if mine:
                with self._lock:
                    state.moving = False

    def _check(self, state: _FileState, path: str) -> None:
        if state.closed and state.failure is None:  # first: a closed file may be dirty, and no sync of it failed
            raise OSError(errno.EBADF, "the file is closed", path)
        if state.failure is not None or (state.raw is None and state.dirty):
            raise OSError(errno.EIO, f"a sync failed before ({state.failure})", path) from state.failure

    def _reopen(self, state: _FileState, path: str) -> File:
        self._make_room()
        raw = self.with_descriptor(state.reopen)
        if raw.identity() != state.identity:
            raw.close()
            raise FileNotFoundError(errno.ENOENT, "another file has its name by now", path)
        with self._lock:
            state.raw, state.users = raw, 1
            self._open += 1
        return raw

    def release(self, state: _FileState) -> None:
        with self._lock:
            state.users -= 1
            if state.users or state.raw is None:
                return
            if not state.closed:
                (self._dirty if state.dirty else self._clean)[state] = None
                return
            raw = self._take_raw(state)
        raw.close()

    # -- closing

    def _take_raw(self, state: _FileState) -> File:
        """Take the descriptor from a state. Requires: _lock, and that nothing uses it."""
        raw, state.raw = state.raw, None
        assert raw is not None
        self._open -= 1
        self._clean.pop(state, None)
        self._dirty.pop(state, None)
        return raw

    def _close_one(self) -> bool:
        """Close the least recently used idle file, preferably one that needs no sync; False if all are in use."""
        self._close_abandoned()
        state: _FileState | None = None
        try:
            with self._lock:
                idle = self._clean or self._dirty
                if not idle:
                    return False
                state = next(iter(idle))
                state.moving = True
                raw = self._take_raw(state)
            self._sync_and_close(state, raw)
            return True
        finally:
            if state is not None:
                with self._lock:
                    state.moving = False

    def _sync_and_close(self, state: _FileState, raw: File) -> None:
        try:
            if state.dirty and not state.closed:
                raw.fdatasync()
            state.dirty = False
        except OSError as error:  # raised at the next use of that file: this caller does not use it
            state.failure = error
        except BaseException:  # interrupted: it keeps its descriptor
            with self._lock:
                state.raw = raw
                self._open += 1
                self._dirty[state] = None
            raise
        raw.close()

    def _close_abandoned(self) -> None:
        while self._abandoned:
            with self._lock:
                raw = self._take_abandoned()
            if raw is not None:
                raw.close()

    def _take_abandoned(self) -> File | None:
        """Take the descriptor of a freed file. Requires: _lock."""
        if not self._abandoned:
            return None
        state = self._abandoned.popleft()
        state.closed = True
        state.users = 0  # nothing can use it: a user that is still counted was interrupted before its release
        return None if state.raw is None else self._take_raw(state)

    def close(self, state: _FileState) -> None:
        """Close a file for good, once its last current user has released it."""
        with self._lock:
            state.closed = True
            raw = None if state.raw is None or state.users else self._take_raw(state)
        if raw is not None:
            raw.close()
        self._close_abandoned()  # last: an interrupt here must not keep this file open

    def abandon(self, state: _FileState) -> None:
        """Close a file from the garbage collector, which may run inside another call of this thread.

        Takes no lock: an interrupt right after acquiring it would be swallowed and leave it locked for good.
        """
        self._abandoned.append(state)


OPEN_FILES = OpenFiles()


class BoundedFile:
    """A file that has a descriptor while it is used, and possibly between uses."""

    def __init__(self, files: OpenFiles, fs: FileSystem, path: str, *, write: bool, create: bool = False) -> None:
        self._files = files
        self._path = path
        take = (lambda: fs.create(path)) if create else (lambda: fs.open(path, write=write))
        reference = [path]  # not `self`: the account must not keep its file alive
        self._reference = reference
        self._state = files.add(take, lambda: fs.open(reference[0], write=write))
        self._raw: File | None = None  # has a descriptor until `close`

    @property
    def path(self) -> str:
        return self._path

    def set_path(self, path: str) -> None:
        self._path = self._reference[0] = path

    @contextmanager
    def pin(self) -> Iterator[None]:
        self._acquire()
        try:
            yield
        finally:
            self._files.release(self._state)

    def hold(self) -> None:
        if self._raw is None:
            self._raw = self._acquire()

    def _acquire(self) -> File:
        raw = self._files.acquire(self._state, self._path, for_sync=False)
        assert raw is not None
        return raw

    def size(self) -> int:
        raw = self._acquire()
        try:
            return raw.size()
        finally:
            self._files.release(self._state)

    def identity(self) -> tuple[int, int]:
        return self._state.identity

    def pread(self, size: int, offset: int) -> bytes:
        raw = self._acquire()
        try:
            return raw.pread(size, offset)
        finally:
            self._files.release(self._state)

    def map(self, size: int) -> memoryview:
        raw = self._acquire()
        try:
            return raw.map(size)
        finally:
            self._files.release(self._state)

    def _change(self, act: Callable[[File], None]) -> None:
        raw, state = self._acquire(), self._state
        try:
            act(raw)
        finally:
            state.dirty = state.wrote = True  # after the act: a concurrent sync may have missed it
            self._files.release(state)

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
        state, raw = self._state, self._raw
        acquired = raw is None or state.failure is not None
        if acquired:
            raw = self._acquire()
        assert raw is not None
        try:
            state.dirty = state.wrote = True
            for piece in pieces:
                raw.pwrite(piece, offset)
                offset += len(piece)
            state.sync(raw.fdatasync)
        finally:
            if acquired:
                self._files.release(state)

    def _sync(self, act: Callable[[File], None]) -> None:
        state = self._state
        raw = self._files.acquire(state, self._path, for_sync=True)
        if raw is None:
            return
        try:
            state.sync(lambda: act(raw))
        finally:
            self._files.release(state)

    def close(self) -> None:
        if self._raw is not None:
            self._raw = None
            self._files.release(self._state)
        self._files.close(self._state)

    def __del__(self) -> None:
        if "_state" in self.__dict__:  # otherwise it was never opened
            self._files.abandon(self._state)


class BoundedFileSystem:
    """A file system whose open files share a budget of descriptors."""

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
        return self._files.with_descriptor(lambda: self._inner.listdir(path))

    def exists(self, path: str) -> bool:
        return self._inner.exists(path)

    def mkdir(self, path: str) -> None:
        self._inner.mkdir(path)

    def rmdir(self, path: str) -> None:
        self._inner.rmdir(path)

    def folder(self, path: str) -> Folder:
        return self._files.with_descriptor(lambda: self._inner.folder(path))

    def fsync_dir(self, path: str) -> None:
        with self.folder(path) as folder:
            folder.fsync()

    def free_bytes(self, path: str) -> int | None:
        return self._inner.free_bytes(path)

    def lock(self, path: str) -> Lock:
        return self._files.with_descriptor(lambda: self._inner.lock(path))
