"""The nearest neighbours of the vectors in a DataFrame, found by its tasks.

A task opens the table's files as of the snapshot that all tasks of the query share, builds the search kernel from them
and keeps it for the next tasks of its Python process. A task that does not see the store's folder asks the owner.

Thread: the driver's; `_task` in tasks.
Invariant: all tasks of a query search one LSN.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame
from pyspark.sql.types import ArrayType, FloatType, LongType, StringType, StructField, StructType

from penstock.arguments import flag, in_short
from penstock.client.store import RemoteSnapshot
from penstock.errors import Invalid, KindMismatch
from penstock.kinds import partitions_of
from penstock.partition.ledger_records import TableInfo
from penstock.registry import vector_kind
from penstock.spark.reading import LEASE_S, renewing
from penstock.spark.table_ref import TableRef, query_name
from penstock.vector.filters import compile_condition
from penstock.vector.options import VectorOptions, decode_vector_options
from penstock.vector.pieces import FileShard, open_piece
from penstock.vector.rows import plain_matrix
from penstock.vector.searching import bound_to_all, check_k, check_probes, hits_batch

HITS_MAX = 1 << 18  # that a task makes at a time: a batch of Spark's has 10,000 rows, each with up to 10,000 neighbours
NEIGHBOR_FIELDS = (
    StructField("rank", LongType()),
    StructField("neighbor", StringType()),
    StructField("distance", FloatType()),
    StructField("neighbor_attributes", StringType()),
)


@dataclass(frozen=True)
class _Search:
    """A search, for tasks."""

    ref: TableRef
    info: TableInfo
    column: str
    k: int
    probes: int
    exact: bool
    where: Any

    @property
    def options(self) -> VectorOptions:
        return decode_vector_options(self.info.options)


def search(
    frame: DataFrame,
    path: str,
    table: str,
    k: int = 10,
    *,
    column: str = "vector",
    where: Mapping[str, object] | pa.compute.Expression | None = None,
    probes: int | None = None,
    exact: bool = False,
) -> DataFrame:
    """Return each row of a DataFrame with its `k` nearest neighbours in a vector table, nearest first.

    `column` holds the query vectors, arrays of numbers. A row comes once for each neighbour, with the further columns
    rank (from 1), neighbor (its id), distance and neighbor_attributes (JSON). The rest is as for `VectorTable.search`.

    >>> epoch = store.vector("docs", dimensions=2).upsert(["a"], [[1.0, 0.0]], durable=True)
    >>> queries = spark.createDataFrame([("q", [1.0, 0.1])], "name string, vector array<double>")
    >>> neighbors = penstock.spark.search(queries, path, "docs", k=1)
    >>> [(row["name"], row["neighbor"]) for row in neighbors.collect()]
    [('q', 'a')]
    """
    ref = TableRef.of({"path": path, "table": table})
    info = ref.info()
    if info.kind != vector_kind().name:
        raise KindMismatch(f"table {table} is of the kind {info.kind}, not vector: search a vector table")
    fields = {field.name: field.dataType for field in frame.schema}
    if not isinstance(fields.get(column), ArrayType):
        raise Invalid(f"the DataFrame has no column {in_short(column)} of arrays: say column=, or rename it to vector")
    taken = [field.name for field in NEIGHBOR_FIELDS if field.name in fields]
    if taken:
        raise Invalid(f"the DataFrame has a column {taken[0]}, which the result needs: rename it")
    if where is not None and not isinstance(where, pc.Expression):
        compile_condition(where, pa.schema([]))  # before any work
    request = _Search(ref, info, column, check_k(k), check_probes(probes), flag(exact, "exact"), where)
    schema = StructType([*frame.schema.fields, *NEIGHBOR_FIELDS])
    return frame.mapInArrow(partial(_task, request), schema)


def _task(request: _Search, batches: Iterator[Any]) -> Iterator[Any]:
    """Search the vectors of a task's rows. Runs in a task."""
    filled = (batch for batch in batches if batch.num_rows)
    first = next(filled, None)
    if first is not None:
        snapshot = request.ref.store().query_snapshot(query_name("search"), lease_s=LEASE_S)
        yield from renewing(_neighbor_rows(request, snapshot, chain([first], filled)), request.ref, snapshot)


def _neighbor_rows(request: _Search, snapshot: RemoteSnapshot, batches: Iterator[Any]) -> Iterator[Any]:
    """Yield the rows of each batch with their neighbours in a snapshot."""
    shards, where = _shards(request, snapshot), request.where
    if shards is not None and where is not None:
        where = bound_to_all(where, [shard.attribute_fields() for shard in shards])
    step = max(1, HITS_MAX // request.k)
    for batch in (whole.slice(at, step) for whole in batches for at in range(0, whole.num_rows, step)):
        matrix = plain_matrix(batch.column(request.column), request.options, batch.num_rows)
        if shards is None:
            reader = snapshot.vector(request.ref.table)
            options: dict[str, Any] = {"where": request.where, "probes": request.probes or None, "exact": request.exact}
            hits: Any = reader.search(matrix, request.k, **options)
        else:
            answers = [
                shard.nearest(matrix, request.k, probes=request.probes or None, exact=request.exact, where=where)
                for shard in shards
            ]
            hits = pa.Table.from_batches([hits_batch(shards, answers, request.k, 0)])
        rows = pa.Table.from_batches([batch]).take(hits.column("query"))
        names = [*batch.schema.names, *(field.name for field in NEIGHBOR_FIELDS)]
        columns = [*rows.columns, *(hits.column(name) for name in ("rank", "id", "distance", "attributes"))]
        yield from pa.table(columns, names=names).to_batches()


class _KernelCache:
    """The kernel of the last search of this Python process."""

    shards: tuple[Any, list[FileShard]] | None = None  # replaced whole


def _shards(request: _Search, snapshot: RemoteSnapshot) -> list[FileShard] | None:
    """Return the shards of the table, read from its files; None if this process does not see them."""
    root, identity = request.ref.root, request.ref.store().identity
    if root is None:
        return None
    key = request.ref.store().uuid, request.info.table_id, snapshot.lsn
    if _KernelCache.shards is not None and _KernelCache.shards[0] == key:
        return _KernelCache.shards[1]
    _KernelCache.shards = None  # before the next is loaded: both at once may take too much memory
    shards: list[FileShard] = []
    for partition in partitions_of(request.info):
        (piece,) = snapshot.port.pieces(partition, 1)
        opened = open_piece(piece.detail, root, identity) if piece.detail else None
        if opened is None:
            return None
        shards.append(FileShard(*opened))
    _KernelCache.shards = key, shards
    return shards
