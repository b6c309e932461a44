"""The installation of a snapshot, interrupted at every file operation: the old store until READY, then the new one."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.archive.chunk import ChunkIdentity, Sealing
from penstock.archive.table_keys import TableKeyRing
from penstock.errors import CorruptionError, Invalid
from penstock.host.file_operations import make_dirs, walk
from penstock.lsm.rows import Columns
from penstock.lsm.writer import SstableWriter
from penstock.replica.file_channel import ShippedFile, SnapshotListing
from penstock.replica.state import LogBase, RaftState, StateFile
from penstock.server.installing import READY, SnapshotTaker, finish_installation
from penstock.store.identity import StoreIdentity, read_identity, write_identity
from penstock.testing.disk import SimulatedDisk

ROOT, CLUSTER, ORIGIN = "/member", bytes(range(16)), bytes(16)
OLD = {
    "manifest": b"old",
    "manifest.owner": b"old",
    "journal/1.log": b"old",
    "tables/1/0/1.sst": b"old",
    "aside/1": b"old",
}
NEW = {"manifest": b"new", "journal/9.log": b"n" * 70_000, "tables/1/0/1.bin": b"new", "tables/2/0/5.bin": b"new"}
BASE = LogBase(8, 3, 7)


class _Leader:
    """A leader's snapshot, in memory."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files, self.read_bytes = files, 0

    def snapshot(self) -> SnapshotListing:
        files = tuple(ShippedFile(path, len(data)) for path, data in self.files.items())
        return SnapshotListing(ORIGIN, BASE, LogBase(12, 3, 11), files)

    def read(self, path: str, offset: int, size: int) -> bytes:
        data = self.files[path][offset : offset + min(size, 20_000)]
        self.read_bytes += len(data)
        return data

    def hash_prefix(self, path: str, size: int) -> bytes:
        import hashlib

        return hashlib.sha256(self.files[path][:size]).digest()


def _write(disk: SimulatedDisk, files: dict[str, bytes]) -> None:
    for path, data in files.items():
        make_dirs(disk, f"{ROOT}/{path}".rpartition("/")[0])
        file = disk.create(f"{ROOT}/{path}")
        file.pwrite(data, 0)
        file.fsync()
        file.close()
        disk.fsync_dir(f"{ROOT}/{path}".rpartition("/")[0])


def _contents(disk: SimulatedDisk) -> dict[str, bytes]:
    contents = {}
    for path in walk(disk, ROOT):
        file = disk.open(f"{ROOT}/{path}")
        contents[path] = file.pread(file.size(), 0)
        file.close()
    return contents


def _member() -> SimulatedDisk:
    disk = SimulatedDisk()
    make_dirs(disk, ROOT)
    _write(disk, OLD)
    write_identity(disk, ROOT, StoreIdentity(CLUSTER, CLUSTER))
    StateFile(disk, f"{ROOT}/raft").save(RaftState(term=5, vote="b", life=77))
    return disk


def _fetch(disk: SimulatedDisk, leader: Any) -> tuple[SnapshotTaker, SnapshotListing]:
    taker = SnapshotTaker(disk, ROOT, stop=lambda: False)
    return taker, taker.fetch(leader)


def test_a_crash_at_any_operation() -> None:
    disk = _member()
    disk.on_image = lambda: 0
    taker, listing = _fetch(disk, _Leader(NEW))
    taker.make_ready(listing, CLUSTER)
    assert finish_installation(disk, ROOT)
    olds = news = 0
    for image in [*disk.images, disk.image()]:
        for mode in ("strict", "torn", "kept"):
            restored = image.restore(mode)
            again = finish_installation(restored, ROOT)
            assert not finish_installation(restored, ROOT)
            contents, state = _contents(restored), StateFile(restored, f"{ROOT}/raft").state
            assert (state.term, state.vote, state.life) == (5, "b", 77)
            if state.bases == (BASE,):
                news += 1
                assert {path: data for path, data in contents.items() if path not in ("STORE", "raft")} == NEW
                assert read_identity(restored, ROOT) == StoreIdentity(ORIGIN, CLUSTER)
            else:
                olds += 1
                assert not again
                assert OLD.items() <= contents.items()
    assert olds > 50
    assert news > 30


def test_what_was_fetched_is_not_fetched_again() -> None:
    disk, leader = _member(), _Leader(NEW)
    _fetch(disk, leader)
    assert leader.read_bytes == sum(map(len, NEW.values()))
    leader.read_bytes, leader.files = 0, {**NEW, "manifest": b"newer"}
    taker, _ = _fetch(disk, leader)
    assert taker.kept_bytes == 70_000
    assert leader.read_bytes < 100
    leader.files = {**NEW, "journal/9.log": b"m" * 70_000}  # another file under the same name
    taker, _ = _fetch(disk, leader)
    assert taker.kept_bytes == 0
    assert _contents(disk)["incoming-journal/9.log"] == b"m" * 70_000


@pytest.mark.parametrize("path", ["../raft", "/raft", "raft", "STORE", "tables/../raft", "incoming-READY", "", "run/x"])
def test_a_leader_cannot_write_elsewhere(path: str) -> None:
    disk = _member()
    before = _contents(disk)
    with pytest.raises(Invalid):
        _fetch(disk, _Leader({**NEW, path: b"bad"}))
    assert _contents(disk) == before


def test_a_damaged_end_of_a_snapshot_is_noticed() -> None:
    disk = _member()
    taker, listing = _fetch(disk, _Leader(NEW))
    taker.make_ready(listing, CLUSTER)
    file = disk.open(f"{ROOT}/{READY}", write=True)
    file.pwrite(b"\xff", 6)
    file.close()
    with pytest.raises(CorruptionError):
        finish_installation(disk, ROOT)
    assert OLD.items() <= _contents(disk).items()


def _sstable(sealing: Sealing) -> dict[str, bytes]:
    disk, path = SimulatedDisk(), "/5.sst"
    writer = SstableWriter(disk, path, ChunkIdentity(store=ORIGIN, chunk_id=5), sealing=sealing)
    writer.append(Columns.of([b"key"], [b"value" * 1_000], 1, [0]))
    writer.finish()
    return {f"tables/2/0{name}": disk.open(name).pread(1 << 20, 0) for name in (path, "/5.idx")}


@pytest.mark.parametrize("which", ["tables/2/0/5.sst", "tables/2/0/5.idx"])
@pytest.mark.parametrize("encrypted", [False, True])
def test_a_damaged_sstable_is_not_installed_whether_it_is_encrypted_or_not(which: str, encrypted: bool) -> None:
    """No key is here when a snapshot comes: blocks have checksums of their own."""
    sealing = Sealing(keys=TableKeyRing(lambda table: bytes(32), 2)) if encrypted else Sealing()
    files, disk = _sstable(sealing), _member()
    middle = len(files[which]) // 2
    flipped = bytes([files[which][middle] ^ 1])
    damaged = files | {which: files[which][:middle] + flipped + files[which][middle + 1 :]}
    with pytest.raises(CorruptionError, match="incoming-tables/2/0/5"):
        _fetch(disk, _Leader(damaged))
    _fetch(disk, _Leader(files))
