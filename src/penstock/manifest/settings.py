"""The settings of a manifest, checked once."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.arguments import COUNT_MAX, DAY_S, SIZE_MAX, in_short, set_seconds, set_wholes
from penstock.errors import Invalid

_COUNTS = ("channel_batches_max", "window_batches_max", "waiters_max", "readers_max", "backups_kept")


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
        set_wholes(self, ("map_bytes", "map_bytes_max"), 1 << 20, SIZE_MAX)
        if self.map_bytes > self.map_bytes_max:
            raise Invalid("map_bytes must be at most map_bytes_max")
        if not isinstance(self.headroom_ratio, float) or not 0.0 < self.headroom_ratio < 1.0:  # type: ignore[redundant-expr]
            raise Invalid(f"headroom_ratio is a number between 0 and 1, not {in_short(self.headroom_ratio)}")
        object.__setattr__(self, "headroom_ratio", float.__float__(self.headroom_ratio))
        set_wholes(self, _COUNTS, 1, COUNT_MAX)
        set_seconds(self, ["commit_latency_budget_s"], 60)
        set_seconds(self, ["reader_check_interval_s"], DAY_S, above_zero=True)
