"""Finds the owner of a store, or starts one.

A started owner is detached: it outlives this process, exits when no client needs it, and yields to `penstock.open`.

Thread: any.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Literal

import pyarrow as pa
from pyarrow import flight

from penstock.arguments import flag, in_short, seconds
from penstock.client.certificates import SCHEME, ServerCertificate
from penstock.client.connection import OWNER_TIMEOUT_S, OwnerLocator
from penstock.client.starting import StartingOwner
from penstock.client.store import TIMEOUT_S_MAX, RemoteStore
from penstock.errors import Invalid, NotFound, ProcessLimit, StoreLocked, WaitExpired
from penstock.host.clock import Clock, SystemClock
from penstock.host.file_errors import translate_open_errors
from penstock.host.file_operations import make_dirs
from penstock.host.forking import use_grpc
from penstock.host.os_files import OsFileSystem
from penstock.host.paths import path_text
from penstock.host.randomness import system_random
from penstock.host.waiting import Retries
from penstock.protocol import locator, wire
from penstock.protocol.folder import check_new_folder, store_folder

Reads = Literal["leader", "linearizable", "local"]
READS = ("leader", "linearizable", "local")
MEMBER_S = 2.0  # for one member of a cluster to answer: the next one may lead
MEMBER_ANSWER_S = 6.0  # for an answer of the leader: if it hangs, its clients try the next member
_ADDRESS = re.compile(r"[\w.-]+:\d{1,5}")  # of a server, without the scheme
ASK_AGAIN_S = 0.2  # between two looks for an owner that another program starts
OPTIONS = [  # of gRPC, which would otherwise back off for minutes after a failed connection
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]


class LocalOwnerLocator:
    """Connects to the owner of a folder on this machine."""

    patience_s: float | None = None
    answer_s: float | None = None

    def __init__(self, path: str, *, create: bool, clock: Clock, start: bool = True) -> None:
        self.folder = self.name = path
        self._create = create
        self._may_start = start
        self._clock = clock
        self._fs = OsFileSystem()
        self._process = system_random().randbytes(8).hex().encode()  # a name for the owner's limits
        self._starting: StartingOwner | None = None  # started here, and has not reported yet

    def headers(self) -> list[tuple[bytes, bytes]]:
        return [(wire.PROCESS_HEADER.encode(), self._process)]

    def open(self, deadline_s: float) -> flight.FlightClient:
        use_grpc()
        with translate_open_errors(self.folder):
            return self._open(deadline_s)

    def _open(self, deadline_s: float) -> flight.FlightClient:
        answer = self._ask_owner(deadline_s)
        # Starting an owner only to find the store locked is expensive, so pauses grow; asking for one is not.
        retries = Retries(self._clock, deadline_s, pause_s_max=1.0 if self._may_start else ASK_AGAIN_S)
        while answer is None or not answer.location:
            if not self._create and not locator.has_store(self.folder):
                name = Path(self.folder).name
                remedy = f"a server's address is {SCHEME}{name}" if _ADDRESS.fullmatch(name) else "give another path"
                raise NotFound(f"there is no store in {self.folder}: {remedy}, or create=True")
            if retries.expired():
                reason = "" if answer is None else f" ({answer.reason})"
                remedy = "try again" if self._may_start else "open it in a program, or leave start=False out"
                raise WaitExpired(f"no owner of {self.folder} is serving{reason}: {remedy}")
            answer = self._start(deadline_s) if self._may_start else self._ask_owner(deadline_s)
            if answer is None or not answer.location:
                retries.again()
        return flight.FlightClient(answer.location, generic_options=OPTIONS)

    def _is_late(self, deadline_s: float) -> bool:
        return self._clock.monotonic_s() >= deadline_s

    def _ask_owner(self, deadline_s: float) -> locator.Answer | None:
        return locator.ask_owner(self.folder, "serve", deadline_s - self._clock.monotonic_s())

    def _start(self, deadline_s: float) -> locator.Answer | None:
        """Start an owner if there is still none. The OPENING lock keeps others from starting or opening."""
        if self._create:
            check_new_folder(self.folder)
            make_dirs(self._fs, self.folder)
        opening = locator.hold_opening(self._fs, self.folder, self._clock, deadline_s)
        try:
            answer = self._ask_owner(deadline_s)
            if answer is None:
                self._start_owner(deadline_s)
                answer = self._ask_owner(deadline_s)
            return answer
        except (ProcessLimit, StoreLocked, WaitExpired) as error:  # its owner does not answer yet, or never will
            if isinstance(error, StoreLocked):
                self._refuse_beside_readers()
            if self._is_late(deadline_s):
                raise
            return None
        finally:
            opening.release()

    def _refuse_beside_readers(self) -> None:
        """Raise `StoreLocked` if processes read the store without an owner: none can start before they close it."""
        try:
            self._fs.lock(f"{self.folder}/LOCK").release()
        except StoreLocked as locked:
            if locked.read_only:
                raise locked from None

    def _start_owner(self, deadline_s: float) -> None:
        """Start an owner, unless one started here is still coming up, and wait until it serves. Requires: OPENING."""
        if self._starting is None:
            self._starting = StartingOwner(self.folder, self._clock)
        report = self._starting.wait_report(deadline_s)
        if report is None:
            pid = self._starting.pid
            raise WaitExpired(f"an owner of {self.folder} was started (process {pid}) but is not ready: try again")
        self._starting = None
        if report.fault is not None:
            raise wire.error_of(report.fault)


class RemoteOwnerLocator:
    """Connects to an owner that serves over TCP."""

    patience_s: float | None = None
    answer_s: float | None = None

    def __init__(self, address: str, token: str, certificate: ServerCertificate, clock: Clock) -> None:
        self.name = f"{SCHEME}{address}"
        self.folder = ""
        self._address = address
        self._headers = [(b"authorization", f"Bearer {token}".encode())]
        self._certificate = certificate
        self._accepted = False  # the server's certificate, once
        self._clock = clock

    def headers(self) -> list[tuple[bytes, bytes]]:
        return self._headers

    def open(self, deadline_s: float) -> flight.FlightClient:
        use_grpc()
        if not self._accepted:
            self._accepted = self._certificate.check(deadline_s - self._clock.monotonic_s())
        roots = self._certificate.roots
        certificates = {} if roots is None else {"tls_root_certs": roots}
        try:
            return flight.FlightClient(f"grpc+tls://{self._address}", generic_options=OPTIONS, **certificates)
        except pa.ArrowInvalid as error:
            raise Invalid(f"{self.name} is not an address ({error}): give {SCHEME}host:port") from None


class ClusterLocator:
    """Connects to the members of a cluster, one after the other, until one takes writes."""

    patience_s: float | None = MEMBER_S
    answer_s: float | None = MEMBER_ANSWER_S

    def __init__(self, members: list[RemoteOwnerLocator], clock: Clock) -> None:
        self._clock = clock
        self.name = SCHEME + ",".join(member.name.removeprefix(SCHEME) for member in members)
        self.folder = ""
        self._members = members
        self._turn = itertools.count()

    def headers(self) -> list[tuple[bytes, bytes]]:
        return self._members[0].headers()

    def open(self, deadline_s: float) -> flight.FlightClient:
        refused: Invalid | None = None
        for _ in self._members:  # a member that is not accepted does not stop the client from trying the others
            member = self._members[next(self._turn) % len(self._members)]
            try:
                return member.open(min(deadline_s, self._clock.monotonic_s() + MEMBER_S))
            except Invalid as error:
                refused = error
        assert refused is not None
        raise refused


def connect(
    path: str | Path,
    *,
    create: bool = False,
    start: bool = True,
    durable: bool = False,
    timeout_s: float = OWNER_TIMEOUT_S,
    token: str | None = None,
    authority: str | Path | None = None,
    reads: Literal["leader", "linearizable", "local"] = "leader",
) -> RemoteStore:
    """Connect to the store in `path`, whichever process owns it; an owner is started if there is none.

    `start=False` starts none: calls wait for a program that opens the store, now and whenever its owner has ended. A
    started owner has default settings, and of master keys only what PENSTOCK_KEYS says.

    `NotFound` if there is no store, unless `create=True`. Any call waits at most `timeout_s` for an owner and its
    answer, then raises `WaitExpired`, or `OutcomeUnknown` for a write. A path `penstock://host:port` is a store that
    is served over TCP: it takes a `token`, and `authority`, a PEM file with the certificate that signed the server's
    (None: those the system trusts). Of a cluster, give all members: `penstock://host:port,host:port,host:port`.

    `reads` is for a cluster. "leader": what the leader has applied; one that was replaced may answer for a moment
    longer. "linearizable": each read waits until a quorum confirmed the leader, and sees every write that was
    acknowledged before it began. "local": what the first member that answers has applied, which may be behind; such a
    connection does not write (`NotLeader`).

    >>> with penstock.connect("data/", create=True) as store:
    ...     epoch = store.kv("users").put(b"ada", b"1815", durable=True)
    """
    timeout_s = seconds(timeout_s, "timeout_s", TIMEOUT_S_MAX, above_zero=True)
    create, start, durable = flag(create, "create"), flag(start, "start"), flag(durable, "durable")
    if create and not start:
        raise Invalid("create=True starts an owner, and start=False starts none: leave one of them out")
    if reads not in READS:
        raise Invalid(f"reads is {in_short(reads)}: give one of {', '.join(READS)}")
    clock, owner_locator = SystemClock(), _locator_of(path_text(path), create, start, token, authority)
    return RemoteStore(
        owner_locator, durable=durable, clock=clock, random=system_random(), owner_timeout_s=timeout_s, reads=reads
    )


def _locator_of(path: str, create: bool, start: bool, token: str | None, authority: str | Path | None) -> OwnerLocator:
    if not path.startswith(SCHEME):
        if token is not None or authority is not None:
            raise Invalid(f"a token and an authority are for {SCHEME}host:port, not for a folder")
        return LocalOwnerLocator(store_folder(path), create=create, clock=SystemClock(), start=start)
    if not isinstance(token, str) or not token.isascii() or not token.isprintable():
        raise Invalid(f"{path} needs a token of printable ASCII: get one from the server's administrator")
    addresses = path.removeprefix(SCHEME).rstrip("/").split(",")
    members = [
        RemoteOwnerLocator(address, token, ServerCertificate(address, authority), SystemClock())
        for address in addresses
    ]
    return members[0] if len(members) == 1 else ClusterLocator(members, SystemClock())
