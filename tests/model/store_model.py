"""What a store of kv tables must hold, worked out one write after the other; and a store on a simulated disk."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from penstock.kv.table import KvTable
from penstock.log import LogSettings
from penstock.lsm.collection import CollectionSettings
from penstock.lsm.rows import NEVER
from penstock.partition.admission import DispatcherSettings
from penstock.partition.checkpoint import CheckpointSettings
from penstock.partition.tokens import TOKEN_WINDOW
from penstock.store.settings import StoreSettings
from penstock.store.store import Store, open_store
from penstock.testing import FakeClock, SimulatedDisk
from penstock.testing.manifest import MemoryEngine

START_US = 1_700_000_000_000_000
SETTINGS = StoreSettings(
    background=False,
    journal=LogSettings(segment_bytes=1_500, allocate_bytes=512, index_bytes=256),
    checkpoint=CheckpointSettings(segments_max=2),
    dispatcher=DispatcherSettings(backoff_s=0.0),
    collection=CollectionSettings(grace_s=0.0),
    reserve_bytes=512,
)


def open_simulated(disk: SimulatedDisk, clock: FakeClock | None = None, settings: StoreSettings = SETTINGS) -> Store:
    return open_store(
        "/store",
        fs=disk,
        clock=clock or FakeClock(),
        random=random.Random(1),
        engine=MemoryEngine,
        settings=settings,
    )


class Write(NamedTuple):
    """One operation on one table. `kind`: put, delete, delete_range (value: the end) or a merge operator."""

    table: str
    kind: str
    key: bytes
    value: bytes = b""
    ttl_s: float | None = None


def perform(table: KvTable[Any], write: Write) -> int:
    """Do a write; its epoch."""
    if write.kind == "put":
        return table.put(write.key, write.value, ttl_s=write.ttl_s)
    if write.kind == "delete":
        return table.delete(write.key)
    if write.kind == "delete_range":
        return table.delete_range(write.key, write.value)
    return table.merge(write.key, write.value, operator=write.kind, ttl_s=write.ttl_s)


class Token(NamedTuple):
    producer: str
    number: int


@dataclass
class StoreModel:
    """Tables of (value, expires_us), and the tokens that were used."""

    tables: dict[str, dict[bytes, tuple[bytes, int]]] = field(default_factory=dict)
    tokens: dict[str, set[int]] = field(default_factory=dict)

    def copy(self) -> StoreModel:
        return StoreModel(
            {name: dict(rows) for name, rows in self.tables.items()},
            {producer: set(numbers) for producer, numbers in self.tokens.items()},
        )

    def create(self, name: str) -> None:
        self.tables.setdefault(name, {})

    def drop(self, name: str) -> None:
        self.tables.pop(name, None)

    def verdict(self, token: Token) -> str:
        used = self.tokens.get(token.producer, set())
        if token.number in used and token.number >= max(used) - TOKEN_WINDOW:
            return "duplicate"
        if used and token.number < max(used) - TOKEN_WINDOW:
            return "too old"
        return "accepted"

    def batch(self, writes: Iterable[Write], time_us: int, token: Token | None = None) -> bool:
        """Whether it happened."""
        if token is not None:
            if self.verdict(token) != "accepted":
                return False
            self.tokens.setdefault(token.producer, set()).add(token.number)
        for write in writes:
            self.write(write, time_us)
        return True

    def write(self, write: Write, time_us: int) -> None:
        rows = self.tables.get(write.table)
        if rows is None:
            return  # dropped
        if write.kind == "delete_range":
            for key in [key for key in rows if write.key <= key < write.value]:
                del rows[key]
            return
        expires = NEVER if write.ttl_s is None else time_us + int(write.ttl_s * 1_000_000)
        older = rows.get(write.key)
        if older is not None and older[1] <= time_us:
            older = None
        if write.kind == "delete":
            rows.pop(write.key, None)
        elif write.kind == "put" or older is None:
            rows[write.key] = (write.value, expires)
        else:
            value = merged(write.kind, older[0], write.value)
            rows[write.key] = (value, older[1] if expires == NEVER else expires)

    def live(self, name: str, now_us: int) -> dict[bytes, bytes]:
        return {key: value for key, (value, expires) in sorted(self.tables[name].items()) if expires > now_us}

    def everything(self, now_us: int) -> dict[str, dict[bytes, bytes]]:
        return {name: self.live(name, now_us) for name in sorted(self.tables)}


def merged(kind: str, older: bytes, newer: bytes) -> bytes:
    if kind == "append":
        return older + newer
    if len(older) != 8:
        return older
    a, b = (int.from_bytes(number, "little", signed=True) for number in (older, newer))
    result = {"add_i64": a + b, "min_i64": min(a, b), "max_i64": max(a, b)}[kind]
    return ((result + (1 << 63)) % (1 << 64) - (1 << 63)).to_bytes(8, "little", signed=True)


def number(value: int) -> bytes:
    return value.to_bytes(8, "little", signed=True)


def read_all(store: Store) -> dict[str, dict[bytes, bytes]]:
    """Everything that a user can see, by scans; gets must agree with them."""
    content: dict[str, dict[bytes, bytes]] = {}
    for name in store.tables():
        table = store.kv(name, create=False)
        content[name] = dict(table.scan())
        for key, value in content[name].items():
            assert table.get(key) == value, f"get({key!r}) of {name} disagrees with the scan"
    return content


def read_snapshot(store: Store) -> tuple[int, dict[str, dict[bytes, bytes]]]:
    with store.snapshot() as snapshot:
        return snapshot.lsn, {name: dict(snapshot.kv(name).scan()) for name in store.tables()}


def difference(actual: dict[str, Any], expected: dict[str, Any]) -> dict[str, Any]:
    """Where two states differ: (actual, expected)."""
    return {
        name: {
            key: (actual.get(name, {}).get(key), expected.get(name, {}).get(key))
            for key in {*actual.get(name, {}), *expected.get(name, {})}
            if actual.get(name, {}).get(key) != expected.get(name, {}).get(key)
        }
        if name in actual and name in expected
        else (name in actual, name in expected)
        for name in {*actual, *expected}
        if actual.get(name) != expected.get(name)
    }


def tables_of(writes: Sequence[Write]) -> list[str]:
    return sorted({write.table for write in writes})
