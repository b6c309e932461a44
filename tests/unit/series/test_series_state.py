"""A series shard: ids, collisions, replays, interrupts, reading at one LSN, and what a select costs."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import numpy as np
import pytest
from interrupts import Interrupt, interrupted_at, where
from pyroaring import BitMap
from series_under_test import DESCRIPTOR, OPTIONS, SeriesModel, SeriesUnderTest, block, labels, select

import penstock.series.ids as ids_module
import penstock.series.labels as labels_module
from penstock.errors import Closed
from penstock.lsm.inspect import statistics
from penstock.lsm.sstable import Sstable
from penstock.lsm.tree_settings import TreeSettings
from penstock.partition.machine import Entry
from penstock.series import index
from penstock.series.keys import DICTIONARY, FORWARD
from penstock.series.labels import Labels, LabelTable
from penstock.series.operators import encode_ids, encode_single_ids
from penstock.series.options import TIME_MAX, TIME_MIN
from penstock.series.section import MetricMetadata, Part, SampleBlock, SeriesDelete, SeriesSection
from penstock.series.section_codec import decode_section, encode_section
from penstock.series.selectors import parse_selector

LARGE = TreeSettings()
BUCKET = OPTIONS.bucket(0)


def hosts(count: int, metric: str = "cpu") -> list[Labels]:
    return [labels(metric, host=f"h{number:04d}") for number in range(count)]


def one_each(series: list[Labels], time: int, value: int = 1) -> SampleBlock:
    return block([(some, time, value + at) for at, some in enumerate(series)])


@pytest.fixture
def shard() -> Any:
    shard = SeriesUnderTest(settings=LARGE)
    yield shard
    shard.close()


# -- ids


def test_ids_count_from_one_and_series_of_one_metric_stand_side_by_side(shard: SeriesUnderTest) -> None:
    mixed = [some for pair in zip(hosts(5, "a"), hosts(5, "b"), strict=True) for some in pair]
    shard.write(one_each(mixed, 5))
    rows = shard.index_rows()
    assert len([key for key in rows if key[4] == FORWARD]) == 10
    state = shard.machine.snapshot()
    (match,) = state.match(parse_selector("a"), TIME_MIN, TIME_MAX)
    assert match[0] == BUCKET
    assert match[1].tolist() == [1, 2, 3, 4, 5]


def test_each_bucket_has_ids_of_its_own(shard: SeriesUnderTest) -> None:
    shard.write(block([(labels("x"), 5, 1), (labels("y"), OPTIONS.bucket_us + 5, 2)]))
    state = shard.machine.snapshot()
    assert [(b - BUCKET, ids.tolist()) for b, ids in state.match((), TIME_MIN, TIME_MAX)] == [(0, [1]), (1, [1])]


def test_series_of_one_fingerprint_are_all_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(labels_module, "digest", lambda data: bytes(16))
    shard, model = SeriesUnderTest(settings=LARGE), SeriesModel()
    for start in (0, 150):  # the second record meets the first in the tree
        part = one_each(hosts(300)[start : start + 200], 5, start)
        shard.write(part)
        model.add(part)
        shard.flush()
        shard.reopen()  # nothing is remembered
    assert shard.select() == model.samples
    assert len([key for key in shard.index_rows() if key[4] == DICTIONARY]) == 1
    assert shard.machine.series_count(BUCKET) == 300
    shard.compact()
    assert shard.select('{host="h0123"}') == model.select('{host="h0123"}')
    shard.close()


def test_two_replays_give_the_same_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(7)
    shards = [SeriesUnderTest(settings=LARGE) for _ in range(3)]
    everything = hosts(60) + hosts(60, "mem")
    for number in range(12):
        part = one_each(chance.sample(everything, 25), number * 90_000_000, number)
        shards[0].write(part)
        shards[1].write(part)
        if number % 3 == 0:
            shards[1].flush()
        if number % 4 == 0:
            shards[1].reopen()
        with monkeypatch.context() as patch:  # nothing is ever remembered
            patch.setattr(ids_module, "SERIES_REMEMBERED_MAX", 0)
            patch.setattr(ids_module, "TABLES_REMEMBERED_MAX", 0)
            shards[2].write(part)
    assert shards[0].index_rows() == shards[1].index_rows() == shards[2].index_rows()
    for shard in shards:
        shard.close()


def test_a_known_label_table_is_resolved_as_a_whole(shard: SeriesUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    table = one_each(hosts(50), 5).series
    index_column = np.arange(50, dtype=np.uint32)

    def write(series: LabelTable, time: int) -> None:
        shard.write(SampleBlock(series, index_column, np.full(50, time), np.zeros(50, np.uint64)))

    write(table, 5)
    monkeypatch.setattr(ids_module.BucketIds, "code_rows", None)
    write(table, 6)
    write(labels_module.decode_table(table.encode()), 7)  # as a client sends it
    assert len(shard.select()) == 150


def test_what_is_remembered_has_a_bound(shard: SeriesUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ids_module, "SERIES_REMEMBERED_MAX", 6)
    for bucket in range(5):
        shard.write(one_each(hosts(3), bucket * OPTIONS.bucket_us))
    remembered = shard.machine._ids
    assert sum(len(some.ids) for some in remembered._buckets.values()) <= 6
    assert len(remembered._tables) == 1
    monkeypatch.setattr(ids_module, "TABLE_BYTES_MAX", 10)
    shard.write(one_each(hosts(4), 5))
    assert len(remembered._tables) == 1
    assert len(shard.select()) == 19


def test_a_decoded_section_does_not_stay_in_memory(shard: SeriesUnderTest) -> None:
    section = decode_section(encode_section(SeriesSection(block([(some, at, 1) for at, some in enumerate(hosts(9))]))))
    shard.apply(1, 0, section)
    (memtable,) = shard.tree.view.memtables()
    (part,) = memtable._parts  # type: ignore[attr-defined]
    assert part.samples.times.base is None
    assert part.samples.bits.base is None


def test_labels_that_come_and_go_are_one_series(shard: SeriesUnderTest) -> None:
    """A table with another column, and other numbers for its values, names the same series."""
    some, other = labels("cpu", host="a"), labels("cpu", dc="x", host="b")
    shard.write(block([(some, 1, 1)]))
    shard.write(block([(other, 2, 2), (some, 2, 3)]))
    shard.write(block([(labels("zz", host="c"), 3, 4), (other, 3, 5), (some, 3, 6)]))
    assert shard.machine.series_count(BUCKET) == 3
    assert shard.machine.series_count(BUCKET, "cpu") == 2


def test_known_series_are_known_to_admission(shard: SeriesUnderTest) -> None:
    shard.write(one_each(hosts(5), 5))
    table = LabelTable.of(hosts(7))
    expected = [True] * 5 + [False] * 2
    assert shard.machine.series_exist(BUCKET, table).tolist() == expected
    assert not shard.machine.series_exist(BUCKET + 1, table).any()
    shard.flush()
    shard.reopen()
    assert shard.machine.series_exist(BUCKET, table).tolist() == expected
    shard.write(one_each(hosts(2), 6))  # some are remembered now, others only stored
    assert shard.machine.series_exist(BUCKET, table).tolist() == expected
    assert shard.machine.series_exist(BUCKET, LabelTable.of([labels("cpu", host="h0001", other="x")])).tolist() == [
        False
    ]


# -- any line may raise


def test_an_apply_interrupted_at_any_line_is_completed_by_the_next() -> None:
    first: list[Part] = [one_each(hosts(3), 5)]
    second: list[Part] = [
        one_each(hosts(4) + hosts(2, "mem"), 6, 50),
        SeriesDelete('{host="h0001"}', 0, 6),
        block([(labels("cpu", host="h0001"), 4, 77)]),
        MetricMetadata("cpu", "gauge"),
    ]
    third: list[Part] = [one_each(hosts(6), 7, 90)]
    model = SeriesModel()
    for part in first + second + third:
        model.add(part)
    expected, point = None, 1
    while True:
        shard = SeriesUnderTest(settings=LARGE)
        shard.write(*first)
        entry = Entry(2, 0, (), (SeriesSection(*second),))
        reached = interrupted_at(point, partial(shard.machine.apply, entry)) >= point
        if shard.machine.applied < 2:  # as the dispatcher does
            shard.machine.apply(entry)
        shard.machine.apply(Entry(3, 0, (), (SeriesSection(*third),)))
        assert shard.select() == model.samples, where[-1:]
        rows = shard.index_rows()
        expected = rows if expected is None else expected
        assert rows == expected, where[-1:]
        shard.close()
        if not reached:
            break
        point += 11  # a prime: a longer run takes every one
    assert point > 500


def test_an_interrupt_between_an_edit_and_its_memory_gives_no_id_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    shard = SeriesUnderTest(settings=LARGE)
    right = ids_module.SeriesIds.remember

    def fail(self: ids_module.SeriesIds, learned: ids_module.LearnedIds) -> None:
        for base, new, _ in learned.buckets.values():
            base.ids.update(new)
        raise Interrupt

    shard.write(one_each(hosts(2), 5))
    with monkeypatch.context() as patch, pytest.raises(Interrupt):
        patch.setattr(ids_module.SeriesIds, "remember", fail)
        shard.write(one_each(hosts(4), 6))
    assert ids_module.SeriesIds.remember is right
    shard.write(one_each(hosts(6), 7))
    assert shard.machine.series_count(BUCKET) == 6
    assert len(shard.select()) == 12
    shard.close()


# -- reading


def test_the_order_of_arrival_of_distinct_times_does_not_matter() -> None:
    rows = [(some, time * 31_000_000, time) for some in hosts(4) for time in range(40)]
    contents = []
    for seed in range(3):
        shuffled = list(rows)
        random.Random(seed).shuffle(shuffled)
        shard = SeriesUnderTest()
        for at in range(0, len(shuffled), 20):
            shard.write(block(shuffled[at : at + 20]))
            if at % 60 == 0:
                shard.flush()
        contents.append(shard.select())
        shard.compact()
        assert shard.select() == contents[-1]
        shard.close()
    assert contents[0] == contents[1] == contents[2]


def test_a_snapshot_sees_one_moment_in_all_buckets(shard: SeriesUnderTest) -> None:
    """The RFC's issue 82: no two readers with different snapshots, also across buckets."""
    far = OPTIONS.bucket_us * 3
    shard.write(block([(labels("x"), 5, 1), (labels("x"), far, 1)]))
    state = shard.machine.snapshot()
    (near, ids), (other, other_ids) = state.match((), TIME_MIN, TIME_MAX)
    reading = state.read(near, ids, TIME_MIN, TIME_MAX)
    shard.write(block([(labels("x"), 5, 2), (labels("x"), far, 2)]))
    shard.flush()
    shard.write(SeriesDelete("{}"))
    shard.compact()
    assert [column[2].tolist() for column in reading] == [[1]]
    assert [column[2].tolist() for column in state.read(other, other_ids, TIME_MIN, TIME_MAX)] == [[1]]
    state.close()
    with pytest.raises(Closed):
        state.match((), TIME_MIN, TIME_MAX)
    assert shard.select() == {}


def test_a_sample_is_read_from_every_place_it_can_be(shard: SeriesUnderTest) -> None:
    """Active, frozen, flushed and compacted: no cache holds a sample back (issue 82)."""
    for step in range(4):
        shard.write(one_each(hosts(2), step))
        if step == 1:
            shard.flush()
        if step == 2:
            shard.tree.freeze()
        assert len(shard.select()) == 2 * (step + 1)


def test_names_values_counts_and_metadata(shard: SeriesUnderTest) -> None:
    shard.write(
        block([(labels("cpu", host="a", dc="x"), 1, 1), (labels("cpu", host="b"), 1, 1), (labels("up"), 1, 1)]),
        MetricMetadata("cpu", "gauge", "s", "load"),
    )
    shard.flush()
    shard.write(block([(labels("up", zone="1"), OPTIONS.bucket_us, 1)]), MetricMetadata("cpu", "counter"))
    state = shard.machine.snapshot()
    everything = TIME_MIN, TIME_MAX
    assert set(state.label_names((), *everything)) == {"__name__", "dc", "host", "zone"}
    assert set(state.label_names(parse_selector("up"), *everything)) == {"__name__", "zone"}
    assert set(state.label_names((), 0, 5)) == {"__name__", "dc", "host"}
    assert set(state.label_values("host", (), *everything)) == {"a", "b"}
    assert set(state.label_values("host", parse_selector('{dc="x"}'), *everything)) == {"a"}
    assert set(state.label_values("nothing", (), *everything)) == set()
    counts = [(b - BUCKET, metric, count) for b, metric, count in state.metric_counts(*everything)]
    assert counts == [(0, "cpu", 2), (0, "up", 1), (1, "up", 1)]
    assert list(state.metadata()) == [MetricMetadata("cpu", "counter")]
    assert state.match((), 5, 5) == []


def test_sets_of_one_id_are_encoded_as_others_are() -> None:
    ids = np.array([1, 2, 65_535, 65_536, 70_001, (1 << 32) - 2], np.uint32)
    assert encode_single_ids(ids) == [encode_ids(BitMap([number])) for number in ids.tolist()]


def test_labels_of_many_ids(shard: SeriesUnderTest) -> None:
    some = hosts(500)
    shard.write(one_each(some, 5))
    state = shard.machine.snapshot()
    ids = np.arange(1, 501, dtype=np.uint32)
    assert list(map(labels_module.decode_labels, state.labels_of(BUCKET, ids))) == some
    assert state.labels_of(BUCKET, ids[::90]) == state.labels_of(BUCKET, ids)[::90]
    with pytest.raises(Exception, match="has no labels"):
        state.labels_of(BUCKET, np.array([501], np.uint32))


def test_reading_yields_columns_of_bounded_size(shard: SeriesUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    import penstock.series.reading as reading_module

    monkeypatch.setattr(reading_module, "COLUMN_SAMPLES", 100)
    monkeypatch.setattr(reading_module, "READ_SAMPLES", 150)
    for step in range(10):
        shard.write(one_each(hosts(64), step))
        if step % 4 == 3:
            shard.flush()
    state = shard.machine.snapshot()
    columns = list(state.read(BUCKET, np.arange(1, 65, dtype=np.uint32), TIME_MIN, TIME_MAX))
    assert sum(len(column[0]) for column in columns) == 640
    assert max(len(column[0]) for column in columns) <= 100
    assert len(select(state)) == 640


def bytes_read(shard: SeriesUnderTest, selector: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many bytes of keys and values of files a select looks at."""
    read: list[int] = []
    find, columns, scan = Sstable.find, Sstable.columns, Sstable.scan

    def finding(self: Sstable, key: bytes, whole: bool = False) -> Any:
        row = find(self, key, whole)
        read.append(0 if row is None else len(row if isinstance(row, bytes) else row[1]))
        return row

    def scanning(self: Sstable, *args: Any, **named: Any) -> Any:
        for part in scan(self, *args, **named):
            read.append(sum(map(len, part.keys)) + sum(map(len, part.values)))
            yield part

    with monkeypatch.context() as patch:
        patch.setattr(Sstable, "find", finding)
        patch.setattr(Sstable, "scan", scanning)
        patch.setattr(Sstable, "columns", lambda *_: pytest.fail("a select reads columns"))
        assert len(shard.select(selector)) == 20
    assert columns is Sstable.columns
    return sum(read)


def test_the_cost_of_a_select_by_label_does_not_depend_on_other_series(monkeypatch: pytest.MonkeyPatch) -> None:
    cost = []
    for others in (20, 2_000):
        shard = SeriesUnderTest(settings=LARGE)
        shard.write(one_each(hosts(20, "wanted"), 5))
        shard.write(one_each(hosts(others, "other"), 5))
        shard.flush()
        shard.reopen()
        cost.append(bytes_read(shard, 'wanted{host=~"h.+"}' if not others else '{__name__="wanted"}', monkeypatch))
        shard.close()
    assert cost[1] <= 1.5 * cost[0]


def test_opening_reads_no_series(monkeypatch: pytest.MonkeyPatch) -> None:
    shard = SeriesUnderTest(settings=LARGE)
    shard.write(one_each(hosts(500), 5))
    shard.flush()
    opened: list[int] = []
    right = Sstable._open_batch

    def open_batch(self: Sstable, number: int) -> object:
        opened.append(number)
        return right(self, number)

    monkeypatch.setattr(Sstable, "_open_batch", open_batch)
    shard.reopen()
    assert opened == []
    shard.write(one_each(hosts(1), 6))
    assert opened
    shard.close()


def test_descriptor_and_statistics(shard: SeriesUnderTest) -> None:
    machine = shard.machine
    assert (machine.applied, machine.stored) == (0, 0)
    shard.write(one_each(hosts(1), 5))
    assert machine.memory_bytes() > 0
    machine.store_now()
    assert (machine.applied, machine.stored) == (1, 1)
    state = machine.snapshot()
    assert machine.is_read()
    assert state.lsn == 1
    state.close()
    assert not machine.is_read()
    assert DESCRIPTOR.kind == "series"


def test_deleting_and_writing_again_in_one_record(shard: SeriesUnderTest) -> None:
    some = labels("x")
    shard.write(block([(some, 5, 1), (some, 6, 1)]))
    shard.write(SeriesDelete("x"), block([(some, 5, 2)]))
    assert shard.select() == {(some, 5): 2}
    shard.flush()
    shard.write(block([(some, 7, 3)]), SeriesDelete("x", 7, 8))
    assert shard.select() == {(some, 5): 2}
    assert index.last_id(shard.tree.view, BUCKET) == 1


def test_files_of_a_shard_can_be_inspected(shard: SeriesUnderTest) -> None:
    shard.write(one_each(hosts(3), 5))
    shard.flush()
    (name,) = (name for name in shard.disk.listdir("/store/tables/1") if name.endswith(".sst"))
    kinds = statistics(f"/store/tables/1/{name}", fs=shard.disk).rows_by_kind
    assert kinds == {"put": 7, "merge series_ids": 4, "merge series_samples": 1}
