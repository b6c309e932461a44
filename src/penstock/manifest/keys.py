"""The keys of the manifest's tables: fixed width and big-endian, so that byte order is numeric order.

Thread: any; all values are immutable.
Invariants: a key packs to one length per table; equal keys pack to equal bytes; ids start at 1, and 0 means none
(as a table id it means the whole store).
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple, NewType

from penstock.errors import CorruptionError, Invalid

DbId = NewType("DbId", int)  # a table; the seeds call it a DB
ChunkId = NewType("ChunkId", int)
JobId = NewType("JobId", int)

U64_MAX = (1 << 64) - 1

_U32 = struct.Struct(">I")
_U64 = struct.Struct(">Q")
_WAL_STATE = struct.Struct(">QH")
_CHUNK = struct.Struct(">QQ")
_PENDING = struct.Struct(">QH")
_METRIC = struct.Struct(">QI")
assert (_WAL_STATE.size, _CHUNK.size, _PENDING.size, _METRIC.size) == (10, 16, 10, 12)

_NAME = b"name/"
WHOLE_STORE = DbId(0)


class ComponentId(IntEnum):
    """The counters of `generation_watermarks`; other components may use any number from 64 up."""

    MANIFEST = 1  # every commit that bumps nothing else
    WAL = 2
    ORCHESTRATOR = 3
    JOB_IDS = 16
    CHUNK_IDS = 18  # 17 is not used: the ledger gives tables their ids
    TABLES = 19  # 1 + the LSN of the last change of a table that the rows of `db` have


class WalStateKey(NamedTuple):
    """A partition of a table."""

    db_id: int
    shard: int

    def pack(self) -> bytes:
        return _pack(_WAL_STATE, self)

    @classmethod
    def unpack(cls, data: bytes) -> WalStateKey:
        return cls(*_unpack(_WAL_STATE, data))


class ChunkKey(NamedTuple):
    """An immutable file of a table."""

    db_id: int
    chunk_id: int

    def pack(self) -> bytes:
        return _pack(_CHUNK, self)

    @classmethod
    def unpack(cls, data: bytes) -> ChunkKey:
        return cls(*_unpack(_CHUNK, data))


class PendingJobKey(NamedTuple):
    """A table and a job kind: at most one job of them is pending."""

    db_id: int
    kind: int

    def pack(self) -> bytes:
        return _pack(_PENDING, self)

    @classmethod
    def unpack(cls, data: bytes) -> PendingJobKey:
        return cls(*_unpack(_PENDING, data))


class MetricKey(NamedTuple):
    """What is measured (kind) and where (scope: a table id, or 0 for the store)."""

    scope: int
    kind: int

    def pack(self) -> bytes:
        return _pack(_METRIC, self)

    @classmethod
    def unpack(cls, data: bytes) -> MetricKey:
        return cls(*_unpack(_METRIC, data))


def pack_id(number: int) -> bytes:
    """Pack the key of a table that has one u64 as its key (`db`, `job_queue`)."""
    return _pack(_U64, (number,))


def unpack_id(data: bytes) -> int:
    """Unpack a key of `pack_id`."""
    return _unpack(_U64, data)[0]


def pack_component(component: int) -> bytes:
    """Pack a key of `generation_watermarks`."""
    return _pack(_U32, (component,))


def unpack_component(data: bytes) -> int:
    """Unpack a key of `pack_component`."""
    return _unpack(_U32, data)[0]


def pack_file_name(file_name: str) -> bytes:
    """Pack a key of `chunk_files`, the only table with keys of variable length beside `meta`."""
    return file_name.encode()


def pack_name(name: str) -> bytes:
    """Pack the key under which `meta` has the id of the table called `name`."""
    return _NAME + name.encode()


def unpack_name(data: bytes) -> str:
    """Unpack a key of `pack_name`."""
    return data.removeprefix(_NAME).decode()


def _pack(layout: struct.Struct, numbers: tuple[int, ...]) -> bytes:
    try:
        return layout.pack(*numbers)
    except struct.error:
        raise Invalid(f"{numbers} is not a key: each number must fit its unsigned field ({layout.format})") from None


def _unpack(layout: struct.Struct, data: bytes) -> tuple[int, ...]:
    if len(data) != layout.size:
        raise CorruptionError(f"manifest key {data.hex()}", 0, f"it has {len(data)} bytes, expected {layout.size}")
    return layout.unpack(data)
