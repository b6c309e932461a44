"""Named threads, plain locks and closing at exit."""

from __future__ import annotations

import gc
import logging
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial

import pytest
from interrupts import every_point, interrupted_at, where

from penstock.host import threads


def test_locks_are_the_plain_ones_of_the_standard_library() -> None:
    assert type(threads.lock("a")) is type(threading.Lock())
    assert type(threads.rlock("a")) is type(threading.RLock())


def test_a_condition_wakes_sleepers_in_order_and_keeps_time() -> None:
    condition = threads.condition("a")
    woken: list[int] = []

    def sleep(number: int) -> None:
        with condition:
            woken.append(-number)
            if condition.wait(20):
                woken.append(number)

    sleepers = [threading.Thread(target=sleep, args=(number,)) for number in (1, 2, 3)]
    for number, sleeper in enumerate(sleepers, 1):
        sleeper.start()
        until(lambda number=number: len(woken) == number)  # type: ignore[misc]
    with condition:
        condition.notify()
    until(lambda: woken == [-1, -2, -3, 1])
    with condition:
        condition.notify_all()
    for sleeper in sleepers:
        sleeper.join(20)
    assert sorted(woken) == [-3, -2, -1, 1, 2, 3]
    with condition:
        assert not condition.wait(0.01)
        assert condition.wait_for(lambda: "yes", 1) == "yes"
        assert not condition.wait_for(lambda: False, 0.02)
    with pytest.raises(RuntimeError):
        condition.wait(0.01)  # not taken


def test_a_wait_gives_up_a_lock_that_was_taken_twice() -> None:
    condition = threads.condition("a")

    def notify() -> None:
        with condition:
            condition.notify()

    with condition, condition:
        other = threading.Thread(target=notify)
        other.start()
        assert condition.wait(20)
    other.join(20)
    assert condition.acquire(timeout=0)
    condition.release()


def test_an_interrupt_never_leaves_a_condition_taken() -> None:
    condition = threads.condition("a")

    def use() -> None:
        with condition:
            condition.wait(0.0)
        with condition:
            condition.notify()

    for _ in every_point(use):
        assert not condition._is_owned(), where[-1]  # type: ignore[attr-defined]


def test_what_is_uninterrupted_ends_before_the_interrupt_is_raised() -> None:
    effects: list[str] = []

    def act() -> str:
        time.sleep(0.001)
        effects.append("made")
        return "value"

    points = 0
    for _ in every_point(lambda: threads.run_uninterrupted(act, undo=lambda _: effects.append("undone"))):
        points += 1
        assert effects in ([], ["made"], ["made", "undone"]), where[-1]
        effects.clear()
    assert points > 8
    with pytest.raises(ValueError, match="bad"):
        threads.run_uninterrupted(lambda: int("bad"))


def test_interrupted_calls_are_undone_and_their_helpers_end() -> None:
    class Alarm(Exception):
        pass

    def ring(number: int, frame: object) -> None:
        raise Alarm

    gate, undone = threading.Event(), list[bool]()
    before = signal.signal(signal.SIGALRM, ring)
    try:
        for _ in range(12):  # each call goes on after its interrupt, in a helper of its own
            with pytest.raises(Alarm):
                signal.setitimer(signal.ITIMER_REAL, 0.02)
                threads.run_interruptible(gate.wait, undo=undone.append)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert not undone
    gate.set()
    until(lambda: undone == [True] * 12)
    until(lambda: sum(thread.name == "penstock-helper" for thread in threading.enumerate()) <= 4)
    assert threads.run_interruptible(lambda: 7) == 7


@pytest.mark.parametrize("keep", [True, False])
def test_an_interrupt_at_any_point_loses_no_helper(keep: bool) -> None:
    """A helper that is neither at work nor kept for the next call would sleep for ever."""

    def act() -> None:
        threads.run_interruptible(lambda: None)

    def end_helpers() -> None:
        while threads._helpers and not keep:
            threads._helpers.pop()._wakeup.release()  # without a call it ends

    def count() -> int:
        return sum(thread.name == "penstock-helper" and thread.is_alive() for thread in threading.enumerate())

    act()
    end_helpers()
    points = 0
    for _ in every_point(act):
        points += 1
        until(lambda: count() == len(threads._helpers))
        end_helpers()
    assert points >= 3


def test_only_what_a_handler_raised_is_an_interrupt() -> None:
    class Handler:
        def __call__(self, number: int, frame: object) -> None:
            raise TimeoutError("an alarm")

    before = signal.getsignal(signal.SIGUSR2)
    try:
        for handler in (Handler(), Handler().__call__, partial(Handler.__call__, Handler())):
            signal.signal(signal.SIGUSR2, handler)
            with pytest.raises(TimeoutError) as raised:
                signal.raise_signal(signal.SIGUSR2)
            with pytest.raises(TimeoutError, match="an alarm"):
                threads.raise_interrupt(raised.value)
    finally:
        signal.signal(signal.SIGUSR2, before)
    try:
        raise TimeoutError
    except TimeoutError as error:
        threads.raise_interrupt(error)


def until(true: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end_s, "it never came"
        time.sleep(0.001)


def test_an_installed_maker_makes_locks_until_it_is_taken_away() -> None:
    calls: list[tuple[str, bool]] = []

    def maker(name: str, reentrant: bool) -> threads.Mutex:
        calls.append((name, reentrant))
        return threading.RLock() if reentrant else threading.Lock()

    previous = threads.install_lock_maker(maker)
    try:
        threads.lock("a")
        threads.rlock("b")
        with threads.condition("c"):
            pass
    finally:
        threads.install_lock_maker(previous)
    threads.lock("d")
    assert calls == [("a", False), ("b", True), ("c", False)]


def test_a_spawned_thread_is_a_named_daemon() -> None:
    started: list[threading.Thread] = []
    thread = threads.spawn(lambda: started.append(threading.current_thread()), name="penstock-test")
    thread.join(10)
    assert started == [thread]
    assert (thread.name, thread.daemon) == ("penstock-test", True)


def test_an_error_that_ends_a_thread_is_logged_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise SystemExit("no way")

    with caplog.at_level(logging.CRITICAL):
        threads.spawn(fail, name="penstock-test").join(10)
    (record,) = caplog.records
    assert "penstock-test" in record.getMessage()
    assert record.exc_info is not None
    assert record.exc_info[0] is SystemExit


_AT_EXIT = """
import os, sys
from penstock.host.threads import at_exit

class Owner:
    def __init__(self, name): self.name = name
    def close(self): print(self.name, flush=True)

first, second, gone, closed = Owner("first"), Owner("second"), Owner("gone"), Owner("closed")
for owner in (first, second, gone):
    at_exit(owner, Owner.close)
at_exit(closed, Owner.close)()
del gone, owner
if os.fork() == 0:
    sys.exit()  # runs the child's exit functions: none of them may close what the parent owns
os.wait()
"""


def test_at_exit_closes_in_reverse_order_what_still_lives_and_only_in_the_process_that_asked() -> None:
    done = subprocess.run([sys.executable, "-c", _AT_EXIT], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["second", "first"]
    assert done.stderr == ""


_FINALIZERS = """
import weakref
from penstock.host.threads import at_exit

class Owner:
    pass

owner = Owner()
at_exit(owner, lambda _: print("closed"))
weakref.finalize(owner, print, "finalized")  # the first of a library that the owner uses, such as pyarrow
"""


def test_at_exit_closes_before_the_finalizers_of_libraries_run() -> None:
    """Those of a connection wait for calls under way, which only `close` ends."""
    done = subprocess.run([sys.executable, "-c", _FINALIZERS], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["closed", "finalized"]


def test_at_exit_keeps_nothing_alive() -> None:
    class Owner:
        pass

    owner = Owner()
    threads.at_exit(owner, lambda _: None)
    alive = [thing for thing in gc.get_objects() if isinstance(thing, Owner)]
    assert alive == [owner]
    del owner, alive
    assert not [thing for thing in gc.get_objects() if isinstance(thing, Owner)]


def test_an_interrupted_notify_loses_nobody_who_sleeps() -> None:
    """A worker waits without a deadline: once it is forgotten, nothing is applied any more."""
    point, count = 0, 1
    while count >= point:
        point += 1
        condition, woken = threads.condition("test"), list[bool]()

        def sleep(condition: threading.Condition = condition, woken: list[bool] = woken) -> None:
            with condition:
                woken.append(condition.wait(20))

        def notify(condition: threading.Condition = condition) -> None:
            with condition:
                condition.notify()

        thread = threading.Thread(target=sleep)
        thread.start()
        while not condition._sleepers:  # type: ignore[attr-defined]
            pass
        count = interrupted_at(point, notify)
        notify()
        thread.join(30)
        assert woken == [True], where[-1]
        assert not condition._sleepers  # type: ignore[attr-defined]
    assert point > 3
