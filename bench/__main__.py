"""`python -m bench [name ...]`: run the benchmarks, all or those named; ends non-zero if a gate is missed."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from pathlib import Path


def main() -> int:
    names = sys.argv[1:] or sorted(m.name for m in pkgutil.iter_modules([str(Path(__file__).parent)]))
    held = [
        importlib.import_module(f"bench.{name}").main()
        for name in names
        if name not in ("__main__", "harness", "prometheus")
    ]
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
