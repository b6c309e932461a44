"""Functions that the tests of the engines call by name, here or in another process."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import sys
import threading
from typing import Any

from penstock.errors import CorruptionError
from penstock.scheduler.task import StopSignal
from penstock.scheduler.work import Plain, WorkCancelled

NOT_A_FUNCTION = 7


def echo(arguments: dict[str, Any], stop: StopSignal) -> Plain:
    return arguments


def process_id(arguments: dict[str, Any], stop: StopSignal) -> Plain:
    return os.getpid()


def count_lines(arguments: dict[str, Any], stop: StopSignal) -> Plain:
    """A file name in, a file name out."""
    with open(arguments["source"]) as source, open(arguments["target"], "w") as target:
        target.write(str(len(source.readlines())))
    return {"file": arguments["target"]}


def noisy(arguments: dict[str, Any], stop: StopSignal) -> Plain:
    """Writes where a careless protocol would talk."""
    print("x" * 100_000, flush=True)
    os.write(1, b"y" * 100_000)
    return "quiet"


def fail(arguments: dict[str, Any], stop: StopSignal) -> Plain:
    raise OSError(arguments.get("text", "no luck"))


def fill_the_disk(arguments: dict[str, Any], stop: StopSignal) -> Plain:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def corrupt(arguments: dict[str, Any], stop: StopSignal) -> Plain:
    raise CorruptionError("a.sst", 7, "bad page")


def unplain(arguments: dict[str, Any], stop: StopSignal) -> Plain:
    return object()  # type: ignore[return-value]


def large(arguments: dict[str, Any], stop: StopSignal) -> Plain:
    return bytes(arguments["size"])


def leave(arguments: dict[str, Any], stop: StopSignal) -> Plain:
    sys.exit(3)


def vanish(arguments: dict[str, Any], stop: StopSignal) -> Plain:
    os._exit(3)


def crash(arguments: dict[str, Any], stop: StopSignal) -> Plain:
    return ctypes.string_at(0)


def die_soon(arguments: dict[str, Any], stop: StopSignal) -> Plain:
    """Is killed after so many seconds, whatever it does by then."""
    timer = threading.Timer(arguments["seconds"], lambda: os.kill(os.getpid(), signal.SIGKILL))
    timer.start()
    return arguments


def hang(arguments: dict[str, Any], stop: StopSignal) -> Plain:
    """Says that it runs (by a file with its process id) and then hears nothing."""
    _announce(arguments["began"])
    while True:
        stop.__class__().wait(1_000)


def obey(arguments: dict[str, Any], stop: StopSignal) -> Plain:
    """Says that it runs and waits for its signal."""
    _announce(arguments["began"])
    if stop.wait(arguments.get("seconds", 1_000)):
        _announce(arguments["began"] + ".heard")
        raise WorkCancelled("heard it")
    return "done"


def _announce(path: str) -> None:
    with open(path + ".new", "w") as file:
        file.write(str(os.getpid()))
    os.rename(path + ".new", path)
