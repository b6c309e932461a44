"""Headers of messages: a few names with bytes, beside the payload.

A batch holds them as an Arrow map column, null for a message without headers; a user gives and gets dicts. In a record
they follow the payloads, so that a reader of the earlier format still finds everything before them:

    offsets   i32, one more than messages: where the headers of each message begin and end
    names     a column of UTF-8
    values    a column of bytes

Thread: pure functions.
Invariant: a message has no name twice, and none of its headers is null.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from penstock.arguments import in_short
from penstock.errors import CorruptionError, Invalid
from penstock.lsm.rows import binary_column, is_binary, offsets_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

HEADERS = pa.map_(pa.string(), pa.binary())
COUNT_MAX = 64  # of one message
NAME_BYTES_MAX = 255
BYTES_MAX = 64 << 10  # names and values of one message
_ENTRIES = [pa.field("key", pa.string(), nullable=False), pa.field("value", pa.binary())]


class HeaderColumns(NamedTuple):
    """The headers of a batch: how many each message has, and all names and values in order."""

    lengths: NDArray[np.int64]
    names: Any  # Arrow binary: UTF-8
    values: Any  # Arrow binary

    def sizes(self) -> NDArray[np.int64]:
        """Return the bytes of each message's names and values."""
        ends = np.concatenate(([0], np.cumsum(self.lengths)))
        total = offsets_of(self.names).astype(np.int64) + offsets_of(self.values)
        return np.diff(total[ends] if len(self.names) else np.zeros(len(ends), np.int64))


def checked_headers(headers: Any) -> dict[str, bytes]:
    """Return the headers that a user gave, text as UTF-8; `Invalid` if they are not headers or too large."""
    if not isinstance(headers, Mapping):
        raise Invalid(f"headers are a dict of names and bytes or text, not {in_short(headers)}")
    checked: dict[str, bytes] = {}
    for name, value in headers.items():
        if not isinstance(name, str) or not isinstance(value, (bytes, str)):
            raise Invalid(f"a header is a name and bytes or text, not {in_short(name)} and {in_short(value)}")
        try:
            checked[str.__str__(name)] = value.encode() if isinstance(value, str) else bytes(value)
            size = len(name.encode())
        except UnicodeEncodeError:
            raise Invalid(f"the header {in_short(name)} is not valid Unicode") from None
        if not 0 < size <= NAME_BYTES_MAX:
            raise Invalid(f"the name of a header has 1 to {NAME_BYTES_MAX} bytes, not {size}")
    if len(checked) > COUNT_MAX:
        raise Invalid(f"a message has {len(checked)} headers: at most {COUNT_MAX} are allowed")
    if header_bytes(checked) > BYTES_MAX:
        raise Invalid(f"the headers of a message have {header_bytes(checked)} bytes: at most {BYTES_MAX} are allowed")
    return checked


def header_bytes(headers: Mapping[str, bytes]) -> int:
    """Return the size of checked headers."""
    return sum(len(name.encode()) + len(value) for name, value in headers.items())


def column_of(all_headers: Sequence[Mapping[str, bytes] | None]) -> Any:
    """Return checked headers of messages as a column; None if no message has any."""
    lengths = np.fromiter((len(headers or ()) for headers in all_headers), np.int64, len(all_headers))
    if not lengths.any():
        return None
    items = [item for headers in all_headers for item in (headers or {}).items()]
    return _column(lengths, binary_column([name.encode() for name, _ in items]), binary_column([v for _, v in items]))


def _column(lengths: NDArray[np.int64], names: Any, values: Any) -> Any:
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    has_headers = lengths > 0
    bitmap = None if has_headers.all() else pa.py_buffer(np.packbits(has_headers, bitorder="little"))
    entries = pa.StructArray.from_arrays([names.view(pa.string()), values], fields=_ENTRIES)
    return pa.Array.from_buffers(HEADERS, len(lengths), [bitmap, pa.py_buffer(offsets)], children=[entries])


def columns_of(column: Any) -> HeaderColumns:
    """Take apart a map column, or a slice of one; nulls become messages without headers."""
    offsets = column.offsets.to_numpy().astype(np.int64)
    lengths = np.diff(offsets)
    names, values = column.keys[offsets[0] : offsets[-1]], column.items[offsets[0] : offsets[-1]]
    if column.null_count:
        valid = column.is_valid().to_numpy(zero_copy_only=False)
        if lengths[~valid].any():  # Arrow allows entries under a null
            used = pa.array(np.repeat(valid, lengths))
            names, values, lengths = names.filter(used), values.filter(used), np.where(valid, lengths, 0)
    return HeaderColumns(lengths, names.view(pa.binary()), values)


def from_arrow(column: Any) -> Any:
    """Return a user's column of maps in our type; None if no message has headers. `Invalid` if it does not fit."""
    column = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(column, pa.ChunkedArray):  # of no chunks
        column = pa.array([], column.type)
    if pa.types.is_null(column.type):
        return None
    kind = column.type
    if (
        not pa.types.is_map(kind)
        or not _is_text(kind.key_type)
        or not (_is_text(kind.item_type) or is_binary(kind.item_type))
    ):
        raise Invalid(f"column headers is {kind}, and must be a map from text to binary or text")
    lengths, names, values = _plain(column)
    if not lengths.any():
        return None
    if names.null_count or values.null_count:
        raise Invalid("the name or value of a header is null: leave it out, or give empty bytes")
    try:
        names.cast(pa.string())  # Arrow trusts a producer's text, and one bad name would make its shard unreadable
    except pa.ArrowInvalid:
        raise Invalid("the name of a header is not valid UTF-8") from None
    return _column(lengths, names, values)


def _plain(column: Any) -> HeaderColumns:
    kind = column.type
    if kind == HEADERS:
        return columns_of(column)
    offsets = column.offsets.to_numpy().astype(np.int64)
    valid = column.is_valid().to_numpy(zero_copy_only=False)
    lengths = np.diff(offsets)
    used = pa.array(np.repeat(valid, lengths))
    entries = [part[offsets[0] : offsets[-1]].filter(used) for part in (column.keys, column.items)]
    names = entries[0].cast(pa.string()).cast(pa.binary())
    return HeaderColumns(np.where(valid, lengths, 0), names, entries[1].cast(pa.binary()))


def _is_text(kind: Any) -> bool:
    types = pa.types
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def check_column(column: Any) -> int:
    """Return the size of a column in bytes; `Invalid` if the headers of a message break a limit."""
    headers = columns_of(column)
    lengths, names, _ = headers
    if len(lengths) and lengths.max() > COUNT_MAX:
        raise Invalid(f"a message has {lengths.max()} headers: at most {COUNT_MAX} are allowed")
    name_bytes = np.diff(offsets_of(names))
    if len(name_bytes) and not 0 < name_bytes.min() <= name_bytes.max() <= NAME_BYTES_MAX:
        raise Invalid(f"the name of a header has 1 to {NAME_BYTES_MAX} bytes")
    sizes = headers.sizes()
    if len(sizes) and sizes.max() > BYTES_MAX:
        raise Invalid(f"the headers of a message have {sizes.max()} bytes: at most {BYTES_MAX} are allowed")
    codes = names.dictionary_encode().indices.to_numpy().astype(np.int64)
    messages = np.repeat(np.arange(len(lengths)), lengths)
    if len(np.unique(messages * (len(codes) + 1) + codes)) < len(codes):
        raise Invalid("a message has a header twice: give each name once")
    return int(sizes.sum())


def encoded_columns(column: Any) -> tuple[bytes, Any, Any]:
    """Return the offsets as bytes, and the columns of names and values, for a record."""
    lengths, names, values = columns_of(column)
    offsets = np.zeros(len(lengths) + 1, "<i4")
    np.cumsum(lengths, out=offsets[1:])
    return offsets.tobytes(), names, values


def decode_columns(count: int, take: Callable[[int], memoryview], take_column: Callable[[int], Any], path: str) -> Any:
    """Read the column of a record of `count` messages; `CorruptionError` if its offsets are not in order."""
    offsets = np.frombuffer(take(4 * (count + 1)), "<i4")
    lengths = np.diff(offsets).astype(np.int64)
    if offsets[0] != 0 or (lengths < 0).any():
        raise CorruptionError(path, 0, "the headers of a batch are out of order")
    entries = int(offsets[-1])
    return _column(lengths, take_column(entries), take_column(entries))


def dicts(column: Any) -> list[dict[str, bytes] | None]:
    """Return the headers of each message as a dict; None where it has none."""
    return [None if items is None else dict(items) for items in column.to_pylist()]
