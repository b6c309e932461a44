"""Things that clients hold by name in the owner: snapshots and scans, each with a lease.

Thread: any; `_lock` guards everything, and is not held while something is used or closed.
Invariants: (1) a thing is closed once, and never while it is used. (2) use renews its lease; what was not used for so
long is closed by `sweep`. (3) there are at most `count_max` of them, and `each_max` of one client, but a client always
gets `own`. (4) what keeps the owner only for a while after its use makes room for others after that, the oldest first.
(5) only the client that holds a thing closes it.
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
    def __init__(self, thing: T, client: str, lease_s: float, now_s: float, keeps_s: float | None) -> None:
        self.thing = thing
        self.client = client
        self.lease_s = lease_s
        self.keeps_s = lease_s if keeps_s is None else keeps_s
        self.used_s = now_s
        self.users = 0
        self.closing = False


class LeasedObjects(Generic[T]):
    """What clients hold."""

    def __init__(
        self,
        close: Callable[[T], object],
        *,
        what: str,
        clock: Clock,
        count_max: int,
        each_max: int,
        own: int = 0,
        users_max: int | None = None,
    ) -> None:
        self._close = close
        self._what = what
        self._clock = clock
        self._count_max = count_max
        self._each_max = each_max
        self._own = own
        self._users_max = users_max
        self._lock = threads.lock("server.held")
        self._entries: dict[str, _LeasedObject[T]] = {}  # guarded by _lock

    def __len__(self) -> int:
        with self._lock:
            return len(self._entries)

    def total(self, measure: Callable[[T], int]) -> int:
        """A measure of all of them together."""
        with self._lock:
            return sum(measure(entry.thing) for entry in self._entries.values())

    def __contains__(self, name: str) -> bool:
        with self._lock:
            return name in self._entries

    def needed(self) -> bool:
        """Whether one of them keeps the owner."""
        now_s = self._clock.monotonic_s()
        with self._lock:
            return any(self._keeps(entry, now_s) for entry in self._entries.values())

    def _keeps(self, entry: _LeasedObject[T], now_s: float) -> bool:
        return entry.keeps_s >= entry.lease_s or now_s < entry.used_s + entry.keeps_s

    def check_room(self, client: str) -> None:
        """`Backpressure` if one more is too many."""
        now_s, gone = self._clock.monotonic_s(), list[str]()
        with self._lock:
            mine = [name for name, entry in self._entries.items() if entry.client == client]
            if not self._has_room(len(mine)):
                idle = [name for name in mine if not self._entries[name].users]
                idle = [name for name in idle if not self._keeps(self._entries[name], now_s)]
                gone = sorted(idle, key=lambda name: self._entries[name].used_s)[:1]
                for name in gone:
                    self._entries[name].closing = True
        self._end(gone)
        with self._lock:
            self._check_room(client)

    def _has_room(self, mine: int) -> bool:
        return mine < self._each_max and (mine < self._own or len(self._entries) < self._count_max)

    def _check_room(self, client: str) -> None:
        mine = sum(1 for entry in self._entries.values() if entry.client == client)
        if not self._has_room(mine):
            raise Backpressure(f"too many {self._what}s are open ({mine} of yours): close some, then retry")

    def add(self, name: str, thing: T, *, client: str, lease_s: float, keeps_s: float | None = None) -> None:
        """Hold a thing. `keeps_s`: how long after its use it keeps the owner, if not for its lease."""
        with self._lock:
            self._check_room(client)
            if name in self._entries:
                raise Invalid(f"there is a {self._what} {name} already")
            self._entries[name] = _LeasedObject(thing, client, lease_s, self._clock.monotonic_s(), keeps_s)

    @contextmanager
    def use(self, name: str, client: str | None = None) -> Iterator[T]:
        """A thing that is not closed before the end of the block; with a client: one of that client."""
        with self._lock:
            entry = self._entries.get(name)
            if entry is None or entry.closing or client not in (None, entry.client):
                raise Closed(f"the {self._what} was closed, or was not used for its lease: begin another")
            if self._users_max is not None and entry.users >= self._users_max:
                raise Invalid(f"a {self._what} is read by one at a time")
            entry.users += 1
            entry.used_s = self._clock.monotonic_s()
        try:
            yield entry.thing
        finally:
            with self._lock:
                entry.users -= 1
                entry.used_s = self._clock.monotonic_s()
                ends = entry.closing and not entry.users
            if ends:
                self._end([name])

    def close(self, name: str, client: str) -> None:
        """Close a thing of a client, as soon as nobody uses it; one that is not there is no error."""
        with self._lock:
            entry = self._entries.get(name)
            if entry is None or entry.client != client:
                return
            entry.closing = True
            used = entry.users > 0
        if not used:
            self._end([name])

    def sweep(self) -> None:
        """Close what was not used for its lease."""
        now_s = self._clock.monotonic_s()
        with self._lock:
            idle = [(name, entry) for name, entry in self._entries.items() if not entry.users]
            lapsed = [name for name, entry in idle if entry.used_s + entry.lease_s <= now_s]
            for name in lapsed:
                self._entries[name].closing = True
        self._end(lapsed)

    def close_all(self) -> None:
        """Close everything, as soon as nobody uses it."""
        with self._lock:
            clients = {name: entry.client for name, entry in self._entries.items()}
        for name, client in clients.items():
            self.close(name, client)

    def _end(self, names: list[str]) -> None:
        for name in names:
            with self._lock:
                entry = self._entries.pop(name, None)
            if entry is not None:  # whoever takes it out closes it
                self._close(entry.thing)


class LeaseCounts:
    """How many things clients have that end by themselves, when their time is over."""

    def __init__(self, clock: Clock, each_max: int) -> None:
        self._clock = clock
        self._each_max = each_max
        self._lock = threads.lock("server.lease_counts")
        self._counts: dict[str, list[tuple[float, int]]] = {}  # guarded by _lock; by client: until when, how many

    def add(self, client: str, count: int, lease_s: float) -> None:
        """Note more of them; `Backpressure` if those are too many."""
        now_s = self._clock.monotonic_s()
        with self._lock:
            running = [(until_s, some) for until_s, some in self._counts.get(client, []) if until_s > now_s]
            there = sum(some for _, some in running)
            if there + count > self._each_max:
                raise Backpressure(f"{there} files are staged (limit {self._each_max}): commit or wait, then retry")
            self._counts[client] = [*running, (now_s + lease_s, count)]
