"""`python -m bench.against REV [name ...]`: did anything that won at an earlier commit become slower?

Both codes run the same benchmarks in turn, each from a checkout of its own and with its own bench/, ROUNDS times. Our
own rates are compared, now to then, because a peer is as fast beside the one as beside the other and would only add its
noise. The gate: what beat its best peer at REV has at least LEAST of that rate now, in the median of the rounds.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.harness import Figure, folder, tell

HERE = Path(__file__).parent.parent
NAMES = ("kv", "log", "lsm", "queue")
ROUNDS = int(os.environ.get("ROUNDS", "3"))
LEAST = 0.95

Medians = dict[str, float]  # rate by case
Results = dict[str, dict[str, Any]]  # report by title


def check_out(revision: str, path: Path) -> None:
    """Write the files of a commit into a folder."""
    command = ["git", "archive", "--format=tar", revision]
    with tarfile.open(
        fileobj=io.BytesIO(subprocess.run(command, cwd=HERE, check=True, capture_output=True).stdout)
    ) as tar:
        tar.extractall(path, filter="data")


def measure(tree: Path, name: str) -> Results:
    """Run a benchmark of a checkout; what it wrote. A gate that it misses is not this module's concern."""
    results = tree / "bench" / "results"
    for path in results.glob("*.json"):
        path.unlink()
    environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
    command = [sys.executable, "-m", "bench", name]
    subprocess.run(command, cwd=tree, env=environment, stdout=subprocess.DEVNULL, check=False)
    return {path.stem: json.loads(path.read_text()) for path in results.glob("*.json")}


def ratios(then: Results, now: Results) -> Iterator[tuple[str, float, float]]:
    """What both measured: (title and case, ours now to ours then, ours then to its best peer of then)."""
    for title, report in now.items():
        old: Medians = then.get(title, {}).get("medians", {})
        for case in report.get("cases", ()):
            name = case["name"]
            peers = [old[peer["name"]] for peer in report["cases"] if peer["peer_of"] == name and peer["name"] in old]
            if name in old and peers:
                yield f"{title}: {name}", report["medians"][name] / old[name], old[name] / max(peers)


def main() -> int:
    """Run the rounds; the exit code."""
    arguments = argparse.ArgumentParser(prog="python -m bench.against")
    arguments.add_argument("revision")
    arguments.add_argument("names", nargs="*", default=NAMES)
    options = arguments.parse_args()
    rounds: dict[str, list[tuple[float, float]]] = {}
    with folder() as root:
        trees = {"then": Path(root) / "then", "now": Path(root) / "now"}
        check_out(options.revision, trees["then"])
        check_out("HEAD", trees["now"])
        for number in range(ROUNDS):
            for name in options.names:
                order = ("then", "now") if number % 2 == 0 else ("now", "then")
                measured = {which: measure(trees[which], name) for which in order}
                for case, change, won in ratios(measured["then"], measured["now"]):
                    rounds.setdefault(case, []).append((change, won))
                print(f"round {number + 1}: {name}", flush=True)
    figures = []
    for case, pairs in sorted(rounds.items()):
        changes, wins = zip(*pairs, strict=True)
        won = statistics.median(wins) >= 1
        spread = (
            f"{case} ({min(changes):.2f} to {max(changes):.2f}; then {statistics.median(wins):.2f} of the best peer)"
        )
        value = statistics.median(changes)
        figures.append(Figure(name=spread, value=value, unit="x", least=LEAST if won else None, gate=won))
    return 0 if tell("against", figures, revision=options.revision, rounds=ROUNDS) else 1


if __name__ == "__main__":
    sys.exit(main())
