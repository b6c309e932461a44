"""What every request goes through: how it is refused, and how its body is read.

Thread: the event loop; `refusal_of` any.
"""

from __future__ import annotations

import logging

from anyio import fail_after
from starlette.requests import Request

from penstock.errors import (
    Backpressure,
    FixTheCall,
    Invalid,
    KeyMissing,
    NotFound,
    PenstockError,
    WaitExpired,
    WrongKey,
)
from penstock.http.prometheus_api import ExecutionRefused

log = logging.getLogger(__name__)
BODY_S = 30.0  # for all of a body to arrive


class Refused(Exception):
    """A request that ends here, with a status and Prometheus' kind of error."""

    def __init__(self, status: int, kind: str, message: str, retry_s: int = 0) -> None:
        super().__init__(message)
        self.status, self.kind, self.retry_s = status, kind, retry_s


def without_port(host: str) -> str:
    """Return the name in a `Host` header, in lower case."""
    name, colon, port = host.rpartition(":")
    return name.lower() if colon and port.isdecimal() else host.lower()


async def read_body(request: Request, bytes_max: int) -> bytes:
    """Read a body, at most `bytes_max` of it, within BODY_S seconds."""
    parts: list[bytes] = []
    size = 0
    try:
        with fail_after(BODY_S):
            async for part in request.stream():
                size += len(part)
                if size > bytes_max:
                    raise Refused(413, "bad_data", f"the body has more than {bytes_max} bytes: send less at once")
                parts.append(part)
    except TimeoutError:
        raise Refused(408, "timeout", f"the body did not arrive within {BODY_S:g} s: send it again") from None
    return b"".join(parts)


def refusal_of(error: Exception) -> Refused:
    """Return the answer to an error; a fault of our own is logged, and not described to the client."""
    match error:
        case ExecutionRefused():
            return Refused(422, "execution", str(error))
        case NotFound():
            return Refused(404, "not_found", str(error))
        case Invalid() | UnicodeError():
            return Refused(400, "bad_data", str(error))
        case WaitExpired():
            return Refused(503, "timeout", str(error), 1)
        case Backpressure():
            return Refused(429, "unavailable", str(error), 1)
        case KeyMissing() | WrongKey():  # of the owner's settings, not of the request
            return Refused(503, "unavailable", str(error), 5)
        case FixTheCall():
            return Refused(422, "execution", str(error))
        case PenstockError():  # a sender must not drop these data: the store takes them once it is repaired
            return Refused(503, "unavailable", str(error), 5)
        case _:
            log.error("a request failed", exc_info=error)
            return Refused(500, "internal", "the request failed: see the log of the server")
