"""Readers, barriers and callers that meet a partition which is late, hangs or failed; each with a seeded defect."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from store_model import open_simulated

import penstock
from penstock.errors import PartitionPaused, PenstockError, Poisoned, WaitExpired
from penstock.kv.machine import KvMachine
from penstock.partition import checkpoint
from penstock.partition.backlog import Backlogs
from penstock.partition.dispatcher import Dispatcher
from penstock.partition.machine import Entry
from penstock.partition.marker import Marker
from penstock.partition.partition import Partition
from penstock.partition.roster import PartitionOpening
from penstock.partition.workers import Workers
from penstock.queue.machine import QueueMachine
from penstock.queue.persistent import PersistentQueue
from penstock.store.dropped import DroppedShards
from penstock.store.services import TableServices
from penstock.store.tasks import StoreTasks
from penstock.testing import FakeClock, SimulatedDisk

DEADLINE_S = 60.0


def settings(**limits: Any) -> penstock.StoreSettings:
    limits.setdefault("stall_s", 600.0)  # what hangs here on purpose is not to be taken for frozen, however busy we are
    return penstock.StoreSettings(dispatcher=penstock.DispatcherSettings(**limits), serve=False)


def await_true(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end_s, "it never happened"
        time.sleep(0.002)


class Call:
    """A call in a thread of its own."""

    def __init__(self, act: Callable[[], Any]) -> None:
        self._outcome: list[Any] = []
        self.thread = threading.Thread(target=self._run, args=(act,), daemon=True)
        self.thread.start()

    def _run(self, act: Callable[[], Any]) -> None:
        try:
            self._outcome.append(act())
        except Exception as error:
            self._outcome.append(error)

    def ends(self, within_s: float = DEADLINE_S) -> bool:
        self.thread.join(within_s)
        return not self.thread.is_alive()

    def result(self) -> Any:
        """What it returned, or the error that it raised."""
        assert self.ends(), "it hangs"
        return self._outcome[0]


class Gates:
    """Holds applies to queues, and the states that workers take of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.apply, self.apply_other, self.snapshot = threading.Event(), threading.Event(), threading.Event()
        self.in_snapshot = threading.Event()
        self.applying = list[threading.Thread]()  # in the order in which they came
        self.apply_error: Exception | None = None
        self.snapshot_error: Exception | None = None
        apply, snapshot = QueueMachine.apply, QueueMachine.snapshot

        def held_apply(machine: QueueMachine, entry: Entry) -> None:
            self.applying.append(threading.current_thread())
            (self.apply_other if machine._descriptor.name == "other" else self.apply).wait(60)
            if self.apply_error is not None:
                raise self.apply_error
            apply(machine, entry)

        def held_snapshot(machine: QueueMachine) -> Any:
            if threading.current_thread().name.startswith("penstock-apply"):
                self.in_snapshot.set()
                self.snapshot.wait(60)
                if self.snapshot_error is not None:
                    raise self.snapshot_error
            return snapshot(machine)

        # This task waits for late shards, too, and its markers would be counted as a reader's.
        monkeypatch.setattr(StoreTasks, "maintain_services", lambda tasks: None)
        monkeypatch.setattr(QueueMachine, "apply", held_apply)
        monkeypatch.setattr(QueueMachine, "snapshot", held_snapshot)

    def open(self) -> None:
        self.apply.set()
        self.apply_other.set()
        self.snapshot.set()


@pytest.fixture
def gates(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gates]:
    gates = Gates(monkeypatch)
    gates.open()
    yield gates
    gates.open()


def partition_of(store: Any, name: str) -> Partition:
    partition: Partition = store._dispatcher.partition(store.queue(name)._partitions[0])
    return partition


def rows_of(store: Any, name: str = "q") -> int:
    return int(store.queue(name).to_arrow().num_rows)


def a_state_is_taken(store: Any, gates: Gates) -> tuple[Partition, Call]:
    """Bring a worker to where it takes the state of a queue with two messages, for a reader."""
    store.queue("q").put(b"0", durable=True)
    assert rows_of(store) == 1
    partition = partition_of(store, "q")
    await_true(lambda: not partition.late)
    gates.apply.clear()
    gates.snapshot.clear()
    gates.in_snapshot.clear()
    store.queue("q").put(b"1", durable=True)
    first = Call(lambda: rows_of(store))
    await_true(lambda: len(partition.markers) == 1)
    gates.apply.set()
    assert gates.in_snapshot.wait(DEADLINE_S)
    return partition, first


def reach_all(self: Backlogs, partition: Partition) -> None:
    """A defect: markers are chosen without the turn, whatever has come meanwhile."""
    entry = partition.backlog[0] if partition.backlog else None
    while partition.markers and (entry is None or partition.markers[0].lsn < entry.lsn):
        partition.markers[0].resolve(partition.machine)
        partition.markers.popleft()


def second_reader(store: Any, gates: Gates) -> tuple[int, int]:
    """What two readers see, if a message and the second come while a worker takes the state for the first."""
    partition, first = a_state_is_taken(store, gates)
    store.queue("q").put(b"2", durable=True)
    second = Call(lambda: rows_of(store))
    await_true(lambda: len(partition.markers) == 2)
    gates.snapshot.set()
    return first.result(), second.result()


def test_a_reader_sees_the_write_before_it(tmp_path: Path, gates: Gates) -> None:
    with penstock.open(tmp_path / "store", settings=settings()) as store:
        assert second_reader(store, gates) == (2, 3)


def test_one_that_does_not_is_seen(tmp_path: Path, gates: Gates, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Backlogs, "_reach", reach_all)
    with penstock.open(tmp_path / "store", settings=settings()) as store:
        assert second_reader(store, gates) == (2, 2)


def earlier_barrier(store: Any, gates: Gates) -> Any:
    """What a barrier before a reader's record returns, if it comes while a worker takes that reader's state."""
    partition, first = a_state_is_taken(store, gates)
    (marker,) = partition.markers
    barrier = Call(lambda: store.wait_for(marker.lsn - 1, tables=["q"], timeout_s=4.0))
    await_true(lambda: len(partition.markers) == 2)
    gates.snapshot.set()
    assert first.result() == 2
    return barrier.result()


def test_a_barrier_that_comes_before_a_reader_is_reached(tmp_path: Path, gates: Gates) -> None:
    with penstock.open(tmp_path / "store", settings=settings()) as store:
        assert isinstance(earlier_barrier(store, gates), int)


def test_one_that_is_removed_instead_is_seen(tmp_path: Path, gates: Gates, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Backlogs, "_reach", reach_all)
    with penstock.open(tmp_path / "store", settings=settings()) as store:
        assert isinstance(earlier_barrier(store, gates), WaitExpired)


def hung_queue(store: Any, gates: Gates) -> int:
    """Let a queue hang; return the LSN of the last message that it has applied."""
    lsn = int(store.queue("q").append(b"0").lsn)
    gates.apply.clear()
    store.queue("q").put(b"1", durable=True)
    await_true(lambda: partition_of(store, "q").claim is not None)
    return lsn


def waiting_after_polls(store: Any, gates: Gates) -> int:
    hung_queue(store, gates)
    for _ in range(100):
        with pytest.raises(PartitionPaused, match="frozen"):
            rows_of(store)
    return len(partition_of(store, "q").markers)


def test_polling_a_table_that_hangs_takes_no_memory(tmp_path: Path, gates: Gates) -> None:
    with penstock.open(tmp_path / "store", settings=settings(stall_s=0.2)) as store:
        assert waiting_after_polls(store, gates) <= 2
        gates.open()


def test_polls_that_are_kept_are_seen(tmp_path: Path, gates: Gates, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Marker, "abandon", lambda marker: None)
    with penstock.open(tmp_path / "store", settings=settings(stall_s=0.2)) as store:
        assert waiting_after_polls(store, gates) == 100
        gates.open()


def test_a_barrier_passes_what_was_applied_before_the_table_hung(
    tmp_path: Path, gates: Gates, monkeypatch: pytest.MonkeyPatch
) -> None:
    with penstock.open(tmp_path / "store", settings=settings(stall_s=0.2)) as store:
        lsn = hung_queue(store, gates)
        assert store.wait_for(lsn, tables=["q"]) >= lsn
        with pytest.raises(PenstockError):
            store.wait_for(lsn + 1, tables=["q"], timeout_s=0.5)
        monkeypatch.setattr(Partition, "has_applied", lambda partition, lsn: False)
        with pytest.raises(PenstockError):  # the negative control
            store.wait_for(lsn, tables=["q"], timeout_s=0.5)
        gates.open()


def rows_after_a_failed_state(store: Any, gates: Gates) -> int:
    """How many of three messages are left, if the state between the second and the third cannot be taken."""
    store.queue("q").put(b"0", durable=True)
    partition = partition_of(store, "q")
    gates.apply.clear()
    gates.snapshot_error = TypeError("a bug in a snapshot")
    store.queue("q").put(b"1", durable=True)
    reader = Call(lambda: rows_of(store))
    await_true(lambda: len(partition.markers) == 1)
    store.queue("q").put(b"2", durable=True)
    gates.apply.set()
    assert isinstance(reader.result(), (TypeError, PartitionPaused))
    await_true(lambda: not partition.late)
    gates.snapshot_error = None
    return rows_of(store)


def test_a_state_that_cannot_be_taken_costs_no_message(tmp_path: Path, gates: Gates) -> None:
    with penstock.open(tmp_path / "store", settings=settings(attempts_max=1)) as store:
        assert rows_after_a_failed_state(store, gates) == 3
        assert store.troubles() == []


def test_one_that_does_is_seen(tmp_path: Path, gates: Gates, monkeypatch: pytest.MonkeyPatch) -> None:
    resolve, raised = Marker.resolve, list[Exception]()

    def failing(marker: Marker, machine: Any) -> None:
        resolve(marker, machine)
        if isinstance(marker.state, TypeError) and not raised:
            raised.append(marker.state)
            raise marker.state

    monkeypatch.setattr(Marker, "resolve", failing)
    with penstock.open(tmp_path / "store", settings=settings(attempts_max=1)) as store:
        assert rows_after_a_failed_state(store, gates) == 2
        assert [trouble.table for trouble in store.troubles()] == ["q"]


class _OneLock(dict[int, Any]):
    """A defect: all tables have one lock. It counts who has to wait for it."""

    def __init__(self) -> None:
        self.lock, self.waiting = threading.Lock(), 0

    def setdefault(self, table: int, lock: Any = None) -> Any:
        return self

    def __enter__(self) -> None:
        if not self.lock.acquire(blocking=False):
            self.waiting += 1
            self.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.lock.release()


def test_the_service_of_one_table_does_not_wait_for_another(tmp_path: Path, gates: Gates) -> None:
    with penstock.open(tmp_path / "store", settings=settings()) as store:
        hung_queue(store, gates)
        store.queue("well")
        hung, well = store.queue("q")._info, store.queue("well")._info
        services, defective = TableServices(store._port), TableServices(store._port)
        defective._making = one_lock = _OneLock()
        call, also = Call(lambda: services.of(hung)), Call(lambda: defective.of(hung))
        await_true(lambda: len(partition_of(store, "q").markers) >= 2)
        assert Call(lambda: services.of(well)).result() is not None
        waits = Call(lambda: defective.of(well))  # the negative control
        await_true(lambda: one_lock.waiting == 1)
        gates.open()
        assert call.result() is not None
        assert also.result() is not None
        assert waits.ends()
        services.close()
        defective.close()


def resume_into_a_hang(store: Any, gates: Gates) -> Call:
    """Resume a queue that was paused, and now hangs."""
    store.queue("q").put(b"0", durable=True)
    gates.apply_error = OSError("the disk fails")
    store.queue("q").put(b"1", durable=True)
    await_true(lambda: partition_of(store, "q").refusal is not None)
    gates.apply.clear()
    gates.apply_error = None
    return Call(lambda: store.resume("q"))


def test_resume_does_not_hang_with_the_files(tmp_path: Path, gates: Gates) -> None:
    with penstock.open(tmp_path / "store", settings=settings(stall_s=0.2, attempts_max=1)) as store:
        resuming = resume_into_a_hang(store, gates)
        assert [trouble.table for trouble in resuming.result()] == ["q"]
        assert resuming.thread not in gates.applying
        gates.open()
        await_true(lambda: not partition_of(store, "q").late)
        assert rows_of(store) == 2


def test_one_that_hangs_is_seen(tmp_path: Path, gates: Gates, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Workers, "run", lambda workers, act, timeout_s, activity: act())
    with penstock.open(tmp_path / "store", settings=settings(stall_s=0.2, attempts_max=1)) as store:
        resuming = resume_into_a_hang(store, gates)
        await_true(lambda: resuming.thread in gates.applying)  # the caller itself is in the files that hang
        gates.open()
        assert resuming.ends()


def close_while_storing(
    path: Path, monkeypatch: pytest.MonkeyPatch, healed: threading.Event, closed: threading.Event
) -> Call:
    """Close a store while a checkpoint hangs in the files of a queue; `closed`: the queue's files are closed, too."""
    sync, begun, close_files = PersistentQueue.sync, threading.Event(), QueueMachine.close

    def hanging(queue: PersistentQueue) -> None:
        begun.set()
        healed.wait(60)
        sync(queue)

    def closing(machine: QueueMachine) -> None:
        closed.set()
        close_files(machine)

    store = penstock.open(path, settings=settings(stall_s=0.2))
    store.queue("q").put(b"0", durable=True)
    assert rows_of(store) == 1
    store._consensus.roll()
    monkeypatch.setattr(checkpoint, "STORE_WAIT_S", 0.1)
    monkeypatch.setattr(PersistentQueue, "sync", hanging)
    monkeypatch.setattr(QueueMachine, "close", closing)
    store.checkpoint()
    assert begun.is_set()
    return Call(store.close)


def test_close_does_not_wait_for_a_checkpoint_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    healed, closed = threading.Event(), threading.Event()
    try:
        closing = close_while_storing(tmp_path / "store", monkeypatch, healed, closed)
        error = closing.result()
        assert not closed.is_set()
        assert isinstance(error, Poisoned)
        assert "the files of q do not answer" in str(error)
    finally:
        healed.set()


def test_one_that_does_wait_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Partition, "is_used", property(lambda partition: partition.claim is not None))
    healed, closed = threading.Event(), threading.Event()
    try:
        closing = close_while_storing(tmp_path / "store", monkeypatch, healed, closed)
        assert closed.wait(DEADLINE_S), "it goes into files that hang"
    finally:
        healed.set()
    assert closing.ends()


def counted_after_a_drop(store: Any, gates: Gates) -> int:
    """What is counted as waiting, if one of two queues that hang is dropped, and then goes on."""
    gates.apply_other.clear()
    store.queue("other").put(b"0", durable=True)
    hung_queue(store, gates)
    partition, backlogs = partition_of(store, "q"), store._dispatcher.backlogs
    assert backlogs.operations == 2
    store.drop("q")
    assert backlogs.operations == 1
    gates.apply.set()
    await_true(lambda: partition.claim is None)
    counted = int(backlogs.operations)
    gates.open()
    return counted


def test_what_waits_is_counted_right_after_a_drop(tmp_path: Path, gates: Gates) -> None:
    with penstock.open(tmp_path / "store", settings=settings()) as store:
        assert counted_after_a_drop(store, gates) == 1


def test_what_is_counted_twice_is_seen(tmp_path: Path, gates: Gates, monkeypatch: pytest.MonkeyPatch) -> None:
    def count(backlogs: Backlogs, partition: Partition, operations: int, size: int) -> None:
        backlogs.operations += operations

    monkeypatch.setattr(Backlogs, "_count", count)
    with penstock.open(tmp_path / "store", settings=settings()) as store:
        assert counted_after_a_drop(store, gates) == 0


def busy_with_a_hung_opening(store: Any, monkeypatch: pytest.MonkeyPatch, healed: threading.Event) -> int:
    """How many workers hang, if a shard whose files hang is to be opened again and again."""
    store.queue("q")
    (number,), dispatcher = store.queue("q")._partitions, store._dispatcher
    begun, open_files = threading.Event(), QueueMachine._open

    def hanging(machine: QueueMachine) -> None:
        begun.set()
        healed.wait(60)
        open_files(machine)

    monkeypatch.setattr(QueueMachine, "_open", hanging)
    for _ in range(6):
        dispatcher._open_later(number)
        assert begun.wait(DEADLINE_S)
    time.sleep(0.1)
    busy = len(dispatcher.backlogs.workers._busy_since)
    healed.set()
    assert rows_of(store) == 0
    return busy


def test_an_opening_that_hangs_costs_one_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with penstock.open(tmp_path / "store", settings=settings()) as store:
        assert busy_with_a_hung_opening(store, monkeypatch, threading.Event()) == 1


def test_one_that_costs_all_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    never = property(lambda opening: False, lambda opening, value: None)
    monkeypatch.setattr(PartitionOpening, "is_given", never, raising=False)
    with penstock.open(tmp_path / "store", settings=settings()) as store:
        assert busy_with_a_hung_opening(store, monkeypatch, threading.Event()) == 4


def is_retried(path: Path, monkeypatch: pytest.MonkeyPatch, within_s: float) -> bool:
    """Whether an apply that failed is tried again, while the files of a dropped table hang."""
    hangs, healed, left, apply = threading.Event(), threading.Event(), [1], KvMachine.apply

    def hanging(dropped: DroppedShards) -> bool:
        hangs.set()
        return healed.wait(60)

    def failing(machine: KvMachine, entry: Entry) -> None:
        left[0] -= 1
        if left[0] >= 0:
            raise OSError("the disk fails")
        apply(machine, entry)

    monkeypatch.setattr(DroppedShards, "remove", hanging)
    with penstock.open(path, settings=settings(backoff_s=0.01)) as store:
        monkeypatch.setattr(KvMachine, "apply", failing)
        store.kv("t").put(b"k", b"v", durable=True)
        partition = store._dispatcher.partition(store.kv("t")._partitions[0])
        store._wake("dropped-tables")
        store._wake("retry")
        assert hangs.wait(DEADLINE_S)
        end_s = time.monotonic() + within_s
        while partition.late and time.monotonic() < end_s:
            store._wake("retry")
            time.sleep(0.01)
        healed.set()
        return not partition.late


def test_a_dropped_table_that_hangs_does_not_stop_retries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_retried(tmp_path / "store", monkeypatch, DEADLINE_S)


def test_one_that_stops_them_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StoreTasks, "retry", StoreTasks.remove_dropped)
    assert not is_retried(tmp_path / "store", monkeypatch, 0.2)  # the only task that could retry hangs


class _Interrupt(BaseException):
    """As Ctrl-C."""


def value_after_a_failure_and_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What is read, if an apply fails and Ctrl-C comes just before its entry is put in the backlog."""
    clock = FakeClock()
    store = open_simulated(SimulatedDisk(), clock)
    table, armed, apply = store.kv("t"), [False, False], KvMachine.apply
    table.put(b"k", b"old", durable=True)

    def failing(machine: KvMachine, entry: Entry) -> None:
        if armed[0]:
            armed[0] = False
            raise OSError("the disk fails")
        apply(machine, entry)

    def set_late(partition: Partition, value: bool) -> None:
        partition.__dict__["late"] = value
        if value and armed[1]:
            armed[1] = False
            raise _Interrupt

    monkeypatch.setattr(KvMachine, "apply", failing)
    late = property(lambda partition: partition.__dict__["late"], set_late)
    monkeypatch.setattr(Partition, "late", late, raising=False)
    armed[:] = True, True
    with pytest.raises(_Interrupt):
        table.put(b"k", b"new", durable=True)
    assert armed == [False, False]
    store.flush()
    clock.advance(60)
    store._dispatcher.retry()
    return table.get(b"k")


def test_an_apply_that_fails_and_is_interrupted_is_done_later(monkeypatch: pytest.MonkeyPatch) -> None:
    assert value_after_a_failure_and_an_interrupt(monkeypatch) == b"new"


def test_one_that_is_forgotten_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_highest(partition: Partition, value: int) -> None:
        partition.__dict__["highest"] = max(value, partition.__dict__.get("highest", 0))

    highest = property(lambda partition: partition.__dict__["highest"], raise_highest)
    monkeypatch.setattr(Partition, "highest", highest, raising=False)
    assert value_after_a_failure_and_an_interrupt(monkeypatch) == b"old"


def value_right_after_the_verdict(store: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What a reader finds that begins when the ledger shows a token, and its row is not applied yet."""
    table, ledger, readers = store.kv("t"), store._dispatcher.ledger, list[Call]()
    table.put(b"k", b"old", durable=True)
    judge = ledger.judge

    def judged(record: Any, lsn: int) -> Any:
        judgement = judge(record, lsn)
        if not readers and ledger.is_token_used("p", 1):
            readers.append(Call(lambda: table.get(b"k")))
            readers[0].ends(0.2)
        return judgement

    monkeypatch.setattr(ledger, "judge", judged)
    with store.batch(token=("p", 1), durable=True) as batch:
        batch.kv("t").put(b"k", b"new")
    return readers[0].result()


def test_whoever_sees_a_token_sees_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with penstock.open(tmp_path / "store", settings=settings()) as store:
        assert value_right_after_the_verdict(store, monkeypatch) == b"new"


def test_whoever_does_not_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Dispatcher, "torn", property(lambda self: False, lambda self, value: None), raising=False)
    with penstock.open(tmp_path / "store", settings=settings()) as store:
        assert value_right_after_the_verdict(store, monkeypatch) == b"old"
