"""A worker process and the thread that owns it.

The process is a fresh interpreter, not a fork and not `multiprocessing`: a fork copies locks that other threads hold,
and `multiprocessing` imports the parent's main module again, which neither a prompt nor a script without a guard
survives. The two talk through a socket pair; see `wire`.

Thread: a slot is used by one thread, which alone controls the process; others signal it by the two events of a call.
Invariants: (1) a call that was sent is never sent again: it may have had effects. (2) after `close` there is no
process.
"""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import socket
import subprocess
import sys
import threading

from penstock.host.clock import Clock
from penstock.scheduler.wire import Channel, Done, EngineCall, Failed, Message, Ready, Stop
from penstock.scheduler.work import WorkCancelled, WorkerLost, WorkFailed, perform

_log = logging.getLogger(__name__)

# The parent's sys.path and not the environment: what the parent can import, its workers can.
_BOOT = """
import json, sys
sys.path[:] = json.loads(sys.argv[2])
from penstock.scheduler.worker import main
main(int(sys.argv[1]))
"""
_POLL_S = 0.05  # between two checks of a call's events
_SEND_S_MAX = 30.0  # for a worker to read a message
_EXIT_S_MAX = 1.0  # for a process that closed its socket to exit, so that its exit code is known
_GONE_S_MAX = 5.0  # for a killed process to be gone
_NEXT_START_S = 60.0  # after a start that failed


def interpreter() -> str:
    """Return the Python to start, or "" if there is none: a frozen program's executable is that program."""
    return "" if getattr(sys, "frozen", False) else sys.executable or ""


class _CannotStart(Exception):
    """No worker process could be started."""


class ProcessSlot:
    """One worker process, started on demand and restarted after it was lost."""

    def __init__(self, *, clock: Clock, executable: str, start_timeout_s: float) -> None:
        self._clock = clock
        self._executable = executable
        self._start_timeout_s = start_timeout_s
        self._next_start_s = clock.monotonic_s()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None

    def run(self, function: str, payload: bytes, stop: threading.Event, kill: threading.Event) -> bytes:
        """Run the call in the process, or in this thread if there is none to be had."""
        try:
            channel = self._ready(kill)
        except _CannotStart as reason:
            if kill.is_set():
                raise WorkCancelled(f"{function} was cancelled before it began") from None
            _log.warning("no worker process (%s): %s runs in a thread", reason, function)
            return perform(function, payload, stop)
        try:
            channel.send(EngineCall(function, payload), _SEND_S_MAX)
            answer = self._await(channel, stop, kill)
        except OSError:
            how = self._end(grace_s=0.0 if kill.is_set() else _EXIT_S_MAX)
            raise WorkerLost(f"the process that ran {function} {how}: it may be tried again") from None
        if isinstance(answer, Done):
            return answer.payload
        if isinstance(answer, Failed) and answer.cancelled:
            raise WorkCancelled(answer.message)
        if isinstance(answer, Failed):
            raise WorkFailed(answer.kind, answer.message, answer.trace, permanent=answer.permanent)
        raise WorkerLost(f"the process that ran {function} sent a {type(answer).__name__} and {self._end()}")

    def close(self) -> None:
        """End the process; what it was doing is lost."""
        self._end()

    def _await(self, channel: Channel, stop: threading.Event, kill: threading.Event) -> Message:
        """Wait for the answer to a call; `OSError` if the process is gone or was killed."""
        stop_sent = False
        while (answer := channel.receive(_POLL_S)) is None:
            if kill.is_set() or (self._process is not None and self._process.poll() is not None):
                raise ConnectionResetError
            if stop.is_set() and not stop_sent:
                channel.send(Stop(), _SEND_S_MAX)
                stop_sent = True
        return answer

    def _ready(self, kill: threading.Event) -> Channel:
        """Return the channel to a running process, starting one if needed."""
        if self._channel is not None and self._process is not None and self._process.poll() is None:
            return self._channel
        self._end()  # it died while idle: no call was lost
        now_s = self._clock.monotonic_s()
        if now_s < self._next_start_s:
            raise _CannotStart("the last start failed a moment ago")
        try:
            channel = self._start()
            deadline_s = now_s + self._start_timeout_s
            while (hello := channel.receive(_POLL_S)) is None:
                if kill.is_set():
                    raise _CannotStart("cancelled")
                if self._clock.monotonic_s() > deadline_s:
                    raise _CannotStart(f"it was silent for {self._start_timeout_s} s")
            if not isinstance(hello, Ready):
                raise _CannotStart("it said something else than ready")
        except (OSError, _CannotStart) as error:
            how = self._end()
            if not kill.is_set():
                self._next_start_s = self._clock.monotonic_s() + _NEXT_START_S
            raise _CannotStart(f"{self._executable} {how}: {error}") from error
        return channel

    def _start(self) -> Channel:
        ours, theirs = socket.socketpair()
        self._channel = Channel(ours)
        with theirs:
            descriptor = theirs.fileno()
            path = json.dumps([str(entry) for entry in sys.path])
            self._process = subprocess.Popen(
                [self._executable, "-c", _BOOT, str(descriptor), path],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # the parent's may carry its own output; stderr is inherited
                pass_fds=(descriptor,),
                start_new_session=True,  # Ctrl-C is for the parent, which decides what becomes of the work
            )
        return self._channel

    def _end(self, *, grace_s: float = 0.0) -> str:
        """End the process, if there is one; return how it ended, for a message."""
        process, self._process = self._process, None
        channel, self._channel = self._channel, None
        if process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(grace_s)
            process.kill()
        if channel is not None:
            channel.close()  # after the kill: a worker that loses its parent ends itself, and hides how it ended
        if process is None:
            return "did not start"
        try:
            code = process.wait(_GONE_S_MAX)
        except subprocess.TimeoutExpired:
            _log.error("worker process %d is still there %s s after it was killed", process.pid, _GONE_S_MAX)
            return "cannot be killed"
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
