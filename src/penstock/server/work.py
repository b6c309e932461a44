"""Requests at work in the owner: how many, whose, and how much memory they take.

A request first takes memory for its bytes; then it is decoded, and takes a place among those that wait for something
to happen, those that read, or those that write. Each sort has places of its own, so that consumers that wait for a
message never keep out who writes it. Everybody has a few places and some memory that nobody else can take.

Thread: any; `_lock` guards everything.
Invariants: (1) once it is shut, nobody begins. (2) whatever a request took is given back when it ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Generic, TypeVar

from penstock.errors import Backpressure, Invalid
from penstock.host import threads
from penstock.host.clock import Clock
from penstock.server.rights import Rights

T = TypeVar("T")
WAITING, READING, WRITING = "waiting", "reading", "writing"
REQUEST_MEMORY_MAX = 256 << 20  # of one, decoded
MEMORY_WAIT_S = 5.0


class Gone(Exception):
    """The owner lets go of the store: find the next one. `untouched`: nothing was done."""

    def __init__(self, *, untouched: bool) -> None:
        super().__init__("the owner is letting go of the store")
        self.untouched = untouched


class Budget:
    """So much in all, so much of one client, and so much that each client has for itself."""

    def __init__(self, total_max: int, each_max: int, own: int) -> None:
        self.total_max = total_max
        self.each_max = each_max
        self.own = own
        self.taken: Counter[str] = Counter()  # by client

    def has_room(self, client: str, amount: int) -> bool:
        mine = self.taken[client] + amount
        return mine <= self.each_max and (mine <= self.own or self.taken.total() + amount <= self.total_max)


class Work:
    """One request."""

    def __init__(self, load: Workload, rights: Rights) -> None:
        self._load = load
        self.rights = rights
        self.memory = 0
        self.place = ""
        self.binds = False

    def hold(self, size: int) -> None:
        """Take memory until the request ends; `Backpressure` if others have it, `Invalid` if nobody ever gets it."""
        self._load.hold(self, size)

    def note(self, size: int) -> None:
        """Count the memory of an answer: it is there already, so that others have to wait for it."""
        self._load.note(self, size)

    def begin(self, place: str, *, binds: bool) -> None:
        """Take a place; `binds`: the owner must not go before this has ended."""
        self._load.begin(self, place, binds=binds)


class Workload:
    """All requests."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threads.condition("server.work")
        self.memory = Budget(512 << 20, 384 << 20, 1 << 20)  # guarded by _lock, as all of these
        self.places = {
            WAITING: Budget(512, 256, 8),
            READING: Budget(256, 192, 8),
            WRITING: Budget(256, 192, 8),
        }
        self._binding = 0  # requests that must end before the owner may go
        self._shut = False
        self._used_s = clock.monotonic_s()  # when the last request ended

    @contextmanager
    def admit(self, rights: Rights, size: int) -> Iterator[Work]:
        """A request of some bytes, until the end of the block."""
        work = Work(self, rights)
        try:
            self.hold(work, size)
            yield work
        finally:
            self._end(work)

    def hold(self, work: Work, size: int) -> None:
        """See `Work.hold`."""
        if work.memory + size > REQUEST_MEMORY_MAX:
            raise Invalid(f"a request takes more than {REQUEST_MEMORY_MAX} bytes of memory: send it in parts")
        client = work.rights.client
        with self._lock:
            self._check_open()
            if not self._lock.wait_for(lambda: self._shut or self.memory.has_room(client, size), MEMORY_WAIT_S):
                raise Backpressure(f"requests at work take {self.memory.taken.total()} bytes of memory: retry later")
            self._check_open()
            self.memory.taken[client] += size
            work.memory += size

    def note(self, work: Work, size: int) -> None:
        """See `Work.note`."""
        more = max(0, size - work.memory)
        if more:
            with self._lock:
                self.memory.taken[work.rights.client] += more
                work.memory += more

    def begin(self, work: Work, place: str, *, binds: bool) -> None:
        """See `Work.begin`."""
        client, places = work.rights.client, self.places[place]
        with self._lock:
            self._check_open()
            if not places.has_room(client, 1):
                raise Backpressure(f"too many requests are {place} ({places.taken[client]} of yours): retry later")
            places.taken[client] += 1
            work.place = place
            self._binding += binds
            work.binds = binds

    def _check_open(self) -> None:
        if self._shut:
            raise Gone(untouched=True)

    def _end(self, work: Work) -> None:
        client = work.rights.client
        with self._lock:
            _give_back(self.memory, client, work.memory)
            if work.place:
                _give_back(self.places[work.place], client, 1)
            self._binding -= work.binds
            self._used_s = self._clock.monotonic_s()
            self._lock.notify_all()

    # -- coming to an end

    def idle_s(self) -> float:
        """For how long nothing was at work that keeps the owner."""
        with self._lock:
            return 0.0 if self._binding else self._clock.monotonic_s() - self._used_s

    def shut(self, occupied: Callable[[], str], drain_s: float) -> str:
        """Let nobody begin from now on, if nothing occupies the owner; otherwise, what does.

        Requests that bind the owner are waited for with the door shut: where many write there is always one at work.
        """
        with self._lock:
            if self._shut:
                return ""
            reason = occupied()
            if not reason:
                self._shut = True
                ended = self._lock.wait_for(lambda: not self._binding, drain_s)
                reason = occupied() if ended else "a write takes long"
                self._shut = not reason
            return reason

    def close(self) -> None:
        """Let nobody begin from now on."""
        with self._lock:
            self._shut = True
            self._lock.notify_all()


def _give_back(budget: Budget, client: str, amount: int) -> None:
    budget.taken[client] -= amount
    if not budget.taken[client]:
        del budget.taken[client]


class Sending(Generic[T]):
    """What goes to a client piece by piece, and what is held until it is there, or until the client is gone.

    A generator would not do: one that nobody began to read never comes to its `finally`.
    """

    def __init__(self, pieces: Iterator[T], held: ExitStack) -> None:
        self._pieces = pieces
        self._held = held

    def __iter__(self) -> Sending[T]:
        return self

    def __next__(self) -> T:
        try:
            return next(self._pieces)
        except BaseException:
            self.close()
            raise

    def close(self, *_: Any) -> None:
        """Let go of everything. A second call does nothing."""
        self._held.close()

    __del__ = close
