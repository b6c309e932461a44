"""A detached owner: `python -m penstock.server PATH`. A client starts it; it ends when no client needs it.

Its first line reports that it serves, or what is wrong; after that it logs to `run/owner.log`. It does not take the
OPENING lock to open: the client that started it holds the lock until it serves or the client times out. It takes the
lock to end, so that no client connects meanwhile. When its writes fail it recovers by itself, or ends, so that the next
owner recovers.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
from contextlib import suppress
from logging.handlers import RotatingFileHandler

import msgspec

from penstock.errors import PenstockError, StoreLocked
from penstock.host.file_errors import translate_open_errors
from penstock.host.os_files import OsFileSystem
from penstock.host.paths import absolute
from penstock.host.randomness import system_random
from penstock.host.waiting import stop_on_signals
from penstock.protocol import wire
from penstock.protocol.report import OwnerReport
from penstock.server.healing import Healer
from penstock.server.service import Service
from penstock.store.store import Store, open_store

logger = logging.getLogger("penstock.server")

IDLE_S = 30.0
POLL_S = 0.25


def main(arguments: list[str] | None = None) -> int:
    """Own a store until no client needs it; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m penstock.server", description=__doc__)
    parser.add_argument("path")
    parser.add_argument("--idle-s", type=float, default=IDLE_S, help="seconds without a client before it ends")
    options = parser.parse_args(arguments)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})  # the process that started it may not
    with stop_on_signals() as stop:
        return _run(absolute(options.path), options.idle_s, stop)


def _run(path: str, idle_s: float, stop: threading.Event) -> int:
    """Open and serve the store, and return the exit code of the process."""
    try:
        with translate_open_errors(path):
            store = open_store(path)
            service = Service(store, random=system_random(), detached=True)
            service.location()
    except PenstockError as error:
        _report(OwnerReport(wire.fault_of(error)))
        return 1
    log = RotatingFileHandler(f"{path}/run/owner.log", maxBytes=1 << 20, backupCount=1)
    logging.basicConfig(handlers=[log], format="%(asctime)s %(levelname)s %(name)s %(message)s")
    _report(OwnerReport())
    try:
        _own(store, service, idle_s, stop)
    except (
        OSError,
        PenstockError,
    ):  # recovery or closing failed: the next owner starts from what is on the disk
        logger.exception("%s: this owner ended with an error", path)
        return 1
    return 0


def _report(report: OwnerReport) -> None:
    """Write the report to the process that started this one, then close the output."""
    with suppress(BrokenPipeError):  # it stopped waiting: serve other clients
        sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
        sys.stdout.flush()
    silence = os.open(os.devnull, os.O_RDWR)
    os.dup2(silence, sys.stdout.fileno())  # no process reads the output any more
    os.dup2(silence, sys.stderr.fileno())
    os.close(silence)


def _own(store: Store, service: Service, idle_s: float, stop: threading.Event) -> None:
    fs, healer = OsFileSystem(), Healer(store, store.clock)
    while not (service.yielded.wait(POLL_S) or stop.is_set()):
        if not healer.heal():
            break
        if service.idle_s() < idle_s:
            continue
        try:
            opening = fs.lock(f"{store.path}/OPENING")
        except StoreLocked:
            continue  # a client is connecting
        try:
            if not service.begin_yield():
                store.close()
        finally:
            opening.release()
    store.close()  # does nothing if it was closed above


if __name__ == "__main__":
    sys.exit(main())
