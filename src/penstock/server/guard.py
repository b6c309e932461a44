"""Stands between the network and gRPC, which by itself takes messages of any length and inflates what is compressed.

It ends TLS, looks at the frames of HTTP/2 as they pass, and hangs up on who breaks a limit: a message that is too long
or compressed, too many streams, one that takes too long, too many bytes under way. What passes goes on to Arrow Flight
on a socket of this machine, which asks for the token.

Thread: one of its own, with an event loop; `close` from any other.
Invariant: of all connections together, gRPC never holds messages of more than UNDER_WAY_BYTES_MAX.
"""

from __future__ import annotations

import asyncio
import ssl
import struct
import threading
from collections.abc import Callable

from penstock.client.wire import MESSAGE_BYTES_MAX
from penstock.errors import PenstockError
from penstock.host import threads

CONNECTIONS_MAX = 256
STREAMS_MAX = 128  # of one connection
STREAM_S_MAX = 180.0  # longer than any call of a client
IDLE_S_MAX = 600.0  # of a connection without a stream
HANDSHAKE_S = 10.0
LOOK_S = 5.0
UNDER_WAY_BYTES_MAX = 512 << 20
CHUNK_BYTES = 1 << 16

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RESET = 0x0, 0x1, 0x3
_END_STREAM, _PADDED = 0x1, 0x8
_FRAME_BYTES = 9
_MESSAGE = struct.Struct(">BI")  # of gRPC: compressed, length


class RefusedError(Exception):
    """Somebody broke a limit."""


class Frames:
    """The frames of one direction, as bytes of them come."""

    def __init__(self, begin: Callable[[int, int, int], None], data: Callable[[int, memoryview], None] | None) -> None:
        self._begin = begin  # kind, flags, stream
        self._data = data  # of a stream
        self._head = bytearray()
        self._rest = 0  # bytes of this frame to come
        self._padding = 0
        self._reads_padding = False
        self._stream = 0
        self._is_data = False

    def feed(self, chunk: memoryview) -> None:
        """Look at more bytes."""
        while chunk:
            if self._rest:
                chunk = self._feed_body(chunk)
                continue
            take = chunk[: _FRAME_BYTES - len(self._head)]
            self._head += take
            chunk = chunk[len(take) :]
            if len(self._head) == _FRAME_BYTES:
                self._open()

    def _open(self) -> None:
        head, self._head = self._head, bytearray()
        self._rest = int.from_bytes(head[:3], "big")
        kind, flags, self._stream = head[3], head[4], int.from_bytes(head[5:], "big") & 0x7FFF_FFFF
        self._is_data = kind == _DATA and self._data is not None
        self._reads_padding = self._is_data and bool(flags & _PADDED)
        self._padding = 0
        self._begin(kind, flags, self._stream)

    def _feed_body(self, chunk: memoryview) -> memoryview:
        if self._reads_padding:
            self._reads_padding = False
            self._padding = chunk[0]
            self._rest -= 1
            if self._padding > self._rest:
                raise RefusedError("a frame has more padding than bytes")
            return chunk[1:]
        take = chunk[: self._rest]
        if self._is_data and self._data is not None:
            self._data(self._stream, take[: max(0, self._rest - self._padding)])
        self._rest -= len(take)
        return chunk[len(take) :]


class _Stream:
    """A request under way."""

    def __init__(self, since_s: float) -> None:
        self.since_s = since_s
        self.head = bytearray()  # of the next message
        self.rest = 0  # bytes of this message to come
        self.declared = 0  # bytes of all its messages


class Meter:
    """What all connections together have under way."""

    def __init__(self) -> None:
        self.bytes = 0
        self.connections = 0


class Inspector:
    """One connection, by its frames."""

    def __init__(self, meter: Meter, clock: Callable[[], float]) -> None:
        self._meter = meter
        self._clock = clock
        self._streams: dict[int, _Stream] = {}
        self._last_stream = 0
        self._preface = bytearray()
        self._idle_since_s = clock()
        self._from_client = Frames(self._client_frame, self._client_data)
        self._from_server = Frames(self._server_frame, None)

    def from_client(self, chunk: bytes) -> None:
        """Look at what a client sends; `RefusedError` if it must not go on."""
        view = memoryview(chunk)
        if len(self._preface) < len(PREFACE):
            take = view[: len(PREFACE) - len(self._preface)]
            self._preface += take
            view = view[len(take) :]
            if not PREFACE.startswith(self._preface):
                raise RefusedError("this is not HTTP/2")
        self._from_client.feed(view)

    def from_server(self, chunk: bytes) -> None:
        """Look at what is answered."""
        self._from_server.feed(memoryview(chunk))

    def _client_frame(self, kind: int, flags: int, stream: int) -> None:
        if kind == _HEADERS and stream > self._last_stream:
            self._last_stream = stream
            if len(self._streams) >= STREAMS_MAX:
                raise RefusedError("too many streams")
            self._streams[stream] = _Stream(self._clock())
        elif kind == _RESET:
            self._end(stream)

    def _server_frame(self, kind: int, flags: int, stream: int) -> None:
        if kind == _RESET or (kind in (_DATA, _HEADERS) and flags & _END_STREAM):
            self._end(stream)

    def _client_data(self, number: int, data: memoryview) -> None:
        stream = self._streams.get(number)
        while stream is not None and data:
            if stream.rest:
                taken = min(stream.rest, len(data))
                stream.rest -= taken
                data = data[taken:]
                continue
            take = data[: _MESSAGE.size - len(stream.head)]
            stream.head += take
            data = data[len(take) :]
            if len(stream.head) == _MESSAGE.size:
                self._begin_message(stream)

    def _begin_message(self, stream: _Stream) -> None:
        compressed, stream.rest = _MESSAGE.unpack(stream.head)
        stream.head.clear()
        if compressed:
            raise RefusedError("a compressed message")
        if stream.rest > MESSAGE_BYTES_MAX + CHUNK_BYTES:
            raise RefusedError(f"a message of {stream.rest} bytes")
        stream.declared += stream.rest
        self._meter.bytes += stream.rest
        if self._meter.bytes > UNDER_WAY_BYTES_MAX:
            raise RefusedError("too many bytes under way")

    def _end(self, number: int) -> None:
        stream = self._streams.pop(number, None)
        if stream is not None:
            self._meter.bytes -= stream.declared
            self._idle_since_s = self._clock()

    def check_times(self) -> None:
        """`RefusedError` if something takes too long."""
        now_s = self._clock()
        if any(now_s - stream.since_s > STREAM_S_MAX for stream in self._streams.values()):
            raise RefusedError("a stream takes too long")
        if not self._streams and now_s - self._idle_since_s > IDLE_S_MAX:
            raise RefusedError("nobody speaks")

    def close(self) -> None:
        """Nothing of it is under way any more."""
        for number in list(self._streams):
            self._end(number)


class Guard:
    """Listens on the network for a socket of this machine."""

    def __init__(self, backend: str, host: str, port: int, tls: ssl.SSLContext) -> None:
        self._backend = backend
        self._tls = tls
        self._meter = Meter()
        self._ready = threading.Event()
        self._failure: OSError | None = None
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self.port = port
        work = self._run(host, port)
        self._thread = threads.spawn(lambda: self._loop.run_until_complete(work), name="penstock-guard")
        self._ready.wait()
        if self._failure is not None:
            self._thread.join()
            self._loop.close()
            raise PenstockError(f"{host}:{port} cannot be listened on: {self._failure}") from self._failure

    async def _run(self, host: str, port: int) -> None:
        try:
            server = await asyncio.start_server(
                self._serve, host, port, ssl=self._tls, ssl_handshake_timeout=HANDSHAKE_S, limit=CHUNK_BYTES
            )
            self.port = server.sockets[0].getsockname()[1]
        except OSError as error:
            self._failure = error
            return
        finally:
            self._ready.set()
        await self._stop.wait()
        server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        self._meter.connections += 1
        try:
            if self._meter.connections <= CONNECTIONS_MAX:
                back_reader, back_writer = await asyncio.open_unix_connection(self._backend, limit=CHUNK_BYTES)
                writers.append(back_writer)
                await self._relay((reader, writer), (back_reader, back_writer))
        except (OSError, asyncio.CancelledError):
            return  # one of both went away, or this one closes
        finally:
            self._meter.connections -= 1
            for each in writers:
                each.transport.abort()

    async def _relay(
        self,
        front: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        back: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    ) -> None:
        inspector = Inspector(self._meter, self._loop.time)
        ways = {
            asyncio.ensure_future(_pass_on(front[0], back[1], inspector.from_client)),
            asyncio.ensure_future(_pass_on(back[0], front[1], inspector.from_server)),
        }
        try:
            ended: set[asyncio.Future[None]] = set()
            while not ended:
                ended, _ = await asyncio.wait(ways, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                inspector.check_times()
        except RefusedError:
            return
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            inspector.close()

    def close(self) -> None:
        """Hang up on everybody."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10.0)
        if not self._thread.is_alive():
            self._loop.close()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, look: Callable[[bytes], None]) -> None:
    while chunk := await reader.read(CHUNK_BYTES):
        look(chunk)
        writer.write(chunk)
        await writer.drain()
