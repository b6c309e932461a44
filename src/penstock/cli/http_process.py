"""`penstock http` as a process beside the owner that `penstock serve` is, so that queries do not hold its interpreter.

The process ends when its standard input does, so it never outlives the owner that started it.

Thread: one, which calls `check` now and then.
Invariant: at most one process at a time; one that ended is started again, a second later at the earliest.
"""

from __future__ import annotations

import select
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

from penstock.errors import Invalid
from penstock.host.clock import SystemClock

AGAIN_S = 1.0
END_S = 20.0


def parse_address(text: str) -> tuple[str, int]:
    """Return the host and the port of HOST:PORT; an IPv6 address stands in brackets."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or len(port) > 5 or int(port) > 65_535:
        raise Invalid(f"--http is HOST:PORT such as 127.0.0.1:9090, not {text[:80]!r}")
    return host.removeprefix("[").removesuffix("]"), int(port)


def parent_has_ended() -> bool:
    """Return whether the standard input, which the owner holds open, has ended."""
    ready, _, _ = select.select([sys.stdin], [], [], 0)
    return bool(ready) and not sys.stdin.buffer.read(1)


class HttpProcess:
    """The process, from its start to `close`."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._command = [sys.executable, "-m", "penstock", "http", *arguments, "--beside"]
        self._clock = SystemClock()
        self._started_s = 0.0
        self._process: subprocess.Popen[bytes] | None = None

    def check(self) -> None:
        """Start the process if there is none, or if it has ended."""
        ended = self._process is None or self._process.poll() is not None
        if ended and self._clock.monotonic_s() >= self._started_s + AGAIN_S:
            self._started_s = self._clock.monotonic_s()
            self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE)  # its output is ours

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
        finally:
            process.kill()
            process.wait(END_S)
            if process.stdin is not None:
                process.stdin.close()
