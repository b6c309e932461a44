"""A series table and its rollup against every crash of writes, deletes, rollups, compactions and retention.

The history holds each batch before it is written (`batch`), and `told` when it was acknowledged. After a crash the
source holds an unbroken beginning of the batches, at least those that were told; brought up to date, the rollup holds
what these batches lead to, also for the hours that retention has deleted from the source since.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from shared import SomeRecoveries
from store_model import START_US, open_simulated

import penstock
from penstock.lsm import file_pieces
from penstock.lsm.sstable import Sstable
from penstock.series import rollups
from penstock.series.section import RollupProgress
from penstock.store.store import Store
from penstock.testing import FakeClock, History, SimulatedDisk, Violation, explore

pytestmark = pytest.mark.usefixtures("quiet")
MINUTE, HOUR = 60_000_000, 3_600_000_000
T0 = START_US // HOUR * HOUR
STEP = 5 * MINUTE
STEPS = ("rename .sst", "commit /manifest", "unlink .sst", "fdatasync /journal/")
WORK = ("roll_up", "compact", "checkpoint", "retain")
Samples = dict[tuple[str, int], float]  # values by host and time
LAST = 9  # the batch after retention


def time_of(number: int) -> int:
    return T0 + (13 * number if number < LAST else 6 * 60) * MINUTE


def samples_after(last: int) -> Samples:
    """What a source without retention holds after some batches."""
    samples: Samples = {}
    for number in range(1, last + 1):
        for host in "ab":
            samples[host, time_of(number)] = float(number)
        if number % 3 == 2:
            del samples["a", time_of(number - 1)]
    return samples


def rolled_up(samples: Samples) -> dict[tuple[str, str, int], float]:
    steps: dict[tuple[str, int], list[float]] = {}
    for (host, time), value in sorted(samples.items()):
        steps.setdefault((host, time // STEP * STEP), []).append(value)
    return {
        (f"cpu:{name}", host, time): float(function(values))
        for (host, time), values in steps.items()
        for name, function in (("count", len), ("sum", math.fsum), ("max", max))
    }


def rows(table: Any, selector: str) -> dict[tuple[str, str, int], float]:
    samples = table.select(selector)
    times = samples.column("time").cast("int64").to_pylist()
    return {
        (row["metric"], dict(row["labels"])["host"], time): row["value"]
        for row, time in zip(samples.to_pylist(), times, strict=True)
    }


class RollupScenario:
    """Batches, each with work after it; then three hours pass, and retention deletes what is older than two."""

    def __init__(self) -> None:
        self.reached: Counter[str] = Counter()  # crashes, by the work in which they came

    def run(self, disk: SimulatedDisk, history: History) -> None:
        clock = FakeClock(time_us=T0 + 2 * HOUR)
        with opened(disk, clock) as store:
            self._use(store, clock, history)

    def _use(self, store: Store, clock: FakeClock, history: History) -> None:
        create(store)
        history.note("made")
        for number in range(1, LAST):
            write(store, history, number)
            if number % 2 == 0:
                work(history, "roll_up", lambda: store.roll_up("rolled"))
            if number in (3, 5, 6):
                work(history, "checkpoint", store.checkpoint)
            if number == 6:
                for name in ("metrics", "rolled"):
                    work(history, "compact", partial(store.compact, name))
        history.note("later")
        clock.advance(4 * 3_600)
        work(history, "retain", lambda: retain(store))
        write(store, history, LAST)
        work(history, "roll_up", lambda: store.roll_up("rolled"))
        work(history, "compact", partial(store.compact, "metrics"))

    def resume(self, disk: SimulatedDisk, history: History) -> None:
        events, later = history.events, ("later",) in history.events
        if events and events[-1][0] == "begun":
            self.reached[events[-1][1]] += 1
        with opened(disk, FakeClock(time_us=T0 + (6 if later else 2) * HOUR)) as store:
            if ("made",) in events:
                self.check(store, history, later=later)

    def check(self, store: Store, history: History, *, later: bool) -> None:
        acknowledged = max([0, *(values[0] for word, *values in history.events if word == "told")])
        tried = max([0, *(values[0] for word, *values in history.events if word == "batch")])
        metrics, rolled = store.series("metrics"), store.series("rolled")
        for again in range(2):  # and once more, when everything is in files
            store.roll_up("rolled")
            if later:
                retain(store)
            floor = T0 + 4 * HOUR if later else 0
            contents = {(host, time): value for (_, host, time), value in rows(metrics, "cpu").items()}
            last = next(
                (n for n in range(acknowledged, tried + 1) if contents == samples_since(samples_after(n), floor)), None
            )
            if last is None:
                raise Violation(f"the source holds {sorted(contents)} after {acknowledged} to {tried} batches")
            summaries = rows(rolled, '{__name__=~"cpu:(count|sum|max)"}')
            if summaries != rolled_up(samples_after(last)):
                wrong = set(summaries.items()) ^ set(rolled_up(samples_after(last)).items())
                raise Violation(f"after {last} batches the rollup differs in {sorted(wrong)[:5]}")
            history.note("told", last)
            if not again:
                store.checkpoint()
                store.compact("metrics")


@contextmanager
def opened(disk: SimulatedDisk, clock: FakeClock) -> Iterator[Store]:
    """A store on a simulated disk, from which the workers of jobs read, too."""

    class Simulated(Sstable):
        open = staticmethod(partial(Sstable.open, fs=disk))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file_pieces, "Sstable", Simulated)
        store = open_simulated(disk, clock)
        try:
            yield store
        finally:
            store.close()


def samples_since(samples: Samples, floor: int) -> Samples:
    return {key: value for key, value in samples.items() if key[1] >= floor}


def create(store: Store) -> None:
    store.series("metrics", shards=2, options=penstock.SeriesOptions(bucket_s=3_600, retention_s=7_200))
    rollup = penstock.Rollup(source="metrics", step_s=300)
    store.series("rolled", options=penstock.SeriesOptions(bucket_s=3_600, rollup=rollup))


def write(store: Store, history: History, number: int) -> None:
    history.note("batch", number)
    with store.batch(token=("p", number)) as batch:
        metrics = batch.series("metrics")
        for host in "ab":
            metrics.write("cpu", float(number), {"host": host}, time=time_of(number))
        if number % 3 == 2:
            metrics.delete('cpu{host="a"}', time_of(number - 1), time_of(number - 1) + 1)
    history.note("told", number)


def retain(store: Store) -> None:
    store.port.maintain()
    store.flush()


def work(history: History, name: str, act: Callable[[], object]) -> None:
    history.note("begun", name)
    act()
    history.note("ended", name)


def test_every_crash_of_a_table_and_its_rollup() -> None:
    scenario = RollupScenario()
    report = explore(scenario, modes=("strict",), depth=1, every=3)
    assert report.missing(*STEPS) == []
    assert [name for name in WORK if not scenario.reached[name]] == []


@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_every_crash_in_every_mode_and_some_in_recovery() -> None:
    explore(RollupScenario(), modes=("strict", "torn", "kept", "restart"), depth=1)
    explore(SomeRecoveries(RollupScenario(), 17), modes=("strict",), recovery_modes=("strict",))


# -- a seeded bug


def test_progress_that_is_committed_before_its_rows_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = rollups._RollupGroup.commit

    def commit(group: rollups._RollupGroup, progress: RollupProgress) -> None:
        sections, size = group._sections, group._bytes
        group._begin()
        right(group, progress)
        group._sections, group._bytes = sections, size
        right(group, progress)

    monkeypatch.setattr(rollups._RollupGroup, "commit", commit)
    with pytest.raises(Violation, match="the rollup differs"):
        explore(RollupScenario(), modes=("strict",), depth=1)
