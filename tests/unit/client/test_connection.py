"""Every call of a client comes back in time, whatever its owner does, and says what is known of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from owner_processes import HANGS_S, hurry, outcome, owners, state_of, stopped, until

import penstock
from penstock.client.connect import connect
from penstock.client.connection import Connection
from penstock.client.store import RemoteStore
from penstock.errors import Closed, OutcomeUnknown, PenstockError, WaitExpired
from penstock.host.waiting import pause


class Tables:
    """What calls are made on."""

    def __init__(self, client: RemoteStore) -> None:
        self.client = client
        self.users = client.kv("users")
        self.counts = client.kv("counts", value="int64")
        self.events = client.queue("events")
        self.users.put_many({b"%04d" % n: bytes(3_000) for n in range(4_000)}, durable=True)  # several pages of a scan
        self.snapshot = client.snapshot()
        self.scan = self.users.scan()
        next(self.scan)
        self.consumer = self.events.consumer("c")


READS: dict[str, Callable[[Tables], Any]] = {
    "get": lambda t: t.users.get(b"0001"),
    "multi_get": lambda t: t.users.multi_get([b"0001", b"0002"]),
    "scan": lambda t: next(t.users.scan()),
    "to_arrow": lambda t: t.users.to_arrow(),
    "snapshot": lambda t: t.client.snapshot(),
    "get in a snapshot": lambda t: t.snapshot.kv("users").get(b"0001"),
    "join a snapshot": lambda t: t.client.snapshot(t.snapshot.id),
    "query snapshot": lambda t: t.client.query_snapshot("q"),
    "tables": lambda t: t.client.tables(),
    "find a table": lambda t: t.client.kv("users"),
    "make a table": lambda t: t.client.port.create("new", "kv", 1, b""),
    "stage": lambda t: t.client.stage("users"),
    "bounds": lambda t: t.events.bounds(),
    "lag": lambda t: t.consumer.lag,
    "time": lambda t: t.users.put(b"x", b"1", ttl_s=60.0),
    "was used": lambda t: t.client.port.is_token_used(("p", 1)),
    "offer": lambda t: t.client.port.take_offer(1),
    "flush": lambda t: (t.users.put(b"flushed", b"1"), t.client.flush()),
    "flush for so long": lambda t: t.client.flush(timeout_s=0.2),
}
WRITES: dict[str, Callable[[Tables], Any]] = {
    "durable put": lambda t: t.users.put(b"y", b"1", durable=True),
    "durable merge": lambda t: t.counts.merge(b"n", 1, operator="add_i64", durable=True),
    "put_many": lambda t: t.users.put_many({b"z": b"1"}, durable=True),
    "batch": lambda t: batch(t, None),
    "batch with a token": lambda t: batch(t, ("p", 1)),
    "put with a token": lambda t: t.events.put(b"e", token=("q", 1)),
    "get messages": lambda t: t.consumer.get(1, timeout_s=0.5),
    "seek": lambda t: t.consumer.forget(),
}


def batch(tables: Tables, token: tuple[str, int] | None) -> None:
    with tables.client.batch(token=token) as writes:
        writes.kv("counts", value="int64").merge(b"batched", 1, operator="add_i64")


def test_calls_to_a_stopped_owner_come_back(path: Path) -> None:
    with connect(path, create=True) as client:
        tables = Tables(client)
        tables.counts.merge(b"n", 0, operator="add_i64", durable=True)
        batches = client.batch(token=("p", 1)), client.batch()
        for each in batches:  # tables are looked up before the owner stops
            each.kv("counts", value="int64").merge(b"batched", 1, operator="add_i64")
        owner = owners(path)[0]
        with stopped(owner):
            hurry(client, 0.5)
            for name, read in READS.items():
                error = outcome(lambda: read(tables))  # noqa: B023 - it is called at once
                assert type(error) is WaitExpired, (name, error)
                assert "\n" not in str(error)
            rest = outcome(lambda: list(tables.scan))
            assert isinstance(rest, Closed | WaitExpired), rest
            assert isinstance(outcome(lambda: client.drop("users")), WaitExpired)  # its writes must be there first
            for name in ("durable put", "durable merge", "put_many", "put with a token"):
                error = outcome(lambda: WRITES[name](tables))  # noqa: B023
                assert type(error) is OutcomeUnknown, (name, error)
            errors = [outcome(each.commit) for each in batches]
            assert [type(error) for error in errors] == [OutcomeUnknown, OutcomeUnknown]
            assert [error.token for error in errors] == [("p", 1), None]
            assert "('p', 1)" in str(errors[0])
            assert os.path.exists(f"/proc/{owner}")
        hurry(client, 30.0)
        client.flush()  # all of it was on its way
        assert tables.counts[b"n"] == 1
        assert tables.counts[b"batched"] == 2
        assert tables.users[b"y"] == tables.users[b"z"] == b"1"
        batch(tables, ("p", 1))  # as the error said
        assert tables.counts[b"batched"] == 2
        assert [bounds.next for bounds in tables.events.bounds()] == [2]


def test_calls_that_may_not_be_repeated_say_that_nobody_knows(path: Path) -> None:
    with connect(path, create=True) as client:
        tables = Tables(client)
        with stopped(owners(path)[0]):
            hurry(client, 0.5)
            assert type(outcome(lambda: tables.events.append(b"x"))) is OutcomeUnknown
        hurry(client, 30.0)
        assert tables.users.get(b"0001") is not None
        with stopped(owners(path)[0]):
            hurry(client, 0.5)
            assert type(outcome(lambda: client.port.drop("events"))) is OutcomeUnknown
            assert type(outcome(lambda: client.port.drop("events"))) is WaitExpired  # it was not asked


def test_a_wait_of_a_call_is_added_to_what_an_answer_may_take(path: Path) -> None:
    """A consumer that waits longer than `timeout_s` of its connection gets what comes meanwhile."""
    with connect(path, create=True) as client:
        events = client.queue("events")
        hurry(client, 3.0)
        sending = threading.Timer(5.0, lambda: events.put(b"late", durable=True))
        sending.start()
        assert [message.payload for message in events.consumer("c").get(timeout_s=15.0)] == [b"late"]
        sending.join()


def test_with_no_deadline_for_answers_this_would_be_seen(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: an answer that is waited for as long as it takes is found by `outcome`."""
    monkeypatch.setattr("owner_processes.HANGS_S", 3.0)
    with connect(path, create=True) as client:
        users = client.kv("users")
        with stopped(owners(path)[0]):
            hurry(client, 0.3)
            monkeypatch.setattr(Connection, "_left_s", lambda *_: 20.0)
            with pytest.raises(AssertionError, match="hangs"):
                outcome(lambda: users.get(b"a"))


# -- the owner ends at the worst time


def wait_until_sent(client: RemoteStore) -> None:
    until(lambda: client._port._flusher._message)


@pytest.mark.parametrize("successor", ["started", "opened"])
def test_an_owner_killed_between_request_and_answer(path: Path, successor: str) -> None:
    with connect(path, create=True) as client:
        counts = client.kv("counts", value="int64")
        for number in range(1, 4):
            victim = owners(path)[0]
            os.kill(victim, signal.SIGSTOP)
            until(lambda: state_of(victim) == "T")  # noqa: B023
            results: list[Any] = []
            writer = threading.Thread(
                target=lambda: results.append(counts.merge(b"n", 1, operator="add_i64", durable=True))  # noqa: B023
            )
            writer.start()
            wait_until_sent(client)
            os.kill(victim, signal.SIGKILL)
            until(lambda: victim not in owners(path))  # noqa: B023
            if successor == "opened":
                with penstock.open(path, timeout_s=30.0) as store:
                    writer.join(HANGS_S)
                    assert store.kv("counts", value="int64")[b"n"] == number
            writer.join(HANGS_S)
            assert len(results) == 1
            assert counts[b"n"] == number
            until(lambda: len(owners(path)) == 1)


def test_threads_share_a_client_while_its_owner_is_killed(path: Path) -> None:
    with connect(path, create=True) as client:
        counts = client.kv("counts", value="int64")
        done, problems = [0] * 6, list[Exception]()

        def work(number: int) -> None:
            try:
                for _ in range(60):
                    counts.merge(b"%d" % number, 1, operator="add_i64", durable=True)
                    done[number] += 1
                    assert counts[b"%d" % number] == done[number]
            except Exception as error:
                problems.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for _ in range(3):
            pause(0.3)
            for pid in owners(path):
                os.kill(pid, signal.SIGKILL)
            until(lambda: not any(thread.is_alive() for thread in threads) or owners(path))
        for thread in threads:
            thread.join(2 * HANGS_S)
        assert problems == []
        assert [counts[b"%d" % number] for number in range(6)] == [60] * 6


# -- closing


def test_close_with_writes_that_cannot_be_sent(path: Path) -> None:
    client = connect(path, create=True)
    users = client.kv("users")
    with stopped(owners(path)[0]):
        users.put(b"a", b"1")
        hurry(client, 0.5)
        error = outcome(client.close)
        assert type(error) is OutcomeUnknown
        assert "\n" not in str(error)
        assert error.first <= error.last
    with pytest.raises(Closed):
        client.tables()
    client.close()
    with connect(path) as other:  # "unknown" was right: it came, or it did not
        assert other.kv("users").get(b"a") in (b"1", None)


def test_a_process_that_ends_with_writes_that_cannot_be_sent(path: Path) -> None:
    code = """
        import sys, penstock
        store = penstock.connect(sys.argv[1], timeout_s=20.0)
        users = store.kv("users")
        print("up", flush=True)
        sys.stdin.readline()
        store._connection._owner_timeout_s = 0.5
        users.put(b"a", b"1")
    """
    with connect(path, create=True):
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code), str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        with stopped(owners(path)[0]):
            _, errors = process.communicate(b"\n", timeout=HANGS_S)
        assert b"OutcomeUnknown" in errors


def test_close_takes_as_long_as_the_owner_takes_messages(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A queue that needs longer than `timeout_s` is no reason to give up, while some of it is taken."""
    monkeypatch.setattr("penstock.client.flusher.MESSAGE_BYTES", 1_000)
    client = connect(path, create=True)
    users = client.kv("users")
    send = Connection.send_once

    def send_slowly(line: Connection, *arguments: Any) -> bytes:
        pause(0.2)
        return send(line, *arguments)

    monkeypatch.setattr(Connection, "send_once", send_slowly)
    for n in range(20):
        users.put(b"%d" % n, bytes(1_000))
        users.delete_range(b"x", b"y")  # a group of its own
    hurry(client, 2.0)
    client.close()
    with connect(path) as other:
        assert len(list(other.kv("users"))) == 20


def test_a_connection_that_never_was_says_so(path: Path) -> None:
    with connect(path, create=True) as client:
        users = client.kv("users")
        client._connection.close()
        with pytest.raises(PenstockError, match="closed"):
            users.get(b"a")
