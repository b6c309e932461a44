"""Errors as they are sent: class name, message and detail.

Thread: pure functions.
"""

from __future__ import annotations

import msgspec

from penstock import errors
from penstock.errors import PenstockError
from penstock.protocol.wire.messages import ErrorMessage

_encode = msgspec.msgpack.Encoder().encode
_faults = msgspec.msgpack.Decoder(ErrorMessage)
# Made again from their parts.
_DETAILED = (
    errors.CorruptionError,
    errors.ManifestNotFound,
    errors.ConditionFailed,
    errors.Backpressure,
    errors.PartitionPaused,
)


def fault_of(error: PenstockError, hidden: str = "") -> ErrorMessage:
    """Return an error in the form that is sent; paths inside the `hidden` folder become relative."""
    detail = list(error.__reduce__()[1]) if isinstance(error, _DETAILED) else []
    message = str(error)
    if hidden:
        message = message.replace(f"{hidden}/", "").replace(hidden, "the store")
        detail = [part.replace(f"{hidden}/", "") if isinstance(part, str) else part for part in detail]
    return ErrorMessage(type(error).__name__, message, detail)


def error_of(fault: ErrorMessage) -> PenstockError:
    """Return the error of a fault; an unknown class becomes `PenstockError`."""
    kind = getattr(errors, fault.name, PenstockError)
    if not isinstance(kind, type) or not issubclass(kind, PenstockError):
        kind = PenstockError
    try:
        return kind(*fault.detail) if fault.detail else kind(fault.message)
    except TypeError:
        return PenstockError(fault.message)


def encode_fault(fault: ErrorMessage) -> bytes:
    """Encode a fault, which is sent beside a status of the transport."""
    return _encode(fault)


def decode_fault(data: bytes) -> ErrorMessage | None:
    """Decode the fault sent beside a status; None if the transport itself failed."""
    try:
        return _faults.decode(data) if data else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
