"""Answers clients that look at background work and files: jobs and chunks.

Thread: any. A client sees the jobs of tables that it may read; to retry one needs the right to administer every table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from penstock.errors import PenstockError
from penstock.protocol import wire
from penstock.registry import check_name
from penstock.server.rights import ADMIN, READ, Rights
from penstock.server.work import Work
from penstock.store.reports import ChunkSummary, JobSummary
from penstock.store.store import Store


class JobRequests:
    """The requests about jobs and chunks. `fault` words an error for a client."""

    def __init__(self, store: Store, fault: Callable[[PenstockError, Rights], wire.ErrorMessage]) -> None:
        self._store = store
        self._fault = fault

    @property
    def answers(self) -> dict[type, Callable[[Any, Work], Any]]:
        return {
            wire.ListJobs: self._list_jobs,
            wire.RetryJob: self._retry_job,
            wire.RunJobs: self._run_jobs,
            wire.ListChunks: self._list_chunks,
        }

    def _list_jobs(self, _: wire.ListJobs, work: Work) -> list[JobSummary]:
        rights = work.rights
        rights.check_anywhere(READ)
        return [
            replace(one, error=self._fault(PenstockError(one.error), rights).message) if one.error else one
            for one in self._store.jobs()
            if (rights.allows(READ, one.table) if one.table else rights.allows_everywhere(READ))
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
