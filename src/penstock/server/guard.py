"""A proxy between the network and gRPC, which accepts any number of connections and messages of any length.

It terminates TLS, inspects the HTTP/2 frames, and closes connections that break a limit. The rest is relayed to Arrow
Flight on a local socket, which asks for the token. Connections without a token are few and live for seconds, and a new
one replaces the oldest: see `callers`.

    accept -> stranger: TLS, then HTTP/2, then a request -> the owner answers it -> client

Thread: one of its own, with an event loop; `close` from any other.
Invariants: (1) a stranger has at most STRANGER_S_MAX seconds. (2) only a peer that speaks HTTP/2 over TLS reaches gRPC.
(3) of all connections together, gRPC holds at most the bytes that `callers` allows.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress

from penstock.errors import Invalid
from penstock.host import threads
from penstock.server.callers import Caller, Callers, RefusedError, budgets
from penstock.server.frames import PREFACE, Inspector

STRANGER_S_MAX = 10.0  # from the first packet to the first answer
CHECK_S = 2.0
BACKLOG = 128
NO_DESCRIPTORS_S = 1.0  # before the next attempt
CHUNK_BYTES = 1 << 16

_Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Guard:
    """Listens on the network and relays to a local socket."""

    def __init__(self, backend: str, host: str, port: int, tls: ssl.SSLContext) -> None:
        self._backend = backend
        self._tls = tls
        self.callers = Callers(*budgets())
        try:
            self._listeners = _listen(host, port)
        except OSError as error:
            raise Invalid(f"{host}:{port} cannot be listened on ({error}): give another host or port") from error
        self.port: int = self._listeners[0].getsockname()[1]
        self._tasks: dict[Caller, asyncio.Task[None]] = {}
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        work = self._run()
        self._thread = threads.spawn(lambda: self._loop.run_until_complete(work), name="penstock-guard")

    async def _run(self) -> None:
        for listener in self._listeners:
            self._loop.add_reader(listener, self._accept, listener)
        await self._stop.wait()
        for listener in self._listeners:
            self._loop.remove_reader(listener)
            listener.close()
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def close(self) -> None:
        """Close every connection."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10.0)
        if not self._thread.is_alive():
            self._loop.close()

    # -- strangers

    def _accept(self, listener: socket.socket) -> None:
        """Accept one connection; one that must make room for it is closed before the next accept."""
        try:
            connection, address = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError:  # out of descriptors: an immediate retry would only burn CPU
            self._loop.remove_reader(listener)
            self._loop.call_later(NO_DESCRIPTORS_S, self._accept_again, listener)
            return
        connection.setblocking(False)
        with suppress(OSError):  # it is closed already
            # asyncio does this for its own listeners only. Without it small answers wait 40 ms for the client's
            # acknowledgement of the one before.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        caller = Caller(address[0], self._disconnect)
        task = self._tasks[caller] = self._loop.create_task(self._serve(connection, caller))
        self.callers.enter(caller)
        late = self._loop.call_later(STRANGER_S_MAX, self.callers.expire, caller)

        def ended(_: object) -> None:
            late.cancel()
            del self._tasks[caller]
            self.callers.leave(caller)
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # during the TLS handshake asyncio would not notice the end
            if not caller.begun:
                connection.close()  # otherwise asyncio closes it

        task.add_done_callback(ended)

    def _disconnect(self, caller: Caller) -> None:
        self._tasks[caller].cancel()

    def _accept_again(self, listener: socket.socket) -> None:
        if not self._stop.is_set():
            self._loop.add_reader(listener, self._accept, listener)

    async def _serve(self, connection: socket.socket, caller: Caller) -> None:
        caller.begun = True
        writers: list[asyncio.StreamWriter] = []
        try:
            front = await self._begin_tls(connection)
            writers.append(front[1])
            preface = await front[0].readexactly(len(PREFACE))
            inspector = Inspector(caller, self.callers, self._loop.time)
            inspector.from_client(preface)
            back = await asyncio.open_unix_connection(self._backend, limit=CHUNK_BYTES)
            writers.append(back[1])
            back[1].write(preface)
            await self._relay(front, back, inspector)
        except (OSError, EOFError, RefusedError, asyncio.CancelledError):
            return  # a peer closed or broke a limit, or the guard closes
        finally:
            for each in writers:
                each.transport.abort()

    async def _begin_tls(self, connection: socket.socket) -> _Streams:
        reader = asyncio.StreamReader(limit=CHUNK_BYTES, loop=self._loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=self._loop)
        transport, _ = await self._loop.connect_accepted_socket(
            lambda: protocol, connection, ssl=self._tls, ssl_handshake_timeout=STRANGER_S_MAX
        )
        return reader, asyncio.StreamWriter(transport, protocol, reader, self._loop)

    # -- relaying

    async def _relay(self, front: _Streams, back: _Streams, inspector: Inspector) -> None:
        ways = {
            asyncio.ensure_future(_pass_on(front[0], back[1], inspector.from_client)),
            asyncio.ensure_future(_pass_on(back[0], front[1], inspector.from_server)),
        }
        try:
            ended: set[asyncio.Future[None]] = set()
            while not ended:
                ended, _ = await asyncio.wait(ways, timeout=CHECK_S, return_when=asyncio.FIRST_COMPLETED)
                inspector.check_times()
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)


async def _pass_on(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, inspect: Callable[[bytes], None]
) -> None:
    while chunk := await reader.read(CHUNK_BYTES):
        inspect(chunk)
        writer.write(chunk)
        await writer.drain()


def _listen(host: str, port: int) -> list[socket.socket]:
    """Return a listening socket for each address of a host, all on one port."""
    listeners: list[socket.socket] = []
    try:
        infos = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, address in dict.fromkeys((each[0], each[4][0]) for each in infos):
            listener = socket.create_server((str(address), port), family=family, backlog=BACKLOG)
            listeners.append(listener)
            listener.setblocking(False)
            port = listener.getsockname()[1]
    except BaseException:
        for listener in listeners:
            listener.close()
        raise
    return listeners
