"""Encrypted tables in a cluster: sealed on the disk of every member, in files by reference, snapshots and rotations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from penstock.log import LogSettings
from penstock.store.settings import StoreSettings
from penstock.store.store import Store
from penstock.testing.members import LocalCluster, await_true

MARKER = b"Zx9Marker"
OLD, NEW = {1: b"1" * 32}, {2: b"2" * 32}
SETTINGS = StoreSettings(
    serve=False, journal=LogSettings(segment_bytes=1 << 16, allocate_bytes=1 << 14), keys=OLD, encrypt=True
)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path, settings=SETTINGS, lag_segments=2) as members:
        yield members


def leaks(folder: Path) -> list[str]:
    return [str(path) for path in folder.rglob("*") if path.is_file() and MARKER in path.read_bytes()]


def fill(store: Store, label: str) -> None:
    name = MARKER + label.encode()
    for number in range(100):
        store.kv("users").put(b"%s-%04d" % (name, number), MARKER * 20)
    store.queue("events").put_many([b"%s %d" % (name, number) for number in range(50)])
    store.series("metrics").write(name.decode(), 1.5, labels={"label": label}, time=len(label))
    store.vector("docs", dimensions=2, metric="cosine").upsert([name.decode()], [[1.0, 2.0]])
    store.flush()


def load(store: Store) -> None:
    """Rows that go to the others as a file, not through the journal."""
    rows = pa.table({"key": [MARKER + b"%08d" % number for number in range(60_000)], "value": [MARKER * 4] * 60_000})
    store.load("users", rows)
    store.flush()


def test_every_member_seals_reads_and_ships_encrypted_tables(cluster: LocalCluster) -> None:
    fill(cluster.leader_store(), "first")
    load(cluster.leader_store())
    for store in cluster.await_agreement().values():
        store._checkpoint.clear()  # the journal begins later: a new disk needs a snapshot
    follower = cluster.followers()[0]
    cluster.stop(follower)
    assert leaks(cluster.folder) == []
    cluster.wipe(follower)
    fill(cluster.leader_store(), "second")
    back = cluster.start(follower)
    digests = cluster.digests()
    assert digests[follower] == digests[cluster.leader()]
    assert back.snapshots_taken == 1
    await_true(lambda: not back.is_joining, "its vote")
    for store in cluster.await_agreement().values():
        users = store.port.table("users")
        assert users is not None
        assert users.key is not None
    cluster.stop(cluster.leader())  # another one leads, and reads what it applied
    assert len(cluster.leader_store().kv("users")) == 60_200
    assert cluster.leader_store().kv("users")[MARKER + b"second-0001"] == MARKER * 20
    assert leaks(cluster.folder) == []


def test_a_rotation_on_the_leader_reaches_every_member(cluster: LocalCluster) -> None:
    fill(cluster.leader_store(), "first")
    cluster.await_agreement()
    cluster.settings = replace(SETTINGS, keys=OLD | NEW)
    for name in [*cluster.followers(), cluster.leader()]:  # one after the other gets the new key
        cluster.stop(name)
        cluster.start(name)
        cluster.leader()
    cluster.await_agreement()
    report = cluster.write(lambda store: store.rotate_keys())
    assert report.version == 2
    for store in cluster.await_agreement().values():
        assert {info.key.version for info in store.port.tables() if info.key is not None} == {2}
    cluster.settings = replace(SETTINGS, keys=NEW)
    for name in [*cluster.followers(), cluster.leader()]:  # and loses the old one
        cluster.stop(name)
        cluster.start(name)
        cluster.leader()
    fill(cluster.leader_store(), "third")
    cluster.digests()
    assert leaks(cluster.folder) == []


def test_a_member_without_the_key_keeps_the_journal_and_catches_up_with_it(tmp_path: Path) -> None:
    with_key, without = replace(SETTINGS, encrypt=False), replace(SETTINGS, keys=None, encrypt=False)
    with LocalCluster(tmp_path, settings=with_key) as cluster:
        cluster.write(lambda store: store.kv("secret", encrypted=True).put(MARKER, MARKER, durable=True))
        cluster.await_agreement()
        cluster.stop("c")
        cluster.settings = without
        cluster.start("c")  # it cannot open its store, and resigns if it is elected
        cluster.write(lambda store: store.kv("open").put(b"a", b"1", durable=True))
        cluster.stop(next(name for name in cluster.followers() if name != "c"))  # c is needed for a quorum
        cluster.write(lambda store: store.kv("open").put(b"b", b"2", durable=True))
        cluster.stop("c")
        cluster.settings = with_key
        cluster.start("c")
        member_store = cluster.await_agreement()["c"]
        assert member_store.kv("secret")[MARKER] == MARKER
        assert member_store.kv("open")[b"b"] == b"2"
        assert leaks(tmp_path) == []
