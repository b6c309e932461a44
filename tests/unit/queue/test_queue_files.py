"""The bytes of a data file, written out by hand from docs/format/qmft.md and compared with what the code writes."""

from __future__ import annotations

import random
import struct
import zlib
from pathlib import Path

import google_crc32c
import pytest
import xxhash

from penstock.errors import CorruptionError
from penstock.queue import Messages, PersistentQueue
from penstock.queue.chain import QueueSettings
from penstock.queue.files import decode_trim
from penstock.queue.qmft import data_files
from penstock.testing import FakeClock, SimulatedDisk

GOLDEN = Path(__file__).parents[2] / "golden" / "queue" / "0000000001.data"
GOLDEN_SHARD = GOLDEN.with_name("shard_0000000001.data")
SALT = 0x0D8A1C2B
IDENTITY = bytes(range(16))
TIME_US = 1_769_083_200_000_000


def record(salt: int, kind: int, index: int, synced: int, body: bytes) -> bytes:
    covered = struct.pack("<IBBHIQQ", len(body), kind, 0, 0, 1, index, synced) + body + bytes(-len(body) % 8)
    return struct.pack("<I", google_crc32c.extend(salt, covered)) + covered


def by_hand(version: int = 1, identity: bytes = IDENTITY) -> bytes:
    opening = b"PSTKQUE\0" + struct.pack("<HHI", version, 0, SALT) + identity + struct.pack("<Qqq", 0, 0, TIME_US)
    data = record(0, 1, 1, 0, opening)
    plain = struct.pack("<QqIHH", 1, TIME_US, 2, 0, 0) + struct.pack("<3i4x", 0, 3, 4) + b"abcd" + bytes(4)
    first = len(data)
    data += record(SALT, 16, 1, 0, plain)
    full = struct.pack("<QqIHH", 9, TIME_US + 5, 2, 7, 0)
    full += struct.pack("<2q", 100, 200)  # times
    full += b"\x02" + bytes(7)  # the first message has no key
    full += struct.pack("<3i4x", 0, 0, 1) + b"k" + bytes(7)
    full += struct.pack("<3i4x", 0, 0, 8) + b"payload!"
    data += record(SALT, 16, 3, 2, full)
    index = struct.pack("<QQQ", 1, first, TIME_US)  # the next entry would come after 64 KiB
    index += struct.pack("<QqQQ", 9, TIME_US + 5, 4, len(data))
    return data + record(SALT, 17, 5, 4, index)


class FixedSalt(random.Random):
    def randbytes(self, n: int) -> bytes:
        return SALT.to_bytes(n, "little")


def test_the_bytes_are_those_of_the_format_page() -> None:
    disk = SimulatedDisk()
    clock = FakeClock(time_us=TIME_US)
    queue = PersistentQueue.open(disk, "/q", random=FixedSalt(), clock=clock, identity=IDENTITY)
    queue.append(Messages.of([b"abc", b"d"]))
    queue.sync()
    queue.append(Messages.of([b"", b"payload!"], [None, b"k"], [100, 200]), lsn=9, time_us=TIME_US + 5)
    queue.close()
    file = disk.open("/q/2026/01/22/0000000001.data")
    assert file.pread(file.size(), 0) == by_hand() == GOLDEN.read_bytes()


def test_the_bytes_of_a_trim_are_those_of_the_format_page() -> None:
    disk = SimulatedDisk()
    queue = open_shard(disk, "/tables/7/3")
    queue.append_bodies([Messages.of([b"abc", b"d"]).encode(lsn=0, time_us=0)], lsn=4, time_us=TIME_US)
    queue.append_bodies([], lsn=6, time_us=TIME_US + 1, trimmed=(1, 3))
    file = disk.open("/tables/7/3/2026/01/22/0000000001.data")
    trim = struct.pack("<QqIHH", 6, TIME_US + 1, 0, 0, 0) + struct.pack("<QQ", 1, 3)
    expected = record(SALT, 18, 3, 0, trim)
    assert expected in file.pread(file.size(), 0)
    (_, first), (_, last) = queue.changes(1)
    assert (first.kind, last.kind, decode_trim(last)) == (16, 18, (1, 3))
    assert [batch.first for batch in queue.read(1)] == [1]


def open_shard(disk: SimulatedDisk, folder: str) -> PersistentQueue:
    clock = FakeClock(time_us=TIME_US)
    return PersistentQueue.open(disk, folder, random=FixedSalt(), clock=clock, identity=IDENTITY, cut_after_lsn=0)


def test_a_file_of_a_store_names_its_shard() -> None:
    disk, folder = SimulatedDisk(), "/moved/tables/7/3"
    queue = open_shard(disk, folder)
    queue.append(Messages.of([b"abc", b"d"]), lsn=1)
    queue.sync()
    queue.append(Messages.of([b"", b"payload!"], [None, b"k"], [100, 200]), lsn=9, time_us=TIME_US + 5)
    queue.close()
    file = disk.open(f"{folder}/2026/01/22/0000000001.data")
    written = file.pread(file.size(), 0)
    assert written == by_hand(2, xxhash.xxh3_128_digest(IDENTITY + b"7/3")) == GOLDEN_SHARD.read_bytes()
    assert open_shard(disk, folder).read(1)[0].payloads.to_pylist() == [b"abc", b"d"]


@pytest.mark.parametrize("which", ["files", "sealed file", "manifest"])
def test_a_file_of_another_shard_is_noticed(which: str) -> None:
    """Files of all shards have the same names."""
    disk, contents = SimulatedDisk(), dict[str, dict[str, bytes]]()
    for shard, size in (("0", 300), ("1", 290)):
        settings = QueueSettings(file_bytes=1_024, allocate_bytes=64, index_bytes=64)
        folder = f"/store/tables/7/{shard}"
        queue = PersistentQueue.open(
            disk, folder, random=FixedSalt(), clock=FakeClock(), settings=settings, identity=IDENTITY, cut_after_lsn=0
        )
        for lsn in range(1, 13):
            queue.append(Messages.of([b"%d" % lsn * (size // 2)]), lsn=lsn)
        queue.close()
        paths = [*data_files(disk, folder), "manifest.1", "manifest.2", "manifest.current"]
        contents[folder] = {path: _content(disk, f"{folder}/{path}") for path in paths}
    one, other = contents.values()
    names = [name for name in one if name.endswith(".data") != (which == "manifest")]
    for name in names[:1] if which == "sealed file" else names:
        file = disk.open(f"/store/tables/7/0/{name}", write=True)
        file.pwrite(other[name], 0)
        file.truncate(len(other[name]))
    with pytest.raises(CorruptionError):
        open_shard(disk, "/store/tables/7/0").read(1)


def _content(disk: SimulatedDisk, path: str) -> bytes:
    file = disk.open(path)
    return file.pread(file.size(), 0)


def test_the_golden_file_is_read() -> None:
    disk = SimulatedDisk()
    for folder in ("/q", "/q/2026", "/q/2026/01", "/q/2026/01/22"):
        disk.mkdir(folder)
    data = GOLDEN.read_bytes()
    disk.create("/q/2026/01/22/0000000001.data").pwrite(data, 0)
    path = b"2026/01/22/0000000001.data"
    manifest = b"QMFT" + struct.pack("<IQII8x", 1, 5, 0, 0)
    manifest += struct.pack("<IQQH", 1, len(data), 4, len(path)) + path
    manifest = manifest[:20] + struct.pack("<I", zlib.crc32(manifest)) + manifest[24:]
    disk.create("/q/manifest.1").pwrite(manifest, 0)
    disk.create("/q/manifest.current").pwrite(b"\x01", 0)
    queue = PersistentQueue.open(disk, "/q", random=FixedSalt(), clock=FakeClock(), identity=IDENTITY)
    rows = [
        (b.first, b.lsn, b.time_us, b.payloads.to_pylist(), b.keys.to_pylist(), b.times.tolist()) for b in queue.read(1)
    ]
    assert rows == [
        (1, 1, TIME_US, [b"abc", b"d"], [None, None], [TIME_US, TIME_US]),
        (3, 9, TIME_US + 5, [b"", b"payload!"], [None, b"k"], [100, 200]),
    ]
    assert queue.stored_lsn == 9
