"""Three members on this machine beside three members of etcd, where it is installed: durable writes by 64 callers.

Each member is a process of its own, on one disk; the callers are threads of this process, and each waits for its write
before the next. etcd's callers ask its leader: through the JSON gateway, with a connection of their own that is kept,
and through gRPC (where `grpcio` is installed), which shares one channel. Ours use `penstock.connect`, which sends what
its callers write together as one request.

`python -m bench.replica failover` kills leaders and followers instead, and tells how long no write was acknowledged.
"""

from __future__ import annotations

import base64
import http.client
import importlib.util
import json
import os
import shutil
import signal
import socket
import statistics
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
    ports: list[int] = []
    for port in range(23_000 + os.getpid() % 10_000, 60_000, 4):
        with ExitStack() as stack:
            try:
                for each in (port, port + 1):
                    stack.enter_context(socket.create_server(("127.0.0.1", each)))
            except OSError:
                continue
            ports.append(port)
        if len(ports) == count:
            return ports
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
def _ours(path: str, killed: list[subprocess.Popen[bytes]] | None = None) -> Iterator[Any]:
    command, hosts = [sys.executable, "-m", "penstock", "cluster"], [f"127.0.0.1:{port}" for port in _ports(3)]
    members = [text for name, host in zip("abc", hosts, strict=True) for text in ("--member", f"{name}={host}")]
    result = subprocess.run([*command, "init", f"{path}/cluster", *members], check=True, capture_output=True, text=True)
    token, authority = result.stdout.strip().removeprefix("token="), f"{path}/cluster/certificates/authority.pem"
    for name, text in (("token", token), ("hosts", ",".join(hosts))):
        with open(f"{path}/cluster/{name}", "w") as file:
            file.write(text)
    runs = [[*command, "run", f"{path}/cluster", name, "--data", f"{path}/{name}"] for name in "abc"]
    with (
        _processes(runs, f"{path}/ours.log") as processes,
        penstock.connect(f"penstock://{','.join(hosts)}", token=token, authority=authority, timeout_s=START_S) as store,
    ):
        store.kv("rows")
        if killed is not None:
            killed += processes
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

    def ask(self, path: str, request: dict[str, str]) -> Any:
        self._connection.request("POST", path, json.dumps(request), {"Content-Type": "application/json"})
        answer = self._connection.getresponse()
        text = answer.read()
        if answer.status != 200:
            raise ValueError(text[:200])
        return json.loads(text)

    def put(self, key: bytes, value: bytes) -> None:
        encoded = {"key": base64.b64encode(key).decode(), "value": base64.b64encode(value).decode()}
        self.ask("/v3/kv/put", encoded)


def _leader_of(ports: list[int]) -> int:
    """The port of the member of etcd that leads."""
    for port in ports:
        status = _Caller(port).ask("/v3/maintenance/status", {})
        if status["leader"] == status["header"]["member_id"]:
            return port
    raise OSError("etcd has no leader")


class _GrpcCaller:
    """Puts by gRPC; the one message is encoded by hand: two fields of bytes."""

    def __init__(self, port: int) -> None:
        grpc: Any = importlib.import_module("grpc")
        channel = grpc.insecure_channel(f"127.0.0.1:{port}")
        self._put = channel.unary_unary("/etcdserverpb.KV/Put")

    def put(self, key: bytes, value: bytes) -> None:
        self._put(b"\x0a" + _varint(len(key)) + key + b"\x12" + _varint(len(value)) + value, timeout=START_S)


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


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


def _etcd_writes(ports: list[int], size: int, *, grpc: bool = False) -> float:
    value, leader = os.urandom(size), _leader_of(ports)
    shared = _GrpcCaller(leader) if grpc else None
    callers = [shared or _Caller(leader) for _ in range(CALLERS)]
    return _by_callers(lambda caller: lambda number: callers[caller].put(b"%d-%d" % (caller, number), value))


def _batches(store: Any) -> float:
    table, rows = store.kv("rows"), [(b"%d" % number, os.urandom(SMALL)) for number in range(BATCH)]

    def work() -> None:
        for _ in range(20):
            table.put_many(rows, durable=True)

    return rate(20 * BATCH, work)


def failover(kills: int = 7) -> None:
    """Kill leaders, then followers, and print how long no write was acknowledged."""
    with folder() as path:
        processes: list[subprocess.Popen[bytes]] = []
        with _ours(path, processes) as store:
            table = store.kv("rows")
            for role in ("leader", "follower"):
                gaps = []
                for _ in range(kills):
                    leader = "abc".index(os.path.basename(_path_of_leader(path)))
                    number = leader if role == "leader" else (leader + 1) % 3
                    gaps.append(_gap(table, processes, number))
                    processes[number] = subprocess.Popen(
                        processes[number].args, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
                    )
                    time.sleep(4)
                median, longest = statistics.median(gaps), max(gaps)
                print(f"{role} killed {kills} times: no write for {median:.2f} s (median), {longest:.2f} s (longest)")
            for process in processes:
                process.send_signal(signal.SIGTERM)
            for process in processes:
                process.wait(START_S)


def _path_of_leader(path: str) -> str:
    with open(f"{path}/cluster/token") as file:
        token = file.read()
    with open(f"{path}/cluster/hosts") as file:
        hosts = file.read()
    authority = f"{path}/cluster/certificates/authority.pem"
    with penstock.connect(f"penstock://{hosts}", token=token, authority=authority, timeout_s=START_S) as store:
        return str(store.path)


def _gap(table: Any, processes: list[subprocess.Popen[bytes]], number: int) -> float:
    """Write all the time, kill a process, and return the longest time between two acknowledgements."""
    gaps, last, killed_s = [0.0], time.monotonic(), time.monotonic() + 0.5
    end_s, killed = killed_s + 5.0, False
    while (now := time.monotonic()) < end_s:
        if not killed and now > killed_s:
            processes[number].kill()
            processes[number].wait()
            killed = True
        table.put(b"key", b"value", durable=True)
        now = time.monotonic()
        if killed:
            gaps.append(now - last)
        last = now
    return max(gaps)


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
            if importlib.util.find_spec("grpc") is not None:
                cases.append(
                    Case(
                        name="etcd by gRPC, 100 bytes",
                        run=lambda: _etcd_writes(ports, SMALL, grpc=True),
                        peer_of="three replicas, 100 bytes, 64 callers",
                    )
                )
            small = "three replicas, 100 bytes, 64 callers"
            goals.append(Goal(ours=small, ratio=2.0, gate=True, peer="etcd, 100 bytes"))
        return run("replica", cases, goals)


if __name__ == "__main__":
    if sys.argv[1:] == ["failover"]:
        failover()
    else:
        sys.exit(0 if main() else 1)
