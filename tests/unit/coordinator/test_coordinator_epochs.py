"""Epochs, watermarks, waiters and triggers by themselves."""

from __future__ import annotations

import itertools

import pytest

from penstock.coordinator.epochs import COUNT_BITS, INCARNATION_MAX, Epoch, EpochTracker
from penstock.coordinator.states import TRANSITIONS, State, Trigger, choose_trigger
from penstock.coordinator.waiting import Waiter, Waiters
from penstock.errors import Invalid, Lost


def test_watermarks_keep_their_order() -> None:
    epochs = EpochTracker(3)
    assert (epochs.incarnation, epochs.count, epochs.none) == (3, 0, 3 << COUNT_BITS)
    epochs.last = Epoch(epochs.none + 5)
    with pytest.raises(AssertionError):
        epochs.advance_durable(Epoch(epochs.none + 6))
    epochs.advance_durable(Epoch(epochs.none + 4))
    for back in (3, 4):
        with pytest.raises(AssertionError):
            epochs.advance_durable(Epoch(epochs.none + back))
    with pytest.raises(AssertionError):
        epochs.advance_applied(Epoch(epochs.none + 5))
    epochs.advance_applied(Epoch(epochs.none + 4))
    with pytest.raises(AssertionError):
        epochs.advance_applied(Epoch(epochs.none + 4))


def test_only_epochs_given_out_here_pass() -> None:
    epochs = EpochTracker(3)
    epochs.last = Epoch(epochs.none + 5)
    assert epochs.check(epochs.none + 5) == epochs.last
    with pytest.raises(Lost, match="incarnation 2, this is 3"):
        epochs.check((2 << COUNT_BITS) + 1)
    with pytest.raises(Invalid):
        epochs.check(epochs.none + 6)
    with pytest.raises(Lost):
        epochs.check(0)


@pytest.mark.parametrize("incarnation", [0, -1, INCARNATION_MAX + 1])
def test_an_epoch_fits_into_64_bits(incarnation: int) -> None:
    with pytest.raises(Invalid):
        EpochTracker(incarnation)
    assert EpochTracker(INCARNATION_MAX).none.bit_length() <= 64


def test_commands_come_before_the_timer_and_the_timer_before_the_size() -> None:
    for asked, timer_due, size_due in itertools.product([False, True], repeat=3):
        wanted = [Trigger.EXPLICIT] * asked + [Trigger.TIMER] * timer_due + [Trigger.SIZE] * size_due
        chosen = choose_trigger(asked=asked, timer_due=timer_due, size_due=size_due)
        assert chosen is (wanted[0] if wanted else None)


def test_every_state_can_fail_and_be_left() -> None:
    assert set(TRANSITIONS) == set(State)
    assert all(State.FAILED in ways for state, ways in TRANSITIONS.items() if state is not State.FAILED)
    assert State.FLUSHING not in TRANSITIONS[State.FAILED]


def test_waiters_are_taken_by_epoch_and_woken_once() -> None:
    waiters = Waiters()
    made = [Waiter(Epoch(number)) for number in (5, 3, 9, 3)]
    for waiter in made:
        waiters.add(waiter)
    assert waiters.discard(made[3])
    assert not waiters.discard(made[3])
    assert waiters.take_reached(Epoch(4)) == [made[1]]
    assert waiters.pop() is made[0]
    waiters.wake_above(9)
    assert len(waiters) == 1
    waiters.wake_above(8)
    assert made[2].wait(0.0)
    assert not made[0].wait(0.0)
    assert waiters.pop() is None
