"""A Spark session with settings that suit a local pipeline, and temporary views of a store's tables.

Thread: the driver's.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from py4j.protocol import Py4JError, Py4JJavaError, Py4JNetworkError  # type: ignore[import-untyped]

from penstock.errors import Invalid, StreamFailed
from penstock.host import threads

PUSHDOWN = "spark.sql.python.filterPushdown.enabled"
JAVA_MIN = 17
LOCAL = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.buffer.size": str(1 << 20),  # between the JVM and its Python processes
}
DAEMON = "penstock.spark.worker_daemon"

TASK_LOGGERS = (
    "org.apache.spark.executor.Executor",
    "org.apache.spark.scheduler.TaskSetManager",
    "org.apache.spark.sql.execution.python",
    "org.apache.spark.api.python",
    "org.apache.spark.util.Utils",
)
STREAM_LOGGERS = ("org.apache.spark.sql.execution.streaming",)
PYTHON_LOGGERS = ("DataFrameQueryContextLogger", "SQLQueryContextLogger", "py4j.clientserver")  # they repeat the same
JVM_ENDED = (
    "Spark's JVM has ended (it was killed, or ran out of memory): restart this program, or the notebook's kernel"
)
JVM_ENDS_S = 5.0  # from its last answer to the end of its process
_lock = threads.lock("spark.loggers")
_muted: Counter[str] = Counter()  # guarded by _lock; how many blocks mute a logger


def session(name: str = "penstock", *, master: str | None = None, ui: bool = False, **conf: str) -> Any:
    """Start a local session, or one on `master`: loopback, no UI by default, few shuffle partitions, quiet logs.

    `conf` sets anything else, with `__` for the dots: `session(spark__executor__memory="2g")`. In a program that
    spark-submit started, the settings of spark-submit override these defaults, the master included.

    >>> spark = penstock.spark.session("reports")
    >>> spark.range(3).count()
    3
    """
    submitted = _submitted()
    if not submitted:
        find_java()
    from pyspark.sql import SparkSession

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # Spark would use any python3 on the PATH
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    master = master or submitted.get("spark.master") or f"local[{threads.cores()}]"
    is_local = master.startswith("local")
    if is_local:
        os.environ.setdefault("SPARK_LOCAL_IP", LOCAL["spark.driver.host"])  # Spark would search for one, and warn
    builder = SparkSession.builder.appName(name).master(master)
    settings = {
        "spark.ui.enabled": str(ui).lower(),
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.shuffle.partitions": str(threads.cores()),
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        PUSHDOWN: "true",
        "spark.log.level": "ERROR",
        **(LOCAL if is_local else {}),
        **({"spark.python.daemon.module": DAEMON} if is_local and _is_this_python() else {}),
    }
    settings |= {key: submitted[key] for key in settings.keys() & submitted.keys()}
    settings |= {key.replace("__", "."): value for key, value in conf.items()}
    for key, value in settings.items():
        builder = builder.config(key, value)
    with _no_orphan():
        spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    mute_accumulators(spark)
    from penstock.spark.format import register

    register(spark)
    return spark


def _is_this_python() -> bool:
    """Whether Spark's Python workers run the Python of this process, which has Penstock."""
    return os.environ.get("PYSPARK_PYTHON") == sys.executable


@contextmanager
def _no_orphan() -> Iterator[None]:
    """End the JVM that Spark starts in the block if that is interrupted before Spark has it: it would stay for ever."""
    from pyspark import SparkContext, java_gateway

    module: Any = java_gateway
    popen, started = module.Popen, list[Any]()

    def start(*arguments: Any, **more: Any) -> Any:
        started.append(popen(*arguments, **more))
        return started[-1]

    module.Popen = start
    try:
        yield
    except BaseException:
        for process in started:
            if SparkContext._gateway is None:
                process.kill()
                process.wait()
        raise
    finally:
        module.Popen = popen


@contextmanager
def muted(spark: Any, loggers: Iterable[str] = TASK_LOGGERS) -> Iterator[None]:
    """Keep Spark from logging failures that are expected and handled, until the last such block ends."""
    log4j = getattr(getattr(spark, "_jvm", None), "org", None)
    if log4j is None:
        yield  # a remote session, which logs elsewhere
        return
    names = tuple(loggers)
    try:
        _set_levels(log4j.apache.logging.log4j, names, 1)
        yield
    finally:
        _set_levels(log4j.apache.logging.log4j, names, -1)


@contextmanager
def jvm_failures(spark: Any, remedy: str) -> Iterator[None]:
    """Raise `StreamFailed`, in one line, if the JVM of a session ends while the block runs."""
    root = logging.getLogger()
    root.addFilter(_is_not_of_py4j)
    try:
        yield
    except (Py4JError, ConnectionError) as error:
        if isinstance(error, Py4JJavaError) or not _has_ended(spark, error):
            raise
        raise ended_jvm(remedy) from None
    finally:
        root.removeFilter(_is_not_of_py4j)


def mute_accumulators(spark: Any) -> None:
    """Keep Spark's server of accumulators from printing a traceback when the JVM ends."""
    server = getattr(getattr(spark, "sparkContext", None), "_accumulatorServer", None)
    if server is None:
        return  # a remote session
    original = type(server).handle_error.__get__(server)

    def handle_error(request: Any, address: Any) -> None:
        if not isinstance(sys.exc_info()[1], (EOFError, ConnectionError)):
            original(request, address)

    server.handle_error = handle_error


def ended_jvm(remedy: str) -> StreamFailed:
    """Return the error for a use of Spark whose JVM has ended; py4j logs nothing from then on."""
    for name in ("py4j.clientserver", "py4j.java_gateway"):
        logging.getLogger(name).disabled = True  # for good: nothing in this process can use Spark any more
    return StreamFailed(f"{JVM_ENDED} ({remedy})")


def _is_not_of_py4j(record: logging.LogRecord) -> bool:
    """Whether a record of the root logger is a user's: py4j logs a traceback there for each call that fails."""
    return record.getMessage() != "Exception while sending command."


def _has_ended(spark: Any, error: Exception) -> bool:
    process = getattr(getattr(spark.sparkContext, "_gateway", None), "proc", None)
    if process is None:  # another program started the JVM
        return isinstance(error, (Py4JNetworkError, ConnectionError))
    try:
        process.wait(JVM_ENDS_S)
    except subprocess.TimeoutExpired:
        return False
    return True


def _set_levels(log4j: Any, names: tuple[str, ...], change: int) -> None:
    with _lock:
        for name in names:
            _muted[name] += change
            level = log4j.Level.OFF if _muted[name] > 0 else log4j.LogManager.getRootLogger().getLevel()
            log4j.core.config.Configurator.setLevel(name, level)
        for name in PYTHON_LOGGERS:
            _muted[name] += change
            logging.getLogger(name).disabled = _muted[name] > 0


def _submitted() -> dict[str, str]:
    """Return the settings of spark-submit; empty if it did not start this program."""
    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        return {}
    from pyspark import SparkConf, SparkContext

    SparkContext._ensure_initialized()  # the settings are in the running JVM
    return dict(SparkConf().getAll())


def find_java() -> str:
    """Return the java that Spark will use; a clear error if it is missing or too old."""
    home = os.environ.get("JAVA_HOME")
    java = os.path.join(home, "bin", "java") if home else shutil.which("java")
    if home and not os.path.exists(java or ""):
        raise Invalid(f"JAVA_HOME is {home!r}, and there is no bin/java in it: correct it, or unset it")
    if java is None:
        raise Invalid(f"Spark needs Java {JAVA_MIN}: install it (Debian: apt-get install openjdk-17-jre-headless)")
    try:
        output = subprocess.run([java, "-version"], capture_output=True, text=True, check=False, timeout=30).stderr
    except (OSError, subprocess.TimeoutExpired) as error:
        source = "which JAVA_HOME names, " if home else ""
        raise Invalid(f"{java}, {source}does not run ({error}): correct it, or set JAVA_HOME") from None
    version = next((word.strip('"') for word in output.split() if word[:1] == '"'), "")
    if not version.split(".")[0].isdecimal() or int(version.split(".")[0]) < JAVA_MIN:
        remedy = f"JAVA_HOME is {home!r}, point it to a newer one" if home else "install it, or set JAVA_HOME"
        raise Invalid(f"Spark needs Java {JAVA_MIN} or later, and {java} is {version or 'not a Java'}: {remedy}")
    return java


def views(spark: Any, path: str, *, snapshot: str | None = None) -> list[str]:
    """Make a temporary view of each table of a store, at a snapshot's LSN if set; return their names.

    >>> penstock.spark.views(spark, path)
    ['events', 'totals', 'users']
    >>> spark.sql("SELECT count(*) FROM users").first()[0]
    1
    """
    from penstock.spark.format import register
    from penstock.spark.table_ref import TableRef

    ref = TableRef.of({"path": path}, table=False)
    register(spark)
    names: list[str] = ref.store().tables()
    for name in names:
        reader = spark.read.format("penstock").option("table", name)
        if snapshot is not None:
            reader = reader.option("snapshot", snapshot)
        reader.load(ref.path).createOrReplaceTempView(name)
    return names
