"""Clients that are slow, cut short or hostile: what is acknowledged is stored, and every wait has an end."""

from __future__ import annotations

import gzip
import json
import socket
import struct
import threading
import time
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from owner_processes import faulty_owner, hurry, until
from test_http_application import PROTOBUF, Client
from test_http_remote_write import T, block, labels, sample, snappy, varint

import penstock
from penstock.errors import (
    Backpressure,
    Closed,
    CorruptionError,
    DiskFull,
    Invalid,
    KeyMissing,
    KindMismatch,
    Lost,
    OutcomeUnknown,
    PartitionPaused,
    Poisoned,
    WrongKey,
)
from penstock.http import application, incoming, serving
from penstock.http.application import HttpSettings
from penstock.http.line_protocol import decode_lines
from penstock.http.otlp import decode_logs, decode_metrics
from penstock.http.prometheus_api import ANSWERS, ReadRequest, label_values
from penstock.http.remote_write import decode_write
from penstock.http.result_json import POINTS_MAX, result_json
from penstock.http.serving import serve_http
from penstock.promql import QueryResult, SelectedSamples
from penstock.promql.labels import LabelMatrix
from penstock.server.rights import READ, Rights
from penstock.testing.clock import FakeClock


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with (
        penstock.open(tmp_path_factory.mktemp("hostile") / "store") as owner,
        penstock.connect(owner.path) as connected,
    ):
        owner.series("metrics")
        owner.kv("rows")
        yield connected


@pytest.fixture(scope="module")
def client(store: Any) -> Iterator[Client]:
    with serve_http(store, HttpSettings(table="metrics", write=True)) as port:
        yield Client(port)


def answer_to(port: int, *parts: bytes, then_close: bool = False) -> bytes:
    """Send bytes as they are, and return all that is answered until the server closes."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as wire:
        for part in parts:
            wire.sendall(part)
        if then_close:
            wire.shutdown(socket.SHUT_WR)
        answer = b""
        while more := wire.recv(65_536):
            answer += more
    return answer


def stored(store: Any, metric: str) -> int:
    rows: int = store.series("metrics").select(metric).num_rows
    return rows


# -- what is acknowledged is stored


def test_a_quote_in_a_comment_or_a_tag_hides_no_lines(client: Client, store: Any) -> None:
    assert client.send("/write", b'# say "hi\nhidden,a=x"y value=1\nhidden,b=" value=2\n')[0] == 204
    assert stored(store, "hidden") == 2
    with pytest.raises(Invalid, match="line 1 .*closing quote"):
        decode_lines(b'a text="x\nb value=1', 0)


def test_all_members_of_gzip_are_read(client: Client, store: Any) -> None:
    body = gzip.compress(b"member,n=1 value=1\n") + gzip.compress(b"member,n=2 value=1\n")
    assert client.send("/write", body, Content_Encoding="gzip")[0] == 204
    assert stored(store, "member") == 2
    for wrong in (body + b"\0rest", gzip.compress(b"") * 101):
        assert client.send("/write", wrong, Content_Encoding="gzip")[0] == 400


def test_points_that_are_left_out_are_told(client: Client, store: Any) -> None:
    points: Any = [{"as_double": 1.0}, {"as_double": 2.0}]
    metrics: Any = [
        {"name": "deltas", "sum": {"data_points": points, "aggregation_temporality": 1}},
        {"name": "level", "gauge": {"data_points": points[:1]}},
    ]
    sent: Any = [{"scope_metrics": [{"metrics": metrics}]}]
    body = ExportMetricsServiceRequest(resource_metrics=sent).SerializeToString()
    status, text, _ = client.send("/v1/metrics", body, **PROTOBUF)
    partial_success = ExportMetricsServiceResponse.FromString(text).partial_success
    assert (status, partial_success.rejected_data_points, stored(store, "level")) == (200, 2, 1)


@pytest.mark.parametrize(
    "body",
    [
        b"Content-Length: 100\r\n\r\ncut value=1\n",
        b"Transfer-Encoding: chunked\r\n\r\nc\r\ncut value=1\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\nff\r\ncut value=1\n",
        b"Transfer-Encoding: chunked\r\n\r\nzz\r\ncut value=1\n\r\n0\r\n\r\n",
        b"Content-Length: 12\r\nContent-Length: 13\r\n\r\ncut value=1\n",
        b"Content-Length: -1\r\n\r\ncut value=1\n",
    ],
)
def test_a_body_that_is_cut_is_not_stored(client: Client, store: Any, body: bytes) -> None:
    answer = answer_to(client.port, b"POST /write HTTP/1.1\r\nHost: localhost\r\n" + body, then_close=True)
    assert b" 204 " not in answer
    assert client.send("/-/healthy")[0] == 200
    assert stored(store, "cut") == 0


def test_nothing_of_a_refused_request_is_stored(client: Client, store: Any) -> None:
    good, long = (block(1, labels(__name__="part", l=value) + sample(1.0, T)) for value in ("a", "x" * 5_000))
    headers = {**PROTOBUF, "Content-Encoding": "snappy"}
    assert client.send("/api/v1/write", snappy(good + long), **headers)[0] == 400
    described = block(3, whole_metadata("x" * 5_000, "help"))
    assert client.send("/api/v1/write", snappy(good + described), **headers)[0] == 400
    assert stored(store, "part") == 0
    same = block(1, labels(__name__="part", l="a", m="") + sample(2.0, T + 1))
    assert client.send("/api/v1/write", snappy(good + same), **headers)[0] == 204
    assert store.series("metrics").series("part").num_rows == 1  # a label without a value is absent


def test_a_long_help_is_cut(client: Client, store: Any) -> None:
    """The samples beside it would be lost: an agent drops what is refused."""
    body = block(1, labels(__name__="told") + sample(1.0, T)) + block(3, whole_metadata("told", "é" * 5_000))
    assert client.send("/api/v1/write", snappy(body), **{**PROTOBUF, "Content-Encoding": "snappy"})[0] == 204
    assert store.series("metrics").metadata("told")["told"].help == "é" * 2_048


def whole_metadata(metric: str, text: str) -> bytes:
    return block(2, metric) + block(4, text)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (Invalid("x"), 400),
        (KindMismatch("x"), 422),
        (Backpressure("x"), 429),
        *((error, 503) for error in (OutcomeUnknown("x"), DiskFull("x"), Closed("x"), Poisoned("x"), Lost("x"))),
        (PartitionPaused("x"), 503),
        *((error, 503) for error in (KeyMissing("x"), WrongKey("x"))),
        (CorruptionError("x", 0, "y"), 503),
        (MemoryError(), 500),
    ],
)
def test_only_a_wrong_request_is_answered_with_an_error_that_makes_senders_drop_it(
    error: Exception, status: int
) -> None:
    assert incoming.refusal_of(error).status == status


def test_samples_for_a_store_that_is_not_there_are_kept_by_their_sender(tmp_path: Path) -> None:
    """A disk that is not mounted: the sender tries again at 503, and drops what it has at 404."""
    folder = tmp_path / "store"
    with penstock.open(folder) as owner:
        owner.series("metrics")
        connected = penstock.connect(folder)
    with connected, serve_http(connected, HttpSettings(table="metrics", write=True)) as port:
        folder.rename(tmp_path / "away")
        status, reply, _ = Client(port).send("/write", b"away value=1")
        assert (status, "there is no store in" in reply["error"]) == (503, True)
        (tmp_path / "away").rename(folder)
        assert Client(port).send("/write", b"away value=1")[0] == 204
        assert Client(port).send("/prometheus/absent/write", b"away value=1")[0] == 404


# -- a few bytes do not become many


def test_long_labels_are_not_repeated_for_each_sample() -> None:
    wide = labels(__name__="wide", **{f"l{n}": "x" * 4_096 for n in range(60)})
    samples = decode_write(snappy(block(1, wide + sample(1.0, T) * 10_000)), 1).to_block()
    assert (len(samples), len(samples.series)) == (10_000, 1)


def test_samples_are_counted_before_they_are_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two bytes of a body are a sample, and 90 bytes of memory."""
    monkeypatch.setattr("penstock.http.samples.SAMPLES_MAX", 1_000)
    body = snappy(block(1, labels(__name__="m") + block(2, b"") * 100_000))
    tracemalloc.start()
    try:
        with pytest.raises(Invalid, match="at most 1000 samples"):
            decode_write(body, 1)
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()


def test_labels_of_a_request_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    symbols = ["", "__name__", "m", "l", "x" * 4_000, *(f"v{n}" for n in range(40))]
    head = b"".join(block(4, symbol) for symbol in symbols)
    series = b"".join(block(5, block(1, bytes([1, 5 + n, 3, 4])) + sample(1.0, T)) for n in range(40))
    assert len(decode_write(snappy(head + series), 2)) == 40
    monkeypatch.setattr("penstock.http.samples.LABEL_BYTES_MAX", 100_000)
    with pytest.raises(Invalid, match="too many labels, or too long"):
        decode_write(snappy(head + series), 2)
    names = b"".join(block(1, labels(__name__="m", **{f"n{n}": "x"}) + sample(1.0, T)) for n in range(40))
    assert len(decode_write(snappy(names), 1)) == 40
    monkeypatch.setattr("penstock.http.samples.LABEL_CELLS_MAX", 1_000)
    with pytest.raises(Invalid, match="too many labels, or too long"):
        decode_write(snappy(names), 1)
    monkeypatch.setattr("penstock.http.samples.SERIES_MAX", 3)
    with pytest.raises(Invalid, match="describes at most 3"):
        decode_write(snappy(b"".join(block(3, whole_metadata(f"m{n}", "x")) for n in range(4))), 1)


def test_logs_and_attributes_of_a_request_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    attributes: Any = [{"key": "k", "value": {"string_value": "x" * 1_000}}]
    logs: Any = [{"resource": {"attributes": attributes}, "scope_logs": [{"log_records": [{}] * 50}]}]
    body = ExportLogsServiceRequest(resource_logs=logs).SerializeToString()
    assert len(decode_logs(body, 0)) == 50
    monkeypatch.setattr("penstock.http.otlp.LOG_BYTES_MAX", 20_000)
    with pytest.raises(Invalid, match="more than 20000 bytes"):
        decode_logs(body, 0)
    points: Any = [{"attributes": [{"key": "a.", "value": {"string_value": "x"}}] * 257, "as_int": 1}]
    sent: Any = [{"scope_metrics": [{"metrics": [{"name": "m", "gauge": {"data_points": points}}]}]}]
    with pytest.raises(Invalid, match="257 attributes"):
        decode_metrics(ExportMetricsServiceRequest(resource_metrics=sent).SerializeToString(), 0)


def test_all_queries_together_hold_a_bounded_number_of_samples(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(application, "SAMPLES_MAX", 5)
    store.series("metrics").write_columns("held", np.arange(4.0), times=np.arange(4) * 10**6, durable=True)
    parameters = {"query": "sum_over_time(held[1m])", "time": 4}
    inner, replies = ANSWERS["query"], []

    def nested(table: Any, request: Any) -> Any:
        answer = inner(table, request)  # still holds its samples
        replies.append(door.send(f"/api/v1/format_query?{urlencode(parameters)}"))
        return answer

    monkeypatch.setattr(application, "ANSWERS", {**ANSWERS, "query": nested, "format_query": inner})
    with serve_http(store, HttpSettings(table="metrics")) as port:
        door = Client(port)
        for _ in range(2):
            assert door.get("/api/v1/query", **parameters)["result"][0]["value"][1] == "6"
        assert [status for status, _, _ in replies] == [429, 429]
        assert "retry later" in replies[0][1]["error"]
        assert door.get("/api/v1/format_query", **parameters)["result"][0]["value"][1] == "6"  # alone


def test_many_selectors_end_when_the_client_is_gone(store: Any) -> None:
    table = store.series("metrics")
    for answer in (
        ANSWERS["series"],
        ANSWERS["labels"],
        lambda *arguments: label_values(arguments[0], "a", arguments[1]),
    ):
        request = ReadRequest({"match[]": ["{__name__!=''}"] * 3, "timeout": ["5"]}, FakeClock())
        assert isinstance(answer(table, request), list)
        request.cancel()
        with pytest.raises(Closed):
            answer(table, request)


def test_an_answer_has_a_limit_of_points(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.http.result_json.POINTS_MAX", 9)
    samples = SelectedSamples(LabelMatrix.empty(1), np.array([0, 10]), np.arange(10), np.zeros(10))
    with pytest.raises(Invalid, match="at most 9 points, not 10"):
        result_json(QueryResult("matrix", samples))
    assert POINTS_MAX > 9


# -- every wait has an end


def test_a_body_that_does_not_arrive_is_given_up(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incoming, "BODY_S", 0.2)
    with serve_http(store, HttpSettings(table="metrics", write=True)) as port:
        answer = answer_to(port, b"POST /write HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\nslow val")
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["errorType"] == "timeout"
        assert stored(store, "slow") == 0


def test_a_connection_without_a_request_is_ended(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.http.serving.IDLE_S", 0.3)
    with serve_http(store, HttpSettings(table="metrics")) as port:
        assert answer_to(port) == b""
        assert answer_to(port, b"GET /-/healthy HTTP/1.1\r\nHost: loc") == b""
        request = b"GET /-/healthy HTTP/1.1\r\nHost: localhost\r\n\r\n"
        assert answer_to(port, request, request[:10]).count(b" 200 OK") == 1


def test_connections_without_requests_do_not_keep_others_out(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "CONNECTIONS_MAX", 4)
    with serve_http(store, HttpSettings(table="metrics")) as port, ExitStack() as opened:
        silent = [opened.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20)) for _ in range(12)]
        for wire in silent[::2]:
            with suppress(OSError):
                wire.sendall(b"GET /-/healthy HTTP/1.1\r\nHost: loc")
        assert Client(port).get("/api/v1/labels") is not None
        for wire in silent[:8]:  # the oldest were ended
            with suppress(ConnectionError):
                assert wire.recv(1) == b""


def test_a_client_that_does_not_read_its_answer_is_ended(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    size = 32 << 20
    monkeypatch.setattr(application, "ANSWERS", {**ANSWERS, "query": lambda *_: "x" * size})
    request = b"GET /api/v1/query?query=1 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"

    def answer_size(port: int, wait_s: float) -> int:
        with socket.create_connection(("127.0.0.1", port), timeout=20) as wire:
            wire.sendall(request)
            count = len(wire.recv(1))
            time.sleep(wait_s)
            try:
                while more := wire.recv(1 << 20):
                    count += len(more)
            except ConnectionError:
                pass
        return count

    with serve_http(store, HttpSettings(table="metrics")) as port:
        assert answer_size(port, 0) > size
    monkeypatch.setattr("penstock.http.serving.IDLE_S", 0.3)
    with serve_http(store, HttpSettings(table="metrics")) as port:
        assert answer_size(port, 1.5) < size


def test_a_query_ends_when_its_client_is_gone(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[bool] = []

    def slow(table: Any, request: Any) -> Any:
        budget = request.budget()
        until = time.monotonic() + 10
        while time.monotonic() < until:
            try:
                budget.check()
            except Closed:
                ended.append(True)
                raise
            time.sleep(0.01)
        ended.append(False)

    monkeypatch.setattr(application, "ANSWERS", {**ANSWERS, "query": slow})
    with serve_http(store, HttpSettings(table="metrics")) as port:
        for head in (b"GET /api/v1/query?query=1", b"POST /api/v1/query"):
            with socket.create_connection(("127.0.0.1", port), timeout=20) as wire:
                wire.sendall(head + b" HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n")
                time.sleep(0.2)
        until = time.monotonic() + 8
        while len(ended) < 2 and time.monotonic() < until:
            time.sleep(0.01)
    assert ended == [True, True]


# -- malformed requests are answered in one line


@pytest.mark.parametrize(
    ("path", "body", "headers", "status"),
    [
        ("/api/v1/labels?" + "a=b&" * 1_001, None, {}, 400),
        ("/api/v1/labels", b"a=b&" * 1_001, {}, 400),
        ("/api/v1/labels", None, {"Origin": "http://[evil"}, 403),
        ("/api/v1/labels", None, {"Origin": "null"}, 403),
        ("/api/v1/labels", None, {"Host": "localhost:evil"}, 403),
        ("/api/v1/labels", None, {"Host": "localhost.evil.example"}, 403),
        ("/api/v1/query_range?query=1&start=0&end=10&step=9999999999999999999y", None, {}, 400),
        ("/api/v1/query_range?query=1&start=0&end=10&step=0s", None, {}, 400),
        ("/api/v1/query_range?query=1&start=0&end=11001&step=1", None, {}, 400),
        ("/api/v1/query_range?query=1&start=0&end=10&step=nan", None, {}, 400),
        ("/api/v1/query_range?query=1&start=nan&end=10&step=1", None, {}, 400),
        ("/api/v1/query?query=x%5B1e30%5D", None, {}, 400),
        ("/api/v1/query?query=x%20@%20253402300800", None, {}, 400),
        ("/api/v1/query?query=" + "(" * 200 + "1" + ")" * 200, None, {}, 400),
        ("/prometheus/rows/api/v1/query?query=up", None, {}, 422),
        ("/prometheus/rows/write", b"a value=1", {}, 422),
        ("/prometheus/..%2Fmetrics/api/v1/labels", None, {}, 404),
        ("/prometheus/../metrics/api/v1/labels", None, {}, 404),
        ("/prometheus/%00/api/v1/labels", None, {}, 400),
        ("/write?precision=fortnight", b"a value=1", {}, 400),
        ("/api/v1/write", varint(1 << 31) + b"x", {**PROTOBUF, "Content-Encoding": "snappy"}, 400),
        ("/api/v1/label/a%00b/values", None, {}, 400),
    ],
)
def test_malformed_requests_have_an_answer(
    client: Client, path: str, body: bytes | None, headers: dict[str, str], status: int
) -> None:
    actual, text, _ = client.send(path, body, **headers)
    assert actual == status, text
    assert isinstance(text, bytes) or ("\n" not in text["error"] and text["errorType"] != "internal")


def test_a_staleness_marker_keeps_its_bits(client: Client, store: Any) -> None:
    marker, payload = 0x7FF0000000000002, 0x7FF8DEADBEEF0001
    stale, other = struct.unpack("<dd", struct.pack("<QQ", marker, payload))
    body = block(1, labels(__name__="gone") + sample(1.0, T) + sample(stale, T + 1_000) + sample(other, T + 2_000))
    assert client.send("/api/v1/write", snappy(body), **{**PROTOBUF, "Content-Encoding": "snappy"})[0] == 204
    values = store.series("metrics").select("gone").column("value").to_numpy().view("u8").tolist()
    assert values[1:] == [marker, payload]
    assert client.get("/api/v1/query", query="gone", time=T / 1_000 + 1) == {"resultType": "vector", "result": []}
    assert client.get("/api/v1/query", query="gone", time=T / 1_000 + 2)["result"][0]["value"][1] == "NaN"


# -- an owner that is gone


def test_writes_go_on_when_there_is_an_owner_again(tmp_path: Path) -> None:
    """Without an owner for so long that writes failed, senders are told to wait; with the next one all is written."""
    owner = penstock.open(tmp_path / "store")
    owner.series("metrics")
    with ExitStack() as later, penstock.connect(owner.path) as store:  # the next owner outlives the client
        hurry(store, 0.3)
        store._port._flusher._send_s = 0.5
        with serve_http(store, HttpSettings(table="metrics", write=True)) as port:
            door = Client(port)
            assert door.send("/write", b"cpu,n=1 value=1 1000000000")[0] == 204
            owner.close()
            hidden = penstock.open(tmp_path / "store", settings=penstock.StoreSettings(serve=False))  # and is silent
            status, reply, headers = door.send("/write", b"cpu,n=2 value=2 1000000000")
            assert status == 503, reply
            assert headers["retry-after"].isdecimal()
            assert door.send("/write", b"cpu,n=3 value=3 1000000000")[0] == 503
            hidden.close()
            owner = later.enter_context(penstock.open(tmp_path / "store"))
            for body in (b"cpu,n=2 value=2 1000000000", b"cpu,n=3 value=3 1000000000"):  # as senders do
                until(lambda body=body: door.send("/write", body)[0] == 204)
            assert sorted(owner.series("metrics").select("cpu").column("value").to_pylist()) == [1.0, 2.0, 3.0]


def test_writes_go_on_after_the_disk_of_the_owner_failed(tmp_path: Path) -> None:
    """Nothing that was answered with 204 is missing, and the door recovers by itself when the owner has."""
    fails, folder, answers = tmp_path / "fails", tmp_path / "store", dict[int, int]()
    with penstock.open(folder) as owner:
        owner.series("metrics")
    with faulty_owner(folder, fails), penstock.connect(folder) as store:
        hurry(store, 1.0)
        store._port._flusher._send_s = 0.3
        with serve_http(store, HttpSettings(table="metrics", write=True)) as port:
            door = Client(port)

            def send(number: int) -> int:
                answers[number] = door.send("/write", b"cpu,n=%d value=%d 1000000000" % (number, number))[0]
                return answers[number]

            assert send(0) == 204
            fails.write_text("")
            with ThreadPoolExecutor(6) as pool:
                failing = list(pool.map(send, range(1, 7)))  # two of everything at once
                assert set(failing) <= {204, 503, 429}
                fails.unlink()
                until(lambda: all(answer == 204 for answer in pool.map(send, range(1, 13))))
        values = store.series("metrics").select("cpu").column("value").to_pylist()
    assert sorted(values) == list(range(13))


def test_one_request_recovers_and_the_others_are_told_to_wait(store: Any) -> None:
    """While one request recovers a poisoned connection, others get 503, and nothing is written twice."""
    began, ends, calls = threading.Event(), threading.Event(), []

    class Poisonous:
        port = store.port

        def series(self, *arguments: Any, **options: Any) -> Any:
            if not ends.is_set():
                raise Poisoned("writes failed: call recover()")
            return store.series(*arguments, **options)

        def recover(self) -> None:
            calls.append("recover")
            began.set()
            assert ends.wait(20)

        def batch(self) -> Any:
            return store.batch()

    with serve_http(Poisonous(), HttpSettings(table="metrics", write=True)) as port, ThreadPoolExecutor(1) as pool:
        first = pool.submit(Client(port).send, "/write", b"poison value=1 1000000000")
        assert began.wait(20)
        status, _, headers = Client(port).send("/write", b"poison value=2 1000000000")
        assert (status, headers["retry-after"]) == (503, "5")
        ends.set()
        assert first.result(20)[0] == 204
    assert calls == ["recover"]
    assert store.series("metrics").select("poison").column("value").to_pylist() == [1.0]


def test_lines_have_a_deadline(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(application, "DECODE_S", -1.0)
    with serve_http(store, HttpSettings(table="metrics", write=True)) as port:
        status, reply, _ = Client(port).send("/write", b"\n".join(b"slow value=%d" % n for n in range(300)))
        assert (status, reply["errorType"]) == (503, "timeout")
        assert "send fewer at once" in reply["error"]
        assert Client(port).send("/write", b"slow value=1")[0] == 204  # too few to look at the clock


def test_messages_are_counted_before_they_are_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two bytes of OTLP are a message, and a hundred bytes of memory."""
    body = block(1, block(2, b"\x12\x00" * 600_000))  # metrics that are empty
    with pytest.raises(Invalid, match="more than 500000 texts and messages"):
        monkeypatch.setattr("penstock.http.otlp.BLOCKS_MAX", 500_000)
        decode_metrics(body, 0)
    monkeypatch.setattr("penstock.http.otlp.BLOCKS_MAX", 700_000)
    assert len(decode_metrics(body, 0)) == 0
    cut = body[:-1]
    with pytest.raises(Invalid, match="not a request of OTLP"):
        decode_metrics(cut, 0)


def test_answers_are_not_delayed(store: Any) -> None:
    """Nagle's algorithm is off: an answer of two packets would wait for the client's delayed acknowledgement."""
    listening = serving._listen("127.0.0.1", 0)
    with listening, socket.create_connection(listening.getsockname()):
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.proto == socket.IPPROTO_TCP  # asyncio turns it off for this protocol only


@pytest.mark.parametrize(
    ("body", "version"),
    [
        (b"\x78\x00" * 3_000, 1),  # fields that nobody knows, of two bytes each
        (block(1, labels(__name__="m") + b"\x78\x00" * 300) * 10, 1),
        (block(1, labels(__name__="m") + block(2, b"\x78\x00" * 3_000)), 1),
        (block(1, block(1, block(1, "__name__") + block(2, "m") + b"\x78\x00" * 3_000)), 1),
        (b"\x78\x00" * 3_000, 2),
        (b"".join(block(4, s) for s in ("", "__name__", "m")) + block(5, b"\x0a\x02\1\2" + b"\x78\x00" * 300) * 10, 2),
    ],
)
def test_fields_of_a_body_are_bounded(body: bytes, version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.http.wire_format.FIELDS_MAX", 2_000)
    with pytest.raises(Invalid, match="more than 2000 fields"):
        decode_write(snappy(body), version)


@pytest.mark.parametrize("path", ["/api/v1/write", "/nowhere", "/"])
def test_a_body_after_its_answer_keeps_nobody_out(store: Any, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has no token is answered at once, and may go on sending: his connections yield, and end."""
    monkeypatch.setattr(serving, "CONNECTIONS_MAX", 4)
    monkeypatch.setattr(serving, "IDLE_S", 1.0)
    rights = {"good": Rights(client="a", tables={"metrics": READ})}
    settings = HttpSettings(table="metrics", rights_of=rights.get)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000000\r\n\r\n".encode()
    with serve_http(store, settings) as port, ExitStack() as opened:
        wires = [opened.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20)) for _ in range(6)]
        ended: set[int] = set()

        def all_ended() -> bool:
            for number, wire in enumerate(wires):
                try:
                    wire.sendall(b"x")
                except OSError:
                    ended.add(number)
            return len(ended) == len(wires)

        for wire in wires:
            with suppress(OSError):  # it was ended for a later one
                wire.sendall(head)
                wire.recv(65_536)
        for _ in range(3):
            all_ended()
            time.sleep(0.02)
        status, _, _ = Client(port).send("/api/v1/labels", Authorization="Bearer good")
        assert status == 200
        until(all_ended)
