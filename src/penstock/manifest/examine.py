"""Decide whether a manifest file may be mapped.

A clean close writes a *stamp* beside the file: the last transaction and a sum of every page. A file with its stamp is
compared with it: a small one at once, the pages of a large one before they are used (see `page_sums.py`), and then free
pages, which nobody reads, have sums that mean nothing. Any other file is examined first:
every page, every row's checksum and every invariant between rows, without LMDB (see `pages.py`). A stamp of the first
version has one hash of all pages, which are then read at once.

Thread: the one that opens or closes the manifest, while it is not mapped.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import xxhash
from google_crc32c import value as crc32c

from penstock.errors import CorruptionError
from penstock.host.files import File, FileSystem
from penstock.manifest.engine import TABLES
from penstock.manifest.invariants import check_all
from penstock.manifest.migrations import is_current
from penstock.manifest.page_sums import FREE_PAGES, SUM_BYTES, PageReader, UncheckedPages
from penstock.manifest.pages import MetaPage, PageWalk, TreeRoot, read_meta

READ_BYTES = 1 << 20
OPENING_PAGES_MAX = 1_024  # a smaller file is compared at its opening, in about a millisecond
_MAGIC = b"PSTKEN2\0"
_MAGIC_1 = b"PSTKEND\0"
_STAMP = struct.Struct("<8sQQ16s")  # magic, transaction, bytes of all pages, XXH3-128 of their sums (1: of the pages)
_SUM = struct.Struct("<I")
STAMP_BYTES = _STAMP.size + _SUM.size


@dataclass(frozen=True, slots=True)
class ClosingStamp:
    """The state of a file when it was closed."""

    transaction: int
    used_bytes: int
    digest: bytes
    sums: bytes | None  # XXH3-64 of each page; None in the first version

    @classmethod
    def of(cls, file: File, unchecked: UncheckedPages | None) -> ClosingStamp:
        """Return the stamp of a file that is not open. Tables in `unchecked` keep the sums that they had."""
        meta = read_meta(file)
        pages, count = PageReader(file, meta.page_bytes), meta.last_page + 1
        sums = array("Q", bytes(count * SUM_BYTES))

        def add(numbers: Iterable[int]) -> None:
            for number, value in pages.sums(sorted(numbers)):
                sums[number] = value

        if unchecked is None:
            add(range(count))
        else:
            sums[: len(unchecked.sums) // SUM_BYTES] = array("Q", unchecked.sums)
            add((0, 1))
            pages.walk(meta.main, add)
            for table, tree in _trees(file, meta).items():
                if table not in unchecked.trees:
                    pages.walk(tree, add)
        data = sums.tobytes()
        return cls(meta.transaction, meta.used_bytes, xxhash.xxh3_128_digest(data), data)

    def encode(self) -> bytes:
        assert self.sums is not None
        data = _STAMP.pack(_MAGIC, self.transaction, self.used_bytes, self.digest)
        return data + _SUM.pack(crc32c(data)) + self.sums

    @classmethod
    def decode(cls, data: bytes) -> ClosingStamp | None:
        """Decode a stamp; None if there is none that can be trusted."""
        body, checksum, sums = data[: _STAMP.size], data[_STAMP.size : STAMP_BYTES], data[STAMP_BYTES:]
        if len(body) != _STAMP.size or checksum != _SUM.pack(crc32c(body)):
            return None
        magic, transaction, used_bytes, digest = _STAMP.unpack(body)
        if magic == _MAGIC_1 and not sums:
            return cls(transaction, used_bytes, digest, None)
        valid = magic == _MAGIC and len(sums) % SUM_BYTES == 0 and xxhash.xxh3_128_digest(sums) == digest
        return cls(transaction, used_bytes, digest, sums) if valid else None


def read_stamp(fs: FileSystem, path: str) -> tuple[bytes, ClosingStamp | None]:
    """Return the beginning of `manifest.owner`, and the stamp in it if that is valid."""
    note = fs.open(path)
    try:
        noted = note.pread(max(note.size(), 1), 0)
    finally:
        note.close()
    return noted[:STAMP_BYTES], ClosingStamp.decode(noted)


def _trees(file: File, meta: MetaPage) -> dict[str, TreeRoot]:
    """Return the roots of all trees but that of tables. Requires: its pages were compared."""
    return {FREE_PAGES: meta.free, **PageWalk(file, meta).roots()}


def _digest(file: File, meta: MetaPage) -> bytes:
    digest, offset = xxhash.xxh3_128(), 0
    while offset < meta.used_bytes:
        data = file.pread(min(READ_BYTES, meta.used_bytes - offset), offset)
        if not data:
            raise CorruptionError(file.path, offset, "it ends inside a page")
        digest.update(data)
        offset += len(data)
    return digest.digest()


def check_file(fs: FileSystem, path: str, stamp: ClosingStamp | None) -> UncheckedPages | None:
    """Return the pages that are still to be compared before use; None if all were.

    `CorruptionError` unless the file matches its stamp or, without a stamp, every row is valid. A stamp of an earlier
    transaction than the file's does not count: then the file is examined, too.
    """
    file, unchecked = fs.open(path), None
    try:
        meta = read_meta(file)
        if stamp is None or stamp.transaction < meta.transaction:
            _examine(file, meta)
            return None
        if meta.transaction < stamp.transaction:
            reason = f"its last transaction is {meta.transaction}, but it was closed after {stamp.transaction}"
            raise CorruptionError(path, 0, f"{reason}: it is an older copy")
        try:
            unchecked = _compare(file, meta, stamp)
        except CorruptionError:
            _examine(file, meta)  # which may say where
            raise
        return unchecked
    except OSError as error:
        raise CorruptionError(path, 0, f"it cannot be read ({error})") from error
    finally:
        if unchecked is None:
            file.close()


def _compare(file: File, meta: MetaPage, stamp: ClosingStamp) -> UncheckedPages | None:
    """Compare a file with its stamp: all pages of a small file, else the meta pages and the tree of tables.

    The result, if any, keeps the file open.
    """
    if meta.used_bytes != stamp.used_bytes:
        raise CorruptionError(file.path, 0, "it has other pages than when it was closed")
    if stamp.sums is None:
        if _digest(file, meta) != stamp.digest:
            raise CorruptionError(file.path, 0, "its bytes changed since it was closed")
        return None
    if len(stamp.sums) != (meta.last_page + 1) * SUM_BYTES:
        raise CorruptionError(file.path, 0, "the stamp of its close has other pages")
    unchecked = UncheckedPages(file, meta.page_bytes, stamp.sums)
    if meta.last_page < OPENING_PAGES_MAX:
        unchecked.check(range(meta.last_page + 1))
        return None
    unchecked.check((0, 1))
    unchecked.walk(meta.main)
    unchecked.trees.update((name, tree) for name, tree in _trees(file, meta).items() if tree.depth)
    return unchecked


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
