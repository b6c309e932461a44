"""Three processes of members, proxies between them, clients that write all four kinds, and a schedule of faults."""

from __future__ import annotations

import json
import math
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from fault_proxy import FaultProxy
from linearizability import Operation, is_linearizable

import penstock
from penstock.errors import OutcomeUnknown, PenstockError
from penstock.replica.seams import RaftTimes
from penstock.testing.members import CLUSTER, NAMES, LocalCluster, await_true, table_digests

FAULTS: tuple[str, ...] = (
    "kill",
    "kill",
    "follower",
    "all",
    "stop",
    "restarts",
    "one-way",
    "partition",
    "delay",
    "noise",
)
FAULTS += ("full", "damage", "wipe", "jump", "strangers")
PROCESS = Path(__file__).with_name("faulty_member.py")
PROGRESS_S = 90.0
LASTING_S = 1_800
FAULT_S = 2.5


class FaultyCluster:
    """The processes, and what clients were told."""

    def __init__(self, folder: Path, *, lazy: bool = False) -> None:
        self._files = LocalCluster(folder, serve=True, start=False)  # certificates, tokens and addresses
        self.folder, self._lazy = self._files.folder, lazy
        self.processes: dict[str, subprocess.Popen[str]] = {}
        self.proxies: dict[tuple[str, str], FaultProxy] = {}
        for name in NAMES:
            addresses = dict(self._files.addresses)
            for other in NAMES:
                if other < name:  # the one whose name sorts later calls; snapshots are asked for directly
                    self.proxies[name, other] = proxy = FaultProxy(self._files.addresses[other])
                    addresses[other] = proxy.address
            config = {"cluster": CLUSTER.hex(), "members": addresses, "clients": self._files.served[name]}
            (self.folder / f"{name}.json").write_text(json.dumps(config))
        self.acknowledged: set[str] = set()
        self._lasts = False  # a row that lasts for a while cannot have expired
        self.tried = 0
        self.history: dict[str, list[Operation]] = {"x": [], "y": []}
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self.done: Counter[str] = Counter()

    # -- processes

    def start(self, name: str) -> bool:
        """Start a member; return whether it runs."""
        process = self._spawn(name)
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            process.communicate()
            return False
        self.processes[name] = process
        if self._lazy:
            self.tell(name, "lazy 1")
        return True

    def _spawn(self, name: str) -> subprocess.Popen[str]:
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, str(PROCESS), str(self.folder), name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def tell(self, name: str, line: str) -> None:
        process = self.processes[name]
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{line}\n")
        process.stdin.flush()
        assert process.stdout.readline() == "done\n"

    def kill(self, name: str) -> None:
        process = self.processes.pop(name)
        process.kill()
        process.communicate()

    def leader(self) -> str:
        """Return the member that wrote its store's log last, as its output says; any if none did."""
        with self._files.connect(timeout_s=PROGRESS_S) as store:
            return Path(store.path).name

    # -- clients

    def begin_clients(self) -> None:
        self._threads = [threading.Thread(target=self._write, args=(number,), daemon=True) for number in range(2)]
        for register in self.history:
            for _ in range(2):
                self._threads.append(threading.Thread(target=self._use_register, args=(register,), daemon=True))
        for thread in self._threads:
            thread.start()

    def end_clients(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(PROGRESS_S * 2)
            assert not thread.is_alive(), "a client does not end"

    def _write(self, number: int) -> None:
        """Write one key, message, sample and vector in one batch; note what was acknowledged."""
        with self._files.connect(timeout_s=60) as store:
            store.kv("rows"), store.queue("events"), store.series("metrics")
            store.vector("docs", dimensions=2, metric="cosine")
            count = 0
            while not self._stop.is_set():
                count += 1
                self.tried += 1
                key = f"{number}-{count}"
                try:
                    with store.batch(token=(f"writer-{number}", count)) as batch:
                        batch.kv("rows").put(key.encode(), b"value of " + key.encode())
                        batch.queue("events").put(key.encode())
                        batch.series("metrics").write("count", float(count), labels={"writer": str(number)}, time=count)
                        batch.vector("docs").upsert([key], [[float(count), 1.0]])
                    self.acknowledged.add(key)
                except PenstockError:  # it may be there or not; the connection goes on with the next
                    with suppress(PenstockError):
                        store.recover()

    def _use_register(self, register: str) -> None:
        chance = random.Random()
        with self._files.connect(timeout_s=10, reads="linearizable") as store:
            table = store.kv("registers")
            while not self._stop.is_set():
                is_write, begin, end = chance.random() < 0.5, time.monotonic(), math.inf
                value: bytes | None = b"%d" % chance.getrandbits(40) if is_write else None
                try:
                    if is_write and value is not None:
                        table.put(register.encode(), value, durable=True)
                    else:
                        value = table.get(register.encode())
                    end = time.monotonic()
                except OutcomeUnknown:
                    pass
                except PenstockError:
                    if is_write:
                        with suppress(PenstockError):
                            store.recover()
                self.history[register].append(Operation(begin, end, is_write=is_write, value=value))
                time.sleep(0.05)

    def await_progress(self, more: int = 3) -> None:
        count_min = len(self.acknowledged) + more
        await_true(lambda: len(self.acknowledged) >= count_min, f"{more} more acknowledged writes", PROGRESS_S)

    # -- faults

    def run(self, faults: int, seed: int, kinds: tuple[str, ...] = FAULTS) -> None:
        chance = random.Random(seed)
        for name in NAMES:
            assert self.start(name), self.log_of(name)
        self.begin_clients()
        self.await_progress()
        with self._files.connect(timeout_s=PROGRESS_S) as store:
            store.kv("lasting").put(b"half an hour", b"x", ttl_s=LASTING_S, durable=True)
        began_s = time.monotonic()
        order: list[str] = []
        for _ in range(faults):
            order = order or chance.sample(kinds, len(kinds))
            self._inject(order.pop(), chance)
            self.await_progress()
        self._lasts = time.monotonic() - began_s < LASTING_S / 2
        self.end_clients()

    def _inject(self, fault: str, chance: random.Random) -> None:
        self.done[fault] += 1
        leader = self.leader()
        follower = chance.choice([name for name in NAMES if name != leader])
        name = leader if fault == "kill" or (fault != "follower" and chance.random() < 0.5) else follower
        if fault in ("kill", "follower"):
            self.kill(name)
            self.await_progress()
            assert self.start(name), self.log_of(name)
        elif fault == "all":
            for each in NAMES:
                self.kill(each)
            for each in NAMES:
                assert self.start(each), self.log_of(each)
        elif fault == "stop":
            os.kill(self.processes[name].pid, signal.SIGSTOP)
            time.sleep(chance.random() * FAULT_S)
            self.await_progress()
            os.kill(self.processes[name].pid, signal.SIGCONT)
        elif fault in ("one-way", "partition", "delay"):
            self._disturb(fault, name, chance)
        elif fault == "noise":
            for each in NAMES:
                self.tell(each, "noise 0.2")
            self.await_progress(5)
            for each in NAMES:
                self.tell(each, "noise 0")
        elif fault == "full":
            self.tell(name, "full 1")
            self.await_progress()
            self.tell(name, "full 0")
        elif fault == "restarts":
            self.kill(name)
            for _ in range(3):
                process = self._spawn(name)
                time.sleep(chance.random() * FAULT_S)  # before it is ready, and after
                process.kill()
                process.communicate()
            assert self.start(name), self.log_of(name)
        elif fault == "jump":
            self._set_clock(name, chance.choice((-3_600, 3_600)))
            self.kill(leader)  # so that another clock counts
            self.await_progress()
            assert self.start(leader), self.log_of(leader)
        elif fault == "strangers":
            self._use_up_descriptors(name)
        elif fault in ("damage", "wipe"):
            self._lose_disk(fault, follower)

    def _disturb(self, fault: str, name: str, chance: random.Random) -> None:
        """Let a member not hear the others, not be heard, or both; or delay everything."""
        deaf = chance.random() < 0.5
        for (caller, callee), proxy in self.proxies.items():
            if fault == "delay":
                proxy.delay = True
            elif name in (caller, callee):
                hears = "from" if caller == name else "to"
                speaks = "to" if caller == name else "from"
                proxy.holds = {hears: deaf or fault == "partition", speaks: not deaf or fault == "partition"}
        time.sleep(chance.random() * FAULT_S)  # shorter and longer than an election
        self.await_progress()
        for proxy in self.proxies.values():
            proxy.heal()

    def _set_clock(self, name: str, ahead_s: int) -> None:
        """Set the wall clock of a member's machine, which stays so when its process is started again."""
        path = self.folder / f"{name}.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "jump": ahead_s}))
        self.tell(name, f"jump {ahead_s}")

    def _use_up_descriptors(self, name: str) -> None:
        """Let strangers connect to a member that has few descriptors left; nobody else can call it meanwhile."""
        process, strangers = self.processes[name].pid, list[socket.socket]()
        limits = resource.prlimit(process, resource.RLIMIT_NOFILE)
        few = len(os.listdir(f"/proc/{process}/fd")) + 4
        resource.prlimit(process, resource.RLIMIT_NOFILE, (few, limits[1]))
        for address in (self._files.addresses[name], self._files.served[name]):
            for _ in range(20):
                strangers.append(socket.socket())
                strangers[-1].setblocking(False)
                strangers[-1].connect_ex(address)
        self.await_progress(5)
        for stranger in strangers:
            stranger.close()
        resource.prlimit(process, resource.RLIMIT_NOFILE, limits)

    def _lose_disk(self, fault: str, name: str) -> None:
        """Damage a journal or remove it; a damaged one is refused at the start, and its disk replaced."""
        self.kill(name)
        self.await_progress()
        if fault == "damage":
            segments = sorted((self.folder / name / "journal").iterdir())
            with segments[0].open("r+b") as file:
                file.seek(300)
                file.write(bytes(200))
            assert not self.start(name), f"{name} starts with a damaged journal"
        shutil.rmtree(self.folder / name)
        assert self.start(name), self.log_of(name)
        self.await_progress()
        await_true(
            lambda: (self.folder / name / "journal").exists() and self._caught_up(name), f"{name} to be back", 120
        )

    def _caught_up(self, name: str) -> bool:
        """Whether a member has a store that has the newest rows of another one."""
        host, port = self._files.served[name]
        authority = self.folder / "certificates" / "authority.pem"
        newest_key = max(self.acknowledged, key=lambda key: int(key.split("-")[1]))
        with (
            suppress(PenstockError),
            penstock.connect(
                f"penstock://{host}:{port}", token="admin-secret", authority=authority, reads="local", timeout_s=5
            ) as store,
        ):
            return store.kv("rows", create=False).get(newest_key.encode()) is not None
        return False

    def log_of(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()[-3_000:]

    def end(self) -> None:
        self._stop.set()
        for proxy in self.proxies.values():
            proxy.close()
        for process in self.processes.values():
            process.send_signal(signal.SIGCONT)
            process.communicate()
        self.processes.clear()

    # -- checks

    def check(self) -> None:
        """Check every member: all that was acknowledged, once, the same everywhere, without gaps."""
        for register, history in self.history.items():
            assert is_linearizable(history), f"the history of {register} is not linearizable: {history}"
        self.end()
        calm = RaftTimes(heartbeat_s=0.4, election_s=4.0)  # three stores share this process now
        with LocalCluster(self.folder, serve=True, times=calm) as members:
            stores = members.await_agreement()
            digests = {name: table_digests(store) for name, store in stores.items()}
            for name in NAMES:
                assert digests[name] == digests["a"], f"{name} differs from a: {digests}"
            for name, store in stores.items():
                rows = dict(store.kv("rows").scan())
                events = store.queue("events").to_arrow()
                lost = self.acknowledged - {key.decode() for key in rows}
                assert not lost, f"{name} lost {len(lost)} acknowledged writes: {sorted(lost)[:5]}"
                payloads = Counter(events["payload"].to_pylist())
                assert set(payloads) == set(rows)
                assert set(payloads.values()) == {1}, "a message is there twice"
                sequences = events["sequence"].to_pylist()
                assert sequences == list(range(sequences[0], sequences[0] + len(sequences))), "a gap in the queue"
                assert store.series("metrics").to_arrow().num_rows == len(rows)
                assert store.vector("docs").to_arrow().num_rows == len(rows)
                if self._lasts:
                    assert store.kv("lasting").get(b"half an hour") == b"x", f"a row expired early on {name}"
