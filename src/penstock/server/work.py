"""Admission of requests in the owner: their number and memory, by client.

A request first takes memory for its bytes; then it is decoded, and takes a slot among the requests that wait for an
event, that read, or that write. Each of the three has slots of its own, so that consumers waiting for a message never
block the writer of it. Every client has a few slots and some memory reserved.

Thread: any; `_lock` guards everything.
Invariants: (1) once the workload is shut, no request begins. (2) a request returns everything it took when it ends.
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
REQUEST_MEMORY_MAX = 256 << 20  # of one request, decoded
MEMORY_WAIT_S = 5.0


class OwnerLeaving(Exception):
    """The owner is yielding: find the next one. `untouched`: the request did nothing."""

    def __init__(self, *, untouched: bool) -> None:
        super().__init__("the owner is releasing the store")
        self.untouched = untouched


class Budget:
    """A limited amount: `total_max` in all, `each_max` for one client, `own` reserved for each client."""

    def __init__(self, total_max: int, each_max: int, own: int) -> None:
        self.total_max = total_max
        self.each_max = each_max
        self.own = own
        self.taken: Counter[str] = Counter()  # by client

    def has_room(self, client: str, amount: int) -> bool:
        after = self.taken[client] + amount
        return after <= self.each_max and (after <= self.own or self.taken.total() + amount <= self.total_max)


class Work:
    """One admitted request, and what it has taken."""

    def __init__(self, load: Workload, rights: Rights) -> None:
        self._load = load
        self.rights = rights
        self.memory = 0
        self.activity = ""
        self.binds = False

    def hold(self, size: int) -> None:
        """Take memory until the request ends; `Backpressure` if others use it, `Invalid` if it exceeds the limit."""
        self._load.hold(self, size)

    def note(self, size: int) -> None:
        """Count the memory of an answer. It is allocated already, so this never fails: later requests wait for it."""
        self._load.note(self, size)

    def begin(self, activity: str, *, binds: bool) -> None:
        """Take a slot for waiting, reading or writing; `binds`: the owner must not yield before the request ends."""
        self._load.begin(self, activity, binds=binds)


class Workload:
    """All requests at work, and their budgets."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threads.condition("server.work")
        self.memory = Budget(512 << 20, 384 << 20, 1 << 20)  # guarded by _lock, as all of these
        self.slots = {
            WAITING: Budget(512, 256, 8),
            READING: Budget(256, 192, 8),
            WRITING: Budget(256, 192, 8),
        }
        self._binding = 0  # requests that must end before the owner may yield
        self._shut = False
        self._used_s = clock.monotonic_s()  # when the last request ended

    @contextmanager
    def admit(self, rights: Rights, size: int) -> Iterator[Work]:
        """Admit a request of `size` bytes, until the end of the block."""
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
        client = work.rights.budget
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
                self.memory.taken[work.rights.budget] += more
                work.memory += more

    def begin(self, work: Work, activity: str, *, binds: bool) -> None:
        """See `Work.begin`."""
        client, slots = work.rights.budget, self.slots[activity]
        with self._lock:
            self._check_open()
            if not slots.has_room(client, 1):
                raise Backpressure(f"too many requests are {activity} ({slots.taken[client]} of yours): retry later")
            slots.taken[client] += 1
            work.activity = activity
            self._binding += binds
            work.binds = binds

    def _check_open(self) -> None:
        if self._shut:
            raise OwnerLeaving(untouched=True)

    def _end(self, work: Work) -> None:
        client = work.rights.budget
        with self._lock:
            _give_back(self.memory, client, work.memory)
            if work.activity:
                _give_back(self.slots[work.activity], client, 1)
            self._binding -= work.binds
            self._used_s = self._clock.monotonic_s()
            self._lock.notify_all()

    # -- yielding and closing

    def idle_s(self) -> float:
        """Return for how many seconds no request kept the owner from yielding."""
        with self._lock:
            return 0.0 if self._binding else self._clock.monotonic_s() - self._used_s

    def shut(self, occupied: Callable[[], str], drain_s: float) -> str:
        """Refuse new requests, unless the owner is occupied; return the reason then, else empty.

        New requests are refused while this waits for binding ones: under steady writes one would always be running.
        """
        with self._lock:
            if self._shut:
                return ""
            reason = occupied()
            if not reason:
                self._shut = True
                ended = self._lock.wait_for(lambda: not self._binding, drain_s)
                reason = occupied() if ended else "a write is taking long"
                self._shut = not reason
            return reason

    def close(self) -> None:
        """Refuse new requests."""
        with self._lock:
            self._shut = True
            self._lock.notify_all()


def _give_back(budget: Budget, client: str, amount: int) -> None:
    budget.taken[client] -= amount
    if not budget.taken[client]:
        del budget.taken[client]


class Sending(Generic[T]):
    """An answer sent piece by piece, with the resources it holds until it is sent or the client is gone.

    Not a generator: one that was never started does not run its `finally`.
    """

    def __init__(self, pieces: Iterator[T], resources: ExitStack) -> None:
        self._pieces = pieces
        self._resources = resources

    def __iter__(self) -> Sending[T]:
        return self

    def __next__(self) -> T:
        try:
            return next(self._pieces)
        except BaseException:
            self.close()
            raise

    def close(self, *_: Any) -> None:
        """Release the resources. A second call does nothing."""
        self._resources.close()

    __del__ = close
