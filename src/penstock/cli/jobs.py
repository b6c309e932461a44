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


def _job(one: Any) -> tuple[Any, ...]:
    created, finished = _moment(one.created_us), _moment(one.finished_us)
    return one.job, one.kind, one.table, one.state, one.attempts, created, finished, one.error


@command(jobs_group, "list")
def list_jobs(
    session: Session,
    state: Annotated[JobState | None, typer.Option(help="only these")] = None,
    table: Annotated[str | None, typer.Option(help="only of this table")] = None,
    limit: Limit = None,
) -> None:
    """List the jobs, the newest first."""
    jobs = reversed(session.store.jobs())
    wanted = (one for one in jobs if table in (None, one.table) and (state is None or state.value == one.state))
    session.out.rows(JOB_COLUMNS, map(_job, wanted), limit=session.out.limit(limit))


Job = Annotated[int, typer.Argument(min=1, help="the number of a job")]


@command(jobs_group, "show")
def show_job(session: Session, job: Job) -> None:
    """Print all that is known about a job."""
    found = next((one for one in session.store.jobs() if one.job == job), None)
    if found is None:
        raise NotFound(f"there is no job {job}: finished ones are removed after a while; see `penstock jobs list`")
    fields = {name: getattr(found, name) for name in found.__dataclass_fields__}
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
