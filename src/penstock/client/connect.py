"""Finds the owner of a store, or starts one.

A started owner is detached: it goes on when this process ends, exits when nobody needs it, and yields to `open`.

Thread: any.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
from pyarrow import flight

import penstock
from penstock.client import place, wire
from penstock.client.connection import PATIENCE_S
from penstock.client.report import Report
from penstock.client.store import RemoteStore
from penstock.errors import Invalid, NotFound, StoreLocked, WaitExpired
from penstock.host import threads
from penstock.host.chance import system_random
from penstock.host.clock import Clock, SystemClock
from penstock.host.files import OsFileSystem, absolute, make_dirs

KNOCK_S = 10.0
SCHEME = "penstock://"
OPTIONS = [  # of gRPC, which would otherwise remember for minutes that nobody was there
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]


class LocalDoor:
    """To the store in a folder of this machine."""

    def __init__(self, path: str, *, create: bool, clock: Clock) -> None:
        self._path = path
        self._create = create
        self._clock = clock
        self._fs = OsFileSystem()

    @property
    def name(self) -> str:
        return self._path

    def headers(self) -> list[tuple[bytes, bytes]]:
        return []

    def open(self, deadline_s: float) -> flight.FlightClient:
        answer = place.knock(self._path, "serve", KNOCK_S)
        while answer is None or not answer.location:
            if not self._create and not place.has_store(self._path):
                raise NotFound(f"there is no store in {self._path}: give another path, or make one with penstock.open")
            if self._clock.monotonic_s() >= deadline_s:
                reason = "" if answer is None else f" ({answer.reason})"
                raise WaitExpired(f"no owner of {self._path} came up{reason}: try again")
            answer = self._start(deadline_s)
        return flight.FlightClient(answer.location, generic_options=OPTIONS)

    def _start(self, deadline_s: float) -> place.Answer | None:
        """Start an owner if there is still none. OPENING keeps others from doing the same, and from opening."""
        if self._create:
            make_dirs(self._fs, self._path)
        opening = place.hold_opening(self._fs, self._path, self._clock, deadline_s)
        answer = None
        try:
            answer = place.knock(self._path, "serve", KNOCK_S)
            if answer is None:
                start_owner(self._path)
                answer = place.knock(self._path, "serve", KNOCK_S)
        except (StoreLocked, WaitExpired):  # by one who does not answer yet, or never will
            if self._clock.monotonic_s() >= deadline_s:
                raise
        finally:
            opening.release()
        if answer is None or not answer.location:
            place.pause()
        return answer


def start_owner(path: str) -> None:
    """Start a detached owner and wait until it serves. Requires: OPENING."""
    code = str(Path(penstock.__file__).parents[1])
    known = os.environ.get("PYTHONPATH", "")
    environment = {**os.environ, "PYTHONPATH": f"{code}:{known}" if known else code}
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock.server", path],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd="/",
        env=environment,
        start_new_session=True,  # Ctrl-C here is not meant for it
    )
    assert process.stdout is not None
    with process.stdout:
        said = process.stdout.readline()
        try:
            report = msgspec.json.decode(said, type=Report)
        except msgspec.DecodeError:  # it could not even begin: the last line of a traceback says why
            said = (said + process.stdout.read()).rstrip().rpartition(b"\n")[2]
            text, name = said.decode(errors="replace"), "PenstockError" if said else "WaitExpired"  # nothing: killed
            report = Report(wire.Fault(name, f"an owner of {path} could not be started: {text or 'it was ended'}"))
    threads.spawn(process.wait, name="penstock-owner-reaper")
    if report.fault is not None:
        raise wire.error_of(report.fault)


class RemoteDoor:
    """To a store that is served over TCP."""

    def __init__(self, address: str, token: str, roots: bytes | None) -> None:
        self.name = f"{SCHEME}{address}"
        self._address = address
        self._headers = [(b"authorization", f"Bearer {token}".encode())]
        self._roots = roots

    def headers(self) -> list[tuple[bytes, bytes]]:
        return self._headers

    def open(self, deadline_s: float) -> flight.FlightClient:
        given = {} if self._roots is None else {"tls_root_certs": self._roots}
        return flight.FlightClient(f"grpc+tls://{self._address}", generic_options=OPTIONS, **given)


def connect(
    path: str | Path,
    *,
    create: bool = False,
    durable: bool = False,
    timeout_s: float = PATIENCE_S,
    token: str | None = None,
    authority: str | Path | None = None,
) -> RemoteStore:
    """The store in `path`, whoever owns it; an owner is started if there is none.

    `NotFound` if there is no store, unless `create=True`. `timeout_s`: how long an owner is waited for, now and
    whenever it went away. A path `penstock://host:port` is a store that is served over TCP: it takes a `token`, and
    `authority`, a PEM file with the certificate of who signed the server's (None: those the system trusts).
    """
    if not timeout_s > 0:
        raise Invalid(f"timeout_s is {timeout_s}: give more than 0")
    clock, door = SystemClock(), _door_of(str(path), create, token, authority)
    return RemoteStore(door, durable=durable, clock=clock, random=system_random(), patience_s=timeout_s)


def _door_of(path: str, create: bool, token: str | None, authority: str | Path | None) -> LocalDoor | RemoteDoor:
    if not path.startswith(SCHEME):
        if token is not None or authority is not None:
            raise Invalid(f"a token and an authority go with {SCHEME}host:port, not with a folder")
        return LocalDoor(absolute(path), create=create, clock=SystemClock())
    if token is None or not token.isascii() or not token.isprintable():
        raise Invalid(f"{path} needs a token of printable ASCII: ask who serves it")
    try:
        roots = None if authority is None else Path(authority).read_bytes()
    except OSError as error:
        raise Invalid(f"the authority cannot be read: {error}") from None
    return RemoteDoor(path.removeprefix(SCHEME).rstrip("/"), token, roots)
