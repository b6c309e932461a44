"""Files within a budget of descriptors: given up when idle, never unsynced, never while they are used."""

from __future__ import annotations

import errno
import gc
import os
import random
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from interrupts import every_point, where

import penstock.testing.disk_files as disk_module
from penstock.errors import ProcessLimit, RetryLater
from penstock.host.file_operations import rename_durably
from penstock.host.open_files import OPEN_FILES, OPEN_MAX, BoundedFileSystem, OpenFiles, open_files_max
from penstock.host.os_files import OsFileSystem, UnboundedFileSystem
from penstock.testing import Fault, SimulatedDisk


def bounded(disk: SimulatedDisk, limit: int) -> BoundedFileSystem:
    return BoundedFileSystem(disk, OpenFiles(lambda: limit, wait_s=0.0))


@contextmanager
def descriptor_limit(limit: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def taken() -> int:
    """The lowest limit under which nothing can be opened."""
    return max(map(int, os.listdir("/proc/self/fd"))) + 1


@contextmanager
def strangers() -> Iterator[list[int]]:
    """Others who have all the descriptors there are."""
    theirs: list[int] = []
    with descriptor_limit(taken() + 20):
        try:
            while True:
                theirs.append(os.open(os.devnull, os.O_RDONLY))
        except OSError as error:
            assert error.errno == errno.EMFILE
        try:
            yield theirs
        finally:
            for fd in theirs:
                os.close(fd)


def test_more_files_than_descriptors() -> None:
    disk = SimulatedDisk()
    disk.open_files_max = 4
    fs = bounded(disk, 3)
    files = [fs.create(f"/{number}") for number in range(10)]
    for number, file in enumerate(files):
        file.pwrite(b"%d" % number, 0)
    for number, file in enumerate(files):
        assert file.pread(9, 0) == b"%d" % number
        assert disk.open_files <= 3
    for file in files:
        file.close()
    assert disk.open_files == 0


def test_without_a_budget_they_do_not_fit() -> None:
    disk = SimulatedDisk()
    disk.open_files_max = 4
    with pytest.raises(OSError, match="too many"):
        _ = [disk.create(f"/{number}") for number in range(10)]


def test_the_one_that_was_idle_longest_goes() -> None:
    disk = SimulatedDisk()
    fs = bounded(disk, 2)
    first, second = fs.create("/1"), fs.create("/2")
    first.size()
    before = disk.operations
    fs.create("/3")
    first.pread(1, 0)
    assert disk.operations == before + 2  # no opening of the first
    second.pread(1, 0)
    assert disk.operations == before + 4


def test_what_was_written_is_synced_before_its_descriptor_goes() -> None:
    disk = SimulatedDisk()
    fs = bounded(disk, 1)
    file = fs.create("/a")
    file.pwrite(b"data", 0)
    fs.fsync_dir("/")
    fs.create("/b")  # takes the descriptor of the other
    image = disk.image().restore("strict")
    assert image.open("/a").pread(9, 0) == b"data"
    before = disk.operations
    file.fdatasync()  # it is: that takes no descriptor and no second sync
    assert disk.operations == before


def test_a_file_that_was_only_read_is_not_synced() -> None:
    disk = SimulatedDisk()
    disk.create("/a").close()
    fs = bounded(disk, 1)
    fs.open("/a").size()
    disk.on_image = lambda: 0
    fs.open("/a")
    assert not disk.images


def test_a_sync_that_failed_on_the_way_out_is_told_to_the_next_user_for_ever() -> None:
    disk = SimulatedDisk()
    fs = bounded(disk, 1)
    file = fs.create("/a")
    file.pwrite(b"data", 0)
    disk._faults[disk.operations + 1] = "eio"
    other = fs.create("/b")  # is not told of it
    other.pwrite(b"fine", 0)
    uses: list[Callable[[], object]] = [
        file.fsync,
        file.fdatasync,
        file.size,
        lambda: file.pwrite(b"x", 0),
        lambda: file.pread(1, 0),
        lambda: file.map(1),
        lambda: file.truncate(0),
    ]
    for use in uses:
        with pytest.raises(OSError, match="sync failed before"):
            use()
    file.close()
    assert other.pread(9, 0) == b"fine"


def test_a_failed_sync_is_not_tried_again_on_the_way_out() -> None:
    disk = SimulatedDisk()
    fs = bounded(disk, 1)
    file = fs.create("/a")
    file.pwrite(b"data", 0)
    disk._faults[disk.operations + 1] = "eio"
    with pytest.raises(OSError, match="simulated eio"):
        file.fsync()
    before = disk.operations
    fs.create("/b")
    assert disk.operations == before + 1
    with pytest.raises(OSError, match="sync failed before"):
        file.fsync()


def test_an_interrupt_leaves_the_file_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SimulatedDisk()
    fs = bounded(disk, 1)
    file = fs.create("/a")
    file.pwrite(b"data", 0)

    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(disk_module.SimulatedFile, "fdatasync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            fs.create("/b")
    assert file.pread(9, 0) == b"data"
    fs.fsync_dir("/")
    file.fdatasync()
    assert disk.image().restore("strict").open("/a").pread(9, 0) == b"data"


def test_a_pinned_file_keeps_its_descriptor() -> None:
    disk = SimulatedDisk()
    fs = bounded(disk, 1)
    file = fs.create("/a")
    with file.pin():
        others = [fs.create(f"/{number}") for number in range(3)]
        disk.open_files_max = 0
        file.pwrite(b"data", 0)
        file.fsync()
    disk.open_files_max = None
    others[0].size()
    assert disk.open_files == 1


def test_a_name_that_leads_to_another_file_is_not_found() -> None:
    disk = SimulatedDisk()
    fs = bounded(disk, 1)
    file = fs.create("/a")
    other = fs.create("/b")
    fs.unlink("/a")
    with pytest.raises(FileNotFoundError):
        file.size()
    again = fs.create("/a")
    with pytest.raises(FileNotFoundError, match="another file"):
        file.size()
    assert again.size() == other.size() == 0


def test_a_file_that_was_renamed_is_found_under_its_new_name() -> None:
    disk = SimulatedDisk()
    fs = bounded(disk, 1)
    file = fs.create("/a.tmp")
    file.pwrite(b"data", 0)
    file.fsync()
    rename_durably(fs, "/a.tmp", "/a")
    file.set_path("/a")
    fs.create("/b")
    assert (file.path, file.pread(9, 0)) == ("/a", b"data")


def test_a_rename_takes_its_descriptor_first() -> None:
    disk = SimulatedDisk()
    fs = bounded(disk, 1)
    fs.create("/a").close()
    disk.open_files_max = 0
    with pytest.raises(ProcessLimit):
        rename_durably(fs, "/a", "/b")
    assert disk.exists("/a")


def test_a_file_nobody_has_any_more_gives_its_descriptor_back() -> None:
    disk = SimulatedDisk()
    files = OpenFiles(lambda: 100, wait_s=0.0)
    fs = BoundedFileSystem(disk, files)
    file = fs.create("/a")
    assert files.count == disk.open_files == 1
    del file
    gc.collect()
    fs.create("/b").close()  # the collector itself takes no lock: the next call closes what it found
    assert files.count == disk.open_files == 0


def test_a_file_that_is_freed_inside_another_call_goes_with_the_next() -> None:
    disk = SimulatedDisk()
    files = OpenFiles(lambda: 1, wait_s=0.0)
    fs = BoundedFileSystem(disk, files)
    file = fs.create("/a")
    with files._lock:
        del file
        gc.collect()
    assert disk.open_files == 1
    other = fs.create("/b")
    assert other.size() == 0
    assert disk.open_files == 1


def test_an_interrupt_of_the_collector_leaves_nothing_taken() -> None:
    """What `__del__` is interrupted by is swallowed: a lock that it left taken would stop the process for good."""
    files = OpenFiles(lambda: 100, wait_s=0.0)
    fs = BoundedFileSystem(SimulatedDisk(), files)
    file = fs.create("/a")
    for _ in every_point(file.__del__):  # type: ignore[attr-defined]
        assert files._lock.acquire(blocking=False), where[-1]
        files._lock.release()


def test_a_user_who_was_interrupted_keeps_no_descriptor_of_a_freed_file() -> None:
    disk = SimulatedDisk()
    files = OpenFiles(lambda: 100, wait_s=0.0)
    fs = BoundedFileSystem(disk, files)
    file = fs.create("/a")
    file._acquire()  # type: ignore[attr-defined]  # the interrupt comes right behind it
    del file
    gc.collect()
    fs.create("/b").close()
    assert files.count == disk.open_files == 0


def test_a_closed_file_says_so() -> None:
    fs = bounded(SimulatedDisk(), 1)
    file = fs.create("/a")
    file.close()
    file.close()
    with pytest.raises(OSError, match="closed"):
        file.pread(1, 0)


@pytest.mark.parametrize("limit", [1, 3])
def test_threads_share_files(limit: int) -> None:
    disk = SimulatedDisk()
    files = OpenFiles(lambda: limit, wait_s=0.0)
    fs = BoundedFileSystem(disk, files)
    shared = [fs.create(f"/{number}") for number in range(8)]
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        chance = random.Random(seed)
        try:
            for turn in range(300):
                number = chance.randrange(8)
                file, offset = shared[number], 16 * seed
                data = b"%d-%d" % (seed, turn)
                with file.pin():
                    file.pwrite(data.ljust(16), offset)
                assert file.pread(16, offset).strip() == data
                if chance.random() < 0.1:
                    file.fdatasync()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert files.count <= limit + 6
    for file in shared:
        file.close()
    assert files.count == disk.open_files == 0


# -- the limits of this process


def test_the_budget_follows_the_process() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with descriptor_limit(256):
        assert open_files_max() == 128
    assert hard == resource.RLIM_INFINITY or open_files_max() <= min(hard, OPEN_MAX)


def test_within_the_limit_of_the_process(tmp_path: Path) -> None:
    fs, count = OsFileSystem(), 300
    with descriptor_limit(taken() + 40):
        files = [fs.create(f"{tmp_path}/{number}") for number in range(count)]
        for number, file in enumerate(files):
            file.pwrite(b"%d" % number, 0)
        assert [file.pread(9, 0) for file in files] == [b"%d" % number for number in range(count)]
        with pytest.raises(OSError, match="Too many open files"):
            _ = [UnboundedFileSystem().open(f"{tmp_path}/{number}") for number in range(count)]
    open_before = OPEN_FILES.count
    for file in files:
        file.close()
    assert OPEN_FILES.count < open_before


def test_strangers_took_them_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Idle files make room; without any, a typed error that can be retried, and nothing changed."""
    monkeypatch.setattr(OPEN_FILES, "_wait_s", 0.0)
    fs = OsFileSystem()
    while OPEN_FILES._close_one():
        pass
    with strangers() as theirs:
        for attempt in (
            lambda: fs.create(f"{tmp_path}/a"),
            lambda: fs.fsync_dir(str(tmp_path)),
            lambda: fs.listdir(str(tmp_path)),
            lambda: fs.lock(f"{tmp_path}/l"),
        ):
            with pytest.raises(ProcessLimit, match="ulimit -n") as refusal:
                attempt()
            assert isinstance(refusal.value, RetryLater)
        os.close(theirs.pop())
        file = fs.create(f"{tmp_path}/a")
        assert fs.listdir(str(tmp_path)) == ["a"]  # it gave its descriptor up
        file.pwrite(b"data", 0)
        fs.fsync_dir(str(tmp_path))
        file.fsync()
        assert file.pread(9, 0) == b"data"
        file.close()


def test_a_shortage_that_passes_is_waited_for(tmp_path: Path) -> None:
    while OPEN_FILES._close_one():
        pass
    with strangers() as theirs:
        timer = threading.Timer(0.05, lambda: os.close(theirs.pop()))
        timer.start()
        OsFileSystem().create(f"{tmp_path}/a").close()
        timer.join()


def test_other_errors_are_not_waited_for(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        OsFileSystem().open(f"{tmp_path}/none")
    disk = SimulatedDisk(faults=(Fault(1, "eio"),))
    with pytest.raises(OSError, match="simulated eio"):
        bounded(disk, 1).create("/a")


def test_one_failure_to_open_is_made_good_for() -> None:
    disk = SimulatedDisk()
    fs = bounded(disk, 9)
    fs.create("/a")
    for make in (lambda: fs.create("/b"), lambda: fs.open("/b"), lambda: fs.listdir("/"), lambda: fs.folder("/")):
        fs.open("/a").size()
        keep = fs.open("/a")
        disk._faults[disk.operations + 1] = "emfile"
        make()
        keep.close()


def test_a_forked_child_has_files_of_its_own(tmp_path: Path) -> None:
    fs = OsFileSystem()
    file = fs.create(f"{tmp_path}/a")
    file.pwrite(b"parent", 0)
    with OPEN_FILES._lock:  # as if another thread were in the middle of something
        child = os.fork()
        if child == 0:
            ok = OPEN_FILES.count == 0 and fs.open(f"{tmp_path}/a").pread(9, 0) == b"parent"
            os._exit(0 if ok else 1)
    assert os.waitpid(child, 0)[1] == 0
    file.fsync()
    file.close()
