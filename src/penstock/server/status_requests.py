"""Answers clients that ask how the store is: its metrics, statistics and next view, its jobs and its files.

Thread: any. A client sees the tables that it may read, and what concerns the whole store if it may read any. To retry a
job needs the right to administer every table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from penstock.errors import PenstockError
from penstock.host.metrics import exposition
from penstock.protocol import wire
from penstock.registry import check_name
from penstock.server.rights import ADMIN, READ, Rights
from penstock.server.work import Work
from penstock.store.metrics import LEDGER_NAME
from penstock.store.reports import ChunkSummary, JobSummary, StoreStatistics
from penstock.store.store import Store
from penstock.store.views import StoreView


class StatusRequests:
    """The requests about the state of a store. `fault` words an error for a client."""

    def __init__(self, store: Store, fault: Callable[[PenstockError, Rights], wire.ErrorMessage]) -> None:
        self._store = store
        self._fault = fault

    @property
    def answers(self) -> dict[type, Callable[[Any, Work], Any]]:
        return {
            wire.ReadMetrics: self._metrics,
            wire.ReadStatistics: self._statistics,
            wire.AwaitView: self._await_view,
            wire.ListJobs: self._list_jobs,
            wire.RetryJob: self._retry_job,
            wire.RunJobs: self._run_jobs,
            wire.ListChunks: self._list_chunks,
        }

    def _metrics(self, _: wire.ReadMetrics, work: Work) -> str:
        work.rights.check_anywhere(READ)

        def allowed(table: str) -> bool:
            return table == LEDGER_NAME or work.rights.allows(READ, table)

        return exposition(self._store.metrics.read(allowed))

    def _statistics(self, _: wire.ReadStatistics, work: Work) -> StoreStatistics:
        rights = work.rights
        rights.check_anywhere(READ)
        now = self._store.statistics()
        partitions = tuple(
            replace(partition, error=self._worded(partition.error, rights))
            for partition in now.partitions
            if rights.allows(READ, partition.table)
        )
        return replace(now, error=self._worded(now.error, rights), partitions=partitions)

    def _await_view(self, request: wire.AwaitView, work: Work) -> StoreView:
        work.rights.check_anywhere(READ)
        if not request.timeout_s > 0:  # also if it is not a number
            return self._store.view()
        return self._store.wait_view(request.after, min(request.timeout_s, wire.VIEW_S_MAX))

    def _list_jobs(self, _: wire.ListJobs, work: Work) -> list[JobSummary]:
        rights = work.rights
        rights.check_anywhere(READ)
        return [
            replace(job, error=self._worded(job.error, rights))
            for job in self._store.jobs()
            if (rights.allows(READ, job.table) if job.table else rights.allows_everywhere(READ))
        ]

    def _retry_job(self, request: wire.RetryJob, work: Work) -> int:
        work.rights.check_everywhere(ADMIN)  # the number of a job may be that of any table
        return self._store.retry_job(request.job)

    def _run_jobs(self, request: wire.RunJobs, work: Work) -> int:
        work.rights.check(ADMIN, check_name(request.name))
        return self._store.run_jobs(request.name, timeout_s=request.timeout_s)

    def _list_chunks(self, request: wire.ListChunks, work: Work) -> list[ChunkSummary]:
        work.rights.check(READ, check_name(request.name))
        return self._store.chunks(request.name)

    def _worded(self, error: str, rights: Rights) -> str:
        return self._fault(PenstockError(error), rights).message if error else ""
