from __future__ import annotations

import pytest

from penstock.errors import CorruptionError, Invalid
from penstock.testing import FakeClock, Fault, Faults, History, SimulatedDisk, Violation, explore
from penstock.testing.crashes import Skipped, absent
from penstock.testing.disk_image import Mode


def test_strict_keeps_only_what_was_synced() -> None:
    disk = SimulatedDisk()
    file = disk.create("/f")
    file.pwrite(b"synced", 0)
    file.fsync()
    file.pwrite(b"lost??", 0)
    assert not disk.image().restore("strict").exists("/f")  # its name was not
    disk.fsync_dir("/")
    after = disk.image()
    assert after.restore("strict").open("/f").pread(10, 0) == b"synced"
    assert after.restore("kept").open("/f").pread(10, 0) == b"lost??"


def test_torn_keeps_sectors_by_chance_and_nothing_else() -> None:
    disk = SimulatedDisk()
    file = disk.create("/f")
    disk.fsync_dir("/")
    file.pwrite(b"o" * 2048, 0)
    file.fsync()
    file.pwrite(b"n" * 2000, 24)
    patterns = set()
    for seed in range(200):
        content = disk.image().restore("torn", seed).open("/f").pread(4096, 0)
        assert len(content) == 2048
        assert content[:24] == b"o" * 24
        sectors = [content[i : i + 512].lstrip(b"o") for i in range(0, 2048, 512)]
        assert all(set(sector.rstrip(b"o")) <= {ord("n")} for sector in sectors)
        patterns.add(tuple(bool(sector) for sector in sectors))
    assert len(patterns) == 16


def test_a_new_file_may_be_empty_or_zeroed_after_a_crash() -> None:
    disk = SimulatedDisk()
    file = disk.create("/f")
    disk.fsync_dir("/")
    file.pwrite(b"x" * 1024, 0)
    contents = {disk.image().restore("torn", seed).open("/f").pread(2000, 0) for seed in range(300)}
    assert {b"", bytes(1024), b"x" * 1024} <= contents


def test_a_failed_fsync_loses_its_bytes_for_later_ones() -> None:
    disk = SimulatedDisk(faults=(Fault(4, "eio"),))
    file = disk.create("/f")
    disk.fsync_dir("/")
    file.pwrite(b"gone", 0)
    with pytest.raises(OSError, match="simulated eio"):
        file.fsync()
    file.fsync()  # "succeeds"
    assert file.pread(4, 0) == b"gone"
    assert disk.image().restore("strict").open("/f").pread(4, 0) == b""
    survivor = disk.image().restore("restart")  # the operating system lives on, and has not forgotten
    assert survivor.open("/f").pread(4, 0) == b"gone"
    survivor.open("/f").fsync()
    assert survivor.image().restore("strict").open("/f").pread(4, 0) == b""


def test_names_survive_by_chance() -> None:
    disk = SimulatedDisk()
    disk.create("/a").fsync()
    disk.fsync_dir("/")
    disk.rename("/a", "/b")
    disk.create("/c")
    listings = {tuple(sorted(disk.image().restore("torn", seed).listdir("/"))) for seed in range(100)}
    assert listings == {("a",), ("b",), ("a", "c"), ("b", "c")}


def test_faults() -> None:
    disk = SimulatedDisk(faults=(Fault(2, "short"), Fault(5, "rot"), Fault(6, "enospc"), Fault(8, "rot")))
    file = disk.create("/f")
    file.pwrite(b"0123", 0)  # 2 and 3: looped
    assert file.pread(4, 0) == b"0123"  # 4
    file.pwrite(b"0123", 0)  # 5: one bit is wrong on the disk
    with pytest.raises(OSError, match="enospc"):
        file.pwrite(b"4567", 4)  # 6
    assert file.pread(4, 0) != b"0123"  # 7
    assert disk.damaged
    stored = bytes(file._inode.live)  # type: ignore[attr-defined]
    assert file.pread(8, 0) != stored  # 8: one bit is wrong on its way


def test_capacity() -> None:
    disk = SimulatedDisk(capacity_bytes=10)
    file = disk.create("/f")
    with pytest.raises(OSError, match="full"):
        file.pwrite(b"x" * 11, 0)
    assert file.size() == 10  # what fitted is there, as on a real disk
    disk.unlink("/f")
    disk.create("/g").allocate(0, 10)


class Careless:
    """A scenario with a bug: it tells before it syncs."""

    def __init__(self, *, careful: bool = False) -> None:
        self.careful = careful

    def run(self, disk: SimulatedDisk, history: History) -> None:
        file = disk.create("/f")
        disk.fsync_dir("/")
        file.pwrite(b"word", 0)
        if self.careful:
            file.fsync()
        history.note("told", b"word")

    def resume(self, disk: SimulatedDisk, history: History) -> None:
        acknowledged = [value for _, value in history.events]
        content = disk.open("/f").pread(10, 0) if disk.exists("/f") else b""
        if acknowledged and content != b"word":
            if disk.damaged:
                raise CorruptionError("/f", 0, "rotten")
            raise Violation(f"{content!r}")


@pytest.mark.parametrize("mode", ["strict", "torn"])
def test_explore_catches_a_broken_promise_and_says_where(mode: Mode) -> None:
    with pytest.raises(Violation, match=rf"{mode} crash .* before operation 3 \(end\)"):
        explore(Careless(), modes=(mode,), torn_seeds=20)


def test_explore_passes_a_kept_promise() -> None:
    report = explore(Careless(careful=True), faults=Faults())
    assert report.operations == 4
    assert report.faults == 16
    assert report.labels == {"create", "fsync_dir", "pwrite", "fsync"}
    assert report.missing("create /f", "pwrite", "pwrite /g", "unlink /f") == ["pwrite /g", "unlink /f"]
    assert absent(report.faulted, "fsync /f", "unlink") == ["unlink"]


def test_equal_disks_have_one_state() -> None:
    def written(*, name: str = "/f", data: bytes = b"x" * 600, synced: bool = True) -> SimulatedDisk:
        disk = SimulatedDisk()
        file = disk.create(name)
        file.pwrite(data, 0)
        if synced:
            file.fsync()
            disk.fsync_dir("/")
        return disk

    modes: tuple[Mode, ...] = ("strict", "kept", "torn", "restart")
    synced = written().image()
    assert {synced.restore(mode).state() for mode in modes} == {written().state()}
    assert written(synced=False).image().restore("kept").state() == written().state()
    different = [
        SimulatedDisk(),
        written(),
        written(name="/g"),
        written(data=b"x" * 599),
        written(data=b"x" * 599 + b"y"),
        written(synced=False).image().restore("restart"),  # looks the same, but a crash loses it
    ]
    assert len({disk.state() for disk in different}) == len(different)


def test_explore_resumes_each_state_once() -> None:
    """And leaves none out: compared with every image in every mode."""
    resumed: list[tuple[int, int]] = []

    class Noting(Careless):
        def resume(self, disk: SimulatedDisk, history: History) -> None:
            resumed.append((disk.state(), len(history.events)))
            super().resume(disk, history)

    disk, history = SimulatedDisk(), History()
    disk.on_image = lambda: len(history.events)
    Careless(careful=True).run(disk, history)
    modes: tuple[Mode, ...] = ("strict", "torn", "kept", "restart")
    images = [*disk.images, disk.image()]
    states = {
        (image.restore(mode, seed).state(), image.mark) for image in images for mode in modes for seed in range(20)
    }
    report = explore(Noting(careful=True), modes=modes, torn_seeds=20, depth=1)
    assert set(resumed) == states
    assert len(resumed) == len(states) == report.crashes
    assert report.crashed.total() == len(images) * (len(modes) + 19)  # those that are not resumed again are covered too


def test_an_image_that_a_scenario_leaves_out_does_not_count() -> None:
    class Lazy(Careless):
        def resume(self, disk: SimulatedDisk, history: History) -> None:
            raise Skipped

    report = explore(Lazy(), depth=1)
    assert (report.crashes, report.crashes_in_recovery) == (0, 0)
    assert report.missing("create", "pwrite") == ["create", "pwrite"]


def test_crashes_in_recovery_are_counted_by_what_came_next() -> None:
    class Writing(Careless):
        def resume(self, disk: SimulatedDisk, history: History) -> None:
            super().resume(disk, history)
            if not disk.exists("/g7"):
                disk.create("/g7")

    report = explore(Writing(careful=True))
    assert report.missing("create /g") == ["create /g"]
    assert report.missing_in_recovery("create /g#", "pwrite /f") == ["pwrite /f"]
    assert report.crashes_in_recovery > 0


def test_an_error_without_a_fault_is_a_failure() -> None:
    class Failing(Careless):
        def run(self, disk: SimulatedDisk, history: History) -> None:
            raise Invalid("wrong")

    with pytest.raises(Invalid):
        explore(Failing())


def test_a_recovery_that_raises_is_a_violation() -> None:
    class Unopenable(Careless):
        def resume(self, disk: SimulatedDisk, history: History) -> None:
            raise KeyError("no such thing")

    with pytest.raises(Violation, match="recovery failed"):
        explore(Unopenable())


def test_fake_clock() -> None:
    clock = FakeClock(time_us=5, monotonic_s=1.0)
    clock.advance(2)
    clock.jump(-3600)
    assert (clock.time_us(), clock.monotonic_s()) == (5 + 2_000_000 - 3_600_000_000, 3.0)
    with pytest.raises(ValueError, match="backwards"):
        clock.advance(-1)
