"""A client that floods the owner with writes or barriers, in a process of its own, is limited alone."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import pytest

import penstock
from penstock.client import flusher
from penstock.errors import Backpressure, PartitionPaused, PenstockError
from penstock.host.waiting import pause
from penstock.queue.machine import QueueMachine
from penstock.server import work
from penstock.server.work import WAITING, Budget, Workload

SETTINGS = penstock.StoreSettings(
    dispatcher=penstock.DispatcherSettings(partition_operations_max=8, stall_s=600.0, backoff_s=0.01)
)


@contextmanager
def process(code: str, path: Path) -> Iterator[subprocess.Popen[str]]:
    text = "import sys, threading, penstock\n" + textwrap.dedent(code)
    child = subprocess.Popen([sys.executable, "-c", text, str(path)], stdout=subprocess.PIPE, text=True)
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Event]:
    """The queue `sick` applies nothing until the event is set, and is not frozen."""
    healed, apply = Event(), QueueMachine.apply

    def patched(machine: QueueMachine, entry: Any) -> None:
        if machine._descriptor.name == "sick":
            healed.wait(60)
        apply(machine, entry)

    monkeypatch.setattr(QueueMachine, "apply", patched)
    yield healed
    healed.set()


def refusals(store: Any) -> int:
    return int(store._dispatcher.refusals["partition"])


def until(condition: Any) -> None:
    for _ in range(1_000):
        if condition():
            return
        pause(0.02)
    raise AssertionError("it did not come about")


def test_a_flood_of_writes_to_one_table(tmp_path: Path, slow: Event) -> None:
    flood = """
        store = penstock.connect(sys.argv[1])
        sick = store.queue("sick")
        print("begun", flush=True)
        while True:
            try:
                sick.put(bytes(1_000), durable=True)
            except penstock.errors.PenstockError:
                pass
    """
    with penstock.open(tmp_path, settings=SETTINGS) as store, ExitStack() as healing:
        healing.callback(slow.set)
        store.queue("sick")
        with process(flood, tmp_path) as child, penstock.connect(tmp_path) as client:
            assert child.stdout is not None
            assert child.stdout.readline() == "begun\n"
            until(lambda: refusals(store) >= 2)
            well, events = client.kv("well"), client.queue("events")
            for number in range(20):
                well.put(b"%d" % number, bytes(100), durable=True)
                events.put(b"%d" % number, durable=True)
            assert len(list(well.scan())) == 20
            assert events.to_arrow().num_rows == 20
            (sick,) = [one for one in store.statistics().partitions if one.table == "sick"]
            assert sick.enqueued_ops <= 8 + 2, "the flooder is stopped at its limit"


def test_a_client_whose_one_table_takes_no_writes_goes_on_with_the_others(
    tmp_path: Path, slow: Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flusher, "BUSY_S", 0.3)
    with (
        penstock.open(tmp_path, settings=SETTINGS) as store,
        penstock.connect(tmp_path) as client,
        ExitStack() as healing,
    ):
        healing.callback(slow.set)
        sick, well = client.queue("sick"), client.kv("well")
        error: PenstockError | None = None
        done = 0
        for _ in range(40):
            try:
                sick.put(b"x", durable=True)
                done += 1
            except PenstockError as refused:
                error = refused
                break
        assert isinstance(error, (Backpressure, PartitionPaused))
        assert (error.table, error.limit) == ("sick", "partition_operations_max")
        assert error.retry_after_s > 0
        sick.put(b"y")
        well.put(b"a", b"1")
        with pytest.raises(Backpressure):
            client.flush()
        well.put(b"b", b"2", durable=True)
        assert dict(well.scan()) == {b"a": b"1", b"b": b"2"}
        slow.set()
        until(lambda: not any(one.enqueued_ops for one in store.statistics().partitions))
        assert sick.to_arrow().num_rows == done


def test_a_flood_of_barriers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = Workload.__init__

    def small(self: Workload, clock: Any) -> None:
        begin(self, clock)
        self.slots[WAITING] = Budget(12, 6, 2)

    monkeypatch.setattr(work.Workload, "__init__", small)
    flood = """
        store = penstock.connect(sys.argv[1])
        refused = []
        def wait():
            while True:
                try:
                    store.wait_for(1 << 40, timeout_s=20)
                except penstock.errors.Backpressure:
                    if not refused:
                        refused.append(sys.stdout.write("refused\\n"))  # in one call: threads share it
                        sys.stdout.flush()
                except penstock.errors.PenstockError:
                    pass
        for _ in range(20):
            threading.Thread(target=wait, daemon=True).start()
        threading.Event().wait()
    """
    with penstock.open(tmp_path) as store:
        events = store.queue("events")
        epoch = events.put(b"0", durable=True)
        assert epoch
        with process(flood, tmp_path) as child, penstock.connect(tmp_path) as client:
            assert child.stdout is not None
            assert child.stdout.readline() == "refused\n", "the flooder is limited"
            lsn = store.statistics().applied_lsn
            assert client.wait_for(lsn, timeout_s=20) >= lsn
            consumer = client.queue("events").consumer("c")
            assert [message.payload for message in consumer.get(1, timeout_s=20)] == [b"0"]
            assert client.kv("well").put(b"a", b"1", durable=True)
