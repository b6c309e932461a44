"""Messages between an engine and its worker process.

A message is its length (u32, little-endian) and a MessagePack array that opens with its kind. Both ends run the same
code on the same machine.

Thread: one sends and one receives, not necessarily the same.
"""

from __future__ import annotations

import socket
import struct
from typing import TypeAlias

import msgspec

from penstock.scheduler.work import PAYLOAD_BYTES_MAX

LENGTH = struct.Struct("<I")
assert LENGTH.size == 4

_FRAME_BYTES_MAX = PAYLOAD_BYTES_MAX + (1 << 20)  # room for the rest of the message
_TEXT_CHARACTERS_MAX = 100_000


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """From a worker that has started."""


class EngineCall(msgspec.Struct, frozen=True, array_like=True, tag="call"):
    """To a worker: run a function. It gets one call at a time."""

    function: str
    payload: bytes


class Stop(msgspec.Struct, frozen=True, array_like=True, tag="stop"):
    """To a worker: give the running function its stop signal. No call follows."""


class Done(msgspec.Struct, frozen=True, array_like=True, tag="done"):
    """From a worker: the function's packed result."""

    payload: bytes


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """From a worker: the function raised."""

    kind: str
    message: str
    trace: str
    permanent: bool
    cancelled: bool


Message: TypeAlias = Ready | EngineCall | Stop | Done | Failed

_decoder = msgspec.msgpack.Decoder(Message)


def shorten(text: str) -> str:
    """Cut an error text to what a message may carry."""
    return text if len(text) <= _TEXT_CHARACTERS_MAX else text[:_TEXT_CHARACTERS_MAX] + " ... (cut)"


class Channel:
    """One end of the connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = bytearray()

    def send(self, message: Message, timeout_s: float | None) -> None:
        """Send a message; `OSError` if the other end is gone or does not read in time."""
        frame = msgspec.msgpack.encode(message)
        self._connection.settimeout(timeout_s)
        # Without SIGPIPE, which ends programs that do not ignore it.
        self._connection.sendall(LENGTH.pack(len(frame)) + frame, getattr(socket, "MSG_NOSIGNAL", 0))

    def receive(self, timeout_s: float | None) -> Message | None:
        """Return the next message; None after `timeout_s` seconds; `OSError` if the other end is gone."""
        while (message := self._next()) is None:
            self._connection.settimeout(timeout_s)
            try:
                part = self._connection.recv(1 << 16)
            except TimeoutError:
                return None
            if not part:
                raise ConnectionResetError("the other end closed the connection")
            self._buffer += part
        return message

    def close(self) -> None:
        self._connection.close()

    def _next(self) -> Message | None:
        if len(self._buffer) < LENGTH.size:
            return None
        (length,) = LENGTH.unpack_from(self._buffer)
        if length > _FRAME_BYTES_MAX:
            raise ConnectionError(f"a message of {length} bytes: the other end is not a worker")
        end = LENGTH.size + length
        if len(self._buffer) < end:
            return None
        frame = bytes(self._buffer[LENGTH.size : end])
        del self._buffer[:end]
        try:
            message: Message = _decoder.decode(frame)
            return message
        except (msgspec.DecodeError, ValueError, RecursionError) as error:  # ValueError: text that is not UTF-8
            raise ConnectionError(f"this is not a worker's message: {error}") from error
