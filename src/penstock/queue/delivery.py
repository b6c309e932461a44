"""Delivery of messages to consumers, in the owner: leases, waiting, dead letters.

A consumer gets messages under *leases*, which exist only in this memory: they expire after their time, and when the
store is opened again. Acknowledgements are in the ledger, which decides: an acknowledgement needs the lease when it
arrives here, and a message that is still unacknowledged when the ledger evaluates it.

Thread: any; `_changed` guards leases. Messages are read from files without it.
Invariants: (1) a message is under one lease at a time. (2) `get` waits for no write except that of dead letters.
(3) waiters are woken when messages arrive, when acknowledgements make room in a full window, when a lease may have
expired, and when the queue is closed. (4) a `get` that fails leases nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from itertools import compress
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from penstock.errors import Closed, Invalid, KindMismatch, LeaseLost, NotFound, PenstockError
from penstock.host import threads
from penstock.kinds import Host, partitions_of
from penstock.lsm.maintenance import COMPANION
from penstock.lsm.rows import bytes_list
from penstock.partition.ledger_records import Condition, TableInfo, encode_condition
from penstock.partition.pending import PendingGroup
from penstock.queue import section
from penstock.queue.headers import dicts
from penstock.queue.leases import Claim, Leases
from penstock.queue.machine import QueueMachine
from penstock.queue.messages import MessageBatch, Messages
from penstock.queue.options import has_headers
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
    read_row,
    runs,
)

if TYPE_CHECKING:
    from penstock.queue.calls import QueueCall

WAIT_S_MAX = 30.0  # of one call: to wait longer, call again
CONSUMERS_MAX = 10_000  # consumers whose last activity is remembered
GET_BYTES_MAX = 16 << 20  # of one call: may return fewer messages than requested


class Delivery(msgspec.Struct, frozen=True, array_like=True):
    """Messages of a shard under one lease, as columns."""

    shard: int
    lease: int
    sequences: list[int]
    times: list[int]
    keys: list[bytes | None]
    payloads: list[bytes]
    deliveries: list[int]  # including this one
    headers: list[dict[str, bytes] | None] | None = None  # None: no message has any

    def only(self, chosen: Sequence[bool]) -> Delivery:
        """Return the chosen messages."""
        return Delivery(
            self.shard,
            self.lease,
            list(compress(self.sequences, chosen)),
            list(compress(self.times, chosen)),
            list(compress(self.keys, chosen)),
            list(compress(self.payloads, chosen)),
            list(compress(self.deliveries, chosen)),
            None if self.headers is None else list(compress(self.headers, chosen)),
        )


class Deliveries:
    """The consumers of one queue."""

    def __init__(self, info: TableInfo, host: Host, machines: Sequence[QueueMachine]) -> None:
        self._info = info
        self._host = host
        self._machines = machines  # by shard
        self._changed = threads.condition("queue.deliveries")
        self._waiting = 0  # number of waiters; guarded by _changed, but `_applied` reads it without
        self._blocked = 0  # number of waiters at a full window; likewise
        self._asleep_until_s = 0.0  # guarded by _changed: no waiter sleeps longer
        self._closed = False  # guarded by _changed
        self._leases = Leases(host.incarnation, host.uuid)  # guarded by _changed
        self._arrived = False  # messages arrived since the last wake-up; set by apply
        self._last_seen_us: OrderedDict[str, int] = OrderedDict()  # guarded by _changed: by consumer, oldest first
        for machine in machines:
            machine.changed = self._note_arrival
        self._ignore_applied = host.on_applied(self._applied)

    def _note_arrival(self) -> None:
        self._arrived = True

    def _applied(self) -> None:
        """Wake waiters: whole records were applied, and only now are their messages visible."""
        if self._waiting and (self._arrived or self._blocked):
            self._arrived = False
            with self._changed:
                self._changed.notify_all()

    # -- leasing messages

    def get(self, call: QueueCall) -> list[Delivery]:
        """Lease messages; wait for some if there are none."""
        letters_to = self._dead_letter_table(call)  # before anything is leased
        deadline_s = self._host.clock.monotonic_s() + min(call.timeout_s, WAIT_S_MAX)
        while claims := self._claim_or_wait(call, deadline_s):
            try:
                deliveries = self._read(call.consumer, claims)
                if call.deliveries_max is not None:
                    deliveries = self._without_spent(call, deliveries, letters_to)
                if deliveries:
                    self._count(call.consumer, claims, deliveries)
                    return deliveries
            except BaseException:
                self._undo(call.consumer, claims)
                raise
        return []

    def _claim_or_wait(self, call: QueueCall, deadline_s: float) -> list[Claim]:
        clock, blocked = self._host.clock, False
        with self._changed:
            self._note_activity(call.consumer)
            self._waiting += 1  # before the check: an apply after it sees this
            try:
                while True:
                    if self._closed:
                        raise self._closed_error()
                    now_s = clock.monotonic_s()
                    claims, full = self._claim(call, now_s)
                    if claims or now_s >= deadline_s:
                        return claims
                    if full and not blocked:
                        blocked = True
                        self._blocked += 1
                        continue  # check again: from now on, applied acknowledgements wake this waiter
                    lapse_s = self._leases.next_lapse_s(call.consumer, now_s)
                    until_s = deadline_s if lapse_s is None else min(deadline_s, lapse_s)
                    self._asleep_until_s = max(self._asleep_until_s, until_s)
                    self._changed.wait(max(0.001, until_s - now_s))
            finally:
                self._waiting -= 1
                self._blocked -= blocked

    def _claim(self, call: QueueCall, now_s: float) -> tuple[list[Claim], bool]:
        """Lease up to `count` messages; also return whether some are beyond a full window. Requires: _changed."""
        claims: list[Claim] = []
        count, until_s, full = call.count, now_s + call.visibility_timeout_s, False
        for shard in self._leases.shards_in_turn(call.consumer, len(self._machines)):
            within = self._machines[shard].first, self._machines[shard].next
            row = self._row(call.consumer, shard)
            if row.mode != "leased":
                for earlier in claims:
                    self._leases.undo(call.consumer, earlier)
                raise self._other_use(call.consumer, "leased")
            claim = self._leases.claim(
                call.consumer,
                shard,
                row,
                within=within,
                limit=count,
                now_s=now_s,
                until_s=until_s,
                holder=call.holder,
            )
            if claim is not None:
                claims.append(claim)
                count -= len(claim.sequences)
                if count <= 0:
                    break
            full = full or within[1] > row.floor + WINDOW
        if claims and until_s < self._asleep_until_s:
            self._changed.notify_all()  # these may expire before the sleeping waiters wake up
        return claims, full

    def _row(self, consumer: str, shard: int) -> ConsumerRow:
        """Return a consumer's row, with its floor raised above trimmed messages."""
        row = read_row(self._host.ledger_row, self._info.table_id, shard, consumer) or ConsumerRow("leased")
        return row.raised(self._machines[shard].first)

    def _read(self, consumer: str, claims: list[Claim]) -> list[Delivery]:
        """Read the messages of claims up to GET_BYTES_MAX; release the leases of the others."""
        deliveries, room = list[Delivery](), GET_BYTES_MAX
        for claim in claims:
            batches, reached, room = self._batches(claim, room)
            if reached <= claim.sequences[-1]:
                self._undo(consumer, [claim], reached)
            if batches:
                deliveries.append(_delivery(claim, batches))
        return deliveries

    def _batches(self, claim: Claim, room: int) -> tuple[list[MessageBatch], int, int]:
        """Read a claim's messages within `room` bytes, without trimmed ones; return batches, end and room left."""
        machine, batches, at = self._machines[claim.shard], list[MessageBatch](), 0
        for low, high in runs(claim.sequences):
            at = max(low, at)
            while (at := max(at, machine.first)) < high:
                if room <= 0:
                    return batches, at, room
                try:
                    more = machine.queue.read(at, limit_messages=high - at, limit_bytes=room)
                except NotFound:
                    continue  # trimmed meanwhile: the shard's first message is later now
                batches += more
                at = more[-1].next
                room -= sum(batch.messages.size_bytes() for batch in more)
        return batches, at, room

    def _undo(self, consumer: str, claims: list[Claim], from_sequence: int = 0) -> None:
        with self._changed:
            for claim in claims:
                self._leases.undo(consumer, claim, from_sequence)
            self._changed.notify_all()

    # -- dead letters

    def _dead_letter_table(self, call: QueueCall) -> TableInfo | None:
        """Return the queue for messages that were delivered too often."""
        if call.dead_letter is None:
            return None
        info = self._host.port.table(call.dead_letter)
        if info is None or info.kind != "queue":
            raise NotFound(f"there is no queue {call.dead_letter} for dead letters: create it first")
        if info.table_id == self._info.table_id:
            raise Invalid(f"queue {info.name} cannot take its own dead letters: name another")
        source = self._host.port.table(self._info.name) or self._info  # its options may have been altered
        if has_headers(source.options) and not has_headers(info.options):
            raise Invalid(f"queue {info.name} takes no headers, so it cannot take dead letters: alter(headers=True) it")
        if source.key is not None and info.key is None:
            raise Invalid(f"queue {source.name} is encrypted and {info.name} is not: name an encrypted one")
        return info

    def _without_spent(
        self, call: QueueCall, deliveries: list[Delivery], letters_to: TableInfo | None
    ) -> list[Delivery]:
        """Acknowledge messages that were delivered too often and move them to the dead letters, in one group."""
        spent, others = list[Delivery](), list[Delivery]()
        for delivery in deliveries:
            is_spent = [count > (call.deliveries_max or 0) for count in delivery.deliveries]
            if any(is_spent):
                spent.append(delivery.only(is_spent))
                delivery = delivery.only([not each for each in is_spent])
            if delivery.sequences:
                others.append(delivery)
        if not spent:
            return others
        ranges = [(delivery.shard, runs(delivery.sequences)) for delivery in spent]
        leases = [[delivery.lease] * len(spans) for delivery, (_, spans) in zip(spent, ranges, strict=True)]
        ack = Ack(call.consumer, ranges, leases)
        group = PendingGroup(encode_condition(Condition(None, ((ACK, argument(self._info.table_id, ack)),))))
        if letters_to is not None:
            for delivery in spent:
                letters = Messages.of(delivery.payloads, delivery.keys, delivery.times, delivery.headers)
                for partition, part in section.by_shard(letters, partitions_of(letters_to), spare=0):
                    puts: section.Puts = group.sections.setdefault(partition, section.Puts())
                    puts.add_many(part)
        # A refusal means that another client moved the consumer meanwhile: its leases on these messages have ended.
        with suppress(LeaseLost):
            self._host.port.commit_and_wait(
                group, sum(len(payload) for delivery in spent for payload in delivery.payloads)
            )
        return others

    def _count(self, consumer: str, claims: list[Claim], deliveries: list[Delivery]) -> None:
        """Record deliveries, without waiting: a crash may lose the newest counts, with all later writes."""
        first = {claim.shard: claim.first for claim in claims}
        request = Deliver(consumer, [(each.shard, first[each.shard], runs(each.sequences)) for each in deliveries])
        data = argument(self._info.table_id, request)
        self._host.port.submit(PendingGroup(encode_condition(Condition(None, ((DELIVER, data),)))), len(data))

    # -- returning messages

    def nack(self, call: QueueCall) -> int:
        """Release leases, so that their messages are delivered again after `delay_s`; return how many."""
        with self._changed:
            self._note_activity(call.consumer)
            now_s = self._host.clock.monotonic_s()
            released = self._leases.release(call.consumer, call.leases, self._row, now_s, now_s + call.delay_s)
            self._changed.notify_all()
            return released

    def extend(self, call: QueueCall) -> None:
        """Renew leases, for `visibility_timeout_s` from now; `LeaseLost`, and none is renewed, if one has ended."""
        with self._changed:
            self._note_activity(call.consumer)
            now_s = self._host.clock.monotonic_s()
            until_s = now_s + call.visibility_timeout_s
            if not self._leases.extend(call.consumer, call.leases, self._row, now_s, until_s):
                raise LeaseLost(f"consumer {call.consumer} no longer holds these messages: no lease was extended")
            if until_s < self._asleep_until_s:
                self._changed.notify_all()  # these may expire before the sleeping waiters wake up

    def leave(self, call: QueueCall) -> None:
        """End the leases of a client that closes its connection: others get its messages at once."""
        with self._changed:
            self._leases.leave(call.holder)
            self._changed.notify_all()

    # -- consumers

    def _note_activity(self, consumer: str) -> None:
        """Remember when a consumer was active. Requires: _changed."""
        self._last_seen_us[consumer] = self._host.port.time_us()
        self._last_seen_us.move_to_end(consumer)
        if len(self._last_seen_us) > CONSUMERS_MAX:
            self._last_seen_us.popitem(last=False)

    def activity(self) -> tuple[dict[str, int], dict[str, int]]:
        """Return, by consumer, when each was last seen in microseconds, and how many messages it has leased."""
        with self._changed:
            return dict(self._last_seen_us), self._leases.count_leased(self._row, self._host.clock.monotonic_s())

    # -- conditions

    def admit(self, name: str, data: bytes) -> None:
        """Reject a condition that the ledger would refuse, or that lacks its leases. A seek or forget ends leases."""
        if name == ACK:
            _, ack = read_argument(data, Ack)
            assert isinstance(ack, Ack)
            self._check_use(ack.consumer, "leased")
            with self._changed:
                self._note_activity(ack.consumer)
                holds_leases = self._leases.hold(ack, self._host.clock.monotonic_s())
            if not holds_leases:
                raise LeaseLost(f"consumer {ack.consumer} no longer holds these messages: nothing was written")
        elif name == MOVE:
            _, move = read_argument(data, Move)
            assert isinstance(move, Move)
            if all(shard < COMPANION for shard, _, _ in move.ranges):  # else it is of the change feed
                self._check_use(move.consumer, "streamed")
                with self._changed:
                    self._note_activity(move.consumer)
        elif name == SEEK:
            _, seek = read_argument(data, Seek)
            assert isinstance(seek, Seek)
            self._check_use(seek.consumer, seek.mode)
            self._end_leases(seek.consumer)
            with self._changed:
                self._note_activity(seek.consumer)
        elif name == FORGET:
            _, forget = read_argument(data, ForgetConsumer)
            assert isinstance(forget, ForgetConsumer)
            self._end_leases(forget.consumer)
            with self._changed:
                self._last_seen_us.pop(forget.consumer, None)

    def _end_leases(self, consumer: str) -> None:
        """End all leases of a consumer, because it moves to another position."""
        with self._changed:
            self._leases.end(consumer)
            self._changed.notify_all()

    def _check_use(self, consumer: str, mode: Mode) -> None:
        """Raise `KindMismatch` if a consumer is used in the other mode in some shard."""
        for shard in range(len(self._machines)):
            row = read_row(self._host.ledger_row, self._info.table_id, shard, consumer)
            if row is not None and row.mode != mode:
                raise self._other_use(consumer, mode)

    def _other_use(self, consumer: str, mode: Mode) -> KindMismatch:
        is_used = "is moved by a stream" if mode == "leased" else "takes messages by leases"
        return KindMismatch(f"consumer {consumer} of {self._info.name} {is_used}: use another name, or forget it first")

    # -- maintenance and closing

    def maintain(self) -> None:
        """Discard windows without leases."""
        with self._changed:
            self._leases.forget_idle(self._host.clock.monotonic_s())

    def has_leases(self) -> bool:
        """Whether unacknowledged messages are under a lease."""
        with self._changed:
            return self._leases.has_leased(self._row, self._host.clock.monotonic_s())

    def _closed_error(self) -> PenstockError:
        info = self._host.port.table(self._info.name)
        if info is None or info.table_id != self._info.table_id:
            return NotFound(f"queue {self._info.name} was dropped")
        return Closed("the store was closed: open it again")

    def close(self) -> None:
        """Wake all waiters; their calls fail."""
        self._ignore_applied()
        with self._changed:
            self._closed = True
            self._changed.notify_all()


def _delivery(claim: Claim, batches: list[MessageBatch]) -> Delivery:
    keys: list[bytes | None] = []
    times: list[int] = []
    payloads: list[bytes] = []
    headers: list[dict[str, bytes] | None] | None = None
    if any(batch.messages.headers is not None for batch in batches):
        headers = []
    for batch in batches:
        messages, count = batch.messages, len(batch)
        keys += [None] * count if messages.keys is None else messages.keys.to_pylist()
        times += [batch.time_us] * count if messages.times is None else messages.times.tolist()
        payloads += bytes_list(messages.payloads)
        if headers is not None:
            headers += [None] * count if messages.headers is None else dicts(messages.headers)
    sequences, deliveries = claim.sequences, claim.deliveries
    if len(payloads) < len(sequences):  # some were trimmed meanwhile, or there was no room
        read = np.concatenate([np.arange(batch.first, batch.next) for batch in batches])
        sequences, deliveries = read, deliveries[np.searchsorted(sequences, read)]
    return Delivery(claim.shard, claim.lease, sequences.tolist(), times, keys, payloads, deliveries.tolist(), headers)
