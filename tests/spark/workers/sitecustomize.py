"""Spark's Python processes start sooner: they take a second of CPU time each, and these tests start hundreds.

Python imports this file when it starts; programs other than Spark's `python -m pyspark...`, and Penstock's daemon for
Spark's workers, are not changed by it.
(1) They import the installed pyspark: Spark puts an archive of its sources first, which each process compiles anew.
(2) Its daemons load their workers' modules before they fork, instead of each worker after.

tests/cluster/test_users_day.py does without.
"""

import sys
from importlib.machinery import PathFinder

DAEMONS = "pyspark.daemon", "penstock.spark.worker_daemon"

if sys.orig_argv[1:2] == ["-m"] and sys.orig_argv[2].startswith(("pyspark.", *DAEMONS)):
    installed = [entry for entry in sys.path if not entry.endswith(("/pyspark.zip", "-src.zip"))]
    if all(PathFinder.find_spec(name, installed) for name in ("pyspark", "py4j", "penstock")):
        sys.path[:] = installed
        if sys.orig_argv[2] in DAEMONS:
            import gc
            import importlib

            for name in (*sys.orig_argv[3:4], "pyspark.worker", "penstock.spark.reading", "penstock.spark.writing"):
                importlib.import_module(name)
            gc.collect()
            gc.freeze()
