"""A store against a plain model: every read at every moment, whatever happens to files, journal and process."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from store_model import StoreModel, Token, Write, difference, number, open_simulated, perform, read_all

from penstock.errors import TokenTooOld
from penstock.store.flusher import StoreFlusher
from penstock.testing import FakeClock, SimulatedDisk

NAMES = {"a": 1, "b": 3, "c": 1}  # table: shards
keys = st.sampled_from([b"", b"a", b"aa", b"ab", b"b", b"b\xff", b"\xff", b"c0", b"c1", b"c2"])
values = st.binary(max_size=12)
ttls = st.sampled_from([None, None, None, 2.0, 5.0])
tables = st.sampled_from(sorted(NAMES))
tokens = st.builds(Token, st.sampled_from("pq"), st.sampled_from([0, 1, 2, 3, 5, 8, 13, 1_030, 1_040, 2_100]))
operands = st.sampled_from([number(1), number(-3), number(1 << 40)])
writes = st.one_of(
    st.builds(Write, tables, st.just("put"), keys, values, ttls),
    st.builds(Write, tables, st.just("delete"), keys, st.just(b""), st.none()),
    st.builds(Write, tables, st.sampled_from(["add_i64", "min_i64", "max_i64"]), keys, operands, ttls),
    st.builds(Write, tables, st.just("append"), keys, values, ttls),
    st.builds(lambda t, a, b: Write(t, "delete_range", min(a, b), max(a, b) + b"\x00"), tables, keys, keys),
)


class StoreMachine(RuleBasedStateMachine):
    """Plain writes reach the model at once; time stands still while they are not flushed."""

    def __init__(self) -> None:
        super().__init__()
        self.disk, self.clock, self.model = SimulatedDisk(), FakeClock(), StoreModel()
        self.applied = StoreModel()  # what a snapshot must show: all up to the last flush
        self.snapshots: list[tuple[Any, dict[str, dict[bytes, bytes]]]] = []  # snapshots and what they showed at first
        self.store = open_simulated(self.disk, self.clock)

    @initialize()
    def begin(self) -> None:
        for name in NAMES:
            self._create(name)

    def teardown(self) -> None:
        for snapshot, _ in self.snapshots:
            snapshot.close()
        self.store.close()

    def _create(self, name: str) -> None:
        self.store.kv(name, shards=NAMES[name])
        self.model.create(name)
        self._flushed()

    def _flushed(self) -> None:
        self.applied = self.model.copy()

    # -- writes

    @rule(write=writes)
    def write(self, write: Write) -> None:
        if write.table in self.model.tables:
            perform(self.store.kv(write.table, create=False), write)
            self.model.write(write, self.clock.time_us())

    @rule(table=tables, rows=st.dictionaries(keys, values, max_size=5))
    def put_many(self, table: str, rows: dict[bytes, bytes]) -> None:
        if table in self.model.tables:
            self.store.kv(table, create=False).put_many(rows)
            for key, value in rows.items():
                self.model.write(Write(table, "put", key, value), self.clock.time_us())

    @rule(batch=st.lists(writes, max_size=6), token=st.none() | tokens, durable=st.booleans())
    def batch(self, batch: list[Write], token: Token | None, durable: bool) -> None:
        batch = [write for write in batch if write.table in self.model.tables]
        verdict = "accepted" if token is None else self.model.verdict(token)
        if token is None:
            self.model.batch(batch, self.clock.time_us())  # seen from now on
        try:
            with self.store.batch(token=token, durable=durable) as handle:
                for write in batch:
                    perform(handle.kv(write.table), write)
        except TokenTooOld:
            assert verdict == "too old"
        else:
            assert verdict != "too old"
            assert handle.duplicate == (verdict == "duplicate")
        if token is not None:
            self.model.batch(batch, self.clock.time_us(), token)
        if token is not None or (durable and batch):
            self._flushed()

    @rule(name=tables)
    def drop_or_create(self, name: str) -> None:
        if name in self.model.tables:
            self.store.drop(name)
            self.model.drop(name)
            self._flushed()
        else:
            self._create(name)

    # -- time and maintenance

    @rule()
    def flush(self) -> None:
        self.store.flush()
        self._flushed()

    @rule(seconds=st.sampled_from([0.5, 3.0, 10.0]))
    def wait(self, seconds: float) -> None:
        self.flush()  # a write's record has the time of its flush
        self.clock.advance(seconds)

    @rule(name=st.sampled_from(["ledger", *NAMES]))
    def flush_tree(self, name: str) -> None:
        table = 1 if name == "ledger" else getattr(self.store._ledger.table(name), "table_id", None)
        for tree, catalog in self.store._maintenance.trees():
            if catalog.db_id == table:
                self.store._maintenance.flush(tree)

    @rule(name=tables)
    def compact(self, name: str) -> None:
        if name in self.model.tables:
            self.store.compact(name)  # with what was written before
            self._flushed()
            self.store._collector.collect()

    @rule(everything=st.booleans())
    def checkpoint(self, everything: bool) -> None:
        report = self.store._checkpoint.run(everything=everything)
        assert report.needed_from <= self.store._consensus.committed + 1

    @rule(crash=st.booleans())
    def reopen(self, crash: bool) -> None:
        self.flush()
        for snapshot, _ in self.snapshots:
            snapshot.close()
        self.snapshots.clear()
        if crash:
            self.disk = self.disk.image().restore("strict")
        else:
            self.store.close()
        self.store = open_simulated(self.disk, self.clock)

    @rule()
    def collect_dropped(self) -> None:
        self.store._tasks.retry()

    # -- reads

    @rule(table=tables, key=keys, prefix=st.sampled_from([b"", b"a", b"b", b"c", b"\xff"]), reverse=st.booleans(),
          limit=st.none() | st.integers(0, 4), start=keys, end=st.none() | keys)  # fmt: skip
    def scan(
        self, table: str, key: bytes, prefix: bytes, reverse: bool, limit: int | None, start: bytes, end: bytes | None
    ) -> None:
        if table not in self.model.tables:
            return
        actual = list(self.store.kv(table).scan(start, end, prefix=prefix, reverse=reverse, limit=limit))
        expected = [
            (k, v)
            for k, v in sorted(self.model.live(table, self.clock.time_us()).items(), reverse=reverse)
            if k >= start and (end is None or k < end) and k.startswith(prefix)
        ]
        assert actual == (expected if limit is None else expected[:limit])

    @rule(table=tables)
    def arrow(self, table: str) -> None:
        if table in self.model.tables:
            batches = self.store.kv(table).to_arrow().to_pydict()
            actual = dict(zip(batches["key"], batches["value"], strict=True))
            assert actual == self.model.live(table, self.clock.time_us())

    @precondition(lambda self: len(self.snapshots) < 3)
    @rule()
    def take_snapshot(self) -> None:
        snapshot = self.store.snapshot()
        expected = self.applied.everything(self.clock.time_us())
        self.snapshots.append((snapshot, expected))
        assert snapshot.lsn == self.store._ledger.tree.lsn

    @rule()
    def read_snapshots(self) -> None:
        for snapshot, expected in self.snapshots:
            actual = {name: dict(snapshot.kv(name).scan()) for name in expected}
            assert actual == expected, difference(actual, expected)

    @invariant()
    def gets_agree(self) -> None:
        now_us = self.clock.time_us()
        for name in self.model.tables:
            table, expected = self.store.kv(name, create=False), self.model.live(name, now_us)
            for key in [b"", b"a", b"aa", b"ab", b"b", b"b\xff", b"\xff", b"c0", b"c1", b"c2"]:
                assert table.get(key) == expected.get(key), (name, key)

    @rule()
    def everything_agrees(self) -> None:
        expected = self.model.everything(self.clock.time_us())
        actual = read_all(self.store)
        assert actual == expected, difference(actual, expected)


class WatchedMachine(StoreMachine):
    """Looks at everything between fsync and apply, and between apply and the end of the flush, too."""

    def __init__(self) -> None:
        super().__init__()
        self._patch = pytest.MonkeyPatch()
        machine, apply = self, StoreFlusher.apply

        def watched(flusher: StoreFlusher, flushed: Any) -> int:
            groups = [group for record in flushed.records for group in record.groups]
            plain = all(not group.condition and 1 << 16 not in group.sections for group in groups)
            if plain:  # a tokened batch, a create or a drop is in the model only afterwards
                machine.gets_agree()
                machine.everything_agrees()
            lsn = apply(flusher, flushed)
            if plain:
                machine.gets_agree()
                machine.everything_agrees()
            return lsn

        self._patch.setattr(StoreFlusher, "apply", watched)

    @rule(batch=st.lists(writes, min_size=1, max_size=4))
    def batch_then_flush(self, batch: list[Write]) -> None:
        for write in batch:
            self.write(write)
        self.flush()

    def teardown(self) -> None:
        self._patch.undo()
        super().teardown()


FEW = settings(max_examples=50, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))
TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = FEW
TestWatchedMachine = WatchedMachine.TestCase
TestWatchedMachine.settings = settings(FEW, max_examples=30)


@pytest.mark.campaign
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("machine", [StoreMachine, WatchedMachine])
def test_many_histories(machine: type[StoreMachine]) -> None:
    run_state_machine_as_test(machine, settings=settings(FEW, max_examples=2_000, stateful_step_count=60))
