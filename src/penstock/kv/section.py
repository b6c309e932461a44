"""Writes to one shard of a kv table, between the caller and the tree.

A section is a `Rows` (a dict: key to value, or to an operation) or a `Ranges` (deletes of key ranges). Adjacent writes
by key gather in one `Rows`, where the last one of a key counts and operands are folded; deletes of ranges stand alone.

Thread: changed under the coordinator's lock; read by anyone.
Invariant: decode(encode(section)) is the section.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import TypeAlias

import numpy as np

from penstock.errors import CorruptionError
from penstock.journal.partitions import PartitionId
from penstock.lsm.memtable import Edit, fold_rows
from penstock.lsm.operators import fold
from penstock.lsm.ranges import RangeDeletes
from penstock.lsm.rows import DELETE, MERGE, NEVER, PUT, VALUE_BYTES_MAX, Row
from penstock.partition.pending import PendingDelta

Operation: TypeAlias = tuple[int, bytes, int]  # kind, value, expires_us
PLAIN, FULL, RANGES = 0, 1, 2
_HEADER = struct.Struct("<BxxxI")  # form, rows
_ONE_PUT = struct.Struct("<BxxxIII")  # the same, the length of the key, of the value


class Rows(dict[bytes, "bytes | Operation"]):
    """Key to value (a put that never expires) or to an operation."""

    plain = True  # values only
    size_bytes: int | None = None  # noted when it is encoded: it does not change any more by then

    @classmethod
    def of(cls, values: dict[bytes, bytes]) -> Rows:
        """Puts that never expire."""
        rows = cls()
        rows.update(values)
        return rows


class Ranges(list[tuple[bytes, bytes]]):
    """Deletes of [start, end)."""

    __slots__ = ()


Section: TypeAlias = Rows | Ranges


# -- inserts, under the coordinator's lock


def put(delta: PendingDelta, partition: PartitionId, key: bytes, value: bytes) -> None:
    """A put that never expires: the hot path."""
    try:
        delta.open[partition][key] = value  # type: ignore[index]
    except (KeyError, TypeError):  # the first of its group, or of its shard
        sections = delta.begin() if delta.open is None else delta.open
        rows = sections[partition] = Rows()
        rows[key] = value


def put_many(delta: PendingDelta, partition: PartitionId, pairs: dict[bytes, bytes], _: None) -> None:
    """Many puts that never expire."""
    sections = delta.begin() if delta.open is None else delta.open
    rows = sections.get(partition)
    if rows is None:
        rows = sections[partition] = Rows()
    rows.update(pairs)


def operate(delta: PendingDelta, partition: PartitionId, key: bytes, operation: Operation) -> None:
    """A delete, a put that expires, or an operand of a merge."""
    sections = delta.begin() if delta.open is None else delta.open
    rows = sections.get(partition)
    if rows is None:
        rows = sections[partition] = Rows()
    rows.plain = False  # before the row is there: an interrupt may come between any two lines
    older = rows.get(key)
    if operation[0] < MERGE or older is None:
        rows[key] = operation
    elif isinstance(older, bytes) or older[2] == NEVER:
        kind, value = fold((PUT, older) if isinstance(older, bytes) else older[:2], operation[:2])
        if len(value) <= VALUE_BYTES_MAX:
            rows[key] = (kind, value, operation[2])
        else:  # a chain of several operators, longer than any value may be
            _in_new_group(delta, partition, key, operation)
    else:  # whether the older one has expired by then, only the record's time can tell
        _in_new_group(delta, partition, key, operation)


def _in_new_group(delta: PendingDelta, partition: PartitionId, key: bytes, operation: Operation) -> None:
    rows = Rows()
    rows.plain = False
    rows[key] = operation
    delta.begin()[partition] = rows


# -- bytes


def encode(section: Section) -> bytes:
    """A section as columns."""
    if len(section) == 1 and isinstance(section, Rows) and section.plain:  # the same bytes as below, with less ado
        ((key, value),) = section.items()
        section.size_bytes = len(key) + len(value)
        return _ONE_PUT.pack(PLAIN, 1, len(key), len(value)) + key + value  # type: ignore[operator]
    if isinstance(section, Ranges):
        starts, ends = [a for a, _ in section], [b for _, b in section]
        return b"".join((_HEADER.pack(RANGES, len(section)), _lengths(starts), _lengths(ends), *starts, *ends))
    keys = list(section)
    if section.plain or not keys:  # no keys: an interrupt came before the first
        values: list[bytes] = list(section.values())  # type: ignore[arg-type]
        payload = b"".join((_HEADER.pack(PLAIN, len(keys)), _lengths(keys), _lengths(values), *keys, *values))
        section.size_bytes = len(payload) - _HEADER.size - 8 * len(keys)
        return payload
    operations = [(PUT, op, NEVER) if isinstance(op, bytes) else op for op in section.values()]
    contents = [operation[1] for operation in operations]
    return b"".join(
        (
            _HEADER.pack(FULL, len(keys)),
            _lengths(keys),
            _lengths(contents),
            bytes([operation[0] for operation in operations]),
            np.array([operation[2] for operation in operations], "<i8").tobytes(),
            *keys,
            *contents,
        )
    )


def row_count(payload: bytes) -> int:
    """How many rows a payload says it has, as far as it is long enough for them."""
    count: int = _HEADER.unpack_from(payload)[1] if len(payload) >= _HEADER.size else 0
    return min(count, len(payload) // 8)


def decode(payload: bytes) -> Section:
    """The section in a payload."""
    try:
        form, count = _HEADER.unpack_from(payload)
        at = _HEADER.size
        first = np.frombuffer(payload, "<u4", count, at).tolist()
        second = np.frombuffer(payload, "<u4", count, at + 4 * count).tolist()
        at += 8 * count
        kinds, expires = b"", []
        if form == FULL:
            kinds = payload[at : at + count]
            expires = np.frombuffer(payload, "<i8", count, at + count).tolist()
            at += 9 * count
        keys, at = _cut(payload, first, at)
        values, at = _cut(payload, second, at)
        if at != len(payload) or form not in (PLAIN, FULL, RANGES):
            raise ValueError("its length is wrong")
    except (ValueError, struct.error) as error:
        raise CorruptionError("kv section", 0, f"it does not decode ({error})") from None
    if form == RANGES:
        return Ranges(zip(keys, values, strict=True))
    rows = Rows()
    if form == PLAIN:
        rows.update(zip(keys, values, strict=True))
    else:
        rows.plain = False
        rows.update(zip(keys, zip(kinds, values, expires, strict=True), strict=True))
    return rows


def _lengths(items: Sequence[bytes]) -> bytes:
    return struct.pack(f"<{len(items)}I", *map(len, items))  # faster than numpy, for few items and for many


def _cut(payload: bytes, lengths: list[int], at: int) -> tuple[list[bytes], int]:
    items: list[bytes] = []
    for length in lengths:
        items.append(payload[at : at + length])
        at += length
    if at > len(payload):
        raise ValueError("it is cut short")
    return items, at


# -- one edit


def to_edit(sections: Iterable[Section], lsn: int, time_us: int) -> Edit:
    """All sections of a record for a shard, folded in order: ranges that delete what was before, rows on top."""
    sections = list(sections)
    if sections and all(isinstance(section, Rows) and section.plain for section in sections):
        return _puts(sections, lsn, time_us)  # type: ignore[arg-type]
    rows: dict[bytes, Row] = {}
    # For each key the place of the last section that deletes it: what sections before that do to it counts for nothing.
    last_deletes = RangeDeletes.of(
        (start, end, place)
        for place, section in enumerate(sections)
        if isinstance(section, Ranges)
        for start, end in section
    )
    last_place = max(last_deletes.lsns, default=-1)
    for place, section in enumerate(sections):
        if isinstance(section, Ranges):
            continue
        operations: Iterable[tuple[bytes, bytes | Operation]] = section.items()
        if place < last_place:
            deleted = last_deletes.lsn_over
            operations = [(key, operation) for key, operation in operations if deleted(key) <= place]
        elif section.plain:
            values: Iterable[bytes] = section.values()  # type: ignore[assignment]
            rows.update(zip(section, zip(repeat(PUT), values, repeat(lsn), repeat(NEVER)), strict=False))
            continue
        for key, operation in operations:
            if isinstance(operation, bytes):
                rows[key] = (PUT, operation, lsn, NEVER)
            else:
                kind, value, expires = operation
                rows[key] = fold_rows(rows.get(key), (kind, value, lsn, expires), time_us)
    ranges = [border for section in sections if isinstance(section, Ranges) for border in section]
    return Edit(lsn=lsn, time_us=time_us, rows=rows, ranges=ranges)


def only_put(section: Section) -> tuple[bytes, bytes] | None:
    """The key and the value of a section that is one put of a value that never expires."""
    if len(section) != 1 or not isinstance(section, Rows) or not section.plain:
        return None
    (pair,) = section.items()
    return pair  # type: ignore[return-value]


def _puts(sections: list[Rows], lsn: int, time_us: int) -> Edit:
    if len(sections) == 1:
        puts: dict[bytes, bytes] = sections[0]  # type: ignore[assignment]
        return Edit(lsn=lsn, time_us=time_us, puts=puts, put_bytes=sections[0].size_bytes)
    puts = {}
    for section in sections:
        puts.update(section)  # type: ignore[arg-type]
    return Edit(lsn=lsn, time_us=time_us, puts=puts)


def find(section: Section, key: bytes) -> Operation | None:
    """What a section does to a key."""
    if isinstance(section, Ranges):
        return (DELETE, b"", NEVER) if any(start <= key < end for start, end in section) else None
    operation = section.get(key)
    return (PUT, operation, NEVER) if isinstance(operation, bytes) else operation
