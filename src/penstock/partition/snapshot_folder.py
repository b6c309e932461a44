"""A partition's snapshot as files: the header, and a folder that receives, checks and sends them.

A snapshot holds what a partition's own files hold at one LSN, with the rows of the manifest that list them. It is
written to a folder chunk by chunk, in any number of attempts, then sealed: every file is compared with its digest and
synced, and the header is published last. A folder without a header is not a snapshot.
docs/format/partition_snapshot.md gives the bytes.

Thread: one writer for a folder; a sealed one is read by any.
Invariant: a sealed folder never changes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

import google_crc32c
import msgspec
import xxhash

from penstock.errors import CorruptionError, Invalid, UnsupportedVersion
from penstock.host.file_errors import unreadable
from penstock.host.file_operations import make_dirs, publish, remove_folder
from penstock.host.files import File, FileSystem
from penstock.host.paths import parent
from penstock.manifest.records import ChunkEntryRecord, WalStateRecord, check_relative

HEADER = "snapshot.header"
VERSION = 1
CHUNK_BYTES = 4 << 20
HEADER_BYTES_MAX = 256 << 20
_PREFIX = struct.Struct("<4sHHIQ")  # magic, version, reserved, checksum of the body, its bytes
_MAGIC = b"PSNP"
assert _PREFIX.size == 20


class SnapshotFile(msgspec.Struct, frozen=True, array_like=True):
    """A file of a snapshot."""

    name: str  # relative to the folder of the shard
    size: int
    digest: bytes  # xxh3, 128 bits

    def __post_init__(self) -> None:
        check_relative(self.name)
        if self.size < 0 or len(self.digest) != 16 or self.name == HEADER:
            raise Invalid(f"{self.name} is not a file of a snapshot")


class PartitionSnapshotHeader(msgspec.Struct, frozen=True, array_like=True):
    """What a snapshot is of, where it was taken, and its files."""

    store: bytes
    partition: int
    table: str
    kind: str
    lsn: int  # it holds every entry of the partition up to here, and none after it
    partition_index: int  # the partition's own number of its last entry: a queue's last sequence, a tree's LSN
    term: int  # of the journal's record `index`
    index: int  # where the journal was: no entry of the partition lies in (lsn, index]
    progress: tuple[tuple[int, WalStateRecord], ...]  # by the number of the tree that it is of
    chunks: tuple[tuple[int, ChunkEntryRecord], ...]  # the rows of the manifest, by chunk id
    files: tuple[SnapshotFile, ...]

    def __post_init__(self) -> None:
        if not 0 <= self.lsn <= self.index or self.partition_index < 0 or self.term < 0:
            raise Invalid(f"a snapshot at LSN {self.lsn} cannot be of record {self.index}")


class SnapshotChunk(NamedTuple):
    """Some bytes of a file."""

    name: str
    offset: int
    data: bytes


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(PartitionSnapshotHeader)


def encode_header(header: PartitionSnapshotHeader) -> bytes:
    """Encode a header."""
    body = _encode(header)
    return _PREFIX.pack(_MAGIC, VERSION, 0, google_crc32c.value(body), len(body)) + body


def decode_header(data: bytes, where: str) -> PartitionSnapshotHeader:
    """Decode a header; `CorruptionError` if it is damaged, `UnsupportedVersion` if it is newer than this Penstock."""
    if len(data) < _PREFIX.size:
        raise CorruptionError(where, 0, "the header of a snapshot is cut short")
    magic, version, reserved, checksum, size = _PREFIX.unpack_from(data)
    body = data[_PREFIX.size :]
    if magic == _MAGIC and version != VERSION:
        raise UnsupportedVersion(f"{where} has version {version}, this Penstock reads {VERSION}: use a newer Penstock")
    if magic != _MAGIC or reserved or size != len(body) or google_crc32c.value(body) != checksum:
        raise CorruptionError(where, 0, "the header of a snapshot is damaged")
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, Invalid) as error:
        raise CorruptionError(where, 0, f"the header of a snapshot does not decode ({error})") from None


class SnapshotFolder:
    """A folder that becomes a snapshot, or is one."""

    def __init__(self, fs: FileSystem, path: str) -> None:
        self._fs = fs
        self.path = path

    def header(self) -> PartitionSnapshotHeader | None:
        """Return the header; None if the folder is not sealed."""
        if not self._fs.exists(f"{self.path}/{HEADER}"):
            return None
        file = self._fs.open(f"{self.path}/{HEADER}")
        try:
            if file.size() > HEADER_BYTES_MAX:
                raise CorruptionError(file.path, 0, f"the header of a snapshot has {file.size()} bytes")
            return decode_header(file.pread(file.size(), 0), file.path)
        finally:
            file.close()

    def damaged(self) -> Iterator[CorruptionError]:
        """Read every file; yield what is damaged or missing."""
        header = self.header()
        if header is None:
            yield CorruptionError(self.path, 0, "this snapshot is missing or incomplete")
            return
        for one in header.files:
            path = f"{self.path}/{one.name}"
            try:
                file = self._fs.open(path)
            except FileNotFoundError:
                yield CorruptionError(path, 0, "this file of a snapshot is missing")
                continue
            except OSError as error:
                yield unreadable(error, path)
                continue
            try:
                if file.size() != one.size or _digest(file) != one.digest:
                    yield CorruptionError(path, 0, "this file is not the one in the snapshot")
            except OSError as error:
                yield unreadable(error, path)
            finally:
                file.close()

    # -- writing

    def size_of(self, name: str) -> int:
        """Return how many bytes of a file are in this folder: an interrupted copy continues there."""
        path = f"{self.path}/{name}"
        if not self._fs.exists(path):
            return 0
        file = self._fs.open(path)
        try:
            return file.size()
        finally:
            file.close()

    def write(self, chunk: SnapshotChunk) -> None:
        """Add bytes at the end of a file. Requires: the chunk's offset is the file's `size_of`."""
        check_relative(chunk.name)
        path = f"{self.path}/{chunk.name}"
        if chunk.offset == 0 and not self._fs.exists(path):
            make_dirs(self._fs, parent(path))
            file = self._fs.create(path)
        else:
            file = self._fs.open(path, write=True)
        try:
            if file.size() != chunk.offset:
                raise Invalid(f"{path} has {file.size()} bytes: send it from there, not from {chunk.offset}")
            file.pwrite(chunk.data, chunk.offset)
        finally:
            file.close()

    def seal(self, header: PartitionSnapshotHeader) -> None:
        """Check and sync every file, then publish the header. A file that differs is removed: it is sent again."""
        make_dirs(self._fs, self.path)
        folders, wrong = {self.path}, list[str]()
        for one in header.files:
            path = f"{self.path}/{one.name}"
            if not self._fs.exists(path):
                raise CorruptionError(path, 0, "this file of a snapshot is missing: copy it again")
            file = self._fs.open(path, write=True)
            try:
                intact = file.size() == one.size and _digest(file) == one.digest
                if intact:
                    file.fsync()
            finally:
                file.close()
            if not intact:
                self._fs.unlink(path)
                wrong.append(path)
            folders.add(parent(path))
        if wrong:
            raise CorruptionError(wrong[0], 0, "this file is not the one in the snapshot: copy it again")
        for folder in folders:
            self._fs.fsync_dir(folder)
        temporary = f"{self.path}/{HEADER}.tmp"
        if self._fs.exists(temporary):
            self._fs.unlink(temporary)
        file = self._fs.create(temporary)
        try:
            file.pwrite(encode_header(header), 0)
            publish(self._fs, file, f"{self.path}/{HEADER}")
        finally:
            file.close()

    def receive(self, source: SnapshotFolder) -> PartitionSnapshotHeader:
        """Copy a sealed snapshot here, from where an earlier attempt stopped, and seal it."""
        header = source.header()
        if header is None:
            raise Invalid(f"{source.path} is not a snapshot of a partition, or is incomplete")
        if self.header() == header:
            return header
        if self.header() is not None:  # sealed by an earlier attempt, with other files
            self.remove()
        self._copy(source, header)
        try:
            self.seal(header)
        except CorruptionError:  # what an earlier attempt wrote was not synced before a crash
            self._copy(source, header)
            self.seal(header)
        return header

    def _copy(self, source: SnapshotFolder, header: PartitionSnapshotHeader) -> None:
        for file in header.files:
            at = self.size_of(file.name)
            if at < file.size or file.size == 0:
                for chunk in read_chunks(self._fs, source.path, file.name, file.size, at):
                    self.write(chunk)

    def remove(self) -> None:
        """Remove the folder, its header first: half a snapshot is none."""
        if self._fs.exists(f"{self.path}/{HEADER}"):
            self._fs.unlink(f"{self.path}/{HEADER}")
            self._fs.fsync_dir(self.path)
        remove_folder(self._fs, self.path)


def read_chunks(fs: FileSystem, folder: str, name: str, size: int, start: int = 0) -> Iterator[SnapshotChunk]:
    """Yield the first `size` bytes of a file, from `start` on; one empty chunk for an empty file."""
    path = f"{folder}/{name}"
    if not fs.exists(path):
        raise CorruptionError(path, 0, "this file of a snapshot is missing")
    file = fs.open(path)
    try:
        if file.size() < size:
            raise CorruptionError(path, file.size(), f"this file of a snapshot has lost its end: it had {size} bytes")
        while start < size or start == size == 0:
            data = file.pread(min(CHUNK_BYTES, size - start), start) if size else b""
            yield SnapshotChunk(name, start, data)
            if size == 0:
                return
            start += len(data)
    finally:
        file.close()


def _digest(file: File) -> bytes:
    digest, at, size = xxhash.xxh3_128(), 0, file.size()
    while at < size:
        data = file.pread(min(CHUNK_BYTES, size - at), at)
        digest.update(data)
        at += len(data)
    return digest.digest()
