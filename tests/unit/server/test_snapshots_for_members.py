"""A member that lost its disk, or is behind the journal of the others, gets a snapshot; loads by file reach all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from penstock.host.os_files import OsFileSystem
from penstock.log import LogSettings
from penstock.server.installing import INCOMING
from penstock.store.settings import StoreSettings
from penstock.store.store import Store
from penstock.testing.members import LocalCluster, await_true

SETTINGS = StoreSettings(serve=False, journal=LogSettings(segment_bytes=1 << 16, allocate_bytes=1 << 14))


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path, settings=SETTINGS, lag_segments=2) as members:
        yield members


def _fill(store: Store, label: str, rows: int = 200) -> None:
    for number in range(rows):
        store.kv("users").put(b"%s-%04d" % (label.encode(), number), b"v" * 500)
    store.queue("events").put_many([b"%s %d" % (label.encode(), number) for number in range(rows)])
    store.series("metrics").write("cpu", float(rows), labels={"label": label}, time=rows)
    store.vector("docs", dimensions=2, metric="cosine").upsert([label], [[1.0, 2.0]])
    store.flush()


def _cut(store: Store) -> None:
    """Let the journal of a member begin later."""
    store._checkpoint.clear()


def test_a_member_that_lost_its_disk_comes_back(cluster: LocalCluster) -> None:
    _fill(cluster.leader_store(), "first")
    for store in cluster.await_agreement().values():
        _cut(store)
    follower = cluster.followers()[0]
    cluster.stop(follower)
    cluster.wipe(follower)
    _fill(cluster.leader_store(), "second")
    back = cluster.start(follower)
    digests = cluster.digests()
    assert digests[follower] == digests[cluster.leader()]
    assert set(digests[follower]) >= {"users", "events", "metrics", "docs"}
    assert back.snapshots_taken == 1
    await_true(lambda: not back.is_joining, "its vote")
    other = next(name for name in cluster.followers() if name != follower)
    cluster.stop(other)  # it counts again
    _fill(cluster.leader_store(), "third")
    assert not [path for path in (cluster.folder / follower).iterdir() if path.name.startswith(INCOMING)]


def test_a_dead_follower_does_not_keep_the_journal(cluster: LocalCluster) -> None:
    _fill(cluster.leader_store(), "first")
    cluster.await_agreement()
    follower = cluster.followers()[0]
    cluster.stop(follower)
    for number in range(6):
        _fill(cluster.leader_store(), f"while it is away {number}")
        _cut(cluster.leader_store())
    assert len(list((cluster.folder / cluster.leader() / "journal").iterdir())) <= 4
    back = cluster.start(follower)
    digests = cluster.digests()
    assert digests[follower] == digests[cluster.leader()]
    assert back.snapshots_taken == 1


def test_rows_in_files_reach_every_member(cluster: LocalCluster) -> None:
    rows = pa.table({"key": [b"%08d" % number for number in range(60_000)], "value": [b"x" * 40] * 60_000})
    store = cluster.leader_store()
    store.kv("loaded")
    assert store.load("loaded", rows, token=("loader", 1)).rows == 60_000
    assert store.load("loaded", rows, token=("loader", 1)).duplicate
    table_digests = {name: digests["loaded"] for name, digests in cluster.digests().items()}
    assert len(set(table_digests.values())) == 1
    assert table_digests["a"].startswith("60000:")
    cluster.stop(cluster.leader())  # who leads next has the files, too
    assert sum(1 for _ in cluster.write(lambda store: store.kv("loaded")).scan()) == 60_000


def test_an_interrupted_snapshot_goes_on(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was fetched is not fetched again, if the leader has the same bytes."""
    from penstock.server import installing

    rows = pa.table({"key": [b"%08d" % number for number in range(60_000)], "value": [b"x" * 40] * 60_000})
    cluster.leader_store().kv("loaded")
    cluster.leader_store().load("loaded", rows)
    for store in cluster.await_agreement().values():
        _cut(store)
    follower = cluster.followers()[0]
    cluster.stop(follower)
    cluster.wipe(follower)
    taken: list[Any] = []
    fetch = installing.SnapshotTaker._fetch_file

    def failing(taker: Any, client: Any, file: Any) -> None:
        fetch(taker, client, file)
        if file.size > 1 << 20 and taker not in taken:
            taken.append(taker)
            if len(taken) == 1:
                raise OSError(5, "the network is away")

    monkeypatch.setattr(installing.SnapshotTaker, "_fetch_file", failing)
    back = cluster.start(follower)
    digests = cluster.digests()
    assert digests[follower] == digests[cluster.leader()]
    assert back.snapshots_taken == 1
    assert len(taken) >= 2
    assert taken[-1].kept_bytes > 1 << 20
    assert OsFileSystem().exists(f"{cluster.folder}/{follower}/raft")
