"""Admission of samples: the times and the number of series that a table accepts, judged by the owner before a write.

Apply accepts everything. So a limit counts series from their admission on: see `admitted`.

Thread: the writer's.
Invariant: what is refused changes nothing, and the refusal names the table's option, and the metric.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from penstock.errors import Invalid
from penstock.series.keys import dictionary_keys
from penstock.series.labels import METRIC, LabelTable
from penstock.series.options import SECOND_US, SeriesOptions
from penstock.series.section import BucketTrim, RollupProgress, SampleBlock, SeriesSection
from penstock.series.shard import SeriesLimits


def check_not_rollup(name: str, options: SeriesOptions) -> None:
    """Raise `Invalid` if a table is a rollup, which only its jobs write."""
    if options.rollup is not None:
        raise Invalid(f"table {name} is a rollup of {options.rollup.source}: write there, and it follows")


def check_window(name: str, first: int, last: int, options: SeriesOptions, time_us: int) -> None:
    """Raise `Invalid` if times are older or later than a table accepts; `time_us` is the store's time."""
    if options.future_s is not None and last > time_us + options.future_s * SECOND_US:
        late_s = (last - time_us) / SECOND_US
        raise Invalid(
            f"a sample is {late_s:,.0f} s in the future, and table {name} accepts {options.future_s:,.0f} s "
            "(future_s): give times in microseconds since 1970"
        )
    if options.window_s is not None and first < time_us - options.window_s * SECOND_US:
        old_s = (time_us - first) / SECOND_US
        raise Invalid(
            f"a sample is {old_s:,.0f} s old, and table {name} accepts {options.window_s:,.0f} s (window_s): drop it"
        )


def admit_sections(
    name: str, sections: Sequence[SeriesSection], options: SeriesOptions, limits: SeriesLimits, time_us: int
) -> None:
    """Raise `Invalid` if the sections of one group have times or new series that a table does not accept."""
    if options.rollup is not None:
        for section in sections:
            if not any(isinstance(part, (RollupProgress, BucketTrim)) for part in section.log):
                check_not_rollup(name, options)
        return  # its series are those of its source
    blocks = [part for section in sections for part in section.parts if isinstance(part, SampleBlock)]
    found: dict[int, list[LabelTable]] = {}
    for block in blocks:
        check_window(name, int(block.times.min()), int(block.times.max()), options, time_us)
        for bucket, new in _new_series(block, options, limits):
            found.setdefault(bucket, []).append(new)
    if not found:
        return
    with limits.admitted.lock:
        limits.admitted.forget(time_us)
        series = {bucket: _check_new(name, bucket, _united(some), options, limits) for bucket, some in found.items()}
        for bucket, by_metric in series.items():  # when all are accepted
            limits.admitted.add(bucket, by_metric, time_us)


def _new_series(block: SampleBlock, options: SeriesOptions, limits: SeriesLimits) -> Iterator[tuple[int, LabelTable]]:
    """Yield, for each bucket of a block, the series that it does not have yet."""
    buckets = options.buckets(block.times)
    numbers = np.unique(buckets).tolist()
    for bucket in numbers:
        series = block.series
        if len(numbers) > 1:
            series = series.take(np.unique(block.index[buckets == bucket]).astype(np.intp))
        new = np.flatnonzero(~limits.known(bucket, series))
        if len(new):
            yield bucket, series if len(new) == len(series) else series.take(new)


def _united(tables: Sequence[LabelTable]) -> LabelTable:
    """Return the distinct series of several tables: a batch may hold a block for each of its writes."""
    if len(tables) == 1:
        return tables[0]
    return LabelTable.of(list(dict.fromkeys(table.labels(row) for table in tables for row in range(len(table)))))


def _check_new(
    name: str, bucket: int, table: LabelTable, options: SeriesOptions, limits: SeriesLimits
) -> dict[str, list[bytes]]:
    """Return the dictionary keys of the series that a bucket does not have, by metric; `Invalid` if they are too many.

    Requires: `limits.admitted.lock` is held.
    """
    rows = np.flatnonzero(~limits.known(bucket, table))  # again: some may be applied by now
    place = table.names.index(METRIC)
    names = ["", *table.values[place]]
    series: dict[str, list[bytes]] = {}
    keys = dictionary_keys(bucket, table.fingerprints[rows])
    for code, key in zip(table.codes[rows, place].tolist(), keys, strict=True):
        series.setdefault(names[code], []).append(key)
    new = Counter({metric: limits.admitted.new(bucket, metric, keys) for metric, keys in series.items()})
    count, known = new.total(), limits.series_count(bucket) + limits.admitted.count(bucket)
    if count and known + count > options.series_max:
        raise Invalid(
            f"table {name} holds {known:,} series and this write adds {count:,}, most of metric "
            f"{new.most_common(1)[0][0]}: the limit is {options.series_max:,} (series_max); give fewer label "
            "values, or make a table that takes more"
        )
    for metric, count in new.items():
        known = limits.series_count(bucket, metric) + limits.admitted.count(bucket, metric)
        if count and known + count > options.metric_series_max:
            raise Invalid(
                f"metric {metric} of table {name} has {known:,} series and this write adds {count:,}: the limit is "
                f"{options.metric_series_max:,} (metric_series_max); give its labels fewer values"
            )
    return series
