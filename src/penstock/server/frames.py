"""Inspects the HTTP/2 frames of one connection, and refuses what gRPC would accept without a limit.

Thread: the guard's.
Invariants: (1) a message that is too long or compressed is refused at its first bytes. (2) a connection on which the
owner has not answered a request yet is a stranger: an answer needs a token, and a refusal carries no data.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from penstock.protocol.wire import MESSAGE_BYTES_MAX
from penstock.server.callers import Caller, Callers, RefusedError

STREAMS_MAX = 128  # of a client, at once
STRANGER_STREAMS_MAX = 16  # at once
STRANGER_STREAMS_TOTAL_MAX = 64
STREAM_S_MAX = 180.0  # longer than any call of a client
PROGRESS_S_MAX = 30.0  # between two parts of a request
IDLE_S_MAX = 600.0  # of a client without a request
HEADERS_BYTES_MAX = 32 << 10  # of one request
CONTROL_BYTES_MAX = 32 << 10  # of a frame that is not data
RESETS_MAX = 1_024  # requests that a client cancels between two calls of `check_times`
MESSAGE_ROOM = 1 << 16  # for the framing of a message

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RESET, _CONTINUATION = 0x0, 0x1, 0x3, 0x9
_END_STREAM, _PADDED = 0x1, 0x8
_FRAME_BYTES = 9
_MESSAGE = struct.Struct(">BI")  # of gRPC: compressed, length


class Frames:
    """Parses the frames of one direction from a stream of bytes."""

    def __init__(
        self, begin: Callable[[int, int, int, int], None], data: Callable[[int, memoryview], None] | None
    ) -> None:
        self._begin = begin  # kind, flags, stream, length
        self._data = data  # of a stream
        self._head = bytearray()
        self._rest = 0  # bytes of this frame to come
        self._padding = 0
        self._reads_padding = False
        self._stream = 0
        self._is_data = False

    def feed(self, chunk: memoryview) -> None:
        """Parse more bytes."""
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
        self._begin(kind, flags, self._stream, self._rest)

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
    """A running request."""

    def __init__(self, now_s: float) -> None:
        self.since_s = now_s
        self.heard_s = now_s  # when its last bytes came
        self.head = bytearray()  # of the next message
        self.rest = 0  # bytes of this message to come
        self.bytes = 0  # received so far
        self.declared = 0  # bytes of all its messages
        self.header_bytes = 0
        self.whole = False  # the client has sent the whole request


class Inspector:
    """Enforces the limits on one connection."""

    def __init__(self, caller: Caller, callers: Callers, clock: Callable[[], float]) -> None:
        self._caller = caller
        self._callers = callers
        self._clock = clock
        self._streams: dict[int, _Stream] = {}
        self._last_stream = 0
        self._opened = 0
        self._resets = 0  # since the last `check_times`
        self._preface = bytearray()
        caller.idle_since_s = clock()
        self._from_client = Frames(self._client_frame, self._client_data)
        self._from_server = Frames(self._server_frame, None)

    def from_client(self, chunk: bytes) -> None:
        """Check bytes from the client; `RefusedError` if they break a limit."""
        view = memoryview(chunk)
        if len(self._preface) < len(PREFACE):
            take = view[: len(PREFACE) - len(self._preface)]
            self._preface += take
            view = view[len(take) :]
            if not PREFACE.startswith(self._preface):
                raise RefusedError("this is not HTTP/2")
        self._from_client.feed(view)

    def from_server(self, chunk: bytes) -> None:
        """Check bytes from the owner: the first answer makes a stranger a client."""
        self._from_server.feed(memoryview(chunk))

    # -- from the client

    def _client_frame(self, kind: int, flags: int, number: int, length: int) -> None:
        if kind != _DATA and length > CONTROL_BYTES_MAX:
            raise RefusedError(f"a frame of kind {kind} with {length} bytes")
        if kind == _HEADERS and number > self._last_stream:
            self._begin_stream(number)
        stream = self._streams.get(number)
        if kind in (_HEADERS, _CONTINUATION) and stream is not None:
            stream.header_bytes += length
            if stream.header_bytes > HEADERS_BYTES_MAX:
                raise RefusedError("too many headers")
        if kind in (_HEADERS, _DATA) and flags & _END_STREAM and stream is not None:
            stream.whole = True
        if kind == _RESET:
            self._resets += 1
            if self._resets > RESETS_MAX:
                raise RefusedError("too many requests are cancelled")
            self._end(number)

    def _begin_stream(self, number: int) -> None:
        self._last_stream = number
        self._opened += 1
        is_client = self._caller.is_client
        if len(self._streams) >= (STREAMS_MAX if is_client else STRANGER_STREAMS_MAX):
            raise RefusedError("too many requests at once")
        if not is_client and self._opened > STRANGER_STREAMS_TOTAL_MAX:
            raise RefusedError("too many requests without a token")
        self._streams[number] = _Stream(self._clock())
        self._caller.requests = len(self._streams)

    def _client_data(self, number: int, data: memoryview) -> None:
        stream = self._streams.get(number)
        if stream is None:
            return
        stream.heard_s = self._clock()
        stream.bytes += len(data)
        self._callers.add_bytes(self._caller, len(data))
        while data:
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
        stream.declared += stream.rest
        if stream.declared > MESSAGE_BYTES_MAX + MESSAGE_ROOM:
            raise RefusedError(f"a message of {stream.rest} bytes")

    # -- from the owner

    def _server_frame(self, kind: int, flags: int, number: int, length: int) -> None:
        if kind == _DATA and length:
            self._callers.recognise(self._caller)
        if kind == _RESET or (kind in (_DATA, _HEADERS) and flags & _END_STREAM):
            self._end(number)

    def _end(self, number: int) -> None:
        stream = self._streams.pop(number, None)
        if stream is not None:
            self._callers.release_bytes(self._caller, stream.bytes)
            self._caller.requests = len(self._streams)
            self._caller.idle_since_s = self._clock()

    # -- time

    def check_times(self) -> None:
        """Raise `RefusedError` if something takes too long. Called periodically."""
        now_s, self._resets = self._clock(), 0
        for stream in self._streams.values():
            if now_s - stream.since_s > STREAM_S_MAX:
                raise RefusedError("a request takes too long")
            if not stream.whole and now_s - stream.heard_s > PROGRESS_S_MAX:
                raise RefusedError("the rest of a request did not arrive")
        if not self._streams and now_s - self._caller.idle_since_s > IDLE_S_MAX:
            raise RefusedError("the connection is idle")
