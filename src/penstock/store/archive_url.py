"""The file `ARCHIVE` of a store: the URL of its archive, so that every later opening finds what was evicted.

One line of JSON, then one with the CRC32C of the first. It has no credentials.

Thread: the one that opens the store.
"""

from __future__ import annotations

import google_crc32c
import msgspec

from penstock.errors import CorruptionError, UnsupportedVersion
from penstock.host.file_operations import publish
from penstock.host.files import FileSystem

ARCHIVE_FILE = "ARCHIVE"
VERSION = 1


class _ArchiveUrl(msgspec.Struct, frozen=True):
    version: int
    url: str


def read_archive_url(fs: FileSystem, root: str) -> str | None:
    """Return the URL of a store's archive; None if it never had one."""
    path = f"{root}/{ARCHIVE_FILE}"
    try:
        file = fs.open(path)
    except FileNotFoundError:
        return None
    try:
        body, _, checksum = file.pread(4_096, 0).partition(b"\n")
    finally:
        file.close()
    if checksum.strip() != b"%08x" % google_crc32c.value(body):
        raise CorruptionError(path, 0, "its checksum does not match: write the URL of the archive again, or remove it")
    try:
        stored = msgspec.json.decode(body, type=_ArchiveUrl)
    except msgspec.DecodeError as error:
        raise CorruptionError(path, 0, f"it does not decode ({error})") from None
    if stored.version != VERSION:
        raise UnsupportedVersion(f"{path} has version {stored.version}: use a newer Penstock")
    return stored.url


def write_archive_url(fs: FileSystem, root: str, url: str) -> None:
    """Write the URL of a store's archive, durably, unless it is there already."""
    path = f"{root}/{ARCHIVE_FILE}"
    if fs.exists(path) and read_archive_url(fs, root) == url:
        return
    if fs.exists(f"{path}.tmp"):
        fs.unlink(f"{path}.tmp")
    body = msgspec.json.encode(_ArchiveUrl(VERSION, url))
    file = fs.create(f"{path}.tmp")
    try:
        file.pwrite(body + b"\n%08x\n" % google_crc32c.value(body), 0)
        publish(fs, file, path)
    finally:
        file.close()
