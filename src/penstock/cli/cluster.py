"""`penstock cluster`: make the files of a cluster, run a member, and see who leads.

The folder of a cluster has `cluster.toml`, `tokens.toml` and `certificates/`; every machine gets a copy of it, with the
keys of its own member.

Thread: one.
Invariant: `init` overwrites nothing.
"""

from __future__ import annotations

import hashlib
import tomllib
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.table import Table

from penstock.cli.commands import app, console
from penstock.client.certificates import ServerCertificate, parse_address
from penstock.errors import Invalid, PenstockError
from penstock.host.clock import SystemClock
from penstock.host.private_files import write_new_files
from penstock.host.randomness import system_random
from penstock.host.waiting import stop_on_signals

__all__ = ["app"]  # with these commands beside the others

cluster = typer.Typer(no_args_is_help=True, help="Three replicas of one store.")
app.add_typer(cluster, name="cluster")

Folder = Annotated[Path, typer.Argument(help="the folder with cluster.toml")]
STATUS_S = 3.0


class _Addresses(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    clients: str
    members: str


class ClusterFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`cluster.toml`."""

    cluster: str
    members: dict[str, _Addresses]


def read_cluster(folder: Path) -> ClusterFile:
    """Read `cluster.toml`; `Invalid` if it is not one."""
    try:
        return msgspec.convert(tomllib.loads((folder / "cluster.toml").read_text()), ClusterFile)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise Invalid(f"{folder / 'cluster.toml'} is not the file of a cluster ({error}): see `cluster init`") from None


@cluster.command()
def init(
    folder: Annotated[Path, typer.Argument(help="a new folder")],
    member: Annotated[
        list[str], typer.Option(help="NAME=HOST:PORT, once for each; PORT for clients, PORT+1 for members")
    ],
) -> None:
    """Make the files of a cluster: its members, their certificates, and a token for clients."""
    from penstock.cli.certificates import make_member_certificates

    hosts: dict[str, tuple[str, int]] = {}
    for text in member:
        name, _, address = text.partition("=")
        if not name.isidentifier() or name in hosts:
            raise Invalid(f"--member {text!r}: give NAME=HOST:PORT, each member once")
        hosts[name] = parse_address(address)
    if len(hosts) not in {1, 3, 5}:
        raise Invalid(f"{len(hosts)} members: give three, or one or five")
    random = system_random()
    token = random.randbytes(24).hex()
    lines = [f'cluster = "{random.randbytes(16).hex()}"\n']
    for name, (host, port) in hosts.items():
        shown = f"[{host}]" if ":" in host else host
        lines.append(f'[members.{name}]\nclients = "{shown}:{port}"\nmembers = "{shown}:{port + 1}"\n')
    digest = hashlib.sha256(token.encode()).hexdigest()
    tokens = f'[tokens.admin]\nsha256 = "{digest}"\nrights = {{ "*" = "admin" }}\n'
    try:
        write_new_files(
            str(folder), [("cluster.toml", "\n".join(lines).encode(), False), ("tokens.toml", tokens.encode(), False)]
        )
    except OSError as error:
        raise Invalid(f"{error.filename or folder}: {error.strerror}; give a new folder") from None
    make_member_certificates(str(folder / "certificates"), {name: host for name, (host, _) in hosts.items()})
    print(f"token={token}")


@cluster.command()
def run(
    folder: Folder,
    name: Annotated[str, typer.Argument(help="the member to run here")],
    data: Annotated[Path, typer.Option(help="the folder of its store")],
) -> None:
    """Run a member until SIGTERM or SIGINT."""
    from penstock.server.member import Member

    config = read_cluster(folder)
    if name not in config.members:
        raise Invalid(f"{name} is not a member: {', '.join(config.members)} are")
    with stop_on_signals() as stopping:
        member = Member(
            data,
            name,
            {each: parse_address(addresses.members) for each, addresses in config.members.items()},
            cluster=bytes.fromhex(config.cluster),
            certificates=folder / "certificates",
            serve=parse_address(config.members[name].clients),
            tokens=folder / "tokens.toml",
        )
        try:
            print(f"penstock://{config.members[name].clients}", flush=True)
            leader: str | None = ""
            while not stopping.wait(0.25):
                if member.leader != leader:
                    leader = member.leader
                    print("no leader" if leader is None else f"{leader} leads", flush=True)
        finally:
            member.close()


@cluster.command()
def status(folder: Folder, token: Annotated[str, typer.Option(envvar="PENSTOCK_TOKEN", help="of a client")]) -> None:
    """Say which members answer, and which one leads."""
    config = read_cluster(folder)
    out = Table("member", "clients", "role")
    for name, addresses in config.members.items():
        out.add_row(name, addresses.clients, _role(addresses.clients, token, folder / "certificates" / "authority.pem"))
    console.print(out)


def _role(address: str, token: str, authority: Path) -> str:
    from penstock.client.connect import RemoteOwnerLocator
    from penstock.client.connection import Connection

    locator = RemoteOwnerLocator(address, token, ServerCertificate(address, authority), SystemClock())
    connection = Connection(locator, clock=SystemClock(), owner_timeout_s=STATUS_S, any_member=True)
    try:
        return "leads" if connection.owner.takes_writes else "follows"
    except PenstockError:
        return "away"
    finally:
        connection.close()
