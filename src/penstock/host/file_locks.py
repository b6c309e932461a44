"""The lock on a store's folder.

Thread: any.
Invariant: a lock ends with the process that took it, however that ends, and no forked child keeps it.
"""

from __future__ import annotations

import fcntl
import os

from penstock.errors import Closed, StoreLocked
from penstock.host import threads
from penstock.host.paths import parent


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
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._close()
            if isinstance(error, BlockingIOError):
                raise StoreLocked(f"{path} is locked by another process: close it there first") from None
            raise
        self._status = os.fstat(self._fd)

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
