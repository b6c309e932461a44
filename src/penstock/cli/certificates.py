"""Certificates for a server of your own, or for the members of a cluster: an authority, and those that it signs.

    authority.pem, authority.key   signs the others; clients get authority.pem, nobody gets the key
    server.pem, server.key         for `penstock serve`, valid for the hosts that were named
    NAME.pem, NAME.key             for a member of a cluster
    client.pem, client.key         for proxies that ask clients for a certificate; Penstock itself asks for a token

Thread: one.
Invariants: (1) no file is overwritten. (2) keys are readable by their owner alone (mode 0600).
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from penstock.arguments import in_short, whole
from penstock.errors import Invalid
from penstock.host.clock import SystemClock
from penstock.host.os_files import OsFileSystem
from penstock.host.private_files import write_new_files
from penstock.replica.identity import IDENTITY

try:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
except ModuleNotFoundError as missing:
    raise Invalid("penstock certificates needs cryptography: pip install 'penstock[crypto]'") from missing

DAYS, DAYS_MAX = 825, 36_500
CLOCKS_APART = timedelta(hours=1)  # a client whose clock is behind accepts the certificate all the same
HOST_CHARACTERS_MAX = 253
_LABEL = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)|\*")


class Signed(NamedTuple):
    """A certificate and its key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def make_certificates(folder: str, hosts: Sequence[str], days: int) -> list[str]:
    """Make an authority, and a server's and a client's certificate, in `folder`; return the names of the files."""
    days = whole(days, "days", 1, DAYS_MAX)
    if not hosts:
        raise Invalid("name the hosts that clients connect to: --host db.example, and perhaps --host 127.0.0.1")
    alternatives = [_alternative(host) for host in dict.fromkeys(hosts)]
    until = timedelta(days=days)
    authority = _sign("Penstock authority", until, None, x509.BasicConstraints(ca=True, path_length=0))
    server = _sign(
        "Penstock server", until, authority,
        x509.SubjectAlternativeName(alternatives), x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]),
    )  # fmt: skip
    client = _sign("Penstock client", until, authority, x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]))
    return _write(folder, {"authority": authority, "server": server, "client": client})


def renew_member_certificate(folder: str, member: str, host: str, days: int = DAYS) -> list[str]:
    """Sign a new certificate for a member, by the authority in `folder`; the old files get another name.

    `Invalid` if the authority's key is not there.
    """
    until, fs = timedelta(days=whole(days, "days", 1, DAYS_MAX)), OsFileSystem()
    authority = _load(folder, "authority")
    both = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    names = [x509.UniformResourceIdentifier(IDENTITY + member), _alternative(host)]
    signed = _sign("Penstock member", until, authority, x509.SubjectAlternativeName(names), both)
    for name in (f"{member}.pem", f"{member}.key"):
        if fs.exists(f"{folder}/{name}"):
            number = 1
            while fs.exists(f"{folder}/{name}.old{number}"):
                number += 1
            fs.rename(f"{folder}/{name}", f"{folder}/{name}.old{number}")
    return _write(folder, {member: signed})


def _load(folder: str, name: str) -> Signed:
    """Read a certificate and its key."""
    try:
        certificate = x509.load_pem_x509_certificate(_read(f"{folder}/{name}.pem"))
        key = serialization.load_pem_private_key(_read(f"{folder}/{name}.key"), None)
    except (OSError, ValueError) as error:
        raise Invalid(f"{folder} lacks {name}.pem and {name}.key, which sign a certificate ({error})") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise Invalid(f"{folder}/{name}.key is not a key that Penstock made")
    return Signed(certificate, key)


def _read(path: str) -> bytes:
    file = OsFileSystem().open(path)
    try:
        return file.pread(file.size(), 0)
    finally:
        file.close()


def make_member_certificates(folder: str, members: Mapping[str, str], days: int = DAYS) -> list[str]:
    """Make an authority, and a certificate for each member of a cluster; return the names of the files.

    `members` are names and hosts. Members know each other by their names, and clients know them by their hosts.
    """
    until = timedelta(days=whole(days, "days", 1, DAYS_MAX))
    authority = _sign("Penstock authority", until, None, x509.BasicConstraints(ca=True, path_length=0))
    both = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    signed = {"authority": authority}
    for name, host in members.items():
        names = [x509.UniformResourceIdentifier(IDENTITY + name), _alternative(host)]
        signed[name] = _sign("Penstock member", until, authority, x509.SubjectAlternativeName(names), both)
    return _write(folder, signed)


def _write(folder: str, certificates: Mapping[str, Signed]) -> list[str]:
    """Write certificates and their keys; return the names of the files."""
    files = [
        file
        for name, signed in certificates.items()
        for file in ((f"{name}.pem", _pem(signed.certificate), False), (f"{name}.key", _key_pem(signed.key), True))
    ]
    try:
        write_new_files(folder, files)
    except FileExistsError as error:
        raise Invalid(f"{error.filename} exists, and nothing is overwritten: give another folder") from None
    except OSError as error:
        raise Invalid(f"{error.filename or folder} cannot be written: {error.strerror}") from None
    return [name for name, _, _ in files]


def _alternative(host: str) -> x509.GeneralName:
    """Return the name or the address of a host, as a certificate holds it; `Invalid` if it is neither."""
    try:
        return x509.IPAddress(ipaddress.ip_address(host.removeprefix("[").removesuffix("]")))
    except ValueError:
        if len(host) > HOST_CHARACTERS_MAX or not all(map(_LABEL.fullmatch, host.split("."))):
            raise Invalid(f"{in_short(host)} is not the name or the address of a host: give db.example") from None
        return x509.DNSName(host)


def _sign(name: str, lasting: timedelta, by: Signed | None, *extensions: Any) -> Signed:
    """Make a key and a certificate for it, signed by an authority, or by itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.fromtimestamp(SystemClock().time_us() / 1e6, UTC)
    issuer, signing = (subject, key) if by is None else (by.certificate.subject, by.key)
    builder = (
        x509.CertificateBuilder(issuer, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - CLOCKS_APART)
        .not_valid_after(now + lasting)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signing.public_key()), critical=False)
        .add_extension(_usage(is_authority=by is None), critical=True)
    )
    for extension in extensions:
        builder = builder.add_extension(extension, critical=isinstance(extension, x509.BasicConstraints))
    return Signed(builder.sign(signing, hashes.SHA256()), key)


def _usage(*, is_authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not is_authority, key_cert_sign=is_authority, crl_sign=is_authority,
        content_commitment=False, key_encipherment=False, data_encipherment=False, key_agreement=False,
        encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    return key.private_bytes(encoding, form, serialization.NoEncryption())
