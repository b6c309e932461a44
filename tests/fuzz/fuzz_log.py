"""Coverage-guided fuzzing of the decoders of the log; `make crash` runs it for a while.

Any bytes give a record or `CorruptionError`, and a segment of any bytes gives a tail or `CorruptionError`.
"""

from __future__ import annotations

import contextlib
import sys

import atheris

with atheris.instrument_imports():
    from penstock.errors import CorruptionError, UnsupportedVersion
    from penstock.log.chain import SegmentName
    from penstock.log.record import decode, encode
    from penstock.log.segment import SegmentHeader, SegmentReader, scan_tail
    from penstock.testing import SimulatedDisk

HEADER = SegmentHeader(first=1, incarnation=1, salt=7, identity=bytes(16), cut=False)
SOUND = encode([b"one", b"two"], salt=7, incarnation=1, first=1, synced=0)


def one(data: bytes) -> None:
    with contextlib.suppress(CorruptionError):
        decode(data, 0, salt=7)
    for content in (data, HEADER.encode() + data, HEADER.encode() + SOUND + data):
        disk = SimulatedDisk()
        disk.put_atomically(f"/{SegmentName(1, 1)}", content)
        with contextlib.suppress(CorruptionError, UnsupportedVersion):
            scan_tail(SegmentReader.open(disk, "", SegmentName(1, 1), bytes(16)))


if __name__ == "__main__":
    atheris.Setup(sys.argv, one)
    atheris.Fuzz()
