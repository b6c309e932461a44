"""The owner's endpoint for Prometheus: what it answers, and what clients cannot do to it."""

from __future__ import annotations

import os
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock
from penstock.errors import Invalid
from penstock.server import metrics_endpoint
from penstock.store.settings import StoreSettings
from penstock.store.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with penstock.open(tmp_path / "store", settings=StoreSettings(metrics_port=0)) as opened:
        opened.kv("t").put(b"k", b"v", durable=True)
        yield opened


def port_of(store: Store) -> int:
    return int(store.metrics_url.removesuffix("/metrics").rpartition(":")[2])


def ask(store: Store, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port_of(store)), timeout=20) as line:
        line.sendall(request)
        answer = b""
        while data := line.recv(65_536):
            answer += data
    return answer


def test_prometheus_reads_the_metrics(store: Store) -> None:
    with urllib.request.urlopen(store.metrics_url, timeout=20) as answer:
        text = answer.read().decode()
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert 'penstock_partition_applied_index{table="t",shard="0"}' in text


@pytest.mark.parametrize(
    ("request_line", "host", "status"),
    [
        ("GET /metrics HTTP/1.1", "localhost:1", 200),
        ("GET /metrics?x=y HTTP/1.0", "127.0.0.1", 200),
        ("HEAD /metrics HTTP/1.1", "[::1]:9464", 200),
        ("GET / HTTP/1.1", "localhost", 404),
        ("POST /metrics HTTP/1.1", "localhost", 405),
        ("GET /metrics HTTP/1.1", "evil.example", 403),
        ("GET /metrics HTTP/1.1", "127.evil.example:80", 403),
        ("nonsense", "localhost", 400),
        ("GET /metrics SPDY/3", "localhost", 400),
    ],
)
def test_answers(store: Store, request_line: str, host: str, status: int) -> None:
    answer = ask(store, f"{request_line}\r\nHost: {host}\r\n\r\n".encode())
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())
    head, _, body = answer.partition(b"\r\n\r\n")
    assert (b"penstock_" in body) == (status == 200 and not request_line.startswith("HEAD"))
    assert b"Content-Length: " in head


def test_clients_that_hang_or_flood_do_not_stop_it(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_endpoint, "CONNECTION_S", 0.2)
    silent = [socket.create_connection(("127.0.0.1", port_of(store))) for _ in range(8)]
    assert ask(store, b"x" * (metrics_endpoint.REQUEST_BYTES_MAX + 1)).startswith(b"HTTP/1.1 431 ")
    assert b"penstock_" in ask(store, b"GET /metrics HTTP/1.1\r\n\r\n")
    for line in silent:
        line.settimeout(20)
        assert line.recv(1) == b"", "the endpoint ends a connection that says nothing"
        line.close()
    reads: list[int] = []
    read = store.metrics.exposition
    monkeypatch.setattr(metrics_endpoint, "FRESH_S", 1e9)

    def counted() -> str:
        reads.append(1)
        return read()

    monkeypatch.setattr(store.metrics, "exposition", counted)
    for _ in range(20):
        assert b" 200 OK" in ask(store, b"GET /metrics HTTP/1.1\r\n\r\n")
    assert len(reads) <= 1, "clients that ask often share what was read"


def test_what_it_cannot_read_is_logged_and_the_next_client_is_served(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing() -> str:
        raise RuntimeError("a bug")

    with monkeypatch.context() as broken:
        broken.setattr(store.metrics, "exposition", failing)
        for _ in range(2 * metrics_endpoint.WORKERS):
            assert ask(store, b"GET /metrics HTTP/1.1\r\n\r\n") == b""
    assert b" 200 OK" in ask(store, b"GET /metrics HTTP/1.1\r\n\r\n")
    assert "report this as a bug" in caplog.text


def test_a_client_that_sends_a_little_now_and_then_ends_in_time(store: Store) -> None:
    endpoint = metrics_endpoint.MetricsEndpoint(store, "127.0.0.1", 0)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        endpoint._serve(theirs, store.clock.monotonic_s() - 1.0)
        theirs.setblocking(False)
        assert theirs.recv(3) == b"GET", "it went on after its deadline"


def test_it_ends_with_the_store(store: Store) -> None:
    port = port_of(store)
    store.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)


def test_a_port_that_is_taken_is_told_and_leaves_nothing_open(store: Store, tmp_path: Path) -> None:
    settings = StoreSettings(metrics_port=port_of(store))
    for chosen in (settings, StoreSettings(metrics_port=port_of(store), serve=False)):
        with pytest.raises(Invalid, match="give another metrics_port"):
            penstock.open(tmp_path / "other", settings=chosen)
    with pytest.raises(Invalid, match="give another metrics_port"):
        penstock.open(tmp_path / "other", settings=StoreSettings(metrics_port=0, metrics_host="192.0.2.1"))
    with pytest.raises(Invalid, match="another metrics_host"):
        penstock.open(tmp_path / "other", settings=StoreSettings(metrics_port=0, metrics_host="x" * 64 + ".example"))
    penstock.open(tmp_path / "other").close()  # not locked


def test_a_forked_child_does_not_keep_it(store: Store) -> None:
    port, (reading, writing), (ready, begun) = port_of(store), os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.write(begun, b"x")
        os.read(reading, 1)  # lives until the parent has looked
        os._exit(0)
    os.close(reading)
    try:
        assert os.read(ready, 1) == b"x"  # what a fork does in the child is done
        store.close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=5)
    finally:
        for pipe in (writing, ready, begun):
            os.close(pipe)
        os.waitpid(child, 0)
