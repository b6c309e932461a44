"""A series shard against every crash, crashes in recovery, and faults; with seeded bugs that must be caught."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from series_scenario import SeriesScenario
from series_under_test import Contents, SeriesUnderTest
from shared import SomeRecoveries, stored_too_far
from test_series_changes import changes_of, follow, in_any_order

import penstock
import penstock.testing.disk_files as disk_module
from penstock.lsm.maintenance import Maintenance
from penstock.lsm.memtable import Memtable, Readable
from penstock.series.keys import DICTIONARY, FORWARD
from penstock.series.memtable import SeriesMemtable
from penstock.series.options import SeriesOptions
from penstock.testing import Faults, History, SimulatedDisk, Violation, explore
from penstock.testing.crashes import absent

FED = SeriesOptions(bucket_s=300, changes=penstock.ChangeOptions())
STEPS = ("fsync .sst", "rename .sst", "rename .idx", "fsync_dir /tables/", "commit /manifest", "unlink .sst")


WORK = ("flush", "compaction", "collection")
PARTS = ("SeriesDelete replayed", "SeriesDelete stored", "BucketTrim replayed", "BucketTrim stored")


def crashes() -> None:
    scenario = SeriesScenario()
    report = explore(scenario, modes=("strict",), depth=1)
    assert report.missing(*STEPS) == []
    assert scenario.missing(*WORK, *PARTS) == []
    assert report.crashes > 20  # distinct states of the disk; the steps above are what counts


def test_every_crash_of_a_series_shard() -> None:
    crashes()


class ShortSeries(SeriesScenario):
    """Two flushes and a compaction, for what is tried many times over."""

    records, flush_every, compact_every = 2, 1, 1


def test_crashes_in_recovery() -> None:
    scenario = ShortSeries()
    report = explore(SomeRecoveries(scenario, 7), modes=("strict",), recovery_modes=("strict",))
    assert report.missing_in_recovery("rename .sst", "commit /manifest", "unlink .sst") == []
    assert scenario.missing(*WORK) == []


def test_faults_crossed_with_crashes() -> None:
    faults, scenario = (
        Faults(kinds=("eio",), operations=("pwrite", "fsync", "commit"), every=4, images_every=29),
        ShortSeries(),
    )
    report = explore(scenario, modes=("strict",), depth=1, faults=faults)
    assert absent(report.faulted, "pwrite .sst", "commit /manifest") == []
    assert scenario.missing(*WORK) == []


@pytest.mark.campaign
@pytest.mark.timeout(7200)
def test_every_fault_and_every_crash_in_recovery() -> None:
    explore(SeriesScenario(), modes=("strict", "torn", "kept"))
    explore(SeriesScenario(), modes=("strict", "kept"), depth=1, faults=Faults(images_every=5))
    explore(FedSeries(), modes=("strict", "torn", "kept", "restart"), depth=1)


# -- seeded bugs


def dictionary_in_the_next_file(patch: pytest.MonkeyPatch) -> None:
    """The RFC's issue 95: samples reach a file before the series they belong to."""
    right = SeriesMemtable.to_flush

    def to_flush(self: SeriesMemtable, files: Readable) -> Memtable:
        rows = right(self, files)
        for key in [key for key in rows.rows if key[4] in (DICTIONARY, FORWARD)]:
            del rows.rows[key]
        return rows

    patch.setattr(SeriesMemtable, "to_flush", to_flush)


def samples_left_in_memory(patch: pytest.MonkeyPatch) -> None:
    """The RFC's issue 82: a memtable is dropped with samples that no file has."""
    patch.setattr(SeriesMemtable, "to_flush", lambda self, files: self)


def table_not_synced(patch: pytest.MonkeyPatch) -> None:
    fsync = disk_module.SimulatedFile.fsync
    patch.setattr(disk_module.SimulatedFile, "fsync", lambda f: None if ".sst" in f.path else fsync(f))


@pytest.mark.parametrize(
    "seed_bug", [dictionary_in_the_next_file, samples_left_in_memory, table_not_synced, stored_too_far]
)
def test_seeded_bug_is_caught(seed_bug: Callable[[pytest.MonkeyPatch], None]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        seed_bug(patch)
        with pytest.raises(Violation):
            crashes()


# -- the change feed


class FedSeries(SeriesScenario):
    """A shard with a change feed: it leads to what the shard holds, and stays what a reader has seen."""

    def make(self, disk: SimulatedDisk) -> SeriesUnderTest:
        return SeriesUnderTest(disk, options=FED, grace_s=0)

    def check(self, shard: SeriesUnderTest, history: History) -> None:
        super().check(shard, history)
        feed, rows = changes_of(shard), Contents()
        for _, changes in feed:
            try:
                rows = follow(rows, changes)
            except KeyError as error:
                raise Violation(f"the feed deletes what it has not inserted: {error}") from error
        if rows != shard.select():
            raise Violation("the feed leads to other samples than the shard holds")
        earlier_feeds = [commits for word, *commits in history.events if word == "fed"]
        if earlier_feeds and in_any_order(feed)[: len(earlier_feeds[-1])] != earlier_feeds[-1]:
            raise Violation("the feed was another")
        history.note("fed", *in_any_order(feed))


def test_the_feed_of_a_series_shard_after_crashes() -> None:
    scenario = FedSeries()
    report = explore(scenario, modes=("strict", "torn", "kept", "restart"), depth=1, every=25)
    assert report.missing(*STEPS) == []
    assert scenario.missing(*WORK, *PARTS) == []


def test_a_feed_stored_after_its_shard_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Maintenance, "_store_within_job", lambda self, tree: None)
    with pytest.raises((Violation, AssertionError)):
        explore(FedSeries(), modes=("strict",), depth=1)
