"""What the streams of a consumer did is counted once, by verdict, and outlives the process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.errors import Invalid, PositionConflict
from penstock.feeds import stream_of
from penstock.http.console_sampling import StoreReader, parse_metrics
from penstock.kinds import BatchCounts
from penstock.queue.calls import StreamTotals
from penstock.store import stream_counts
from penstock.testing import FakeClock

NAMES = StreamTotals.__struct_fields__


def move(store: Any, start: int, end: int, counts: BatchCounts, consumer: str = "spark", **feed: bool) -> bool:
    info = store.port.table("events")
    with store.batch() as batch:
        batch.require(*stream_of(info, **feed).move(info, consumer, [(0, start, end)], counts))
    return bool(batch.duplicate)


def totals(store: Any) -> dict[str, StreamTotals | None]:
    return {consumer.name: consumer.stream for consumer in store.queue("events").consumers()}


def metrics(store: Any) -> dict[tuple[str, str, str], float]:
    samples = parse_metrics(store.metrics.exposition())
    return {(name, of["consumer"], of["reads"]): value for name, of, value in samples if name.startswith("stream_")}


def fill(store: Any) -> None:
    queue = store.queue("events", changes=True)
    queue.put_many([b"%d" % number for number in range(40)], durable=True)
    queue.consumer("worker").get()


def test_batches_are_counted_by_verdict_and_outlive_the_process(tmp_path: Path) -> None:
    with penstock.open(tmp_path / "store") as store:
        fill(store)
        assert not move(store, 1, 11, BatchCounts(7, 2))
        assert not move(store, 11, 21, BatchCounts(5, 0, skipped=3))
        assert move(store, 11, 21, BatchCounts(5, 0, skipped=9))  # a duplicate: only that is counted
        with pytest.raises(PositionConflict):
            move(store, 30, 40, BatchCounts(100, 100, 100))
        expected = StreamTotals(batches=2, rows_in=20, rows_out=12, dead=2, duplicates=4)
        assert totals(store) == {"spark": expected, "worker": None}
    with penstock.open(tmp_path / "store") as store, penstock.connect(store.path) as connected:
        for each in (store, connected):
            counts = metrics(each)  # before anything is counted here
            assert [counts[f"stream_{name}_total", "spark", "messages"] for name in NAMES] == [2, 20, 12, 2, 4]
            assert totals(each) == {"spark": expected, "worker": None}
        assert not move(connected, 21, 22, BatchCounts(1))
        expected = StreamTotals(batches=3, rows_in=21, rows_out=13, dead=2, duplicates=4)
        assert totals(connected)["spark"] == expected
        sample = StoreReader(connected, FakeClock()).read()
        assert [consumer["stream"] for consumer in sample["consumers"]] == [
            {name: getattr(expected, name) for name in NAMES},
            None,
        ]
        store.drop("events")
        assert metrics(store) == {}
    with penstock.open(tmp_path / "store") as store:
        fill(store)  # another table of that name
        assert totals(store) == {"worker": None}


def test_a_consumer_of_changes_is_not_that_of_messages(tmp_path: Path) -> None:
    with penstock.open(tmp_path / "store") as store:
        fill(store)
        move(store, 1, 11, BatchCounts(1))
        move(store, 1, 3, BatchCounts(50), changes=True)
        counts = metrics(store)
        assert counts["stream_rows_out_total", "spark", "messages"] == 1
        assert counts["stream_rows_out_total", "spark", "changes"] == 50
        assert totals(store)["spark"] == StreamTotals(batches=1, rows_in=10, rows_out=1)


def test_names_of_consumers_do_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_counts, "STREAMS_MAX", 3)
    with penstock.open(tmp_path / "store") as store:
        fill(store)
        for number in range(9):
            move(store, 1, 2, BatchCounts(1), f"c{number}")
        assert len(metrics(store)) == 3 * len(NAMES)
        by_consumer = totals(store)
        assert by_consumer["c0"] == StreamTotals(1, 1, 1)
        assert by_consumer["c8"] == StreamTotals()


@pytest.mark.parametrize("counts", [BatchCounts(-1), BatchCounts(0, 1 << 62), BatchCounts(0, 0, -5)])
def test_a_count_that_is_no_count_is_refused(tmp_path: Path, counts: BatchCounts) -> None:
    with penstock.open(tmp_path / "store") as store, penstock.connect(store.path) as connected:
        fill(store)
        with pytest.raises(Invalid, match="count"):
            move(connected, 1, 2, counts)
        assert totals(store) == {"worker": None}


def test_a_move_without_counts_is_read_as_before() -> None:
    import msgspec

    from penstock.queue.positions import Move, read_argument

    earlier = bytes(7) + b"\x02" + msgspec.msgpack.encode(["spark", [[0, 1, 5]]])
    assert read_argument(earlier, Move) == (2, Move("spark", [(0, 1, 5)], BatchCounts()))
