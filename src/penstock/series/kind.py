"""The kind `series`: samples of float64 at microsecond times, found by labels.

The key of a row, for readers that share a scan, is its time: eight bytes, in the order of time.

Thread: pure functions; the table it makes is for any thread.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

import pyarrow as pa
from msgspec.structs import replace

from penstock.arguments import in_short, microseconds
from penstock.errors import CorruptionError, Invalid, KindMismatch
from penstock.kinds import (
    BuildContext,
    Derived,
    FileReadable,
    Filters,
    Host,
    Kind,
    Loadable,
    MachineContext,
    Piece,
    Port,
    PreparedRows,
    Queryable,
    QueryContext,
    Reading,
    Selectable,
    Serviced,
)
from penstock.kinds.changes import ChangeOptions, Changing, change_options
from penstock.manifest.records import JobKind, RetentionPolicy
from penstock.partition.ledger_records import TableInfo
from penstock.partition.machine import PartitionDescriptor
from penstock.partition.reference import StagedFile
from penstock.series.admission import admit_sections
from penstock.series.aggregate import aggregate, decode_aggregate
from penstock.series.arrow import LABELS, SAMPLES, TIME
from penstock.series.changes import CHANGE_COLUMNS, read_changes
from penstock.series.labels import check_name
from penstock.series.loading import STAGED_SUFFIX, SampleLoader, bundle
from penstock.series.machine import SeriesMachine, open_series_machine
from penstock.series.options import (
    TIME_MAX,
    TIME_MIN,
    SeriesOptions,
    check_series_options,
    decode_series_options,
    encode_series_options,
)
from penstock.series.queries import SeriesQuery, check_series_query, encode_query, run_series_query
from penstock.series.reader import SeriesReader
from penstock.series.reading import SeriesState, check_piece, read_piece
from penstock.series.rollups import (
    RollupPlan,
    changed_hours,
    check_source,
    decode_progress,
    plan_rollup,
    rollup_progress,
)
from penstock.series.rules import receive_section
from penstock.series.section import BucketTrim, SeriesDelete, SeriesSection
from penstock.series.section_codec import decode_section, encode_section, section_weight
from penstock.series.selectors import parse_selector
from penstock.series.service import SeriesService
from penstock.series.table import SeriesTable
from penstock.series.times import key_times, time_key

_DIGITS = re.compile(r"-?[0-9]{1,18}")


class SeriesKind(Kind, Derived, FileReadable, Loadable, Queryable, Selectable, Serviced, Changing):
    """The kind `series`."""

    name = "series"
    options_default = encode_series_options(SeriesOptions())
    staged_suffix = STAGED_SUFFIX
    derived_by = JobKind.ROLLUP
    read_only_calls: frozenset[str] = frozenset()
    repeatable_calls: frozenset[str] = frozenset()

    def options(self, options: SeriesOptions | None, changes: bool | ChangeOptions = False) -> bytes:
        """Return the encoded options of a table; `Invalid` if they are not options."""
        checked, feed = check_series_options(options), change_options(changes)
        if feed is None or (checked.changes is not None and changes is True):
            return encode_series_options(checked)
        if checked.changes not in (None, feed):  # before a table is made: it would fit neither of the two
            raise Invalid("changes= and SeriesOptions(changes=) differ: give one of them")
        return encode_series_options(replace(checked, changes=feed))

    def check_made(self, info: TableInfo, options: SeriesOptions | None) -> None:
        """Raise `KindMismatch` if an existing table has other options than those requested."""
        existing, requested = decode_series_options(info.options), check_series_options(options)
        if options is not None and existing != replace(requested, changes=requested.changes or existing.changes):
            raise KindMismatch(
                f"series table {info.name} has other options: leave options= out, or change them with alter(); "
                f"it has {decode_series_options(info.options)}"
            )

    # -- sections

    def encode(self, part: SeriesSection) -> bytes:
        return encode_section(part)

    def decode(self, payload: bytes) -> SeriesSection:
        return decode_section(payload)

    def weight(self, payload: bytes) -> int:
        return section_weight(payload)

    def receive(self, payload: bytes, options: bytes) -> SeriesSection:
        return receive_section(payload)

    def admit(
        self, info: TableInfo, sections: Sequence[SeriesSection], machine: SeriesMachine, time_us: int
    ) -> Callable[[], None] | None:
        term = machine.term  # before the state is read: a delete that is applied meanwhile ends this one
        admission = admit_sections(info.name, sections, decode_series_options(info.options), machine, time_us)
        for section in sections:
            sample = section.log[0] if len(section.log) == 1 else None
            if isinstance(sample, tuple):
                sample[0].term = term  # its table writes more samples of this series without asking
        return None if admission is None else partial(machine.withdraw, admission)

    def frees_space(self, section: SeriesSection) -> bool:
        return all(isinstance(part, (SeriesDelete, BucketTrim)) for part in section.log)

    # -- tables

    def check_retention(self, policy: RetentionPolicy) -> None:
        if policy.bytes_max is not None:
            raise Invalid("a series table deletes by age, not by bytes: use RetentionPolicy(age_ms_max=...)")

    def check_options(self, options: bytes) -> None:
        try:
            decode_series_options(options)
        except CorruptionError as error:
            raise Invalid(f"options of a series table are malformed: {error.reason}") from None

    def check_altered(self, info: TableInfo, options: bytes) -> None:
        before, after = decode_series_options(info.options), decode_series_options(options)
        if (before.bucket_s, before.rollup, before.changes) != (after.bucket_s, after.rollup, after.changes):
            raise Invalid(f"bucket_s, rollup and changes of table {info.name} are fixed: create another table")

    def open_machine(self, descriptor: PartitionDescriptor, options: bytes, site: MachineContext) -> SeriesMachine:
        return open_series_machine(site, descriptor, options)

    def table(self, port: Port, info: TableInfo, *, durable: bool) -> SeriesTable:
        return SeriesTable(port, info, durable=durable)

    def reader(self, port: Reading, info: TableInfo) -> SeriesReader:
        return SeriesReader(port, info)

    def schema(self, options: bytes) -> Any:
        return SAMPLES

    def to_table_schema(self, batch: Any, options: bytes, shard: int) -> Any:
        return batch

    # -- the change feed

    def change_options(self, options: bytes) -> ChangeOptions | None:
        return decode_series_options(options).changes

    def change_schema(self, options: bytes) -> Any:
        return CHANGE_COLUMNS

    def read_changes(self, data: bytes, options: bytes) -> tuple[Any, Any]:
        return read_changes(data)

    def nothing(self) -> SeriesSection:
        return SeriesSection()

    # -- ranges of time

    def parse_key(self, text: str) -> bytes:
        if _DIGITS.fullmatch(text):
            return time_key(microseconds(int(text)))
        try:
            time = datetime.fromisoformat(text)
        except ValueError:
            raise Invalid(
                f"{in_short(text)} is not a time: give microseconds since 1970, or 2026-01-31T12:00:00"
            ) from None
        return time_key(microseconds(time if time.tzinfo is not None else time.replace(tzinfo=UTC)))

    def key_range(self, filters: Filters, info: TableInfo, shard: int, port: Port) -> tuple[bytes, bytes | None]:
        low, high = TIME_MIN, TIME_MAX
        for column, operation, value in filters:
            values = list(value) if operation == "in" else [value]
            if column != "time" or not all(isinstance(some, datetime) and some.tzinfo is not None for some in values):
                continue
            first, last = microseconds(min(values)), microseconds(max(values))
            if operation in ("=", "in", ">=", ">"):
                low = max(low, first + (operation == ">"))
            if operation in ("=", "in", "<=", "<"):
                high = min(high, last + (operation != "<"))
        return time_key(low), None if high >= TIME_MAX else time_key(max(low, high))

    # -- loads

    def load_schema(self, input_schema: Any, options: bytes) -> Any:
        missing = [name for name in ("metric", "time", "value") if name not in input_schema.names]
        if missing or len(set(input_schema.names)) != len(input_schema.names):
            raise Invalid(
                f"rows of a series table have the columns metric, time and value, not {', '.join(input_schema.names)}"
            )
        return pa.schema([_load_field(field) for field in input_schema])

    def load(self, batches: Iterator[Any], info: TableInfo, context: BuildContext) -> list[PreparedRows]:
        return SampleLoader(info, context).run(batches)

    def bundle(self, loads: Sequence[PreparedRows], info: TableInfo, context: BuildContext) -> list[PreparedRows]:
        return bundle(loads, info, context)

    def check_staged(self, machine: SeriesMachine, files: Sequence[StagedFile]) -> Callable[[], None]:
        return machine.check_staged(files)

    # -- files

    def read_piece(
        self, piece: Piece, root: str, identity: bytes, columns: Collection[str] | None = None
    ) -> Iterator[Any] | None:
        return read_piece(piece, root, identity, columns)

    def check_piece(self, piece: Piece, root: str, identity: bytes) -> list[tuple[str, str]] | None:
        return check_piece(piece, root, identity)

    # -- queries

    def check_query(self, info: TableInfo, name: str, argument: bytes) -> None:
        if name == "aggregate":
            decode_aggregate(argument)
        elif name in ("changed_hours", "rollup_progress"):
            decode_progress(argument)
        else:
            check_series_query(name, argument)

    def query(
        self, info: TableInfo, name: str, argument: bytes, shards: Sequence[SeriesState], context: QueryContext
    ) -> Iterator[Any]:
        if name == "aggregate":
            return aggregate(decode_aggregate(argument), shards, context)
        if name == "changed_hours":
            return changed_hours(decode_progress(argument), shards, context)
        if name == "rollup_progress":
            return rollup_progress(shards)
        return run_series_query(name, argument, shards, context)

    def select_range(self, selector: str, shard: int, start: bytes, end: bytes | None) -> tuple[str, bytes]:
        parse_selector(selector)
        low, high = key_times(start, end)
        return "select", encode_query(SeriesQuery(selector, low, max(low, high), shard=shard))

    # -- rollups

    def check_source(self, name: str, options: bytes, find: Callable[[str], TableInfo | None]) -> None:
        rollup = decode_series_options(options).rollup
        if rollup is not None:
            check_source(name, rollup, find(rollup.source), self.name)

    def is_derived(self, info: TableInfo) -> bool:
        return decode_series_options(info.options).rollup is not None

    def derive(self, info: TableInfo, host: Host) -> RollupPlan | None:
        rollup = decode_series_options(info.options).rollup
        return None if rollup is None else plan_rollup(info, rollup, host)

    # -- retention

    def service(self, info: TableInfo, host: Host) -> SeriesService:
        return SeriesService(info, host)

    def check_call(self, info: TableInfo, name: str, argument: bytes) -> Sequence[str]:
        raise Invalid(f"a series table takes no call {in_short(name)}")

    def waits(self, name: str, argument: bytes) -> bool:
        return False


def _load_field(field: Any) -> Any:
    """Return the field to cast a column of rows to; `Invalid` if its type does not fit."""
    kind = field.type
    if field.name == "time":
        if not pa.types.is_timestamp(kind) and not pa.types.is_int64(kind):
            raise Invalid(f"the column time is {kind}: give a timestamp, or int64 microseconds since 1970")
        return field if pa.types.is_int64(kind) or kind.unit == "ns" else field.with_type(TIME)
    if field.name == "value":
        if not (pa.types.is_floating(kind) or pa.types.is_integer(kind) or pa.types.is_decimal(kind)):
            raise Invalid(f"the column value is {kind}: give numbers")
        return field.with_type(pa.float64())
    if field.name == "labels" and pa.types.is_map(kind):
        return field.with_type(LABELS)
    if field.name == "labels" and pa.types.is_struct(kind):
        return field
    text = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not (pa.types.is_string(text) or pa.types.is_large_string(text) or pa.types.is_string_view(text)):
        raise Invalid(f"the column {field.name} is {kind}: labels are texts: cast it to string, or drop it")
    check_name(field.name)
    return field
