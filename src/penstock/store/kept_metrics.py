"""Counters and histograms that outlive the process: the manifest adds up what each opening counted.

The manifest knows a metric by a number: the table it belongs to (or none), and a hash of its name and other labels. The
numbers of a table are read at its first use; an export adds them to what this process counted; `save` merges what is
new.

Thread: any; `_lock` guards all.
Invariants: (1) nothing is committed if nothing changed. (2) a crash loses the counts since the last `save`, nothing
else; a commit of unknown outcome counts as done, so that nothing is counted twice.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

from penstock.errors import OutcomeUnknown
from penstock.host import threads
from penstock.host.metrics import Distribution, Keep, MetricFamily, MetricSamples, MetricValue
from penstock.manifest.keys import WHOLE_STORE, MetricKey
from penstock.manifest.manifest import Manifest
from penstock.manifest.records import MetricDelta, MetricRecord

HASHED = 1 << 31  # numbers below it are those of `lsm.tree_jobs`


class KeptMetrics:
    """What all openings of a store counted. `scope_of` returns the id of a table by its name."""

    def __init__(
        self,
        manifest: Manifest,
        scope_of: Callable[[str], int | None],
        metrics_of: Callable[[int], Mapping[int, MetricRecord]],
    ) -> None:
        """`metrics_of`: those of a scope, as the manifest had them when the store was opened."""
        self._manifest = manifest
        self._scope_of = scope_of
        self._metrics_of = metrics_of
        self._lock = threads.lock("store.kept_metrics")
        self._earlier: dict[int, Mapping[int, MetricRecord]] = {}  # by scope: read before its first save
        self._saved: dict[MetricKey, MetricValue] = {}  # guarded by _lock: what of this opening is in the manifest

    def with_earlier(self, families: Iterable[MetricFamily]) -> list[MetricFamily]:
        """Return metrics of this opening with the counts of earlier ones."""
        return [self._with_earlier(family) if _is_kept(family) else family for family in families]

    def _with_earlier(self, family: MetricFamily) -> MetricFamily:
        samples: MetricSamples = {}
        for labels, key, value in self._keyed(family):
            earlier = self._earlier_of(key)
            samples[labels] = value if earlier is None else _sum(value, earlier)
        return replace(family, samples=samples)

    def _earlier_of(self, key: MetricKey) -> MetricRecord | None:
        """Return what earlier openings counted. A table's metrics are read at its first use, not at the opening."""
        earlier = self._earlier.get(key.scope)
        if earlier is None:
            earlier = self._earlier.setdefault(key.scope, self._metrics_of(key.scope))
        return earlier.get(key.kind)

    def save(self, families: Iterable[MetricFamily]) -> bool:
        """Merge what is new into the manifest; return whether there was anything to commit."""
        with self._lock:
            txn, values, changed = self._manifest.begin_write(), dict[MetricKey, MetricValue](), False
            for family in filter(_is_kept, families):
                for _, key, value in self._keyed(family):
                    self._earlier_of(key)  # before this opening's counts are among them
                    delta = _delta(value, self._saved.get(key))
                    if delta is not None:
                        txn.merge_metric(key, delta)
                        values[key] = value
                        changed = changed or family.keep is Keep.ALWAYS
            if not changed:
                return False
            try:
                txn.commit()
            except OutcomeUnknown:
                self._saved.update(values)
                raise
            self._saved.update(values)
            return True

    def _keyed(self, family: MetricFamily) -> Iterator[tuple[tuple[str, ...], MetricKey, MetricValue]]:
        """Yield (labels, key, value) of each sample whose table exists."""
        at = family.labels.index("table") if "table" in family.labels else None
        for labels, value in family.samples.items():
            scope = WHOLE_STORE if at is None else self._scope_of(labels[at])
            if scope is not None:
                rest = [text for number, text in enumerate(labels) if number != at]
                yield labels, MetricKey(scope, number_of(family.name, rest)), value


def number_of(name: str, labels: Iterable[str]) -> int:
    """Return the number of a metric in the manifest; a test holds that no two share one."""
    return HASHED | zlib.crc32("\0".join((name, *labels)).encode())


def _is_kept(family: MetricFamily) -> bool:
    return family.kind != "gauge" and family.keep is not Keep.ELSEWHERE


def _delta(value: MetricValue, saved: MetricValue | None) -> MetricDelta | None:
    """Return what a metric counted since it was saved; None if nothing."""
    if isinstance(value, Distribution):
        before = saved.counts if isinstance(saved, Distribution) else (0,) * len(value.counts)
        total = saved.sum if isinstance(saved, Distribution) else 0.0
        counts = tuple(now - then for now, then in zip(value.counts, before, strict=True))
        count = sum(counts)
        return MetricDelta(value.sum - total, count, value.min, value.max, counts) if count else None
    new = float(value) - (saved if isinstance(saved, (int, float)) else 0.0)
    return MetricDelta(new, 1, new, new) if new > 0 else None


def _sum(value: MetricValue, earlier: MetricRecord) -> MetricValue:
    if not isinstance(value, Distribution):
        total = value + earlier.sum
        return int(total) if isinstance(value, int) else total
    counts = [*earlier.bucket_counts, *[0] * len(value.counts)]
    added = tuple(now + then for now, then in zip(value.counts, counts, strict=False))
    return Distribution(
        value.bounds, added, value.sum + earlier.sum, min(value.min, earlier.min), max(value.max, earlier.max)
    )
