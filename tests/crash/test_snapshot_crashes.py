"""A partition's snapshot, its log and its repair against every crash: nothing acknowledged is lost or doubled."""

from __future__ import annotations

from typing import Any

import pytest
from shared import Patch, SomeRecoveries
from store_model import open_simulated

from penstock.errors import Invalid
from penstock.partition.snapshots import PartitionSnapshots
from penstock.partition.spill import SpillLog
from penstock.store.store import Store
from penstock.testing import FakeClock, History, SimulatedDisk, Violation, explore

pytestmark = pytest.mark.usefixtures("quiet")
ONE = (1).to_bytes(8, "little")
STEPS = ("rename -install", "unlink -replaced/", "rename snapshot.header", "unlink snapshot.header", "rename -log/")


def write(store: Store, history: History, start: int, end: int) -> None:
    for number in range(start, end):
        history.note("asked", number)
        with store.batch() as batch:
            batch.kv("t").put(b"%03d" % number, bytes(60))
            batch.kv("t").merge(b"sum", ONE, operator="add_i64")
            batch.queue("q").put(b"%03d" % number)
        history.note("done", number)


def check(store: Store, history: History, when: str) -> None:
    done = {values[0] for word, *values in history.events if word == "done"}
    attempted = {values[0] for word, *values in history.events if word == "asked"}
    rows = dict(store.kv("t").scan())
    total = int.from_bytes(rows.pop(b"sum", b""), "little")
    keys = {int(key) for key in rows}
    messages = [int(payload) for payload in store.queue("q").to_arrow().column("payload").to_pylist()]
    if not done <= keys <= attempted:
        raise Violation(f"{when}: the rows are {sorted(keys)}, acknowledged were {sorted(done)}")
    if sorted(keys) != messages or total != len(keys):
        raise Violation(f"{when}: {len(keys)} rows, {total} counted, messages {messages}")


class Repairing:
    """Snapshots, checkpoints and repairs of a kv table and a queue."""

    def run(self, disk: SimulatedDisk, history: History) -> None:
        with open_simulated(disk, FakeClock()) as store:
            store.kv("t")
            store.queue("q")
            write(store, history, 0, 6)
            self._snapshot(store, history)
            write(store, history, 6, 12)
            store.compact("t")
            store.checkpoint()
            self._repair(store, history)
            write(store, history, 12, 15)
            self._snapshot(store, history)
            self._repair(store, history)
            write(store, history, 15, 16)
            check(store, history, "after all")

    def _snapshot(self, store: Store, history: History) -> None:
        for name in ("t", "q"):
            store.keep_snapshot(name)
            history.note("kept", name)

    def _repair(self, store: Store, history: History) -> None:
        for name in ("t", "q"):
            store.repair(name)

    def resume(self, disk: SimulatedDisk, history: History) -> None:
        with open_simulated(disk, FakeClock()) as store:
            if not {"t", "q"} <= set(store.tables()):
                return
            check(store, history, "after the crash")
            tables = {values[0] for word, *values in history.events if word == "kept"}
            for name in ("t", "q"):
                try:
                    store.repair(name)
                except Invalid as error:
                    if name in tables:
                        raise Violation(f"the snapshot of {name} is lost ({error})") from error
            check(store, history, "after a repair")
            number = 100 + len(history.events)
            write(store, history, number, number + 1)
            check(store, history, "after a write")


def test_crashes() -> None:
    report = explore(Repairing(), modes=("strict",), depth=1, every=2)
    assert report.missing(*STEPS) == []


@pytest.mark.campaign
def test_every_crash_and_crashes_in_recovery() -> None:
    explore(Repairing(), modes=("strict", "torn"), depth=1)
    explore(SomeRecoveries(Repairing(), 29), modes=("strict",), recovery_modes=("strict",))


def log_shrinks(patch: Patch) -> None:
    """The log gives up entries that are stored, although they are newer than the snapshot."""
    patch.setattr(SpillLog, "covers", lambda self, stored: max(self.upto, stored))


def progress_stays(patch: Patch) -> None:
    """The files are replaced, but not the LSN that they reach."""
    operations = PartitionSnapshots._operations

    def patched(self: PartitionSnapshots, header: Any, descriptor: Any) -> list[Any]:
        return [one for one in operations(self, header, descriptor) if not getattr(one, "replaces", False)]

    patch.setattr(PartitionSnapshots, "_operations", patched)


def never_finished(patch: Patch) -> None:
    """An installation that a crash interrupted is not finished by the next opening."""
    finish = PartitionSnapshots.finish_install

    def patched(self: PartitionSnapshots, descriptor: Any) -> None:
        if self._busy:
            finish(self, descriptor)

    patch.setattr(PartitionSnapshots, "finish_install", patched)


@pytest.mark.parametrize("seed_bug", [log_shrinks, progress_stays, never_finished])
def test_seeded_bugs_are_caught(seed_bug: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seed_bug(monkeypatch)
    with pytest.raises(Violation):
        explore(Repairing(), modes=("strict",), depth=1, every=3)
