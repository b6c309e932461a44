"""Functions that can run in another process: called by name, with plain values as arguments and result.

A function is named `package.module:function` and imported where it runs, so that no code is sent; values are sent as
MessagePack, so that bytes from another process are never more than data. Large data is passed by file name.

Thread: any. Every engine calls `perform` in the end, in whichever thread or process.
"""

from __future__ import annotations

import importlib
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from penstock.errors import DiskFull, FixTheCall, Invalid, PenstockError, Restore, RetryLater
from penstock.host.file_errors import ran_out_of_space
from penstock.scheduler.task import StopSignal

Plain: TypeAlias = "bool | int | float | str | bytes | Sequence[Plain] | Mapping[str, Plain] | None"
"""Values that can be sent: integers have at most 64 bits; sequences arrive as lists and mappings as dicts."""

WorkFunction: TypeAlias = Callable[[dict[str, Any], StopSignal], Plain]
"""Takes its arguments and a signal; when that is set, long work should raise `WorkCancelled`."""

PAYLOAD_BYTES_MAX = 64 << 20

_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)
_decoder = msgspec.msgpack.Decoder()


class WorkFailed(PenstockError):
    """The function raised; it may have left partial results behind."""

    def __init__(self, kind: str, message: str, trace: str, *, permanent: bool) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind  # the name of the error's class
        self.message = message
        self.trace = trace
        self.permanent = permanent  # the same call would fail again: see `errors`

    def typed(self) -> PenstockError:
        """Return the error that the caller should see: a full disk is `DiskFull`, wherever the function ran."""
        return DiskFull(self.message) if self.kind == DiskFull.__name__ else self


class WorkerLost(RetryLater):
    """The process that ran the function ended before the function did."""


class WorkCancelled(RetryLater):
    """The call was cancelled and ended without a result."""


def check_name(function: str) -> None:
    """Raise `Invalid` unless `function` has the form of a function's name."""
    if not _NAME.fullmatch(function):
        raise Invalid(f"work is named {function!r}: give package.module:function")


def pack(value: Plain) -> bytes:
    """Encode plain values."""
    try:
        payload = msgspec.msgpack.encode(value)
    except (TypeError, OverflowError, ValueError, RecursionError) as error:
        raise Invalid(f"work takes and returns plain values only ({error}): pass large data by file name") from error
    if len(payload) > PAYLOAD_BYTES_MAX:
        raise Invalid(f"{len(payload)} bytes of arguments or result (limit {PAYLOAD_BYTES_MAX}): pass a file name")
    return payload


def unpack(payload: bytes) -> Plain:
    """Decode the bytes that `pack` returned."""
    value: Plain = _decoder.decode(payload)
    return value


def perform(function: str, payload: bytes, stop: StopSignal) -> bytes:
    """Run a function and return its packed result; what it raises becomes `WorkFailed` or `WorkCancelled`."""
    try:
        arguments = unpack(payload)
        assert isinstance(arguments, dict)
        return pack(_resolve(function)(arguments, stop))
    except WorkCancelled:
        raise
    except BaseException as error:
        failure = error
        if isinstance(error, OSError) and ran_out_of_space(error):
            failure = DiskFull(f"{error.filename or 'the disk of the store'} has no room: free some space, then retry")
            failure.__cause__ = error
        permanent = isinstance(failure, FixTheCall | Restore)
        kind = type(failure).__name__
        raise WorkFailed(kind, str(failure), traceback.format_exc(), permanent=permanent) from failure


def _resolve(function: str) -> WorkFunction:
    check_name(function)
    module_name, _, attribute = function.partition(":")
    try:
        attribute_value = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise Invalid(f"work {function} cannot be imported here ({error}): check the name and sys.path") from error
    if not callable(attribute_value):
        raise Invalid(f"work {function} is not a function")
    work: WorkFunction = attribute_value
    return work
