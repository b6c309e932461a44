"""Change feeds as users meet them: embedded, connected, in asyncio, trimmed, and with wrong arguments."""

from __future__ import annotations

import asyncio
import itertools
import math
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from feed_model import await_applied, changes_of, follow, take_in_expired
from store_model import open_simulated

import penstock
import penstock.aio
from penstock.errors import CorruptionError, Invalid, KindMismatch, NotFound
from penstock.kinds.change_reading import encode_request
from penstock.kinds.changes import Feed, change_options
from penstock.kv.changes import read_changes
from penstock.kv.machine import KvMachine
from penstock.kv.values import Options
from penstock.registry import KV
from penstock.testing import FakeClock, SimulatedDisk


def test_embedded_connected_and_in_a_snapshot(path: Path) -> None:
    with penstock.open(str(path)) as store:
        users = store.kv("users", value="int64", key="utf8", shards=3, changes=True)
        users.put_many({f"k{number}": number for number in range(300)}, durable=True)
        with store.snapshot() as snapshot:
            users.merge("k1", 5, operator="add_i64", durable=True)
            users.delete_range("k2", "k3", durable=True)
            assert snapshot.kv("users", key="utf8").changes().to_arrow().num_rows == 300
            later = users.changes(after=snapshot.lsn).to_arrow().to_pydict()
        assert (later["key"][0], later["value"][0], later["_change_type"][0]) == ("k1", 6, "update_postimage")
        assert set(later["_change_type"][1:]) == {"delete"}
        with penstock.connect(str(path)) as client:
            table = client.kv("users", key="utf8", value="int64", changes=True)
            table.put("new", 7)
            table.put("k1", 8)
            client.flush()
            assert table.changes().to_arrow().equals(users.changes().to_arrow())
            assert pa.table(table.changes()).equals(users.changes().to_arrow())
            remote = client.kv("made", changes=True)
            remote.put(b"a", b"b", durable=True)
            assert [one[1:] for one in changes_of(store, "made")] == [("insert", b"a", b"b")]
        columns = users.changes().to_arrow().to_pydict()
        rows = zip(columns["_commit_version"], columns["_change_type"], columns["key"], columns["value"], strict=True)
        expected: dict[Any, Any] = dict(users.scan())
        assert follow({}, rows, preimages=False) == expected


def test_samples_embedded_connected_and_in_a_snapshot(path: Path) -> None:
    with penstock.open(str(path)) as store, penstock.connect(str(path)) as client:
        cpu = client.series("cpu", shards=2, changes=penstock.ChangeOptions(preimages=True))
        for host in "abcd":
            cpu.write_columns("cpu", [1.0, 2.0, 3.0], {"host": host}, times=[1, 2, 3], durable=True)
        with store.snapshot() as snapshot:
            cpu.write("cpu", float("nan"), {"host": "a"}, time=2, durable=True)
            cpu.delete('{host="b"}', start=2, durable=True)
            assert snapshot.series("cpu").changes().to_arrow().num_rows == 12
            later = store.series("cpu", changes=True).changes(after=snapshot.lsn).to_arrow()
            again = cpu.changes(after=snapshot.lsn).to_arrow()
        assert later["_change_type"].to_pylist() == ["update_preimage", "update_postimage", "delete", "delete"]
        assert later["labels"].to_pylist() == [[("host", host)] for host in "aabb"] == again["labels"].to_pylist()
        assert later["value"].to_pylist()[::2] == [2.0, 2.0]
        until = later["_commit_version"][1].as_py()
        for table in (cpu, store.series("cpu")):
            some = table.changes(after=snapshot.lsn, until=until).to_arrow()
            assert some["_change_type"].to_pylist() == ["update_preimage", "update_postimage"]
            assert table.changes(until=1 << 60).to_arrow().num_rows == 16
            with pytest.raises(Invalid, match="above until"):
                table.changes(after=2, until=1)
        assert math.isnan(later["value"][1].as_py())
        cpu.alter(window_s=1e9)
        assert store.series("cpu").options.changes == penstock.ChangeOptions(preimages=True)
        assert store.series("cpu", options=penstock.SeriesOptions(window_s=1e9)).changes().to_arrow().num_rows == 16
        with pytest.raises(KindMismatch, match="other options"):
            store.series("cpu", changes=True, options=penstock.SeriesOptions())
        with pytest.raises(KindMismatch, match="other options"):
            store.series("cpu", changes=penstock.ChangeOptions())
        wrong: Any = True
        with pytest.raises(Invalid, match="ChangeOptions"):
            penstock.SeriesOptions(changes=wrong)
        store.series("plain")
        with pytest.raises(KindMismatch, match="no change feed"):
            store.series("plain", changes=True)


def test_a_feed_that_is_described_twice_makes_no_table(tmp_path: Path) -> None:
    images, other = penstock.ChangeOptions(preimages=True), penstock.ChangeOptions(age_s=60.0)
    with penstock.open(tmp_path / "store") as store, penstock.connect(tmp_path / "store") as client:
        for number, opened in enumerate((store, client)):
            with pytest.raises(Invalid, match="differ: give one of them"):
                opened.series("cpu", options=penstock.SeriesOptions(changes=images), changes=other)
            assert "cpu" not in store.tables()
            table = opened.series(f"both{number}", options=penstock.SeriesOptions(changes=images), changes=True)
            assert table.options.changes == images
            opened.series(f"both{number}", options=penstock.SeriesOptions(changes=images), changes=images)
            with pytest.raises(KindMismatch):
                opened.series(f"both{number}", changes=other)


def test_loads_and_retention_of_samples_are_in_the_feed(path: Path) -> None:
    with penstock.open(str(path)) as store:
        cpu = store.series("cpu", options=penstock.SeriesOptions(future_s=None), changes=True)
        cpu.write("cpu", 1.0, time=5, durable=True)
        store.load("cpu", pa.table({"metric": ["cpu"] * 3, "time": [5, 6, 7], "value": [2.0, 3.0, 4.0]}))
        kinds = cpu.changes().to_arrow()["_change_type"].to_pylist()
        assert kinds == ["insert", "update_postimage", "insert", "insert"]
        cpu.alter(retention_s=60)
        store.port.maintain()
        store.flush()
        deletes = cpu.changes().to_arrow().slice(4)
        assert deletes["_change_type"].to_pylist() == ["delete"] * 3
        assert deletes["time"].cast("int64").to_pylist() == [5, 6, 7]
        assert deletes["value"].null_count == 3
        assert cpu.to_arrow().num_rows == 0


def test_in_asyncio(path: Path) -> None:
    async def main() -> list[Any]:
        async with penstock.aio.open(str(path)) as store:
            users = await store.kv("users", changes=True)
            await users.put(b"ada", b"1815", durable=True)
            return [row async for batch in users.changes() for row in batch.to_pylist()]

    (row,) = asyncio.run(main())
    assert (row["key"], row["_change_type"], row["_shard"]) == (b"ada", "insert", 0)


def test_loads_are_in_the_feed(path: Path) -> None:
    with penstock.open(str(path)) as store:
        table = store.kv("t", changes=penstock.ChangeOptions(preimages=True))
        table.put_many({b"%06d" % number: b"old" for number in range(0, 50_000, 7)}, durable=True)
        store.load(
            "t", pa.table({"key": [b"%06d" % number for number in range(50_000)], "value": [b"x" * 100] * 50_000})
        )
        changes = changes_of(store, "t")
        assert follow({}, changes, preimages=True) == dict(table.scan())
        assert sum(kind == "update_preimage" for _, kind, _, _ in changes) == len(range(0, 50_000, 7))


def test_retention_trims_whole_commits_and_says_so() -> None:
    clock = FakeClock()
    with open_simulated(SimulatedDisk(), clock) as store:
        old = store.kv("old", changes=penstock.ChangeOptions(age_s=100))
        small = store.kv("small", changes=penstock.ChangeOptions(age_s=None, bytes_max=500))
        for number in range(20):
            old.put(b"k", b"%d" % number, durable=True)
            small.put(b"k", b"x" * 50, durable=True)
            clock.advance(10)
        take_in_expired(store)
        ages = old.changes().to_arrow()["value"].to_pylist()
        assert 9 <= len(ages) <= 11
        assert ages[-1] == b"19"
        assert 4 <= small.changes().to_arrow().num_rows <= 9
        with pytest.raises(NotFound, match="were trimmed"):
            old.changes(after=1).to_arrow()
        first = old.changes().to_arrow()["_commit_version"][0].as_py()
        assert old.changes(after=first - 1).to_arrow().num_rows == len(ages)
        clock.advance(1_000)
        take_in_expired(store)
        assert old.changes().to_arrow().num_rows == 0
        old.put(b"k", b"again", durable=True)
        assert [one[1] for one in changes_of(store, "old")] == ["update_postimage"]


def _trimmed_and_replayed() -> tuple[list[Any], list[Any]]:
    """Return a feed that records trimmed, before and after its store was killed with nothing of it in files."""
    disk, clock = SimulatedDisk(), FakeClock()
    store = open_simulated(disk, clock)
    table = store.kv("t", changes=penstock.ChangeOptions(age_s=5, bytes_max=2_000))
    for number in range(30):
        table.put(b"k%d" % (number % 7), bytes(40), durable=True, ttl_s=3 if number % 3 else None)
        clock.advance(0.4)
    take_in_expired(store)
    before = changes_of(store, "t")
    disk = disk.image().restore("strict")
    clock.advance(2.5)  # what is due by the clock is not due by the records
    with open_simulated(disk, clock) as again:
        return before, changes_of(again, "t")


def test_what_a_feed_has_follows_from_the_journal() -> None:
    before, after = _trimmed_and_replayed()
    assert before == after
    assert 5 < len(before) < 30


def test_a_feed_that_is_trimmed_by_a_clock_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    due, opened = Feed._due, itertools.count()

    def by_clock(feed: Feed, time_us: int) -> Any:
        late = getattr(feed, "late", None)
        if late is None:
            late = feed.late = next(opened)  # type: ignore[attr-defined]
        return due(feed, time_us + late * 2_500_000)

    monkeypatch.setattr(Feed, "_due", by_clock)
    before, after = _trimmed_and_replayed()
    assert before != after


def test_the_owner_takes_in_what_expired_without_writes() -> None:
    disk, clock = SimulatedDisk(), FakeClock()
    for _ in range(2):
        with open_simulated(disk, clock) as store:
            table = store.kv("t", changes=True)
            if not table.changes().to_arrow().num_rows:
                table.put(b"k", b"v", ttl_s=1, durable=True)
                clock.advance(2)
            store._tasks.maintain_services()
            store.flush()
            assert [one[1] for one in changes_of(store, "t")] == ["insert", "delete"]


def test_a_shard_that_hangs_does_not_delay_the_feeds_of_others(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    going_on, apply = threading.Event(), KvMachine.apply

    def hang(machine: KvMachine, entry: Any) -> None:
        if machine._descriptor.name == "hanging":
            assert going_on.wait(60)
        apply(machine, entry)

    options = penstock.ChangeOptions(bytes_max=1)
    with penstock.open(str(path)) as store:
        hanging, other = store.kv("hanging", changes=options), store.kv("other", changes=options)
        for table in (hanging, other):
            table.put(b"a", b"1", durable=True)
            table.put(b"b", b"2", durable=True)
        await_applied(store)
        monkeypatch.setattr(KvMachine, "apply", hang)
        try:
            store.flush(hanging.delete(b"a"))
            store._tasks.maintain_services()  # with a wait, it would say that the feed of `hanging` is trimmed later
            store.flush()
            assert [record.message for record in caplog.records if "trimmed later" in record.message] == []
            assert [key for _, _, key, _ in changes_of(store, "other")] == [b"b"]
        finally:
            going_on.set()
        assert [key for _, _, key, _ in changes_of(store, "hanging")] == [b"a", b"b", b"a"]


def test_of_a_dropped_table_nothing_is_left(path: Path) -> None:
    with penstock.open(str(path)) as store:
        store.kv("t", changes=True).put(b"k", b"v", durable=True)
        store.checkpoint()
        store.drop("t")
        assert store.kv("t", changes=True).changes().to_arrow().num_rows == 0
    with penstock.open(str(path), settings=penstock.StoreSettings(background=False)) as store:
        store._tasks.retry()
        assert [entry.name for entry in (path / "tables").iterdir() if (entry / "0" / "changes").exists()] == ["3"]


@pytest.mark.parametrize("changes", [None, 1, "true", [], penstock.Retention()])
def test_changes_is_a_bool_or_options(changes: Any, path: Path) -> None:
    with penstock.open(str(path)) as store, pytest.raises(Invalid, match="changes"):
        store.kv("t", changes=changes)


@pytest.mark.parametrize(
    "options", [{"age_s": 0}, {"age_s": "1"}, {"bytes_max": 0}, {"bytes_max": 1.5}, {"preimages": 1}, {"age_s": 1e300}]
)
def test_wrong_options(options: Any) -> None:
    with pytest.raises(Invalid, match="change feed"):
        penstock.ChangeOptions(**options)


def test_tables_without_a_feed(path: Path) -> None:
    with penstock.open(str(path)) as store:
        plain, events = store.kv("plain"), store.queue("events")
        for table in (plain, events):
            with pytest.raises(KindMismatch, match="has no change feed: create another one .*copy the rows with"):
                table.changes()
        with pytest.raises(KindMismatch, match="has no change feed"):
            store.kv("plain", changes=True)
        store.kv("fed", changes=True)
        with pytest.raises(KindMismatch, match="other options"):
            store.kv("fed", changes=penstock.ChangeOptions(preimages=True))
        assert store.kv("fed").changes().to_arrow().num_rows == 0


@pytest.mark.parametrize("after", [-1, "1", 1.5, 1 << 62, True])
def test_wrong_positions(after: Any, path: Path) -> None:
    with penstock.open(str(path)) as store, pytest.raises(Invalid, match="after"):
        store.kv("t", changes=True).changes(after=after)


WRONG_RANGES = [[(9, 1, 2)], [(0, 3, 2)], [(0, 1, 2), (0, 2, 3)], [(0, -1, 2)]]


@pytest.mark.parametrize("argument", [b"", b"x", *map(encode_request, WRONG_RANGES)])
def test_malformed_requests_of_clients(argument: bytes, path: Path) -> None:
    with penstock.open(str(path)) as store:
        store.kv("t", changes=True)
        for port in (store._port, penstock.connect(str(path)).port):
            info = port.table("t")
            assert info is not None
            for query in ("changes", "change_sizes"):
                with pytest.raises(Invalid):
                    list(port.query(info, query, argument))


def test_damaged_parts_are_an_error() -> None:
    for data in (b"", b"\0" * 8, b"\7" + b"\0" * 7, b"\1\0\0\0\1\0\0\0\3", b"\0\0\0\0\2\0\0\0\0" + b"\0" * 8):
        if data == b"\0" * 8:
            continue
        with pytest.raises(CorruptionError):
            read_changes(data, Options())


def test_options_of_tables_without_a_feed_are_as_before() -> None:
    assert KV.options(None) == KV.options(None, None, False)
    assert KV.options("utf8", None, True) != KV.options("utf8")
    assert KV.change_options(KV.options("utf8", "utf8", True)) == change_options(True)
