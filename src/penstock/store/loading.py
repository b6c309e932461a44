"""Bulk loads: Arrow rows become sections or sorted files in the caller's process, and one batch commits them.

A load has two halves. `prepare` turns rows into what their kind writes: few rows into a section, many into files that
are staged in the store. They are not visible yet, and any number of processes may prepare at once. `bundle` combines
what they prepared for a table into one group, which a batch commits: all rows become visible together, or none. Files
that are not committed are removed when their lease ends.

Thread: the caller's.
Invariant: rows are checked and cast before a file is staged for them; a bad schema leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import pyarrow as pa

from penstock.arguments import in_short, seconds
from penstock.arrow_input import SourceError, cast_batches, open_batches
from penstock.errors import Invalid
from penstock.host.file_errors import translate_os_errors
from penstock.journal.partitions import table_of
from penstock.kinds import BuildContext, Port, PreparedRows, as_loadable, as_replaceable
from penstock.partition.ledger_records import TableInfo
from penstock.partition.reference import LEASE_S_MAX
from penstock.registry import kind_named

LEASE_S = 3_600.0  # of staged files: how long they wait for their commit


class PreparedLoad(msgspec.Struct, frozen=True, array_like=True):
    """Rows for one table, ready to be committed by `StoreBatch.load`, in this process or another one.

    >>> prepared = store.prepare("users", pyarrow.table({"key": [b"bob"], "value": [b"1912"]}))
    >>> with store.batch() as batch:
    ...     batch.load("users", prepared)
    1
    """

    table: str
    rows: int
    parts: tuple[PreparedRows, ...]
    store: bytes = b""  # the UUID of the store that they are for


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What `load` did.

    >>> rows = pyarrow.table({"key": [b"bob", b"eve"], "value": [b"1912", b"1990"]})
    >>> store.load("users", rows, token=("nightly", 1))
    LoadReport(rows=2, duplicate=False)
    >>> store.load("users", rows, token=("nightly", 1))
    LoadReport(rows=0, duplicate=True)
    """

    rows: int  # written by this call
    duplicate: bool  # the token was committed before: this call wrote nothing


def prepare(port: Port, info: TableInfo, rows: Any, lease_s: float = LEASE_S) -> PreparedLoad:
    """Turn rows, an Arrow table or stream, into sections and staged files; `Invalid` if they do not fit the table."""
    lease_s = seconds(lease_s, "lease_s", LEASE_S_MAX, above_zero=True)
    schema, batches = open_batches(rows, "load")
    with port.building(lease_s) as context:
        return prepare_batches(context, info, schema, batches)


def prepare_batches(
    context: BuildContext,
    info: TableInfo,
    schema: pa.Schema,
    batches: Iterable[pa.RecordBatch],
    replace: tuple[bytes, bytes | None] | None = None,
) -> PreparedLoad:
    """Turn record batches of one schema, all in the range that is replaced, into sections and staged files."""
    kind = as_loadable(kind_named(info.kind, info.name), info)
    load_schema = kind.load_schema(schema, info.options)
    count = 0

    def fitting() -> Iterator[pa.RecordBatch]:
        nonlocal count
        fitted = cast_batches(batches, load_schema)
        if replace is not None:
            fitted = as_replaceable(kind_named(info.kind, info.name), info).inside(fitted, *replace)
        for batch in fitted:
            count += batch.num_rows
            yield batch

    try:
        with translate_os_errors():
            parts = kind.load(fitting(), info, context)
            for part in parts:
                if part.file is not None:
                    context.hand_over(part.partition, part.file)
    except SourceError as error:
        raise error.__cause__ or error from None
    return PreparedLoad(info.name, count, tuple(parts), context.uuid)


def check_loads(info: TableInfo, prepared: Any, store: bytes) -> Sequence[PreparedLoad]:
    """Return the loads as a sequence; `Invalid` if they are not loads of this table, in the store of this UUID."""
    loads = [prepared] if isinstance(prepared, PreparedLoad) else prepared
    if not isinstance(loads, Sequence) or not all(isinstance(load, PreparedLoad) for load in loads):
        raise Invalid(f"load takes an Arrow table or stream, or what prepare returned, not {in_short(prepared)}")
    for load in loads:
        if load.store not in (b"", store):  # its table of that number may hold other types
            raise Invalid(f"rows for table {load.table} were prepared for another store: prepare them with this one")
        if any(table_of(part.partition) != info.table_id for part in load.parts):
            raise Invalid(f"rows prepared for table {load.table} were given for {info.name}: prepare them again")
    return loads


def bundle(
    context: BuildContext,
    info: TableInfo,
    parts: Sequence[PreparedRows],
    replace: tuple[bytes, bytes | None] | None = None,
) -> list[PreparedRows]:
    """Combine what several calls prepared into one group; `replace`: a range of keys whose rows they replace."""
    with translate_os_errors():
        kind = kind_named(info.kind, info.name)
        if replace is None:
            bundled = as_loadable(kind, info).bundle(parts, info, context)
        else:
            bundled = as_replaceable(kind, info).bundle_in_place(parts, info, context, replace)
        handed_over = {part.file for part in parts}
        for part in bundled:
            if part.file is not None and part.file not in handed_over:
                context.hand_over(part.partition, part.file)
    return bundled
