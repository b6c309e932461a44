"""The connections for files between members, attacked: whatever a peer sends, the member goes on and gives nothing.

Only one of three members runs: it listens, and has neither a leader nor a store.
"""

from __future__ import annotations

import random
import socket
import ssl
import struct
from collections.abc import Iterator
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

import msgspec
import pytest

from penstock.errors import Invalid, NotFound, WaitExpired
from penstock.replica.file_channel import PIECE_BYTES, PURPOSE, FileClient, Greeting, pack_greeting
from penstock.replica.identity import member_contexts
from penstock.testing.members import CLUSTER, LocalCluster


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("files"), start=False) as members:
        members.start("a")
        yield members


def _client(cluster: LocalCluster, *, member: str = "b", peer: str = "a", cluster_id: bytes = CLUSTER) -> FileClient:
    context = member_contexts(cluster.folder / "certificates", "b")[1]
    return FileClient(member, peer, cluster.addresses["a"], cluster=cluster_id, context=context)


def _is_alive(cluster: LocalCluster) -> None:
    client = _client(cluster)
    with pytest.raises(WaitExpired, match="no store"):
        client.snapshot()
    client.close()


@pytest.mark.parametrize(
    "path",
    ["../a/STORE", "/etc/passwd", "raft", "STORE", "tables/../raft", "tables/1/0/../../../raft", "", "journal/x", "\0"],
)
def test_only_files_of_tables_are_read(cluster: LocalCluster, path: str) -> None:
    client = _client(cluster)
    for ask in (partial(client.read_some, path, 0, 10), partial(client.hash_prefix, path, 10)):
        with pytest.raises(WaitExpired, match="is not a file that members read"):
            ask()
    with pytest.raises(NotFound):
        client.read_some("tables/1/0/00000000000000000001.sst", 0, 10)
    client.close()


@pytest.mark.parametrize(("offset", "size"), [(-1, 10), (0, 0), (0, -5), (0, PIECE_BYTES + 1)])
def test_pieces_have_limits(cluster: LocalCluster, offset: int, size: int) -> None:
    folder = cluster.folder / "a" / "tables" / "1" / "0"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "00000000000000000009.bin").write_bytes(b"x" * 100)
    client = _client(cluster)
    with pytest.raises(WaitExpired, match="at most"):
        client.read_some("tables/1/0/00000000000000000009.bin", offset, size)
    assert client.read_some("tables/1/0/00000000000000000009.bin", 90, 100) == b"x" * 10
    assert client.read_some("tables/1/0/00000000000000000009.bin", 100, 100) == b""
    client.close()


@pytest.mark.parametrize(
    "wrong", [{"member": "c"}, {"peer": "c"}, {"cluster_id": bytes(16)}, {"member": "a"}, {"member": "stranger"}]
)
def test_a_peer_that_is_not_who_it_says_gets_nothing(cluster: LocalCluster, wrong: dict[str, object]) -> None:
    with pytest.raises((Invalid, OSError)), closing(_client(cluster, **wrong)) as client:  # type: ignore[arg-type]
        client.snapshot()
    _is_alive(cluster)


def test_random_bytes(cluster: LocalCluster) -> None:
    """Before and after a greeting: random bytes, pickles, huge lengths, structs of other shapes."""
    chance, context = random.Random(19), member_contexts(cluster.folder / "certificates", "b")[1]
    greeting = pack_greeting(Greeting(CLUSTER, "b", PURPOSE))
    frames = [
        b"\xff\xff\xff\xff",
        struct.pack(">I", 1 << 30),
        _frame(b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00cos\nsystem\n."),
        _frame(msgspec.msgpack.encode(["ReadPiece", 1, 2, 3])),
        _frame(msgspec.msgpack.encode(["ReadPiece", "x" * 1000, 1 << 63, 3])),
        _frame(msgspec.msgpack.encode(["Nothing"])),
        _frame(msgspec.msgpack.encode({"a": 1})),
        _frame(b""),
        *(_frame(chance.randbytes(chance.randrange(200))) for _ in range(30)),
        *(chance.randbytes(chance.randrange(1, 200)) for _ in range(10)),
    ]
    for number, frame in enumerate(frames):
        plain = socket.create_connection(cluster.addresses["a"], 5)
        with plain, suppress(OSError), context.wrap_socket(plain) as tls:
            tls.settimeout(5)
            tls.sendall(frame if number % 2 else _frame(greeting) + frame)
    for _ in range(10):
        with socket.create_connection(cluster.addresses["a"], 5) as plain, suppress(OSError, ssl.SSLError):
            plain.sendall(chance.randbytes(100))
    _is_alive(cluster)


def _frame(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data


def test_another_authority_gets_nothing(cluster: LocalCluster, tmp_path: Path) -> None:
    with LocalCluster(tmp_path, start=False) as others:
        context = member_contexts(others.folder / "certificates", "b")[1]
        with pytest.raises((OSError, Invalid)):
            FileClient("b", "a", cluster.addresses["a"], cluster=CLUSTER, context=context)
    _is_alive(cluster)
