"""`penstock cluster`: make the files of a cluster, run a member, see who leads, replace one.

The folder of a cluster has `cluster.toml`, `tokens.toml` and `certificates/`; every machine gets a copy of it, with the
keys of its own member.

Thread: one.
Invariant: `init`, `certs` and `replace` overwrite no certificate and no key.
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import typer

from penstock.cli.app import group
from penstock.cli.maintenance import Json
from penstock.cli.output import Output, note
from penstock.client.certificates import ServerCertificate, parse_address
from penstock.errors import Invalid, PenstockError
from penstock.host import threads
from penstock.host.clock import SystemClock
from penstock.host.file_operations import publish, remove_file
from penstock.host.os_files import OsFileSystem
from penstock.host.private_files import write_new_files
from penstock.host.randomness import system_random
from penstock.host.waiting import stop_on_signals
from penstock.protocol import wire
from penstock.replica.masters import HASH, Masters
from penstock.replica.state import StateFile, founding
from penstock.store.following import RAFT_FILE
from penstock.store.identity import IDENTITY_BYTES, read_uuid
from penstock.store.reports import StoreStatistics

cluster = group("cluster", "Three replicas of one store.")

Folder = Annotated[Path, typer.Argument(help="the folder with cluster.toml")]
STATUS_S = 3.0
LEADS = "leads"
AWAY = "away"
REFUSES = "refuses"
_CLUSTER = re.compile(rf"[0-9a-fA-F]{{{2 * IDENTITY_BYTES}}}")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}")


class _Answer(NamedTuple):
    """The role of a member, its statistics, and why it refuses."""

    role: str
    statistics: StoreStatistics | None = None
    reason: str = ""


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise Invalid(f"{name!r} is not the name of a member: give up to 63 of a-z, A-Z, 0-9 and _, no digit first")


class _Addresses(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    clients: str
    members: str


class ClusterFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`cluster.toml`."""

    cluster: str
    members: dict[str, _Addresses]
    masters: str = HASH

    def __post_init__(self) -> None:
        if not _CLUSTER.fullmatch(self.cluster):
            raise Invalid(f"cluster is {self.cluster!r}, not {IDENTITY_BYTES} bytes in hexadecimal digits")
        owners: dict[tuple[str, int], str] = {}
        for name, at in self.members.items():
            _check_name(name)
            for address in map(parse_address, (at.clients, at.members)):
                if owners.setdefault(address, name) != name or at.clients == at.members:
                    raise Invalid(
                        f"members {owners[address]} and {name} share port {address[1]} of {address[0]}: each has two "
                        "of its own, PORT for clients and PORT+1 for members"
                    )
        Masters(self.masters, self.members)


def read_cluster(folder: Path) -> ClusterFile:
    """Read `cluster.toml`; `Invalid` if it is not one."""
    try:
        return msgspec.convert(tomllib.loads((folder / "cluster.toml").read_text()), ClusterFile)
    except (Invalid, OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise Invalid(f"{folder / 'cluster.toml'} is not the file of a cluster ({error}): see `cluster init`") from None


@cluster.command()
def init(
    folder: Annotated[Path, typer.Argument(help="a new folder")],
    member: Annotated[
        list[str], typer.Option(help="NAME=HOST:PORT, once for each; PORT for clients, PORT+1 for members")
    ],
    store: Annotated[
        Path | None,
        typer.Option(
            "--from", help="a store, or the last copy of a cluster, which the member that runs on it brings in"
        ),
    ] = None,
    masters: Annotated[
        str, typer.Option(help="who is preferred for reads of a partition: hash, fixed:NAME or disabled")
    ] = HASH,
) -> None:
    """Make the files of a cluster: its members, their certificates, and a token for clients."""
    from penstock.cli.certificates import make_member_certificates

    hosts = _hosts(member)
    if len(hosts) not in {1, 3, 5}:
        raise Invalid(f"{len(hosts)} members: give three, or one or five")
    Masters(masters, hosts)
    if (folder / "STORE").exists():
        raise Invalid(f"{folder} is a store: give a new folder for the files of the cluster; --from brings a store in")
    random = system_random()
    token = random.randbytes(24).hex()
    identity = random.randbytes(16)
    if store is not None:
        uuid = read_uuid(OsFileSystem(), str(store))
        if uuid is None:
            raise Invalid(f"there is no store in {store}: give the folder of one that is closed")
        identity = uuid
    members = {name: _addresses(host, port) for name, (host, port) in hosts.items()}
    text = _cluster_text(ClusterFile(identity.hex(), members, masters))
    digest = hashlib.sha256(token.encode()).hexdigest()
    tokens = f'[tokens.admin]\nsha256 = "{digest}"\nrights = {{ "*" = "admin" }}\n'
    try:
        write_new_files(str(folder), [("cluster.toml", text.encode(), False), ("tokens.toml", tokens.encode(), False)])
    except OSError as error:
        raise Invalid(f"{error.filename or folder}: {error.strerror}; give a new folder") from None
    make_member_certificates(str(folder / "certificates"), {name: host for name, (host, _) in hosts.items()})
    if store is not None:
        _begin_new_cluster(str(store))
    print(f"token={token}")


def _begin_new_cluster(path: str) -> None:
    """Let the folder of a member begin another cluster: the others of the old one are lost, or will not be run."""
    fs = OsFileSystem()
    if fs.exists(f"{path}/{RAFT_FILE}"):
        lock = fs.lock(f"{path}/MEMBER")
        try:
            state = StateFile(fs, f"{path}/{RAFT_FILE}")
            state.save(founding(state.state, system_random()))
        finally:
            lock.release()


def _hosts(members: list[str]) -> dict[str, tuple[str, int]]:
    hosts: dict[str, tuple[str, int]] = {}
    for text in members:
        name, _, address = text.partition("=")
        _check_name(name)
        if name in hosts:
            raise Invalid(f"--member {text!r}: give NAME=HOST:PORT, each member once")
        hosts[name] = parse_address(address)
    return hosts


def _addresses(host: str, port: int) -> _Addresses:
    url_host = f"[{host}]" if ":" in host else host
    return _Addresses(f"{url_host}:{port}", f"{url_host}:{port + 1}")


def _cluster_text(config: ClusterFile) -> str:
    lines = [f'cluster = "{config.cluster}"\nmasters = "{config.masters}"\n']
    for name, at in config.members.items():
        lines.append(f'[members.{name}]\nclients = "{at.clients}"\nmembers = "{at.members}"\n')
    return "\n".join(lines)


@cluster.command()
def certs(
    folder: Annotated[Path, typer.Argument(help="where the files go; none is overwritten")],
    member: Annotated[list[str], typer.Option(help="NAME=HOST, once for each")],
) -> None:
    """Make an authority and a certificate for each member, for a cluster that is set up by hand."""
    from penstock.cli.certificates import make_member_certificates

    hosts: dict[str, str] = {}
    for text in member:
        name, _, host = text.partition("=")
        _check_name(name)
        if not host or name in hosts:
            raise Invalid(f"--member {text!r}: give NAME=HOST, each member once")
        hosts[name] = host
    for name in make_member_certificates(str(folder), hosts):
        print(folder / name)


@cluster.command()
def replace(
    folder: Folder,
    name: Annotated[str, typer.Argument(help="the member that gets a new machine or a new disk")],
    address: Annotated[str | None, typer.Option(help="HOST:PORT of the new machine; by default the old one")] = None,
) -> None:
    """Prepare a new machine for a member: a new certificate, and its address in cluster.toml.

    Then copy the folder to all machines and run the member there with an empty --data. It takes a snapshot of the
    leader's store and votes when it has caught up. Members that run read the new address by themselves.
    """
    from penstock.cli.certificates import renew_member_certificate

    config = read_cluster(folder)
    if name not in config.members:
        raise Invalid(f"{name} is not a member: {', '.join(config.members)} are")
    host, port = parse_address(config.members[name].clients if address is None else address)
    changed = ClusterFile(config.cluster, {**config.members, name: _addresses(host, port)}, config.masters)
    for written in renew_member_certificate(str(folder / "certificates"), name, host):
        print(folder / "certificates" / written)
    _write_cluster(folder, _cluster_text(changed))
    print(f"run it with an empty folder: penstock cluster run {folder} {name} --data NEW")


def _write_cluster(folder: Path, text: str) -> None:
    fs, temporary = OsFileSystem(), f"{folder}/cluster.toml.new"
    remove_file(fs, temporary)
    file = fs.create(temporary)
    try:
        file.pwrite(text.encode(), 0)
        publish(fs, file, f"{folder}/cluster.toml")
    finally:
        file.close()


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
            masters=config.masters,
        )
        try:
            print(f"penstock://{config.members[name].clients}", flush=True)
            leader: str | None = ""
            while not stopping.wait(0.25):
                with suppress(Invalid):  # while it is being written
                    if (latest := read_cluster(folder)) != config:
                        config = latest
                        member.move({each: parse_address(at.members) for each, at in latest.members.items()})
                if member.leader != leader:
                    leader = member.leader
                    print("no leader" if leader is None else f"{leader} leads", flush=True)
        finally:
            member.close()


@cluster.command()
def status(
    folder: Folder,
    token: Annotated[str, typer.Option(envvar="PENSTOCK_TOKEN", help="of a client")],
    json: Json = False,
) -> None:
    """Say which members answer, and which one leads.

    `acknowledged` is the LSN up to which a member has all records on disk, as the leader knows; `masters` the number of
    partitions whose reads it is preferred for. Ends with 1 if a member does not answer, or none leads.
    """
    config = read_cluster(folder)
    answers = _ask_members(folder, config, token)
    leader = next((answer.statistics for answer in answers.values() if answer.role == LEADS), None)
    upto, mastered = dict[str, int](), Counter[str]()
    if leader is not None:
        upto = {**leader.acknowledged, leader.member: leader.durable_lsn}
        mastered = Counter(partition.master for partition in leader.partitions)
    rows = (
        (name, at.clients, answers[name].role, upto.get(name, 0), mastered[name]) for name, at in config.members.items()
    )
    Output(json=json).rows(("member", "clients", "role", "acknowledged", "masters"), rows)
    if reason := next((answer.reason for answer in answers.values() if answer.reason), ""):
        note(reason)
    if leader is None or any(answer.role in (AWAY, REFUSES) for answer in answers.values()):
        raise typer.Exit(1)


def member_roles(folder: Path, token: str | None) -> Callable[[], list[dict[str, str]]]:
    """Return a function that asks every member of a cluster for its role, for the console."""
    read_cluster(folder)
    if token is None:
        raise Invalid("--cluster asks every member: give the token of a client, --token")

    def ask() -> list[dict[str, str]]:
        config = read_cluster(folder)  # again: `replace` gives a member another address
        answers = _ask_members(folder, config, token)
        roles = {name: AWAY if answer.role == REFUSES else answer.role for name, answer in answers.items()}
        return [{"name": name, "address": at.clients, "role": roles[name]} for name, at in config.members.items()]

    return ask


def _ask_members(folder: Path, config: ClusterFile, token: str) -> dict[str, _Answer]:
    """Ask all members at the same time: any number that do not answer cost one timeout."""
    authority, answers = folder / "certificates" / "authority.pem", dict[str, _Answer]()

    def ask(name: str, address: str) -> Callable[[], None]:
        return lambda: answers.__setitem__(name, _ask_member(address, token, authority))

    asking = [threads.spawn(ask(name, at.clients), name=f"penstock-ask-{name}") for name, at in config.members.items()]
    for thread in asking:
        thread.join()
    return {name: answers.get(name, _Answer(AWAY)) for name in config.members}


def _ask_member(address: str, token: str, authority: Path) -> _Answer:
    """Return the role of a member, and its statistics if the token may read them."""
    from penstock.client.connect import RemoteOwnerLocator
    from penstock.client.connection import Connection

    locator = RemoteOwnerLocator(address, token, ServerCertificate(address, authority), SystemClock())
    connection = Connection(locator, clock=SystemClock(), owner_timeout_s=STATUS_S, any_member=True)
    try:
        role = LEADS if connection.owner.takes_writes else "follows"
        try:
            return _Answer(role, connection.ask(wire.ReadStatistics(), StoreStatistics))
        except PenstockError:
            return _Answer(role)
    except Invalid as error:  # of the token or the certificate: the member is there
        return _Answer(REFUSES, reason=str(error))
    except PenstockError:
        return _Answer(AWAY)
    finally:
        connection.close()
