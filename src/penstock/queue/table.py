"""The API of a queue, over a port; `view` is what it has in common with a queue of a snapshot.

Thread: any number; a table's only state is a counter that spreads messages without a key over the shards.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import pyarrow as pa

from penstock.arguments import ArrowSource, bytes_remedy, flag, in_short, microseconds, text, whole
from penstock.arrow_input import plain_table
from penstock.coordinator import Epoch
from penstock.errors import Backpressure, Invalid, NotFound
from penstock.journal.partitions import PartitionId, shard_of
from penstock.kinds import Filters, Port, WritableTable
from penstock.lsm.rows import KEY_BYTES_MAX, VALUE_BYTES_MAX
from penstock.partition.ledger_records import Condition, TableInfo, Verdict, encode_condition
from penstock.partition.pending import PendingDelta, PendingGroup
from penstock.partition.tokens import check_token, token_too_old
from penstock.queue import section
from penstock.queue.calls import ConsumerSummary, QueueCall, QueueTotals, ShardBounds
from penstock.queue.headers import checked_headers, header_bytes
from penstock.queue.machine import KEY
from penstock.queue.messages import Messages, encode_payloads
from penstock.queue.options import (
    Retention,
    decode_queue_options,
    encode_queue_options,
    has_headers,
    no_headers,
    queue_options,
)
from penstock.queue.positions import SEQUENCE_MAX
from penstock.queue.view import QueueView

if TYPE_CHECKING:
    from penstock.queue.consumer import Consumer


START_BYTES_MAX = 1 << 16
DIGITS_MAX = 20  # of a sequence or a time
ALTERS_MAX = 10  # attempts against other callers
MESSAGE_BYTES = 200  # memory of a pending message besides its key and payload


class Position(NamedTuple):
    """The position of a message.

    >>> store.queue("events").append(b"again").sequence
    2
    """

    shard: int
    sequence: int
    lsn: int


class QueueTable(QueueView, WritableTable):
    """A queue of an open store.

    >>> events = store.queue("events")
    >>> epoch = events.put(b"again", key=b"user 7", durable=True)
    >>> [message.payload for message in events.read()]
    [b'hello', b'again']
    """

    def __init__(self, port: Port, info: TableInfo, *, durable: bool = False) -> None:
        super().__init__(port, info)
        self._port = port
        self._durable = durable
        self._turn = itertools.count()

    # -- writing

    def put(
        self,
        payload: bytes,
        *,
        key: bytes | None = None,
        time: int | datetime | None = None,
        headers: Mapping[str, bytes | str] | None = None,
        token: tuple[str, int] | None = None,
        durable: bool | None = None,
    ) -> Epoch:
        """Add a message. Messages of one key stay in order; with a token it is added at most once, durably.

        >>> epoch = events.put(b"hello", key=b"ada", durable=True)
        """
        if durable is not None:
            flag(durable, "durable")
        message: section.Message = _checked(payload, key, time)
        size = len(payload) + len(key or b"") + MESSAGE_BYTES
        if headers is not None and (message_headers := self._headers(headers)):
            message, size = (*message[:3], message_headers), size + header_bytes(message_headers)
        partition = self._partition_of(key)
        if token is not None:
            return self._put_once(token, partition, section.put, message, size)
        return self._end(self._port.write(partition, section.put, size, message, None), durable)

    def put_many(
        self,
        messages: Iterable[bytes] | ArrowSource,
        *,
        keys: Sequence[bytes | None] | None = None,
        headers: Sequence[Mapping[str, bytes | str] | None] | None = None,
        token: tuple[str, int] | None = None,
        durable: bool | None = None,
    ) -> Epoch:
        """Add payloads (with `keys` and `headers`), or an Arrow array or table of payload, key, timestamp and headers.

        Messages without keys all go to one shard, in order. In a queue of several shards there is one write for each
        shard; with a token all messages are one group, added at most once, durably.

        >>> epoch = events.put_many([b"a", b"b"], keys=[b"ada", b"bob"], token=("producer", 1))
        """
        if durable is not None:
            flag(durable, "durable")
        parts = self._parts(messages, keys, headers)
        if not parts:
            return Epoch(0)
        if token is not None:
            group = PendingDelta()
            for partition, part in parts:
                section.put_many(group, partition, part, None)
            return self._commit_once(token, group, sum(len(part) + MESSAGE_BYTES for _, part in parts))
        epoch = Epoch(0)
        for partition, part in parts:
            epoch = self._port.write(partition, section.put_many, len(part) + MESSAGE_BYTES, part, None)
        return self._end(epoch, durable)

    def _parts(
        self, messages: Any, keys: Sequence[bytes | None] | None, headers: Any
    ) -> list[tuple[PartitionId, bytes]]:
        """Divide messages by shard and encode them."""
        spare = next(self._turn) % len(self._partitions)
        if keys is None and headers is None and isinstance(messages, list) and messages:
            return [(self._partitions[spare], encode_payloads(messages, lsn=0, time_us=section.NO_TIME))]
        if headers is not None:
            if isinstance(headers, (str, bytes, Mapping)) or not isinstance(headers, Iterable):
                raise Invalid(f"headers of put_many are a dict or None for each message, not {in_short(headers)}")
            headers = [None if each is None else checked_headers(each) for each in headers]
        batch = _columns(messages, keys, headers)
        if batch.headers is not None:
            self._check_takes_headers()
        parts = section.by_shard(batch, self._partitions, spare) if len(batch) else []
        return [(partition, section.encoded(part)) for partition, part in parts]

    def _headers(self, headers: Any) -> dict[str, bytes]:
        message_headers = checked_headers(headers)
        self._check_takes_headers()
        return message_headers

    def _check_takes_headers(self) -> None:
        if not has_headers(self._info.options) and not has_headers(self._latest().options):
            raise no_headers(self.name)

    def append(
        self,
        payload: bytes,
        *,
        key: bytes | None = None,
        time: int | datetime | None = None,
        headers: Mapping[str, bytes | str] | None = None,
    ) -> Position:
        """Add a message, wait until it is durable and applied, and return its position.

        >>> position = events.append(b"hello", key=b"ada")
        >>> position.shard, position.sequence > 1
        (0, True)
        """
        message = _checked(payload, key, time)
        shard = self._partitions.index(self._partition_of(key))
        message_headers = None if headers is None else self._headers(headers) or None
        request = QueueCall(
            shard=shard, payload=message[0], key=message[1], time_us=message[2], headers=message_headers
        )
        lsn, sequence = self._port.ask(self._info, "append", request, tuple[int, int])
        return Position(shard, sequence, lsn)

    def trim(self, before: int, *, shard: int = 0, durable: bool | None = None) -> Epoch:
        """Delete the messages of a shard below a sequence.

        >>> epoch = events.trim(before=1, shard=0)  # keeps the message 1
        """
        if durable is not None:
            flag(durable, "durable")
        before = whole(before, "before, the sequence of the first message to keep,", 1, SEQUENCE_MAX - 1)
        return self._end(self._port.write(self._partition(shard), section.trim, 64, before, None), durable)

    def _partition_of(self, key: bytes | None) -> PartitionId:
        if len(self._partitions) == 1:
            return self._partitions[0]
        if key is None:
            return self._partitions[next(self._turn) % len(self._partitions)]
        return self._partitions[shard_of(key, len(self._partitions))]

    def _put_once(self, token: Any, partition: PartitionId, insert: Any, message: Any, size: int) -> Epoch:
        delta = PendingDelta()
        insert(delta, partition, message, None)
        return self._commit_once(token, delta, size)

    def _commit_once(self, token: Any, delta: PendingDelta, size: int) -> Epoch:
        group = PendingGroup(encode_condition(Condition(check_token(token))))
        group.sections = delta.groups[0].sections
        epoch = self._port.commit_and_wait(group, size)
        if group.verdict is Verdict.TOKEN_TOO_OLD:
            raise token_too_old(token)
        return epoch

    # -- queries

    def seek(self, time: int | datetime, *, shard: int = 0) -> int:
        """Return the sequence of the first message whose record has this time or a later one.

        >>> events.seek(datetime(2024, 1, 1, tzinfo=UTC))
        1
        """
        self._partition(shard)
        request = QueueCall(shard=shard, time_us=microseconds(time))
        return self._port.ask(self._info, "seek", request, int)

    def bounds(self) -> list[ShardBounds]:
        """Return the oldest sequence and the next one, for each shard.

        >>> events.bounds()[0].first
        1
        """
        return self._port.ask(self._info, "bounds", QueueCall(), list[ShardBounds])

    def offsets(self, start: str) -> dict[int, int]:
        """Return the sequence to begin with, for each shard, from the text of an option.

        "earliest", "latest", "consumer:NAME", "time:MICROSECONDS", a sequence, or sequences by shard as JSON.

        >>> events.offsets("earliest")
        {0: 1}
        """
        bounds = self.bounds()
        start = text(start, "start", START_BYTES_MAX)
        word, _, rest = start.partition(":")
        if start == "earliest":
            return {shard: shard_bounds.first for shard, shard_bounds in enumerate(bounds)}
        if start == "latest":
            return {shard: shard_bounds.next for shard, shard_bounds in enumerate(bounds)}
        if word == "consumer" and rest:
            return self.consumer(rest).position
        if word == "time" and rest.removeprefix("-").isdecimal() and len(rest) <= DIGITS_MAX:
            return {shard: self.seek(int(rest), shard=shard) for shard in range(self.shards)}
        if start.isdecimal() and len(start) <= DIGITS_MAX:
            return dict.fromkeys(range(self.shards), int(start))
        try:
            sequences = msgspec.json.decode(start, type=dict[int, int])
        except msgspec.DecodeError:
            sequences = {}
        if sorted(sequences) != list(range(self.shards)):
            raise Invalid(
                f"start is {in_short(start)}: use earliest, latest, consumer:NAME, time:MICROSECONDS, a sequence, or "
                f"sequences of all shards (0 to {self.shards - 1}) as JSON"
            )
        return sequences

    def advance(self, start: dict[int, int], rows_max: int | None, bytes_max: int | None) -> dict[int, int]:
        """Return the end of a batch that begins at `start`: within the limits, shared fairly among the shards.

        >>> events.advance({0: 1}, rows_max=1, bytes_max=None)
        {0: 2}
        """
        request = QueueCall(positions=sorted(start.items()), count=rows_max or 0, bytes_max=bytes_max or 0)
        return self._port.ask(self._info, "advance", request, dict[int, int])

    def lag(self, consumer: str) -> int:
        """Return how many messages a consumer has not acknowledged.

        >>> messages = events.consumer("worker").get()
        >>> events.lag("worker") == len(messages)
        True
        """
        return self.consumer(consumer).lag

    def statistics(self) -> QueueTotals:
        """Return the messages, files and bytes, and the position of each consumer.

        >>> events.statistics().messages > 0
        True
        """
        return self._port.ask(self._info, "statistics", QueueCall(), QueueTotals)

    # -- options

    @property
    def retention(self) -> Retention:
        """How long the queue keeps its messages, now."""
        return decode_queue_options(self._latest().options).retention

    @property
    def takes_headers(self) -> bool:
        """Whether messages may have headers, now."""
        return has_headers(self._latest().options)

    def alter(self, *, retention: Retention | None = None, headers: bool | None = None) -> None:
        """Change options of the queue durably, for every process; what is None stays.

        A retention applies from the next check of the store; `Retention()`, without rules, keeps everything.
        `headers=True` lets messages have headers from now on.

        >>> events.alter(retention=penstock.Retention(age_s=7 * 86_400))
        """
        if retention is None and headers is None:
            raise Invalid("alter what? Give retention=Retention(...), or headers=True")
        for _ in range(ALTERS_MAX):
            info = self._latest()
            now = decode_queue_options(info.options)
            takes_headers = now.headers if headers is None else flag(headers, "headers")
            new_retention = now.retention if retention is None else retention
            options = encode_queue_options(queue_options(new_retention, takes_headers, now.changes))
            if info.options == options or self._port.alter(info, options).options == options:
                self._latest()
                return
        raise Backpressure(f"other callers alter queue {self.name} at the same time: retry later")

    def _latest(self) -> TableInfo:
        info = self._port.table(self.name)
        if info is None or info.table_id != self._info.table_id:
            raise NotFound(f"queue {self.name} was dropped")
        self._info = info
        return info

    # -- consuming

    def consumers(self) -> list[ConsumerSummary]:
        """Return all consumers: position, lag, messages under leases, and when each was last seen.

        >>> [consumer.name for consumer in events.consumers()]
        ['worker']
        """
        return self._port.ask(self._info, "consumers", QueueCall(), list[ConsumerSummary])

    def consumer(
        self,
        name: str,
        *,
        visibility_timeout_s: float = 30.0,
        deliveries_max: int | None = None,
        dead_letter: str | None = None,
    ) -> Consumer:
        """Return a consumer. Consumers with the same name share the messages; each name sees all messages.

        >>> worker = events.consumer("worker", visibility_timeout_s=60.0, deliveries_max=5, dead_letter="dead")
        """
        from penstock.queue.consumer import Consumer, ConsumerSettings

        settings = ConsumerSettings(
            visibility_timeout_s=visibility_timeout_s, deliveries_max=deliveries_max, dead_letter=dead_letter
        )
        return Consumer(self._port, self._info, name, settings)


def _checked(payload: Any, key: Any, time: Any) -> tuple[bytes, bytes | None, int | None]:
    for name, value, bytes_max in (("payload", payload, VALUE_BYTES_MAX), ("key", key, KEY_BYTES_MAX)):
        if type(value) is not bytes:
            if name == "key" and value is None:
                continue
            raise Invalid(f"a {name} is bytes, not {type(value).__name__}: {bytes_remedy(value)}")
        if len(value) > bytes_max:
            raise Invalid(f"a {name} has at most {bytes_max:,} bytes, this one has {len(value):,}")
    return payload, key, None if time is None else microseconds(time)


def _columns(messages: Any, keys: Sequence[bytes | None] | None, headers: list[Any] | None) -> Messages:
    if hasattr(messages, "__arrow_c_stream__") and not isinstance(messages, pa.ChunkedArray):
        column = _column_of(messages)
        messages = plain_table(messages, "put_many") if column is None else column
    if isinstance(messages, (pa.Array, pa.ChunkedArray, pa.Table, pa.RecordBatch)):
        if keys is not None or headers is not None:
            raise Invalid("keys and headers of an Arrow table go into its columns `key` and `headers`")
        try:
            return Messages.from_arrow(messages)
        except (pa.ArrowException, TypeError) as error:
            raise Invalid(f"payload and key are binary, timestamp is a timestamp, headers a map ({error})") from None
    if isinstance(messages, (bytes, str)) or not isinstance(messages, Iterable):
        raise Invalid(
            f"put_many takes many payloads or an Arrow table, not {type(messages).__name__}: give a list, or use put"
        )
    return Messages.of(list(messages), keys, headers=headers)


def _column_of(messages: Any) -> pa.ChunkedArray | None:
    """Return a single column of another library, such as a series of Polars; None for rows, which are left unread."""
    try:
        return pa.chunked_array(messages) if hasattr(messages, "dtype") else None  # a frame has dtypes
    except (pa.ArrowException, TypeError, ValueError):
        return None  # what reads rows says what is wrong


def filtered_sequence_range(filters: Filters, table: QueueTable, shard: int) -> tuple[bytes, bytes | None]:
    """Return a key range that holds every message of a shard that passes the filters.

    Only filters on shard and sequence narrow it: a message may have its own time, earlier or later than its record's,
    so times say nothing about sequences.
    """
    low, high = 0, 1 << 63
    for column, operation, value in filters:
        values = value if operation == "in" else [value]
        if column == "shard" and operation in ("=", "in") and shard not in values:
            high = low
        if column == "sequence":
            if operation in ("=", "in", ">", ">="):
                low = max(low, min(values) + (operation == ">"))
            if operation in ("=", "in", "<", "<="):
                high = min(high, max(values) + (operation != "<"))
    return KEY.pack(max(0, low)), None if high >= 1 << 63 else KEY.pack(max(0, low, high))
