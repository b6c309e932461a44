"""`penstock serve`, `http`, `certificates`, `token`: a store for other machines.

Thread: one.
"""

from __future__ import annotations

import hashlib
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

import penstock
from penstock.cli.app import app, group
from penstock.cli.maintenance import Keys
from penstock.errors import Invalid, NotFound, Poisoned
from penstock.host.randomness import system_random

Store = Annotated[Path, typer.Argument(help="the store's folder")]

token_group = group("token", "Tokens of clients.")


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
    console_write: Annotated[
        bool, typer.Option("--console-write", help="with --http: the console's buttons may change something")
    ] = False,
    metrics_port: Annotated[int | None, typer.Option(help="of http://127.0.0.1:PORT/metrics for Prometheus")] = None,
    statsd: Annotated[str | None, typer.Option(help="ADDRESS:PORT of a StatsD agent that gets the metrics")] = None,
    archive: Annotated[str | None, typer.Option(help="URL of an object store, like s3://bucket/prefix")] = None,
    keys: Keys = None,
) -> None:
    """Own a store and serve it over TCP with TLS, until SIGTERM or SIGINT."""
    from penstock.cli.http_process import HttpProcess, parse_address
    from penstock.host.waiting import stop_on_signals
    from penstock.server.healing import Healer
    from penstock.server.tcp import serve_tcp

    option_values = {"--certificate": certificate, "--key": key, "--tokens": tokens, "--table": table, "--logs": logs}
    if http is not None:
        option_values["--host"], option_values["--port"] = map(str, parse_address(http))
    elif table is not None or logs is not None or create or console_write:
        raise Invalid("--table, --logs, --create and --console-write go with --http: give it, too")
    options = [text for name, value in option_values.items() if value is not None for text in (name, str(value))]
    options += ["--create"] if create else []
    options += ["--console-write"] if console_write else []
    settings = penstock.StoreSettings(metrics_port=metrics_port, statsd=statsd, keys=keys)
    with (
        stop_on_signals() as stopping,
        penstock.open(store, settings=settings, archive=archive) as opened,
        ExitStack() as ends,
    ):
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
    console: Annotated[
        bool | None,
        typer.Option(
            help="the console under /console/. Default: with --tokens; without, every program here could read all"
        ),
    ] = None,
    console_write: Annotated[bool, typer.Option("--console-write", help="its buttons may change something")] = False,
    beside: Annotated[bool, typer.Option(hidden=True, help="end with the owner that started it")] = False,
) -> None:
    """Answer Prometheus' HTTP API, and take remote write, OTLP and line protocol, until SIGTERM or SIGINT."""
    from penstock.cli.http_process import parent_has_ended
    from penstock.host.waiting import stop_on_signals
    from penstock.server.rights import Tokens

    try:
        from penstock.http.application import HttpSettings
        from penstock.http.console import ConsoleSettings
        from penstock.http.serving import find_tables, serve_http
    except ImportError as missing:
        raise Invalid("penstock http needs starlette and uvicorn: pip install 'penstock[http]'") from missing
    try:
        rights_of = None if tokens is None else Tokens.parse(tokens.read_text()).rights_of
    except (OSError, UnicodeDecodeError) as error:
        raise Invalid(f"the file of tokens cannot be read: {error}") from None
    with stop_on_signals() as stopping, ExitStack() as ends:
        opened = ends.enter_context(_connect_for_http(store, create))
        table = find_tables(opened, table, logs, create=create)
        enabled = rights_of is not None if console is None else console
        pages = ConsoleSettings(write=console_write, title=str(store)) if enabled else None
        settings = HttpSettings(table=table, logs=logs, write=write, rights_of=rights_of, console=pages)
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


@token_group.command("new")
def new_token(
    name: Annotated[str, typer.Argument(help="of the client, for the log")],
    right: Annotated[
        list[str] | None,
        typer.Option(help="TABLE=read, TABLE=write or TABLE=admin; may be repeated. Default: '*=read'"),
    ] = None,
) -> None:
    """Make a token: print it to stderr, once, and its entry for the file of tokens to stdout."""
    from penstock.server.rights import Right, Tokens

    rights = {}
    for text in right or ["*=read"]:
        table, separator, word = text.rpartition("=")
        if not separator or word not in get_args(Right):
            raise Invalid(f"--right {text!r}: give TABLE=read, TABLE=write or TABLE=admin")
        rights[table] = word
    token = system_random().randbytes(24).hex()
    listed = ", ".join(f'"{table}" = "{word}"' for table, word in rights.items())
    entry = f'[tokens."{name}"]\nsha256 = "{hashlib.sha256(token.encode()).hexdigest()}"\nrights = {{ {listed} }}\n'
    Tokens.parse(entry)  # refuses names and rights that the server would refuse
    print(entry, end="")
    print(f"token of {name}, shown only now: {token}", file=sys.stderr)
