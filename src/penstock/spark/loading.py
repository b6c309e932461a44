"""Rows of Spark's tasks on their way into a store: prepared by the tasks, committed once, together.

A task turns its rows into loads (see `Kind.load`) and says what it made; whoever commits puts the loads of all tasks
and tables into one group. A task that is tried again makes other files; those that no commit names are purged.

Thread: Spark's; a task's part runs in its worker, the commit wherever Spark commits.
Invariant: nothing is seen before the commit, and all of it after.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from penstock.errors import Invalid
from penstock.journal.partitions import shard_number
from penstock.kinds import PreparedRows, as_loadable, as_replaceable
from penstock.spark.arrow import arrow_schema, from_spark
from penstock.spark.place import StoreLocation, check_range, working
from penstock.store.batch import StoreBatch

_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(list[PreparedRows])


def check_schema(place: StoreLocation, schema: Any) -> None:
    """`Invalid` before any work if rows of this Spark schema cannot be written to the table."""
    kind, info = place.kind()
    as_loadable(kind, info).load_schema(arrow_schema(schema), info.options)


def make_loads(
    place: StoreLocation, schema: Any, batches: Iterator[Any], replace: tuple[bytes, bytes | None] | None = None
) -> bytes:
    """In a task: prepare its rows, all of which are in the range that is replaced; what to tell the one who commits."""
    kind, info = place.kind()
    loader = as_loadable(kind, info)
    rows = from_spark(batches, loader.load_schema(arrow_schema(schema), info.options))
    if replace is not None:
        rows = as_replaceable(kind, info).inside(rows, *replace)
    with working(place) as (workplace, hand_over):
        return _encode([hand_over(load) for load in loader.load(rows, info, workplace)])


def add_loads(
    batch: StoreBatch, place: StoreLocation, told: Iterable[bytes], replace: tuple[bytes, bytes | None] | None = None
) -> int:
    """Put the loads of all tasks for a table into a batch; how many rows they hold."""
    kind, info = place.kind()
    loads = [load for some in told for load in _decoder.decode(some)]
    theirs = {load.file for load in loads}  # which the tasks handed over
    with working(place) as (workplace, hand_over):
        if replace is None:
            bundled = as_loadable(kind, info).bundle(loads, info, workplace)
        else:
            bundled = as_replaceable(kind, info).bundle_in_place(loads, info, workplace, replace)
        bundled = [load if load.file in theirs else hand_over(load) for load in bundled]
    for load in bundled:
        if load.file is not None:
            batch.adopt(info.name, [load.file], shard_number(load.partition))
        else:
            batch.add_section(load.partition, kind.decode(load.payload), len(load.payload))
    return sum(load.rows for load in loads)


def replaced_range(place: StoreLocation, options: dict[str, str], overwrite: bool) -> tuple[bytes, bytes | None] | None:
    """What an overwrite replaces: the range of the options `start` and `end`, or everything."""
    if not overwrite:
        if "start" in options or "end" in options:
            raise Invalid("start and end say what mode('overwrite') replaces; mode('append') takes neither")
        return None
    kind, info = place.kind()
    as_replaceable(kind, info)  # before any work
    start = kind.key_of(options["start"]) if "start" in options else b""
    found = start, kind.key_of(options["end"]) if "end" in options else None
    check_range(*found)
    return found
