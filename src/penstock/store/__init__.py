"""A store: a folder that one process owns.

`store.py` is the public class; `tables.py` and `batch.py` are the part of it that a connected process has too.
`port.py` is the only way from there to everything below: it passes a write to the coordinator, which passes it to
`flusher.py`, and so to the journal and the partitions. `applied.py` and `snapshot_port.py` are its read-only forms, for
clients and for snapshots; `services.py` runs what tables need beyond reads and writes. `governor.py` limits memory,
`space.py` and `reserve.py` handle a full disk, `dropped.py` removes the files of dropped tables, and
`identity.py` holds the store's UUID.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {"Store": "store", "open_store": "store", "StoreSettings": "settings"}


def __getattr__(name: str) -> Any:
    """Import the store when it is first used: clients need only a little of this package."""
    if name in _HOMES:
        return getattr(import_module(f"penstock.store.{_HOMES[name]}"), name)
    raise AttributeError(f"penstock.store has no {name!r}")
