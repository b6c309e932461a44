"""Workers are joined at close, and a claim that an interrupt left behind is taken over; with what shows it if not."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from store_model import SETTINGS, open_simulated

import penstock
from penstock.partition.backlog import Backlogs
from penstock.partition.partition import Partition
from penstock.partition.workers import Workers
from penstock.queue.machine import QueueMachine
from penstock.testing import FakeClock, SimulatedDisk


def appliers_left(path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The threads that apply, right after a close. Each of them takes its time to end."""
    run = Workers._run

    def slow_to_end(self: Workers, token: object) -> None:
        run(self, token)
        time.sleep(0.3)

    monkeypatch.setattr(Workers, "_run", slow_to_end)
    before = set(threading.enumerate())
    store = penstock.open(path, settings=penstock.StoreSettings(serve=False))
    store.queue("q").put(b"x", durable=True)
    assert len(store.queue("q").read()) == 1
    store.close()
    return [thread.name for thread in set(threading.enumerate()) - before if thread.name.startswith("penstock-apply")]


def test_no_thread_applies_after_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert appliers_left(tmp_path / "store", monkeypatch) == []


def test_threads_that_are_not_joined_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Workers, "join", lambda self, timeout_s: None)
    assert appliers_left(tmp_path / "store", monkeypatch) != []


def is_applied_after_a_left_claim() -> bool:
    """Whether a queue gets its message after a thread was interrupted between its claim and the end of its work."""
    with open_simulated(SimulatedDisk(), FakeClock(), SETTINGS) as store:
        queue = store.queue("q")
        queue.put(b"0", durable=True)
        partition = store._dispatcher.partition(queue._partitions[0])
        partition.claim = threading.current_thread()
        queue.put(b"1", durable=True)
        applied = not partition.late
        partition.claim = None
        store._dispatcher.retry()
        assert [message.payload for message in queue.read()] == [b"0", b"1"]
        return applied


def test_a_thread_takes_over_its_own_claim() -> None:
    assert is_applied_after_a_left_claim()


def test_a_claim_that_is_not_taken_over_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    drain = Backlogs.drain

    def shy(self: Backlogs, partition: Partition) -> None:
        if partition.claim is None:
            drain(self, partition)

    monkeypatch.setattr(Backlogs, "drain", shy)
    assert not is_applied_after_a_left_claim()


def test_a_claim_of_another_thread_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads never apply to one partition."""
    apply, inside, most, entered = QueueMachine.apply, [0], [0], threading.Event()

    def counted(machine: QueueMachine, entry: Any) -> None:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        entered.set()
        time.sleep(0.002)
        apply(machine, entry)
        inside[0] -= 1

    monkeypatch.setattr(QueueMachine, "apply", counted)
    with penstock.open(tmp_path / "store", settings=penstock.StoreSettings(serve=False)) as store:
        queue = store.queue("q")
        for number in range(30):
            queue.put(b"%d" % number)
            store.flush()
            store._dispatcher.retry()
        partition = store._dispatcher.partition(queue._partitions[0])
        drains = [threading.Thread(target=store._dispatcher.backlogs.drain, args=(partition,)) for _ in range(8)]
        for thread in drains:
            thread.start()
        for thread in drains:
            thread.join(30)
        assert len(queue.read()) == 30
    assert most == [1]
