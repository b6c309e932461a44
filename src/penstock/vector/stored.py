"""What the rows of a vector shard hold: its sequence, generations, centroids and lists, vectors and records.

Thread: pure functions of a view.
Invariant: values that cannot have been written by a draft raise `CorruptionError`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyroaring import BitMap64

from penstock.errors import CorruptionError
from penstock.lsm.rows import Columns, offsets_of
from penstock.lsm.view import View
from penstock.vector.keys import (
    CENTROID,
    DICTIONARY,
    F32,
    FIRST_ID,
    GENERATIONS,
    I32,
    POSTINGS,
    RECORD,
    SEQUENCE,
    U64,
    VECTOR,
    id_key,
    id_range,
    ids_of,
    list_of,
    list_range,
)
from penstock.vector.operators import decode_ids, id_array
from penstock.vector.options import Metric
from penstock.vector.training import ListAssigner

_SEQUENCE = struct.Struct("<QQ")
_GENERATIONS = struct.Struct("<IIQQI")
_ID = struct.Struct("<Q")
_LENGTH = struct.Struct("<H")


class StoredRows(Protocol):
    """What a draft reads: a view of the tree, or a snapshot."""

    def get(self, key: bytes) -> bytes | None: ...

    def existing(self, keys: Sequence[bytes]) -> npt.NDArray[np.bool_]: ...

    def scan(self, start: bytes = b"", end: bytes | None = None) -> Iterator[tuple[bytes, bytes]]: ...


@dataclass(frozen=True, slots=True)
class IdSequence:
    """The next internal id of a shard, and how many vectors it has."""

    next: int = FIRST_ID
    count: int = 0


@dataclass(frozen=True, slots=True)
class Generations:
    """The generation of centroids in use, and one that is being built; 0: none."""

    current: int = 0
    building: int = 0
    assigned: int = 0  # internal ids below this are in lists of the one being built
    until: int = 0  # internal ids from here on were given to lists of it when they were written
    probes: int = 0  # lists of the one in use that a search looks at

    def live(self) -> list[int]:
        """Return the generations that new vectors join."""
        return [number for number in (self.current, self.building) if number]


class Centroids:
    """The centroids of one generation, by list; the numbers of lists ascend."""

    __slots__ = ("_assigner", "matrix", "numbers")

    def __init__(self, numbers: I32, matrix: F32) -> None:
        self.numbers = numbers
        self.matrix = matrix
        self._assigner: ListAssigner | None = None

    def __len__(self) -> int:
        return len(self.numbers)

    def nearest(self, vectors: F32, metric: Metric) -> npt.NDArray[np.int32]:
        """Return the position of the nearest centroid of each vector. Requires: there are centroids."""
        assigner = self._assigner
        if assigner is None:
            assigner = self._assigner = ListAssigner(self.matrix, metric)
        return assigner.nearest(np.ascontiguousarray(vectors, np.float32))


# -- rows that stand alone, and lists


def read_sequence(rows: StoredRows) -> IdSequence:
    """Return the sequence of a shard."""
    value = rows.get(SEQUENCE)
    return IdSequence() if value is None else IdSequence(*_unpacked(_SEQUENCE, value))


def read_generations(rows: StoredRows) -> Generations:
    """Return the generations of a shard."""
    value = rows.get(GENERATIONS)
    return Generations() if value is None else Generations(*_unpacked(_GENERATIONS, value))


def encode_sequence(sequence: IdSequence) -> bytes:
    """Encode the row of a sequence."""
    return _SEQUENCE.pack(sequence.next, sequence.count)


def encode_generations(now: Generations) -> bytes:
    """Encode the row of the generations."""
    return _GENERATIONS.pack(now.current, now.building, now.assigned, now.until, now.probes)


def _unpacked(form: struct.Struct, value: bytes) -> tuple[int, ...]:
    if len(value) != form.size:
        raise CorruptionError("vector row", 0, f"it has {len(value)} bytes, not {form.size}")
    return form.unpack(value)


def read_centroids(rows: StoredRows, generation: int, dimensions: int) -> Centroids:
    """Return the centroids of a generation."""
    pairs = list(rows.scan(*list_range(CENTROID, generation)))
    numbers = np.fromiter((list_of(key) for key, _ in pairs), np.int32, len(pairs))
    matrix = np.frombuffer(b"".join(value for _, value in pairs), "<f4")
    if len(matrix) != len(pairs) * dimensions:
        raise CorruptionError("centroids", 0, f"{len(pairs)} of {dimensions} dimensions have {len(matrix)} numbers")
    return Centroids(numbers, matrix.reshape(-1, dimensions).astype(np.float32, copy=False))


def read_postings(rows: StoredRows, generation: int) -> Iterator[tuple[int, BitMap64]]:
    """Yield each list of a generation and the internal ids in it."""
    for key, value in rows.scan(*list_range(POSTINGS, generation)):
        yield list_of(key), decode_ids(value)


def internal_id(value: bytes | None) -> int:
    """Return the internal id in a row of the dictionary; 0 if there is no row."""
    return 0 if value is None else _unpacked(_ID, value)[0]


def record_values(externals: Sequence[bytes], attributes: Sequence[bytes]) -> list[bytes]:
    """Encode records: the external id and the attributes of each."""
    lengths = {size: _LENGTH.pack(size) for size in set(map(len, externals))}
    return [
        lengths[len(external)] + external + encoded for external, encoded in zip(externals, attributes, strict=True)
    ]


def split_record(value: bytes) -> tuple[bytes, bytes]:
    """Return the external id and the encoded attributes of a record."""
    end = 2 + _LENGTH.unpack_from(value)[0]
    return value[2:end], value[end:]


# -- vectors and records


def vector_key(number: int) -> bytes:
    """Return the key of an internal id's vector."""
    return id_key(VECTOR, number)


def record_key(number: int) -> bytes:
    """Return the key of an internal id's record."""
    return id_key(RECORD, number)


def vector_slices(view: View, dimensions: int, start: int = 0, end: int | None = None) -> Iterator[tuple[U64, F32]]:
    """Yield internal ids in [start, end), ascending, and their vectors."""
    for columns in view.scan_columns(*id_range(VECTOR, start, end)):
        yield ids_of(columns.keys), matrix_of(columns, dimensions)


def matrix_of(columns: Columns, dimensions: int) -> F32:
    """Return the values of rows of vectors as a matrix, without a copy where that is possible."""
    offsets = offsets_of(columns.values)
    if len(columns) and not bool((np.diff(offsets) == 4 * dimensions).all()):
        raise CorruptionError("vectors", 0, f"a vector does not have {dimensions} dimensions")
    data = np.frombuffer(columns.values.buffers()[2], np.uint8) if len(columns) else np.zeros(0, np.uint8)
    return data[int(offsets[0]) : int(offsets[-1])].view("<f4").reshape(-1, dimensions)


def record_slices(view: View, start: int = 0, end: int | None = None) -> Iterator[tuple[U64, Any, Any]]:
    """Yield internal ids in [start, end), ascending, with columns of external ids and of attributes as JSON text."""
    for columns in view.scan_columns(*id_range(RECORD, start, end)):
        if len(columns):
            yield ids_of(columns.keys), *_split_records(columns.values)


def _split_records(values: Any) -> tuple[Any, Any]:
    """Return the external ids and the attributes (null: none) of encoded records, as Arrow columns of texts."""
    offsets = offsets_of(values).astype(np.int64)
    data = np.frombuffer(values.buffers()[2], np.uint8)[: int(offsets[-1])]
    starts, ends = offsets[:-1], offsets[1:]
    if len(starts) and int((ends - starts).min()) < 2:
        raise CorruptionError("records", 0, "a record is cut short")
    middles = starts + 2 + data[starts] + (data[starts + 1].astype(np.int64) << 8)
    if bool((middles > ends).any()):
        raise CorruptionError("records", 0, "an external id is cut short")
    return _texts(data, starts + 2, middles), _texts(data, middles, ends, empty_is_null=True)


def _texts(data: Any, starts: Any, ends: Any, *, empty_is_null: bool = False) -> Any:
    """Return the texts at [start, end) of some bytes. Requires: they ascend and do not overlap."""
    lengths = ends - starts
    offsets = np.zeros(len(starts) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    present = lengths > 0
    marks = np.zeros(len(data) + 1, np.int8)
    marks[starts[present]] += 1
    marks[ends[present]] -= 1
    chosen = data[np.cumsum(marks[:-1], dtype=np.int8).view(np.bool_)]
    valid = pa.py_buffer(np.packbits(present, bitorder="little")) if empty_is_null and not present.all() else None
    return pa.Array.from_buffers(pa.string(), len(starts), [valid, pa.py_buffer(offsets), pa.py_buffer(chosen)])


def lists_by_id(view: View, generation: int, centroids: Centroids) -> tuple[U64, I32]:
    """Return the internal ids in the lists of a generation, ascending, and the position of each one's centroid."""
    positions = {number: position for position, number in enumerate(centroids.numbers.tolist())}
    parts = [
        (id_array(ids), positions[number])
        for number, ids in read_postings(view, generation)
        if ids and number in positions
    ]
    if not parts:
        return np.zeros(0, np.uint64), np.zeros(0, np.int32)
    ids = np.concatenate([members for members, _ in parts])
    lists = np.concatenate([np.full(len(members), position, np.int32) for members, position in parts])
    order = np.argsort(ids, kind="stable")
    return ids[order], lists[order]


def get_record(get: Callable[[bytes], bytes | None], external: bytes) -> bytes | None:
    """Return the vector of an external id followed by its encoded attributes; None if there is none."""
    number = internal_id(get(DICTIONARY + external))
    if not number:
        return None
    vector, record = get(vector_key(number)), get(record_key(number))
    if vector is None or record is None:
        return None
    return vector + split_record(record)[1]


def read_record(get: Callable[[bytes], bytes | None], number: int) -> tuple[str, bytes] | None:
    """Return the external id and encoded attributes of an internal id, or None."""
    value = get(record_key(number))
    if value is None:
        return None
    external, attributes = split_record(value)
    return external.decode(), attributes
