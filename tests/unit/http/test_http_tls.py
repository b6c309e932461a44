"""The HTTP door over TLS, with tokens: handshakes are bounded, and strangers learn and hold nothing."""

from __future__ import annotations

import hashlib
import json
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.cli.certificates import make_certificates
from penstock.http import tls_listener
from penstock.http.application import HttpSettings
from penstock.http.serving import serve_http
from penstock.server.rights import Tokens

HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"  # the first bytes of a client that says no more


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    make_certificates(str(folder), ["localhost", "127.0.0.1"], 10)
    return folder


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with penstock.open(tmp_path_factory.mktemp("tls") / "store") as owner:
        owner.series("metrics").write("up", 1.0, time=1_000_000, durable=True)
        yield owner


@contextmanager
def served(store: Any, folder: Path) -> Iterator[int]:
    digest = hashlib.sha256(b"secret").hexdigest()
    tokens = Tokens.parse(f'[tokens.reader]\nsha256 = "{digest}"\nrights = {{ metrics = "read" }}')
    settings = HttpSettings(table="metrics", rights_of=tokens.rights_of)
    with serve_http(store, settings, certificate=folder / "server.pem", key=folder / "server.key") as port:
        yield port


def ask(folder: Path, port: int, token: str = "secret") -> Any:
    context = ssl.create_default_context(cafile=str(folder / "authority.pem"))
    url = f"https://localhost:{port}/api/v1/labels"
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=20, context=context) as answer:
        return json.load(answer)["data"]


def ended(wire: socket.socket) -> bool:
    """Whether the server ends a connection, within the time limit of the socket."""
    try:
        while wire.recv(4_096):  # an alert of TLS may come first
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


@pytest.mark.parametrize(
    "sent", [b"", HELLO, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", b"\x16\x03\x01\xff\xff" * 90]
)
def test_a_handshake_has_a_deadline(store: Any, folder: Path, sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls_listener, "HANDSHAKE_S", 0.3)
    with served(store, folder) as port, socket.create_connection(("127.0.0.1", port), timeout=20) as wire:
        wire.sendall(sent)
        assert ended(wire)
        assert ask(folder, port) == ["__name__"]


@pytest.mark.parametrize("sent", [b"", HELLO])
def test_half_open_handshakes_are_bounded_and_keep_nobody_out(
    store: Any, folder: Path, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls_listener, "HANDSHAKE_S", 600.0)
    monkeypatch.setattr(tls_listener, "HANDSHAKES_MAX", 4)
    listeners: list[Any] = []
    right = tls_listener.TlsListener.__init__

    def noticed(self: Any, *arguments: Any) -> None:
        listeners.append(self)
        right(self, *arguments)

    monkeypatch.setattr(tls_listener.TlsListener, "__init__", noticed)
    with served(store, folder) as port, ExitStack() as opened:

        def connect(source: str) -> socket.socket:
            return opened.enter_context(
                socket.create_connection(("127.0.0.1", port), timeout=20, source_address=(source, 0))
            )

        slow = connect("127.0.0.2")  # of another address, and older than all others
        flood: list[socket.socket] = []
        for _ in range(24):
            flood.append(connect("127.0.0.1"))
            with suppress(OSError):  # it was ended already
                flood[-1].sendall(sent)
            assert len(listeners[0]._tasks) <= 4 + 2  # besides those being ended
        assert ask(folder, port) == ["__name__"]
        assert all(map(ended, flood[:20]))
        context = ssl.create_default_context(cafile=str(folder / "authority.pem"))
        with context.wrap_socket(slow, server_hostname="localhost") as wire:
            wire.sendall(b"GET /-/healthy HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            assert b" 200 OK" in wire.recv(4_096)
        for last in flood[20:]:
            last.settimeout(0.01)
        assert sum(not ended(wire) for wire in flood[20:]) == 2  # slow, these and the one that was answered
    assert listeners[0]._tasks == {}
    assert all(map(ended, flood[20:]))


def test_a_server_ends_beside_open_handshakes(store: Any, folder: Path) -> None:
    with served(store, folder) as port:
        wires = [socket.create_connection(("127.0.0.1", port), timeout=20) for _ in range(3)]
        assert ask(folder, port) == ["__name__"]
    for wire in wires:
        with wire:
            assert ended(wire)


def test_strangers_learn_nothing(store: Any, folder: Path) -> None:
    with served(store, folder) as port:
        for token in ("", "wrong", "secret " * 2_000, "sécret", "secret\x00"):
            with pytest.raises((urllib.error.HTTPError, OSError, ValueError, UnicodeError)) as refused:
                ask(folder, port, token)
            if isinstance(refused.value, urllib.error.HTTPError):
                with refused.value as answer:
                    assert answer.code in (400, 401)
                    assert b"metrics" not in answer.read()
        assert ask(folder, port) == ["__name__"]
