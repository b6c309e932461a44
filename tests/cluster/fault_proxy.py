"""A TCP proxy between two members: it delays what they say, or holds it back in one direction or both.

Bytes are never changed or dropped in the middle of a connection, because TLS would notice: what was held back is gone
with its connection, which `heal` closes.

Thread: two for each connection, and one that accepts.
"""

from __future__ import annotations

import random
import socket
import threading
import time
from contextlib import suppress

DELAY_S = 0.15


class FaultProxy:
    """Connects callers of its own port with a member."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = ("127.0.0.1", int(self._server.getsockname()[1]))
        self.holds = {"to": False, "from": False}  # the callee hears nothing; the caller hears nothing
        self.delay = False
        self._sockets: list[socket.socket] = []
        self._closed = False
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while not self._closed:
            try:
                caller, _ = self._server.accept()
            except OSError:
                return
            try:
                callee = socket.create_connection(self._target, 5)
            except OSError:
                caller.close()
                continue
            self._sockets = [each for each in self._sockets if each.fileno() >= 0] + [caller, callee]
            callee.settimeout(None)
            for source, target, direction in ((caller, callee, "to"), (callee, caller, "from")):
                threading.Thread(target=self._pump, args=(source, target, direction), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, direction: str) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if self.delay:
                    time.sleep(random.random() * DELAY_S)
                while self.holds[direction] and source.fileno() >= 0:
                    time.sleep(0.02)
                target.sendall(data)
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def heal(self) -> None:
        """End what was wrong; connections from that time are closed."""
        was_holding, self.holds, self.delay = any(self.holds.values()), {"to": False, "from": False}, False
        if was_holding:
            for each in self._sockets:
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._closed = True
        self._server.close()
        self.holds = {"to": True, "from": True}
        self.heal()
