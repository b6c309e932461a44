"""Retries with deadlines, periodic calls beside a block, and stop signals.

For changes within this process, callers wait on a condition (`threads.condition`), with a timeout. Other processes,
lock files and descriptors notify nobody: they are tried again by `Retries`, until a deadline or a stop signal. Ctrl-C
ends either wait at once.

Thread: a `Retries` belongs to one thread; `repeating` starts one.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from penstock.host import threads
from penstock.host.clock import Clock
from penstock.host.randomness import Random

PAUSE_S = 0.02
_LAST_CALL_S = 10.0


class Retries:
    """The pauses between the attempts of one call, until its deadline."""

    def __init__(
        self,
        clock: Clock,
        deadline_s: float,
        *,
        pause_s: float = PAUSE_S,
        pause_s_max: float | None = None,
        stop: threading.Event | None = None,
        random: Random | None = None,
    ) -> None:
        """`deadline_s` is by the monotonic clock. With `pause_s_max`, pauses double up to it.

        With `random`, each is between half of that and all of it, so that callers refused together do not return
        together.
        """
        self._clock = clock
        self._deadline_s = deadline_s
        self._pause_s = pause_s
        self._pause_s_max = pause_s if pause_s_max is None else pause_s_max
        self._stop = stop
        self._random = random

    def expired(self) -> bool:
        """Whether the deadline has passed."""
        return self._clock.monotonic_s() >= self._deadline_s

    def again(self, at_least_s: float = 0.0) -> bool:
        """Pause before another attempt; False if the deadline has passed or `stop` is set: then give up.

        `at_least_s`: the pause that the other side asked for; it is cut short at the deadline.
        """
        left_s = self._deadline_s - self._clock.monotonic_s()
        if left_s <= 0:
            return False
        pause_s = max(self._pause_s, at_least_s)
        if self._random is not None:
            pause_s *= 0.5 + self._random.random() / 2 if at_least_s < self._pause_s else 1 + self._random.random() / 2
        stopped = pause(min(pause_s, max(left_s, self._pause_s)), self._stop)
        self._pause_s = min(2 * self._pause_s, self._pause_s_max)
        return not stopped


def pause(seconds: float, stop: threading.Event | None = None) -> bool:
    """Sleep, but not past `stop`; return whether that was set."""
    return (threading.Event() if stop is None else stop).wait(seconds)


@contextmanager
def stop_on_signals() -> Iterator[threading.Event]:
    """Yield an event that SIGTERM and SIGINT set while the block runs.

    Python delivers signals to the main thread only: in any other thread nothing sets the event.
    """
    stop = threading.Event()
    in_main = threading.current_thread() is threading.main_thread()
    before: dict[signal.Signals, Any] = {}
    try:
        for number in (signal.SIGTERM, signal.SIGINT) if in_main else ():
            before[number] = signal.getsignal(number)
            signal.signal(number, lambda *_: stop.set())
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def repeating(act: Callable[[], bool], *, every_s: float, name: str) -> Iterator[None]:
    """While the block runs, call `act` every `every_s` seconds from a thread of its own, until it returns False.

    When the block ends, a call in progress is waited for, up to 10 seconds.
    """
    ended = threading.Event()
    thread: threading.Thread | None = None

    def run() -> None:
        while not ended.wait(every_s) and act():
            pass

    try:
        thread = threads.spawn(run, name=name)
        yield
    finally:
        ended.set()
        if thread is not None:
            thread.join(_LAST_CALL_S)
