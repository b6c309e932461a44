"""What crash suites share: scenarios that recover from some of their images only, and bugs to be seeded anywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

import penstock.testing.crashes as crashes_module
import penstock.testing.disk_files as disk_module
from penstock.lsm.tree import Tree
from penstock.testing import History, SimulatedDisk
from penstock.testing.crashes import Scenario, Skipped

Patch = pytest.MonkeyPatch


class SomeRecoveries:
    """A scenario in whose recovery crashes begin at every n-th image: each of them costs a run."""

    def __init__(self, scenario: Scenario, every: int) -> None:
        self._scenario, self._every = scenario, every
        self._count = 0

    def run(self, disk: SimulatedDisk, history: History) -> None:
        self._scenario.run(disk, history)

    def resume(self, disk: SimulatedDisk, history: History) -> None:
        if disk.on_image is not None:  # the first crash, which another will follow
            self._count += 1
            if self._count % self._every:
                raise Skipped
        self._scenario.resume(disk, history)


# -- seeded bugs


@contextmanager
def seeded(seed_bug: Callable[[Patch], None]) -> Iterator[None]:
    """Seed a bug for the block, in which crashes are explored until it shows."""
    with Patch.context() as patch:
        # Many bugs show late in a run and then everywhere: some crashes from all over it come first, then all.
        patch.setattr(crashes_module, "search_order", lambda points: [*points[11::16], *points])
        seed_bug(patch)
        yield


def no_directory_fsync(patch: Patch) -> None:
    """Names are not made durable."""
    patch.setattr(SimulatedDisk, "fsync_dir", lambda self, path: None)


def fsync_retried(patch: Patch) -> None:
    """The bytes of a failed fsync are trusted because the second one reports success."""
    fdatasync = disk_module.SimulatedFile.fdatasync

    def again(file: disk_module.SimulatedFile) -> None:
        try:
            fdatasync(file)
        except OSError:
            fdatasync(file)

    patch.setattr(disk_module.SimulatedFile, "fdatasync", again)


def stored_too_far(patch: Patch) -> None:
    """Records of the growing memtable count as stored."""
    begin = Tree.begin_flush

    def begin_flush(self: Tree) -> object:
        work = begin(self)
        if work is not None:
            work[1][0].lsn_last += 1
        return work

    patch.setattr(Tree, "begin_flush", begin_flush)
