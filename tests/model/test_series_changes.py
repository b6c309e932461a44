"""The change feed of a series shard is the difference of its states: writes, deletes, retention; reopening, crashes."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from series_under_test import Contents, SeriesUnderTest, block, labels
from test_series_machine import MINUTE, chance_parts, make_small

import penstock
import penstock.kinds.changes as feed_module
import penstock.series.changes as changes_module
from penstock.kinds.changes import INSERT, POSTIMAGE, PREIMAGE, REMOVAL
from penstock.series.changes import NewestTimes, read_changes
from penstock.series.labels import METRIC
from penstock.series.options import SeriesOptions
from penstock.series.section import Part, SampleBlock

Patch = pytest.MonkeyPatch
Change = tuple[int, object, int | None]  # type, labels and time, bits


def changes_of(shard: SeriesUnderTest, after: int = 0) -> list[tuple[int, list[Change]]]:
    """The changes of each commit."""
    state, by_lsn = shard.machine.snapshot(), dict[int, list[Change]]()
    assert state.feed is not None
    for lsn, _, rows, data in state.feed.parts(after + 1, 1 << 60):
        types, batch = read_changes(data)
        assert batch.num_rows == rows == len(types)
        bits = batch.column("value").fill_null(0).to_numpy().view(np.uint64).tolist()
        for kind, row, value in zip(types, batch.to_pylist(), bits, strict=True):
            key = tuple(sorted([(METRIC, row["metric"]), *row["labels"]])), int(row["time"].timestamp() * 1e6)
            by_lsn.setdefault(lsn, []).append((kind, key, None if row["value"] is None else value))
    state.close()
    return list(by_lsn.items())


def in_any_order(commits: list[tuple[int, list[Change]]]) -> list[tuple[int, list[Change]]]:
    """The commits in order, the changes of each in any: a replay may have them in another."""
    return [(lsn, sorted(changes, key=repr)) for lsn, changes in commits]


def difference(before: Contents, after: Contents, written: set[object], preimages: bool) -> list[Change]:
    changes: list[Change] = []
    for key in {**before, **after}:
        if key not in after:
            changes.append((REMOVAL, key, before[key] if preimages else None))
        elif key not in before:
            changes.append((INSERT, key, after[key]))
        elif key in written or before[key] != after[key]:
            changes += [(PREIMAGE, key, before[key])] if preimages else []
            changes.append((POSTIMAGE, key, after[key]))
    return changes


def follow(rows: Contents, changes: list[Change]) -> Contents:
    rows = dict(rows)
    for kind, key, bits in changes:
        if kind == REMOVAL:
            del rows[key]  # type: ignore[arg-type]
        elif kind != PREIMAGE:
            assert bits is not None
            rows[key] = bits  # type: ignore[index]
    return rows


def drive(seed: int, steps: int = 30) -> None:
    chance = random.Random(seed)
    preimages = seed % 2 == 0
    with pytest.MonkeyPatch.context() as patches:
        make_small(patches, collide=seed % 3 == 0, forget=seed % 5 == 0, divide=seed % 4 < 2)
        patches.setattr(changes_module, "PART_BYTES", chance.choice([100, 300, 4 << 20]))
        patches.setattr(changes_module, "SHOWN_BYTES_MAX", chance.choice([100, 1 << 20]))
        patches.setattr(changes_module, "IDS_REMEMBERED_MAX", chance.choice([2, 1 << 20]))
        patches.setattr(feed_module, "LOADED_BYTES", chance.choice([500, 1 << 20]))
        options = SeriesOptions(bucket_s=300, changes=penstock.ChangeOptions(preimages=preimages))
        shard, before, last_lsn = SeriesUnderTest(options=options), Contents(), 0
        everything: list[tuple[int, list[Change]]] = []
        appended = 0
        for step in chance.choices("wwwaaafcnr", k=steps):
            parts: list[Part] = []
            if step == "w":
                parts = chance_parts(chance)
            elif step == "a":  # samples in the order of time, as most are
                appended += MINUTE
                parts = [block([(labels("cpu", host=host), appended, seed) for host in "ab"])]
            elif step == "f":
                shard.flush()
            elif step == "c":
                shard.compact()
            elif step == "n":
                shard.tree.freeze()
            else:
                shard.reopen()
            if parts:
                shard.write(*parts)
            after, changes = shard.select(), changes_of(shard, last_lsn)
            written: set[object] = {
                (part.series.labels(row), time)
                for part in parts
                if isinstance(part, SampleBlock)
                for row, time in zip(part.index.tolist(), part.times.tolist(), strict=True)
            }
            expected = difference(before, after, written, preimages)
            actual = changes[0][1] if changes else []
            assert len(changes) <= 1
            assert sorted(actual, key=repr) == sorted(expected, key=repr)
            for number, (kind, key, _) in enumerate(actual):
                assert kind != PREIMAGE or actual[number + 1][:2] == (POSTIMAGE, key)
            everything += changes
            last_lsn, before = shard.tree.lsn, after
        assert in_any_order(changes_of(shard)) == in_any_order(everything), "what a reader has seen stays"
        rebuilt: Contents = {}
        for _, some in everything:
            rebuilt = follow(rebuilt, some)
        assert rebuilt == before
        shard.close()


@pytest.mark.parametrize("seed", range(8))
def test_by_chance(seed: int) -> None:
    drive(seed)


@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_by_much_chance() -> None:
    for seed in range(100, 3_000):
        drive(seed, 80)


def newest_of_the_last_record(patch: pytest.MonkeyPatch) -> None:
    """The newest time of a series is that of its last sample, even if an earlier one was later."""
    right = NewestTimes.append

    def append(self: NewestTimes, bucket: int, samples: object, known_last: int | None) -> bool:
        later = right(self, bucket, samples, known_last)  # type: ignore[arg-type]
        self._buckets[bucket][samples.ids] = samples.times  # type: ignore[attr-defined]
        return later

    patch.setattr(NewestTimes, "append", append)


def trimmed_series_are_others(patch: pytest.MonkeyPatch) -> None:
    """A series that is written again in a trimmed bucket is not found by its labels."""
    patch.setattr(changes_module._Comparison, "_renumbered", lambda self: {})


def nothing_is_read(patch: pytest.MonkeyPatch) -> None:
    """Every sample is taken for a new one."""
    patch.setattr(NewestTimes, "append", lambda *_: True)


@pytest.mark.parametrize("seed_bug", [newest_of_the_last_record, trimmed_series_are_others, nothing_is_read])
def test_seeded_bugs_are_caught(seed_bug: Callable[[Patch], None], monkeypatch: Patch) -> None:
    seed_bug(monkeypatch)
    with pytest.raises((AssertionError, KeyError, IndexError)):
        for seed in range(40):
            drive(seed)
