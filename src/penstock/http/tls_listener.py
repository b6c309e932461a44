"""Accepts connections over TLS: a bounded number of handshakes at a time, each for a few seconds.

asyncio's own server bounds a handshake by time only, and reports it only once it is done. So a client that opens
connections and sends nothing would hold a descriptor and some 100 KB of memory for each. Here one handshake too many
ends the oldest one of the address that has the most: a stranger locks out nobody else.

Thread: that of the event loop.
Invariant: at most HANDSHAKES_MAX connections whose handshake is not done have a descriptor each.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress

from penstock.server.callers import Caller, Callers

HANDSHAKES_MAX = 64
HANDSHAKE_S = 5.0
BACKLOG = 128
NO_DESCRIPTORS_S = 1.0  # before the next attempt


class TlsListener:
    """A listening socket whose connections begin with TLS; what uvicorn needs of an `asyncio.Server`."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        listener: socket.socket,
        protocol: Callable[[], asyncio.Protocol],
        tls: ssl.SSLContext,
    ) -> None:
        self._loop, self._listener, self._protocol, self._tls = loop, listener, protocol, tls
        self.strangers = Callers(strangers_max=HANDSHAKES_MAX)
        self._tasks: dict[Caller, asyncio.Task[None]] = {}
        self._closed = False
        self.sockets = (listener,)
        listener.setblocking(False)
        listener.listen(BACKLOG)
        loop.add_reader(listener, self._accept)

    def close(self) -> None:
        """Accept no more connections, and end those that are in their handshake."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._listener)
            for task in list(self._tasks.values()):
                task.cancel()

    async def wait_closed(self) -> None:
        """Wait until the handshakes have ended."""
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _accept(self) -> None:
        """Accept one connection; one that has to make room for it is ended before the next."""
        try:
            connection, address = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError:  # out of descriptors: an immediate retry would only burn CPU
            self._loop.remove_reader(self._listener)
            self._loop.call_later(NO_DESCRIPTORS_S, self._accept_again)
            return
        connection.setblocking(False)
        caller = Caller(address[0], lambda oldest: self._tasks[oldest].cancel())
        task = self._tasks[caller] = self._loop.create_task(self._begin(connection, caller))
        task.add_done_callback(lambda _: self._ended(connection, caller))
        self.strangers.enter(caller)

    def _accept_again(self) -> None:
        if not self._closed:
            self._loop.add_reader(self._listener, self._accept)

    async def _begin(self, connection: socket.socket, caller: Caller) -> None:
        caller.begun = True
        with suppress(OSError, EOFError):  # a peer that is gone, too slow or does not speak TLS
            await self._loop.connect_accepted_socket(
                self._protocol, connection, ssl=self._tls, ssl_handshake_timeout=HANDSHAKE_S
            )
            caller.is_client = True

    def _ended(self, connection: socket.socket, caller: Caller) -> None:
        del self._tasks[caller]
        self.strangers.leave(caller)
        if not caller.begun:
            connection.close()  # otherwise asyncio does
        elif not caller.is_client:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # asyncio notices the end of a handshake by this
