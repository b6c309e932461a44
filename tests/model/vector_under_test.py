"""A vector shard on a simulated disk, with a manifest in memory, and a model of what it must answer."""

from __future__ import annotations

from typing import Any

import numpy as np
from tree_under_test import ShardUnderTest

from penstock.journal.partitions import partition_id
from penstock.kinds.changes import open_feed
from penstock.partition.machine import Entry, PartitionDescriptor
from penstock.testing import SimulatedDisk
from penstock.vector import indexing
from penstock.vector.attributes import decode_attributes, encode_attributes
from penstock.vector.machine import VectorMachine
from penstock.vector.options import Metric, VectorOptions
from penstock.vector.reading import VectorState
from penstock.vector.section import (
    Deletes,
    IndexChange,
    Part,
    Upserts,
    VectorSection,
    decode_section,
    encode_section,
)
from penstock.vector.stored import read_generations

DIMENSIONS = 3
OPTIONS = VectorOptions(dimensions=DIMENSIONS, metric="euclidean")
DESCRIPTOR = PartitionDescriptor(partition_id(1, 0), 1, 0, "docs", "vector")
Records = dict[str, tuple[tuple[float, ...], dict[str, Any]]]  # vector and attributes by id


def upserts(rows: Records) -> Upserts:
    """A part of a section, as a writer makes it."""
    return Upserts(
        [external.encode() for external in rows],
        np.array([vector for vector, _ in rows.values()], np.float32).reshape(len(rows), -1),
        [encode_attributes(attributes) for _, attributes in rows.values()],
    )


def deletes(*ids: str) -> Deletes:
    return Deletes([external.encode() for external in ids])


def no_stop() -> None:
    """A check that never stops a step."""


class VectorModel:
    """A dict that does the same, one part after the other."""

    def __init__(self, metric: Metric = "euclidean") -> None:
        self.records: Records = {}
        self.metric = metric

    def add(self, part: Part) -> None:
        if isinstance(part, Upserts):
            for external, vector, data in zip(part.ids, part.vectors.tolist(), part.attributes_of(), strict=True):
                self.records[external.decode()] = tuple(vector), decode_attributes(data)
        elif isinstance(part, Deletes):
            for external in part.ids:
                self.records.pop(external.decode(), None)

    def distances(self, query: list[float], where: dict[str, Any] | None = None) -> dict[str, float]:
        """The distance of each vector that passes."""
        distances: dict[str, float] = {}
        for name, (vector, attributes) in self.records.items():
            if where is None or all(attributes.get(key) == value for key, value in where.items()):
                a, b = np.array(vector, np.float64), np.array(query, np.float64)
                if self.metric == "euclidean":
                    distances[name] = float(np.linalg.norm(a - b))
                elif self.metric == "dot":
                    distances[name] = -float(a @ b)
                else:
                    distances[name] = 1 - float(a @ b) / float(np.linalg.norm(a) * np.linalg.norm(b))
        return distances

    def copy(self) -> VectorModel:
        other = VectorModel(self.metric)
        other.records = dict(self.records)
        return other


def contents(state: VectorState) -> Records:
    """What a shard holds, as the model has it; raises if an id comes twice."""
    records: Records = {}
    for batch in state.scan_arrow(b"", None):
        for row in batch.to_pylist():
            assert row["id"] not in records, "an id comes twice"
            records[row["id"]] = tuple(row["vector"]), decode_attributes((row["attributes"] or "").encode())
    return records


def nearest(
    state: VectorState, query: list[float], k: int, *, exact: bool = True, where: Any = None
) -> list[tuple[str, float]]:
    """The ids and distances of the nearest vectors."""
    distances, ids = state.nearest(np.array([query], np.float32), k, exact=exact, where=where)
    hits = [(number, distance) for number, distance in zip(ids[0].tolist(), distances[0].tolist(), strict=True)]
    hits = [hit for hit in hits if hit[0] >= 0]
    names = state.records(np.array([number for number, _ in hits], np.int64))[0].to_pylist()
    return list(zip(names, [distance for _, distance in hits], strict=True))


def check_nearest(hits: list[tuple[str, float]], expected: dict[str, float], k: int) -> None:
    """Raise if these are not the nearest: equal distances may come in any order."""
    best = sorted(expected.values())[:k]
    assert len({name for name, _ in hits}) == len(hits) == len(best), (hits, expected)
    np.testing.assert_allclose([distance for _, distance in hits], best, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose([distance for _, distance in hits], [expected[n] for n, _ in hits], rtol=1e-4, atol=1e-3)


class VectorUnderTest(ShardUnderTest):
    """A vector shard with what it needs to run, reopen and replay its records."""

    def __init__(
        self, disk: SimulatedDisk | None = None, *, options: VectorOptions = OPTIONS, grace_s: float = 60.0
    ) -> None:
        self.records: list[tuple[int, int, bytes]] = []  # lsn, time, section
        self._options = options
        super().__init__(disk, grace_s=grace_s)

    def replay(self) -> None:
        changes = self._options.changes
        feed = None if changes is None else open_feed(self.maintenance, DESCRIPTOR, self.tree, changes)
        self.machine = VectorMachine(self.tree, self.maintenance, DESCRIPTOR, self._options, feed=feed)
        for lsn, time_us, payload in self.records:
            if lsn > self.tree.stored:
                self.apply(lsn, time_us, decode_section(payload))

    def write(self, *parts: Part) -> int:
        lsn, time_us, section = 1 + self.tree.lsn, self.clock.time_us(), VectorSection(*parts)
        self.records.append((lsn, time_us, encode_section(section)))
        self.apply(lsn, time_us, section)
        return lsn

    def apply(self, lsn: int, time_us: int, section: VectorSection) -> None:
        self.machine.apply(Entry(lsn, time_us, (), (section,)))

    # -- the steps of a new generation, as jobs do them

    def step(self) -> IndexChange:
        """Return the next step of a new generation; begin one if none is being built."""
        rows, now = self.tree.view, read_generations(self.tree.view)
        if not now.building:
            return indexing.train(rows, self._options, no_stop)
        start = max(1, now.assigned)
        if start < now.until:
            end = min(start + 5, now.until)
            added = indexing.assign(rows, self._options, start, end, no_stop)
            return IndexChange(generation=now.building, added=added, assigned=end)
        return indexing.use(rows, self._options, no_stop)
