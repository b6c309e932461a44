"""Named threads, plain locks and closing at exit."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import threading

import pytest

from penstock.host import threads


def test_locks_are_the_plain_ones_of_the_standard_library() -> None:
    assert type(threads.lock("a")) is type(threading.Lock())
    assert type(threads.rlock("a")) is type(threading.RLock())
    assert type(threads.condition("a")) is threading.Condition


def test_an_installed_maker_makes_locks_until_it_is_taken_away() -> None:
    made: list[tuple[str, bool]] = []

    def maker(name: str, reentrant: bool) -> threads.Mutex:
        made.append((name, reentrant))
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
    assert made == [("a", False), ("b", True), ("c", False)]


def test_a_spawned_thread_is_a_named_daemon() -> None:
    seen: list[threading.Thread] = []
    thread = threads.spawn(lambda: seen.append(threading.current_thread()), name="penstock-test")
    thread.join(10)
    assert seen == [thread]
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


def test_at_exit_keeps_nothing_alive() -> None:
    class Owner:
        pass

    owner = Owner()
    threads.at_exit(owner, lambda _: None)
    alive = [found for found in gc.get_objects() if isinstance(found, Owner)]
    assert alive == [owner]
    del owner, alive
    assert not [found for found in gc.get_objects() if isinstance(found, Owner)]
