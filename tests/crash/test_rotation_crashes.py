"""A rotation of the master keys, with a crash before every file operation, and crashes in the recovery from each.

Until `rotate_keys` has returned, the store opens with both keys; from then on with the newest alone. Whatever happens,
all rows are there, the manifest names the master key that wraps each table's key, and once a rotation was finished the
files of the ledger hold no form of a key that an older one wraps.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from shared import Patch, seeded

from penstock.errors import KeyMissing, PenstockError
from penstock.lsm.collection import CollectionSettings
from penstock.manifest.tables import DB
from penstock.partition.ledger import _LedgerChanges
from penstock.partition.ledger_records import LEDGER_TABLE, Rewrap
from penstock.store.keys import StoreKeys
from penstock.store.settings import StoreSettings
from penstock.store.store import Store, open_store
from penstock.testing import FakeClock, History, SimulatedDisk, Violation, explore
from penstock.testing.disk_image import Mode
from penstock.testing.manifest import MemoryEngine

pytestmark = pytest.mark.usefixtures("quiet")

OLD, NEW = {1: b"1" * 32}, {2: b"2" * 32}
SETTINGS = StoreSettings(
    background=False, reserve_bytes=0, encrypt=True, collection=CollectionSettings(grace_s=0.0, dropped_grace_s=0.0)
)
NAMES = ("users", "events", "spare")


def opened(disk: SimulatedDisk, keys: dict[int, bytes]) -> Store:
    settings = replace(SETTINGS, keys=keys)
    return open_store("s", settings=settings, fs=disk, clock=FakeClock(), random=random.Random(1), engine=MemoryEngine)


def fill(store: Store) -> None:
    store.kv("users").put(b"a", b"1")
    store.queue("events").put(b"message")
    store.kv("spare").put(b"b", b"2")
    store.flush()
    store.compact("users")  # a chunk: its data key is wrapped by the table's
    store._maintenance.flush(store._ledger.tree)  # the older form of the keys is in a file, too


def check_rows(store: Store) -> None:
    rows = [
        list(store.kv("users").scan()),
        [message.payload for message in store.queue("events").read()],
        list(store.kv("spare").scan()),
    ]
    if rows != [[(b"a", b"1")], [b"message"], [(b"b", b"2")]]:
        raise Violation(f"rows were lost: {rows}")
    if not store.check().ok:
        raise Violation(f"damaged: {store.check().damage}")


def check_versions(store: Store) -> set[int]:
    """Return the versions that wrap tables' keys; the manifest must name the same ones as the ledger."""
    tables = {info.table_id: info for info in store.port.tables()}
    for table, row in store._manifest.read(lambda view: dict(DB.scan(view))).items():
        key, options = tables[table].key, row.options.encryption
        if key is None or options is None or options.key_version != key.version:
            raise Violation(f"the manifest names {options} for {row.name}, the ledger has {key}")
    return {info.key.version for info in tables.values() if info.key is not None}


def older_forms(disk: SimulatedDisk, wrapped: list[bytes]) -> list[str]:
    folder = f"s/tables/{LEDGER_TABLE}/0"
    files = [name for name in disk.listdir(folder) if name.endswith(".sst")]
    return [name for name in files if any(each in disk.open(f"{folder}/{name}").pread(1 << 20, 0) for each in wrapped)]


class RotationScenario:
    """One rotation from key 1 to key 2, of a store that was opened once before."""

    def run(self, disk: SimulatedDisk, history: History) -> None:
        with opened(disk, OLD) as store:
            fill(store)
            for info in store.port.tables():
                assert info.key is not None
                history.note("wrapped", info.key.wrapped)
        history.note("filled")
        store = opened(disk, OLD | NEW)
        if store.rotate_keys().version != 2:
            raise Violation("it rotated to another key than the newest")
        history.note("rotated")
        check_rows(store)

    def resume(self, disk: SimulatedDisk, history: History) -> None:
        words = [word for word, *_ in history.events]
        if "filled" not in words:
            return
        wrapped = [event[1] for event in history.events if event[0] == "wrapped"]
        done = "rotated" in words
        try:
            store = opened(disk, NEW if done else OLD | NEW)
        except PenstockError as error:
            raise Violation(
                f"it does not open {'with the new key alone' if done else 'with both keys'}: {error}"
            ) from error
        check_rows(store)
        if not check_versions(store) <= ({2} if done else {1, 2}):
            raise Violation("an older key wraps a table's key again")
        if store.rotate_keys().version != 2 or check_versions(store) != {2}:
            raise Violation("a second rotation does not finish the first")
        store._collector.collect()
        if left := older_forms(disk, wrapped):
            raise Violation(f"{left} hold keys that the older master key wraps")
        store.close()
        with opened(disk, NEW) as again:
            check_rows(again)


STEPS = ("pwrite s/journal/", "fdatasync s/journal/", "commit s/manifest", "fsync .sst", "rename .idx")


def test_some_crashes_of_a_rotation() -> None:
    report = explore(RotationScenario(), modes=("strict",), depth=1)
    assert report.missing(*STEPS) == []


@pytest.mark.campaign
@pytest.mark.parametrize("mode", ["strict", "torn", "kept", "restart"])
def test_every_crash_of_a_rotation(mode: Mode) -> None:
    explore(RotationScenario(), modes=(mode,), depth=1)


# -- seeded bugs


def rewrap_in_memory_only(patch: Patch) -> None:
    """The row of the ledger is not written: the replayed state has the old key."""

    def rewrap(changes: _LedgerChanges, request: Rewrap) -> None:
        put, changes.put = changes.put, lambda key, value: None  # type: ignore[method-assign]
        changes._replace(request.table_id, "key", request.key)
        changes.put = put  # type: ignore[method-assign]

    patch.setattr(_LedgerChanges, "_rewrap", rewrap)


def ledger_not_rewritten(patch: Patch) -> None:
    patch.setattr(Store, "_rewrite_ledger", lambda store: None)


def one_table_forgotten(patch: Patch) -> None:
    rewrapped = StoreKeys.rewrapped
    patch.setattr(StoreKeys, "rewrapped", lambda keys, tables, version: rewrapped(keys, list(tables)[1:], version))


def manifest_names_the_first_key(patch: Patch) -> None:
    """What `storage_options` said before: the version that the table was created with."""
    from penstock.partition.ledger_records import TableInfo
    from penstock.partition.storage_options import decode_storage

    patch.setattr(TableInfo, "storage_options", property(lambda info: decode_storage(info.storage)))


@pytest.mark.parametrize(
    "bug", [rewrap_in_memory_only, ledger_not_rewritten, one_table_forgotten, manifest_names_the_first_key]
)
def test_seeded_bugs_of_a_rotation_are_caught(bug: Callable[[Patch], None]) -> None:
    with seeded(bug), pytest.raises(Violation):
        explore(RotationScenario(), modes=("strict",), depth=1)


def test_an_old_key_is_needed_until_the_rotation_and_not_after_it() -> None:
    """The check can fail: without the rotation the new key alone does not open the store."""
    disk = SimulatedDisk()
    with opened(disk, OLD) as store:
        fill(store)
    with pytest.raises(KeyMissing, match="does not hold master key 1"):
        opened(disk, NEW)
    with opened(disk, OLD | NEW) as store:
        store.rotate_keys()
    opened(disk, NEW).close()
