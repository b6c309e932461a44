"""The change feed of a vector shard is the difference of its states, whatever is written, stored and opened again."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from vector_under_test import DIMENSIONS, VectorModel, VectorUnderTest, deletes, upserts

import penstock
import penstock.kinds.changes as feed_module
import penstock.vector.changes as changes_module
from penstock.kinds.changes import NAMES
from penstock.lsm.view import View
from penstock.vector.options import VectorOptions
from penstock.vector.section import Part

Rows = dict[str, Any]


def follow(rows: Rows, changes: list[tuple[str, str, Any]], *, preimages: bool) -> Rows:
    """The records after the changes of one commit; an error if one of them is not a change of those before."""
    before, rows = rows, dict(rows)
    for number, (kind, name, record) in enumerate(changes):
        assert (kind == "insert") == (name not in before)
        if kind == "update_preimage":
            assert preimages
            assert changes[number + 1][:2] == ("update_postimage", name)
            assert record == before[name]
        elif kind == "delete":
            assert record == (before[name] if preimages else None)
            del rows[name]
        else:
            rows[name] = record
    return rows


def drive(seed: int) -> None:
    chance = random.Random(seed)
    preimages = seed % 2 == 0
    options = VectorOptions(
        dimensions=DIMENSIONS, metric="euclidean", changes=penstock.ChangeOptions(preimages=preimages)
    )
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(changes_module, "PART_BYTES", chance.choice([50, 4 << 20]))
        patches.setattr(feed_module, "LOADED_BYTES", chance.choice([300, 64 << 20]))
        shard, model, rows, last_lsn = VectorUnderTest(options=options), VectorModel(), Rows(), 0
        for step in chance.choices("wwwdfcrs", k=40):
            if step == "w":
                names = chance.sample("abcdefgh", chance.randint(1, 5))
                record = {name: (tuple(chance.choices([1.0, -2.0, 0.5], k=DIMENSIONS)), {"n": seed}) for name in names}
                parts: list[Part] = [upserts(record), deletes(*chance.sample("abcdefgh", chance.randint(0, 2)))]
                shard.write(*parts)
                for part in parts:
                    model.add(part)
            elif step == "d":
                shard.write(part := deletes(*chance.sample("abcdefgh", 3)))
                model.add(part)
            elif step == "f":
                shard.flush()
            elif step == "c":
                shard.compact()
            elif step == "r":
                shard.reopen()
            elif model.records:
                shard.write(shard.step())  # of the index: no change
            state = shard.machine.snapshot()
            assert state.feed is not None
            changes: list[tuple[str, str, Any]] = []
            for _, _, _, data in state.feed.parts(last_lsn + 1, 1 << 60):
                types, batch = changes_module.read_changes(data, options)
                for kind, row in zip(types, batch.to_pylist(), strict=True):
                    record_now = None if row["vector"] is None else (tuple(row["vector"]), row["attributes"])
                    changes.append((NAMES[kind], row["id"], record_now))
            state.close()
            rows, last_lsn = follow(rows, changes, preimages=preimages), shard.tree.lsn
            assert {name: vector for name, (vector, _) in rows.items()} == {
                name: vector for name, (vector, _) in model.records.items()
            }
        shard.close()


@pytest.mark.parametrize("seed", range(4))
def test_by_chance(seed: int) -> None:
    drive(seed)


def test_a_feed_that_reads_no_state_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(View, "existing", lambda self, keys: np.zeros(len(keys), np.bool_))
    with pytest.raises(AssertionError):
        drive(1)
