"""The HTTP application of a store: Prometheus' API, remote write, OTLP and line protocol.

It runs in a process that connects, so that queries do not hold the owner's interpreter. The order of a request: its
host and origin, its token and rights, the size of its body, and only then its content.

    GET, POST  /api/v1/...                      of the default table; /prometheus/TABLE/api/v1/... of any
    POST       /api/v1/write                    remote write 1.0 and 2.0
    POST       /v1/metrics, /v1/logs            OTLP: metrics to the default table, logs to a queue
    POST       /write, /api/v2/write            line protocol
    GET        /-/healthy, /-/ready, /metrics   of the store itself; / says where to go

Without tokens it listens on loopback only, and reads; `write=True` lets it write. A browser's page cannot use it: the
host has to be a loopback name, and an `Origin` has to be that host.

Thread: an event loop for the connections; each request works in a thread of the pool.
Invariant: an answer of 204 or 200 to a write means that it is durable.
"""

from __future__ import annotations

import asyncio
import logging
import urllib.parse
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import msgspec
from anyio import CapacityLimiter, to_thread
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from penstock.errors import Invalid, NotFound, Poisoned, WaitExpired
from penstock.host import threads
from penstock.host.clock import Clock, SystemClock
from penstock.host.randomness import system_random
from penstock.http.console import Console, ConsoleSettings
from penstock.http.incoming import Refused, read_body, refusal_of, without_port
from penstock.http.line_protocol import decode_lines
from penstock.http.otlp import decode_logs, decode_metrics, metrics_answer
from penstock.http.prometheus_api import ANSWERS, ReadRequest, label_values
from penstock.http.remote_write import decode_write, write_version
from penstock.http.samples import LabelCache, ReceivedSamples
from penstock.http.sessions import Sessions
from penstock.promql.limits import SampleRoom
from penstock.series.reader import SeriesReader
from penstock.series.section import MetricMetadata
from penstock.server.rights import READ, WRITE, Right, Rights

log = logging.getLogger(__name__)
BODY_BYTES_MAX = 16 << 20  # as it is sent
TEXT_BYTES_MAX = 32 << 20  # after gzip
GZIP_MEMBERS_MAX = 100  # one after the other
PARAMETERS_MAX = 1_000
FORM_BYTES_MAX = 1 << 20  # parameters of a query
DECODE_S = 10.0  # for lines to be decoded
DESCRIBED_MAX = 100_000  # metrics whose metadata are not written again
REQUESTS_MAX = 64  # at work or waiting for a thread
SAMPLES_MAX = 40_000_000  # that all queries hold at once: each takes some 60 bytes
THREADS_MAX = 8  # that read, and as many that write: slow queries do not keep samples waiting
INDEX = "Penstock answers Prometheus' API under /api/v1, and /prometheus/TABLE/api/v1 of other tables.\n"
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
PREFIXES = ("", "/prometheus/{table}")
WriteAct: TypeAlias = Callable[[Request, bytes], Response]
ReadAct: TypeAlias = Callable[[Request, SeriesReader, ReadRequest], Any]


@dataclass(frozen=True, kw_only=True)
class HttpSettings:
    """What the application serves."""

    table: str | None = None  # the default table; None: only by name
    logs: str | None = None  # the queue for logs
    write: bool = False  # without tokens, whether requests may write
    rights_of: Callable[[str], Rights | None] | None = None  # of a bearer token; None: no tokens
    console: ConsoleSettings | None = None  # None: no console
    loopback: bool = False  # with tokens: refuse hosts that are not loopback names all the same


def http_application(store: Any, settings: HttpSettings, clock: Clock | None = None) -> Starlette:
    """Return the application over a store, at best one from `penstock.connect`."""
    door = _Door(store, settings, clock or SystemClock())
    application = Starlette(routes=door.routes())
    application.state.stop = door.stop
    return application


class _Door:
    """The handlers of one application."""

    def __init__(self, store: Any, settings: HttpSettings, clock: Clock) -> None:
        self._store = store
        self._settings = settings
        self._clock = clock
        self._threads: dict[Right, CapacityLimiter] = {}  # made in the event loop
        self._working = 0
        self._labels = LabelCache()
        self._room = SampleRoom(SAMPLES_MAX)
        self._recovering = threads.lock("http.recovering")
        self._sessions = Sessions(settings.rights_of, clock, system_random())
        self._console = None if settings.console is None else self._make_console(settings.console)
        self._described: dict[tuple[int, str], MetricMetadata] = {}  # by table and metric: what is stored already

    def _make_console(self, settings: ConsoleSettings) -> Console:
        return Console(
            self._store,
            settings,
            self._sessions,
            clock=self._clock,
            guarded=self._guarded,
            rights=self._rights,
            in_thread=self._in_thread,
        )

    def stop(self) -> None:
        """End what would go on until its client leaves: the events of the console. Any thread may call this."""
        if self._console is not None:
            self._console.sampler.stopping = True

    def routes(self) -> list[Route]:
        routes = [Route(f"/-/{name}", self._alive) for name in ("healthy", "ready")]
        routes.append(Route("/", self._index))
        routes.append(Route("/metrics", self._metrics))
        for prefix in PREFIXES:
            base = f"{prefix}/api/v1"
            for name in ANSWERS:
                routes.append(Route(f"{base}/{name}", self._read(partial(self._answer, name)), methods=["GET", "POST"]))
            routes.append(Route(f"{base}/label/{{name}}/values", self._read(self._label_values), methods=["GET"]))
            for path, decode in (
                (f"{base}/write", self._remote_write),
                (f"{prefix}/v1/metrics", self._otlp_metrics),
                (f"{prefix}/write", self._lines),
                (f"{prefix}/api/v2/write", self._lines),
            ):
                routes.append(Route(path, self._written(decode), methods=["POST"]))
        routes += [] if self._console is None else self._console.routes()
        routes.append(Route("/v1/logs", self._written(self._otlp_logs), methods=["POST"]))
        return routes

    async def _alive(self, request: Request) -> Response:
        return Response("Penstock is healthy.\n", media_type="text/plain")

    async def _index(self, request: Request) -> Response:
        return Response(INDEX, media_type="text/plain")

    async def _metrics(self, request: Request) -> Response:
        return await self._guarded(request, self._metrics_answer, None)

    async def _metrics_answer(self, request: Request, _: None) -> Response:
        """Answer with the metrics of the store, which name all tables."""
        rights = self._rights(request)
        if rights is not None and not rights.allows_everywhere(READ):
            raise Refused(403, "bad_data", "the token does not give the right to read every table")
        text = await self._in_thread(READ, self._store.metrics.exposition)
        return Response(text, media_type="text/plain; version=0.0.4")

    # -- the order of a request

    def _read(self, answer: ReadAct) -> Callable[[Request], Any]:
        async def handle(request: Request) -> Response:
            return await self._guarded(request, self._read_answer, answer)

        return handle

    def _written(self, decode: WriteAct) -> Callable[[Request], Any]:
        async def handle(request: Request) -> Response:
            return await self._guarded(request, self._write_answer, decode)

        return handle

    async def _guarded(self, request: Request, handle: Callable[[Request, Any], Any], act: Any) -> Response:
        try:
            self._check_source(request)
            if self._working >= REQUESTS_MAX:
                raise Refused(503, "unavailable", f"{REQUESTS_MAX} requests are at work: retry later", 1)
            self._working += 1
            try:
                answer: Response = await handle(request, act)
                return answer
            finally:
                self._working -= 1
        except Refused as refused:
            return self._refused(refused)
        except ClientDisconnect:
            return Response(status_code=499)

    def _refused(self, refused: Refused) -> Response:
        headers = {"Retry-After": str(refused.retry_s)} if refused.retry_s else {}
        if refused.status in (408, 413):
            headers["Connection"] = "close"  # the rest of the body is not read
        body = {"status": "error", "errorType": refused.kind, "error": str(refused)}
        return JSONResponse(body, refused.status, headers)

    def _check_source(self, request: Request) -> None:
        """Refuse what a page in a browser could send."""
        host = request.headers.get("host", "")
        local = self._settings.rights_of is None or self._settings.loopback
        if local and without_port(host) not in LOOPBACK:
            raise Refused(403, "bad_data", "the host of the request is not a loopback name: use localhost")
        origin = request.headers.get("origin")
        if origin is not None and origin.partition("://")[2] != host:
            raise Refused(403, "bad_data", "the request comes from a page of another origin")

    def _rights(self, request: Request) -> Rights | None:
        """Return the rights of a request's token; None if the server has no tokens."""
        rights_of = self._settings.rights_of
        if rights_of is None:
            return None
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        rights = rights_of(token.strip()) if scheme.lower() == "bearer" else self._sessions.rights(request)
        if rights is None:
            raise Refused(401, "bad_data", "a bearer token that the server knows is needed")
        return rights

    def _check_right(self, request: Request, right: Right, table: str) -> None:
        rights = self._rights(request)
        if rights is None:
            if right == WRITE and not self._settings.write:
                raise Refused(403, "bad_data", "this server only reads: start it with write=True")
        elif not rights.allows(right, table):
            raise Refused(403, "bad_data", f"the token does not give the right to {right} {table}")

    def _table(self, request: Request) -> str:
        table = request.path_params.get("table", self._settings.table)
        if table is None:
            raise Refused(404, "not_found", "there is no default table: use /prometheus/TABLE/api/v1")
        return str(table)

    async def _in_thread(self, right: Right, act: Callable[[], Any]) -> Any:
        if right not in self._threads:
            self._threads[right] = CapacityLimiter(THREADS_MAX)
        try:
            return await to_thread.run_sync(self._done, act, limiter=self._threads[right])
        except (Refused, ClientDisconnect):
            raise
        except Exception as error:
            raise refusal_of(error) from error

    def _done(self, act: Callable[[], Any]) -> Any:
        """Call `act`; 503 if the store itself is absent (a disk is not mounted): at 404, senders drop samples."""
        try:
            return act()
        except NotFound as error:
            try:
                self._store.port.tables()
            except NotFound:
                raise Refused(503, "unavailable", str(error), 5) from error
            raise

    # -- reading

    async def _read_answer(self, request: Request, answer: ReadAct) -> Response:
        table = self._table(request)
        self._check_right(request, READ, table)
        parameters = _parameters(request.scope["query_string"])
        if request.method == "POST":
            parameters |= _parameters(await read_body(request, FORM_BYTES_MAX))
        reading = ReadRequest(parameters, self._clock, self._room)
        with _until_disconnected(request, reading.cancel):
            body = await self._in_thread(READ, partial(self._encoded, answer, request, table, reading))
        return Response(body, media_type="application/json")

    def _encoded(self, answer: ReadAct, request: Request, table: str, reading: ReadRequest) -> bytes:
        """Return an answer as JSON, here and not in the event loop: it may be long."""
        try:
            data = answer(request, self._store.series(table, create=False), reading)
            warnings = {"warnings": reading.warnings} if reading.warnings else {}
            return msgspec.json.encode({"status": "success", "data": data, **warnings})
        finally:
            reading.close()

    def _answer(self, name: str, request: Request, table: SeriesReader, reading: ReadRequest) -> Any:
        return ANSWERS[name](table, reading)

    def _label_values(self, request: Request, table: SeriesReader, reading: ReadRequest) -> list[str]:
        return label_values(table, request.path_params["name"], reading)

    # -- writing

    def _writing(self, decode: WriteAct, request: Request, body: bytes) -> Response:
        """Write; after a failure that stopped all writes, for lack of an owner, recover first."""
        try:
            return decode(request, body)
        except Poisoned:
            if not self._recovering.acquire(blocking=False):
                raise
            try:
                self._store.recover()  # what was kept is sent again, with its tokens
            finally:
                self._recovering.release()
        return decode(request, body)

    async def _write_answer(self, request: Request, decode: WriteAct) -> Response:
        target = self._table(request) if decode != self._otlp_logs else self._settings.logs
        if target is None:
            raise Refused(404, "not_found", "this server takes no logs: start it with the name of a queue for them")
        self._check_right(request, WRITE, target)
        body = await read_body(request, BODY_BYTES_MAX)
        answer: Response = await self._in_thread(WRITE, partial(self._writing, decode, request, body))
        return answer

    def _remote_write(self, request: Request, body: bytes) -> Response:
        try:
            version = write_version(request.headers.get("content-type", ""))
        except Invalid as refused:
            raise Refused(415, "bad_data", str(refused)) from None
        if request.headers.get("content-encoding", "snappy").lower() != "snappy":
            raise Refused(415, "bad_data", "remote write is compressed by snappy")
        return self._store_samples(request, decode_write(body, version, self._labels))

    def _otlp_metrics(self, request: Request, body: bytes) -> Response:
        _check_otlp(request)
        samples = decode_metrics(_plain_body(request, body), self._clock.time_us())
        answer = Response(metrics_answer(samples.left_out), 200, None, "application/x-protobuf")
        return self._store_samples(request, samples, answer)

    def _otlp_logs(self, request: Request, body: bytes) -> Response:
        _check_otlp(request)
        messages = decode_logs(_plain_body(request, body), self._clock.time_us())
        if messages:
            self._store.queue(self._settings.logs, create=False).put_many(messages, durable=True)
        return Response(b"", 200, None, "application/x-protobuf")

    def _lines(self, request: Request, body: bytes) -> Response:
        precision = request.query_params.get("precision", "ns")
        until_s = self._clock.monotonic_s() + DECODE_S

        def check() -> None:
            if self._clock.monotonic_s() > until_s:
                raise WaitExpired(f"the lines take longer than {DECODE_S:g} s to decode: send fewer at once")

        samples = decode_lines(_plain_body(request, body), self._clock.time_us(), precision, check)
        return self._store_samples(request, samples)

    def _store_samples(self, request: Request, samples: ReceivedSamples, answer: Response | None = None) -> Response:
        """Write samples and metadata in one commit, and wait until it is durable."""
        table = self._table(request)
        self._store.series(table, create=False)
        described, table_id = samples.metadata, 0
        if described:
            info = self._store.port.table(table)
            table_id = 0 if info is None else info.table_id
            described = [each for each in described if self._described.get((table_id, each.metric)) != each]
        if len(samples) or described:
            with self._store.batch() as batch:
                series = batch.series(table)
                if len(samples):
                    series.write_block(samples.to_block())
                for each in described:
                    series.set_metadata(each.metric, type=each.type, unit=each.unit, help=each.help)
            if len(self._described) > DESCRIBED_MAX:
                self._described.clear()
            self._described.update({(table_id, each.metric): each for each in described})  # after the commit
        response = answer or Response(status_code=204)
        for kind, count in (("Samples", len(samples)), ("Histograms", 0), ("Exemplars", 0)):
            response.headers[f"X-Prometheus-Remote-Write-{kind}-Written"] = str(count)
        return response


def _parameters(text: bytes) -> dict[str, list[str]]:
    try:
        # UTF-8 may stand there as it is, too: `curl -d` sends what it is given.
        form = text.decode(errors="replace")
        return urllib.parse.parse_qs(form, keep_blank_values=True, max_num_fields=PARAMETERS_MAX)
    except ValueError:
        raise Refused(400, "bad_data", f"a request has at most {PARAMETERS_MAX} parameters: send fewer") from None


@contextmanager
def _until_disconnected(request: Request, cancel: Callable[[], None]) -> Iterator[None]:
    """Call `cancel` if the client goes away while the block runs. Requires: the body was read."""

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        cancel()

    watching = asyncio.ensure_future(watch())
    try:
        yield
    finally:
        watching.cancel()


def _plain_body(request: Request, body: bytes) -> bytes:
    """Undo gzip, within bounds."""
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding == "identity":
        return body
    if encoding != "gzip":
        raise Refused(415, "bad_data", "the body is compressed by gzip, or not at all")
    plain = b""
    for _ in range(GZIP_MEMBERS_MAX):
        unpacking = zlib.decompressobj(31)
        try:
            plain += unpacking.decompress(body, TEXT_BYTES_MAX - len(plain) + 1)
        except zlib.error:
            raise Invalid("the body is not compressed by gzip") from None
        if len(plain) > TEXT_BYTES_MAX or not unpacking.eof:
            raise Invalid(f"the body is cut short, or has more than {TEXT_BYTES_MAX} bytes when decompressed")
        body = unpacking.unused_data
        if not body:
            return plain
    raise Invalid(f"the body has more than {GZIP_MEMBERS_MAX} members of gzip: compress it as one")


def _check_otlp(request: Request) -> None:
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/x-protobuf":
        raise Refused(415, "bad_data", "OTLP is taken as application/x-protobuf")
