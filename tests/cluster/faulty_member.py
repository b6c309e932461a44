"""One member of a cluster whose machine fails on command: `faulty_member.py FOLDER NAME`.

FOLDER has `NAME.json` (its addresses), the certificates and the tokens. What was written to the journal and not synced
is in this process alone, so that a kill loses it, as a power failure would. Lines on standard input:

    noise SHARE    deliver that share of the messages twice, late or out of order
    jump SECONDS   set the wall clock ahead by that, or back
    full 1         fail every write of a file with ENOSPC; 0 ends that
    lazy 1         say that the journal is synced before it is (the negative control)

A line "ready" on standard output says that the member runs. It ends when its standard input does.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import random
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import penstock.server.member
from penstock.host.clock import SystemClock
from penstock.host.os_files import OsFileSystem
from penstock.log import LogSettings
from penstock.replica.seams import RaftTimes
from penstock.replica.tcp_link import TcpLink
from penstock.server.member import Member
from penstock.store.settings import StoreSettings

LAZY_S = 0.4  # until a lazy sync is done


class Faults:
    """What is wrong now."""

    noise = 0.0
    jump = 0.0
    full = False
    lazy = False


class _UnsyncedFile:
    """A file whose bytes reach the disk when it is synced."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._unsynced: list[tuple[int, bytes]] = []
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def size(self) -> int:
        with self._lock:
            return max([int(self._file.size()), *(offset + len(data) for offset, data in self._unsynced)])

    def pread(self, size: int, offset: int) -> bytes:
        with self._lock:
            data = bytearray(self._file.pread(size, offset))
            for at, piece in self._unsynced:
                begin, end = max(at, offset), min(at + len(piece), offset + size)
                if begin < end:
                    data.extend(bytes(max(0, end - offset - len(data))))
                    data[begin - offset : end - offset] = piece[begin - at : end - at]
        return bytes(data)

    def pwrite(self, data: Any, offset: int) -> None:
        with self._lock:
            self._unsynced.append((offset, bytes(data)))

    def _write_out(self) -> None:
        with self._lock:
            for offset, data in self._unsynced:
                self._file.pwrite(data, offset)
            self._unsynced.clear()

    def _sync(self, sync: Callable[[], None]) -> None:
        if Faults.lazy:
            threading.Timer(LAZY_S, self._write_out).start()
        else:
            self._write_out()
            sync()

    def fsync(self) -> None:
        self._sync(self._file.fsync)

    def fdatasync(self) -> None:
        self._sync(self._file.fdatasync)

    def write_synced(self, pieces: Any, offset: int) -> None:
        self.pwrite(b"".join(map(bytes, pieces)), offset)
        self.fdatasync()

    def truncate(self, size: int) -> None:
        self._write_out()
        self._file.truncate(size)

    def map(self, size: int) -> Any:
        self._write_out()
        return self._file.map(size)

    def close(self) -> None:
        if not Faults.lazy:
            self._write_out()
        self._file.close()


class UnsyncedFileSystem(OsFileSystem):
    """Files of the journal lose at a kill what was not synced."""

    def create(self, path: str) -> Any:
        file = super().create(path)
        return _UnsyncedFile(file) if "/journal/" in path else file

    def open(self, path: str, *, write: bool = False) -> Any:
        file = super().open(path, write=write)
        return _UnsyncedFile(file) if write and "/journal/" in path else file


class JumpingClock(SystemClock):
    """The clocks of a machine whose wall clock is set wrong."""

    def time_us(self) -> int:
        return super().time_us() + round(Faults.jump * 1_000_000)


def _fail_when_full() -> None:
    for name in ("pwrite", "pwritev", "posix_fallocate", "write"):
        real = getattr(os, name)

        def failing(*arguments: Any, _real: Any = real) -> Any:
            if Faults.full and arguments[0] > 2:
                raise OSError(errno.ENOSPC, "No space left on device")
            return _real(*arguments)

        setattr(os, name, failing)


def _add_noise() -> None:
    receive, chance, waiting = TcpLink.receive, random.Random(), list[tuple[str, Any]]()

    def noisy(link: TcpLink, member: str, message: Any) -> None:
        due = [(member, message)]
        if chance.random() < Faults.noise:
            fate = chance.choice(("twice", "later", "lost"))
            if fate == "twice":
                due *= 2
            elif fate == "later":
                waiting.append(due.pop())
            else:
                due.clear()
        if waiting and chance.random() < 0.3:  # what waited comes after what was sent later
            due.append(waiting.pop(chance.randrange(len(waiting))))
        for each in due:
            receive(link, *each)

    TcpLink.receive = noisy  # type: ignore[assignment,method-assign]


def main(folder: Path, name: str) -> None:
    vars(penstock.server.member)["OsFileSystem"] = UnsyncedFileSystem
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    _fail_when_full()
    _add_noise()
    config = json.loads((folder / f"{name}.json").read_text())
    Faults.jump = config.get("jump", 0.0)
    member = Member(
        folder / name,
        name,
        {each: (host, port) for each, (host, port) in config["members"].items()},
        cluster=bytes.fromhex(config["cluster"]),
        certificates=folder / "certificates",
        settings=StoreSettings(journal=LogSettings(segment_bytes=1 << 18, allocate_bytes=1 << 16)),
        times=RaftTimes(heartbeat_s=0.1, election_s=0.6),
        serve=tuple(config["clients"]),
        tokens=folder / "tokens.toml",
        lag_segments=4,
        clock=JumpingClock(),
    )
    print("ready", flush=True)
    for line in sys.stdin:
        fault, value = line.split()
        setattr(Faults, fault, float(value) if fault in ("noise", "jump") else bool(int(value)))
        print("done", flush=True)
    Faults.full, Faults.noise = False, 0.0
    member.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
