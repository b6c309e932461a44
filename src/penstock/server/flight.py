"""The gateway behind Arrow Flight, on one address.

Only two methods are served: an action answers a message, a get returns a page of a scan. Clients never send Arrow.
Every other method is refused before a byte of it is read, so that an idle stream holds no thread.

Thread: gRPC's, one for each running request.
Invariant: a client sees the class and message of Penstock's errors; of any other error it sees an id, and the log has
the rest.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pyarrow as pa
from pyarrow import flight

from penstock.errors import PenstockError
from penstock.host.randomness import Random
from penstock.protocol import wire
from penstock.server.gateway import Gateway
from penstock.server.rights import LOCAL, Rights
from penstock.server.work import OwnerLeaving

logger = logging.getLogger(__name__)

_METHODS = (flight.FlightMethod.DO_ACTION, flight.FlightMethod.DO_GET)
_AUTHORIZATION = "authorization"


@lru_cache(1_024)
def local_rights(process: str) -> Rights:
    """Return the rights of a local client; a process that changes its name only leaves its own budget."""
    return replace(LOCAL, process=process[:64])


class _Authorized(flight.ServerMiddleware):  # type: ignore[misc]
    def __init__(self, rights: Rights, headers: dict[str, list[Any]]) -> None:
        self.rights = rights
        self.linearizable = headers.get(wire.READS_HEADER, [""])[0] == wire.LINEARIZABLE


class _Authorization(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    """Checks the method and token of every call before its body is read."""

    def __init__(self, rights_of: Callable[[str], Rights | None] | None) -> None:
        self._rights_of = rights_of

    def start_call(self, info: Any, headers: dict[str, list[Any]]) -> _Authorized:
        if info.method not in _METHODS:
            raise flight.FlightUnauthorizedError("this method is not served")
        if self._rights_of is None:
            return _Authorized(local_rights(str(headers.get(wire.PROCESS_HEADER, [""])[0])), headers)
        header = str(headers.get("authorization", [""])[0])
        rights = self._rights_of(header.removeprefix("Bearer ")) if header.startswith("Bearer ") else None
        if rights is None:
            raise flight.FlightUnauthenticatedError("a bearer token that the owner knows is needed")
        return _Authorized(rights, headers)


class FlightGateway(flight.FlightServerBase):  # type: ignore[misc]
    """Serves a gateway on one address."""

    def __init__(
        self,
        gateway: Gateway,
        location: str,
        *,
        random: Random,
        rights_of: Callable[[str], Rights | None] | None = None,
    ) -> None:
        super().__init__(location, middleware={_AUTHORIZATION: _Authorization(rights_of)})
        self._gateway = gateway
        self._random = random

    def do_action(self, context: Any, action: Any) -> Iterator[Any]:
        authorized = context.get_middleware(_AUTHORIZATION)
        rights = authorized.rights
        try:
            if action.type != wire.PROTOCOL:
                raise PenstockError(
                    f"the owner speaks protocol {wire.PROTOCOL}, not {action.type[:20]!r}: use one Penstock"
                )
            return map(flight.Result, self._answering(action, authorized))
        except BaseException as error:
            raise self._sent(error, rights) from None

    def _answering(self, action: Any, authorized: _Authorized) -> Iterator[bytes]:
        return self._gateway.answering(
            action.body.to_pybytes(), authorized.rights, linearizable=authorized.linearizable
        )

    def do_get(self, context: Any, ticket: Any) -> Any:
        authorized = context.get_middleware(_AUTHORIZATION)
        rights = authorized.rights
        try:
            schema, batches = self._gateway.page(ticket.ticket, rights, linearizable=authorized.linearizable)
        except BaseException as error:
            raise self._sent(error, rights) from None
        return flight.GeneratorStream(schema, self._batches(batches, rights))

    def _batches(self, batches: Iterator[tuple[Any, bytes]], rights: Rights) -> Iterator[tuple[Any, bytes]]:
        try:
            yield from batches
        except GeneratorExit:
            raise
        except BaseException as error:
            raise self._sent(error, rights) from None
        finally:
            pa.default_memory_pool().release_unused()  # Arrow keeps unused memory per thread

    def _sent(self, error: BaseException, rights: Rights) -> flight.FlightError:
        """Return the Flight error to send for an error."""
        if isinstance(error, OwnerLeaving):
            fault = wire.ErrorMessage(wire.LEAVING if error.untouched else wire.ENDING, str(error))
            return flight.FlightUnavailableError(fault.message, wire.encode_fault(fault))
        if isinstance(error, PenstockError):
            fault = self._gateway.fault(error, rights)
        else:
            name = self._random.randbytes(6).hex()
            logger.error("error %s while answering a client", name, exc_info=error)
            fault = wire.ErrorMessage("PenstockError", f"the owner failed to answer: its log has error {name}")
        return flight.FlightServerError(fault.message, wire.encode_fault(fault))
