"""Engines: where the heavy part of a job runs.

An `Engine` takes a function's name and plain arguments and returns a `Handle`. `thread` runs the function on a few
threads of this process, `process` in a few worker processes; others (Spark) are added to `Engines` under a name of
their own.

Thread: any. Each slot of a pool is one thread that waits for work; a slot of `process` owns one worker process.
Invariants: (1) every handle is answered once: with a result, an error, or a cancellation at shutdown at the latest.
(2) at most `waiting_max` calls wait. (3) after `shutdown` no worker process is left.
"""

from __future__ import annotations

import functools
import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from penstock.errors import Backpressure, Closed, Invalid, PenstockError, WaitExpired
from penstock.host import threads
from penstock.host.clock import Clock, SystemClock
from penstock.scheduler.processes import ProcessSlot, interpreter
from penstock.scheduler.work import Plain, WorkCancelled, WorkerLost, WorkFailed, check_name, pack, perform, unpack

_log = logging.getLogger(__name__)

_POLL_S = 0.05  # between two checks of the stop signal of a call
_KILL_S_MAX = 10.0  # for a killed process to be gone


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """How much an engine does at once."""

    workers_max: int = 2
    waiting_max: int = 100
    idle_s: float = 60.0  # after which a worker process ends; the next call starts another
    start_timeout_s: float = 30.0  # for a worker process to answer; after that the call runs in a thread
    shutdown_timeout_s: float = 10.0  # at the interpreter's exit

    def __post_init__(self) -> None:
        for name in ("workers_max", "waiting_max"):
            if getattr(self, name) < 1:
                raise Invalid(f"{name} is {getattr(self, name)}: give 1 or more")
        for name in ("idle_s", "start_timeout_s", "shutdown_timeout_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise Invalid(f"{name} is {getattr(self, name)}: give seconds, more than 0")


@dataclass(frozen=True, kw_only=True)
class EngineStatistics:
    """Counters of a pool since it was created."""

    name: str
    waiting: int
    running: int
    succeeded: int
    failed: int  # cancelled ones included
    workers_lost: int


class Handle:
    """A submitted call."""

    def __init__(self, function: str, payload: bytes, cancel: Callable[[Handle], None]) -> None:
        self.function = function
        self.payload = payload
        self.stop = threading.Event()  # asks the function to end
        self.kill = threading.Event()  # ends the process under it, where there is one
        self._cancel = cancel
        self._lock = threads.lock("scheduler.handle")
        self._answered = threading.Event()
        self._result: bytes = b""  # set before _answered
        self._error: PenstockError | None = None  # set before _answered

    def result(self, timeout_s: float) -> Plain:
        """Return the result, or raise the error of the call; `WaitExpired` if it has not ended after `timeout_s`."""
        if not self._answered.wait(timeout_s):
            raise WaitExpired(f"{self.function} has not ended in {timeout_s} s: wait on, or cancel it")
        if self._error is not None:
            raise self._error
        return unpack(self._result)

    def wait(self, stop: Callable[[], bool]) -> Plain:
        """Wait for the result, as long as it takes; cancel the call as soon as `stop` returns True."""
        while True:
            try:
                return self.result(_POLL_S)
            except WaitExpired:
                if stop():
                    self.cancel()  # the next round finds it cancelled

    def done(self) -> bool:
        return self._answered.is_set()

    def cancel(self) -> None:
        """Do not start the call, or end it: in a thread when the function checks its signal, in a process at once.

        `result` says when it has ended: it raises `WorkCancelled`, or returns a result that came first.
        """
        self._cancel(self)

    def answer(self, result: bytes, error: PenstockError | None) -> bool:
        """For engines: set the outcome. False if there is one already."""
        with self._lock:
            if self._answered.is_set():
                return False
            self._result, self._error = result, error
            self._answered.set()
            return True


class Engine(Protocol):
    """Runs functions by name."""

    def submit(self, function: str, arguments: Mapping[str, Plain]) -> Handle:
        """Queue a call. `Backpressure` if too many wait."""

    def shutdown(self, timeout_s: float) -> bool:
        """Ask running calls to stop, wait for them, then end them by force; False if some could not be ended."""


class Slot(Protocol):
    """Runs one call at a time, for one thread."""

    def run(self, function: str, payload: bytes, stop: threading.Event, kill: threading.Event) -> bytes:
        """Run a call and return its packed result, or raise a `PenstockError`."""

    def close(self) -> None:
        """End the worker process, if there is one."""


class ThreadSlot:
    """Runs calls in its thread, where nothing can end them by force."""

    def run(self, function: str, payload: bytes, stop: threading.Event, kill: threading.Event) -> bytes:
        return perform(function, payload, stop)

    def close(self) -> None:
        pass


class PooledEngine:
    """An engine of a few slots in this process. An unused engine is collected after its slots have idled."""

    def __init__(self, name: str, make_slot: Callable[[], Slot], settings: EngineSettings, *, kill_s: float) -> None:
        self._name = name
        self._make_slot = make_slot
        self._settings = settings
        self._kill_s = kill_s
        self._changed = threads.condition("scheduler.engine")
        self._waiting: deque[Handle] = deque()  # guarded by _changed
        self._running: list[Handle] = []  # guarded by _changed
        self._closed = False  # guarded by _changed
        self._slots_made = 0  # guarded by _changed
        self._slots_alive = 0  # whose threads and processes may still exist; guarded by _changed
        self._slots_serving = 0  # of these, slots that will take another call; guarded by _changed
        self._slots_idle = 0  # of these, slots that wait for a call; guarded by _changed
        self._succeeded = self._failed = self._lost = 0  # guarded by _changed
        timeout_s = settings.shutdown_timeout_s
        self._forget_exit = threads.at_exit(self, lambda engine: engine.shutdown(timeout_s))

    def submit(self, function: str, arguments: Mapping[str, Plain]) -> Handle:
        check_name(function)
        handle = Handle(function, pack(arguments), self._cancel)
        with self._changed:
            if self._closed:
                raise Closed(f"the engine {self._name} was shut down: create a new one")
            if len(self._waiting) >= self._settings.waiting_max:
                raise Backpressure(f"{len(self._waiting)} calls wait for the engine {self._name} (limit): retry later")
            if len(self._waiting) >= self._slots_idle and self._slots_serving < self._settings.workers_max:
                threads.spawn(self._serve, name=f"penstock-{self._name}-{self._slots_made + 1}")
                self._slots_made += 1
                self._slots_alive += 1
                self._slots_serving += 1
            self._waiting.append(handle)
            self._changed.notify()
        return handle

    def shutdown(self, timeout_s: float) -> bool:
        self._forget_exit()
        with self._changed:
            self._closed = True
            waiting, running = list(self._waiting), list(self._running)
            self._waiting.clear()
            self._failed += len(waiting)
            self._changed.notify_all()
        for handle in waiting:
            handle.answer(b"", WorkCancelled(f"{handle.function} had not begun when its engine was shut down"))
        for handle in running:
            handle.stop.set()
        if self._ended(timeout_s):
            return True
        for handle in running:
            handle.kill.set()
        if self._ended(self._kill_s):
            return True
        for handle in running:
            if handle.answer(b"", WorkCancelled(f"{handle.function} had not ended when its engine was shut down")):
                _log.warning("%s still runs after the shutdown of its engine: nothing can end it", handle.function)
        return False

    def statistics(self) -> EngineStatistics:
        with self._changed:
            return EngineStatistics(
                name=self._name,
                waiting=len(self._waiting),
                running=len(self._running),
                succeeded=self._succeeded,
                failed=self._failed,
                workers_lost=self._lost,
            )

    def _cancel(self, handle: Handle) -> None:
        with self._changed:
            waited = handle in self._waiting
            if waited:
                self._waiting.remove(handle)
                self._failed += 1
        handle.stop.set()
        handle.kill.set()
        if waited:
            handle.answer(b"", WorkCancelled(f"{handle.function} was cancelled before it began"))

    def _ended(self, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self._slots_alive, timeout_s)

    def _serve(self) -> None:
        """Serve calls: the body of a slot's thread."""
        slot = self._make_slot()
        try:
            while (handle := self._take()) is not None:
                self._run(slot, handle)
        finally:
            slot.close()
            with self._changed:
                self._slots_alive -= 1
                self._changed.notify_all()

    def _take(self) -> Handle | None:
        """Return the next call; None if the slot must end, because it idled too long or the pool was closed."""
        with self._changed:
            self._slots_idle += 1
            self._changed.wait_for(lambda: self._waiting or self._closed, self._settings.idle_s)
            self._slots_idle -= 1
            if not self._waiting:
                self._slots_serving -= 1  # together with the decision: the next call starts a new slot
                return None
            handle = self._waiting.popleft()
            self._running.append(handle)
            return handle

    def _run(self, slot: Slot, handle: Handle) -> None:
        result, error = b"", None
        try:
            result = slot.run(handle.function, handle.payload, handle.stop, handle.kill)
        except PenstockError as failure:
            error = failure.typed() if isinstance(failure, WorkFailed) else failure
        except BaseException as failure:
            _log.error("the engine %s failed with %s", self._name, handle.function, exc_info=True)
            error = WorkerLost(f"{handle.function} was not run to its end ({failure}): it may be retried")
        if isinstance(error, WorkerLost) and handle.kill.is_set():
            error = WorkCancelled(f"{handle.function} was cancelled while it ran")
        with self._changed:
            self._running.remove(handle)
            self._succeeded += error is None
            self._failed += error is not None
            self._lost += isinstance(error, WorkerLost)
        handle.answer(result, error)


def thread_engine(settings: EngineSettings | None = None) -> PooledEngine:
    """Return an engine that runs calls on threads of this process."""
    return PooledEngine("thread", ThreadSlot, settings or EngineSettings(), kill_s=0.0)


def process_engine(
    settings: EngineSettings | None = None, *, clock: Clock | None = None, executable: str | None = None
) -> PooledEngine:
    """Return an engine that runs calls in worker processes, or on threads if none can be started."""
    settings, clock = settings or EngineSettings(), clock or SystemClock()
    python = interpreter() if executable is None else executable
    make_slot = functools.partial(ProcessSlot, clock=clock, executable=python, start_timeout_s=settings.start_timeout_s)

    return PooledEngine("process", make_slot, settings, kill_s=_KILL_S_MAX)


class Engines:
    """The engines of a store by name, each created at first use."""

    def __init__(self, makers: Mapping[str, Callable[[], Engine]] | None = None) -> None:
        self._lock = threads.lock("scheduler.engines")
        self._makers = dict(makers or {"thread": thread_engine, "process": process_engine})  # guarded by _lock
        self._engines: dict[str, Engine] = {}  # guarded by _lock
        self._closed = False  # guarded by _lock

    def add(self, name: str, make: Callable[[], Engine]) -> None:
        """Add an engine under a name."""
        with self._lock:
            if name in self._makers:
                raise Invalid(f"an engine named {name} exists: give this one another name")
            self._makers[name] = make

    def get(self, name: str) -> Engine:
        with self._lock:
            if self._closed:
                raise Closed("the engines were shut down: create new ones")
            if name not in self._makers:
                raise Invalid(f"no engine is named {name}: there are {', '.join(sorted(self._makers))}")
            if name not in self._engines:
                self._engines[name] = self._makers[name]()
            return self._engines[name]

    def shutdown(self, timeout_s: float) -> bool:
        """Shut down all engines in turn, with `timeout_s` for each; False if one could not be ended."""
        with self._lock:
            self._closed = True
            engines, self._engines = list(self._engines.values()), {}
        ended = [
            engine.shutdown(timeout_s) for engine in engines
        ]  # all of them: a failing engine does not stop the others
        return all(ended)
