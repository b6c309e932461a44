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
from penstock.host.files import OsFileSystem, make_dirs

KNOCK_S = 10.0


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
                raise NotFound(f"there is no store in {self._path}: give another path, or create=True")
            if self._clock.monotonic_s() >= deadline_s:
                reason = "" if answer is None else f" ({answer.reason})"
                raise WaitExpired(f"no owner of {self._path} came up{reason}: try again")
            answer = self._start(deadline_s)
        return flight.FlightClient(answer.location)

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
        except StoreLocked:  # by one who does not answer yet, or never will
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
            text = said.decode(errors="replace") or "it said nothing"
            report = Report(wire.Fault("PenstockError", f"an owner of {path} could not be started: {text}"))
    threads.spawn(process.wait, name="penstock-owner-reaper")
    if report.fault is not None:
        raise wire.error_of(report.fault)


def connect(
    path: str | Path,
    *,
    create: bool = False,
    durable: bool = False,
    timeout_s: float = PATIENCE_S,
) -> RemoteStore:
    """The store in `path`, whoever owns it; an owner is started if there is none.

    `NotFound` if there is no store, unless `create=True`. `timeout_s`: how long an owner is waited for, now and
    whenever it went away.
    """
    if not timeout_s > 0:
        raise Invalid(f"timeout_s is {timeout_s}: give more than 0")
    clock = SystemClock()
    door = LocalDoor(place.absolute(str(path)), create=create, clock=clock)
    return RemoteStore(door, durable=durable, clock=clock, random=system_random(), patience_s=timeout_s)
