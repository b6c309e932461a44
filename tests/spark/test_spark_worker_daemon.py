"""Spark's Python workers use the installed pyspark, and only where it is the one that their archive was made of."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyspark
import pytest

from penstock.spark.sessions import DAEMON
from penstock.spark.worker_daemon import without_archives

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


def test_a_local_session_has_it(spark: Any) -> None:
    assert spark.sparkContext.getConf().get("spark.python.daemon.module") == DAEMON
