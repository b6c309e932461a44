"""Kv tables whose keys are text (`key="utf8"`): the tables of bytes, with every key encoded and decoded.

Keys are stored as UTF-8, whose order of bytes is that of the code points.

Thread: any.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar, overload

import pyarrow as pa

from penstock.arguments import ArrowSource
from penstock.arrow_input import is_arrow
from penstock.coordinator import Epoch
from penstock.errors import Invalid
from penstock.kinds import Port, Reading
from penstock.kinds.change_reading import ChangeFeed
from penstock.kv.mapping import ReadableMapping, WritableMapping
from penstock.kv.queries import KvStatistics
from penstock.kv.table import KvReader, KvRow, KvTable
from penstock.kv.values import DecimalType, StructType, ValueType
from penstock.partition.ledger_records import TableInfo

V = TypeVar("V")  # the Python type of the table's values
Default = TypeVar("Default")


def encode_key(key: Any) -> bytes:
    """Return the stored form of a key; `Invalid` if it is not text."""
    if not isinstance(key, str):
        raise Invalid(f"a key of this table is text (key='utf8'), not {type(key).__name__}: decode it")
    try:
        return str.encode(key)
    except UnicodeEncodeError as error:
        raise Invalid(f"a key of this table is text, and this is not ({error})") from None


def _encode_border(key: Any) -> bytes | None:
    return None if key is None else encode_key(key)


class TextKvReader(ReadableMapping[str, V]):
    """A read-only kv table, live or in a snapshot: a mapping of text to values. Methods are those of `KvReader`.

    >>> epoch = store.kv("cities", key="utf8", value="int64").put("Zürich", 443_000, durable=True)
    >>> with store.snapshot() as snapshot:
    ...     snapshot.kv("cities", key="utf8", value="int64")["Zürich"]
    443000
    """

    _table: KvReader[V]

    def __init__(self, port: Reading, info: TableInfo) -> None:
        self._table = KvReader(port, info)
        self._options = self._table._options

    def changes(self, *, after: int | None = None, until: int | None = None) -> ChangeFeed:
        """Return the changes of the table after an LSN: see `KvReader.changes`."""
        return self._table.changes(after=after, until=until)

    @property
    def name(self) -> str:
        """Its name."""
        return self._table.name

    @property
    def shards(self) -> int:
        """Into how many shards it is split."""
        return self._table.shards

    @property
    def value_type(self) -> ValueType | DecimalType | StructType:
        """The declared type of the values, as `value=` took it."""
        return self._table.value_type

    def __repr__(self) -> str:
        return repr(self._table).replace(type(self._table).__name__, type(self).__name__, 1)

    @overload
    def get(self, key: str) -> V | None: ...

    @overload
    def get(self, key: str, default: Default) -> V | Default: ...

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, or `default` if it is absent."""
        return self._table.get(encode_key(key), default)

    def get_row(self, key: str) -> KvRow[V] | None:
        """Return the value of a key and the LSN of its row, for `if_lsn`; None if it is absent."""
        return self._table.get_row(encode_key(key))

    def multi_get(self, keys: Iterable[str]) -> list[V | None]:
        """Return the value of each key, None where absent, all at one LSN."""
        if isinstance(keys, (str, bytes)) or not isinstance(keys, Iterable):
            raise Invalid(f"multi_get takes a list of keys, not {type(keys).__name__}")
        return self._table.multi_get(map(encode_key, keys))

    def __getitem__(self, key: str) -> V:
        try:
            return self._table[encode_key(key)]
        except KeyError:
            raise KeyError(key) from None

    def __contains__(self, key: object) -> bool:
        return encode_key(key) in self._table

    def scan(
        self,
        start: str = "",
        end: str | None = None,
        *,
        prefix: str = "",
        reverse: bool = False,
        limit: int | None = None,
    ) -> Iterator[tuple[str, V]]:
        """Return (key, value) pairs of [start, end) within `prefix` in the order of code points, as of this call."""
        pairs = self._table.scan(
            encode_key(start), _encode_border(end), prefix=encode_key(prefix), reverse=reverse, limit=limit
        )
        return ((key.decode(), value) for key, value in pairs)

    def count(self, start: str = "", end: str | None = None, *, prefix: str = "") -> int:
        """Count the keys in [start, end) within `prefix`."""
        return self._table.count(encode_key(start), _encode_border(end), prefix=encode_key(prefix))

    def statistics(self) -> KvStatistics:
        """Return the number of rows, files and bytes, without reading the rows."""
        return self._table.statistics()

    @property
    def schema(self) -> pa.Schema:
        """The Arrow schema: key (text), value (of the declared type), LSN."""
        return self._table.schema

    def scan_arrow(self, start: str = "", end: str | None = None, *, prefix: str = "") -> Iterator[pa.RecordBatch]:
        """Return record batches of (key, value, lsn), in key order within each shard."""
        return self._table.scan_arrow(encode_key(start), _encode_border(end), prefix=encode_key(prefix))

    def to_arrow(self, start: str = "", end: str | None = None, *, prefix: str = "") -> pa.Table:
        """Return an Arrow table of (key, value, lsn)."""
        return self._table.to_arrow(encode_key(start), _encode_border(end), prefix=encode_key(prefix))

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self._table.__arrow_c_stream__(requested_schema)


class TextKvTable(TextKvReader[V], WritableMapping[str, V]):
    """A kv table of an open store: a mutable mapping of text to values. Methods are those of `KvTable`.

    >>> cities = store.kv("cities", key="utf8", value="int64")
    >>> epoch = cities.put("Zürich", 443_000)
    >>> dict(cities)
    {'Zürich': 443000}
    """

    _table: KvTable[V]

    def __init__(self, port: Port, info: TableInfo, *, durable: bool = False) -> None:
        self._table = KvTable(port, info, durable=durable)
        self._options = self._table._options

    def put(
        self,
        key: str,
        value: V,
        *,
        ttl_s: float | None = None,
        durable: bool | None = None,
        if_lsn: int | None = None,
        if_absent: bool = False,
    ) -> Epoch:
        """Set a key: see `KvTable.put`."""
        return self._table.put(encode_key(key), value, ttl_s=ttl_s, durable=durable, if_lsn=if_lsn, if_absent=if_absent)

    def put_many(
        self, pairs: Mapping[str, V] | Iterable[tuple[str, V]] | ArrowSource, *, durable: bool | None = None
    ) -> Epoch:
        """Set many keys: see `KvTable.put_many`."""
        if is_arrow(pairs):
            return self._table.put_many(pairs, durable=durable)  # type: ignore[arg-type]
        try:
            rows: dict[Any, V] = dict(pairs)  # type: ignore[arg-type]
        except (TypeError, ValueError) as error:
            raise Invalid(f"put_many takes a mapping or (key, value) pairs with keys of text ({error})") from error
        return self._table.put_many({encode_key(key): value for key, value in rows.items()}, durable=durable)

    def delete(self, key: str, *, durable: bool | None = None, if_lsn: int | None = None) -> Epoch:
        """Delete a key; an absent key is not an error."""
        return self._table.delete(encode_key(key), durable=durable, if_lsn=if_lsn)

    def delete_range(self, start: str, end: str, *, durable: bool | None = None) -> Epoch:
        """Delete all keys in [start, end), in every shard at once."""
        return self._table.delete_range(encode_key(start), encode_key(end), durable=durable)

    def merge(
        self, key: str, operand: V | bytes, *, operator: str, ttl_s: float | None = None, durable: bool | None = None
    ) -> Epoch:
        """Merge an operand into a key's value: see `KvTable.merge`."""
        return self._table.merge(encode_key(key), operand, operator=operator, ttl_s=ttl_s, durable=durable)

    def __setitem__(self, key: str, value: V) -> None:
        self.put(key, value)

    def clear(self) -> None:
        """Delete all keys, in every shard at once."""
        self._table.clear()
