"""Sections of a queue: the pending writes of one shard, between the caller and its files.

A section is `Puts`, messages in the order of their arrival, or `Trim`, a sequence below which messages are deleted.
The bytes of a batch in a section are those of a record in a data file, except for the LSN and time at their start.

Thread: changed under the coordinator's lock until it is sealed; then only apply sets `first` and `lsn`.
Invariant: decode(encode(section)) holds the same messages.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import pyarrow as pa

from penstock.errors import CorruptionError
from penstock.journal.partitions import PartitionId, shards_of
from penstock.partition.pending import PendingDelta
from penstock.queue.coding import PREFIX
from penstock.queue.messages import Messages, encode_payloads

MESSAGES, TRIM = 0, 1
RUN_BYTES = 8 << 20  # of single messages that form one batch
NO_TIME = -(1 << 63)  # placeholder for a record's time that is not known yet; no message has it
_HEADER = struct.Struct("<BxxxI")  # form, number of batches
_U64 = struct.Struct("<Q")

# Payload, key, time; and headers, if it has some.
Message: TypeAlias = tuple[bytes, bytes | None, int | None] | tuple[bytes, bytes | None, int | None, dict[str, bytes]]
Body: TypeAlias = bytes | memoryview  # a batch, encoded


class Puts:
    """Pending messages of a shard.

    Each insert is one append to a list, and all numbers follow from the lists: an interrupt between any two lines
    leaves a message in the section and counted, or neither.
    """

    __slots__ = ("_bodies", "_open", "_open_index", "_parts", "first", "lsn")

    def __init__(self) -> None:
        self._bodies: list[bytes] | None = None  # once it is encoded: it no longer changes then
        self._parts: list[tuple[int, bytes | list[Message]]] = []  # each with the index of its first message
        self._open: list[Message] | None = None  # the last part, if single messages may be added to it
        self._open_index = 0
        self.first: int | None = None  # the sequence of the first message, once they are applied
        self.lsn = 0  # of their record, once they are applied

    def __len__(self) -> int:
        if not self._parts:
            return 0
        index, part = self._parts[-1]
        return index + (PREFIX.unpack_from(part)[2] if isinstance(part, bytes) else len(part))

    def add(self, message: Message) -> int:
        """Append one message and return its index in this section."""
        last = self._open
        if last is None:
            last = []
            self._open_index = len(self)
            self._parts.append((self._open_index, last))
            self._open = last  # after it is in its place
        last.append(message)
        return self._open_index + len(last) - 1

    def add_many(self, batch: Messages | bytes) -> int:
        """Append a batch, which may be `encoded` already, and return the index of its first message."""
        body = batch if isinstance(batch, bytes) else encoded(batch)
        self._open = None
        index = len(self)
        self._parts.append((index, body))
        return index

    def get(self, key: bytes) -> None:
        """Return None: messages have no sequence before they are applied, so none is found by key."""

    def bodies(self) -> list[bytes]:
        """Return the batches, encoded once for the journal and apply, without LSN and time. Requires: sealed."""
        if self._bodies is None:
            bodies: list[bytes] = []
            for _, part in self._parts:
                bodies += [part] if isinstance(part, bytes) else map(_encode_run, _runs(part))
            self._bodies = bodies
        return self._bodies


class Trim:
    """Delete the messages below a sequence."""

    __slots__ = ("before",)

    def __init__(self, before: int) -> None:
        self.before = before

    def __len__(self) -> int:
        return 1

    def get(self, key: bytes) -> None: ...


class Encoded:
    """Messages that are already encoded: from the journal, or from a client."""

    __slots__ = ("count", "encoded", "first", "lsn")

    def __init__(self, encoded: list[Body]) -> None:
        self.encoded = encoded
        self.count: int = sum(PREFIX.unpack_from(body)[2] for body in encoded)
        self.first: int | None = None
        self.lsn = 0

    def __len__(self) -> int:
        return self.count

    def get(self, key: bytes) -> None: ...

    def bodies(self) -> list[Body]:
        return self.encoded


Section: TypeAlias = Puts | Encoded | Trim


def encoded(messages: Messages) -> bytes:
    """Check a batch and encode it for a section; `Invalid` if it breaks a limit."""
    messages.check()
    return messages.encode(lsn=0, time_us=NO_TIME)


def _runs(messages: list[Message]) -> list[list[Message]]:
    """Split messages into batches: at RUN_BYTES, and between those with and without a time of their own, or headers."""
    runs: list[list[Message]] = []
    timed: bool | None = None
    size = width = 0
    for message in messages:
        size += len(message[0]) + len(message[1] or b"")
        if timed is not (message[2] is not None) or size > RUN_BYTES or len(message) != width:
            timed, width = message[2] is not None, len(message)
            size = len(message[0])
            runs.append([])
        runs[-1].append(message)
    return runs


def by_shard(batch: Messages, partitions: Sequence[PartitionId], spare: int) -> list[tuple[PartitionId, Messages]]:
    """Divide messages by the shards of their keys, in order; those without a key go to shard `spare`."""
    if len(partitions) == 1 or batch.keys is None:
        return [(partitions[spare], batch)]
    shards = shards_of(batch.keys, len(partitions), keyless=spare)
    parts = []
    for shard in np.unique(shards).tolist():
        rows = np.flatnonzero(shards == shard)
        times = None if batch.times is None else batch.times[rows]
        headers = None if batch.headers is None else batch.headers.take(pa.array(rows))
        parts.append((partitions[shard], Messages(batch.payloads.take(rows), batch.keys.take(rows), times, headers)))
    return parts


def _encode_run(messages: list[Message]) -> bytes:
    # Not zip(*messages): it makes an iterator for each, enough to start the garbage collector in nearly every flush.
    payloads, keys = [message[0] for message in messages], [message[1] for message in messages]
    times = [message[2] for message in messages if message[2] is not None]  # all of a run have one, or none
    headers = [message[3] for message in messages if len(message) == 4]  # as above
    if not times and not headers and keys.count(None) == len(keys):
        return encode_payloads(payloads, lsn=0, time_us=NO_TIME)
    return Messages.of(payloads, keys, times or None, headers or None).encode(lsn=0, time_us=NO_TIME)


# -- inserts, under the coordinator's lock


def _puts(delta: PendingDelta, partition: PartitionId) -> Puts:
    sections = delta.begin() if delta.open is None else delta.open
    puts: Puts | None = sections.get(partition)
    if puts is None:
        puts = sections[partition] = Puts()
    return puts


class Receipt:
    """Where a write was inserted: its section, and its index there."""

    __slots__ = ("offset", "section")

    section: Puts
    offset: int


def put(delta: PendingDelta, partition: PartitionId, message: Message, receipt: Receipt | None) -> None:
    """Insert one message."""
    puts = _puts(delta, partition)
    offset = puts.add(message)
    if receipt is not None:
        receipt.section, receipt.offset = puts, offset


def put_many(delta: PendingDelta, partition: PartitionId, body: bytes, _: None) -> None:
    """Insert a batch that the caller has encoded, so as not to encode under the lock."""
    _puts(delta, partition).add_many(body)


def trim(delta: PendingDelta, partition: PartitionId, before: int, _: None) -> None:
    """Insert a trim, in a group of its own."""
    delta.begin()[partition] = Trim(before)
    delta.open = None


# -- bytes


def encode(section: Section) -> bytes:
    """Encode a section."""
    if isinstance(section, Trim):
        return _HEADER.pack(TRIM, 0) + _U64.pack(section.before)
    bodies = section.bodies()
    parts: list[Body] = [_HEADER.pack(MESSAGES, len(bodies)), *(_U64.pack(len(body)) for body in bodies)]
    for body in bodies:
        parts += (body, bytes(-len(body) & 7))
    return b"".join(parts)


def batch_count(payload: bytes) -> int:
    """Return the batch count that a payload states, capped by what its length allows."""
    count: int = _HEADER.unpack_from(payload)[1] if len(payload) >= _HEADER.size else 0
    return min(count, len(payload) // (_U64.size + PREFIX.size))


def decode(payload: bytes) -> Encoded | Trim:
    """Decode a section; `CorruptionError` if it is malformed."""
    try:
        form, count = _HEADER.unpack_from(payload)
        at = _HEADER.size
        if form == MESSAGES and count > batch_count(payload):
            raise ValueError("it is too short for its batches")
        if form == TRIM:
            if count or len(payload) != at + _U64.size:
                raise ValueError("a trim has another length")
            return Trim(_U64.unpack_from(payload, at)[0])
        sizes = [_U64.unpack_from(payload, at + index * _U64.size)[0] for index in range(count)]
        at += count * _U64.size
        bodies: list[Body] = []
        for size in sizes:
            bodies.append(memoryview(payload)[at : at + size])  # no copy: stamping it copies it
            at += size + (-size & 7)
        if form != MESSAGES or at != len(payload) or any(len(body) < PREFIX.size for body in bodies):
            raise ValueError("its length is wrong")
    except (ValueError, struct.error, OverflowError) as error:
        raise CorruptionError("queue section", 0, f"it does not decode ({error})") from None
    return Encoded(bodies)
