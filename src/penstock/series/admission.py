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
from penstock.series.admitted import SeriesAdmission
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
) -> SeriesAdmission | None:
    """Raise `Invalid` if the sections of one group have times or new series that a table does not accept.

    Return the admission of their new series, to be withdrawn if they are never written; None if they have none.
    """
    if options.rollup is not None:
        for section in sections:
            if not any(isinstance(part, (RollupProgress, BucketTrim)) for part in section.log):
                check_not_rollup(name, options)
        return None  # its series are those of its source
    blocks = [part for section in sections for part in section.parts if isinstance(part, SampleBlock)]
    tables_by_bucket: dict[int, list[LabelTable]] = {}
    for block in blocks:
        check_window(name, int(block.times.min()), int(block.times.max()), options, time_us)
        for bucket, series in _by_bucket(block, options):
            if not limits.series_exist(bucket, series).all():
                tables_by_bucket.setdefault(bucket, []).append(series)
    if not tables_by_bucket:
        return None
    with limits.admitted.lock:
        limits.admitted.forget(time_us)
        series_new = {bucket: _new_series(bucket, tables, limits) for bucket, tables in tables_by_bucket.items()}
        for bucket, by_metric in series_new.items():
            _check_new(name, bucket, by_metric, options, limits)
        return limits.admitted.add(series_new, time_us)  # when all are accepted


def _by_bucket(block: SampleBlock, options: SeriesOptions) -> Iterator[tuple[int, LabelTable]]:
    """Yield each bucket of a block, and the series that have samples in it."""
    first, last = (options.bucket(int(time)) for time in (block.times.min(), block.times.max()))
    if first == last:
        yield first, block.series
        return
    for bucket, positions in options.by_bucket(block.times):
        yield bucket, block.series.take(np.unique(block.index[positions]).astype(np.intp))


def _new_series(bucket: int, tables: Sequence[LabelTable], limits: SeriesLimits) -> dict[str, set[bytes]]:
    """Return the dictionary keys of the series that a bucket does not have, by metric.

    Requires: `limits.admitted.lock` is held.
    """
    keys_by_metric: dict[str, set[bytes]] = {}
    for table in tables:
        rows = np.flatnonzero(~limits.series_exist(bucket, table))
        column = table.names.index(METRIC)
        names = ["", *table.values[column]]
        keys = dictionary_keys(bucket, table.fingerprints[rows])
        for code, key in zip(table.codes[rows, column].tolist(), keys, strict=True):
            keys_by_metric.setdefault(names[code], set()).add(key)
    return keys_by_metric


def _check_new(
    name: str, bucket: int, series: dict[str, set[bytes]], options: SeriesOptions, limits: SeriesLimits
) -> None:
    """Raise `Invalid` if new series of a bucket are too many. Requires: `limits.admitted.lock` is held."""
    new = Counter({metric: limits.admitted.new(bucket, metric, keys) for metric, keys in series.items()})
    count, existing = new.total(), limits.series_count(bucket) + limits.admitted.count(bucket)
    if count and existing + count > options.series_max:
        raise Invalid(
            f"table {name} holds {existing:,} series and this write adds {count:,}, most of metric "
            f"{new.most_common(1)[0][0]}: the limit is {options.series_max:,} (series_max); give fewer label "
            "values, or make a table that takes more"
        )
    for metric, count in new.items():
        existing = limits.series_count(bucket, metric) + limits.admitted.count(bucket, metric)
        if count and existing + count > options.metric_series_max:
            raise Invalid(
                f"metric {metric} of table {name} has {existing:,} series and this write adds {count:,}: the limit is "
                f"{options.metric_series_max:,} (metric_series_max); give its labels fewer values"
            )
