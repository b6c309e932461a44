"""Starts a detached owner, and waits for its report.

A client that times out leaves the owner running: if it killed it, a store that takes longer to open than its clients
wait would never open. The owner serves later clients, or ends because another process has the store's lock. A client
that retries waits for the same process, so it starts one at a time.

Thread: one at a time.
"""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
from pathlib import Path

import msgspec

import penstock
from penstock.host import threads
from penstock.host.clock import Clock
from penstock.host.environment import KEYS_VARIABLE
from penstock.protocol import wire
from penstock.protocol.report import OwnerReport

REPORT_BYTES_MAX = 1 << 20  # of its output before it serves: a line, or a traceback


class StartingOwner:
    """A started owner process that has not reported yet."""

    def __init__(self, path: str, clock: Clock) -> None:
        self._path = path
        self._clock = clock
        self._output = b""
        self._pipe = -1
        code = str(Path(penstock.__file__).parents[1])
        inherited = os.environ.get("PYTHONPATH", "")
        environment = {**os.environ, "PYTHONPATH": f"{code}:{inherited}" if inherited else code}
        keys = environment.get(KEYS_VARIABLE, "")
        if keys.startswith("file:"):  # its owner runs in another folder
            environment[KEYS_VARIABLE] = f"file:{os.path.abspath(keys.removeprefix('file:'))}"
        self._pipe, output = os.pipe()
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "penstock.server", path],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd="/",
                env=environment,
                start_new_session=True,  # Ctrl-C must not reach it
            )
        finally:
            os.close(output)
        self.pid = process.pid
        threads.spawn(process.wait, name="penstock-owner-reaper")

    def close(self) -> None:
        """Stop waiting for its report; the process continues."""
        pipe, self._pipe = self._pipe, -1
        if pipe >= 0:
            os.close(pipe)

    def __del__(self) -> None:
        self.close()

    def wait_report(self, deadline_s: float) -> OwnerReport | None:
        """Return its report; None if there is none before the deadline."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._pipe, selectors.EVENT_READ)
            while not self._is_whole():
                if not selector.select(max(0.0, deadline_s - self._clock.monotonic_s())):
                    return None
                part = os.read(self._pipe, 65_536)
                if not part:
                    break
                self._output += part
        self.close()
        return self._report()

    def _is_whole(self) -> bool:
        """Whether to stop reading: the output ends with a report line, or is too long to be one."""
        is_report = self._output.endswith(b"\n") and self._last_line().startswith(b"{")
        return is_report or len(self._output) > REPORT_BYTES_MAX

    def _last_line(self) -> bytes:
        return self._output.rstrip().rpartition(b"\n")[2]

    def _report(self) -> OwnerReport:
        try:
            return msgspec.json.decode(self._last_line(), type=OwnerReport)
        except msgspec.DecodeError:  # it failed before its report: the last line of a traceback says why
            reason = self._last_line().decode(errors="replace")
        name = "PenstockError" if reason else "WaitExpired"  # no output: it was killed, and another may start
        return OwnerReport(
            wire.ErrorMessage(name, f"an owner of {self._path} could not be started: {reason or 'it was killed'}")
        )
