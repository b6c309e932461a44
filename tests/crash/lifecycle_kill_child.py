"""A store in which tables live and die, in a process that is killed. It prints what it tries and what it was told."""

from __future__ import annotations

import sys

from penstock.lsm.collection import CollectionSettings
from penstock.partition.storage_options import StorageOptions
from penstock.store.settings import StoreSettings
from penstock.store.store import open_store

KILL_SETTINGS = StoreSettings(
    background=False, reserve_bytes=0, collection=CollectionSettings(grace_s=0.0, dropped_grace_s=0.0)
)


def main(root: str, life: int) -> None:
    store = open_store(root, settings=KILL_SETTINGS)
    number = 0
    while True:
        name = f"t{life}_{number}"
        storage = StorageOptions(chunk_dir="volumes/a") if number % 2 else None
        for state, act in (
            ("active", lambda: store.kv(name, storage=storage).put(b"k", b"v", durable=True)),  # noqa: B023
            ("draining", lambda: store.drain(name)),  # noqa: B023
            ("active", lambda: store.reactivate(name)),  # noqa: B023
            ("dropped", lambda: store.drop(name)),  # noqa: B023
        ):
            print("try", name, state, flush=True)
            act()
            print("told", name, state, flush=True)
            if state == "active" and number % 3 == 2:
                break  # it lives on
        store._tasks.remove_dropped()
        number += 1


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
