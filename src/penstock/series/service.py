"""What the owner does for a series table: it deletes buckets by age.

Thread: the owner's, one at a time.
Invariant: retention is a record in the journal, so that every replica and replay deletes the same.
"""

from __future__ import annotations

from typing import Any, NoReturn

from penstock.errors import Invalid
from penstock.kinds import Host, TableService, partitions_of
from penstock.partition.ledger_records import TableInfo
from penstock.partition.pending import PendingGroup
from penstock.series.options import SECOND_US, decode_series_options
from penstock.series.section import BucketTrim, SeriesSection
from penstock.series.shard import SeriesLimits

TRIM_BYTES = 512


class SeriesService(TableService):
    """The service of one table."""

    def __init__(self, info: TableInfo, host: Host) -> None:
        self._info = info
        self._host = host

    def maintain(self) -> None:
        """Delete the buckets whose samples are all older than the retention."""
        info = self._host.port.table(self._info.name) or self._info  # as of now
        options, age_ms = decode_series_options(info.options), info.storage_options.retention.age_ms_max
        ages = [age for age in (options.retention_s, None if age_ms is None else age_ms / 1_000) if age is not None]
        if not ages:
            return
        floor = self._host.port.time_us() - round(min(ages) * SECOND_US)
        group = PendingGroup()
        for partition in partitions_of(self._info):
            machine: SeriesLimits = self._host.machine(partition)
            oldest = machine.oldest_bucket()
            if oldest is not None and options.bucket_start(oldest + 1) <= floor:
                group.sections[partition] = SeriesSection(BucketTrim(floor))
        if group.sections:
            self._host.port.submit(group, TRIM_BYTES * len(group.sections))

    def call(self, name: str, argument: bytes) -> bytes:
        _refuse(name)

    def perform(self, name: str, request: Any) -> Any:
        _refuse(name)

    def admit(self, name: str, argument: bytes) -> None:
        """Do nothing: a series table has no conditions."""

    def has_leases(self) -> bool:
        return False

    def close(self) -> None:
        """Do nothing: no call waits."""


def _refuse(name: str) -> NoReturn:
    raise Invalid(f"a series table takes no call {name!r}")
