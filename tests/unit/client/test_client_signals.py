"""Ctrl-C in a real process that waits for a store: it ends the wait, and is never swallowed.

The owner is stopped, so that nothing but the signal can end a wait: the client would wait for its 300 seconds.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock
from penstock.host.waiting import pause

PATIENCE_S = 60.0  # of the test: a client that is not back by then waits for the owner
OWNER = """
    import sys, penstock
    with penstock.open(sys.argv[1]) as store:
        users = store.kv("users")
        for part in range(8):
            users.put_many({b"%d.%d" % (part, n): b"x" * 1000 for n in range(2_000)}, durable=True)
        store.queue("events")
        print("ready", flush=True)
        sys.stdin.readline()
"""
WAITS = {
    "a message": "next(iter(consumer))",
    "messages, with a timeout": "consumer.get(10, timeout_s=200)",
    "a scan that goes on": "list(rows)",
    "a new scan": "list(users.scan())",
    "a get": "users.get(b'1')",
    "a snapshot": "store.snapshot()",
    "a flush": "users.put(b'k', b'v'); store.flush()",
    "a durable write": "users.put(b'k', b'v', durable=True)",
    "a batch": "begun.commit()",
    "an append": "events.append(b'm')",
    "another connection": "penstock.connect(sys.argv[1], timeout_s=300)",
    "a close": "users.put(b'k', b'v'); store.close()",
}
CLIENT = f"""
    import os, sys, penstock
    store = penstock.connect(sys.argv[1], timeout_s=300)
    for name, act in {WAITS!r}.items():
        users, events = store.kv("users"), store.queue("events")
        consumer, rows, begun = events.consumer("c"), iter(users.scan()), store.batch()
        next(rows)
        begun.kv("users").put(b"k", b"v")
        print("ready", flush=True)
        sys.stdin.readline()
        print("waiting", flush=True)
        try:
            exec(act)
            print("it returned", flush=True)
        except BaseException as error:
            print(type(error).__name__, flush=True)
    os._exit(0)
"""


def program(code: str, folder: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", textwrap.dedent(code), str(folder)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def line(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().decode().strip()


def tell(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.write(b"\n")
    process.stdin.flush()


def stop(process: subprocess.Popen[bytes]) -> None:
    """Stop a process, and return when all its threads have stopped: until then it may answer."""
    process.send_signal(signal.SIGSTOP)
    tasks = Path("/proc", str(process.pid), "task")
    while any(task.read_text().rpartition(")")[2].split()[0] != "T" for task in tasks.glob("*/stat")):
        pause(0.01)


@pytest.fixture(scope="module")
def owner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, subprocess.Popen[bytes]]]:
    folder = tmp_path_factory.mktemp("signals") / "store"
    process = program(OWNER, folder)
    assert line(process) == "ready"
    yield folder, process
    process.send_signal(signal.SIGCONT)
    process.communicate(b"\n", timeout=PATIENCE_S)


def test_ctrl_c_ends_every_wait(owner: tuple[Path, subprocess.Popen[bytes]]) -> None:
    folder, serving = owner
    client = program(CLIENT, folder)
    watchdog = threading.Timer(PATIENCE_S, client.kill)
    watchdog.start()
    try:
        for name in WAITS:
            assert line(client) == "ready", name
            stop(serving)
            tell(client)
            assert line(client) == "waiting", name
            pause(0.2)
            client.send_signal(signal.SIGINT)
            assert line(client) == "KeyboardInterrupt", name
            serving.send_signal(signal.SIGCONT)
    finally:
        watchdog.cancel()
        serving.send_signal(signal.SIGCONT)
        client.kill()
        client.communicate()


def test_a_program_ends_by_ctrl_c(owner: tuple[Path, subprocess.Popen[bytes]]) -> None:
    """A consumer's loop, as people write it: it ends as any program does that is interrupted."""
    folder, _ = owner
    code = """
        import sys, penstock
        with penstock.connect(sys.argv[1]) as store:
            print("waiting", flush=True)
            for message in store.queue("events").consumer("loop"):
                pass
    """
    client = program(code, folder)
    try:
        assert line(client) == "waiting"
        pause(0.3)
        client.send_signal(signal.SIGINT)
        _, errors = client.communicate(timeout=PATIENCE_S)
        assert client.returncode == -signal.SIGINT
        assert errors.decode().strip().endswith("KeyboardInterrupt")
    finally:
        client.kill()
        client.communicate()


def test_the_store_is_fine_afterwards(owner: tuple[Path, subprocess.Popen[bytes]]) -> None:
    folder, _ = owner
    with penstock.connect(folder) as store:
        store.kv("users").put(b"after", b"1", durable=True)
        store.queue("events").put(b"m", durable=True)
        consumer = store.queue("events").consumer("after")
        consumer.ack(consumer.get(1, timeout_s=10))
