"""A shard that failed: behind until all of it is in, begun anew where its files failed, not paused by a shortage."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from store_model import open_simulated

from penstock.errors import GateShut, PartitionPaused, PenstockError
from penstock.kv.machine import KvMachine
from penstock.partition.backlog import Backlogs
from penstock.partition.machine import Entry
from penstock.partition.partition import Partition
from penstock.partition.spill import SpillLog
from penstock.queue.files import DataWriter
from penstock.store.store import Store
from penstock.testing import FakeClock, SimulatedDisk

Fail = Callable[[KvMachine, Entry], None]


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def store(clock: FakeClock) -> Store:
    return open_simulated(SimulatedDisk(), clock)


def failing(monkeypatch: pytest.MonkeyPatch, before: Fail) -> None:
    """Call something before every apply to the table t."""
    apply = KvMachine.apply

    def patched(machine: KvMachine, entry: Entry) -> None:
        if machine._descriptor.name == "t":
            before(machine, entry)
        apply(machine, entry)

    monkeypatch.setattr(KvMachine, "apply", patched)


def catch_up(store: Store, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What readers find between two entries of a backlog."""
    table = store.kv("t")
    table.put(b"k", b"old", durable=True)
    values: list[object] = []
    broken = [True]

    def before(machine: KvMachine, entry: Entry) -> None:
        if broken[0]:
            raise OSError("the disk fails")
        try:
            values.append(table.get(b"k"))
        except PartitionPaused:
            values.append(None)

    failing(monkeypatch, before)
    table.put(b"other", b"1", durable=True)
    table.put(b"k", b"new", durable=True)
    broken[0] = False
    store.resume("t")
    assert table.get(b"k") == b"new"
    return values


def test_a_shard_is_behind_until_all_of_its_backlog_is_in(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    assert catch_up(store, monkeypatch) == [None, None]


def test_one_that_is_not_is_seen(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: it counts as whole as soon as it is resumed."""

    def late(partition: Partition) -> bool:
        return bool(partition.__dict__["_late"] and partition.retry_at_s)

    def set_late(partition: Partition, value: bool) -> None:
        partition.__dict__["_late"] = value
        partition.__dict__.setdefault("retry_at_s", 0.0)

    monkeypatch.setattr(Partition, "late", property(late, set_late), raising=False)
    assert b"old" in catch_up(store, monkeypatch)


def test_what_can_be_retried_never_pauses_a_shard(
    store: Store, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, left = store.kv("t"), [20]

    def before(machine: KvMachine, entry: Entry) -> None:
        left[0] -= 1
        if left[0] >= 0:
            raise GateShut("somebody flushes it")

    failing(monkeypatch, before)
    table.put(b"k", b"v", durable=True)
    for _ in range(25):
        clock.advance(60)
        store._dispatcher.retry()
    assert table.get(b"k") == b"v"


def fail_writes(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    write, left = DataWriter.write, [count]

    def patched(writer: DataWriter, *args: object, **kwargs: object) -> None:
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(5, "Input/output error")
        write(writer, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(DataWriter, "write", patched)


def one_bad_write(store: Store, clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    queue = store.queue("q")
    for number in range(3):
        queue.put(b"%d" % number, durable=True)
    store.checkpoint()
    queue.put(b"3", durable=True)  # applied, not stored
    fail_writes(monkeypatch, 1)
    queue.put(b"4", durable=True)  # durable; applying it fails
    clock.advance(60)
    store._dispatcher.retry()
    queue.put(b"5", durable=True)
    with store.snapshot() as snapshot:
        return [bytes(payload) for payload in snapshot.queue("q").to_arrow().column("payload").to_pylist()]


def test_a_queue_whose_file_failed_begins_anew_from_the_journal(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SimulatedDisk()
    everything = [b"%d" % number for number in range(6)]
    with open_simulated(disk, clock) as store:
        assert one_bad_write(store, clock, monkeypatch) == everything
        assert store.queue("q").append(b"6").sequence == 7
    with open_simulated(disk, clock) as store, store.snapshot() as snapshot:
        payloads = snapshot.queue("q").to_arrow().column("payload").to_pylist()
        assert payloads == [*everything, b"6"]


def test_one_that_only_goes_on_is_seen(store: Store, clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: nobody begins anew."""
    monkeypatch.setattr(Backlogs, "renew", lambda self, partition: None)
    with pytest.raises(PenstockError):
        one_bad_write(store, clock, monkeypatch)


def checkpoint_after(monkeypatch: pytest.MonkeyPatch, name: str, store: Store) -> list[str]:
    """Let a checkpoint spill and cut the journal when entries were read from one of two sources, the first time."""
    source: Any = SpillLog if name == "entries" else store._dispatcher.backlogs
    read, done = getattr(source, name), list[str]()

    def patched(*args: object) -> Iterator[Entry]:
        entries = list(read(*args))
        if not done:
            done.append(name)
            store._consensus.roll()
            assert store.checkpoint().spilled == 1
        yield from entries

    monkeypatch.setattr(source, name, patched)
    return done


def begin_anew_with_a_checkpoint(clock: FakeClock, monkeypatch: pytest.MonkeyPatch, name: str) -> list[bytes]:
    with open_simulated(SimulatedDisk(), clock) as store:
        queue = store.queue("q")
        queue.put(b"0", durable=True)
        store.checkpoint()
        queue.put(b"1", durable=True)  # applied, not stored
        fail_writes(monkeypatch, 1)
        queue.put(b"2", durable=True)
        done = checkpoint_after(monkeypatch, name, store)
        clock.advance(60)
        store._dispatcher.retry()
        assert done == [name]
        return [bytes(payload) for payload in queue.to_arrow().column("payload").to_pylist()]


@pytest.mark.parametrize("name", ["entries", "_replay"])
def test_a_checkpoint_takes_nothing_from_a_queue_that_begins_anew(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    assert begin_anew_with_a_checkpoint(clock, monkeypatch, name) == [b"0", b"1", b"2"]


def test_one_that_reads_the_journal_last_is_seen(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control."""

    def renew(self: Backlogs, partition: Partition) -> None:
        if partition.machine.broken:
            partition.machine.renew()
            entries = {entry.lsn: entry for entry in partition.spill.entries(partition.machine.stored)}
            start = partition.machine.applied + 1
            from_journal = self._replay(partition.descriptor.partition, start, partition.highest)
            entries.update({entry.lsn: entry for entry in [*from_journal, *partition.backlog]})
            partition.backlog = deque(entries[lsn] for lsn in sorted(entries))

    monkeypatch.setattr(Backlogs, "renew", renew)
    assert begin_anew_with_a_checkpoint(clock, monkeypatch, "entries") == [b"2"]
