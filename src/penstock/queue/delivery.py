"""Messages for consumers, in the owner: leases, waiting, dead letters.

A consumer gets messages under *leases*, which live here and nowhere else: they lapse when their time is over and when
the store is opened again. What is acknowledged is in the ledger, which has the last word: an acknowledgement needs the
lease when it comes in, and a message that nobody has acknowledged when it is judged.

Thread: any; `_changed` guards leases. Messages are read from files without it.
Invariants: (1) a message is under one lease at a time. (2) `get` writes nothing that it waits for, but dead letters.
(3) whoever waits for messages is woken when some come, when acknowledgements make room in a full window, when a lease
may have lapsed, or when the queue is closed. (4) a `get` that fails leases nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import compress
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from penstock.errors import Closed, Invalid, KindMismatch, LeaseLost, NotFound, PenstockError
from penstock.host import threads
from penstock.kinds import Host, partitions_of
from penstock.lsm.rows import bytes_list
from penstock.partition.ledger import Condition, TableInfo, encode_condition
from penstock.partition.pending import PendingGroup
from penstock.queue import section
from penstock.queue.leases import Claim, Leases
from penstock.queue.machine import QueueMachine
from penstock.queue.messages import MessageBatch, Messages
from penstock.queue.positions import (
    ACK,
    DELIVER,
    FORGET,
    MOVE,
    SEEK,
    WINDOW,
    Ack,
    ConsumerRow,
    Deliver,
    ForgetConsumer,
    Mode,
    Move,
    Seek,
    argument,
    read_argument,
    read_place,
    runs,
)

if TYPE_CHECKING:
    from penstock.queue.calls import QueueCall

WAIT_S_MAX = 30.0  # of one call: who wants to wait longer calls again
GET_BYTES_MAX = 16 << 20  # of one call: fewer messages are given than were asked for


class Delivery(msgspec.Struct, frozen=True, array_like=True):
    """Messages of a shard under one lease, as columns."""

    shard: int
    lease: int
    sequences: list[int]
    times: list[int]
    keys: list[bytes | None]
    payloads: list[bytes]
    deliveries: list[int]  # this one included

    def only(self, chosen: Sequence[bool]) -> Delivery:
        """Some of them."""
        return Delivery(
            self.shard,
            self.lease,
            list(compress(self.sequences, chosen)),
            list(compress(self.times, chosen)),
            list(compress(self.keys, chosen)),
            list(compress(self.payloads, chosen)),
            list(compress(self.deliveries, chosen)),
        )


class Deliveries:
    """The consumers of one queue."""

    def __init__(self, info: TableInfo, host: Host, machines: Sequence[QueueMachine]) -> None:
        self._info = info
        self._host = host
        self._machines = machines  # by shard
        self._changed = threads.condition("queue.deliveries")
        self._waiting = 0  # guarded by _changed, and looked at without it by who applies
        self._blocked = 0  # of these, who found a full window; the same
        self._asleep_until_s = 0.0  # guarded by _changed: nobody who waits sleeps longer
        self._closed = False  # guarded by _changed
        self._leases = Leases(host.incarnation)  # guarded by _changed
        self._arrived = False  # messages came that nobody was told of; set by who applies
        for machine in machines:
            machine.changed = self._note_arrival
        self._ignore_applied = host.on_applied(self._applied)

    def _note_arrival(self) -> None:
        self._arrived = True

    def _applied(self) -> None:
        """Whole records were applied: only now may their messages be seen."""
        if self._waiting and (self._arrived or self._blocked):
            self._arrived = False
            with self._changed:
                self._changed.notify_all()

    # -- taking

    def get(self, call: QueueCall) -> list[Delivery]:
        """Messages under leases; waits for some if there are none."""
        graves = self._graves(call)  # before anything is leased
        deadline_s = self._host.clock.monotonic_s() + min(call.timeout_s, WAIT_S_MAX)
        while claims := self._claim_or_wait(call, deadline_s):
            try:
                found = self._read(call.consumer, claims)
                if call.deliveries_max is not None:
                    found = self._without_spent(call, found, graves)
                if found:
                    self._count(call.consumer, claims, found)
                    return found
            except BaseException:
                self._undo(call.consumer, claims)
                raise
        return []

    def _claim_or_wait(self, call: QueueCall, deadline_s: float) -> list[Claim]:
        clock, blocked = self._host.clock, False
        with self._changed:
            self._waiting += 1  # before the look: who applies after it will see it
            try:
                while True:
                    if self._closed:
                        raise self._gone()
                    now_s = clock.monotonic_s()
                    claims, full = self._claim(call, now_s)
                    if claims or now_s >= deadline_s:
                        return claims
                    if full and not blocked:
                        blocked = True
                        self._blocked += 1
                        continue  # look again: acknowledgements that are applied from now on will be heard
                    lapse_s = self._leases.next_lapse_s(call.consumer, now_s)
                    until_s = deadline_s if lapse_s is None else min(deadline_s, lapse_s)
                    self._asleep_until_s = max(self._asleep_until_s, until_s)
                    self._changed.wait(max(0.001, until_s - now_s))
            finally:
                self._waiting -= 1
                self._blocked -= blocked

    def _claim(self, call: QueueCall, now_s: float) -> tuple[list[Claim], bool]:
        """Lease up to `count` messages of all shards; whether there are some past a window. Requires: _changed."""
        claims: list[Claim] = []
        count, until_s, full = call.count, now_s + call.visibility_timeout_s, False
        for shard in self._leases.shards_in_turn(call.consumer, len(self._machines)):
            within = self._machines[shard].first, self._machines[shard].next
            place = self._place(call.consumer, shard)
            if place.mode != "leased":
                for taken in claims:
                    self._leases.undo(call.consumer, taken)
                raise self._other_use(call.consumer, "leased")
            claim = self._leases.claim(
                call.consumer, shard, place, within=within, limit=count, now_s=now_s, until_s=until_s
            )
            if claim is not None:
                claims.append(claim)
                count -= len(claim.sequences)
                if count <= 0:
                    break
            full = full or within[1] > place.floor + WINDOW
        if claims and until_s < self._asleep_until_s:
            self._changed.notify_all()  # these may lapse before those who sleep wake up
        return claims, full

    def _place(self, consumer: str, shard: int) -> ConsumerRow:
        """Where a consumer is; what was trimmed is behind it."""
        place = read_place(self._host.ledger_row, self._info.table, shard, consumer) or ConsumerRow("leased")
        return place.raised(self._machines[shard].first)

    def _read(self, consumer: str, claims: list[Claim]) -> list[Delivery]:
        """The messages of claims, as far as there is room; the others are given back."""
        found, room = list[Delivery](), GET_BYTES_MAX
        for claim in claims:
            batches, reached, room = self._batches(claim, room)
            if reached <= claim.sequences[-1]:
                self._undo(consumer, [claim], reached)
            if batches:
                found.append(_delivery(claim, batches))
        return found

    def _batches(self, claim: Claim, room: int) -> tuple[list[MessageBatch], int, int]:
        """The messages of a claim within `room` bytes, without trimmed ones; where they end, and the room left."""
        machine, found, at = self._machines[claim.shard], list[MessageBatch](), 0
        for low, high in runs(claim.sequences):
            at = max(low, at)
            while (at := max(at, machine.first)) < high:
                if room <= 0:
                    return found, at, room
                try:
                    batches = machine.queue.read(at, limit_messages=high - at, limit_bytes=room)
                except NotFound:
                    continue  # trimmed meanwhile: the first message is a later one now
                found += batches
                at = batches[-1].next
                room -= sum(batch.messages.size_bytes() for batch in batches)
        return found, at, room

    def _undo(self, consumer: str, claims: list[Claim], from_sequence: int = 0) -> None:
        with self._changed:
            for claim in claims:
                self._leases.undo(consumer, claim, from_sequence)
            self._changed.notify_all()

    # -- dead letters

    def _graves(self, call: QueueCall) -> TableInfo | None:
        """Where messages go that were delivered too often."""
        if call.dead_letter is None:
            return None
        info = self._host.port.table(call.dead_letter)
        if info is None or info.kind != "queue":
            raise NotFound(f"there is no queue {call.dead_letter} for dead letters: make it first")
        if info.table == self._info.table:
            raise Invalid(f"queue {info.name} cannot take its own dead letters: name another")
        return info

    def _without_spent(self, call: QueueCall, found: list[Delivery], graves: TableInfo | None) -> list[Delivery]:
        """Acknowledge messages that were delivered too often, and put them into their queue, in one group."""
        spent, others = list[Delivery](), list[Delivery]()
        for delivery in found:
            is_spent = [count > (call.deliveries_max or 0) for count in delivery.deliveries]
            if any(is_spent):
                spent.append(delivery.only(is_spent))
                delivery = delivery.only([not gone for gone in is_spent])
            if delivery.sequences:
                others.append(delivery)
        if not spent:
            return others
        ranges = [(delivery.shard, runs(delivery.sequences)) for delivery in spent]
        leases = [[delivery.lease] * len(some) for delivery, (_, some) in zip(spent, ranges, strict=True)]
        asked = Ack(call.consumer, ranges, leases)
        group = PendingGroup(encode_condition(Condition(None, ((ACK, argument(self._info.table, asked)),))))
        if graves is not None:
            for delivery in spent:
                letters = Messages.of(delivery.payloads, delivery.keys, delivery.times)
                for partition, part in section.by_shard(letters, partitions_of(graves), spare=0):
                    puts: section.Puts = group.sections.setdefault(partition, section.Puts())
                    puts.add_many(part)
        # If it is refused, somebody moved the consumer meanwhile: then they are not this one's any more.
        with suppress(LeaseLost):
            self._host.port.commit_and_wait(
                group, sum(len(payload) for delivery in spent for payload in delivery.payloads)
            )
        return others

    def _count(self, consumer: str, claims: list[Claim], found: list[Delivery]) -> None:
        """Remember deliveries. Nobody waits for it: a crash may forget the newest, with all that came after them."""
        first = {claim.shard: claim.first for claim in claims}
        asked = Deliver(consumer, [(each.shard, first[each.shard], runs(each.sequences)) for each in found])
        data = argument(self._info.table, asked)
        self._host.port.submit(PendingGroup(encode_condition(Condition(None, ((DELIVER, data),)))), len(data))

    # -- giving back

    def nack(self, call: QueueCall) -> int:
        """Give leases back: their messages are delivered again, after `delay_s`."""
        with self._changed:
            now_s = self._host.clock.monotonic_s()
            given = self._leases.release(call.consumer, call.leases, self._place, now_s, now_s + call.delay_s)
            self._changed.notify_all()
            return given

    # -- conditions

    def admit(self, name: str, data: bytes) -> None:
        """Refuse a condition that the ledger would refuse, or that lacks its leases; a seek and a forget end them."""
        if name == ACK:
            _, ack = read_argument(data, Ack)
            assert isinstance(ack, Ack)
            self._check_use(ack.consumer, "leased")
            with self._changed:
                held = self._leases.hold(ack, self._host.clock.monotonic_s())
            if not held:
                raise LeaseLost(f"consumer {ack.consumer} does not hold these messages any more: nothing was written")
        elif name == MOVE:
            _, move = read_argument(data, Move)
            assert isinstance(move, Move)
            self._check_use(move.consumer, "streamed")
        elif name == SEEK:
            _, seek = read_argument(data, Seek)
            assert isinstance(seek, Seek)
            self._check_use(seek.consumer, seek.mode)
            self._end_leases(seek.consumer)
        elif name == FORGET:
            _, forget = read_argument(data, ForgetConsumer)
            assert isinstance(forget, ForgetConsumer)
            self._end_leases(forget.consumer)

    def _end_leases(self, consumer: str) -> None:
        """Who has messages now has them no more: the consumer begins at another place."""
        with self._changed:
            self._leases.end(consumer)
            self._changed.notify_all()

    def _check_use(self, consumer: str, mode: Mode) -> None:
        """A consumer is used in one way, in all shards."""
        for shard in range(len(self._machines)):
            place = read_place(self._host.ledger_row, self._info.table, shard, consumer)
            if place is not None and place.mode != mode:
                raise self._other_use(consumer, mode)

    def _other_use(self, consumer: str, mode: Mode) -> KindMismatch:
        is_used = "is moved by a stream" if mode == "leased" else "takes messages by leases"
        return KindMismatch(f"consumer {consumer} of {self._info.name} {is_used}: use another name, or forget it first")

    # -- the end

    def maintain(self) -> None:
        """Let go of what is not needed any more."""
        with self._changed:
            self._leases.forget_idle(self._host.clock.monotonic_s())

    def has_leases(self) -> bool:
        """Whether messages are out."""
        with self._changed:
            return self._leases.some_out(self._place, self._host.clock.monotonic_s())

    def _gone(self) -> PenstockError:
        info = self._host.port.table(self._info.name)
        if info is None or info.table != self._info.table:
            return NotFound(f"queue {self._info.name} was dropped")
        return Closed("the store was closed: open it again")

    def close(self) -> None:
        """Answer whoever waits."""
        self._ignore_applied()
        with self._changed:
            self._closed = True
            self._changed.notify_all()


def _delivery(claim: Claim, batches: list[MessageBatch]) -> Delivery:
    keys: list[bytes | None] = []
    times: list[int] = []
    payloads: list[bytes] = []
    for batch in batches:
        messages, count = batch.messages, len(batch)
        keys += [None] * count if messages.keys is None else messages.keys.to_pylist()
        times += [batch.time_us] * count if messages.times is None else messages.times.tolist()
        payloads += bytes_list(messages.payloads)
    sequences, deliveries = claim.sequences, claim.deliveries
    if len(payloads) < len(sequences):  # some were trimmed meanwhile, or found no room
        read = np.concatenate([np.arange(batch.first, batch.next) for batch in batches])
        sequences, deliveries = read, deliveries[np.searchsorted(sequences, read)]
    return Delivery(claim.shard, claim.lease, sequences.tolist(), times, keys, payloads, deliveries.tolist())
