"""Reads of a vector table, live or in a snapshot, over a port.

Thread: any number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.arguments import flag, in_short, plain_int, seconds
from penstock.errors import Invalid
from penstock.journal.partitions import PartitionId, shard_of
from penstock.kinds import QUERY_BYTES_MAX, QUERY_S, QUERY_S_MAX, ReadableTable, Reading, TableSize
from penstock.partition.ledger_records import TableInfo
from penstock.vector.attributes import decode_attributes
from penstock.vector.changes import change_schema
from penstock.vector.filters import encode_expression
from penstock.vector.keys import F32
from penstock.vector.options import Metric, decode_vector_options
from penstock.vector.rows import plain_id, plain_ids, plain_queries, schema_of
from penstock.vector.searching import HITS, Hit, SearchQuery, check_k, check_probes, encode_search

SEARCH_BYTES = 4_096  # of a query's argument, besides its vectors


class VectorRecord(NamedTuple):
    """A record of a vector table.

    >>> docs = store.vector("docs", dimensions=2)
    >>> epoch = docs.upsert("a", [1.0, 0.0], {"lang": "en"})
    >>> docs.get("a").attributes
    {'lang': 'en'}
    """

    id: str
    vector: npt.NDArray[np.float32]
    attributes: dict[str, str | int | float | bool | None]


@dataclass(frozen=True, slots=True)
class VectorStatistics:
    """What a vector table holds, at one moment.

    >>> docs = store.vector("docs", dimensions=2)
    >>> docs.statistics().count
    0
    """

    count: int  # vectors
    deleted: int  # deleted vectors that stand in lists
    trained: bool  # searches use lists; otherwise they are exact
    lists: int  # of the index in memory, in all shards; 1 for each shard where searches are exact
    probes: int  # lists that a search of one shard looks at by default, the most of all shards
    recall: float | None  # of the 10 nearest at default settings, on a sample of the queries; None: none were searched
    recall_queries: int  # the size of that sample
    memory_bytes: int  # of the index and of attributes in memory
    memory_bytes_per_vector: float
    files: int
    file_bytes: int

    @property
    def size(self) -> TableSize:
        """Its size, in the terms that all kinds share."""
        return TableSize(self.count, self.files, self.file_bytes, self.memory_bytes)


class VectorReader(ReadableTable):
    """A read-only vector table, live or in a snapshot.

    >>> docs = store.vector("docs", dimensions=2)
    >>> epoch = docs.upsert(["a", "b"], [[1.0, 0.0], [0.0, 1.0]], durable=True)
    >>> with store.snapshot() as snapshot:
    ...     snapshot.vector("docs").search([0.1, 1.0], k=1)[0].id
    'b'
    """

    def __init__(self, port: Reading, info: TableInfo) -> None:
        super().__init__(port, info)
        self._options = decode_vector_options(info.options)

    def _change_schema(self) -> pa.Schema | None:
        return None if self._options.changes is None else change_schema(self._options)

    @property
    def dimensions(self) -> int:
        """The length of its vectors."""
        return self._options.dimensions

    @property
    def metric(self) -> Metric:
        """How distances are measured: cosine, dot or euclidean."""
        return self._options.metric

    @property
    def schema(self) -> pa.Schema:
        """The Arrow schema of its rows: id, vector, attributes (as JSON text)."""
        return schema_of(self._options)

    def __repr__(self) -> str:
        shards = "" if self.shards == 1 else f" of {self.shards} shards"
        return f"<{type(self).__name__} {self.name!r}{shards}: {self.dimensions} dimensions, {self.metric}>"

    def _partition(self, external: bytes) -> PartitionId:
        return self._partitions[0 if self.shards == 1 else shard_of(external, self.shards)]

    # -- records

    @overload
    def get(self, ids: str) -> VectorRecord | None: ...  # type: ignore[overload-overlap]

    @overload
    def get(self, ids: Iterable[str]) -> list[VectorRecord | None]: ...

    def get(self, ids: str | Iterable[str]) -> VectorRecord | list[VectorRecord | None] | None:
        """Return the record of an id, or None; for several ids, a list of records.

        >>> documents.get("a").attributes
        {'lang': 'en'}
        """
        if isinstance(ids, str):
            external = plain_id(ids)
            return self._record(external, self._reading.lookup(self._partition(external), external))
        keys = plain_ids(ids)
        records: list[VectorRecord | None] = [None] * len(keys)
        if not keys:
            return records
        with self._reading.moment(self._partitions) as moment:
            for partition in self._partitions:
                positions = [position for position, key in enumerate(keys) if self._partition(key) == partition]
                values = moment.lookup_many(partition, [keys[position] for position in positions])
                for position, value in zip(positions, values, strict=True):
                    records[position] = self._record(keys[position], value)
        return records

    def _record(self, external: bytes, value: bytes | None) -> VectorRecord | None:
        if value is None:
            return None
        vector = np.frombuffer(value, "<f4", self.dimensions).astype(np.float32)
        return VectorRecord(external.decode(), vector, decode_attributes(value[self._options.vector_bytes :]))

    def __contains__(self, id: object) -> bool:  # noqa: A002
        external = plain_id(id)  # False for something that is not an id would be correct, but hide the mistake
        return self._reading.lookup(self._partition(external), external) is not None

    def count(self) -> int:
        """Return the number of vectors.

        >>> documents.count()
        2
        """
        batches = self._reading.query(self._info, "count", b"")
        return sum(batch.column(0)[0].as_py() for batch in batches)

    def scan_arrow(self) -> Iterator[pa.RecordBatch]:
        """Return all rows as record batches, in bounded memory, in the order in which they were written.

        >>> [batch.num_rows for batch in documents.scan_arrow()]
        [2]
        """
        with self._reading.moment(self._partitions) as moment:
            for partition in self._partitions:
                yield from moment.scan_arrow(partition, b"", None)

    def to_arrow(self) -> pa.Table:
        """Return all rows as an Arrow table: id, vector, attributes (as JSON text).

        >>> documents.to_arrow().column("id").to_pylist()
        ['a', 'b']
        """
        return pa.Table.from_batches(list(self.scan_arrow()), self.schema)

    # -- searching

    def search(
        self,
        vector: npt.ArrayLike,
        k: int = 10,
        *,
        where: Mapping[str, object] | pa.compute.Expression | None = None,
        probes: int | None = None,
        exact: bool = False,
        timeout_s: float = QUERY_S,
    ) -> list[Hit] | pa.Table:
        """Return the `k` nearest vectors, the nearest first: a list of `Hit`.

        For a matrix of queries, an Arrow table (query, rank, id, distance, attributes). `where` is a condition on
        attributes: a dict such as `{"lang": "en", "year": {">=": 1990}, "kind": ["a", "b"]}`, or a pyarrow expression.
        `probes` is how many lists of the index to look at (more: slower, better recall), `exact` compares with all.

        >>> [hit.id for hit in documents.search([1.0, 0.1], k=1, where={"lang": "en"})]
        ['a']
        """
        return self._search(plain_queries(vector, self._options), k, where, probes, exact, timeout_s)

    def _search(  # noqa: PLR0917
        self, queries: F32, k: int, where: Any, probes: int | None, exact: bool, timeout_s: float
    ) -> list[Hit] | pa.Table:
        """Search as `search` does, for an array of one vector or several."""
        k, number, exact = check_k(k), check_probes(probes), flag(exact, "exact")
        timeout_s = seconds(timeout_s, "timeout_s", QUERY_S_MAX, above_zero=True)
        if queries.ndim == 1:
            batches = self._searched(queries.reshape(1, -1), k, where, number, exact, timeout_s)
            return [
                Hit(row["id"], row["distance"], decode_attributes((row["attributes"] or "").encode()))
                for batch in batches
                for row in batch.to_pylist()
            ]
        if not len(queries):
            return HITS.empty_table()
        return pa.Table.from_batches(list(self._searched(queries, k, where, number, exact, timeout_s)), HITS)

    def _searched(  # noqa: PLR0917
        self, queries: F32, k: int, where: Any, probes: int, exact: bool, timeout_s: float
    ) -> Iterator[Any]:
        condition, expression = self._condition(where)

        def argument(vectors: F32) -> bytes:
            return encode_search(
                SearchQuery(
                    vectors=np.ascontiguousarray(vectors, "<f4").tobytes(),
                    k=k,
                    probes=probes,
                    exact=exact,
                    where=condition,
                    expression=expression,
                )
            )

        room = QUERY_BYTES_MAX - len(argument(queries[:0])) - SEARCH_BYTES
        step = max(1, room // self._options.vector_bytes)
        if len(queries) <= step:
            yield from self._reading.query(self._info, "search", argument(queries), timeout_s=timeout_s)
            return
        with self._reading.moment(self._partitions) as moment:
            for start in range(0, len(queries), step):
                batches = moment.query(
                    self._info, "search", argument(queries[start : start + step]), timeout_s=timeout_s
                )
                for batch in batches:
                    numbers = pc.add(batch.column(0), start)
                    yield batch.set_column(0, HITS.field(0), numbers)

    def _condition(self, where: Any) -> tuple[Any, bytes]:
        """Return a condition as plain values, or as the bytes of an expression."""
        if where is None:
            return None, b""
        if isinstance(where, pc.Expression):
            return None, encode_expression(where, self._attributes_schema())
        return self._plain_condition(where), b""

    @staticmethod
    def _plain_condition(where: Any) -> Any:
        """Return a condition that is a dict with plain values."""
        if not isinstance(where, Mapping):
            raise Invalid(f"where is a dict such as {{'lang': 'en'}}, or a pyarrow expression, not {in_short(where)}")
        try:
            return _plain(where)
        except RecursionError:
            raise Invalid(
                "where is nested too deeply: give a value, a list or a dict of operators by attribute"
            ) from None

    def _attributes_schema(self) -> pa.Schema:
        batches = list(self._reading.query(self._info, "attributes", b""))
        rows = [row for batch in batches for row in batch.to_pylist()]
        types = {"int64": pa.int64(), "double": pa.float64(), "bool": pa.bool_(), "null": pa.null()}
        return pa.schema([pa.field(row["name"], types.get(row["type"], pa.string())) for row in rows])

    def statistics(self) -> VectorStatistics:
        """Return counts, memory, and the recall of searches, measured on a sample of the queries so far.

        >>> documents.statistics().count
        2
        """
        rows = [row for batch in self._reading.query(self._info, "statistics", b"") for row in batch.to_pylist()]
        count, memory = sum(row["count"] for row in rows), sum(row["memory_bytes"] for row in rows)
        measured = [row for row in rows if row["recall"] is not None]
        weight = sum(row["recall_queries"] for row in measured)
        return VectorStatistics(
            count=count,
            deleted=sum(row["deleted"] for row in rows),
            trained=any(row["generation"] for row in rows),
            lists=sum(row["lists"] for row in rows),
            probes=max(row["probes"] for row in rows),
            recall=sum(row["recall"] * row["recall_queries"] for row in measured) / weight if weight else None,
            recall_queries=weight,
            memory_bytes=memory,
            memory_bytes_per_vector=memory / count if count else 0.0,
            files=sum(row["files"] for row in rows),
            file_bytes=sum(row["file_bytes"] for row in rows),
        )


def _plain(where: Any) -> Any:
    """Return a condition with plain containers and values, for other processes."""
    kind = type(where)
    if kind is str or kind is float or kind is bool or (kind is int and -(1 << 63) <= where < 1 << 63):
        return where
    if isinstance(where, Mapping):
        return {_plain(name): _plain(value) for name, value in where.items()}
    if isinstance(where, (list, tuple, set, frozenset)):
        return [_plain(value) for value in where]
    if isinstance(where, str):
        return str.__str__(where)
    if isinstance(where, float):
        return float.__float__(where)
    if isinstance(where, np.generic):
        return where.item()
    if where is None or isinstance(where, bool):
        return where
    number = plain_int(where)
    if number is None or not -(1 << 63) <= number < 1 << 64:
        raise Invalid(f"where compares an attribute with {in_short(where)}: use a str, int, float, bool or None")
    return number
