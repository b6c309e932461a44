"""Prints the options of the JVMs that tests start, among them an archive of the classes that Spark loads.

    JAVA_TOOL_OPTIONS="$(python tools/spark_archive.py)"

Loading classes is half of what a short-lived JVM does: with the archive it takes half the CPU time. The archive is a
file of the virtual environment, made at the first call; a JVM that cannot use it (another Java, other jars) ignores it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ARCHIVE = Path(sys.prefix) / "spark-classes.jsa"
MADE_S_MAX = 600.0

# A JVM that lives for minutes gains nothing from its second compiler, and shares two cores with the Python processes.
OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"

# A read and a stream, which load most of what tests need.
WORKLOAD = """
import sys
import tempfile

import penstock
import penstock.spark

options = f"-XX:ArchiveClassesAtExit={sys.argv[1]} -Xlog:disable"
spark = penstock.spark.session("archive", master="local[2]", spark__driver__extraJavaOptions=options)
with tempfile.TemporaryDirectory() as folder, penstock.open(f"{folder}/store") as store:
    store.kv("t", value="int64").put(b"k", 1, durable=True)
    store.queue("q").put(b"m", durable=True)
    store.queue("copied")
    spark.read.format("penstock").option("table", "t").load(store.path).groupBy("value").count().collect()
    penstock.spark.wait(
        penstock.spark.stream(
            spark,
            store.path,
            source="q",
            consumer="c",
            batch=lambda frame: {"copied": frame.select("payload")},
            available_now=True,
        ),
        200,
    )
spark.stop()
"""


def make() -> None:
    """Make the archive, under its name only when it is whole."""
    unfinished = ARCHIVE.with_suffix(f".{os.getpid()}")
    environment = {**os.environ, "JAVA_TOOL_OPTIONS": OPTIONS}
    # Its output ends when the JVM does, which is after the Python process.
    subprocess.run(
        [sys.executable, "-c", WORKLOAD, str(unfinished)],
        env=environment,
        capture_output=True,
        timeout=MADE_S_MAX,
        check=True,
    )
    unfinished.rename(ARCHIVE)


def main() -> None:
    """Print the options; without the archive if it cannot be made."""
    try:
        if not ARCHIVE.exists():
            print("making an archive of Spark's classes, once", file=sys.stderr)
            make()
        print(f"{OPTIONS} -XX:SharedArchiveFile={ARCHIVE} -Xshare:auto -Xlog:disable")
    except (OSError, subprocess.SubprocessError) as error:
        print(f"tests run without an archive of Spark's classes: {error}", file=sys.stderr)
        print(OPTIONS)


if __name__ == "__main__":
    main()
