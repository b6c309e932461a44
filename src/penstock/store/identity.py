"""The identity of a store: what its files carry, and the UUID of the store itself.

The file `STORE` holds 16 bytes and their CRC32C (u32, little-endian); files of the first version lack the checksum. The
bytes are drawn when the store is created, and written into each of its files. They are its UUID, too, unless the store
is a restored copy: its files carry the identity of the original, and its own UUID follows the checksum, which covers
both (ADR 0067).

`STORE` is the first file of a store, the manifest is the second, and the journal follows both: one that is missing
while a later one exists was lost, and is not created again.

Thread: the one that opens the store.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from google_crc32c import value as crc32c

from penstock.errors import CorruptionError
from penstock.host.file_operations import publish
from penstock.host.files import FileSystem
from penstock.host.randomness import Random

IDENTITY_BYTES = 16
_SUM = struct.Struct("<I")


class StoreIdentity(NamedTuple):
    """What tells a store, and its files, from others."""

    files: bytes  # in each of its files; a restored copy has that of its original
    uuid: bytes  # of this store alone


def load_identity(fs: FileSystem, root: str, random: Random) -> StoreIdentity:
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
    drawn = random.randbytes(IDENTITY_BYTES)
    identity = StoreIdentity(drawn, drawn)
    write_identity(fs, root, identity)
    return identity


def write_identity(fs: FileSystem, root: str, identity: StoreIdentity) -> None:
    """Write the identity of a store, durably."""
    path = f"{root}/STORE"
    if fs.exists(f"{path}.tmp"):
        fs.unlink(f"{path}.tmp")
    own = b"" if identity.uuid == identity.files else identity.uuid
    file = fs.create(f"{path}.tmp")
    file.pwrite(identity.files + _SUM.pack(crc32c(identity.files + own)) + own, 0)
    publish(fs, file, path)
    file.close()


def read_uuid(fs: FileSystem, root: str) -> bytes | None:
    """Return the UUID of the store in a folder; None if this process cannot read one there."""
    try:
        return _read(fs, f"{root}/STORE").uuid
    except OSError:
        return None


def read_identity(fs: FileSystem, root: str) -> StoreIdentity | None:
    """Return the identity of the store in a folder; None if there is none."""
    return _read(fs, f"{root}/STORE") if fs.exists(f"{root}/STORE") else None


def _read(fs: FileSystem, path: str) -> StoreIdentity:
    file = fs.open(path)
    content = file.pread(64, 0)
    file.close()
    files, own = content[:IDENTITY_BYTES], content[IDENTITY_BYTES + _SUM.size :]
    checksum = content[IDENTITY_BYTES : IDENTITY_BYTES + _SUM.size]
    sizes = len(files) == IDENTITY_BYTES and len(own) in (0, IDENTITY_BYTES)
    if not sizes or checksum not in (b"", _SUM.pack(crc32c(files + own))):
        raise CorruptionError(path, 0, "the store's identity does not match its checksum")
    return StoreIdentity(files, own or files)


def _has_journal(fs: FileSystem, root: str) -> bool:
    try:
        fs.listdir(f"{root}/journal")
    except (
        FileNotFoundError,
        NotADirectoryError,
    ):  # opening the journal reports a foreign file of that name
        return False
    return True
