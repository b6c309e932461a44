"""One request gives all that a batch or a read plan needs, and it is what the tables themselves say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock
from penstock.client.connect import connect
from penstock.client.store import RemoteStore
from penstock.errors import KindMismatch
from penstock.kinds import partitions_of
from penstock.server.planning import parts_for
from penstock.store.store import Store

MB = 1 << 20


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with penstock.open(tmp_path / "store") as opened:
        yield opened


@pytest.fixture
def client(store: Store) -> Iterator[RemoteStore]:
    with connect(store.path) as connected:
        yield connected


def requests(store: Store) -> dict[str, int]:
    """How many requests of each name the owner has answered."""
    (samples,) = [family.samples for family in store.metrics.families() if family.name == "requests_total"]
    return {name: round(count) for (name,), count in samples.items() if isinstance(count, float | int) and count}


def test_the_plan_of_a_batch(store: Store, client: RemoteStore) -> None:
    events, totals = store.queue("events", shards=2), store.kv("totals", shards=3)
    for number in range(40):
        events.put(b"%d" % number, key=b"k%d" % number)
    store.flush()
    events.trim(4, shard=1, durable=True)
    events.consumer("c").seek({0: 3, 1: 9})
    before = requests(store)
    plan = client.port.plan_batch(
        ["totals", "nothing", "events"], source="events", consumer="c", start={0: 2, 1: 1}, rows_max=10
    )
    assert {name: count - before.get(name, 0) for name, count in requests(store).items()}["PlanBatch"] == 1
    assert [info.name for info in plan.tables] == ["totals", "events"]
    assert plan.tables[0] == store.port.table("totals")
    assert totals.shards == plan.tables[0].shards == 3
    assert plan.time_us <= store.port.time_us()
    source = plan.source
    assert source is not None
    assert source.table == store.port.table("events")
    assert source.earliest == events.offsets("earliest") == {0: 1, 1: 4}
    assert source.latest == events.offsets("latest")
    assert source.position == {0: 3, 1: 9}
    assert source.end == events.advance({0: 2, 1: 4}, 10, None) == {0: 7, 1: 9}


def test_a_plan_without_a_source(store: Store, client: RemoteStore) -> None:
    store.kv("totals")
    assert client.port.plan_batch(["totals"]).source is None
    assert client.port.plan_batch([], source="nothing").source is None
    with pytest.raises(KindMismatch, match="totals of the kind kv has no change feed: .*with changes=True"):
        client.port.plan_batch([], source="totals")
    store.queue("events")
    source = client.port.plan_batch([], source="events").source
    assert source is not None
    assert (source.position, source.end) == ({}, {})


def test_a_plan_sees_what_its_client_wrote(store: Store, client: RemoteStore) -> None:
    events = client.queue("events")
    events.put_many([b"1", b"2", b"3"])
    source = client.port.plan_batch([], source="events").source
    assert source is not None
    assert source.latest == {0: 4}


@pytest.mark.parametrize("snapshot", [False, True])
def test_all_shards_of_a_table_are_cut_in_one_request(store: Store, client: RemoteStore, snapshot: bool) -> None:
    table = store.kv("t", shards=4)
    table.put_many({b"%05d" % number: bytes(100) for number in range(20_000)}, durable=True)
    store.compact("t")
    info = store.port.table("t")
    assert info is not None
    ranges = [(partition, b"00100", b"19000") for partition in partitions_of(info)]
    before = requests(store).get("CutRanges", 0)
    with client.snapshot() as remote_snapshot:
        port = remote_snapshot._port if snapshot else client.port
        even = port.cut_ranges(ranges, 20)
        by_size = port.cut_ranges(ranges, 8, 1, 1 << 30)
        whole = port.cut_ranges(ranges, 8, 1 << 30, 1 << 30)
    assert requests(store)["CutRanges"] - before == 3
    assert [len(cuts) for cuts in even] == [4] * 4
    assert [len(cuts) for cuts in by_size] == [1] * 4  # 8 readers share 4 shards of one size
    assert whole == [[]] * 4
    for cuts in (*even, *by_size):
        assert sorted(set(cuts)) == cuts
        assert all(b"00100" < key < b"19000" for key in cuts)


def test_a_range_without_rows_is_not_cut(store: Store, client: RemoteStore) -> None:
    table = store.kv("t", shards=2)
    table.put_many({b"%05d" % number: bytes(100) for number in range(20_000)}, durable=True)
    store.compact("t")
    info = store.port.table("t")
    assert info is not None
    first, second = partitions_of(info)
    cuts = client.port.cut_ranges([(first, b"", None), (second, b"x", None)], 8, 1, 1 << 30)
    assert [len(keys) for keys in cuts] == [7, 0]


def test_tables_are_cut_by_their_bytes_and_the_readers() -> None:
    least, most = 16 * MB, 256 * MB
    sizes = (0, 1, least, least + 1, 3 * least, 8 * least, 4 * most, 4 * most + 1)
    assert [parts_for(size, 4, least, most) for size in sizes] == [1, 1, 1, 2, 3, 4, 4, 8]
    assert parts_for(1 << 60, 1, 1, 1) == 10_000
