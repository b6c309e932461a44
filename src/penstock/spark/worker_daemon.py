"""Spark's daemon for Python workers, on the installed pyspark: `python -m penstock.spark.worker_daemon MODULE`.

Spark lets its Python processes import pyspark from an archive of sources in its folder. Nothing compiled is kept for an
archive, so each worker compiles all of pyspark again: about a second of CPU time. With pip's pyspark the same sources
are installed, and compiled, beside it. `session` sets `spark.python.daemon.module` to this module where that is so.

Thread: the only one of its process, which forks the workers: nothing may start another one, so it loads no more than
Spark's own daemon does.
Invariant: without the installed package, or with another one than the archive's, it is Spark's daemon unchanged.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder


def without_archives(path: Sequence[str]) -> list[str]:
    """Return a module search path without the archives of pyspark and py4j, if the package they came with is on it."""
    rest = [entry for entry in path if not entry.endswith((".zip", ".jar"))]
    installed, py4j = (PathFinder.find_spec(name, rest) for name in ("pyspark", "py4j"))
    if installed is None or py4j is None or not installed.submodule_search_locations:
        return list(path)
    archives = f"{installed.submodule_search_locations[0]}/python/lib/"
    return [entry for entry in path if not entry.startswith(archives)]


def main() -> None:
    """Run the daemon."""
    sys.path[:] = without_archives(sys.path)
    from pyspark.daemon import manager

    manager()


if __name__ == "__main__":
    main()
