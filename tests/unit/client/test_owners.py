"""Owners that come and go: found, started, idle, asked to yield, killed; consumers that are killed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from owner_processes import output_of, owners, script, succeeds, until

import penstock
from penstock.client.connect import connect
from penstock.client.store import RemoteStore
from penstock.errors import Closed, Invalid, LeaseLost, NotFound, StoreLocked, WaitExpired
from penstock.host.os_files import OsFileSystem
from penstock.host.waiting import pause
from penstock.queue.table import QueueTable

# -- found and started


def test_connect_starts_an_owner_that_all_share(path: Path) -> None:
    with connect(path, create=True) as first, connect(path) as second:
        first.kv("users").put(b"a", b"1", durable=True)
        assert second.kv("users")[b"a"] == b"1"
        assert len(owners(path)) == 1
    with connect(path) as third:
        assert third.kv("users")[b"a"] == b"1"
        assert len(owners(path)) == 1
    assert oct((path / "run").stat().st_mode & 0o777) == "0o700"


def test_many_who_come_at_once_get_one_owner(path: Path) -> None:
    penstock.open(path).close()
    code = """
        with penstock.connect(sys.argv[1]) as store:
            store.kv("counts", value="int64").merge(b"n", 1, operator="add_i64", durable=True)
            print(store.kv("counts", value="int64")[b"n"] > 0)
    """
    processes = [script(code, path) for _ in range(6)]
    assert [output_of(process) for process in processes] == ["True"] * 6
    assert len(owners(path)) == 1
    with connect(path) as store:
        assert store.kv("counts", value="int64")[b"n"] == 6


def test_a_path_without_a_store(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotFound, match=r"there is no store in /.*: give another path, or create=True") as caught:
        connect(path)
    assert "\n" not in str(caught.value)
    path.parent.joinpath("other").mkdir()
    monkeypatch.chdir(path.parent)
    with connect("store", create=True) as store:
        assert store.path == str(path)
    with pytest.raises(NotFound, match=str(path.parent / "other")):
        connect("other")
    with pytest.raises(penstock.errors.Invalid):
        connect(path, timeout_s=0)
    with pytest.raises(penstock.errors.Invalid, match="token"):
        connect(path, token="x")
    with pytest.raises(penstock.errors.Invalid, match="token"):
        connect("penstock://localhost:1")


def test_what_an_owner_finds_wrong_is_told(path: Path) -> None:
    penstock.open(path).close()
    (path / "STORE").write_bytes(b"short")
    with pytest.raises(penstock.errors.CorruptionError, match="identity"):
        connect(path)
    until(lambda: owners(path) == [])


def test_a_path_too_long_for_a_socket(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 100) / "store"
    with penstock.open(path) as store, connect(path) as client:
        folder = Path((path / "run" / "elsewhere").read_text())
        assert oct(folder.stat().st_mode & 0o777) == "0o700"
        client.kv("users").put(b"a", b"1", durable=True)
        assert store.kv("users")[b"a"] == b"1"
    assert not folder.exists()
    assert not {"control", "elsewhere"} & set(os.listdir(path / "run"))


def test_a_store_that_does_not_serve(path: Path) -> None:
    with penstock.open(path, settings=penstock.StoreSettings(serve=False)):
        assert not (path / "run").exists()
        with pytest.raises((StoreLocked, WaitExpired)):
            connect(path, timeout_s=0.5)
        with pytest.raises(StoreLocked):
            penstock.open(path, timeout_s=0.2)


def test_a_client_that_starts_no_owner_waits_for_the_program_that_opens_the_store(path: Path) -> None:
    with pytest.raises(NotFound):
        connect(path, start=False)
    with penstock.open(path) as store:
        store.kv("users")
        client = connect(path, start=False)
        users = client.kv("users")
        users.put(b"a", b"1", durable=True)
    written = threading.Thread(target=lambda: users.put(b"b", b"2", durable=True))
    written.start()
    with pytest.raises(WaitExpired, match="no owner of .* is serving: open it in a program, or leave start=False out"):
        connect(path, start=False, timeout_s=0.5)
    assert written.is_alive()
    assert owners(path) == []
    with penstock.open(path) as store:
        written.join(30.0)
        assert dict(store.kv("users")) == {b"a": b"1", b"b": b"2"}
        client.close()
    assert owners(path) == []
    with pytest.raises(Invalid, match="leave one of them out"):
        connect(path, create=True, start=False)


# -- open and yield


def test_open_makes_a_started_owner_yield_and_clients_follow(path: Path) -> None:
    with connect(path, create=True) as client:
        users = client.kv("users")
        users.put(b"a", b"1")
        assert users[b"a"] == b"1"
        with penstock.open(path) as store:
            until(lambda: not owners(path))
            assert store.kv("users")[b"a"] == b"1"
            users.put(b"b", b"2")
            assert users[b"b"] == b"2"
            assert store.kv("users")[b"b"] == b"2"
            with pytest.raises(StoreLocked, match="open in this process"):
                penstock.open(path)
        assert users[b"b"] == b"2"  # an owner was started again
        assert len(owners(path)) == 1


def test_an_owner_does_not_yield_while_it_is_needed(path: Path) -> None:
    with connect(path, create=True) as client:
        users, events = client.kv("users"), client.queue("events")
        users.put(b"a", b"1")
        snapshot = client.snapshot()
        with pytest.raises(StoreLocked, match="snapshot"):
            penstock.open(path, timeout_s=0.3)
        assert snapshot.kv("users")[b"a"] == b"1"
        snapshot.close()
        events.put(b"x", durable=True)
        consumer = events.consumer("c")
        got = consumer.get()
        with pytest.raises(StoreLocked, match="lease"):
            penstock.open(path, timeout_s=0.3)
        consumer.ack(got)
        with penstock.open(path) as store:
            assert store.queue("events").consumer("c").lag == 0


def test_one_who_waits_for_messages_does_not_keep_the_owner(path: Path) -> None:
    with connect(path, create=True) as client:
        events, got = client.queue("events"), list[Any]()
        waiting = threading.Thread(target=lambda: got.extend(events.consumer("c").get(timeout_s=60.0)))
        waiting.start()
        pause(0.5)
        with penstock.open(path) as store:
            pause(0.2)
            store.queue("events").put(b"x", durable=True)
            waiting.join(60.0)
            assert [message.payload for message in got] == [b"x"]


def test_nobody_slips_in_between(path: Path) -> None:
    """While one opens, a client that lost its owner waits for that one and starts no other."""
    with connect(path, create=True) as client:
        users = client.kv("users")
        stop, problems = threading.Event(), list[Exception]()

        def write() -> None:
            number = 0
            while not stop.is_set():
                try:
                    users.put(b"%d" % number, b"x", durable=True)
                    users.get(b"%d" % number)
                    number += 1
                except Exception as error:
                    problems.append(error)
                    return

        writing = threading.Thread(target=write)
        writing.start()
        for _ in range(5):
            with penstock.open(path, timeout_s=30.0) as store:
                until(lambda: not owners(path))
                count = len(list(store.kv("users")))
                until(lambda: problems or len(list(store.kv("users"))) > count)  # noqa: B023
        stop.set()
        writing.join()
        assert problems == []
        assert len(owners(path)) <= 1


def test_an_idle_owner_exits_and_one_that_is_needed_does_not(path: Path) -> None:
    command = [sys.executable, "-m", "penstock.server", str(path), "--idle-s", "0.5"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process:
        assert process.stdout.readline() == b'{"fault":null}\n'
        with connect(path) as client:
            client.kv("users").put(b"a", b"1", durable=True)
            snapshot = client.snapshot(lease_s=3600.0)
            pause(1.5)
            assert process.poll() is None
            assert snapshot.kv("users")[b"a"] == b"1"
            snapshot.close()
            assert process.wait(30.0) == 0
    with penstock.open(path) as store:
        assert store.kv("users")[b"a"] == b"1"


def test_an_owner_that_is_told_to_stop_closes_its_store(path: Path) -> None:
    with connect(path, create=True) as client:
        client.kv("users").put(b"a", b"1", durable=True)
        os.kill(owners(path)[0], signal.SIGTERM)
        until(lambda: not owners(path))
        OsFileSystem().lock(f"{path}/LOCK").release()
        assert client.kv("users")[b"a"] == b"1"


def test_an_owner_takes_signals_that_its_client_blocks(path: Path) -> None:
    """Programs that wait for signals in one thread block them in all, and a process inherits that."""

    def connect_in_a_thread() -> RemoteStore:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # of this thread alone
        return connect(path, create=True)

    with ThreadPoolExecutor(1) as pool, pool.submit(connect_in_a_thread).result():
        status = Path(f"/proc/{owners(path)[0]}/status").read_text()
    blocked = int(status.partition("SigBlk:")[2].split()[0], 16)
    assert blocked >> signal.SIGHUP - 1 & 1  # the control
    assert not blocked >> signal.SIGTERM - 1 & 1


# -- killed


def test_merges_count_once_though_the_owner_is_killed_again_and_again(path: Path) -> None:
    draw = random.Random(11)
    with connect(path, create=True) as client:
        counts, number = client.kv("counts", value="int64"), 0
        for _ in range(5):
            victim = owners(path)[0]
            killing = threading.Timer(draw.random() * 0.2, os.kill, (victim, signal.SIGKILL))
            killing.start()
            while killing.is_alive() or number % 50:
                counts.merge(b"n", 1, operator="add_i64", durable=draw.random() < 0.1)
                number += 1
            client.flush()
            assert counts[b"n"] == number  # by the next owner, also if all was durable when the last one was killed
            assert victim not in owners(path)


def test_when_the_owner_dies_its_clients_are_told_and_go_on_with_the_next(path: Path) -> None:
    code = """
        store = penstock.open(sys.argv[1])
        store.kv("users").put_many({b"%05d" % n: bytes(2_000) for n in range(10_000)}, durable=True)
        print("up", flush=True)
        sys.stdin.read()
    """
    process = subprocess.Popen(
        [sys.executable, "-c", "import sys, penstock\n" + textwrap.dedent(code), str(path)],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
    )
    assert process.stdout is not None
    with process:
        assert process.stdout.readline() == b"up\n"
        with connect(path, timeout_s=20.0) as client:
            users = client.kv("users")
            snapshot, scan = client.snapshot(), users.scan()
            next(scan)
            process.kill()
            process.wait()
            with pytest.raises(Closed, match="read it again"):
                list(scan)
            with pytest.raises(Closed, match="snapshot"):
                snapshot.kv("users").get(b"00001")
            with penstock.open(path) as store:
                assert len(list(users.scan())) == 10_000
                users.put(b"new", b"1", durable=True)
                assert store.kv("users")[b"new"] == b"1"


def test_without_an_owner_a_client_waits_and_then_says_so(path: Path) -> None:
    with connect(path, create=True), connect(path, timeout_s=3.0) as client:  # the first waits for an owner to come up
        users = client.kv("users")
        os.kill(owners(path)[0], signal.SIGKILL)
        until(lambda: not owners(path))
        opening = OsFileSystem().lock(f"{path}/OPENING")  # somebody opens, and takes long
        with pytest.raises((WaitExpired, StoreLocked)) as caught:
            users.get(b"a")
        assert "\n" not in str(caught.value)
        opening.release()
        until(lambda: succeeds(lambda: users.get(b"a")))


CONSUMER = """
    import random, os
    with penstock.connect(sys.argv[1]) as store:
        consumer = store.queue("events").consumer("c", visibility_timeout_s=1.0)
        while True:
            got = consumer.get(random.randint(1, 20), timeout_s=2.0)
            if not got and consumer.lag == 0:
                break
            try:
                with store.batch() as batch:
                    consumer.ack(got, batch=batch)
                    for message in got:
                        batch.kv("counts", value="int64").merge(message.payload, 1, operator="add_i64")
            except penstock.errors.LeaseLost:
                pass
    print("done")
"""


def test_consumers_that_are_killed_lose_and_repeat_nothing(path: Path) -> None:
    with penstock.open(path) as store:
        counts = store.kv("counts", value="int64")
        events: QueueTable = store.queue("events", shards=2)
        draw = random.Random(5)
        consumers = [script(CONSUMER, path) for _ in range(3)]
        for start in range(0, 1_500, 250):  # a consumer is killed for each part, once some of that part is consumed
            numbers = range(start, start + 250)
            events.put_many([b"%04d" % n for n in numbers], keys=[b"%d" % n for n in numbers], durable=True)
            lag = events.consumer("c").lag
            until(lambda lag=lag: events.consumer("c").lag < lag)
            pause(draw.random() * 0.05)
            victim = draw.randrange(3)
            consumers[victim].kill()
            output_of(consumers[victim])
            consumers[victim] = script(CONSUMER, path)
        assert [output_of(process) for process in consumers] == ["done"] * 3
        assert dict(counts.items()) == {b"%04d" % n: 1 for n in range(1_500)}


def test_messages_of_one_store_are_not_acknowledged_in_another(tmp_path: Path) -> None:
    """Two stores that were made in the same way, each with its own owner: tables, sequences and names are the same."""
    with connect(tmp_path / "a", create=True) as first, connect(tmp_path / "b", create=True) as second:
        deliveries = []
        for store in (first, second):
            store.queue("events").put_many([b"1", b"2", b"3"], durable=True)
            store.kv("totals", value="int64")
            consumer = store.queue("events").consumer("worker")
            deliveries.append((consumer, consumer.get(2)))
        (consumer, messages), (other, _) = deliveries
        with pytest.raises(LeaseLost), second.batch() as batch:
            batch.kv("totals", value="int64").put(b"n", 2)
            consumer.ack(messages, batch=batch)
        with pytest.raises(LeaseLost):
            other.ack(messages)
        assert (consumer.lag, other.lag, len(second.kv("totals"))) == (3, 3, 0)
        with first.batch() as batch:
            consumer.ack(messages, batch=batch)
        assert (consumer.lag, other.lag) == (1, 3)


def test_two_processes_never_own_one_store(path: Path) -> None:
    """Openers and clients at random; each opener writes a mark that it must find unchanged."""
    code = """
        import random, os
        draw = random.Random(int(sys.argv[2]))
        done = 0
        for _ in range(5):
            try:
                if draw.random() < 0.5:
                    with penstock.open(sys.argv[1], timeout_s=20.0) as store:
                        mark = sys.argv[1] + "/mark"
                        open(mark, "w").write(sys.argv[2])
                        store.kv("counts", value="int64").merge(b"n", 1, operator="add_i64", durable=True)
                        assert open(mark).read() == sys.argv[2], "another owner was here"
                        done += 1
                else:
                    with penstock.connect(sys.argv[1], create=True, timeout_s=30.0) as store:
                        store.kv("counts", value="int64").merge(b"n", 1, operator="add_i64", durable=True)
                        done += 1
            except penstock.errors.StoreLocked:
                pass
        print(done)
    """
    penstock.open(path).close()
    processes = [script(code, path, number) for number in range(3)]
    total = sum(int(output_of(process)) for process in processes)
    with connect(path) as store:
        assert store.kv("counts", value="int64")[b"n"] == total > 4
