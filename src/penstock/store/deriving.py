"""Tables that are computed from others: a task enqueues a durable job for each, a runner runs it.

The parts of a job run on Spark if a driver is connected, otherwise in a process of this machine.

Thread: the scheduler's, or the caller's of `derive_now`.
Invariants: (1) a job that is repeated, after a failure or a crash at any point, computes the same: see `Derived`.
(2) one computation of a table at a time: an older one that commits last would show older results for a while.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from penstock.errors import KindMismatch, PenstockError, UniqueJobAlreadyPending
from penstock.kinds import Derivation, Derived
from penstock.manifest.jobs import JobQueue, Lease
from penstock.manifest.records import JobKind
from penstock.partition.ledger_records import TableInfo
from penstock.registry import kind_named
from penstock.scheduler.engines import Engines
from penstock.scheduler.offers import OfferBoard
from penstock.scheduler.runner import JobResult, JobRunner
from penstock.scheduler.task import Outcome, PeriodicTask, StopSignal, TaskLoad
from penstock.scheduler.work import WorkCancelled, WorkFailed, pack, perform, unpack
from penstock.store.port import LocalPort

logger = logging.getLogger(__name__)

TASK, RUNNER = "derived-tables", "derived-table-jobs"
INTERVAL_S = 10.0


class DerivedTables:
    """The computed tables of a store."""

    def __init__(self, port: LocalPort, jobs: JobQueue, engines: Engines, offers: OfferBoard, root: str) -> None:
        self._port = port
        self._jobs = jobs
        self._engines = engines
        self._offers = offers
        self._root = root
        self._turns: dict[int, threading.Lock] = {}  # by the id of a table

    def tasks(self) -> list[PeriodicTask | JobRunner]:
        """Return the task that enqueues jobs, and the runner of the jobs."""
        return [
            PeriodicTask(TASK, INTERVAL_S, self._enqueue),
            JobRunner(RUNNER, self._jobs, dict.fromkeys((int(JobKind.ROLLUP), int(JobKind.TRAIN)), self._handle)),
        ]

    def _enqueue(self) -> Outcome:
        enqueued = False
        for info in self._port.tables():
            kind = kind_named(info.kind, info.name)
            if isinstance(kind, Derived) and kind.is_derived(info) and kind.is_due(info, self._port):
                with suppress(UniqueJobAlreadyPending):
                    self._jobs.enqueue(kind.derived_by, db_id=info.table)
                    enqueued = True
        return None if enqueued else TaskLoad.IDLE  # not BUSY: a job is enqueued each time, needed or not

    def _handle(self, lease: Lease, stop: StopSignal) -> JobResult:
        info = self._port.table_by_id(lease.job.db_id or 0)
        while info is not None and not stop.is_set() and self._derive(info, lambda plan: self._run(plan, stop)):
            pass
        return JobResult.DONE

    def turn(self, info: TableInfo) -> threading.Lock:
        """Return the lock that is held while a computation of a table is planned, done and committed."""
        return self._turns.setdefault(info.table_id, threading.Lock())

    def derive_now(self, info: TableInfo) -> int:
        """Compute a table in this thread until it holds all that there is; return the number of commits."""
        kind = kind_named(info.kind, info.name)
        if not isinstance(kind, Derived) or not kind.is_derived(info):
            raise KindMismatch(f"table {info.name} is not computed from another one: write to it")
        count = 0
        while self._derive(info, self._run_here):
            count += 1
        return count

    def _derive(self, info: TableInfo, run: Callable[[Derivation], list[Any]]) -> bool:
        """Do the next computation of a table; return whether there was one."""
        kind = kind_named(info.kind, info.name)
        with self.turn(info):
            plan = kind.derive(info, self._port) if isinstance(kind, Derived) else None
            if plan is None:
                return False
            try:
                plan.commit(run(plan))
            finally:
                plan.close()
            return True

    def _run(self, plan: Derivation, stop: StopSignal) -> list[Any]:
        if self._offers.slots() and plan.parts:
            try:
                results: Any = self._offers.submit_parts(plan.function, plan.parts).wait(stop.is_set)
                return list(results)
            except WorkCancelled:
                raise
            except (PenstockError, OSError) as error:
                logger.warning("%s is done here, because a driver did not do it: %s", plan.function, error)
        engine = self._engines.get("process")
        handles = [engine.submit(plan.function, self._arguments(part.arguments)) for part in plan.parts]
        return [handle.wait(stop.is_set) for handle in handles]

    def _run_here(self, plan: Derivation) -> list[Any]:
        never = _Never()
        try:
            return [unpack(perform(plan.function, pack(self._arguments(part.arguments)), never)) for part in plan.parts]
        except WorkFailed as error:
            raise error.__cause__ or error from None

    def _arguments(self, packed: bytes) -> dict[str, Any]:
        arguments = unpack(packed)
        assert isinstance(arguments, dict)
        return {**arguments, "root": self._root}


class _Never:
    """A stop signal that is never given."""

    def is_set(self) -> bool:
        return False

    def wait(self, timeout: float | None = None) -> bool:
        return False
