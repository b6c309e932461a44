"""Real owners for tests: found, stopped, ended, and made to fail."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock.client.store import RemoteStore
from penstock.errors import WaitExpired
from penstock.host.waiting import pause

HANGS_S = 60.0  # a call with a deadline of a second or two that is not back by then never comes back


def owners(path: Path) -> list[int]:
    """The detached owners of a store, by their command lines."""
    process_ids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes().split(b"\0")
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if b"penstock.server" in command and os.fsencode(path) in command and state != "Z":
                process_ids.append(int(entry.name))
    return process_ids


def until(condition: Any, seconds: float = 30.0) -> None:
    """Wait until something is so."""
    for _ in range(int(seconds / 0.05)):
        if condition():
            return
        pause(0.05)
    raise AssertionError("it did not come about")


def succeeds(call: Callable[[], object]) -> bool:
    """Whether a call that waits for an owner found one in time."""
    try:
        call()
    except WaitExpired:
        return False
    return True


def script(code: str, *arguments: object) -> subprocess.Popen[bytes]:
    text = "import sys, penstock\n" + textwrap.dedent(code)
    return subprocess.Popen([sys.executable, "-c", text, *map(str, arguments)], stdout=subprocess.PIPE)


def output_of(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    with process:
        return process.stdout.read().decode().strip()


# -- stopped and failing


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process that does nothing within the block."""
    os.kill(pid, signal.SIGSTOP)
    try:
        until(lambda: state_of(pid) == "T")
        yield
    finally:
        if state_of(pid) == "T":
            os.kill(pid, signal.SIGCONT)


def state_of(pid: int) -> str:
    """R, S, D, T (stopped), Z, or nothing if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def outcome(call: Callable[[], Any]) -> Any:
    """What a call returned or raised; it fails if the call hangs."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(call())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(HANGS_S)
    assert results, "it hangs"
    return results[0]


def hurry(client: RemoteStore, timeout_s: float) -> None:
    """As if it had been connected with another `timeout_s`: finding its owner needed more time than that."""
    client._connection._owner_timeout_s = timeout_s
    client._port._write_s = timeout_s


FAULTY = """
    import errno, os
    from penstock.host.os_files import OsFile
    from penstock.server import healing
    healing.WAIT_S_MIN = healing.WAIT_S_MAX = 0.05
    whole, fails = OsFile.fdatasync, sys.argv[2]

    def fdatasync(file):
        if "/journal/" in file.path and os.path.exists(fails):
            if open(fails).read() == "once":
                os.unlink(fails)
            raise OSError(errno.EIO, "the disk failed")
        whole(file)

    OsFile.fdatasync = fdatasync
"""


@contextmanager
def faulty_owner(path: Path, fails: Path, *, program: str = "") -> Iterator[subprocess.Popen[bytes]]:
    """A detached owner whose journal cannot be synced while a file is there; with "once" in it, once."""
    run = program or "from penstock.server.__main__ import main\nsys.exit(main([sys.argv[1]]))"
    process = script(textwrap.dedent(FAULTY) + textwrap.dedent(run), path, fails)
    assert process.stdout is not None
    with process:
        process.stdout.readline()
        try:
            yield process
        finally:
            process.kill()
