"""The change feed is the difference of snapshots: histories with drops, ranges, operands, expiry, loads, crashes."""

from __future__ import annotations

import pytest
from feed_model import Rows, changes_of, follow, take_in_expired
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule, run_state_machine_as_test
from test_store_machine import NAMES, StoreMachine, tables

import penstock
from penstock.kinds.deadlines import Deadlines
from penstock.kv import changes


class FeedMachine(StoreMachine):
    """The store machine, with a change feed for every table. `b` has preimages."""

    def __init__(self) -> None:
        super().__init__()
        self.last_read: dict[int, tuple[int, Rows]] = {}  # by table: an LSN and the rows at it

    def _create(self, name: str) -> None:
        self.store.kv(name, shards=NAMES[name], changes=penstock.ChangeOptions(preimages=name == "b"))
        super()._create(name)

    @rule(name=tables, count=st.integers(60, 70))
    def put_together(self, name: str, count: int) -> None:
        """So many keys that they are looked up together."""
        if name in self.model.tables:
            pairs = {b"c%d" % number: b"%d" % number for number in range(count)}
            self.store.kv(name).put_many(pairs)
            for key, value in pairs.items():
                self.model.tables[name][key] = (value, (1 << 63) - 1)

    @rule(name=tables)
    def put_and_let_expire(self, name: str) -> None:
        if name in self.model.tables:
            self.store.kv(name).put(b"t", b"1", ttl_s=1)
            self.flush()
            self.clock.advance(2)
            self.model.tables[name].pop(b"t", None)

    @rule()
    def feed_follows(self) -> None:
        self.flush()
        take_in_expired(self.store)
        for name in self.model.tables:
            info = self.store._ledger.table(name)
            assert info is not None
            lsn, rows = self.last_read.get(info.table_id, (0, {}))
            with self.store.snapshot() as snapshot:
                now = dict(snapshot.kv(name).scan())
                fed = snapshot.table(name).changes(after=lsn).to_arrow()
                assert fed.num_rows == 0 or fed["_commit_version"][-1].as_py() <= snapshot.lsn
                assert follow(rows, changes_of(self.store, name, lsn), preimages=name == "b") == now
                self.last_read[info.table_id] = snapshot.lsn, now
            assert follow({}, changes_of(self.store, name), preimages=name == "b") == now, "rebuilt from the beginning"

    def teardown(self) -> None:
        self.feed_follows()
        super().teardown()

    @invariant()
    def gets_agree(self) -> None:
        """Of the store machine: not again."""


SEARCH = settings(
    max_examples=100,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],  # the history is not made shorter: that it is found is enough
    suppress_health_check=list(HealthCheck),
)
FEW = settings(max_examples=30, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck))


def test_the_feed_is_the_difference_of_snapshots() -> None:
    run_state_machine_as_test(FeedMachine, settings=FEW)


@pytest.mark.parametrize("bug", ["an old state", "no expiry"])
def test_a_wrong_feed_is_noticed(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if bug == "an old state":  # the state before a record is taken without what is only in memory
        monkeypatch.setattr(changes, "_before", lambda tree: tree.files())
    else:
        monkeypatch.setattr(Deadlines, "due", lambda self, lsn, after_us, time_us: [])
    with pytest.raises(AssertionError):
        run_state_machine_as_test(FeedMachine, settings=SEARCH)


@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_many_histories() -> None:
    run_state_machine_as_test(FeedMachine, settings=settings(FEW, max_examples=1_000, stateful_step_count=50))
