"""Finds the rows that make a batch function fail, in one Spark job.

The function runs once, on a frame whose rows a search can choose (a gate, in one partition: the batch itself needs no
shuffle). Tasks then evaluate the plan that Spark made of it on ever fewer of their rows: `RowSearch.java` says how. It
is compiled by Janino, which is a part of Spark, and sent to the executors as a jar.

Thread: that of the stream. The local properties and settings that a search needs are those of this thread and of the
stream's own session.
Invariant: a search writes nothing, and what it reports failed alone. If it cannot search (the plan broadcasts its
input, or rows fail only together) it says so, and reports nothing.
"""

from __future__ import annotations

import logging
import pkgutil
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from pyspark.sql import DataFrame

from penstock.host import threads
from penstock.kinds import StreamColumns

logger = logging.getLogger(__name__)
SEARCHING = "penstock.searching"  # as in RowSearch.java
SETTINGS = {
    "spark.sql.shuffle.partitions": "1",  # the other side of a join comes in one partition, as the gate does
    "spark.sql.adaptive.enabled": "false",  # a plan is made whole, and no part of it is run before
    "spark.sql.exchange.reuse": "false",
}
POSITION_TYPES = ["int", "bigint"]  # of the columns shard and sequence, as the tasks read them
_lock = threads.lock("spark.isolation")
_loaders: dict[str, Any] = {}  # guarded by _lock; class loaders by Spark application


class RowPosition(NamedTuple):
    """The position of a message."""

    shard: int
    sequence: int


Failures = dict[RowPosition, str]  # the text of the error by position


class NotSearchableError(Exception):
    """The rows of this batch cannot be evaluated apart."""


def find_failures(
    frame: DataFrame,
    plans_of: Callable[[DataFrame], list[DataFrame]],
    columns: StreamColumns,
    *,
    error_column: int | None,
    failures_max: int,
    timeout_s: float,
) -> Failures:
    """Return the rows on which a plan fails: all of them, or any `failures_max + 1`.

    With `error_column`, a row of output that is not null there is a failure, too. The caller owns a job tag with which
    it may cancel the job.
    """
    types = dict(frame.dtypes)
    if [types.get(columns.shard), types.get(columns.sequence)] != POSITION_TYPES:
        raise NotSearchableError(f"{columns.shard} and {columns.sequence} are not {POSITION_TYPES}")
    context: Any = frame.sparkSession.sparkContext
    try:
        loader = _loader(context)
        source = _rows(frame.select("*"))
        with _settings(frame.sparkSession):
            plans = plans_of(_gated(loader, frame))
            with _searching(context):
                executed = context._gateway.new_array(context._jvm.org.apache.spark.sql.execution.SparkPlan, len(plans))
                for number, plan in enumerate(plans):
                    executed[number] = plan._jdf.queryExecution().executedPlan()
                partitions = len(source.partitions())
                slices = max(1, context.defaultParallelism // max(1, partitions))
                columns_read = [frame.columns.index(columns.shard), frame.columns.index(columns.sequence)]
                errors = -1 if error_column is None else error_column
                limits = [failures_max, int(timeout_s) + 1]
                arguments = [executed, max(1, partitions), slices, *columns_read, errors, *limits]
                search = _new(context, loader, "penstock.RowSearch", *arguments)
                failing_rows = _repeated(context, source, slices).mapPartitionsWithIndex(search, False)
                texts = [str(text) for text in failing_rows.collect()]
    except Exception as error:
        raise NotSearchableError(str(error)) from error
    given_up = [text[1:] for text in texts if text.startswith("?")]
    if given_up:
        raise NotSearchableError(given_up[0])
    return dict(_failure(text) for text in texts)


def _failure(text: str) -> tuple[RowPosition, str]:
    shard, sequence, error = text.split(" ", 2)
    return RowPosition(int(shard), int(sequence)), error


def _rows(frame: DataFrame) -> Any:
    """Return the rows of a frame as Spark computes them."""
    return frame._jdf.queryExecution().toRdd()


def _repeated(context: Any, rows: Any, times: int) -> Any:
    """Return the partitions of an RDD several times, one after the other."""
    every = context._gateway.new_array(context._jvm.org.apache.spark.api.java.JavaRDD, times)
    for number in range(times):
        every[number] = rows.toJavaRDD()
    return context._jsc.union(every)


def _gated(loader: Any, frame: DataFrame) -> DataFrame:
    """Return a frame with the schema of another, whose rows a search chooses."""
    session: Any = frame.sparkSession
    gate = _new(session.sparkContext, loader, "penstock.RowSearch$Gate", _rows(frame.coalesce(1)))
    rows = session._jsparkSession.internalCreateDataFrame(gate, frame._jdf.schema(), False)
    return DataFrame(rows, session).coalesce(1)  # which also tells Spark that it is one partition


def _new(context: Any, loader: Any, name: str, *arguments: Any) -> Any:
    """Return a new object of a class that only `loader` knows."""
    array = context._gateway.new_array(context._jvm.java.lang.Object, len(arguments))
    for number, argument in enumerate(arguments):
        array[number] = argument
    return loader.loadClass(name).getConstructors()[0].newInstance(array)


@contextmanager
def _searching(context: Any) -> Iterator[None]:
    """Mark the jobs of this thread: in them nothing but a search may read a gate."""
    context.setLocalProperty(SEARCHING, "true")
    try:
        yield
    finally:
        context.setLocalProperty(SEARCHING, None)


@contextmanager
def _settings(session: Any) -> Iterator[None]:
    before = {name: session.conf.get(name) for name in SETTINGS}
    try:
        for name, value in SETTINGS.items():
            session.conf.set(name, value)
        yield
    finally:
        for name, value in before.items():
            session.conf.set(name, value)


def _loader(context: Any) -> Any:
    """Return a class loader with the classes of a search, which the executors have, too."""
    with _lock:
        loader = _loaders.get(context.applicationId)
        if loader is None:
            loader = _loaders[context.applicationId] = _compile(context)
        return loader


def _compile(context: Any) -> Any:
    jvm = context._jvm
    source = pkgutil.get_data("penstock.spark", "RowSearch.java")
    assert source is not None, "the package has its source"
    compiler = jvm.org.codehaus.janino.SimpleCompiler()
    compiler.setParentClassLoader(jvm.java.lang.Thread.currentThread().getContextClassLoader())
    compiler.cook("RowSearch.java", jvm.java.io.StringReader(source.decode()))
    jar = f"{context._temp_dir}/penstock-row-search.jar"
    with zipfile.ZipFile(jar, "w") as archive:
        for entry in compiler.getBytecodes().entrySet():
            archive.writestr(f"{entry.getKey().replace('.', '/')}.class", bytes(entry.getValue()))
    context._jsc.addJar(jar)
    return compiler.getClassLoader()
