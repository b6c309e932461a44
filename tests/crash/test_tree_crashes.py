"""Flush and compaction against every crash, crashes in recovery, and faults; with seeded bugs that must be caught."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from shared import seeded
from tree_scenario import TreeScenario
from tree_under_test import TreeUnderTest

import penstock.lsm.catalog as catalog_module
import penstock.testing.disk_files as disk_module
from penstock.lsm.collection import Collector
from penstock.lsm.maintenance import Maintenance
from penstock.lsm.memtable import Memtable
from penstock.lsm.tree import Tree
from penstock.lsm.tree_files import TreeFiles
from penstock.lsm.tree_jobs import TreeJobs
from penstock.testing import Faults, History, SimulatedDisk, Violation, explore
from penstock.testing.crashes import absent, steps

# A flush or a merge gives a file its name, the manifest lists it, what it replaced is removed.
STEPS = (
    "fsync .sst",
    "rename .sst",
    "rename .idx",
    "fsync_dir /tables/",
    "commit /manifest",
    "unlink .sst",
    "unlink .idx",
)


def crashes() -> None:
    report = explore(TreeScenario(), modes=("strict", "torn", "kept"), depth=1)
    assert report.missing(*STEPS) == []
    assert report.crashes > 150


@pytest.mark.parametrize(
    ("part", "missing"), [((Maintenance, "flush"), "rename .sst"), ((Collector, "collect"), "unlink .sst")]
)
def test_a_step_that_is_no_longer_reached_is_noticed(
    part: tuple[type, str], missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*part, lambda *_: None)
    disk = SimulatedDisk()
    disk.on_image = lambda: 0
    TreeScenario().run(disk, History())
    assert missing in absent(steps(disk.images), *STEPS)


def test_every_crash_of_flush_and_compaction() -> None:
    crashes()


def test_crashes_in_recovery() -> None:
    report = explore(Short(), modes=("strict",), recovery_modes=("strict",))
    assert report.missing_in_recovery(*STEPS) == []


def test_faults_crossed_with_crashes() -> None:
    faults = Faults(kinds=("eio", "enospc", "short"), every=24, images_every=29)
    report = explore(TreeScenario(), modes=("strict",), depth=1, faults=faults)
    assert absent(report.faulted, "pwrite .sst", "fsync .sst", "rename .sst", "commit /manifest") == []


@pytest.mark.campaign
@pytest.mark.timeout(7200)
def test_every_fault_and_every_crash_in_recovery() -> None:
    explore(TreeScenario(), modes=("strict", "torn", "kept"))
    explore(TreeScenario(), modes=("strict", "kept"), depth=1, faults=Faults(images_every=5))


class Short(TreeScenario):
    """A flush and a compaction, for what is tried many times over."""

    def run(self, disk: SimulatedDisk, history: History) -> None:
        shard = TreeUnderTest(disk, grace_s=0)
        for number in (1, 2, 3):
            self.write(shard, history, number)
            shard.maintenance.flush(shard.tree)
            history.note("stored", shard.tree.stored)
        shard.maintenance.compact(shard.tree)
        shard.close()


# -- a reader at every yield point


class Watched(TreeScenario):
    """Reads everything before every file operation and every commit: each key is there, old or new."""

    def run(self, disk: SimulatedDisk, history: History) -> None:
        shard = TreeUnderTest(disk, grace_s=0)
        watching = [False]

        def look() -> int:
            if watching[0]:
                watching[0] = False
                self.check(shard, history)
                watching[0] = True
                reads.append(1)
            return 0

        reads: list[int] = []
        disk.on_image = look
        for number in range(1, 10):
            self.write(shard, history, number)
            watching[0] = True
            self._maintain(shard, history, number)
            watching[0] = False
            disk.images.clear()
        shard.close()
        assert len(reads) > 100


def watch() -> None:
    Watched().run(SimulatedDisk(), History())


def test_a_reader_at_every_yield_point_misses_nothing() -> None:
    watch()


# -- seeded bugs


def table_not_synced(patch: pytest.MonkeyPatch) -> None:
    fsync = disk_module.SimulatedFile.fsync
    patch.setattr(disk_module.SimulatedFile, "fsync", lambda f: None if ".sst" in f.path else fsync(f))


def folder_not_synced(patch: pytest.MonkeyPatch) -> None:
    fsync_dir = SimulatedDisk.fsync_dir
    patch.setattr(SimulatedDisk, "fsync_dir", lambda disk, p: None if p.endswith("tables/1") else fsync_dir(disk, p))


def manifest_before_the_file(patch: pytest.MonkeyPatch) -> None:
    """The row is committed before the file has its name."""
    write = TreeFiles.write

    def listed_first(self: TreeFiles, rows: Memtable, catalog: Any, ids: Sequence[int]) -> list[Any]:
        summaries = write(self, rows, catalog, ids)
        files = [catalog.describe(s, level=0, run=ids[0]) for s in summaries]
        for meta in files:
            self.fs.unlink(f"{self.root}/{meta.file_name}")
        self.fs.fsync_dir(f"{self.root}/{catalog.folder}")
        catalog._manifest.apply(catalog.publish(files))
        for meta in files:
            self.fs.unlink(f"{self.root}/{meta.file_name.replace('.sst', '.idx')}")
        return write(self, rows, catalog, ids)

    patch.setattr(TreeFiles, "write", listed_first)


def watermark_without_the_rows(patch: pytest.MonkeyPatch) -> None:
    """`stored` is committed apart from, and before, the file it speaks of."""
    publish = catalog_module.Catalog.publish

    def apart(self: catalog_module.Catalog, added: Any, removed: Any = (), *, stored: Any = None, **more: Any) -> Any:
        if stored is not None:
            self._manifest.apply(publish(self, (), stored=stored, **more))
        return publish(self, added, removed, stored=stored, **more)

    patch.setattr(catalog_module.Catalog, "publish", apart)


def memtable_dropped_first(patch: pytest.MonkeyPatch) -> None:
    """The flush takes its memtables out of the version before the file is in."""
    begin = Tree.begin_flush

    def dropping(self: Tree) -> Any:
        work = begin(self)
        if work is not None:
            self._install(replace(self._version, frozen=()))
        return work

    patch.setattr(Tree, "begin_flush", dropping)
    end = Tree.end_flush

    def ending(self: Tree, frozen: Any, files: Any, time_us: int) -> None:
        self._install(replace(self._version, frozen=frozen))
        end(self, frozen, files, time_us)

    patch.setattr(Tree, "end_flush", ending)


def inputs_removed_first(patch: pytest.MonkeyPatch) -> None:
    """A compaction removes its inputs before the manifest lists the outputs."""
    merge = TreeJobs._merge_here

    def removing(self: TreeJobs, plan: Any, stop: Any, keys: Any) -> Any:
        summaries = merge(self, plan, stop, keys)
        for source in plan.inputs:
            self._files.fs.unlink(source.path)
        self._files.fs.fsync_dir(plan.folder)
        return summaries

    patch.setattr(TreeJobs, "_merge_here", removing)


def leftovers_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Collector, "_unlisted", lambda self, tree, catalog: [])


@pytest.mark.parametrize(
    ("seed_bug", "suite"),
    [
        (table_not_synced, crashes),
        (folder_not_synced, crashes),
        (manifest_before_the_file, crashes),
        (watermark_without_the_rows, crashes),
        (memtable_dropped_first, watch),
        (inputs_removed_first, crashes),
        (leftovers_forgotten, crashes),
    ],
)
def test_seeded_bug_is_caught(seed_bug: Callable[[pytest.MonkeyPatch], None], suite: Callable[[], None]) -> None:
    with seeded(seed_bug), pytest.raises(Violation):
        suite()
