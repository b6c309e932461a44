"""Messages in a file that another process built: an Arrow IPC file with the columns payload, key, time, maybe headers.

Thread: pure functions over a file; a `MessageLoader` belongs to its caller.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.errors import Invalid
from penstock.host.files import FileSystem
from penstock.journal.partitions import PartitionId, shards_of
from penstock.kinds import BuildContext, PreparedRows, partitions_of, staged_content
from penstock.log.record import KIND_DATA, Index, Record
from penstock.lsm.rows import KEY_BYTES_MAX, VALUE_BYTES_MAX, is_binary
from penstock.partition.ledger_records import TableInfo
from penstock.partition.reference import StagedFile, sealed
from penstock.queue import section
from penstock.queue.arrow_files import validated_batches
from penstock.queue.headers import HEADERS, check_column, from_arrow
from penstock.queue.messages import COLUMNS, Messages, check_columns, decode_batch, time_name
from penstock.queue.options import has_headers

STAGED_SCHEMA = pa.schema(
    [
        pa.field("payload", pa.binary(), nullable=False),
        pa.field("key", pa.binary()),
        pa.field("time", pa.timestamp("us", tz="UTC"), nullable=False),
    ]
)
STAGED_WITH_HEADERS = STAGED_SCHEMA.append(pa.field("headers", HEADERS))  # of a queue that takes headers


def staged_batches(fs: FileSystem, path: str) -> Iterator[Any]:
    """Return the record batches of a staged file; `Invalid` if it is malformed."""
    yield from validated_batches(staged_content(fs, path), (STAGED_SCHEMA, STAGED_WITH_HEADERS), path)


INLINE_BYTES_MAX = 1 << 20  # of messages that are sent as sections
FILE_BYTES = 32 << 20  # of one staged file: it is read whole when it is applied


def load_schema(input_schema: Any, options: bytes) -> Any:
    """Return the schema that messages are cast to; `Invalid` if their columns do not fit a queue with these options."""
    names = check_columns(input_schema.names, COLUMNS if has_headers(options) else COLUMNS[:-1])
    time, fields = time_name(names), []
    for name in names:
        actual = input_schema.field(name).type
        if name == "headers":
            fields.append(pa.field(name, actual))  # checked by its content
            continue
        text = pa.types.is_string(actual) or pa.types.is_large_string(actual) or pa.types.is_string_view(actual)
        if name == time and not (pa.types.is_timestamp(actual) or pa.types.is_int64(actual)):
            raise Invalid(f"column {name} is {actual}: give a timestamp, or int64 microseconds since 1970")
        if name != time and not (text or is_binary(actual) or pa.types.is_null(actual)):
            raise Invalid(f"column {name} is {actual}, but messages hold binary: cast or encode it first")
        kind = STAGED_SCHEMA.field("time").type if name == time else pa.binary()
        fields.append(pa.field(name, kind, nullable=name != "payload"))
    return pa.schema(fields)


class MessageLoader:
    """Prepares messages outside the owner: few as sections, many as files, in the order of the input."""

    def __init__(self, info: TableInfo, context: BuildContext) -> None:
        self._context = context
        self._now_us = context.time_us  # for messages without a time
        self._fs = context.fs
        self._partitions = partitions_of(info)
        self._schema = STAGED_WITH_HEADERS if has_headers(info.options) else STAGED_SCHEMA
        self._parts: dict[PartitionId, list[Any]] = {}
        self._bytes: dict[PartitionId, int] = {}
        self._done: list[PreparedRows] = []

    def run(self, batches: Iterator[Any]) -> list[PreparedRows]:
        """Read all batches and return what is to be committed."""
        for number, batch in enumerate(batches):
            messages = self._staged(batch)
            for shard, part in self._by_shard(messages, number):
                partition = self._partitions[shard]
                self._parts.setdefault(partition, []).append(part)
                self._bytes[partition] = self._bytes.get(partition, 0) + part.nbytes
                if self._bytes[partition] >= FILE_BYTES:
                    self._write(partition)
        for partition, parts in list(self._parts.items()):
            if parts and self._bytes[partition] <= INLINE_BYTES_MAX:
                puts = section.Puts()
                for part in parts:
                    puts.add_many(Messages.from_arrow(part))
                self._done.append(PreparedRows(partition, section.encode(puts), rows=len(puts)))
            elif parts:
                self._write(partition)
        return self._done

    def as_files(self, loads: Sequence[PreparedRows]) -> list[PreparedRows]:
        """Write loads that came as sections to files."""
        for load in loads:
            self._parts.setdefault(load.partition, []).extend(self._messages(load.payload))
        for partition in list(self._parts):
            self._write(partition)
        return self._done

    def _messages(self, payload: bytes) -> Iterator[Any]:
        """Yield the messages of a section in the schema of staged files."""
        part = section.decode(payload)
        assert isinstance(part, section.Encoded)  # a load does not trim
        for body in part.encoded:
            record = Record(Index(1), 1, Index(0), KIND_DATA, 0, bytes(body))
            messages = decode_batch(record, path="a load", offset=0).messages
            times = np.full(len(messages), self._now_us) if messages.times is None else messages.times
            keys = pa.nulls(len(messages), pa.binary()) if messages.keys is None else messages.keys
            time = pa.array(times, pa.int64()).cast(STAGED_SCHEMA.field("time").type)
            yield self._batch([messages.payloads, keys, time], messages.headers)

    def _staged(self, batch: Any) -> Any:
        """Check a batch and convert it to the schema of staged files."""
        import pyarrow.compute as pc

        names, count = batch.schema.names, batch.num_rows
        payload = batch.column("payload")
        if payload.null_count:
            raise Invalid("a payload is null: leave such rows out, or write an empty payload")
        key = batch.column("key") if "key" in names else pa.nulls(count, pa.binary())
        for column, bytes_max, name in ((payload, VALUE_BYTES_MAX, "payload"), (key, KEY_BYTES_MAX, "key")):
            longest = pc.max(pc.binary_length(column)).as_py() or 0
            if longest > bytes_max:
                raise Invalid(f"a {name} has {longest} bytes: at most {bytes_max} are allowed")
        now = pa.scalar(self._now_us, STAGED_SCHEMA.field("time").type)
        times = time_name(names)
        time = pa.repeat(now, count) if times is None else pc.fill_null(batch.column(times), now)
        headers = from_arrow(batch.column("headers")) if "headers" in names else None
        if headers is not None:
            check_column(headers)
        return self._batch([payload, key, time], headers)

    def _batch(self, columns: list[Any], headers: Any) -> Any:
        if self._schema is STAGED_WITH_HEADERS:
            columns = [*columns, pa.nulls(len(columns[0]), HEADERS) if headers is None else headers]
        return pa.record_batch(columns, schema=self._schema)

    def _by_shard(self, batch: Any, number: int) -> Iterator[tuple[int, Any]]:
        """Divide messages by the shards of their keys; all without a key in a batch go to one shard."""
        count = len(self._partitions)
        if count == 1:
            yield 0, batch
            return
        shards = shards_of(batch.column("key"), count, keyless=number % count)
        for shard in np.unique(shards).tolist():
            yield shard, batch.take(pa.array(np.flatnonzero(shards == shard)))

    def _write(self, partition: PartitionId) -> None:
        parts = self._parts.pop(partition)
        self._bytes[partition] = 0
        staged = self._context.reserve(partition, 1)[0]
        self._context.write_file(partition, staged, self._arrow_file(parts))
        self._done.append(self._load(partition, staged, sum(part.num_rows for part in parts)))

    def _arrow_file(self, parts: list[Any]) -> memoryview:
        out = pa.BufferOutputStream()
        with pa.ipc.new_file(out, self._schema) as writer:
            for part in parts:
                writer.write_batch(part)
        return memoryview(out.getvalue())

    def _load(self, partition: PartitionId, staged: StagedFile, rows: int) -> PreparedRows:
        return PreparedRows(partition, file=sealed(self._fs, self._context.root, staged), rows=rows)


def bundle(loads: Sequence[PreparedRows], info: TableInfo, context: BuildContext) -> list[PreparedRows]:
    """Arrange loads for one group: each shard has either sections or files, because files are applied alone."""
    shards = {load.partition for load in loads if load.file is not None}
    beside = [load for load in loads if load.file is None and load.partition in shards]
    others = [load for load in loads if load.file is not None or load.partition not in shards]
    return others + MessageLoader(info, context).as_files(beside)
