"""Series that were admitted and are not applied yet: limits count them from their admission.

A write that was refused after its admission is withdrawn. One that failed otherwise may still be applied, and nothing
reports the outcome here: its series are forgotten after ADMITTED_S seconds, or somewhat later if they were admitted
again. Until then a failed write may count, and a repeated one counts once.

Thread: any, under `lock`; the thread that applies takes it, too, when series are new.
Invariant: while `lock` is held, a series that was applied is known to the shard, and is not in here; one that is being
applied is in here, and `SeriesLimits.series_count` leaves it out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import takewhile
from typing import TypeAlias

from penstock.host import threads

ADMITTED_S = 60
ADMITTED_MAX = 4_000_000  # series; more are all forgotten


SeriesKeys: TypeAlias = Mapping[int, Mapping[str, Collection[bytes]]]  # dictionary keys, by bucket and metric


class SeriesAdmission:
    """An admission of series to a shard."""

    __slots__ = ("series", "until_us")

    def __init__(self, series: SeriesKeys, until_us: int) -> None:
        self.series = series  # that were not here before
        self.until_us = until_us  # when they are forgotten


class AdmittedSeries:
    """Admitted series of a shard."""

    def __init__(self) -> None:
        self.lock = threads.lock("series.admitted")
        # The admission by bucket, metric and dictionary key; the oldest first. Guarded by lock.
        self._admissions: dict[int, dict[str, dict[bytes, SeriesAdmission]]] = {}

    def new(self, bucket: int, metric: str, keys: Collection[bytes]) -> int:
        """Return how many of some series of a metric are not here."""
        return len(set(keys).difference(self._admissions.get(bucket, {}).get(metric, ())))

    def count(self, bucket: int, metric: str | None = None) -> int:
        """Return the number of series in a bucket, or of one metric in it."""
        metrics = self._admissions.get(bucket, {})
        return sum(map(len, metrics.values())) if metric is None else len(metrics.get(metric, ()))

    def add(self, series: SeriesKeys, time_us: int) -> SeriesAdmission:
        """Add series. Those that are here already are admitted once more, and cannot be withdrawn: two writes wait."""
        until_us = time_us + ADMITTED_S * 1_000_000
        admission, again = SeriesAdmission(series, until_us), SeriesAdmission({}, until_us)
        for bucket, by_metric in series.items():
            metrics = self._admissions.setdefault(bucket, {})
            for metric, keys in by_metric.items():
                waiting = metrics.setdefault(metric, {})
                common = waiting.keys() & keys
                waiting.update(dict.fromkeys(keys, admission))
                waiting.update(dict.fromkeys(common, again))
        return admission

    def withdraw(self, admission: SeriesAdmission) -> None:
        """Remove the series of a write that will never be applied."""
        for bucket, by_metric in admission.series.items():
            for metric, keys in by_metric.items():
                waiting = self._admissions.get(bucket, {}).get(metric, {})
                for key in [key for key in keys if waiting.get(key) is admission]:
                    del waiting[key]
            self._drop_empty(bucket)

    def remove(self, bucket: int, keys: Collection[bytes]) -> None:
        """Remove series of a bucket that are applied."""
        metrics, applied = self._admissions.get(bucket, {}), frozenset(keys)
        for metric in list(metrics):
            for key in metrics[metric].keys() & applied:
                del metrics[metric][key]
        self._drop_empty(bucket)

    def forget(self, time_us: int) -> None:
        """Forget series whose time is over."""
        if sum(map(self.count, self._admissions)) > ADMITTED_MAX:
            self._admissions = {}
        for bucket in list(self._admissions):
            for waiting in self._admissions[bucket].values():
                for key, _ in list(takewhile(lambda item: item[1].until_us <= time_us, waiting.items())):
                    del waiting[key]
            self._drop_empty(bucket)

    def _drop_empty(self, bucket: int) -> None:
        metrics = self._admissions.get(bucket, {})
        for metric in [metric for metric, waiting in metrics.items() if not waiting]:
            del metrics[metric]
        if not metrics:
            self._admissions.pop(bucket, None)
