"""A series shard against a dict: writes, deletes, retention; flush, compaction, snapshots and reopening between."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import initialize, invariant, precondition, rule, run_state_machine_as_test
from maintenance_rules import MaintenanceRules
from series_under_test import Contents, SeriesModel, SeriesUnderTest, block, labels, listed, select

import penstock.series.blocks as blocks_module
import penstock.series.drafts as drafts_module
import penstock.series.ids as ids_module
import penstock.series.labels as labels_module
import penstock.series.memtable as memtable_module
import penstock.series.operators as operators_module
import penstock.series.reading as reading_module
import penstock.series.slices as slices_module
from penstock.lsm.operators import SERIES_SAMPLES
from penstock.series import index
from penstock.series.blocks import Block, encode
from penstock.series.keys import SAMPLES
from penstock.series.memtable import SeriesMemtable
from penstock.series.options import TIME_MAX, TIME_MIN
from penstock.series.reading import SeriesState
from penstock.series.samples import NO_TOMBSTONES, Samples, Tombstones
from penstock.series.section import BucketTrim, MetricMetadata, Part, SeriesDelete, SeriesSection

MINUTE = 60_000_000
SPECIAL = [0x7FF0000000000002, 0x7FF8000000000001, 0xFFF0000000000000, 0x8000000000000000, 0]
series = st.one_of(
    st.builds(labels, st.sampled_from(["cpu", "mem"]), host=st.sampled_from("abcd")),
    st.builds(labels, st.sampled_from(["cpu", "é"]), dc=st.sampled_from(["x", "y\0z"]), host=st.sampled_from("ab")),
    st.builds(labels, st.sampled_from(["cpu", "up"])),
)
times = st.one_of(st.integers(-8, 24), st.integers(-8, 24).map(lambda n: n * MINUTE))  # four to five buckets
values = st.one_of(st.sampled_from(SPECIAL), st.floats(allow_nan=False).map(lambda v: int(np.float64(v).view("u8"))))
samples = st.lists(st.tuples(series, times, values), min_size=1, max_size=12)
SELECTORS = [
    "{}", "cpu", '{host="a"}', '{host=~"a|b"}', '{host!="a"}', '{host!~"[ab]"}', '{dc=""}', '{dc!=""}', '{dc=~"y.*"}',
    '{__name__=~"c.+",host="b"}', '{host=~".*"}', '{nothing="x"}', 'cpu{dc!~"x"}',
]  # fmt: skip
selectors = st.sampled_from(SELECTORS)


@st.composite
def parts(draw: st.DrawFn) -> list[Part]:
    section_parts: list[Part] = []
    for kind in draw(st.lists(st.sampled_from("ssssssddtm"), min_size=1, max_size=3)):
        if kind == "s":
            section_parts.append(block(draw(samples)))
        elif kind == "d":
            start = draw(times)
            length = draw(st.sampled_from([1, MINUTE, 9 * MINUTE, 60 * MINUTE]))
            section_parts.append(SeriesDelete(draw(selectors), start, start + length))
        elif kind == "t":
            section_parts.append(BucketTrim(draw(st.sampled_from([-5, 0, 5])) * MINUTE))
        else:
            section_parts.append(
                MetricMetadata(draw(st.sampled_from(["cpu", "mem"])), "gauge", "s", draw(st.text("ab")))
            )
    return section_parts


def make_small(patches: pytest.MonkeyPatch, *, collide: bool, forget: bool, divide: bool) -> None:
    """Make limits so small that a few samples reach them."""
    patches.setattr(blocks_module, "CHUNK_SAMPLES_MIN", 3)
    patches.setattr(blocks_module, "CHUNK_SAMPLES_MAX", 7)
    patches.setattr(reading_module, "READ_SAMPLES", 5)
    patches.setattr(reading_module, "COLUMN_SAMPLES", 4)
    for module in (slices_module, reading_module):
        patches.setattr(module, "GROUP_SHIFT", 1)
    if divide:
        patches.setattr(slices_module, "SLICE_BYTES", 400)
    if collide:
        patches.setattr(labels_module, "digest", lambda data: bytes(16))
    if forget:
        patches.setattr(ids_module, "SERIES_REMEMBERED_MAX", 2)
        patches.setattr(ids_module, "TABLES_REMEMBERED_MAX", 1)


class SeriesMachineRules(MaintenanceRules):
    shard: SeriesUnderTest

    @initialize(collide=st.booleans(), forget=st.booleans(), divide=st.booleans())
    def start(self, collide: bool, forget: bool, divide: bool) -> None:
        self.patches = pytest.MonkeyPatch()
        make_small(self.patches, collide=collide, forget=forget, divide=divide)
        self.shard, self.model = SeriesUnderTest(), SeriesModel()
        self.snapshots: list[tuple[SeriesState, Contents]] = []

    def teardown(self) -> None:
        if hasattr(self, "shard"):
            self.patches.undo()
            self.shard.close()

    @rule(some=parts())
    def write(self, some: list[Part]) -> None:
        self.shard.write(*some)
        for part in some:
            self.model.add(part)

    @precondition(lambda self: len(self.snapshots) < 3)
    @rule()
    def snapshot(self) -> None:
        self.snapshots.append((self.shard.machine.snapshot(), dict(self.model.samples)))

    @precondition(lambda self: self.snapshots)
    @rule(data=st.data(), close=st.booleans())
    def read_snapshot(self, data: st.DataObject, close: bool) -> None:
        at = data.draw(st.integers(0, len(self.snapshots) - 1))
        state, expected = self.snapshots[at]
        assert select(state) == expected
        if close:
            state.close()
            del self.snapshots[at]

    @precondition(lambda self: not self.snapshots)
    @rule()
    def reopen(self) -> None:
        before = self.shard.index_rows()
        self.shard.reopen()
        assert self.shard.index_rows() == before, "a replay gave other ids"

    @rule(some=parts())
    def overlay(self, some: list[Part]) -> None:
        state, model = self.shard.machine.snapshot(), self.model.copy()
        for part in some:
            model.add(part)
        over = self.shard.machine.overlay(state, [SeriesSection(*some)], 0)
        assert select(over) == model.samples
        assert listed(over) == model.listed
        state.close()

    @rule(selector=selectors, start=times, length=st.sampled_from([0, 1, MINUTE, 10 * MINUTE]))
    def select(self, selector: str, start: int, length: int) -> None:
        assert self.shard.select(selector, start, start + length) == self.model.select(selector, start, start + length)

    @invariant()
    def all_is_there(self) -> None:
        if hasattr(self, "shard"):
            state = self.shard.machine.snapshot()
            assert select(state) == self.model.samples
            assert listed(state) == self.model.listed
            assert self.shard.counts() == Counter(bucket for bucket, _ in self.model.listed)
            assert {some.metric: some for some in state.metadata()} == self.model.metadata
            state.close()


TestSeries = SeriesMachineRules.TestCase
TestSeries.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)


@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_series_for_long() -> None:
    long = settings(max_examples=2_000, stateful_step_count=50, deadline=None)
    run_state_machine_as_test(SeriesMachineRules, settings=long)


# -- the same by chance alone: quicker, so that seeded bugs are found in little time


def chance_parts(chance: random.Random) -> list[Part]:
    some = [labels(m, host=h) for m in ("cpu", "mem") for h in "ab"] + [labels("cpu"), labels("up", dc="y")]

    def moment() -> int:
        return chance.choice([chance.randint(-8, 24), chance.randint(-8, 24) * MINUTE])

    section_parts: list[Part] = []
    for kind in chance.choices("sssdt", (6, 6, 6, 3, 1), k=chance.randint(1, 3)):
        if kind == "s":
            rows = [(chance.choice(some), moment(), chance.getrandbits(64)) for _ in range(chance.randint(1, 12))]
            section_parts.append(block(rows))
        elif kind == "d":
            start = moment()
            length = chance.choice([3, MINUTE, 9 * MINUTE, 30 * MINUTE])
            section_parts.append(SeriesDelete(chance.choice(SELECTORS), start, start + length))
        else:
            section_parts.append(BucketTrim(chance.choice([-5, 0, 5]) * MINUTE))
    return section_parts


def drive(seed: int) -> None:
    """Work of a shard by chance, compared with the model after each step."""
    chance = random.Random(seed)
    with pytest.MonkeyPatch.context() as patches:
        make_small(patches, collide=seed % 2 == 0, forget=seed % 3 == 0, divide=seed % 4 < 2)
        shard, model = SeriesUnderTest(), SeriesModel()
        for step in chance.choices("wwwffccnor", k=30):
            if step == "w":
                for part in (some := chance_parts(chance)):
                    model.add(part)
                shard.write(*some)
            elif step == "f":
                shard.flush()
            elif step == "c":
                shard.compact(everything=chance.random() < 0.5)
            elif step == "n":
                shard.tree.freeze()
            elif step == "o":
                state, later, some = shard.machine.snapshot(), model.copy(), chance_parts(chance)
                for part in some:
                    later.add(part)
                assert select(shard.machine.overlay(state, [SeriesSection(*some)], 0)) == later.samples
                state.close()
            else:
                before = shard.index_rows()
                shard.reopen()
                assert shard.index_rows() == before
            assert shard.select() == model.samples
            assert shard.listed() == model.listed
            assert shard.counts() == Counter(bucket for bucket, _ in model.listed)
            check_summaries(shard, chance.choice([0, 2, MINUTE, 5 * MINUTE]))
            selector, start = chance.choice(SELECTORS), chance.randint(-8, 24) * chance.choice([1, MINUTE])
            end = start + chance.choice([2, 5, MINUTE, 7 * MINUTE])
            assert shard.select(selector, start, end) == model.select(selector, start, end)
        shard.close()


def check_summaries(shard: SeriesUnderTest, step_us: int) -> None:
    """Samples and summaries of runs together count, and end, as the samples alone."""
    state = shard.machine.snapshot()
    for bucket, ids in state.match((), TIME_MIN, TIME_MAX):
        expected: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for columns in state.read(bucket, ids, TIME_MIN, TIME_MAX):
            for number, time, bits in zip(*(column.tolist() for column in columns), strict=True):
                expected.setdefault((number, time // step_us if step_us else 0), []).append((time, bits))
        actual: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        for columns, runs in state.read_summarized(bucket, ids, TIME_MIN, TIME_MAX, step_us):
            for number, time, bits in zip(*(column.tolist() for column in columns), strict=True):
                actual.setdefault((number, time // step_us if step_us else 0), []).append((time, bits, 1))
            rows = zip(runs.id.tolist(), runs.last_time.tolist(), runs.last.tolist(), runs.count.tolist(), strict=True)
            for number, time, bits, count in rows:
                actual.setdefault((int(number), int(time) // step_us if step_us else 0), []).append((time, bits, count))
        assert actual.keys() == expected.keys()
        for key, some in actual.items():
            assert sum(count for *_, count in some) == len(expected[key])
            assert max(some)[:2] == max(expected[key])
    state.close()


@pytest.mark.parametrize("seed", range(4))
def test_by_chance(seed: int) -> None:
    drive(seed)


# -- seeded bugs


def first_write_wins(patch: pytest.MonkeyPatch) -> None:
    """Of two samples with one time the older is kept."""
    right = operators_module.fold_columns

    def reversed_order(contents: object) -> tuple[Samples, Tombstones]:
        return right(reversed(list(contents)))  # type: ignore[call-overload]

    for module in (operators_module, memtable_module, reading_module, slices_module):
        patch.setattr(module, "fold_columns", reversed_order)


def tombstones_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A compaction above the bottom drops deletes of older samples."""
    right = encode
    patch.setattr(operators_module, "encode", lambda some, deleted: right(some, NO_TOMBSTONES))
    patch.setattr(slices_module, "encode", lambda some, deleted=None: right(some, NO_TOMBSTONES))


def fingerprint_is_identity(patch: pytest.MonkeyPatch) -> None:
    """Two series of one fingerprint are taken for one."""
    patch.setattr(
        drafts_module.RecordDraft,
        "_find",
        lambda self, bucket, stored, some: next(iter(index.dictionary_ids(stored)), 0),
    )


def memory_not_read(patch: pytest.MonkeyPatch) -> None:
    """A reader sees files only."""
    patch.setattr(SeriesState, "_memory", lambda self, bucket: [])


def remembered_after_trim(patch: pytest.MonkeyPatch) -> None:
    """Ids of a dropped bucket are used again without their labels."""
    right = ids_module.SeriesIds.remember

    def remember(self: ids_module.SeriesIds, learned: ids_module.LearnedIds) -> None:
        learned.trimmed = 0
        right(self, learned)

    patch.setattr(ids_module.SeriesIds, "remember", remember)


def chunk_by_chunk_times(patch: pytest.MonkeyPatch) -> None:
    """A run at the end of the range is read whole."""
    patch.setattr(Block, "between", lambda self, which, start, end: self.read(which))


def samples_of_dropped_buckets(patch: pytest.MonkeyPatch) -> None:
    """A range delete of a bucket does not reach the columns of a memtable."""
    patch.setattr(SeriesMemtable, "deleted_below", lambda self, key: 0)


def samples_doubled_by_a_merge(patch: pytest.MonkeyPatch) -> None:
    """The parts of the older memtable are lost when two small ones are merged."""
    right = SeriesMemtable.merge_newer

    def merge_newer(self: SeriesMemtable, newer: SeriesMemtable, now_us: int) -> None:
        self._parts = []
        right(self, newer, now_us)

    patch.setattr(SeriesMemtable, "merge_newer", merge_newer)


def division_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A divided slice is an operand, so that its older rows are read too."""
    right = slices_module.group_rows

    def group_rows(*args: object) -> object:
        return [(key, SERIES_SAMPLES if key[4] == SAMPLES else kind, value) for key, kind, value in right(*args)]  # type: ignore[arg-type]

    patch.setattr(memtable_module, "group_rows", group_rows)


def borders_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A tombstone reaches only the first of the slices it covers."""
    right = slices_module._clipped

    def clipped(contents: tuple[Samples, Tombstones], start: int, end: int) -> tuple[Samples, Tombstones]:
        samples, deleted = right(contents, start, end)
        return samples, deleted if start < -(1 << 62) else NO_TOMBSTONES

    patch.setattr(slices_module, "_clipped", clipped)


def refilled_series_stay_empty(patch: pytest.MonkeyPatch) -> None:
    """A series that gets samples after its deletion is still left out."""
    patch.setattr(drafts_module.RecordDraft, "_refill", lambda *_: None)


def empty_after_a_part(patch: pytest.MonkeyPatch) -> None:
    """A delete of a part of a bucket makes its series empty."""
    patch.setattr(drafts_module, "TIME_MIN", 1 << 62)
    patch.setattr(drafts_module, "TIME_MAX", -(1 << 62))


def overwritten_runs_are_summarized(patch: pytest.MonkeyPatch) -> None:
    """What a newer block or a delete touches is taken from the directory of the older one."""
    patch.setattr(reading_module._Part, "_touched", lambda *_: np.zeros(0, np.uint32))


@pytest.mark.parametrize(
    ("seed_bug", "seed"),
    [
        (refilled_series_stay_empty, 3),
        (empty_after_a_part, 1),
        (overwritten_runs_are_summarized, 0),
        (first_write_wins, 0),
        (tombstones_forgotten, 1),
        (fingerprint_is_identity, 0),
        (memory_not_read, 0),
        (remembered_after_trim, 8),
        (chunk_by_chunk_times, 0),
        (samples_of_dropped_buckets, 1),
        (samples_doubled_by_a_merge, 1),
        (division_forgotten, 8),
        (borders_forgotten, 8),
    ],
)
def test_seeded_bug_is_caught(seed_bug: Callable[[pytest.MonkeyPatch], None], seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        seed_bug(patch)
        with pytest.raises(Exception):  # noqa: B017 - a wrong answer, or an error that it leads to
            for each in (seed, *range(60)):  # `seed` finds it; others do if the work by chance changes
                drive(each)
