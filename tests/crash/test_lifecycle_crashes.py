"""Tables are created, altered, drained, dropped and collected, with a crash before every file operation, and kill -9.

After every crash, and after crashes in the recovery from it, the rows of the manifest are those of the ledger; what was
acknowledged holds; and a table is, as a whole, before or after the change that was under way. Once everything was
collected, nothing is left of a dropped table: no row, no file, no metric.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lifecycle_kill_child
import pytest
from lifecycle_kill_child import KILL_SETTINGS
from shared import Patch, seeded

from penstock.errors import NotFound, TableDraining
from penstock.lsm.collection import CollectionSettings
from penstock.manifest.invariants import check_all
from penstock.manifest.keys import ComponentId
from penstock.manifest.records import ArchivePolicy, Codec, CompressionConfig, Tombstoned
from penstock.manifest.tables import CHUNKS, DB, METRICS, WAL_STATE
from penstock.partition.ledger import _LedgerChanges
from penstock.partition.ledger_records import LEDGER_TABLE, TableStatus
from penstock.partition.storage_options import StorageOptions
from penstock.store.settings import StoreSettings
from penstock.store.store import Store, open_store
from penstock.store.table_registry import DbRegistry, config_hash
from penstock.testing import FakeClock, History, SimulatedDisk, Violation, explore
from penstock.testing.manifest import MemoryEngine

pytestmark = pytest.mark.usefixtures("quiet")

ELSEWHERE = StorageOptions(chunk_dir="volumes/large", wal_dir="volumes/fast")
ZSTD = CompressionConfig(Codec.ZSTD, 3)
SETTINGS = StoreSettings(
    background=False, reserve_bytes=0, collection=CollectionSettings(grace_s=0.0, dropped_grace_s=0.0)
)


def opened(disk: SimulatedDisk) -> Store:
    return open_store("s", settings=SETTINGS, fs=disk, clock=FakeClock(), engine=MemoryEngine)


def rows(store: Store) -> dict[int, Any]:
    return store._manifest.read(lambda view: dict(DB.scan(view)))


def check_registry(store: Store) -> None:
    """The rows follow the ledger."""
    by_id, ledger = rows(store), store._ledger
    alive = {db_id: row for db_id, row in by_id.items() if not isinstance(row.status, Tombstoned)}
    if {db_id: row.name for db_id, row in alive.items()} != {i: t.name for i, t in ledger.tables_by_id.items()}:
        raise Violation(f"rows of tables are {alive}, the ledger has {ledger.tables_by_id}")
    for db_id, row in alive.items():
        info = ledger.tables_by_id[db_id]
        storage = info.storage_options
        is_draining = type(row.status).__name__ == "Draining"
        same = (row.options.compression, row.options.archive) == (storage.compression, storage.archive)
        if not same or row.config_hash != config_hash(info) or is_draining != (info.status is TableStatus.DRAINING):
            raise Violation(f"the row of {info.name} is {row}, the ledger has {info}")
    for db_id, row in by_id.items():
        if db_id not in alive:
            tombstone = ledger.tombstones.get(db_id)
            if tombstone is None or row.status.tombstoned_at_epoch_ms != tombstone.dropped_us // 1_000:
                raise Violation(f"{row} is tombstoned, the ledger says {tombstone}")
    broken = store._manifest.read(lambda view: list(check_all(view)))
    if broken:
        raise Violation(f"the manifest is broken: {broken}")


def check_collected(store: Store, disk: SimulatedDisk) -> None:
    """Nothing is left of tables that do not exist."""
    ids = {LEDGER_TABLE, 0, *store._ledger.tables_by_id}
    left = store._manifest.read(
        lambda view: {
            *(db_id for db_id, _ in DB.scan(view)),
            *(key.db_id for key, _ in CHUNKS.scan(view)),
            *(key.db_id for key, _ in WAL_STATE.scan(view)),
            *(key.scope for key, _ in METRICS.scan(view)),
        }
    )
    folders = {
        int(name)
        for folder in ("tables", "volumes/large", "volumes/fast")
        if disk.exists(f"s/{folder}")
        for name in disk.listdir(f"s/{folder}")
    }
    if not (left | folders) <= ids:
        raise Violation(f"of dropped tables rows of {left - ids} and folders of {folders - ids} are left")


def state_of(store: Store) -> tuple[Any, ...]:
    """All that the scenario changes: tables by name, with status, options and rows."""
    return tuple(
        (
            info.name,
            info.status.name,
            info.storage_options.compression.codec.name,
            info.storage_options.archive is not None,
            tuple(store.kv(info.name).scan()),
        )
        for info in store.port.tables()
    )


STEPS: tuple[Callable[[Store], object], ...] = (
    lambda store: store.kv("users"),
    lambda store: store.kv("users").put(b"a", b"1", durable=True),
    lambda store: store.kv("logs", storage=ELSEWHERE),
    lambda store: store.kv("logs").put(b"l", b"2", durable=True),
    lambda store: store.alter("users", compression=ZSTD),
    lambda store: store.drain("logs"),
    lambda store: store.drop("logs"),
    lambda store: store._tasks.remove_dropped(),
    lambda store: store.kv("logs"),  # the name again
    lambda store: store.drain("users"),
    lambda store: store._checkpoint.clear(),  # the ledger is in files: nothing is replayed
    lambda store: store.reactivate("users"),
    lambda store: store.alter("users", archive=ArchivePolicy(archive_after_ms=1)),
    lambda store: store.drop("users"),
    lambda store: store._tasks.remove_dropped(),
)


def states() -> list[tuple[Any, ...]]:
    """Return the state before each step, and at the end."""
    with opened(SimulatedDisk()) as store:
        in_order = [state_of(store)]
        for step in STEPS:
            step(store)
            store.flush()
            in_order.append(state_of(store))
    return in_order


class LifecycleScenario:
    """A table's life, step by step; a crash leaves the state before or after the step that was under way."""

    def __init__(self) -> None:
        self._states = states()

    def run(self, disk: SimulatedDisk, history: History) -> None:
        store = opened(disk)
        for number, step in enumerate(STEPS):
            history.note("try", number)
            step(store)
            store.flush()
            history.note("done", number)
        store.close()

    def resume(self, disk: SimulatedDisk, history: History) -> None:
        tried = max([-1, *(values[0] for word, *values in history.events if word == "try")])
        done = max([-1, *(values[0] for word, *values in history.events if word == "done")])
        with opened(disk) as store:
            check_registry(store)
            state = state_of(store)
            if state not in self._states[done + 1 : tried + 2]:
                raise Violation(f"after step {done} of {tried} the tables are {state}")
            for info in store.port.tables():
                if info.status is TableStatus.DRAINING:
                    try:
                        store.kv(info.name).put(b"x", b"y")
                        raise Violation(f"{info.name} drains, and takes rows")
                    except TableDraining:
                        continue
            store._tasks.remove_dropped()
            store._tasks.remove_dropped()
            check_registry(store)
            check_collected(store, disk)
            generation = store._manifest.generation(ComponentId.ORCHESTRATOR)
        with opened(disk) as store:  # and once more: nothing is left to do
            check_registry(store)
            if store._manifest.generation(ComponentId.ORCHESTRATOR) != generation:
                raise Violation("an opening changed descriptors that followed already")


def test_every_crash_in_the_life_of_a_table() -> None:
    report = explore(LifecycleScenario(), modes=("strict",), depth=1, every=4)
    assert report.missing("commit /manifest", "fdatasync /journal/", "rename -gone") == []
    assert report.crashes > 30


@pytest.mark.campaign
@pytest.mark.parametrize("mode", ["strict", "torn", "restart"])
def test_every_crash_in_the_life_of_a_table_and_in_the_recovery(mode: Any) -> None:
    report = explore(LifecycleScenario(), modes=(mode,), depth=1 + (mode == "strict"))
    assert report.crashes > 60, "images that differ: in the mode strict, one for each thing that was synced"


# -- seeded bugs


def rows_never_follow_at_open(patch: Patch) -> None:
    """An opening believes that the rows follow the ledger."""

    def believe(registry: DbRegistry, recovered: Any) -> None:
        registry._followed = registry._ledger.tables_by_id

    patch.setattr(DbRegistry, "restore", believe)


def draining_is_forgotten(patch: Patch) -> None:
    """The ledger does not store the status of a table: a restart forgets it."""
    replace = _LedgerChanges._replace

    def forgetful(changes: Any, table: int, field: str, value: Any, *, before: Any = None) -> Any:
        info = replace(changes, table, field, value, before=before)
        if field == "status" and info is not None:
            changes._rows.pop(b"n" + info.name.encode())
        return info

    patch.setattr(_LedgerChanges, "_replace", forgetful)


def removals_elsewhere_are_not_synced(patch: Patch) -> None:
    """The row of a table goes before it is certain that its folders did: nothing would find them again."""
    fsync_dir = SimulatedDisk.fsync_dir

    def skip(disk: SimulatedDisk, path: str) -> None:
        if not path.endswith(("volumes/large", "volumes/fast")) or disk.listdir(path):
            fsync_dir(disk, path)

    patch.setattr(SimulatedDisk, "fsync_dir", skip)


@pytest.mark.parametrize("bug", [rows_never_follow_at_open, draining_is_forgotten, removals_elsewhere_are_not_synced])
def test_a_seeded_bug_is_noticed(bug: Callable[[Patch], None]) -> None:
    scenario = LifecycleScenario()
    with seeded(bug), pytest.raises((Violation, NotFound)):
        explore(scenario, modes=("strict",), depth=1)


# -- kill -9


def kill_rounds(root: str, rounds: int, seed: int = 7) -> None:
    acknowledged: dict[str, str] = {}
    chance = random.Random(seed)
    for number in range(rounds):
        with subprocess.Popen(
            [sys.executable, lifecycle_kill_child.__file__, root, str(number)], stdout=subprocess.PIPE, text=True
        ) as child:
            assert child.stdout is not None
            lines = [child.stdout.readline() for _ in range(5)]
            time.sleep(chance.uniform(0.0, 1.0))
            child.send_signal(signal.SIGKILL)
            lines += child.stdout.read().split("\n")[:-1]
        trying = ""
        for word, name, state in (line.split() for line in lines if line.count(" ") == 2):
            if word == "try":
                trying = name
            else:
                acknowledged[name] = state
                trying = ""
        with open_store(root, settings=KILL_SETTINGS) as store:
            check_registry(store)
            alive = {info.name: info for info in store.port.tables()}
            for name, state in acknowledged.items():
                if name == trying:
                    continue
                assert (name in alive) == (state != "dropped"), (name, state)
                if state in ("active", "draining"):
                    assert store.describe(name).status == state
            for name in alive:
                store.drop(name)
            acknowledged = dict.fromkeys({*acknowledged, *alive}, "dropped")  # also the one whose drop was not answered
        with open_store(root, settings=KILL_SETTINGS) as store:
            store._tasks.clean_up()
            store._tasks.remove_dropped()
            assert rows(store) == {}


def test_killed_in_the_life_of_a_table(tmp_path: Path) -> None:
    kill_rounds(str(tmp_path / "s"), 2)


@pytest.mark.campaign
def test_killed_again_and_again_in_the_life_of_a_table(tmp_path: Path) -> None:
    kill_rounds(str(tmp_path / "s"), 25)
