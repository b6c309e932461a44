"""Reads every record of a log that nobody appends to: what is damaged, and what can still be read.

Thread: any; nothing is changed. Requires: nothing is appended meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise

import numpy as np

from penstock.errors import CorruptionError, UnsupportedVersion
from penstock.host.file_errors import unreadable
from penstock.host.files import FileSystem
from penstock.log.chain import SegmentName, is_damaged_name, read_names
from penstock.log.record import HEADER, KIND_DATA, KIND_SEAL, Record, decode
from penstock.log.segment import HEADER_BYTES, SegmentReader, scan_tail


def damaged_segments(fs: FileSystem, folder: str, identity: bytes) -> Iterator[CorruptionError]:
    """Yield an error for each damaged segment of the log in `folder`; `FileNotFoundError` if one disappears."""
    chain, _, _, others = read_names(fs.listdir(folder))
    for name in filter(is_damaged_name, others):
        yield CorruptionError(f"{folder}/{name}", 0, "it looks like a segment, but its name is damaged")
    for name, successor in pairwise([*chain, None]):
        assert name is not None
        try:
            _read_segment(fs, folder, identity, name, successor)
        except CorruptionError as error:
            yield error
        except UnsupportedVersion as error:
            yield CorruptionError(f"{folder}/{name}", 0, str(error))
        except FileNotFoundError:
            raise
        except OSError as error:
            yield unreadable(error, f"{folder}/{name}")


def _read_segment(
    fs: FileSystem, folder: str, identity: bytes, name: SegmentName, successor: SegmentName | None
) -> None:
    reader = SegmentReader.open(fs, folder, name, identity)
    try:
        if successor is None and reader.sparse_index() is None:
            scan_tail(reader)  # an end torn by a crash is not damage
            return
        expected = name.first
        for offset, record in reader.records(HEADER_BYTES):
            if record.kind == KIND_SEAL or (successor is not None and expected >= successor.first):
                return
            if record.index != expected:
                raise CorruptionError(reader.file.path, offset, f"found record {record.index}, expected {expected}")
            expected += 1
            if successor is not None and expected == successor.first and reader.sparse_index() is None:
                return  # it was cut off here, without a closing record
    finally:
        reader.close()


def readable_records(fs: FileSystem, folder: str, identity: bytes) -> Iterator[Record]:
    """Yield the records of a log that can be read, in order; damaged ones are left out."""
    chain, _, _, _ = read_names(fs.listdir(folder))
    for name, successor in pairwise([*chain, None]):
        assert name is not None
        try:
            reader = SegmentReader.open(fs, folder, name, identity)
        except (CorruptionError, UnsupportedVersion, OSError):
            continue
        try:
            limit = successor.first if successor is not None else 1 << 63
            yield from _readable(reader, name.first, limit)
        finally:
            reader.close()


def _readable(reader: SegmentReader, expected: int, limit: int) -> Iterator[Record]:
    offset: int | None = HEADER_BYTES
    while offset is not None:
        try:
            for at, record in reader.records(offset):
                if record.kind == KIND_SEAL or record.index >= limit:
                    return
                offset = at
                if record.index >= expected:
                    yield record
                    expected = record.index + 1
        except (CorruptionError, OSError):
            offset = _next_record(reader, offset, expected)


def _next_record(reader: SegmentReader, offset: int, expected: int) -> int | None:
    """Return the offset of a valid record after a damaged one; None if there is none."""
    try:
        data = reader.file.pread(reader.file.size() - offset, offset)
    except OSError as error:
        unreadable(error, reader.file.path)
        return None
    words = np.frombuffer(data[: len(data) & ~7], dtype="<u8")
    if len(words) < HEADER.size // 8:
        return None
    second, index = words[1:-2], words[2:-1]
    kind = second & np.uint64(0xFF)
    likely = (index >= expected) & (index < expected + len(words)) & (kind >= KIND_DATA)
    for position in np.flatnonzero(likely).tolist():
        if position == 0:
            continue
        with suppress(CorruptionError):
            decode(data, position * 8, salt=reader.header.salt)
            return offset + position * 8
    return None
