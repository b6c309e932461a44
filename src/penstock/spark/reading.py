"""Batch reads: the owner pins a snapshot and cuts it into pieces; tasks read files where they see them, or ask.

Options: `table`; `start` and `end` (keys of a kv table as text or 0x..., sequences of a queue), `splits` (about how
many tasks), `snapshot` (the id of a snapshot that somebody holds, for several reads at one LSN).

Thread: `partitions` in Spark's planner, `read` in its tasks.
Invariants: (1) all tasks read one LSN. (2) a filter that is given back to Spark may be used here only to read less.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import msgspec
from pyspark.sql.datasource import (
    DataSourceReader,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    LessThan,
    LessThanOrEqual,
)
from pyspark.sql.types import StructType

from penstock.errors import Invalid
from penstock.kinds import Piece, partitions_of
from penstock.spark.arrow import for_spark
from penstock.spark.place import Place

SPLITS = 8
SNAPSHOT_LEASE_S = 600.0  # since the last task that used it
PUSHDOWN = "spark.sql.python.filterPushdown.enabled"
OPERATIONS = {EqualTo: "=", GreaterThan: ">", GreaterThanOrEqual: ">=", LessThan: "<", LessThanOrEqual: "<=", In: "in"}
_warned: list[bool] = []
_piece = msgspec.msgpack.Decoder(Piece)


class PiecePartition(InputPartition):
    """A piece for one task, as bytes: Spark pickles what we give it."""

    def __init__(self, piece: bytes, shard: int, snapshot: str) -> None:
        super().__init__(None)
        self.piece, self.shard, self.snapshot = piece, shard, snapshot


class _Pushed:
    """Takes filters from sessions that push them down.

    Spark calls `reader.pushFilters` where that is on; where it is off, it refuses readers whose method is their own. So
    this stands in the method's place, and shows Spark's own function to who asks whether there is another.
    """

    __func__ = staticmethod(DataSourceReader.pushFilters)

    def __init__(self, wanted: list[tuple[str, str, Any]]) -> None:
        self._wanted = wanted

    def __call__(self, filters: list[Filter]) -> Iterable[Filter]:
        """Remember what narrows the range to be read, and leave every filter to Spark as well."""
        for found in filters:
            operation = OPERATIONS.get(type(found))
            if operation is not None and len(found.attribute) == 1:  # type: ignore[attr-defined]
                value = found.value  # type: ignore[attr-defined]
                value = [one for one in value if one is not None] if operation == "in" else value
                if value is not None and value != []:
                    self._wanted.append((found.attribute[0], operation, value))  # type: ignore[attr-defined]
            yield found


class TableReader(DataSourceReader):
    """Reads a table of any kind."""

    def __init__(self, options: dict[str, str], schema: StructType) -> None:
        self._place = Place.of(options)
        self._schema = schema
        self._snapshot = options.get("snapshot", "")
        self._splits = whole_number(options, "splits", SPLITS)
        kind, _ = self._place.kind()
        self._start = kind.key_of(options["start"]) if "start" in options else b""
        self._end = kind.key_of(options["end"]) if "end" in options else None
        self._wanted: list[tuple[str, str, Any]] = []
        self.pushFilters = _Pushed(self._wanted)  # type: ignore[method-assign]
        warn_if_off()

    def partitions(self) -> list[InputPartition]:
        kind, info = self._place.kind()
        store = self._place.store()
        snapshot = store.snapshot(id=self._snapshot or None, lease_s=SNAPSHOT_LEASE_S)
        found: list[InputPartition] = []
        shards = partitions_of(info)
        for shard, partition in enumerate(shards):
            start, end = kind.narrowed(self._wanted, info, shard, store._port)
            start, end = max(start, self._start), _least(end, self._end)
            for piece in snapshot._port.pieces(partition, max(1, self._splits // len(shards))):
                clipped = replace(piece, start=max(start, piece.start), end=_least(end, piece.end))
                if clipped.end is None or clipped.start < clipped.end:
                    found.append(PiecePartition(msgspec.msgpack.encode(clipped), shard, snapshot.id))
        return found

    def read(self, partition: InputPartition) -> Iterator[Any]:
        if not isinstance(partition, PiecePartition):
            return iter(())  # Spark makes one for a table without pieces
        kind, info = self._place.kind()
        piece = _piece.decode(partition.piece)
        batches, root = None, self._place.root
        if piece.detail and root is not None:
            batches = kind.read_piece(piece, root, self._place.store().identity)
        if batches is None:
            snapshot = self._place.store().snapshot(id=partition.snapshot, lease_s=SNAPSHOT_LEASE_S)
            batches = snapshot._port.scan_arrow(piece.partition, piece.start, piece.end)
        shown = (kind.shown(batch, info.options, partition.shard) for batch in batches)
        return for_spark(shown, self._schema, self._wanted)


def _least(one: bytes | None, other: bytes | None) -> bytes | None:
    """The lower end of two, where None is past everything."""
    return other if one is None else one if other is None else min(one, other)


def warn_if_off() -> None:
    """One warning for each process if the session does not push filters down: everything is read then."""
    frame: Any = sys._getframe(1)
    while frame is not None and "enable_pushdown" not in frame.f_locals:
        frame = frame.f_back
    if frame is not None and not frame.f_locals["enable_pushdown"] and not _warned:
        _warned.append(True)
        print(f"penstock: filters are not pushed down, set {PUSHDOWN}=true to read less", file=sys.stderr)


def whole_number(options: dict[str, str], name: str, default: int) -> int:
    """An option that counts something."""
    text = options.get(name, str(default))
    if not text.isdigit() or int(text) < 1:
        raise Invalid(f"option {name} is {text!r}: give a whole number above 0")
    return int(text)
