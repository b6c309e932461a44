"""Sections of a vector table: the pending writes of one shard, in the order in which they were written.

A section is a list of parts:

    Upserts       vectors with their ids and attributes: each replaces the whole record of its id
    Deletes       ids to delete
    IndexChange   centroids and posting lists, from a job of the owner

When a section is encoded or read, the upserts and deletes between two changes of the index are folded: the last write
of an id wins, so an id is at most once in them, and one part of each is left.

As bytes:

    version u8 = 1, and parts as `partition/part_codec` frames them
    upserts          count u32, dimensions u32, vectors f32; for each the length of its id u16, then for each of its
                     attributes u32; ids, attributes
    deletes          count u32, length of each id u16, ids
    index change     MessagePack

Thread: changed under the coordinator's lock; read by any thread.
Invariant: decode(encode(section)) has the same parts.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, TypeAlias

import msgspec
import numpy as np
import pyarrow as pa

from penstock.errors import Invalid
from penstock.host import threads
from penstock.journal.partitions import PartitionId
from penstock.lsm.rows import binary_column
from penstock.partition.part_codec import HEADER, PART, decode_parts, decoding, encode_parts, receive_parts
from penstock.partition.part_log import PartLog, open_section
from penstock.partition.pending import PendingDelta
from penstock.vector.attributes import check_encoded
from penstock.vector.keys import F32
from penstock.vector.options import VectorOptions

VERSION = 1
UPSERTS, DELETES, CHANGE = 1, 2, 3
ID_BYTES_MAX = 1_024
ROW_WEIGHT = 300  # memory of the objects around an id and its attributes
LENGTH_MAX = 1e15  # of a vector: squares of distances fit float32
SQUARE_MIN, SQUARE_MAX = 1e-30, LENGTH_MAX**2  # of the length of a vector; the least is for cosine
_SQUARE_SURE_MIN, _SQUARE_SURE_MAX = 1e-25, 1e25
_UPSERTS = struct.Struct("<II")
_DELETES = struct.Struct("<I")
_F32, _U32, _U16 = np.dtype("<f4"), np.dtype("<u4"), np.dtype("<u2")


@dataclass(frozen=True, eq=False, slots=True)
class Upserts:
    """Records by external id."""

    ids: Sequence[bytes]
    vectors: F32  # a row for each id
    attributes: Sequence[bytes]  # as `attributes` encodes them; empty: none has any

    def __len__(self) -> int:
        return len(self.ids)

    def attributes_of(self) -> Sequence[bytes]:
        """Return the attributes of each record."""
        return self.attributes or [b""] * len(self.ids)


@dataclass(frozen=True, eq=False, slots=True)
class Deletes:
    """External ids whose records are deleted."""

    ids: Sequence[bytes]

    def __len__(self) -> int:
        return len(self.ids)


class IndexChange(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, kw_only=True):
    """A change of one generation of centroids and posting lists; sets of internal ids are as `operators` encodes them.

    Generation 0 means no index: search is exact.
    """

    generation: int
    centroids: list[tuple[int, bytes]] = []  # list, its vector
    added: list[tuple[int, bytes]] = []  # list, internal ids
    forgotten: bytes = b""  # deleted internal ids that no list has any more
    assigned: int = 0  # internal ids below this are in lists of a generation that is being built
    use: bool = False  # from now on searches use this generation, and others are dropped
    probes: int = 0  # lists that a search looks at, if it does not say how many; with `use`

    def __len__(self) -> int:
        return 1


Part: TypeAlias = Upserts | Deletes | IndexChange
_pack = msgspec.msgpack.Encoder().encode
_unpack_change = msgspec.msgpack.Decoder(IndexChange).decode
_finding = threads.lock("vector.section")  # one for all sections: it is held for an instant


class VectorSection(PartLog[Part]):
    """Pending writes of one shard, in order."""

    __slots__ = ("_rows_by_id",)

    def __init__(self, *parts: Part) -> None:
        super().__init__(*parts)
        # How many parts of the log are in it; by id, the last part that writes it, and the row. Guarded by _finding.
        self._rows_by_id: tuple[int, dict[bytes, tuple[Upserts | Deletes, int]]] = (0, {})

    def __len__(self) -> int:
        return sum(map(len, self.log))

    def _make(self, log: list[Part]) -> list[Part]:
        return fold_parts(log)

    def find(self, key: bytes) -> tuple[F32, bytes] | bool:
        """Return the vector and attributes that a section writes for an id; True if it deletes it, False if neither."""
        with _finding:
            scanned, rows_by_id = self._rows_by_id
            end = len(self.log)
            for part in self.log[scanned:end]:
                if not isinstance(part, IndexChange):
                    rows_by_id.update(zip(part.ids, zip(repeat(part), range(len(part)), strict=False), strict=True))
            self._rows_by_id = end, rows_by_id
        entry = rows_by_id.get(key)
        if entry is None:
            return False
        part, row = entry
        if isinstance(part, Deletes):
            return True
        return part.vectors[row], part.attributes[row] if part.attributes else b""

    def get(self, key: bytes) -> bytes | None:
        """Return the vector that a section writes for an id, followed by its attributes; None if it writes none."""
        write = self.find(key)
        return None if isinstance(write, bool) else write[0].astype("<f4").tobytes() + write[1]


def fold_parts(log: Iterable[Part]) -> list[Part]:
    """Fold the upserts and deletes between changes of the index."""
    parts: list[Part] = []
    rows: list[Upserts | Deletes] = []
    for part in log:
        if isinstance(part, IndexChange):
            parts += _fold_rows(rows)
            parts.append(part)
            rows = []
        elif len(part):
            rows.append(part)
    return parts + _fold_rows(rows)


def _fold_rows(rows: list[Upserts | Deletes]) -> list[Part]:
    if not rows:
        return []
    ids = [key for part in rows for key in part.ids]
    last = dict(zip(ids, range(len(ids)), strict=True))
    if len(rows) == 1 and len(last) == len(ids):
        return [rows[0]]
    last_writes = np.fromiter(last.values(), np.intp, len(last))
    last_writes.sort()  # ids are assigned in the order of the last writes
    is_upsert = np.concatenate([np.full(len(part), isinstance(part, Upserts)) for part in rows])
    row_of = np.cumsum(is_upsert) - 1  # the row of each upsert in the joined matrix
    upserted = last_writes[is_upsert[last_writes]]
    parts: list[Part] = []
    deleted = last_writes[~is_upsert[last_writes]].tolist()
    if deleted:
        parts.append(Deletes([ids[position] for position in deleted]))
    if len(upserted):
        upserts = [part for part in rows if isinstance(part, Upserts)]
        vectors = np.concatenate([part.vectors for part in upserts]) if len(upserts) > 1 else upserts[0].vectors
        attributes: list[bytes] = []
        if any(part.attributes for part in upserts):
            attributes = [data for part in upserts for data in part.attributes_of()]
            attributes = [attributes[row] for row in row_of[upserted].tolist()]
        chosen = vectors if len(upserted) == len(vectors) else vectors[row_of[upserted]]
        parts.append(Upserts([ids[position] for position in upserted.tolist()], chosen, attributes))
    return parts


# -- inserts, under the coordinator's lock


def append_part(delta: PendingDelta, partition: PartitionId, part: Part, _: None) -> None:
    """Append a part."""
    open_section(delta, partition, VectorSection).log.append(part)


# -- bytes


def encode_section(section: VectorSection) -> bytes:
    """Encode a section."""
    return encode_parts(VERSION, [_encode_part(part) for part in section.parts])


def _encode_part(part: Part) -> tuple[int, Sequence[bytes | memoryview]]:
    if isinstance(part, Upserts):
        return UPSERTS, _upsert_bytes(part)
    if isinstance(part, Deletes):
        return DELETES, [_DELETES.pack(len(part)), _lengths(part.ids, _U16), b"".join(part.ids)]
    return CHANGE, [_pack(part)]


def _upsert_bytes(part: Upserts) -> list[bytes | memoryview]:
    attributes = part.attributes_of()
    vectors = np.ascontiguousarray(part.vectors, _F32)
    return [
        _UPSERTS.pack(len(part), vectors.shape[1]),
        vectors.data.cast("B"),  # not a copy: the vectors are nearly all of a section
        _lengths(part.ids, _U16),
        _lengths(attributes, _U32),
        b"".join(part.ids),
        b"".join(attributes),
    ]


def _lengths(items: Sequence[bytes], kind: np.dtype[Any]) -> bytes:
    return np.fromiter(map(len, items), kind, len(items)).tobytes()


def decode_section(payload: bytes) -> VectorSection:
    """Decode a section; `CorruptionError` if it is malformed."""
    with decoding("vector"):
        return VectorSection(*decode_parts(payload, VERSION, _DECODERS))


def _decode_upserts(body: memoryview) -> Upserts:
    count, dimensions = _UPSERTS.unpack_from(body)
    at = _UPSERTS.size
    if at + count * (4 * dimensions + 6) > len(body):
        raise ValueError("upserts are cut short")
    vectors = np.frombuffer(body, _F32, count * dimensions, at).reshape(count, dimensions)
    at += vectors.nbytes
    lengths = np.frombuffer(body, _U16, count, at)
    at += lengths.nbytes
    of_attributes = np.frombuffer(body, _U32, count, at)
    at += of_attributes.nbytes
    ids, at = _cut(body, lengths, at)
    attributes: list[bytes] = []
    if of_attributes.any():
        attributes, at = _cut(body, of_attributes, at)
    if at != len(body):
        raise ValueError("the length of upserts is wrong")
    return Upserts(ids, vectors.astype(np.float32, copy=False), attributes)


def _decode_deletes(body: memoryview) -> Deletes:
    (count,) = _DELETES.unpack_from(body)
    if _DELETES.size + 2 * count > len(body):
        raise ValueError("deletes are cut short")
    lengths = np.frombuffer(body, _U16, count, _DELETES.size)
    ids, at = _cut(body, lengths, _DELETES.size + lengths.nbytes)
    if at != len(body):
        raise ValueError("the length of deletes is wrong")
    return Deletes(ids)


_DECODERS: dict[int, Any] = {UPSERTS: _decode_upserts, DELETES: _decode_deletes, CHANGE: _unpack_change}


def _cut(body: memoryview, lengths: Any, at: int) -> tuple[list[bytes], int]:
    ends = np.cumsum(lengths, dtype=np.int64)
    size = int(ends[-1]) if len(ends) else 0
    if at + size > len(body):
        raise ValueError("it is cut short")
    data = bytes(body[at : at + size])
    starts = ends - lengths
    return [data[low:high] for low, high in zip(starts.tolist(), ends.tolist(), strict=True)], at + size


def section_weight(payload: bytes) -> int:
    """Estimate the memory that `receive_section` needs, from counts in a section that may be malformed."""
    rows, at = 0, HEADER.size
    while at + PART.size + _DELETES.size <= len(payload):
        number, size = PART.unpack_from(payload, at)
        at += PART.size
        if number in (UPSERTS, DELETES):
            rows += min(_DELETES.unpack_from(payload, at)[0], len(payload) // 2)
        at += size
    return 3 * len(payload) + ROW_WEIGHT * rows


# -- sections from other processes


def receive_section(payload: bytes, options: VectorOptions) -> VectorSection:
    """Decode and check a section; `Invalid` if it breaks a rule of the API."""
    section = receive_parts("vector", decode_section, payload)
    for part in section.log:
        if isinstance(part, IndexChange):
            raise Invalid("only the owner of a store changes the index of a vector table")
        if not len(part):
            raise Invalid("a part of a vector section holds nothing")
        check_ids(part.ids)
        if isinstance(part, Upserts):
            check_vectors(part.vectors, options)
            for data in part.attributes:
                check_encoded(data)
    if len(section.parts) != len(section.log):
        raise Invalid("a section of a vector table has an id twice: its parts are not folded")
    if any(len(one) != len(other) for one, other in zip(section.parts, section.log, strict=True)):
        raise Invalid("a section of a vector table has an id twice: its parts are not folded")
    return section


def check_ids(ids: Sequence[bytes]) -> None:
    """Raise `Invalid` if one of the ids is not a text of a valid length."""
    longest, shortest = max(map(len, ids)), min(map(len, ids))
    if shortest < 1 or longest > ID_BYTES_MAX:
        raise Invalid(f"the id of a vector is a text of 1 to {ID_BYTES_MAX} bytes, and one has {longest or shortest}")
    try:
        binary_column(list(ids)).cast(pa.string())
    except pa.ArrowInvalid as error:
        raise Invalid(f"the ids of vectors are texts, and one is not UTF-8 ({error})") from None


def check_vectors(vectors: F32, options: VectorOptions) -> None:
    """Raise `Invalid` if vectors do not fit a table: wrong dimensions, NaN, infinite, or zero with cosine."""
    if vectors.shape[1] != options.dimensions:
        raise Invalid(f"the vectors of this table have {options.dimensions} dimensions, these have {vectors.shape[1]}")
    squares = np.einsum("ij,ij->i", vectors, vectors)
    if len(squares) and squares.min() > _SQUARE_SURE_MIN and squares.max() < _SQUARE_SURE_MAX:
        return  # float32 decides nearly always, in a quarter of the time; NaN is not above anything
    squares = np.einsum("ij,ij->i", vectors, vectors, dtype=np.float64)  # NaN or infinite if a number of the vector is
    wrong = np.flatnonzero(~(squares <= SQUARE_MAX))
    if len(wrong):
        row = int(wrong[0])
        if np.isfinite(vectors[row]).all():
            raise Invalid(f"{_named(row, vectors)} is longer than {LENGTH_MAX:g}: distances would overflow, scale it")
        raise Invalid(f"{_named(row, vectors)} holds NaN or infinity: drop it")
    if options.metric == "cosine":
        wrong = np.flatnonzero(squares < SQUARE_MIN)
        if len(wrong):
            raise Invalid(
                f"{_named(int(wrong[0]), vectors)} is zero or nearly zero, so it has no direction for cosine: drop it"
            )


def _named(row: int, vectors: F32) -> str:
    return "the vector" if len(vectors) == 1 else f"the vector in row {row}"
