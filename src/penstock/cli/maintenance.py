"""`penstock check|backup|restore|salvage|resume|repair|keep-snapshot|recover|metrics`: care of a store.

Thread: one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

import penstock
from penstock.cli import disk_campaign
from penstock.cli.app import app
from penstock.cli.output import Output
from penstock.cli.session import Name, Session, command
from penstock.errors import Invalid

Json = Annotated[bool, typer.Option("--json", envvar="PENSTOCK_JSON", help="print JSON, an object a line")]
Keys = Annotated[
    str | None, typer.Option(envvar="PENSTOCK_KEYS", help="master keys of encrypted tables: file:PATH or env:NAME")
]
BACKUPS = "BACKUPS"  # a file in every folder of backups


@command(app)
def check(
    session: Session,
    number: Annotated[int | None, typer.Option(help="of a backup; the newest by default")] = None,
    campaign: Annotated[
        bool, typer.Option("--campaign", help="STORE is a folder on a disk: kill a store that writes there, and verify")
    ] = False,
    seconds: Annotated[float, typer.Option(min=1, max=86_400, help="of a campaign")] = 60.0,
) -> None:
    """Read every file of a store, or of a backup, and list what is damaged; the exit code is 1 if anything is."""
    out = session.out
    if campaign:
        with out.progress("trying the disk", left="the store of the trial was removed"):
            counts = disk_campaign.run(session.folder, seconds)
        out.done(
            f"{counts['kills']:,} kills, {counts['batches']:,} batches over four tables: nothing lost or doubled; "
            f"a sync takes {counts['sync_ms']} ms",
            **counts,
        )
        return
    if (Path(session.address) / BACKUPS).exists():
        with out.progress("checking", left="nothing was changed") as progress:
            damage = penstock.check_backup(session.folder, number=number, progress=progress)
        _report(out, [], damage)
        return
    if number is not None:
        raise Invalid(f"--number is of a backup, and {session.address} is not a folder of backups: omit it")
    with out.progress("checking", left="nothing was changed"):  # by the owner, which does not say how far it is
        report = session.store.check()
    for orphan in report.orphans:
        print(f"named by nothing: {orphan}", file=sys.stderr)
    _report(out, report.troubles, report.damage)


@command(app)
def backup(
    session: Session,
    target: Annotated[Path, typer.Argument(help="a folder for backups of this store, created if absent")],
    keep: Annotated[int | None, typer.Option(help="remove all but this many of the newest backups")] = None,
) -> None:
    """Copy a store as of one LSN, while it is in use; only what changed since the last backup is copied."""
    left = f"{target} holds every earlier backup, and this one only if `penstock check {target}` finds it"
    with session.out.progress("copying", left=left):
        report = session.store.backup(target, keep=keep)
    session.out.done(
        f"backup {report.number} at LSN {report.lsn}: {report.files:,} files of {report.bytes:,} bytes, "
        f"{report.files_copied:,} of {report.bytes_copied:,} bytes copied",
        **report_fields(report),
    )


@app.command()
def restore(
    source: Annotated[Path, typer.Argument(help="a folder of backups")],
    store: Annotated[Path, typer.Argument(help="the folder of the new store, absent or empty")],
    number: Annotated[int | None, typer.Option(help="of the backup; the newest by default")] = None,
    json: Json = False,
) -> None:
    """Make a new store from a backup."""
    out = Output(json=json)
    with out.progress("restoring", left=lambda: unfinished(store, ".restoring")) as progress:
        report = penstock.restore(source, store, number=number, progress=progress)
    out.done(
        f"backup {report.number}, as of LSN {report.lsn}: {report.files:,} files of {report.bytes:,} bytes in {store}",
        **report_fields(report),
    )


@app.command()
def salvage(
    store: Annotated[Path, typer.Argument(help="the folder of a damaged store")],
    target: Annotated[Path, typer.Argument(help="the folder of a new store, absent or empty")],
    keys: Keys = None,
    json: Json = False,
) -> None:
    """Copy what can be read of a damaged store to a new one; the exit code is 1 if anything is lost."""
    out = Output(json=json)
    left = f"{target} is incomplete: remove it, then begin again; {store} was not changed"
    with out.progress("salvaging", left=left) as progress:
        report = penstock.salvage(store, target, keys=keys, progress=progress)
    if json:
        damage = [{"path": file.path, "reason": file.reason} for file in report.damage]
        out.document({"rows": report.rows, "damage": damage, "lost": list(report.lost)})
    else:
        out.rows(("table", "rows"), report.rows.items(), none="no rows were copied")
        for file in report.damage:
            print(f"{file.path}: {file.reason}")
        for lost in report.lost:
            print(f"lost: {lost}")
    if report.lost:
        raise typer.Exit(1)


@command(app)
def resume(session: Session, table: Name) -> None:
    """Let a paused table try again; print the troubles that remain."""
    _report(session.out, session.store.resume(table), [])


@command(app, "keep-snapshot")
def keep_snapshot(session: Session, table: Name) -> None:
    """Copy the files of a table, so that `repair` can restore it."""
    with session.out.progress("copying"):
        lsns = session.store.keep_snapshot(table)
    session.out.done(f"{table}: {len(lsns)} shards, at LSN {max(lsns)}", table=table, lsns=lsns)


@command(app)
def repair(session: Session, table: Name) -> None:
    """Replace the damaged files of a table by its snapshot; print the troubles that remain."""
    with session.out.progress("repairing"):
        troubles = session.store.repair(table)
    _report(session.out, troubles, [])


@command(app)
def recover(session: Session) -> None:
    """Let a store take writes again after a failed one, once its disk is healthy."""
    session.store.recover()
    session.out.done("the store takes writes", recovered=True)


@command(app)
def metrics(session: Session) -> None:
    """Print the metrics of a store in Prometheus' text format."""
    print(session.store.metrics.exposition(), end="")


def _report(out: Output, troubles: Iterable[Any], damage: Iterable[penstock.FileDamage]) -> None:
    """Print what is wrong, one line each; the exit code is 1 if anything is."""
    troubles, damage = list(troubles), list(damage)
    if out.json:
        out.document(
            {
                "well": not troubles and not damage,
                "troubles": [
                    {"table": trouble.table, "shard": trouble.shard, "lsn": trouble.lsn, "reason": trouble.reason}
                    for trouble in troubles
                ],
                "damage": [{"path": file.path, "reason": file.reason} for file in damage],
            }
        )
    elif not troubles and not damage:
        print("all is well")
    else:
        if troubles:
            out.rows(("table", "shard", "LSN", "what"), ((t.table, t.shard, t.lsn, t.reason) for t in troubles))
        for file in damage:
            print(f"{file.path}: {file.reason}")
    if troubles or damage:
        raise typer.Exit(1)


def unfinished(store: Path, suffix: str) -> str:
    """Return what Ctrl-C left of a store that is made beside its folder, and appears there when it is complete."""
    if (store / "STORE").exists():  # Ctrl-C came after the last step
        return f"{store} was made, and is complete"
    return f"{store} was not made: run the same command again, which begins anew, or remove {store}{suffix}"


def report_fields(report: Any) -> dict[str, Any]:
    """Return the fields of a report, for JSON."""
    return {name: getattr(report, name) for name in report.__dataclass_fields__}
