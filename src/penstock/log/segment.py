"""One file of records.

A segment begins with a header record (checksummed without a salt, because it carries the salt) and gets its name by a
rename after that header is synced: a visible segment has a valid header. It ends sealed (a closing record with the
sparse index, the file truncated to its length) or cut (the next segment supersedes everything from its own first index
on).

Thread: `SegmentWriter` belongs to the log's writer. `SegmentReader` belongs to one cursor.
Invariants: (1) bytes of synced records never change. (2) space is reserved before record bytes are written, so that a
full disk is noticed while nothing has been written.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from penstock.errors import CorruptionError, DiskFull, UnsupportedVersion
from penstock.host.file_errors import is_disk_full
from penstock.host.file_operations import claim, rename_durably
from penstock.host.files import File, FileSystem
from penstock.log.chain import SegmentName
from penstock.log.record import (
    HEADER,
    KIND_DATA,
    KIND_SEAL,
    KIND_SEGMENT,
    LARGE_BYTES,
    Record,
    decode,
    encode,
    encode_one,
    encode_pieces,
    encoded_size,
)

VERSION = 1
MAGIC = b"PSTKLOG\0"
_HEADER_BODY = struct.Struct("<8sHHI16s")  # magic, version, flags, salt, identity
assert _HEADER_BODY.size == 32
_FLAG_CUT = 1  # the segment before this one has no closing record, or is cut short of it
HEADER_BYTES = encoded_size(_HEADER_BODY.size)

_SEAL_TAIL = struct.Struct("<QQ")  # last index, offset of the closing record itself
_ENTRY_BYTES = 16

READ_BYTES = 1 << 20
_CHECKSUM_BYTES_PER_BYTE = 64  # limit on checksummed bytes per byte that is searched for records
TEMPORARY = ".tmp"


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentHeader:
    """The header of a segment."""

    first: int
    incarnation: int
    salt: int
    identity: bytes  # of the store: tells its files from those of another
    cut: bool  # whether the previous segment may lack its closing record

    @property
    def name(self) -> SegmentName:
        return SegmentName(self.first, self.incarnation)

    def encode(self) -> bytes:
        flags = _FLAG_CUT if self.cut else 0
        body = _HEADER_BODY.pack(MAGIC, VERSION, flags, self.salt, self.identity)
        return encode(
            [body], salt=0, incarnation=self.incarnation, first=self.first, synced=self.first - 1, kind=KIND_SEGMENT
        )

    @classmethod
    def read(cls, file: File) -> SegmentHeader:
        record = decode(file.pread(HEADER_BYTES, 0), 0, salt=0, path=file.path)
        if record.kind != KIND_SEGMENT or len(record.body) != _HEADER_BODY.size:
            raise CorruptionError(file.path, 0, "the file does not begin with a segment's header")
        magic, version, flags, salt, identity = _HEADER_BODY.unpack(record.body)
        if magic != MAGIC:
            raise CorruptionError(file.path, 0, "the file is not a log segment")
        if version > VERSION:
            raise UnsupportedVersion(f"{file.path} has log version {version}, this Penstock reads up to {VERSION}")
        return cls(
            first=record.index,
            incarnation=record.incarnation,
            salt=salt,
            identity=identity,
            cut=bool(flags & _FLAG_CUT),
        )


@dataclass(slots=True)
class SparseIndex:
    """Offsets of some records, one per `every_bytes`."""

    every_bytes: int
    indexes: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    due: int = 0  # the offset from which on a record gets an entry

    def add(self, index: int, offset: int) -> None:
        """Add a record if it is far enough from the last entry."""
        if offset >= self.due:
            self.due = offset + self.every_bytes
            self.offsets.append(offset)  # first: a concurrent reader that sees the index also sees the offset
            self.indexes.append(index)

    def before(self, index: int) -> int:
        """Return the offset of the last entry at or before `index`, or of the first entry."""
        return self.offsets[max(0, bisect_right(self.indexes, index) - 1)] if self.offsets else HEADER_BYTES


class SegmentWriter:
    """The active segment."""

    def __init__(self, file: File, header: SegmentHeader, *, allocate_bytes: int, index_bytes: int) -> None:
        self.file = file
        self.header = header
        self.end = HEADER_BYTES
        self.index = SparseIndex(index_bytes)
        self._allocate_bytes = allocate_bytes
        self.claimed = HEADER_BYTES

    @classmethod
    def create(
        cls,
        fs: FileSystem,
        folder: str,
        header: SegmentHeader,
        tail: Sequence[Record],
        *,
        allocate_bytes: int,
        index_bytes: int,
    ) -> SegmentWriter:
        """Create a segment with the records of `tail`, durably.

        After `DiskFull` and `ProcessLimit` it does not exist; after any other error it may.
        """
        target = f"{folder}/{header.name}"
        source = target + TEMPORARY
        try:
            if fs.exists(source):  # left by an attempt that found the disk full
                fs.unlink(source)
            file = fs.create(source)
            file.pwrite(header.encode(), 0)
            segment = cls(file, header, allocate_bytes=allocate_bytes, index_bytes=index_bytes)
            for record in tail:
                segment.copy(record)
            file.fsync()  # before the name appears: a visible segment has a valid header
        except OSError as error:
            if is_disk_full(error):
                raise DiskFull(f"{folder} has no room for a new segment: free some space, then retry") from error
            raise
        rename_durably(fs, source, target)
        file.set_path(target)
        return segment

    def claim(self, size: int) -> None:
        """Reserve space for `size` more bytes; `DiskFull` if there is none, with nothing written."""
        if self.end + size > self.claimed:
            self.claimed = claim(self.file, self.claimed, self.end, size, self._allocate_bytes)

    def write(self, bodies: Sequence[bytes], *, first: int, synced: int, kind: int = KIND_DATA, flags: int = 0) -> None:
        """Append records, numbered from `first`. Requires: space for them is reserved."""
        at = self.end
        for piece in self._encode(bodies, first, synced, kind, flags):
            self.file.pwrite(piece, at)
            at += len(piece)
        self._grow(bodies, first)

    def write_synced(self, bodies: Sequence[bytes], *, first: int, synced: int) -> None:
        """Append records and make them durable, with one use of the file."""
        header, end = self.header, self.end
        if len(bodies) == 1 and len(bodies[0]) < LARGE_BYTES:
            piece = encode_one(bodies[0], header.salt, header.incarnation, first, synced)
            self.file.write_synced((piece,), end)
            if end >= self.index.due:
                self.index.add(first, end)
            self.end = end + len(piece)
            return
        pieces = encode_pieces(bodies, salt=header.salt, incarnation=header.incarnation, first=first, synced=synced)
        self.file.write_synced(pieces, end)
        self._grow(bodies, first)

    def _encode(self, bodies: Sequence[bytes], first: int, synced: int, kind: int, flags: int) -> list[bytes]:
        salt, incarnation = self.header.salt, self.header.incarnation
        return encode_pieces(
            bodies, salt=salt, incarnation=incarnation, first=first, synced=synced, kind=kind, flags=flags
        )

    def _grow(self, bodies: Sequence[bytes], first: int) -> None:
        end = self.end
        for index, body in enumerate(bodies, first):
            if end >= self.index.due:
                self.index.add(index, end)
            end += HEADER.size + len(body) + (-len(body) & 7)
        self.end = end

    def copy(self, record: Record) -> None:
        """Append a record of an older segment, with its incarnation: it stays the same record."""
        data = encode(
            [record.body],
            salt=self.header.salt,
            incarnation=record.incarnation,
            first=record.index,
            synced=self.header.first - 1,
            kind=record.kind,
            flags=record.flags,
        )
        self.file.pwrite(data, self.end)
        self.index.add(record.index, self.end)
        self.end += len(data)
        self.claimed = max(self.claimed, self.end)

    def seal(self, last: int) -> None:
        """Write the closing record. Requires: everything up to `last` is synced."""
        entries = np.array([self.index.indexes, self.index.offsets], dtype="<u8").T.tobytes()
        body = entries + _SEAL_TAIL.pack(last, self.end)
        with self.file.pin():
            self.claim(encoded_size(len(body)))
            self.write([body], first=last + 1, synced=last, kind=KIND_SEAL)
            self.file.truncate(self.end)
            self.file.fsync()


class SegmentReader:
    """A segment open for reading."""

    def __init__(self, file: File, header: SegmentHeader) -> None:
        self.file = file
        self.header = header

    @classmethod
    def open(cls, fs: FileSystem, folder: str, name: SegmentName, identity: bytes) -> SegmentReader:
        file = fs.open(f"{folder}/{name}")
        try:
            header = SegmentHeader.read(file)
            if header.name != name:
                raise CorruptionError(file.path, 0, f"the header says {header.name}")
            if header.identity != identity:
                raise CorruptionError(file.path, 0, "the file belongs to another store")
            return cls(file, header)
        except BaseException:
            file.close()
            raise

    def records(self, offset: int) -> Iterator[tuple[int, Record]]:
        """Iterate over offsets and records from `offset` on, the closing record included.

        It ends with a `CorruptionError` at the first bytes that are not a record: only the caller knows whether a
        record must be there.
        """
        buffer, base, at, size = b"", offset, 0, self.file.size()
        while True:
            if len(buffer) - at < HEADER.size:
                buffer, base, at = self.file.pread(READ_BYTES, base + at), base + at, 0
            if len(buffer) - at >= HEADER.size:
                length = encoded_size(HEADER.unpack_from(buffer, at)[1])
                # The length is not yet checked: never read more than the file holds.
                if len(buffer) - at < length <= size - (base + at):
                    buffer, base, at = self.file.pread(max(length, READ_BYTES), base + at), base + at, 0
            record = decode(buffer, at, salt=self.header.salt, path=self.file.path, base=base)
            yield base + at, record
            at += encoded_size(len(record.body))

    def sparse_index(self) -> SparseIndex | None:
        """Return the sparse index of the closing record; None without a valid closing record."""
        return _read_seal(self.file, self.header)

    def close(self) -> None:
        self.file.close()


def _read_seal(file: File, header: SegmentHeader) -> SparseIndex | None:
    size = file.size()
    if size < HEADER_BYTES + encoded_size(_SEAL_TAIL.size):
        return None
    last, offset = _SEAL_TAIL.unpack(file.pread(_SEAL_TAIL.size, size - _SEAL_TAIL.size))
    if not HEADER_BYTES <= offset <= size - encoded_size(_SEAL_TAIL.size):
        return None
    length, kind = HEADER.unpack(file.pread(HEADER.size, offset))[1:3]
    if kind != KIND_SEAL or encoded_size(length) != size - offset:  # before the body: it may be large
        return None
    try:
        record = decode(file.pread(size - offset, offset), 0, salt=header.salt)
    except CorruptionError:
        return None
    if record.kind != KIND_SEAL or record.index != last + 1 or (len(record.body) - _SEAL_TAIL.size) % _ENTRY_BYTES:
        return None
    entries = np.frombuffer(record.body[: -_SEAL_TAIL.size], dtype="<u8").reshape(-1, 2)
    return SparseIndex(0, entries[:, 0].tolist(), entries[:, 1].tolist())


@dataclass(frozen=True, slots=True)
class SegmentTail:
    """The end of the last segment, as found by a scan."""

    unsynced: list[Record]  # valid, in order, not known to be synced
    synced: int  # the last index that a valid record reports as synced
    end: int  # where the records end
    seal: Record | None
    torn: str | None  # why the bytes that follow are not a record; None if nothing was written there

    @property
    def last(self) -> int:
        return self.unsynced[-1].index if self.unsynced else self.synced


def scan_tail(reader: SegmentReader) -> SegmentTail:
    """Read the last segment to its end, and tell a torn tail from damage.

    Valid records up to the first bad one count. If a valid record after it reports the bad one as synced, the bad one
    was whole once: that is damage, not a torn tail.
    """
    header, path = reader.header, reader.file.path
    expected, end, synced = header.first, HEADER_BYTES, header.first - 1
    unsynced: deque[Record] = deque()
    seal, torn = None, None
    try:
        for offset, record in reader.records(HEADER_BYTES):
            if record.index != expected:
                raise CorruptionError(path, offset, f"found record {record.index}, expected {expected}")
            synced = max(synced, record.synced)
            if record.kind == KIND_SEAL:
                seal = record
                break
            unsynced.append(record)
            while unsynced and unsynced[0].index <= synced:
                unsynced.popleft()
            expected, end = expected + 1, offset + encoded_size(len(record.body))
    except CorruptionError as error:
        rest = reader.file.pread(reader.file.size() - end, end)
        if _highest_synced(rest, header, expected, path, end) >= expected:
            message = f"a later record says that record {expected} was synced, but {error.reason}"
            raise CorruptionError(path, end, message) from None
        if np.frombuffer(rest, dtype=np.uint8).any():
            torn = error.reason
    tail = [record for record in unsynced if record.index > synced]
    return SegmentTail(unsynced=tail, synced=synced, end=end, seal=seal, torn=torn)


def reseal(fs: FileSystem, reader: SegmentReader, tail: SegmentTail) -> None:
    """Write a closing record again and sync it: its fsync may have failed in the process that wrote it."""
    seal = tail.seal
    assert seal is not None
    data = encode(
        [seal.body],
        salt=reader.header.salt,
        incarnation=seal.incarnation,
        first=seal.index,
        synced=seal.synced,
        kind=KIND_SEAL,
    )
    file = fs.open(reader.file.path, write=True)
    try:
        file.pwrite(data, tail.end)
        file.truncate(tail.end + len(data))
        file.fsync()
    finally:
        file.close()


def _highest_synced(rest: bytes, header: SegmentHeader, expected: int, path: str, end: int) -> int:
    """Return the highest `synced` of the valid records in `rest`; 0 if there is none.

    Records begin at multiples of 8. Numpy finds the few positions whose fields could be a relevant record's header;
    only these are decoded. Bytes forged to look like headers could cost endless checksums, so those are limited.
    """
    words = np.frombuffer(rest[: len(rest) & ~7], dtype="<u8")
    if len(words) < HEADER.size // 8:
        return 0
    first, second, index, synced = words[:-3], words[1:-2], words[2:-1], words[3:]
    length, kind, reserved = (
        first >> np.uint64(32),
        second & np.uint64(0xFF),
        (second >> np.uint64(16)) & np.uint64(0xFFFF),
    )
    room = np.uint64(8) * (np.uint64(len(words)) - np.arange(len(first), dtype=np.uint64))
    candidates = (synced >= expected) & (synced <= index) & (index < expected + len(words))
    candidates &= (kind != 0) & (reserved == 0) & (length <= room) & (second >> np.uint64(32) <= header.incarnation)
    highest, budget = 0, _CHECKSUM_BYTES_PER_BYTE * len(rest)
    for position in np.flatnonzero(candidates).tolist():
        budget -= int(length[position])
        if budget < 0:
            raise CorruptionError(
                path, end, "the bytes after the last valid record look like too many records to check"
            )
        try:
            highest = max(highest, decode(rest, position * 8, salt=header.salt).synced)
        except CorruptionError:
            continue
    return highest
