"""The manifest of a queue: the valid data files, and the end of the active one.

Two slots, `manifest.1` and `manifest.2`, are written alternately; the one byte of `manifest.current`, the *pointer*,
says which is valid. docs/format/qmft.md gives the bytes. Data files are listed only to distinguish a new queue from one
that lost its pointer, and only up to the first file.

Thread: `QmftManifest` and its parts are immutable; a `QmftWriter` belongs to the queue's writer.
Invariants: (1) the slot that the durable pointer names is never written. (2) a slot and its name are durable before the
pointer names it. (3) the pointer is one byte at any moment after its creation. (4) a file whose fsync failed is never
written again in place: it is replaced under its name.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.errors import DiskFull, Invalid, ManifestCorrupted, ManifestNotFound, UnsupportedManifestVersion
from penstock.host.file_errors import is_disk_full
from penstock.host.file_operations import publish
from penstock.host.files import FileSystem

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAGIC = b"QMFT"
VERSION = 1
HEADER = struct.Struct("<4sIQII8s")  # magic, version, next_seq, file_count, checksum, reserved
assert HEADER.size == 32
_CHECKSUM_AT = 20
_ACTIVE = struct.Struct("<IQQH")  # file_seq, write_pos, msg_count, path_len
_ENTRY = struct.Struct("<QQQH")  # start_seq, end_seq, size, path_len
assert (_ACTIVE.size, _ENTRY.size) == (22, 26)
_ENTRY_COLUMNS = np.dtype([("start", "<u8"), ("end", "<u8"), ("size", "<u8"), ("path_len", "<u2")])
assert _ENTRY_COLUMNS.itemsize == _ENTRY.size

POINTER = "manifest.current"
SLOTS = ("", "manifest.1", "manifest.2")  # by the slot's number
_TEMPORARY = POINTER + ".tmp"
DATA_SUFFIX = ".data"
_DATA_FILE = re.compile(rf"[0-9]{{10}}\{DATA_SUFFIX}")  # files with other names are ignored
_PATH_BYTES_MAX = (1 << 16) - 1


@dataclass(frozen=True, slots=True)
class ActiveFileState:
    """The active data file, as far as it was synced when the manifest was written."""

    file_sequence: int
    write_position: int
    message_count: int
    path: str  # relative to the queue's folder; empty while there is no data file

    def __post_init__(self) -> None:
        if self.path:
            _check_path(self.path)


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A sealed data file. Both sequences are inclusive."""

    path: str
    start_sequence: int
    end_sequence: int
    size: int

    def __post_init__(self) -> None:
        _check_path(self.path)
        if not 0 < self.start_sequence <= self.end_sequence:
            raise Invalid(f"{self.path} cannot hold messages {self.start_sequence} to {self.end_sequence}")

    def encode(self) -> bytes:
        path = self.path.encode()
        return _ENTRY.pack(self.start_sequence, self.end_sequence, self.size, len(path)) + path


def _check_path(path: str) -> None:
    parts = path.split("/")
    if not path or len(path.encode()) > _PATH_BYTES_MAX or path.startswith("/") or ".." in parts or "\0" in path:
        raise Invalid(f"{path[:80]!r} is not a path inside a queue's folder")


class FileTable(Sequence[FileEntry]):
    """The sealed data files in order of their messages.

    Stored as the bytes of the manifest and four columns: there may be tens of thousands, and an entry is built only
    when it is read.
    """

    __slots__ = ("_offsets", "_raw", "ends", "sizes", "starts")

    def __init__(self, raw: bytes = b"", offsets: NDArray[np.int64] | None = None) -> None:
        """Requires: an entry begins at each of `offsets`, and they fill `raw`."""
        self._raw = raw
        self._offsets = np.zeros(0, np.int64) if offsets is None else offsets
        octets = np.frombuffer(raw, np.uint8)[self._offsets[:, None] + np.arange(_ENTRY.size)]
        columns = np.ascontiguousarray(octets).view(_ENTRY_COLUMNS).reshape(-1)
        self.starts: NDArray[np.uint64] = columns["start"].astype(np.uint64)
        self.ends: NDArray[np.uint64] = columns["end"].astype(np.uint64)
        self.sizes: NDArray[np.uint64] = columns["size"].astype(np.uint64)

    @classmethod
    def of(cls, entries: Iterable[FileEntry]) -> FileTable:
        encoded = [entry.encode() for entry in entries]
        lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
        return cls(b"".join(encoded), np.cumsum(lengths) - lengths)

    @classmethod
    def decode(cls, raw: bytes, count: int) -> FileTable:
        """Decode `count` entries; `Invalid` if the bytes are not that many entries in order."""
        table = cls(raw, _entry_offsets(raw, count))
        if (table.starts > table.ends).any() or (table.starts[1:] <= table.ends[:-1]).any():
            raise Invalid("its files are not in the order of their messages")
        return table

    def encode(self) -> bytes:
        return self._raw

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int) -> FileEntry:  # type: ignore[override]
        at = int(self._offsets[index])
        start, end, size, length = _ENTRY.unpack_from(self._raw, at)
        try:  # checked only here: opening costs the same for any number of files
            return FileEntry(self._raw[at + _ENTRY.size : at + _ENTRY.size + length].decode(), start, end, size)
        except (Invalid, UnicodeDecodeError) as error:
            raise ManifestCorrupted("the manifest of a queue", at, f"entry {index} is malformed ({error})") from None

    def __iter__(self) -> Iterator[FileEntry]:
        return map(self.__getitem__, range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FileTable) and self._raw == other._raw

    def __hash__(self) -> int:
        return hash(self._raw)

    def with_file(self, entry: FileEntry) -> FileTable:
        return FileTable(self._raw + entry.encode(), np.append(self._offsets, len(self._raw)))

    def without_oldest(self, count: int) -> FileTable:
        start = int(self._offsets[count]) if count < len(self) else len(self._raw)
        return FileTable(self._raw[start:], self._offsets[count:] - start)

    def index_of(self, sequence: int) -> int:
        """Return the index of the file that holds `sequence`, or of the next one; the length if there is none."""
        return int(np.searchsorted(self.ends, np.uint64(sequence)))


def _entry_offsets(raw: bytes, count: int) -> NDArray[np.int64]:
    """Return the offset of each entry. Entries of one length, as we write them, need no loop."""
    if count and len(raw) % count == 0 and len(raw) // count > _ENTRY.size:
        step = len(raw) // count
        lengths = np.frombuffer(raw, np.uint8).reshape(count, step)[:, _ENTRY.size - 2 : _ENTRY.size]
        if (np.ascontiguousarray(lengths).view("<u2") == step - _ENTRY.size).all():
            return np.arange(count, dtype=np.int64) * step
    offsets, at = [], 0
    for _ in range(count):
        if at + _ENTRY.size > len(raw):
            raise Invalid("its list of files is cut short")
        offsets.append(at)
        at += _ENTRY.size + _ENTRY.unpack_from(raw, at)[3]
    if at != len(raw):
        raise Invalid("its list of files does not fill it")
    return np.array(offsets, np.int64)


@dataclass(frozen=True, slots=True)
class QmftManifest:
    """The state of a queue's files at one time."""

    next_sequence: int  # after the last message that this manifest covers
    active_file: ActiveFileState
    files: FileTable
    version: int = VERSION

    @classmethod
    def fresh(cls) -> QmftManifest:
        """Return the manifest of an empty queue, whose first message will have sequence 1."""
        return cls(1, ActiveFileState(0, 0, 0, ""), FileTable())

    def encode(self) -> bytes:
        active = self.active_file
        path = active.path.encode()
        data = bytearray(HEADER.pack(MAGIC, self.version, self.next_sequence, len(self.files), 0, bytes(8)))
        data += _ACTIVE.pack(active.file_sequence, active.write_position, active.message_count, len(path)) + path
        data += self.files.encode()
        struct.pack_into("<I", data, _CHECKSUM_AT, zlib.crc32(data))
        return bytes(data)

    @classmethod
    def decode(cls, data: bytes, path: str = "") -> QmftManifest:
        """Decode a manifest; `path` is for error messages only."""
        if len(data) < HEADER.size + _ACTIVE.size or data[:4] != MAGIC:
            raise ManifestCorrupted(path, 0, "this is not a queue manifest")
        _, version, next_sequence, count, stored, _ = HEADER.unpack_from(data)
        zeroed = data[:_CHECKSUM_AT] + bytes(4) + data[_CHECKSUM_AT + 4 :]
        if zlib.crc32(zeroed) != stored:  # before the version: a flipped bit there is damage, not a newer version
            raise ManifestCorrupted(path, 0, "the manifest's checksum does not match")
        if version != VERSION:
            raise UnsupportedManifestVersion(f"{path} has manifest version {version}, this Penstock reads {VERSION}")
        file_sequence, position, messages, length = _ACTIVE.unpack_from(data, HEADER.size)
        start = HEADER.size + _ACTIVE.size
        if start + length > len(data):
            raise ManifestCorrupted(path, start, "the path of its active file is cut short")
        try:
            active = ActiveFileState(file_sequence, position, messages, data[start : start + length].decode())
            files = FileTable.decode(data[start + length :], count)
        except (Invalid, UnicodeDecodeError) as error:
            raise ManifestCorrupted(path, start, str(error)) from None
        return cls(next_sequence, active, files, version)


class QmftWriter:
    """The two slots and the pointer of one queue folder."""

    def __init__(self, fs: FileSystem, folder: str) -> None:
        self._fs = fs
        self._folder = folder
        self._slot = 0  # the slot that the pointer names; 0: there is no pointer yet
        # Whether every fsync of the file is known to have succeeded. One may have failed in a process that died.
        self._pointer_valid = False
        self._spare_valid = False

    def read_latest(self) -> QmftManifest | None:
        """Return the valid manifest, or None in a folder without pointer and data. Changes nothing on disk."""
        pointer = self._path(POINTER)
        try:
            value = self._read(pointer)
        except FileNotFoundError:
            if has_data_files(self._fs, self._folder):
                raise ManifestNotFound(pointer) from None
            return None
        if value not in (b"\x01", b"\x02"):
            raise ManifestCorrupted(pointer, 0, f"it must hold one byte, 01 or 02, and holds {value[:8].hex(' ')!r}")
        slot = self._path(SLOTS[value[0]])
        try:
            manifest = QmftManifest.decode(self._read(slot), slot)
        except FileNotFoundError:
            raise ManifestNotFound(slot) from None
        self._slot, self._pointer_valid, self._spare_valid = value[0], False, False
        return manifest

    def files(self) -> tuple[tuple[str, bytes], ...]:
        """Return the names and bytes of the valid slot and the pointer, as they are in memory."""
        if self._slot == 0:
            return ()
        return (SLOTS[self._slot], self._read(self._path(SLOTS[self._slot]))), (POINTER, bytes([self._slot]))

    def secure_pointer(self) -> None:
        """Make the pointer durable as it was read, or as the last good `write` left it.

        A process that died may have left a pointer that is only in the page cache: a crash would lose it, with all that
        was written since.
        """
        if self._slot and not self._pointer_valid:
            self._create_pointer(self._slot)
            self._pointer_valid = True

    def write(self, manifest: QmftManifest) -> None:
        """Make `manifest` the valid one, durably. Requires: all that it says of data files is durable.

        `DiskFull`, `ProcessLimit`: nothing changed. After any other error the old or the new one is valid;
        `secure_pointer` restores the old.
        """
        self.secure_pointer()
        target = 2 if self._slot == 1 else 1
        data = manifest.encode()
        fresh, self._spare_valid = not self._spare_valid, False
        try:
            self._write_slot(self._path(SLOTS[target]), data, fresh=fresh)
        except OSError as error:
            if is_disk_full(error):
                raise DiskFull(f"{self._folder} has no room for a manifest: free some space, then retry") from error
            raise
        self._pointer_valid = False
        if self._slot:
            self._overwrite_pointer(target)
        else:
            self._create_pointer(target)
        self._slot, self._pointer_valid = target, True
        self._spare_valid = True  # the slot that was valid until now, or one that does not exist yet

    def _write_slot(self, path: str, data: bytes, *, fresh: bool) -> None:
        fresh = fresh or not self._fs.exists(path)
        if fresh:
            with suppress(FileNotFoundError):
                self._fs.unlink(path)
        file = self._fs.create(path) if fresh else self._fs.open(path, write=True)
        try:
            file.pwrite(data, 0)
            file.truncate(len(data))
            file.fsync()
        finally:
            file.close()
        if fresh:
            self._fs.fsync_dir(self._folder)  # before the pointer: it must never name a file that a crash removes

    def _overwrite_pointer(self, slot: int) -> None:
        file = self._fs.open(self._path(POINTER), write=True)
        try:
            file.pwrite(bytes([slot]), 0)  # in place: a crash leaves the old byte or the new one, never none
            file.fsync()
        finally:
            file.close()

    def _create_pointer(self, slot: int) -> None:
        temporary = self._path(_TEMPORARY)
        with suppress(FileNotFoundError):
            self._fs.unlink(temporary)
        file = self._fs.create(temporary)
        try:
            file.pwrite(bytes([slot]), 0)
            publish(self._fs, file, self._path(POINTER))
        finally:
            file.close()

    def _read(self, path: str) -> bytes:
        file = self._fs.open(path)
        try:
            return file.pread(file.size(), 0)
        finally:
            file.close()

    def _path(self, name: str) -> str:
        return f"{self._folder}/{name}"


def data_files(fs: FileSystem, folder: str) -> Iterator[str]:
    """Yield the paths of the data files below `folder`, relative to it, one folder at a time."""
    for year in _numbered(fs, folder, 4):
        for month in _numbered(fs, f"{folder}/{year}", 2):
            for day in _numbered(fs, f"{folder}/{year}/{month}", 2):
                for name in _listdir(fs, f"{folder}/{year}/{month}/{day}"):
                    if _DATA_FILE.fullmatch(name):
                        yield f"{year}/{month}/{day}/{name}"


def has_data_files(fs: FileSystem, folder: str) -> bool:
    """Whether there is a data file; stops at the first."""
    return next(data_files(fs, folder), None) is not None


def _numbered(fs: FileSystem, folder: str, digits: int) -> list[str]:
    return sorted(name for name in _listdir(fs, folder) if len(name) == digits and name.isascii() and name.isdigit())


def _listdir(fs: FileSystem, folder: str) -> list[str]:
    try:
        return fs.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
