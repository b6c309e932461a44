"""Queues and logs that share very few descriptors, or get none for a while, against crashes and failed syncs.

With a budget of one, nearly every use of a file takes the descriptor from another one: what was written is synced then,
and a sync that fails must be heard of by the file's owner. With none to be had, every operation may end in
`ProcessLimit`: nothing is poisoned, nothing is half done, and the same call succeeds later.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import log_scenario
import pytest
import queue_scenario
from queue_scenario import START_US, Model, StoreScenario, User, observe, replay
from shared import Patch

import penstock.host.open_files as open_files
from penstock.errors import ProcessLimit
from penstock.host.files import File, FileSystem
from penstock.host.open_files import BoundedFileSystem, OpenFiles
from penstock.log import Log, LogSettings
from penstock.testing import Faults, History, SimulatedDisk, Violation, explore
from penstock.testing.crashes import absent


def bounded(fs: FileSystem, limit: int = 1) -> BoundedFileSystem:
    return BoundedFileSystem(fs, OpenFiles(lambda: limit, wait_s=0.0))


@pytest.fixture(autouse=True)
def _one_descriptor(monkeypatch: Patch) -> None:
    """The scenarios of the other suites, each process with a budget of one file."""
    open_queue = queue_scenario.open_queue

    def open_bounded(fs: FileSystem, seed: int, **options: int) -> object:
        return open_queue(bounded(fs), seed, **options)

    monkeypatch.setattr(queue_scenario, "open_queue", open_bounded)


class Short(StoreScenario):
    """A few records with a reader beside the writer: each of its reads takes the descriptor of the file that grows."""

    def run(self, disk: SimulatedDisk, history: History) -> None:
        queue = queue_scenario.open_queue(disk, 1, cut_after_lsn=0)
        for number, sizes in enumerate(((10,), (300, 5), (500,), (900,), (40, 2)), 1):
            payloads = [f"{number}.{n}:".encode().ljust(size, b"x") for n, size in enumerate(sizes)]
            history.note("record", 3 * number, START_US + number, payloads)
            queue = self.step(disk, history, queue, number == 2)
            queue.read(queue.first_sequence, limit_messages=1)
        queue.sync()
        history.note("stored", queue.stored_lsn)


def failed_syncs() -> None:
    faults = Faults(kinds=("eio",), operations=("fdatasync", "fsync"), images_every=3)
    report = explore(Short(), modes=("restart", "strict"), depth=1, faults=faults)
    assert absent(report.faulted, "fdatasync .data", "fsync manifest.") == []


def test_every_crash_with_one_descriptor() -> None:
    report = explore(Short(), depth=1)
    assert report.missing("fdatasync .data", "create .data", "pwrite manifest.current") == []


def test_failed_syncs_with_one_descriptor(quiet: None) -> None:
    failed_syncs()


def test_logs_with_one_descriptor(monkeypatch: Patch) -> None:
    class BoundedLog(Log):
        @classmethod
        def open(cls, fs: FileSystem, folder: str, **options: Any) -> Log:
            return Log.open(bounded(fs), folder, **options)

    monkeypatch.setattr(log_scenario, "Log", BoundedLog)
    report = explore(log_scenario.LogScenario(), modes=("strict", "restart"), depth=1)
    assert report.missing("fdatasync", "rename", "unlink") == []


# -- seeded bugs


def closed_unsynced(patch: Patch) -> None:
    """A file gives its descriptor up with what was written to it still in the page cache."""

    def close(files: OpenFiles, account: open_files._FileState, raw: File) -> None:
        account.dirty = False
        raw.close()

    patch.setattr(OpenFiles, "_sync_and_close", close)


def failure_forgotten(patch: Patch) -> None:
    """The sync of a file that gives its descriptor up fails, and nobody is told."""
    sync_and_close = OpenFiles._sync_and_close

    def forget(files: OpenFiles, account: open_files._FileState, raw: File) -> None:
        sync_and_close(files, account, raw)
        account.failure, account.dirty = None, False

    patch.setattr(OpenFiles, "_sync_and_close", forget)


def test_a_file_that_is_closed_unsynced_is_noticed(monkeypatch: Patch) -> None:
    closed_unsynced(monkeypatch)
    with pytest.raises(Violation):
        explore(Short(), modes=("strict",), depth=1)


def test_a_failure_that_is_forgotten_is_noticed(monkeypatch: Patch, quiet: None) -> None:
    failure_forgotten(monkeypatch)
    with pytest.raises(Violation):
        failed_syncs()


# -- no descriptor at all


class Famine(SimulatedDisk):
    """A disk for a process that gets no descriptor from its `begin`-th on, until it was refused `length` times."""

    def __init__(self, begin: int, length: int) -> None:
        super().__init__()
        self.begin, self.left, self.count = begin, length, 0

    def _take_descriptor(self, path: str) -> None:
        self.count += 1
        if self.count >= self.begin and self.left > 0:
            self.left -= 1
            raise OSError(errno.EMFILE, "no descriptor", path)
        super()._take_descriptor(path)


def persist(act: Callable[[], object]) -> int:
    """Do something until it is done; how often it was refused."""
    refused = 0
    while True:
        try:
            act()
            return refused
        except ProcessLimit:
            refused += 1
            assert refused < 100


def queue_in_famine(begin: int, length: int) -> tuple[int, int]:
    """Use a queue; how many descriptors it took, and how often it was refused."""
    disk, history = Famine(begin, length), History()
    opened: list[User] = []

    def open_it() -> None:
        opened.append(User(queue_scenario.open_queue(disk, 1), history, "a"))

    refused = persist(open_it)
    user = opened[-1]
    steps: list[Callable[[], None]] = [
        lambda: user.append(10),
        user.sync,
        lambda: user.append(700, 1),
        lambda: user.append(900, 5),  # rolls
        user.sync,
        lambda: user.trim(4),
        lambda: user.append(300),
        user.sync,
    ]
    for step in steps:
        refused += persist(step)
        assert not user.queue.statistics().poisoned
    first, messages = observe(user.queue)
    assert (first, len(messages)) == (4, 3)
    for image in (disk.image().restore("strict"), disk.image().restore("kept")):
        queue = queue_scenario.open_queue(image, 2)
        observed = observe(queue)
        Model.of(history).check(*observed, damaged=False)
        assert observed == (first, messages)
    refused += persist(user.queue.close)
    return disk.count, refused


def test_a_queue_that_gets_no_descriptor_is_not_poisoned(quiet: None) -> None:
    count, refused = queue_in_famine(1 << 30, 0)
    assert refused == 0
    for begin in range(1, count + 1):
        for length in (1, 2, 7):
            _, refused = queue_in_famine(begin, length)
            assert refused or length == 1 or begin > count - 8  # one refusal may be made good for by another file


def shard_in_famine(begin: int) -> int:
    """The same, where the journal is the log: what was refused is applied again, to the same sequences."""
    disk, history = Famine(begin, 3), History()
    queue = None
    for _ in range(5):
        try:
            queue = queue_scenario.open_queue(disk, 1, cut_after_lsn=0)
            break
        except ProcessLimit:
            continue
    assert queue is not None
    for number in range(1, 8):
        history.note("record", number, START_US + number, [b"%d" % number] * 2 + [b"x" * 300])
        persist(lambda: replay(queue, history))
        assert not queue.statistics().poisoned
    persist(lambda: StoreScenario().check(queue, history, up_to=1 << 60, damaged=False))
    queue.sync()
    history.note("stored", queue.stored_lsn)
    after = queue_scenario.open_queue(disk.image().restore("strict"), 2, cut_after_lsn=queue.stored_lsn)
    StoreScenario().check(after, history, up_to=queue.stored_lsn, damaged=False)
    return disk.count


def test_a_shard_that_gets_no_descriptor_is_applied_later(quiet: None) -> None:
    for begin in range(1, shard_in_famine(1 << 30) + 1):
        shard_in_famine(begin)


def log_in_famine(begin: int) -> int:
    disk = Famine(begin, 4)
    fs = bounded(disk)
    settings = LogSettings(segment_bytes=600, allocate_bytes=128, index_bytes=64)
    opened: list[Log] = []
    persist(lambda: opened.append(Log.open(fs, "/log", random=random.Random(1), settings=settings)))
    log = opened[-1]
    for number in range(12):
        persist(partial(log.append, [b"%02d" % number * 40]))
        persist(log.sync)
        if number in (5, 9):
            persist(lambda: log.truncate_front(log.synced - 2))
        if number == 7:
            persist(lambda: log.truncate_back(log.synced - 1))
    assert not log.statistics().poisoned
    bodies: list[bytes] = []

    def read() -> None:
        bodies[:] = [record.body[:2] for record in log]

    persist(read)
    assert bodies[-6:] == [b"%02d" % number for number in (5, 6, 8, 9, 10, 11)]
    with Log.open(disk.image().restore("strict"), "/log", random=random.Random(2), settings=settings) as after:
        assert [record.body[:2] for record in after] == bodies
    return disk.count


def test_a_log_that_gets_no_descriptor_is_not_poisoned(quiet: None) -> None:
    for begin in range(1, log_in_famine(1 << 30) + 1):
        log_in_famine(begin)


def test_without_a_budget_it_is_poisoned(monkeypatch: Patch) -> None:
    monkeypatch.setitem(globals(), "bounded", lambda fs: fs)
    with pytest.raises((OSError, AssertionError)):
        queue_in_famine(8, 1)
