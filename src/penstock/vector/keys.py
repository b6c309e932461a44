"""The keys of rows in the tree of a vector shard: a byte that says what a row is, then big-endian numbers.

    1, external id               internal id
    2, internal id u64           the vector
    3, internal id u64           external id and attributes
    4                            next internal id, number of vectors
    5                            deleted internal ids that may stand in posting lists
    6, generation u32, list u32  a centroid
    7, generation u32, list u32  the internal ids in a list
    8                            the generations of centroids: the one in use, and one that is being built

Thread: pure functions.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

DICTIONARY, VECTOR, RECORD, SEQUENCE, DELETED, CENTROID, POSTINGS, GENERATIONS = (bytes([n]) for n in range(1, 9))
FIRST_ID = 1  # 0 means none
LAST_ID = (1 << 64) - 1
U64: TypeAlias = npt.NDArray[np.uint64]
I32: TypeAlias = npt.NDArray[np.int32]
F32: TypeAlias = npt.NDArray[np.float32]
_ID = struct.Struct(">cQ")
ID_KEY_BYTES = _ID.size
_LIST = struct.Struct(">cII")
FEW_KEYS = 64  # from here on numpy makes them sooner, one by one they take up to 4 us less


def dictionary_keys(ids: Sequence[bytes]) -> list[bytes]:
    """Return the keys of external ids."""
    return [DICTIONARY + external for external in ids]


def id_key(kind: bytes, number: int) -> bytes:
    """Return the key of an internal id's vector or record."""
    return _ID.pack(kind, number)


def id_keys(kind: bytes, numbers: U64) -> list[bytes]:
    """Return the keys of some internal ids."""
    if len(numbers) < FEW_KEYS:
        return [_ID.pack(kind, number) for number in numbers.tolist()]
    matrix = np.empty((len(numbers), 9), np.uint8)
    matrix[:, 0] = kind[0]
    matrix[:, 1:] = numbers.astype(">u8").view(np.uint8).reshape(-1, 8)
    packed: Any = matrix.view("V9").reshape(-1)
    keys: list[bytes] = packed.tolist()
    return keys


def ids_of(keys: Any) -> U64:
    """Return the internal ids in an Arrow array of keys of vectors or records."""
    if not len(keys):
        return np.zeros(0, np.uint64)
    raw = np.frombuffer(keys.buffers()[2], np.uint8)
    start = int(np.frombuffer(keys.buffers()[1], np.int32)[keys.offset])
    matrix = raw[start : start + 9 * len(keys)].reshape(-1, 9)[:, 1:]
    return np.ascontiguousarray(matrix).view(">u8").reshape(-1).astype(np.uint64)


def id_range(kind: bytes, start: int = 0, end: int | None = None) -> tuple[bytes, bytes]:
    """Return the range of keys of internal ids in [start, end)."""
    return id_key(kind, start), bytes([kind[0] + 1]) if end is None else id_key(kind, end)


def list_key(kind: bytes, generation: int, number: int) -> bytes:
    """Return the key of a list's centroid or internal ids."""
    return _LIST.pack(kind, generation, number)


def list_range(kind: bytes, generation: int, end: int | None = None) -> tuple[bytes, bytes]:
    """Return the range of keys of all lists of a generation, or of the generations up to `end`."""
    return list_key(kind, generation, 0), list_key(kind, generation + 1 if end is None else end, 0)


def list_of(key: bytes) -> int:
    """Return the number of the list in a key."""
    number: int = _LIST.unpack(key)[2]
    return number


# -- keys of rows, for readers that share a scan: internal ids


def scan_bounds(start: bytes, end: bytes | None) -> tuple[int, int]:
    """Return the internal ids of a key range: its ends are eight bytes, or fewer, which sort before."""
    low = _ceiling(start)
    return low, max(low, _ceiling(end)) if end is not None else 1 << 64


def _ceiling(key: bytes) -> int:
    """Return the first internal id whose eight bytes are not below a key."""
    number = int.from_bytes(key[:8].ljust(8, b"\0"), "big")
    return number + 1 if len(key) > 8 else number


def scan_key(number: int) -> bytes:
    """Return the scan key of an internal id."""
    return number.to_bytes(8, "big")
