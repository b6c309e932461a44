"""The way to the other members: one TCP connection with mutual TLS for each pair, in the loop's thread.

Of two members, the one whose name sorts later connects. The certificate of a peer must be signed by the cluster's
authority and name the member that it says it is (`penstock-member:NAME`, a URI among its alternative names). A frame is
its length (u32, big-endian) and a message; the first frame is a `Greeting`, and an empty one shows that the peer is
alive. A connection whose greeting says that it is for files is handed to a thread: see `file_channel`.

Thread: the loop's; every socket is non-blocking.
Invariants: (1) a message is taken from a peer only after its certificate was checked against its name. (2) the bytes
that wait to be sent are bounded: a peer that reads too slowly is disconnected and starts again where it is. (3) a
connection that has not greeted after GREETING_S, or is one of too many, is closed; so is one that is silent for
SILENT_S. (4) the loop never waits for a name server.
"""

from __future__ import annotations

import errno
import logging
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress

from pysyncobj.poller import POLL_EVENT_TYPE

from penstock.errors import Invalid, ProcessLimit
from penstock.host import threads
from penstock.host.clock import Clock
from penstock.replica.file_channel import PURPOSE, FileSource, FrameSocket, Greeting, pack_greeting, serve_files
from penstock.replica.file_channel import unpack_greeting as _unpack_greeting
from penstock.replica.identity import certified_members
from penstock.replica.messages import MESSAGE_BYTES_MAX, Message, pack, unpack
from penstock.replica.raft import Raft
from penstock.replica.resolving import Resolver

logger = logging.getLogger(__name__)

GREETING_S = 5.0
RETRY_S = 0.2
PING_S = 1.0  # an empty frame is sent after this time without one
SILENT_S = 5.0  # a peer that has sent nothing for this time is called again
FILE_CONNECTIONS_MAX = 4  # of all members together
STRANGERS_MAX = 16  # accepted connections that have not greeted yet
ROOM_BYTES = 4 << 20  # entries are sent while less than this waits
WAITING_BYTES_MAX = MESSAGE_BYTES_MAX + ROOM_BYTES * 2
GREETING_BYTES_MAX = 4_096
JOINED_BYTES = 16 << 10  # a smaller frame is sent by one call, and is one record of TLS
_SHORTAGE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_LENGTH = struct.Struct(">I")
_READ, _WRITE, _ERROR = POLL_EVENT_TYPE.READ, POLL_EVENT_TYPE.WRITE, POLL_EVENT_TYPE.ERROR


class MemberError(Exception):
    """This member failed while it handled a message: its loop must end."""


class _Connection:
    """One connection, from the TCP handshake to its end."""

    def __init__(self, link: TcpLink, sock: socket.socket, *, to: str | None, began_s: float) -> None:
        self._link, self.to, self.began_s = link, to, began_s
        self._plain = sock
        self._tls: ssl.SSLSocket | None = None  # since TCP is connected
        self._descriptor = sock.fileno()
        self.member: str | None = None  # set by its greeting
        self._shaken = False
        self._sending: list[memoryview] = []
        self.waiting_bytes = 0
        self._buffer = bytearray()
        self._sent_s = self.heard_s = began_s
        self.send(pack_greeting(Greeting(link.cluster, link.member)))
        self._subscribe(_READ | _WRITE | _ERROR)

    def _subscribe(self, mask: int) -> None:
        self._link.poller.subscribe(self._descriptor, self._ready, mask)

    def send(self, data: bytes) -> None:
        """Queue a frame; it is sent as the peer reads."""
        head = _LENGTH.pack(len(data))
        self._sending += (
            (memoryview(head + data),) if len(data) < JOINED_BYTES else (memoryview(head), memoryview(data))
        )
        self.waiting_bytes += _LENGTH.size + len(data)
        self._sent_s = self._link.now_s()
        if self.waiting_bytes > WAITING_BYTES_MAX:
            self._link.drop(self, "it reads too slowly")
        elif self._shaken:
            self._work(self._write)

    def ping(self, now_s: float) -> None:
        """Show that this member is there, if it has sent nothing for a while."""
        if now_s - self._sent_s >= PING_S and not self._sending:
            self.send(b"")

    def _ready(self, descriptor: int, event: int) -> None:
        if self._descriptor < 0 or (not self._shaken and not self._work(self._shake)):
            return
        if self._work(self._read):
            self._work(self._write)

    def _work(self, act: Callable[[], None]) -> bool:
        """Do one step; return whether it went through. A failure ends the connection."""
        try:
            act()
        except ssl.SSLWantReadError:
            if not self._shaken:
                self._subscribe(_READ | _ERROR)
            return self._shaken
        except ssl.SSLWantWriteError:
            self._subscribe(_READ | _WRITE | _ERROR)
            return self._shaken
        except (OSError, Invalid) as error:
            self._link.drop(self, str(error))
            return False
        return True

    def _shake(self) -> None:
        if self._tls is None:
            if error := self._plain.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise OSError(error, "it cannot be reached")
            context = self._link.server_context if self.to is None else self._link.client_context
            self._tls = context.wrap_socket(self._plain, server_side=self.to is None, do_handshake_on_connect=False)
        self._tls.do_handshake()
        self._shaken = True

    def _write(self) -> None:
        assert self._tls is not None
        while self._sending and self._descriptor >= 0:
            sent = self._tls.send(self._sending[0])
            self.waiting_bytes -= sent
            rest = self._sending[0][sent:]
            if rest:
                self._sending[0] = rest
            else:
                del self._sending[0]
        if self._descriptor >= 0:
            self._subscribe(_READ | _ERROR)

    def _read(self) -> None:
        assert self._tls is not None
        while self._descriptor >= 0:
            data = self._tls.recv(1 << 18)
            if not data:
                raise OSError(errno.ECONNRESET, "it closed the connection")
            self._buffer += data
            self.heard_s = self._link.now_s()
            self._take_frames()

    def _take_frames(self) -> None:
        at, limit = 0, GREETING_BYTES_MAX if self.member is None else MESSAGE_BYTES_MAX
        while len(self._buffer) - at >= _LENGTH.size and self._descriptor >= 0:
            (size,) = _LENGTH.unpack_from(self._buffer, at)
            if size > limit:
                raise Invalid(f"it sent a frame of {size} bytes: at most {limit} are allowed")
            if len(self._buffer) - at - _LENGTH.size < size:
                break
            frame = bytes(self._buffer[at + _LENGTH.size : at + _LENGTH.size + size])
            at += _LENGTH.size + size
            if self.member is None:
                self._greet(frame, at)
                limit = MESSAGE_BYTES_MAX
            elif frame:
                self._link.receive(self.member, unpack(frame))
        del self._buffer[:at]

    def _greet(self, frame: bytes, end: int) -> None:
        greeting = _unpack_greeting(frame)
        assert self._tls is not None
        names = certified_members(self._tls.getpeercert() or {})
        if greeting.member not in names:
            raise Invalid(f"it says it is {greeting.member!r}, but its certificate names {names or 'no member'}")
        if greeting.cluster != self._link.cluster:
            raise Invalid(f"member {greeting.member} is of another cluster")
        if self.to not in (None, greeting.member):
            raise Invalid(f"{self.to} was called, and {greeting.member} answered")
        self.member = greeting.member
        if greeting.purpose == PURPOSE and self.to is None:
            rest = b"".join(self._sending), bytes(self._buffer[end:])
            self._leave()
            self._link.serve_files(self, self._tls, *rest)
        elif greeting.purpose:
            raise Invalid(f"member {greeting.member} wants {greeting.purpose!r}, which this one does not know")
        else:
            self._link.greeted(self)

    def _leave(self) -> None:
        """Leave the loop; the socket goes on."""
        self._link.poller.unsubscribe(self._descriptor)
        self._descriptor, self._sending, self.waiting_bytes = -1, [], 0

    def close(self) -> None:
        if self._descriptor >= 0:
            self._leave()
            self._buffer = bytearray()  # the poller keeps this object for a while
            with suppress(OSError):
                (self._tls or self._plain).close()


class TcpLink:
    """Connections to all other members, by name."""

    def __init__(
        self,
        member: str,
        addresses: Mapping[str, tuple[str, int]],
        *,
        cluster: bytes,
        server_context: ssl.SSLContext,
        client_context: ssl.SSLContext,
        clock: Clock,
        open_source: Callable[[], FileSource] | None = None,
    ) -> None:
        """`open_source` makes the source from which another member reads files."""
        for context in (server_context, client_context):
            if context.verify_mode != ssl.CERT_REQUIRED:
                raise Invalid("members check each other's certificates: set verify_mode to CERT_REQUIRED")
        self.member, self.cluster = member, cluster
        self.server_context, self.client_context = server_context, client_context
        self._addresses, self._clock = dict(addresses), clock
        self._raft: Raft | None = None
        self._listener: socket.socket | None = None
        self._deaf_since_s: float | None = None  # there was no descriptor for a caller
        self._connections: dict[str, _Connection] = {}  # greeted, by member
        self._others: list[_Connection] = []  # not greeted yet
        self._tried_s: dict[str, float] = {}
        self._open_source = open_source
        self._maintained_s = self._ticked_s = clock.monotonic_s()
        self._file_connections: list[threading.Thread] = []
        self._resolver = Resolver()

    def now_s(self) -> float:
        return self._clock.monotonic_s()

    # -- MemberLink

    def attach(self, raft: Raft) -> None:
        self._raft, self.poller = raft, raft.poller
        host, port = self._addresses[self.member]
        host = self._resolver.find(host, wait=True) or host
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, port), family=family, backlog=32)
        except OSError as error:
            raise Invalid(f"member {self.member} cannot listen at {host}:{port} ({error}): see its address") from None
        self._listener.setblocking(False)
        self._listen()
        raft.addOnTickCallback(self._maintain)

    def _listen(self) -> None:
        assert self._listener is not None
        self._deaf_since_s = None
        self.poller.subscribe(self._listener.fileno(), self._accept, _READ | _ERROR)

    def detach(self) -> None:
        for connection in [*self._connections.values(), *self._others]:
            connection.close()
        self._connections, self._others = {}, []
        if self._listener is not None:
            self.poller.unsubscribe(self._listener.fileno())
            self._listener.close()
            self._listener = None

    def send(self, member: str, message: Message) -> None:
        connection = self._connections.get(member)
        if connection is not None:
            connection.send(pack(message))

    def has_room(self, member: str) -> bool:
        connection = self._connections.get(member)
        return connection is not None and connection.waiting_bytes < ROOM_BYTES

    # -- connections

    def _maintain(self) -> None:
        """Connect to members that are away, and close strangers that do not greet."""
        now_s = self._clock.monotonic_s()
        if self._deaf_since_s is not None and now_s - self._deaf_since_s >= RETRY_S:
            self._listen()
        for connection in list(self._others):
            if now_s - connection.began_s > GREETING_S:
                self.drop(connection, "it did not greet in time")
        for connection in list(self._connections.values()):
            if now_s - max(connection.heard_s, self._maintained_s) > SILENT_S:
                self.drop(connection, "it is silent")
            else:
                connection.ping(now_s)
        if now_s - self._ticked_s > PING_S:  # this process was stopped: what they sent meanwhile is read first
            self._maintained_s = now_s
        self._ticked_s = now_s
        calling = {connection.to for connection in self._others}
        for name, (host, port) in self._addresses.items():
            away = name < self.member and name not in self._connections and name not in calling
            if away and now_s - self._tried_s.get(name, -1e9) >= RETRY_S:
                self._tried_s[name] = now_s
                self._call(name, host, port)

    def move(self, addresses: Mapping[str, tuple[str, int]]) -> None:
        """Use other addresses of members from now on. From any thread. Names that are not members are left out."""
        self._addresses = {name: addresses.get(name, at) for name, at in self._addresses.items()}

    def address_of(self, member: str) -> tuple[str, int]:
        return self._addresses[member]

    def _call(self, name: str, host: str, port: int) -> None:
        sock: socket.socket | None = None
        address = self._resolver.find(host)
        if address is None:
            return  # it is being looked up
        host = address
        try:
            sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            code = sock.connect_ex((host, port))
            if code not in (0, errno.EINPROGRESS):
                raise OSError(code, "it cannot be reached")
            self._others.append(_Connection(self, sock, to=name, began_s=self._clock.monotonic_s()))
        except OSError as error:
            if sock is not None:
                sock.close()
            logger.debug("member %s: %s", name, error)

    def _accept(self, descriptor: int, event: int) -> None:
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            if error.errno in _SHORTAGE:  # the stranger stays, and would wake the loop again at once
                self.poller.unsubscribe(self._listener.fileno())
                self._deaf_since_s = self.now_s()
            return
        strangers = [connection for connection in self._others if connection.to is None]
        if len(strangers) >= STRANGERS_MAX:
            self.drop(strangers[0], "too many connections have not greeted")
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._others.append(_Connection(self, sock, to=None, began_s=self._clock.monotonic_s()))
        except OSError:
            sock.close()

    def greeted(self, connection: _Connection) -> None:
        assert connection.member is not None
        if connection.member not in self._addresses or connection.member == self.member:
            raise Invalid(f"{connection.member} is not a member of this cluster")
        if connection.to is None and connection.member < self.member:
            raise Invalid(f"{connection.member} waits to be called, it does not call")
        with suppress(ValueError):
            self._others.remove(connection)
        before = self._connections.get(connection.member)
        if before is not None:
            self.drop(before, "it connected again")
        self._connections[connection.member] = connection
        if self._raft is not None:
            self._raft.connect(connection.member)

    def serve_files(self, connection: _Connection, sock: ssl.SSLSocket, unsent: bytes, unread: bytes) -> None:
        """Hand a connection for files to a thread of its own."""
        with suppress(ValueError):
            self._others.remove(connection)
        self._file_connections = [thread for thread in self._file_connections if thread.is_alive()]
        is_member = connection.member in self._addresses and connection.member != self.member
        if self._open_source is None or not is_member or len(self._file_connections) >= FILE_CONNECTIONS_MAX:
            sock.close()
            return
        source, frames = self._open_source(), FrameSocket(sock, unread)

        def serve() -> None:
            with suppress(OSError):
                sock.sendall(unsent)
            serve_files(frames, source)

        try:
            self._file_connections.append(threads.spawn(serve, name="penstock-files"))
        except ProcessLimit as error:  # too many threads: the other member asks again
            frames.close()
            source.close()
            logger.warning("member %s gets no files now: %s", connection.member, error)

    def receive(self, member: str, message: Message) -> None:
        """Pass a message on. An error of this member, of its disk for example, is not one of the connection."""
        if self._raft is None:
            return
        try:
            self._raft.receive(member, message)
        except Invalid:
            raise
        except Exception as error:
            raise MemberError from error

    def drop(self, connection: _Connection, why: str) -> None:
        """Close a connection; `_maintain` connects to its member again, if that is up to this one."""
        connection.close()
        name = connection.member or connection.to
        logger.debug("the connection with %s ends: %s", name or "a stranger", why)
        with suppress(ValueError):
            self._others.remove(connection)
        if connection.member is not None and self._connections.get(connection.member) is connection:
            del self._connections[connection.member]
            if self._raft is not None:
                self._raft.disconnect(connection.member)
