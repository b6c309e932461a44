"""Removed ids that are still in memory: what pins need, and that a removal costs the same however many there are."""

from __future__ import annotations

import random

import numpy as np
import pytest

from penstock.vector.index import VectorIndex
from penstock.vector.removed import HiddenIds, IndexPin, RemovedIds


@pytest.mark.parametrize("seed", range(20))
def test_what_pins_need_is_kept_and_the_rest_can_go(seed: int) -> None:
    chance, removed = random.Random(seed), RemovedIds()
    pins: list[tuple[IndexPin, set[int]]] = []  # and what was removed before each
    hidden, next_id = set[int](), 1
    for _ in range(300):
        step = chance.random()
        if step < 0.5:
            ids = range(next_id, next_id + chance.randrange(1, 4))
            next_id = ids.stop
            again = [chance.randrange(1, next_id)] if chance.random() < 0.2 else []
            again = [one for one in again if one in hidden and one not in ids]
            removed.add(np.array(sorted([*ids, *again]), np.uint64))
            hidden |= set(ids)
        elif step < 0.7:
            pins.append((removed.pin(), set(range(1, next_id))))
        elif step < 0.85 and pins:
            del pins[chance.randrange(len(pins))]
        else:
            needed = set().union(*(hidden - before for _, before in pins))
            assert set(removed.spare()) == hidden - needed
            if chance.random() < 0.5:
                removed.drop_spare()
                hidden = needed
        assert len(removed) == len(hidden)
        assert (removed.hidden is None) == (not hidden)
        if removed.hidden is not None:
            assert removed.hidden.ids.tolist() == sorted(hidden)


def test_a_change_beside_a_snapshot_does_not_list_what_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise each record costs more than the one before, for as long as the snapshot is open."""
    index = VectorIndex(2, "euclidean")
    index.load(np.arange(1, 101, dtype=np.uint64), np.ones((100, 2), np.float32), np.zeros(100, np.int32), None)
    pin = index.pin()
    with monkeypatch.context() as patch:

        def list_them(self: HiddenIds) -> None:
            raise AssertionError("a change listed all removed ids")

        patch.setattr(HiddenIds, "ids", property(list_them))
        for number in range(1, 101):
            new, old = np.array([100 + number], np.uint64), np.array([number], np.uint64)
            index.update(new, np.zeros((1, 2), np.float32), np.zeros(1, np.int32), old)
    assert index.removed.tolist() == list(range(1, 101))
    assert (index.count, index.count_in_memory) == (100, 200)
    del pin
    index.remove(np.array([101], np.uint64))
    assert (index.count, index.count_in_memory) == (99, 99)
