"""Queues of a store against a plain model: nothing is lost, doubled, renumbered or delivered after it was acknowledged.

Plain writes have their numbers from the moment they are made, because nothing refuses them; they are seen when they are
flushed, and a crash takes what was not. Acknowledgements and batches with a token are flushed by themselves.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from queue_model import build, contents, open_queues, staged_table

from penstock.errors import LeaseLost
from penstock.journal.partitions import shard_of
from penstock.testing import FakeClock, SimulatedDisk

QUEUES, SHARDS, CONSUMERS = ("a", "b"), 2, ("c", "d")
LEASE_S = 10.0
KEYS = [next(b"%d" % n for n in range(99) if shard_of(b"%d" % n, SHARDS) == shard) for shard in range(SHARDS)]
queues, shards, names = st.sampled_from(QUEUES), st.integers(0, SHARDS - 1), st.sampled_from(CONSUMERS)
sizes = st.lists(st.sampled_from([0, 5, 60, 400, 900]), min_size=1, max_size=4)
tokens = st.tuples(st.sampled_from("pq"), st.integers(0, 6))


@dataclass
class Shard:
    """The messages of a shard: number n is `messages[n - 1]`."""

    messages: list[bytes] = field(default_factory=list)
    floor: int = 1

    @property
    def next(self) -> int:
        return len(self.messages) + 1

    def trim(self, before: int) -> None:
        self.floor = max(self.floor, min(before, self.next))

    def live(self) -> dict[int, bytes]:
        return {number: self.messages[number - 1] for number in range(self.floor, self.next)}


@dataclass
class Model:
    """All that is journalled."""

    shards: dict[tuple[str, int], Shard] = field(default_factory=dict)
    done: dict[tuple[str, str, int], set[int]] = field(default_factory=dict)  # acknowledged, by queue, consumer, shard
    counts: dict[tuple[str, str, int, int], int] = field(default_factory=dict)  # deliveries, of each message
    results: dict[bytes, bytes] = field(default_factory=dict)
    tokens: set[tuple[str, int]] = field(default_factory=set)

    def create(self, queue: str) -> None:
        self.shards.update({(queue, shard): Shard() for shard in range(SHARDS)})
        self.done.update({(queue, name, shard): set() for name in CONSUMERS for shard in range(SHARDS)})

    def drop(self, queue: str) -> None:
        self.shards = {key: value for key, value in self.shards.items() if key[0] != queue}
        self.done = {key: value for key, value in self.done.items() if key[0] != queue}
        self.counts = {key: value for key, value in self.counts.items() if key[0] != queue}


class QueueMachineTest(RuleBasedStateMachine):
    """Two queues with two shards each, two consumers of each, a table for results."""

    def __init__(self) -> None:
        super().__init__()
        self.disk, self.clock = SimulatedDisk(), FakeClock()
        self.model, self.durable = Model(), Model()
        self.deliveries: list[tuple[str, str, Any]] = []  # queue, consumer, message: what a consumer got and may use
        self.leases: dict[tuple[str, str, int, int], tuple[int, float]] = {}  # of each message: lease and its end
        self.snapshots: list[tuple[Any, dict[str, list[dict[int, bytes]]]]] = []
        self.count = self.seeks = 0
        self.store = open_queues(self.disk, self.clock)

    @initialize()
    def begin(self) -> None:
        self.store.kv("results")
        for queue in QUEUES:
            self._create(queue)
            for shard in range(SHARDS):
                self.put(queue, shard, [5] * 6, many=True)
        self.flush()

    def teardown(self) -> None:
        self.flush()
        self.everything_agrees()
        self._drain()
        self._close_snapshots()
        self.store.close()

    def _create(self, queue: str) -> None:
        self.store.queue(queue, shards=SHARDS)
        self.model.create(queue)
        self._flushed()

    def _flushed(self) -> None:
        self.durable = copy.deepcopy(self.model)

    def _payloads(self, lengths: list[int]) -> list[bytes]:
        payloads = []
        for length in lengths:
            self.count += 1
            payloads.append(b"%d:" % self.count + b"x" * length)
        return payloads

    def _add(self, queue: str, shard: int, payloads: list[bytes]) -> None:
        self.model.shards[queue, shard].messages += payloads

    # -- writes

    @rule(queue=queues, shard=shards, lengths=sizes, many=st.booleans())
    def put(self, queue: str, shard: int, lengths: list[int], many: bool) -> None:
        payloads, table = self._payloads(lengths), self.store.queue(queue)
        if many:
            table.put_many(payloads, keys=[KEYS[shard]] * len(payloads))
        else:
            for payload in payloads:
                table.put(payload, key=KEYS[shard])
        self._add(queue, shard, payloads)

    @rule(queue=queues, shard=shards, lengths=sizes)
    def append(self, queue: str, shard: int, lengths: list[int]) -> None:
        for payload in self._payloads(lengths[:2]):
            where = self.store.queue(queue).append(payload, key=KEYS[shard])
            self._add(queue, shard, [payload])
            assert (where.shard, where.sequence) == (shard, self.model.shards[queue, shard].next - 1)
            self._flushed()
            assert self.store.queue(queue).read(*where[:2], 1)[0].payload == payload

    @rule(queue=queues, lengths=sizes, token=tokens)
    def put_with_token(self, queue: str, lengths: list[int], token: tuple[str, int]) -> None:
        payloads = self._payloads(lengths)
        keys = [KEYS[index % SHARDS] for index in range(len(payloads))]
        self.store.queue(queue).put_many(payloads, keys=keys, token=token)
        if token not in self.model.tokens:
            self.model.tokens.add(token)
            for index, payload in enumerate(payloads):
                self._add(queue, index % SHARDS, [payload])
        self._flushed()

    @rule(lengths=sizes, token=st.none() | tokens, trim=st.none() | st.integers(1, 30))
    def batch(self, lengths: list[int], token: tuple[str, int] | None, trim: int | None) -> None:
        payloads = self._payloads(lengths)
        with self.store.batch(token=token) as batch:
            for queue in QUEUES:
                batch.queue(queue).put_many(payloads, keys=[KEYS[0]] * len(payloads))
                if trim is not None:
                    batch.queue(queue).trim(trim, shard=0)
            batch.kv("results").put(b"batch", b"%d" % self.count)
        accepted = token is None or token not in self.model.tokens
        assert batch.duplicate is not accepted
        if accepted:
            self.model.tokens |= set() if token is None else {token}
            for queue in QUEUES:
                self._add(queue, 0, payloads)
                if trim is not None:
                    self.model.shards[queue, 0].trim(trim)
            self.model.results[b"batch"] = b"%d" % self.count
        self._flushed()

    @rule(queue=queues, shard=shards, before=st.integers(1, 40))
    def trim(self, queue: str, shard: int, before: int) -> None:
        self.store.queue(queue).trim(before, shard=shard)
        self.model.shards[queue, shard].trim(before)

    @rule(queue=queues, shard=shards, lengths=sizes)
    def adopt(self, queue: str, shard: int, lengths: list[int]) -> None:
        payloads = self._payloads(lengths)
        staged = self.store.stage(queue, shard)[0]
        with self.store.batch() as batch:
            batch.adopt(queue, [build(self.disk, "/store", staged, staged_table(*payloads))], shard)
        self._add(queue, shard, payloads)
        self._flushed()

    @rule(queue=queues)
    def drop_and_create(self, queue: str) -> None:
        self.store.drop(queue)
        self.model.drop(queue)
        self.deliveries = [delivery for delivery in self.deliveries if delivery[0] != queue]
        self.leases = {key: lease for key, lease in self.leases.items() if key[0] != queue}
        self._create(queue)

    # -- consumers

    def _free(self, queue: str, name: str) -> set[tuple[int, int]]:
        """What a consumer may get now: (shard, sequence)."""
        now_s, free = self.clock.monotonic_s(), set()
        for shard in range(SHARDS):
            for sequence in self.durable.shards[queue, shard].live():
                out = self.leases.get((queue, name, shard, sequence), (0, 0.0))[1] > now_s
                if not out and sequence not in self.model.done[queue, name, shard]:
                    free.add((shard, sequence))
        return free

    @rule(queue=queues, name=names, count=st.integers(1, 6), acknowledge=st.integers(0, 63), with_result=st.booleans())
    def work(self, queue: str, name: str, count: int, acknowledge: int, with_result: bool) -> None:
        """Get messages, and acknowledge some of them."""
        messages = self._get(queue, name, count)
        chosen = [message for index, message in enumerate(messages) if acknowledge >> index & 1]
        if chosen:
            self._ack(queue, name, chosen, with_result)

    @rule(queue=queues, name=names, count=st.integers(1, 12))
    def get(self, queue: str, name: str, count: int) -> None:
        self._get(queue, name, count)

    def _get(self, queue: str, name: str, count: int) -> list[Any]:
        free = self._free(queue, name)
        messages = self.store.queue(queue).consumer(name, visibility_timeout_s=LEASE_S).get(count)
        got = {(message.shard, message.sequence) for message in messages}
        assert len(got) == len(messages), "a message twice in one answer"
        assert got <= free, f"delivered though it is out or acknowledged: {got - free}"
        assert len(messages) == min(count, len(free)), "there were more"
        for message in messages:
            key = (queue, name, message.shard, message.sequence)
            assert message.payload == self.durable.shards[queue, message.shard].messages[message.sequence - 1]
            self.model.counts[key] = self.model.counts.get(key, 0) + 1
            assert message.deliveries == self.model.counts[key]
            self.leases[key] = (message.lease, self.clock.monotonic_s() + LEASE_S)
            self.deliveries.append((queue, name, message))
        for name_shard in {message.shard for message in messages}:
            order = [message.sequence for message in messages if message.shard == name_shard]
            assert order == sorted(order)
        return messages

    def _holds(self, queue: str, name: str, message: Any) -> bool:
        lease, until_s = self.leases.get((queue, name, message.shard, message.sequence), (0, 0.0))
        acknowledged = message.sequence in self.model.done[queue, name, message.shard]
        return lease == message.lease and until_s > self.clock.monotonic_s() and not acknowledged

    @precondition(lambda self: self.deliveries)
    @rule(data=st.data(), with_result=st.booleans())
    def ack(self, data: Any, with_result: bool) -> None:
        queue, name, _ = data.draw(st.sampled_from(self.deliveries))
        mine = [delivery for delivery in self.deliveries if delivery[:2] == (queue, name)]
        chosen = [delivery[2] for delivery in data.draw(st.lists(st.sampled_from(mine), min_size=1, max_size=4))]
        self._ack(queue, name, chosen, with_result)

    def _ack(self, queue: str, name: str, chosen: list[Any], with_result: bool) -> None:
        once = len(set(map(_position, chosen))) == len(chosen)
        fits = once and all(self._holds(queue, name, message) for message in chosen)
        trimmed = any(message.sequence < self.durable.shards[queue, message.shard].floor for message in chosen)
        consumer, happened = self.store.queue(queue).consumer(name), True
        try:
            if with_result:
                with self.store.batch() as batch:
                    for message in chosen:
                        batch.kv("results").merge(self._result(queue, name, message), b"x", operator="append")
                    batch.queue(queue).put(b"result", key=KEYS[1])
                    consumer.ack(chosen, batch=batch)
            else:
                consumer.ack(chosen)
        except LeaseLost:
            happened = False
        assert happened == fits or (trimmed and not happened), "an acknowledgement must need its lease, and no more"
        if happened:
            for message in chosen:
                self.model.done[queue, name, message.shard].add(message.sequence)
            if with_result:
                self._add(queue, 1, [b"result"])
                for message in chosen:
                    key = self._result(queue, name, message)
                    self.model.results[key] = self.model.results.get(key, b"") + b"x"
                    assert self.model.results[key] == b"x"
        if happened or self.store._coordinator.durable == self.store._coordinator.last:
            self._flushed()  # also where the ledger refused: what was written before it went into the same record

    def _result(self, queue: str, name: str, message: Any) -> bytes:
        """Of one message, until a seek lets it come again."""
        return f"{queue} {name} {self.seeks} {message.shard} {message.sequence} {message.payload[:8]!r}".encode()

    @precondition(lambda self: self.deliveries)
    @rule(data=st.data(), delay_s=st.sampled_from([0.0, 3.0]))
    def nack(self, data: Any, delay_s: float) -> None:
        queue, name, message = data.draw(st.sampled_from(self.deliveries))
        holds = self._holds(queue, name, message)
        self.store.queue(queue).consumer(name).nack(message, delay_s=delay_s)
        if holds:
            self.leases[queue, name, message.shard, message.sequence] = (0, self.clock.monotonic_s() + delay_s)

    @rule(queue=queues, name=names, to=st.sampled_from(["earliest", "latest"]))
    def seek(self, queue: str, name: str, to: str) -> None:
        self.flush()
        self.store.queue(queue).consumer(name).seek(to)
        self.seeks += 1
        for shard in range(SHARDS):
            model_shard = self.model.shards[queue, shard]
            self.model.done[queue, name, shard] = set(
                range(1, model_shard.floor if to == "earliest" else model_shard.next)
            )
        self.leases = {key: lease for key, lease in self.leases.items() if key[:2] != (queue, name)}
        self.model.counts = {key: count for key, count in self.model.counts.items() if key[:2] != (queue, name)}
        self._flushed()

    @rule(seconds=st.sampled_from([1.0, 4.0, LEASE_S]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    # -- files, journal, process

    @rule()
    def flush(self) -> None:
        self.store.flush()
        self._flushed()

    @rule(everything=st.booleans())
    def checkpoint(self, everything: bool) -> None:
        self.store._checkpoint.run(everything=everything)

    @rule()
    def maintain(self) -> None:
        self.flush()
        self.store._port.maintain()
        self.store._tasks.retry()

    @rule(how=st.sampled_from(["close", "crash", "flush and crash", "restart"]))
    def reopen(self, how: str) -> None:
        if how == "flush and crash":
            self.flush()
        self._close_snapshots()
        if how == "close":
            self.store.close()
            self._flushed()
        elif how == "restart":
            self.disk = self.disk.image().restore("restart")
        else:
            self.disk = self.disk.image().restore("strict")
        self.model = copy.deepcopy(self.durable)
        self.leases.clear()
        self.store = open_queues(self.disk, self.clock)
        self.everything_agrees()

    # -- reading

    @precondition(lambda self: len(self.snapshots) < 3)
    @rule()
    def take_snapshot(self) -> None:
        snapshot = self.store.snapshot()
        self.snapshots.append((snapshot, self._expected()))
        self.read_snapshots()

    @rule()
    def read_snapshots(self) -> None:
        for snapshot, expected in self.snapshots:
            for queue, live in expected.items():
                if snapshot._port.table(queue) == self.store._ledger.table(queue):  # a dropped one is gone
                    assert contents(snapshot.queue(queue)) == live

    def _close_snapshots(self) -> None:
        for snapshot, _ in self.snapshots:
            snapshot.close()
        self.snapshots.clear()

    def _expected(self) -> dict[str, list[dict[int, bytes]]]:
        return {queue: [self.durable.shards[queue, shard].live() for shard in range(SHARDS)] for queue in QUEUES}

    @rule()
    def everything_agrees(self) -> None:
        for queue, live in self._expected().items():
            table = self.store.queue(queue)
            assert contents(table) == live
            model_shards = [self.durable.shards[queue, shard] for shard in range(SHARDS)]
            assert [(bounds.first, bounds.next) for bounds in table.bounds()] == [
                (s.floor, s.next) for s in model_shards
            ]
            for name in CONSUMERS:
                done = [self.model.done[queue, name, shard] for shard in range(SHARDS)]
                lag = sum(1 for shard in range(SHARDS) for number in live[shard] if number not in done[shard])
                assert table.consumer(name).lag == lag
                for shard, floor in table.consumer(name).position.items():
                    expected = model_shards[shard].floor
                    while expected in done[shard]:
                        expected += 1
                    assert floor == expected
        results = dict(self.store.kv("results").scan())
        assert results == self.model.results

    @invariant()
    def files_hold_what_counts(self) -> None:
        for partition in self.store._dispatcher.partitions():
            machine = partition.machine
            assert machine.stored <= machine.applied
            assert not partition.failures

    def _drain(self) -> None:
        """In the end every message that is not acknowledged comes, each to each consumer, and then no more."""
        self.clock.advance(LEASE_S + 5)
        for queue in QUEUES:
            for name in CONSUMERS:
                expected, consumer = self._free(queue, name), self.store.queue(queue).consumer(name)
                positions: set[tuple[int, int]] = set()
                while messages := consumer.get(7):
                    assert not positions & set(map(_position, messages))
                    positions |= set(map(_position, messages))
                    consumer.ack(messages)
                assert positions == expected
                assert consumer.lag == 0


def _position(message: Any) -> tuple[int, int]:
    return message.shard, message.sequence


FEW = settings(max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))
TestQueueMachine = QueueMachineTest.TestCase
TestQueueMachine.settings = FEW


@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_many_histories() -> None:
    run_state_machine_as_test(QueueMachineTest, settings=settings(FEW, max_examples=2_000, stateful_step_count=60))
