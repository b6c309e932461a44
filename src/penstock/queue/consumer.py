"""The API of a consumer: takes messages under leases and acknowledges them.

Thread: any number, each with its own messages; a consumer has no state of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice, repeat
from typing import Any

from penstock.arguments import in_short, seconds, text, whole
from penstock.errors import Invalid
from penstock.host import threads
from penstock.host.decoders import decoder_of
from penstock.kinds import Conditional, InThisProcess, Port
from penstock.partition.ledger_records import Condition, TableInfo, Verdict, encode_condition
from penstock.partition.pending import PendingGroup
from penstock.queue.calls import LEASES_MAX, ConsumerPosition, LeasedMessage, QueueCall, ShardBounds, encode_call
from penstock.queue.delivery import Delivery
from penstock.queue.positions import ACK, FORGET, SEEK, Ack, ForgetConsumer, Range, Seek, argument

CALL_S_MAX = 20.0  # the longest wait of one call; a longer wait takes several calls
# The same for a client's main thread: a call that Ctrl-C has ended there may lease messages for nobody in the owner.
MAIN_CALL_S_MAX = 0.5
DELAY_S_MAX = 7 * 24 * 3600  # of a message that is leased or returned
GET_MAX = 4_096
NOT_GOT = "give messages as `get` returned them"


@dataclass(frozen=True, kw_only=True)
class ConsumerSettings:
    """How a consumer treats its messages.

    >>> store.queue("events").consumer("worker", visibility_timeout_s=60).settings.visibility_timeout_s
    60
    """

    visibility_timeout_s: float = 30.0  # an unacknowledged message is delivered again after this
    deliveries_max: int | None = None  # after that many deliveries a message goes to the dead letters instead
    dead_letter: str | None = None  # name of a queue; None: the message is only acknowledged

    def __post_init__(self) -> None:
        seconds(self.visibility_timeout_s, "visibility_timeout_s", DELAY_S_MAX, above_zero=True)
        if self.deliveries_max is not None:
            whole(self.deliveries_max, "deliveries_max", 1, 254)
        if self.dead_letter is not None:
            text(self.dead_letter, "dead_letter, the name of a queue,", 63)
        if self.dead_letter is not None and self.deliveries_max is None:
            raise Invalid("dead_letter needs deliveries_max: after how many deliveries?")


class Consumer(InThisProcess):
    """A named consumer of a queue. Consumers with the same name share the messages.

    >>> worker = store.queue("events").consumer("worker", visibility_timeout_s=60)
    >>> for message in worker.get(100, timeout_s=5):
    ...     print(message.payload)
    ...     worker.ack(message)
    b'hello'
    >>> worker.lag
    0
    """

    def __init__(self, port: Port, info: TableInfo, name: str, settings: ConsumerSettings) -> None:
        self._port = port
        self._info = info
        self.name = text(name, "a consumer's name", 255)
        self.settings = settings

    def __repr__(self) -> str:
        return f"<Consumer {self.name!r} of the queue {self._info.name!r}>"

    # -- messages

    def get(self, max: int = 100, timeout_s: float = 0.0) -> list[LeasedMessage]:  # noqa: A002 - it reads well
        """Lease up to `max` messages that no consumer of this name holds; wait up to `timeout_s` for the first.

        >>> [message.payload for message in worker.get(10, timeout_s=5.0)]
        [b'hello']
        """
        max = whole(max, "max, the number of messages to get,", 1)  # noqa: A001 - the same
        timeout_s, settings = seconds(timeout_s, "timeout_s", math.inf), self.settings
        deliveries_max, holder = settings.deliveries_max, self._holder()
        while True:
            wait_s = min(timeout_s, MAIN_CALL_S_MAX if holder and threads.in_main_thread() else CALL_S_MAX)
            timeout_s -= wait_s
            request = QueueCall(
                consumer=self.name,
                count=min(max, GET_MAX),
                timeout_s=wait_s,
                visibility_timeout_s=float(settings.visibility_timeout_s),
                deliveries_max=None if deliveries_max is None else int(deliveries_max),
                dead_letter=None if settings.dead_letter is None else str.__str__(settings.dead_letter),
                holder=holder,
            )
            deliveries = self._ask("get", request, list[Delivery], wait_s=wait_s)
            if deliveries or timeout_s <= 0:
                return [message for delivery in deliveries for message in _messages(delivery)]

    def _holder(self) -> str:
        """Return the name of this client, whose leases end when it closes its connection; empty in the owner."""
        holder = self._port.holder
        if holder:
            self._port.call_at_close(self._info, "leave", encode_call(QueueCall(holder=holder)))
        return holder

    def __iter__(self) -> Iterator[LeasedMessage]:
        """Yield messages one by one, and wait for more for ever. Acknowledge each."""
        while True:
            yield from self.get(1, math.inf)  # one at a time: the lease of a second would run while the first is used

    def ack(self, messages: LeasedMessage | Iterable[LeasedMessage], *, batch: Conditional | None = None) -> None:
        """Acknowledge messages durably; with a batch, atomically with the batch's writes.

        `LeaseLost` if the lease of one has ended: then none is acknowledged, and the batch writes nothing.

        >>> messages = worker.get()
        >>> with store.batch() as batch:  # the result and the acknowledgement: both or neither
        ...     epoch = batch.kv("users").put(b"bob", messages[0].payload)
        ...     worker.ack(messages, batch=batch)
        """
        if batch is not None and not isinstance(batch, Conditional):
            raise Invalid(f"batch is what store.batch() returns, not {in_short(batch)}")
        leased = _listed(messages)
        if not leased:
            return
        try:  # the numbers of a message may be forged
            data = argument(self._info.table_id, _acknowledging(self.name, leased))
        except (TypeError, ValueError, OverflowError):
            raise Invalid(NOT_GOT) from None
        if batch is not None:
            batch.require(ACK, data)
        else:
            self._command(ACK, data)

    def nack(self, messages: LeasedMessage | Iterable[LeasedMessage], *, delay_s: float = 0.0) -> int:
        """Return messages for redelivery, at once or after `delay_s`. Returns how many were still leased.

        >>> worker.nack(worker.get(), delay_s=5.0)
        1
        """
        delay_s, released = seconds(delay_s, "delay_s", DELAY_S_MAX), 0
        for leases in _leases(messages):
            released += self._call_with("nack", QueueCall(consumer=self.name, leases=leases, delay_s=delay_s), int)
        return released

    def extend(
        self, messages: LeasedMessage | Iterable[LeasedMessage], *, visibility_timeout_s: float | None = None
    ) -> None:
        """Renew the leases of messages: they end `visibility_timeout_s` (None: the consumer's) after this call.

        `LeaseLost` if the lease of one has ended: another consumer may have it.

        >>> worker.extend(worker.get(), visibility_timeout_s=60.0)
        """
        wanted_s = self.settings.visibility_timeout_s if visibility_timeout_s is None else visibility_timeout_s
        wanted_s = seconds(wanted_s, "visibility_timeout_s", DELAY_S_MAX, above_zero=True)
        for leases in _leases(messages):
            request = QueueCall(consumer=self.name, leases=leases, visibility_timeout_s=wanted_s)
            self._call_with("extend", request, None)

    def _call_with(self, name: str, request: QueueCall, reply: Any) -> Any:
        try:  # the numbers of a message may be forged
            encoded = encode_call(request)
        except (TypeError, ValueError, OverflowError):
            raise Invalid(NOT_GOT) from None
        return decoder_of(reply).decode(self._port.call(self._info, name, encoded))

    # -- position

    def positions(self) -> list[ConsumerPosition]:
        """Return the consumer's position in each shard.

        >>> [(position.shard, position.floor) for position in worker.positions()]
        [(0, 1)]
        """
        positions = self._ask("positions", QueueCall(consumer=self.name), list[ConsumerPosition])
        by_shard = {position.shard: position for position in positions}
        return [
            by_shard.get(shard, ConsumerPosition(self.name, shard, "new", bounds.first, bounds.next - bounds.first))
            for shard, bounds in enumerate(self._bounds())
        ]

    @property
    def position(self) -> dict[int, int]:
        """For each shard, the sequence below which everything is acknowledged.

        >>> worker.position
        {0: 1}
        """
        return {each.shard: each.floor for each in self.positions()}

    @property
    def lag(self) -> int:
        """How many messages are not acknowledged.

        >>> worker.lag
        1
        """
        return sum(each.lag for each in self.positions())

    def seek(self, to: int | str | Mapping[int, int]) -> None:
        """Move to a sequence (in every shard), to sequences by shard, to "earliest" or to "latest".

        >>> worker.seek("earliest")
        """
        bounds = self._bounds()
        if isinstance(to, str) and to in ("earliest", "latest"):
            sequences = {shard: each.first if to == "earliest" else each.next for shard, each in enumerate(bounds)}
        elif isinstance(to, int) and not isinstance(to, bool):
            sequences = dict.fromkeys(range(len(bounds)), to)
        elif isinstance(to, Mapping):
            sequences = dict(to)
        else:
            raise Invalid(f'seek takes a sequence, sequences by shard, "earliest" or "latest", not {in_short(to)}')
        checked: dict[int, int] = {}
        for number, sequence in sequences.items():
            shard = whole(number, f"a shard of queue {self._info.name}", 0, len(bounds) - 1)
            checked[shard] = whole(sequence, f"a sequence of shard {shard}", 1, bounds[shard].next)
        self._command(SEEK, argument(self._info.table_id, Seek(self.name, sorted(checked.items()), "leased")))

    def forget(self) -> None:
        """Delete the consumer and its acknowledgements; it no longer delays retention.

        >>> worker.forget()
        """
        self._command(FORGET, argument(self._info.table_id, ForgetConsumer(self.name, self._info.shards)))

    def _bounds(self) -> list[ShardBounds]:
        bounds: list[ShardBounds] = self._ask("bounds", QueueCall(), list[ShardBounds])
        return bounds

    def _ask(self, name: str, call: QueueCall, kind: Any, *, wait_s: float = 0.0) -> Any:
        return self._port.ask(self._info, name, call, kind, wait_s=wait_s)

    def _command(self, condition: str, data: bytes) -> None:
        from penstock.queue.kind import QueueKind

        group = PendingGroup(encode_condition(Condition(None, ((condition, data),))))
        self._port.commit_and_wait(group, len(data))
        if group.verdict is not Verdict.ACCEPTED:
            raise QueueKind().refusal(condition, data)


def _messages(delivery: Delivery) -> Iterator[LeasedMessage]:
    columns = delivery.sequences, delivery.times, delivery.keys, delivery.payloads, delivery.deliveries
    headers = () if delivery.headers is None else (delivery.headers,)
    return map(LeasedMessage, repeat(delivery.shard), *columns, repeat(delivery.lease), *headers)


def _acknowledging(consumer: str, messages: list[LeasedMessage]) -> Ack:
    """Build an acknowledgement. Consecutive messages under one lease, which is of one shard, become one range."""
    begins: list[LeasedMessage] = []
    ends: list[int] = []
    lease = end = 0
    for message in messages:
        if message.sequence != end or message.lease != lease:
            ends.append(end)
            begins.append(message)
            lease, end = message.lease, message.sequence
        end += 1
    ranges: dict[int, list[Range]] = {}
    leases: dict[int, list[int]] = {}
    for begin, high in zip(begins, [*ends[1:], end], strict=True):
        ranges.setdefault(begin.shard, []).append((begin.sequence, high))
        leases.setdefault(begin.shard, []).append(begin.lease)
    return Ack(consumer, list(ranges.items()), list(leases.values()))


def _leases(messages: Any) -> Iterator[list[tuple[int, int, int]]]:
    """Yield (shard, sequence, lease) of messages, as many as fit into one call."""
    rest = iter([(message.shard, message.sequence, message.lease) for message in _listed(messages)])
    while leases := list(islice(rest, LEASES_MAX)):
        yield leases


def _listed(messages: Any) -> list[LeasedMessage]:
    try:
        listed = [messages] if isinstance(messages, LeasedMessage) else list(messages)
    except TypeError:
        listed = [messages]
    if set(map(type, listed)) - {LeasedMessage}:
        raise Invalid(NOT_GOT)
    return listed
