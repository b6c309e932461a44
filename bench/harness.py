"""Run cases in interleaved rounds, print a table of medians and ratios, write JSON.

A case returns its rate in units a second (more is better). Peers run in the same process and the same round as we do,
so a noisy machine hurts all alike: trust the ratios. What is no rate beside a peer's (bytes, milliseconds, memory) is a
`Figure`. Both go to `results/<title>.json`, from which bench/page.py makes docs/benchmarks.md.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

RESULTS = Path(__file__).parent / "results"
ROUNDS_MIN = 3
QUICK = os.environ.get("QUICK", "") not in ("", "0")  # sizes for five minutes in all: to see that everything runs
PEERS = (
    "chromadb",
    "duckdb",
    "faiss-cpu",
    "hnswlib",
    "lancedb",
    "litequeue",
    "lmdb",
    "persist-queue",
    "plyvel",
    "pyarrow",
    "pyspark",
    "rocksdict",
    "sqlite-vec",
    "usearch",
)

T = TypeVar("T")


def sized(full: T, quick: T) -> T:
    """The size of a benchmark: the first, or the second with QUICK=1."""
    return quick if QUICK else full


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
    peer: str = ""  # part of a peer's name, if one of several is meant


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A number by itself: how much, and what it should be at most, or at least."""

    name: str
    value: float
    unit: str
    most: float | None = None
    least: float | None = None
    gate: bool = False

    @property
    def is_met(self) -> bool:
        """Whether it is within what was wanted; NaN is not."""
        return (self.most is None or self.value <= self.most) and (self.least is None or self.value >= self.least)


def rate(count: int, work: Callable[[], object]) -> float:
    """How many a second, if `work` does `count`."""
    begin = time.perf_counter()
    work()
    return count / (time.perf_counter() - begin)


def by_threads(keys: list[bytes], threads: int, count: int, work: Callable[[list[bytes]], None]) -> float:
    """The rate of `count` of the keys, shared among threads that begin together."""
    share = count // threads
    started = threading.Barrier(threads + 1)

    def body(number: int) -> None:
        started.wait()
        work(keys[number * share : (number + 1) * share])

    workers = [threading.Thread(target=body, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()

    def measured() -> None:
        started.wait()
        for worker in workers:
            worker.join()

    return rate(share * threads, measured)


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
    rounds = sized(max(rounds, ROUNDS_MIN), 1)
    for _ in range(rounds):
        for case in cases:
            figures[case.name].append(case.run())
    medians = {name: statistics.median(values) for name, values in figures.items()}
    print(f"\n{title}  ({rounds} interleaved rounds, medians)")
    for case in cases:
        against = f"{medians[case.peer_of] / medians[case.name]:8.2f} x" if case.peer_of else ""
        print(f"  {case.name:<48} {medians[case.name]:>16,.1f} {case.unit:<10} {against}")
    judgements = [_judge(goal, cases, medians) for goal in goals]
    write(
        title,
        rounds=rounds,
        cases=[{"name": case.name, "unit": case.unit, "peer_of": case.peer_of} for case in cases],
        figures=figures,
        medians=medians,
        goals=[
            {**asdict(goal), "measured": ratio, "held": ok} for goal, (ratio, ok) in zip(goals, judgements, strict=True)
        ],
    )
    return all(ok or not goal.gate for goal, (_, ok) in zip(goals, judgements, strict=True))


def _judge(goal: Goal, cases: Sequence[Case], medians: dict[str, float]) -> tuple[float, bool]:
    best = max(medians[case.name] for case in cases if case.peer_of == goal.ours and goal.peer in case.name)
    ratio = medians[goal.ours] / best
    is_met = ratio >= goal.ratio
    word = "gate" if goal.gate else "goal"
    peer = goal.peer or "the best peer"
    print(f"  {word}: {goal.ours} at least {goal.ratio:.3g} of {peer}: {ratio:.2f} {'held' if is_met else 'MISSED'}")
    return ratio, is_met


def tell(title: str, figures: Sequence[Figure], **more: Any) -> bool:
    """Print figures by themselves and write them to `results/<title>.json`; whether every gate held."""
    print(f"\n{title}")
    for figure in figures:
        bound = (
            f"at most {figure.most:g}"
            if figure.most is not None
            else f"at least {figure.least:g}"
            if figure.least
            else ""
        )
        word = f"{'gate' if figure.gate else 'goal'}: {bound}: {'held' if figure.is_met else 'MISSED'}" if bound else ""
        print(f"  {figure.name:<64} {figure.value:>16,.2f} {figure.unit:<8} {word}")
    write(title, numbers=[{**asdict(figure), "held": figure.is_met} for figure in figures], **more)
    return all(figure.is_met or not figure.gate for figure in figures)


def write(title: str, **content: Any) -> None:
    """Write `results/<title>.json`, with the machine and the versions."""
    RESULTS.mkdir(exist_ok=True)
    report = {"title": title, "quick": QUICK, "time": time.strftime("%Y-%m-%d %H:%M", time.gmtime()), **content}
    report["machine"] = machine()
    (RESULTS / f"{title}.json").write_text(json.dumps(report, indent=1) + "\n")


def machine() -> dict[str, Any]:
    """What the figures were measured on, and with which versions."""
    versions = {}
    for name in PEERS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 30
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": memory,
        "load": round(os.getloadavg()[1], 1),  # of the last five minutes: above the cores, others were at work
        "versions": versions,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
