"""One table's apply blocks for ever, is slow, or fails: every other table goes on, and nothing is lost or doubled."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock.errors import Backpressure, PartitionPaused
from penstock.partition.admission import PartitionState
from penstock.partition.machine import Entry
from penstock.queue.machine import QueueMachine
from penstock.registry import KINDS
from penstock.series.machine import SeriesMachine
from penstock.vector.machine import VectorMachine

DEADLINE_S = 20.0
SETTINGS = penstock.StoreSettings(
    dispatcher=penstock.DispatcherSettings(stall_s=0.3, partition_operations_max=40, backoff_s=0.01),
    serve=False,
)
MACHINES = {"queue": QueueMachine, "series": SeriesMachine, "vector": VectorMachine}


class Fault:
    """What happens before an apply to the table `sick`."""

    def __init__(self) -> None:
        self.act: Callable[[], None] = lambda: None
        self.healed = threading.Event()

    def block(self) -> None:
        self.healed.wait(120)

    def heal(self) -> None:
        self.act = lambda: None
        self.healed.set()


@pytest.fixture
def fault(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fault]:
    fault = Fault()

    def patch(machine_class: type[Any]) -> None:
        apply = machine_class.apply

        def patched(machine: Any, entry: Entry) -> None:
            if machine._descriptor.name == "sick":
                fault.act()
            apply(machine, entry)

        monkeypatch.setattr(machine_class, "apply", patched)

    for machine_class in MACHINES.values():
        patch(machine_class)
    yield fault
    fault.heal()


def by_deadline(act: Callable[[], Any], deadline_s: float = DEADLINE_S) -> Any:
    """Call `act` in a thread; fail if it does not end in time."""
    outcome: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append((act(),))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(deadline_s)
    if errors:
        raise errors[0]
    assert outcome, "it hangs"
    return outcome[0][0]


def await_true(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end_s, "it never happened"
        time.sleep(0.01)


@contextmanager
def opened(path: Path, fault: Fault, settings: penstock.StoreSettings = SETTINGS) -> Iterator[Any]:
    store = penstock.open(path, settings=settings)
    try:
        yield store
    finally:
        fault.heal()
        by_deadline(store.close)


def eight_tables(store: Any, sick: str) -> dict[str, Any]:
    """Two tables of each kind, and the sick one of the kind `sick`."""
    tables: dict[str, Any] = {}
    for number in (1, 2):
        tables[f"kv{number}"] = store.kv(f"kv{number}")
        tables[f"queue{number}"] = store.queue(f"queue{number}")
        tables[f"series{number}"] = store.series(f"series{number}")
        tables[f"vector{number}"] = store.vector(f"vector{number}", dimensions=2)
    tables["sick"] = store.vector("sick", dimensions=2) if sick == "vector" else getattr(store, sick)("sick")
    return tables


def write(table: Any, number: int, *, durable: bool = True) -> None:
    match table._info.kind:
        case "kv":
            table.put(b"%d" % number, b"v", durable=durable)
        case "queue":
            table.put(b"%d" % number, durable=durable)
        case "series":
            table.write("m", float(number), time=1_700_000_000_000_000 + number * 1_000_000, durable=durable)
        case _:
            table.upsert([f"id-{number}"], np.array([[number, 1.0]], np.float32), durable=durable)


def count(table: Any) -> int:
    match table._info.kind:
        case "kv":
            return sum(1 for _ in table.scan())
        case "series":
            return int(table.select("m").num_rows)
        case _:
            return int(table.to_arrow().num_rows)


def healthy(tables: dict[str, Any]) -> list[Any]:
    return [table for name, table in tables.items() if name != "sick"]


def others_go_on(store: Any, tables: dict[str, Any], numbers: range) -> None:
    """Writes, reads, scans, batches, snapshots and checkpoints of the tables that are well."""
    for number in numbers:
        for table in healthy(tables):
            write(table, number)
        with store.batch() as batch:
            batch.kv("kv1").put(b"batch", b"%d" % number)
            batch.queue("queue1").put(b"batch")
    assert tables["kv1"].get(b"%d" % numbers[-1]) == b"v"
    for name in ("kv2", "queue2", "series2", "vector2"):
        assert count(tables[name]) == numbers[-1] + 1
    with store.snapshot() as snapshot:
        assert snapshot.kv("kv1").get(b"%d" % numbers[-1]) == b"v"
        assert snapshot.queue("queue2").to_arrow().num_rows == numbers[-1] + 1
    store.checkpoint()


def flush_and_go_on(store: Any, tables: dict[str, Any]) -> bool:
    store.flush()
    others_go_on(store, tables, range(3))
    return True


def write_all(table: Any, numbers: range) -> None:
    for number in numbers:
        write(table, number)


def partition_of(store: Any) -> Any:
    return store._dispatcher.partition(store.port.table("sick").table_id << 16)


@pytest.mark.parametrize("kind", sorted(MACHINES))
def test_a_blocked_table_stops_nobody_else(tmp_path: Path, fault: Fault, kind: str) -> None:
    with opened(tmp_path / "store", fault) as store:
        tables = eight_tables(store, kind)
        for table in tables.values():
            write(table, 0)
        assert count(tables["sick"]) == 1
        fault.act = fault.block
        write(tables["sick"], 1, durable=False)
        by_deadline(store.flush)
        by_deadline(lambda: others_go_on(store, tables, range(1, 4)))
        await_true(lambda: store._dispatcher.admission.state(partition_of(store)) is PartitionState.FROZEN)
        # It answers at once, and only its table raises, with fields that say what is wrong.
        with pytest.raises(PartitionPaused, match="shard 0 of sick is frozen") as caught:
            by_deadline(lambda: count(tables["sick"]))
        assert (caught.value.table, caught.value.shard, caught.value.state) == ("sick", 0, "frozen")
        assert caught.value.value >= caught.value.maximum == 0.3
        assert caught.value.retry_after_s > 0
        with pytest.raises(PartitionPaused, match="frozen"):
            by_deadline(lambda: write_all(tables["sick"], range(2, 52)))
        assert [trouble.table for trouble in by_deadline(store.troubles)] == ["sick"]
        by_deadline(lambda: others_go_on(store, tables, range(4, 6)))
        with store.snapshot() as snapshot, pytest.raises(PartitionPaused):
            count(getattr(snapshot, kind)("sick"))
        waiting = len(partition_of(store).backlog)
        fault.heal()
        await_true(lambda: not partition_of(store).late)
        assert count(tables["sick"]) == 1 + waiting
        write(tables["sick"], 100)
        assert count(tables["sick"]) == 2 + waiting
        assert store.troubles() == []


def test_negative_control_inline_apply_hangs(tmp_path: Path, fault: Fault) -> None:
    """Without workers the thread that flushes hangs in the blocked table, and every write with it."""
    inline = penstock.StoreSettings(dispatcher=penstock.DispatcherSettings(workers=0, stall_s=0.3), serve=False)
    with opened(tmp_path / "store", fault, inline) as store:
        tables = eight_tables(store, "queue")
        fault.act = fault.block
        write(tables["sick"], 1, durable=False)
        with pytest.raises(AssertionError, match="it hangs"):
            by_deadline(lambda: flush_and_go_on(store, tables), 2.0)
        fault.heal()


def test_a_slow_table_slows_only_its_writers(tmp_path: Path, fault: Fault) -> None:
    with opened(tmp_path / "store", fault) as store:
        tables = eight_tables(store, "queue")
        fault.act = lambda: time.sleep(0.05)
        done = threading.Event()
        written = [0]

        def flood() -> None:
            while not done.is_set():
                write(tables["sick"], 0, durable=False)
                written[0] += 1
                time.sleep(0.001)

        thread = threading.Thread(target=flood, daemon=True)
        thread.start()
        by_deadline(lambda: others_go_on(store, tables, range(10)))
        assert len(partition_of(store).backlog) <= 2 * SETTINGS.dispatcher.partition_operations_max
        done.set()
        thread.join(DEADLINE_S)
        fault.heal()
        store.flush()
        assert count(tables["sick"]) == written[0]  # a read waits until it has caught up


def test_a_failing_table_is_paused_alone(tmp_path: Path, fault: Fault) -> None:
    def fail() -> None:
        raise OSError(5, "Input/output error")

    with opened(tmp_path / "store", fault) as store:
        tables = eight_tables(store, "series")
        fault.act = fail
        write(tables["sick"], 0)
        await_true(lambda: store._dispatcher.admission.state(partition_of(store)) is PartitionState.PAUSED)
        by_deadline(lambda: others_go_on(store, tables, range(3)))
        with pytest.raises(PartitionPaused, match="resume") as caught:
            write(tables["sick"], 1)
        assert caught.value.state == "paused"
        fault.heal()
        assert store.resume("sick") == []
        assert count(tables["sick"]) == 1


def test_the_backlog_is_bounded_and_the_refusal_has_fields(tmp_path: Path, fault: Fault) -> None:
    limits = penstock.DispatcherSettings(stall_s=60.0, partition_operations_max=3)
    with opened(tmp_path / "store", fault, penstock.StoreSettings(dispatcher=limits, serve=False)) as store:
        sick = store.queue("sick")
        fault.act = fault.block

        def flood() -> None:
            for number in range(100):
                sick.put(b"%d" % number)
                store.flush()

        with pytest.raises(Backpressure, match=r"shard 0 of sick has \d waiting operations \(limit 3\)") as caught:
            by_deadline(flood)
        error = caught.value
        assert (error.table, error.shard, error.state) == ("sick", 0, "throttled")
        assert (error.limit, error.maximum) == ("partition_operations_max", 3)
        assert error.value >= 3
        assert error.retry_after_s > 0
        store.kv("well").put(b"k", b"v", durable=True)
        fault.heal()


KILLED = """
import os, sys, threading
import penstock
from penstock.queue.machine import QueueMachine

path, apply = sys.argv[1], QueueMachine.apply
store = penstock.open(path, settings=penstock.StoreSettings(serve=False))
queue, well = store.queue("sick"), store.kv("well")
queue.put(b"0", durable=True)

def patched(machine, entry):
    threading.Event().wait(60)

QueueMachine.apply = patched
for number in range(1, 5):
    with store.batch() as batch:
        batch.queue("sick").put(b"%d" % number)
        batch.kv("well").put(b"%d" % number, b"v")
print("acknowledged", flush=True)
os.kill(os.getpid(), 9)
"""


def test_killed_while_a_table_is_blocked(tmp_path: Path) -> None:
    program = [sys.executable, "-c", KILLED, str(tmp_path / "store")]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=60, check=False)
    assert ended.stdout == "acknowledged\n", ended.stderr
    with penstock.open(tmp_path / "store") as store:
        payloads = store.queue("sick").to_arrow().column("payload").to_pylist()
        assert payloads == [b"%d" % number for number in range(5)]
        assert [key for key, _ in store.kv("well").scan()] == [b"%d" % number for number in range(1, 5)]
    shutil.rmtree(tmp_path)


def test_kinds_are_covered() -> None:
    assert set(MACHINES) | {"kv"} <= set(KINDS)
