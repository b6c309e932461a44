"""Consumers of a queue: leases, redelivery, dead letters, positions, windows, waiting; streams beside them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from queue_model import contents, machine_of, open_queues, payloads

from penstock.errors import Closed, Invalid, KindMismatch, LeaseLost, NotFound, PositionConflict
from penstock.journal.partitions import shard_of
from penstock.partition.ledger_records import Verdict
from penstock.partition.partition import Partition
from penstock.queue.consumer import Consumer
from penstock.queue.delivery import GET_BYTES_MAX
from penstock.queue.leases import Leases
from penstock.queue.positions import (
    CONDITIONS,
    MOVE,
    WINDOW,
    Ack,
    ConsumerRow,
    Deliver,
    ForgetConsumer,
    Move,
    Seek,
    argument,
    read_row,
    runs,
)
from penstock.queue.service import GET_WAIT_S
from penstock.queue.table import QueueTable
from penstock.store.settings import StoreSettings
from penstock.store.store import Store, open_store
from penstock.testing import FakeClock, SimulatedDisk


@pytest.fixture
def disk() -> SimulatedDisk:
    return SimulatedDisk()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def store(disk: SimulatedDisk, clock: FakeClock) -> Iterator[Store]:
    opened = open_queues(disk, clock)
    yield opened
    opened.close()


@pytest.fixture
def queue(store: Store) -> QueueTable:
    return store.queue("events")


def numbers(messages: list[Any]) -> list[int]:
    return [message.sequence for message in messages]


def fill(queue: QueueTable, count: int) -> None:
    queue.put_many([b"%d" % n for n in range(1, count + 1)], durable=True)


# -- leases


def test_a_message_is_out_until_it_comes_back(queue: QueueTable, clock: FakeClock) -> None:
    fill(queue, 5)
    consumer = queue.consumer("c", visibility_timeout_s=10)
    first = consumer.get(2)
    assert [(message.sequence, message.payload, message.deliveries) for message in first] == [
        (1, b"1", 1),
        (2, b"2", 1),
    ]
    assert numbers(consumer.get(2)) == [3, 4]
    clock.advance(5)
    assert numbers(consumer.get()) == [5]
    assert consumer.get() == []
    clock.advance(5)  # the first two gets lapse
    again = consumer.get()
    assert [(message.sequence, message.deliveries) for message in again] == [(1, 2), (2, 2), (3, 2), (4, 2)]
    clock.advance(5)
    assert numbers(consumer.get()) == [5]


def test_acknowledged_messages_never_come_again(disk: SimulatedDisk, queue: QueueTable, clock: FakeClock) -> None:
    fill(queue, 6)
    consumer = queue.consumer("c", visibility_timeout_s=1)
    messages = consumer.get()
    consumer.ack(messages[1])
    consumer.ack([messages[3], messages[4]])
    consumer.ack([])
    clock.advance(2)
    assert numbers(consumer.get()) == [1, 3, 6]
    again = open_queues(disk.image().restore("strict"), clock)
    consumer = again.queue("events").consumer("c")
    assert numbers(consumer.get()) == [1, 3, 6]
    assert consumer.position == {0: 1}
    assert consumer.lag == 3
    again.close()


def test_a_lease_is_extended(queue: QueueTable, clock: FakeClock) -> None:
    fill(queue, 4)
    consumer = queue.consumer("c", visibility_timeout_s=10)
    messages = consumer.get(3)
    clock.advance(8)
    consumer.extend(messages[:2])
    clock.advance(5)  # the third has lapsed
    assert numbers(consumer.get()) == [3, 4]
    with pytest.raises(LeaseLost):
        consumer.extend([messages[0], messages[2]], visibility_timeout_s=100)
    clock.advance(6)
    assert numbers(consumer.get()) == [1, 2], "a refused extension extends nothing"
    with pytest.raises(LeaseLost):
        consumer.ack(messages[0])
    assert consumer.get() == []


def test_an_extended_lease_is_acknowledged(queue: QueueTable, clock: FakeClock) -> None:
    fill(queue, 3)
    consumer = queue.consumer("c", visibility_timeout_s=10)
    first, second, third = consumer.get()
    consumer.extend(first, visibility_timeout_s=60)
    consumer.extend([])
    clock.advance(50)
    consumer.ack(first)
    for wrong in (first, second, third):
        with pytest.raises(LeaseLost):
            consumer.extend(wrong)
    clock.advance(50)
    assert numbers(consumer.get()) == [2, 3]


def test_consumers_are_listed(store: Store, clock: FakeClock) -> None:
    queue = store.queue("spread", shards=2)
    for n in range(20):
        queue.put(b"%d" % n, key=b"%d" % n)
    store.flush()
    assert queue.consumers() == []
    billing, audit, late = queue.consumer("billing"), queue.consumer("audit"), queue.consumer("late")
    messages = billing.get(8)
    billing.ack(messages[:3])
    seen_us = store._port.time_us()
    clock.advance(5)
    audit.seek("latest")
    listed = {each.name: each for each in queue.consumers()}
    assert list(listed) == ["audit", "billing"]
    assert (listed["billing"].mode, listed["billing"].lag, listed["billing"].leased) == ("leased", 17, 5)
    assert listed["billing"].position == billing.position
    assert listed["billing"].last_seen_us == seen_us
    assert (listed["audit"].lag, listed["audit"].leased) == (0, 0)
    late.get(1)
    store.flush()
    assert [(each.mode, each.lag) for each in queue.consumers() if each.name == "late"] == [("leased", 20)]
    clock.advance(60)
    assert [each.leased for each in queue.consumers()] == [0, 0, 0]
    late.forget()
    assert [each.name for each in queue.consumers()] == ["audit", "billing"]


def test_a_consumer_is_not_seen_before_the_opening(disk: SimulatedDisk, queue: QueueTable, clock: FakeClock) -> None:
    fill(queue, 2)
    consumer = queue.consumer("c")
    consumer.ack(consumer.get(1))
    again = open_queues(disk.image().restore("strict"), clock)
    (only,) = again.queue("events").consumers()
    assert (only.name, only.position, only.lag, only.leased, only.last_seen_us) == ("c", {0: 2}, 1, 0, None)
    again.queue("events").consumer("new").get(timeout_s=0)
    assert [each.name for each in again.queue("events").consumers()] == ["c", "new"]
    again.close()


def test_a_lease_can_be_lost(disk: SimulatedDisk, queue: QueueTable, clock: FakeClock) -> None:
    fill(queue, 4)
    consumer = queue.consumer("c", visibility_timeout_s=10)
    messages = consumer.get()

    def lost(act: Callable[[], object]) -> None:
        with pytest.raises(LeaseLost):
            act()

    consumer.ack(messages[0])
    lost(lambda: consumer.ack(messages[0]))  # a second time
    lost(lambda: consumer.ack([messages[1], messages[1]]))  # twice at once
    lost(lambda: consumer.ack([messages[1], messages[0]]))  # one of them: none is acknowledged
    lost(lambda: queue.consumer("other").ack(messages[1]))  # by somebody else
    consumer.nack(messages[3])
    lost(lambda: consumer.ack(messages[3]))  # it was given back
    clock.advance(10)
    lost(lambda: consumer.ack(messages[1]))  # too late, though nobody else has it
    fresh = consumer.get()
    assert numbers(fresh) == [2, 3, 4]
    lost(lambda: consumer.ack(messages[1]))  # somebody else has it
    consumer.ack(fresh[0])
    again = open_queues(disk.image().restore("strict"), clock)
    reopened = again.queue("events").consumer("c")
    lost(lambda: reopened.ack(fresh[1]))  # leases do not outlive the process
    taken = reopened.get()
    assert numbers(taken) == [3, 4]
    lost(lambda: reopened.ack(fresh[1]))  # and their numbers are not used again
    reopened.ack(taken)
    assert reopened.lag == 0
    again.close()


def test_a_message_of_another_queue_is_never_acknowledged_in_this_one(store: Store, queue: QueueTable) -> None:
    """Same consumer, shard and sequence: only the lease tells them apart."""
    fill(queue, 1)
    old = queue.consumer("worker").get(1)
    store.drop(queue.name)
    again, other = store.queue(queue.name), store.queue("other")
    for another in (again, other):
        fill(another, 1)
        worker = another.consumer("worker")
        messages = worker.get(1)
        with pytest.raises(LeaseLost):
            worker.ack(old)
        assert (worker.nack(old), worker.lag) == (0, 1)
        worker.ack(messages)


def test_an_ack_needs_the_message_not_to_be_acknowledged_when_it_is_judged(store: Store, queue: QueueTable) -> None:
    """Both were admitted: the ledger has the last word."""
    fill(queue, 2)
    consumer = queue.consumer("c")
    messages = consumer.get()
    keys = store.kv("keys")
    one, two = store.batch(), store.batch()
    consumer.ack(messages, batch=one)
    consumer.ack(messages[1], batch=two)
    for batch, value in ((one, b"one"), (two, b"two")):
        batch.kv("keys").put(b"result", value)
    groups = [one._group(), two._group()]
    for group in groups:
        assert group is not None
        store._port.submit(group, 100)
    store.flush()
    assert [group.verdict for group in groups] == [Verdict.ACCEPTED, Verdict.REFUSED]  # type: ignore[union-attr]
    assert keys[b"result"] == b"one"


def test_ack_and_result_are_one(store: Store, queue: QueueTable, clock: FakeClock) -> None:
    fill(queue, 3)
    results = store.kv("results")
    consumer = queue.consumer("c", visibility_timeout_s=10)
    messages = consumer.get()
    with store.batch() as batch:
        batch.kv("results").put(b"1", b"done")
        consumer.ack(messages[0], batch=batch)
    assert results[b"1"] == b"done"
    assert consumer.position == {0: 2}
    with pytest.raises(RuntimeError), store.batch() as batch:
        consumer.ack(messages[1], batch=batch)
        raise RuntimeError
    clock.advance(10)
    with pytest.raises(LeaseLost), store.batch() as batch:
        batch.kv("results").put(b"2", b"late")
        batch.queue("events").put(b"late")
        consumer.ack(messages[1], batch=batch)
    assert results.get(b"2") is None
    assert queue.statistics().messages == 3
    fresh = consumer.get()
    with pytest.raises(LeaseLost), store.batch() as batch:  # one lost lease is enough
        batch.kv("results").put(b"2", b"late")
        consumer.ack(fresh[0], batch=batch)
        consumer.ack(messages[2], batch=batch)
    assert results.get(b"2") is None
    assert numbers(fresh) == [2, 3]
    with store.batch() as batch:
        batch.kv("results").put(b"2", b"good")
        consumer.ack(fresh[0], batch=batch)
        consumer.ack(fresh[1], batch=batch)
    assert results[b"2"] == b"good"
    assert consumer.lag == 0


def test_a_batch_that_is_repeated_by_its_token_is_a_duplicate_though_its_lease_is_over(
    store: Store, queue: QueueTable, clock: FakeClock
) -> None:
    fill(queue, 1)
    store.kv("results")
    consumer = queue.consumer("c", visibility_timeout_s=10)
    messages = consumer.get()
    for expected in (False, True, True):
        with store.batch(token=("worker", 1)) as batch:
            batch.kv("results").merge(b"n", b"x", operator="append")
            consumer.ack(messages, batch=batch)
        assert batch.duplicate is expected
        clock.advance(10)
    assert store.kv("results")[b"n"] == b"x"


# -- giving back, counting, dead letters


def test_nack_does_not_count_what_is_acknowledged(queue: QueueTable) -> None:
    queue.put_many([b"%d" % number for number in range(6)], durable=True)
    consumer = queue.consumer("c")
    messages = consumer.get(max=6)
    consumer.ack(messages[:2])
    consumer.ack(messages[4])
    assert consumer.nack(messages) == 3
    assert consumer.nack(messages) == 0
    assert sorted(message.payload for message in consumer.get(max=6)) == sorted(
        message.payload for message in (*messages[2:4], messages[5])
    )


def test_nack(queue: QueueTable, clock: FakeClock) -> None:
    fill(queue, 3)
    consumer = queue.consumer("c", visibility_timeout_s=100)
    messages = consumer.get()
    assert consumer.nack(messages[0]) == 1
    assert consumer.nack(messages[1], delay_s=30) == 1
    assert consumer.nack(messages[:2]) == 0, "they were given back already"
    assert [(message.sequence, message.deliveries) for message in consumer.get()] == [(1, 2)]
    clock.advance(29)
    assert consumer.get() == []
    clock.advance(1)
    assert [(message.sequence, message.deliveries) for message in consumer.get()] == [(2, 2)]
    clock.advance(100)
    assert consumer.nack(messages[2]) == 0, "its time was over"


def test_deliveries_are_counted_across_restarts(disk: SimulatedDisk, queue: QueueTable, clock: FakeClock) -> None:
    fill(queue, 3)
    consumer = queue.consumer("c")
    for _ in range(3):
        consumer.nack(consumer.get(2))
    consumer.ack(consumer.get(1))
    again = open_queues(disk.image().restore("strict"), clock)
    counts = [(message.sequence, message.deliveries) for message in again.queue("events").consumer("c").get()]
    assert counts == [(2, 4), (3, 1)]
    again.close()


def test_counts_end_somewhere(queue: QueueTable) -> None:
    fill(queue, 1)
    consumer = queue.consumer("c")
    for _ in range(300):
        messages = consumer.get()
        consumer.nack(messages)
    assert messages[0].deliveries == 255


def test_dead_letters(store: Store, queue: QueueTable, clock: FakeClock) -> None:
    dead = store.queue("dead", shards=2)
    queue.put(b"good", key=b"g", time=5)
    queue.put(b"bad", key=b"k", time=6)
    queue.put(b"ugly", time=7, durable=True)
    consumer = queue.consumer("c", visibility_timeout_s=1, deliveries_max=2, dead_letter="dead")
    for _ in range(2):
        messages = consumer.get()
        assert numbers(messages) == [1, 2, 3]
        clock.advance(1)
    rest = consumer.get(1)
    assert rest == [], "what was asked for was spent"
    consumer = queue.consumer("c", visibility_timeout_s=1, deliveries_max=2, dead_letter="dead")
    assert consumer.get() == []
    found_dead = sorted(row["payload"] for row in dead.to_arrow().to_pylist())
    assert found_dead == [b"bad", b"good", b"ugly"]
    rows = {row["payload"]: row for row in dead.to_arrow().to_pylist()}
    assert rows[b"bad"]["key"] == b"k"
    assert rows[b"bad"]["shard"] == shard_of(b"k", 2), "as if it had been put there"
    assert rows[b"ugly"]["key"] is None
    assert [message.time_us for shard in range(2) for message in dead.read(shard) if message.payload == b"bad"] == [6]
    assert consumer.lag == 0
    clock.advance(10)
    assert consumer.get() == []


def test_a_dead_letter_and_its_acknowledgement_are_one(disk: SimulatedDisk, clock: FakeClock) -> None:
    store = open_queues(disk, clock)
    queue, _ = store.queue("events"), store.queue("dead")
    fill(queue, 2)
    queue.consumer("c").nack(queue.consumer("c").get(1))
    store.flush()
    disk.on_image = lambda: 0
    consumer = queue.consumer("c", deliveries_max=1, dead_letter="dead")
    assert numbers(consumer.get()) == [2]
    outcomes = set()
    for image in [*disk.images, disk.image()]:
        after = open_queues(image.restore("strict"), clock)
        sequences = numbers(after.queue("events").consumer("c").get())
        buried = payloads(after.queue("dead"))
        assert (buried, sequences) in ([[], [1, 2]], [[b"1"], [2]], ([], [1, 2]), ([b"1"], [2]))
        outcomes.add(bool(buried))
        after.close()
    assert outcomes == {False, True}


def test_dead_letters_that_have_nowhere_to_go(store: Store, queue: QueueTable) -> None:
    fill(queue, 2)
    queue.consumer("c").nack(queue.consumer("c").get(1))
    store.kv("keys")
    for name in ("absent", "keys"):
        with pytest.raises(NotFound):
            queue.consumer("c", deliveries_max=1, dead_letter=name).get()
    with pytest.raises(Invalid, match="own"):
        queue.consumer("c", deliveries_max=1, dead_letter="events").get()
    plain = queue.consumer("c").get()
    assert [(message.sequence, message.deliveries) for message in plain] == [(1, 2), (2, 1)], "nothing was leased"
    queue.consumer("c").nack(plain)
    only_acknowledged = queue.consumer("c", deliveries_max=1)
    assert only_acknowledged.get() == []
    assert only_acknowledged.lag == 0


def test_a_get_that_fails_leases_nothing(store: Store, queue: QueueTable, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(queue, 3)
    consumer = queue.consumer("c")

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("simulated eio")

    with monkeypatch.context() as patch:
        patch.setattr(machine_of(store, "events").queue, "read", fail)
        with pytest.raises(OSError, match="eio"):
            consumer.get()
    assert [(message.sequence, message.deliveries) for message in consumer.get()] == [(1, 1), (2, 1), (3, 1)]


def test_one_get_gives_so_many_bytes(queue: QueueTable) -> None:
    size = GET_BYTES_MAX // 3
    for _ in range(8):
        queue.put(bytes(size), durable=True)
    consumer = queue.consumer("c")
    first = consumer.get()
    assert 1 <= len(first) <= 4
    others = [consumer.get() for _ in range(8)]
    assert [message.sequence for some in (first, *others) for message in some] == list(range(1, 9))
    assert {message.deliveries for some in (first, *others) for message in some} == {1}


# -- sharing


def test_one_name_shares_and_other_names_see_all(store: Store) -> None:
    queue = store.queue("events", shards=3)
    queue.put_many([b"%d" % n for n in range(30)], keys=[b"%d" % n for n in range(30)], durable=True)
    a, b, other = queue.consumer("c"), queue.consumer("c"), queue.consumer("other")
    deliveries: list[bytes] = []
    while messages := [*a.get(3), *b.get(4)]:
        deliveries += [message.payload for message in messages]
    assert sorted(deliveries) == sorted(b"%d" % n for n in range(30))
    assert len(other.get(1_000)) == 30


def test_no_shard_is_starved(store: Store) -> None:
    queue = store.queue("events", shards=2)
    names = [next(b"%d" % n for n in range(99) if shard_of(b"%d" % n, 2) == shard) for shard in (0, 1)]
    for _ in range(10):
        queue.put_many([b"a", b"b"], keys=names, durable=True)
    one, two = queue.consumer("one"), queue.consumer("two")
    shards: dict[str, set[int]] = {"one": set(), "two": set()}
    for consumer in (one, two, one, two):
        shards[consumer.name] |= {message.shard for message in consumer.get(1)}
    assert shards == {"one": {0, 1}, "two": {0, 1}}


def test_get_costs_no_fsync(disk: SimulatedDisk, queue: QueueTable) -> None:
    fill(queue, 100)
    consumer = queue.consumer("c")
    consumer.get(1)
    disk.on_image = lambda: 0
    for _ in range(20):
        consumer.get(3)
    assert not [image.label for image in disk.images if "sync" in image.label or "commit" in image.label]


# -- the window


def test_get_never_leases_past_the_window(store: Store, queue: QueueTable) -> None:
    fill(queue, WINDOW + 50)
    consumer = queue.consumer("c")
    messages = consumer.get(WINDOW + 50)
    assert len(messages) == WINDOW
    assert consumer.get() == []
    consumer.ack(messages[1:])  # all but the first: the window does not move
    assert consumer.get() == []
    assert consumer.lag == 51
    consumer.ack(messages[0])
    assert numbers(consumer.get(100)) == list(range(WINDOW + 1, WINDOW + 51))


def test_a_waiting_consumer_is_woken_when_acknowledgements_make_room(tmp_path: Path) -> None:
    with open_store(str(tmp_path / "s"), settings=StoreSettings(flush_interval_s=0.01)) as store:
        queue = store.queue("events")
        fill(queue, WINDOW + 1)
        consumer = queue.consumer("c", visibility_timeout_s=3_600)
        messages = consumer.get(WINDOW)
        waiting = Waiter(lambda: queue.consumer("c").get(10, timeout_s=200))
        wait_for_waiters(store, "events", 1)
        consumer.ack(messages)
        assert numbers(waiting.result()) == [WINDOW + 1]


@pytest.mark.parametrize("trimmed", [WINDOW - 5, WINDOW, 3 * WINDOW])
def test_a_consumer_goes_on_where_a_trim_left_messages(
    disk: SimulatedDisk, store: Store, queue: QueueTable, clock: FakeClock, trimmed: int
) -> None:
    """Its floor is far below the oldest message: neither a new consumer nor one that was behind may be stuck."""
    fill(queue, 3 * WINDOW + 10)
    behind, new = queue.consumer("behind"), queue.consumer("new")
    stale = behind.get(3)
    behind.ack(stale[0])
    queue.trim(trimmed + 1, durable=True)
    for consumer in (behind, new):
        assert consumer.lag == 3 * WINDOW + 10 - trimmed
        assert consumer.position == {0: trimmed + 1}
        deliveries: list[int] = []
        while messages := consumer.get(1_000):
            deliveries += numbers(messages)
            consumer.ack(messages[1:])
            consumer.ack(messages[0])
        assert deliveries == list(range(trimmed + 1, 3 * WINDOW + 11))
        assert consumer.lag == 0
    with pytest.raises(LeaseLost):
        behind.ack(stale[1])
    again = open_queues(disk.image().restore("strict"), clock)
    assert again.queue("events").consumer("behind").get() == []
    again.close()


def test_what_is_acknowledged_above_a_trim_stays_so(queue: QueueTable, clock: FakeClock) -> None:
    fill(queue, 20)
    consumer = queue.consumer("c", visibility_timeout_s=1)
    messages = consumer.get()
    consumer.ack([messages[9], messages[10], messages[15]])  # 10, 11, 16
    queue.trim(10, durable=True)
    clock.advance(2)
    assert consumer.position == {0: 12}
    assert numbers(consumer.get()) == [12, 13, 14, 15, 17, 18, 19, 20]


# -- positions


def test_seek(queue: QueueTable) -> None:
    fill(queue, 10)
    consumer = queue.consumer("c")
    consumer.ack(consumer.get(4))
    consumer.seek("earliest")
    assert numbers(consumer.get(2)) == [1, 2]
    consumer.seek(8)
    assert consumer.position == {0: 8}
    assert numbers(consumer.get()) == [8, 9, 10]
    consumer.seek("latest")
    assert (consumer.position, consumer.lag) == ({0: 11}, 0)
    assert consumer.get() == []
    consumer.seek({0: 3})
    assert (consumer.position, consumer.lag) == ({0: 3}, 8)
    for wrong in (0, 12, -1, {1: 1}, {0: 12}, {"0": 1}, {0: "1"}, "middle", None, 1.5, True, {0: True}):
        with pytest.raises(Invalid):
            consumer.seek(wrong)  # type: ignore[arg-type]
    assert consumer.position == {0: 3}


def test_a_seek_takes_leases_away(queue: QueueTable) -> None:
    fill(queue, 10)
    consumer = queue.consumer("c")
    consumer.ack(consumer.get(5))
    messages = consumer.get(2)  # 6, 7
    consumer.seek(2)
    assert numbers(consumer.get()) == list(range(2, 11))
    with pytest.raises(LeaseLost):
        consumer.ack(messages[0])
    consumer.seek(9)
    with pytest.raises(LeaseLost):
        consumer.ack(messages[1])


def test_new_and_forgotten_consumers(store: Store) -> None:
    queue = store.queue("events", shards=2)
    queue.put_many([b"a", b"b", b"c"], keys=[b"1", b"1", b"2"], durable=True)
    consumer = queue.consumer("c")
    assert {position.mode for position in consumer.positions()} == {"new"}
    assert consumer.lag == 3
    consumer.ack(consumer.get())
    assert consumer.lag == 0
    consumer.forget()
    assert queue.statistics().consumers == []
    assert consumer.lag == 3
    assert len(consumer.get()) == 3


@pytest.mark.parametrize(
    "wrong",
    [
        lambda queue: queue.consumer(""),
        lambda queue: queue.consumer("x" * 256),
        lambda queue: queue.consumer(b"c"),
        lambda queue: queue.consumer("c", visibility_timeout_s=0),
        lambda queue: queue.consumer("c", visibility_timeout_s=1e9),
        lambda queue: queue.consumer("c", visibility_timeout_s=float("nan")),
        lambda queue: queue.consumer("c", deliveries_max=0),
        lambda queue: queue.consumer("c", deliveries_max=255),
        lambda queue: queue.consumer("c", dead_letter="dead"),
        lambda queue: queue.consumer("c").get(0),
        lambda queue: queue.consumer("c").get(1.5),
        lambda queue: queue.consumer("c").get(1, -1),
        lambda queue: queue.consumer("c").get(1, float("nan")),
        lambda queue: queue.consumer("c").ack([b"x"]),
        lambda queue: queue.consumer("c").nack([1]),
        lambda queue: queue.consumer("c").nack([], delay_s=-1),
        lambda queue: queue.consumer("c").nack([], delay_s=float("nan")),
    ],
)
def test_wrong_use(queue: QueueTable, wrong: Any) -> None:
    fill(queue, 1)
    with pytest.raises(Invalid):
        wrong(queue)
    assert len(queue.consumer("c").get()) == 1


# -- waiting


class Waiter:
    """A call in a thread of its own."""

    def __init__(self, act: Callable[[], Any]) -> None:
        self._answer: list[Any] = []
        self._thread = threading.Thread(target=self._run, args=(act,), daemon=True)
        self._thread.start()

    def _run(self, act: Callable[[], Any]) -> None:
        try:
            self._answer.append(act())
        except Exception as error:
            self._answer.append(error)

    def result(self) -> Any:
        self._thread.join(100)
        assert self._answer, "nobody woke it"
        return self._answer[0]


def wait_for_waiters(store: Store, name: str, count: int) -> None:
    """Until so many consumers sleep. There is no event for that: their number under the lock says it."""
    info = store._ledger.table(name)
    assert info is not None
    deliveries = store._port._service(info)._deliveries  # type: ignore[union-attr]
    for _ in range(10_000):
        with deliveries._changed:
            if len(deliveries._changed._sleepers) >= count:
                return
        threading.Event().wait(0.001)
    raise AssertionError("they never slept")


@pytest.fixture
def real(tmp_path: Path) -> Iterator[Store]:
    with open_store(str(tmp_path / "s"), settings=StoreSettings(flush_interval_s=0.01)) as opened:
        yield opened


def test_a_waiting_consumer_is_woken_by_a_message(real: Store) -> None:
    queue = real.queue("events", shards=2)
    waiters = [Waiter(lambda: queue.consumer("c").get(1, timeout_s=200)) for _ in range(3)]
    other = Waiter(lambda: queue.consumer("other").get(10, timeout_s=200))
    wait_for_waiters(real, "events", 4)
    queue.put(b"1")
    assert [message.payload for message in other.result()] == [b"1"]
    queue.put(b"2")
    queue.put(b"3")
    assert sorted(message.payload for waiter in waiters for message in waiter.result()) == [b"1", b"2", b"3"]


def test_a_waiting_consumer_is_woken_by_a_message_that_comes_back(real: Store) -> None:
    queue = real.queue("events")
    fill(queue, 1)
    messages = queue.consumer("c", visibility_timeout_s=3_600).get()
    waiter = Waiter(lambda: queue.consumer("c").get(1, timeout_s=200))
    wait_for_waiters(real, "events", 1)
    queue.consumer("c").nack(messages)
    assert [message.deliveries for message in waiter.result()] == [2]


def test_a_waiting_consumer_is_woken_by_a_lapse(real: Store) -> None:
    """Also of a lease that was taken while it slept, and would end long before it meant to wake up."""
    queue = real.queue("events")
    fill(queue, 1)
    long = queue.consumer("c", visibility_timeout_s=3_600)
    messages = long.get()
    waiter = Waiter(lambda: queue.consumer("c").get(1, timeout_s=19))
    wait_for_waiters(real, "events", 1)
    info = real._ledger.table("events")
    assert info is not None
    deliveries = real._port._service(info)._deliveries  # type: ignore[union-attr]
    with deliveries._changed:  # it must not be the waiter who takes it
        deliveries._leases.release("c", [(0, 1, messages[0].lease)], deliveries._row, real._clock.monotonic_s(), 0.0)
        deliveries._claim(_call(queue.consumer("c", visibility_timeout_s=0.05)), real._clock.monotonic_s())
    assert [message.deliveries for message in waiter.result()] == [3]


def _call(consumer: Consumer) -> Any:
    from penstock.queue.calls import QueueCall

    return QueueCall(consumer=consumer.name, count=1, visibility_timeout_s=consumer.settings.visibility_timeout_s)


def test_waiting_is_no_polling(real: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """An acknowledged message above the floor, whose lease ended long ago, wakes nobody."""
    queue = real.queue("events")
    fill(queue, 2)
    first = queue.consumer("c", visibility_timeout_s=3_600).get(1)
    short = queue.consumer("c", visibility_timeout_s=0.2)
    second = short.get()
    short.ack(second)
    threading.Event().wait(0.3)
    looks = 0
    claim = Leases.claim

    def counted(self: Leases, *args: Any, **kwargs: Any) -> Any:
        nonlocal looks
        looks += 1
        return claim(self, *args, **kwargs)

    monkeypatch.setattr(Leases, "claim", counted)
    assert short.get(timeout_s=0.3) == []
    assert looks < 10
    assert numbers(first) == [1]


@pytest.mark.parametrize(("act", "error"), [("close", Closed), ("drop", NotFound)])
def test_a_waiting_consumer_hears_the_end(tmp_path: Path, act: str, error: type[Exception]) -> None:
    store = open_store(str(tmp_path / "s"), settings=StoreSettings(flush_interval_s=0.01))
    queue = store.queue("events")
    waiter = Waiter(lambda: queue.consumer("c").get(1, timeout_s=200))
    wait_for_waiters(store, "events", 1)
    if act == "close":
        store.close()
    else:
        store.drop("events")
    assert isinstance(waiter.result(), error)
    store.close()


def test_iteration(real: Store) -> None:
    queue = real.queue("events")
    fill(queue, 3)
    consumer, deliveries = queue.consumer("c"), list[bytes]()
    for message in consumer:
        deliveries.append(message.payload)
        consumer.ack(message)
        if len(deliveries) == 2:
            break
    assert deliveries == [b"1", b"2"]
    assert numbers(consumer.get()) == [3], "it was left to others"


def test_many_threads_share_the_work(real: Store) -> None:
    """Each message once, as long as nobody's lease lapses; producers and consumers side by side."""
    queue, results = real.queue("events", shards=2), real.kv("results")
    total, done = 400, threading.Event()
    errors: list[BaseException] = []

    def consume() -> None:
        try:
            consumer = queue.consumer("c")
            while not done.is_set():
                messages = consumer.get(7, timeout_s=0.2)
                if messages:
                    with real.batch() as batch:
                        for message in messages:
                            batch.kv("results").merge(message.payload, b"x", operator="append")
                        consumer.ack(messages, batch=batch)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=consume, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for number in range(total):
        queue.put(b"%d" % number, key=b"%d" % (number % 11))
    real.flush()
    for _ in range(1_000):
        if errors or queue.consumer("c").lag == 0:
            break
        threading.Event().wait(0.02)
    done.set()
    for thread in threads:
        thread.join(60)
    assert not errors
    assert {key: value for key, value in results.scan() if value != b"x"} == {}
    assert len(dict(results.scan())) == total


# -- streams


def move(store: Store, consumer: str, ranges: list[tuple[int, int, int]], mark: bytes) -> bool:
    """Whether it was a duplicate."""
    info = store._ledger.table("events")
    assert info is not None
    with store.batch() as batch:
        batch.kv("results").merge(b"log", mark, operator="append")
        batch.require(MOVE, argument(info.table_id, Move(consumer, ranges)))
    return batch.duplicate


def test_moving_a_stream(disk: SimulatedDisk, store: Store, clock: FakeClock) -> None:
    queue, results = store.queue("events", shards=2), store.kv("results")
    queue.put_many([b"%d" % n for n in range(20)], keys=[b"%d" % n for n in range(20)], durable=True)
    assert not move(store, "s", [(0, 1, 4), (1, 1, 3)], b"a")
    assert move(store, "s", [(0, 1, 4), (1, 1, 3)], b"a"), "the same again"
    for wrong in (
        [(0, 1, 5), (1, 1, 3)],  # one of the ends is another
        [(0, 4, 6), (1, 1, 3)],  # one shard was moved by somebody else
        [(0, 3, 6), (1, 3, 5)],
        [(0, 5, 6), (1, 4, 5)],
        [(0, 4, 3), (1, 3, 2)],  # backwards
        [(0, 4, 6), (0, 6, 8)],
    ):
        with pytest.raises(PositionConflict):
            move(store, "s", wrong, b"!")
    assert not move(store, "s", [(0, 4, 6), (1, 3, 3)], b"b")
    assert move(store, "s", [(0, 4, 6), (1, 3, 3)], b"b")
    assert move(store, "s", [(0, 1, 4), (1, 1, 3)], b"a"), "an old one is still a duplicate"
    assert move(store, "s", [(0, 2, 2), (1, 2, 2)], b"!"), "of nothing, and all shards are past it"
    assert not move(store, "s", [(0, 6, 6), (1, 3, 3)], b"c"), "an empty batch moves nothing"
    assert results[b"log"] == b"abc"
    assert queue.consumer("s").position == {0: 6, 1: 3}
    assert queue.consumer("s").lag == 20 - 5 - 2
    again = open_queues(disk.image().restore("strict"), clock)
    assert move(again, "s", [(0, 4, 6), (1, 3, 3)], b"b")
    assert not move(again, "s", [(0, 6, 7), (1, 3, 4)], b"d")
    again.close()


def test_a_new_stream_is_where_it_says(store: Store) -> None:
    store.queue("events", shards=2).put(b"x", durable=True)
    store.kv("results")
    assert not move(store, "s", [(0, 5, 7)], b"a")
    with pytest.raises(PositionConflict):
        move(store, "s", [(0, 1, 2), (1, 1, 2)], b"b")
    assert not move(store, "s", [(1, 9, 10)], b"c")


def test_one_name_is_used_in_one_way(store: Store) -> None:
    queue = store.queue("events", shards=2)
    store.kv("results")
    names = [next(b"%d" % n for n in range(99) if shard_of(b"%d" % n, 2) == shard) for shard in (0, 1)]
    queue.put_many([b"a"], keys=[names[0]], durable=True)
    leased = queue.consumer("leased")
    messages = leased.get()
    store.flush()
    for ranges in ([(0, 1, 2)], [(1, 1, 2)], [(0, 1, 2), (1, 1, 2)]):
        with pytest.raises(KindMismatch):
            move(store, "leased", ranges, b"!")
    move(store, "streamed", [(0, 1, 2)], b"ok")
    queue.put_many([b"b"], keys=[names[1]], durable=True)
    streamed = queue.consumer("streamed")
    for use in (streamed.get, lambda: streamed.seek("earliest"), lambda: streamed.ack(messages)):
        with pytest.raises(KindMismatch):
            use()
    assert streamed.position == {0: 2, 1: 1}
    streamed.forget()
    assert len(streamed.get()) == 2
    leased.ack(messages)
    assert store.kv("results")[b"log"] == b"ok"


# -- the rows of the ledger, against a plain model


class Rows:
    """Conditions over a dict of rows."""

    def __init__(self) -> None:
        self.rows: dict[bytes, bytes] = {}

    def judge(self, name: str, request: Any) -> Verdict:
        changed = dict(self.rows)

        def put(key: bytes, value: bytes | None) -> None:
            if value is None:
                changed.pop(key, None)
            else:
                changed[key] = value

        verdict = CONDITIONS[name](argument(7, request), changed.get, put)
        if verdict is Verdict.ACCEPTED:
            self.rows = changed
        return verdict

    def row(self, shard: int) -> ConsumerRow | None:
        return read_row(self.rows.get, 7, shard, "c")


sequences = st.lists(st.integers(1, 40), max_size=5)
steps = st.one_of(
    st.tuples(st.just("ack"), sequences),
    st.tuples(st.just("deliver"), st.integers(1, 30), st.lists(st.integers(1, 40), max_size=5, unique=True)),
    st.tuples(st.just("seek"), st.integers(1, 40)),
    st.tuples(st.just("forget")),
)


@given(st.lists(steps, max_size=30))
@settings(max_examples=200, deadline=None)
def test_places_against_a_set(history: list[Any]) -> None:
    rows, acknowledged, floor, counts = Rows(), set[int](), 1, dict[int, int]()
    for word, *values in history:
        if word == "ack":
            messages = values[0]
            fits = all(floor <= s < floor + WINDOW and s not in acknowledged for s in messages)
            fits = fits and len(set(messages)) == len(messages)
            verdict = rows.judge("queue.ack", Ack("c", [(0, [(n, n + 1) for n in messages])]))
            assert verdict is (Verdict.ACCEPTED if fits else Verdict.REFUSED)
            acknowledged |= set(messages) if fits else set()
        elif word == "deliver":
            floor = max(floor, values[0])
            assert (
                rows.judge("queue.deliver", Deliver("c", [(0, values[0], runs(sorted(values[1])))])) is Verdict.ACCEPTED
            )
            while floor in acknowledged:
                floor += 1
            for sequence in values[1]:
                counts[sequence] = counts.get(sequence, 0) + (sequence >= floor)
        elif word == "seek":
            rows.judge("queue.seek", Seek("c", [(0, values[0])], "leased"))
            floor, acknowledged, counts = values[0], set(), {}
        else:
            rows.judge("queue.forget", ForgetConsumer("c", 1))
            floor, acknowledged, counts = 1, set(), {}
        while floor in acknowledged:
            floor += 1
        row = rows.row(0) or ConsumerRow("leased")
        assert row.floor == floor
        flags, delivery_counts = row.flags(), row.counts()
        assert {floor + int(i) for i in flags.nonzero()[0]} == {s for s in acknowledged if s >= floor}
        for sequence in range(floor, 45):
            assert delivery_counts[sequence - floor] == counts.get(sequence, 0)


@given(st.lists(st.integers(1, 30), unique=True))
def test_runs(sequences: list[int]) -> None:
    ranges = runs(sorted(sequences))
    assert [n for low, high in ranges for n in range(low, high)] == sorted(sequences)
    assert all(high < low for (_, high), (low, _) in pairwise(ranges))


def test_messages_in_any_order_are_acknowledged(store: Store, clock: FakeClock) -> None:
    queue = store.queue("events", shards=2)
    queue.put_many([b"%d" % n for n in range(20)], keys=[b"%d" % n for n in range(20)], durable=True)
    consumer = queue.consumer("c", visibility_timeout_s=5)
    messages = [*consumer.get(3), *consumer.get(9), *consumer.get(8)]
    chosen = [messages[index] for index in (19, 3, 4, 5, 0, 11, 10, 7)]
    consumer.ack(chosen)
    left = {(message.shard, message.sequence) for message in messages if message not in chosen}
    clock.advance(5)
    assert {(message.shard, message.sequence) for message in consumer.get()} == left
    assert consumer.lag == 12


def test_a_window_is_kept_exactly() -> None:
    rows = Rows()
    assert rows.judge("queue.ack", Ack("c", [(0, [(WINDOW + 1, WINDOW + 2)])])) is Verdict.REFUSED
    assert rows.judge("queue.ack", Ack("c", [(0, [(2, WINDOW + 1)])])) is Verdict.ACCEPTED
    row = rows.row(0)
    assert row is not None
    assert row.floor == 1
    assert rows.judge("queue.ack", Ack("c", [(0, [(1, 2)])])) is Verdict.ACCEPTED
    assert rows.row(0) == ConsumerRow("leased", WINDOW + 1)
    assert rows.judge("queue.ack", Ack("c", [(0, [(5, 6)]), (1, [(1, 2)])])) is Verdict.REFUSED
    assert rows.row(1) is None, "a refused group leaves nothing"


def test_contents_are_left_alone_by_consumers(queue: QueueTable) -> None:
    fill(queue, 5)
    before = contents(queue)
    consumer = queue.consumer("c")
    consumer.ack(consumer.get())
    assert contents(queue) == before


def test_a_look_at_what_is_out_changes_nothing(store: Store, queue: QueueTable) -> None:
    """Also where a trim is ahead of what the ledger knows of the consumer."""
    fill(queue, 20)
    queue.trim(11, durable=True)
    consumer = queue.consumer("c")
    assert not store._port.has_leases()
    messages = consumer.get(3)
    assert store._port.has_leases()
    assert numbers(consumer.get(3)) == [14, 15, 16], "the first three are still out"
    consumer.ack(messages)
    assert store._port.has_leases()
    consumer.seek("latest")
    assert not store._port.has_leases()


def test_a_stream_that_comes_between_takes_nothing(store: Store) -> None:
    """A consumer that turns out to be a stream's in its second shard: what was claimed in the first is given back."""
    queue = store.queue("events", shards=2)
    store.kv("results")
    queue.put_many([b"%d" % n for n in range(20)], keys=[b"%d" % n for n in range(20)], durable=True)
    move(store, "c", [(1, 1, 2)], b"a")
    for _ in range(2):
        with pytest.raises(KindMismatch):
            queue.consumer("c").get(100)
    assert not store._port.has_leases()


def test_a_get_waits_once_for_all_shards_that_are_late(
    store: Store, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = store.queue("sharded", shards=4)
    consumer, waits = queue.consumer("c"), list[float]()
    consumer.get(timeout_s=0.0)  # every shard is open
    partitions = [store._dispatcher.partition(number) for number in queue._partitions]

    def catch_up(partition: Partition, *, timeout_s: float) -> None:
        waits.append(timeout_s)
        clock.advance(min(timeout_s, 3.0))
        partition.late = False

    monkeypatch.setattr(store._dispatcher, "catch_up", catch_up)
    for partition in partitions:
        partition.late = True
    consumer.get(timeout_s=0.0)
    assert waits == [GET_WAIT_S, GET_WAIT_S - 3.0, 0.0, 0.0]
