"""A store that is built beside its folder is there wholly or not at all, and stays once it was told to be made."""

from __future__ import annotations

import pytest
from shared import no_directory_fsync, seeded

from penstock.store.new_store import built_beside
from penstock.testing import History, SimulatedDisk, Violation, explore


class Building:
    """Builds a folder with two files; after a crash, builds it unless it is there."""

    def run(self, disk: SimulatedDisk, history: History) -> None:
        with built_beside(disk, "/store", ".making") as work:
            for name in ("first", "second"):
                file = disk.create(f"{work}/{name}")
                file.pwrite(b"whole", 0)
                file.fsync()
                file.close()
            disk.fsync_dir(work)
        history.note("made")

    def resume(self, disk: SimulatedDisk, history: History) -> None:
        if not disk.exists("/store"):
            if ("made",) in history.events:
                raise Violation("the store was made, and is gone")
            self.run(disk, history)
        for name in ("first", "second"):
            if not disk.exists(f"/store/{name}") or disk.open(f"/store/{name}").pread(9, 0) != b"whole":
                raise Violation(f"{name} is missing or torn")


def test_every_crash() -> None:
    report = explore(Building())
    assert report.missing("rename /store.making", "fsync_dir /") == []


def test_a_name_that_is_not_made_durable_is_noticed() -> None:
    with seeded(no_directory_fsync), pytest.raises(Violation):
        explore(Building())
