"""A series shard: ids, collisions, replays, interrupts, reading at one LSN, and what a select costs."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import numpy as np
import pytest
from interrupts import Interrupt, interrupted_at, where
from pyroaring import BitMap
from series_place import DESCRIPTOR, OPTIONS, SeriesModel, SeriesPlace, block, labels, select

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
def place() -> Any:
    made = SeriesPlace(settings=LARGE)
    yield made
    made.close()


# -- ids


def test_ids_count_from_one_and_series_of_one_metric_stand_side_by_side(place: SeriesPlace) -> None:
    mixed = [some for pair in zip(hosts(5, "a"), hosts(5, "b"), strict=True) for some in pair]
    place.write(one_each(mixed, 5))
    rows = place.index_rows()
    assert len([key for key in rows if key[4] == FORWARD]) == 10
    state = place.machine.snapshot()
    (found,) = state.match(parse_selector("a"), TIME_MIN, TIME_MAX)
    assert found[0] == BUCKET
    assert found[1].tolist() == [1, 2, 3, 4, 5]


def test_each_bucket_has_ids_of_its_own(place: SeriesPlace) -> None:
    place.write(block([(labels("x"), 5, 1), (labels("y"), OPTIONS.bucket_us + 5, 2)]))
    state = place.machine.snapshot()
    assert [(b - BUCKET, ids.tolist()) for b, ids in state.match((), TIME_MIN, TIME_MAX)] == [(0, [1]), (1, [1])]


def test_series_of_one_fingerprint_are_all_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(labels_module, "digest", lambda data: bytes(16))
    place, model = SeriesPlace(settings=LARGE), SeriesModel()
    for start in (0, 150):  # the second record meets the first in the tree
        part = one_each(hosts(300)[start : start + 200], 5, start)
        place.write(part)
        model.add(part)
        place.flush()
        place.reopen()  # nothing is remembered
    assert place.select() == model.samples
    assert len([key for key in place.index_rows() if key[4] == DICTIONARY]) == 1
    assert place.machine.series_count(BUCKET) == 300
    place.compact()
    assert place.select('{host="h0123"}') == model.select('{host="h0123"}')
    place.close()


def test_two_replays_give_the_same_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(7)
    places = [SeriesPlace(settings=LARGE) for _ in range(3)]
    everything = hosts(60) + hosts(60, "mem")
    for number in range(12):
        part = one_each(chance.sample(everything, 25), number * 90_000_000, number)
        places[0].write(part)
        places[1].write(part)
        if number % 3 == 0:
            places[1].flush()
        if number % 4 == 0:
            places[1].reopen()
        with monkeypatch.context() as patch:  # nothing is ever remembered
            patch.setattr(ids_module, "SERIES_REMEMBERED_MAX", 0)
            patch.setattr(ids_module, "TABLES_REMEMBERED_MAX", 0)
            places[2].write(part)
    assert places[0].index_rows() == places[1].index_rows() == places[2].index_rows()
    for made in places:
        made.close()


def test_a_known_label_table_is_resolved_as_a_whole(place: SeriesPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    table = one_each(hosts(50), 5).series
    index_column = np.arange(50, dtype=np.uint32)

    def write(series: LabelTable, time: int) -> None:
        place.write(SampleBlock(series, index_column, np.full(50, time), np.zeros(50, np.uint64)))

    write(table, 5)
    monkeypatch.setattr(ids_module.BucketIds, "code_rows", None)
    write(table, 6)
    write(labels_module.decode_table(table.encode()), 7)  # as a client sends it
    assert len(place.select()) == 150


def test_what_is_remembered_has_a_bound(place: SeriesPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ids_module, "SERIES_REMEMBERED_MAX", 6)
    for bucket in range(5):
        place.write(one_each(hosts(3), bucket * OPTIONS.bucket_us))
    remembered = place.machine._ids
    assert sum(len(some.ids) for some in remembered._buckets.values()) <= 6
    assert len(remembered._tables) == 1
    monkeypatch.setattr(ids_module, "TABLE_BYTES_MAX", 10)
    place.write(one_each(hosts(4), 5))
    assert len(remembered._tables) == 1
    assert len(place.select()) == 19


def test_a_decoded_section_does_not_stay_in_memory(place: SeriesPlace) -> None:
    section = decode_section(encode_section(SeriesSection(block([(some, at, 1) for at, some in enumerate(hosts(9))]))))
    place.apply(1, 0, section)
    (memtable,) = place.tree.view.memtables()
    (part,) = memtable._parts  # type: ignore[attr-defined]
    assert part.samples.times.base is None
    assert part.samples.bits.base is None


def test_labels_that_come_and_go_are_one_series(place: SeriesPlace) -> None:
    """A table with another column, and other numbers for its values, names the same series."""
    some, other = labels("cpu", host="a"), labels("cpu", dc="x", host="b")
    place.write(block([(some, 1, 1)]))
    place.write(block([(other, 2, 2), (some, 2, 3)]))
    place.write(block([(labels("zz", host="c"), 3, 4), (other, 3, 5), (some, 3, 6)]))
    assert place.machine.series_count(BUCKET) == 3
    assert place.machine.series_count(BUCKET, "cpu") == 2


def test_known_series_are_known_to_admission(place: SeriesPlace) -> None:
    place.write(one_each(hosts(5), 5))
    table = LabelTable.of(hosts(7))
    expected = [True] * 5 + [False] * 2
    assert place.machine.known(BUCKET, table).tolist() == expected
    assert not place.machine.known(BUCKET + 1, table).any()
    place.flush()
    place.reopen()
    assert place.machine.known(BUCKET, table).tolist() == expected
    place.write(one_each(hosts(2), 6))  # some are remembered now, others only stored
    assert place.machine.known(BUCKET, table).tolist() == expected
    assert place.machine.known(BUCKET, LabelTable.of([labels("cpu", host="h0001", other="x")])).tolist() == [False]


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
        place = SeriesPlace(settings=LARGE)
        place.write(*first)
        entry = Entry(2, 0, (), (SeriesSection(*second),))
        reached = interrupted_at(point, partial(place.machine.apply, entry)) >= point
        if place.machine.applied < 2:  # as the dispatcher does
            place.machine.apply(entry)
        place.machine.apply(Entry(3, 0, (), (SeriesSection(*third),)))
        assert place.select() == model.samples, where[-1:]
        rows = place.index_rows()
        expected = rows if expected is None else expected
        assert rows == expected, where[-1:]
        place.close()
        if not reached:
            break
        point += 11  # a prime: a longer run takes every one
    assert point > 500


def test_an_interrupt_between_an_edit_and_its_memory_gives_no_id_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    place = SeriesPlace(settings=LARGE)
    right = ids_module.SeriesIds.remember

    def fail(self: ids_module.SeriesIds, learned: ids_module.LearnedIds) -> None:
        for base, new, _ in learned.buckets.values():
            base.ids.update(new)
        raise Interrupt

    place.write(one_each(hosts(2), 5))
    with monkeypatch.context() as patch, pytest.raises(Interrupt):
        patch.setattr(ids_module.SeriesIds, "remember", fail)
        place.write(one_each(hosts(4), 6))
    assert ids_module.SeriesIds.remember is right
    place.write(one_each(hosts(6), 7))
    assert place.machine.series_count(BUCKET) == 6
    assert len(place.select()) == 12
    place.close()


# -- reading


def test_the_order_of_arrival_of_distinct_times_does_not_matter() -> None:
    rows = [(some, time * 31_000_000, time) for some in hosts(4) for time in range(40)]
    found = []
    for seed in range(3):
        shuffled = list(rows)
        random.Random(seed).shuffle(shuffled)
        place = SeriesPlace()
        for at in range(0, len(shuffled), 20):
            place.write(block(shuffled[at : at + 20]))
            if at % 60 == 0:
                place.flush()
        found.append(place.select())
        place.compact()
        assert place.select() == found[-1]
        place.close()
    assert found[0] == found[1] == found[2]


def test_a_snapshot_sees_one_moment_in_all_buckets(place: SeriesPlace) -> None:
    """The RFC's issue 82: no two readers with different snapshots, also across buckets."""
    far = OPTIONS.bucket_us * 3
    place.write(block([(labels("x"), 5, 1), (labels("x"), far, 1)]))
    state = place.machine.snapshot()
    (near, ids), (other, other_ids) = state.match((), TIME_MIN, TIME_MAX)
    reading = state.read(near, ids, TIME_MIN, TIME_MAX)
    place.write(block([(labels("x"), 5, 2), (labels("x"), far, 2)]))
    place.flush()
    place.write(SeriesDelete("{}"))
    place.compact()
    assert [column[2].tolist() for column in reading] == [[1]]
    assert [column[2].tolist() for column in state.read(other, other_ids, TIME_MIN, TIME_MAX)] == [[1]]
    state.close()
    with pytest.raises(Closed):
        state.match((), TIME_MIN, TIME_MAX)
    assert place.select() == {}


def test_a_sample_is_read_from_every_place_it_can_be(place: SeriesPlace) -> None:
    """Active, frozen, flushed and compacted: no cache holds a sample back (issue 82)."""
    for step in range(4):
        place.write(one_each(hosts(2), step))
        if step == 1:
            place.flush()
        if step == 2:
            place.tree.freeze()
        assert len(place.select()) == 2 * (step + 1)


def test_names_values_counts_and_metadata(place: SeriesPlace) -> None:
    place.write(
        block([(labels("cpu", host="a", dc="x"), 1, 1), (labels("cpu", host="b"), 1, 1), (labels("up"), 1, 1)]),
        MetricMetadata("cpu", "gauge", "s", "load"),
    )
    place.flush()
    place.write(block([(labels("up", zone="1"), OPTIONS.bucket_us, 1)]), MetricMetadata("cpu", "counter"))
    state = place.machine.snapshot()
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


def test_labels_of_many_ids(place: SeriesPlace) -> None:
    some = hosts(500)
    place.write(one_each(some, 5))
    state = place.machine.snapshot()
    ids = np.arange(1, 501, dtype=np.uint32)
    assert list(map(labels_module.decode_labels, state.labels_of(BUCKET, ids))) == some
    assert state.labels_of(BUCKET, ids[::90]) == state.labels_of(BUCKET, ids)[::90]
    with pytest.raises(Exception, match="has no labels"):
        state.labels_of(BUCKET, np.array([501], np.uint32))


def test_reading_yields_columns_of_bounded_size(place: SeriesPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    import penstock.series.reading as reading_module

    monkeypatch.setattr(reading_module, "COLUMN_SAMPLES", 100)
    monkeypatch.setattr(reading_module, "READ_SAMPLES", 150)
    for step in range(10):
        place.write(one_each(hosts(64), step))
        if step % 4 == 3:
            place.flush()
    state = place.machine.snapshot()
    columns = list(state.read(BUCKET, np.arange(1, 65, dtype=np.uint32), TIME_MIN, TIME_MAX))
    assert sum(len(column[0]) for column in columns) == 640
    assert max(len(column[0]) for column in columns) <= 100
    assert len(select(state)) == 640


def bytes_read(place: SeriesPlace, selector: str, monkeypatch: pytest.MonkeyPatch) -> int:
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
        assert len(place.select(selector)) == 20
    assert columns is Sstable.columns
    return sum(read)


def test_the_cost_of_a_select_by_label_does_not_depend_on_other_series(monkeypatch: pytest.MonkeyPatch) -> None:
    cost = []
    for others in (20, 2_000):
        place = SeriesPlace(settings=LARGE)
        place.write(one_each(hosts(20, "wanted"), 5))
        place.write(one_each(hosts(others, "other"), 5))
        place.flush()
        place.reopen()
        cost.append(bytes_read(place, 'wanted{host=~"h.+"}' if not others else '{__name__="wanted"}', monkeypatch))
        place.close()
    assert cost[1] <= 1.5 * cost[0]


def test_opening_reads_no_series(monkeypatch: pytest.MonkeyPatch) -> None:
    place = SeriesPlace(settings=LARGE)
    place.write(one_each(hosts(500), 5))
    place.flush()
    opened: list[int] = []
    right = Sstable._open_batch

    def open_batch(self: Sstable, number: int) -> object:
        opened.append(number)
        return right(self, number)

    monkeypatch.setattr(Sstable, "_open_batch", open_batch)
    place.reopen()
    assert opened == []
    place.write(one_each(hosts(1), 6))
    assert opened
    place.close()


def test_descriptor_and_statistics(place: SeriesPlace) -> None:
    machine = place.machine
    assert (machine.applied, machine.stored) == (0, 0)
    place.write(one_each(hosts(1), 5))
    assert machine.memory_bytes() > 0
    machine.store_now()
    assert (machine.applied, machine.stored) == (1, 1)
    state = machine.snapshot()
    assert machine.is_read()
    assert state.lsn == 1
    state.close()
    assert not machine.is_read()
    assert DESCRIPTOR.kind == "series"


def test_deleting_and_writing_again_in_one_record(place: SeriesPlace) -> None:
    some = labels("x")
    place.write(block([(some, 5, 1), (some, 6, 1)]))
    place.write(SeriesDelete("x"), block([(some, 5, 2)]))
    assert place.select() == {(some, 5): 2}
    place.flush()
    place.write(block([(some, 7, 3)]), SeriesDelete("x", 7, 8))
    assert place.select() == {(some, 5): 2}
    assert index.last_id(place.tree.view, BUCKET) == 1


def test_files_of_a_shard_can_be_inspected(place: SeriesPlace) -> None:
    place.write(one_each(hosts(3), 5))
    place.flush()
    (name,) = (name for name in place.disk.listdir("/store/tables/1") if name.endswith(".sst"))
    kinds = statistics(f"/store/tables/1/{name}", fs=place.disk).rows_by_kind
    assert kinds == {"put": 7, "merge series_ids": 4, "merge series_samples": 1}
