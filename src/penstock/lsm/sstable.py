"""Reads an sstable: an Arrow IPC file of sorted rows, through its mapped buffers and the index beside it.

A file holds at most one point row of a key, the newest: a snapshot keeps whole files, so no file needs a second
version. A range delete is a row too (key = start, value = end); `get` and `scan` skip them, and `range_deletes` returns
them, because they delete rows of other files too.

Thread: shared by any number of threads; reads of a mapped file take no lock.
Invariants: (1) no byte of a page is used before the page's checksum matched (if google-crc32c is installed). (2) this
module and its imports need only pyarrow, numpy and the standard library.
"""

from __future__ import annotations

import struct
import threading
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from penstock.archive.chunk import Chunk, KeyRing, crc32c
from penstock.archive.container import open_chunk
from penstock.errors import Closed, CorruptionError
from penstock.host.files import FileSystem
from penstock.host.os_files import OsFileSystem
from penstock.lsm.index import ALL_PUTS, BATCH_SHIFT, PAGE_BYTES, Index, Summary, fingerprint_mask, hash64
from penstock.lsm.probe import ABSENT, PRESENT, UNSURE, ProbedKeys
from penstock.lsm.ranges import RangeDeletes
from penstock.lsm.rows import (
    I64,
    NEVER,
    PUT,
    RANGE_DELETE,
    SCHEMA,
    U8,
    U32,
    Columns,
    Row,
    binary_array,
    bytes_list,
)
from penstock.lsm.scan_part import ScanPart, rows_of_list
from penstock.lsm.writer import index_path

_PAGE_SHIFT = 16
_BATCH_MASK = (1 << BATCH_SHIFT) - 1
assert 1 << _PAGE_SHIFT == PAGE_BYTES

PART_ROWS_FIRST = 128
PART_ROWS_MAX = 1_024
_OPEN_BATCHES_MAX = 8  # for a chunk that is not mapped
_FENCE_ROWS = 32
_PROBED_MIN = 16  # keys: fewer are looked up one by one
_ITEMS_MAX = 256  # keys or values sliced one by one; numpy or Arrow slices more


class _Batch:
    """The buffers of one record batch. Keys and row columns are checked when it is opened, values page by page."""

    __slots__ = (
        "expires", "fences", "first", "key_base", "key_bytes", "key_offsets", "kinds", "lsns", "rows", "source",
        "special", "value_base", "value_bytes", "value_offsets",
    )  # fmt: skip

    def __init__(self, table: Sstable, entry: Any, first: int, lsn: int | None) -> None:
        start, rows = int(entry["start"]), int(entry["rows"])
        key_base = int(entry["keys"])
        value_base = int(entry["values"])
        region = table._checked(start, value_base)

        def part(name: str, size: int, code: Literal["i", "Q", "B", "q"]) -> memoryview:
            at = int(entry[name]) - start
            if at < 0 or at + size > len(region):
                raise CorruptionError(table.path, start, f"the {name} of a batch are not inside it")
            return region[at : at + size].cast(code)

        self.first = first
        self.rows = rows
        self.fences: list[bytes] = []  # every _FENCE_ROWS-th key, filled on first use: a search starts here
        self.key_offsets = part("key_offsets", 4 * (rows + 1), "i")
        self.value_offsets = part("value_offsets", 4 * (rows + 1), "i")
        self.lsns = part("lsns", 8 * rows, "Q")
        self.kinds = part("kinds", rows, "B")
        self.expires = part("expires", 8 * rows, "q")
        if lsn is not None:
            self.lsns = np.broadcast_to(np.uint64(lsn), rows).data
        # Slicing it gives keys and values as bytes: the mapping, or for keys a copy of the opened blocks.
        self.source: Any = table._source if table._source is not None else bytes(region)
        self.key_base = key_base if table._source is not None else key_base - start
        self.value_base = value_base
        self.special = int(entry["flags"]) != ALL_PUTS
        # The length of the keys (values) if all have the same, so that a get needs no offsets; else 0.
        if key_base < start:
            raise CorruptionError(table.path, start, "the keys of a batch are not inside it")
        keys_end = min(int(entry["lsns"]), value_base)
        self.key_bytes = _equal_length(table.path, self.key_offsets, key_base, keys_end)
        self.value_bytes = _equal_length(table.path, self.value_offsets, value_base, int(entry["end"]))

    def key(self, row: int) -> bytes:
        offsets, base = self.key_offsets, self.key_base
        key: bytes = self.source[base + offsets[row] : base + offsets[row + 1]]
        return key

    def cut_keys(self, start: int, end: int) -> list[bytes]:
        """Return the keys of rows [start, end)."""
        return _cut(self.source, self.key_base, start, end, offsets=self.key_offsets, size=self.key_bytes)

    def row_before(self, key: bytes) -> int:
        """Return a row at most _FENCE_ROWS before the first row with a key >= `key`."""
        fences = self.fences
        if not fences:
            fences = self.fences = [self.key(row) for row in range(0, self.rows, _FENCE_ROWS)]
        fence = bisect_left(fences, key)
        return (fence - 1) * _FENCE_ROWS if fence else 0


def _equal_length(path: str, offsets: memoryview, base: int, end: int) -> int:
    column = np.frombuffer(offsets, np.int32)
    lengths = np.diff(column)
    low = int(lengths.min(initial=0x7FFFFFFF))
    if column[0] != 0 or low < 0 or base + int(column[-1]) > max(end, base):
        raise CorruptionError(path, base, "the offsets of a batch leave it")
    return low if low == int(lengths.max(initial=0)) else 0


class Sstable:
    """An sstable, open for reading. `lsn`, if set, replaces the LSN of all its rows (an adopted file)."""

    def __init__(self, data: Chunk, index: Index, lsn: int | None = None) -> None:
        self._data = data
        self._index = index
        self._lsn = lsn
        self.path = data.path
        self.summary: Summary = index.summary
        if data.size != self.summary.file_bytes or len(index.page_sums) != -(-data.size // PAGE_BYTES):
            raise CorruptionError(self.path, data.size, "the index beside it belongs to another file")
        self._mapped = data.view is not None
        self._source: Any = data.view.obj if data.view is not None else None
        # One flag per page: 1 if reads of the mapping may use it without a check.
        self._intact_pages = bytearray(len(index.page_sums))
        if crc32c is None and self._mapped and not data.lazy:
            self._intact_pages = bytearray(b"\1" * len(index.page_sums))
        batches = index.batches
        self._batches: list[_Batch | None] = [None] * (1 + len(batches))  # indexed by batch number in a slot, from 1
        self._firsts: list[int] = [0, *np.cumsum(batches["rows"]).tolist()]
        self._all_intact = 0 not in self._intact_pages
        self._home_mask = index.homes - 1
        self._location_mask = (1 << index.location_bits) - 1
        self._fingerprint_mask = fingerprint_mask(index.location_bits)
        self._lock = threading.Lock()
        self._open: deque[int] = deque()  # guarded by _lock; for a chunk that is not mapped
        if self._firsts[-1] != self.summary.rows:
            raise CorruptionError(self.path, 0, "the index lists another number of rows")
        self.range_deletes = RangeDeletes.of(self._range_delete(row) for row in index.range_rows)

    @classmethod
    def open(
        cls,
        path: str,
        *,
        fs: FileSystem | None = None,
        keys: KeyRing | None = None,
        lsn: int | None = None,
        key: int | None = None,
        data_path: str | None = None,
        resident: bool = False,
    ) -> Sstable:
        """Open a file and its index. `data_path`: of a copy of the file, if it is not beside its index.

        `key`, of both, and `resident`, for files that are read again and again: see `open_chunk`.
        """
        fs = OsFileSystem() if fs is None else fs
        with ExitStack() as opened:  # what was opened before a failure
            index_chunk = open_chunk(fs, index_path(path), keys, key=key, resident=resident)
            opened.callback(index_chunk.close)
            data = open_chunk(fs, path if data_path is None else data_path, keys, key=key, resident=resident)
            opened.callback(data.close)
            table = cls(data, Index(index_chunk), lsn)
            opened.pop_all()
        return table

    def close(self) -> None:
        """Close the files. Requires: no reader is left; blocks that are not mapped become unreadable."""
        self._index.close()
        self._data.close()

    @property
    def mapped(self) -> bool:
        """Whether reads use a mapping of the file; otherwise blocks are opened into bounded memory."""
        return self._mapped

    # -- pages and batches

    def _checked(self, start: int, end: int) -> memoryview:
        """Return bytes [start, end) of the file after checking the checksums of their pages."""
        first, last = start >> _PAGE_SHIFT, -(-end >> _PAGE_SHIFT)
        if self._mapped:
            page = self._intact_pages.find(0, first, last)
            while page >= 0:
                at = page << _PAGE_SHIFT
                self._check_page(page, self._data.read(at, min(at + PAGE_BYTES, self._data.size)))
                self._intact_pages[page] = 1
                self._all_intact = 0 not in self._intact_pages
                page = self._intact_pages.find(0, page + 1, last)
            return self._data.read(start, end)
        base = first << _PAGE_SHIFT
        data = self._data.read(base, max(base, min(last << _PAGE_SHIFT, self._data.size)))
        for page in range(first, last):
            at = (page << _PAGE_SHIFT) - base
            self._check_page(page, data[at : at + PAGE_BYTES])
        return data[start - base : end - base]

    def _check_page(self, page: int, data: memoryview) -> None:
        if crc32c is not None and crc32c(bytes(data)) != self._index.page_sums[page]:
            raise CorruptionError(self.path, page << _PAGE_SHIFT, "this page does not match its checksum")

    def check_locations(self) -> None:
        """Raise `CorruptionError` if the index points to rows that do not exist: another process may have built it."""
        self._index.check_locations()

    def damaged_pages(self) -> list[CorruptionError]:
        """Read every page of the file and its index again; return an error for each that does not match."""
        damage: list[CorruptionError] = []
        for at in range(0, self._data.size, PAGE_BYTES):
            try:
                self._check_page(at >> _PAGE_SHIFT, self._data.read_again(at, min(at + PAGE_BYTES, self._data.size)))
            except CorruptionError as error:
                damage.append(error)
        for number in range(self._index.pages):
            try:
                self._index.recheck(number)
            except CorruptionError as error:
                damage.append(error)
        return damage

    def _open_batch(self, number: int) -> _Batch:
        batch = _Batch(self, self._index.batches[number], self._firsts[number], self._lsn)
        self._batches[number + 1] = batch
        if not self._mapped:
            with self._lock:
                self._open.append(number)
                while len(self._open) > _OPEN_BATCHES_MAX:
                    self._batches[self._open.popleft() + 1] = None
        return batch

    def _batch(self, number: int) -> _Batch:
        return self._batches[number + 1] or self._open_batch(number)

    def _key_region(self, batch: _Batch) -> memoryview:
        region = self._data.view if self._mapped else memoryview(batch.source)
        if region is None:
            raise Closed(f"{self.path} was closed: open it again")
        return region

    def _value(self, batch: _Batch, row: int) -> bytes:
        offsets, base = batch.value_offsets, batch.value_base
        return bytes(self._checked(base + offsets[row], base + offsets[row + 1]))

    def _range_delete(self, row: int) -> tuple[bytes, bytes, int]:
        batch = self._batch(bisect_right(self._firsts, row) - 1)
        row -= batch.first
        return batch.key(row), self._value(batch, row), batch.lsns[row]

    # -- points

    def get(self, key: bytes) -> Row | None:
        """Return the row of `key`: (kind, value, lsn, expires_us), or None."""
        row = self.find(key, True)
        assert not isinstance(row, bytes)
        return row

    def find(self, key: bytes, whole: bool = False) -> bytes | Row | None:
        """Return the value of `key` or None; its row if `whole` or if its batch holds more than plain puts."""
        if hash64 is None:
            return self._get_sorted(key)
        hashed = hash64(key)
        at = hashed & self._home_mask
        mask = self._fingerprint_mask
        want = hashed & mask
        index = self._index
        if not index.ready:
            index.check_from(at)
        slots = index.slot_view
        while slot := slots[at]:
            if slot & mask == want:
                number = (slot & self._location_mask) >> BATCH_SHIFT
                batch = self._batches[number]
                if batch is None:
                    batch = self._open_batch(number - 1)
                row = slot & _BATCH_MASK
                start = batch.key_base
                size = batch.key_bytes
                if size:
                    start += row * size
                    row_key = batch.source[start : start + size]
                else:
                    row_key = batch.source[start + batch.key_offsets[row] : start + batch.key_offsets[row + 1]]
                if row_key == key:
                    start = batch.value_base
                    size = batch.value_bytes
                    if size:
                        start += row * size
                        end = start + size
                    else:
                        end = start + batch.value_offsets[row + 1]
                        start += batch.value_offsets[row]
                    # The usual cases first: all pages are checked, or the value lies within one checked page.
                    value: bytes
                    if self._all_intact or (start >> 16 == end >> 16 and self._intact_pages[start >> 16]):
                        value = self._source[start:end]
                    else:
                        value = self._value(batch, row)
                    if batch.special:
                        return batch.kinds[row], value, batch.lsns[row], batch.expires[row]
                    return (PUT, value, batch.lsns[row], NEVER) if whole else value
            at += 1
        return None

    def probe(self, keys: ProbedKeys, numbers: I64) -> U8:
        """Return for each of some keys, by number, whether a row has it: ABSENT, PRESENT or UNSURE."""
        index, slot_view = self._index, self._index.slot_view
        if not self._mapped or not isinstance(slot_view, memoryview):
            return np.full(len(numbers), UNSURE, np.uint8)
        result = np.zeros(len(numbers), np.uint8)
        index.check_all()
        slots = np.frombuffer(slot_view, np.uint32, index.slots)
        mask = np.uint32(self._fingerprint_mask)
        hashes = keys.hashes[numbers]
        at = (hashes & np.uint32(self._home_mask)).astype(np.int64)
        hashes &= mask
        left, few = np.arange(len(numbers)), list[int]()
        while len(left) > _PROBED_MIN:  # each step looks at the next slot of all that are undecided
            here = slots[at[left]]
            used = here != 0
            match = ((here & mask) == hashes[left]) & used
            hits = left[match]
            if len(hits) > _PROBED_MIN:
                result[hits] = self._compare(keys, numbers[hits], here[match] & np.uint32(self._location_mask))
                used &= result[left] == ABSENT
            else:  # most of them other keys with the same fingerprint
                few += hits.tolist()
                used &= ~match
            left = left[used]
            at[left] += 1
        for number in (*left.tolist(), *few):
            row = self.find(keys.keys[numbers[number]])
            result[number] = ABSENT if row is None else PRESENT if isinstance(row, bytes) else UNSURE
        return result

    def _compare(self, keys: ProbedKeys, numbers: I64, locations: U32) -> U8:
        """Return for each of some keys whether the row at a location has it."""
        batches, rows = locations >> BATCH_SHIFT, (locations & np.uint32(_BATCH_MASK)).astype(np.int64)
        starts, sizes = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64)
        outcome = np.empty(len(rows), np.uint8)
        for number in np.unique(batches).tolist():
            batch = self._batch(number - 1)
            here = np.flatnonzero(batches == number)
            offsets, row = np.frombuffer(batch.key_offsets, np.int32), rows[here]
            starts[here] = batch.key_base + offsets[row]
            sizes[here] = offsets[row + 1] - offsets[row]
            outcome[here] = UNSURE if batch.special else PRESENT
        if (source := self._data.view) is None:
            raise Closed(f"{self.path} was closed: open it again")
        outcome[~keys.equal(numbers, source, starts, sizes)] = ABSENT
        return outcome

    def _get_sorted(self, key: bytes) -> Row | None:
        row = self.lower_bound(key)
        while row < self.summary.rows:
            batch = self._batch(bisect_right(self._firsts, row) - 1)
            at = row - batch.first
            if batch.key(at) != key:
                return None
            if batch.kinds[at] != RANGE_DELETE:
                return batch.kinds[at], self._value(batch, at), batch.lsns[at], batch.expires[at]
            row += 1
        return None

    # -- ranges

    def lower_bound(self, key: bytes) -> int:
        """Return the number of the first row with a key >= `key`."""
        number = bisect_left(self._index.first_keys, key) - 1
        if number < 0:
            return 0
        batch = self._batch(number)
        low = batch.row_before(key)
        high = min(low + _FENCE_ROWS, batch.rows)
        source, base, offsets = batch.source, batch.key_base, batch.key_offsets
        while low < high:
            middle = (low + high) >> 1
            if source[base + offsets[middle] : base + offsets[middle + 1]] < key:
                low = middle + 1
            else:
                high = middle
        return batch.first + low

    def rows_between(self, start: bytes = b"", end: bytes | None = None) -> tuple[int, int]:
        """Return the numbers [first, last) of the rows with keys in [start, end)."""
        first = self.lower_bound(start)
        return first, max(first, self.summary.rows if end is None else self.lower_bound(end))

    def pieces(self, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """Yield rows [first, last) as (batch, from, to) within each batch."""
        number = bisect_right(self._firsts, first) - 1
        while first < last:
            base, end = self._firsts[number], min(self._firsts[number + 1], last)
            yield number, first - base, end - base
            first, number = end, number + 1

    def landmarks(self) -> Iterator[tuple[bytes, int, int]]:
        """Yield the first key, rows and bytes of each batch, from the index: no page of the file is read."""
        batches = self._index.batches
        sizes = (batches["end"] - batches["start"]).tolist()
        return zip(self._index.first_keys, batches["rows"].tolist(), sizes, strict=True)

    def key_at(self, number: int, row: int) -> bytes:
        """Return the key of a row of a batch."""
        return self._batch(number).key(row)

    def row_bytes(self, number: int) -> I64:
        """Return the bytes of keys and values before each row of a batch, and before its end."""
        batch = self._batch(number)
        keys, values = np.frombuffer(batch.key_offsets, np.int32), np.frombuffer(batch.value_offsets, np.int32)
        return keys.astype(np.int64) + values

    def columns(self, number: int, start: int, end: int, *, hashes: bool = False) -> Columns:
        """Return rows [start, end) of a batch with range deletes; keys and values of a mapping are not copied."""
        batch = self._batch(number)
        key_offsets = np.frombuffer(batch.key_offsets, np.int32)[start : end + 1]
        value_offsets = np.frombuffer(batch.value_offsets, np.int32)[start : end + 1]
        low, high = int(key_offsets[0]), int(key_offsets[-1])
        keys = self._key_region(batch)[batch.key_base + low : batch.key_base + high]
        values = self._checked(batch.value_base + int(value_offsets[0]), batch.value_base + int(value_offsets[-1]))
        if start:  # those of a whole batch begin at 0, and are used in place
            key_offsets, value_offsets = key_offsets - low, value_offsets - value_offsets[0]
        return Columns(
            keys=binary_array(key_offsets, keys),
            lsns=np.asarray(batch.lsns)[start:end],
            kinds=np.frombuffer(batch.kinds, np.uint8)[start:end],
            expires=np.frombuffer(batch.expires, np.int64)[start:end],
            values=binary_array(value_offsets, values),
            hashes=self._index.hashes(batch.first + start, batch.first + end) if hashes else None,
            plain=not batch.special,
        )

    def scan(
        self, start: bytes = b"", end: bytes | None = None, *, reverse: bool = False, size: int = PART_ROWS_FIRST
    ) -> Iterator[ScanPart]:
        """Yield the point rows with keys in [start, end), in parts of growing size, which begins with `size` rows."""
        if self._mapped and self._data.view is None:
            raise Closed(f"{self.path} was closed: open it again")
        return self._scan_back(start, end, size) if reverse else self._scan(start, end, size)

    def _scan(self, start: bytes, end: bytes | None, size: int) -> Iterator[ScanPart]:
        """Slice keys out from the fence before `start` on, and search both ends among them."""
        first_keys = self._index.first_keys
        number = max(0, bisect_left(first_keys, start) - 1)
        batch = self._batch(number)
        low = batch.row_before(start)
        high = low + _FENCE_ROWS + size  # the first key to yield is before the next fence
        while True:
            high = min(high, batch.rows)
            keys = batch.cut_keys(low, high)
            begin, stop = bisect_left(keys, start), len(keys)
            if is_last := end is not None and keys[-1] >= end:
                stop = bisect_left(keys, end, begin)
            elif high == batch.rows:
                number += 1
                is_last = number == len(first_keys) or (end is not None and first_keys[number] >= end)
            if begin < stop and (part := self._part(batch, low + begin, low + stop, keys[begin:stop], is_last)).keys:
                yield part
            if is_last:
                return
            low = high
            if low == batch.rows:
                batch, low = self._batch(number), 0
            size = min(2 * size, PART_ROWS_MAX)
            high = low + size

    def _scan_back(self, start: bytes, end: bytes | None, size: int) -> Iterator[ScanPart]:
        first, last = self.rows_between(start, end)
        while first < last:
            number = bisect_right(self._firsts, last - 1) - 1
            base, batch = self._firsts[number], self._batch(number)
            low = max(first, base, last - size)
            part = self._part(batch, low - base, last - base, batch.cut_keys(low - base, last - base), low == first)
            if part.keys:
                rows_between = partial(_rows_back, part.rows_between, len(part.keys))
                yield ScanPart(part.keys[::-1], part.values[::-1], part.plain, rows_between, 0, part.is_last)
            last = low
            size = min(2 * size, PART_ROWS_MAX)

    def _part(self, batch: _Batch, start: int, end: int, keys: list[bytes], is_last: bool) -> ScanPart:
        """Return the point rows [start, end) of a batch; `keys` are their keys."""
        offsets, base = batch.value_offsets, batch.value_base
        if self._all_intact and self._source is not None:
            values = _cut(self._source, base, start, end, offsets=offsets, size=batch.value_bytes)
        else:
            source = bytes(self._checked(base + offsets[start], base + offsets[end]))
            values = _cut(source, -offsets[start], start, end, offsets=offsets, size=batch.value_bytes)
        if not batch.special:
            return ScanPart(keys, values, True, partial(_puts_between, batch.lsns, start, values), 0, is_last)
        kinds, lsns, expires = batch.kinds[start:end], batch.lsns[start:end], batch.expires[start:end]
        rows = [
            (key, row)
            for key, row in zip(keys, zip(kinds, values, lsns, expires, strict=True), strict=True)
            if row[0] != RANGE_DELETE
        ]
        whole = [row for _, row in rows]
        values, rows_between = [row[1] for row in whole], partial(rows_of_list, whole)
        return ScanPart([key for key, _ in rows], values, False, rows_between, 0, is_last)

    def scan_arrow(self, start: bytes = b"", end: bytes | None = None) -> Iterator[Any]:
        """Yield every row with its key in [start, end), as record batches over the mapping.

        The rows are as stored, range deletes included: the caller has to interpret the kinds.
        """
        for number, low, high in self.pieces(*self.rows_between(start, end)):
            yield self.columns(number, low, high).record_batch(SCHEMA)


def _puts_between(lsns: Sequence[int], first: int, values: list[bytes], start: int, end: int) -> list[Row]:
    puts = zip(values[start:end], lsns[first + start : first + end], strict=True)
    return [(PUT, value, lsn, NEVER) for value, lsn in puts]


def _rows_back(rows_between: Callable[[int, int], list[Row]], count: int, start: int, end: int) -> list[Row]:
    """Return rows of a reversed part."""
    return rows_between(count - end, count - start)[::-1]


@lru_cache(4_096)
def _items(size: int, count: int) -> struct.Struct:
    """Return a struct that slices `count` items of `size` bytes in one call."""
    return struct.Struct(f"{size}s" * count)


def _cut(source: Any, base: int, start: int, end: int, *, offsets: memoryview, size: int) -> list[bytes]:
    """Return the items [start, end) of a binary column, whose first begins at byte `base` of `source`.

    `source` is bytes or a mapping; `size` is the length of each item, or 0 if they differ.
    """
    count = end - start
    if size:
        at = base + start * size
        if count <= _ITEMS_MAX:
            return list(_items(size, count).unpack_from(source, at))
        return np.frombuffer(source, f"V{size}", count, at).tolist()  # type: ignore[no-any-return]
    some = offsets[start : end + 1]
    if count <= _ITEMS_MAX:
        return [source[base + low : base + high] for low, high in pairwise(some.tolist())]
    at, ends = base + some[0], np.frombuffer(some, np.int32) - some[0]
    return bytes_list(binary_array(ends, memoryview(source)[at : at + int(ends[-1])]))
