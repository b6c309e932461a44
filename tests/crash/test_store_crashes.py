"""The store against every crash, crashes in recovery and faults; with seeded bugs that must be caught."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
from shared import Patch, SomeRecoveries, fsync_retried, seeded
from store_scenario import Encrypted, Short, StoreScenario

from penstock.journal.consensus import Alone
from penstock.journal.partitions import PartitionId
from penstock.journal.record import JournalRecord, Lsn
from penstock.log import Log
from penstock.lsm.collection import Collector
from penstock.partition.checkpoint import Checkpoint, CheckpointReport
from penstock.partition.dispatcher import Dispatcher
from penstock.partition.ledger import Ledger, _LedgerChanges
from penstock.partition.ledger_records import Verdict
from penstock.partition.machine import Entry
from penstock.partition.spill import SpillLog
from penstock.store.dropped import DroppedShards
from penstock.store.keys import StoreKeys
from penstock.testing import Faults, History, SimulatedDisk, Violation, explore
from penstock.testing.crashes import CrashReport, absent, steps

pytestmark = pytest.mark.usefixtures("quiet")

# A record, a sealed segment, a checkpoint that drops one, a spill, a flush, a commit of the manifest.
SHORT_STEPS = (
    "fdatasync /journal/",
    "truncate /journal/",
    "rename /journal/",
    "unlink /journal/",
    "rename -log/",
    "rename .sst",
    "commit /manifest",
)
RECOVERY_STEPS = ("rename /journal/", "unlink /journal/", "commit /manifest", "rename .sst")
STEPS = (
    *SHORT_STEPS,
    "unlink .sst",
    "rename -gone",
    "rmdir /tables/",
)  # compacted files are collected; a dropped table is removed


def test_every_crash() -> None:
    report = explore(StoreScenario(), modes=("strict",), depth=1)
    assert report.missing(*STEPS) == []
    assert report.crashes > 150
    assert explore(StoreScenario(), modes=("torn",), depth=1, every=3).crashes > 80


def no_checkpoints(patch: Patch) -> None:
    patch.setattr(Checkpoint, "run", lambda self, *, everything=False: CheckpointReport(0, 0, 0))


def no_collection(patch: Patch) -> None:
    patch.setattr(Collector, "collect", lambda self, *, closing=False: 0)


def no_drops(patch: Patch) -> None:
    patch.setattr(DroppedShards, "remove", lambda self, *_: True)


@pytest.mark.parametrize(
    ("loss", "missing"),
    [
        (no_checkpoints, ["unlink /journal/", "rename -log/"]),
        (no_collection, ["unlink .sst"]),
        (no_drops, ["rmdir /tables/"]),
    ],
)
def test_a_step_that_is_no_longer_reached_is_noticed(
    loss: Callable[[Patch], None], missing: list[str], monkeypatch: Patch
) -> None:
    loss(monkeypatch)
    disk = SimulatedDisk()
    disk.on_image = lambda: 0
    StoreScenario().run(disk, History())
    assert set(missing) <= set(absent(steps(disk.images), *STEPS))


@pytest.mark.parametrize("scenario", [StoreScenario(), Short()])
def test_the_scenarios_spill_and_drop_segments(scenario: StoreScenario, monkeypatch: Patch) -> None:
    reports: list[CheckpointReport] = []
    run = Checkpoint.run

    def noted(self: Checkpoint, *, everything: bool = False) -> CheckpointReport:
        reports.append(run(self, everything=everything))
        return reports[-1]

    monkeypatch.setattr(Checkpoint, "run", noted)
    scenario.run(SimulatedDisk(), History())
    assert sum(report.spilled for report in reports) > 0
    assert sum(report.segments_dropped for report in reports) > 0


def short_crashes() -> None:
    explore(Short(), depth=1)


def test_every_crash_of_the_process_or_with_all_bytes_kept() -> None:
    report = explore(Short(), modes=("kept", "restart"), depth=1)
    assert report.missing(*SHORT_STEPS) == []


def test_crashes_of_a_store_with_encrypted_tables() -> None:
    report = explore(Encrypted(), modes=("strict",), depth=1, every=2)
    assert report.missing("fdatasync /journal/", "rename -log/", "rename .sst") == []


def test_sections_that_are_not_opened_are_missed(monkeypatch: Patch) -> None:
    """The control: what was written lives in this process, so only a replay shows that it cannot be read."""
    monkeypatch.setattr(StoreKeys, "opener", lambda self, table_id: None)
    with pytest.raises(Violation):
        explore(Encrypted(), modes=("strict",), depth=1, every=2)


@pytest.mark.campaign
@pytest.mark.timeout(7200)
def test_every_crash_and_fault_of_a_store_with_encrypted_tables() -> None:
    explore(Encrypted())
    explore(Encrypted(), modes=("strict", "kept"), depth=1, faults=Faults(images_every=9))


def test_crashes_in_recovery() -> None:
    report = explore(SomeRecoveries(Short(), 11), modes=("strict",), recovery_modes=("strict",))
    assert report.crashes_in_recovery > 100
    assert report.missing_in_recovery(*RECOVERY_STEPS) == []


def test_faults_crossed_with_crashes() -> None:
    faults = Faults(kinds=("eio", "enospc", "short"), every=151, images_every=83)
    report = explore(StoreScenario(), modes=("strict",), depth=1, faults=faults)
    assert report.faults > 20


def failed_syncs() -> CrashReport:
    faults = Faults(kinds=("eio",), operations=("fdatasync",), every=2, images_every=5)
    return explore(Short(), modes=("strict",), depth=1, faults=faults)


def test_failed_syncs() -> None:
    assert absent(failed_syncs().faulted, "fdatasync /journal/", "fdatasync -log/") == []


@pytest.mark.campaign
@pytest.mark.timeout(7200)
def test_every_fault_and_every_crash_in_recovery() -> None:
    explore(StoreScenario(), depth=1, torn_seeds=3)
    explore(Short())
    explore(StoreScenario(), modes=("strict", "kept"), depth=1, faults=Faults(images_every=9))


# -- seeded bugs


def acknowledged_before_the_fsync(patch: Patch) -> None:
    def unsynced(self: Alone, bodies: Sequence[bytes]) -> Lsn:
        self._log.synced = self._log.append(bodies)  # it believes so
        return Lsn(self._log.synced)

    patch.setattr(Alone, "propose", unsynced)


def verdicts_decided_anew(patch: Patch) -> None:
    def anew(self: Ledger, record: JournalRecord, lsn: int) -> tuple[Verdict, ...]:
        work = _LedgerChanges(self, record.time_us, lsn)
        return tuple(work.judge(group.condition) for group in record.groups)

    patch.setattr(Ledger, "verdicts", anew)


def journal_dropped_before_the_spill_is_synced(patch: Patch) -> None:
    append = SpillLog.append

    def unsynced(self: SpillLog, entries: Sequence[Entry]) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(Log, "sync", lambda log: log.last)
            append(self, entries)

    patch.setattr(SpillLog, "append", unsynced)


def journal_dropped_without_a_spill(patch: Patch) -> None:
    def pretend(self: SpillLog, entries: Sequence[Entry]) -> None:
        self.upto = entries[-1].lsn

    patch.setattr(SpillLog, "append", pretend)


def other_partition_forgotten(patch: Patch) -> None:
    """A group is replayed for the first of its partitions only."""
    entries = Dispatcher._entries

    def first(
        self: Dispatcher, record: JournalRecord, lsn: int, verdicts: Sequence[Verdict], decoded: Any
    ) -> Mapping[PartitionId, Entry]:
        by_partition = entries(self, record, lsn, verdicts, decoded)
        return by_partition if decoded is not None else dict(list(by_partition.items())[:1])

    patch.setattr(Dispatcher, "_entries", first)


def replayed_twice(patch: Patch) -> None:
    """What a partition has spilled is applied again from the journal, where it still is."""

    def entries(self: SpillLog, after: int) -> Iterator[Entry]:
        for entry in original(self, after):
            yield Entry(entry.lsn, entry.time_us, entry.sections * 2)

    original = SpillLog.entries
    patch.setattr(SpillLog, "entries", entries)


def tokens_forgotten_at_reopening(patch: Patch) -> None:
    """A record that the ledger judged, but had not stored, is replayed without its tokens."""
    judge = _LedgerChanges.judge
    patch.setattr(
        _LedgerChanges, "judge", lambda self, condition: Verdict.ACCEPTED if self._lsn % 2 else judge(self, condition)
    )


@pytest.mark.parametrize(
    ("seed_bug", "suite"),
    [
        (acknowledged_before_the_fsync, short_crashes),
        (verdicts_decided_anew, short_crashes),
        (journal_dropped_before_the_spill_is_synced, short_crashes),
        (journal_dropped_without_a_spill, short_crashes),
        (fsync_retried, failed_syncs),
        (other_partition_forgotten, short_crashes),
        (replayed_twice, short_crashes),
        (tokens_forgotten_at_reopening, short_crashes),
    ],
)
def test_seeded_bug_is_caught(seed_bug: Callable[[Patch], None], suite: Callable[[], object]) -> None:
    with seeded(seed_bug), pytest.raises(Violation) as caught:
        suite()
    assert "recovery failed: A" not in str(caught.value)  # AttributeError and the like: the bug itself is broken
