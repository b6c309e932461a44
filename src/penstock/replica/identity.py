"""How members show who they are: a certificate of the cluster's authority that names the member, as a URI.

Thread: pure functions.
"""

from __future__ import annotations

import errno
import ssl
from pathlib import Path
from typing import Any

from penstock.errors import Invalid

IDENTITY = "penstock-member:"


class MemberSocket(ssl.SSLSocket):
    """A connection between members. One that is reset while it is made leaves no open socket, as a plain one would."""

    def getpeername(self) -> Any:
        """Return the other end's address; if there is none any more, `wrap_socket` ends here."""
        try:
            return super().getpeername()
        except OSError as error:
            self.close()
            raise ConnectionResetError(errno.ECONNRESET, "it was reset") from error


def certified_members(certificate: object) -> list[str]:
    """Return the members that a certificate names, as `ssl` gives it."""
    names = certificate.get("subjectAltName", ()) if isinstance(certificate, dict) else ()
    return [value[len(IDENTITY) :] for kind, value in names if kind == "URI" and value.startswith(IDENTITY)]


def member_contexts(folder: Path, member: str) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return a member's contexts: to accept connections, and to make them."""
    contexts = []
    for protocol in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT):
        context = ssl.SSLContext(protocol)
        context.sslsocket_class = MemberSocket
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # the member's name is checked instead, whatever its address
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(folder / "authority.pem")
            context.load_cert_chain(folder / f"{member}.pem", folder / f"{member}.key")
        except OSError as error:  # SSLError is an OSError
            raise Invalid(
                f"{folder} lacks the certificates of member {member} ({error}): see `penstock cluster`"
            ) from None
        contexts.append(context)
    return contexts[0], contexts[1]
