"""The store's UUID: drawn when the store is created, and written into each of its files.

The file `STORE` holds its 16 bytes and their CRC32C (u32, little-endian); files of the first version lack the checksum.
It is the first file of a store, the manifest is the second, and the journal follows both: one that is missing while a
later one exists was lost, and is not created again.

Thread: the one that opens the store.
"""

from __future__ import annotations

import struct

from google_crc32c import value as crc32c

from penstock.errors import CorruptionError
from penstock.host.file_operations import publish
from penstock.host.files import FileSystem
from penstock.host.randomness import Random

IDENTITY_BYTES = 16
_SUM = struct.Struct("<I")


def load_identity(fs: FileSystem, root: str, random: Random) -> bytes:
    """Return the identity of the store in a folder, drawn if it is new. `CorruptionError` if a file was lost."""
    path = f"{root}/STORE"
    has_manifest = fs.exists(f"{root}/manifest")
    if not has_manifest and _has_journal(fs, root):
        raise CorruptionError(f"{root}/manifest", 0, "the manifest is missing, although the store has a journal")
    if fs.exists(path):
        if not has_manifest:
            fs.fsync_dir(root)  # its creator may have died before this, and a manifest must not outlive it
        return _read(fs, path)
    if has_manifest:
        raise CorruptionError(path, 0, "the store's identity is missing, although it has a manifest")
    identity = random.randbytes(IDENTITY_BYTES)
    create_identity(fs, root, identity)
    return identity


def create_identity(fs: FileSystem, root: str, identity: bytes) -> None:
    """Write the identity of a new store."""
    path = f"{root}/STORE"
    if fs.exists(f"{path}.tmp"):
        fs.unlink(f"{path}.tmp")
    file = fs.create(f"{path}.tmp")
    file.pwrite(identity + _SUM.pack(crc32c(identity)), 0)
    publish(fs, file, path)
    file.close()


def read_identity(fs: FileSystem, root: str) -> bytes | None:
    """Return the identity of the store in a folder; None if this process cannot read one there."""
    try:
        return _read(fs, f"{root}/STORE")
    except OSError:
        return None


def _read(fs: FileSystem, path: str) -> bytes:
    file = fs.open(path)
    content = file.pread(64, 0)
    file.close()
    identity, checksum = content[:IDENTITY_BYTES], content[IDENTITY_BYTES:]
    if len(identity) != IDENTITY_BYTES or checksum not in (b"", _SUM.pack(crc32c(identity))):
        raise CorruptionError(path, 0, "the store's identity does not match its checksum")
    return identity


def _has_journal(fs: FileSystem, root: str) -> bool:
    try:
        fs.listdir(f"{root}/journal")
    except (
        FileNotFoundError,
        NotADirectoryError,
    ):  # opening the journal reports a foreign file of that name
        return False
    return True
