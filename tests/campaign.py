"""`make crash MINUTES=10`: every crash suite with fresh random seeds, for a given time; then a table of what was tried.

    python -m tests.campaign --minutes 10        # all trials, each with its share of the time, two at once
    python -m tests.campaign store --seed 7      # one trial again, with the seed that a failure printed

A trial runs in a process of its own until its share is over: crash images of the simulated disk in random order, with
crashes in recovery and faults crossed with crashes; real processes that are killed; system calls of real processes that
fail; random histories of Hypothesis against models; schedules of members on a simulated network. `controls` are the
seeded bugs: each must be caught. A violation is printed with the command that shows it again, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FOLDERS = (
    "crash",
    "fuzz",
    "model",
    "unit",
    "unit/client",
    "unit/lsm",
    "unit/replica",
    "unit/server",
    "cluster",
)  # as pytest has them
CONTROLS = "mutant or mistake or bug or seeded or caught or found_out"
GRACE_S = 240.0  # a trial may end its last round

FAULTS_MIN = 200  # on processes of a cluster

Tally = Counter[str]


class Clock:
    """The share of a trial."""

    def __init__(self, seconds: float) -> None:
        self._end_s = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        return self._end_s - time.monotonic()

    def rounds(self, chance: random.Random) -> Iterator[int]:
        """A new seed for each round, while there is time; at least one."""
        yield chance.randrange(1 << 32)
        while self.left_s > 0:
            yield chance.randrange(1 << 32)


def simulated(*scenarios: Callable[[], Any], faults: bool = True) -> Callable[[int, float], Tally]:
    """Crash images of some scenarios, each with an equal share."""

    def trial(seed: int, seconds: float) -> Tally:
        from penstock.testing import Faults, SearchBudget, explore

        tally = Tally()
        for number, make in enumerate(scenarios):
            budget = SearchBudget(seconds=seconds / len(scenarios) / (2 if faults else 1), seed=seed + number)
            reports = [explore(make(), torn_seeds=2, budget=budget)]
            if faults:
                crossed = Faults(images_every=23)
                reports.append(explore(make(), modes=("strict", "torn"), depth=1, faults=crossed, budget=budget))
            for report in reports:
                tally["images"] += report.crashes + report.crashes_in_recovery
                tally["faults"] += report.faults
        return tally

    return trial


def _log() -> Any:
    from log_scenario import LogScenario

    return LogScenario()


def _tree() -> Any:
    from tree_scenario import TreeScenario

    return TreeScenario()


def _store() -> Any:
    from store_scenario import StoreScenario

    return StoreScenario()


def _queue() -> Any:
    from queue_scenario import QueueScenario

    return QueueScenario()


def _queue_store() -> Any:
    from queue_store_scenario import QueueStoreScenario

    return QueueStoreScenario()


def _series() -> Any:
    from series_scenario import SeriesScenario

    return SeriesScenario()


def _vector() -> Any:
    from vector_scenario import VectorScenario

    return VectorScenario()


def _feed() -> Any:
    from test_change_crashes import FeedScenario

    return FeedScenario()


def _repair() -> Any:
    from test_snapshot_crashes import Repairing

    return Repairing()


def _backup() -> Any:
    from test_backup_crashes import BackupScenario

    return BackupScenario()


def _archive() -> Any:
    from test_archive_crashes import ArchiveScenario

    return ArchiveScenario()


def _lifecycle() -> Any:
    from test_lifecycle_crashes import LifecycleScenario

    return LifecycleScenario()


def killed(module: str, rounds: int) -> Callable[[int, float], Tally]:
    """A process at work on a real disk is killed, and what it left is checked, in one store again and again."""

    def trial(seed: int, seconds: float) -> Tally:
        kill_rounds = __import__(module).kill_rounds
        tally = Tally()
        for at in Clock(seconds).rounds(random.Random(seed)):
            with tempfile.TemporaryDirectory(prefix="penstock-campaign-") as folder:
                kill_rounds(f"{folder}/store", rounds, at)
            tally["kills"] += rounds
        return tally

    return trial


def failing_calls(seed: int, seconds: float) -> Tally:
    """System calls of owners and clients fail, are short or kill."""
    from faults.campaign import Campaign, Report
    from faults.plan import draw_rounds

    clock = Clock(seconds)

    def is_enough(report: Report) -> bool:
        return clock.left_s <= 0

    with tempfile.TemporaryDirectory(prefix="penstock-campaign-") as folder:
        report = Campaign(Path(folder), seed).run(draw_rounds(seed, range(10_000)), is_enough)
    if report.violations:
        raise AssertionError(report.show())
    return Tally(faults=report.struck, kills=report.kill_count)


def histories(module: str, machine: str) -> Callable[[int, float], Tally]:
    """Random histories of a machine of Hypothesis, against its model."""

    def trial(seed: int, seconds: float) -> Tally:
        from hypothesis import HealthCheck, settings
        from hypothesis import seed as seeded
        from hypothesis.stateful import run_state_machine_as_test

        rules = getattr(__import__(module), machine)
        few = settings(
            max_examples=20,
            stateful_step_count=50,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        tally = Tally()
        for at in Clock(seconds).rounds(random.Random(seed)):
            run_state_machine_as_test(seeded(at)(rules), settings=few)
            tally["histories"] += 20
        return tally

    return trial


def schedules(seed: int, seconds: float) -> Tally:
    """Members on a simulated network and simulated disks."""
    run = __import__("test_raft_schedules")._run
    tally = Tally()
    for at in Clock(seconds).rounds(random.Random(seed)):
        _, done = run(range(at, at + 10), 2_500)
        tally["schedules"] += 10
        tally["faults"] += sum(done[fault] for fault in ("crash", "all", "block", "double", "lose"))
    return tally


def controls(seed: int, seconds: float) -> Tally:
    """The seeded bugs: that each is caught is what makes the other rows worth reading."""
    folders = ("tests/crash", "tests/model", "tests/unit/replica")
    command = [sys.executable, "-m", "pytest", "-m", "not campaign", "-k", CONTROLS, "--timeout=900", *folders]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise AssertionError(ran.stdout[-4_000:])
    return Tally(controls=int(ran.stdout.strip().splitlines()[-1].split()[0]))  # N passed, ...


def cluster_faults(seed: int, seconds: float) -> Tally:
    """Three processes of members under at least FAULTS_MIN faults, with clients that write and read meanwhile."""
    from faulty_cluster import FAULTS, FaultyCluster

    tally = Tally()
    for each in Clock(seconds).rounds(random.Random(seed)):
        while True:
            with tempfile.TemporaryDirectory() as folder:
                cluster = FaultyCluster(Path(folder))
                try:
                    cluster.run(4 * len(FAULTS), each)
                    cluster.check()
                finally:
                    cluster.end()
            tally["faults"] += sum(cluster.done.values())
            tally["acknowledged writes"] += len(cluster.acknowledged)
            tally["linearizable reads and writes"] += sum(map(len, cluster.history.values()))
            if tally["faults"] >= FAULTS_MIN:
                break
            each += 1
    return tally


TRIALS: dict[str, Callable[[int, float], Tally]] = {
    "controls": controls,
    "log": simulated(_log),
    "tree": simulated(_tree),
    "store": simulated(_store),
    "queue": simulated(_queue, _queue_store),
    "series": simulated(_series),
    "vector": simulated(_vector),
    "feed": simulated(_feed, faults=False),
    "repair": simulated(_repair, faults=False),
    "backup": simulated(_backup, faults=False),
    "archive": simulated(_archive, faults=False),
    "lifecycle": simulated(_lifecycle, faults=False),
    "failing calls": failing_calls,
    "killed store": killed("test_store_kill", 5),
    "killed queue": killed("test_queue_kill", 5),
    "killed tree": killed("test_tree_kill", 5),
    "killed manifest": killed("test_manifest_kill", 5),
    "killed rollup": killed("test_rollup_kill", 5),
    "killed archive": killed("test_archive_kill", 4),
    "killed lifecycle": killed("test_lifecycle_crashes", 4),
    "kv histories": histories("test_store_machine", "StoreMachine"),
    "queue histories": histories("test_queue_machine", "QueueMachineTest"),
    "series histories": histories("test_series_machine", "SeriesMachineRules"),
    "vector histories": histories("test_vector_machine", "VectorShardMachine"),
    "tree histories": histories("test_tree_machine", "TreeMachineRules"),
    "feed histories": histories("test_changes_machine", "FeedMachine"),
    "coordinator histories": histories("test_coordinator_machine", "CoordinatorMachine"),
    "raft schedules": schedules,
    "cluster faults": cluster_faults,
}
LONG_S = {"controls": 600.0, "cluster faults": 1_800.0}  # what a trial may take beyond its share


def run_one(name: str, seed: int, seconds: float) -> int:
    """Run a trial in this process; print its tally as JSON."""
    import logging

    logging.disable(logging.CRITICAL)  # faults by the thousand are logged by the thousand
    sys.path[:0] = [str(ROOT / "tests" / folder) for folder in FOLDERS]
    begin = time.monotonic()
    try:
        tally = TRIALS[name](seed, seconds)
    except BaseException:
        traceback.print_exc()
        return 1
    print(json.dumps({"tally": tally, "seconds": round(time.monotonic() - begin, 1)}))
    return 0


def start(name: str, seed: int, seconds: float) -> dict[str, Any]:
    """Run a trial in a process of its own; what came of it."""
    command = [sys.executable, "-m", "tests.campaign", name, "--seed", str(seed), "--seconds", str(seconds)]
    try:
        timeout_s = seconds + GRACE_S + LONG_S.get(name, 0.0)
        ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return {"name": name, "seed": seed, "failure": f"did not end within {timeout_s:.0f} s"}
    if ran.returncode:
        return {"name": name, "seed": seed, "failure": (ran.stdout[-2_000:] + ran.stderr[-4_000:]).strip()}
    return {"name": name, "seed": seed, **json.loads(ran.stdout.strip().splitlines()[-1])}


def show(result: dict[str, Any]) -> None:
    if "failure" in result:
        print(f"  {result['name']:<22} seed {result['seed']:<11} VIOLATION", flush=True)
        return
    counts = ", ".join(f"{count:,} {unit}" for unit, count in result["tally"].items() if count)
    print(f"  {result['name']:<22} seed {result['seed']:<11} {result['seconds']:>6.0f} s  {counts}", flush=True)


def main() -> int:
    """Run all trials for a time, or one."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaign", description=__doc__.splitlines()[0])
    parser.add_argument("trial", nargs="?", choices=sorted(TRIALS))
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seconds", type=float, default=60.0, help="of the one trial")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 32))
    options = parser.parse_args()
    if options.trial:
        return run_one(options.trial, options.seed, options.seconds)
    workers = os.cpu_count() or 1
    share = options.minutes * 60 * workers / len(TRIALS)
    print(f"campaign: {len(TRIALS)} trials of {share:.0f} s, {workers} at once, seed {options.seed}", flush=True)
    seeds = random.Random(options.seed)
    results = []
    with ThreadPoolExecutor(workers) as pool:
        waiting = [pool.submit(start, name, seeds.randrange(1 << 32), share) for name in TRIALS]
        for future in waiting:
            results.append(future.result())
            show(results[-1])
    total = sum((Counter(result.get("tally", {})) for result in results), Tally())
    failed = [result for result in results if "failure" in result]
    print(f"  in all: {', '.join(f'{count:,} {unit}' for unit, count in total.items())}, {len(failed)} violations")
    for result in failed:
        print(f"\n{result['failure']}\n\nagain: python -m tests.campaign '{result['name']}' --seed {result['seed']}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
