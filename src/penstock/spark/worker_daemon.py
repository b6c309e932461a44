"""Spark's daemon for Python workers, on the installed pyspark: `python -m penstock.spark.worker_daemon MODULE`.

Spark lets its Python processes import pyspark from an archive of sources in its folder. Nothing compiled is kept for an
archive, so each worker compiles all of pyspark again: about a second of CPU time. With pip's pyspark the same sources
are installed, and compiled, beside it. `session` sets `spark.python.daemon.module` to this module where that is so.

Two more costs of each task are spared, which is much for small tasks, and most of a search for broken records:
- Spark writes a task in two parts, the function and the rows. The kernel holds the second back until the first is
  acknowledged (Nagle), and a worker that has answered before acknowledges 40 ms late, unless it asks for another way.
- Spark lets a worker collect garbage after each task: 17 ms among the objects of all modules, unless they are frozen.

Thread: the only one of its process, which forks the workers: nothing may start another one, so it loads no more than
Spark's own daemon does.
Invariant: without the installed package, or with another one than the archive's, it imports what Spark's daemon does.
"""

from __future__ import annotations

import gc
import socket
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


def begin_task(sock: socket.socket, modules: int) -> int:
    """Prepare a worker process for its next task; return how many modules it has, `modules` before the last task."""
    if sock.family != socket.AF_UNIX and hasattr(socket, "TCP_QUICKACK"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)  # the kernel forgets it with each answer
    if len(sys.modules) != modules:
        gc.freeze()  # only then: frozen objects are never collected, and the number of modules is bounded
    return len(sys.modules)


def main() -> None:
    """Run the daemon."""
    sys.path[:] = without_archives(sys.path)
    from pyspark import daemon

    serve, modules = daemon.worker, 0

    def worker(sock: socket.socket, authenticated: bool) -> int:
        nonlocal modules
        modules = begin_task(sock, modules)
        return serve(sock, authenticated)

    daemon.worker = worker
    daemon.manager()


if __name__ == "__main__":
    main()
