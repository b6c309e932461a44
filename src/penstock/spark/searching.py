"""The neighbours of the rows of a DataFrame: each task searches a vector table in the files that it maps itself.

A task loads the index of one snapshot from the files of the table, keeps it for the next task of its process, and
searches it as the owner does. Where it does not see the files, it asks the owner.

Thread: `search` in the driver, the rest in Spark's tasks, one at a time in a process.
Invariant: all tasks of a query search one LSN.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa
from pyspark.sql.types import FloatType, LongType, StringType, StructField, StructType

from penstock.arguments import flag, in_short, whole
from penstock.client.store import RemoteSnapshot
from penstock.errors import Invalid, NotFound
from penstock.kinds import QUERY_BYTES_MAX, NeighbourSearchable, as_neighbour_searchable, partitions_of
from penstock.partition.ledger import TableInfo
from penstock.registry import kind_named
from penstock.spark.reading import LEASE_S, query_name
from penstock.spark.table_ref import TableRef

RANK, ID, DISTANCE, ATTRIBUTES = "rank", "id", "distance", "attributes"
ADDED = StructType(
    [
        StructField(RANK, LongType(), False),
        StructField(ID, StringType(), False),
        StructField(DISTANCE, FloatType(), False),
        StructField(ATTRIBUTES, StringType(), True),
    ]
)
HITS_ROWS = 65_536  # of a batch
K_MAX = 10_000
_opened: dict[tuple[bytes, int, int], list[Any]] = {}  # the shards of the last table searched, by store, table and LSN


@dataclass(frozen=True)
class NeighbourSearch:
    """A search as the tasks get it."""

    ref: TableRef
    info: TableInfo
    plan: str
    snapshot: str
    column: str
    k: int
    where: dict[str, Any] | None
    probes: int
    exact: bool


def search(
    frame: Any,
    path: str,
    table: str,
    k: int = 10,
    *,
    vector: str = "vector",
    where: Mapping[str, Any] | None = None,
    probes: int | None = None,
    exact: bool = False,
    snapshot: str = "",
) -> Any:
    """Return a row for each of the `k` nearest vectors of each row: its columns, then rank, id, distance, attributes.

    `vector` names the column with the query vectors. `where`, `probes` and `exact` are those of a table's search;
    `snapshot` is the id of an open snapshot, otherwise a query reads the moment at which its first task begins.

    >>> with penstock.connect(path) as store:
    ...     docs = store.vector("docs", dimensions=2)
    ...     epoch = docs.upsert(["a", "b"], [[1.0, 0.0], [0.0, 1.0]], durable=True)
    >>> queries = spark.createDataFrame([(1, [0.9, 0.1])], "number int, vector array<float>")
    >>> [(row.number, row.id) for row in penstock.spark.search(queries, path, "docs", k=1).collect()]
    [(1, 'a')]
    """
    ref = TableRef.of({"path": path, "table": table})
    info = ref.info()
    as_neighbour_searchable(kind_named(info.kind, info.name), info)
    names = frame.schema.names
    if vector not in names:
        raise Invalid(f"the DataFrame has no column {in_short(vector)}: say which one has the vectors by vector=")
    taken = [name for name in ADDED.names if name in names]
    if taken:
        raise Invalid(f"the DataFrame has a column {taken[0]!r}, which the result adds: use withColumnRenamed first")
    if where is not None and not isinstance(where, Mapping):
        raise Invalid(f"where of a search on Spark is a dict such as {{'lang': 'en'}}, not {in_short(where)}")
    if probes is None and not flag(exact, "exact"):
        probes = ref.store().vector(table).statistics().probes or None  # as many as the owner takes
    wanted = NeighbourSearch(
        ref=ref,
        info=info,
        plan=uuid.uuid4().hex,
        snapshot=snapshot,
        column=vector,
        k=whole(k, "k", 1, K_MAX),
        where=None if where is None else dict(where),
        probes=0 if probes is None else whole(probes, "probes", 1),
        exact=exact,
    )
    return frame.mapInArrow(partial(_neighbours, wanted), StructType([*frame.schema.fields, *ADDED.fields]))


def _neighbours(wanted: NeighbourSearch, batches: Iterator[Any]) -> Iterator[Any]:
    """Yield the rows of a task's queries, each as often as it has neighbours."""
    ask: Any = None
    for batch in batches:
        row_bytes = batch.nbytes // max(1, batch.num_rows) + 1
        step = max(1, min(HITS_ROWS // wanted.k, QUERY_BYTES_MAX // 4 // row_bytes))
        for start in range(0, batch.num_rows, step):
            some = batch.slice(start, step)
            ask = _searcher(wanted) if ask is None else ask
            for hits in ask(some.column(batch.schema.get_field_index(wanted.column))):
                yield _beside(some, hits)


def _beside(queries: Any, hits: Any) -> Any:
    """Return each hit beside its query."""
    rows = queries.take(hits.column("query"))
    added = [hits.column(name) for name in ADDED.names]
    return pa.record_batch([*rows.columns, *added], names=[*rows.schema.names, *ADDED.names])


def _searcher(wanted: NeighbourSearch) -> Any:
    """Return a function that searches for a column of vectors, and yields record batches of hits."""
    store = wanted.ref.store()
    name = query_name(wanted.plan)
    moment = store.snapshot(wanted.snapshot) if wanted.snapshot else store.query_snapshot(name, lease_s=LEASE_S)
    info = moment.info(wanted.ref.table)
    if info.table_id != wanted.info.table_id:
        raise NotFound(f"table {info.name} was dropped and made again since this search was planned: search anew")
    kind = as_neighbour_searchable(kind_named(info.kind, info.name), info)
    shards = _shards(wanted.ref, kind, info, moment)

    def ask(column: Any) -> Iterator[Any]:
        query = kind.neighbour_query(
            info, column, wanted.k, where=wanted.where, probes=wanted.probes, exact=wanted.exact
        )
        if shards is None:
            return iter(moment.port.query(info, *query))
        return kind.query(info, *query, shards, _TaskQuery())

    return ask


def _shards(ref: TableRef, kind: NeighbourSearchable, info: TableInfo, moment: RemoteSnapshot) -> list[Any] | None:
    """Return the shards of a table from the files that this process maps; None if it does not see them."""
    root, identity = ref.root, ref.store().identity
    key = (identity, info.table_id, moment.lsn)
    if root is None:
        return None
    if key not in _opened:
        shards = []
        for partition in partitions_of(info):
            pieces = moment.port.pieces(partition, 1, b"", None)
            shard = kind.open_shard(pieces[0], root, identity) if len(pieces) == 1 and pieces[0].detail else None
            if shard is None:
                return None
            shards.append(shard)
        _opened.clear()  # of one table and moment: an index takes memory
        _opened[key] = shards
    return _opened[key]


class _TaskQuery:
    """What a query in a task may use; Spark bounds its time."""

    time_us = 0

    def check(self) -> None:
        """Do nothing."""
