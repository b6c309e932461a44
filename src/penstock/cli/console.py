"""`penstock console STORE`: the console in a browser, for one person on this machine, until Ctrl-C.

The address that it prints has a new token, after the `#`: browsers do not send that part to anyone, and the page trades
the token for a session. `penstock serve --http` has the same console for many, with tokens from a file.

Thread: one, and that of the server.
"""

from __future__ import annotations

import hmac
import webbrowser
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.app import app
from penstock.cli.cluster import member_roles
from penstock.cli.session import Session, command
from penstock.errors import Invalid
from penstock.host.randomness import system_random
from penstock.host.waiting import stop_on_signals
from penstock.server.rights import ADMIN, EVERY_TABLE, READ, Rights

PORT = 8480  # if it is free
HOST = "127.0.0.1"


def one_token(token: str, *, write: bool) -> Callable[[str], Rights | None]:
    """Return a function that gives rights to one token, and to no other."""
    rights = Rights(client="console", tables={EVERY_TABLE: ADMIN if write else READ})
    return lambda candidate: rights if hmac.compare_digest(candidate.encode(), token.encode()) else None


@command(app)
def console(
    session: Session,
    write: Annotated[bool, typer.Option("--write", help="let its buttons change something; each asks first")] = False,
    port: Annotated[int | None, typer.Option(min=0, max=65_535, help=f"default: {PORT}, or a free one")] = None,
    browse: Annotated[bool, typer.Option("--open", help="open the page in the browser of this machine")] = False,
    cluster: Annotated[Path | None, typer.Option(help="the folder with cluster.toml, to show its members")] = None,
) -> None:
    """Show a store in the browser, live: health, tables, rows, consumers, PromQL, vectors, jobs."""
    try:
        from penstock.http.application import HttpSettings
        from penstock.http.console import ConsoleSettings
        from penstock.http.serving import serve_http
    except ImportError as missing:
        raise Invalid("penstock console needs starlette and uvicorn: pip install 'penstock[http]'") from missing
    token = system_random().randbytes(24).hex()
    members = None if cluster is None else member_roles(cluster, session.token)
    settings = HttpSettings(
        rights_of=one_token(token, write=write),
        loopback=True,
        console=ConsoleSettings(write=write, title=session.address, members=members),
    )
    with stop_on_signals() as stopping, ExitStack() as ends:
        store = session.store
        try:
            bound = ends.enter_context(serve_http(store, settings, HOST, PORT if port is None else port))
        except Invalid:
            if port is not None:
                raise
            bound = ends.enter_context(serve_http(store, settings, HOST, 0))
        address = f"http://{HOST}:{bound}/console/#token={token}"
        session.out.done(address, address=address, write=write)
        print(end="", flush=True)
        if browse:
            webbrowser.open(address)
        while not stopping.wait(0.25):
            pass
