"""The body of a journal record: a time, an epoch, and groups of sections.

A *group* is accepted or refused as a whole; a *section* is its part for one partition, as bytes that are encoded once
and carried unchanged, or as a reference to files with the data. docs/format/journal.md gives the bytes.

Thread: pure functions.
"""

from __future__ import annotations

import struct
from typing import NewType

import msgspec

from penstock.errors import CorruptionError
from penstock.journal.partitions import PartitionId

Lsn = NewType("Lsn", int)

INLINE, REFERENCE = 0, 1
CODEC_NONE, CODEC_SEALED = 0, 1

_RECORD = struct.Struct("<QQIHH")  # time, last epoch, groups, version, reserved
_GROUP = struct.Struct("<II")  # sections, bytes of the condition
_SECTION = struct.Struct("<QBBHIQ")  # partition, form, codec, reserved, key id, bytes of the payload
assert (_RECORD.size, _GROUP.size, _SECTION.size) == (24, 8, 24)
VERSION = 1
_PADDING = [bytes(n) for n in range(8)]


class SegmentedRecordHeader(msgspec.Struct, frozen=True, gc=False):
    """The partition of a section, and how its bytes are encoded."""

    partition: PartitionId
    form: int = INLINE
    codec: int = CODEC_NONE  # of the payload: as the kind encoded it, or sealed with the table's key
    key_id: int = 0  # which key of the table, if it is sealed; from 1


class Section(msgspec.Struct, frozen=True, gc=False):
    """The part of a group for one partition."""

    header: SegmentedRecordHeader
    payload: bytes


class Group(msgspec.Struct, frozen=True, gc=False):
    """Writes that happen together or not at all. The ledger judges the condition; an empty one always holds."""

    sections: tuple[Section, ...]
    condition: bytes = b""


class JournalRecord(msgspec.Struct, frozen=True, gc=False):
    """One record of the journal."""

    time_us: int
    last_epoch: int
    groups: tuple[Group, ...]


def encode(record: JournalRecord) -> bytes:
    """Encode a record."""
    parts: list[bytes] = [_RECORD.pack(record.time_us, record.last_epoch, len(record.groups), VERSION, 0)]
    for group in record.groups:
        size = len(group.condition)
        parts += (_GROUP.pack(len(group.sections), size), group.condition, _PADDING[-size & 7])
        for section in group.sections:
            header, size = section.header, len(section.payload)
            parts.append(_SECTION.pack(header.partition, header.form, header.codec, 0, header.key_id, size))
            parts += (section.payload, _PADDING[-size & 7])
    return b"".join(parts)


def group_count(body: bytes) -> int:
    """Return the number of groups of an encoded record; 0 if it is too short for one."""
    return int(_RECORD.unpack_from(body)[2]) if len(body) >= _RECORD.size else 0


def decode(body: bytes, *, where: str = "journal", lsn: int = 0) -> JournalRecord:
    """Decode a record; `CorruptionError` if the body is not one."""
    reader = _Reader(body, where, lsn)
    time_us, last_epoch, group_count, version, _ = reader.take(_RECORD)
    if version != VERSION:
        raise CorruptionError(where, lsn, f"record {lsn} has version {version}, this Penstock reads {VERSION}")
    groups: list[Group] = []
    for _ in range(group_count):
        section_count, condition_bytes = reader.take(_GROUP)
        condition = reader.bytes(condition_bytes)
        sections: list[Section] = []
        for _ in range(section_count):
            partition, form, codec, _, key_id, size = reader.take(_SECTION)
            header = SegmentedRecordHeader(PartitionId(partition), form, codec, key_id)
            sections.append(Section(header, reader.bytes(size)))
        groups.append(Group(tuple(sections), condition))
    if reader.at != len(body):
        raise CorruptionError(where, lsn, f"record {lsn} has {len(body) - reader.at} extra bytes")
    return JournalRecord(time_us, last_epoch, tuple(groups))


class _Reader:
    def __init__(self, body: bytes, where: str, lsn: int) -> None:
        self._body, self._where, self._lsn = body, where, lsn
        self.at = 0

    def take(self, shape: struct.Struct) -> tuple[int, ...]:
        if len(self._body) - self.at < shape.size:
            raise CorruptionError(self._where, self._lsn, f"record {self._lsn} is cut short")
        values = shape.unpack_from(self._body, self.at)
        self.at += shape.size
        return values

    def bytes(self, size: int) -> bytes:
        end = self.at + size
        if end > len(self._body):
            raise CorruptionError(self._where, self._lsn, f"record {self._lsn} is cut short")
        data = self._body[self.at : end]
        self.at = min(len(self._body), end + (-size & 7))
        return data
