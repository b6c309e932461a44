"""An HTTP endpoint of the owner that answers `GET /metrics` for Prometheus, and nothing else.

It needs no library, so that an owner that is scraped is as small as one that is not.

Thread: a few of its own, each of which serves one connection at a time; `close` from any other.
Invariants: (1) a connection ends within CONNECTION_S, whatever its client does. (2) metrics are read at most once every
FRESH_S, however many clients ask. (3) on a loopback address, a page in a browser cannot read them: the host of a
request has to be a loopback name.
"""

from __future__ import annotations

import logging
import re
import selectors
import socket
import threading
from ipaddress import ip_address

from penstock.errors import Invalid, PenstockError
from penstock.host import threads
from penstock.host.metrics import CONTENT_TYPE
from penstock.host.waiting import pause
from penstock.store.store import Store

logger = logging.getLogger(__name__)

WORKERS = 3
CONNECTION_S = 5.0
REQUEST_BYTES_MAX = 16 << 10
FRESH_S = 0.1
_REASONS = {200: "OK", 400: "Bad Request", 403: "Forbidden", 404: "Not Found", 405: "Method Not Allowed"}
_REASONS |= {431: "Request Header Fields Too Large", 503: "Service Unavailable"}


class MetricsEndpoint:
    """Serves the metrics of a store over HTTP until the store is closed."""

    def __init__(self, store: Store, host: str, port: int) -> None:
        self._store = store
        self._clock = store.clock
        self._loopback = _is_loopback(host)
        self._lock = threads.lock("server.metrics_endpoint")
        self._text, self._read_s = b"", -FRESH_S  # guarded by _lock
        with threads.without_forks():
            self._listener = _listen(host, port)
            self._ended, self._end = socket.socketpair()
            threads.after_fork(self, MetricsEndpoint._close_sockets)
        self.port: int = self._listener.getsockname()[1]
        self._threads: list[threading.Thread] = []
        try:
            for number in range(1, WORKERS + 1):
                self._threads.append(threads.spawn(self._run, name=f"penstock-metrics-{number}"))
        except BaseException:
            self.close()
            raise
        url_host = f"[{host}]" if ":" in host else host
        store.metrics_url = f"http://{url_host}:{self.port}/metrics"
        store.at_close(self.close)
        logger.info("metrics are at %s", store.metrics_url)

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for each in (self._listener, self._ended):
                selector.register(each, selectors.EVENT_READ)
            while self._ended not in [key.fileobj for key, _ in selector.select()]:
                self._serve_one()

    def _serve_one(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return  # another thread has it
        except OSError as error:  # out of descriptors, or the client is gone
            logger.warning("a client could not be accepted at the metrics endpoint: %s", error)
            pause(0.1)
            return
        with connection:
            try:
                self._serve(connection, self._clock.monotonic_s() + CONNECTION_S)
            except OSError as error:
                logger.debug("a client of the metrics endpoint did not wait for its answer: %s", error)
            except Exception:  # this thread has to serve the next client
                logger.exception("the metrics endpoint met an unexpected error, and goes on: report this as a bug")

    def _serve(self, connection: socket.socket, deadline_s: float) -> None:
        request = b""
        while b"\r\n\r\n" not in request and len(request) <= REQUEST_BYTES_MAX:
            left_s = deadline_s - self._clock.monotonic_s()
            if left_s <= 0:  # it sends a little now and then
                return
            connection.settimeout(left_s)
            data = connection.recv(4096)
            if not data:
                return
            request += data
        status, body = self._answer(request)
        headers = (
            f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: {CONTENT_TYPE}\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        connection.settimeout(max(0.001, deadline_s - self._clock.monotonic_s()))
        connection.sendall(
            headers.encode() + (b"" if request.startswith(b"HEAD ") else body), getattr(socket, "MSG_NOSIGNAL", 0)
        )
        connection.shutdown(socket.SHUT_WR)

    def _answer(self, request: bytes) -> tuple[int, bytes]:
        head, separator, _ = request.partition(b"\r\n\r\n")
        if not separator:
            return 431, b"the request is too long\n"
        first, *lines = head.decode("latin-1").split("\r\n")
        method, _, rest = first.partition(" ")
        target, _, version = rest.partition(" ")
        if not version.startswith("HTTP/1."):
            return 400, b"this is not a request of HTTP/1\n"
        if self._loopback and not self._is_local(lines):
            return 403, b"the host of the request is not a loopback name: use localhost\n"
        if target.partition("?")[0] != "/metrics":
            return 404, b"there is only /metrics here\n"
        if method not in ("GET", "HEAD"):
            return 405, b"metrics are read by GET\n"
        try:
            return 200, self._exposition()
        except PenstockError as error:
            return 503, f"{error}\n".encode()

    def _is_local(self, lines: list[str]) -> bool:
        hosts = [line.partition(":")[2].strip() for line in lines if line.lower().startswith("host:")]
        return all(_is_loopback(re.sub(r":\d+$", "", host).strip("[]")) for host in hosts)

    def _exposition(self) -> bytes:
        with self._lock:
            now_s = self._clock.monotonic_s()
            if now_s - self._read_s >= FRESH_S:
                self._text, self._read_s = self._store.metrics.exposition().encode(), now_s
            return self._text

    def _close_sockets(self) -> None:
        """Close the sockets; also in a forked child, so that no client waits for it after the owner ended."""
        self._listener.close()
        self._ended.close()
        self._end.close()

    def close(self) -> None:
        """Stop serving."""
        self._end.send(b"x")
        for thread in self._threads:
            thread.join(CONNECTION_S + 1.0)
        with threads.without_forks():
            self._close_sockets()


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=16)
    except (OSError, UnicodeError, TypeError) as error:  # the latter two: no name of a host
        reason = getattr(error, "strerror", None) or error
        raise Invalid(
            f"metrics cannot be served at {host}, port {port} ({reason}): give another metrics_port, or 0 for any free "
            "one, or another metrics_host"
        ) from error
    listener.setblocking(False)
    return listener
