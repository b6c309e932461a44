"""Files between members: a connection of its own, so that a snapshot never delays a heartbeat.

It begins as every connection between members does, at the same address, with the same certificates; its `Greeting` says
that it is for files. The loop checks it and hands the socket to a thread (`serve_files`). One member sends requests
(`FileClient`), and the other answers them one after the other; each is a frame with a msgpack struct. Numbers and
names are checked by `FileSource`, which knows what may be read.

Thread: each connection has one on either side.
Invariants: (1) every wait has a deadline. (2) an answer is at most ANSWER_BYTES_MAX. (3) a request that fails is
answered with its reason, and the connection goes on.
"""

from __future__ import annotations

import hashlib
import logging
import socket
import ssl
import struct
from contextlib import suppress
from typing import Protocol, TypeVar

import msgspec

from penstock.errors import CorruptionError, Invalid, NotFound, PenstockError, WaitExpired
from penstock.host.files import File
from penstock.replica.identity import certified_members
from penstock.replica.state import LogBase

logger = logging.getLogger(__name__)

T = TypeVar("T")
PURPOSE = "files"
PIECE_BYTES = 1 << 20
ANSWER_BYTES_MAX = 64 << 20  # the list of a large store's files
REQUEST_BYTES_MAX = 1 << 16
WAIT_S = 60.0  # for the next request, and for an answer: making a snapshot takes a while
CONNECT_S = 5.0
_LENGTH = struct.Struct(">I")


class Greeting(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The first frame of every connection between members: which cluster, who, and what for."""

    cluster: bytes
    member: str
    purpose: str = ""


class _FileMessage(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    pass


class BeginSnapshot(_FileMessage, frozen=True):
    """Make a snapshot of the store, and keep it as long as this connection asks for its files."""


class ReadPiece(_FileMessage, frozen=True):
    """Return bytes of a file, by its path in the store."""

    path: str
    offset: int
    size: int


class HashPrefix(_FileMessage, frozen=True):
    """Return the SHA-256 of a file's first bytes, for a member that has them already."""

    path: str
    size: int


class ShippedFile(msgspec.Struct, frozen=True, array_like=True):
    """A file of a snapshot."""

    path: str
    size: int


class SnapshotListing(_FileMessage, frozen=True):
    """A snapshot: its files, and where its journal begins and ends."""

    identity: bytes  # what the files carry
    base: LogBase  # the entry before the first in its journal
    end: LogBase  # the last one
    files: tuple[ShippedFile, ...]


class FileBytes(_FileMessage, frozen=True):
    """Bytes of a file."""

    data: bytes


class PrefixHash(_FileMessage, frozen=True):
    """A SHA-256."""

    digest: bytes


class RefusedRead(_FileMessage, frozen=True):
    """Why a request was not answered."""

    reason: str
    is_missing: bool  # the file is not there, and will not be


FileRequest = BeginSnapshot | ReadPiece | HashPrefix
FileAnswer = SnapshotListing | FileBytes | PrefixHash | RefusedRead

_encode = msgspec.msgpack.Encoder().encode
_greetings = msgspec.msgpack.Decoder(Greeting)
_requests = msgspec.msgpack.Decoder(FileRequest)
_answers = msgspec.msgpack.Decoder(FileAnswer)


def pack_greeting(greeting: Greeting) -> bytes:
    """Encode a greeting."""
    return _encode(greeting)


def unpack_greeting(frame: bytes) -> Greeting:
    """Decode a greeting; `Invalid` if it does not decode."""
    try:
        return _greetings.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise Invalid("its greeting does not decode") from None


class FileSource(Protocol):
    """The files that a member reads for another one, for as long as that is connected."""

    def begin_snapshot(self) -> SnapshotListing: ...

    def open(self, path: str) -> File:
        """Open a file for reading; `NotFound` if it is not there, `Invalid` if it must not be read."""

    def close(self) -> None: ...


class FrameSocket:
    """Frames over a blocking TLS socket."""

    def __init__(self, sock: ssl.SSLSocket, buffer: bytes = b"") -> None:
        self._socket, self._buffer = sock, bytearray(buffer)
        sock.settimeout(WAIT_S)

    def send(self, data: bytes) -> None:
        self._socket.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self, bytes_max: int) -> bytes:
        (size,) = _LENGTH.unpack(self._take(_LENGTH.size))
        if size > bytes_max:
            raise Invalid(f"it sent a frame of {size} bytes: at most {bytes_max} are allowed")
        return self._take(size)

    def _take(self, size: int) -> bytes:
        while len(self._buffer) < size:
            data = self._socket.recv(1 << 18)
            if not data:
                raise ConnectionResetError("it closed the connection")
            self._buffer += data
        taken = bytes(self._buffer[:size])
        del self._buffer[:size]
        return taken

    def close(self) -> None:
        with suppress(OSError):
            self._socket.close()


# -- the side that serves files


def serve_files(frames: FrameSocket, source: FileSource) -> None:
    """Answer requests until the connection ends."""
    try:
        while True:
            request = _requests.decode(frames.receive(REQUEST_BYTES_MAX))
            frames.send(_encode(_answer(source, request)))
    except (OSError, Invalid, msgspec.MsgspecError, UnicodeDecodeError) as error:
        logger.debug("a connection for files ends: %s", error)
    finally:
        frames.close()
        source.close()


def _answer(source: FileSource, request: FileRequest) -> FileAnswer:
    try:
        if isinstance(request, BeginSnapshot):
            return source.begin_snapshot()
        file = source.open(request.path)
        try:
            if isinstance(request, HashPrefix):
                return PrefixHash(hash_prefix(file, request.size))
            if not (request.offset >= 0 and 0 < request.size <= PIECE_BYTES):
                raise Invalid(f"at most {PIECE_BYTES} bytes are read at once")
            return FileBytes(file.pread(request.size, request.offset))
        finally:
            file.close()
    except (PenstockError, OSError) as error:
        return RefusedRead(str(error)[:1_000], isinstance(error, NotFound | FileNotFoundError))


def hash_prefix(file: File, size: int) -> bytes:
    """Return the SHA-256 of the first bytes of a file."""
    digest, at = hashlib.sha256(), 0
    while at < size:
        data = file.pread(min(PIECE_BYTES, size - at), at)
        if not data:
            raise Invalid(f"{file.path} has {at} bytes, not {size}")
        digest.update(data)
        at += len(data)
    return digest.digest()


# -- the side that requests files


class FileClient:
    """A connection for files to another member."""

    def __init__(
        self, member: str, peer: str, address: tuple[str, int], *, cluster: bytes, context: ssl.SSLContext
    ) -> None:
        """Connect as `member` to `peer`; `Invalid` if another one answers."""
        plain = socket.create_connection(address, CONNECT_S)
        try:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            tls = context.wrap_socket(plain)
        except BaseException:
            plain.close()
            raise
        self._frames = FrameSocket(tls)
        try:
            self._frames.send(pack_greeting(Greeting(cluster, member, PURPOSE)))
            greeting = unpack_greeting(self._frames.receive(REQUEST_BYTES_MAX))
            names = certified_members(tls.getpeercert() or {})
            if greeting.member != peer or peer not in names or greeting.cluster != cluster:
                raise Invalid(f"{peer} was called, and {greeting.member!r} answered, certified as {names}")
        except BaseException:
            self.close()
            raise

    def snapshot(self) -> SnapshotListing:
        """Let the peer make a snapshot; it lasts as long as this connection is used."""
        return self._ask(BeginSnapshot(), SnapshotListing)

    def read(self, path: str, offset: int, size: int) -> bytes:
        """Return up to `size` bytes of a file, at least one; `CorruptionError` if it ends before."""
        data = self.read_some(path, offset, min(size, PIECE_BYTES))
        if not data or len(data) > size:
            raise CorruptionError(path, offset, "another member's file ends here, and more was expected")
        return data

    def read_some(self, path: str, offset: int, size: int) -> bytes:
        """Return up to `size` bytes of a file; none at its end."""
        return self._ask(ReadPiece(path, offset, size), FileBytes).data

    def hash_prefix(self, path: str, size: int) -> bytes:
        """Return the SHA-256 of the first bytes of a file."""
        return self._ask(HashPrefix(path, size), PrefixHash).digest

    def _ask(self, request: FileRequest, kind: type[T]) -> T:
        self._frames.send(_encode(request))
        try:
            answer = _answers.decode(self._frames.receive(ANSWER_BYTES_MAX))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise Invalid(f"a member's answer does not decode ({error})") from None
        if isinstance(answer, RefusedRead):
            raise NotFound(answer.reason) if answer.is_missing else WaitExpired(answer.reason)
        if not isinstance(answer, kind):
            raise Invalid(f"a member answered with {type(answer).__name__}, not {kind.__name__}")
        return answer

    def close(self) -> None:
        self._frames.close()
