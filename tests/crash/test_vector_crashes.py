"""A vector shard against every crash, crashes in recovery, and faults; with seeded bugs that must be caught."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from shared import SomeRecoveries, stored_too_far
from vector_scenario import VectorScenario, ids_of, record, replayed
from vector_under_test import VectorUnderTest

from penstock.lsm.memtable import Edit
from penstock.lsm.rows import Row
from penstock.testing import Faults, Violation, explore
from penstock.testing.crashes import absent
from penstock.vector.draft import VectorDraft
from penstock.vector.keys import F32, RECORD, SEQUENCE, U64, VECTOR
from penstock.vector.section import IndexChange

STEPS = ("fsync .sst", "rename .sst", "rename .idx", "fsync_dir /tables/", "commit /manifest", "unlink .sst")


WORK = ("flush", "compaction", "collection")
PARTS = tuple(
    f"{part} {outcome}" for part in ("Upserts", "Deletes", "IndexChange") for outcome in ("replayed", "stored")
)


def crashes() -> None:
    scenario = VectorScenario()
    report = explore(scenario, modes=("strict",), depth=1)
    assert report.missing(*STEPS) == []
    assert scenario.missing(*WORK, *PARTS) == []
    assert report.crashes > 20  # distinct states of the disk; the steps above are what counts


def test_every_crash_of_a_vector_shard() -> None:
    crashes()


class ShortVectors(VectorScenario):
    """Two flushes and a compaction, for what is tried many times over."""

    records, flush_every, compact_every, indexed_from = 2, 1, 1, 1


def test_crashes_in_recovery() -> None:
    scenario = ShortVectors()
    report = explore(SomeRecoveries(scenario, 7), modes=("strict",), recovery_modes=("strict",))
    assert report.missing_in_recovery("rename .sst", "commit /manifest", "unlink .sst") == []
    assert scenario.missing(*WORK) == []


def test_faults_crossed_with_crashes() -> None:
    faults = Faults(kinds=("eio",), operations=("pwrite", "fsync", "commit"), every=4, images_every=29)
    scenario = ShortVectors()
    report = explore(scenario, modes=("strict",), depth=1, faults=faults)
    assert absent(report.faulted, "pwrite .sst", "commit /manifest") == []
    assert scenario.missing(*WORK) == []


@pytest.mark.campaign
@pytest.mark.timeout(7200)
def test_every_fault_and_every_crash_in_recovery() -> None:
    explore(VectorScenario(), modes=("strict", "torn", "kept"))
    explore(VectorScenario(), modes=("strict", "kept"), depth=1, faults=Faults(images_every=5))


def test_two_replays_give_the_same_rows() -> None:
    first = VectorUnderTest()
    for number in range(1, 12):
        first.write(*record(number))
        if number > 2:
            first.write(first.step())
    payloads = [payload for _, _, payload in first.records]
    second = replayed(payloads)
    assert dict(second.tree.scan()) == dict(first.tree.scan())
    assert ids_of(second) == ids_of(first)


# -- seeded bugs


def sequence_in_the_next_edit(patch: pytest.MonkeyPatch) -> None:
    """The next internal id is stored one record late: a crash would give the same ids again."""
    right, waiting = VectorDraft.edit, list[Row]()

    def edit(self: VectorDraft, time_us: int) -> Edit:
        prepared = right(self, time_us)
        sequence = prepared.rows.get(SEQUENCE)
        if sequence is not None:
            rows = dict(prepared.rows)
            del rows[SEQUENCE]
            if waiting:
                rows[SEQUENCE] = waiting.pop()
            waiting.append(sequence)
            prepared = Edit(
                lsn=prepared.lsn, time_us=prepared.time_us, rows=rows, puts=prepared.puts, ranges=prepared.ranges
            )
        return prepared

    patch.setattr(VectorDraft, "edit", edit)


def record_left_behind(patch: pytest.MonkeyPatch) -> None:
    """The record of a deleted vector stays."""
    right = VectorDraft._remove

    def remove(self: VectorDraft, numbers: U64) -> None:
        right(self, numbers)
        for key in [key for key in self._dropped if key[:1] == RECORD]:
            del self._dropped[key]

    patch.setattr(VectorDraft, "_remove", remove)


def vector_left_behind(patch: pytest.MonkeyPatch) -> None:
    """The vector of a deleted record stays, and is found."""
    right = VectorDraft._remove

    def remove(self: VectorDraft, numbers: U64) -> None:
        right(self, numbers)
        for key in [key for key in self._dropped if key[:1] == VECTOR]:
            del self._dropped[key]

    patch.setattr(VectorDraft, "_remove", remove)


def deleted_ids_forgotten(patch: pytest.MonkeyPatch) -> None:
    """An upsert does not say that its old internal id is deleted."""
    right = VectorDraft._remove

    def remove(self: VectorDraft, numbers: U64) -> None:
        before = self._deleted.copy()
        right(self, numbers)
        self._deleted = before

    patch.setattr(VectorDraft, "_remove", remove)


def not_assigned_while_building(patch: pytest.MonkeyPatch) -> None:
    """Vectors that are written while a generation is built are in none of its lists."""
    right = VectorDraft._assign

    def assign(self: VectorDraft, generation: int, numbers: U64, vectors: F32) -> Any:
        return None if generation == self.generations.building else right(self, generation, numbers, vectors)

    patch.setattr(VectorDraft, "_assign", assign)


def all_assigned_at_once(patch: pytest.MonkeyPatch) -> None:
    """A generation is used before its older vectors are in lists."""
    right = VectorUnderTest.step

    def step(self: VectorUnderTest) -> IndexChange:
        change = right(self)
        return IndexChange(generation=change.generation, use=True, probes=1) if change.assigned else change

    patch.setattr(VectorUnderTest, "step", step)


@pytest.mark.parametrize(
    "seed_bug",
    [
        sequence_in_the_next_edit,
        record_left_behind,
        vector_left_behind,
        deleted_ids_forgotten,
        not_assigned_while_building,
        all_assigned_at_once,
        stored_too_far,
    ],
)
def test_seeded_bug_is_caught(seed_bug: Callable[[pytest.MonkeyPatch], None]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        seed_bug(patch)
        with pytest.raises(Violation):
            crashes()
