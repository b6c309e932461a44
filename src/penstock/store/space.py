"""Handles a disk that gets full, and one that has space again.

While space is short, few writes may wait in memory: they must fit on the disk, or at last in the reserve, because
deletes are written after them. On a full disk the reserve is released, writes that grow the store are refused, and
deletes continue. Journal space that they free is released at once. When the reserve can be claimed again, writes are
accepted again.

Thread: `check` and `release_reserve` by the threads that flush and apply; `reclaim` by one scheduler task, or opening.
Invariant: nothing here repeats a failed fsync: a repeated write uses a new segment.
"""

from __future__ import annotations

import logging
from contextlib import suppress

from penstock.errors import DiskFull, PenstockError
from penstock.host.clock import Clock
from penstock.host.file_errors import ran_out_of_space
from penstock.partition.checkpoint import Checkpoint
from penstock.partition.dispatcher import Dispatcher
from penstock.store.flusher import Coordinator
from penstock.store.port import LocalPort
from penstock.store.reserve import Reserve

logger = logging.getLogger(__name__)

SHORT_RATIO = 4  # space is short below this many times the bytes that may wait to be written
WAITING_PART = 8  # then 1/8 of the free space may wait
WAITING_BYTES_MIN = 64 << 10  # but at least this much
RECLAIM_PAUSE_S = 2.0  # between attempts: each of them needs some of the space that is left


class DiskSpace:
    """The disk space of one store."""

    def __init__(
        self,
        path: str,
        reserve: Reserve,
        *,
        coordinator: Coordinator,
        port: LocalPort,
        dispatcher: Dispatcher,
        checkpoint: Checkpoint,
        clock: Clock,
        waiting_bytes_max: int,
    ) -> None:
        self._path = path
        self._reserve = reserve
        self._coordinator = coordinator
        self._port = port
        self._dispatcher = dispatcher
        self._checkpoint = checkpoint
        self._clock = clock
        self._short_bytes = SHORT_RATIO * waiting_bytes_max
        self._short = False
        self._reclaimed_lsn = 0  # up to where the journal was dropped while the disk was full
        self._reclaim_s = 0.0  # when that is tried next

    def begin(self) -> None:
        """At opening: claim the reserve; if the disk is still full, accept only deletes."""
        self.claim_reserve()
        if self._reserve.lacks_space():
            self._refuse_growth()

    def check(self) -> None:
        """While space is short, limit the waiting writes to what the disk and the reserve can hold."""
        free = self._reserve.free_bytes()
        if free is not None and free < self._short_bytes:
            self._short = True
            self._coordinator.limit_bytes(max(self._reserve.size_bytes // 4, free // WAITING_PART, WAITING_BYTES_MIN))
        elif self._short:
            self._short = False
            self._coordinator.limit_bytes(None)

    def release_reserve(self) -> bool:
        """On a full disk: release the reserve for waiting writes and deletes, and refuse other writes."""
        self._refuse_growth()
        return self._reserve.release()

    def _refuse_growth(self) -> None:
        self._port.read_only = DiskFull(f"the disk of {self._path} is full: only deletes are taken; free some space")

    def claim_reserve(self) -> None:
        """Claim the reserve again if it was released; then accept writes again."""
        if self._reserve.claim():
            self._port.read_only = None

    def reclaim(self) -> None:
        """Write what waits for space, and release what deletes have freed."""
        self.check()
        if self._dispatcher.out_of_space():
            self.release_reserve()
        if ran_out_of_space(self._coordinator.failure):
            self.release_reserve()
            with suppress(PenstockError):  # there is no space yet
                self._coordinator.recover()
        now_s, lsn = self._clock.monotonic_s(), self._dispatcher.ledger.tree.lsn
        if self._port.read_only is not None and lsn != self._reclaimed_lsn and now_s >= self._reclaim_s:
            self._reclaim_s = now_s + RECLAIM_PAUSE_S
            self._reclaim_journal(lsn)
        self.claim_reserve()

    def _reclaim_journal(self, lsn: int) -> None:
        """Drop the journal. Nothing is spilled: that would take space."""
        try:
            self._checkpoint.clear()
            self._reclaimed_lsn = lsn
        except (OSError, PenstockError) as error:
            logger.warning("%s: the journal keeps its space for now (%s)", self._path, error)
