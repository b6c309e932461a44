"""When the journal is cut: periodically, more of it while the store is quiet, and at close.

Thread: the scheduler's, for `due` and `run`; the one that closes the store, for `at_close`, when no task runs any more.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import suppress

from penstock.errors import PenstockError
from penstock.host.clock import Clock
from penstock.host.files import FileSystem
from penstock.log.chain import is_segment
from penstock.lsm.tree import Tree
from penstock.manifest.jobs import Lease
from penstock.manifest.records import JobKind
from penstock.partition.checkpoint import Checkpoint
from penstock.scheduler.durable_work import JobRequest
from penstock.scheduler.runner import JobResult
from penstock.scheduler.task import StopSignal

logger = logging.getLogger(__name__)

LEAVE_BYTES = 4 << 20  # of journal at close: opening reads that much quickly
QUIET_BYTES = 16 << 20  # of journal that a quiet store keeps
QUIET_S = 30.0  # without a record until the store counts as quiet


class JournalTrimmer:
    """Decides when a checkpoint runs, and how much of the journal it leaves: the durable work of checkpoints."""

    kind, task, interval_s = JobKind.CHECKPOINT, "checkpoint", 30.0

    def __init__(self, checkpoint: Checkpoint, ledger: Tree, *, fs: FileSystem, root: str, clock: Clock) -> None:
        self._checkpoint = checkpoint
        self._ledger = ledger
        self._fs = fs
        self._root = root
        self._clock = clock
        self._seen_lsn, self._seen_s = -1, 0.0  # the last record that `run` saw, and when

    def due(self) -> Iterable[JobRequest]:
        """Return a job if the journal can, or must, be cut."""
        is_quiet = self._is_quiet() and self._journal_bytes() > QUIET_BYTES
        return [JobRequest()] if is_quiet or self._checkpoint.is_due() else []

    def run(self, lease: Lease, stop: StopSignal) -> JobResult:
        """Cut the journal, as a job. The repair of one that ended half-way is the same."""
        self.trim()
        return JobResult.DONE

    def trim(self) -> None:
        """Cut the journal."""
        self._checkpoint.run()
        if self._is_quiet() and self._journal_bytes() > QUIET_BYTES:
            self._checkpoint.clear()  # a quiet store has no writers that this delays

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
