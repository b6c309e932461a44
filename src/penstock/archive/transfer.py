"""Moves files to and from an object store, and compares bytes with what their keys say.

Thread: any.
Invariant: a file that was fetched is whole, synced, and has the checksum in the key of its object.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.archive.objects import INDEX, ObjectStore, file_key, parse_file_key
from penstock.archive.plain import TemporaryFile
from penstock.errors import Closed, CorruptionError
from penstock.host.file_operations import make_dirs
from penstock.host.files import FileSystem
from penstock.host.paths import parent

PART_BYTES = 8 << 20  # of an object that are read at a time
FILE_BYTES = 256 << 10  # of a file: above 1 MiB each read would get fresh pages from the system
Stop = Callable[[], bool]


def crc32c_extend(checksum: int, data: bytes) -> int:
    """Extend a CRC32C by more bytes."""
    import google_crc32c  # here: readers on other machines may lack it, and do not upload

    return int(google_crc32c.extend(checksum, data))


def never() -> bool:
    """Do not stop."""
    return False


def where(objects: ObjectStore, key: str) -> str:
    """Return the URL of an object, for messages."""
    return f"{objects.url.rstrip('/')}/{key}"


def file_checksum(fs: FileSystem, path: str, stop: Stop = never) -> tuple[int, int]:
    """Return the size and the CRC32C of a file."""
    file = fs.open(path)
    try:
        size, at, checksum = file.size(), 0, 0
        while at < size:
            _check(stop)
            data = file.pread(min(FILE_BYTES, size - at), at)
            if not data:
                raise CorruptionError(path, at, f"it ends here, and {size} bytes were expected")
            checksum = crc32c_extend(checksum, data)
            at += len(data)
        return size, checksum
    finally:
        file.close()


def put_file(fs: FileSystem, objects: ObjectStore, path: str, key: str) -> bool:
    """Upload a file as it is on disk; False if there is an object of this key already."""
    file = fs.open(path)
    try:
        size = file.size()
        content = file.map(size) if size else memoryview(b"")
    finally:
        file.close()
    return objects.put_new(key, content)


def upload(  # noqa: PLR0917 - from where, then to where
    fs: FileSystem, objects: ObjectStore, root: str, file_name: str, store: str, stop: Stop = never
) -> str:
    """Upload a file of the store, unless its object exists already; return the key. It is not verified yet."""
    path = f"{root}/{file_name}"
    size, checksum = file_checksum(fs, path, stop)
    key = file_key(store, file_name, checksum, size)
    put_file(fs, objects, path, key)
    return key


def verify_object(objects: ObjectStore, key: str, stop: Stop = never) -> None:
    """Read a file's object; `CorruptionError` if it is missing or is not what its key says."""
    named = parse_file_key(key)
    check_object(objects, key, named.size, named.checksum, stop)


def check_object(objects: ObjectStore, key: str, size: int, checksum: int, stop: Stop = never) -> None:
    """Read an object; `CorruptionError` if it is missing, or has another size or checksum."""
    at = crc = 0
    while at < size:
        _check(stop)
        data = _read(objects, key, at, min(at + PART_BYTES, size))
        crc = crc32c_extend(crc, data)
        at += len(data)
    _compare(objects, key, size, crc == checksum)


def fetch(fs: FileSystem, objects: ObjectStore, key: str, target: str, stop: Stop = never) -> None:
    """Write a file's object to a new file; `CorruptionError` if it is missing or is not what its key says."""
    named = parse_file_key(key)
    fetch_as(fs, objects, key, target, named.size, named.checksum, stop)


def fetch_index(fs: FileSystem, objects: ObjectStore, key: str, target: str, stop: Stop = never) -> None:
    """Write the index of an sstable's object to a new file; its own checksums are compared when it is read."""
    size = objects.size(key + INDEX)
    if size is None:
        raise CorruptionError(where(objects, key + INDEX), 0, "this object is missing")
    fetch_as(fs, objects, key + INDEX, target, size, None, stop)


def fetch_as(  # noqa: PLR0917 - what is fetched, then how it is checked
    fs: FileSystem, objects: ObjectStore, key: str, target: str, size: int, checksum: int | None, stop: Stop = never
) -> None:
    """Write an object of this size and checksum to a new file, synced under its name."""
    make_dirs(fs, parent(target))
    out = TemporaryFile(fs, target)
    try:
        at = crc = 0
        while at < size:
            _check(stop)
            data = _read(objects, key, at, min(at + PART_BYTES, size))
            crc = crc32c_extend(crc, data) if checksum is not None else 0
            out.file.pwrite(data, at)
            at += len(data)
        _compare(objects, key, size, checksum is None or crc == checksum)
        out.publish()
    except BaseException:
        out.abort()
        raise


def _read(objects: ObjectStore, key: str, start: int, end: int) -> bytes:
    try:
        data = objects.read(key, start, end)
    except FileNotFoundError:
        raise CorruptionError(where(objects, key), 0, "this object is missing") from None
    if not data:
        raise CorruptionError(where(objects, key), start, f"this object ends here, not at {end} bytes or later")
    return data


def _compare(objects: ObjectStore, key: str, size: int, same: bool) -> None:
    length = objects.size(key)
    if length is None:
        raise CorruptionError(where(objects, key), 0, "this object is missing")
    if length != size:
        raise CorruptionError(where(objects, key), min(length, size), f"this object has {length} bytes, not {size}")
    if not same:
        raise CorruptionError(
            where(objects, key), 0, "this object does not have the checksum that it was uploaded with"
        )


def _check(stop: Stop) -> None:
    if stop():
        raise Closed("the transfer was interrupted, or the store was closed: begin it again")
