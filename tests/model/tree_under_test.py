"""A tree on a simulated disk, with a manifest in memory, and a model of what it must answer."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from penstock.lsm.collection import CollectionSettings, Collector
from penstock.lsm.compaction import LevelLimits
from penstock.lsm.maintenance import Maintenance
from penstock.lsm.memtable import Edit, Memtable
from penstock.lsm.operators import check_operand, union_items, union_of
from penstock.lsm.rows import DELETE, NEVER, PUT, Row
from penstock.lsm.tree_settings import TreeSettings
from penstock.manifest.jobs import JobQueue
from penstock.manifest.manifest import Manifest
from penstock.testing import FakeClock, SimulatedDisk
from penstock.testing.manifest import MemoryEngine

SETTINGS = TreeSettings(
    memtable_bytes=20_000,
    limits=LevelLimits(level0_runs=2, level1_bytes=3_000, fanout=2),
    level0_slow=50,
    level0_stop=60,
)
STORE = bytes(range(16))


class Write(NamedTuple):
    """One operation of a record."""

    kind: str  # put, delete, delete_range, or a merge operator
    key: bytes
    value: bytes = b""  # for delete_range: the end
    expires_us: int = NEVER


class ShardUnderTest(ABC):
    """A shard's tree with what it needs to run. It keeps what was applied, to bring a reopened tree up to date."""

    def __init__(
        self,
        disk: SimulatedDisk | None = None,
        *,
        settings: TreeSettings = SETTINGS,
        memtable: type[Memtable] = Memtable,
        grace_s: float = 60.0,
    ) -> None:
        self.disk = disk or SimulatedDisk()
        self.clock = FakeClock()
        self._settings, self._memtable, self._grace_s = settings, memtable, grace_s
        self.open()

    def open(self) -> None:
        self.disk.mkdir("/store")
        self.disk.fsync_dir("/")
        self.manifest = Manifest.open("/store/manifest", fs=self.disk, clock=self.clock, engine=MemoryEngine)
        self.jobs = JobQueue(self.manifest, random=random.Random(1))
        self.maintenance = Maintenance(
            self.manifest,
            self.jobs,
            fs=self.disk,
            root="/store",
            store=STORE,
            clock=self.clock,
        )
        self.collector = Collector(
            self.maintenance,
            self.manifest,
            fs=self.disk,
            root="/store",
            clock=self.clock,
            settings=CollectionSettings(grace_s=self._grace_s),
        )
        self.tree = self.maintenance.open_tree(1, 0, "tables/1", self._settings, self._memtable)
        self.jobs.compensate_orphans()
        self.replay()

    @abstractmethod
    def replay(self) -> None:
        """Apply what the tree has not stored."""

    def close(self) -> None:
        self.manifest.close()

    def reopen(self) -> None:
        self.close()
        self.open()

    def flush(self) -> None:
        self.maintenance.flush(self.tree)

    def compact(self, *, everything: bool = True) -> None:
        self.maintenance.compact(self.tree, everything=everything)

    def files(self) -> list[str]:
        return sorted(self.disk.listdir("/store/tables/1"))


class TreeUnderTest(ShardUnderTest):
    """A tree to which edits are applied, and what it needs to run."""

    def __init__(self, disk: SimulatedDisk | None = None, *, grace_s: float = 60.0) -> None:
        self.edits: list[Edit] = []
        super().__init__(disk, grace_s=grace_s)

    def replay(self) -> None:
        for edit in self.edits:
            if edit.lsn > self.tree.stored:
                self.tree.apply(edit)

    def write(self, writes: Sequence[Write]) -> Edit:
        return self.write_at(writes, 1 + self.tree.lsn, self.clock.time_us())

    def write_at(self, writes: Sequence[Write], lsn: int, time_us: int) -> Edit:
        edit = to_edit(writes, lsn, time_us)
        self.edits.append(edit)
        self.tree.apply(edit)
        return edit


def to_edit(writes: Sequence[Write], lsn: int, time_us: int) -> Edit:
    """Distinct keys, ranges first: the folding within a record is the table kind's business."""
    rows: dict[bytes, Row] = {}
    ranges: list[tuple[bytes, bytes]] = []
    for kind, key, value, expires_us in writes:
        if kind == "delete_range":
            ranges.append((key, value))
        elif kind == "put":
            rows[key] = (PUT, value, lsn, expires_us)
        elif kind == "delete":
            rows[key] = (DELETE, b"", lsn, NEVER)
        else:
            rows[key] = (check_operand(kind, value), value, lsn, expires_us)
    if not ranges and all(row[0] == PUT and row[3] == NEVER for row in rows.values()):
        return Edit(lsn=lsn, time_us=time_us, puts={key: row[1] for key, row in rows.items()})
    return Edit(lsn=lsn, time_us=time_us, rows=rows, ranges=ranges)


class Model:
    """A dict that does the same, one record after the other."""

    def __init__(self) -> None:
        self.rows: dict[bytes, tuple[bytes, int]] = {}
        self.lsns: dict[bytes, int] = {}  # of the last record that wrote to a key

    def copy(self) -> Model:
        copy = Model()
        copy.rows, copy.lsns = dict(self.rows), dict(self.lsns)
        return copy

    def write(self, writes: Sequence[Write], time_us: int, lsn: int = 0) -> None:
        ranges = [(w.key, w.value) for w in writes if w.kind == "delete_range"]
        self.rows = {k: r for k, r in self.rows.items() if not any(a <= k < b for a, b in ranges)}
        last = {w.key: w for w in writes if w.kind != "delete_range"}
        self.lsns |= dict.fromkeys(last, lsn)
        for kind, key, value, expires_us in last.values():
            older = self.rows.get(key)
            if older is not None and older[1] <= time_us:
                older = None
            if kind == "delete":
                self.rows.pop(key, None)
            elif kind == "put" or older is None:
                self.rows[key] = (value, expires_us)
            else:
                self.rows[key] = (_merge(kind, older[0], value), older[1] if expires_us == NEVER else expires_us)

    def live(self, now_us: int) -> dict[bytes, bytes]:
        return {key: value for key, (value, expires) in sorted(self.rows.items()) if expires > now_us}

    def stamped(self, now_us: int) -> list[tuple[bytes, bytes, int]]:
        """What is live, with LSNs."""
        return [(key, value, self.lsns[key]) for key, value in self.live(now_us).items()]


def _merge(kind: str, older: bytes, newer: bytes) -> bytes:
    if kind == "append":
        return older + newer
    if kind == "union":
        try:
            return union_of({*union_items(older), *union_items(newer)})
        except ValueError:
            return older
    if len(older) != 8:
        return older
    a, b = (int.from_bytes(number, "little", signed=True) for number in (older, newer))
    result = {"add_i64": a + b, "min_i64": min(a, b), "max_i64": max(a, b)}[kind]
    return ((result + (1 << 63)) % (1 << 64) - (1 << 63)).to_bytes(8, "little", signed=True)
