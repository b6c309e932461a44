"""Run cases in interleaved rounds, print a table of medians and ratios, write JSON.

A case returns its rate in units a second (more is better). Peers run in the same process and the same round as we do,
so a noisy machine hurts all alike: trust the ratios.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
ROUNDS_MIN = 3


@dataclass(frozen=True, kw_only=True)
class Case:
    """One thing to measure: ours, or a peer's."""

    name: str
    run: Callable[[], float]
    peer_of: str | None = None  # the case it is compared with; None: ours
    unit: str = "/s"


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What the ratio of ours to a peer (the best, if several) should be; a gate must be, a report is only told."""

    ours: str
    ratio: float
    gate: bool = False


def rate(count: int, work: Callable[[], object]) -> float:
    """How many a second, if `work` does `count`."""
    begin = time.perf_counter()
    work()
    return count / (time.perf_counter() - begin)


@contextmanager
def folder() -> Iterator[str]:
    """An empty folder on the disk that BENCH_DIR names (default: the system's temporary one)."""
    path = tempfile.mkdtemp(prefix="penstock-bench-", dir=os.environ.get("BENCH_DIR"))
    try:
        yield path
    finally:
        shutil.rmtree(path)


def run(title: str, cases: Sequence[Case], goals: Sequence[Goal] = (), *, rounds: int = ROUNDS_MIN) -> bool:
    """Measure, print, write `results/<title>.json`; whether every gate held."""
    figures: dict[str, list[float]] = {case.name: [] for case in cases}
    for _ in range(max(rounds, ROUNDS_MIN)):
        for case in cases:
            figures[case.name].append(case.run())
    medians = {name: statistics.median(values) for name, values in figures.items()}
    print(f"\n{title}  ({max(rounds, ROUNDS_MIN)} interleaved rounds, medians)")
    for case in cases:
        against = f"{medians[case.peer_of] / medians[case.name]:8.2f} x" if case.peer_of else ""
        print(f"  {case.name:<48} {medians[case.name]:>16,.1f} {case.unit:<10} {against}")
    held = [_judge(goal, cases, medians) for goal in goals]
    RESULTS.mkdir(exist_ok=True)
    report = {
        "title": title,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "figures": figures,
        "medians": medians,
        "goals": [
            {"ours": g.ours, "wanted": g.ratio, "gate": g.gate, "ratio": r}
            for g, (r, _) in zip(goals, held, strict=True)
        ],
    }
    (RESULTS / f"{title}.json").write_text(json.dumps(report, indent=1))
    return all(ok or not goal.gate for goal, (_, ok) in zip(goals, held, strict=True))


def _judge(goal: Goal, cases: Sequence[Case], medians: dict[str, float]) -> tuple[float, bool]:
    best = max(medians[case.name] for case in cases if case.peer_of == goal.ours)
    ratio = medians[goal.ours] / best
    held = ratio >= goal.ratio
    word = "gate" if goal.gate else "goal"
    print(f"  {word}: {goal.ours} at least {goal.ratio} of the best peer: {ratio:.2f} {'held' if held else 'MISSED'}")
    return ratio, held
