"""A member that is killed in the middle of its start: `dying_member.py FOLDER NAME`.

FOLDER has `NAME.json` (its addresses) and the certificates. Each line on standard input is a number: a child runs the
member and kills itself, as `kill -9` does, before that change of a file or message; 0: never. The answer is "killed",
or "joined", the number of changes and messages, and that of snapshots, when the member votes and its store caught up.

Processes are forked from this one, which has no threads: a start takes milliseconds.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.host.os_files import OsFile, OsFileSystem
from penstock.log import LogSettings
from penstock.replica.seams import RaftTimes
from penstock.replica.tcp_link import TcpLink
from penstock.server.member import Member
from penstock.store.settings import StoreSettings

CHANGES = ("pwrite", "truncate", "allocate", "fsync", "fdatasync", "write_synced")
FOLDER_CHANGES = ("create", "rename", "unlink", "mkdir", "rmdir", "fsync_dir", "lock")
MESSAGES = ("send", "receive")
SETTINGS = StoreSettings(serve=False, journal=LogSettings(segment_bytes=1 << 16, allocate_bytes=1 << 14))
TIMES = RaftTimes(heartbeat_s=0.05, election_s=0.4)
LAG_SEGMENTS = 2
JOIN_S = 90.0


class Count:
    """What was done so far, and before which of it the process is killed."""

    done, fatal = 0, 0
    lock = threading.Lock()

    @classmethod
    def add(cls) -> None:
        with cls.lock:
            cls.done += 1
            if cls.done == cls.fatal:
                os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(60)


def _counted(real: Callable[..., Any]) -> Callable[..., Any]:
    def counted(*arguments: Any, **options: Any) -> Any:
        Count.add()
        return real(*arguments, **options)

    return counted


def count_changes() -> None:
    for owner, names in ((OsFile, CHANGES), (OsFileSystem, FOLDER_CHANGES), (TcpLink, MESSAGES)):
        for name in names:
            setattr(owner, name, _counted(getattr(owner, name)))


def _join(folder: Path, name: str) -> int:
    config = json.loads((folder / f"{name}.json").read_text())
    member = Member(
        folder / name,
        name,
        {each: (host, port) for each, (host, port) in config["members"].items()},
        cluster=bytes.fromhex(config["cluster"]),
        certificates=folder / "certificates",
        settings=SETTINGS,
        times=TIMES,
        lag_segments=LAG_SEGMENTS,
    )
    store, end = member.store(JOIN_S), time.monotonic() + JOIN_S
    while member.is_joining or member.committed < config["committed"]:
        assert time.monotonic() < end, f"{name} did not join: {member.committed} of {config['committed']}"
        time.sleep(0.01)
    store = member.store(JOIN_S)
    store.wait_for(config["committed"], timeout_s=JOIN_S)
    Count.fatal = 0
    member.close()
    return member.snapshots_taken


def run(folder: Path, name: str, fatal: int) -> str:
    """Run a member in a child; return what came of it."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        status = 1
        try:
            Count.fatal = fatal
            snapshots = _join(folder, name)
            os.write(writer, b"joined %d %d" % (Count.done, snapshots))
            status = 0
        except BaseException as error:
            os.write(writer, f"failed: {error!r}"[:4_000].encode())
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader) as answer:
        text = answer.read()
    _, status = os.waitpid(child, 0)
    return "killed" if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL else text


def main(folder: Path, name: str) -> None:
    count_changes()
    for line in sys.stdin:
        print(run(folder, name, int(line)), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
