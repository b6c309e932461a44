"""`penstock certificates`: files that TLS accepts, that nobody else can read, and that nothing overwrites."""

from __future__ import annotations

import hashlib
import os
import ssl
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.cli.certificates import make_certificates
from penstock.errors import Invalid

FILES = [f"{name}.{kind}" for name in ("authority", "server", "client") for kind in ("pem", "key")]


def test_a_client_connects_with_them(tmp_path: Path) -> None:
    """As the server's page says, with a name and an address; a host that was not named is refused."""
    folder, tokens = tmp_path / "certificates", tmp_path / "tokens.toml"
    command = [sys.executable, "-m", "penstock", "certificates", str(folder), "--host", "localhost", "--host", "::1"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.split() == [str(folder / name) for name in FILES]
    digest = hashlib.sha256(b"secret").hexdigest()
    tokens.write_text(f'[tokens.me]\nsha256 = "{digest}"\nrights = {{ "*" = "admin" }}\n')
    with penstock.open(tmp_path / "store") as store:
        certificate, key, authority = (folder / name for name in ("server.pem", "server.key", "authority.pem"))
        port = penstock.serve_tcp(store, certificate=certificate, key=key, tokens=tokens)
        with penstock.connect(f"penstock://localhost:{port}", token="secret", authority=authority) as client:
            client.kv("users").put(b"ada", b"1815", durable=True)
        with pytest.raises(Invalid, match="is for another host"):
            penstock.connect(f"penstock://127.0.0.1:{port}", token="secret", authority=authority)
        assert store.kv("users")[b"ada"] == b"1815"


def test_both_sides_can_ask_for_a_certificate(tmp_path: Path) -> None:
    make_certificates(str(tmp_path), ["db.example", "10.0.0.7"], 30)
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    server.verify_mode = ssl.CERT_REQUIRED
    for name, context in (("server", server), ("client", client)):
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        context.load_cert_chain(tmp_path / f"{name}.pem", tmp_path / f"{name}.key")
        context.load_verify_locations(tmp_path / "authority.pem")
    assert shake_hands(server, client, "db.example") == ("Penstock server", "Penstock client")
    assert shake_hands(server, client, "10.0.0.7") == ("Penstock server", "Penstock client")
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(server, client, "other.example")
    client.load_cert_chain(tmp_path / "server.pem", tmp_path / "server.key")
    with pytest.raises(ssl.SSLCertVerificationError, match="purpose"):
        shake_hands(server, client, "db.example")


def shake_hands(server: ssl.SSLContext, client: ssl.SSLContext, host: str) -> tuple[str, ...]:
    """The names that each side saw of the other."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [
        client.wrap_bio(to_client, to_server, server_hostname=host),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    for _ in range(10):
        for side in sides:
            with suppress(ssl.SSLWantReadError):
                side.do_handshake()
    certificates: list[Any] = [side.getpeercert() for side in sides]
    return tuple(certificate["subject"][0][0][1] for certificate in certificates)


def test_keys_are_private(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        make_certificates(str(tmp_path), ["localhost"], 30)
    finally:
        os.umask(umask)
    modes = {name: (tmp_path / name).stat().st_mode & 0o777 for name in FILES}
    assert modes == {name: 0o600 if name.endswith(".key") else 0o644 for name in FILES}


@pytest.mark.parametrize("taken", ["authority.pem", "client.key"])
def test_nothing_is_overwritten_and_nothing_half_made(tmp_path: Path, taken: str) -> None:
    (tmp_path / taken).write_text("mine")
    with pytest.raises(Invalid, match=f"{taken} exists, and nothing is overwritten"):
        make_certificates(str(tmp_path), ["localhost"], 30)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {taken: "mine"}


@pytest.mark.parametrize(
    ("hosts", "days", "words"),
    [
        ([], 30, "name the hosts"),
        (["db.example:7878"], 30, "is not the name or the address of a host"),
        (["-x.example"], 30, "is not the name"),
        ([""], 30, "is not the name"),
        (["a" * 64], 30, "is not the name"),
        (["localhost"], 0, "days is a whole number from 1"),
    ],
)
def test_what_is_refused(tmp_path: Path, hosts: list[str], days: int, words: str) -> None:
    with pytest.raises(Invalid, match=words):
        make_certificates(str(tmp_path / "new"), hosts, days)
    assert not (tmp_path / "new").exists()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Invalid, match="cannot be written"):
        make_certificates(str(tmp_path / "file" / "below"), ["localhost"], 30)


def test_without_cryptography() -> None:
    code = "import sys; sys.modules['cryptography'] = None; sys.argv = ['penstock', 'certificates', 'x', '--host', 'h']"
    ran = subprocess.run(
        [sys.executable, "-c", f"{code}; from penstock.cli import main; main()"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (ran.returncode, ran.stderr) == (
        2,
        "penstock: penstock certificates needs cryptography: pip install 'penstock[crypto]'\n",
    )
