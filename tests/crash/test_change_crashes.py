"""The change feed against every crash: it has the changes of all that is applied, once, and the same after a replay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from feed_model import Change, changes_of, follow, take_in_expired
from shared import Patch, SomeRecoveries, seeded
from store_model import open_simulated, read_all
from store_scenario import Short, StoreScenario, StoreUser, time_of

import penstock
from penstock.lsm.maintenance import Maintenance
from penstock.testing import FakeClock, Faults, History, SimulatedDisk, Violation, explore

pytestmark = pytest.mark.usefixtures("quiet")
STEPS = ("rename /changes/", "fsync /changes/", "commit /manifest", "rename -log/", "rename -gone")


class FeedUser(StoreUser):
    """Somebody who uses kv tables with change feeds; that of `c` has preimages."""

    def create(self, name: str, shards: int = 1) -> None:
        options = penstock.ChangeOptions(preimages=name == "c")
        self._try("create", name, act=lambda: self.store.kv(name, shards=shards, changes=options))

    def check(self) -> None:
        super().check()
        take_in_expired(self.store)
        tables = read_all(self.store)
        for name, rows in tables.items():
            info = self.store._ledger.table(name)
            assert info is not None
            changes = changes_of(self.store, name)
            try:
                rebuilt = follow({}, changes, preimages=name == "c")
            except AssertionError as error:
                raise Violation(f"the feed of {name} contradicts itself: {error}") from error
            if rebuilt != rows:
                raise Violation(f"the feed of {name} leads to {rebuilt}, and the table holds {rows}")
            self._same_as_before(info.table_id, changes)
            self.history.note("fed", info.table_id, changes)

    def _same_as_before(self, table: int, changes: list[Change]) -> None:
        """What a reader of the feed has seen stays."""
        noted = [values for word, *values in self.history.events if word == "fed"]
        earlier: list[list[Change]] = [fed for fed_table, fed in noted if fed_table == table]
        if earlier and changes[: len(earlier[-1])] != earlier[-1]:
            raise Violation(f"the feed of table {table} was {earlier[-1]}, and is {changes}")


class FeedScenario(StoreScenario):
    def open(self, disk: SimulatedDisk, history: History) -> FeedUser:
        clock = FakeClock(time_us=time_of(history))
        return FeedUser(open_simulated(disk, clock), history, clock)


class ShortFeed(FeedScenario, Short):
    """Few steps."""


def test_crashes() -> None:
    report = explore(FeedScenario(), modes=("strict",), depth=1, every=9)
    assert report.missing(*STEPS) == []


def test_crashes_in_recovery_and_faults() -> None:
    explore(SomeRecoveries(ShortFeed(), 50), modes=("strict",), recovery_modes=("strict",))
    faults = Faults(kinds=("eio",), operations=("fsync", "commit"), every=13, images_every=61)
    explore(ShortFeed(), modes=("strict",), depth=1, faults=faults)


def not_stored_first(patch: Patch) -> None:
    """The files of the table are published before those of its feed."""
    patch.setattr(Maintenance, "_store_within_job", lambda self, tree: None)


@pytest.mark.parametrize("seed_bug", [not_stored_first])
def test_seeded_bugs_are_caught(seed_bug: Callable[[Patch], None]) -> None:
    with seeded(seed_bug), pytest.raises((Violation, AssertionError)):
        explore(FeedScenario(), modes=("strict",), depth=1)


@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_every_crash() -> None:
    explore(FeedScenario(), modes=("strict", "torn"), depth=1)
    explore(ShortFeed(), modes=("strict",), recovery_modes=("strict",))
