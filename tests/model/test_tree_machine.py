"""A tree against a dict: any operations in any order, with flush, compaction, snapshots, time and reopening between."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import initialize, invariant, precondition, rule, run_state_machine_as_test
from lsm_files import puts
from lsm_files import write as write_sstable
from maintenance_rules import MaintenanceRules
from tree_under_test import Model, TreeUnderTest, Write

from penstock.lsm import memtable
from penstock.lsm.operators import union_of
from penstock.lsm.rows import NEVER
from penstock.lsm.snapshot import Snapshot

LONG = b"shared/prefix/of/some/length/" * 2
keys = st.one_of(
    st.sampled_from([b"a", b"a\0", b"a\0\0", b"b", b"\xff", b"\xff\xff", b""]),
    st.binary(max_size=3),
    st.integers(0, 40).map(lambda n: LONG + b"%02d" % n),
)
numbers = st.integers(-(2**63), 2**63 - 1).map(lambda n: n.to_bytes(8, "little", signed=True))
values = st.one_of(st.binary(max_size=20), numbers)
ttl = st.sampled_from([0, 0, 0, 1_000_000, 60_000_000])


@st.composite
def writes(draw: st.DrawFn) -> list[Write]:
    batch: list[Write] = []
    puts_only = draw(st.booleans())  # as most records are: bare values
    for _ in range(draw(st.integers(1, 12))):
        kind = (
            "put"
            if puts_only
            else draw(
                st.sampled_from(
                    ["put"] * 5 + ["delete"] * 2 + ["delete_range", "add_i64", "max_i64", "append", "union"]
                )
            )
        )
        key = draw(keys)
        if kind == "delete_range":
            low, high = sorted((key, draw(keys)))
            batch.append(Write(kind, low, high))
        elif kind == "delete":
            batch.append(Write(kind, key))
        else:
            if kind == "union":
                value = union_of(draw(st.frozensets(st.binary(max_size=3), max_size=3)))
            else:
                value = draw(numbers if kind.endswith("i64") else values)
            batch.append(Write(kind, key, value, 0 if puts_only else draw(ttl)))
    return batch


class TreeMachineRules(MaintenanceRules):
    shard: TreeUnderTest

    @initialize(bare=st.booleans())
    def start(self, bare: bool) -> None:
        self.patches = pytest.MonkeyPatch()
        if bare:
            self.patches.setattr(memtable, "_BARE_PUTS_MIN", 1)
        self.shard = TreeUnderTest()
        self.model = Model()
        self.snapshots: list[tuple[Snapshot, dict[bytes, bytes], list[tuple[bytes, bytes, int]]]] = []

    def teardown(self) -> None:
        self.patches.undo()
        if hasattr(self, "shard"):
            self.shard.close()

    @property
    def now_us(self) -> int:
        return max(self.shard.clock.time_us(), self.shard.tree.time_us)

    @rule(batch=writes())
    def write(self, batch: list[Write]) -> None:
        now_us = self.now_us  # a record's time never goes back
        timed = [
            w._replace(expires_us=now_us + w.expires_us if w.expires_us not in (0, NEVER) else NEVER) for w in batch
        ]
        self.shard.write_at(timed, self.shard.tree.lsn + 1, now_us)
        self.model.write(timed, now_us, self.shard.tree.lsn)

    @rule(seconds=st.sampled_from([0.5, 2.0, 100.0]))
    def time_passes(self, seconds: float) -> None:
        self.shard.clock.advance(seconds)

    @rule(seconds=st.sampled_from([-3600.0, -1.0, 3600.0]))
    def clock_jumps(self, seconds: float) -> None:
        self.shard.clock.jump(seconds)

    @rule(pairs=st.dictionaries(keys, values, min_size=1, max_size=8), cut=st.integers(0, 8))
    def adopt(self, pairs: dict[bytes, bytes], cut: int) -> None:
        """Files built elsewhere, one or two, as one run."""
        shard, ordered = self.shard, sorted(pairs)
        parts = [part for part in (ordered[:cut], ordered[cut:]) if part]
        ids = [int(shard.manifest.reserve_chunk_id()) for _ in parts]
        for chunk_id, part in zip(ids, parts, strict=True):
            path = f"/store/tables/1/{chunk_id:020d}.sst"
            write_sstable(shard.disk, path, puts({key: pairs[key] for key in part}), chunk_id=chunk_id)
        now_us = max(shard.clock.time_us(), shard.tree.time_us)
        shard.maintenance.adopt(shard.tree, ids, shard.tree.lsn + 1, now_us)
        self.model.write([Write("put", key, value) for key, value in pairs.items()], now_us, shard.tree.lsn)

    @precondition(lambda self: len(self.snapshots) < 4)
    @rule()
    def snapshot(self) -> None:
        now_us = self.now_us
        self.snapshots.append((self.shard.tree.snapshot(), self.model.live(now_us), self.model.stamped(now_us)))

    @precondition(lambda self: self.snapshots)
    @rule(data=st.data(), close=st.booleans())
    def read_snapshot(self, data: st.DataObject, close: bool) -> None:
        position = data.draw(st.integers(0, len(self.snapshots) - 1))
        snapshot, expected, stamped = self.snapshots[position]
        assert dict(snapshot.scan()) == expected
        assert list(snapshot.scan(reverse=True)) == list(reversed(expected.items()))
        assert arrow(snapshot.scan_arrow()) == stamped
        if close:
            snapshot.close()
            del self.snapshots[position]

    @precondition(lambda self: not self.snapshots)
    @rule()
    def reopen(self) -> None:
        self.shard.reopen()

    @rule(
        start=keys,
        end=st.one_of(st.none(), keys),
        prefix=st.sampled_from([b"", b"a", LONG, b"\xff"]),
        limit=st.integers(-1, 5),
    )
    def scan(self, start: bytes, end: bytes | None, prefix: bytes, limit: int) -> None:
        stamped = [
            row
            for row in self.model.stamped(self.now_us)
            if start <= row[0] and (end is None or row[0] < end) and row[0].startswith(prefix)
        ]
        live = [row[:2] for row in stamped]
        cut = slice(None) if limit < 0 else slice(limit)
        tree = self.shard.tree
        assert list(tree.scan(start, end, prefix=prefix, limit=limit)) == live[cut]
        assert list(tree.scan(start, end, prefix=prefix, limit=limit, reverse=True)) == live[::-1][cut]
        assert arrow(tree.scan_arrow(start, end, prefix=prefix)) == stamped

    @rule(some=st.lists(keys, max_size=5))
    def get(self, some: list[bytes]) -> None:
        live = self.model.live(self.now_us)
        assert [self.shard.tree.get(key) for key in some] == [live.get(key) for key in some]

    @invariant()
    def all_is_there(self) -> None:
        if hasattr(self, "shard"):
            live = self.model.live(self.now_us)
            assert dict(self.shard.tree.scan()) == live
            assert {key: self.shard.tree.get(key) for key in live} == live


def arrow(batches: object) -> list[tuple[bytes, bytes, int]]:
    rows: list[tuple[bytes, bytes, int]] = []
    for batch in batches:  # type: ignore[attr-defined]
        rows += zip(*(batch.column(name).to_pylist() for name in ("key", "value", "lsn")), strict=True)
    return rows


TestTree = TreeMachineRules.TestCase
TestTree.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_tree_for_long() -> None:
    long = settings(max_examples=2_000, stateful_step_count=50, deadline=None)
    run_state_machine_as_test(TreeMachineRules, settings=long)
