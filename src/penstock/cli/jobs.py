"""`penstock jobs …`: background work, what waits, what runs and what ended.

Thread: one.
"""

from __future__ import annotations

from datetime import UTC, datetime
from enum import Enum
from typing import Annotated, Any

import typer

from penstock.cli.app import group
from penstock.cli.session import Limit, Name, Session, command
from penstock.errors import NotFound

jobs_group = group("jobs", "Background work: what waits, what runs, what ended.")

JOB_COLUMNS = ("job", "kind", "table", "state", "attempts", "created", "finished", "error")


class JobState(Enum):
    """What a job is doing."""

    pending = "pending"
    running = "running"
    done = "done"
    failed = "failed"


def _moment(time_us: int | None) -> datetime | None:
    return None if time_us is None else datetime.fromtimestamp(time_us / 1e6, UTC)


def _job(job: Any) -> tuple[Any, ...]:
    created, finished = _moment(job.created_us), _moment(job.finished_us)
    return job.job, job.kind, job.table, job.state, job.attempts, created, finished, job.error


@command(jobs_group, "list")
def list_jobs(
    session: Session,
    state: Annotated[JobState | None, typer.Option(help="only these")] = None,
    table: Annotated[str | None, typer.Option(help="only of this table")] = None,
    limit: Limit = None,
) -> None:
    """List the jobs, the newest first."""
    jobs = reversed(session.store.jobs())
    matches = (job for job in jobs if table in (None, job.table) and (state is None or state.value == job.state))
    session.out.rows(JOB_COLUMNS, map(_job, matches), limit=session.out.limit(limit))


Job = Annotated[int, typer.Argument(min=1, help="the number of a job")]


@command(jobs_group, "show")
def show_job(session: Session, job: Job) -> None:
    """Print all that is known about a job."""
    info = next((entry for entry in session.store.jobs() if entry.job == job), None)
    if info is None:
        raise NotFound(f"there is no job {job}: finished ones are removed after a while; see `penstock jobs list`")
    fields = {name: getattr(info, name) for name in info.__dataclass_fields__}
    for name in ("created", "started", "finished"):
        fields[name] = _moment(fields.pop(f"{name}_us"))
    session.out.document(fields)


@command(jobs_group, "retry")
def retry_job(session: Session, job: Job) -> None:
    """Enqueue a job that failed for good once more."""
    new = session.store.retry_job(job)
    session.out.done(f"job {new} does again what job {job} did not", job=new, retries=job)


@command(jobs_group, "run")
def run_jobs(
    session: Session, table: Name, wait_s: Annotated[float, typer.Option(help="for other work on the table")] = 60.0
) -> None:
    """Flush a table and do the compactions that are due, now."""
    with session.out.progress("running jobs"):
        count = session.store.run_jobs(table, timeout_s=wait_s)
    session.out.done(f"{table}: flushed, {count:,} compactions", table=table, compactions=count)
