"""Decide whether a manifest file may be mapped.

A clean close writes a *stamp* beside the file: the last transaction and a hash of every page. A file that matches it is
as our last commit left it. Any other file is examined first: every page, every row's checksum and every invariant
between rows, without LMDB (see `pages.py`).

Thread: the one that opens or closes the manifest, while it is not mapped.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import xxhash
from google_crc32c import value as crc32c

from penstock.errors import CorruptionError
from penstock.host.files import File, FileSystem
from penstock.manifest.engine import TABLES
from penstock.manifest.invariants import check_all
from penstock.manifest.migrations import is_current
from penstock.manifest.pages import MetaPage, PageWalk, read_meta

READ_BYTES = 1 << 20
_MAGIC = b"PSTKEND\0"
_STAMP = struct.Struct("<8sQQ16s")  # magic, transaction, bytes of all pages, their XXH3-128
_SUM = struct.Struct("<I")
STAMP_BYTES = _STAMP.size + _SUM.size


@dataclass(frozen=True, slots=True)
class ClosingStamp:
    """The state of a file when it was closed."""

    transaction: int
    used_bytes: int
    digest: bytes

    @classmethod
    def of(cls, file: File) -> ClosingStamp:
        """Return the stamp of a file that is not open."""
        meta = read_meta(file)
        return cls(meta.transaction, meta.used_bytes, _digest(file, meta))

    def encode(self) -> bytes:
        data = _STAMP.pack(_MAGIC, self.transaction, self.used_bytes, self.digest)
        return data + _SUM.pack(crc32c(data))

    @classmethod
    def decode(cls, data: bytes) -> ClosingStamp | None:
        """Decode a stamp; None if there is none that can be trusted."""
        body, checksum = data[: _STAMP.size], data[_STAMP.size :]
        if len(body) != _STAMP.size or checksum != _SUM.pack(crc32c(body)):
            return None
        magic, transaction, used_bytes, digest = _STAMP.unpack(body)
        return cls(transaction, used_bytes, digest) if magic == _MAGIC else None


def _digest(file: File, meta: MetaPage) -> bytes:
    digest, offset = xxhash.xxh3_128(), 0
    while offset < meta.used_bytes:
        data = file.pread(min(READ_BYTES, meta.used_bytes - offset), offset)
        if not data:
            raise CorruptionError(file.path, offset, "it ends inside a page")
        digest.update(data)
        offset += len(data)
    return digest.digest()


def check_file(fs: FileSystem, path: str, stamp: ClosingStamp | None) -> None:
    """Raise `CorruptionError` unless the file matches its stamp or, without a stamp, every row is valid.

    A stamp of an earlier transaction than the file's does not count: then the file is examined, too.
    """
    file = fs.open(path)
    try:
        meta = read_meta(file)
        if stamp is None or stamp.transaction < meta.transaction:
            return _examine(file, meta)
        if meta.transaction < stamp.transaction:
            reason = f"its last transaction is {meta.transaction}, but it was closed after {stamp.transaction}"
            raise CorruptionError(path, 0, f"{reason}: it is an older copy")
        if (meta.used_bytes, _digest(file, meta)) != (stamp.used_bytes, stamp.digest):
            _examine(file, meta)  # which may say where
            raise CorruptionError(path, 0, "its bytes changed since it was closed")
    except OSError as error:
        raise CorruptionError(path, 0, f"it cannot be read ({error})") from error
    finally:
        file.close()


def examine(fs: FileSystem, path: str) -> None:
    """Read every page and row; `CorruptionError` if anything is damaged."""
    check_file(fs, path, None)


def _examine(file: File, meta: MetaPage) -> None:
    walk = PageWalk(file, meta)
    rows: dict[str, dict[bytes, bytes]] = {name: {} for name in TABLES}
    for table, key, value in walk.rows():
        rows.setdefault(table, {})[key] = value
    if walk.tables != set(TABLES):
        raise CorruptionError(file.path, 0, f"it has the tables {sorted(walk.tables)}")
    view = _Rows(rows)
    try:
        if is_current(view):  # other versions cannot be decoded here, but every page was read
            for broken in check_all(view):
                raise CorruptionError(file.path, 0, broken)
    except CorruptionError as error:
        reason = error.reason if error.path == file.path else f"{error.path}: {error.reason}"
        raise CorruptionError(file.path, 0, reason) from None


class _Rows:
    """A `ReadView` over rows that were read from pages, in order."""

    def __init__(self, rows: dict[str, dict[bytes, bytes]]) -> None:
        self._rows = rows

    def get(self, table: str, key: bytes) -> bytes | None:
        return self._rows[table].get(key)

    def scan(self, table: str, start: bytes = b"", stop: bytes | None = None) -> Iterator[tuple[bytes, bytes]]:
        for key, value in self._rows[table].items():
            if key >= start and (stop is None or key < stop):
                yield key, value
