"""Files that cannot be removed do no harm: a warning, everything goes on, and they go as soon as they can."""

from __future__ import annotations

import errno
import os

import pytest
from store_model import open_simulated

from penstock.errors import PenstockError, Poisoned
from penstock.host.files import FileSystem
from penstock.log import Log
from penstock.log.chain import SegmentName
from penstock.manifest.records import JobKind
from penstock.queue.options import Retention
from penstock.store.store import Store
from penstock.testing import FakeClock, SimulatedDisk


class StickyDisk(SimulatedDisk):
    """A disk on which nothing that was used up can be removed for a while."""

    number: int | None = None  # of the error
    refused = 0

    def _refuse(self, path: str) -> None:
        replaced = "/manifest" in path or path.endswith(".tmp")  # no clean-up: another is written in its place
        if self.number is not None and self.exists(path) and not replaced:
            self.refused += 1
            raise OSError(self.number, os.strerror(self.number))

    def unlink(self, path: str) -> None:
        self._refuse(path)
        super().unlink(path)

    def rmdir(self, path: str) -> None:
        self._refuse(path)
        super().rmdir(path)


def files(disk: FileSystem, folder: str = "/store") -> set[str]:
    paths = set()
    for name in disk.listdir(folder):
        path = f"{folder}/{name}"
        try:
            paths |= files(disk, path)
        except (NotADirectoryError, FileNotFoundError):
            paths.add(path)
    return paths


def work(store: Store, clock: FakeClock, round_: int) -> None:
    """Everything that removes files: checkpoints, compaction, collection, trims, drops, staged files."""
    rows, messages = store.kv("rows"), store.queue("messages", retention=Retention(bytes_max=1))
    other = store.kv("other")
    staged = store._port.stage(rows._partition(b""), 1, 1.0)[0]
    store._fs.create(f"/store/{staged.file_name}").close()
    for number in range(6):
        rows.put(b"row %d" % number, bytes(900), durable=True)
        other.put(b"row", bytes(900), durable=True)
        messages.put(b"message %d %d" % (round_, number), durable=True)
    for _ in range(2):
        store.compact("rows")
        store.checkpoint()
        clock.advance(7_200.0)
        messages.put(b"the last of %d" % round_, durable=True)
        store._port.maintain()
        store.flush()
    store.drop("other")
    store._tasks.retry()
    store._collector.collect()
    store._tasks.clean_up()


def untouched(rounds: int) -> set[str]:
    """The files of a store where everything could be removed."""
    disk, clock = SimulatedDisk(), FakeClock()
    with open_simulated(disk, clock) as store:
        for round_ in range(rounds):
            work(store, clock, round_)
        return files(disk)


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.EBUSY])
def test_files_that_cannot_be_removed_do_no_harm(number: int, caplog: pytest.LogCaptureFixture) -> None:
    disk, clock = StickyDisk(), FakeClock()
    with open_simulated(disk, clock) as store:
        work(store, clock, 0)
        usual = len(files(disk))
        disk.number = number
        for round_ in range(1, 4):
            work(store, clock, round_)
        assert disk.refused > 20
        assert "could not be removed" in caplog.text
        stuck = len(files(disk))
        assert stuck > 2 * usual
        assert store.kv("rows").get(b"row 5") == bytes(900)
        disk.number = None
        work(store, clock, 4)
        work(store, clock, 5)
        assert len(files(disk)) <= len(untouched(rounds=6))
    with open_simulated(disk, clock) as store:
        assert store.kv("rows").get(b"row 5") == bytes(900)
        assert store.queue("messages").read()[-1].payload == b"the last of 5"


def test_opening_and_closing_do_not_need_it_either() -> None:
    disk, clock = StickyDisk(), FakeClock()
    for round_ in range(3):
        with open_simulated(disk, clock) as store:
            work(store, clock, round_)
        disk.number = errno.EBUSY
    with open_simulated(disk, clock) as store:
        assert store.kv("rows").get(b"row 5") == bytes(900)


def test_the_control_an_unlink_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bug of before: the error went through the log, which took it for a failed write."""

    def remove(self: Log, *names: SegmentName) -> bool:
        for name in names:
            self._fs.unlink(f"{self._folder}/{name}")
        return True

    monkeypatch.setattr(Log, "_remove", remove)
    disk, clock = StickyDisk(), FakeClock()
    store = open_simulated(disk, clock)
    disk.number = errno.EIO
    with pytest.raises((OSError, PenstockError)):
        work(store, clock, 0)
    with pytest.raises(Poisoned):
        store._consensus.propose([b"anything"])


def test_a_drop_while_a_job_works_on_another_shard(caplog: pytest.LogCaptureFixture) -> None:
    """The job holds the gate of the whole table: its files are removed when it has ended, and nothing is logged."""
    disk, clock = SimulatedDisk(), FakeClock()
    with open_simulated(disk, clock) as store:
        table = store.kv("rows", shards=2)
        table.put_many({b"%d" % number: bytes(100) for number in range(100)}, durable=True)
        info = store.port.table("rows")
        assert info is not None
        jobs = store._jobs
        job = jobs.enqueue(JobKind.COMPACTION, db_id=info.table_id, payload=b"")
        lease = jobs.acquire("here", [JobKind.COMPACTION], info.table_id)
        assert lease is not None
        assert lease.job.job_id == job
        store.drop("rows")
        folder = f"/store/tables/{info.table_id}"
        for _ in range(3):
            store._tasks.retry()
        assert disk.exists(folder)
        jobs.complete(lease)
        store._tasks.retry()
        assert not disk.exists(folder)
    assert not caplog.records, caplog.text
