"""Rows as columns: kinds, limits, and the form in which rows move between memtable, sstable and merge.

Thread: values, shared freely.
Invariant: the columns of one `Columns` have equal length, and its keys ascend strictly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pyarrow as pa

from penstock.errors import Invalid
from penstock.host.lazy_imports import load_pandas, pandas_is_loaded

if TYPE_CHECKING:
    import numpy.typing as npt

PUT = 0
DELETE = 1
RANGE_DELETE = 2  # key = start, value = end (exclusive)
MERGE = 3  # this and above: operands, by operator; see `operators`

NEVER = (1 << 63) - 1  # the expiry of a row that never expires: null in the file

KEY_BYTES_MAX = 1 << 16
VALUE_BYTES_MAX = 1 << 26

Row: TypeAlias = tuple[int, bytes, int, int]  # kind, value, lsn, expires_us
U8: TypeAlias = "npt.NDArray[np.uint8]"
U32: TypeAlias = "npt.NDArray[np.uint32]"
U64: TypeAlias = "npt.NDArray[np.uint64]"
I64: TypeAlias = "npt.NDArray[np.int64]"

SCHEMA = pa.schema(
    [
        pa.field("key", pa.binary(), nullable=False),
        pa.field("lsn", pa.uint64(), nullable=False),
        pa.field("kind", pa.uint8(), nullable=False),
        pa.field("expires_us", pa.int64(), nullable=True),
        pa.field("value", pa.binary(), nullable=False),
    ]
)


def binary_column(items: list[bytes]) -> Any:
    """Return an Arrow binary array of `items`: joined once, which is twice as fast as `pa.array`."""
    offsets = np.zeros(len(items) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, items), np.int64, len(items)), out=offsets[1:])
    if offsets[-1] >= 1 << 31:
        raise Invalid(f"{len(items)} items hold {offsets[-1]} bytes: give them in chunks below 2 GiB")
    data = b"".join(items)
    if len(data) != offsets[-1]:
        raise Invalid("a column takes bytes: one of these items holds wider ones")
    return binary_array(offsets.astype(np.int32), data)


def binary_array(offsets: npt.NDArray[np.int32], data: Any) -> Any:
    """Return an Arrow binary array over int32 offsets and bytes, without a copy."""
    return pa.Array.from_buffers(
        pa.binary(), len(offsets) - 1, [None, pa.py_buffer(offsets), pa.py_buffer(data)], null_count=0
    )


def fixed_array(kind: Any, items: npt.NDArray[Any]) -> Any:
    """Return an Arrow array of fixed-width items without nulls. (`pa.array` would import pandas.)"""
    buffer = pa.py_buffer(np.ascontiguousarray(items))
    return pa.Array.from_buffers(kind, len(items), [None, buffer], null_count=0)


def offsets_of(column: Any) -> npt.NDArray[np.int32]:
    """Return the offsets of an Arrow binary array (of its slice), without a copy."""
    if len(column) == 0:
        return np.zeros(1, np.int32)
    raw = np.frombuffer(column.buffers()[1], np.int32)
    return raw[column.offset : column.offset + len(column) + 1]


def is_binary(kind: Any) -> bool:
    """Whether an Arrow type holds bytes, in any layout."""
    types = pa.types
    return bool(types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind))


def bytes_list(column: Any) -> list[bytes]:
    """Return an Arrow binary array as a list."""
    if not pandas_is_loaded:
        load_pandas()
    items: list[bytes] = column.to_numpy(zero_copy_only=False).tolist()
    return items


@dataclass(frozen=True, slots=True)
class Columns:
    """A run of point rows (put, delete, merge) in key order."""

    keys: Any  # Arrow binary
    lsns: U64
    kinds: U8
    expires: I64  # NEVER for a row that does not expire
    values: Any  # Arrow binary
    key_list: list[bytes] | None = None  # the keys again, if the maker had them as a list
    hashes: U32 | None = None  # of the keys, if the maker had them
    plain: bool = False  # the maker knows that all are puts that never expire

    def __post_init__(self) -> None:
        if not len(self.keys) == len(self.lsns) == len(self.kinds) == len(self.expires) == len(self.values):
            raise Invalid("the columns of a run of rows must have one length")

    def __len__(self) -> int:
        return len(self.lsns)

    @classmethod
    def of(
        cls,
        keys: list[bytes],
        values: list[bytes],
        lsns: npt.ArrayLike,
        kinds: npt.ArrayLike | None = None,
        expires: npt.ArrayLike | None = None,
    ) -> Columns:
        """Make columns from lists, as a memtable has them; by default all are puts without expiry."""
        n = len(keys)
        return cls(
            keys=binary_column(keys),
            lsns=np.broadcast_to(np.asarray(lsns, np.uint64), (n,)),
            kinds=np.zeros(n, np.uint8) if kinds is None else np.asarray(kinds, np.uint8),
            expires=np.full(n, NEVER, np.int64) if expires is None else np.asarray(expires, np.int64),
            values=binary_column(values),
            key_list=keys,
        )

    def slice(self, start: int, end: int) -> Columns:
        """Return rows [start, end), without a copy."""
        return Columns(
            keys=self.keys[start:end],
            lsns=self.lsns[start:end],
            kinds=self.kinds[start:end],
            expires=self.expires[start:end],
            values=self.values[start:end],
            key_list=None if self.key_list is None else self.key_list[start:end],
            hashes=None if self.hashes is None else self.hashes[start:end],
            plain=self.plain,
        )

    def key(self, row: int) -> bytes:
        key: bytes = self.keys[row].as_py()
        return key

    def list_keys(self) -> list[bytes]:
        return bytes_list(self.keys) if self.key_list is None else self.key_list

    def record_batch(self, schema: Any = SCHEMA) -> Any:
        """Return the rows as an Arrow record batch of an sstable."""
        rows, data = len(self), np.ascontiguousarray(self.expires)
        # NEVER stays under each null, so that our own reader need not read the bitmap.
        if self.plain:
            bitmap, nulls = pa.py_buffer(bytes(-(-rows // 8))), rows
        else:
            bitmap, nulls = pa.py_buffer(np.packbits(self.expires != NEVER, bitorder="little")), -1
        expires = pa.Array.from_buffers(pa.int64(), rows, [bitmap, pa.py_buffer(data)], null_count=nulls)
        return pa.record_batch(
            [
                self.keys,
                fixed_array(pa.uint64(), self.lsns),
                fixed_array(pa.uint8(), self.kinds),
                expires,
                self.values,
            ],
            schema=schema,
        )
