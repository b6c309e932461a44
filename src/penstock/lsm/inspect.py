"""Shows an sstable to people: its rows, its statistics, and whether every page is intact.

Thread: any; nothing is changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from penstock.archive.chunk import KeyRing, crc32c
from penstock.archive.container import open_chunk
from penstock.errors import CorruptionError, Invalid
from penstock.host.files import FileSystem
from penstock.host.os_files import OsFileSystem
from penstock.lsm.index import Index, Summary
from penstock.lsm.operators import CHAIN, KIND_OPERATORS, OPERATORS
from penstock.lsm.rows import DELETE, NEVER, PUT, RANGE_DELETE, bytes_list
from penstock.lsm.sstable import Sstable
from penstock.lsm.writer import index_path

KIND_NAMES = {PUT: "put", DELETE: "delete", RANGE_DELETE: "range delete", CHAIN: "merge chain"}
KIND_NAMES |= {kind: f"merge {name}" for name, kind in OPERATORS.items()}
KIND_NAMES |= {kind: f"merge {function.partition(':')[2]}" for kind, function in KIND_OPERATORS.items()}


@dataclass(frozen=True, slots=True)
class DumpedRow:
    """A row as stored. The value of a range delete is the end of its range."""

    key: bytes
    lsn: int
    kind: str
    expires_us: int | None
    value: bytes


@dataclass(frozen=True, slots=True)
class Statistics:
    """Statistics of an sstable and its index."""

    summary: Summary
    rows_by_kind: dict[str, int]
    key_bytes: int
    value_bytes: int
    batches: int
    slots: int
    index_bytes: int
    mapped: bool


def dump(table: Sstable, start: bytes = b"", end: bytes | None = None) -> Iterator[DumpedRow]:
    """Yield every row with its key in [start, end), range deletes included."""
    for number, first, last in table.pieces(*table.rows_between(start, end)):
        for at in range(first, last, 1_024):
            columns = table.columns(number, at, min(at + 1_024, last))
            for key, lsn, kind, expires, value in zip(
                bytes_list(columns.keys), columns.lsns.tolist(), columns.kinds.tolist(), columns.expires.tolist(),
                bytes_list(columns.values), strict=True,
            ):  # fmt: skip
                yield DumpedRow(key, lsn, KIND_NAMES[kind], None if expires == NEVER else expires, value)


def statistics(path: str, *, fs: FileSystem | None = None, keys: KeyRing | None = None) -> Statistics:
    """Read a whole sstable and return its statistics."""
    fs = OsFileSystem() if fs is None else fs
    table = Sstable.open(path, fs=fs, keys=keys)
    kinds: dict[str, int] = {}
    key_bytes = value_bytes = 0
    for row in dump(table):
        kinds[row.kind] = kinds.get(row.kind, 0) + 1
        key_bytes += len(row.key)
        value_bytes += len(row.value)
    chunk = open_chunk(fs, index_path(path), keys)
    index = Index(chunk)
    return Statistics(
        summary=table.summary,
        rows_by_kind=kinds,
        key_bytes=key_bytes,
        value_bytes=value_bytes,
        batches=len(index.batches),
        slots=index.slots,
        index_bytes=chunk.size,
        mapped=table.mapped,
    )


def verify(path: str, *, fs: FileSystem | None = None, keys: KeyRing | None = None) -> list[CorruptionError]:
    """Check every page of an sstable and its index, the order of its rows, and that the index finds each of them."""
    if crc32c is None:
        raise Invalid("checksums need the package google-crc32c: install it with pip install google-crc32c")
    try:
        table = Sstable.open(path, fs=fs, keys=keys)
    except CorruptionError as error:
        return [error]
    damage = table.damaged_pages()
    if damage:
        return damage  # rows of a damaged file cannot be checked
    before: bytes | None = None
    for piece in table.scan():
        for key in piece.keys:
            if before is not None and key <= before:
                return [CorruptionError(path, 0, f"key {key!r} follows {before!r}")]
            if table.get(key) is None:
                return [CorruptionError(index_path(path), 0, f"the index does not find key {key!r}")]
            before = key
    return []
