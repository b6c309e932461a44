"""Random writes, deletes, filters, snapshots, training and reopening of a vector shard, against a dict."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import initialize, invariant, rule, run_state_machine_as_test
from maintenance_rules import MaintenanceRules
from vector_under_test import (
    DIMENSIONS,
    VectorModel,
    VectorUnderTest,
    check_nearest,
    contents,
    deletes,
    nearest,
    upserts,
)

from penstock.errors import CorruptionError
from penstock.kinds import ALL_LATER
from penstock.vector import live
from penstock.vector.columns import RecordCache
from penstock.vector.draft import VectorDraft
from penstock.vector.loaded import IndexView, LoadedIndex
from penstock.vector.options import VectorOptions
from penstock.vector.reading import VectorState
from penstock.vector.section import IndexChange, VectorSection

NAMES = st.sampled_from(["a", "b", "c", "d", "e", "ä"])
# Few values, so that vectors are often equal and distances tie; none is zero, which cosine refuses.
VECTORS = st.tuples(*[st.sampled_from([1.0, -2.0, 0.5])] * DIMENSIONS)
ATTRIBUTES = st.sampled_from([{}, {"n": 1}, {"n": 2}, {"n": 1, "text": "x"}, {"text": "y", "flag": True}])
RECORDS = st.dictionaries(NAMES, st.tuples(VECTORS, ATTRIBUTES), min_size=1, max_size=5)
WHERE = st.sampled_from([None, {"n": 1}, {"text": "x"}, {"flag": True}])


class VectorShardMachine(MaintenanceRules):
    """The shard and the dict."""

    shard: VectorUnderTest

    @initialize(metric=st.sampled_from(["euclidean", "dot", "cosine"]))
    def begin(self, metric: Any) -> None:
        self.shard = VectorUnderTest(options=VectorOptions(dimensions=DIMENSIONS, metric=metric))
        self.model = VectorModel(metric)
        self.snapshots: list[tuple[VectorState, VectorModel]] = []

    def teardown(self) -> None:
        if hasattr(self, "shard"):
            for state, _ in self.snapshots:
                state.close()
            self.shard.close()

    def _write(self, *parts: Any) -> None:
        self.shard.write(*parts)
        for part in parts:
            self.model.add(part)

    @rule(rows=RECORDS)
    def upsert(self, rows: Any) -> None:
        self._write(upserts(rows))

    @rule(rows=RECORDS, deleted=st.lists(NAMES, max_size=3), again=RECORDS)
    def write_much(self, rows: Any, deleted: list[str], again: Any) -> None:
        self._write(upserts(rows), deletes(*deleted), upserts(again))

    @rule(deleted=st.lists(NAMES, min_size=1, max_size=3))
    def delete(self, deleted: list[str]) -> None:
        self._write(deletes(*deleted))

    @rule()
    def index_step(self) -> None:
        if self.model.records:
            self.shard.write(self.shard.step())

    @rule()
    def drop_index(self) -> None:
        self.shard.write(IndexChange(generation=0, use=True))

    @rule()
    def refresh(self) -> None:
        self.shard.machine.live.refresh()

    @rule()
    def reopen(self) -> None:
        for state, _ in self.snapshots:
            state.close()
        self.snapshots = []
        self.shard.reopen()

    @rule()
    def take_snapshot(self) -> None:
        if len(self.snapshots) < 3:
            self.snapshots.append((self.shard.machine.snapshot(), self.model.copy()))

    @rule(query=VECTORS, k=st.integers(1, 8), where=WHERE, exact=st.booleans())
    def search(self, query: Any, k: int, where: Any, exact: bool) -> None:
        for state, model in [*self.snapshots, (self.shard.machine.snapshot(), self.model)]:
            hits = nearest(state, list(query), k, where=where, exact=exact)
            expected = model.distances(list(query), where)
            if exact:
                check_nearest(hits, expected, k)
            else:  # by the index, which may miss some: what it finds must be there, once, with its distance
                assert len({name for name, _ in hits}) == len(hits) <= len(expected)
                distances = [expected[name] for name, _ in hits]
                np.testing.assert_allclose([d for _, d in hits], distances, rtol=1e-4, atol=1e-3)
            if model is self.model:
                state.close()

    @rule(query=VECTORS, k=st.integers(1, 8))
    def search_live(self, query: Any, k: int) -> None:
        machine = self.shard.machine
        distances, ids = machine.live.load().search(np.array([query], np.float32), k, exact=True)
        hits = [
            (machine.live.cache.record(number, machine.tree.view.get), distance)
            for number, distance in zip(ids[0].tolist(), distances[0].tolist(), strict=True)
            if number >= 0
        ]
        named = [(record[0], distance) for record, distance in hits if record is not None]
        check_nearest(named, self.model.distances(list(query)), k)

    @rule(query=VECTORS, rows=RECORDS, deleted=st.lists(NAMES, max_size=2), where=WHERE)
    def overlay(self, query: Any, rows: Any, deleted: list[str], where: Any) -> None:
        """Writes that are not applied yet, over a snapshot."""
        parts = upserts(rows), deletes(*deleted)
        state, model = self.shard.machine.snapshot(), self.model.copy()
        for part in parts:
            model.add(part)
        over = self.shard.machine.overlay(state, [VectorSection(*parts)], 0)
        check_nearest(nearest(over, list(query), 4, where=where), model.distances(list(query), where), 4)
        assert contents(over) == model.records
        assert state.lsn < ALL_LATER
        state.close()

    @invariant()
    def same_contents(self) -> None:
        if not hasattr(self, "shard"):
            return
        state = self.shard.machine.snapshot()
        assert contents(state) == self.model.records
        assert state.count == len(self.model.records)
        for name in ("a", "ä", "nobody"):
            assert (self.shard.machine.get(name.encode()) is not None) == (name in self.model.records)
        state.close()
        for old, model in self.snapshots:
            assert contents(old) == model.records


TestVectorShard = VectorShardMachine.TestCase
TestVectorShard.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)


@pytest.mark.campaign
def test_many_more_runs() -> None:
    run_state_machine_as_test(
        VectorShardMachine, settings=settings(max_examples=2_000, stateful_step_count=60, deadline=None)
    )


# -- seeded bugs


def removed_stays_in_the_kernel(patch: pytest.MonkeyPatch) -> None:
    right = LoadedIndex.take_in

    def take_in(self: LoadedIndex, draft: VectorDraft) -> None:
        draft.removed.clear()
        right(self, draft)

    patch.setattr(LoadedIndex, "take_in", take_in)


def snapshots_see_later_vectors(patch: pytest.MonkeyPatch) -> None:
    def of(loaded: LoadedIndex) -> IndexView:
        return IndexView(loaded.index, loaded.index.pin(), 1 << 60, loaded.index.removed)

    patch.setattr(IndexView, "of", of)


def attributes_of_the_first_look(patch: pytest.MonkeyPatch) -> None:
    right = RecordCache.up_to

    def up_to(self: RecordCache, *arguments: Any) -> Any:
        return self.columns if self.columns is not None else right(self, *arguments)

    patch.setattr(RecordCache, "up_to", up_to)


def overlay_shows_what_it_replaces(patch: pytest.MonkeyPatch) -> None:
    right = VectorState.under

    def under(self: VectorState, draft: VectorDraft, time_us: int) -> VectorState:
        state = right(self, draft, time_us)
        draft.removed.clear()
        return state

    patch.setattr(VectorState, "under", under)


def test_a_snapshot_does_not_see_later_vectors() -> None:
    """Without a filter, which would hide them; with the seeded bug it does."""

    def later_vectors_are_hidden() -> None:
        shard = VectorUnderTest()
        shard.write(upserts({"a": ((1.0, 2.0, 3.0), {})}))
        shard.machine.live.load()
        state = shard.machine.snapshot()
        shard.write(upserts({"b": ((1.0, 2.0, 3.0), {})}))
        try:
            assert [name for name, _ in nearest(state, [1.0, 2.0, 3.0], 5)] == ["a"]
        finally:
            state.close()
            shard.close()

    later_vectors_are_hidden()
    with pytest.MonkeyPatch.context() as patch:
        snapshots_see_later_vectors(patch)
        with pytest.raises(CorruptionError, match="has no record"):
            later_vectors_are_hidden()


@pytest.mark.parametrize(
    "seed_bug",
    [
        removed_stays_in_the_kernel,
        attributes_of_the_first_look,
        overlay_shows_what_it_replaces,
    ],
)
def test_seeded_bug_is_caught(seed_bug: Callable[[pytest.MonkeyPatch], None]) -> None:
    quick = settings(
        max_examples=200, stateful_step_count=25, deadline=None, database=None, derandomize=True,
        phases=[Phase.generate], suppress_health_check=list(HealthCheck), report_multiple_bugs=False,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(live, "COLD_QUERIES", 0)  # most searches by a kernel: the bugs are there
        seed_bug(patch)
        with pytest.raises(Exception):  # noqa: B017 - a wrong answer, or an error that it leads to
            run_state_machine_as_test(VectorShardMachine, settings=quick)
