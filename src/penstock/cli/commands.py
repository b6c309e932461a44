"""The commands. Those that read or write a store use `penstock.connect`: it may be open in another process.

Thread: one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

import penstock
from penstock.cli.formatting import format_value, parse_bytes
from penstock.client.certificates import SCHEME
from penstock.errors import Invalid, NotFound, Poisoned
from penstock.partition.aside import Trouble

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help="A Penstock store.")
console = Console(highlight=False)

Store = Annotated[Path, typer.Argument(help="the store's folder")]
Name = Annotated[str, typer.Argument(help="a table")]
Limit = Annotated[int, typer.Option(help="maximum number of rows")]


def _connect(path: Path) -> Any:
    return penstock.connect(path)


@app.command()
def tables(store: Store) -> None:
    """List the tables."""
    with _connect(store) as opened:
        out = Table("table", "kind", "shards")
        for info in opened.port.tables():
            out.add_row(info.name, info.kind, str(info.shards))
        console.print(out)


@app.command()
def scan(store: Store, table: Name, limit: Limit = 20, prefix: str = "", reverse: bool = False) -> None:
    """Print rows of a kv table in the order of their keys."""
    with _connect(store) as opened:
        rows = opened.kv(table, create=False).scan(prefix=parse_bytes(prefix), reverse=reverse, limit=limit)
        _print(("key", "value"), rows)


@app.command()
def select(store: Store, table: Name, selector: str, limit: Limit = 20) -> None:
    """Print samples of a series table, such as those of 'cpu{host="a"}'."""
    with _connect(store) as opened:
        batches = opened.series(table, create=False).scan_arrow(selector)
        samples = (row for batch in batches for row in batch.to_pylist())
        _print(("metric", "labels", "time", "value"), islice(map(_sample, samples), limit))


def _sample(row: dict[str, Any]) -> tuple[str, ...]:
    labels = ", ".join(f"{name}={value}" for name, value in row["labels"])
    return row["metric"], labels, row["time"].isoformat(), repr(row["value"])


@app.command()
def get(store: Store, table: Name, key: str) -> None:
    """Print the value of a key."""
    with _connect(store) as opened:
        value = opened.kv(table, create=False).get(parse_bytes(key))
        if value is None:
            raise NotFound(f"there is no key {key} in {table}")
        console.print(format_value(value), markup=False)


@app.command()
def put(store: Store, table: Name, key: str, value: str) -> None:
    """Set a key of a kv table that holds bytes or text, durably."""
    with _connect(store) as opened:
        kv = opened.kv(table, create=False)
        text = kv.schema.field("value").type == "string"
        kv.put(parse_bytes(key), value if text else parse_bytes(value), durable=True)


@app.command()
def delete(store: Store, table: Name, key: str) -> None:
    """Remove a key of a kv table, durably."""
    with _connect(store) as opened:
        opened.kv(table, create=False).delete(parse_bytes(key), durable=True)


@app.command()
def read(
    store: Store, queue: Name, limit: Limit = 20, shard: int = 0, start: Annotated[int, typer.Option()] = 1
) -> None:
    """Print messages of a queue."""
    with _connect(store) as opened:
        messages = opened.queue(queue, create=False).read(shard, start, limit)
        rows = ((message.sequence, message.time_us, message.key or b"", message.payload) for message in messages)
        _print(("sequence", "time", "key", "payload"), rows)


@app.command()
def send(store: Store, queue: Name, payload: str, key: str = "") -> None:
    """Append a message to a queue; print its position."""
    with _connect(store) as opened:
        where = opened.queue(queue, create=False).append(parse_bytes(payload), key=parse_bytes(key) if key else None)
        console.print(f"shard {where.shard}, sequence {where.sequence}, LSN {where.lsn}")


@app.command()
def queue(store: Store, name: Name) -> None:
    """Print the size of a queue, and the positions of its consumers."""
    with _connect(store) as opened:
        numbers = opened.queue(name, create=False).statistics()
        console.print(f"{numbers.messages:,} messages in {numbers.files} files, {numbers.bytes:,} bytes")
        rows = ((c.consumer, c.shard, c.mode, c.floor, c.lag) for c in numbers.consumers)
        _print(("consumer", "shard", "mode", "position", "lag"), rows)


@app.command()
def drop(store: Store, table: Name, yes: Annotated[bool, typer.Option("--yes", help="do not ask")] = False) -> None:
    """Delete a table and its contents."""
    if yes or typer.confirm(f"Delete {table} and its contents?"):
        with _connect(store) as opened:
            opened.drop(table)


@app.command()
def check(
    store: Annotated[Path, typer.Argument(help="the folder of a store, or of backups")],
    number: Annotated[int | None, typer.Option(help="of a backup; the newest by default")] = None,
) -> None:
    """Read every file of a store, or of a backup, and list what is damaged; the exit code is 1 if anything is."""
    if (store / "BACKUPS").exists():
        _report_damage(penstock.check_backup(store, number=number))
        return
    if number is not None:
        raise Invalid(f"--number is of a backup, and {store} is not a folder of backups: omit it")
    with _connect(store) as opened:
        report = opened.check()
    for orphan in report.orphans:
        print(f"named by nothing: {orphan}", file=sys.stderr)
    if not report.damage:
        _report(report.troubles)
        return
    if report.troubles:
        _print(_TROUBLE, map(_trouble, report.troubles))
    _report_damage(report.damage)


@app.command()
def backup(
    store: Store,
    target: Annotated[Path, typer.Argument(help="a folder for backups of this store, created if absent")],
    keep: Annotated[int | None, typer.Option(help="remove all but this many of the newest backups")] = None,
) -> None:
    """Copy a store as of one LSN, while it is in use; only what changed since the last backup is copied."""
    with _connect(store) as opened:
        report = opened.backup(target, keep=keep)
    console.print(
        f"backup {report.number} at LSN {report.lsn}: {report.files:,} files of {report.bytes:,} bytes, "
        f"{report.files_copied:,} of {report.bytes_copied:,} bytes copied"
    )


@app.command()
def restore(
    source: Annotated[Path, typer.Argument(help="a folder of backups")],
    store: Annotated[Path, typer.Argument(help="the folder of the new store, absent or empty")],
    number: Annotated[int | None, typer.Option(help="of the backup; the newest by default")] = None,
) -> None:
    """Make a new store from a backup."""
    report = penstock.restore(source, store, number=number)
    console.print(
        f"backup {report.number}, as of LSN {report.lsn}: {report.files:,} files of {report.bytes:,} bytes in {store}",
        soft_wrap=True,
    )


@app.command()
def salvage(
    store: Annotated[Path, typer.Argument(help="the folder of a damaged store")],
    target: Annotated[Path, typer.Argument(help="the folder of a new store, absent or empty")],
) -> None:
    """Copy what can be read of a damaged store to a new one; the exit code is 1 if anything is lost."""
    report = penstock.salvage(store, target)
    _print(("table", "rows"), iter(report.rows.items()))
    for damage in report.damage:
        print(f"{damage.path}: {damage.reason}")
    for lost in report.lost:
        print(f"lost: {lost}")
    if report.lost:
        raise typer.Exit(1)


@app.command()
def resume(store: Store, table: Name) -> None:
    """Let a paused table try again; print the troubles that remain."""
    with _connect(store) as opened:
        _report(opened.resume(table))


@app.command("keep-snapshot")
def keep_snapshot(store: Store, table: Name) -> None:
    """Copy the files of a table, so that `repair` can restore it."""
    with _connect(store) as opened:
        lsns = opened.keep_snapshot(table)
        console.print(f"{table}: {len(lsns)} shards, at LSN {max(lsns)}")


@app.command()
def repair(store: Store, table: Name) -> None:
    """Replace the damaged files of a table by its snapshot; print the troubles that remain."""
    with _connect(store) as opened:
        _report(opened.repair(table))


def _report(troubles: list[Trouble]) -> None:
    if not troubles:
        console.print("all is well")
        return
    _print(_TROUBLE, map(_trouble, troubles))
    raise typer.Exit(1)


_TROUBLE = ("table", "shard", "LSN", "what")


def _trouble(one: Trouble) -> tuple[Any, ...]:
    return one.table, one.shard, one.lsn, one.reason


def _report_damage(damage: list[penstock.FileDamage]) -> None:
    if not damage:
        console.print("all is well")
        return
    for one in damage:  # one line each, however long the path is
        print(f"{one.path}: {one.reason}")
    raise typer.Exit(1)


@app.command()
def metrics(
    store: Annotated[str, typer.Argument(help="the store's folder, or penstock://host:port")],
    token: Annotated[str | None, typer.Option(envvar="PENSTOCK_TOKEN", help="for penstock://host:port")] = None,
    authority: Annotated[Path | None, typer.Option(help="PEM file that signed the server's certificate")] = None,
) -> None:
    """Print the metrics of a store in Prometheus' text format."""
    address = store.startswith(SCHEME)
    with penstock.connect(store, token=token if address else None, authority=authority) as opened:
        print(opened.metrics.exposition(), end="")


@app.command()
def serve(  # noqa: PLR0917 - typer reads the signature
    store: Store,
    certificate: Annotated[Path, typer.Option(help="PEM file")],
    key: Annotated[Path, typer.Option(help="PEM file of the certificate's key")],
    tokens: Annotated[Path, typer.Option(help="file that lists tokens and their rights")],
    host: str = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: any free port")] = 0,
    http: Annotated[str | None, typer.Option(help="HOST:PORT: `penstock http` beside it, in another process")] = None,
    table: Annotated[str | None, typer.Option(help="with --http: the series table of /api/v1")] = None,
    logs: Annotated[str | None, typer.Option(help="with --http: the queue for OTLP's logs")] = None,
    create: Annotated[bool, typer.Option(help="with --http: create these tables if they are absent")] = False,
    metrics_port: Annotated[int | None, typer.Option(help="of http://127.0.0.1:PORT/metrics for Prometheus")] = None,
) -> None:
    """Own a store and serve it over TCP with TLS, until SIGTERM or SIGINT."""
    from penstock.cli.http_process import HttpProcess, parse_address
    from penstock.host.waiting import stop_on_signals
    from penstock.server.healing import Healer
    from penstock.server.tcp import serve_tcp

    given = {"--certificate": certificate, "--key": key, "--tokens": tokens, "--table": table, "--logs": logs}
    if http is not None:
        given["--host"], given["--port"] = map(str, parse_address(http))
    elif table is not None or logs is not None or create:
        raise Invalid("--table, --logs and --create go with --http: give it, too")
    options = [text for name, value in given.items() if value is not None for text in (name, str(value))]
    options += ["--create"] if create else []
    settings = penstock.StoreSettings(metrics_port=metrics_port)
    with stop_on_signals() as stopping, penstock.open(store, settings=settings) as opened, ExitStack() as ends:
        bound = serve_tcp(opened, host, port, certificate=certificate, key=key, tokens=tokens)
        print(f"penstock://{host}:{bound}", flush=True)
        healer = Healer(opened, opened.clock)
        beside = None if http is None else HttpProcess([str(store), *options])
        if beside is not None:
            ends.callback(beside.close)
        while not stopping.wait(0.25):
            if beside is not None:
                beside.check()
            if not healer.heal():
                opened.check_folder()
                raise Poisoned(
                    f"writes to {store} fail and recovery failed, too ({opened.port.failure}): check its disk"
                )


@app.command()
def http(  # noqa: PLR0917 - typer reads the signature
    store: Store,
    table: Annotated[str | None, typer.Option(help="the series table of /api/v1; others: /prometheus/TABLE")] = None,
    host: str = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: any free port")] = 9090,
    write: Annotated[bool, typer.Option(help="take writes without a token, from this machine")] = False,
    logs: Annotated[str | None, typer.Option(help="the queue for OTLP's logs")] = None,
    tokens: Annotated[Path | None, typer.Option(help="file that lists tokens and their rights")] = None,
    certificate: Annotated[Path | None, typer.Option(help="PEM file")] = None,
    key: Annotated[Path | None, typer.Option(help="PEM file of the certificate's key")] = None,
    create: Annotated[bool, typer.Option(help="create the store and these tables if they are absent")] = False,
    beside: Annotated[bool, typer.Option(hidden=True, help="end with the owner that started it")] = False,
) -> None:
    """Answer Prometheus' HTTP API, and take remote write, OTLP and line protocol, until SIGTERM or SIGINT."""
    from penstock.cli.http_process import parent_has_ended
    from penstock.host.waiting import stop_on_signals
    from penstock.server.rights import Tokens

    try:
        from penstock.http.application import HttpSettings
        from penstock.http.serving import find_tables, serve_http
    except ImportError as missing:
        raise Invalid("penstock http needs starlette and uvicorn: pip install 'penstock[http]'") from missing
    try:
        rights_of = None if tokens is None else Tokens.parse(tokens.read_text()).rights_of
    except OSError as error:
        raise Invalid(f"the file of tokens cannot be read: {error}") from None
    with stop_on_signals() as stopping, ExitStack() as ends:
        opened = ends.enter_context(_connect_for_http(store, create))
        table = find_tables(opened, table, logs, create=create)
        settings = HttpSettings(table=table, logs=logs, write=write, rights_of=rights_of)
        bound = ends.enter_context(serve_http(opened, settings, host, port, certificate=certificate, key=key))
        print(f"http{'' if certificate is None else 's'}://{host}:{bound}", flush=True)
        while not stopping.wait(0.25):
            if beside and parent_has_ended():
                break


def _connect_for_http(store: Path, create: bool) -> Any:
    try:
        return penstock.connect(store, create=create)
    except NotFound:
        raise NotFound(f"there is no store in {store}: give another path, or --create") from None


@app.command()
def certificates(
    folder: Annotated[Path, typer.Argument(help="a folder for the files, created if absent")],
    host: Annotated[list[str], typer.Option(help="a name or an address that clients connect to; may be repeated")],
    days: Annotated[int, typer.Option(help="how long the certificates are valid")] = 825,
) -> None:
    """Make an authority, and certificates for a server and a client that it signs, for `serve`."""
    from penstock.cli.certificates import make_certificates

    for name in make_certificates(str(folder), host, days):
        print(folder / name)
    print(f"serve with --certificate {folder / 'server.pem'} --key {folder / 'server.key'}", file=sys.stderr)
    print(f"clients connect with authority={str(folder / 'authority.pem')!r}: give them that file", file=sys.stderr)


def _print(columns: tuple[str, ...], rows: Iterator[Any]) -> None:
    out = Table(*columns)
    for row in islice(rows, 100_000):
        out.add_row(*map(format_value, row))
    console.print(out)
