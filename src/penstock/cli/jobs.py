"""`penstock jobs …` and `penstock chunks …`: background work, and the files that it makes.

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
chunks_group = group("chunks", "The files that never change.")

JOB_COLUMNS = ("job", "kind", "table", "state", "attempts", "created", "finished", "error")
CHUNK_COLUMNS = (
    "table",
    "shard",
    "level",
    "chunk",
    "rows",
    "size_bytes",
    "deletes",
    "lsn_min",
    "lsn_max",
    "residency",
    "object",
)


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


@command(chunks_group, "list")
def list_chunks(
    session: Session,
    table: Annotated[str | None, typer.Argument(help="a table; all by default")] = None,
    limit: Limit = None,
) -> None:
    """List the files that never change, by table, shard and level; of a queue, those that get no more messages."""
    store = session.store
    names = [table] if table is not None else store.tables()
    rows = (tuple(getattr(one, name) for name in CHUNK_COLUMNS) for each in names for one in store.chunks(each))
    none = "there are none: rows are in the journal until they are flushed to files"
    session.out.rows(CHUNK_COLUMNS, rows, limit=session.out.limit(limit), none=none)


@command(chunks_group, "verify")
def verify_chunks(
    session: Session, table: Annotated[str | None, typer.Argument(help="a table; all by default")] = None
) -> None:
    """Read every file that never changes and list those that are damaged; the exit code is 1 if any is."""
    store = session.store
    names = [table] if table is not None else store.tables()
    stems = {one.file.removesuffix(".sst") for each in names for one in store.chunks(each)}
    with session.out.progress("reading", left="nothing was changed"):
        report = store.check()
    damage = [one for one in report.damage if any(stem in one.path for stem in stems)]  # or of its index
    if session.out.json:
        found = [{"path": one.path, "reason": one.reason} for one in damage]
        session.out.document({"well": not damage, "chunks": len(stems), "damage": found})
    else:
        for one in damage:
            print(f"{one.path}: {one.reason}")
        if not damage:
            print(f"{len(stems):,} files, all is well")
    if damage:
        raise typer.Exit(1)
