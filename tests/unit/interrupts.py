"""Raises an interrupt at any chosen point of the project's code: Ctrl-C, at its worst, and again and again.

CPython 3.11 looks for signals when a function begins, after a call of what is written in C, and at a jump backwards,
and nowhere else. So these are the points at which a handler can raise, and all of them are tried: `sys.settrace` is
told before every instruction and knows the one before it. Left out is what no signal can bring: an interrupt behind a
call that is the last instruction of a `try` or `with`, where the next instruction is not; and one behind a function
written in Python that was called by its name, because its return is no more than a change of frames. The standard
library's `contextlib` and `threading` count as the project's code: a `with` statement runs through them.

Thread: the one that traces; other threads are not interrupted, as they are not by signals.
"""

from __future__ import annotations

import contextlib
import dis
import opcode
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import penstock

_CODE = (str(Path(penstock.__file__).parent), contextlib.__file__, threading.__file__)
_FINALIZER_DEPTH = 5  # calls below a `__del__`
_LOOKS_FOR_SIGNALS = {
    number
    for name, number in opcode.opmap.items()
    if name in ("RESUME", "CALL", "CALL_FUNCTION_EX") or "BACKWARD" in name
}


class Interrupt(BaseException):
    """What a handler raises: no `Exception`, so that nothing takes it for a failure."""


class Alarm(TimeoutError):
    """What the handler of an alarm often raises: by its class it could be a failure of the disk."""


def _raise_alarm(number: int, frame: FrameType | None) -> None:
    raise Alarm("an alarm" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}")


@cache
def _handlers(code: CodeType) -> list[int]:
    """For each instruction of a function where an exception raised by it goes; 0: out of the function."""
    handlers = [0] * (len(code.co_code) + 2)
    for entry in dis._parse_exception_table(code):  # type: ignore[attr-defined]
        for offset in range(entry.start, entry.end, 2):
            handlers[offset] = entry.target
    return handlers


def _is_finalizer(frame: FrameType | None) -> bool:
    """Whether an exception raised there goes nowhere: the interpreter reports what `__del__` raises, and goes on."""
    for _ in range(_FINALIZER_DEPTH):
        if frame is None or frame.f_code.co_name == "__del__":
            return frame is not None
        frame = frame.f_back
    return False


where: list[str] = []  # every interrupt so far, for a test that fails


def interrupted_at(point: int, act: Callable[[], Any], *, alarm: bool = False) -> int:
    """Call `act` and interrupt it at a point, counted from 1 as they come; how many came until its end.

    `alarm`: by a signal whose handler raises `Alarm`.
    """
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        if event == "call":
            caller = frame.f_back
            if caller is not None and frame.f_code.co_name in caller.f_code.co_names:
                previous[id(caller)] = -1
            if not frame.f_code.co_filename.startswith(_CODE) or _is_finalizer(frame):
                return None
            frame.f_trace_opcodes = True
            frame.f_trace_lines = False
            previous[id(frame)] = -1
            return trace
        if event == "return":
            previous.pop(id(frame), None)
        elif event == "opcode":
            code, at = frame.f_code, frame.f_lasti
            before, previous[id(frame)] = previous.get(id(frame), -1), at
            handlers = _handlers(code)
            if before >= 0 and code.co_code[before] in _LOOKS_FOR_SIGNALS and handlers[before] == handlers[at]:
                count += 1
                if count == point:
                    sys.settrace(None)
                    if alarm:
                        signal.raise_signal(signal.SIGUSR2)
                    raise Interrupt(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        return trace

    previous: dict[int, int] = {}
    outer, handler = sys.gettrace(), signal.signal(signal.SIGUSR2, _raise_alarm)
    sys.settrace(trace)
    try:
        act()
    except (Interrupt, Alarm) as interrupt:
        where.append(str(interrupt))
    finally:
        sys.settrace(outer)
        signal.signal(signal.SIGUSR2, handler)
    return count


def every_point(act: Callable[[], Any], *, first: int = 1, step: int = 1, alarm: bool = False) -> Iterator[int]:
    """Interrupt `act` at one point after the other, until it runs to its end; yields after each interrupt."""
    point = first
    while interrupted_at(point, act, alarm=alarm) >= point:
        yield point
        point += step
