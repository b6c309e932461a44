"""Certificates for a cluster: an authority, and one certificate for each member, for development and small clusters.

Thread: any.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import ssl
from collections.abc import Mapping
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from penstock.host.clock import Clock
from penstock.replica.tcp_link import IDENTITY

DAYS = 825


def make_certificates(folder: Path, members: Mapping[str, str], clock: Clock) -> None:
    """Write `authority.pem`, and `NAME.pem` and `NAME.key` for each member; the authority's key is not kept.

    `members` are names and hosts: a certificate is for other members, by its name, and for clients, by its host.
    """
    folder.mkdir(parents=True, exist_ok=True)
    authority_key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Penstock cluster")])
    authority = _sign(name, name, authority_key, authority_key, names=[], clock=clock)
    (folder / "authority.pem").write_bytes(authority.public_bytes(serialization.Encoding.PEM))
    for member, host in members.items():
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, member[:64])])
        certificate = _sign(subject, name, key, authority_key, names=_names(member, host), clock=clock)
        (folder / f"{member}.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        secret = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        with os.fdopen(os.open(folder / f"{member}.key", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(secret)


def _sign(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    signer: ec.EllipticCurvePrivateKey,
    *,
    names: list[x509.GeneralName],
    clock: Clock,
) -> x509.Certificate:
    now = datetime.datetime.fromtimestamp(clock.time_us() / 1e6, datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=DAYS))
        .add_extension(x509.BasicConstraints(ca=not names, path_length=None), critical=True)
    )
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return builder.sign(signer, hashes.SHA256())


def _names(member: str, host: str) -> list[x509.GeneralName]:
    try:
        address: x509.GeneralName = x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        address = x509.DNSName(host)
    return [x509.UniformResourceIdentifier(IDENTITY + member), address]


def contexts(folder: Path, member: str) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return the contexts of a member: to be called, and to call."""
    found = []
    for protocol in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT):
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # the member's name is checked instead, whatever its address
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(folder / "authority.pem")
        context.load_cert_chain(folder / f"{member}.pem", folder / f"{member}.key")
        found.append(context)
    return found[0], found[1]
