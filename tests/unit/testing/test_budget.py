"""A budget of time: points in a random order that a seed repeats, and an end."""

from __future__ import annotations

import sys

import pytest
from tests import campaign

from penstock.testing import Faults, History, SearchBudget, SimulatedDisk, Violation, explore


class Words:
    """Keeps words, each in a file of its own; `forgets` has one that is not synced."""

    def __init__(self, count: int = 12, forgets: int | None = None) -> None:
        self.count, self.forgets = count, forgets
        self.resumed: list[int] = []

    def run(self, disk: SimulatedDisk, history: History) -> None:
        for number in range(self.count):
            file = disk.create(f"/word-{number}")
            file.pwrite(b"word", 0)
            if number != self.forgets:
                file.fsync()
            disk.fsync_dir("/")
            history.note("kept", number)

    def resume(self, disk: SimulatedDisk, history: History) -> None:
        self.resumed.append(len(history.events))
        for _, number in history.events:
            if disk.open(f"/word-{number}").pread(4, 0) != b"word":
                raise Violation(f"word {number} is lost")


def order(seed: int) -> list[int]:
    scenario = Words()
    explore(scenario, depth=1, modes=("strict",), budget=SearchBudget(seconds=60, seed=seed))
    return scenario.resumed


def test_a_seed_repeats_its_order_and_another_has_another() -> None:
    assert order(1) == order(1)
    assert order(1) != order(2)
    assert sorted(order(1)) == sorted(order(2))  # with time enough, all are tried


def test_no_time_tries_nothing() -> None:
    report = explore(Words(), budget=SearchBudget(seconds=0, seed=1), faults=Faults())
    assert (report.crashes, report.faults) == (0, 0)


def test_a_violation_is_found_in_any_order() -> None:
    for seed in range(3):
        with pytest.raises(Violation, match="word 5 is lost"):
            explore(Words(forgets=5), budget=SearchBudget(seconds=60, seed=seed))


def test_a_campaign_tells_what_fails_and_how_to_repeat_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(seed: int, seconds: float) -> campaign.Tally:
        explore(Words(forgets=1), budget=SearchBudget(seconds=seconds, seed=seed))
        return campaign.Tally(images=1)

    monkeypatch.setitem(campaign.TRIALS, "log", fails)
    monkeypatch.setattr("sys.path", list(sys.path))
    monkeypatch.setattr("logging.disable", lambda level: None)
    assert campaign.run_one("log", 7, 5.0) == 1


def test_a_campaign_counts_what_it_tried(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(campaign.TRIALS, "log", lambda seed, seconds: campaign.Tally(images=3, faults=0))
    monkeypatch.setattr("sys.path", list(sys.path))
    monkeypatch.setattr("logging.disable", lambda level: None)
    assert campaign.run_one("log", 7, 5.0) == 0
    assert '"images": 3' in capsys.readouterr().out
