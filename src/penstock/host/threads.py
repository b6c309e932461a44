"""Threads and locks, created here so that tests can watch them.

Thread: any. `lock`, `rlock` and `condition` return the plain objects of `threading`, at no extra cost, unless a test
has installed its own maker (`penstock.testing.locks` does, to check the order in which locks are taken).
Invariants: (1) a thread started here has a name, and an error that ends it is logged. (2) what `at_exit` registers is
closed at most once, and never by a forked child, whose threads are gone. (3) what is created inside `without_forks` is
in no forked child before `after_fork` knows of it.
"""

from __future__ import annotations

import _thread
import atexit
import logging
import os
import signal
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import CodeType, TracebackType
from typing import Any, Protocol, TypeVar, cast

from penstock.errors import ProcessLimit

T = TypeVar("T")

_log = logging.getLogger(__name__)


class Mutex(Protocol):
    """A lock, plain or reentrant."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool: ...

    def release(self) -> None: ...

    def __enter__(self) -> bool: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...


LockMaker = Callable[[str, bool], Mutex]
"""Makes a lock from its name and whether it is reentrant."""


def _plain(name: str, reentrant: bool) -> Mutex:
    return threading.RLock() if reentrant else threading.Lock()


_make: LockMaker = _plain


def install_lock_maker(maker: LockMaker | None) -> LockMaker:
    """Create locks by `maker` from now on (None: plain ones); return the previous maker. For tests."""
    global _make  # noqa: PLW0603 - one hook for the process, like the interpreter's own
    previous = _make
    _make = maker or _plain
    return previous


def lock(name: str) -> Mutex:
    """Return a lock. Locks of one name have the same rank in the lock order."""
    return _make(name, False)


def rlock(name: str) -> Mutex:
    """Return a reentrant lock."""
    return _make(name, True)


def condition(name: str) -> threading.Condition:
    """Return a condition with a lock of its own."""
    if _make is _plain:
        return cast(threading.Condition, SelfLockedCondition())
    return threading.Condition(cast(threading.Lock, _make(name, False)))


class SelfLockedCondition(_thread.RLock):  # type: ignore[misc]  # only the stubs call it final
    """A condition that is its own lock, so that an interrupt cannot leave it locked.

    `with threading.Condition()` runs Python code between taking the lock and entering the block, and after a wait it
    takes the lock by a call that a signal handler can end. Here `with` is the lock's own, in C, where no interrupt can
    happen, and so is taking it again after a wait.
    """

    def __init__(self) -> None:
        self._sleepers: deque[threading.Lock] = deque()  # guarded by itself

    def wait(self, timeout: float | None = None) -> bool:
        """Sleep until notified; False after `timeout` seconds. Requires: locked."""
        sleeper = threading.Lock()
        sleeper.acquire()
        limit = -1.0 if timeout is None else min(max(0.0, timeout), threading.TIMEOUT_MAX)
        thread = threading.get_ident()
        self._sleepers.append(sleeper)
        woken = False
        try:
            try:
                state = self._release_save()  # type: ignore[attr-defined]
            except BaseException:
                if not self._is_owned():  # type: ignore[attr-defined]  # the interrupt came right after it
                    self._acquire_restore((1, thread))  # type: ignore[attr-defined]
                raise
            try:
                woken = sleeper.acquire(timeout=limit)
            finally:
                self._acquire_restore(state)  # type: ignore[attr-defined]
        finally:
            if sleeper in self._sleepers:  # nobody woke it, or its waker was interrupted
                with suppress(ValueError):
                    self._sleepers.remove(sleeper)
        return woken

    def wait_for(self, predicate: Callable[[], T], timeout: float | None = None) -> T:
        """Sleep until the predicate holds or time is up; return its last value."""
        end_s = None if timeout is None else time.monotonic() + timeout
        while not (result := predicate()):
            left_s = None if end_s is None else end_s - time.monotonic()
            if left_s is not None and left_s <= 0:
                break
            self.wait(left_s)
        return result

    def notify(self, n: int = 1) -> None:
        """Wake up to `n` waiters. Requires: locked."""
        for _ in range(min(n, len(self._sleepers))):
            with suppress(RuntimeError):  # it was woken by a call that was interrupted, and has not run yet
                self._sleepers[0].release()  # first: an interrupt between the two must not lose a sleeper
            self._sleepers.popleft()

    def notify_all(self) -> None:
        """Wake all waiters. Requires: locked."""
        self.notify(len(self._sleepers))


def spawn(target: Callable[[], object], *, name: str) -> threading.Thread:
    """Start `target` in a daemon thread; an error that ends it is logged with its traceback.

    `ProcessLimit` if the system refuses the thread.
    """

    def run() -> None:
        try:
            target()
        except BaseException:
            _log.critical("thread %s ended by an error: report this as a bug", name, exc_info=True)

    thread = threading.Thread(target=run, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        if "can't start" not in str(error):
            raise
        raise ProcessLimit(f"{name}: {error}; end other threads or processes, or raise the limit") from error
    return thread


def in_main_thread() -> bool:
    """Whether this is the thread that signal handlers interrupt."""
    return threading.get_ident() == threading.main_thread().ident


def raise_interrupt(error: BaseException) -> None:
    """Raise an error again if a signal handler raised it: it is an interrupt like Ctrl-C, whatever its class.

    Programs limit the time of a call by an alarm whose handler raises `TimeoutError`, or an exception of their own.
    Code that treats an exception as a failure of the store calls this first.
    """
    if not in_main_thread():
        return
    handlers = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in handlers:
            raise error
        trace = trace.tb_next


def _code_of(handler: Any) -> CodeType | None:
    """Return the code that runs when a signal handler is called; None if it is not written in Python."""
    while isinstance(handler, partial):
        handler = handler.func
    function = getattr(handler, "__func__", handler)
    if callable(function) and not hasattr(function, "__code__"):
        function = type(function).__call__
    code = getattr(function, "__code__", None)
    return code if isinstance(code, CodeType) else None


_WAKE_S = 0.2


def run_uninterrupted(
    act: Callable[[], T], *, cancel: Callable[[], object] | None = None, undo: Callable[[T], object] | None = None
) -> T:
    """Call `act` where no signal handler can interrupt it; an interrupt meanwhile is raised after it has ended.

    Signals interrupt only the main thread, so from there `act` runs in another one. At an interrupt `cancel` asks it to
    end early, and `undo` discards its result, which the caller will not get. It costs a thread: not for hot paths.
    """
    if not in_main_thread():
        return act()
    call = _Call(act)
    interrupt: BaseException | None = None
    try:
        call.begin()
    except BaseException as error:
        if not call.allowed:
            raise
        interrupt = error
    while True:
        try:
            while not call.outcome:
                call.ended.acquire(timeout=_WAKE_S)
            break
        except BaseException as error:
            interrupt = interrupt or error
            if cancel is not None:
                cancel()
    succeeded, value = call.outcome[0]
    if interrupt is not None:
        if succeeded and undo is not None:
            undo(value)
        raise interrupt
    if not succeeded:
        raise value
    return value  # type: ignore[no-any-return]


class _Call:
    """A function in a thread of its own, which waits for permission: an interrupt may come before it is given."""

    def __init__(self, act: Callable[[], Any]) -> None:
        self._act = act
        self.allowed = False
        self._permit = threading.Lock()
        self._permit.acquire()
        self.ended = threading.Lock()
        self.ended.acquire()
        self.outcome: list[tuple[bool, Any]] = []  # (True, its result) or (False, its error)

    def begin(self) -> None:
        """Start the thread. After an interrupt here, `allowed` says whether the function runs nevertheless."""
        try:
            threading.Thread(target=self._run, name="penstock-call", daemon=True).start()
        except BaseException as error:
            if isinstance(error, RuntimeError) and "can't start" in str(error):  # the interpreter is ending
                self.allowed = True
                self._call()
                return
            self._permit.release()  # if the thread was started after all, it ends at once
            raise _start_error(error) from None
        self.allowed = True
        self._permit.release()

    def _run(self) -> None:
        self._permit.acquire()
        if self.allowed:
            self._call()

    def _call(self) -> None:
        try:
            value = self._act()
        except BaseException as error:
            self.outcome.append((False, error))
        else:
            self.outcome.append((True, value))
        finally:
            self.ended.release()


def _start_error(error: BaseException) -> BaseException:
    """Return why a thread was not started: an interrupt meanwhile surfaces as an error of what it left behind."""
    return (error.__context__ or error) if isinstance(error, (RuntimeError, KeyError)) else error


class _Helper:
    """A thread that makes calls for the main thread, one at a time."""

    def __init__(self) -> None:
        self._wakeup = threading.Lock()
        self._wakeup.acquire()
        self._call: _HelpedCall | None = None
        self.is_running = False  # it waits for a call, or makes one

    def start(self) -> None:
        """Start the thread; after an interrupt `is_running` says whether it stays."""
        self._thread = threading.Thread(target=self._run, name="penstock-helper", daemon=True)
        try:
            self._thread.start()
        except BaseException as error:
            self._wakeup.release()  # if the thread was started after all, it ends at once
            raise _start_error(error) from None
        self.is_running = True

    def give(self, call: _HelpedCall) -> None:
        self._call = call
        call.is_given = True  # an interrupt comes before these two lines, or after the third
        self._wakeup.release()

    def end(self) -> None:
        """End the thread of a helper that is idle, and is not in the list any more."""
        self._wakeup.release()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._wakeup.acquire()
            call, self._call = self._call, None
            if call is None or not call.make(self):
                return
            del call  # its result may be large


class _HelpedCall:
    def __init__(self, act: Callable[[], Any]) -> None:
        self._act = act
        self.is_given = False  # to a helper, which makes it
        self.value: Any = None
        self.error: BaseException | None = None
        self.ended = threading.Lock()
        self.ended.acquire()
        self._undo: list[Callable[[Any], object]] = []  # `append` and `pop` are atomic

    def drop(self, undo: Callable[[Any], object]) -> None:
        """Undo the call once it has ended: its caller was interrupted and will not get the result."""
        self._undo.append(undo)
        if self.ended.acquire(blocking=False):
            self._undo_dropped()

    def _undo_dropped(self) -> None:
        try:
            undo = self._undo.pop()
        except IndexError:  # the other thread does it
            return
        if self.error is None:
            try:
                undo(self.value)
            except Exception:  # it must not end a helper
                _log.warning("an interrupted call could not be undone", exc_info=True)

    def make(self, helper: _Helper) -> bool:
        """Make the call, and keep its helper for the next one; False if enough are kept."""
        try:
            self.value = self._act()
        except BaseException as error:
            self.error = error
        has_room = len(_helpers) < _HELPERS_KEPT
        if has_room:
            _helpers.append(helper)
        self.ended.release()
        if self._undo:
            self._undo_dropped()
        return has_room


_HELPERS_KEPT = 4
_helpers: list[_Helper] = []  # idle ones; each of its methods is atomic


def run_interruptible(act: Callable[[], T], *, undo: Callable[[T], object] | None = None) -> T:
    """Call `act`, which may wait in C code, so that Ctrl-C ends the wait at once.

    Signals interrupt only Python code of the main thread, so from there `act` runs in another one. After an interrupt
    it goes on to its end, and its result is dropped; `undo` gets it then.
    """
    if not in_main_thread():
        return act()
    call = _HelpedCall(act)
    helper: _Helper | None = None
    try:
        if _helpers:
            helper = _helpers[0]  # only this thread removes them
            _helpers.remove(helper)
        else:
            helper = _Helper()
            helper.start()
        helper.give(call)
        call.ended.acquire()
    except BaseException as error:
        if call.is_given:
            if undo is not None:
                call.drop(undo)
        elif isinstance(error, RuntimeError) and "can't" in str(error):  # no thread: the interpreter is ending
            return act()
        elif helper is not None and helper.is_running and helper not in _helpers:
            _helpers.append(helper)  # it has nothing to do, and would wait for ever
        raise
    if call.error is not None:
        try:
            raise call.error
        finally:
            call.error = None  # the error's traceback refers to this call
    return call.value  # type: ignore[no-any-return]


def end_idle_helpers() -> None:
    """End the threads that `run_interruptible` keeps: a closed connection leaves none. The next call starts one."""
    while in_main_thread() and _helpers:  # only this thread removes them
        _helpers.pop().end()


os.register_at_fork(after_in_child=_helpers.clear)  # a child has none of these threads


# The first one registers the exit handler of all finalizers: before those of `at_exit`, so that it runs after them.
# Those of pyarrow close the connections of a client, and wait for its calls: `close` ends these first.
weakref.finalize(_log, bool).detach()


def at_exit(owner: T, close: Callable[[T], object]) -> Callable[[], None]:
    """Call `close(owner)` when the interpreter exits, last registered first. Returns a function that unregisters it.

    Keeps no reference to `owner`, so `close` must not either: pass a function, not a bound method.
    """
    process = os.getpid()

    def run() -> None:
        alive = reference()
        if alive is not None and os.getpid() == process:
            close(alive)

    def forget(_: object = None) -> None:
        atexit.unregister(run)

    reference = weakref.ref(owner, forget)
    atexit.register(run)
    return forget


_in_children: weakref.WeakKeyDictionary[Any, Callable[[Any], object]] = weakref.WeakKeyDictionary()
_forks = threading.RLock()  # reentrant: a signal handler may fork inside


def without_forks() -> Mutex:
    """Return a lock under which no thread forks: hold it from creating something until `after_fork` knows of it."""
    return _forks


def after_fork(owner: T, act: Callable[[T], object]) -> None:
    """Call `act(owner)` in every forked child, before anything else runs there. Keeps no reference to `owner`."""
    _in_children[owner] = act


def _after_fork() -> None:
    _forks.release()
    for owner, act in list(_in_children.items()):
        try:
            act(owner)
        except Exception:  # a failing act must not stop the others
            _log.exception("%s was not released in a forked child: report this as a bug", type(owner).__name__)


os.register_at_fork(before=_forks.acquire, after_in_parent=_forks.release, after_in_child=_after_fork)


def cores() -> int:
    """Return how many threads of this process can run at once."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def process_id() -> int:
    """Return the id of this process: another one after a fork."""
    return os.getpid()


def process_name() -> str:
    """This process, as the files that it builds name it: host and process id."""
    return f"{socket.gethostname()}:{process_id()}"
