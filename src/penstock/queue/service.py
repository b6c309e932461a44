"""What the owner does for one queue: numbers for `append`, leases for consumers, retention.

A consumer gets messages under *leases*, which live here and nowhere else: they lapse when their time is over and when
the store is opened again. What is acknowledged is in the ledger, which has the last word: an acknowledgement needs the
lease when it comes in, and a message that nobody has acknowledged when it is judged.

Thread: any; `_changed` guards leases. Messages are read from files without it.
Invariants: (1) a message is under one lease at a time. (2) `get` writes nothing that it waits for. (3) whoever waits
for messages is woken when some come, when a lease may have lapsed, or when the store closes.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgspec

from penstock.errors import Closed, Invalid, KindMismatch, LeaseLost, NotFound, PartitionPaused, PenstockError
from penstock.host import threads
from penstock.journal.record import PartitionId
from penstock.kinds import Host, partitions_of
from penstock.partition.ledger import Condition, TableInfo, encode_condition
from penstock.partition.pending import PendingGroup
from penstock.queue import section
from penstock.queue.leases import Claim, Leases
from penstock.queue.machine import QueueMachine
from penstock.queue.messages import Messages
from penstock.queue.options import decode_queue_options
from penstock.queue.positions import (
    ACK,
    DELIVER,
    MOVE,
    Ack,
    Deliver,
    Move,
    Place,
    argument,
    decode_place,
    parse_key,
    read_argument,
    read_place,
    rows_of,
    sequences_of,
)
from penstock.queue.retention import trim_before

WAIT_S_MAX = 30.0  # of one call: who wants to wait longer calls again


class Call(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The argument of a call; each uses what it needs."""

    shard: int = 0
    payload: bytes = b""
    key: bytes | None = None
    time_us: int | None = None
    consumer: str = ""
    count: int = 0
    timeout_s: float = 0.0
    visibility_timeout_s: float = 30.0
    deliveries_max: int | None = None
    dead_letter: str | None = None
    leases: list[tuple[int, int, int]] = []  # (shard, sequence, lease)
    delay_s: float = 0.0


class Bounds(msgspec.Struct, frozen=True, array_like=True):
    """The messages [first, next) of a shard."""

    first: int
    next: int


class Found(msgspec.Struct, frozen=True, array_like=True):
    """A message under a lease."""

    shard: int
    sequence: int
    time_us: int
    key: bytes | None
    payload: bytes
    deliveries: int  # this one included
    lease: int


class ConsumerPlace(msgspec.Struct, frozen=True, array_like=True):
    """Where a consumer is in a shard."""

    consumer: str
    shard: int
    mode: str
    floor: int  # all below is acknowledged
    lag: int  # messages that are not


class QueueTotals(msgspec.Struct, frozen=True, array_like=True):
    """A queue at one moment."""

    shards: list[Bounds]
    files: int
    bytes: int
    consumers: list[ConsumerPlace]

    @property
    def messages(self) -> int:
        return sum(bounds.next - bounds.first for bounds in self.shards)


_encode = msgspec.msgpack.Encoder().encode
_call = msgspec.msgpack.Decoder(Call)


def encode_call(call: Call) -> bytes:
    """The argument of a call as bytes."""
    return _encode(call)


class QueueService:
    """The owner's part of a queue."""

    def __init__(self, info: TableInfo, host: Host) -> None:
        self._info = info
        self._host = host
        self._partitions = partitions_of(info)
        self._retention = decode_queue_options(info.options).retention
        self._changed = threads.condition("queue.service")
        self._waiting = 0  # guarded by _changed, and looked at without it by who applies
        self._closed = False  # guarded by _changed
        self._leases = Leases(host.incarnation)  # guarded by _changed
        for partition in self._partitions:
            self._machine(partition).changed = self._wake

    def _machine(self, partition: PartitionId) -> QueueMachine:
        machine = self._host.machine(partition)
        assert isinstance(machine, QueueMachine)
        return machine

    def _wake(self) -> None:
        if self._waiting:
            with self._changed:
                self._changed.notify_all()

    def call(self, name: str, argument: bytes) -> bytes:
        try:
            answer = {
                "append": self._append,
                "seek": self._seek,
                "bounds": self._bounds,
                "statistics": self._statistics,
                "get": self._get,
                "nack": self._nack,
                "places": self._places,
            }[name]
        except KeyError:
            raise Invalid(f"a queue does not know {name!r}") from None
        return _encode(answer(_call.decode(argument) if argument else Call()))

    # -- messages

    def _append(self, call: Call) -> tuple[int, int]:
        """(LSN, sequence) of a message, when it is durable and applied."""
        receipt, message = section.Receipt(), (call.payload, call.key, call.time_us)
        port, size = self._host.port, len(call.payload) + len(call.key or b"") + 256
        epoch = port.write(self._partitions[call.shard], section.put, size, message, receipt)
        port.wait_applied(epoch)  # type: ignore[attr-defined]
        first = receipt.section.first
        if first is None:
            raise PartitionPaused(f"the message is durable, but shard {call.shard} of {self._info.name} is paused")
        return self._machine(self._partitions[call.shard]).applied, first + receipt.offset

    def _seek(self, call: Call) -> int:
        machine = self._machine(self._partitions[call.shard])
        return max(machine.first, machine.queue.seek_time(call.time_us or 0))

    def _bounds(self, _: Call) -> list[Bounds]:
        machines = map(self._machine, self._partitions)
        return [Bounds(machine.first, machine.queue.next_sequence) for machine in machines]

    def _statistics(self, call: Call) -> QueueTotals:
        numbers = [self._machine(partition).queue.statistics() for partition in self._partitions]
        files, size = sum(shard.files for shard in numbers), sum(shard.bytes for shard in numbers)
        return QueueTotals(self._bounds(call), files, size, self._places(call))

    def _places(self, call: Call) -> list[ConsumerPlace]:
        """Where consumers are: one of them, or all."""
        found = []
        for key, row in self._host.remembered_range(rows_of(self._info.table)):
            shard, consumer = parse_key(self._info.table, key)
            if call.consumer in ("", consumer):
                place, machine = decode_place(row), self._machine(self._partitions[shard])
                floor = max(place.floor, machine.first)
                acknowledged = int(place.flags()[floor - place.floor :].sum()) if floor < place.floor + 4096 else 0
                lag = max(0, machine.queue.next_sequence - floor - acknowledged)
                found.append(ConsumerPlace(consumer, shard, place.mode, floor, lag))
        return found

    # -- consumers

    def _get(self, call: Call) -> list[Found]:
        """Messages under leases; waits for some if there are none."""
        deadline_s = self._host.clock.monotonic_s() + min(call.timeout_s, WAIT_S_MAX)
        while True:
            claims = self._claim_or_wait(call, deadline_s)
            if not claims:
                return []
            found = [message for claim in claims for message in self._read(claim)]
            if spent := [message for message in found if self._is_spent(message, call)]:
                self._bury(call, spent)
                found = [message for message in found if not self._is_spent(message, call)]
            if found:
                self._count_deliveries(call.consumer, found)
                return found

    def _claim_or_wait(self, call: Call, deadline_s: float) -> list[Claim]:
        clock = self._host.clock
        with self._changed:
            self._waiting += 1  # before the look: who applies after it will see it
            try:
                while True:
                    if self._closed:
                        raise Closed("the store was closed: open it again")
                    now_s = clock.monotonic_s()
                    claims = self._claim(call, now_s)
                    if claims or now_s >= deadline_s:
                        return claims
                    lapse_s = self._leases.next_lapse_s(call.consumer)
                    until_s = deadline_s if lapse_s is None else min(deadline_s, lapse_s)
                    self._changed.wait(max(0.001, until_s - now_s))
            finally:
                self._waiting -= 1

    def _claim(self, call: Call, now_s: float) -> list[Claim]:
        """Lease up to `count` messages of all shards. Requires: _changed."""
        claims: list[Claim] = []
        count, until_s = call.count, now_s + call.visibility_timeout_s
        for shard in self._leases.shards_in_turn(call.consumer, len(self._partitions)):
            machine = self._machine(self._partitions[shard])
            place = self._place(call.consumer, shard)
            within = machine.first, machine.queue.next_sequence
            claim = self._leases.claim(
                call.consumer, shard, place, within=within, count=count, now_s=now_s, until_s=until_s
            )
            if claim is not None:
                claims.append(claim)
                count -= len(claim.sequences)
            if count <= 0:
                break
        return claims

    def _place(self, consumer: str, shard: int) -> Place:
        place = read_place(self._host.remembered, self._info.table, shard, consumer) or Place("leased")
        if place.mode != "leased":
            raise KindMismatch(f"consumer {consumer} of {self._info.name} is moved by a stream: use another name")
        return place

    def _read(self, claim: Claim) -> list[Found]:
        """The messages of a claim; those that were trimmed meanwhile are left out."""
        machine, wanted = self._machine(self._partitions[claim.shard]), claim.deliveries
        found: list[Found] = []
        for low, high in claim.runs():
            at = max(low, machine.first)
            while at < high:
                with suppress(NotFound):
                    for batch in machine.queue.read(at, limit_messages=high - at):
                        part = batch.slice(at, high)
                        at = part.next
                        rows = zip(
                            range(part.first, part.next),
                            part.times.tolist(),
                            part.keys.to_pylist(),
                            part.payloads.to_pylist(),
                            strict=True,
                        )
                        found += [
                            Found(claim.shard, sequence, time, key, payload, wanted[sequence], claim.lease)
                            for sequence, time, key, payload in rows
                        ]
                    continue
                at = max(at + 1, machine.first)
        return found

    def _is_spent(self, message: Found, call: Call) -> bool:
        return call.deliveries_max is not None and message.deliveries > call.deliveries_max

    def _bury(self, call: Call, spent: list[Found]) -> None:
        """Acknowledge messages that were delivered too often, and put them into the dead-letter queue, in one group."""
        group = self._ack_group(call.consumer, spent)
        if call.dead_letter is not None:
            info = self._host.port.table(call.dead_letter)
            if info is None or info.kind != "queue":
                raise NotFound(f"there is no queue {call.dead_letter} for dead letters: make it first")
            puts = section.Puts()
            times = [message.time_us for message in spent]
            puts.add_many(Messages.of([m.payload for m in spent], [m.key for m in spent], times))
            group.sections[partitions_of(info)[0]] = puts
        self._host.port.settle(group, sum(len(message.payload) for message in spent))

    def _ack_group(self, consumer: str, messages: list[Found]) -> PendingGroup:
        asked = Ack(
            consumer,
            sequences_of([(message.shard, message.sequence) for message in messages]),
            [[message.lease for message in messages if message.shard == shard] for shard in _shards(messages)],
        )
        return PendingGroup(encode_condition(Condition(None, ((ACK, argument(self._info.table, asked)),))))

    def _count_deliveries(self, consumer: str, found: list[Found]) -> None:
        """Remember that they were delivered. Nobody waits for it: a crash may forget the newest deliveries."""
        asked = Deliver(consumer, sequences_of([(message.shard, message.sequence) for message in found]))
        group = PendingGroup(encode_condition(Condition(None, ((DELIVER, argument(self._info.table, asked)),))))
        with suppress(PenstockError):  # a store that takes no writes still delivers
            self._host.port.submit(group, 16 * len(found))

    def _nack(self, call: Call) -> int:
        """Give leases back: their messages are delivered again, after `delay_s`."""
        with self._changed:
            until_s = self._host.clock.monotonic_s() + call.delay_s
            given = self._leases.release(call.consumer, call.leases, until_s)
            self._changed.notify_all()
            return given

    # -- conditions

    def admit(self, name: str, data: bytes) -> None:
        if name == ACK:
            _, asked = read_argument(data, Ack)
            assert isinstance(asked, Ack)
            for shard, _ in asked.messages:
                self._place(asked.consumer, shard)
            with self._changed:
                held = self._leases.hold(asked, self._host.clock.monotonic_s())
            if not held:
                raise LeaseLost(f"consumer {asked.consumer} does not hold these messages any more: nothing was written")
        elif name == MOVE:
            _, move = read_argument(data, Move)
            assert isinstance(move, Move)
            for shard, _, _ in move.ranges:
                place = read_place(self._host.remembered, self._info.table, shard, move.consumer)
                if place is not None and place.mode != "streamed":
                    raise KindMismatch(f"consumer {move.consumer} takes messages by leases: stream under another name")

    # -- retention

    def tend(self) -> None:
        """Trim what the retention lets go, then remove files that nobody needs."""
        for shard, partition in enumerate(self._partitions):
            machine = self._machine(partition)
            floors = self._floors(shard) if self._retention.acknowledged else []
            before = trim_before(machine, self._retention, floors, self._host.port.time_us())
            if before > machine.first:
                self._host.port.write(partition, section.trim, 64, before, None)
            machine.drop_files()

    def _floors(self, shard: int) -> list[int]:
        """Where the consumers of a shard are."""
        rows = self._host.remembered_range(rows_of(self._info.table))
        return [decode_place(row).floor for key, row in rows if parse_key(self._info.table, key)[0] == shard]

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()


def _shards(messages: list[Any]) -> list[int]:
    return sorted({message.shard for message in messages})
