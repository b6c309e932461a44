"""Three members on this machine beside three members of etcd, where it is installed: durable writes by 64 callers.

Each member is a process of its own, on one disk; the callers are threads of this process, and each waits for its write
before the next. etcd is asked through its JSON gateway, with a connection for each caller; ours through
`penstock.connect`, which sends what its callers write together as one request.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import penstock
from bench.harness import Case, Goal, folder, rate, run

CALLERS, WRITES = 64, 50  # of each caller in a round
SMALL, LARGE = 100, 4_096
BATCH = 1_000
START_S = 60.0


def _ports(count: int) -> list[int]:
    """Free ports, each with a free one after it."""
    found: list[int] = []
    for port in range(23_000 + os.getpid() % 10_000, 60_000, 4):
        with ExitStack() as stack:
            try:
                for each in (port, port + 1):
                    stack.enter_context(socket.create_server(("127.0.0.1", each)))
            except OSError:
                continue
            found.append(port)
        if len(found) == count:
            return found
    raise OSError("there are not enough free ports")


@contextmanager
def _processes(commands: list[list[str]], log: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    processes: list[subprocess.Popen[bytes]] = []
    try:
        with open(log, "wb") as file:
            processes += [subprocess.Popen(command, stdout=file, stderr=file) for command in commands]
        yield processes
    finally:
        for process in processes:
            process.send_signal(signal.SIGTERM)
        for process in processes:
            process.wait(START_S)


@contextmanager
def _ours(path: str) -> Iterator[Any]:
    command, hosts = [sys.executable, "-m", "penstock", "cluster"], [f"127.0.0.1:{port}" for port in _ports(3)]
    members = [text for name, host in zip("abc", hosts, strict=True) for text in ("--member", f"{name}={host}")]
    made = subprocess.run([*command, "init", f"{path}/cluster", *members], check=True, capture_output=True, text=True)
    token, authority = made.stdout.strip().removeprefix("token="), f"{path}/cluster/certificates/authority.pem"
    runs = [[*command, "run", f"{path}/cluster", name, "--data", f"{path}/{name}"] for name in "abc"]
    with (
        _processes(runs, f"{path}/ours.log"),
        penstock.connect(f"penstock://{','.join(hosts)}", token=token, authority=authority, timeout_s=START_S) as store,
    ):
        store.kv("rows")
        yield store


@contextmanager
def _etcd(path: str) -> Iterator[list[int]]:
    ports = _ports(3)
    peers = ",".join(f"{name}=http://127.0.0.1:{port + 1}" for name, port in zip("abc", ports, strict=True))
    commands = [
        [
            "etcd", "--name", name, "--data-dir", f"{path}/etcd-{name}", "--initial-cluster", peers,
            "--listen-client-urls", f"http://127.0.0.1:{port}", "--advertise-client-urls", f"http://127.0.0.1:{port}",
            "--listen-peer-urls", f"http://127.0.0.1:{port + 1}",
            "--initial-advertise-peer-urls", f"http://127.0.0.1:{port + 1}",
        ]
        for name, port in zip("abc", ports, strict=True)
    ]  # fmt: skip
    with _processes(commands, f"{path}/etcd.log"):
        deadline = time.monotonic() + START_S
        while True:
            try:
                _Caller(ports[0]).put(b"first", b"first")
            except (OSError, http.client.HTTPException, ValueError):
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
            else:
                break
        yield ports


class _Caller:
    """A connection to etcd's JSON gateway."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=START_S)

    def put(self, key: bytes, value: bytes) -> None:
        body = json.dumps({"key": base64.b64encode(key).decode(), "value": base64.b64encode(value).decode()})
        self._connection.request("POST", "/v3/kv/put", body, {"Content-Type": "application/json"})
        answer = self._connection.getresponse()
        text = answer.read()
        if answer.status != 200:
            raise ValueError(text[:200])


def _by_callers(make: Callable[[int], Callable[[int], object]]) -> float:
    """The rate of all callers together; `make(caller)` returns what it does, by number."""
    acts = [make(caller) for caller in range(CALLERS)]
    failures: list[BaseException] = []

    def call(act: Callable[[int], object]) -> None:
        try:
            for number in range(WRITES):
                act(number)
        except BaseException as error:
            failures.append(error)

    def work() -> None:
        threads = [threading.Thread(target=call, args=(act,)) for act in acts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]

    return rate(CALLERS * WRITES, work)


def _our_writes(store: Any, size: int) -> float:
    table, value = store.kv("rows"), os.urandom(size)
    return _by_callers(lambda caller: lambda number: table.put(b"%d-%d" % (caller, number), value, durable=True))


def _etcd_writes(ports: list[int], size: int) -> float:
    value = os.urandom(size)
    callers = [_Caller(ports[caller % 3]) for caller in range(CALLERS)]
    return _by_callers(lambda caller: lambda number: callers[caller].put(b"%d-%d" % (caller, number), value))


def _batches(store: Any) -> float:
    table, rows = store.kv("rows"), [(b"%d" % number, os.urandom(SMALL)) for number in range(BATCH)]

    def work() -> None:
        for _ in range(20):
            table.put_many(rows, durable=True)

    return rate(20 * BATCH, work)


def main() -> bool:
    with ExitStack() as stack:
        path = stack.enter_context(folder())
        ours = stack.enter_context(_ours(path))
        stack.enter_context(penstock.open(f"{path}/alone")).close()
        alone = stack.enter_context(penstock.connect(f"{path}/alone"))
        cases = [
            Case(name="three replicas, 100 bytes, 64 callers", run=lambda: _our_writes(ours, SMALL)),
            Case(name="three replicas, 4 KB, 64 callers", run=lambda: _our_writes(ours, LARGE)),
            Case(name="three replicas, batches of 1,000 rows", run=lambda: _batches(ours)),
            Case(
                name="one store, batches of 1,000 rows",
                run=lambda: _batches(alone),
                peer_of="three replicas, batches of 1,000 rows",
            ),
        ]
        goals = [Goal(ours="three replicas, batches of 1,000 rows", ratio=0.3)]
        if shutil.which("etcd"):
            ports = stack.enter_context(_etcd(path))
            cases += [
                Case(
                    name="etcd, 100 bytes",
                    run=lambda: _etcd_writes(ports, SMALL),
                    peer_of="three replicas, 100 bytes, 64 callers",
                ),
                Case(
                    name="etcd, 4 KB",
                    run=lambda: _etcd_writes(ports, LARGE),
                    peer_of="three replicas, 4 KB, 64 callers",
                ),
            ]
            goals.append(Goal(ours="three replicas, 100 bytes, 64 callers", ratio=2.0, gate=True))
        return run("replica", cases, goals)


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
