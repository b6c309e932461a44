"""The checker of lock orders: it must see what can deadlock, and only that."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from penstock.host import threads
from penstock.host.threads import Mutex
from penstock.testing.locks import LockOrderChecker, LockOrderViolation


@pytest.fixture
def checker() -> LockOrderChecker:
    return LockOrderChecker()


def locks(checker: LockOrderChecker, *names: str) -> list[Mutex]:
    with checker.installed():
        return [threads.lock(name) for name in names]


def in_thread(function: Callable[[], object]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()


def test_two_orders_of_two_locks_are_a_violation_though_they_never_met(checker: LockOrderChecker) -> None:
    a, b = locks(checker, "a", "b")

    def forwards() -> None:
        with a, b:
            pass

    in_thread(forwards)
    with pytest.raises(LockOrderViolation, match=r"a taken under b at .*, against .* b under a at") as caught, b, a:
        pass
    assert str(caught.value).count("test_lock_order.py:") == 2
    assert checker.violations == [caught.value]
    assert checker.order() == {"a": {"b"}, "b": set()}
    assert checker.lock_names() == []


def test_a_circle_of_three_is_a_violation(checker: LockOrderChecker) -> None:
    a, b, c = locks(checker, "a", "b", "c")
    with a, b:
        pass
    with b, c:
        pass
    with pytest.raises(LockOrderViolation, match=r"b under a .* c under b"), c, a:
        pass


def test_one_order_in_many_threads_is_none(checker: LockOrderChecker) -> None:
    a, b, c = locks(checker, "a", "b", "c")
    wrong: list[list[str]] = []

    def forwards() -> None:
        for _ in range(50):
            with a, b, c:
                names = checker.lock_names()
                wrong.extend([names] if names != ["a", "b", "c"] else [])
            with a, c:
                pass

    runners = [threading.Thread(target=forwards) for _ in range(4)]
    for runner in runners:
        runner.start()
    for runner in runners:
        runner.join(30)
    assert wrong == []
    assert checker.violations == []
    assert checker.order() == {"a": {"b", "c"}, "b": {"c"}}


def swallow(first: Mutex, second: Mutex) -> None:
    try:
        with first, second:
            pass
    except LockOrderViolation:
        pass


def run_with_a_thread_that_swallows() -> None:
    with LockOrderChecker().installed():
        a, b = threads.lock("a"), threads.lock("b")
        with a, b:
            pass
        in_thread(lambda: swallow(b, a))


def test_a_violation_that_a_thread_swallowed_is_raised_at_the_end() -> None:
    with pytest.raises(LockOrderViolation):
        run_with_a_thread_that_swallows()


def test_two_locks_of_one_name_have_no_order_and_may_not_be_nested(checker: LockOrderChecker) -> None:
    one, other = locks(checker, "partition", "partition")
    with pytest.raises(LockOrderViolation), one, other:
        pass


def test_a_plain_lock_taken_twice_is_a_violation_and_not_a_hang(checker: LockOrderChecker) -> None:
    (a,) = locks(checker, "a")
    with pytest.raises(LockOrderViolation, match="twice"), a, a:
        pass


def test_a_reentrant_lock_may_be_taken_again_even_under_another() -> None:
    with LockOrderChecker().installed() as checker:
        a, b = threads.rlock("a"), threads.lock("b")
        with a, b, a:
            assert checker.lock_names() == ["a", "b", "a"]
        assert checker.lock_names() == []


def test_a_try_that_does_not_wait_sets_no_order(checker: LockOrderChecker) -> None:
    a, b = locks(checker, "a", "b")
    with a, b:
        pass
    with b:
        assert a.acquire(blocking=False)
        assert checker.lock_names() == ["b", "a"]
        a.release()
    assert checker.violations == []


def test_a_condition_lets_go_of_its_lock_while_it_waits() -> None:
    with LockOrderChecker().installed() as checker:
        changed = threads.condition("changed")
        other = threads.lock("other")
        ready: list[bool] = []
        woken: list[list[str]] = []

        def wait() -> None:
            with changed:
                changed.wait_for(lambda: ready, timeout=10)
                woken.append(checker.lock_names())

        waiter = threading.Thread(target=wait)
        waiter.start()
        with other, changed:
            ready.append(True)
            changed.notify_all()
        waiter.join(10)
        assert woken == [["changed"]]
        assert checker.order() == {"other": {"changed"}}
        with pytest.raises(RuntimeError):
            changed.notify()


def test_io_with_a_lock_held_is_a_violation_unless_that_lock_is_allowed(checker: LockOrderChecker) -> None:
    a, b = locks(checker, "a", "b")
    checker.check_io("fsync of x")
    with a, b:
        checker.check_io("fsync of x", allowed=frozenset({"a", "b"}))
        with pytest.raises(LockOrderViolation, match="fsync of x with b held"):
            checker.check_io("fsync of x", allowed=frozenset({"a"}))
