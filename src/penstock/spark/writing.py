"""Batch and streaming writes through the format.

Options: `table`; for mode("overwrite") of a kv table `start` and `end`, the range that is replaced.

Thread: `write` in Spark's tasks, `commit` in a process of Spark's.
Invariants: (1) a batch write is one group: atomic, visible at once. (2) a micro-batch is written once: its token is the
query's id and the batch's number.
"""

from __future__ import annotations

import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from penstock.errors import Invalid
from penstock.spark.loading import add_loads, check_schema, make_loads, replaced_range
from penstock.spark.table_ref import TableRef


@dataclass
class TaskResult(WriterCommitMessage):
    """The loads a task made."""

    loads: bytes
    query: str = ""


class TableWriter(DataSourceArrowWriter):
    """Writes a DataFrame as one group."""

    def __init__(self, options: dict[str, str], schema: StructType, overwrite: bool) -> None:
        self._table = TableRef.of(options).planned()
        self._schema = schema
        self._replace = replaced_range(self._table, options, overwrite)
        self._token = f"spark-{uuid.uuid4()}"
        check_schema(self._table, schema)

    def write(self, iterator: Iterator[Any]) -> TaskResult:
        return TaskResult(make_loads(self._table, self._schema, iterator, self._replace))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        encoded = [message.loads for message in messages if isinstance(message, TaskResult)]
        store = self._table.ref.store()
        store.port.learn([self._table.info])  # it was planned in another process
        with store.batch(token=(self._token, 0)) as batch:
            add_loads(batch, self._table, encoded, self._replace)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Report the abort: nothing is visible, and staged files are purged when their lease is over."""
        print(f"penstock: a write to {self._table.info.name} was aborted, nothing of it is visible", file=sys.stderr)


class StreamWriter(DataSourceStreamArrowWriter):
    """Writes the micro-batches of a stream, each once."""

    def __init__(self, options: dict[str, str], schema: StructType, overwrite: bool) -> None:
        if overwrite:
            raise Invalid("a stream appends: outputMode('complete') would replace the table with each batch")
        self._ref = TableRef.of(options)  # planned for each batch: a stream may run for months
        self._schema = schema
        check_schema(self._ref.planned(), schema)

    def write(self, iterator: Iterator[Any]) -> TaskResult:
        context = TaskContext.get()
        query = context.getLocalProperty("sql.streaming.queryId") if context else None
        if not query:
            raise Invalid("Spark passed no query id, so repeated batches cannot be recognised")
        return TaskResult(make_loads(self._ref.planned(), self._schema, iterator), query)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        results = [message for message in messages if isinstance(message, TaskResult)]
        if not results:
            return
        table = self._ref.planned()
        with self._ref.store().batch(token=(f"spark-stream-{results[0].query}", batchId)) as batch:
            add_loads(batch, table, [message.loads for message in results])

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Do nothing: nothing is visible, and Spark repeats the batch."""
