"""The change feed of a vector table leads from each commit to the next, through crashes, flushes and compactions."""

from __future__ import annotations

import random
from typing import Any

import pytest
from store_model import open_simulated

import penstock
from penstock.errors import CorruptionError
from penstock.testing import FakeClock, SimulatedDisk
from penstock.vector.changes import read_changes
from penstock.vector.options import VectorOptions

Rows = dict[str, tuple[Any, Any]]


def rows_of(table: Any) -> Rows:
    columns = table.to_arrow().to_pydict()
    return dict(zip(columns["id"], zip(columns["vector"], columns["attributes"], strict=True), strict=True))


def follow(rows: Rows, changes: Any, *, preimages: bool) -> Rows:
    rows = dict(rows)
    for change in changes.to_pylist():
        external, kind, record = change["id"], change["_change_type"], (change["vector"], change["attributes"])
        assert (kind == "insert") == (external not in rows)
        if kind == "update_preimage":
            assert rows[external] == record
        elif kind == "delete":
            assert record == (rows.pop(external) if preimages else (None, None))
            rows.pop(external, None)
        else:
            rows[external] = record
    return rows


@pytest.mark.parametrize("preimages", [False, True])
def test_each_commit_leads_to_the_next(preimages: bool) -> None:
    disk, clock, chance = SimulatedDisk(), FakeClock(), random.Random(preimages)
    store = open_simulated(disk, clock)
    options = penstock.ChangeOptions(preimages=preimages)
    docs = store.vector("docs", dimensions=2, shards=2, changes=options)
    rows: Rows = {}
    last = 0
    for _ in range(40):
        ids = [f"id{number}" for number in chance.sample(range(90), chance.choice([1, 3, 70]))]
        action = chance.randrange(6)
        if action < 3:
            attributes = [{"n": chance.randrange(9)} if chance.random() < 0.5 else {} for _ in ids]
            docs.upsert(ids, [[chance.random(), 1.0] for _ in ids], attributes=attributes)
        elif action == 3:
            docs.delete(ids)
        elif action == 4:
            for tree, _ in store._maintenance.trees():
                store._maintenance.flush(tree)
            store._checkpoint.run(everything=True)
        else:
            store.flush()
            disk = disk.image().restore("strict")
            store = open_simulated(disk, clock)
            docs = store.vector("docs")
        store.flush()
        with store.snapshot() as snapshot:
            table = snapshot.vector("docs")
            now = rows_of(table)
            assert follow(rows, table.changes(after=last).to_arrow(), preimages=preimages) == now
            rows, last = now, snapshot.lsn
    assert follow({}, docs.changes().to_arrow(), preimages=preimages) == rows
    store.close()


def test_damaged_parts_are_an_error() -> None:
    for data in (b"", b"\1" + b"\0" * 7, b"\0\0\0\0\1\0\0\0\0", b"\0\0\0\0\0\0\0\0x"):
        with pytest.raises(CorruptionError):
            read_changes(data, VectorOptions(dimensions=2))
