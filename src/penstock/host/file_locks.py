"""The lock on a store's folder.

Owners lock exclusively; readers of a store without an owner share a lock, so that no owner changes it meanwhile.

Thread: any.
Invariant: a lock ends with the process that took it, however that ends, and no forked child keeps it.
"""

from __future__ import annotations

import fcntl
import os
import time
import weakref

from penstock.errors import Closed, StoreLocked
from penstock.host import threads
from penstock.host.paths import parent

LOOKS, LOOK_S = 10, 0.03  # how often a lock that seems shared is tried, and the time between


class OsReadLock:
    """A shared `flock` on an existing file, opened for reading only: it works on a read-only file system, too."""

    def __init__(self, path: str) -> None:
        self._fd = -1
        with threads.without_forks():
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            threads.after_fork(self, OsReadLock.release)
        try:
            _take(path, self._fd, fcntl.LOCK_SH)
        except (OSError, StoreLocked):
            self.release()
            raise

    def check(self) -> None: ...

    def release(self) -> None:
        with threads.without_forks():  # a child forked between the two lines would keep the lock
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)

    def __del__(self) -> None:
        self.release()


def _take(path: str, fd: int, kind: int) -> None:
    """Lock a file; `StoreLocked` if others have it.

    A lock that seems shared is tried again: its owner may have ended between two attempts, and other processes share
    it for a moment when they find it locked.
    """
    for left in reversed(range(LOOKS)):
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            refusal = _refusal(path, fd)
        if not left or not refusal.read_only:
            raise refusal
        time.sleep(LOOK_S)


def _refusal(path: str, fd: int) -> StoreLocked:
    """Return the error for a file that is locked already."""
    status = os.fstat(fd)
    if any(lock.is_of(status) for lock in list(_locks)):
        error = StoreLocked(f"{path} is locked by this process: use what is open, or close it first")
        error.here = True
        return error
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # an owner would refuse this, too
    except OSError:
        return StoreLocked(f"{path} is locked by another process: close it there first")
    fcntl.flock(fd, fcntl.LOCK_UN)  # this process is not one of the readers
    error = StoreLocked(
        f"{parent(path)} is open read-only (read_only=True) in {_readers(status)}: close it there first"
    )
    error.read_only = True
    return error


def _readers(status: os.stat_result) -> str:
    """Name the processes that share a lock on a file; Linux lists them, if they are not in another container."""
    try:
        with open("/proc/locks", encoding="ascii") as listed:
            locks = [line.split() for line in listed]
    except OSError:
        locks = []
    # A line is: number, FLOCK, ADVISORY, READ, process, device and inode, start, end.
    readers = {lock[4] for lock in locks if lock[1:4:2] == ["FLOCK", "READ"] and lock[5].endswith(f":{status.st_ino}")}
    pids = sorted(int(pid) for pid in readers if pid.isdecimal() and int(pid) > 0)
    if not pids:
        return "another process"
    named = ", ".join("this one" if pid == os.getpid() else str(pid) for pid in pids)
    return f"process{'es' if len(pids) > 1 else ''} {named}"


class OsLock:
    """A `flock`, released by the kernel when the process ends.

    A forked child inherits the descriptor and would keep the lock while it lives, so it closes its copy at once.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = -1
        with threads.without_forks():
            self._fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
            threads.after_fork(self, OsLock._close)
        try:
            _take(path, self._fd, fcntl.LOCK_EX)
        except (OSError, StoreLocked):
            self._close()
            raise
        self._status = os.fstat(self._fd)
        _locks.add(self)

    def is_of(self, status: os.stat_result) -> bool:
        """Whether this locks the file with this status."""
        own = self._status
        return self._fd >= 0 and (own.st_ino, own.st_dev) == (status.st_ino, status.st_dev)

    def check(self) -> None:
        try:
            if self._fd < 0:
                return  # already released: a closing store changes nothing more
            now, opened = os.stat(self._path), self._status
            if now.st_ino == opened.st_ino and now.st_dev == opened.st_dev:
                return
        except (FileNotFoundError, NotADirectoryError):
            pass
        raise Closed(
            f"{parent(self._path)} was moved, deleted or replaced while it was open, so nothing more is written there"
            ": close this store and open the path again"
        )

    def release(self) -> None:
        if self._fd >= 0:  # not in a forked child, where unlocking would take it from the parent
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        self._close()

    def _close(self) -> None:
        with threads.without_forks():  # a child forked between the two lines would keep the lock
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)

    def __del__(self) -> None:
        self.release()  # for a caller that was interrupted before it could release it


_locks: weakref.WeakSet[OsLock] = weakref.WeakSet()  # by this process
