"""The process behind the engine `process`: runs named functions for its parent, one at a time.

Started by `penstock.scheduler.processes` with one inherited socket. It has nothing else: no store, no lock.

Thread: functions run on the main thread; a second one listens, so that a stop signal reaches a running function and so
that the process ends when its parent does, even in the middle of a function.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import socket
import threading

from penstock.host.threads import spawn
from penstock.scheduler.wire import Channel, Done, EngineCall, Failed, Message, Ready, Stop, shorten
from penstock.scheduler.work import WorkCancelled, WorkFailed, perform


def main(descriptor: int) -> None:
    """Serve the parent at the other end of a socket until it closes it."""
    connection = socket.socket(fileno=descriptor)
    calls: queue.Queue[EngineCall] = queue.Queue(maxsize=1)
    stop = threading.Event()
    spawn(lambda: _listen(Channel(connection), calls, stop), name="penstock-worker-listener")
    answers = Channel(connection)
    answer: Message = Ready()
    with contextlib.suppress(OSError):  # the parent is gone: the listener ends the process
        while True:
            answers.send(answer, None)  # no limit: the two threads share one socket, and a limit is the socket's
            answer = _answer(calls.get(), stop)


def _listen(requests: Channel, calls: queue.Queue[EngineCall], stop: threading.Event) -> None:
    try:
        while True:
            message = requests.receive(None)
            if isinstance(message, EngineCall):
                calls.put(message)
            elif isinstance(message, Stop):
                stop.set()
    finally:
        # The result has no reader any more, and no manifest lists a half-written file. An orderly exit would wait for
        # the main thread, which may be an hour into a merge.
        signal.raise_signal(signal.SIGKILL)


def _answer(call: EngineCall, stop: threading.Event) -> Message:
    try:
        return Done(perform(call.function, call.payload, stop))
    except WorkFailed as failure:
        text = shorten(str(failure.__cause__))
        return Failed(failure.kind, text, shorten(failure.trace), failure.permanent, False)
    except WorkCancelled as failure:
        return Failed("WorkCancelled", shorten(str(failure)), "", False, True)
