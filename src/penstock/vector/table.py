"""The API of a vector table, over a port.

Thread: any number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.arguments import ArrowSource, flag, seconds, whole
from penstock.arrow_input import is_arrow
from penstock.coordinator import Epoch
from penstock.errors import Invalid
from penstock.journal.partitions import shards_of
from penstock.kinds import QUERY_S, QUERY_S_MAX, Port, WritableTable
from penstock.lsm.rows import binary_column
from penstock.partition.ledger_records import TableInfo
from penstock.partition.pending import PendingGroup
from penstock.vector.reader import VectorReader
from penstock.vector.rows import arrow_rows, plain_id, plain_ids, plain_queries, plain_vector, rows_of
from penstock.vector.searching import K_MAX, Hit, check_k, check_probes
from penstock.vector.section import Deletes, Upserts, VectorSection, append_part
from penstock.vector.service import SEARCH

EPOCH_MAX = (1 << 72) - 1
ROW_BYTES = 400  # memory of a pending record besides its vector and attributes
_HITS = list[Hit]
_FLOAT32 = np.dtype(np.float32)


class VectorTable(VectorReader, WritableTable):
    """A vector table of an open store.

    >>> docs = store.vector("docs", dimensions=2, metric="cosine")
    >>> epoch = docs.upsert(["a", "b"], [[1.0, 0.0], [0.0, 1.0]], [{"lang": "en"}, {"lang": "de"}])
    >>> [hit.id for hit in docs.search([1.0, 0.2], k=2, after=epoch)]
    ['a', 'b']
    >>> docs.search([1.0, 0.2], where={"lang": "de"})[0].attributes
    {'lang': 'de'}
    """

    def __init__(self, port: Port, info: TableInfo, *, durable: bool = False) -> None:
        super().__init__(port, info)
        self._port = port
        self._durable = durable
        self._single = self.shards == 1
        self._shape = (self._options.dimensions,)

    # -- writing

    def upsert(
        self,
        ids: str | Iterable[str] | ArrowSource,
        vectors: npt.ArrayLike | None = None,
        attributes: Mapping[str, object] | Sequence[Mapping[str, object] | None] | None = None,
        *,
        durable: bool | None = None,
    ) -> Epoch:
        """Write records, all or none of them: a record replaces the whole of an earlier one with its id.

        `ids` and a matrix `vectors`, with a list of dicts `attributes` (texts, numbers, bools) if there are some; or
        one id, one vector and one dict; or an Arrow table with the columns `id`, `vector` and attributes.

        >>> epoch = documents.upsert(["a", "b"], [[1.0, 0.0], [0.0, 1.0]], [{"lang": "en"}, None])
        """
        if durable is not None:
            flag(durable, "durable")
        if isinstance(ids, str):
            single = plain_vector(vectors, self._options).reshape(1, -1)
            if attributes is not None and not isinstance(attributes, Mapping):
                raise Invalid("the attributes of one vector are a dict: give a list of ids for several")
            rows = rows_of([ids], single, None if attributes is None else [attributes], self._options)
        elif vectors is None:
            if not is_arrow(ids) or isinstance(ids, (pa.Array, pa.ChunkedArray)):
                raise Invalid("upsert takes ids and a matrix of vectors, or an Arrow table with the columns id, vector")
            if attributes is not None:
                raise Invalid("attributes are columns of an Arrow table: leave attributes= out")
            rows = arrow_rows(ids, self._options)
        else:
            rows = rows_of(ids, vectors, attributes, self._options)
        return Epoch(0) if rows is None else self._end(self._write(rows), durable)

    def delete(self, ids: str | Iterable[str], *, durable: bool | None = None) -> Epoch:
        """Delete records, all or none; ids that do not exist are ignored.

        >>> epoch = documents.delete(["b"], durable=True)
        """
        if durable is not None:
            flag(durable, "durable")
        plain = [plain_id(ids)] if isinstance(ids, str) else plain_ids(ids)
        return self._end(self._write(Deletes(plain)), durable) if plain else Epoch(0)

    def _write(self, rows: Upserts | Deletes) -> Epoch:
        size = _size(rows)
        if self._single:
            return self._port.write(self._partitions[0], append_part, size, rows, None)
        group = PendingGroup()
        for shard, part in split_rows(rows, self.shards):
            group.sections[self._partitions[shard]] = VectorSection(part)
        return self._port.submit(group, size)

    # -- searching

    def search(
        self,
        vector: npt.ArrayLike,
        k: int = 10,
        *,
        where: Mapping[str, object] | pa.compute.Expression | None = None,
        probes: int | None = None,
        exact: bool = False,
        after: int | None = None,
        timeout_s: float = QUERY_S,
    ) -> list[Hit] | pa.Table:
        """Return the `k` nearest vectors, as `VectorReader.search` does, of what is applied.

        `after` is the epoch of a write, which the search waits for.

        >>> epoch = documents.upsert("c", [0.5, 0.5])
        >>> documents.search([0.5, 0.5], k=1, after=epoch)[0].id
        'c'
        """
        if timeout_s is not QUERY_S:
            timeout_s = seconds(timeout_s, "timeout_s", QUERY_S_MAX, above_zero=True)
        if after is not None:
            number = whole(after, "after", 0, EPOCH_MAX)
            if number:
                self._port.flush(number, timeout_s, table=self._info.table_id)
        if type(vector) is np.ndarray and vector.dtype is _FLOAT32 and vector.shape == self._shape:
            query = vector  # the hot path: the owner looks for NaN in it
        else:
            query = plain_queries(vector, self._options)
        if query.ndim == 1 and exact is False and self._single and (where is None or isinstance(where, Mapping)):
            if type(k) is not int or not 0 < k <= K_MAX:
                k = check_k(k)
            request = (
                query,  # a client sends its bytes
                k,
                0 if probes is None else check_probes(probes),
                None if where is None else self._plain_condition(where),
            )
            return self._port.ask(self._info, SEARCH, request, _HITS, wait_s=timeout_s)
        return self._search(query, k, where, probes, exact, timeout_s)


def _size(rows: Upserts | Deletes) -> int:
    size = ROW_BYTES * len(rows) + sum(map(len, rows.ids))
    return size if isinstance(rows, Deletes) else size + rows.vectors.nbytes + sum(map(len, rows.attributes))


def split_rows(rows: Upserts | Deletes, shards: int) -> Iterator[tuple[int, Upserts | Deletes]]:
    """Yield, for each shard with rows, its number and its part."""
    if shards == 1:
        yield 0, rows
        return
    numbers = shards_of(binary_column(list(rows.ids)), shards)
    for shard in np.unique(numbers).tolist():
        positions = np.flatnonzero(numbers == shard)
        ids = [rows.ids[position] for position in positions.tolist()]
        if isinstance(rows, Deletes):
            yield shard, Deletes(ids)
        else:
            attributes = [rows.attributes[position] for position in positions.tolist()] if rows.attributes else []
            yield shard, Upserts(ids, rows.vectors[positions], attributes)
