"""A guard for objects that do not survive a fork: their locks may stay locked, and LMDB's file must not be shared.

Thread: any. It is checked before any lock is taken, because the thread that held the lock does not exist in the child.
"""

from __future__ import annotations

from os import getpid

from penstock.errors import Closed


class ForkGuard:
    """Remembers the process that created it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._pid = getpid()

    def is_child(self) -> bool:
        """Return whether this is a forked child of that process."""
        return getpid() != self._pid

    def check(self) -> None:
        """Raise `Closed` in a forked child."""
        if self.is_child():
            raise Closed(f"{self._name} was opened before a fork: open it, or connect to its owner, in this process")
