"""Between a client's coordinator and the owner: a batch of deltas becomes messages.

Every group has a token, the user's or one of this client's own, so that a message whose answer was lost is sent again
and nothing happens twice. The owner answers when all of a message is durable and applied.

Thread: the coordinator's: `make_durable` by one thread at a time.
Invariants: (1) a section is encoded once. (2) groups happen in their order: what the owner did not take is sent again
before anything after it. (3) a message has at most GROUPS_MAX groups, so that all its tokens are still remembered when
it is sent again.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator

import msgspec

from penstock.client import wire
from penstock.client.connection import Connection, GoneError
from penstock.client.place import pause
from penstock.coordinator import Batch, Durability
from penstock.errors import NotFound, OutcomeUnknown, PenstockError, RetryLater
from penstock.host.clock import Clock
from penstock.journal.record import PartitionId
from penstock.kinds import Kind
from penstock.partition.ledger import Condition, Verdict, decode_condition, encode_condition
from penstock.partition.pending import PendingDelta, PendingGroup, parts
from penstock.partition.reference import Reference

SEND_S = 60.0  # for a batch to be taken, with an owner that comes and goes
MESSAGE_BYTES = 8 << 20  # about: more go into another message
SECTION_BYTES = MESSAGE_BYTES // wire.SECTIONS_MAX  # counted for each, so that a message has not too many
BACKOFF_S = 0.05
REFUSALS_MAX = 64  # kept for those who ask later


class _Outgoing:
    """A group on its way."""

    __slots__ = ("bytes", "group", "own_token", "sent")

    def __init__(self, group: PendingGroup | None, sent: wire.SentGroup, *, own_token: bool) -> None:
        self.group = group
        self.sent = sent
        self.own_token = own_token  # of this client: that it was used before means that this group happened
        self.bytes = sum(SECTION_BYTES + len(section.payload) for section in sent.sections)


class Refusal(msgspec.Struct, frozen=True, eq=False):
    """Writes that the owner would not take."""

    first: int  # epochs, both included
    last: int
    error: PenstockError


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
    ) -> None:
        self._connection = connection
        self._kind_of = kind_of
        self._producer = producer
        self._clock = clock
        self._send_s = send_s
        self._last_number = 0  # of a token
        self._kept: deque[_Outgoing] = deque()  # of a batch that failed
        self.refused: dict[int, PenstockError] = {}  # by the id of a group that somebody waits for
        self.awaited: set[int] = set()  # the ids of such groups
        self.whole: set[int] = set()  # the ids of groups that were submitted as such and are not encoded yet
        self.refusals: deque[Refusal] = deque(maxlen=REFUSALS_MAX)
        self.news: deque[Refusal] = deque(maxlen=REFUSALS_MAX)  # of these, those that nobody was told of
        self.idle = threading.Event()  # no batch is under way
        self.idle.set()
        self.unsent_bytes = 0  # about, since the last batch went

    @property
    def durability(self) -> Durability:
        return Durability(self._connection.owner.durability)

    def make_durable(self, batch: Batch[PendingDelta], *, again: bool) -> int:
        self.unsent_bytes = 0
        self.idle.clear()
        try:
            return self._make_durable(batch, again=again)
        finally:
            self.idle.set()

    def _make_durable(self, batch: Batch[PendingDelta], *, again: bool) -> int:
        outgoing = self._kept if again else self._encode(batch)
        self._kept = outgoing  # until all of it is answered
        deadline_s, waits_s = self._clock.monotonic_s() + self._send_s, BACKOFF_S
        while outgoing:
            message = list(_first_message(outgoing))
            try:
                outcomes = self._send(message, again=again)
                again = False
                busy = self._settle(outgoing, message, outcomes, batch)
            except GoneError as gone:
                again, busy = True, OutcomeUnknown(f"the owner did not answer ({gone})")
            except RetryLater as error:  # of the message as a whole: some of it may have happened
                again, busy = True, error
            if busy is None:
                waits_s = BACKOFF_S
                continue
            if self._clock.monotonic_s() >= deadline_s:
                raise busy
            pause(waits_s)
            waits_s = min(2 * waits_s, 1.0)
        return batch.last

    def apply(self, flushed: int) -> int:
        return flushed

    def recover(self) -> None:
        """What was kept is sent again under the same tokens."""

    # -- encoding

    def _encode(self, batch: Batch[PendingDelta]) -> deque[_Outgoing]:
        return deque(self._outgoing(group) for delta in batch.deltas for group in delta.groups)

    def _outgoing(self, group: PendingGroup) -> _Outgoing:
        asked = decode_condition(group.condition)
        own = asked.token is None
        condition = group.condition if asked.token is not None else self._own_condition(asked.others)
        sections = [
            self._section(partition, part) for partition, held in group.sections.items() for part in parts(held)
        ]
        plain = id(group) not in self.whole
        self.whole.discard(id(group))
        return _Outgoing(group, wire.SentGroup(condition, plain, sections), own_token=own)

    def _own_condition(self, others: tuple[tuple[str, bytes], ...] = ()) -> bytes:
        self._last_number += 1
        return encode_condition(Condition((self._producer, self._last_number), others))

    def _section(self, partition: PartitionId, part: object) -> wire.SentSection:
        if isinstance(part, Reference):
            return wire.SentSection(partition, b"", list(part.files))
        kind = self._kind_of(partition)
        if kind is None:
            raise NotFound(f"table {partition >> 16} is not known here")
        return wire.SentSection(partition, kind.encode(part))

    # -- sending

    def _send(self, message: list[_Outgoing], *, again: bool) -> list[wire.Outcome]:
        answer = self._connection.send_once(wire.Write([outgoing.sent for outgoing in message], again))
        return wire.unpack(answer, wire.Outcomes).outcomes

    def _settle(
        self,
        outgoing: deque[_Outgoing],
        message: list[_Outgoing],
        outcomes: list[wire.Outcome],
        batch: Batch[PendingDelta],
    ) -> PenstockError | None:
        """Take what was answered off the queue; why the next of them must wait, if it must."""
        for sent, outcome in zip(message, outcomes, strict=False):
            error = None if outcome.fault is None else wire.error_of(outcome.fault)
            if error is not None and sent.sent.plain:
                if isinstance(error, RetryLater):
                    return error
                if len({section.partition for section in sent.sent.sections}) > 1:
                    outgoing.popleft()
                    outgoing.extendleft(reversed(list(self._split(sent))))
                    return None
            outgoing.popleft()
            self._answer(sent, outcome, error, batch)
        return None

    def _split(self, refused: _Outgoing) -> Iterator[_Outgoing]:
        """A plain group, table by table: one that is paused must not keep back the others."""
        for partition in dict.fromkeys(section.partition for section in refused.sent.sections):
            sections = [section for section in refused.sent.sections if section.partition == partition]
            yield _Outgoing(None, wire.SentGroup(self._own_condition(), True, sections), own_token=True)

    def _answer(
        self, sent: _Outgoing, outcome: wire.Outcome, error: PenstockError | None, batch: Batch[PendingDelta]
    ) -> None:
        group = sent.group
        if error is not None and group is not None and id(group) in self.awaited:
            self.refused[id(group)] = error
        elif error is not None:
            refusal = Refusal(batch.first, batch.last, error)
            self.refusals.append(refusal)
            self.news.append(refusal)
        elif group is not None:
            happened = sent.own_token and outcome.happened
            group.verdict = Verdict.ACCEPTED if happened else Verdict(outcome.verdict)


def _first_message(outgoing: deque[_Outgoing]) -> Iterator[_Outgoing]:
    """As many groups as fit into one message, and at least one."""
    size = 0
    for count, one in enumerate(outgoing):
        size += one.bytes
        if count and (size > MESSAGE_BYTES or count >= wire.GROUPS_MAX):
            return
        yield one
