"""A checker of the order in which threads acquire locks.

Two threads that acquire two locks in opposite orders can deadlock, but seldom do so in a test. The checker finds this
without a deadlock: it records, by name, which lock was acquired while which was held, and orders that form a cycle are
a violation even if the threads never met.

Thread: any. Only locks made by `penstock.host.threads` while the checker is installed are watched. A violation is added
to `violations` and raised in the thread that caused it, before it would wait.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from penstock.host.threads import Mutex, install_lock_maker


class LockOrderViolation(AssertionError):
    """Locks were acquired in an order that can deadlock, or held where none may be."""


class LockOrderChecker:
    """Watches the named locks made while it is installed."""

    def __init__(self) -> None:
        self.violations: list[LockOrderViolation] = []
        self._mutex = threading.Lock()
        self._followers: dict[str, dict[str, str]] = {}  # guarded by _mutex; name -> name taken under it -> where
        self._threads = threading.local()

    @contextmanager
    def installed(self) -> Iterator[LockOrderChecker]:
        """Watch locks that are made in this context; at its end raise the first violation, even a swallowed one."""
        previous = install_lock_maker(self._make)
        try:
            yield self
        finally:
            install_lock_maker(previous)
        if self.violations:
            raise self.violations[0]

    def lock_names(self) -> list[str]:
        """Return the names of the watched locks that this thread holds, in the order it acquired them."""
        return [watched.name for watched in self._stack()]

    def check_io(self, operation: str, *, allowed: frozenset[str] = frozenset()) -> None:
        """Report a violation if this thread holds a lock that is not `allowed`. Call it where I/O happens."""
        names = [name for name in self.lock_names() if name not in allowed]
        if names:
            self._report(f"{operation} with {' and '.join(names)} held at {_where()}")

    def order(self) -> dict[str, set[str]]:
        """Return, for each lock, the locks that were acquired while it was held."""
        with self._mutex:
            return {name: set(followers) for name, followers in self._followers.items()}

    def _make(self, name: str, reentrant: bool) -> Mutex:
        return _WatchedLock(self, name, reentrant)

    def _stack(self) -> list[_WatchedLock]:
        stack: list[_WatchedLock] | None = getattr(self._threads, "stack", None)
        if stack is None:
            stack = self._threads.stack = []
        return stack

    def _before(self, inner: _WatchedLock) -> None:
        for outer in self._stack():
            if outer is inner:
                self._report(f"{inner.name} taken twice by one thread at {_where()}: it would wait for itself")
            self._follow(outer.name, inner.name)

    def _follow(self, outer: str, inner: str) -> None:
        with self._mutex:
            followers = self._followers.setdefault(outer, {})
            if inner in followers:
                return
            way = self._way(inner, outer)
            if way is None:
                followers[inner] = _where()
                return
        chain = ", ".join(f"{taken} under {under} at {where}" for under, taken, where in way)
        self._report(f"{inner} taken under {outer} at {_where()}, against the order already seen: {chain or 'itself'}")

    def _way(self, start: str, end: str) -> list[tuple[str, str, str]] | None:
        """Return the recorded acquisitions that lead from `start` to `end`, or None."""
        ways: dict[str, list[tuple[str, str, str]]] = {start: []}
        names = [start]
        for name in names:
            if name == end:
                return ways[name]
            for follower, where in self._followers.get(name, {}).items():
                if follower not in ways:
                    ways[follower] = [*ways[name], (name, follower, where)]
                    names.append(follower)
        return None

    def _report(self, text: str) -> None:
        violation = LockOrderViolation(f"thread {threading.current_thread().name}: {text}")
        self.violations.append(violation)
        raise violation


class _WatchedLock:
    """A lock that reports to the checker."""

    def __init__(self, checker: LockOrderChecker, name: str, reentrant: bool) -> None:
        self.name = name
        self._checker = checker
        self._reentrant = reentrant
        self._lock: Mutex = threading.RLock() if reentrant else threading.Lock()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        stack = self._checker._stack()
        # A non-blocking attempt cannot deadlock, nor can acquiring one's own reentrant lock again.
        if blocking and not (self._reentrant and self in stack):
            self._checker._before(self)
        taken = self._lock.acquire(blocking, timeout)
        if taken:
            stack.append(self)
        return taken

    def release(self) -> None:
        stack = self._checker._stack()
        for index in range(len(stack) - 1, -1, -1):
            if stack[index] is self:
                del stack[index]
                break
        self._lock.release()

    def _is_owned(self) -> bool:
        """For `threading.Condition`, which would otherwise try to acquire the lock to find out."""
        return self in self._checker._stack()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        self.release()


def _where() -> str:
    """Return the nearest caller outside this module and `threading`."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename in (__file__, threading.__file__):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
