"""Queries of vector tables: the nearest vectors, counts, statistics; on all shards at one LSN.

    search       the nearest vectors of some query vectors, as (query, rank, id, distance, attributes)
    count        the number of vectors
    statistics   of each shard: vectors, lists, memory, and recall on a sample of the queries that were searched
    attributes   the columns of attributes: (name, type)

Thread: any; pure functions of snapshots.
Invariant: distances ascend within a query, smaller is nearer: 1 - cosine, - dot product, Euclidean distance.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.substrait

from penstock.arguments import in_short, whole
from penstock.errors import Invalid
from penstock.kinds import QueryContext
from penstock.vector.attributes import joined_fields
from penstock.vector.filters import BoundCondition, compile_condition, one_column_each
from penstock.vector.keys import DELETED, F32
from penstock.vector.operators import decode_ids
from penstock.vector.options import VectorOptions
from penstock.vector.pieces import FileShard
from penstock.vector.reading import VectorState, merge_nearest
from penstock.vector.section import check_vectors
from penstock.vector.stored import read_sequence

K_MAX = 10_000
PROBES_MAX = 1 << 20
HITS_ROWS = 16_384  # of a batch
QUERIES = ("search", "count", "statistics", "attributes")

HITS = pa.schema(
    [
        pa.field("query", pa.int64(), nullable=False),
        pa.field("rank", pa.int64(), nullable=False),
        pa.field("id", pa.string(), nullable=False),
        pa.field("distance", pa.float32(), nullable=False),
        pa.field("attributes", pa.string()),
    ]
)


class Hit(NamedTuple):
    """A vector that a search found; a smaller distance is nearer.

    >>> docs = store.vector("docs", dimensions=2)
    >>> epoch = docs.upsert(["a", "b"], [[1.0, 0.0], [0.0, 1.0]], [{"lang": "en"}, {"lang": "de"}])
    >>> docs.search([1.0, 0.1], k=1, after=epoch)[0].id
    'a'
    """

    id: str
    distance: float
    attributes: dict[str, str | int | float | bool | None]


class SearchQuery(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, kw_only=True):
    """The argument of `search`."""

    vectors: bytes  # float32, one query after the other
    k: int
    probes: int = 0  # lists to look at; 0: the table's own choice
    exact: bool = False
    where: Any = None  # a condition as a dict
    expression: bytes = b""  # a condition as an Arrow expression, in Substrait


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(SearchQuery)


def check_k(k: Any) -> int:
    """Return `k`, the number of vectors to find; `Invalid` if it is not a whole number from 1 to K_MAX."""
    return whole(k, "k", 1, K_MAX)


def check_probes(probes: Any) -> int:
    """Return how many lists to look at; 0 for None."""
    return 0 if probes is None else whole(probes, "probes", 1, PROBES_MAX)


def encode_search(query: SearchQuery) -> bytes:
    """Encode the argument of `search`; `Invalid` if its condition has values that are not plain."""
    try:
        return _encode(query)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise Invalid(
            f"where has a value that is not an attribute ({error}): compare with texts, numbers, bools"
        ) from None


def check_search(argument: bytes, options: VectorOptions) -> SearchQuery:
    """Decode and check the argument of `search`; `Invalid` if it is malformed."""
    query = _decoded(argument)
    check_k(query.k)
    whole(query.probes, "probes", 0, PROBES_MAX)
    if not query.vectors or len(query.vectors) % options.vector_bytes:
        raise Invalid(f"query vectors of this table have {options.dimensions} dimensions")
    check_vectors(_vectors_of(query, options), options)
    if query.where is not None:
        compile_condition(query.where, pa.schema([]))
    return query


def _decoded(argument: bytes) -> SearchQuery:
    try:
        return _decoder.decode(argument)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Invalid(f"the argument of a query does not decode: {error}") from None


def _vectors_of(query: SearchQuery, options: VectorOptions) -> F32:
    return np.frombuffer(query.vectors, "<f4").reshape(-1, options.dimensions).astype(np.float32, copy=False)


def condition_of(query: SearchQuery) -> Any:
    """Return the condition of a search: a dict, an expression, or None."""
    if not query.expression:
        return query.where
    try:
        bound = pa.substrait.deserialize_expressions(query.expression)
        (expression,) = bound.expressions.values()
        return BoundCondition(expression, bound.schema)
    except (pa.ArrowException, ValueError, TypeError) as error:
        raise Invalid(f"the expression of a search does not decode: {error}") from None


def check_vector_query(name: str, argument: bytes, options: VectorOptions) -> None:
    """Raise `Invalid` if there is no such query, or its argument is malformed."""
    if name not in QUERIES:
        raise Invalid(f"a vector table has no query {in_short(name)}: use one of {', '.join(QUERIES)}")
    if name == "search":
        condition_of(check_search(argument, options))
    elif argument:
        raise Invalid(f"the query {name} of a vector table has no argument")


def run_vector_query(
    name: str, argument: bytes, options: VectorOptions, shards: Sequence[VectorState], context: QueryContext
) -> Iterator[Any]:
    """Return the record batches of a query. Requires: `check_vector_query` has passed."""
    if name == "search":
        query = _decoded(argument)
        return _search(query, _vectors_of(query, options), shards, context)
    if name == "count":
        return _count(shards, context)
    return _attributes(shards, context) if name == "attributes" else _statistics(shards, context)


def _search(query: SearchQuery, vectors: F32, shards: Sequence[VectorState], context: QueryContext) -> Iterator[Any]:
    where = _with_types(condition_of(query), shards, context)
    step = max(1, HITS_ROWS // query.k)
    for start in range(0, len(vectors), step):
        block = vectors[start : start + step]
        nearest = []
        for shard in shards:
            context.check()
            nearest.append(shard.nearest(block, query.k, probes=query.probes or None, exact=query.exact, where=where))
        context.check()
        yield hits_batch(shards, nearest, query.k, start)


def _with_types(where: Any, shards: Sequence[VectorState], context: QueryContext) -> Any:
    """Return a condition for all shards, bound to the types that its attributes have in any of them."""
    if not isinstance(where, dict) or (len(shards) == 1 and shards[0].in_one_table):
        return where
    return bound_to_all(where, [list(shard.attribute_fields(context.check)) for shard in shards])


def bound_to_all(where: Any, fields: Iterable[Iterable[pa.Field]]) -> Any:
    """Return a condition, bound to the columns that its attributes have in any of several parts of a table."""
    schema = pa.schema(joined_fields(field for part in fields for field in part))
    if isinstance(where, Mapping):
        return BoundCondition(where, pa.schema([field for field in schema if field.name in where]))
    return BoundCondition(where, one_column_each(schema)) if isinstance(where, pc.Expression) else where


def hits_batch(
    shards: Sequence[VectorState | FileShard], nearest: Sequence[tuple[F32, Any]], k: int, first: int
) -> Any:
    """Return the `k` nearest of the answers of shards, as a record batch; `first` is the number of the first query."""
    distances, ids, sources = merge_nearest(nearest, k)
    rows, columns = np.nonzero(ids >= 0)
    hit_ids, hit_shards = ids[rows, columns], sources[rows, columns]
    if len(shards) == 1:
        texts, attributes = shards[0].records(hit_ids)
    else:
        positions = [np.flatnonzero(hit_shards == number) for number in range(len(shards))]
        parts = [shard.records(hit_ids[here]) for shard, here in zip(shards, positions, strict=True)]
        order = pa.array(np.argsort(np.concatenate(positions), kind="stable"))
        texts, attributes = (pa.concat_arrays([part[at] for part in parts]).take(order) for at in (0, 1))
    return pa.record_batch(
        [
            pa.array(rows + first, pa.int64()),
            pa.array(columns + 1, pa.int64()),
            texts,
            pa.array(distances[rows, columns], pa.float32()),
            attributes,
        ],
        schema=HITS,
    )


def _count(shards: Sequence[VectorState], context: QueryContext) -> Iterator[Any]:
    context.check()
    yield pa.record_batch({"count": [sum(shard.count for shard in shards)]})


def _attributes(shards: Sequence[VectorState], context: QueryContext) -> Iterator[Any]:
    fields = joined_fields(field for shard in shards for field in shard.attribute_fields(context.check))
    columns = [[field.name for field in fields], [str(field.type) for field in fields]]
    yield pa.record_batch([pa.array(column, pa.string()) for column in columns], names=["name", "type"])


def _statistics(shards: Sequence[VectorState], context: QueryContext) -> Iterator[Any]:
    rows: list[dict[str, Any]] = []
    for shard in shards:
        context.check()
        version, generations = shard.snapshot.version, shard.generations()
        rows.append(
            {
                "count": shard.count,
                "ids_used": read_sequence(shard.view).next - 1,
                "deleted": len(decode_ids(shard.view.get(DELETED))),
                "generation": generations.current,
                "building": generations.building,
                "files": sum(1 for _ in version.files()),
                "file_bytes": sum(file.meta.size_bytes for file in version.files()),
                **shard.index_statistics(),
            }
        )
    yield pa.RecordBatch.from_pylist(rows, STATISTICS)


STATISTICS = pa.schema(
    [
        *(pa.field(name, pa.int64()) for name in ("count", "ids_used", "deleted", "generation", "building")),
        *(pa.field(name, pa.int64()) for name in ("files", "file_bytes", "lists", "probes", "memory_bytes")),
        pa.field("loaded", pa.bool_()),
        pa.field("recall", pa.float64()),
        pa.field("recall_queries", pa.int64()),
    ]
)
