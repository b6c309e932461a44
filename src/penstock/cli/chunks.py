"""`penstock chunks …` and `penstock reattach`: the immutable files of tables, and the archive that they go to.

Thread: one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import penstock
from penstock.cli.app import app, group
from penstock.cli.maintenance import Json, report_fields, unfinished
from penstock.cli.output import Output
from penstock.cli.session import Limit, Session, command

chunks_group = group("chunks", "The files that never change.")

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
Table = Annotated[str | None, typer.Option(help="of one table; of all by default")]


@command(chunks_group, "list")
def list_chunks(
    session: Session,
    table: Annotated[str | None, typer.Argument(help="a table; all by default")] = None,
    limit: Limit = None,
) -> None:
    """List the files that never change, by table, shard and level; of a queue, those that get no more messages."""
    store = session.store
    names = [table] if table is not None else store.tables()
    rows = (tuple(getattr(chunk, name) for name in CHUNK_COLUMNS) for each in names for chunk in store.chunks(each))
    none = "there are none: rows are in the journal until they are flushed to files"
    session.out.rows(CHUNK_COLUMNS, rows, limit=session.out.limit(limit), none=none)


@command(chunks_group, "verify")
def verify_chunks(
    session: Session, table: Annotated[str | None, typer.Argument(help="a table; all by default")] = None
) -> None:
    """Read every file that never changes and list those that are damaged; the exit code is 1 if any is."""
    store = session.store
    names = [table] if table is not None else store.tables()
    stems = {chunk.file.removesuffix(".sst") for each in names for chunk in store.chunks(each)}
    with session.out.progress("reading", left="nothing was changed"):
        report = store.check()
    damage = [file for file in report.damage if any(stem in file.path for stem in stems)]  # or of its index
    if session.out.json:
        files = [{"path": file.path, "reason": file.reason} for file in damage]
        session.out.document({"well": not damage, "chunks": len(stems), "damage": files})
    else:
        for file in damage:
            print(f"{file.path}: {file.reason}")
        if not damage:
            print(f"{len(stems):,} files, all is well")
    if damage:
        raise typer.Exit(1)


@command(chunks_group)
def archive(session: Session) -> None:
    """Upload what the archive lacks, verified, and the store as of one LSN."""
    with session.out.progress("uploading"):
        report = session.store.archive()
    session.out.done(
        f"run {report.number} at LSN {report.lsn}: {report.files:,} files, {report.files_uploaded:,} of "
        f"{report.bytes_uploaded:,} bytes uploaded",
        **report_fields(report),
    )


@command(chunks_group, "verify-archive")
def verify_archive(session: Session, table: Table = None) -> None:
    """Read archived objects and compare checksums; the exit code is 1 if one is damaged or missing."""
    with session.out.progress("reading the archive", left="nothing was changed"):
        report = session.store.verify_archive(table)
    if session.out.json:
        session.out.document(report_fields(report))
    else:
        for where, reason in report.damage:
            print(f"{where}: {reason}")
        print(f"{report.objects:,} objects of {report.bytes:,} bytes, {len(report.damage):,} damaged")
    if report.damage:
        raise typer.Exit(1)


@command(chunks_group)
def evict(
    session: Session,
    table: Table = None,
    local_bytes: Annotated[int, typer.Option(help="that each table keeps in the folder")] = 0,
) -> None:
    """Remove archived files from the folder; reading fetches them again."""
    with session.out.progress("evicting"):
        report = session.store.evict(table, local_bytes=local_bytes)
    session.out.done(
        f"{report.files:,} files of {report.bytes:,} bytes left the folder, {report.kept:,} are needed",
        **report_fields(report),
    )


@command(chunks_group)
def rehydrate(session: Session, table: Table = None) -> None:
    """Fetch evicted files into the folder again."""
    with session.out.progress("fetching"):
        size = session.store.rehydrate(table)
    session.out.done(f"{size:,} bytes fetched", bytes=size)


@command(chunks_group)
def collect(session: Session) -> None:
    """Delete archived objects that nothing needs any more, after their grace period."""
    with session.out.progress("collecting"):
        count = session.store.collect_archive()
    session.out.done(f"{count:,} objects deleted", objects=count)


@app.command()
def reattach(
    url: Annotated[str, typer.Argument(help="of an archive, like s3://bucket/prefix")],
    store: Annotated[Path, typer.Argument(help="the folder of the new store, absent or empty")],
    uuid: Annotated[str | None, typer.Option(help="of the archived store, if the archive has several")] = None,
    number: Annotated[int | None, typer.Option(help="of the archive run; the newest by default")] = None,
    json: Json = False,
) -> None:
    """Make a store from its archive, after its disk was lost."""
    out = Output(json=json)
    with out.progress("fetching", left=lambda: unfinished(store, ".reattaching")):
        report = penstock.reattach(url, store, store=uuid, number=number)
    out.done(
        f"run {report.number}, as of LSN {report.lsn}: {report.files:,} files of {report.bytes:,} bytes fetched, "
        f"{report.evicted:,} stay in the archive until they are read",
        **report_fields(report),
    )
