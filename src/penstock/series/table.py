"""Writing a series table, over a port.

Thread: any number; a table caches the series it writes to, and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from types import EllipsisType
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.arguments import ArrowSource, flag
from penstock.coordinator import Epoch
from penstock.errors import Backpressure, Invalid, NotFound
from penstock.journal.partitions import PartitionId
from penstock.kinds import DURABLE_S, Port, WritableTable
from penstock.partition.ledger_records import TableInfo
from penstock.partition.pending import PendingGroup
from penstock.series.admission import check_window
from penstock.series.arrow import BlockMaker
from penstock.series.columns import plain_number, times_us, value_bits
from penstock.series.labels import LabelTable, check_labels, fingerprint_of, shard_number_of
from penstock.series.options import check_series_options, decode_series_options, encode_series_options
from penstock.series.reader import SeriesReader, query_bounds
from penstock.series.rules import check_delete, check_metadata, check_times
from penstock.series.section import (
    SAMPLE_BYTES,
    MetricMetadata,
    Part,
    SampleBlock,
    SeriesDelete,
    SeriesKey,
    SeriesSection,
    append_sample,
    split_block,
)
from penstock.series.times import moment_us

KEYS_MAX = 100_000  # series that a table remembers
SECTION_BYTES = 512  # memory of a section besides its columns
ALTERS_MAX = 100  # attempts, while others alter the same table


class SeriesTable(SeriesReader, WritableTable):
    """A series table of an open store.

    >>> metrics = store.series("metrics")
    >>> epoch = metrics.write("cpu", 0.42, {"host": "a"})
    >>> metrics.select("cpu").column("value").to_pylist()
    [0.42]
    """

    def __init__(self, port: Port, info: TableInfo, *, durable: bool = False) -> None:
        super().__init__(port, info)
        self._port = port
        self._durable = durable
        self._write = port.write  # bound once
        self._bucket_us = self._options.bucket_us
        self._keys: dict[Any, SeriesKey] = {}  # by metric and labels as they are given; cleared when it is full
        self._maker = BlockMaker()

    # -- writing

    def write(
        self,
        metric: str,
        value: float,
        labels: Mapping[str, str] | None = None,
        *,
        time: int | datetime | np.datetime64 | None = None,
        durable: bool | None = None,
    ) -> Epoch:
        """Write one sample; `time` is whole microseconds since 1970 or a datetime with a zone, by default now.

        A sample replaces an earlier one of the same series and time.

        >>> epoch = metrics.write("cpu", 0.5, {"host": "a"}, durable=True)
        """
        try:
            key = self._keys.get((metric,) if labels is None else (metric, *labels.items()))
        except (TypeError, AttributeError):  # not a mapping, or something unhashable in it
            key = None
        if key is None:
            key = self._key(metric, labels)
        number = value if type(value) is float else plain_number(value)
        if durable is not None and durable is not True and durable is not False:
            flag(durable, "durable")
        if time is None:
            time_us = self._port.now_us()
        else:
            time_us = moment_us(time)
            self._check_window(time_us, time_us)
        bucket = time_us // self._bucket_us
        if key.bucket == bucket and not key.term.over:
            epoch = self._write(key.partition, append_sample, SAMPLE_BYTES, key, (time_us, number))
        else:  # it may be a new or an emptied series, which the owner must admit
            section = SeriesSection()
            section.log.append((key, time_us, number))
            epoch = self._submit({key.partition: section}, SAMPLE_BYTES)
            key.bucket = bucket
        if durable or (durable is None and self._durable):
            self._port.flush(epoch, DURABLE_S, table=self._info.table_id)
        return epoch

    def _key(self, metric: Any, labels: Any) -> SeriesKey:
        checked = check_labels(metric, labels)
        key = SeriesKey(checked, self._partitions[shard_number_of(fingerprint_of(checked), len(self._partitions))])
        if len(self._keys) >= KEYS_MAX:
            self._keys = {}
        if labels is None or type(labels) is dict:
            self._keys[(metric,) if labels is None else (metric, *labels.items())] = key
        return key

    def write_columns(
        self,
        metric: str,
        values: npt.ArrayLike,
        labels: Mapping[str, str] | None = None,
        *,
        times: npt.ArrayLike | Sequence[datetime],
        durable: bool | None = None,
    ) -> Epoch:
        """Write many samples of one series: values and times of the same length.

        >>> times_us = [1_704_067_200_000_000, 1_704_067_215_000_000]
        >>> epoch = metrics.write_columns("cpu", [0.5, 0.6], {"host": "a"}, times=times_us)
        """
        if durable is not None:
            flag(durable, "durable")
        series = LabelTable.of([check_labels(metric, labels)])
        bits, moments = value_bits(values), times_us(times)
        if len(bits) != len(moments):
            raise Invalid(f"there are {len(bits)} values and {len(moments)} times: give as many of both")
        if not len(bits):
            return Epoch(0)
        check_times(moments)
        return self._end(self._write_block(SampleBlock(series, np.zeros(len(bits), np.uint32), moments, bits)), durable)

    def write_arrow(self, rows: ArrowSource, *, metric: str | None = None, durable: bool | None = None) -> Epoch:
        """Write an Arrow table or record batch, all or none of its rows.

        Columns: `metric` (or the argument), `time`, `value`, `labels` (a map or a struct), and any others as labels.

        >>> rows = pyarrow.table({"time": [1_704_067_200_000_000], "value": [0.5], "host": ["a"]})
        >>> epoch = metrics.write_arrow(rows, metric="cpu")
        """
        if durable is not None:
            flag(durable, "durable")
        block = self._maker.block(rows, metric)
        return Epoch(0) if block is None else self._end(self._write_block(block), durable)

    def write_block(self, block: SampleBlock) -> Epoch:
        """Write samples of label sets that were checked; for other packages of Penstock."""
        check_times(block.times)
        return self._end(self._write_block(block), None)

    def _write_block(self, block: SampleBlock) -> Epoch:
        self._check_window(int(block.times.min()), int(block.times.max()))
        parts = [(0, block)] if self.shards == 1 else list(split_block(block, self.shards))
        size = 20 * len(block) + sum(2 * len(part.series.encode()) + SECTION_BYTES for _, part in parts)
        return self._submit({self._partitions[shard]: SeriesSection(part) for shard, part in parts}, size)

    def delete(
        self,
        selector: str,
        start: int | datetime | np.datetime64 | None = None,
        end: int | datetime | np.datetime64 | None = None,
        *,
        durable: bool | None = None,
    ) -> Epoch:
        """Delete the samples of a selector in [start, end), in every shard at once.

        >>> epoch = metrics.delete('cpu{host="a"}', durable=True)
        """
        if durable is not None:
            flag(durable, "durable")
        part = check_delete(SeriesDelete(*query_bounds(selector, start, end)))
        sections = {partition: SeriesSection(part) for partition in self._partitions}
        return self._end(self._submit(sections, SECTION_BYTES * len(sections) + len(part.selector)), durable)

    def set_metadata(
        self,
        metric: str,
        *,
        type: str = "",  # noqa: A002 - they read well
        unit: str = "",
        help: str = "",  # noqa: A002
        durable: bool | None = None,
    ) -> Epoch:
        """Set type (counter, gauge, histogram, summary, info, stateset, unknown), unit and help of a metric.

        >>> epoch = metrics.set_metadata("cpu", type="gauge", help="The load of a host.")
        """
        if durable is not None:
            flag(durable, "durable")
        part: Part = check_metadata(MetricMetadata(metric, type, unit, help))
        return self._end(self._submit({self._partitions[0]: SeriesSection(part)}, SECTION_BYTES), durable)

    def alter(
        self,
        *,
        window_s: float | EllipsisType | None = ...,
        future_s: float | EllipsisType | None = ...,
        retention_s: float | EllipsisType | None = ...,
        series_max: int | EllipsisType = ...,
        metric_series_max: int | EllipsisType = ...,
    ) -> None:
        """Change options of the table durably, for every process; what is left out stays.

        Other table objects follow when they next write a new series, or when `series` returns them again.

        >>> metrics.alter(retention_s=30 * 86_400)
        """
        arguments = {
            "window_s": window_s,
            "future_s": future_s,
            "retention_s": retention_s,
            "series_max": series_max,
            "metric_series_max": metric_series_max,
        }
        changes = {name: value for name, value in arguments.items() if value is not ...}
        if not changes:
            raise Invalid(f"alter what? Give one of {', '.join(arguments)}")
        for _ in range(ALTERS_MAX):
            info = self._latest()
            options = encode_series_options(check_series_options(msgspec.structs.replace(self._options, **changes)))
            if info.options == options or self._port.alter(info, options).options == options:
                self._latest()
                return
        raise Backpressure(f"other callers alter table {self.name} at the same time: retry later")

    def _latest(self) -> TableInfo:
        info = self._port.table(self.name)
        if info is None or info.table_id != self._info.table_id:
            raise NotFound(f"series table {self.name} was dropped")
        self._info, self._options = info, decode_series_options(info.options)
        return info

    def _check_window(self, first: int, last: int) -> None:
        """Refuse times outside the table's window early; the owner checks each write again.

        A refusal uses the table's current options and the store's time: this process's clock may have jumped, and an
        agent never sends a refused sample again.
        """
        try:
            check_window(self._info.name, first, last, self._options, self._port.now_us())
        except Invalid:
            self._latest()
            check_window(self._info.name, first, last, self._options, self._port.time_us())

    def _submit(self, sections: dict[PartitionId, SeriesSection], size: int) -> Epoch:
        group = PendingGroup()
        group.sections.update(sections)
        return self._port.submit(group, size)
