"""`python -m bench [name ...]`: run the benchmarks, all or those named, each in a process of its own.

All of them take about 40 minutes on two cores; QUICK=1 takes five, with sizes that prove only that they run. Ends
non-zero if a gate is missed or a benchmark fails. After a run of full size, bench/page.py makes the page anew.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
import time
from pathlib import Path

from bench.harness import QUICK

HERE = Path(__file__).parent
NOT_BENCHMARKS = {"__init__", "__main__", "against", "charts", "harness", "page", "prometheus", "soak"}


def names() -> list[str]:
    """The benchmarks there are."""
    return sorted(path.stem for path in HERE.glob("*.py") if path.stem not in NOT_BENCHMARKS)


def main() -> int:
    """Run what was asked for; the exit code."""
    if len(sys.argv) == 2:  # its own process already
        return 0 if importlib.import_module(f"bench.{sys.argv[1]}").main() else 1
    missed = []
    for name in sys.argv[1:] or names():
        begin = time.perf_counter()
        if subprocess.run([sys.executable, "-m", "bench", name], cwd=HERE.parent, check=False).returncode:
            missed.append(name)
        print(f"  [{name}: {time.perf_counter() - begin:.0f} s]", flush=True)
    if not QUICK:
        subprocess.run([sys.executable, "-m", "bench.page"], cwd=HERE.parent, check=True)
    print(f"\nmissed a gate, or failed: {', '.join(missed)}" if missed else "\nevery gate held")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
