"""The keys and values of one slice of a merge, joined into single buffers, and the sorted order of the keys.

Keys are sorted by the 8 bytes after their common prefix; only ties are compared further.

Thread: pure functions; numpy releases the interpreter lock while it sorts.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pyarrow as pa

from penstock.errors import Invalid
from penstock.lsm.rows import I64, U64, binary_array, binary_column, fixed_array, offsets_of

if TYPE_CHECKING:
    import numpy.typing as npt

Flags: TypeAlias = "npt.NDArray[np.bool_]"

_WORD = 8
_LONGEST = (1 << 31) - 1
_JOIN_BYTES_MAX = 1 << 28


class Keys:
    """Keys in one buffer, which has 8 spare bytes at its end so that every word can be read whole."""

    def __init__(self, data: bytearray, starts: I64, lengths: I64) -> None:
        self.data = data
        self.starts = starts
        self.lengths = lengths
        low, high = int(lengths.min(initial=_LONGEST)), int(lengths.max(initial=0))
        self._width = low if low == high else 0  # of every key, if all have the same; else 0
        self._array: Any = None  # as an Arrow array, made on first use
        # A big-endian word at every byte position; numpy reads unaligned ones.
        self._words: Any = np.ndarray((len(data) - _WORD + 1,), dtype=">u8", buffer=data, strides=(1,))

    @classmethod
    def of(cls, columns: list[Any]) -> Keys:
        """Concatenate the keys of Arrow binary arrays."""
        parts: list[Any] = []
        lengths: list[npt.NDArray[np.int32]] = []
        for column in columns:
            offsets = offsets_of(column)
            lengths.append(np.diff(offsets))
            data = column.buffers()[2]
            parts.append(memoryview(data)[offsets[0] : offsets[-1]] if data is not None else b"")
        each = np.concatenate(lengths).astype(np.int64)
        ends = np.cumsum(each)
        return cls(bytearray(b"").join([*parts, bytes(_WORD)]), ends - each, each)

    def __len__(self) -> int:
        return len(self.starts)

    def key(self, row: int) -> bytes:
        start = int(self.starts[row])
        return bytes(self.data[start : start + int(self.lengths[row])])

    def shared_prefix(self) -> int:
        """Return the length of the keys' common prefix. Requires: there is a key."""
        shortest, depth = int(self.lengths.min()), 0
        while depth < shortest:
            words, _ = self.words(slice(None), depth)
            differing = int(words.min()) ^ int(words.max())
            if differing:
                return min(shortest, depth + _WORD - (differing.bit_length() + 7) // 8)
            depth += _WORD
        return shortest

    def take(self, rows: I64) -> Any:
        """Return some of the keys as an Arrow binary array."""
        if self._width:
            offsets = np.arange(len(rows) + 1, dtype=np.int32) * np.int32(self._width)
            return binary_array(offsets, np.frombuffer(self.data, f"V{self._width}", len(self)).take(rows))
        if self._array is None:
            offsets = np.append(self.starts, len(self.data) - _WORD).astype(np.int32)
            self._array = binary_array(offsets, self.data)
        return self._array.take(fixed_array(pa.int64(), rows))

    def words(self, rows: I64 | slice, depth: int) -> tuple[U64, I64]:
        """Return, per row, 8 bytes at `depth` as a big-endian number (zeros past its end), and how many exist."""
        left = np.clip(self.lengths[rows] - depth, 0, _WORD)
        if isinstance(rows, slice) and self._width >= depth + _WORD:
            even: Any = np.ndarray((len(self),), ">u8", self.data, depth, (self._width,))
            return even[rows].astype(np.uint64), left
        at = self.starts[rows] + depth
        if depth:
            at = np.minimum(at, len(self._words) - 1)  # a key that ended before `depth`: masked below
        words = self._words[at].astype(np.uint64)
        if len(left) and left.min() < _WORD:
            spare = ((_WORD - left) * 8).astype(np.uint64)
            words = np.where(left == 0, np.uint64(0), words >> np.minimum(spare, 63) << np.minimum(spare, 63))
        return words, left


class Strings:
    """Joins byte strings, some thousands at a time: one call for all would block the interpreter."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._lengths: list[I64] = [np.zeros(0, np.int64)]

    def add(self, items: list[bytes]) -> None:
        self._data += b"".join(items)
        self._lengths.append(np.fromiter(map(len, items), np.int64, len(items)))

    def joined(self) -> Keys:
        """Return all strings; values have the same layout as keys."""
        if len(self._data) >= 1 << 31:
            raise Invalid(f"rows hold {len(self._data)} bytes: an array takes less than 2 GiB")
        lengths = np.concatenate(self._lengths)
        self._data += bytes(_WORD)
        return Keys(self._data, np.cumsum(lengths) - lengths, lengths)


class Values:
    """Values of rows numbered through several Arrow arrays; more can be added at the end."""

    def __init__(self, parts: list[Any]) -> None:
        self._parts = list(parts)
        self._firsts = [0, *np.cumsum([len(part) for part in parts]).tolist()]
        self._bytes = sum(int(offsets[-1] - offsets[0]) for offsets in map(offsets_of, parts))
        self._joined: Any = None

    def add(self, values: list[bytes]) -> I64:
        """Number new values, and return their numbers."""
        first = self._firsts[-1]
        self._parts.append(binary_column(values))
        self._firsts.append(first + len(values))
        self._bytes += sum(map(len, values))
        self._joined = None
        return np.arange(first, first + len(values), dtype=np.int64)

    def value(self, row: int) -> bytes:
        number = bisect_right(self._firsts, row) - 1
        value: bytes = self._parts[number][row - self._firsts[number]].as_py()
        return value

    def lengths(self, rows: I64) -> I64:
        each = np.concatenate([np.diff(offsets_of(part)) for part in self._parts])
        return each[rows].astype(np.int64)

    def numbers(self, rows: I64) -> I64:
        """Return the values of `rows`, each of 8 bytes, as little-endian int64."""
        column = self.take(rows)
        start = int(offsets_of(column)[0])
        return np.frombuffer(column.buffers()[2], "<i8", len(rows), start).astype(np.int64)

    def take(self, rows: I64) -> Any:
        """Return some of the values as an Arrow binary array."""
        if self._bytes <= _JOIN_BYTES_MAX:
            if self._joined is None:
                self._joined = pa.concat_arrays(self._parts)
            return self._joined.take(fixed_array(pa.int64(), rows))
        # Many large values of one key: copy only the requested ones, which have different keys.
        number = np.searchsorted(np.array(self._firsts), rows, "right") - 1
        by_part = np.argsort(number, kind="stable")
        taken = [
            part.take(fixed_array(pa.int64(), rows[number == i] - self._firsts[i]))
            for i, part in enumerate(self._parts)
        ]
        back = np.empty(len(rows), np.int64)
        back[by_part] = np.arange(len(rows))
        return pa.concat_arrays(taken).take(fixed_array(pa.int64(), back))


def shared_prefix(first: bytes, last: bytes) -> int:
    """Return the length of the common prefix of all keys between two keys (both included)."""
    for i, (one, other) in enumerate(zip(first, last, strict=False)):
        if one != other:
            return i
    return min(len(first), len(last))


def _order_by_high_bits(words: U64) -> I64 | None:
    """Return the order of words if their high bits all differ: one sort of numbers, each with its index."""
    bits = np.uint64(len(words).bit_length())
    packed = words >> bits << bits
    packed |= np.arange(len(words), dtype=np.uint64)
    packed.sort()
    high = packed >> bits
    if (high[1:] == high[:-1]).any():
        return None
    packed &= (np.uint64(1) << bits) - np.uint64(1)
    return packed.view(np.int64)


def sort(keys: Keys, prefix: int, *, distinct: bool = False) -> tuple[I64, Flags]:
    """Return the stable order of `keys`, which share `prefix` bytes, and flags where a key equals the one before.

    `distinct`: no two keys are equal, so it is worth trying to sort by the high bits alone.
    """
    same = np.zeros(len(keys), np.bool_)
    words, left = keys.words(slice(None), prefix)
    if distinct and (by_high_bits := _order_by_high_bits(words)) is not None:
        return by_high_bits, same
    order = np.argsort(words, kind="stable")
    words = words[order]
    tied = words[1:] == words[:-1]
    if not tied.any():
        return order, same
    if _equal(keys, order[:-1][tied], order[1:][tied], prefix + _WORD):  # all ties are versions of one key
        same[1:] = tied
        return order, same
    active, group = _members(tied)  # positions that may still move, and the group of each
    words, left = words[active], left[order[active]]
    depth = prefix
    while True:
        tied = (group[1:] == group[:-1]) & (words[1:] == words[:-1])
        if not _ascending(group, words, left, tied):
            deeper = np.lexsort((left, words, group))
            order[active] = order[active][deeper]
            words, left = words[deeper], left[deeper]
            tied = (group[1:] == group[:-1]) & (words[1:] == words[:-1])
        tied &= left[1:] == left[:-1]
        ended = tied & (left[1:] < _WORD)
        same[active[1:][ended]] = True
        tied &= ~ended
        if not tied.any():
            return order, same
        members, group = _members(tied)
        active = active[members]
        depth += _WORD
        words, left = keys.words(order[active], depth)


def _equal(keys: Keys, rows: I64, others: I64, depth: int) -> bool:
    """Whether each of `rows` has the same key as its counterpart in `others`, given that they agree up to `depth`."""
    lengths = keys.lengths[rows]
    if not np.array_equal(lengths, keys.lengths[others]):
        return False
    return all(
        np.array_equal(keys.words(rows, at)[0], keys.words(others, at)[0])
        for at in range(depth, int(lengths.max()), _WORD)
    )


def _members(tied: Flags) -> tuple[I64, I64]:
    """Return the positions that tie with a neighbour, and the group number of each."""
    heads = np.concatenate([[True], ~tied])
    members = np.flatnonzero(np.concatenate([tied, [False]]) | ~heads)
    return members, np.cumsum(heads)[members]


def _ascending(group: I64, words: U64, left: I64, tied: Flags) -> bool:
    """Whether rows of a group are already in order: the usual case for keys that are equal or share a long prefix."""
    falls = (group[1:] == group[:-1]) & (words[1:] < words[:-1])
    return not (falls.any() or (tied & (left[1:] < left[:-1])).any())
