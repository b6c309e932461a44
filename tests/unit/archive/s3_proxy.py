"""An S3 endpoint over HTTP on loopback (moto), behind a proxy that fails as networks and servers do."""

from __future__ import annotations

import http.client
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SLOW_S = 1.5  # longer than the time-out of the tests' requests

# 500, 503: the request does not reach S3. lost: it does, and its answer is a 500. cut: no answer. half: half of one.
FAULTS = ("500", "503", "lost", "cut", "half", "slow")


class FaultyProxy(ThreadingHTTPServer):
    """Forwards requests to `target`, except those that `fault` names a failure for."""

    daemon_threads = True

    def __init__(self, target: tuple[str, int]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target = target
        self.fault: Callable[[str, str], str | None] = lambda method, path: None
        self.requests: Counter[str] = Counter()  # by method
        self.failed: Counter[str] = Counter()  # by fault
        self.lock = threading.Lock()

    def handle_error(self, *_: Any) -> None:
        """A cut connection is what the test wants."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FaultyProxy

    def _forward(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with self.server.lock:
            self.server.requests[self.command] += 1
            fault = self.server.fault(self.command, self.path)
            self.server.failed[fault or "none"] += 1
        if fault in ("500", "503"):
            self._answer(int(fault), [], b"")
            return
        if fault == "cut":
            self.close_connection = True
            return
        if fault == "slow":
            threading.Event().wait(SLOW_S)
            self.close_connection = True
            return
        status, headers, answer = self._ask(body)
        if fault == "lost":
            status, headers, answer = 500, [], b""
        self._answer(status, headers, answer, half=fault == "half")

    def _ask(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        there = http.client.HTTPConnection(*self.server.target, timeout=30)
        headers = dict(self.headers.items())
        there.request(self.command, self.path, body, headers)
        answer = there.getresponse()
        content = answer.read()
        there.close()
        return answer.status, answer.getheaders(), content

    def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes, *, half: bool = False) -> None:
        self.send_response_only(status)
        lengths = [value for name, value in headers if name.lower() == "content-length"]
        for name, value in headers:
            if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                self.send_header(name, value)
        length = lengths[0] if self.command == "HEAD" and lengths else str(len(body))
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(body[: len(body) // 2] if half else body)
        if half:
            self.close_connection = True

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = _forward

    def log_message(self, *_: Any) -> None:
        """Nothing to standard error."""


@contextmanager
def s3_behind_proxy() -> Iterator[tuple[FaultyProxy, dict[str, str]]]:
    """Yield the proxy of an S3 endpoint with a bucket `bucket`, and the environment that leads there."""
    import logging

    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    proxy = FaultyProxy((host, int(port)))
    thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        connection = http.client.HTTPConnection(host, int(port), timeout=30)
        connection.request("PUT", "/bucket")
        connection.getresponse().read()
        connection.close()
        yield (
            proxy,
            {
                "AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.server_address[1]}",
                "AWS_ACCESS_KEY_ID": "key",
                "AWS_SECRET_ACCESS_KEY": "secret",
                "AWS_REGION": "us-east-1",
            },
        )
    finally:
        proxy.shutdown()
        proxy.server_close()
        server.stop()
