"""Checks a server's certificate before gRPC connects: gRPC would try a bad one again and again, and only log why.

Thread: any.
"""

from __future__ import annotations

import re
import socket
import ssl
from pathlib import Path

from penstock.errors import Invalid

SCHEME = "penstock://"
CHECK_S_MIN, CHECK_S_MAX = 0.05, 5.0  # after that, gRPC finds out by itself
_ADDRESS = re.compile(r"(?:\[([0-9A-Fa-f:.%]+)\]|([\w.-]+)):([0-9]{1,5})")
_WRONG_HOST = (62, 64)  # OpenSSL's codes: of another name, of another address


def parse_address(address: str) -> tuple[str, int]:
    """Split host:port; `Invalid` if it is neither that nor [IPv6 address]:port."""
    match = _ADDRESS.fullmatch(address)
    if match is None or not 0 < int(match[3]) < 1 << 16:
        raise Invalid(f"{SCHEME}{address} is not an address: give {SCHEME}host:port")
    return match[1] or match[2], int(match[3])


class ServerCertificate:
    """What a client accepts as a server's certificate."""

    def __init__(self, address: str, authority: str | Path | None) -> None:
        """`authority`: a PEM file with the certificates that may sign it; None: those that the system trusts."""
        self._host, self._port = parse_address(address)
        self._name = f"{SCHEME}{address}"
        self._authority = authority
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._tls.set_alpn_protocols(["h2"])
        self.roots: bytes | None = None
        if authority is None:
            self._tls.load_default_certs()
            return
        try:
            self.roots = Path(authority).read_bytes()
            self._tls.load_verify_locations(cadata=self.roots.decode())
        except (OSError, TypeError, ValueError) as error:  # SSLError is an OSError
            raise Invalid(f"authority={str(authority)!r} is not a readable PEM file of certificates: {error}") from None

    def check(self, timeout_s: float) -> bool:
        """Whether the server showed a certificate that is accepted; False if it did not answer yet.

        `Invalid` if the certificate is not accepted, or the server does not speak TLS.
        """
        try:
            addresses = len(socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM))
            each_s = max(CHECK_S_MIN, min(CHECK_S_MAX, timeout_s) / addresses)  # they are tried one after the other
            with (
                socket.create_connection((self._host, self._port), each_s) as plain,
                self._tls.wrap_socket(plain, server_hostname=self._host),
            ):
                return True
        except ssl.SSLCertVerificationError as error:
            raise Invalid(self._refusal(error)) from None
        except ssl.SSLError as error:
            if error.reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE"):
                raise Invalid(f"{self._name} does not speak TLS: give the port of `penstock serve`") from None
            return False
        except OSError:  # not there, or not yet: gRPC tries again
            return False

    def _refusal(self, error: ssl.SSLCertVerificationError) -> str:
        reason = error.verify_message or error.reason
        if error.verify_code in _WRONG_HOST:
            return f"the certificate of {self._name} is for another host ({reason}): connect by a name that it holds"
        if self._authority is None:
            return (
                f"the certificate of {self._name} is not signed by an authority that this system trusts ({reason}): "
                "give authority=, the PEM file of the one that signed it"
            )
        return (
            f"the certificate of {self._name} is not accepted with authority={str(self._authority)!r} ({reason}): "
            "give the PEM file of the authority that signed it"
        )
