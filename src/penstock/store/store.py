"""What users hold: an open store, with everything they can ask of it beside its tables.

Thread: any for everything.
Invariant: a store that was opened before a fork does not work in the child.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from types import TracebackType

from penstock.arguments import seconds
from penstock.coordinator import Durability
from penstock.host import threads
from penstock.host.clock import Clock, SystemClock
from penstock.host.file_errors import translate_os_errors
from penstock.host.files import FileSystem
from penstock.host.os_files import OsFileSystem
from penstock.host.randomness import Random, system_random
from penstock.kinds import partitions_of
from penstock.lsm.manual_compaction import CompactionReport, compact_trees
from penstock.manifest.engine import EngineOpener
from penstock.manifest.environment import LmdbEngine
from penstock.partition.aside import Trouble
from penstock.partition.checkpoint import CheckpointReport
from penstock.partition.ledger import TableInfo
from penstock.store.opening import OpenedParts
from penstock.store.port import LocalPort
from penstock.store.settings import StoreSettings

COMPACT_WAIT_S = 60.0  # for others that work on the table


def open_store(
    path: str,
    *,
    settings: StoreSettings | None = None,
    fs: FileSystem | None = None,
    clock: Clock | None = None,
    random: Random | None = None,
    engine: EngineOpener = LmdbEngine,
) -> Store:
    """Be the owner of the store in `path`; it is made if there is none."""
    fs, clock, random = fs or OsFileSystem(), clock or SystemClock(), random or system_random()
    chosen = settings or StoreSettings()

    def opened() -> Store:
        with translate_os_errors():
            return Store(str(path), settings=chosen, fs=fs, clock=clock, random=random, engine=engine)

    # Nothing stands between this call and the caller: an interrupt there would leave a store open that nobody has.
    return threads.run_uninterrupted(opened, undo=Store.close)


class Store(OpenedParts):
    """An open store."""

    # -- maintenance by hand

    def checkpoint(self) -> CheckpointReport:
        """Drop all of the journal that can be dropped, now."""
        self._check_usable()
        with translate_os_errors():
            return threads.run_uninterrupted(lambda: self._checkpoint.run(everything=True))

    def compact(self, name: str, *, timeout_s: float = COMPACT_WAIT_S) -> CompactionReport:
        """Bring a table into as few files as possible; what was done. `GateShut` if others work on it for too long."""
        wanted, timeout_s = self._info(name), seconds(timeout_s, "timeout_s", math.inf)
        with translate_os_errors():
            return self._compact(wanted, timeout_s)

    def _compact(self, wanted: TableInfo, timeout_s: float) -> CompactionReport:
        for partition in partitions_of(wanted):
            self._dispatcher.partition(partition)  # a shard that nobody has used yet has files, too
        trees = [tree for tree, catalog in self._maintenance.trees() if catalog.db_id == wanted.table]
        cancelled: list[bool] = []
        compaction = partial(compact_trees, self._maintenance, trees, clock=self._clock, timeout_s=timeout_s)
        return threads.run_uninterrupted(
            lambda: compaction(stop=lambda: bool(cancelled)), cancel=lambda: cancelled.append(True)
        )

    def recover(self) -> None:
        """Go on after a failed write: what was kept is written again."""
        self._check_usable()
        self._coordinator.recover()

    def resume(self, name: str) -> list[Trouble]:
        """Let a paused table try again; what is wrong with it all the same, see `check`."""
        info = self._info(name)
        self._dispatcher.resume(info.table)
        self._port.applied()
        return [trouble for trouble in self.check() if trouble.table == info.name]

    def check(self) -> list[Trouble]:
        """What stands between users and what was acknowledged: nothing, if all is well.

        Entries that were set aside are not tried again, because later ones were applied without them: their bytes stay
        in the folder `aside` of the store.
        """
        self._check_usable()
        return self._dispatcher.troubles()

    # -- for who serves it

    @property
    def port(self) -> LocalPort:
        return self._port

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def clock(self) -> Clock:
        return self._clock

    @property
    def files(self) -> FileSystem:
        return self._fs

    @property
    def durability(self) -> Durability:
        """How safe an acknowledged write is."""
        return self._flusher.durability

    def check_folder(self) -> None:
        """`Closed` if the folder at this path is not the one that was opened: it was moved, deleted or replaced."""
        self._lock.check()

    def at_close(self, act: Callable[[], object]) -> None:
        """Do something when the store closes: writes are in by then, and its parts still there."""
        self._parts.callback(act)

    # -- a block

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
