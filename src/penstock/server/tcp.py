"""Serves a store over the network: TLS, and a bearer token with rights for each client.

Thread: any.
"""

from __future__ import annotations

import ssl
from pathlib import Path

from penstock.errors import Invalid
from penstock.host.os_files import OsFileSystem
from penstock.server.rights import Tokens
from penstock.server.service import Service, service_of
from penstock.store.store import Store


def serve_tcp(
    store: Store,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    certificate: str | Path,
    key: str | Path,
    tokens: str | Path,
) -> int:
    """Serve an open store over TCP, too, until it closes; return the port (0: the system chooses one).

    `certificate` and `key` are PEM files, `tokens` a file that lists tokens and their rights.

    >>> files = {"certificate": "server.pem", "key": "server.key", "tokens": "tokens.toml"}
    >>> port = penstock.serve_tcp(store, "localhost", **files)
    >>> client = penstock.connect(f"penstock://localhost:{port}", token="change-me", authority="authority.pem")
    >>> client.tables()
    ['events', 'users']
    >>> client.close()
    """
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.minimum_version = ssl.TLSVersion.TLSv1_2
    tls.options |= ssl.OP_NO_RENEGOTIATION  # it costs the server more than the client
    tls.set_alpn_protocols(["h2"])
    contents = {
        name: _text(path, name) for name, path in (("certificate", certificate), ("key", key), ("tokens", tokens))
    }
    try:
        tls.load_cert_chain(str(certificate), str(key))
    except (OSError, ValueError) as error:  # SSLError is an OSError
        pair = f"certificate={str(certificate)!r} and key={str(key)!r}"
        raise Invalid(f"{pair} are not a pair of PEM files: {error}") from None
    token_list = Tokens.parse(contents["tokens"])
    service: Service | None = service_of(store)
    if service is None:
        raise Invalid(f"{store.path} was opened with serve=False: open it with penstock.open to serve it")
    return service.listen(host, port, tls, token_list.rights_of)


def _text(path: str | Path, name: str) -> str:
    """Return the text of a file that an argument names."""
    try:
        file = OsFileSystem().open(str(path))
        try:
            return file.pread(file.size(), 0).decode()
        finally:
            file.close()
    except (OSError, UnicodeDecodeError) as error:
        raise Invalid(f"{name}={str(path)!r} cannot be read: {getattr(error, 'strerror', None) or error}") from None
