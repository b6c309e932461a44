"""The protocols between a series table's queries and its storage: a shard's snapshot, and its limits for admission.

Times are ranges [start, end) in microseconds. Labels are the canonical bytes of `labels.encode_labels`. Ids are of one
bucket: the same series has another id in another bucket, and only its labels say that it is the same. `check` is called
now and then, and raises when the query is out of time.

Thread: any; a snapshot does not change.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias

from penstock.kinds import ShardSnapshot
from penstock.series.admitted import AdmittedSeries
from penstock.series.blocks import RunSummaries
from penstock.series.index import Check, unchecked
from penstock.series.labels import U32, U64, LabelTable
from penstock.series.samples import I64, SampleSteps
from penstock.series.section import MetricMetadata
from penstock.series.selectors import Matcher

SampleColumns: TypeAlias = tuple[U32, I64, U64]  # ids, times, bits


class SeriesShard(ShardSnapshot, Protocol):
    """Read-only view of one shard of a series table at one LSN."""

    def match(
        self, matchers: Sequence[Matcher], start: int, end: int, check: Check = unchecked
    ) -> list[tuple[int, U32]]:
        """Return, for each bucket that overlaps the range, its number and the ids of matching series.

        Buckets ascend, ids ascend, and no entry is empty. A series may have no sample in the range.
        """

    def labels_of(self, bucket: int, ids: U32) -> list[bytes]:
        """Return the labels of each id."""

    def read(
        self, bucket: int, ids: U32, start: int, end: int, steps: SampleSteps | None = None
    ) -> Iterator[SampleColumns]:
        """Yield the samples of some ids in the range, ordered by id and time; a column has about 65,536 elements.

        With `steps`, samples that are not the last before a step may be left out.
        """

    def read_summarized(
        self, bucket: int, ids: U32, start: int, end: int, step_us: int
    ) -> Iterator[tuple[SampleColumns, RunSummaries]]:
        """Yield what `read` does, but summaries of runs that lie in one step (0: in the range), where that is possible.

        A summary stands for samples of one series that follow each other, none of which is a NaN.
        """

    def label_names(self, matchers: Sequence[Matcher], start: int, end: int, check: Check = unchecked) -> Iterable[str]:
        """Return the names of all labels of matching series, in any order."""

    def label_values(
        self, name: str, matchers: Sequence[Matcher], start: int, end: int, check: Check = unchecked
    ) -> Iterable[str]:
        """Return the distinct values of one label of matching series, in any order."""

    def label_codes(self, bucket: int, name: str, ids: U32, check: Check = unchecked) -> tuple[list[str], I64]:
        """Return values of a label, the first of which is "", and for each id the position of its value among them."""

    def metadata(self) -> Iterable[MetricMetadata]:
        """Return what was written about metrics, each once."""

    def statistics(self) -> dict[str, int]:
        """Return the numbers of `SeriesStatistics` that are sums over shards, and `runs`."""

    def metric_counts(self, start: int, end: int, check: Check = unchecked) -> Iterable[tuple[int, str, int]]:
        """Return (bucket, metric, number of series), for each bucket that overlaps the range."""


class SeriesLimits(Protocol):
    """What admission needs from a shard's state machine."""

    admitted: AdmittedSeries

    def series_exist(self, bucket: int, series: LabelTable) -> Any:
        """Return, for each series, whether it has samples in the bucket: an array of bool."""

    def series_count(self, bucket: int, metric: str | None = None) -> int:
        """Return the number of series in a bucket, or of one metric in it, that are not among `admitted`.

        Requires: `admitted.lock` is held.
        """

    def oldest_bucket(self) -> int | None:
        """Return the number of the oldest bucket; None if there is none."""
