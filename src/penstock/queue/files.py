"""A data file of a queue: an opening record, batches of messages, trims, index records.

The *opening record* holds the last LSN, sequence and time before the file, a salt and the store's identity. It is
synced before any manifest names the file. An *index record* summarizes the file so far: the offsets of some records,
the last LSN and time. One is written before a manifest names that position, so a manifest's write position is always
right after the opening record or an index record, and nothing before it need be read again. A *trim record* is in the
files of a queue with a change feed alone: which messages a trim deleted.

Thread: `DataWriter` belongs to the queue's writer; a `DataReader` may be shared, it only reads.
Invariants: (1) bytes of synced records never change. (2) sequences and LSNs are stored, never counted. (3) space is
allocated before record bytes are written, so a full disk is noticed before anything is written.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

import numpy as np
import xxhash

from penstock.errors import CorruptionError, DiskFull, UnsupportedVersion
from penstock.host.file_errors import is_disk_full
from penstock.host.file_operations import claim
from penstock.host.files import File, FileSystem
from penstock.log.record import HEADER, KIND_DATA, KIND_SEGMENT, Record, decode, encode, encoded_size
from penstock.queue.coding import PREFIX
from penstock.queue.qmft import DATA_SUFFIX

VERSION, VERSION_OF_SHARD = 1, 2  # 1: a file carries the store's identity; 2: its shard's
MAGIC = b"PSTKQUE\0"
KIND_MESSAGES = KIND_DATA
KIND_INDEX = KIND_DATA + 1
KIND_TRIM = KIND_DATA + 2
_OPENING = struct.Struct("<8sHHI16sQqq")  # magic, version, flags, salt, identity, last LSN, last time, time
assert _OPENING.size == 56
OPENING_BYTES = encoded_size(_OPENING.size)
_FLOORS = struct.Struct("<QQ")  # of a trim: the sequence of the first message before and after it
_INDEX_TAIL = struct.Struct("<QqQQ")  # last LSN, last time, messages in the file, offset of the index record itself
_ENTRY = np.dtype("<u8")
_ENTRY_WORDS = 3  # sequence, offset, time

READ_BYTES = 1 << 20
PROBE_BYTES = 4 << 10  # to read a single record
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, kw_only=True, slots=True)
class Opening:
    """The opening record: describes the data file, and the queue's state before it."""

    file_sequence: int
    first: int  # sequence of its first message
    last_lsn: int  # of the last record before this file
    last_time_us: int  # the time of that record
    time_us: int  # record time at which the file was created
    salt: int
    identity: bytes  # of the store or the shard, so that a file of another is not accepted
    version: int = VERSION

    @property
    def path(self) -> str:
        """The file's path in the queue's folder, by the day of its record time in UTC."""
        day = _EPOCH + timedelta(microseconds=self.time_us)
        return f"{day:%Y/%m/%d}/{self.file_sequence:010d}{DATA_SUFFIX}"

    @property
    def position(self) -> FilePosition:
        return FilePosition(OPENING_BYTES, self.first, self.last_lsn, self.last_time_us)

    def encode(self) -> bytes:
        body = _OPENING.pack(
            MAGIC, self.version, 0, self.salt, self.identity, self.last_lsn, self.last_time_us, self.time_us
        )
        first, incarnation = self.first, self.file_sequence
        # Without a salt, because this record holds the salt.
        return encode([body], salt=0, incarnation=incarnation, first=first, synced=first - 1, kind=KIND_SEGMENT)

    @classmethod
    def read(cls, file: File) -> Opening:
        record = decode(file.pread(OPENING_BYTES, 0), 0, salt=0, path=file.path)
        if record.kind != KIND_SEGMENT or len(record.body) != _OPENING.size:
            raise CorruptionError(file.path, 0, "the file does not begin as a queue's data file")
        magic, version, _, salt, identity, lsn, last_time, time = _OPENING.unpack(record.body)
        if magic != MAGIC:
            raise CorruptionError(file.path, 0, "the file is not a data file of a queue")
        if version > VERSION_OF_SHARD:
            reads = f"this Penstock reads up to {VERSION_OF_SHARD}"
            raise UnsupportedVersion(f"{file.path} has queue version {version}, {reads}")
        return cls(
            file_sequence=record.incarnation,
            first=record.index,
            last_lsn=lsn,
            last_time_us=last_time,
            time_us=time,
            salt=salt,
            identity=identity,
            version=version,
        )


def encode_trim(floor: int, before: int, *, lsn: int, time_us: int) -> bytes:
    """Encode the body of the record of a trim, which moves the first message from `floor` to `before`."""
    return PREFIX.pack(lsn, time_us, 0, 0, 0) + _FLOORS.pack(floor, before)


def decode_trim(record: Record) -> tuple[int, int]:
    """Return the sequence of the first message before and after a trim."""
    return _FLOORS.unpack_from(record.body, PREFIX.size)


def shard_identity(store: bytes, folder: str) -> bytes:
    """Return the identity of a shard's files: files of all shards have the same names, and must not be confused.

    Only the last two names of the folder are used, the table's and the shard's, because a store may be moved.
    """
    digest: bytes = xxhash.xxh3_128_digest(store + "/".join(folder.split("/")[-2:]).encode())
    return digest


@dataclass(frozen=True, slots=True)
class FilePosition:
    """A position between two records of a data file, and the queue's state there."""

    offset: int
    next_sequence: int
    last_lsn: int
    last_time_us: int

    def after(self, record: Record) -> FilePosition:
        """Return the position after a record that begins here."""
        offset = self.offset + encoded_size(len(record.body))
        if record.kind == KIND_INDEX:
            return replace(self, offset=offset)
        lsn, time, count, _, _ = PREFIX.unpack_from(record.body)
        return FilePosition(offset, self.next_sequence + count, lsn, time)


@dataclass(slots=True)
class FileIndex:
    """The offsets of some records, one per `every_bytes`. Grows only at its end, so readers need no lock."""

    every_bytes: int
    sequences: list[int] = field(default_factory=list)
    times: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)

    def add(self, sequence: int, offset: int, time_us: int) -> None:
        if not self.offsets or offset - self.offsets[-1] >= self.every_bytes:
            self.offsets.append(offset)  # first: a reader that finds the sequence finds the offset
            self.times.append(time_us)
            self.sequences.append(sequence)

    def cut(self, entries: int) -> None:
        """Keep only the first `entries`."""
        for column in (self.sequences, self.times, self.offsets):
            del column[entries:]

    def before(self, sequence: int) -> int:
        """Return the offset of a record at or before the one that holds `sequence`."""
        return self._offset(bisect_right(self.sequences, sequence))

    def before_time(self, time_us: int) -> int:
        """Return the offset of a record before which every record is older than `time_us`."""
        return self._offset(bisect_left(self.times, time_us))

    def _offset(self, entries: int) -> int:
        return self.offsets[entries - 1] if entries else OPENING_BYTES

    def encode(self, position: FilePosition, messages: int) -> bytes:
        entries = np.array([self.sequences, self.offsets, self.times], _ENTRY).T.tobytes()
        return entries + _INDEX_TAIL.pack(position.last_lsn, position.last_time_us, messages, position.offset)

    @classmethod
    def decode(cls, body: bytes, every_bytes: int) -> FileIndex:
        words = np.frombuffer(body[: -_INDEX_TAIL.size], _ENTRY).reshape(-1, _ENTRY_WORDS)
        sequences, offsets, times = words.T.tolist()
        return cls(every_bytes, sequences, times, offsets)


class DataWriter:
    """The data file that messages are appended to."""

    def __init__(
        self, file: File, opening: Opening, position: FilePosition, index: FileIndex, *, allocate_bytes: int, path: str
    ) -> None:
        self.file = file
        self.path = path  # in the queue's folder
        self.opening = opening
        self.position = position
        self.index = index
        self._allocate_bytes = allocate_bytes
        self._claimed = position.offset
        self._indexed = position.offset  # right after the newest index record, or the opening record

    @classmethod
    def create(
        cls, fs: FileSystem, folder: str, opening: Opening, tail: Sequence[Record], *, allocate_bytes: int, every: int
    ) -> DataWriter:
        """Create a file that holds the records of `tail`; it is durable under its name when this returns.

        Requires: its folder exists, and no manifest names a file of its name. `DiskFull`: a partial file may be left
        under that name, which the next attempt replaces.
        """
        path, undo = f"{folder}/{opening.path}", ExitStack()
        try:
            if fs.exists(path):  # from an attempt that ended before a manifest named it
                fs.unlink(path)
            file = fs.create(path)
            undo.callback(file.close)
            writer = cls(
                file, opening, opening.position, FileIndex(every), allocate_bytes=allocate_bytes, path=opening.path
            )
            file.pwrite(opening.encode(), 0)
            for record in tail:
                writer.write(record.body, synced=opening.first - 1, kind=record.kind)
            if tail:
                writer.write_index()
            file.fsync()
            fs.fsync_dir(path.rpartition("/")[0])
        except OSError as error:
            with suppress(OSError):
                undo.close()
            if is_disk_full(error):
                raise DiskFull(f"{folder} has no room for a new data file: free some space, then retry") from error
            raise
        return writer

    @property
    def messages(self) -> int:
        return self.position.next_sequence - self.opening.first

    @property
    def is_empty(self) -> bool:
        """Whether it has neither messages nor trims."""
        return self.position.last_lsn == self.opening.last_lsn and not self.messages

    def claim(self, size: int) -> None:
        """Make sure that `size` more bytes can be written; `DiskFull` if not, with nothing written."""
        self._claimed = claim(self.file, self._claimed, self.position.offset, size, self._allocate_bytes)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Write all records in this context or none: the next write overwrites what an interrupt cut short."""
        position, entries = self.position, len(self.index.sequences)
        try:
            yield
        except BaseException:
            self.position = position
            self.index.cut(entries)
            raise

    def write(self, body: bytes, *, synced: int, kind: int = KIND_MESSAGES) -> None:
        """Append one record. `synced`: the last sequence that is known to be durable."""
        opening, position = self.opening, self.position
        first = position.next_sequence
        data = encode(
            [body], salt=opening.salt, incarnation=opening.file_sequence, first=first, synced=synced, kind=kind
        )
        self.file.pwrite(data, position.offset)
        if kind == KIND_INDEX:
            self.position = replace(position, offset=position.offset + len(data))
            return
        lsn, time, count, _, _ = PREFIX.unpack_from(body)
        if kind == KIND_MESSAGES:
            self.index.add(first, position.offset, time)
        self.position = FilePosition(position.offset + len(data), first + count, lsn, time)

    def write_index(self) -> None:
        """Append an index record, unless one ends here. Not durable yet."""
        if self.position.offset == self._indexed:
            return
        body = self.index.encode(self.position, self.messages)
        self.claim(encoded_size(len(body)))
        self.write(body, synced=self.position.next_sequence - 1, kind=KIND_INDEX)
        self._indexed = self.position.offset

    def finish(self) -> None:
        """Write an index record and truncate the file after it; durable when this returns.

        Requires: all messages are synced, because the index record vouches for them.
        """
        with self.file.pin():
            self.write_index()
            self.file.truncate(self.position.offset)
            self._claimed = self.position.offset
            self.file.fsync()


class DataReader:
    """Reads a data file."""

    def __init__(self, file: File, opening: Opening) -> None:
        self.file = file
        self.opening = opening
        self.hint = (0, 0)  # where the last read ended: a sequence, and the offset of its record
        self._index: FileIndex | None = None

    @classmethod
    def open(cls, fs: FileSystem, folder: str, path: str, identity: bytes | None) -> DataReader:
        """Open the file at `path` in the queue's folder. Without `identity` the file's own is not checked."""
        file = fs.open(f"{folder}/{path}")
        opening = Opening.read(file)
        if identity is not None and opening.version == VERSION_OF_SHARD:
            identity = shard_identity(identity, folder)
        if identity is not None and opening.identity != identity:
            raise CorruptionError(file.path, 0, "the file belongs to another store, or to another shard")
        return cls(file, opening)

    def position_at(self, offset: int) -> tuple[FilePosition, FileIndex | None]:
        """Return the position right after the opening record or an index record, and that index."""
        if offset == OPENING_BYTES:
            return self.opening.position, None
        tail = self.file.pread(8, max(0, offset - 8))
        (start,) = struct.unpack("<Q", tail) if len(tail) == 8 else (0,)
        if not OPENING_BYTES < start < offset <= self.file.size():
            raise CorruptionError(self.file.path, offset, "no index record ends here")
        record = decode(
            self.file.pread(offset - start, start), 0, salt=self.opening.salt, path=self.file.path, base=start
        )
        if record.kind != KIND_INDEX or encoded_size(len(record.body)) != offset - start:
            raise CorruptionError(self.file.path, start, "this is not an index record")
        lsn, time, _, _ = _INDEX_TAIL.unpack(record.body[-_INDEX_TAIL.size :])
        return FilePosition(offset, record.index, lsn, time), FileIndex.decode(record.body, 0)

    def index(self, size: int) -> FileIndex:
        """Return the index of a finished file: its last record, or one built by reading the file once."""
        if self._index is None:
            try:
                self._index = self.position_at(size)[1]
            except CorruptionError:  # a file that ended in a crash has no index record
                self._index = FileIndex(READ_BYTES)
                for offset, record in self.records(OPENING_BYTES, size, past_damage=True):
                    if record.kind == KIND_MESSAGES:
                        self._index.add(record.index, offset, PREFIX.unpack_from(record.body)[1])
        return self._index or FileIndex(0)

    def before_lsn(self, lsn: int, size: int, index: FileIndex | None) -> int:
        """Return the offset of a record before which every record has a lower LSN. Reads about ten records."""
        offsets = (index or self.index(size)).offsets
        low, high = 0, len(offsets)  # offsets below `low` are of lower LSNs
        while low < high:
            middle = (low + high) // 2
            _, record = next(self.records(offsets[middle], size, read_bytes=PROBE_BYTES))
            if PREFIX.unpack_from(record.body)[0] < lsn:
                low = middle + 1
            else:
                high = middle
        return offsets[low - 1] if low else OPENING_BYTES

    def records(
        self,
        start: int,
        end: int,
        *,
        past_damage: bool = False,
        read_bytes: int = READ_BYTES,
        damage: list[CorruptionError] | None = None,
    ) -> Iterator[tuple[int, Record]]:
        """Yield (offset, record) in [start, end); a bad record raises, or with `past_damage` is skipped.

        Each `CorruptionError` is also added to `damage`.
        """
        buffer, base, at = b"", start, 0
        salt, path = self.opening.salt, self.file.path
        while base + at < end:
            if len(buffer) - at < HEADER.size:
                buffer, base, at = self.file.pread(min(read_bytes, end - base - at), base + at), base + at, 0
            if len(buffer) - at >= HEADER.size:
                length = encoded_size(HEADER.unpack_from(buffer, at)[1])
                # The length is not yet checked: never read past the end.
                if len(buffer) - at < length <= end - base - at:
                    size = min(max(length, read_bytes), end - base - at)
                    buffer, base, at = self.file.pread(size, base + at), base + at, 0
            try:
                record = decode(buffer, at, salt=salt, path=path, base=base)
            except CorruptionError as error:
                if damage is not None:
                    damage.append(error)
                if not past_damage:
                    raise
                buffer, base, at = self.file.pread(end - base - at, base + at), base + at, 0
                at, record = next(self.valid_records(buffer), (-1, None))  # type: ignore[assignment]
                if record is None:
                    return
            yield base + at, record
            at += encoded_size(len(record.body))

    def valid_records(self, data: bytes) -> Iterator[tuple[int, Record]]:
        """Yield the valid records anywhere in `data`, which begins at an offset divisible by 8.

        Numpy finds the few offsets whose header could belong to this file; only those are decoded.
        """
        words = np.frombuffer(data[: len(data) & ~7], "<u8")
        if len(words) < HEADER.size // 8:
            return
        kinds, index, synced = words[1:-2], words[2:-1], words[3:]
        ours = (kinds >> np.uint64(32)) == self.opening.file_sequence
        candidates = np.flatnonzero(ours & (index >= self.opening.first) & (synced < index))
        behind = 0
        for word in candidates.tolist():
            if word * 8 < behind:  # inside a valid record
                continue
            try:
                record = decode(data, word * 8, salt=self.opening.salt)
            except CorruptionError:
                continue
            behind = word * 8 + encoded_size(len(record.body))
            yield word * 8, record
