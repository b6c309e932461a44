"""Retries up to a deadline, pauses that a signal ends, and acts repeated beside a block."""

from __future__ import annotations

import signal
import threading

import pytest

from penstock.host.waiting import Retries, pause, repeating, stop_on_signals
from penstock.testing import FakeClock

LONG_S = 60.0


def test_attempts_go_on_until_the_deadline() -> None:
    clock = FakeClock()
    retries = Retries(clock, clock.monotonic_s() + 10, pause_s=0.0)
    for _ in range(10):
        assert not retries.expired()
        assert retries.again()
        clock.advance(1)
    assert retries.expired()
    assert not retries.again()


def test_a_stop_signal_ends_a_pause_and_the_attempts() -> None:
    clock, stop = FakeClock(), threading.Event()
    retries = Retries(clock, clock.monotonic_s() + LONG_S, pause_s=LONG_S, stop=stop)
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(retries.again()))
    thread.start()
    stop.set()
    thread.join(LONG_S / 2)
    assert answers == [False]
    assert pause(LONG_S, stop)
    assert not pause(0.0)


class Chosen:
    """A source of one number."""

    def __init__(self, number: float) -> None:
        self._number = number

    def random(self) -> float:
        return self._number

    def randbytes(self, n: int) -> bytes:
        return bytes(n)


def test_pauses_differ_by_chance_and_are_no_shorter_than_the_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    paused: list[float] = []
    monkeypatch.setattr("penstock.host.waiting.pause", lambda seconds, _: paused.append(seconds))
    clock = FakeClock()
    for number in (0.0, 1.0):
        retries = Retries(clock, 10 + clock.monotonic_s(), pause_s=0.1, pause_s_max=0.4, random=Chosen(number))
        assert all(retries.again() for _ in range(3))
        assert retries.again(2.0)
        assert retries.again(50.0)  # not past the deadline
    assert paused == pytest.approx([0.05, 0.1, 0.2, 2.0, 10.0, 0.1, 0.2, 0.4, 3.0, 10.0])


def test_pauses_double_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    paused: list[float] = []
    monkeypatch.setattr("penstock.host.waiting.pause", lambda seconds, _: paused.append(seconds))
    clock = FakeClock()
    growing = Retries(clock, 10 + clock.monotonic_s(), pause_s=0.1, pause_s_max=0.5)
    steady = Retries(clock, 10 + clock.monotonic_s(), pause_s=0.1)
    assert all(growing.again() for _ in range(5))
    assert all(steady.again() for _ in range(3))
    assert paused == pytest.approx([0.1, 0.2, 0.4, 0.5, 0.5, 0.1, 0.1, 0.1])


def test_an_act_is_repeated_while_the_block_runs_and_never_after() -> None:
    calls, enough = [], threading.Event()

    def act() -> bool:
        calls.append(threading.current_thread().name)
        if len(calls) == 3:
            enough.set()
        return True

    with repeating(act, every_s=0.001, name="penstock-beat"):
        assert enough.wait(LONG_S)
    assert set(calls) == {"penstock-beat"}
    assert not any(thread.name == "penstock-beat" for thread in threading.enumerate())


def test_an_act_that_returns_false_is_not_repeated() -> None:
    calls, called = [], threading.Event()

    def act() -> bool:
        calls.append(1)
        called.set()
        return False

    with repeating(act, every_s=0.001, name="penstock-once"):
        assert called.wait(LONG_S)
        for thread in threading.enumerate():
            if thread.name == "penstock-once":
                thread.join(LONG_S)
    assert calls == [1]


def test_an_error_of_the_block_ends_the_repetition() -> None:
    with pytest.raises(KeyboardInterrupt), repeating(lambda: True, every_s=LONG_S / 2, name="penstock-long"):
        raise KeyboardInterrupt
    assert not any(thread.name == "penstock-long" for thread in threading.enumerate())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_set_the_event_of_a_block_and_only_there(number: signal.Signals) -> None:
    heard: list[int] = []
    before = signal.signal(number, lambda *_: heard.append(1))
    try:
        with stop_on_signals() as stop:
            assert not stop.is_set()
            signal.raise_signal(number)
            assert stop.is_set()
        assert heard == []
        signal.raise_signal(number)
        assert heard == [1]
    finally:
        signal.signal(number, before)


def test_outside_the_main_thread_no_handler_is_changed() -> None:
    handlers: list[object] = []

    def run() -> None:
        with stop_on_signals():
            handlers.append(signal.getsignal(signal.SIGTERM))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join(LONG_S)
    assert handlers == [before]
