"""Sections of a kv table: the pending writes of one shard, between the caller and the tree.

A section is a `Rows` (a dict: key to value, or to an operation) or a `Ranges` (deletes of key ranges). Adjacent writes
by key share one `Rows`: the last write of a key wins and operands are folded. A range delete is a group of its own.

Thread: changed under the coordinator's lock; read by any thread.
Invariant: decode(encode(section)) is the section.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
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
_ONE_PUT = struct.Struct("<BxxxIII")  # form, rows, length of the key, length of the value


class Rows(dict[bytes, "bytes | Operation"]):
    """A map from key to value (a put that never expires) or to an operation."""

    plain = True  # values only
    operands = False  # there may be operands of a merge
    size_bytes: int | None = None  # of keys and values, if they are many: set when it is encoded, and final then

    @classmethod
    def of(cls, values: dict[bytes, bytes]) -> Rows:
        """Return a section of puts that never expire."""
        rows = cls()
        rows.update(values)
        return rows

    @classmethod
    def of_one(cls, key: bytes, operation: bytes | Operation) -> Rows:
        """Return a section of one row."""
        rows = cls()
        rows.plain = isinstance(operation, bytes)
        rows.operands = not rows.plain and operation[0] >= MERGE
        rows[key] = operation
        return rows


class Ranges(list[tuple[bytes, bytes]]):
    """Deletes of [start, end)."""

    __slots__ = ()


Section: TypeAlias = Rows | Ranges


# -- inserts, under the coordinator's lock


def put(delta: PendingDelta, partition: PartitionId, key: bytes, value: bytes) -> None:
    """Insert a put that never expires: the hot path."""
    sections = delta.open
    if sections is None:  # the first write of its group
        rows = delta.begin()[partition] = Rows()
        rows[key] = value
        return
    try:
        sections[partition][key] = value
    except KeyError:  # the first write of its shard
        rows = sections[partition] = Rows()
        rows[key] = value


def put_many(delta: PendingDelta, partition: PartitionId, pairs: dict[bytes, bytes], _: None) -> None:
    """Insert many puts that never expire."""
    sections = delta.begin() if delta.open is None else delta.open
    rows = sections.get(partition)
    if rows is None:
        rows = sections[partition] = Rows()
    rows.update(pairs)


def operate(delta: PendingDelta, partition: PartitionId, key: bytes, operation: Operation) -> None:
    """Insert a delete, a put that expires, or a merge operand."""
    sections = delta.begin() if delta.open is None else delta.open
    rows = sections.get(partition)
    if rows is None:
        rows = sections[partition] = Rows()
    rows.plain = False  # before the row is added: an interrupt may come between any two lines
    rows.operands = rows.operands or operation[0] >= MERGE
    older = rows.get(key)
    if operation[0] < MERGE or older is None:
        rows[key] = operation
    elif isinstance(older, bytes) or older[2] == NEVER:
        kind, value = fold((PUT, older) if isinstance(older, bytes) else older[:2], operation[:2])
        if len(value) <= VALUE_BYTES_MAX:
            rows[key] = (kind, value, operation[2])
        else:  # a chain of several operators, longer than a value may be
            _in_new_group(delta, partition, key, operation)
    else:  # only the record's time can tell whether the older one has expired
        _in_new_group(delta, partition, key, operation)


def _in_new_group(delta: PendingDelta, partition: PartitionId, key: bytes, operation: Operation) -> None:
    rows = Rows()
    rows.plain, rows.operands = False, operation[0] >= MERGE
    rows[key] = operation
    delta.begin()[partition] = rows


def has_operands(section: Section) -> bool:
    """Whether a section may hold operands, which are folded onto stored rows when they are applied."""
    return section.operands if isinstance(section, Rows) else False


# -- bytes


def encode(section: Section) -> bytes:
    """Encode a section as columns."""
    if len(section) == 1 and isinstance(section, Rows) and section.plain:  # the same bytes as below, only faster
        ((key, value),) = section.items()
        return _ONE_PUT.pack(PLAIN, 1, len(key), len(value)) + key + value  # type: ignore[operator]
    if isinstance(section, Ranges):
        starts, ends = [a for a, _ in section], [b for _, b in section]
        return b"".join((_HEADER.pack(RANGES, len(section)), _lengths(starts), _lengths(ends), *starts, *ends))
    keys = list(section)
    if section.plain or not keys:  # no keys: an interrupt came before the first was added
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


def divided(payload: bytes, bytes_max: int) -> Iterator[tuple[int, int, bytes]]:
    """Yield the rows [start, end) of an encoded section of puts that never expire, as sections of about `bytes_max`."""
    _, count = _HEADER.unpack_from(payload)
    lengths = np.frombuffer(payload, "<u4", 2 * count, _HEADER.size)
    ends = _HEADER.size + 8 * count + np.cumsum(lengths, dtype=np.int64)
    sizes = np.cumsum(lengths[:count].astype(np.int64) + lengths[count:] + 8)
    borders = np.concatenate([[_HEADER.size + 8 * count], ends])  # where each key, then each value begins
    start = 0
    while start < count:
        before = int(sizes[start - 1]) if start else 0
        end = min(count, start + 1 + int(np.searchsorted(sizes[start:], before + bytes_max)))
        yield (
            start,
            end,
            b"".join(
                (
                    _HEADER.pack(PLAIN, end - start),
                    lengths[start:end].tobytes(),
                    lengths[count + start : count + end].tobytes(),
                    payload[borders[start] : borders[end]],
                    payload[borders[count + start] : borders[count + end]],
                )
            ),
        )
        start = end


def row_count(payload: bytes) -> int:
    """Return the row count that a payload states, capped by what its length allows."""
    count: int = _HEADER.unpack_from(payload)[1] if len(payload) >= _HEADER.size else 0
    return min(count, len(payload) // 8)


def decode(payload: bytes) -> Section:
    """Decode a section; `CorruptionError` if it is malformed."""
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
        rows.plain, rows.operands = False, max(kinds, default=0) >= MERGE
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
    """Fold the sections of a record for one shard, in order, into one edit: range deletes first, then rows."""
    sections = list(sections)
    if sections and all(isinstance(section, Rows) and section.plain for section in sections):
        return _puts(sections, lsn, time_us)  # type: ignore[arg-type]
    rows: dict[bytes, Row] = {}
    # For each key, the index of the last section that deletes it: what earlier sections do to the key has no effect.
    last_deletes = RangeDeletes.of(
        (start, end, index)
        for index, section in enumerate(sections)
        if isinstance(section, Ranges)
        for start, end in section
    )
    last_index = max(last_deletes.lsns, default=-1)
    for index, section in enumerate(sections):
        if isinstance(section, Ranges):
            continue
        operations: Iterable[tuple[bytes, bytes | Operation]] = section.items()
        if index < last_index:
            deleted = last_deletes.lsn_over
            operations = [(key, operation) for key, operation in operations if deleted(key) <= index]
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
    """Return the key and value if a section is a single put that never expires; else None."""
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
    """Return what a section does to a key; None if nothing."""
    if isinstance(section, Ranges):
        return (DELETE, b"", NEVER) if any(start <= key < end for start, end in section) else None
    operation = section.get(key)
    return (PUT, operation, NEVER) if isinstance(operation, bytes) else operation
