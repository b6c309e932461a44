"""Members of a cluster: masters, acknowledgements, truncation by the slowest, and feeds that are trimmed alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.errors import Invalid
from penstock.log import LogSettings
from penstock.store.settings import StoreSettings
from penstock.store.store import Store
from penstock.testing.members import LocalCluster, await_true

SMALL = StoreSettings(serve=False, journal=LogSettings(segment_bytes=1 << 16, allocate_bytes=1 << 14))


def _fill(store: Store, tag: bytes, rows: int = 40) -> None:
    users = store.kv("users", shards=3)
    for number in range(rows):
        users.put(b"%s%03d" % (tag, number), bytes(8_000), durable=True)


def _masters(store: Store) -> dict[tuple[str, int], str]:
    return {(one.table, one.shard): one.master for one in store.statistics().partitions}


def test_masters_and_acknowledgements(tmp_path: Path) -> None:
    with LocalCluster(tmp_path, settings=SMALL) as members:
        members.write(lambda store: _fill(store, b"a"))
        stores = members.await_agreement()
        leader = members.leader()
        masters = _masters(stores[leader])
        assert set(masters.values()) <= {"a", "b", "c"}
        for name, store in stores.items():
            assert store.statistics().member == name
            assert _masters(store) == masters

        def acknowledged() -> bool:
            now = stores[leader].statistics()
            return set(now.acknowledged.values()) == {now.durable_lsn}

        await_true(acknowledged, "acknowledgements of all members")
        _check_metrics(stores[leader], masters)
        slow = members.followers()[0]
        members.stop(slow)
        store = members.leader_store()
        at = store.statistics().durable_lsn
        members.write(lambda store: _fill(store, b"b"))
        store.checkpoint()
        now = store.statistics()
        assert now.acknowledged[slow] <= at  # it has nothing of what came since, and so the journal stays
        assert now.first_lsn <= now.required_from <= now.acknowledged[slow] + 1 < now.needed_from
        members.start(slow)
        members.await_agreement()
        assert members.members[slow].snapshots_taken == 0
        await_true(lambda: members.write(lambda store: _first_after_checkpoint(store) > at), "a shorter journal")
        assert _masters(members.members[slow].store()) == masters  # rebuilt from its journal and files
        assert len({str(sorted(each.items())) for each in members.digests().values()}) == 1


def _check_metrics(store: Store, masters: dict[tuple[str, int], str]) -> None:
    """The leader's metrics say what each member has, what keeps the journal, and who is preferred for which shard."""
    now, lines = store.statistics(), set(store.metrics.exposition().splitlines())
    assert "penstock_consensus_is_leader 1" in lines
    assert f"penstock_consensus_term {now.incarnation}" in lines
    assert f"penstock_journal_required_index {now.required_from}" in lines
    for member, lsn in now.acknowledged.items():
        assert f'penstock_member_acknowledged_index{{member="{member}"}} {lsn}' in lines
    for (table, shard), master in masters.items():
        assert f'penstock_partition_master{{table="{table}",shard="{shard}",member="{master}"}} 1' in lines


def _first_after_checkpoint(store: Store) -> int:
    store.checkpoint()
    return store.statistics().first_lsn


@pytest.mark.parametrize("policy", ["fixed:a", "disabled"])
def test_a_policy_of_the_cluster(tmp_path: Path, policy: str) -> None:
    with LocalCluster(tmp_path, ("a",), masters=policy) as members:
        members.write(lambda store: store.kv("users").put(b"k", b"v", durable=True))
        assert set(_masters(members.leader_store()).values()) == {"" if policy == "disabled" else "a"}


@pytest.mark.parametrize("policy", ["fixed:z", "", None, 1])
def test_a_wrong_policy_makes_no_member(tmp_path: Path, policy: Any) -> None:
    with pytest.raises(Invalid, match="masters is"):
        LocalCluster(tmp_path, ("a",), masters=policy)
    assert not (tmp_path / "a").exists()


def test_feeds_are_trimmed_alike_on_every_member(tmp_path: Path) -> None:
    options = penstock.ChangeOptions(age_s=None, bytes_max=500)
    with LocalCluster(tmp_path, settings=SMALL) as members:

        def write(store: Store) -> None:
            users = store.kv("users", changes=options)
            for number in range(60):
                users.put(b"k%d" % number, bytes(100), durable=True)
            events = store.queue("events", changes=options)
            events.put_many([bytes(100)] * 60, durable=True)
            store._tasks.maintain_services()
            store.flush()

        members.write(write)
        stores = members.await_agreement()
        lsns = {name: _changes(store) for name, store in stores.items()}
        assert len(set(map(str, lsns.values()))) == 1, lsns
        assert 0 < len(lsns["a"]) < 10
        for store in stores.values():  # a queue's feed is trimmed by each member: it frees files, and needs no record
            store._tasks.maintain_services()
            assert store.queue("events", create=False).changes().to_arrow().num_rows < 60


def _changes(store: Store) -> list[int]:
    lsns: list[int] = store.kv("users", create=False).changes().to_arrow()["_commit_version"].to_pylist()
    return lsns
