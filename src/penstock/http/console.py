"""The console: pages in a browser that show a store while it works, and what its buttons do.

    GET   /console/                the page; /console/files/NAME: its scripts and styles, from inside the package
    POST  /console/api/login       a token for a session (see `sessions`); /console/api/logout ends it
    GET   /console/events          samples of the store, as server-sent events
    GET   /console/api/NAME        what a screen reads
    POST  /console/api/do/NAME     what a button does; only of a server that was started to write

The page is fixed text: it has no data, so every client that reaches the server may have it. All data come from the
API as JSON, of tables that the client's token names, and the page puts them into the document as text. The policy in
every answer forbids scripts, styles and connections of any other origin, and scripts inside the page.

Thread: the event loop; reading and writing in threads of the pool.
Invariants: (1) nothing is changed by a GET, nor by a request without the header that only our own page sends: another
site's page can send it only after a preflight request, which is refused. (2) an action needs `--write` and the token's
right to the table.
"""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from importlib.resources import files
from typing import Any, TypeAlias

import msgspec
from anyio import move_on_after
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from penstock.errors import Invalid
from penstock.host.clock import Clock
from penstock.http import console_reading as reading
from penstock.http.console_reading import Parameters, Reply
from penstock.http.console_sampling import PAGES_MAX, Sample, Sampler, StoreReader, visible
from penstock.http.incoming import Refused, read_body, refusal_of
from penstock.http.sessions import Sessions
from penstock.server.rights import ADMIN, EVERY_TABLE, READ, WRITE, Right, Rights

HEADER = "x-penstock-console"  # sent by our page with every request but that for events
ACTION_BYTES_MAX = 1 << 20
ACTION_S = 120.0
KEY_SHOWN = 256  # bytes of a chunk's first and last key
WAKE_S = 0.5  # between two checks that a page is still connected
FILES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
Members: TypeAlias = Callable[[], list[dict[str, str]]]
InThread: TypeAlias = Callable[[Right, Callable[[], Any]], Awaitable[Any]]
Guarded: TypeAlias = Callable[[Request, Callable[[Request, Any], Any], Any], Awaitable[Response]]


@dataclass(frozen=True, kw_only=True)
class ConsoleSettings:
    """What the console may do."""

    write: bool = False  # whether its buttons change anything
    title: str = ""  # of the store, as its user named it
    members: Members | None = None  # of a cluster: name, address, role


def page_files() -> dict[str, tuple[bytes, str]]:
    """Return the files of the page, which are part of the package: name to content, compressed by gzip, and type."""
    contents: dict[str, tuple[bytes, str]] = {}
    for file in (files("penstock.http") / "console_files").iterdir():
        name, data = file.name.removesuffix(".gz"), file.read_bytes()
        kind = FILES.get("." + name.rpartition(".")[2])
        if kind is not None:
            contents[name] = data if file.name != name else gzip.compress(data, mtime=0), kind
    return contents


class Console:
    """The handlers of the console of one server."""

    def __init__(
        self,
        store: Any,
        settings: ConsoleSettings,
        sessions: Sessions,
        *,
        clock: Clock,
        guarded: Guarded,
        rights: Callable[[Request], Rights | None],
        in_thread: InThread,
    ) -> None:
        self._store = store
        self._settings = settings
        self._sessions = sessions
        self._guarded = guarded
        self._rights_of = rights
        self._in_thread = in_thread
        self._files = page_files()
        self.sampler = Sampler(StoreReader(store, clock), partial(in_thread, READ))
        of_table: dict[str, tuple[str, Callable[[Any, Parameters], Reply]]] = {
            "rows": ("kv", reading.read_rows),
            "row": ("kv", reading.read_row),
            "messages": ("queue", reading.read_messages),
            "message": ("queue", reading.read_message),
            "letters": ("queue", partial(reading.read_letters, store)),
            "cardinality": ("series", reading.read_cardinality),
            "neighbours": ("vector", reading.read_neighbours),
            "recall": ("vector", reading.check_recall),
        }
        self._of_table = of_table
        self._reads: dict[str, Callable[[Rights, Parameters], Any]] = {
            "table": self._table,
            "jobs": self._jobs,
            "chunks": self._chunks,
            "members": self._members,
        }
        self._actions: dict[str, Callable[[Rights, Parameters], Reply]] = {
            "compact": self._compact,
            "resume": self._resume,
            "retry": self._retry,
            "put_back": self._put_back,
            "delete": self._delete,
        }

    def routes(self) -> list[Route]:
        """Return the routes under /console."""
        return [
            Route("/console", _redirect),
            Route("/console/", self._handle(self._page)),
            Route("/console/files/{name}", self._handle(self._page)),
            Route("/console/events", self._handle(self._events)),
            Route("/console/api/hello", self._handle(self._hello)),
            Route("/console/api/sample", self._handle(self._sample)),
            Route("/console/api/login", self._handle(self._login), methods=["POST"]),
            Route("/console/api/logout", self._handle(self._logout), methods=["POST"]),
            Route("/console/api/do/{name}", self._handle(self._act), methods=["POST"]),
            Route("/console/api/{name}", self._handle(self._read)),
        ]

    def _handle(self, answer: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def handled(request: Request, _: Any) -> Response:
            _check_site(request)
            try:
                return await answer(request)
            except (Refused, ClientDisconnect):
                raise
            except Exception as error:  # the client's mistake, or our own, which is logged
                raise refusal_of(error) from error

        async def handle(request: Request) -> Response:
            response = await self._guarded(request, handled, None)
            response.headers.update(HEADERS)
            return response

        return handle

    def _rights(self, request: Request) -> Rights:
        """Return the rights of a request; without tokens, everybody on this machine reads."""
        rights = self._rights_of(request)
        if rights is None:
            return Rights(client="", tables={EVERY_TABLE: ADMIN if self._settings.write else READ})
        if not rights.allows_anywhere(READ):
            raise Refused(403, "bad_data", "the token does not give the right to read any table")
        return rights

    # -- the page

    async def _page(self, request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        if name not in self._files:
            raise Refused(404, "not_found", "the console has no such file")
        body, kind = self._files[name]
        if "gzip" not in request.headers.get("accept-encoding", ""):
            return Response(gzip.decompress(body), media_type=kind)
        return Response(body, media_type=kind, headers={"Content-Encoding": "gzip", "Vary": "Accept-Encoding"})

    async def _login(self, request: Request) -> Response:
        _check_header(request)
        parameters = await _document(request)
        response = JSONResponse({"status": "success"})
        if not self._sessions.begin(request, response, parameters.text("token").strip()):
            raise Refused(401, "bad_data", "this is not a token that the server knows")
        return response

    async def _logout(self, request: Request) -> Response:
        _check_header(request)
        response = JSONResponse({"status": "success"})
        self._sessions.end(request, response)
        return response

    # -- what is live

    async def _hello(self, request: Request) -> Response:
        rights = self._rights(request)
        infos = await self._in_thread(READ, self._store.port.tables)
        return _reply(
            {
                "store": self._settings.title or str(self._store.path),
                "version": version("penstock"),
                "client": rights.client,
                "write": self._settings.write and rights.allows_anywhere(WRITE),
                "sessions": self._rights_of(request) is not None,
                "cluster": self._settings.members is not None,
                "tables": [
                    {"name": info.name, "kind": info.kind, "shards": info.shards}
                    for info in infos
                    if rights.allows(READ, info.name)
                ],
            }
        )

    async def _sample(self, request: Request) -> Response:
        rights = self._rights(request)
        return _reply(visible(await self.sampler.sample(), rights))

    async def _events(self, request: Request) -> Response:
        rights = self._rights(request)
        page = self.sampler.open_page()  # now, not with the first event: many may connect before one of them gets it
        if page is None:
            raise Refused(503, "unavailable", f"{PAGES_MAX} pages are open: close some", 5)
        return _EventStream(self._stream(request, rights, page), partial(self.sampler.close_page, page))

    async def _stream(self, request: Request, rights: Rights, page: asyncio.Queue[Sample]) -> AsyncIterator[bytes]:
        yield _event("history", [visible(past, rights) for past in self.sampler.past()])
        while not self.sampler.stopping and not await request.is_disconnected():
            sample: Sample | None = None
            with move_on_after(WAKE_S):
                sample = await page.get()
            if sample is not None:
                try:
                    rights = self._rights(request)
                except Refused:  # its token was withdrawn, or its session has ended
                    return
                yield _event("sample", visible(sample, rights))

    # -- reading

    async def _read(self, request: Request) -> Response:
        rights, name = self._rights(request), request.path_params["name"]
        parameters = Parameters(dict(request.query_params))
        if name in self._of_table:
            kind, read = self._of_table[name]
            return _reply(
                await self._in_thread(READ, lambda: read(self._existing(rights, parameters, kind), parameters))
            )
        if name not in self._reads:
            raise Refused(404, "not_found", "the console's API has no such name")
        return _reply(await self._in_thread(READ, lambda: self._reads[name](rights, parameters)))

    def _existing(self, rights: Rights, parameters: Parameters, kind: str, right: Right = READ) -> Any:
        """Return a table that the client has a right to; one that it may not read looks like one that is absent."""
        name = parameters.text("table")
        if not rights.allows(READ, name):
            raise Refused(404, "not_found", f"there is no table {name[:100]}, or the token does not give a right to it")
        _check_right(rights, right, name)
        info = self._store.port.table(name)
        if info is not None and kind and info.kind != kind:
            raise Invalid(f"table {name} is a {info.kind}, not a {kind}")
        return self._store.table(name)

    def _table(self, rights: Rights, parameters: Parameters) -> Reply:
        table = self._existing(rights, parameters, "")
        return reading.describe(self._store, table, self._store.port.table(parameters.text("table")))

    def _jobs(self, rights: Rights, parameters: Parameters) -> Reply:
        limit = parameters.number("limit", 500, 1, 2_000)
        jobs = [
            {name: getattr(job, name) for name in job.__dataclass_fields__}
            for job in self._store.jobs()
            if (rights.allows(READ, job.table) if job.table else rights.allows_everywhere(READ))
        ]
        return {"jobs": jobs[-limit:][::-1], "total": len(jobs)}

    def _chunks(self, rights: Rights, parameters: Parameters) -> Reply:
        self._existing(rights, parameters, "")
        chunks = self._store.chunks(parameters.text("table"))
        fields = [name for name in (chunks[0].__dataclass_fields__ if chunks else ()) if name not in ("start", "end")]
        entries = [
            {name: getattr(chunk, name) for name in fields}
            | {"start": chunk.start[:KEY_SHOWN].hex(), "end": chunk.end[:KEY_SHOWN].hex()}
            for chunk in chunks[:2_000]
        ]
        return {"chunks": entries, "total": len(chunks)}

    def _members(self, rights: Rights, parameters: Parameters) -> Reply:
        members = self._settings.members
        return {"members": None if members is None else members()}

    # -- actions

    async def _act(self, request: Request) -> Response:
        _check_header(request)
        rights = self._rights(request)
        act = self._actions.get(request.path_params["name"])
        if act is None:
            raise Refused(404, "not_found", "the console has no such action")
        if not self._settings.write:
            raise Refused(403, "bad_data", "this console only reads: start it with --write")
        parameters = await _document(request)
        return _reply(await self._in_thread(WRITE, lambda: act(rights, parameters)))

    def _compact(self, rights: Rights, parameters: Parameters) -> Reply:
        self._existing(rights, parameters, "", ADMIN)
        report = self._store.compact(parameters.text("table"), timeout_s=ACTION_S)
        return {"done": f"{report.files_before} files became {report.files_after}"}

    def _resume(self, rights: Rights, parameters: Parameters) -> Reply:
        self._existing(rights, parameters, "", ADMIN)
        troubles = self._store.resume(parameters.text("table"))
        return {"done": "all is well" if not troubles else f"{len(troubles)} troubles remain: {troubles[0].reason}"}

    def _retry(self, rights: Rights, parameters: Parameters) -> Reply:
        if not rights.allows_everywhere(ADMIN):
            raise Refused(403, "bad_data", "the token does not give the right to administer every table")
        return {"done": f"job {self._store.retry_job(parameters.number('job', 0, 1))} does it again"}

    def _put_back(self, rights: Rights, parameters: Parameters) -> Reply:
        table = self._existing(rights, parameters, "queue")
        _check_right(rights, WRITE, reading.letter_source(table, parameters))
        return reading.put_back(self._store, table, parameters)

    def _delete(self, rights: Rights, parameters: Parameters) -> Reply:
        return reading.delete_row(self._existing(rights, parameters, "kv", WRITE), parameters)


class _EventStream(StreamingResponse):
    """Events for one page. `close` is called at its end, also if the client left before the first event."""

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()


async def _redirect(request: Request) -> Response:
    return RedirectResponse("/console/", headers=HEADERS)


def _check_site(request: Request) -> None:
    """Refuse requests of other sites' pages; a person may follow a link from there to the page itself."""
    site = request.headers.get("sec-fetch-site", "none")
    to_page = request.url.path == "/console/" and request.headers.get("sec-fetch-mode") == "navigate"
    if site not in ("same-origin", "none") and not to_page:
        raise Refused(403, "bad_data", "the request comes from a page of another site")


def _check_right(rights: Rights, right: Right, table: str) -> None:
    if not rights.allows(right, table):
        raise Refused(403, "bad_data", f"the token does not give the right to {right} {table}")


def _check_header(request: Request) -> None:
    if request.headers.get(HEADER) != "1":
        raise Refused(403, "bad_data", f"a request that changes something needs the header {HEADER}: 1")


async def _document(request: Request) -> Parameters:
    try:
        fields = msgspec.json.decode(await read_body(request, ACTION_BYTES_MAX), type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise Refused(400, "bad_data", "the body is a JSON object") from None
    return Parameters(fields)


def _reply(data: Mapping[str, Any]) -> Response:
    return Response(msgspec.json.encode({"status": "success", "data": data}), media_type="application/json")


def _event(name: str, data: Any) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(data) + b"\n\n"
