"""The settings of a store's archive, and reports of its work.

Thread: immutable values.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.arguments import DAY_S, SIZE_MAX, in_short, set_seconds, set_wholes
from penstock.errors import Invalid
from penstock.manifest.records import ArchivePolicy

_TIME_S_MAX = 36_500 * DAY_S


@dataclass(frozen=True, kw_only=True)
class ArchiveSettings:
    """How a store uses its archive: `penstock.open(path, archive="s3://bucket/prefix")`.

    >>> archive = penstock.ArchiveSettings(interval_s=600, policy=penstock.ArchivePolicy(evict_after_ms=86_400_000))
    >>> penstock.StoreSettings(archive=archive).archive.interval_s
    600.0
    """

    interval_s: float | None = 3_600.0  # between two runs that the store makes by itself; None: none
    policy: ArchivePolicy = field(default_factory=ArchivePolicy)  # of tables without one: `store.alter(archive=...)`
    cache_bytes_max: int = 4 << 30  # of files that were fetched to be read
    runs_kept: int = 2  # from which the store can be reattached
    grace_s: float = DAY_S  # before an object that nothing names is deleted
    request_timeout_s: float = 120.0  # of one request to the object store
    timeout_s: float = 300.0  # of all attempts at one request
    attempts_max: int = 6

    def __post_init__(self) -> None:
        if self.interval_s is not None:
            set_seconds(self, ["interval_s"], _TIME_S_MAX, above_zero=True)
        set_wholes(self, ["cache_bytes_max"], 0, SIZE_MAX)
        set_wholes(self, ("runs_kept", "attempts_max"), 1, 1_000)
        set_seconds(self, ["grace_s"], _TIME_S_MAX)
        set_seconds(self, ("request_timeout_s", "timeout_s"), DAY_S, above_zero=True)
        if not isinstance(self.policy, ArchivePolicy):
            raise Invalid(f"policy is a penstock.ArchivePolicy(...), not {in_short(self.policy)}")


@dataclass(frozen=True, kw_only=True)
class ArchiveReport:
    """An archive run that was made: the store can be reattached as of its LSN.

    >>> report = store.archive()
    >>> report.number
    1
    """

    number: int
    lsn: int  # it holds everything up to here, in every table
    files: int  # of the run
    bytes: int
    files_uploaded: int  # the others are in the archive since earlier runs
    bytes_uploaded: int


@dataclass(frozen=True, kw_only=True)
class EvictReport:
    """Files that left the store's folder.

    >>> report = store.archive()
    >>> store.evict("users").bytes >= 0
    True
    """

    files: int
    bytes: int
    kept: int  # archived files that stay, because a snapshot, a backup or a compaction needs them


@dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """What a check of archived objects found.

    >>> report = store.archive()
    >>> store.verify_archive().damage
    []
    """

    objects: int
    bytes: int
    damage: list[tuple[str, str]]  # the URL of an object, and what is wrong with it
