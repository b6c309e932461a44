"""Compare and set in batches with tokens, across crashes: what was told stands, a repeated batch is a duplicate.

The process reads a row, tries to replace it by the next number, and writes the number to another table in the same
batch. After a crash it repeats its last batch exactly: the same token, the same LSN. That must never be a conflict.
"""

from __future__ import annotations

import pytest
from store_model import START_US, open_simulated
from store_scenario import flush_ledger, flush_table

from penstock.errors import ConditionFailed
from penstock.partition.ledger import Ledger
from penstock.partition.ledger_records import Verdict
from penstock.store import conditions
from penstock.store.store import Store
from penstock.testing import FakeClock, History, SimulatedDisk, Violation, explore

pytestmark = pytest.mark.usefixtures("quiet")


class ConditionScenario:
    """Batches that depend on a row, and what happens to the files of their tables meanwhile."""

    def run(self, disk: SimulatedDisk, history: History) -> None:
        store = open_simulated(disk, FakeClock(time_us=START_US))
        store.kv("state")
        store.kv("log", shards=2)
        for number in range(1, 8):
            self._advance(store, history, number)
            match number:
                case 2:
                    flush_table(store, "state")
                case 3:
                    flush_ledger(store)
                case 4:
                    flush_table(store, "log")
                    store.checkpoint()
                case 6:
                    store.close()
                    store = open_simulated(disk, FakeClock(time_us=START_US))

    def _advance(self, store: Store, history: History, number: int) -> None:
        row = store.kv("state").get_row(b"n")
        lsn = 0 if row is None else row.lsn
        history.note("try", number, lsn)
        if self._batch(store, number, number, lsn):
            raise Violation(f"batch {number} is called a duplicate")
        history.note("told", number)

    def _batch(self, store: Store, token: int, number: int, lsn: int) -> bool:
        with store.batch(token=("p", token)) as batch:
            batch.kv("log").put(b"%d" % number, b"")
            batch.kv("state").put(b"n", b"%d" % number, if_lsn=lsn)
        return batch.duplicate

    def resume(self, disk: SimulatedDisk, history: History) -> None:
        store = open_simulated(disk, FakeClock(time_us=START_US))
        try:
            self._check(store, history)
        finally:
            store.close()

    def _check(self, store: Store, history: History) -> None:
        acknowledged = max([0, *(values[0] for word, *values in history.events if word == "told")])
        tried, lsn = max([(0, 0), *((values[0], values[1]) for word, *values in history.events if word == "try")])
        present = int(store.kv("state").get(b"n") or 0)
        if present not in (acknowledged, tried):
            raise Violation(f"the row holds {present}, although {acknowledged} was told and {tried} tried")
        if sorted(int(key) for key in store.kv("log", shards=2)) != list(range(1, present + 1)):
            raise Violation("a batch was written in part")
        if not tried:
            return
        try:
            if self._batch(store, tried, tried, lsn) is not (present == tried):
                raise Violation(f"batch {tried} was repeated, and is wrongly told whether it is a duplicate")
        except ConditionFailed as error:
            raise Violation(f"batch {tried} was repeated, and is called a conflict: {error}") from None
        history.note("told", tried)
        with pytest.raises(ConditionFailed):  # with another token it is one
            self._batch(store, 1_000 + tried, 0, lsn)


def test_every_crash() -> None:
    report = explore(ConditionScenario(), modes=("strict", "kept"), depth=1)
    assert report.crashes > 100


def test_rows_that_are_judged_before_the_token_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ledger, "token_verdict", lambda *_: Verdict.ACCEPTED)
    with pytest.raises(Violation, match="called a conflict"):
        explore(ConditionScenario(), modes=("kept",), depth=1)


def test_rows_that_are_not_judged_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conditions, "_judge", lambda *_: None)
    with pytest.raises(BaseException, match="DID NOT RAISE"):
        explore(ConditionScenario(), modes=("kept",), depth=1)
