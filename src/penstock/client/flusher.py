"""Turns a batch of deltas from a client's coordinator into messages to the owner.

The steps of a batch:
 1. Its groups are encoded, once, into a queue.
 2. As many as fit become a message. A group without a token of the user gets the next number of this client's own.
 3. The message is sent until it is answered: without an answer its outcome is unknown, so it is sent again unchanged,
    to this owner or the next, and the tokens ensure that nothing happens twice.
 4. Every answered group leaves the queue: done, or not done and reported to its writer. The owner stops at a plain
    group that it refuses; the groups after it get new numbers in the next message.

So numbers rise in the order of sending, and an unanswered message has at most GROUPS_MAX of them: none is ever below
the window in which the ledger remembers tokens, however long the queue is.

Thread: the coordinator's: `make_durable` by one at a time, which is its background thread or the caller of `recover`.
Waiters for a write do not send, so that they can time out or be interrupted at any time.
Invariants: (1) groups happen in order. (2) a group leaves the queue only when its outcome is known. (3) every dropped
write is reported, to its writer or to a later call.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice

from penstock.client.connection import Connection, GoneError
from penstock.client.refusals import Refusal, Refusals, in_doubt
from penstock.coordinator import Batch, Durability
from penstock.errors import (
    Backpressure,
    DiskFull,
    FixTheCall,
    Invalid,
    NotFound,
    OutcomeUnknown,
    PenstockError,
    Reopen,
    Restore,
    RetryLater,
    StoreLocked,
)
from penstock.host.clock import Clock
from penstock.host.randomness import Random, system_random
from penstock.host.waiting import Retries
from penstock.journal.partitions import PartitionId, table_of
from penstock.kinds import Kind
from penstock.partition.ledger_records import Condition, Verdict, decode_condition, encode_condition
from penstock.partition.pending import PendingDelta, PendingGroup, parts
from penstock.partition.reference import Reference
from penstock.protocol import wire

SEND_S = 60.0  # for a batch to be accepted, over any number of owners
ANSWER_S = 120.0  # for one message: the owner may have files to read and sync
BUSY_S = 5.0  # for an owner's full disk, or a shard that takes no writes, before the write is refused
MESSAGE_BYTES = 8 << 20  # approximate limit of one message
SECTION_BYTES = MESSAGE_BYTES // wire.SECTIONS_MAX  # counted for each, so that a message does not get too many
GROUP_BYTES_MAX = wire.MESSAGE_BYTES_MAX - (1 << 20)  # of a group's sections: it must fit into a message
BACKOFF_S = 0.05


class WholeGroup(PendingGroup):
    """A group that its writer submitted as one: it is atomic."""

    awaited: bool = False  # its writer waits for `verdict` and `error`
    error: PenstockError | None = None


class _Outgoing:
    """A group in the queue."""

    __slots__ = ("bytes", "condition", "group", "sections", "sent")

    def __init__(self, group: PendingGroup | None, condition: Condition, sections: list[wire.SentSection]) -> None:
        self.group = group  # None: a part of a plain one
        self.condition = condition  # with a token, if the user gave one
        self.sections = sections
        self.bytes = sum(SECTION_BYTES + len(section.payload) for section in sections)
        self.bytes += sum(len(name) + len(argument) for name, argument in condition.others)
        self.sent: wire.SentGroup | None = None  # as in the last message

    @property
    def plain(self) -> bool:
        return not isinstance(self.group, WholeGroup)

    def tables(self) -> set[int]:
        return {table_of(section.partition) for section in self.sections}


class RemoteFlusher:
    """Makes batches of a client durable in the owner."""

    def __init__(
        self,
        connection: Connection,
        kind_of: Callable[[PartitionId], Kind | None],
        *,
        producer: str,
        clock: Clock,
        send_s: float = SEND_S,
        random: Random | None = None,
    ) -> None:
        self._connection = connection
        self._random = random or system_random()
        self._kind_of = kind_of
        self._producer = producer
        self._clock = clock
        self._send_s = send_s
        self._last_number = 0  # of a token
        self._last_epoch = 0  # of the batch that the following fields describe
        self._queue: deque[_Outgoing] = deque()  # groups whose outcome is not known
        self._message: tuple[_Outgoing, ...] = ()  # the first groups of the queue: sent, and not answered
        self._taken: set[int] = set()  # tables with writes that happened
        self._refused: dict[int, PenstockError] = {}  # tables with writes that did not
        self._busy_since: tuple[int, float] | None = None  # the shard that takes no writes (0: the disk is full), since
        self._ending = threading.Event()
        self.refusals = Refusals()
        self.answers = 0  # number of answered messages
        self.idle = threading.Event()  # no batch is being sent
        self.idle.set()
        self.unsent_bytes = 0  # approximate, since the last batch began

    @property
    def durability(self) -> Durability:
        return Durability(self._connection.owner.durability)

    def make_durable(self, batch: Batch[PendingDelta], *, again: bool) -> int:
        self.unsent_bytes = 0
        self.idle.clear()
        try:
            if self._last_epoch != batch.last:  # otherwise it failed, and continues where it stopped
                self._begin(batch)
            if again:  # the caller of `recover` waits
                self._send_all(self._connection.owner_timeout_s, self._connection.owner_timeout_s)
            else:
                self._send_all(self._send_s, ANSWER_S)
            self._report(batch)
            return batch.last
        finally:
            self.idle.set()

    def apply(self, flushed: int) -> int:
        return flushed

    def recover(self) -> None:
        """Do nothing: `make_durable` sends the kept batch again, with the same tokens."""

    def end(self) -> None:
        """Stop retrying after the current attempt."""
        self._ending.set()

    # -- encoding

    def _begin(self, batch: Batch[PendingDelta]) -> None:
        self._taken, self._refused = set(), {}
        queue: deque[_Outgoing] = deque()
        for delta in batch.deltas:
            for group in delta.groups:
                try:
                    outgoing = self._outgoing(group)
                    if outgoing.sections or group.condition:
                        queue.append(outgoing)
                except PenstockError as error:
                    self._refuse(group, {table_of(partition) for partition in group.sections}, error)
        self._queue, self._message = queue, ()
        self._last_epoch = batch.last  # last: if a line above raised, all of it is repeated

    def _outgoing(self, group: PendingGroup) -> _Outgoing:
        sections = [
            self._section(partition, part)
            for partition, waiting in group.sections.items()
            for part in parts(waiting)
            if isinstance(part, Reference) or len(part)  # an interrupted write may have left an empty one
        ]
        return _Outgoing(group, decode_condition(group.condition), sections)

    def _section(self, partition: PartitionId, part: object) -> wire.SentSection:
        if isinstance(part, Reference):
            return wire.SentSection(partition, b"", list(part.files))
        kind = self._kind_of(partition)
        if kind is None:
            raise NotFound(f"table number {table_of(partition)} is not known here: get it from the store again")
        return wire.SentSection(partition, kind.encode(part))

    # -- sending

    def _send_all(self, owner_timeout_s: float, answer_s: float) -> None:
        """Send the queue; raises if the owner accepts nothing for `owner_timeout_s`."""
        retries = self._retries(owner_timeout_s)
        while self._queue:
            try:
                busy = self._send_message(answer_s)
            except GoneError as error:
                busy = OutcomeUnknown(f"the owner did not answer ({error})")
            except PenstockError as error:
                if not _may_pass(error):
                    raise
                busy = error
            if busy is None:
                retries = self._retries(owner_timeout_s)
            elif not retries.again(busy.retry_after_s if isinstance(busy, Backpressure) else 0.0):
                raise busy

    def _retries(self, owner_timeout_s: float) -> Retries:
        deadline_s = self._clock.monotonic_s() + owner_timeout_s
        return Retries(
            self._clock, deadline_s, pause_s=BACKOFF_S, pause_s_max=1.0, stop=self._ending, random=self._random
        )

    def _send_message(self, answer_s: float) -> PenstockError | None:
        """Send the next message, or the last one again; return why the next must wait, None if it need not."""
        again = bool(self._message)
        if not again and not self._form_message():
            return None
        sent = [outgoing.sent for outgoing in self._message if outgoing.sent is not None]
        if not any(section.files for group in sent for section in group.sections):
            answer_s = self._connection.bounded(answer_s)  # another member may lead, and has these tokens or not
        answer = self._connection.send_once(wire.Write(sent, again), answer_s)
        busy = self._process(wire.unpack(answer, wire.Outcomes).outcomes, again=again)
        if busy is None or not again:  # otherwise an earlier sending may still happen: keep the numbers
            self._message = ()
        self.answers += 1
        return busy

    def _form_message(self) -> bool:
        """Number the groups of the next message; False if the first was too large, and was refused."""
        message = tuple(_first_message(self._queue))
        first = message[0]
        if first.bytes > GROUP_BYTES_MAX or len(first.sections) > wire.SECTIONS_MAX:
            size = f"{len(first.sections)} sections and {first.bytes} bytes"
            hint = "split it, or load its rows with store.load"
            self._not_done(first, Invalid(f"a batch of {size} does not fit into a message to the owner: {hint}"))
            return False
        for outgoing in message:
            own = outgoing.condition.token is None
            condition = self._own_condition(outgoing.condition.others) if own else encode_condition(outgoing.condition)
            outgoing.sent = wire.SentGroup(condition, outgoing.plain, outgoing.sections)
        self._message = message
        return True

    def _own_condition(self, others: tuple[tuple[str, bytes], ...]) -> bytes:
        self._last_number += 1
        return encode_condition(Condition((self._producer, self._last_number), others))

    # -- outcomes

    def _process(self, outcomes: list[wire.Outcome], *, again: bool) -> PenstockError | None:
        """Remove the answered groups from the queue; return why the next must wait, None if it need not."""
        if not outcomes:
            return OutcomeUnknown("the owner answered nothing")
        for outgoing, outcome in zip(self._message, outcomes, strict=False):
            if not self._queue or self._queue[0] is not outgoing:  # processed before an interrupt
                continue
            error = None if outcome.fault is None else self._connection.error_of(outcome.fault)
            if error is None:
                self._done(outgoing, outcome, again=again)
            elif isinstance(error, RetryLater) and outgoing.plain and not self._stays_busy(error, again=again):
                return error
            else:
                self._not_done(outgoing, error)
        return None

    def _stays_busy(self, error: PenstockError, *, again: bool) -> bool:
        """Whether the owner's disk was full, or one shard took no writes, for BUSY_S. Then the write is refused.

        Other writes wait behind it: deletes that would free space, and those of tables that are well.
        """
        if again:  # an earlier sending may still happen
            return False
        if isinstance(error, DiskFull):
            cause = 0
        elif isinstance(error, Backpressure) and error.partition:
            cause = error.partition
        else:
            return False
        now_s = self._clock.monotonic_s()
        if self._busy_since is None or self._busy_since[0] != cause:
            self._busy_since = cause, now_s
        return now_s - self._busy_since[1] >= BUSY_S

    def _not_done(self, outgoing: _Outgoing, error: PenstockError) -> None:
        """Refuse the first group of the queue, which is certain never to happen."""
        partitions = dict.fromkeys(section.partition for section in outgoing.sections)
        if outgoing.plain and len(partitions) > 1:  # one refusing shard must not block the others
            pieces = [
                _Outgoing(None, Condition(), [each for each in outgoing.sections if each.partition == partition])
                for partition in partitions
            ]
            self._queue = deque([*pieces, *islice(self._queue, 1, None)])
            return
        self._refuse(outgoing.group, outgoing.tables(), error)
        self._queue.popleft()

    def _refuse(self, group: PendingGroup | None, tables: set[int], error: PenstockError) -> None:
        if isinstance(group, WholeGroup) and group.awaited:
            group.error = error
            return
        for table in tables:
            self._refused.setdefault(table, error)

    def _done(self, outgoing: _Outgoing, outcome: wire.Outcome, *, again: bool) -> None:
        """Remove the first group of the queue, which was judged."""
        own, verdict = outgoing.condition.token is None, Verdict(outcome.verdict)
        if own and outcome.happened:  # by an earlier sending of this group
            verdict = Verdict.ACCEPTED
        unexpected = own and not outgoing.condition.others and verdict is not Verdict.ACCEPTED
        if unexpected or (verdict is Verdict.TOKEN_TOO_OLD and (own or again)):
            error = OutcomeUnknown("the owner does not remember whether this write happened: read to find out")
            self._refuse(outgoing.group, outgoing.tables(), error)
        else:
            self._taken |= outgoing.tables()
            self._busy_since = None
            if outgoing.group is not None:
                outgoing.group.verdict = verdict
                outgoing.group.refused_by = outcome.refused_by
        self._queue.popleft()

    def _report(self, batch: Batch[PendingDelta]) -> None:
        """Record the refused writes of a batch for its writers."""
        if self._refused:
            first, last = batch.first, batch.last
            errors = {
                table: in_doubt(error, first, last) if table in self._taken else error
                for table, error in self._refused.items()
            }
            self.refusals.add(Refusal(first, last, errors))
            self._refused = {}


def _may_pass(error: PenstockError) -> bool:
    """Whether to send a message again after an error: its outcome is unknown either way."""
    return isinstance(error, (RetryLater, StoreLocked)) or not isinstance(error, (FixTheCall, Reopen, Restore))


def _first_message(queue: deque[_Outgoing]) -> Iterator[_Outgoing]:
    """Yield as many groups as fit into one message, and at least one."""
    size = 0
    for count, outgoing in enumerate(queue):
        size += outgoing.bytes
        if count and (size > MESSAGE_BYTES or count >= wire.GROUPS_MAX):
            return
        yield outgoing
