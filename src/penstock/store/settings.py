"""The settings of a store.

Thread: immutable values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass, field

from penstock.archive.master_keys import Keys
from penstock.arguments import COUNT_MAX, DAY_S, SIZE_MAX, in_short, seconds, set_seconds, set_wholes, text
from penstock.coordinator import CoordinatorSettings
from penstock.errors import Invalid
from penstock.kinds import Kind
from penstock.log import LogSettings
from penstock.lsm.collection import CollectionSettings
from penstock.lsm.tree_settings import TreeSettings
from penstock.manifest.jobs import JobSettings
from penstock.manifest.settings import ManifestSettings
from penstock.partition.admission import DispatcherSettings
from penstock.partition.checkpoint import CheckpointSettings
from penstock.registry import check_settings
from penstock.scheduler.scheduler import SchedulerSettings
from penstock.store.archive_settings import ArchiveSettings
from penstock.store.statsd import parse_agent
from penstock.store.tracing import WriteStage

RESERVE_BYTES = 8 << 20  # held back, so that deletes can be written to a full disk
WRITE_BYTES_MAX = 128 << 20  # of one write, whatever the memory
FLUSH_BYTES = 8 << 20


@dataclass(frozen=True, kw_only=True)
class StoreSettings:
    """The settings of a store, checked when they are made.

    >>> settings = penstock.StoreSettings(memory_bytes_max=512 << 20, durable=True)
    >>> penstock.open("data/", settings=settings).close()
    """

    memory_bytes_max: int = 1 << 30  # that writing may use; writers wait rather than exceed it
    durable: bool = False  # whether every write waits until it is durable, by default
    journal: LogSettings = field(default_factory=LogSettings)
    dispatcher: DispatcherSettings = field(default_factory=DispatcherSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    collection: CollectionSettings = field(default_factory=CollectionSettings)
    manifest: ManifestSettings = field(default_factory=ManifestSettings)
    jobs: JobSettings = field(default_factory=JobSettings)
    scheduler: SchedulerSettings = field(default_factory=SchedulerSettings)
    task_intervals_s: Mapping[str, float] = field(default_factory=dict)  # of background tasks, by name; see `trigger`
    archive: ArchiveSettings = field(default_factory=ArchiveSettings)  # with `penstock.open(path, archive=...)`
    kinds: tuple[object, ...] = ()  # settings of kinds, like `QueueSettings()`: at most one of each type
    flush_interval_s: float = 0.1
    flush_bytes: int = FLUSH_BYTES  # pending writes of this size are flushed at once
    waiting_writes_max: int = 1_000  # writes that wait for memory; further ones are refused at once
    background: bool = True  # False: no threads; maintenance runs when it is called
    serve: bool = True  # whether `penstock.open` lets other processes of this user connect
    reserve_bytes: int = RESERVE_BYTES
    trust_clock: bool = False  # accept the wall clock, however far it is from the newest record
    offer_bytes_min: int = 256 << 20  # compactions of at least this size are offered to Spark drivers
    metrics_port: int | None = None  # of an HTTP endpoint /metrics for Prometheus; 0: any free port; None: no endpoint
    metrics_host: str = "127.0.0.1"  # the address that it listens on; others than loopback let everyone there read
    statsd: str | None = None  # ADDRESS:PORT of an agent that gets the metrics in datagrams; None: none does
    trace: Callable[[WriteStage], object] | None = None  # called with every stage of every write; must be quick
    keys: Keys | None = field(default=None, repr=False)  # master keys: file:PATH, env:NAME, a dict or a function
    encrypt: bool = False  # whether new tables are encrypted, unless they are created with encrypted=False
    queue: InitVar[object] = None  # the earlier spelling of `kinds=(QueueSettings(...),)`

    def __post_init__(self, queue: object) -> None:
        if queue is not None:
            object.__setattr__(self, "kinds", (*self.kinds, queue))
        set_wholes(self, ["memory_bytes_max"], 256 << 20, SIZE_MAX)
        set_wholes(self, ("reserve_bytes", "offer_bytes_min"), 0, SIZE_MAX)
        set_wholes(self, ["flush_bytes"], 1, self.pending_bytes_max)
        set_wholes(self, ["waiting_writes_max"], 0, COUNT_MAX)
        set_seconds(self, ["flush_interval_s"], DAY_S, above_zero=True)
        for name, kind in _SETTING_TYPES.items():
            if not isinstance(getattr(self, name), kind):
                raise Invalid(f"{name} is a {kind.__name__}, not {in_short(getattr(self, name))}")
        if self.metrics_port is not None:
            set_wholes(self, ["metrics_port"], 0, 65_535)
        text(self.metrics_host, "metrics_host", 255)
        if self.statsd is not None:
            parse_agent(self.statsd)
        if self.trace is not None and not callable(self.trace):
            raise Invalid(f"trace is a function that takes a WriteStage, not {in_short(self.trace)}")
        check_settings(self.kinds)
        if not isinstance(self.task_intervals_s, Mapping):
            raise Invalid(f"task_intervals_s maps names of tasks to seconds, not {in_short(self.task_intervals_s)}")
        for task, interval_s in self.task_intervals_s.items():
            text(task, "the name of a task", 127)
            seconds(interval_s, f"the interval of task {task}", DAY_S, above_zero=True)

    def of_kind(self, kind: Kind) -> object:
        """Return the settings of a kind: those given here, or its default."""
        return next((settings for settings in self.kinds if type(settings) is type(kind.settings)), kind.settings)

    # Memory is used by rows in memtables; by writes under way, in up to three copies (as written, encoded, and as a
    # journal record); and by a flush, with a copy of its memtable and one batch of a file.

    @property
    def coordinator(self) -> CoordinatorSettings:
        return CoordinatorSettings(
            flush_interval_s=self.flush_interval_s,
            flush_bytes=self.flush_bytes,
            bytes_max=self.pending_bytes_max,
            waiting_writes_max=self.waiting_writes_max,
            bytes_max_remedy="split it, or open the store with a larger memory_bytes_max"
            if self.memory_bytes_max < 12 * WRITE_BYTES_MAX
            else "split it, or use store.load",
        )

    @property
    def pending_bytes_max(self) -> int:
        """The limit for writes that are not applied yet."""
        return min(self.memory_bytes_max // 12, WRITE_BYTES_MAX)  # from 1 GiB on, the largest value fits

    @property
    def rows_bytes_max(self) -> int:
        """The limit for rows in memtables."""
        return self.memory_bytes_max // 2 - (32 << 20)

    @property
    def tree(self) -> TreeSettings:
        return TreeSettings(memtable_bytes=min(self.memory_bytes_max // 8, 128 << 20))


_SETTING_TYPES: dict[str, type] = {
    **dict.fromkeys(("durable", "background", "serve", "trust_clock", "encrypt"), bool),
    "journal": LogSettings,
    "dispatcher": DispatcherSettings,
    "checkpoint": CheckpointSettings,
    "collection": CollectionSettings,
    "manifest": ManifestSettings,
    "jobs": JobSettings,
    "scheduler": SchedulerSettings,
    "archive": ArchiveSettings,
    "kinds": tuple,
}
