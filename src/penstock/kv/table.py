"""The API of a kv table, over a port.

Thread: any number; a table has no state of its own.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar, cast, overload

import pyarrow as pa

from penstock.arguments import ArrowSource, bytes_remedy, flag, in_short, seconds, whole
from penstock.arrow_input import is_arrow
from penstock.coordinator import Epoch
from penstock.errors import Invalid, OutcomeUnknown, PenstockError
from penstock.journal.partitions import PartitionId, shard_of
from penstock.kinds import DURABLE_S, Conditional, Port, ReadableTable, Reading, WritableTable
from penstock.kv import queries, section
from penstock.kv.changes import change_schema
from penstock.kv.conditions import ROW, encode_argument, expected_lsn
from penstock.kv.frames import frame_rows, parts_of
from penstock.kv.mapping import ReadableMapping, WritableMapping
from penstock.kv.queries import KvStatistics
from penstock.kv.ranges import PAST_ALL_KEYS
from penstock.kv.values import (
    MERGES,
    DecimalType,
    Options,
    StructType,
    ValueType,
    arrow_type,
    arrow_values,
    decode_options,
    decoder,
    encode_operand,
    encoder,
    key_type,
)
from penstock.lsm.operators import check_operand
from penstock.lsm.rows import DELETE, KEY_BYTES_MAX, NEVER, PUT, VALUE_BYTES_MAX
from penstock.lsm.view import narrowed
from penstock.partition.ledger_records import Condition, TableInfo, encode_condition
from penstock.partition.pending import PendingGroup

ROW_BYTES = 160  # memory of a pending row besides its key and value: two objects and a dict entry
GROUP_ROOM = 16 << 10  # of a write, for what it takes besides its rows
TTL_S_MAX = 1e11
_ABSENT = object()
T = TypeVar("T")
V = TypeVar("V")  # the Python type of the table's values
Default = TypeVar("Default")


def kv_schema(options: Options) -> pa.Schema:
    """Return the Arrow schema (key, value, lsn), with the declared type of the values."""
    return pa.schema(
        [
            pa.field("key", key_type(options), nullable=False),
            pa.field("value", arrow_type(options), nullable=False),
            pa.field("lsn", pa.uint64(), nullable=False),
        ]
    )


def with_types(batch: Any, options: Options) -> Any:
    """Convert a record batch of a shard's scan to the table's schema."""
    keys = batch.column("key").cast(key_type(options))
    columns = [keys, arrow_values(batch.column("value"), options), batch.column("lsn")]
    return pa.record_batch(columns, schema=kv_schema(options))


class KvRow(NamedTuple, Generic[V]):
    """A value and the LSN of its row, which changes with every write to the key.

    >>> users = store.kv("users")
    >>> row = users.get_row(b"ada")
    >>> epoch = users.put(b"ada", b"1852", if_lsn=row.lsn)  # only if nobody wrote it since
    """

    value: V
    lsn: int


class KvReader(ReadableTable, ReadableMapping[bytes, V]):
    """A read-only kv table, live or in a snapshot: a mapping of bytes to values.

    >>> with store.snapshot() as snapshot:
    ...     snapshot.kv("users")[b"ada"]
    b'1815'
    """

    def __init__(self, port: Reading, info: TableInfo) -> None:
        super().__init__(port, info)
        self._lookup = port.lookup
        self._options = decode_options(info.options)
        self._decode: Callable[[bytes], V] = decoder(self._options)
        self._raw = self._options.value == "bytes"
        self._one = self._partitions[0] if info.shards == 1 else None

    @property
    def value_type(self) -> ValueType | DecimalType | StructType:
        """The declared type of the values, as `value=` took it."""
        if self._options.value in ("decimal", "struct"):
            return cast("DecimalType | StructType", arrow_type(self._options))
        return cast(ValueType, self._options.value)

    def _change_schema(self) -> pa.Schema | None:
        return None if self._options.changes is None else change_schema(self._options)

    def _partition(self, key: bytes) -> PartitionId:
        if self._one is not None:
            return self._one
        return self._partitions[shard_of(key, len(self._partitions))]

    @overload
    def get(self, key: bytes) -> V | None: ...

    @overload
    def get(self, key: bytes, default: Default) -> V | Default: ...

    def get(self, key: bytes, default: Any = None) -> Any:
        """Return the value of a key, or `default` if it is absent.

        >>> users.get(b"ada"), users.get(b"bob", b"unknown")
        (b'1815', b'unknown')
        """
        if type(key) is not bytes:
            raise not_a_key(key)
        value = self._lookup(self._one or self._partition(key), key)
        if value is None:
            return default
        return value if self._raw else self._decode(value)

    def get_row(self, key: bytes) -> KvRow[V] | None:
        """Return the value of a key and the LSN of its row, for `if_lsn`; None if it is absent.

        Both are durable: the call first waits for this process's own writes to the key.

        >>> row = users.get_row(b"ada")
        >>> epoch = users.put(b"ada", row.value + b"!", if_lsn=row.lsn)
        """
        if type(key) is not bytes:
            raise not_a_key(key)
        row = self._reading.lookup_row(self._one or self._partition(key), key)
        return None if row is None else KvRow(self._decode(row[0]), row[1])

    def multi_get(self, keys: Iterable[bytes]) -> list[V | None]:
        """Return the value of each key, None where absent, all at one LSN.

        >>> users.multi_get([b"ada", b"bob"])
        [b'1815', None]
        """
        if isinstance(keys, bytes) or not isinstance(keys, Iterable):  # type: ignore[redundant-expr]
            raise Invalid(f"multi_get takes a list of keys, not {type(keys).__name__}")
        keys, by_shard = list(keys), dict[PartitionId, list[int]]()
        for index, key in enumerate(keys):
            if type(key) is not bytes:
                raise not_a_key(key)
            by_shard.setdefault(self._partition(key), []).append(index)
        results: list[Any] = [None] * len(keys)
        with ExitStack() as stack:
            reading = self._at_one_moment(stack, list(by_shard))
            for partition, indexes in by_shard.items():
                values = reading.lookup_many(partition, [keys[index] for index in indexes])
                for index, value in zip(indexes, values, strict=True):
                    results[index] = value if value is None or self._raw else self._decode(value)
        return results

    def _at_one_moment(self, stack: ExitStack, partitions: Sequence[PartitionId]) -> Reading:
        """Return what to read several shards from, at one LSN; one shard needs no snapshot for a single read."""
        return self._reading if len(partitions) < 2 else stack.enter_context(self._reading.moment(partitions))

    def __getitem__(self, key: bytes) -> V:
        value: Any = self.get(key, _ABSENT)
        if value is _ABSENT:
            raise KeyError(key)
        return value  # type: ignore[no-any-return]

    def __contains__(self, key: object) -> bool:
        if type(key) is not bytes:  # False would be correct, but hide the mistake
            raise not_a_key(key)
        return self._lookup(self._partition(key), key) is not None

    def scan(
        self,
        start: bytes = b"",
        end: bytes | None = None,
        *,
        prefix: bytes = b"",
        reverse: bool = False,
        limit: int | None = None,
    ) -> Iterator[tuple[bytes, V]]:
        """Return (key, value) pairs of [start, end) within `prefix` in key order, as of this call.

        >>> list(users.scan(prefix=b"a", limit=10))
        [(b'ada', b'1815')]
        """
        start, end = narrowed(start, end, prefix)
        if limit is not None:
            limit = whole(limit, "limit")
        flag(reverse, "reverse")
        stack = ExitStack()
        reading = self._at_one_moment(stack, self._partitions)
        shards = [reading.scan(partition, start, end, reverse) for partition in self._partitions]
        pairs = shards[0] if len(shards) == 1 else _until_the_end(heapq.merge(*shards, reverse=reverse), stack)
        if limit is not None:
            pairs = (pair for pair, _ in zip(pairs, range(limit), strict=False))
        return pairs if self._raw else ((key, self._decode(value)) for key, value in pairs)

    def count(self, start: bytes = b"", end: bytes | None = None, *, prefix: bytes = b"") -> int:
        """Count the keys in [start, end) within `prefix`: the owner reads them, and sends only their number.

        >>> users.count(prefix=b"a")
        1
        """
        return queries.count(self._reading, self._info, *narrowed(start, end, prefix))

    def statistics(self) -> KvStatistics:
        """Return the number of rows, files and bytes, without reading the rows.

        >>> users.statistics().shards
        1
        """
        return queries.statistics(self._reading, self._info)

    def __repr__(self) -> str:
        shards = "" if self.shards == 1 else f", {self.shards} shards"
        return f"<{type(self).__name__} {self.name!r} of {self.value_type}{shards}>"

    @property
    def schema(self) -> pa.Schema:
        """The Arrow schema: key, value (of the declared type), LSN."""
        return kv_schema(self._options)

    def scan_arrow(
        self, start: bytes = b"", end: bytes | None = None, *, prefix: bytes = b""
    ) -> Iterator[pa.RecordBatch]:
        """Return record batches of (key, value, lsn), in key order within each shard.

        >>> [batch.num_rows for batch in users.scan_arrow()]
        [1]
        """
        start, end = narrowed(start, end, prefix)
        stack = ExitStack()
        reading = self._at_one_moment(stack, self._partitions)
        shards = [reading.scan_arrow(partition, start, end) for partition in self._partitions]
        batches = (with_types(batch, self._options) for batch in chain.from_iterable(shards))
        return _until_the_end(batches, stack)

    def to_arrow(self, start: bytes = b"", end: bytes | None = None, *, prefix: bytes = b"") -> pa.Table:
        """Return an Arrow table of (key, value, lsn).

        >>> users.to_arrow().column("value").to_pylist()
        [b'1815']
        """
        return pa.Table.from_batches(list(self.scan_arrow(start, end, prefix=prefix)), self.schema)


def not_a_key(key: object) -> Invalid:
    """Return the error for a key that is not bytes."""
    text = ", or make the table with key='utf8' for keys of text" if isinstance(key, str) else ""
    return Invalid(f"a key is bytes, not {type(key).__name__}: {bytes_remedy(key)}{text}")


def _until_the_end(items: Iterator[T], stack: ExitStack) -> Iterator[T]:
    """Yield all items, then close what they were read from."""
    with stack:
        yield from items


class KvTable(KvReader[V], WritableTable, WritableMapping[bytes, V]):
    """A kv table of an open store: a mutable mapping of bytes to values.

    >>> users = store.kv("users")
    >>> epoch = users.put(b"bob", b"1912", durable=True)
    >>> users[b"bob"], users.get(b"nobody")
    (b'1912', None)
    >>> list(users.scan(prefix=b"a"))
    [(b'ada', b'1815')]
    >>> users.to_arrow().column_names
    ['key', 'value', 'lsn']
    """

    def __init__(self, port: Port, info: TableInfo, *, durable: bool = False) -> None:
        super().__init__(port, info)
        self._port = port
        self._durable = durable
        self._encode: Callable[[V], bytes] = encoder(self._options)
        self._write = port.write  # bound once: a put is little more than this call

    # -- writing

    def put(
        self,
        key: bytes,
        value: V,
        *,
        ttl_s: float | None = None,
        durable: bool | None = None,
        if_lsn: int | None = None,
        if_absent: bool = False,
    ) -> Epoch:
        """Set a key; with `ttl_s` it expires after that many seconds.

        `if_lsn`: only if the row still has the LSN that `get_row` returned. `if_absent`: only if there is no row. If
        that does not hold, `ConditionFailed`, and nothing is written. Such a write waits until it is durable.

        >>> epoch = users.put(b"ada", b"1815", ttl_s=3600, durable=True)
        """
        data: Any = value if self._raw and type(value) is bytes else self._encode(value)
        if type(key) is not bytes:
            raise not_a_key(key)
        size = len(key) + len(data) + ROW_BYTES
        if size > KEY_BYTES_MAX:  # else neither is too long: most rows are spared two comparisons
            self._check(key, data)
        partition = self._one or self._partition(key)
        if durable is None:
            durable = self._durable
        elif durable is not True and durable is not False:
            flag(durable, "durable")
        if if_lsn is not None or if_absent is not False:
            operation = data if ttl_s is None else (PUT, data, self._expiry(ttl_s))
            return self._write_if(partition, key, operation, size, expected_lsn(if_lsn, if_absent))
        if ttl_s is None:
            epoch = self._write(partition, section.put, size, key, data)
        else:
            epoch = self._write(partition, section.operate, size, key, (PUT, data, self._expiry(ttl_s)))
        if durable:
            self._port.flush(epoch, DURABLE_S, table=self._info.table_id)
        return epoch

    def put_many(
        self, pairs: Mapping[bytes, V] | Iterable[tuple[bytes, V]] | ArrowSource, *, durable: bool | None = None
    ) -> Epoch:
        """Set many keys, all or none. `pairs` may be Arrow data or a frame with the columns key and value.

        Rows that are larger than one write may be (see `memory_bytes_max`) are written in several, in their order; if
        one fails, `OutcomeUnknown` says how many rows are durable. In a batch they are refused: use `batch.load`.

        >>> epoch = users.put_many({b"ada": b"1815", b"grace": b"1906"})
        """
        if durable is not None:
            flag(durable, "durable")
        if is_arrow(pairs):
            rows: dict[bytes, bytes] = {}
            for part in frame_rows(pairs, self._options):
                rows.update(part)
            self._check_lengths(rows)
        else:
            try:
                values = dict(pairs)  # type: ignore[arg-type]
            except (TypeError, ValueError) as error:
                raise Invalid(f"put_many takes a mapping or (key, value) pairs with keys of bytes ({error})") from error
            rows = self._checked(values)
        if not rows:
            return Epoch(0)
        size = sum(map(len, rows)) + sum(map(len, rows.values())) + ROW_BYTES * len(rows)
        if size > self._port.write_bytes_max:
            return self._end(self._put_in_parts(rows), durable)
        return self._end(self._put_rows(rows, size), durable)

    def _put_rows(self, rows: dict[bytes, bytes], size: int) -> Epoch:
        if self._one is not None:
            return self._write(self._one, section.put_many, size, rows, None)
        group = PendingGroup()
        for partition, part in self._by_shard(rows).items():
            group.sections[partition] = section.Rows.of(part)
        return self._port.submit(group, size)

    def _put_in_parts(self, rows: dict[bytes, bytes]) -> Epoch:
        """Write rows one part after the other, each durable before the next."""
        epoch, written = Epoch(0), 0
        bytes_max = self._port.write_bytes_max
        parts = parts_of(rows, ROW_BYTES, bytes_max - min(bytes_max // 8, GROUP_ROOM))
        try:
            for part in parts:
                size = sum(map(len, part)) + sum(map(len, part.values())) + ROW_BYTES * len(part)
                epoch = self._put_rows(part, size)
                self._port.flush(epoch, DURABLE_S, table=self._info.table_id)
                written += len(part)
        except PenstockError as error:
            raise OutcomeUnknown(
                f"the first {written:,} of {len(rows):,} rows are durable, then writing failed ({error}): put all again"
            ) from error
        return epoch

    def _checked(self, rows: dict[bytes, Any]) -> dict[bytes, bytes]:
        """Check the rows and encode their values, with calls that process all rows at once; or `Invalid`."""
        if not self._raw or set(map(type, rows.values())) - {bytes}:
            rows = {key: self._encode(value) for key, value in rows.items()}
        if set(map(type, rows)) - {bytes}:
            self._refuse(next(key for key in rows if type(key) is not bytes), b"")
        self._check_lengths(rows)
        return rows

    def _check_lengths(self, rows: dict[bytes, bytes]) -> None:
        longest = max(map(len, rows), default=0), max(map(len, rows.values()), default=0)
        if longest[0] > KEY_BYTES_MAX or longest[1] > VALUE_BYTES_MAX:
            self._refuse(max(rows, key=len), max(rows.values(), key=len))

    def _by_shard(self, rows: dict[bytes, bytes]) -> dict[PartitionId, dict[bytes, bytes]]:
        by_shard: dict[PartitionId, dict[bytes, bytes]] = {}
        for key, data in rows.items():
            by_shard.setdefault(self._partition(key), {})[key] = data
        return by_shard

    def _write_if(
        self, partition: PartitionId, key: bytes, operation: bytes | section.Operation, size: int, lsn: int
    ) -> Epoch:
        """Write a row if its present LSN is `lsn`; in a batch, make the batch depend on that."""
        argument = encode_argument(partition, key, lsn)
        if isinstance(self._port, Conditional):
            self._port.require(ROW, argument)
            if isinstance(operation, bytes):
                return self._port.write(partition, section.put, size, key, operation)
            return self._port.write(partition, section.operate, size, key, operation)
        group = PendingGroup(encode_condition(Condition(None, ((ROW, argument),))))
        group.sections[partition] = section.Rows.of_one(key, operation)
        return self._port.commit_and_wait(group, size)

    def delete(self, key: bytes, *, durable: bool | None = None, if_lsn: int | None = None) -> Epoch:
        """Delete a key; an absent key is not an error. `if_lsn`: as for `put`.

        >>> epoch = users.delete(b"ada", durable=True)
        """
        if durable is not None:
            flag(durable, "durable")
        partition = self._check(key, b"")
        if if_lsn is not None:
            operation, size = (DELETE, b"", NEVER), len(key) + ROW_BYTES
            return self._write_if(partition, key, operation, size, expected_lsn(if_lsn, False))
        epoch = self._port.write(partition, section.operate, len(key) + ROW_BYTES, key, (DELETE, b"", NEVER))
        return self._end(epoch, durable)

    def delete_range(self, start: bytes, end: bytes, *, durable: bool | None = None) -> Epoch:
        """Delete all keys in [start, end), in every shard at once.

        >>> epoch = users.delete_range(b"a", b"b")  # every key that begins with a
        """
        if durable is not None:
            flag(durable, "durable")
        for border in (start, end):
            self._check(border, b"")
        if end <= start:
            raise Invalid(f"a range runs upwards: {in_short(end)} is not above {in_short(start)}")
        return self._delete_range(start, end, durable)

    def _delete_range(self, start: bytes, end: bytes, durable: bool | None) -> Epoch:
        group = PendingGroup()
        group.sections = {partition: section.Ranges([(start, end)]) for partition in self._partitions}
        size = (len(start) + len(end) + ROW_BYTES) * len(self._partitions)
        return self._end(self._port.submit(group, size), durable)

    def merge(
        self, key: bytes, operand: V | bytes, *, operator: str, ttl_s: float | None = None, durable: bool | None = None
    ) -> Epoch:
        """Merge an operand into a key's value, by an operator that fits the table's type.

        int64: add_i64, min_i64, max_i64. float64: add_f64, min_f64, max_f64. Decimals: add_decimal, min_decimal,
        max_decimal. utf8: append. bytes: append, union, and those of numbers on 8 bytes.

        >>> visits = store.kv("visits", value="int64")
        >>> epoch = visits.merge(b"ada", 1, operator="add_i64")
        """
        if not isinstance(operator, str) or operator not in MERGES[self._options.value]:  # type: ignore[redundant-expr]
            allowed = ", ".join(MERGES[self._options.value])
            remedy = f"use one of: {allowed}" if allowed else "no operator does, so put the whole value"
            raise Invalid(f"{in_short(operator)} does not fit a table of {self._options.value_name}: {remedy}")
        if durable is not None:
            flag(durable, "durable")
        data = encode_operand(operand, self._options)
        kind = check_operand(operator, data)
        partition = self._check(key, data)
        expires = NEVER if ttl_s is None else self._expiry(ttl_s)
        size = len(key) + len(data) + ROW_BYTES
        return self._end(self._port.write(partition, section.operate, size, key, (kind, data, expires)), durable)

    def __setitem__(self, key: bytes, value: V) -> None:
        self.put(key, value)

    def clear(self) -> None:
        """Delete all keys, in every shard at once.

        >>> users.clear()
        """
        self._delete_range(b"", PAST_ALL_KEYS, None)

    def _check(self, key: bytes, value: bytes) -> PartitionId:
        if type(key) is not bytes or len(key) > KEY_BYTES_MAX or len(value) > VALUE_BYTES_MAX:
            self._refuse(key, value)
        return self._partition(key)

    def _refuse(self, key: Any, value: bytes) -> NoReturn:
        if type(key) is not bytes:
            raise not_a_key(key)
        if len(key) > KEY_BYTES_MAX:
            raise Invalid(f"a key has at most {KEY_BYTES_MAX:,} bytes, this one has {len(key):,}")
        raise Invalid(f"a value has at most {VALUE_BYTES_MAX:,} bytes, this one has {len(value):,}: split it")

    def _expiry(self, ttl_s: float) -> int:
        ttl_s = seconds(ttl_s, "ttl_s", TTL_S_MAX, above_zero=True)
        return self._port.time_us() + int(ttl_s * 1_000_000)
