"""Object stores: the few operations that the archive needs, and the keys of its objects.

    <uuid>/STORE                                       which store this is
    <uuid>/files/<file name>-<crc32c>-<bytes>          a file that never changes, by its path in the store
    <uuid>/files/<file name>-<crc32c>-<bytes>.idx      the index of that sstable
    <uuid>/runs/<number>/<path>                        files of one archive run alone
    <uuid>/runs/<number>/LISTING                       everything of that run; written last

A key names its content: whoever has the key can check the bytes. docs/format/archive.md gives the rest.

Thread: any.
Invariant: an object never changes. It is created whole, or not at all, and later deleted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple, Protocol

from penstock.errors import ArchiveUnavailable, Invalid
from penstock.host.files import Buffer

FILES, RUNS, MARKER, LISTING = "files", "runs", "STORE", "LISTING"
INDEX = ".idx"  # behind the key of an sstable: that of its index
_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*")
_FILE_KEY = re.compile(rf"([0-9a-f]{{32}})/{FILES}/(.+)-([0-9a-f]{{8}})-([0-9]+)")


class NetworkFailure(ArchiveUnavailable):
    """A failure that another attempt may not meet: no connection, a time-out, an error of the server."""


class StoredObject(NamedTuple):
    """An object as it is listed."""

    key: str
    size: int


class ObjectStore(Protocol):
    """A bucket, or a part of one. Keys are relative to `url`."""

    url: str  # without credentials

    def put_new(self, key: str, data: Buffer) -> bool:
        """Create an object, durably; False if the key exists: then nothing changed."""

    def read(self, key: str, start: int, end: int) -> bytes:
        """Return the bytes [start, end) of an object, fewer at its end; `FileNotFoundError` if it does not exist."""

    def size(self, key: str) -> int | None:
        """Return the size of an object in bytes; None if it does not exist."""

    def listed(self, prefix: str) -> Iterator[StoredObject]:
        """Iterate over the objects whose keys begin with `prefix` and a slash."""

    def folders(self) -> list[str]:
        """Return the first parts of all keys: one for each store."""

    def delete(self, key: str) -> None:
        """Delete an object, if it exists."""


class FileKey(NamedTuple):
    """What the key of a file says."""

    store: str  # the UUID of the store that uploaded it, as hex digits
    file_name: str
    checksum: int
    size: int


def check_key(key: str) -> str:
    """Return a key; `Invalid` if it could lead outside the archive, or is spelt differently by some object stores."""
    if not _KEY.fullmatch(key) or len(key) > 900:
        raise Invalid(f"{key!r} is not the key of an archived object")
    return key


def file_key(store: str, file_name: str, checksum: int, size: int) -> str:
    """Return the key of a file."""
    return check_key(f"{store}/{FILES}/{file_name}-{checksum:08x}-{size}")


def parse_file_key(key: str) -> FileKey:
    """Parse the key of a file or of its index; `Invalid` if it is neither."""
    match = _FILE_KEY.fullmatch(key.removesuffix(INDEX))
    if match is None:
        raise Invalid(f"{key!r} is not the key of an archived file")
    return FileKey(match[1], match[2], int(match[3], 16), int(match[4]))
