"""Series that were admitted and are not applied yet: limits count them from their admission.

A write that was admitted may still fail, and nobody says so here. So an entry is forgotten after ADMITTED_S seconds:
until then a failed write may count, and a repeated one counts once.

Thread: any, under `lock`; the thread that applies takes it, too, when series are new.
Invariant: while `lock` is held, a series that was applied is known to the shard, and is not in here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from penstock.host import threads
from penstock.series.keys import bucket_of

ADMITTED_S = 60
ADMITTED_MAX = 4_000_000  # the oldest are forgotten


class AdmittedSeries:
    """Admitted series of a shard, by their dictionary key, which names the bucket too."""

    def __init__(self) -> None:
        self.lock = threads.lock("series.admitted")
        self._until: dict[bytes, tuple[int, str]] = {}  # the time when it is forgotten, and the metric; oldest first
        # By bucket, and by bucket and metric. An interrupt may leave less here than in `_until`, never more.
        self._keys: dict[tuple[int, str | None], set[bytes]] = {}

    def __contains__(self, key: bytes) -> bool:
        return key in self._until

    def count(self, bucket: int, metric: str | None = None) -> int:
        """Return the number of series in a bucket, or of one metric in it."""
        return len(self._keys.get((bucket, metric), ()))

    def forget(self, time_us: int) -> None:
        """Forget series whose time is over."""
        over: list[bytes] = []
        for key, (until, _) in self._until.items():
            if until > time_us and len(self._until) - len(over) <= ADMITTED_MAX:
                break
            over.append(key)
        self.remove(over)

    def add(self, keys: Sequence[bytes], metrics: Sequence[str], time_us: int) -> None:
        """Add series, or admit them once more."""
        self.remove(keys)
        until = time_us + ADMITTED_S * 1_000_000
        for key, metric in zip(keys, metrics, strict=True):
            self._until[key] = until, metric
            for group in ((bucket_of(key), None), (bucket_of(key), metric)):
                self._keys.setdefault(group, set()).add(key)

    def remove(self, keys: Iterable[bytes]) -> None:
        """Remove series: they are applied."""
        for key in keys if self._until else ():
            known = self._until.get(key)
            if known is None:
                continue
            for group in ((bucket_of(key), None), (bucket_of(key), known[1])):
                members = self._keys.get(group, set())
                members.discard(key)
                if not members:
                    self._keys.pop(group, None)
            del self._until[key]
