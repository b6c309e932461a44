"""Runs the HTTP application: a socket, a thread with an event loop, and an end.

Thread: `serve_http` starts one, and ends it with its block.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from penstock.errors import Invalid, WaitExpired
from penstock.host import threads
from penstock.host.clock import SystemClock
from penstock.host.waiting import pause
from penstock.http.application import HttpSettings, http_application
from penstock.http.tls_listener import TlsListener

log = logging.getLogger(__name__)
START_S = 10.0
END_S = 10.0
CONNECTIONS_MAX = 256  # one more ends the one that has waited longest for a request
IDLE_S = 30  # between requests, for the headers of one, and until something of an answer is read
LOOPBACK_ADDRESSES = ("127.0.0.1", "::1", "localhost")


@contextmanager
def serve_http(
    store: Any,
    settings: HttpSettings,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    certificate: str | Path | None = None,
    key: str | Path | None = None,
) -> Iterator[int]:
    """Serve a store over HTTP while the block runs; yield the port. Beyond loopback, tokens and TLS are needed."""
    if host not in LOOPBACK_ADDRESSES and (settings.rights_of is None or certificate is None):
        raise Invalid(f"to listen on {host}, which others can reach, give tokens, certificate and key")
    if (certificate is None) != (key is None):
        raise Invalid("certificate and key go together: give both, or none")
    application = http_application(store, settings)
    config = uvicorn.Config(
        application,
        http=_PromptProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=IDLE_S,
        timeout_graceful_shutdown=int(END_S),
        ssl_certfile=None if certificate is None else str(certificate),
        ssl_keyfile=None if key is None else str(key),
    )
    try:
        config.load()
    except (OSError, ssl.SSLError) as error:
        raise Invalid(f"certificate and key are not a pair of PEM files: {error}") from None
    server = uvicorn.Server(config)
    listener = _listen(host, port)
    thread = threads.spawn(lambda: _run(server, listener), name="penstock-http")
    try:
        clock = SystemClock()
        until_s = clock.monotonic_s() + START_S
        while not server.started:
            if clock.monotonic_s() > until_s or not thread.is_alive():
                raise WaitExpired(f"the HTTP server did not start within {START_S:g} s: retry later")
            pause(0.01)
        yield listener.getsockname()[1]
    finally:
        application.state.stop()
        server.should_exit = True
        thread.join(2 * END_S)
        listener.close()


def find_tables(store: Any, table: str | None, logs: str | None, *, create: bool) -> str | None:
    """Return the default table: the one that is named, or the only series table; `create` makes what is absent."""
    kinds = {info.name: info.kind for info in store.port.tables()}
    series = [name for name, kind in kinds.items() if kind == "series"]
    if table is None and len(series) == 1:
        table = series[0]
    elif table is None and create:
        raise Invalid("--create needs --table: name the series table of /api/v1")
    if create:
        store.series(table)
        if logs is not None:
            store.queue(logs)
    elif table in kinds and table not in series:
        log.warning(
            "table %s is of the kind %s: requests are answered 404; give --table a series table", table, kinds[table]
        )
    elif table is not None and table not in series:
        log.warning("there is no series table %s yet: requests are answered 404 until there is; see --create", table)
    return table


def _run(server: uvicorn.Server, listener: socket.socket) -> None:
    with asyncio.Runner(loop_factory=_PromptLoop) as runner:
        runner.run(server.serve(sockets=[listener]))


class _PromptLoop(asyncio.SelectorEventLoop):
    """Bounds TLS handshakes by time and by number."""

    async def create_server(self, protocol_factory: Any, *args: Any, **options: Any) -> Any:
        if options.get("ssl") is not None:
            return TlsListener(self, options["sock"], protocol_factory, options["ssl"])
        return await super().create_server(protocol_factory, *args, **options)


class _PromptProtocol(H11Protocol):
    """Ends a connection on which nothing goes on for IDLE_S seconds.

    The next request has to begin, with all of its headers, and something of an answer has to be read, which is held in
    memory until then. What arrives of a body after its answer, as from a client without a token, does not count.
    Beyond CONNECTIONS_MAX, the connection that has waited longest for its next request ends: a client that opens many
    and sends nothing does not keep others out.
    """

    _reading: asyncio.TimerHandle | None = None  # of a client that does not read as fast as it is answered

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._end_at(self.loop.time() + self.timeout_keep_alive)
        if len(self.connections) > CONNECTIONS_MAX:
            waiting = (
                connection
                for connection in self.connections
                if isinstance(connection, _PromptProtocol) and connection.waits_until
            )
            min(waiting, key=lambda connection: connection.waits_until).end()

    @property
    def waits_until(self) -> float:
        """When a connection that waits for a request is ended; 0 while a request is at work."""
        return 0.0 if self.timeout_keep_alive_task is None else self.timeout_keep_alive_task.when()

    def end(self) -> None:
        """End the connection, which waits for a request."""
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
            self.timeout_keep_alive_task = None
        self.connections.discard(self)
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        waiting = self.timeout_keep_alive_task
        super().data_received(data)  # which stops the wait, even for a part of the headers
        if waiting is not None and self.timeout_keep_alive_task is None and self._is_idle:
            self._end_at(waiting.when())

    @property
    def _is_idle(self) -> bool:
        """Whether no request is at work: none has begun, or what still comes is the body of one that was answered."""
        return self.conn.their_state is h11.IDLE or self.conn.our_state is h11.DONE

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_awaiting()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_awaiting()
        super().connection_lost(exc)

    def _await_reading(self, unread: int | None = None) -> None:
        left = self.transport.get_write_buffer_size()
        if unread is not None and left >= unread:
            self.transport.abort()
        else:
            self._reading = self.loop.call_later(self.timeout_keep_alive, self._await_reading, left)

    def _stop_awaiting(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _end_at(self, time_s: float) -> None:
        self.timeout_keep_alive_task = self.loop.call_at(time_s, self.timeout_keep_alive_handler)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named: without it asyncio leaves Nagle's algorithm on, and an answer waits 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(128)
    except (OSError, OverflowError) as error:
        listener.close()
        raise Invalid(f"cannot listen on {host}:{port}: {error}") from None
    return listener
