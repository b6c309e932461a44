"""A cluster of members in this process, on loopback, for tests.

Thread: the test's; each member has its own.
"""

from __future__ import annotations

import hashlib
import shutil
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, TypeVar

from penstock.cli.certificates import make_member_certificates
from penstock.client.connect import connect
from penstock.client.store import RemoteStore
from penstock.errors import Closed, PenstockError
from penstock.host.clock import SystemClock
from penstock.host.randomness import system_random
from penstock.host.waiting import pause
from penstock.replica.seams import RaftTimes
from penstock.server.member import Member
from penstock.store.settings import StoreSettings
from penstock.store.store import Store

T = TypeVar("T")

_monotonic_s = SystemClock().monotonic_s
NAMES = ("a", "b", "c")
TOKEN = "admin-secret"
CLUSTER = bytes(range(16))
PATIENCE_S = 60.0


def free_ports(count: int) -> list[int]:
    """Return loopback ports that are not in use now."""
    chance, ports = system_random(), list[int]()
    while len(ports) < count:
        port = 10_000 + int(chance.random() * 22_000)  # below those that the system gives to clients
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            ports += [port] if port not in ports else []
    return ports


def await_true(find: Callable[[], T], event: str = "it", timeout_s: float = PATIENCE_S) -> T:
    """Call until the result is true, and return it."""
    deadline = _monotonic_s() + timeout_s
    while not (result := find()):
        assert _monotonic_s() < deadline, f"{event} did not come about within {timeout_s:g} s"
        pause(0.01)
    return result


class LocalCluster:
    """Members of one cluster.

    >>> from penstock.testing.members import LocalCluster
    >>> with LocalCluster("cluster") as members:
    ...     store = members.leader_store()
    ...     epoch = store.kv("users").put(b"ada", b"1815", durable=True)
    """

    def __init__(
        self,
        folder: str | Path,
        names: tuple[str, ...] = NAMES,
        *,
        times: RaftTimes | None = None,
        settings: StoreSettings | None = None,
        serve: bool = False,
        start: bool = True,
        cluster: bytes = CLUSTER,
        **options: Any,
    ) -> None:
        """`serve`: clients can `connect`, too."""
        self.folder, self.names, self.cluster = Path(folder).absolute(), names, cluster
        self.folder.mkdir(parents=True, exist_ok=True)
        self.times = times or RaftTimes(heartbeat_s=0.05, election_s=0.4)
        self.settings = settings or StoreSettings(serve=serve)
        self.options = options
        ports = free_ports(len(names) * 2)
        self.addresses = {name: ("127.0.0.1", port) for name, port in zip(names, ports, strict=False)}
        self.served = {name: ("127.0.0.1", port) for name, port in zip(names, ports[len(names) :], strict=True)}
        self.tokens: Path | None = None
        if not (self.folder / "certificates").exists():
            make_member_certificates(str(self.folder / "certificates"), dict.fromkeys(names, "127.0.0.1"))
        if serve:
            self.tokens = self.folder / "tokens.toml"
            digest = hashlib.sha256(TOKEN.encode()).hexdigest()
            self.tokens.write_text(f'[tokens.admin]\nsha256 = "{digest}"\nrights = {{ "*" = "admin" }}\n')
            self.tokens.chmod(0o600)
        self.members: dict[str, Member] = {}
        for name in names if start else ():
            self.start(name)

    def start(self, name: str, addresses: Mapping[str, tuple[str, int]] | None = None) -> Member:
        """Start a member; `addresses`: where it finds the others, and itself."""
        self.members[name] = member = Member(
            self.folder / name,
            name,
            addresses or self.addresses,
            cluster=self.cluster,
            certificates=self.folder / "certificates",
            settings=self.settings,
            times=self.times,
            serve=self.served[name] if self.tokens is not None else None,
            tokens=self.tokens,
            **self.options,
        )
        return member

    def stop(self, name: str) -> None:
        self.members.pop(name).close()

    def wipe(self, name: str) -> None:
        """Lose the disk of a member. Requires: it is stopped."""
        shutil.rmtree(self.folder / name)

    def leader(self) -> str:
        """Wait for a leader; return its name."""
        return await_true(lambda: next((name for name, each in self.members.items() if each.is_leader), ""), "a leader")

    def leader_store(self) -> Store:
        """Return the store of the leader, which is closed when another one leads."""
        return self.members[self.leader()].store()

    def followers(self) -> list[str]:
        leader = self.leader()
        return [name for name in self.members if name != leader]

    def write(self, act: Callable[[Store], T]) -> T:
        """Call `act` with the leader's store, again until it succeeds."""
        deadline = _monotonic_s() + PATIENCE_S
        while True:
            try:
                return act(self.leader_store())
            except PenstockError:
                if _monotonic_s() > deadline:
                    raise
                pause(0.02)

    def connect(self, **options: Any) -> RemoteStore:
        """Connect as a client to all members."""
        hosts = ",".join(f"{host}:{port}" for host, port in self.served.values())
        authority = self.folder / "certificates" / "authority.pem"
        return connect(f"penstock://{hosts}", token=TOKEN, authority=authority, **options)

    def await_agreement(self) -> dict[str, Store]:
        """Wait until every member has applied all that is committed; return their stores."""
        leader = self.leader()
        last = self.members[leader].committed
        return {name: self._caught_up(name, last) for name in self.members}

    def _caught_up(self, name: str, last: int) -> Store:
        deadline = _monotonic_s() + PATIENCE_S
        while True:  # its store is replaced when its role changes
            with suppress(PenstockError):
                store = self.members[name].store()
                store.wait_for(last, timeout_s=5.0)
                return store
            assert _monotonic_s() < deadline, f"member {name} did not apply record {last}"
            pause(0.02)

    def digests(self) -> dict[str, dict[str, str]]:
        """Return the logical digest of each table of each member, after all of them agree."""
        deadline = _monotonic_s() + PATIENCE_S
        while True:
            try:
                return {name: table_digests(store) for name, store in self.await_agreement().items()}
            except Closed:  # another one leads now, and stores were opened again
                if _monotonic_s() > deadline:
                    raise

    def close(self) -> None:
        for name in list(self.members):
            self.stop(name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def table_digests(store: Store) -> dict[str, str]:
    """Return a digest of what each table holds, whatever its files are."""
    return {info.name: _digest(store, info.name, info.kind) for info in store.port.tables()}


def _digest(store: Store, name: str, kind: str) -> str:
    digest = hashlib.sha256()
    with store.snapshot() as snapshot:
        table = getattr(snapshot, kind)(name)
        rows = table.to_arrow()
    for row in sorted(map(repr, rows.to_pylist())) if kind != "queue" else map(repr, rows.to_pylist()):
        digest.update(row.encode())
    return f"{rows.num_rows}:{digest.hexdigest()}"
