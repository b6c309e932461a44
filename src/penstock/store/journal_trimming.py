"""When the journal is cut: periodically, more of it while the store is quiet, and at close.

Thread: the scheduler's, for `run`; the one that closes the store, for `at_close`, when no task runs any more.
"""

from __future__ import annotations

import logging
from contextlib import suppress

from penstock.errors import PenstockError
from penstock.host.clock import Clock
from penstock.host.files import FileSystem
from penstock.log.chain import is_segment
from penstock.lsm.tree import Tree
from penstock.partition.checkpoint import Checkpoint
from penstock.scheduler.task import Outcome, TaskLoad

logger = logging.getLogger(__name__)

LEAVE_BYTES = 4 << 20  # of journal at close: opening reads that much quickly
QUIET_BYTES = 16 << 20  # of journal that a quiet store keeps
QUIET_S = 30.0  # without a record until the store counts as quiet


class JournalTrimmer:
    """Decides when a checkpoint runs, and how much of the journal it leaves."""

    def __init__(self, checkpoint: Checkpoint, ledger: Tree, *, fs: FileSystem, root: str, clock: Clock) -> None:
        self._checkpoint = checkpoint
        self._ledger = ledger
        self._fs = fs
        self._root = root
        self._clock = clock
        self._seen_lsn, self._seen_s = -1, 0.0  # the last record that `run` saw, and when

    def run(self) -> Outcome:
        report = self._checkpoint.run()
        if self._is_quiet() and self._journal_bytes() > QUIET_BYTES:
            report = self._checkpoint.clear()  # a quiet store has no writers that this delays
        return TaskLoad.BUSY if report.segments_dropped else None

    def _is_quiet(self) -> bool:
        """Whether the last QUIET_S seconds brought no record."""
        now_s, lsn = self._clock.monotonic_s(), self._ledger.lsn
        if lsn != self._seen_lsn:
            self._seen_lsn, self._seen_s = lsn, now_s
        return now_s - self._seen_s >= QUIET_S

    def _journal_bytes(self) -> int:
        folder, size = f"{self._root}/journal", 0
        for name in filter(is_segment, self._fs.listdir(folder)):
            with suppress(FileNotFoundError):  # dropped meanwhile
                file = self._fs.open(f"{folder}/{name}")
                size += file.size()
                file.close()
        return size

    def at_close(self) -> None:
        """Spare the next opening a long journal. A failure loses nothing."""
        try:
            if self._journal_bytes() > LEAVE_BYTES:
                self._checkpoint.clear()
        except (OSError, PenstockError) as error:
            logger.warning("%s: the next opening reads the whole journal (%s)", self._root, error)
