"""The file beside an sstable: where each key's row is, where each batch's buffers are, and every page's checksum.

A hash slot is 32 bits: the low bits are a location (batch and row), the high bits a fingerprint from the key's hash. At
most half of the slots are used; a key is at or after its home slot with no empty slot between. The hashes of all rows
follow, so that a merge need not hash a key again. docs/format/sstable.md gives the bytes.

Thread: `PageSums` belongs to its writer; an `Index` is shared.
Invariant: no byte of the index is used before its checksum matched (if google-crc32c is installed).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.archive.chunk import Chunk, ChunkIdentity, crc32c
from penstock.errors import CorruptionError, Invalid, UnsupportedVersion
from penstock.host.files import Buffer
from penstock.lsm.rows import U32

if TYPE_CHECKING:
    import numpy.typing as npt

hash64: Callable[[bytes], int] | None
try:  # A reader on another machine may lack it: it then searches the sorted keys.
    from xxhash import xxh3_64_intdigest as hash64
except ImportError:
    hash64 = None

PAGE_BYTES = 1 << 16
PAGE_SLOTS = PAGE_BYTES // 4
BATCH_SHIFT = 16  # a location is batch << BATCH_SHIFT | row; batches count from 1, so none is 0
BATCHES_MAX = (1 << 12) - 1  # which leaves a fingerprint of at least 4 bits
ROWS_MAX = 4_000_000

MAGIC = b"PENSIDX1"
VERSION = 1
# magic, version, location bits, reserved, batches, store, chunk id, sstable bytes, rows, homes, slots, lowest and
# highest LSN, deletes, merges, expiring rows, range deletes, sstable pages, body bytes; then a checksum of it all.
_HEADER = struct.Struct("<8sHBBI16sQQQIIQQQQQIII")
_SUM = struct.Struct("<I")
HEADER_BYTES = _HEADER.size + _SUM.size

# Places of a batch's buffers in the sstable, and what its rows are.
BATCH = np.dtype(
    [
        (name, "<i8")
        for name in (
            "rows", "start", "key_offsets", "keys", "lsns", "kinds", "expires", "value_offsets", "values", "end",
            "flags",
        )
    ]
)  # fmt: skip
ALL_PUTS = 1
SOME_EXPIRE = 2


def hash_keys(keys: Sequence[bytes]) -> U32:
    """Return the hash of each key. It blocks the interpreter: pass some thousands at a time."""
    if hash64 is None:
        raise Invalid("writing sstables needs the package xxhash: install it with pip install xxhash")
    return np.fromiter(map(hash64, keys), np.uint64, len(keys)).astype(np.uint32)


def build_slots(hashes: U32, locations: U32, location_bits: int) -> tuple[U32, int]:
    """Return slots for `hashes` at `locations`, and the number of homes. One pass over sorted hashes probes all."""
    homes = homes_for(len(hashes))
    # Home above, slot below: one sort of plain numbers puts all in order.
    packed = (hashes & np.uint32(homes - 1)).astype(np.uint64)
    packed <<= np.uint64(32)
    packed |= (hashes & np.uint32(fingerprint_mask(location_bits))) | locations
    packed.sort()
    at = (packed >> np.uint64(32)).view(np.int64)
    i = np.arange(len(hashes), dtype=np.int64)
    at -= i
    np.maximum.accumulate(at, out=at)
    at += i
    last = int(at[-1]) if len(at) else 0
    slots = np.zeros(max(homes, last + 1) + 1, np.uint32)  # the last slot stays empty: a probe ends there
    slots[at] = packed.astype(np.uint32)
    return slots, homes


def homes_for(rows: int) -> int:
    """Return the number of homes for `rows` rows: a power of two, so that a get finds its home by one `and`."""
    return 1 << max(0, 2 * rows - 1).bit_length()


def fingerprint_mask(location_bits: int) -> int:
    """Return the bits of a slot (and of a hash) that hold the fingerprint."""
    return 0xFFFFFFFF & ~((1 << location_bits) - 1)


class PageSums:
    """Computes the checksums of pages while content is written."""

    def __init__(self) -> None:
        self._sums: list[int] = []
        self._rest = b""

    def feed(self, data: Buffer) -> None:
        assert crc32c is not None
        view = memoryview(data)
        at = 0
        if self._rest:
            at = PAGE_BYTES - len(self._rest)
            self._rest += view[:at]
            if len(self._rest) < PAGE_BYTES:
                return
            self._sums.append(crc32c(self._rest))
        whole = at + (len(view) - at) // PAGE_BYTES * PAGE_BYTES
        self._sums.extend([crc32c(bytes(view[a : a + PAGE_BYTES])) for a in range(at, whole, PAGE_BYTES)])
        self._rest = bytes(view[whole:])

    def finish(self) -> U32:
        if self._rest:
            assert crc32c is not None
            self._sums.append(crc32c(self._rest))
        return np.array(self._sums, np.uint32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Counts and bounds of an sstable."""

    store: bytes
    chunk_id: int
    file_bytes: int  # of the sstable's content, without the index
    rows: int  # range deletes included
    start: bytes  # no key and no range delete is before this
    end: bytes  # nor at or after this
    lsn_min: int
    lsn_max: int
    deletes: int
    merges: int
    expiring: int
    range_deletes: int


def encode_index(
    summary: Summary,
    *,
    hashes: U32,
    range_rows: list[int],
    batches: npt.NDArray[np.void],
    first_keys: list[bytes],
    page_sums: U32,
) -> tuple[bytes, memoryview]:
    """Return the bytes of an index, in two parts; `hashes` are of all rows."""
    if crc32c is None:
        raise Invalid("writing sstables needs the package google-crc32c: install it with pip install google-crc32c")
    counts = enumerate(batches["rows"].tolist(), 1)
    locations = np.concatenate([(number << BATCH_SHIFT) + np.arange(rows, dtype=np.uint32) for number, rows in counts])
    location_bits = int(locations[-1]).bit_length()
    points = (np.delete(hashes, range_rows), np.delete(locations, range_rows)) if range_rows else (hashes, locations)
    slots, homes = build_slots(*points, location_bits)
    tail = np.concatenate([slots, hashes]).view(np.uint8).data
    tail_sums = [crc32c(bytes(tail[at : at + PAGE_BYTES])) for at in range(0, len(tail), PAGE_BYTES)]
    texts = [summary.start, summary.end, *first_keys]
    lengths = np.array([len(text) for text in texts], "<u4")
    body = b"".join(
        [
            batches.tobytes(),
            np.array(range_rows, "<u4").tobytes(),
            page_sums.astype("<u4").tobytes(),
            np.array(tail_sums, "<u4").tobytes(),
            lengths.tobytes(),
            *texts,
        ]
    )
    body += bytes(-(HEADER_BYTES + len(body)) % 8)
    header = _HEADER.pack(
        MAGIC, VERSION, location_bits, 0, len(batches), summary.store, summary.chunk_id, summary.file_bytes,
        summary.rows, homes, len(slots), summary.lsn_min, summary.lsn_max, summary.deletes, summary.merges,
        summary.expiring, len(range_rows), len(page_sums), len(body),
    )  # fmt: skip
    return header + _SUM.pack(crc32c(header + body)) + body, tail


class Index:
    """An index, open for reading."""

    def __init__(self, chunk: Chunk) -> None:
        self._chunk = chunk
        path = chunk.path
        if chunk.size < HEADER_BYTES:
            raise CorruptionError(path, chunk.size, "the index ends inside its header")
        raw = bytes(chunk.read(0, HEADER_BYTES))
        header = raw[: _HEADER.size]
        (magic, version, location_bits, _, batches, store, chunk_id, sstable_bytes, rows, homes, slots, lsn_min,
         lsn_max, deletes, merges, expiring, ranges, pages, body_bytes) = _HEADER.unpack(header)  # fmt: skip
        if magic != MAGIC:
            raise CorruptionError(path, 0, "this is not the index of an sstable")
        if version != VERSION:
            raise UnsupportedVersion(f"{path} has index version {version}: open it with a newer Penstock")
        self._slots_at = HEADER_BYTES + body_bytes
        tail_pages = -(-(slots + rows) // PAGE_SLOTS)
        least = batches * BATCH.itemsize + 4 * (ranges + pages + tail_pages + 2 + batches)
        if (
            chunk.size != self._slots_at + 4 * (slots + rows)
            or least > body_bytes
            or homes < 1
            or homes & (homes - 1)
            or slots <= homes
        ):
            raise CorruptionError(path, chunk.size, "the index's sections do not fill the file")
        body = bytes(chunk.read(HEADER_BYTES, self._slots_at))
        if crc32c is not None and crc32c(header + body) != _SUM.unpack(raw[_HEADER.size :])[0]:
            raise CorruptionError(path, 0, "the index's head does not match its checksum")
        self.identity = ChunkIdentity(store=store, chunk_id=chunk_id)
        self.location_bits: int = location_bits
        self.homes: int = homes
        self.slots: int = slots
        self.batches: npt.NDArray[np.void] = np.frombuffer(body, BATCH, batches)
        at = self.batches.nbytes
        self.range_rows: list[int] = np.frombuffer(body, "<u4", ranges, at).tolist()
        at += 4 * ranges
        self.page_sums: list[int] = np.frombuffer(body, "<u4", pages, at).tolist()
        at += 4 * pages
        self._tail_sums: list[int] = np.frombuffer(body, "<u4", tail_pages, at).tolist()
        at += 4 * tail_pages
        lengths = np.frombuffer(body, "<u4", 2 + batches, at)
        ends = at + lengths.nbytes + np.cumsum(lengths, dtype=np.int64)
        self._check_head(path, rows, int(ends[-1]), len(body))
        texts = [body[end - size : end] for end, size in zip(ends.tolist(), lengths.tolist(), strict=True)]
        self.first_keys: list[bytes] = texts[2:]
        self.summary = Summary(
            store=store, chunk_id=chunk_id, file_bytes=sstable_bytes, rows=rows, start=texts[0], end=texts[1],
            lsn_min=lsn_min, lsn_max=lsn_max, deletes=deletes, merges=merges, expiring=expiring, range_deletes=ranges,
        )  # fmt: skip
        self.pages = tail_pages
        self._intact_pages = bytearray(tail_pages)  # one flag per page of a mapping: its checksum matched
        self._slot_pages = -(-slots // PAGE_SLOTS)
        # The slots; those of a mapping are used as they are once `ready`, or after `check_from`.
        self.slot_view: memoryview | _OpenedSlots = _OpenedSlots(self)
        self.ready = True
        if chunk.view is not None:
            self.slot_view = chunk.view[self._slots_at :].cast("I")
            self.ready = crc32c is None and not chunk.lazy

    def _check_head(self, path: str, rows: int, texts_end: int, body_bytes: int) -> None:
        """Check that the numbers are consistent, which a checksum does not show: another process may have built it."""
        counts = self.batches["rows"]
        last_location = (len(counts) << BATCH_SHIFT) + int(counts[-1]) - 1 if len(counts) else 0
        if (
            texts_end > body_bytes
            or ((counts < 1) | (counts > 1 << BATCH_SHIFT)).any()
            or self.location_bits != last_location.bit_length()
            or max(self.range_rows, default=-1) >= rows
        ):
            raise CorruptionError(path, HEADER_BYTES, "the numbers of the index do not fit each other")

    def check_locations(self) -> None:
        """Raise `CorruptionError` if a slot leads to no row: checked once, for an index that another process built."""
        rows = np.concatenate([[0], self.batches["rows"]])
        for number in range(self._slot_pages):
            slots = np.frombuffer(self.page(number), np.uint32)[: self.slots - number * PAGE_SLOTS]
            locations = slots[slots != 0] & ~np.uint32(fingerprint_mask(self.location_bits))
            batches = np.minimum(locations >> BATCH_SHIFT, len(rows) - 1)
            inside = (batches > 0) & (batches == locations >> BATCH_SHIFT)
            if not (inside & ((locations & ((1 << BATCH_SHIFT) - 1)) < rows[batches])).all():
                raise CorruptionError(self._chunk.path, self._slots_at, "a slot leads to no row")
        if self.slot_view[self.slots - 1]:
            raise CorruptionError(self._chunk.path, self._slots_at, "the last slot is not empty")

    def page(self, number: int) -> memoryview:
        """Return a page of slots (after them, of hashes), checked."""
        start, end = self._page_span(number)
        data = self._chunk.read(start, end)
        if not self._intact_pages[number]:
            self._check_page(number, data)
            self._intact_pages[number] = self._chunk.view is not None  # a page opened from blocks is checked every time
        return data.cast("I")

    def _page_span(self, number: int) -> tuple[int, int]:
        start = self._slots_at + number * PAGE_BYTES
        return start, min(start + PAGE_BYTES, self._chunk.size)

    def _check_page(self, number: int, data: memoryview) -> None:
        if crc32c is not None and crc32c(bytes(data)) != self._tail_sums[number]:
            at = self._page_span(number)[0]
            raise CorruptionError(self._chunk.path, at, "this page of slots does not match its checksum")

    def recheck(self, number: int) -> None:
        """Read a page from the file again and compare it with its checksum, even if it matched before."""
        self._intact_pages[number] = 0
        self._check_page(number, self._chunk.read_again(*self._page_span(number)))

    def check_from(self, at: int) -> None:
        """Check the pages that a probe from this slot reads."""
        while True:
            if not self._intact_pages[at // PAGE_SLOTS]:
                self.page(at // PAGE_SLOTS)
                self._check_rest()
            if not self.slot_view[at]:
                return
            at += 1

    def check_all(self) -> None:
        """Check every page of slots, once."""
        if not self.ready:
            for number in range(self._slot_pages):
                if not self._intact_pages[number]:
                    self.page(number)
            self.ready = 0 not in self._intact_pages[: self._slot_pages]

    def _check_rest(self) -> None:
        """Be ready when all pages with homes are checked. Probes seldom reach the slots behind: check those now."""
        homes = self.homes // PAGE_SLOTS
        if 0 not in self._intact_pages[:homes]:
            for number in range(homes, self._slot_pages):
                self.page(number)
            self.ready = 0 not in self._intact_pages[: self._slot_pages]

    def hashes(self, first: int, last: int) -> U32:
        """Return the hashes of the keys of rows [first, last)."""
        first, last = self.slots + first, self.slots + last
        numbers = range(first // PAGE_SLOTS, -(-last // PAGE_SLOTS))
        base = numbers.start * PAGE_SLOTS
        return np.concatenate([np.frombuffer(self.page(n), np.uint32) for n in numbers])[first - base : last - base]

    def close(self) -> None:
        self.slot_view = _OpenedSlots(self)  # releases the mapping
        self._chunk.close()


class _OpenedSlots:
    """The slots of an index that is not mapped: each access opens and checks its page."""

    def __init__(self, index: Index) -> None:
        self._index = index

    def __getitem__(self, at: int) -> int:
        slot: int = self._index.page(at // PAGE_SLOTS)[at % PAGE_SLOTS]
        return slot
