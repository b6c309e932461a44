"""Backups against every crash: a half backup is never taken for whole, a whole one restores, the source is not hurt.

With seeded bugs that must be caught.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import backup_kill_child
import pytest
from shared import seeded
from store_model import SETTINGS

import penstock
from penstock.errors import NotFound, PenstockError
from penstock.store.backup_folder import BackupFolder, BackupListing
from penstock.store.restore import restore_backup
from penstock.store.store import Store, open_store
from penstock.testing import FakeClock, Faults, History, SimulatedDisk, Violation, explore
from penstock.testing.disk import FaultKind
from penstock.testing.disk_image import Mode
from penstock.testing.manifest import MemoryEngine


def opened(disk: SimulatedDisk, path: str) -> Store:
    return open_store(path, fs=disk, clock=FakeClock(), random=random.Random(1), engine=MemoryEngine, settings=SETTINGS)


def write(store: Store, number: int) -> None:
    with store.batch() as batch:
        batch.kv("keys").put(b"%d" % number, b"value")
        batch.queue("events").put(b"%d" % number)


def rounds(store: Store) -> int:
    """How many rounds are there; both tables must have the same."""
    if set(store.tables()) != {"keys", "events"}:
        return 0
    with store.snapshot() as snapshot:
        keys = sorted(int(key) for key, _ in snapshot.kv("keys").scan())
        events = [int(payload) for payload in snapshot.queue("events").to_arrow()["payload"].to_pylist()]
    if keys != events or keys != list(range(len(keys))):
        raise Violation(f"the tables are not of one moment: {keys} and {events}")
    return len(keys)


class BackupScenario:
    """Some backups, the last of which removes the first; files of tables are replaced between them."""

    def __init__(self, backups: int = 3, keep: int = 2) -> None:
        self._backups = backups
        self._keep = keep

    def run(self, disk: SimulatedDisk, history: History) -> None:
        store = opened(disk, "/store")
        store.kv("keys")
        store.queue("events")
        for number in range(self._backups):
            write(store, number)
            history.note("written", number + 1)
            store.compact("keys")
            store.backup("/backups", keep=self._keep)
            history.note("backed up", number + 1)

    def resume(self, disk: SimulatedDisk, history: History) -> None:
        written = max([0, *(count for word, count in history.events if word == "written")])
        backed_up = max([0, *(count for word, count in history.events if word == "backed up")])
        store = opened(disk, "/store")
        if rounds(store) < written:
            raise Violation(f"{written} rounds were written, and {rounds(store)} are there")
        round_counts = [self._restored(disk, listing) for listing in listings(disk)]
        if backed_up > max(round_counts, default=0) or sorted(round_counts) != round_counts:
            raise Violation(f"{backed_up} rounds were backed up, and the backups have {round_counts}")
        if backed_up:  # and backups go on; a store that never had one may lack its tables
            write(store, rounds(store))
            store.backup("/backups")
            if self._restored(disk, listings(disk)[-1]) != rounds(store):
                raise Violation("the next backup has other rounds")
        store.close()

    def _restored(self, disk: SimulatedDisk, listing: BackupListing) -> int:
        path = f"/copy{listing.number}-{len(disk.listdir('/'))}"
        restore_backup(disk, "/backups", path, random=random.Random(2), number=listing.number)
        copy = opened(disk, path)
        if copy.statistics().durable_lsn < listing.lsn:
            raise Violation("a restored store ends before its backup's LSN")
        count = rounds(copy)
        copy.close()
        return count


def listings(disk: SimulatedDisk) -> list[BackupListing]:
    try:
        return BackupFolder(disk, "/backups").listings()
    except NotFound:
        return []


STEPS = (
    "fsync .sst.tmp",
    "rename .sst.tmp",
    "fsync LISTING.tmp",
    "rename LISTING.tmp",
    "unlink LISTING",
    "create BACKUPS",
)


def test_every_crash_of_a_backup() -> None:
    report = explore(BackupScenario(), modes=("strict",), depth=1)
    assert report.missing(*STEPS) == []


def test_a_process_that_dies_while_it_removes_a_backup() -> None:
    report = explore(BackupScenario(backups=2, keep=1), modes=("restart",), depth=1, every=4)
    assert report.missing("unlink .sst") == []


@pytest.mark.campaign
@pytest.mark.parametrize("mode", ["torn", "kept", "restart"])
def test_every_other_crash_of_a_backup(mode: Mode) -> None:
    explore(BackupScenario(), modes=(mode,), depth=1)


@pytest.mark.campaign
@pytest.mark.parametrize("kind", ["eio", "enospc"])
def test_faults_of_a_backup(kind: FaultKind) -> None:
    """Crashes follow each failure: some right after it, and the end of the run."""
    faults = Faults(kinds=(kind,), every=11, images_every=97)
    explore(BackupScenario(backups=2, keep=1), modes=("strict",), depth=1, every=50, faults=faults)


def no_fsync_of_folders(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("penstock.store.backup.make_dirs", lambda fs, path: [fs.mkdir(each) for each in parents(path)])
    patch.setattr(BackupFolder, "publish", publish_early)


def parents(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[: count + 1]) for count in range(1, len(parts))]


def publish_early(folder: BackupFolder, listing: BackupListing) -> None:
    folder._write(listing, f"{folder.own(listing.number)}/LISTING")


def listing_first(patch: pytest.MonkeyPatch) -> None:
    """Removes the files of an old backup before its listing."""

    def remove(self: BackupFolder, old: list[BackupListing], others: list[BackupListing]) -> None:
        self._sweep(others)
        for listing in old:
            self.fs.unlink(f"{self.own(listing.number)}/LISTING")

    patch.setattr(BackupFolder, "remove", remove)


@pytest.mark.parametrize(("bug", "mode"), [(no_fsync_of_folders, "strict"), (listing_first, "restart")])
def test_seeded_bugs_are_caught(bug: Callable[[pytest.MonkeyPatch], None], mode: Mode) -> None:
    with seeded(bug), pytest.raises(Violation):
        explore(BackupScenario(backups=2, keep=1), modes=(mode,), depth=1)


def test_a_killed_owner_leaves_whole_backups_only(tmp_path: Path) -> None:
    """kill -9 while a store with all kinds is written to, maintained and backed up; the second time amid a backup."""
    first = 0
    for kill in range(2):
        child = subprocess.Popen(
            [sys.executable, backup_kill_child.__file__, str(tmp_path), str(first), *(["halt"] if kill else [])],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert child.stdout is not None
        acknowledged, whole = first, 0
        try:
            for line in child.stdout:
                word, value = line.split()
                if word == "halted":
                    break
                acknowledged, whole = (int(value), whole) if word == "written" else (acknowledged, int(value))
                if word == "backed-up" and not kill and acknowledged >= first + 10:
                    break
        finally:
            child.send_signal(signal.SIGKILL)
            rest = child.stdout.read()
            child.wait(30)
            child.stdout.close()
        acknowledged = max([acknowledged, *(int(line.split()[1]) for line in rest.splitlines() if "written" in line)])
        half = tmp_path / "backups" / f"{whole + 1:06d}"
        assert not kill or (half.exists() and not (half / "LISTING").exists())
        assert penstock.check_backup(tmp_path / "backups") == []
        report = penstock.restore(tmp_path / "backups", tmp_path / f"copy{kill}")
        assert report.number >= whole
        with penstock.open(tmp_path / f"copy{kill}") as copy:
            copied = backup_kill_child.rounds_of(copy)
        with penstock.open(tmp_path / "store") as store:
            written = backup_kill_child.rounds_of(store)
            assert copied <= written
            assert written >= acknowledged
            with suppress(PenstockError):
                store.resume("users")
            assert store.check().ok
            if kill:
                assert store.backup(tmp_path / "backups").number == whole + 1  # in place of the half one
        first = written
