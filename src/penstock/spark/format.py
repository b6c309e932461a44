"""The format `penstock` of Spark: what to do with .read, .write, .readStream and .writeStream.

    spark.read.format("penstock").option("table", "users").load("/absolute/path")

Thread: Spark's; an instance is made and pickled by Spark at will, so it holds nothing but options.
"""

from __future__ import annotations

from typing import Any

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from penstock.spark.arrow import check_columns, spark_schema
from penstock.spark.place import Place


class PenstockSource(DataSource):
    """The format."""

    @classmethod
    def name(cls) -> str:
        return "penstock"

    def schema(self) -> StructType:
        kind, info = Place.of(self.options).kind()
        return spark_schema(kind.schema(info.options))

    def reader(self, schema: StructType) -> DataSourceReader:
        from penstock.spark.reading import TableReader

        check_columns(schema, self.schema(), self.options["table"])
        return TableReader(dict(self.options), schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from penstock.spark.writing import TableWriter

        return TableWriter(dict(self.options), schema, overwrite)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        from penstock.spark.streaming import StreamReader

        check_columns(schema, self.schema(), self.options["table"])
        return StreamReader(dict(self.options), schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        from penstock.spark.writing import StreamWriter

        return StreamWriter(dict(self.options), schema, overwrite)


def register(spark: Any) -> None:
    """Make the format known to a session; one that finds `pyspark_penstock` does it by itself."""
    spark.dataSource.register(PenstockSource)
