"""A full disk: growing writes are refused, deletes work, and when there is space again so does everything else."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from store_model import SETTINGS, open_simulated

import penstock
from penstock.errors import DiskFull, NotFound, OutcomeUnknown, PenstockError, RetryLater
from penstock.host.file_errors import ran_out_of_space
from penstock.store.settings import StoreSettings
from penstock.store.space import DiskSpace
from penstock.store.store import Store, open_store
from penstock.testing import FakeClock, Fault, SimulatedDisk
from penstock.testing.disk_image import Image

# -- a real file system


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """32 MiB, where this process may mount a file system."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=32m", "none", folder], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting is not permitted here")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_a_copy_without_room_names_the_disk_that_is_full(small_disk: Path, tmp_path: Path) -> None:
    with open_store(str(tmp_path / "roomy")) as store:
        store.kv("rows").put(b"large", os.urandom(1 << 20), durable=True)
        store.backup(tmp_path / "backups")
        for left, target in ((512 << 10, "middle"), (0, "beginning")):  # of the backup, where it finds no room
            with (small_disk / f"before {target}").open("wb") as others:
                free = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize
                if free > left:
                    os.posix_fallocate(others.fileno(), 0, free - left)
            with pytest.raises(DiskFull, match=f"^{small_disk}/{target} has no room, its disk is full"):
                store.backup(small_disk / target)
    with pytest.raises(DiskFull, match=f"^{small_disk}/copy has no room, its disk is full"):
        penstock.restore(tmp_path / "backups", small_disk / "copy")


def put_rows(store: Store, number: int) -> None:
    store.kv("rows").put(b"row %06d" % number, os.urandom(4_000))


def put_messages(store: Store, number: int) -> None:
    store.queue("messages").put(os.urandom(4_000))


def commit_batches(store: Store, number: int) -> None:
    with store.batch() as batch:
        for index in range(20):
            batch.kv("rows").put(b"row %06d %d" % (number, index), os.urandom(4_000))
            batch.queue("messages").put(b"message")


def fill_until_refused(store: Store, write: Callable[[Store, int], None]) -> None:
    with pytest.raises(DiskFull):
        for number in range(20_000):
            write(store, number)


def wait_until_taken(store: Store) -> None:
    """Try a write until it is taken; whoever waits for a wonder fails by the limit of attempts."""
    for _ in range(400):
        try:
            store.kv("kept").put(b"after", b"x", durable=True)
        except (DiskFull, OutcomeUnknown):
            time.sleep(0.05)
        else:
            return
    store.kv("kept").put(b"after", b"x", durable=True)


SMALL = StoreSettings(reserve_bytes=4 << 20)


@pytest.mark.parametrize("write", [put_rows, put_messages, commit_batches])
def test_a_full_disk_takes_deletes_and_gives_space_back(small_disk: Path, write: Callable[[Store, int], None]) -> None:
    path = str(small_disk / "store")
    with open_store(path, settings=SMALL) as store:
        other, rows = store.kv("kept"), store.kv("rows")
        store.queue("messages")
        other.put_many({b"a": b"1", b"b": b"2"}, durable=True)
        fill_until_refused(store, write)
        store.flush()  # what was taken is durable: nothing of it waits for space
        written = sum(1 for _ in rows.scan())
        with pytest.raises(DiskFull):
            write(store, 0)
        other.delete(b"a", durable=True)
        assert (other.get(b"a"), other.get(b"b")) == (None, b"2")
        for key, _ in list(rows.scan()):
            rows.delete(key)
        store.flush()
        store.drop("messages")
        wait_until_taken(store)
        assert written or write is put_messages
    with open_store(path, settings=SMALL) as store:
        assert dict(store.kv("kept").scan()) == {b"b": b"2", b"after": b"x"}
        assert not list(store.kv("rows").scan())


def test_samples_on_a_full_disk(small_disk: Path) -> None:
    """What was taken stays readable, deletes are taken and give space back, and a new opening finds the same."""
    path, chance, taken = str(small_disk / "store"), np.random.default_rng(1), 0
    with open_store(path, settings=SMALL) as store:
        metrics = store.series("metrics", shards=2)
        store.kv("kept")
        with pytest.raises(DiskFull):
            for number in range(20_000):
                times = 1_700_000_000_000_000 + 2_000 * number + np.arange(2_000)
                metrics.write_columns("noise", chance.normal(size=2_000), {"n": str(number % 70)}, times=times)
                taken += 2_000
        store.flush()
        assert metrics.aggregate("noise", function="count").column("value").to_pylist() == [taken]
    with open_store(path, settings=SMALL) as store:
        metrics = store.series("metrics")
        assert metrics.aggregate("noise", function="count").column("value").to_pylist() == [taken]
        metrics.delete('noise{n!="7"}', durable=True)
        wait_until_taken(store)
        metrics.write("up", 1.0, durable=True)
        assert metrics.label_values("n") == ["7"]
        assert metrics.cardinality().metrics == {"noise": 1, "up": 1}


def test_rows_that_a_range_deleted_need_no_room(small_disk: Path) -> None:
    """They are in memory and in the journal, more than the disk has left: what is deleted is not written to a file."""
    with open_store(str(small_disk / "store"), settings=SMALL) as store:
        rows = store.kv("rows")
        store.kv("kept")
        fill_until_refused(store, put_rows)
        store.flush()
        rows.delete_range(b"", b"~", durable=True)
        wait_until_taken(store)
        assert not list(rows.scan())


def test_space_that_others_took_and_gave_back(small_disk: Path) -> None:
    path, ballast = str(small_disk / "store"), small_disk / "ballast"
    with open_store(path, settings=SMALL) as store:
        store.kv("kept").put(b"before", b"x", durable=True)
        ballast.write_bytes(bytes(20 << 20))
        fill_until_refused(store, put_rows)
        ballast.unlink()
        wait_until_taken(store)
        store.flush()
        rows = dict(store.kv("rows").scan())
    with open_store(path, settings=SMALL) as store:
        assert dict(store.kv("rows").scan()) == rows
        assert dict(store.kv("kept").scan()) == {b"before": b"x", b"after": b"x"}


def test_a_disk_that_is_still_full_takes_deletes_after_an_opening(small_disk: Path) -> None:
    """The reserve is gone by then: what is left of the disk is for deletes, and not for whoever writes first."""
    path, ballast = str(small_disk / "store"), small_disk / "ballast"
    with open_store(path, settings=SMALL) as store:
        store.kv("kept").put_many({b"a": b"1", b"b": b"2"}, durable=True)
        with open(ballast, "wb", buffering=0) as file:
            os.posix_fallocate(file.fileno(), 0, os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize)
        fill_until_refused(store, put_rows)
    for key in (b"a", b"b"):
        with open_store(path, settings=SMALL) as store:
            with pytest.raises(DiskFull, match="only deletes are taken"):
                put_rows(store, 0)
            store.kv("kept").delete(key, durable=True)
    ballast.unlink()
    with open_store(path, settings=SMALL) as store:
        put_rows(store, 0)
        assert not list(store.kv("kept").scan())


def test_space_that_went_all_at_once(small_disk: Path) -> None:
    """What waits is larger than the reserve: it is kept, told to be unknown, and written when there is space."""
    path, ballast = str(small_disk / "store"), small_disk / "ballast"
    with open_store(path, settings=replace(SMALL, reserve_bytes=64 << 10, flush_interval_s=600.0)) as store:
        rows = store.kv("rows")
        rows.put(b"before", b"x", durable=True)
        for number in range(300):
            put_rows(store, number)
        with open(ballast, "wb", buffering=0) as file:
            os.posix_fallocate(file.fileno(), 0, os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize)
        with pytest.raises(OutcomeUnknown):
            store.flush()
        with pytest.raises(DiskFull):
            rows.put(b"refused", b"x")
        assert rows.get(b"row 000000") is not None
        ballast.unlink()
        wait_until_taken(store)
        assert len(list(rows.scan())) == 301
    with open_store(path, settings=SMALL) as store:
        assert len(list(store.kv("rows").scan())) == 301


def test_the_control_a_store_that_does_not_mend(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bug of before: once more waited than the reserve has room for, writes and deletes were refused for good."""
    monkeypatch.setattr(DiskSpace, "check", lambda space: None)
    monkeypatch.setattr(DiskSpace, "reclaim", lambda space: None)
    ballast = small_disk / "ballast"
    store = open_store(str(small_disk / "store"), settings=replace(SMALL, flush_interval_s=600.0))
    store.kv("rows").put(b"before", b"x", durable=True)
    for number in range(2_600):  # some are flushed at once, because the put before them was waited for
        put_rows(store, number)
    assert store.statistics().pending_bytes > SMALL.reserve_bytes
    ballast.write_bytes(bytes(os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize))
    with pytest.raises(PenstockError):
        store.flush()
    with pytest.raises(DiskFull):
        store.kv("rows").delete(b"before", durable=True)
    ballast.unlink()
    store._tasks.retry()
    with pytest.raises(DiskFull):
        store.kv("rows").delete(b"before", durable=True)
    with pytest.raises(PenstockError):
        store.close()


# -- a simulated one


def put(store: Store, key: bytes, durable: dict[bytes, bytes]) -> None:
    store.kv("rows").put(key, bytes(200), durable=True)
    durable[key] = bytes(200)


def work(store: Store, durable: dict[bytes, bytes], failures: list[Exception]) -> None:
    """A bit of everything; what was told to be durable goes to `durable`."""
    for number in range(2):
        key = b"%d" % number
        steps: list[Callable[[], object]] = [
            partial(put, store, key, durable),
            lambda: store.queue("messages").put(bytes(200), durable=True),
            lambda: store.kv("rows").delete(b"nothing", durable=True),
            store.checkpoint,
            lambda: store.compact("rows"),
            store._port.maintain,
            store._tasks.retry,
            store._collector.collect,
        ]
        for step in steps:
            try:
                step()
            except (OSError, PenstockError) as error:
                failures.append(error)


class LabelledDisk(SimulatedDisk):
    """Remembers what each operation was."""

    def __init__(self, *, faults: tuple[Fault, ...] = ()) -> None:
        super().__init__(faults=faults)
        self.labels: dict[int, str] = {}
        self.on_image = lambda: 0

    def image(self, label: str = "end") -> Image:
        self.labels[self.operations] = label
        return Image(self.operations, label, 0, False, None, {}, {})


def run_with(fault: Fault | None) -> tuple[LabelledDisk, list[Exception]]:
    """Open, work, and let the store mend itself; then everything must be there, and work."""
    disk, clock = LabelledDisk(faults=(fault,) if fault else ()), FakeClock()
    settings = replace(SETTINGS, reserve_bytes=4_096)
    durable: dict[bytes, bytes] = {}
    failures: list[Exception] = []
    try:
        store = open_simulated(disk, clock, settings)
    except PenstockError as error:
        failures.append(error)
        store = open_simulated(disk, clock, settings)
    work(store, durable, failures)
    disk.on_image = None  # no faults from here on
    for _ in range(3):
        clock.advance(10.0)
        store._tasks.retry()
    store.queue("messages").put(b"last", durable=True)
    put(store, b"last", durable)
    assert all(store.kv("rows").get(key) == value for key, value in durable.items())
    assert store.queue("messages").read(limit=1_000)[-1].payload == b"last"
    store.close()
    with open_simulated(disk, clock, settings) as again:
        assert all(again.kv("rows").get(key) == value for key, value in durable.items())
        assert again.queue("messages").read(limit=1_000)[-1].payload == b"last"
    return disk, failures


def test_no_space_at_any_operation_heals_by_itself(quiet: None) -> None:
    """But for a sync of a queue's own files: that one failed, whatever its number says, and is never tried again."""
    disk, failures = run_with(None)
    assert not failures
    met = 0
    for at, label in disk.labels.items():
        if ("sync" in label and "/tables/3/" in label) or label.endswith("manifest.current"):
            continue
        _, failures = run_with(Fault(at, "enospc"))
        met += bool(failures)
        for error in failures:
            assert isinstance(error, (RetryLater, NotFound)) or ran_out_of_space(error), (label, error)
            assert not isinstance(error, OSError), (label, error)
    assert met > 20


LIMITED = """
import resource, sys
import penstock
from penstock.errors import RetryLater

resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
with penstock.open(sys.argv[1]) as store:
    table, durable = store.kv("users"), 0
    try:
        while True:
            table.put(b"%d" % durable, b"x" * 5_000, durable=True)
            durable += 1
    except RetryLater as error:
        assert "ulimit -f" in str(error), error
    assert durable > 10 and table.get(b"0") == b"x" * 5_000
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    store.recover()
    store.flush()
with penstock.open(sys.argv[1]) as store:
    store.kv("users").put(b"last", b"1", durable=True)
    assert all(b"%d" % number in store.kv("users") for number in range(durable))
"""


def test_a_limit_of_the_size_of_files_is_met_as_a_full_disk(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LIMITED, str(tmp_path / "store")]
    ended = subprocess.run(command, capture_output=True, timeout=120, check=False)
    assert (ended.returncode, ended.stderr) == (0, b"")
