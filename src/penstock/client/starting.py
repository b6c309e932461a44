"""A detached owner on its way up, as the client sees it that started it.

A client that cannot wait any longer leaves the owner alone: killing it would mean that a store whose opening takes
longer than its clients wait is never opened at all. It serves whoever comes next, or ends because somebody else has the
store's lock. The same client goes on waiting for the same process, so that it starts one at a time.

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
from penstock.protocol import wire
from penstock.protocol.report import OwnerReport

REPORT_BYTES_MAX = 1 << 20  # of what it says before it serves: a line, or a traceback


class StartingOwner:
    """The process, until it said that it serves or why not."""

    def __init__(self, path: str, clock: Clock) -> None:
        self._path = path
        self._clock = clock
        self._output = b""
        self._pipe = -1
        code = str(Path(penstock.__file__).parents[1])
        known = os.environ.get("PYTHONPATH", "")
        environment = {**os.environ, "PYTHONPATH": f"{code}:{known}" if known else code}
        self._pipe, output = os.pipe()
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "penstock.server", path],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd="/",
                env=environment,
                start_new_session=True,  # Ctrl-C here is not meant for it
            )
        finally:
            os.close(output)
        self.pid = process.pid
        threads.spawn(process.wait, name="penstock-owner-reaper")

    def close(self) -> None:
        """Listen to it no more; it comes up all the same."""
        pipe, self._pipe = self._pipe, -1
        if pipe >= 0:
            os.close(pipe)

    def __del__(self) -> None:
        self.close()

    def wait_report(self, deadline_s: float) -> OwnerReport | None:
        """What it says; None if it said nothing before the deadline."""
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
        """Whether this is all that is wanted: a report, which is one line, or too much to be one."""
        is_report = self._output.endswith(b"\n") and self._last_line().startswith(b"{")
        return is_report or len(self._output) > REPORT_BYTES_MAX

    def _last_line(self) -> bytes:
        return self._output.rstrip().rpartition(b"\n")[2]

    def _report(self) -> OwnerReport:
        try:
            return msgspec.json.decode(self._last_line(), type=OwnerReport)
        except msgspec.DecodeError:  # it could not even begin: the last line of a traceback says why
            reason = self._last_line().decode(errors="replace")
        name = "PenstockError" if reason else "WaitExpired"  # nothing: it was killed, and another one may come up
        return OwnerReport(
            wire.ErrorMessage(name, f"an owner of {self._path} could not be started: {reason or 'it was ended'}")
        )
