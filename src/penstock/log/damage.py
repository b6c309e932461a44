"""Reads every record of a log that nobody appends to, and names what is damaged.

Thread: any; nothing is changed. Requires: nothing is appended meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from penstock.errors import CorruptionError, UnsupportedVersion
from penstock.host.files import FileSystem
from penstock.log.chain import SegmentName, is_damaged_name, read_names
from penstock.log.record import KIND_SEAL
from penstock.log.segment import HEADER_BYTES, SegmentReader, scan_tail


def damaged_segments(fs: FileSystem, folder: str, identity: bytes) -> Iterator[CorruptionError]:
    """Yield one error for each damaged segment of the log in `folder`."""
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


def _read_segment(
    fs: FileSystem, folder: str, identity: bytes, name: SegmentName, successor: SegmentName | None
) -> None:
    reader = SegmentReader.open(fs, folder, name, identity)
    try:
        if successor is None and reader.sparse_index() is None:
            scan_tail(reader)  # an end that a crash tore is no damage
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
