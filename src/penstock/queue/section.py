"""Writes to one shard of a queue, between the caller and its files.

A section is `Puts`, messages in the order in which they came, or `Trim`, a sequence below which messages are gone.
The bytes of a batch in a section are those of a record in a data file, but for the LSN and time in their first bytes.

Thread: changed under the coordinator's lock, and by nobody once it is sealed; `first` and `lsn` are set at apply.
Invariant: decode(encode(section)) holds the same messages.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from penstock.errors import CorruptionError
from penstock.journal.partitions import PartitionId, shards_of
from penstock.partition.pending import PendingDelta
from penstock.queue.messages import PREFIX, Messages, encode_payloads

MESSAGES, TRIM = 0, 1
RUN_BYTES = 8 << 20  # of single messages that are one batch
NO_TIME = -(1 << 63)  # stands for the time of a record that is not known yet; no message has it
_HEADER = struct.Struct("<BxxxI")  # form, number of batches
_U64 = struct.Struct("<Q")

Message: TypeAlias = tuple[bytes, bytes | None, int | None]  # payload, key, time
Body: TypeAlias = bytes | memoryview  # a batch, encoded


class Puts:
    """Messages on their way to a shard."""

    __slots__ = ("_bodies", "_count", "_open", "_parts", "first", "lsn")

    def __init__(self) -> None:
        self._bodies: list[bytes] | None = None  # once it is encoded: it does not change any more by then
        self._parts: list[bytes | list[Message]] = []
        self._open: list[Message] | None = None  # the last of the parts, if single messages may join it
        self._count = 0
        self.first: int | None = None  # the sequence of the first of them, once they are applied
        self.lsn = 0  # of their record, then

    def __len__(self) -> int:
        return self._count

    def add(self, message: Message) -> int:
        """Append one message; its place among these."""
        if self._open is None:
            self._open = []
            self._parts.append(self._open)
        self._open.append(message)
        self._count += 1
        return self._count - 1

    def add_many(self, batch: Messages | bytes) -> int:
        """Append a batch, which may be `encoded` already; the place of its first message."""
        body = batch if isinstance(batch, bytes) else encoded(batch)
        self._open = None
        self._parts.append(body)
        place, self._count = self._count, self._count + PREFIX.unpack_from(body)[2]
        return place

    def get(self, key: bytes) -> None:
        """Messages have no number before they are applied, so nobody finds one here."""

    def bodies(self) -> list[bytes]:
        """The batches, encoded without an LSN and a time: once, for the journal and for apply. Requires: sealed."""
        if self._bodies is None:
            found: list[bytes] = []
            for part in self._parts:
                found += [part] if isinstance(part, bytes) else map(_encode_run, _runs(part))
            self._bodies = found
        return self._bodies


class Trim:
    """Messages below a sequence are gone."""

    __slots__ = ("before",)

    def __init__(self, before: int) -> None:
        self.before = before

    def __len__(self) -> int:
        return 1

    def get(self, key: bytes) -> None: ...


class Encoded:
    """Messages whose bytes are at hand: out of the journal, or from a client."""

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
    """A batch as it goes into a section; `Invalid` if it may not."""
    messages.check()
    return messages.encode(lsn=0, time_us=NO_TIME)


def _runs(messages: list[Message]) -> list[list[Message]]:
    """Cut where messages with a time of their own meet such without, and where a batch would get large."""
    runs: list[list[Message]] = []
    timed: bool | None = None
    size = 0
    for message in messages:
        size += len(message[0]) + len(message[1] or b"")
        if timed is not (message[2] is not None) or size > RUN_BYTES:
            timed = message[2] is not None
            size = len(message[0])
            runs.append([])
        runs[-1].append(message)
    return runs


def by_shard(batch: Messages, partitions: Sequence[PartitionId], spare: int) -> list[tuple[PartitionId, Messages]]:
    """Messages by the shards of their keys, in order; those without a key go to the spare one."""
    if len(partitions) == 1 or batch.keys is None:
        return [(partitions[spare], batch)]
    shards = shards_of(batch.keys, len(partitions), keyless=spare)
    parts = []
    for shard in np.unique(shards).tolist():
        rows = np.flatnonzero(shards == shard)
        times = None if batch.times is None else batch.times[rows]
        parts.append((partitions[shard], Messages(batch.payloads.take(rows), batch.keys.take(rows), times)))
    return parts


def _encode_run(messages: list[Message]) -> bytes:
    payloads, keys, times = zip(*messages, strict=True)
    if times[0] is None and not any(key is not None for key in keys):
        return encode_payloads(payloads, lsn=0, time_us=NO_TIME)
    return Messages.of(payloads, keys, None if times[0] is None else times).encode(lsn=0, time_us=NO_TIME)


# -- inserts, under the coordinator's lock


def _puts(delta: PendingDelta, partition: PartitionId) -> Puts:
    sections = delta.begin() if delta.open is None else delta.open
    found: Puts | None = sections.get(partition)
    if found is None:
        found = sections[partition] = Puts()
    return found


class Receipt:
    """Where a write went: filled in as it goes in."""

    __slots__ = ("offset", "section")

    section: Puts
    offset: int


def put(delta: PendingDelta, partition: PartitionId, message: Message, receipt: Receipt | None) -> None:
    """One message."""
    puts = _puts(delta, partition)
    offset = puts.add(message)
    if receipt is not None:
        receipt.section, receipt.offset = puts, offset


def put_many(delta: PendingDelta, partition: PartitionId, body: bytes, _: None) -> None:
    """Many messages, encoded: by who brings them, and not under the lock."""
    _puts(delta, partition).add_many(body)


def trim(delta: PendingDelta, partition: PartitionId, before: int, _: None) -> None:
    """A trim: a group of its own."""
    delta.begin()[partition] = Trim(before)
    delta.open = None


# -- bytes


def encode(section: Section) -> bytes:
    """A section as bytes."""
    if isinstance(section, Trim):
        return _HEADER.pack(TRIM, 0) + _U64.pack(section.before)
    bodies = section.bodies()
    parts: list[Body] = [_HEADER.pack(MESSAGES, len(bodies)), *(_U64.pack(len(body)) for body in bodies)]
    for body in bodies:
        parts += (body, bytes(-len(body) & 7))
    return b"".join(parts)


def batch_count(payload: bytes) -> int:
    """How many batches a payload says it has, as far as it is long enough for them."""
    count: int = _HEADER.unpack_from(payload)[1] if len(payload) >= _HEADER.size else 0
    return min(count, len(payload) // (_U64.size + PREFIX.size))


def decode(payload: bytes) -> Encoded | Trim:
    """The section in a payload."""
    try:
        form, count = _HEADER.unpack_from(payload)
        at = _HEADER.size
        if form == MESSAGES and count > batch_count(payload):
            raise ValueError("it is too short for its batches")
        if form == TRIM:
            if count or len(payload) != at + _U64.size:
                raise ValueError("a trim has another length")
            return Trim(_U64.unpack_from(payload, at)[0])
        sizes = [_U64.unpack_from(payload, at + place * _U64.size)[0] for place in range(count)]
        at += count * _U64.size
        bodies: list[Body] = []
        for size in sizes:
            bodies.append(memoryview(payload)[at : at + size])  # no copy: it is stamped, and copied then
            at += size + (-size & 7)
        if form != MESSAGES or at != len(payload) or any(len(body) < PREFIX.size for body in bodies):
            raise ValueError("its length is wrong")
    except (ValueError, struct.error, OverflowError) as error:
        raise CorruptionError("queue section", 0, f"it does not decode ({error})") from None
    return Encoded(bodies)
