"""Objects that clients hold by name in the owner: snapshots and scans, each with a lease.

Thread: any; `_lock` guards everything, and is not held while an object is used or closed.
Invariants: (1) an object is closed once, and never while it is used. (2) use renews its lease; `sweep` closes objects
whose lease expired. (3) there are at most `count_max` objects, and `each_max` of one client, but a client always gets
`own`. (4) an object that keeps the owner from yielding only for `keeps_s` after its use may be closed after that to
make room, the oldest first. (5) only the client that holds an object closes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from penstock.errors import Backpressure, Closed, Invalid
from penstock.host import threads
from penstock.host.clock import Clock

T = TypeVar("T")


class _LeasedObject(Generic[T]):
    def __init__(self, value: T, client: str, lease_s: float, now_s: float, keeps_s: float | None) -> None:
        self.value = value
        self.client = client
        self.lease_s = lease_s
        self.keeps_s = lease_s if keeps_s is None else keeps_s
        self.used_s = now_s
        self.users = 0
        self.closing = False


class LeasedObjects(Generic[T]):
    """The objects of one type that clients hold."""

    def __init__(
        self,
        close: Callable[[T], object],
        *,
        noun: str,
        clock: Clock,
        count_max: int,
        each_max: int,
        own: int = 0,
        users_max: int | None = None,
        renew: Callable[[float], object] = lambda lease_s: None,
    ) -> None:
        """`renew` is called before a lease is renewed by use, with its length."""
        self._close = close
        self._noun = noun
        self._clock = clock
        self._count_max = count_max
        self._each_max = each_max
        self._own = own
        self._users_max = users_max
        self._renew = renew
        self._lock = threads.lock("server.held")
        self._entries: dict[str, _LeasedObject[T]] = {}  # guarded by _lock

    def __len__(self) -> int:
        with self._lock:
            return len(self._entries)

    def total(self, measure: Callable[[T], int]) -> int:
        """Return the sum of a measure over all objects."""
        with self._lock:
            return sum(measure(entry.value) for entry in self._entries.values())

    def longest_left_s(self) -> float:
        """Return for how many seconds the last lease is valid, if nothing is used again; 0 if nothing is held."""
        now_s = self._clock.monotonic_s()
        with self._lock:
            ends_s = [(now_s if entry.users else entry.used_s) + entry.lease_s for entry in self._entries.values()]
        return max([0.0, *(end_s - now_s for end_s in ends_s)])

    def __contains__(self, name: str) -> bool:
        with self._lock:
            return name in self._entries

    def lease_s(self, name: str) -> float:
        """Return the length of an object's lease; 0 if it is not held."""
        with self._lock:
            entry = self._entries.get(name)
            return 0.0 if entry is None else entry.lease_s

    def needed(self) -> bool:
        """Whether an object keeps the owner from yielding."""
        now_s = self._clock.monotonic_s()
        with self._lock:
            return any(self._keeps(entry, now_s) for entry in self._entries.values())

    def _keeps(self, entry: _LeasedObject[T], now_s: float) -> bool:
        return entry.keeps_s >= entry.lease_s or now_s < entry.used_s + entry.keeps_s

    def check_room(self, client: str) -> None:
        """Make room for one more object of a client; `Backpressure` if there is none."""
        now_s, oldest = self._clock.monotonic_s(), list[str]()
        with self._lock:
            names = [name for name, entry in self._entries.items() if entry.client == client]
            if not self._has_room(len(names)):
                idle = [name for name in names if not self._entries[name].users]
                idle = [name for name in idle if not self._keeps(self._entries[name], now_s)]
                oldest = sorted(idle, key=lambda name: self._entries[name].used_s)[:1]
                for name in oldest:
                    self._entries[name].closing = True
        self._end(oldest)
        with self._lock:
            self._check_room(client)

    def _has_room(self, count: int) -> bool:
        return count < self._each_max and (count < self._own or len(self._entries) < self._count_max)

    def _check_room(self, client: str) -> None:
        count = sum(1 for entry in self._entries.values() if entry.client == client)
        if not self._has_room(count):
            raise Backpressure(f"too many {self._noun}s are open ({count} of yours): close some, then retry")

    def add(self, name: str, value: T, *, client: str, lease_s: float, keeps_s: float | None = None) -> None:
        """Hold an object. `keeps_s`: how long after its use it keeps the owner; None: for its lease."""
        with self._lock:
            self._check_room(client)
            if name in self._entries:
                raise Invalid(f"there is a {self._noun} {name} already")
            self._entries[name] = _LeasedObject(value, client, lease_s, self._clock.monotonic_s(), keeps_s)

    @contextmanager
    def use(self, name: str, client: str | None = None) -> Iterator[T]:
        """Use an object, which stays open until the end of the block; with a `client`, only one of its own."""
        entry, ends = None, False
        try:
            with self._lock:
                entry = self._used(name, client)
            self._renew(entry.lease_s)
            with self._lock:
                entry.used_s = self._clock.monotonic_s()
            yield entry.value
        finally:
            if entry is not None:
                with self._lock:
                    entry.users -= 1
                    entry.used_s = self._clock.monotonic_s()
                    ends = entry.closing and not entry.users
            if ends:
                self._end([name])

    def _used(self, name: str, client: str | None) -> _LeasedObject[T]:
        """Count a use of an object. Nothing may come between the count and the return: its caller gives it back."""
        entry = self._entries.get(name)
        if entry is None or entry.closing or client not in (None, entry.client):
            raise Closed(f"the {self._noun} was closed, or was not used for its lease: begin another")
        if self._users_max is not None and entry.users >= self._users_max:
            raise Invalid(f"a {self._noun} is read by one at a time")
        entry.users += 1
        return entry

    def close(self, name: str, client: str) -> None:
        """Close an object of a client once it is not in use; an unknown name is not an error."""
        with self._lock:
            entry = self._entries.get(name)
            if entry is None or entry.client != client:
                return
            entry.closing = True
            used = entry.users > 0
        if not used:
            self._end([name])

    def sweep(self) -> None:
        """Close the objects whose lease expired."""
        now_s = self._clock.monotonic_s()
        with self._lock:
            idle = [(name, entry) for name, entry in self._entries.items() if not entry.users]
            expired = [name for name, entry in idle if entry.used_s + entry.lease_s <= now_s]
            for name in expired:
                self._entries[name].closing = True
        self._end(expired)

    def close_all(self) -> None:
        """Close each object once it is not in use."""
        with self._lock:
            clients = {name: entry.client for name, entry in self._entries.items()}
        for name, client in clients.items():
            self.close(name, client)

    def _end(self, names: list[str]) -> None:
        for name in names:
            with self._lock:
                entry = self._entries.pop(name, None)
            if entry is not None:  # the thread that removed it closes it
                self._close(entry.value)


class LeaseCounts:
    """Counts, by client, the staged files whose lease has not expired."""

    def __init__(self, clock: Clock, each_max: int) -> None:
        self._clock = clock
        self._each_max = each_max
        self._lock = threads.lock("server.lease_counts")
        self._counts: dict[str, list[tuple[float, int]]] = {}  # guarded by _lock; by client: (expiry, count)

    def add(self, client: str, count: int, lease_s: float) -> None:
        """Count more files; `Backpressure` if they are too many."""
        now_s = self._clock.monotonic_s()
        with self._lock:
            running = [(until_s, files) for until_s, files in self._counts.get(client, []) if until_s > now_s]
            staged = sum(files for _, files in running)
            if staged + count > self._each_max:
                raise Backpressure(f"{staged} files are staged (limit {self._each_max}): commit or wait, then retry")
            self._counts[client] = [*running, (now_s + lease_s, count)]
