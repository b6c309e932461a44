"""Arrow rows of a series table: rows that users write become blocks; samples that are read become record batches.

Rows that are written have the columns

    metric   text (or one metric for all rows)
    time     timestamp of any unit (without a zone: UTC), or int64 microseconds since 1970
    value    a number
    labels   optional: a map or a struct of texts
    others   labels: texts, plain or dictionary encoded; null and "" mean that the label is absent

Writers repeat the same series in the same order, so the label columns of the last few calls are kept: equal columns
need no hashing, no sorting and no new label table.

Thread: any; a `BlockMaker` may be shared.
Invariant: values keep their bits.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.arguments import in_short
from penstock.errors import Invalid
from penstock.series.labels import (
    LABELS_MAX,
    METRIC,
    U32,
    U64,
    VALUE_BYTES_MAX,
    Labels,
    LabelTable,
    check_labels,
    check_name,
    check_value,
    decode_labels,
)
from penstock.series.rules import check_times
from penstock.series.samples import I64
from penstock.series.section import SampleBlock

TIME = pa.timestamp("us", tz="UTC")
LABELS = pa.map_(pa.string(), pa.string())
SAMPLES = pa.schema(
    [
        pa.field("metric", pa.string(), nullable=False),
        pa.field("labels", LABELS, nullable=False),
        pa.field("time", TIME, nullable=False),
        pa.field("value", pa.float64(), nullable=False),
    ]
)
RUNS = pa.schema(
    [
        pa.field("series", pa.binary()),  # the canonical labels where the samples of a series begin, null after that
        pa.field("time", pa.int64(), nullable=False),
        pa.field("value", pa.float64(), nullable=False),
    ]
)
SERIES = pa.schema([SAMPLES.field("metric"), SAMPLES.field("labels")])
BATCH_LABEL_BYTES = 64 << 20  # of the labels of all rows of a batch that is read
KEPT_CALLS = 4  # whose label columns are kept
KEPT_ROWS_MAX = 1 << 20
CODES_MAX = 1 << 26  # rows x names of labels, where there are more names than a series may have
_RADIX_MAX = 1 << 62
_PANDAS_INDEX = re.compile(r"__index_level_\d+__")


# -- samples that are read


class LabelColumns:
    """Metrics and label maps of series, from their canonical bytes; decoded when they are first used."""

    def __init__(self, labels: Sequence[bytes]) -> None:
        self._labels = labels
        self.bytes_max = max(map(len, labels), default=0)  # of one series

    def __len__(self) -> int:
        return len(self._labels)

    def bytes_of(self, row: int) -> int:
        """Return the size of a series' labels."""
        return len(self._labels[row])

    def arrays(self, rows: npt.NDArray[np.intp], counts: npt.NDArray[np.intp] | None = None) -> tuple[Any, Any]:
        """Return the metrics and the label maps of some series, each as often as `counts` says (None: once)."""
        if len(rows) == 1 and counts is not None:
            return _repeated(decode_labels(self._labels[rows[0]]), int(counts[0]))
        metrics: list[str] = []
        names: list[str] = []
        values: list[str] = []
        ends: list[int] = [0]
        for row in rows.tolist():
            pairs = dict(decode_labels(self._labels[row]))
            metrics.append(pairs.pop(METRIC, ""))
            names += pairs
            values += pairs.values()
            ends.append(len(names))
        metric, name, value = (pa.array(texts, pa.string()) for texts in (metrics, names, values))
        offsets = np.array(ends, np.int32)
        if counts is not None:  # of texts and not of maps: Arrow takes maps slowly
            series = np.repeat(np.arange(len(rows)), counts)
            sizes = np.diff(offsets)[series]
            repeated = np.concatenate(([0], np.cumsum(sizes)))
            positions = pa.array(np.arange(repeated[-1]) + np.repeat(offsets[series] - repeated[:-1], sizes))
            metric, name, value = metric.take(pa.array(series)), name.take(positions), value.take(positions)
            offsets = repeated.astype(np.int32)
        return metric, pa.MapArray.from_arrays(pa.array(offsets), name, value)

    def metrics(self, rows: npt.NDArray[np.intp], counts: npt.NDArray[np.intp]) -> Any:
        """Return the metrics of some series, each as often as `counts` says."""
        metrics = [dict(decode_labels(self._labels[row])).get(METRIC, "") for row in rows.tolist()]
        return pa.array(metrics, pa.string()).take(pa.array(np.repeat(np.arange(len(rows)), counts)))


def _repeated(labels: Labels, count: int) -> tuple[Any, Any]:
    """Return metric and label map of one series, `count` times: a select of one series is often short."""
    pairs = [pair for pair in labels if pair[0] != METRIC]
    metric, name, value = (
        _texts_repeated(texts, count)
        for texts in ([dict(labels).get(METRIC, "")], [name for name, _ in pairs], [value for _, value in pairs])
    )
    offsets = np.arange(count + 1, dtype=np.int32) * np.int32(len(pairs))
    return metric, pa.MapArray.from_arrays(_fixed(pa.int32(), offsets), name, value)


def _texts_repeated(texts: list[str], count: int) -> Any:
    """Return some texts, one after the other, `count` times: what `take` of their array returns, for less."""
    encoded = [text.encode() for text in texts]
    data = b"".join(encoded)
    ends = np.cumsum([0, *map(len, encoded)])
    offsets = np.append(np.add.outer(np.arange(count) * len(data), ends[:-1]), count * len(data)).astype(np.int32)
    return pa.StringArray.from_buffers(count * len(texts), pa.py_buffer(offsets), pa.py_buffer(data * count))


def sample_batches(
    labels: LabelColumns, rows: npt.NDArray[np.intp], times: I64, bits: U64, schema: Any = SAMPLES
) -> Iterator[Any]:
    """Yield samples as record batches of some fields of `SAMPLES`; `rows` are the series of the samples, as runs.

    Each row repeats the labels of its series, so series with long ones get batches of few rows.
    """
    count = len(rows)
    if count * labels.bytes_max > BATCH_LABEL_BYTES:
        count = max(1, BATCH_LABEL_BYTES // max(map(labels.bytes_of, set(rows.tolist())), default=1))
    for start in range(0, len(rows), count):
        some = slice(start, start + count)
        yield sample_batch(labels, rows[some], times[some], bits[some], schema)


def sample_batch(labels: LabelColumns, rows: npt.NDArray[np.intp], times: I64, bits: U64, schema: Any = SAMPLES) -> Any:
    """Return samples as one record batch, see `sample_batches`."""
    columns = {"time": _fixed(TIME, times), "value": _fixed(pa.float64(), bits)}
    starts = np.flatnonzero(np.append(True, rows[1:] != rows[:-1]))
    counts = np.diff(np.append(starts, len(rows)))
    if "labels" in schema.names:
        columns["metric"], columns["labels"] = labels.arrays(rows[starts], counts)
    elif "metric" in schema.names:
        columns["metric"] = labels.metrics(rows[starts], counts)
    return pa.record_batch([columns[name] for name in schema.names], schema=schema)


def run_batch(labels: Sequence[bytes], rows: npt.NDArray[np.intp], times: I64, bits: U64) -> Any:
    """Return samples as a record batch of `RUNS`; `rows` are the series of the samples, as runs."""
    first = np.append(True, rows[1:] != rows[:-1])
    starts = np.flatnonzero(first)
    texts = [labels[row] for row in rows[starts].tolist()]
    ends = np.cumsum(np.fromiter(map(len, texts), np.int64, len(texts)))
    if ends[-1] > np.iinfo(np.int32).max:
        raise Invalid("the labels of the selected series have more than 2 GiB: narrow the selectors")
    offsets = np.zeros(len(rows) + 1, np.int32)
    offsets[1:] = np.repeat(ends, np.diff(starts, append=len(rows)))
    valid = np.packbits(first, bitorder="little")
    buffers = [pa.py_buffer(valid), pa.py_buffer(offsets), pa.py_buffer(b"".join(texts))]
    series = pa.Array.from_buffers(pa.binary(), len(rows), buffers)
    columns = [series, _fixed(pa.int64(), times), _fixed(pa.float64(), bits)]
    return pa.record_batch(columns, schema=RUNS)


def _fixed(kind: Any, column: npt.NDArray[Any]) -> Any:
    """Return a column of numbers as an Arrow array of the same width, bit by bit."""
    return pa.Array.from_buffers(kind, len(column), [None, pa.py_buffer(np.ascontiguousarray(column))])


def series_batches(labels: LabelColumns, rows_max: int = 8_192) -> Iterator[Any]:
    """Yield record batches of `SERIES`."""
    for start in range(0, len(labels), rows_max):
        rows = np.arange(start, min(start + rows_max, len(labels)))
        yield pa.record_batch(list(labels.arrays(rows)), schema=SERIES)


# -- rows that are written


class BlockMaker:
    """Turns Arrow rows into blocks."""

    def __init__(self) -> None:
        # Of the last calls; replaced whole.
        self._cache: tuple[tuple[tuple[tuple[str, Any], ...], LabelTable, U32], ...] = ()

    def block(self, rows: Any, metric: str | None = None) -> SampleBlock | None:
        """Return the block of a table or record batch; None if it has no rows; `Invalid` if a row breaks a rule."""
        table = _without_index(_as_table(rows))
        columns = {name: _whole_column(table.column(index)) for index, name in enumerate(table.column_names)}
        if len(columns) != table.num_columns:
            raise Invalid("rows of a series table have two columns of one name")
        for name in ("time", "value"):
            if name not in columns:
                raise Invalid(f"rows of a series table have the columns time and value: {name} is missing")
        # Copies: Arrow arrays may share the memory of numpy arrays, which the caller may change.
        times, bits = time_column(columns.pop("time")).copy(), value_column(columns.pop("value")).copy()
        if not table.num_rows:
            return None
        check_times(times)
        columns = {name: _without_views(name, column) for name, column in columns.items()}
        series, index = self._series(columns, metric, table.num_rows)
        return SampleBlock(series, index, times, bits)

    def _series(self, columns: dict[str, Any], metric: str | None, count: int) -> tuple[LabelTable, U32]:
        if metric is not None and "metric" in columns:
            raise Invalid("the rows have a column metric: give no metric beside it")
        if metric is None and "metric" not in columns:
            raise Invalid("rows of a series table have a column metric: add it, or give metric=")
        if metric is not None:
            metric = check_value(METRIC, metric)
        key = (("", metric), *columns.items())
        for cached_key, series, index in self._cache:
            if _equal(cached_key, key) and len(index) == count:
                return series, index
        series, index = _series(columns, metric, count)
        if count <= KEPT_ROWS_MAX:
            all_rows = pa.array(np.arange(count))
            cached_key = (
                ("", metric),
                *((name, column.take(all_rows)) for name, column in columns.items()),
            )  # copies, as above
            self._cache = ((cached_key, series, index), *self._cache[: KEPT_CALLS - 1])
        return series, index


def _equal(one: tuple[tuple[str, Any], ...], other: tuple[tuple[str, Any], ...]) -> bool:
    return len(one) == len(other) and all(
        a == b and (x == y if x is None or isinstance(x, str) else x.type == y.type and x.equals(y))
        for (a, x), (b, y) in zip(one, other, strict=True)
    )


def _as_table(rows: Any) -> Any:
    if isinstance(rows, (pa.Table, pa.RecordBatch)):
        return rows
    try:
        return pa.table(rows) if hasattr(rows, "__arrow_c_stream__") else pa.record_batch(rows)
    except Exception as error:  # whatever another library raises
        reason = _first_line(error)
        raise Invalid(f"write_arrow takes an Arrow table or record batch, not {in_short(rows)} ({reason})") from None


def _without_index(table: Any) -> Any:
    """Return rows without the columns that Arrow makes of an index of pandas that has no name."""
    if table.schema.metadata is None or b"pandas" not in table.schema.metadata:
        return table
    return table.select([name for name in table.schema.names if not _PANDAS_INDEX.fullmatch(name)])


def _whole_column(column: Any) -> Any:
    if not isinstance(column, pa.ChunkedArray):
        return column
    if column.num_chunks > 1 and pa.types.is_dictionary(column.type):
        column = column.unify_dictionaries()
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks or [pa.array([], column.type)])


def _without_views(name: str, column: Any) -> Any:
    """Return a column whose texts are no views: Arrow cannot take rows of those."""
    kind = column.type
    try:
        if pa.types.is_dictionary(kind):
            viewed = pa.types.is_string_view(kind.value_type)
            texts = column.dictionary.cast(pa.large_string()) if viewed else column.dictionary
            return pa.DictionaryArray.from_arrays(column.indices, texts) if viewed else column
        plain = _type_without_views(kind)
        return column if plain == kind else column.cast(plain)
    except pa.ArrowException as error:
        raise Invalid(f"the column {in_short(name)} is {kind}: cast it to string ({_first_line(error)})") from None


def _type_without_views(kind: Any) -> Any:
    if pa.types.is_string_view(kind) or (pa.types.is_dictionary(kind) and pa.types.is_string_view(kind.value_type)):
        return pa.large_string()
    if pa.types.is_map(kind):
        return pa.map_(_type_without_views(kind.key_type), _type_without_views(kind.item_type))
    if pa.types.is_struct(kind):
        fields = [kind.field(index) for index in range(kind.num_fields)]
        return pa.struct([field.with_type(_type_without_views(field.type)) for field in fields])
    return kind


def time_column(column: Any) -> I64:
    """Return times as microseconds; `Invalid` for another type, a null or a time that does not fit."""
    kind = column.type
    if not (pa.types.is_timestamp(kind) or pa.types.is_integer(kind)):
        raise Invalid(f"the column time is {kind}: give a timestamp, or int64 microseconds since 1970")
    _refuse_nulls(column, "time")
    try:
        if pa.types.is_timestamp(kind) and kind.unit != "ns":
            column = column.cast(pa.timestamp("us", kind.tz))
        whole: I64 = column.cast(pa.int64()).to_numpy(zero_copy_only=False)
    except pa.ArrowException as error:
        raise Invalid(f"the column time does not fit microseconds since 1970: {_first_line(error)}") from None
    return whole // 1_000 if pa.types.is_timestamp(kind) and kind.unit == "ns" else whole


def value_column(column: Any) -> U64:
    """Return the bits of values as float64, rounded where they are not exact; `Invalid` for another type or a null."""
    kind = column.type
    if not (pa.types.is_floating(kind) or pa.types.is_integer(kind) or pa.types.is_decimal(kind)):
        raise Invalid(f"the column value is {kind}: give numbers")
    _refuse_nulls(column, "value")
    try:
        numbers = column if kind == pa.float64() else column.cast(pa.float64(), safe=False)
    except pa.ArrowException as error:
        raise Invalid(f"the column value does not fit float64: {_first_line(error)}") from None
    return numbers.to_numpy(zero_copy_only=False).view(np.uint64)  # type: ignore[no-any-return]


def _refuse_nulls(column: Any, name: str) -> None:
    if column.null_count:
        row = int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
        raise Invalid(f"the column {name} is null in row {row}: drop such rows")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _series(columns: dict[str, Any], metric: str | None, count: int) -> tuple[LabelTable, U32]:
    """Return the distinct label sets of rows, in order of first appearance, and the number of each row's set."""
    coded: dict[str, tuple[list[str], npt.NDArray[np.int64]]] = {}
    for name, column in columns.items():
        if name == "labels" and pa.types.is_map(column.type):
            parts = _coded_map(column, count)
        elif name == "labels" and pa.types.is_struct(column.type):
            fields = [column.type.field(index).name for index in range(column.type.num_fields)]
            if len(set(fields)) != len(fields):
                raise Invalid("the struct labels has two fields of one name")
            parts = {field: _coded(field, part) for field, part in zip(fields, column.flatten(), strict=True)}
        else:
            parts = {METRIC if name == "metric" else name: _coded(name, column)}
        for label, part in parts.items():
            if label in coded:
                raise Invalid(f"the label {in_short(label)} stands in two columns")
            coded[label] = part
    if metric is not None:
        checked = check_labels(metric, None)[0][1]
        if METRIC in coded:
            raise Invalid(f"the label {METRIC} is the metric: give it once")
        coded[METRIC] = [checked], np.ones(count, np.int64)
    names = sorted(name for name, (values, _) in coded.items() if values)
    if METRIC not in names or not coded[METRIC][1].all():
        raise Invalid("a metric has a name: no row may have a null or an empty metric")
    _check_names(len(names), count)
    codes = np.stack([coded[name][1] for name in names], axis=1)
    if np.count_nonzero(codes, axis=1).max() > LABELS_MAX:
        raise Invalid(f"a series has more than {LABELS_MAX} labels")
    first, index = _distinct(codes, [len(coded[name][0]) for name in names])
    return LabelTable(names, [coded[name][0] for name in names], codes[first].astype(np.uint32)), index


def _check_names(names: int, count: int) -> None:
    """Refuse rows whose labels, as columns of all their names, would take very much memory."""
    if names > LABELS_MAX and names * count > CODES_MAX:
        raise Invalid(f"{count:,} rows have {names:,} names of labels: write fewer rows at once, or use fewer names")


def _coded(name: str, column: Any) -> tuple[list[str], npt.NDArray[np.int64]]:
    """Return the distinct values of a column of texts, and a code for each row."""
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    if pa.types.is_null(kind):
        return [], np.zeros(len(column), np.int64)
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise Invalid(f"the column {in_short(name)} is {column.type}: labels are texts: cast it to string, or drop it")
    check_name(name)
    encoded = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
    if encoded.dictionary.null_count:  # a dictionary may hold a null
        encoded = column.cast(pa.string()).dictionary_encode()
    codes = pc.fill_null(encoded.indices.cast(pa.int64()), -1).to_numpy(zero_copy_only=False)
    return _compact(name, encoded.dictionary, codes)


def _compact(name: str, dictionary: Any, codes: npt.NDArray[np.int64]) -> tuple[list[str], npt.NDArray[np.int64]]:
    """Return the values that are used, distinct and not empty, and the codes of rows; -1 means absent."""
    longest = pc.max(pc.binary_length(dictionary)).as_py() or 0
    if longest > VALUE_BYTES_MAX:
        raise Invalid(
            f"the label {in_short(name)} has a value of {longest} bytes: at most {VALUE_BYTES_MAX} are allowed"
        )
    try:
        texts: list[str] = dictionary.to_pylist()
    except UnicodeDecodeError:
        raise Invalid(f"the label {in_short(name)} has a value that is not UTF-8") from None
    used = np.zeros(len(texts) + 1, np.bool_)
    used[codes] = True  # -1 marks the last element, which stands for absent
    numbers = np.zeros(len(texts) + 1, np.int64)
    values: dict[str, int] = {}
    if used[:-1].all() and "" not in texts and len(set(texts)) == len(texts):
        numbers[:-1] = np.arange(1, len(texts) + 1)
        return texts, numbers[codes]
    for code in np.flatnonzero(used[:-1]).tolist():
        if texts[code]:
            numbers[code] = values.setdefault(texts[code], len(values) + 1)
    return list(values), numbers[codes]


def _coded_map(column: Any, count: int) -> dict[str, tuple[list[str], npt.NDArray[np.int64]]]:
    """Return, for each key of a column of maps, its distinct values and a code for each row."""
    if column.null_count:  # a null map has no labels, but may have entries
        column = pc.if_else(column.is_valid(), column, pa.scalar([], column.type))
    offsets = column.offsets.to_numpy()
    lengths = np.diff(offsets)
    keys, items = (part.slice(offsets[0], offsets[-1] - offsets[0]) for part in (column.keys, column.items))
    parents = np.repeat(np.arange(count), lengths)
    names, numbers = _coded("labels", keys)
    if len(names) > LABELS_MAX and lengths.max() == len(names):
        raise Invalid(f"a series has more than {LABELS_MAX} labels")
    _check_names(len(names), max(count, len(keys)))
    if len(keys) and not numbers.all():
        raise Invalid("a label has a name: no key of the map labels may be empty")
    result: dict[str, tuple[list[str], npt.NDArray[np.int64]]] = {}
    for number, name in enumerate(names, start=1):
        positions = np.flatnonzero(numbers == number)
        rows = parents[positions]
        if len(np.unique(rows)) != len(rows):
            raise Invalid(f"a map of labels has the key {in_short(name)} twice")
        values, item_codes = _coded(name, items.take(pa.array(positions)))
        codes = np.zeros(count, np.int64)
        codes[rows] = item_codes
        result[name] = values, codes
    return result


def _distinct(codes: npt.NDArray[np.int64], sizes: Sequence[int]) -> tuple[npt.NDArray[np.intp], U32]:
    """Return the first row of each distinct row of codes, ascending, and the number of each row's distinct one."""
    radix = 1
    key = np.zeros(len(codes), np.int64)
    for column, size in enumerate(sizes):
        if radix > _RADIX_MAX // (size + 1):  # start again from the distinct prefixes
            _, key = np.unique(key, return_inverse=True)
            radix = int(key.max()) + 1
        key = key * (size + 1) + codes[:, column]
        radix *= size + 1
    if len(key) == 1 or bool((key[1:] > key[:-1]).all()):  # all differ, in order
        return np.arange(len(key)), np.arange(len(key), dtype=np.uint32)
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    order = np.argsort(first)
    numbers = np.empty(len(order), np.uint32)
    numbers[order] = np.arange(len(order), dtype=np.uint32)
    return first[order], numbers[inverse.reshape(-1)]
