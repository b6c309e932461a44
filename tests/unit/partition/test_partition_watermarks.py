"""Who moves which watermark, and when a waiting entry stops to count (ADRs 0010 and 0011)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_model import SETTINGS, open_simulated

from penstock.errors import Backpressure
from penstock.kv.machine import KvMachine
from penstock.lsm.memtable import Edit, Memtable
from penstock.lsm.tree import Tree
from penstock.partition.admission import DispatcherSettings
from penstock.partition.machine import Entry
from penstock.partition.partition import Partition
from penstock.store.store import Store
from penstock.testing import FakeClock, SimulatedDisk

WAITING = replace(SETTINGS, dispatcher=DispatcherSettings(attempts_max=1_000, backoff_s=1e9))


class Gate:
    """Lets so many entries of the table `slow` be applied."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.room = 0
        self.applied = list[int]()
        apply = KvMachine.apply

        def gated(machine: KvMachine, entry: Entry) -> None:
            if machine._descriptor.name == "slow":
                if not self.room:
                    raise RuntimeError("not now")
                self.room -= 1
                self.applied.append(entry.lsn)
            apply(machine, entry)

        patch.setattr(KvMachine, "apply", gated)

    def pass_on(self, store: Store, count: int) -> None:
        self.room = count
        store.resume("slow")
        self.room = 0


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


def partition_of(store: Store) -> Partition:
    return store._dispatcher.partition(store.kv("slow")._partitions[0])


def test_what_is_durable_moves_applied_nowhere(gate: Gate) -> None:
    """The table of ADR 0010: two records become durable before the first is applied."""
    with open_simulated(SimulatedDisk(), FakeClock(), WAITING) as store:
        slow = store.kv("slow")
        partition, lsns = partition_of(store), list[int]()
        before = partition.watermarks.applied
        for key in (b"first", b"second"):
            slow.put(key, b"x", durable=True)
            lsns.append(store._consensus.committed)
            marks = partition.watermarks
            assert (marks.applied, marks.durable, marks.highest) == (before, lsns[-1], lsns[-1])
        gate.pass_on(store, 1)
        assert (partition.watermarks.applied, partition.watermarks.durable) == (lsns[0], lsns[1])
        gate.pass_on(store, 1)
        assert partition.watermarks.applied == partition.watermarks.durable == lsns[1]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from(["put", "apply", "apply all", "flush", "checkpoint", "reopen"]), max_size=20))
def test_watermarks_are_in_order_and_follow_what_happens(steps: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        gate, disk, clock = Gate(patch), SimulatedDisk(), FakeClock()
        store = open_simulated(disk, clock, WAITING)
        store.kv("slow")
        last = 0
        for number, step in enumerate(steps):
            if step == "put":
                store.kv("slow").put(b"%d" % number, b"x", durable=True)
                last = store._consensus.committed
            elif step == "flush":
                for tree, _ in store._maintenance.trees():
                    store._maintenance.flush(tree)
            elif step == "checkpoint":
                store.checkpoint()
            elif step == "reopen":
                store.close()
                gate.applied.clear()
                store = open_simulated(disk, clock, WAITING)
            else:
                gate.pass_on(store, 1 if step == "apply" else 1_000)
            marks = partition_of(store).watermarks  # whose order checks itself
            assert marks.highest >= last
            if gate.applied:
                assert marks.applied == gate.applied[-1]
        store.close()


def watch(patch: pytest.MonkeyPatch) -> Callable[[Tree], None]:
    """Note how far a tree says it is while an edit is installed."""
    apply = Memtable.apply

    def follow(tree: Tree) -> None:
        def noted(memtable: Memtable, edit: Edit) -> None:
            assert tree.lsn < edit.lsn, "the watermark moved before the view"
            apply(memtable, edit)
            assert tree.lsn < edit.lsn, "the watermark moved before the view"

        patch.setattr(Memtable, "apply", noted)

    return follow


def test_the_watermark_moves_after_the_view(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_simulated(SimulatedDisk(), FakeClock()) as store:
        table = store.kv("t")
        table.put(b"a", b"1", durable=True)
        tree = next(tree for tree, catalog in store._maintenance.trees() if catalog.db_id == 2)
        watch(monkeypatch)(tree)
        tree.apply(Edit(lsn=tree.lsn + 1, time_us=1, puts={b"b": b"2"}))
        apply = Tree.apply

        def early(self: Tree, edit: Edit) -> None:
            before, self.lsn = self.lsn, edit.lsn  # the seeded bug
            try:
                apply(self, msgspec.structs.replace(edit, lsn=edit.lsn + 1))
            finally:
                self.lsn = before

        monkeypatch.setattr(Tree, "apply", early)
        with pytest.raises(AssertionError, match="before the view"):
            noted_lsn = tree.lsn
            tree.apply(Edit(lsn=noted_lsn + 2, time_us=1, puts={b"c": b"3"}))
            assert tree.get(b"c") is None, "the watermark moved before the view"


@pytest.mark.parametrize("limit", [1, 3])
def test_one_apply_lets_one_more_in(gate: Gate, limit: int) -> None:
    limits = replace(WAITING.dispatcher, partition_operations_max=limit)
    with open_simulated(SimulatedDisk(), FakeClock(), replace(WAITING, dispatcher=limits)) as store:
        slow = store.kv("slow")
        for number in range(limit):
            slow.put(b"%d" % number, b"x", durable=True)
        for _ in range(2):
            with pytest.raises(Backpressure, match=f"{limit} waiting operations"):
                slow.put(b"more", b"x", durable=True)
            gate.pass_on(store, 1)
            slow.put(b"more", b"x", durable=True)
        gate.pass_on(store, 1_000)
        partition = partition_of(store)
        assert (len(partition.backlog), partition.backlog_bytes, store._dispatcher.backlogs.behind) == (0, 0, set())


def test_nothing_is_counted_when_all_was_judged(gate: Gate) -> None:
    """Accepted, a duplicate, and void because the table is gone."""
    gate.room = 1_000
    with open_simulated(SimulatedDisk(), FakeClock(), WAITING) as store:
        store.kv("slow")
        for token in (5_000, 5_000, 5_001):
            with store.batch(token=("p", token)) as batch:
                batch.kv("slow").put(b"k", b"x")
        gate.room = 0
        store.kv("slow").put(b"waits", b"x", durable=True)
        assert store._dispatcher.backlogs.behind == {partition_of(store)}
        store.drop("slow")
        assert store._dispatcher.backlogs.behind == set()
