"""Stores and the limits of their process: few descriptors, none for a while, and all of them given back at the end."""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from store_model import SETTINGS

import penstock
from penstock.errors import GateShut, PartitionPaused, ProcessLimit
from penstock.host.open_files import BoundedFileSystem, OpenFiles
from penstock.partition.admission import DispatcherSettings
from penstock.queue.machine import QueueMachine
from penstock.store.store import Store, open_store
from penstock.testing import FakeClock, SimulatedDisk
from penstock.testing.manifest import MemoryEngine

CHILD = Path(__file__).parent / "descriptor_child.py"
LIMIT = 44


def run_child(scenario: str, folder: Path, bounded: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(CHILD), scenario, str(folder), str(LIMIT), bounded]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.parametrize("scenario", ["queue", "kv", "tables", "sstables"])
def test_more_files_than_descriptors(scenario: str, tmp_path: Path) -> None:
    """Forty shards, tables or twice as many files, where forty-four descriptors are all there are."""
    ended = run_child(scenario, tmp_path, "bounded")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == ["0", "0"]  # at the end no file of the store is open or mapped


@pytest.mark.parametrize("scenario", ["queue", "sstables"])
def test_without_a_budget_they_do_not_fit(scenario: str, tmp_path: Path) -> None:
    ended = run_child(scenario, tmp_path, "unbounded")
    assert ended.returncode != 0
    assert "Too many open files" in ended.stderr


def test_everything_is_given_back(tmp_path: Path) -> None:
    root = str(tmp_path / "store")

    def use() -> tuple[int, int]:
        with penstock.open(root) as store:
            store.kv("users", shards=3).put_many([(b"%d" % n, b"v") for n in range(50)])
            store.queue("events", shards=3).put_many([b"%d" % n for n in range(50)])
            store.flush()
            store.compact("users")
            assert len(dict(store.kv("users").scan())) == 50
            assert len(store.queue("events").consumer("c").get(10)) == 10
            snapshot = store.snapshot()
            assert snapshot.kv("users").get(b"7") == b"v"
        gc.collect()
        mapped = Path("/proc/self/maps").read_text().count(root)
        return len(os.listdir("/proc/self/fd")), mapped

    use()  # what the first use loads stays
    threads, first = set(threading.enumerate()), use()
    assert first[1] == 0
    for _ in range(2):
        assert use() == first
        assert set(threading.enumerate()) <= threads  # not their number: threads of an earlier test may end meanwhile


LEAVING = """
import os, sys, threading
from pathlib import Path
import penstock

def held():
    links = []
    for name in os.listdir("/proc/self/fd"):
        if os.path.lexists(f"/proc/self/fd/{name}"):
            links.append(os.readlink(f"/proc/self/fd/{name}"))
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    # gRPC keeps the descriptors that it polls with, for the whole process.
    return [link for link in links if "anon_inode:[event" not in link], threading.enumerate(), children

before = held()
with penstock.open(sys.argv[1]) as store:
    store.kv("users").put(b"ada", b"1815", durable=True)
    store.compact("users")
    store.queue("events").put(b"hello", durable=True)
    store.series("metrics").write("cpu", 0.5)
    store.vector("docs", dimensions=2).upsert("a", [1.0, 0.0], durable=True)
    store.vector("docs").search([1.0, 0.0])
    with penstock.connect(sys.argv[1]) as client:
        client.kv("users").put(b"bob", b"1912", durable=True)
        with client.snapshot() as snapshot:
            snapshot.kv("users").to_arrow()
        assert len(threading.enumerate()) > 1 and len(held()[0]) > len(before[0])  # the measure sees them
after = held()
assert sorted(after[0]) == sorted(before[0]), after[0]
assert after[1] == before[1], after[1]
assert after[2] == before[2], after[2]
"""


def test_a_process_that_closed_its_stores_has_no_thread_process_socket_or_file_of_theirs(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LEAVING, str(tmp_path / "store")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


REDIRECTING = """
import os, subprocess, sys
import penstock

root = sys.argv[1]
with penstock.open(root) as store:
    with penstock.connect(root) as client:
        client.kv("users").put(b"ada", b"1815", durable=True)
        log = os.open(f"{root}.log", os.O_CREAT | os.O_WRONLY)
        null = os.stat(os.devnull).st_rdev
        streams = [number for number in range(3) if os.fstat(number).st_rdev == null]
        for number in range(3):
            os.dup2(log, number)
    second = [sys.executable, "-c", "import penstock, sys; penstock.open(sys.argv[1])", root]
    ended = subprocess.run(second, stderr=subprocess.PIPE, check=False)
    os._exit(0 if streams == [0, 1, 2] and b"StoreLocked" in ended.stderr else 1)
"""


def test_a_store_has_no_descriptor_of_a_closed_standard_stream(tmp_path: Path) -> None:
    """A daemon may redirect its output only after it opened a store: that must close no file of the store."""
    command = ["sh", "-c", 'exec "$0" -c "$1" "$2" <&- >&- 2>&-', sys.executable, REDIRECTING, str(tmp_path / "store")]
    ended = subprocess.run(command, timeout=120, check=False)
    assert ended.returncode == 0


# -- a process that gets no descriptor for a while


class Famine(SimulatedDisk):
    """A disk for a process that gets no descriptor from the `begin`-th on, until it was refused `length` times."""

    def __init__(self, begin: int = 1 << 30, length: int = 0) -> None:
        super().__init__()
        self.begin, self.left, self.count = begin, length, 0

    def _take_descriptor(self, path: str) -> None:
        self.count += 1
        if self.count >= self.begin and self.left > 0:
            self.left -= 1
            raise OSError(errno.EMFILE, "no descriptor", path)
        super()._take_descriptor(path)


def open_bounded(disk: SimulatedDisk, clock: FakeClock) -> Store:
    return open_store(
        "/store",
        fs=BoundedFileSystem(disk, OpenFiles(lambda: 2, wait_s=0.0)),
        clock=clock,
        engine=lambda path, settings, _, time: MemoryEngine(path, settings, disk, time),
        settings=replace(SETTINGS, dispatcher=DispatcherSettings(attempts_max=2, backoff_s=0.0)),
    )


def persist(act: Callable[[], Any], clock: FakeClock) -> Any:
    """Do something until it is done; jobs that failed have pauses."""
    for _ in range(60):
        try:
            return act()
        except (ProcessLimit, GateShut):
            clock.advance(60)
    raise AssertionError("it is refused for ever")


def store_in_famine(begin: int, length: int) -> int:
    """Write to both kinds, flush, checkpoint, close and open again; how many descriptors it took."""
    disk, clock = Famine(begin, length), FakeClock()
    store: Store = persist(lambda: open_bounded(disk, clock), clock)
    users = persist(lambda: store.kv("users"), clock)
    events = persist(lambda: store.queue("events", shards=2), clock)
    for number in range(6):
        persist(partial(users.put, b"%d" % number, b"v" * 200, durable=True), clock)
        persist(partial(events.put, b"%d" % number, key=b"%d" % number, durable=True), clock)
    for _ in range(20):
        store._dispatcher.retry()
    persist(store.checkpoint, clock)
    for tree, _ in store._maintenance.trees():
        persist(partial(store._maintenance.flush, tree), clock)
    rows, messages = [(b"%d" % n, b"v" * 200) for n in range(6)], [b"%d" % n for n in range(6)]
    assert persist(lambda: sorted(users.scan()), clock) == rows
    assert sorted(persist(events.to_arrow, clock).column("payload").to_pylist()) == messages
    count, disk.left = disk.count, 0
    store.close()
    with open_bounded(disk.image().restore("strict"), clock) as after:
        assert sorted(after.kv("users").scan()) == rows
        assert sorted(after.queue("events").to_arrow().column("payload").to_pylist()) == messages
    return count


def test_a_store_that_gets_no_descriptor_goes_on(quiet: None) -> None:
    count = store_in_famine(1 << 30, 0)
    for begin in range(1, count, max(1, count // 40)):
        store_in_famine(begin, 5)


def test_a_shard_that_cannot_be_opened_is_applied_later(quiet: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_bounded(Famine(), FakeClock()) as store:
        events, users = store.queue("events"), store.kv("users")
        opens = [True]
        init = QueueMachine.__init__

        def refuse(machine: QueueMachine, *args: object) -> None:
            if opens:
                raise ProcessLimit("no descriptor")
            init(machine, *args)  # type: ignore[arg-type]

        monkeypatch.setattr(QueueMachine, "__init__", refuse)
        with pytest.raises(ProcessLimit):
            events.put(b"refused", durable=True)  # nothing of it was taken
        opens.clear()
        events.put(b"1")
        opens.append(True)
        store._dispatcher._partitions.clear()  # as if it had never been opened
        users.put(b"k", b"v", durable=True)  # the record holds both
        assert users.get(b"k") == b"v"
        assert store._dispatcher.retry() == 1
        with store.snapshot() as snapshot:
            assert snapshot.kv("users").get(b"k") == b"v"
            with pytest.raises(PartitionPaused, match="tried again"):
                snapshot.queue("events").to_arrow()
        opens.clear()
        assert store._dispatcher.retry() == 0
        assert events.to_arrow().column("payload").to_pylist() == [b"1"]


def test_a_shard_is_never_paused_for_want_of_descriptors(quiet: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_bounded(Famine(), FakeClock()) as store:
        events = store.queue("events")
        events.put(b"0", durable=True)
        scarce = [True]
        append = QueueMachine._append

        def refuse(machine: QueueMachine, *args: object) -> None:
            if scarce:
                raise ProcessLimit("no descriptor")
            append(machine, *args)  # type: ignore[arg-type]

        monkeypatch.setattr(QueueMachine, "_append", refuse)
        events.put(b"1", durable=True)
        for _ in range(10):
            assert store._dispatcher.retry() == 1
        events.put(b"2", durable=True)  # acknowledged, because the journal has it
        scarce.clear()
        assert store._dispatcher.retry() == 0
        assert events.to_arrow().column("payload").to_pylist() == [b"0", b"1", b"2"]


# -- a process that gets no thread


def use(root: str) -> None:
    with penstock.open(root) as store:
        store.kv("users").put(b"ada", b"1815", durable=True)
        store.compact("users")


@pytest.mark.parametrize("for_good", [False, True], ids=["once", "from-then-on"])
def test_a_thread_that_the_system_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quiet: None, for_good: bool
) -> None:
    """Containers limit the number of threads. Any start may fail: it is said in one line, and leaves nothing behind."""
    root = str(tmp_path / "store")
    use(root)
    start = threading._start_new_thread  # type: ignore[attr-defined]
    before = sorted(thread.name for thread in threading.enumerate())
    left = 1 << 30

    def start_or_refuse(*arguments: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0 or (for_good and left < 0):
            raise RuntimeError("can't start new thread")
        return start(*arguments)

    monkeypatch.setattr(threading, "_start_new_thread", start_or_refuse)
    refused = 0
    for number in range(1, 12):
        left = number
        try:
            use(root)
        except ProcessLimit as error:
            refused += 1
            assert "thread" in str(error)
            assert "\n" not in str(error)
        except GateShut:  # the job that the last refusal ended waits for its next attempt
            pass
        left = 1 << 30
        deadline_s = time.monotonic() + 20  # for threads that are about to end
        while (after := sorted(thread.name for thread in threading.enumerate())) != before:
            gc.collect()
            assert time.monotonic() < deadline_s, after
    assert refused >= 7
    with penstock.open(root) as store:
        assert store.kv("users")[b"ada"] == b"1815"
