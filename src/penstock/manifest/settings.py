"""The settings of a manifest, checked once."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.errors import Invalid


@dataclass(frozen=True, kw_only=True)
class ManifestSettings:
    """Limits and times of a manifest.

    >>> penstock.StoreSettings(manifest=penstock.ManifestSettings(backups_kept=4)).manifest.backups_kept
    4
    """

    map_bytes: int = 64 << 20  # initial; a limit, not an allocation
    map_bytes_max: int = 16 << 30
    headroom_ratio: float = 0.2  # the map grows when less than this is left
    channel_batches_max: int = 1024  # waiting commits; more raise Backpressure
    window_batches_max: int = 256  # commits that share one transaction
    commit_latency_budget_s: float = 0.003  # how long a window waits at most for further commits
    waiters_max: int = 4096
    readers_max: int = 1022
    reader_check_interval_s: float = 30.0
    backups_kept: int = 2

    def __post_init__(self) -> None:
        if not 1 << 20 <= self.map_bytes <= self.map_bytes_max:
            raise Invalid("map_bytes must be at least 1 MiB and at most map_bytes_max")
        if not 0.0 < self.headroom_ratio < 1.0:
            raise Invalid("headroom_ratio must be between 0 and 1")
        counts = (self.channel_batches_max, self.window_batches_max, self.waiters_max, self.readers_max)
        if min(*counts, self.backups_kept) < 1:
            raise Invalid("limits of a manifest must be at least 1")
        if not 0 <= self.commit_latency_budget_s <= 60 or not 0 < self.reader_check_interval_s <= 86_400:
            raise Invalid("a window waits for 0 to 60 s, and readers are checked at least once a day")
