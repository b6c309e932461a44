"""The HTTP door over a real socket: Prometheus' API, writes that are durable, and who may do what."""

from __future__ import annotations

import gzip
import hashlib
import json
import socket
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from test_http_remote_write import SYMBOLS, V1, V2, snappy

import penstock
from penstock.cli.certificates import make_certificates
from penstock.errors import Invalid
from penstock.http.application import HttpSettings
from penstock.http.serving import serve_http
from penstock.server.rights import Tokens

T = 1_700_000_000
PROTOBUF = {"Content-Type": "application/x-protobuf"}
SNAPPY = {**PROTOBUF, "Content-Encoding": "snappy"}


class Client:
    def __init__(self, port: int) -> None:
        self.port = port

    def send(self, path: str, body: bytes | None = None, **headers: str) -> tuple[int, Any, dict[str, str]]:
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", body)
        for name, value in headers.items():
            request.add_header(name.replace("_", "-"), value)
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                status, text, answer_headers = answer.status, answer.read(), dict(answer.headers)
        except urllib.error.HTTPError as refused:
            status, text, answer_headers = refused.code, refused.read(), dict(refused.headers)
        return status, json.loads(text) if text[:1] in (b"{", b"[") else text, answer_headers

    def get(self, path: str, **parameters: Any) -> Any:
        status, reply, _ = self.send(f"{path}?{urllib.parse.urlencode(parameters, doseq=True)}")
        assert status == 200, reply
        assert reply["status"] == "success"
        return reply["data"]

    def refused(self, path: str, **parameters: Any) -> tuple[int, str]:
        status, reply, _ = self.send(f"{path}?{urllib.parse.urlencode(parameters, doseq=True)}")
        assert reply["status"] == "error"
        return status, reply["errorType"]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with penstock.open(tmp_path_factory.mktemp("http") / "store") as owner, penstock.connect(owner.path) as connected:
        metrics = owner.series("metrics")
        metrics.write_columns(
            "up", [1.0, 0.5, float("inf")], {"job": "a"}, times=[T * 10**6 + n * 15 * 10**6 for n in range(3)]
        )
        metrics.write("up", 2.0, {"job": "b"}, time=T * 10**6)
        metrics.write("mem", 3.0, {"job": "a"}, time=T * 10**6)
        metrics.set_metadata("up", type="gauge", help="whether it is up", durable=True)
        owner.series("taken")
        owner.queue("logs")
        yield connected


@pytest.fixture(scope="module")
def client(store: Any) -> Iterator[Client]:
    with serve_http(store, HttpSettings(table="metrics", logs="logs", write=True)) as port:
        yield Client(port)


def test_queries(client: Client) -> None:
    assert client.get("/api/v1/query", query="1+1")["result"][1] == "2"
    data = client.get("/api/v1/query", query='up{job="a"}', time=T + 15)
    assert data == {
        "resultType": "vector",
        "result": [{"metric": {"__name__": "up", "job": "a"}, "value": [T + 15.0, "0.5"]}],
    }
    data = client.get("/api/v1/query_range", query="sum(up)", start=T, end=T + 30, step="15s")
    assert data == {
        "resultType": "matrix",
        "result": [{"metric": {}, "values": [[T, "3"], [T + 15, "2.5"], [T + 30, "+Inf"]]}],
    }
    raw = client.get("/api/v1/query", query='up{job="a"}[1m]', time="2023-11-14T22:13:50Z")
    assert [value for _, value in raw["result"][0]["values"]] == ["1", "0.5", "+Inf"]
    assert client.get("/api/v1/query", query='"x"')["result"][1] == "x"
    assert client.get("/prometheus/metrics/api/v1/query", query="vector(NaN)")["result"][0]["value"][1] == "NaN"
    assert client.get("/prometheus/taken/api/v1/query", query="up", time=T)["result"] == []


def test_a_query_by_post(client: Client) -> None:
    form = urllib.parse.urlencode({"query": "sum(up)", "time": T}).encode()
    status, reply, _ = client.send("/api/v1/query", form, Content_Type="application/x-www-form-urlencoded")
    assert (status, reply["data"]["result"][0]["value"][1]) == (200, "3")


def test_letters_in_a_form_need_no_escapes(client: Client, store: Any) -> None:
    """`curl -d 'query=…'` sends UTF-8 as it is."""
    store.series("taken").write("people", 1.0, {"city": "Zürich"}, time=T * 10**6, durable=True)
    form = f'query=people{{city="Zürich"}}&time={T}'.encode()
    status, reply, _ = client.send("/prometheus/taken/api/v1/query", form)
    assert (status, len(reply["data"]["result"])) == (200, 1)
    assert client.send("/prometheus/taken/api/v1/query", b"query=\xff")[0] == 400


def test_names_of_types_and_codings_are_of_any_case(client: Client) -> None:
    assert client.send("/prometheus/taken/write", gzip.compress(b"cased value=1"), Content_Encoding="GZIP")[0] == 204
    assert client.send("/v1/metrics", b"", Content_Type="Application/X-Protobuf")[0] == 200
    headers = {"Content_Type": "application/X-protobuf", "Content_Encoding": "Snappy"}
    assert client.send("/api/v1/write", b"\0", **headers)[0] == 204


def test_labels_series_and_metadata(client: Client) -> None:
    assert client.get("/api/v1/labels") == ["__name__", "job"]
    assert client.get("/api/v1/label/job/values") == ["a", "b"]
    assert client.get("/api/v1/label/__name__/values", **{"match[]": '{job="b"}'}) == ["up"]
    assert client.get("/api/v1/label/job/values", limit=1) == ["a"]
    assert client.get("/api/v1/series", **{"match[]": ["mem", 'up{job="b"}']}, start=T, end=T) == [
        {"__name__": "mem", "job": "a"},
        {"__name__": "up", "job": "b"},
    ]
    assert client.get("/api/v1/metadata") == {"up": [{"type": "gauge", "help": "whether it is up", "unit": ""}]}
    assert client.get("/api/v1/metadata", metric="mem") == {}


def test_what_grafana_asks_for(client: Client) -> None:
    assert client.get("/api/v1/status/buildinfo")["version"].startswith("3.")
    assert "features" not in client.get("/api/v1/status/buildinfo")
    assert client.get("/api/v1/rules") == {"groups": []}
    assert client.get("/api/v1/query_exemplars", query="up", start=T, end=T) == []
    assert client.get("/api/v1/status/tsdb")["headStats"]["numSeries"] == 3
    assert client.send("/-/healthy")[0] == client.send("/-/ready")[0] == 200


@pytest.mark.parametrize(
    ("path", "parameters", "refusal"),
    [
        ("/api/v1/query", {}, (400, "bad_data")),
        ("/api/v1/query", {"query": "sum("}, (400, "bad_data")),
        ("/api/v1/query", {"query": "up", "time": "soon"}, (400, "bad_data")),
        ("/api/v1/query", {"query": "up", "time": "1e300"}, (400, "bad_data")),
        ("/api/v1/query", {"query": "x" * 70_000}, (400, "bad_data")),
        ("/api/v1/query_range", {"query": "up", "start": 0, "end": 10, "step": 0}, (400, "bad_data")),
        ("/api/v1/query_range", {"query": "up", "start": 10, "end": 0, "step": 1}, (400, "bad_data")),
        ("/api/v1/query_range", {"query": "up[5m]", "start": 0, "end": 10, "step": 1}, (400, "bad_data")),
        ("/api/v1/query_range", {"query": "up", "start": 0, "end": 10**9, "step": 1}, (400, "bad_data")),
        ("/api/v1/query", {"query": "up + on() up", "time": T}, (422, "execution")),
        ("/api/v1/query", {"query": "up", "timeout": "x"}, (400, "bad_data")),
        ("/api/v1/series", {}, (400, "bad_data")),
        ("/api/v1/series", {"match[]": "up{"}, (400, "bad_data")),
        ("/api/v1/labels", {"limit": "-1"}, (400, "bad_data")),
        ("/prometheus/nothing/api/v1/query", {"query": "up"}, (404, "not_found")),
    ],
)
def test_errors_have_the_shape_of_prometheus(
    client: Client, path: str, parameters: dict[str, Any], refusal: tuple[int, str]
) -> None:
    if len(str(parameters)) > 1_000:  # longer than a line of a request may be
        form = urllib.parse.urlencode(parameters).encode()
        status, reply, _ = client.send(path, form)
        assert (status, reply["errorType"]) == refusal
    else:
        assert client.refused(path, **parameters) == refusal


def test_remote_write_is_durable_when_it_is_answered(client: Client, store: Any) -> None:
    status, _, headers = client.send("/prometheus/taken/api/v1/write", snappy(V1), **SNAPPY)
    assert (status, headers["x-prometheus-remote-write-samples-written"]) == (204, "3")
    v2 = {**SNAPPY, "Content-Type": "application/x-protobuf;proto=io.prometheus.write.v2.Request"}
    assert client.send("/prometheus/taken/api/v1/write", snappy(V2), **v2)[0] == 204
    taken = store.series("taken")
    assert taken.select("up").num_rows == 2
    assert taken.metadata("h")["h"].type == "histogram"
    assert SYMBOLS[2] in taken.label_values("__name__")


@pytest.mark.parametrize(
    ("path", "body", "headers", "status"),
    [
        ("/api/v1/write", snappy(V1), {"Content-Type": "text/plain"}, 415),
        ("/api/v1/write", snappy(V1), {**PROTOBUF, "Content-Encoding": "zstd"}, 415),
        ("/api/v1/write", b"\xff\xff\xff\xff\x0f" + b"x", SNAPPY, 400),
        ("/api/v1/write", snappy(b"\xff" * 50), SNAPPY, 400),
        ("/prometheus/nothing/api/v1/write", snappy(V1), SNAPPY, 404),
        ("/v1/metrics", b"\xff\xff", PROTOBUF, 400),
        ("/v1/metrics", b"{}", {"Content-Type": "application/json"}, 415),
        ("/write", b"cpu", {}, 400),
        # mtime: names of tests must not change from second to second, workers compare them
        ("/write", gzip.compress(b"cpu value=1", mtime=0)[:-6], {"Content-Encoding": "gzip"}, 400),
        ("/write", gzip.compress(b" " * (33 << 20), mtime=0), {"Content-Encoding": "gzip"}, 400),
        ("/write", b"x" * ((16 << 20) + 1), {}, 413),
    ],
)
def test_hostile_writes_are_refused(
    client: Client, path: str, body: bytes, headers: dict[str, str], status: int
) -> None:
    try:
        assert client.send(path, body, **headers)[0] == status
    except (ConnectionError, urllib.error.URLError):
        assert status == 413  # the server answers, and closes, before all of it was sent
    assert client.send("/-/healthy")[0] == 200


def test_lines_and_otlp(client: Client, store: Any) -> None:
    line = f"cpu,host=a idle=5 {T}".encode()
    assert client.send("/prometheus/taken/write?precision=s", gzip.compress(line), Content_Encoding="gzip")[0] == 204
    assert store.series("taken").select("cpu_idle").column("value").to_pylist() == [5.0]
    record: Any = [{"scope_logs": [{"log_records": [{"body": {"string_value": "late"}}]}]}]
    body = ExportLogsServiceRequest(resource_logs=record).SerializeToString()
    assert client.send("/v1/logs", body, **PROTOBUF)[0] == 200
    assert [json.loads(message.payload)["body"] for message in store.queue("logs").read()] == ["late"]


def test_a_page_of_a_browser_is_refused(client: Client) -> None:
    assert client.send("/api/v1/labels", Host="evil.example")[0] == 403
    assert client.send("/write", b"cpu value=1", Origin="http://evil.example")[0] == 403
    assert client.send("/api/v1/labels", Origin=f"http://127.0.0.1:{client.port}")[0] == 200
    assert client.send("/api/v1/labels", Host=f"localhost:{client.port}")[0] == 200


def test_without_write_it_only_reads(store: Any) -> None:
    with serve_http(store, HttpSettings(table="metrics")) as port:
        client = Client(port)
        assert client.send("/write", b"cpu value=1")[0] == 403
        assert client.send("/api/v1/labels")[0] == 200
        assert client.send("/v1/logs", b"", **PROTOBUF)[0] == 404
    with closing(socket.socket()) as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0  # it has ended


def test_tokens_have_rights(store: Any) -> None:
    listed = "\n".join(
        f'[tokens.{name}]\nsha256 = "{hashlib.sha256(name.encode()).hexdigest()}"\nrights = {{ {rights} }}'
        for name, rights in (("reader", 'metrics = "read"'), ("writer", '"*" = "write"'))
    )
    settings = HttpSettings(table="metrics", rights_of=Tokens.parse(listed).rights_of)
    with serve_http(store, settings) as port:
        client = Client(port)

        def status(path: str, token: str, body: bytes | None = None) -> int:
            return client.send(path, body, Authorization=f"Bearer {token}")[0]

        assert client.send("/api/v1/labels")[0] == 401
        assert status("/api/v1/labels", "guess") == 401
        assert status("/api/v1/labels", "reader") == 200
        assert status("/prometheus/taken/api/v1/labels", "reader") == 403
        assert status("/prometheus/taken/write", "reader", b"tok value=1") == 403
        assert status("/prometheus/taken/write", "writer", b"tok value=1") == 204
        assert client.send("/-/healthy")[0] == 200
        assert client.send("/metrics")[0] == 401
        assert status("/metrics", "reader") == 403  # it may read one table, and these name all
        assert status("/metrics", "writer") == 200


def test_our_own_metrics(client: Client) -> None:
    status, text, headers = client.send("/metrics")
    assert status == 200
    assert headers["content-type"].startswith("text/plain; version=0.0.4")
    assert b"# TYPE penstock_coordinator_writes_total counter" in text


def test_it_does_not_listen_beyond_loopback_without_tokens_and_tls(store: Any, tmp_path: Path) -> None:
    for host, certificate in (("0.0.0.0", None), ("127.0.0.1", tmp_path / "x.pem")):
        with (
            pytest.raises(Invalid, match="certificate"),
            serve_http(store, HttpSettings(), host, certificate=certificate),
        ):
            pass
    with (
        pytest.raises(Invalid, match="PEM"),
        serve_http(store, HttpSettings(), certificate=tmp_path / "x.pem", key=tmp_path / "x.key"),
    ):
        pass
    with pytest.raises(Invalid, match="cannot listen"), serve_http(store, HttpSettings(), port=70_000):
        pass


def test_tls_with_a_certificate_of_ours(store: Any, tmp_path: Path) -> None:
    """Beyond loopback: certificates that `penstock certificates` makes, tokens, and any name of the host."""
    make_certificates(str(tmp_path), ["localhost", "127.0.0.1"], 10)
    digest = hashlib.sha256(b"secret").hexdigest()
    rights = Tokens.parse(f'[tokens.reader]\nsha256 = "{digest}"\nrights = {{ metrics = "read" }}')
    settings = HttpSettings(table="metrics", rights_of=rights.rights_of)
    context = ssl.create_default_context(cafile=str(tmp_path / "authority.pem"))
    files: dict[str, Any] = {"certificate": tmp_path / "server.pem", "key": tmp_path / "server.key"}
    with serve_http(store, settings, "0.0.0.0", **files) as port:
        url = f"https://localhost:{port}/api/v1/query?query=up&time={T}"
        request = urllib.request.Request(url, headers={"Authorization": "Bearer secret", "Host": "metrics.example"})
        with urllib.request.urlopen(request, timeout=20, context=context) as answer:
            assert len(json.load(answer)["data"]["result"]) == 2
        request.remove_header("Authorization")
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(request, timeout=20, context=context)
        with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):  # of an unknown authority
            urllib.request.urlopen(request, timeout=20)
        with pytest.raises((OSError, HTTPException)):  # without TLS
            urllib.request.urlopen(f"http://localhost:{port}/-/healthy", timeout=20)


def test_a_table_is_named_or_there_is_none(store: Any) -> None:
    with serve_http(store, HttpSettings()) as port:
        assert Client(port).refused("/api/v1/labels") == (404, "not_found")
        assert Client(port).get("/prometheus/metrics/api/v1/labels") == ["__name__", "job"]


def test_too_many_requests_are_told_to_wait(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.http.application.REQUESTS_MAX", 0)
    with serve_http(store, HttpSettings(table="metrics")) as port:
        status, _, headers = Client(port).send("/api/v1/labels")
        assert (status, headers["retry-after"]) == (503, "1")
