"""The threads that apply entries which touch files, so that no other thread waits for those files.

A partition is in the queue at most once, and one thread at a time applies to it. A thread that does not come back from
a partition's files is lost to the others: while every thread is stuck like that, more are started, up to a limit.

Thread: any may call `submit`. Threads are started on first use.
Invariants: (1) at most THREADS_MAX threads, and as many queued partitions as there are. (2) `_lock` is never held while
a thread works.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from penstock.errors import ProcessLimit, WaitExpired
from penstock.host import threads
from penstock.host.clock import Clock

logger = logging.getLogger(__name__)

THREADS_MAX = 64
STUCK_S_MAX = 1.0  # a thread that is at one entry for that long does not count, so that others do not wait for it
T = TypeVar("T")
Work = Callable[[], object]


class Workers:
    """A bounded set of threads."""

    def __init__(self, count: int, *, clock: Clock, stall_s: float) -> None:
        self.count = count  # threads that are not stuck; 0: there are none, and callers work themselves
        self._clock = clock
        self._stuck_s = min(STUCK_S_MAX, stall_s / 4)
        self._lock = threads.condition("partition.workers")
        self._queue: deque[Work] = deque()  # guarded by _lock
        self._idle = 0  # guarded by _lock
        self._busy_since: dict[object, float] = {}  # guarded by _lock: by thread
        self._threads: list[threading.Thread] = []  # guarded by _lock
        self._closed = False  # guarded by _lock

    def submit(self, work: Work) -> None:
        """Let a thread call `work` soon. If no thread can be started, as while the interpreter ends, call it here."""
        with self._lock:
            self._queue.append(work)
            self._staff()
            alone = not self._idle and not self._busy_since
            if alone:
                self._queue.remove(work)
        if alone:
            work()

    @property
    def is_crowded(self) -> bool:
        """Whether threads were started in place of others that are stuck; a hint."""
        return len(self._busy_since) > self.count

    def staff(self) -> None:
        """Start another thread if work waits because the others are stuck."""
        if self._queue:
            with self._lock:
                self._staff()

    def _staff(self) -> None:
        """Wake a thread for the queue, or start one. Requires: _lock."""
        if self._closed or not self._queue:
            return
        if self._idle >= len(self._queue):
            self._lock.notify()
            return
        if self._idle:
            self._lock.notify(self._idle)
        late_s = self._clock.monotonic_s() - self._stuck_s
        stuck = sum(since_s <= late_s for since_s in self._busy_since.values())
        running = self._idle + len(self._busy_since)
        if running - stuck < self.count and running < THREADS_MAX:
            token = object()
            self._busy_since[token] = self._clock.monotonic_s()  # counted from here on
            try:
                self._threads.append(threads.spawn(lambda: self._run(token), name="penstock-apply"))
            except BaseException as error:
                self._busy_since.pop(token, None)
                threads.raise_interrupt(error)
                if not isinstance(error, (ProcessLimit, MemoryError)):
                    raise
                logger.warning("no thread could be started to apply writes (%s): it is tried again", error)

    def _run(self, token: object) -> None:
        while True:
            with self._lock:
                self._busy_since.pop(token, None)
                self._idle += 1
                while not self._queue and not self._closed:
                    self._lock.wait()
                self._idle -= 1
                if not self._queue:
                    return
                work = self._queue.popleft()
                self._busy_since[token] = self._clock.monotonic_s()
            try:
                work()
            except BaseException:
                logger.exception("applying met an unexpected error, and goes on: report this as a bug")
            del work

    def run(self, act: Callable[[], T], timeout_s: float, activity: str) -> T:
        """Call `act` in a thread and return its result; `WaitExpired` if it does not end in time, and goes on."""
        if self.count == 0:
            return act()
        outcome: list[tuple[T | None, BaseException | None]] = []
        ended = threads.condition("partition.ended")

        def work() -> None:
            try:
                result: tuple[T | None, BaseException | None] = act(), None
            except BaseException as error:
                result = None, error
            with ended:
                outcome.append(result)
                ended.notify_all()

        self.submit(work)
        with ended:
            if not ended.wait_for(lambda: outcome, timeout_s):
                raise WaitExpired(f"{activity} did not end within {timeout_s:g} s: it goes on")
        value, error = outcome[0]
        if error is not None:
            raise error
        return value  # type: ignore[return-value]

    def close(self) -> None:
        """Let the threads end when the queue is empty."""
        with self._lock:
            self._closed = True
            self._lock.notify_all()

    def join(self, timeout_s: float) -> None:
        """After `close`: wait until the threads have ended, for at most `timeout_s`."""
        deadline_s = self._clock.monotonic_s() + timeout_s
        for thread in list(self._threads):
            thread.join(max(0.0, deadline_s - self._clock.monotonic_s()))
