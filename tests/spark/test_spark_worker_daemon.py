"""Spark's Python workers use the installed pyspark, and only where it is the one that their archive was made of."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyspark
import pytest
from pyspark import daemon

from penstock.spark.sessions import DAEMON
from penstock.spark.worker_daemon import main, without_archives

INSTALLED = Path(pyspark.__file__).parent
ARCHIVES = [str(path) for path in sorted((INSTALLED / "python" / "lib").glob("*.zip"))]
OTHERS = ["/jobs/code.zip", "/jobs", str(INSTALLED.parent)]


def test_its_own_archives_are_passed_over() -> None:
    assert len(ARCHIVES) == 2
    assert without_archives([*ARCHIVES, *OTHERS]) == OTHERS


@pytest.mark.parametrize(
    "path",
    [
        [*ARCHIVES, "/jobs"],  # nothing is installed
        ["/opt/spark/python/lib/pyspark.zip", "/opt/spark/python/lib/py4j-src.zip", *OTHERS],  # of another Spark
        [],
    ],
)
def test_whatever_else_there_is_stays(path: list[str]) -> None:
    assert without_archives(path) == path


PROGRAM = """
import sys
from penstock.spark.worker_daemon import without_archives
sys.path[:] = without_archives(sys.path) if sys.argv[1] else sys.path
import pyspark.daemon
print(pyspark.__file__)
"""


@pytest.mark.parametrize("changed", ["yes", ""])
def test_the_archive_is_not_imported_from(changed: str) -> None:
    """With the path that Spark gives its daemons; and the control, with that path as it is."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*ARCHIVES, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", PROGRAM, changed]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert (Path(ran.stdout.strip()).parent == INSTALLED) == bool(changed)


def test_loading_it_starts_no_thread_and_imports_no_arrow() -> None:
    """The daemon forks: nothing may be running beside it."""
    code = "import penstock.spark.worker_daemon, sys; print(sorted({'numpy', 'pyarrow', 'pandas'} & set(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert ran.stdout.strip() == "[]"


Serve = Callable[[socket.socket, bool], int]


def run_tasks(monkeypatch: pytest.MonkeyPatch, sock: socket.socket, serve: Serve) -> list[int]:
    """Let a daemon serve three tasks in this process; return the number of modules at each freeze."""
    frozen: list[int] = []
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(len(sys.modules)))
    monkeypatch.setattr(daemon, "worker", serve)
    monkeypatch.setattr(daemon, "manager", lambda: [daemon.worker(sock, True) for _ in range(3)])
    main()
    return frozen


@pytest.mark.skipif(not hasattr(socket, "TCP_QUICKACK"), reason="an option of Linux")
def test_every_task_begins_with_acknowledgements_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark writes a task in two parts, and the second one waits for the acknowledgement of the first."""
    quick: list[int] = []

    def serve(sock: socket.socket, authenticated: bool) -> int:
        quick.append(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 0)  # as after an answer
        return 0

    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sock:
        run_tasks(monkeypatch, sock, serve)
    assert quick == [1, 1, 1]


def test_modules_are_frozen_once_and_what_tasks_leave_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through a Unix socket, too, as with `spark.python.unix.domain.socket.enabled`."""
    tasks: list[bool] = []

    def serve(sock: socket.socket, authenticated: bool) -> int:
        if not tasks:
            monkeypatch.setitem(sys.modules, "imported_by_the_first_task", sys)
        tasks.append(authenticated)
        return 0

    here, there = socket.socketpair()
    with here, there:
        first, second = run_tasks(monkeypatch, here, serve)
    assert (second - first, tasks) == (1, [True] * 3)


def test_a_local_session_has_it(spark: Any) -> None:
    assert spark.sparkContext.getConf().get("spark.python.daemon.module") == DAEMON
