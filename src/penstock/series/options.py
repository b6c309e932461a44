"""The options of a series table: its time buckets, the times it accepts, its limits and its retention.

Thread: immutable values.
Invariants: (1) every `SeriesOptions` has passed its checks, and can always be decoded from its bytes. (2) every time
from TIME_MIN to TIME_MAX has a bucket.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.arguments import TIME_US_MAX, TIME_US_MIN, in_short, seconds, whole
from penstock.errors import CorruptionError, Invalid
from penstock.kinds.changes import ChangeOptions, change_options

TIME_MIN, TIME_MAX = TIME_US_MIN, TIME_US_MAX  # microseconds since 1970, half-open: what Python and Spark can show
SECOND_US = 1_000_000
HOUR_S = 3_600
HOUR_US = HOUR_S * SECOND_US
BUCKET_S_MIN, BUCKET_S_MAX = 300, 31 * 86_400
BUCKET_ZERO = 1 << 31  # the number of the bucket that begins in 1970
AGE_S_MAX = 1e11
SERIES_MAX = (1 << 32) - 2  # ids of a bucket are 32 bits, from 1


class Rollup(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Where the samples of a rollup table come from: it has count, sum, min, max and last of each series and step.

    >>> metrics = store.series("metrics")
    >>> rollup = penstock.Rollup(source="metrics", step_s=300)
    >>> store.series("metrics_5m", options=penstock.SeriesOptions(rollup=rollup)).options.rollup.step_s
    300
    """

    source: str  # a series table
    step_s: int  # divides an hour

    def __post_init__(self) -> None:
        if not isinstance(self.source, str) or not self.source:  # type: ignore[redundant-expr]
            raise Invalid(f"source of a rollup is the name of a series table, not {in_short(self.source)}")
        if HOUR_S % whole(self.step_s, "step_s of a rollup", 1, HOUR_S):
            raise Invalid(f"step_s of a rollup divides an hour, and {self.step_s} does not: use 60, 300 or 3600")


class SeriesOptions(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """How a series table stores its samples, and what it refuses. Fixed when the table is created.

    >>> week = store.series("week", options=penstock.SeriesOptions(bucket_s=3600, retention_s=7 * 86_400))
    >>> week.options.bucket_s
    3600
    """

    bucket_s: int = 86_400  # index and samples of this much time are stored, and dropped by retention, together
    window_s: float | None = None  # samples older than this, by the store's clock, are refused; None: none are
    future_s: float | None = 86_400.0  # samples later than this, by the store's clock, are refused; None: none are
    retention_s: float | None = None  # buckets whose samples are all older than this are deleted; None: never
    series_max: int = 10_000_000  # series in one bucket of a shard
    metric_series_max: int = 1_000_000  # series of one metric in one bucket of a shard
    rollup: Rollup | None = None  # computed from another table by jobs, and not written to
    changes: ChangeOptions | None = None  # of its change feed, if it has one; or say changes=True to `store.series`

    def __post_init__(self) -> None:
        whole(self.bucket_s, "bucket_s of a series table", BUCKET_S_MIN, BUCKET_S_MAX)
        for name in ("window_s", "future_s", "retention_s"):
            value = getattr(self, name)
            if value is not None:
                seconds(value, f"{name} of a series table", AGE_S_MAX, above_zero=name != "future_s")
        for name in ("series_max", "metric_series_max"):
            whole(getattr(self, name), f"{name} of a series table", 1, SERIES_MAX)
        if self.rollup is not None and not isinstance(self.rollup, Rollup):
            raise Invalid(f"rollup of a series table is a Rollup(source=, step_s=), not {in_short(self.rollup)}")
        if self.changes is not None and not isinstance(self.changes, ChangeOptions):
            raise Invalid(f"changes of a series table is a ChangeOptions(...), not {in_short(self.changes)}")

    @property
    def bucket_us(self) -> int:
        return self.bucket_s * SECOND_US

    def buckets(self, times: npt.NDArray[np.int64]) -> npt.NDArray[np.uint32]:
        """Return the number of the bucket of each time."""
        return (times // self.bucket_us + BUCKET_ZERO).astype(np.uint32)

    def by_bucket(self, times: npt.NDArray[np.int64]) -> Iterator[tuple[int, npt.NDArray[np.intp]]]:
        """Yield each bucket of some times, at least one, ascending, and the positions of its times, ascending."""
        buckets = self.buckets(times)
        order = np.argsort(buckets, kind="stable")
        numbers, starts = np.unique(buckets[order], return_index=True)
        yield from zip(numbers.tolist(), np.split(order, starts[1:]), strict=True)

    def bucket(self, time_us: int) -> int:
        """Return the number of the bucket of a time."""
        return time_us // self.bucket_us + BUCKET_ZERO

    def bucket_start(self, bucket: int) -> int:
        """Return the first time of a bucket."""
        return (bucket - BUCKET_ZERO) * self.bucket_us


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(SeriesOptions)


def check_series_options(options: Any) -> SeriesOptions:
    """Return options made of plain values; None means the defaults; `Invalid` for anything else."""
    if options is None:
        return SeriesOptions()
    if not isinstance(options, SeriesOptions):
        raise Invalid(f"options of a series table are a SeriesOptions(bucket_s=, ...), not {in_short(options)}")
    rollup = options.rollup
    ages = [None if age is None else float(age) for age in (options.window_s, options.future_s, options.retention_s)]
    return SeriesOptions(
        bucket_s=int(options.bucket_s),
        window_s=ages[0],
        future_s=ages[1],
        retention_s=ages[2],
        series_max=int(options.series_max),
        metric_series_max=int(options.metric_series_max),
        rollup=None if rollup is None else Rollup(source=str.__str__(rollup.source), step_s=int(rollup.step_s)),
        changes=change_options(options.changes or False),
    )


def encode_series_options(options: SeriesOptions) -> bytes:
    """Encode options for the ledger; without a change feed, as before there were any."""
    return _encode(options if options.changes is not None else msgspec.structs.astuple(options)[:-1])


def decode_series_options(data: bytes) -> SeriesOptions:
    """Decode the options of a series table."""
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, Invalid) as error:
        raise CorruptionError("series options", 0, f"they do not decode ({error})") from None
