"""Epochs, layers, waiters and triggers by themselves."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from penstock.coordinator.layers import Layers
from penstock.coordinator.protocols import COUNT_BITS, INCARNATION_MAX, Epoch, EpochTracker
from penstock.coordinator.settings import Trigger, choose_trigger
from penstock.coordinator.waiting import Waiter, Waiters
from penstock.errors import Invalid, Lost


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
    for requested, timer_due, size_due in itertools.product([False, True], repeat=3):
        triggers = [Trigger.EXPLICIT] * requested + [Trigger.TIMER] * timer_due + [Trigger.SIZE] * size_due
        chosen = choose_trigger(requested=requested, timer_due=timer_due, size_due=size_due)
        assert chosen is (triggers[0] if triggers else None)


def test_waiters_are_taken_when_their_epoch_came_and_may_be_woken_twice() -> None:
    waiters = Waiters()
    entries = [Waiter(Epoch(number), applied=number == 9) for number in (5, 3, 9, 3)]
    for waiter in entries:
        waiters.add(waiter)
    waiters.discard(entries[3])
    waiters.discard(entries[3])
    assert waiters.take_reached(durable=4, applied=4) == [entries[1]]
    assert waiters.take_reached(durable=9, applied=8) == [entries[0]]
    waiters.wake_all()
    waiters.wake_all()
    assert entries[2].wait(0.0)
    assert not entries[0].wait(0.0)
    assert waiters.take_reached(durable=9, applied=9) == [entries[2]]
    assert len(waiters) == 0


def test_the_worker_that_gets_a_turn_waits_for_the_lowest_epoch_that_the_turn_brings() -> None:
    waiters = Waiters()
    durable, idle, applied = (
        Waiter(Epoch(7), applied=False),
        Waiter(Epoch(6), applied=True, works=False),
        Waiter(Epoch(8), applied=True),
    )
    for waiter in (durable, idle, applied):
        waiters.add(waiter)
    assert waiters.take_worker(8, applied=False) is None
    assert waiters.take_worker(5, applied=True) is applied
    assert waiters.take_worker(5, applied=False) is durable
    assert len(waiters) == 1


def test_layers_move_in_whole_steps() -> None:
    none = Epoch(10)
    first: Layers[Any, str] = Layers([], (), "", none, none, none, none)
    sealed = first.seal([3], Epoch(11)).seal([4], Epoch(12))
    assert sealed.sealed_deltas == ([3], [])
    folded = sealed.fold([1, 2, 3])
    taken = folded.take([9], Epoch(12), 7).seal([5], Epoch(13))
    assert taken.sealed_deltas == ([4],)
    assert (taken.taken, taken.durable, taken.batches[0].first, taken.batches[0].last) == (12, 10, 11, 12)
    durable = taken.mark_durable("result")
    assert (durable.durable, durable.results, durable.applied) == (12, ("result",), 10)
    applied = durable.retire("view")
    assert (applied.applied, applied.deltas, applied.view, applied.batches, applied.results) == (
        12,
        ([4],),
        "view",
        (),
        (),
    )
    assert applied.take([9], Epoch(13), 1).batches[0].deltas == ([4],)
    with_pending = applied.take([9], Epoch(14), 1)
    assert (with_pending.batches[0].deltas, with_pending.pending, with_pending.deltas) == (([4], [5]), [9], ([5], [4]))
