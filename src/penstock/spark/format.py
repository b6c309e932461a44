"""The Spark format `penstock`: handles .read, .write, .readStream and .writeStream.

    spark.read.format("penstock").option("table", "users").load("/absolute/path")

Thread: Spark's; Spark makes and pickles instances at will, so they hold only options.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from functools import lru_cache
from typing import Any

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from penstock.errors import Invalid
from penstock.feeds import change_schema_of
from penstock.partition.ledger_records import TableInfo
from penstock.registry import kind_named
from penstock.spark.arrow import check_columns, chosen_columns, spark_schema
from penstock.spark.table_ref import TableRef, check_options, choice

BATCH_OPTIONS = ("start", "end", "selector", "columns", "splits", "snapshot", "pushdown")


class PenstockSource(DataSource):
    """The format."""

    @classmethod
    def name(cls) -> str:
        return "penstock"

    def schema(self) -> StructType:
        info = TableRef.of(self.options).info()
        schema = spark_schema(change_schema_of(info)) if self._of_changes() else _schema_of(info)
        return chosen_columns(schema, self.options["columns"], info.name) if "columns" in self.options else schema

    def _of_changes(self) -> bool:
        return choice(self.options, "changes", ("false", "true")) == "true"

    def reader(self, schema: StructType) -> DataSourceReader:
        from penstock.spark.change_reading import ChangesReader
        from penstock.spark.reading import TableReader

        info = TableRef.of(self.options).info()
        if self._of_changes():
            check_options(self.options, "changes", "after", "until", "snapshot")
            check_columns(schema, self.schema(), info.name)
            return ChangesReader(dict(self.options), schema, info)
        check_options(self.options, "changes", *BATCH_OPTIONS)
        check_columns(schema, _schema_of(info), info.name)
        return TableReader(dict(self.options), schema, info)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from penstock.spark.writing import TableWriter

        check_options(self.options, *BATCH_OPTIONS)  # a view for reads and inserts has one set of options
        return TableWriter(dict(self.options), schema, overwrite)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        from penstock.spark.streaming import StreamReader

        check_options(self.options, "start", "maxRows", "maxBytes", "onLoss", "changes")
        check_columns(schema, self.schema(), self.options["table"])
        return StreamReader(dict(self.options), schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        from penstock.spark.writing import StreamWriter

        return StreamWriter(dict(self.options), schema, overwrite)


def _schema_of(info: TableInfo) -> StructType:
    return spark_schema(kind_named(info.kind, info.name).schema(info.options))


def register(spark: Any) -> None:
    """Register the format with a session, and make that the session of the calling thread.

    Spark looks formats up in the session of the thread, and a thread that Python started has none: there it would not
    find a format that is registered. A session that finds `pyspark_penstock` registers the format by itself.

    >>> penstock.spark.register(spark)
    >>> spark.read.format("penstock").option("table", "users").load(path).columns
    ['key', 'value', 'lsn']
    """
    python = getattr(getattr(spark, "sparkContext", None), "pythonExec", sys.executable)
    if not _has_penstock(python):
        raise Invalid(
            f"Spark runs {python}, which has no penstock: use penstock.spark.session(), or set "
            f"PYSPARK_PYTHON={sys.executable} before the session starts"
        )
    spark.dataSource.register(PenstockSource)
    jvm = getattr(spark, "_jvm", None)
    if jvm is not None:
        jvm.SparkSession.setActiveSession(spark._jsparkSession)


@lru_cache
def _has_penstock(python: str) -> bool:
    """Whether the Python that Spark starts can import Penstock."""
    if shutil.which(python) == sys.executable:
        return True
    try:
        process = subprocess.run([python, "-c", "import penstock"], capture_output=True, timeout=60, check=False)
    except OSError:
        return False
    return process.returncode == 0
