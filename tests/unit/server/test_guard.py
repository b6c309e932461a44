"""TCP: TLS, tokens, and the guard that keeps from gRPC what it would take without a limit."""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
import random
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

import penstock
from penstock.client.connect import connect
from penstock.client.store import RemoteStore
from penstock.errors import Invalid, WaitExpired
from penstock.host.waiting import pause
from penstock.partition.ledger_records import TableInfo
from penstock.protocol import wire
from penstock.server import callers
from penstock.server.frames import PREFACE
from penstock.server.tcp import serve_tcp
from penstock.store.store import Store


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """(certificate, key) for 127.0.0.1 that signs itself, as PEM files."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "penstock test")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=7))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    certificate_path, key_path = folder / "server.pem", folder / "server.key"
    certificate_path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    key_path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return certificate_path, key_path


def write_tokens(path: Path, **rights: str) -> Path:
    lines = []
    for name, table_rights in rights.items():
        digest = hashlib.sha256(f"{name}-secret".encode()).hexdigest()
        lines.append(f'[tokens.{name}]\nsha256 = "{digest}"\nrights = {{ {table_rights} }}\n')
    path.write_text("\n".join(lines))
    return path


class Served:
    """A store over TCP."""

    def __init__(self, store: Store, port: int, certificate: Path) -> None:
        self.store, self.port, self.certificate = store, port, certificate
        self.url = f"penstock://127.0.0.1:{port}"

    def connect(self, name: str, timeout_s: float = 5.0) -> RemoteStore:
        return connect(self.url, token=f"{name}-secret", authority=self.certificate, timeout_s=timeout_s)

    def line(self) -> flight.FlightClient:
        return flight.FlightClient(f"grpc+tls://127.0.0.1:{self.port}", tls_root_certs=self.certificate.read_bytes())

    def socket(self) -> ssl.SSLSocket:
        context = ssl.create_default_context(cafile=str(self.certificate))
        context.set_alpn_protocols(["h2"])
        raw = socket.create_connection(("127.0.0.1", self.port), timeout=10.0)
        return context.wrap_socket(raw, server_hostname="127.0.0.1")


@pytest.fixture(scope="module")
def credentials(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def served(tmp_path: Path, credentials: tuple[Path, Path]) -> Iterator[Served]:
    tokens = write_tokens(tmp_path / "tokens.toml", admin='"*" = "admin"', reader='users = "read"')
    with penstock.open(tmp_path / "store") as store:
        port = serve_tcp(store, certificate=credentials[0], key=credentials[1], tokens=tokens)
        yield Served(store, port, credentials[0])


# -- who may come in


def test_no_backup_over_tcp(served: Served, tmp_path: Path) -> None:
    """It would be written to the owner's machine, to whatever folder a client names."""
    with served.connect("admin") as store:
        assert (store.troubles(), store.check().ok) == ([], True)
        with pytest.raises(Invalid, match="connect by its path, on that machine"):
            store.backup(tmp_path / "backups")
    assert not (tmp_path / "backups").exists()
    with served.connect("reader") as store, pytest.raises(Invalid, match="the right to read every table"):
        store.check()


def test_the_whole_api_over_tcp(served: Served) -> None:
    with served.connect("admin") as store:
        users, events = store.kv("users"), store.queue("events")
        users.put_many({b"%05d" % n: bytes(1_000) for n in range(20_000)}, durable=True)
        assert sum(batch.num_rows for batch in users.scan_arrow()) == 20_000
        events.append(b"x")
        consumer = events.consumer("c")
        got = consumer.get()
        with store.batch(token=("p", 1)) as batch:
            consumer.ack(got, batch=batch)
            batch.kv("users").put(b"seen", b"1")
        with store.snapshot() as mine, connect(served.store.path) as other:
            assert other.snapshot(mine.id).kv("users")[b"seen"] == b"1"
        users.put(b"large", bytes(60 << 20), durable=True)
        assert len(users[b"large"]) == 60 << 20


def test_small_answers_do_not_wait_for_an_acknowledgement(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    accepted: list[socket.socket] = []
    accept = socket.socket.accept

    def record(listener: socket.socket) -> tuple[socket.socket, object]:
        connection, address = accept(listener)
        accepted.append(connection)
        return connection, address

    monkeypatch.setattr(socket.socket, "accept", record)
    with served.connect("admin") as store:
        store.kv("users").put(b"a", b"1", durable=True)
        ours = [each for each in accepted if each.fileno() >= 0 and each.family == socket.AF_INET]
        assert ours
        assert all(each.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for each in ours)


def test_no_token_wrong_token_and_a_reader_that_writes(served: Served) -> None:
    served.store.kv("users").put(b"a", b"1", durable=True)
    served.store.kv("others")
    with served.line() as line:
        for headers in ([], [(b"authorization", b"Bearer wrong")], [(b"authorization", b"Basic YWRtaW46eA==")]):
            options = flight.FlightCallOptions(headers=headers, timeout=10.0)
            with pytest.raises(flight.FlightUnauthenticatedError):
                list(line.do_action(flight.Action(wire.PROTOCOL, wire.pack(wire.ReadTime())), options))
            with pytest.raises(flight.FlightUnauthenticatedError):
                line.do_get(flight.Ticket(b"x"), options).read_all()
    with pytest.raises(Invalid, match="token"):
        served.connect("nobody")
    with served.connect("reader") as store:
        assert store.tables() == ["users"]
        users = store.kv("users")
        assert users[b"a"] == b"1"
        with pytest.raises(Invalid, match="right to write users"):
            users.put(b"a", b"2", durable=True)
        with pytest.raises(Invalid, match="right to read others"):
            store.kv("others")
        with pytest.raises(Invalid, match="right to admin users"):
            store.drop("users")
        with pytest.raises(Invalid, match="right to write"), store.batch(token=("p", 1)) as batch:
            batch.kv("users").put(b"a", b"2")
        assert users[b"a"] == b"1"


def test_what_is_needed_to_serve(tmp_path: Path, credentials: tuple[Path, Path]) -> None:
    certificate, key = credentials
    tokens = write_tokens(tmp_path / "tokens.toml", admin='"*" = "admin"')
    with penstock.open(tmp_path / "store") as store:
        with pytest.raises(Invalid, match=r"certificate='.*none.pem' cannot be read: No such file or directory"):
            serve_tcp(store, certificate=tmp_path / "none.pem", key=key, tokens=tokens)
        with pytest.raises(Invalid, match="are not a pair of PEM files"):
            serve_tcp(store, certificate=key, key=key, tokens=tokens)
        with pytest.raises(Invalid, match="tokens"):
            serve_tcp(store, certificate=certificate, key=key, tokens=certificate)
        port = serve_tcp(store, certificate=certificate, key=key, tokens=tokens)
        with pytest.raises(Invalid, match=f"127.0.0.1:{port} cannot be listened on"):
            serve_tcp(store, port=port, certificate=certificate, key=key, tokens=tokens)
    with pytest.raises(WaitExpired):
        connect(f"penstock://127.0.0.1:{port}", token="admin-secret", authority=certificate, timeout_s=0.5)
    with penstock.open(tmp_path / "b", settings=penstock.StoreSettings(serve=False)) as store:  # noqa: SIM117
        with pytest.raises(Invalid, match="serve=False"):
            serve_tcp(store, certificate=certificate, key=key, tokens=tokens)


def test_a_server_that_is_not_who_it_says(served: Served, tmp_path: Path) -> None:
    """It is told at once, in one line that names the argument; gRPC would try for `timeout_s` and fill the log."""
    other, _ = make_certificate(tmp_path)
    with pytest.raises(Invalid, match=f"is not accepted with authority='{other}'"):
        connect(served.url, token="admin-secret", authority=other, timeout_s=60.0)
    with pytest.raises(Invalid, match="give authority=, the PEM file") as caught:
        connect(served.url, token="admin-secret", timeout_s=60.0)
    assert "\n" not in str(caught.value)
    elsewhere = served.url.replace("127.0.0.1", "localhost")
    with pytest.raises(Invalid, match="for another host"):
        connect(elsewhere, token="admin-secret", authority=served.certificate, timeout_s=60.0)


def test_a_server_that_does_not_speak_tls() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                peer.recv(1 << 16)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(Invalid, match="does not speak TLS"):
            connect(f"penstock://127.0.0.1:{listener.getsockname()[1]}", token="t", timeout_s=60.0)
        thread.join()


def test_a_client_finds_a_server_that_is_back(tmp_path: Path, credentials: tuple[Path, Path]) -> None:
    certificate, key = credentials
    tokens = write_tokens(tmp_path / "tokens.toml", admin='"*" = "admin"')
    store = penstock.open(tmp_path / "store")
    port = serve_tcp(store, certificate=certificate, key=key, tokens=tokens)
    with Served(store, port, certificate).connect("admin", timeout_s=20.0) as client:
        users = client.kv("users")
        users.put(b"a", b"1", durable=True)
        store.close()
        back = threading.Event()
        values: list[bytes] = []
        reading = threading.Thread(target=lambda: values.append(users[b"a"]))
        reading.start()
        back.wait(0.5)
        with penstock.open(tmp_path / "store") as store:
            serve_tcp(store, port=port, certificate=certificate, key=key, tokens=tokens)
            reading.join(30.0)
            assert values == [b"1"]
            users.put(b"a", b"2", durable=True)
            assert store.kv("users")[b"a"] == b"2"


# -- against a server in a process of its own


SERVER = """
import sys, penstock
from penstock.server.tcp import serve_tcp
path, certificate, key, tokens, before = sys.argv[1:]
exec(before)
with penstock.open(path) as store:
    store.kv("users").put_many({b"%05d" % n: bytes(2_000) for n in range(5_000)}, durable=True)
    print(serve_tcp(store, certificate=certificate, key=key, tokens=tokens), flush=True)
    sys.stdin.read()
"""


class Process:
    """A server whose memory and threads are watched."""

    def __init__(self, arguments: list[str], before: str = "") -> None:
        command = [sys.executable, "-c", SERVER, *arguments, before]
        self.arguments = arguments
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE)
        assert self.process.stdout is not None
        self.served = Served(None, int(self.process.stdout.readline()), Path(arguments[1]))  # type: ignore[arg-type]

    def again(self, before: str) -> Process:
        """Another server, with something changed in it."""
        return Process([f"{self.arguments[0]}-2", *self.arguments[1:]], before)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()

    def descriptors(self) -> int:
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    def status(self, name: str) -> int:
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))

    def answers(self) -> bool:
        with self.served.connect("admin", timeout_s=20.0) as store:
            return bool(store.kv("users").get(b"00001") == bytes(2_000))


@pytest.fixture
def process(tmp_path: Path, credentials: tuple[Path, Path]) -> Iterator[Process]:
    tokens = write_tokens(tmp_path / "tokens.toml", admin='"*" = "admin"')
    server = Process([str(tmp_path / "store"), *map(str, credentials), str(tokens)])
    try:
        assert server.answers()
        yield server
    finally:
        server.end()


def test_an_oversized_message_takes_no_memory(process: Process) -> None:
    before = process.status("RssAnon")
    highest = before
    body = bytes(400 << 20)
    stop = threading.Event()

    def watch() -> None:
        nonlocal highest
        while not stop.wait(0.01):
            highest = max(highest, process.status("RssAnon"))

    watching = threading.Thread(target=watch)
    watching.start()
    for headers in ([], [(b"authorization", b"Bearer admin-secret")]):
        with process.served.line() as line, pytest.raises(pa.ArrowException):
            options = flight.FlightCallOptions(headers=headers, timeout=60.0)
            list(line.do_action(flight.Action(wire.PROTOCOL, body), options))
    stop.set()
    watching.join()
    assert highest - before < 100 << 10, "of 400 MiB, sent twice"
    assert process.answers()


def test_hundreds_of_idle_streams_and_connections(process: Process, request: pytest.FixtureRequest) -> None:
    threads_before = process.status("Threads")
    silent = [process.served.socket() for _ in range(100)]  # over TLS, and then nothing
    for connection in silent:
        request.addfinalizer(connection.close)
    for connection in silent[:50]:
        connection.sendall(PREFACE + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))  # or half a request
    streams: list[Any] = []
    lines = [process.served.line() for _ in range(5)]
    options = flight.FlightCallOptions(headers=[(b"authorization", b"Bearer admin-secret")], timeout=60.0)
    info = wire.FindTable("users")
    (answer,) = lines[0].do_action(flight.Action(wire.PROTOCOL, wire.pack(info)), options)
    table = wire.unpack(answer.body.to_pybytes(), list[TableInfo])[0].table_id
    for each in range(300):
        line = lines[each % len(lines)]
        with suppress(pa.ArrowException):
            scan = wire.Scan(f"idle{each}", "", table << 16, b"", None, True)
            streams.append(line.do_get(flight.Ticket(wire.pack(scan)), options))
        with suppress(pa.ArrowException):
            streams.append(line.do_put(flight.FlightDescriptor.for_path("x"), pa.schema([]), options))
    assert process.answers()
    assert process.status("Threads") - threads_before < 300
    scans_kib = penstock.StoreSettings().memory_bytes_max // 4 >> 10
    assert process.status("RssAnon") < scans_kib + (400 << 10), "what scans may hold, and the rest"
    for stream in streams:
        with suppress(pa.ArrowException, OSError):
            stream[0].close() if isinstance(stream, tuple) else stream.cancel()
    for line in lines:
        line.close()
    assert process.answers()


def test_noise_is_refused_and_the_server_goes_on(process: Process) -> None:
    draw = random.Random(5)
    for _ in range(30):
        with process.served.socket() as connection, suppress(OSError):
            connection.sendall(draw.choice([PREFACE, b""]) + draw.randbytes(draw.randint(1, 5_000)))
            connection.settimeout(0.2)
            connection.recv(100)
    for _ in range(10):
        with socket.create_connection(("127.0.0.1", process.served.port)) as raw, suppress(OSError):
            raw.sendall(draw.randbytes(500))  # not even TLS
    pause(0.2)
    assert process.answers()


# -- strangers


def knock_and_say_nothing(served: Served, request: pytest.FixtureRequest, raw: int, over_tls: int) -> None:
    for _ in range(raw):
        silent = socket.create_connection(("127.0.0.1", served.port), timeout=10.0)
        request.addfinalizer(silent.close)
    for _ in range(over_tls):
        with suppress(OSError):  # another stranger came meanwhile
            silent = served.socket()
            request.addfinalizer(silent.close)


def test_strangers_hold_little_and_keep_nobody_out(process: Process, request: pytest.FixtureRequest) -> None:
    before, threads_before = process.descriptors(), process.status("Threads")
    knock_and_say_nothing(process.served, request, raw=500, over_tls=100)
    assert process.answers()
    assert process.descriptors() - before < 3 * (callers.STRANGERS_MAX + 20)
    assert process.status("Threads") - threads_before < 20


def test_a_guard_without_a_bound_is_noticed(process: Process, request: pytest.FixtureRequest) -> None:
    """The same attack on a server that lets in as many as come."""
    unbound = process.again("import penstock.server.guard as g; g.budgets = lambda: (10_000, 10_000)")
    request.addfinalizer(unbound.end)
    before = unbound.descriptors()
    knock_and_say_nothing(unbound.served, request, raw=500, over_tls=0)
    assert unbound.answers()
    assert unbound.descriptors() - before > 3 * (callers.STRANGERS_MAX + 20)


def test_a_stranger_has_to_show_a_token_in_time(process: Process, request: pytest.FixtureRequest) -> None:
    hasty = process.again("import penstock.server.guard as g; g.STRANGER_S_MAX = 0.5")
    request.addfinalizer(hasty.end)
    client = hasty.served.connect("admin")
    request.addfinalizer(client.close)
    raw, silent = socket.create_connection(("127.0.0.1", hasty.served.port), timeout=20.0), hasty.served.socket()
    asking = hasty.served.socket()
    asking.sendall(PREFACE + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]) + bytes([0, 0, 1, 1, 4, 0, 0, 0, 1, 0x80]))
    for stranger in (raw, silent, asking):
        request.addfinalizer(stranger.close)
        stranger.settimeout(20.0)
        with suppress(ConnectionResetError, ssl.SSLError):
            while stranger.recv(1 << 16):
                pass  # the server's first frames; the end comes without the rest of the test being waited for
    assert client.tables() == ["users"]  # on its first connection, which is older than all of them
