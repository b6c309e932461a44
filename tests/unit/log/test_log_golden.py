"""The bytes of a log, written out by hand from docs/format/log.md and compared with what the code writes."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import google_crc32c

from penstock.log import Log, LogSettings
from penstock.testing import SimulatedDisk

GOLDEN = Path(__file__).parents[2] / "golden" / "log" / "00000000000000000001-0000000001.log"
SALT = 0x0D8A1C2B
IDENTITY = bytes(range(16))


def record(salt: int, kind: int, index: int, synced: int, body: bytes, incarnation: int = 1, flags: int = 0) -> bytes:
    rest = struct.pack("<IBBHIQQ", len(body), kind, flags, 0, incarnation, index, synced)
    covered = rest + body + bytes(-len(body) % 8)
    return struct.pack("<I", google_crc32c.extend(salt, covered)) + covered


def by_hand() -> bytes:
    header = record(0, 1, 1, 0, b"PSTKLOG\0" + struct.pack("<HHI", 1, 0, SALT) + IDENTITY)
    first = record(SALT, 16, 1, 0, b"penstock")
    second = record(SALT, 17, 2, 1, b"odd", flags=5)
    third = record(SALT, 17, 3, 1, b"", flags=5)
    offsets = [len(header), len(header + first), len(header + first + second)]
    entries = b"".join(struct.pack("<QQ", index, offset) for index, offset in enumerate(offsets, 1))
    data = header + first + second + third
    return data + record(SALT, 2, 4, 3, entries + struct.pack("<QQ", 3, len(data)))


class FixedSalt(random.Random):
    def randbytes(self, n: int) -> bytes:
        return SALT.to_bytes(n, "little")


def test_the_bytes_are_those_of_the_format_page() -> None:
    disk = SimulatedDisk()
    settings = LogSettings(index_bytes=1)
    log = Log.open(disk, "/log", random=FixedSalt(), settings=settings, identity=IDENTITY)
    log.append([b"penstock"])
    log.sync()
    log.append([b"odd", b""], kind=17, flags=5)
    log.close()
    file = disk.open("/log/00000000000000000001-0000000001.log")
    assert file.pread(file.size(), 0) == by_hand() == GOLDEN.read_bytes()


def test_the_golden_file_is_read() -> None:
    disk = SimulatedDisk()
    disk.mkdir("/log")
    file = disk.create("/log/" + GOLDEN.name)
    file.pwrite(GOLDEN.read_bytes(), 0)
    log = Log.open(disk, "/log", random=FixedSalt(), identity=IDENTITY)
    assert [(r.index, r.kind, r.flags, r.body) for r in log] == [
        (1, 16, 0, b"penstock"),
        (2, 17, 5, b"odd"),
        (3, 17, 5, b""),
    ]
