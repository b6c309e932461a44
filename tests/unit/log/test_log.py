from __future__ import annotations

import errno
import random
from pathlib import Path

import pytest

from penstock.errors import Closed, CorruptionError, DiskFull, Invalid, NotFound, Poisoned, UnsupportedVersion
from penstock.host.files import FileSystem
from penstock.host.os_files import OsFileSystem
from penstock.log import Log, LogSettings
from penstock.log.chain import SegmentName
from penstock.log.record import HEADER, encode
from penstock.log.segment import SegmentReader
from penstock.testing import Fault, SimulatedDisk

SETTINGS = LogSettings(segment_bytes=1024, allocate_bytes=256, index_bytes=128)


def open_log(fs: FileSystem, folder: str = "/log", **settings: int) -> Log:
    sizes = LogSettings(**settings) if settings else SETTINGS
    return Log.open(fs, folder, random=random.Random(1), settings=sizes)


def bodies(log: Log, start: int | None = None) -> list[bytes]:
    return [record.body for record in log.cursor(start)]


@pytest.fixture
def filled() -> Log:
    log = open_log(SimulatedDisk())
    for number in range(1, 41):
        log.append([b"%d" % number * 20])
    log.sync()
    return log


def test_a_new_log_is_empty() -> None:
    log = open_log(SimulatedDisk())
    assert (log.first, log.last, log.synced, log.incarnation) == (1, 0, 0, 1)
    assert bodies(log) == []
    with pytest.raises(NotFound, match="it holds 1 to 0"):
        log.read(1)


def test_a_real_folder(tmp_path: Path) -> None:
    with open_log(OsFileSystem(), str(tmp_path / "a" / "b")) as log:
        assert log.append([b"one", b"two"]) == 2
        assert bodies(log) == []  # not durable yet: not shown
        assert log.sync() == 2
        assert bodies(log) == [b"one", b"two"]
    with open_log(OsFileSystem(), str(tmp_path / "a" / "b")) as log:
        assert bodies(log) == [b"one", b"two"]
        assert log.repair is None
        assert log.incarnation == 2


def test_reading_from_any_index(filled: Log) -> None:
    assert len(filled._chain) >= 3
    for start in range(1, 42):
        assert bodies(filled, start) == [b"%d" % n * 20 for n in range(start, 41)]
    assert filled.read(17).body == b"17" * 20
    assert [record.index for record in filled] == list(range(1, 41))


def test_a_read_goes_by_the_sparse_index() -> None:
    log = open_log(SimulatedDisk(), segment_bytes=1 << 20, allocate_bytes=4096, index_bytes=4096)
    for number in range(2000):
        log.append([b"%d" % number * 10])
    log.sync()
    log.append([bytes(1 << 20)])  # rolls
    log.sync()
    with log.cursor(1900) as cursor:
        reader, _ = cursor._open()
        index = reader.sparse_index()
        assert index is not None
        assert len(index.offsets) > 20
        assert 0 <= cursor._offset - index.before(1900) <= 4096 + 128


def test_limits_of_a_read(filled: Log) -> None:
    with filled.cursor() as cursor:
        assert [r.index for r in cursor.read(records_max=3)] == [1, 2, 3]
        assert cursor.next == 4
        assert len(cursor.read(bytes_max=1)) == 1
        assert len(cursor.read(records_max=1000)) == 36
        assert cursor.read() == []
        filled.append([b"more"])
        assert cursor.read() == []
        filled.sync()
        assert [r.body for r in cursor.read()] == [b"more"]


def test_a_batch_larger_than_a_segment_has_one_to_itself() -> None:
    log = open_log(SimulatedDisk())
    log.append([b"a"])
    log.append([b"b" * 5000, b"c" * 5000])
    log.append([b"d"])
    log.sync()
    assert [len(b) for b in bodies(log)] == [1, 5000, 5000, 1]


def test_truncation_from_the_front_drops_whole_segments(filled: Log) -> None:
    before = len(filled._chain)
    assert filled.truncate_front(1) == 1
    first = filled.truncate_front(20)
    assert 1 < first <= 20
    assert len(filled._chain) < before
    assert bodies(filled) == [b"%d" % n * 20 for n in range(first, 41)]
    with pytest.raises(NotFound, match="begins at"):
        filled.cursor(1)
    with pytest.raises(Invalid, match="the last one is 40"):
        filled.truncate_front(42)
    filled.truncate_front(41)
    assert filled.append([b"next"]) == 41


def test_truncation_from_the_back_is_for_good(filled: Log) -> None:
    disk, was = filled._fs, filled.incarnation
    filled.truncate_back(15)
    assert (filled.last, filled.incarnation) == (15, was + 1)
    assert filled.append([b"new 16"]) == 16
    filled.sync()
    filled.close()
    log = open_log(disk)
    assert bodies(log, 15) == [b"15" * 20, b"new 16"]
    log.truncate_back(0)
    assert (log.first, log.last) == (1, 0)
    with pytest.raises(Invalid, match="cannot truncate"):
        log.truncate_back(1)


def test_a_cursor_never_goes_on_in_another_history(filled: Log) -> None:
    below, beyond = filled.cursor(10), filled.cursor(20)
    below.read(records_max=2)
    beyond.read(records_max=2)
    filled.truncate_back(15)
    filled.append([b"new"] * 10)
    filled.sync()
    assert [r.body for r in below][-1] == b"new"
    with pytest.raises(NotFound, match="truncated to 15"):
        beyond.read()


def test_cut_segments_are_read_to_the_cut_and_demand_every_record(filled: Log) -> None:
    filled.truncate_back(15)
    filled.append([b"new"])
    filled.sync()
    assert bodies(filled, 14) == [b"14" * 20, b"15" * 20, b"new"]


@pytest.mark.parametrize("kind", ["eio", "enospc"])
def test_a_failed_sync_poisons_until_recovered(kind: str) -> None:
    disk = SimulatedDisk()
    log = open_log(disk)
    log.append([b"kept"])
    log.sync()
    log.append([b"unknown"])
    disk._faults[disk.operations + 1] = kind  # type: ignore[assignment]
    with pytest.raises(OSError, match="simulated"):
        log.sync()
    for refused in (log.sync, lambda: log.append([b"x"]), lambda: log.truncate_back(0), lambda: log.truncate_front(1)):
        with pytest.raises(Poisoned, match=r"recover\(\) or reopen") as caught:
            refused()
        assert isinstance(caught.value.__cause__, OSError)
    assert bodies(log) == [b"kept"]  # readers go on
    assert log.statistics().poisoned
    log.recover()
    assert log.append([b"after"]) == 2
    log.sync()
    assert bodies(log) == [b"kept", b"after"]


def test_a_full_disk_refuses_and_recovers_by_itself() -> None:
    disk = SimulatedDisk(capacity_bytes=3000)
    log = open_log(disk)
    written = 0
    with pytest.raises(DiskFull, match="free some space"):
        for _ in range(100):
            log.append([b"x" * 100])
            written = log.sync()
    assert 10 < written < 100
    assert len(bodies(log)) == written
    for _ in range(3):
        with pytest.raises(DiskFull):
            log.append([b"x" * 3000])
    disk.capacity_bytes = 20_000
    for _ in range(20):
        log.append([b"y" * 100])
    assert log.sync() == written + 20
    assert len(bodies(log)) == written + 20
    log.close()
    assert len(bodies(open_log(disk))) == written + 20


def test_space_freed_by_truncation_is_usable() -> None:
    disk = SimulatedDisk(capacity_bytes=4000)
    log = open_log(disk)
    with pytest.raises(DiskFull):
        while True:
            log.append([b"x" * 100])
            log.sync()
    log.truncate_front(log.last)
    log.append([b"y" * 100])
    assert log.sync() == log.last


def test_a_torn_tail_is_repaired_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    disk = SimulatedDisk()
    log = open_log(disk)
    log.append([b"sound"])
    log.sync()
    log.append([b"torn"])
    active = log._active
    assert active is not None
    active.file.pwrite(b"\xff", active.end - 8)
    log = open_log(disk)
    assert bodies(log) == [b"sound"]
    assert log.repair is not None
    assert log.repair.torn == "a record's checksum does not match"
    assert "torn tail dropped" in caplog.text


def test_an_unsealed_end_keeps_what_is_sound() -> None:
    disk = SimulatedDisk()
    log = open_log(disk)
    log.append([b"a"])
    log.sync()
    log.append([b"b"])
    log = open_log(disk)  # the process died; nobody was told of b, but it may be kept
    assert bodies(log) == [b"a", b"b"]
    assert log.repair is not None
    assert (log.repair.resynced, log.repair.torn) == (1, None)  # b vouches for a; nothing vouches for b


def test_a_missing_seal_is_corruption(filled: Log) -> None:
    disk, name = filled._fs, filled._chain[1]
    assert isinstance(disk, SimulatedDisk)
    path = f"/log/{name}"
    file = disk.open(path, write=True)
    file.truncate(file.size() - 8)
    with pytest.raises(CorruptionError, match="closing record is damaged") as caught:
        list(filled)
    assert caught.value.path == path


def test_files_of_others_are_refused(filled: Log) -> None:
    disk = filled._fs
    filled.close()
    with pytest.raises(CorruptionError, match="belongs to another store"):
        Log.open(disk, "/log", random=random.Random(1), settings=SETTINGS, identity=b"another store's!")


def test_a_newer_version_is_told() -> None:
    disk = SimulatedDisk()
    open_log(disk).close()
    body = b"PSTKLOG\0" + (2).to_bytes(2, "little") + bytes(22)
    file = disk.open("/log/00000000000000000001-0000000001.log", write=True)
    file.pwrite(encode([body], salt=0, incarnation=1, first=1, synced=0, kind=1), 0)
    with pytest.raises(UnsupportedVersion, match="version 2"):
        open_log(disk)


def test_wrong_use() -> None:
    disk = SimulatedDisk()
    log = open_log(disk)
    for call in (
        lambda: log.append(["text"]),  # type: ignore[list-item]
        lambda: log.append([b""], kind=2),
        lambda: log.append([b""], flags=256),
        lambda: LogSettings(segment_bytes=0),
        lambda: Log.open(disk, "/log", random=random.Random(1), identity=b"short"),
    ):
        with pytest.raises(Invalid):
            call()
    assert log.last == 0
    log.close()
    log.close()
    for refused in (log.sync, lambda: log.append([b""]), log.recover):
        with pytest.raises(Closed, match="open it again"):
            refused()


def test_a_full_disk_does_not_stop_closing() -> None:
    disk = SimulatedDisk()
    log = open_log(disk)
    log.append([b"x" * 100])
    log.sync()
    disk.capacity_bytes = 0
    log.close()
    disk.capacity_bytes = None
    assert bodies(open_log(disk)) == [b"x" * 100]


def test_a_failed_cut_is_a_cut_once_its_outcome_is_unknown() -> None:
    for at in range(1, 8):
        disk = SimulatedDisk()
        log = open_log(disk)
        log.append([b"a", b"b", b"c"])
        log.sync()
        disk._faults[disk.operations + at] = "eio"
        try:
            log.truncate_back(1)
        except OSError:
            assert log.last in (1, 3)
            log.recover()
        disk._faults.clear()
        expected = [b"a", b"b", b"c"][: log.last]
        log.append([b"d"])
        log.sync()
        assert bodies(log) == [*expected, b"d"]
        assert bodies(open_log(disk)) == [*expected, b"d"]


def test_nothing_is_unlinked_on_the_word_of_a_name(filled: Log) -> None:
    disk = filled._fs
    filled.close()
    before = sorted(disk.listdir("/log"))
    other = Log.open(disk, "/other", random=random.Random(2), settings=SETTINGS, identity=b"another store's!")
    content = disk.open(f"/other/{other._chain[0]}").pread(4096, 0)
    stray = "00000000000000000001-0000000099.log"
    disk.create(f"/log/{stray}").pwrite(content, 0)
    with pytest.raises(CorruptionError):
        open_log(disk)
    assert sorted(disk.listdir("/log")) == sorted([*before, stray])


def test_a_name_that_has_rotted_is_told(filled: Log) -> None:
    disk, name = filled._fs, str(filled._chain[-1])
    filled.close()
    disk.rename(f"/log/{name}", f"/log/{name.replace('-', '+')}")
    with pytest.raises(CorruptionError, match="its name is damaged"):
        open_log(disk)


def test_a_failed_read_skips_nothing(filled: Log) -> None:
    disk = filled._fs
    assert isinstance(disk, SimulatedDisk)
    for at in range(1, 12):
        cursor = filled.cursor(3)
        disk._faults = {disk.operations + at: "eio"}
        indexes = []
        for _ in range(30):
            try:
                indexes += [record.index for record in cursor.read(records_max=7)]
            except OSError:
                continue
        assert indexes == list(range(3, 41))


def test_a_cursor_beside_a_roll(filled: Log) -> None:
    cursor, opened = filled.cursor(filled.last), filled.open_segment

    def open_then_roll(name: SegmentName) -> SegmentReader:
        reader = opened(name)
        filled.open_segment = opened  # type: ignore[method-assign]
        for _ in range(6):
            filled.append([b"z" * 300])
        filled.sync()
        return reader

    filled.open_segment = open_then_roll  # type: ignore[method-assign]
    assert [record.index for record in cursor] == list(range(40, 47))


def test_a_cursor_beside_a_cut_to_its_place(filled: Log) -> None:
    cursor, locate = filled.cursor(1), filled.locate
    cursor.read(records_max=5)

    def cut_then_locate(index: int) -> tuple[SegmentName, SegmentName | None]:
        filled.locate = locate  # type: ignore[method-assign]
        filled.truncate_back(5)
        return locate(index)

    filled.locate = cut_then_locate  # type: ignore[method-assign]
    assert cursor.read() == []


def test_a_sparse_index_of_any_size() -> None:
    log = open_log(SimulatedDisk(), segment_bytes=16 << 20, allocate_bytes=4096, index_bytes=1)
    log.append([b""] * 70_000)
    log.append([bytes(16 << 20)])  # rolls: the closing record has more than a megabyte
    log.sync()
    assert log.read(69_999).index == 69_999


def test_a_full_disk_leaves_no_trace_of_a_cut(filled: Log) -> None:
    disk, incarnation = filled._fs, filled.incarnation
    assert isinstance(disk, SimulatedDisk)
    disk.capacity_bytes = 0
    for _ in range(3):
        with pytest.raises(DiskFull):
            filled.truncate_back(20)
    assert (filled.last, filled.incarnation) == (40, incarnation)
    assert sum(name.endswith(".tmp") for name in disk.listdir("/log")) <= 1


def test_bytes_that_look_like_headers_cannot_stop_an_opening() -> None:
    disk = SimulatedDisk()
    log = open_log(disk, segment_bytes=16 << 20)
    log.append([b"sound"])
    log.sync()
    header = HEADER.pack(0, 200_000, 16, 0, 0, 1, 5, 4)
    log.append([header * 16_384])
    active = log._active
    assert active is not None
    active.file.pwrite(b"\xff", active.end - 8)
    with pytest.raises(CorruptionError, match="too many records to check"):
        open_log(disk, segment_bytes=16 << 20)


def test_read_limits(filled: Log) -> None:
    for wrong in ({"records_max": 0}, {"bytes_max": 0}):
        with pytest.raises(Invalid, match="at least 1"):
            filled.cursor().read(**wrong)


def test_a_closed_log_does_not_read(filled: Log) -> None:
    cursor = filled.cursor()
    filled.close()
    with pytest.raises(Closed):
        cursor.read()


def test_faults_are_counted_from_one() -> None:
    with pytest.raises(OSError, match="operation 1"):
        open_log(SimulatedDisk(faults=(Fault(1, "eio"),)))


def test_a_segment_that_is_gone_is_not_in_the_log_although_its_folder_was_not_synced(
    filled: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = filled._fs
    second = filled._chain[1].first
    with monkeypatch.context() as patch:
        patch.setattr(filled._fs, "folder", lambda path: _UnsyncedFolder())
        assert filled.truncate_front(filled.last) == second  # one is gone; the next must not go before it
    assert bodies(filled) == [b"%d" % n * 20 for n in range(second, 41)]
    assert filled.truncate_front(filled.last) > second  # and the next attempt goes on
    filled.close()
    with open_log(disk) as log:
        assert bodies(log)[-1] == b"40" * 20


class _UnsyncedFolder:
    def fsync(self) -> None:
        raise OSError(errno.EIO, "the folder cannot be synced")

    def __enter__(self) -> _UnsyncedFolder:
        return self

    def __exit__(self, *_: object) -> None:
        pass
