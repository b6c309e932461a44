"""Series that were admitted and are not applied yet: limits count them from their admission.

A write that was admitted may still fail, and nobody says so here. So an entry is forgotten after ADMITTED_S seconds, or
somewhat later if it was admitted again: until then a failed write may count, and a repeated one counts once.

Thread: any, under `lock`; the thread that applies takes it, too, when series are new.
Invariant: while `lock` is held, a series that was applied is known to the shard, and is not in here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import takewhile

from penstock.host import threads

ADMITTED_S = 60
ADMITTED_MAX = 4_000_000  # series; more are all forgotten


class AdmittedSeries:
    """Admitted series of a shard."""

    def __init__(self) -> None:
        self.lock = threads.lock("series.admitted")
        # By bucket, metric and dictionary key, the time when it is forgotten; the oldest first. Guarded by lock.
        self._until: dict[int, dict[str, dict[bytes, int]]] = {}

    def new(self, bucket: int, metric: str, keys: Collection[bytes]) -> int:
        """Return how many of some series of a metric are not here."""
        return len(set(keys).difference(self._until.get(bucket, {}).get(metric, ())))

    def count(self, bucket: int, metric: str | None = None) -> int:
        """Return the number of series in a bucket, or of one metric in it."""
        metrics = self._until.get(bucket, {})
        return sum(map(len, metrics.values())) if metric is None else len(metrics.get(metric, ()))

    def add(self, bucket: int, series: Mapping[str, Collection[bytes]], time_us: int) -> None:
        """Add series, by metric; those that are here already are admitted once more."""
        metrics = self._until.setdefault(bucket, {})
        for metric, keys in series.items():
            metrics.setdefault(metric, {}).update(dict.fromkeys(keys, time_us + ADMITTED_S * 1_000_000))

    def remove(self, bucket: int, keys: Collection[bytes]) -> None:
        """Remove series of a bucket that are applied."""
        metrics, applied = self._until.get(bucket, {}), frozenset(keys)
        for metric in list(metrics):
            for key in metrics[metric].keys() & applied:
                del metrics[metric][key]
        self._drop_empty(bucket)

    def forget(self, time_us: int) -> None:
        """Forget series whose time is over."""
        if sum(map(self.count, self._until)) > ADMITTED_MAX:
            self._until = {}
        for bucket in list(self._until):
            for waiting in self._until[bucket].values():
                for key, _ in list(takewhile(lambda item: item[1] <= time_us, waiting.items())):
                    del waiting[key]
            self._drop_empty(bucket)

    def _drop_empty(self, bucket: int) -> None:
        metrics = self._until.get(bucket, {})
        for metric in [metric for metric, waiting in metrics.items() if not waiting]:
            del metrics[metric]
        if not metrics:
            self._until.pop(bucket, None)
