"""Spark imports every module called pyspark_* and registers its `DefaultSource`: so `format("penstock")` just works."""

from penstock.spark.format import PenstockSource as DefaultSource

__all__ = ["DefaultSource"]
