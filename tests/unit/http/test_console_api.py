"""The console's API over a real socket: who may see and do what, and that data come as they are."""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import http.client
import json
import re
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from console_stores import SCRIPT, fill, letter, tokens

import penstock
from penstock.http import console, console_reading, console_sampling
from penstock.http.application import HttpSettings
from penstock.http.console import ConsoleSettings, page_files
from penstock.http.console_sampling import Sampler, StoreReader, parse_metrics
from penstock.http.serving import serve_http
from penstock.testing import FakeClock
from penstock.testing.members import TOKEN, LocalCluster, await_true

OURS = {"X-Penstock-Console": "1"}


class Door:
    """A client of the console."""

    def __init__(self, port: int) -> None:
        self.port = port

    def send(self, path: str, body: Any = None, **headers: str) -> tuple[int, Any, dict[str, str]]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        request_headers = {name.replace("_", "-"): value for name, value in headers.items()}
        data = None if body is None else json.dumps(body).encode()
        try:
            connection.request("GET" if body is None else "POST", path, data, request_headers)
            answer = connection.getresponse()
            text, answer_headers = answer.read(), dict(answer.getheaders())
        finally:
            connection.close()
        return answer.status, json.loads(text) if text[:1] == b"{" else text, answer_headers

    def read(self, path: str, token: str = "admin") -> Any:
        status, reply, _ = self.send(f"/console/api/{path}", Authorization=f"Bearer {token}")
        assert status == 200, reply
        return reply["data"]

    def status(self, path: str, token: str = "admin", body: Any = None, **headers: str) -> int:
        return self.send(f"/console/api/{path}", body, Authorization=f"Bearer {token}", **headers)[0]

    def act(self, name: str, token: str = "admin", **fields: Any) -> tuple[int, Any]:
        return self.send(f"/console/api/do/{name}", fields, Authorization=f"Bearer {token}", **OURS)[:2]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with (
        penstock.open(tmp_path_factory.mktemp("console") / "store") as owner,
        penstock.connect(owner.path) as connected,
    ):
        fill(owner)
        yield connected


@pytest.fixture(scope="module")
def door(store: Any) -> Iterator[Door]:
    settings = HttpSettings(rights_of=tokens().rights_of, loopback=True, console=ConsoleSettings(write=True))
    with serve_http(store, settings) as port:
        yield Door(port)


# -- who may


READS = ["hello", "sample", "table?table=users", "rows?table=users", "messages?table=events", "letters?table=dead",
         "cardinality?table=metrics", "neighbours?table=docs", "jobs", "chunks?table=users", "members"]  # fmt: skip


@pytest.mark.parametrize("path", READS)
def test_reading_needs_a_token_that_the_server_knows(door: Door, path: str) -> None:
    assert door.status(path) == 200
    assert door.send(f"/console/api/{path}")[0] == 401
    assert door.status(path, "wrong") == 401
    assert door.status(path, "nothing") == 403
    assert door.status(path, "reader") == 200
    assert door.send("/console/events")[0] == 401


def test_a_token_sees_its_tables_only(door: Door) -> None:
    assert [table["name"] for table in door.read("hello", "part")["tables"]] == ["users"]
    sample = door.read("sample", "part")
    assert [table["name"] for table in sample["tables"]] == ["users"]
    assert sample["consumers"] == []
    assert {consumer["queue"] for consumer in door.read("sample")["consumers"]} == {"events"}
    for path in ("rows?table=blobs", "messages?table=events", "table?table=metrics", "rows?table=absent"):
        assert door.status(path, "part") == 404
    assert {job["table"] for job in door.read("jobs", "part")["jobs"]} == {"users"}


def test_an_action_needs_write_the_right_and_our_header(door: Door, store: Any) -> None:
    blobs = store.kv("blobs")
    blobs.put(b"kept", b"1", durable=True)
    key = b"kept".hex()
    refused = [
        door.send("/console/api/do/delete", {"table": "blobs", "key": key}, **OURS)[0],
        door.act("delete", "wrong", table="blobs", key=key)[0],
        door.act("delete", "reader", table="blobs", key=key)[0],
        door.act("delete", "writer", table="blobs", key=key)[0],
        door.act("compact", "writer", table="events")[0],
        door.status("do/delete", "admin", {"table": "blobs", "key": key}),  # without the header
        door.status("do/delete", "admin", {"table": "blobs", "key": key}, Origin="http://evil.example", **OURS),
        door.status("do/delete", "admin", {"table": "blobs", "key": key}, Sec_Fetch_Site="cross-site", **OURS),
        door.status("do/delete", "admin", {"table": "blobs", "key": key}, Sec_Fetch_Site="same-site", **OURS),
        door.status("do/delete", "admin"),  # GET
    ]
    assert refused == [401, 401, 403, 403, 403, 403, 403, 403, 403, 405]
    assert blobs.get(b"kept") == b"1"
    assert door.act("delete", table="blobs", key=key)[0] == 200  # the control: with all of it, it is done
    assert blobs.get(b"kept") is None


def test_a_console_that_only_reads_changes_nothing(store: Any) -> None:
    settings = HttpSettings(rights_of=tokens().rights_of, console=ConsoleSettings())
    with serve_http(store, settings) as port:
        door = Door(port)
        status, reply = door.act("delete", table="users", key=b"user-001".hex())
        assert (status, "--write" in reply["error"]) == (403, True)
        assert door.read("hello")["write"] is False
    assert store.kv("users", value="json").get(b"user-001") is not None


def test_without_tokens_this_machine_reads(store: Any) -> None:
    with serve_http(store, HttpSettings(console=ConsoleSettings())) as port:
        door = Door(port)
        assert door.send("/console/api/hello")[0] == 200
        assert door.send("/console/api/hello", Host="evil.example")[0] == 403
        assert door.send("/console/api/do/compact", {"table": "users"}, **OURS)[0] == 403
    with serve_http(store, HttpSettings()) as port:
        assert Door(port).send("/console/")[0] == 404


def test_a_foreign_host_and_another_site_are_refused(door: Door) -> None:
    for path in ("/console/", "/console/files/app.js", "/console/api/hello", "/console/events"):
        for host in ("evil.example", f"evil.example:{door.port}", "127.0.0.1.evil.example"):
            assert door.send(path, Host=host, Authorization="Bearer admin")[0] == 403
    assert door.status("hello", Sec_Fetch_Site="cross-site") == 403
    assert door.send("/console/events", Sec_Fetch_Site="same-site", Authorization="Bearer admin")[0] == 403
    assert door.send("/console/", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="navigate")[0] == 200  # a link
    assert door.send("/console/", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="no-cors")[0] == 403


def test_a_session_has_the_rights_of_its_token(door: Door) -> None:
    wrong = door.send("/console/api/login", {"token": "wrong"}, **OURS)
    assert (wrong[0], "set-cookie" in wrong[2]) == (401, False)
    assert door.send("/console/api/login", {"token": "reader"})[0] == 403  # a form of another site has no header
    assert door.send("/console/api/login", {"token": "reader"}, Origin="http://evil.example", **OURS)[0] == 403
    status, _, headers = door.send("/console/api/login", {"token": "reader"}, **OURS)
    cookie = headers["set-cookie"]
    assert status == 200
    assert {"HttpOnly", "SameSite=strict", "Path=/"} <= set(cookie.split("; "))
    session = cookie.partition(";")[0]
    assert session.startswith(f"penstock-{door.port}=")
    assert "reader" not in session
    assert door.send("/console/api/hello", Cookie=session)[1]["data"]["client"] == "reader"
    assert door.send("/prometheus/metrics/api/v1/query?query=cpu", Cookie=session)[0] == 200
    done = door.send("/console/api/do/delete", {"table": "users", "key": "00"}, Cookie=session, **OURS)
    assert (done[0], "right to write" in done[1]["error"]) == (403, True)
    assert door.send("/console/api/logout", {}, Cookie=session, **OURS)[0] == 200
    assert door.send("/console/api/hello", Cookie=session)[0] == 401
    assert door.send("/console/api/hello", Cookie=f"penstock-{door.port}=made-up")[0] == 401


# -- what is sent


def test_the_page_is_whole_small_and_strict(door: Door) -> None:
    files = page_files()
    folder = Path(console.__file__).parent / "console_files"
    assert sum(path.stat().st_size for path in folder.iterdir()) < 150_000
    assert sum(len(body) for body, _ in files.values()) < 80_000  # as it is sent
    for name in files:
        status, body, headers = door.send(f"/console/files/{name}")
        assert (status, headers["x-content-type-options"]) == (200, "nosniff")
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "*" not in policy
        text = body if isinstance(body, bytes) else json.dumps(body).encode()
        if name not in ("uplot.js", "preact.js", "licences.txt"):
            assert not re.search(rb"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|new Function", text), name
            assert b"dangerouslySet" not in text
            assert not re.search(rb"https?://(?!www\.w3\.org/2000/svg)", text), name
    assert door.send("/console/files/%2e%2e%2fconsole.py")[0] == 404
    assert door.send("/console/files/absent.js")[0] == 404
    assert door.send("/console")[0] == 307


def test_the_vendored_libraries_are_those_of_npm(door: Door) -> None:
    sums = {name: hashlib.sha256(gzip.decompress(body)).hexdigest()[:16] for name, (body, _) in page_files().items()}
    assert sums["preact.js"] == "72284e8e9079c878"
    assert sums["uplot.js"] == "19c8d4c6ad88929a"
    licences = gzip.decompress(page_files()["licences.txt"][0]).decode()
    assert all(name in licences for name in ("htm 3.1.1", "Preact", "uPlot 1.6.32", "Apache License", "MIT License"))


def test_rows_come_as_they_are(door: Door) -> None:
    page = door.read("rows?table=users&limit=200")
    assert (len(page["rows"]), page["rows"][0]["key"]) == (200, SCRIPT.encode().hex())
    more = door.read(f"rows?table=users&limit=200&after={page['next']}")
    assert (len(more["rows"]), more["next"]) == (101, None)
    keys = [bytes.fromhex(row["key"]) for row in page["rows"] + more["rows"]]
    assert keys == sorted(keys)
    assert len(set(keys)) == 301
    back = door.read("rows?table=users&limit=3&reverse=1")
    assert [bytes.fromhex(row["key"]) for row in back["rows"]] == [b"user-299", b"user-298", b"user-297"]
    back = door.read(f"rows?table=users&limit=3&reverse=1&after={back['next']}")
    assert bytes.fromhex(back["rows"][0]["key"]) == b"user-296"
    matches = door.read(f"rows?table=users&prefix={b'user-29'.hex()}&contains=user+295")
    assert ([bytes.fromhex(row["key"]) for row in matches["rows"]], matches["scanned"]) == ([b"user-295"], 10)
    blob = door.read("row?table=blobs&key=00ff01")
    assert (base64.b64decode(blob["value"]["data"]), blob["value"]["type"]) == (b"\xff\x00binary", "bytes")
    values = {bytes.fromhex(row["key"]): row["value"] for row in door.read("rows?table=blobs")["rows"]}
    assert (values[b"large"]["size"], len(base64.b64decode(values[b"large"]["data"]))) == (9_000, 2_048)
    assert len(base64.b64decode(door.read(f"row?table=blobs&key={b'large'.hex()}")["value"]["data"])) == 9_000
    city = door.read(f"row?table=cities&key={'Zürich'.encode().hex()}")
    assert base64.b64decode(city["value"]["data"]) == b"443000"


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("rows", 400), ("rows?table=events", 400), ("rows?table=users&limit=0", 400), ("rows?table=users&limit=x", 400),
        ("rows?table=users&prefix=zz", 400), ("row?table=users&key=00", 404), ("row?table=cities&key=ff", 400),
        ("messages?table=events&shard=1", 400), ("messages?table=events&from=-1", 400),
        ("message?table=events&sequence=99999", 404), ("neighbours?table=docs&k=0", 400),
        ("neighbours?table=docs&like=absent", 404), ("neighbours?table=docs&vector=[1", 400),
        ("neighbours?table=docs&vector=[1,2]", 400), ("chunks?table=absent", 404), ("no_such_name", 404),
    ],
)  # fmt: skip
def test_wrong_requests_are_refused_in_one_line(door: Door, path: str, status: int) -> None:
    actual, reply, _ = door.send(f"/console/api/{path}", Authorization="Bearer admin")
    assert (actual, "\n" in reply["error"]) == (status, False)


@pytest.mark.parametrize("body", [[], "x", {"table": 1, "key": ""}, {"table": "blobs", "key": True}, {"table": None}])
def test_wrong_bodies_are_refused(door: Door, body: Any) -> None:
    assert door.status("do/delete", "admin", body, **OURS) == 400


@pytest.mark.parametrize("token", [5, None, True, [], {}, "\0", "x" * 2_000_000])
def test_wrong_tokens_are_refused(door: Door, token: Any) -> None:
    assert door.send("/console/api/login", {"token": token}, **OURS)[0] in (400, 401, 413)
    assert door.send("/console/api/login", {"tokens": token}, **OURS)[0] in (400, 413)


PARAMETERS = {
    "rows?table=users": ["limit", "prefix", "after", "contains", "reverse"], "row?table=users": ["key"],
    "messages?table=events": ["shard", "from", "limit", "contains"], "message?table=events": ["shard", "sequence"],
    "letters?table=dead": ["limit"], "cardinality?table=metrics": ["top", "label"],
    "neighbours?table=docs": ["k", "like", "vector"], "recall?table=docs": ["k"], "jobs?": ["limit"],
}  # fmt: skip


@pytest.mark.parametrize("value", ["", "-1", "nan", "[]", "9" * 25, "%00", "%ff%fe", "<script>", "a" * 3_000])
def test_no_parameter_is_a_fault_of_the_server(door: Door, value: str) -> None:
    for path, names in PARAMETERS.items():
        for name in names:
            status, reply, _ = door.send(f"/console/api/{path}&{name}={value}", Authorization="Bearer admin")
            assert status in {200, 400, 404}, (path, name, value, reply)


@pytest.mark.parametrize("value", [None, -1, 1.5, True, [], {"a": [1]}, "x" * 3_000, 10**30, "\x00"])
def test_no_value_of_a_button_is_a_fault_of_the_server(door: Door, value: Any) -> None:
    right = {"table": "dead", "shard": 0, "sequence": 1, "job": 1, "key": "00"}
    for name, field in [
("compact", "table"), ("resume", "table"), ("retry", "job"), ("put_back", "shard"), ("put_back", "sequence"),
        ("put_back", "table"), ("delete", "key"),
    ]:  # fmt: skip
        fields = {**right, field: value}
        status, reply = door.act(name, **fields)
        assert status in {400, 404, 409}, (name, field, value, reply)
    assert door.act("put_back", table="dead", shard=0)[0] == 400  # which one?


def test_pages_are_bounded_and_a_closed_one_makes_room(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console_sampling, "PAGES_MAX", 3)

    def opened() -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", door.port, timeout=20)
        connection.request("GET", "/console/events", headers={"Authorization": "Bearer admin"})
        pages.append(connection)
        answer = connection.getresponse()
        statuses.append(answer.status)
        if answer.status == 200:
            answer.readline()
        return connection

    pages: list[http.client.HTTPConnection] = []
    statuses: list[int] = []
    for _ in range(5):
        opened()
    assert statuses == [200, 200, 200, 503, 503]
    for page in pages:
        page.close()
    for _ in range(200):
        opened().close()
        if statuses[-1] == 200:
            return
        threading.Event().wait(0.05)
    raise AssertionError("closed pages still count")


def test_pages_that_open_at_the_same_moment_are_bounded(store: Any) -> None:
    settings = HttpSettings(console=ConsoleSettings())
    with ExitStack() as ends, serve_http(store, settings) as port:
        wires = [ends.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20)) for _ in range(120)]
        for wire in wires:
            wire.sendall(b"GET /console/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        statuses = Counter(wire.recv(12)[9:] for wire in wires)
    assert statuses == {b"200": console_sampling.PAGES_MAX, b"503": 120 - console_sampling.PAGES_MAX}


def test_pages_of_a_filter_reach_the_last_row(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console_reading, "SCANNED_MAX", 50)
    for backwards in ("", "&reverse=1"):
        scanned, after = 0, ""
        for _ in range(20):
            page = door.read(f"rows?table=users&contains=nowhere{backwards}&after={after}")
            scanned, after = scanned + page["scanned"], page["next"]
            if after is None:
                break
        assert scanned == 301


def test_a_text_is_found_as_it_is_written(door: Door, store: Any) -> None:
    store.kv("notes", value="utf8").put_many({b"a": 'say "hi"', b"b": "say hi"}, durable=True)
    rows = door.read("rows?table=notes&contains=%22hi%22")["rows"]
    assert [row["key"] for row in rows] == [b"a".hex()]


def test_a_map_of_wide_vectors_takes_little(door: Door, store: Any) -> None:
    docs = store.vector("wide", dimensions=16_384, metric="euclidean")
    docs.upsert(["a", "b", "c"], np.eye(3, 16_384, dtype=np.float32), durable=True)
    reply = door.read("neighbours?table=wide&k=2&like=b")
    assert reply["hits"][0]["id"] == "b"
    assert [point["id"] for point in reply["map"]] == ["a", "b", "c", None]
    assert reply["map"][1]["at"] == reply["map"][3]["at"]


def test_messages_and_cardinality_and_neighbours(door: Door, store: Any) -> None:
    page = door.read("messages?table=events&from=1&limit=200")
    assert (len(page["rows"]), page["first"], page["next"]) == (121, 1, None)
    assert bytes.fromhex(page["rows"][-1]["key"]) == SCRIPT.encode()
    assert [row["sequence"] for row in door.read("messages?table=events&contains=order%22:+7}")["rows"]] == []
    rows = door.read("messages?table=events&from=1&contains=%22order%22:+77}")["rows"]
    assert [row["sequence"] for row in rows] == [78]
    cardinality = door.read("cardinality?table=metrics&label=host")
    assert (cardinality["series"], cardinality["metrics"]) == (3, [["cpu", 3]])
    assert SCRIPT in cardinality["values"]
    near = door.read("neighbours?table=docs&like=doc-7&k=5")
    nearest = [hit.id for hit in store.vector("docs", dimensions=8).search(store.table("docs").get("doc-7").vector, 5)]
    assert [hit["id"] for hit in near["hits"]] == nearest
    assert (near["found"], len(near["map"]), near["map"][-1]["rank"]) == (5, 61, -1)
    assert door.read("recall?table=docs&k=3")["recall"] == 1.0
    described = door.read("table?table=users")
    assert (described["kind"], sum(level["rows"] for level in described["levels"])) == ("kv", 301)


def test_a_dead_letter_is_put_back_once(door: Door, store: Any) -> None:
    events = store.queue("events")
    letters = door.read("letters?table=dead")["letters"]
    assert (len(letters), {entry["source"] for entry in letters}) == (5, {"events"})
    assert door.read("letters?table=events")["letters"] == []
    before = events.statistics().messages
    number = letters[0]["sequence"]
    assert door.act("put_back", "reader", table="dead", shard=0, sequence=number)[0] == 403
    assert door.act("put_back", "part", table="dead", shard=0, sequence=number)[0] == 404
    assert door.act("put_back", table="events", shard=0, sequence=1)[0] == 404  # not a dead letter
    assert events.statistics().messages == before
    done = [door.act("put_back", "writer", table="dead", shard=0, sequence=number)[1]["data"]["done"] for _ in range(2)]
    assert ["before" in text for text in done] == [False, True]
    assert events.statistics().messages == before + 1
    sent = events.read(0, before + 1, 1)[0].payload
    assert sent == base64.b64decode(letters[0]["payload"]["data"]) == json.loads(letter(number - 1))["payload"].encode()


def test_letters_are_put_back_in_any_order_and_by_table(door: Door, store: Any) -> None:
    """An old letter after a new one; and one of another table that got the name of a dropped one."""
    for _ in range(2):
        late = store.queue("late")
        late.put_many([letter(0), *[b"{}"] * 2_499, letter(1), b'{"a":' + b"[" * 100_000], durable=True)
        assert len(door.read("letters?table=late&limit=50")["letters"]) == 1
        done = [door.act("put_back", table="late", shard=0, sequence=number) for number in (2_501, 1, 1)]
        assert ["before" in answer["data"]["done"] for _, answer in done] == [False, False, True], done
        store.drop("late")


def test_events_end_with_their_session(door: Door) -> None:
    headers = door.send("/console/api/login", {"token": "reader"}, **OURS)[2]
    cookie = headers["set-cookie"].partition(";")[0]
    connection = http.client.HTTPConnection("127.0.0.1", door.port, timeout=20)
    connection.request("GET", "/console/events", headers={"Cookie": cookie})
    answer = connection.getresponse()
    assert answer.readline() == b"event: history\n"
    assert door.send("/console/api/logout", {}, Cookie=cookie, **OURS)[0] == 200
    answer.read()  # until the server ends it, which it does with the next sample
    connection.close()


def test_samples_are_read_one_at_a_time() -> None:
    reading, most, number = 0, 0, 0

    class Reader:
        def read(self) -> dict[str, Any]:
            nonlocal number
            number += 1
            return {"t": float(number)}

    async def in_thread(read: Any) -> Any:
        nonlocal reading, most
        reading += 1
        most = max(most, reading)
        await asyncio.sleep(0.01)
        reading -= 1
        return read()

    async def main() -> list[Any]:
        sampler = Sampler(Reader(), in_thread)  # type: ignore[arg-type]
        return await asyncio.gather(*(sampler.sample() for _ in range(20)))

    samples = asyncio.run(main())
    assert (most, {sample["t"] for sample in samples}) == (1, {1.0})


def test_a_clock_that_is_set_back_stops_no_sample() -> None:
    times = iter([100.0, 101.0, 40.0, 41.0])

    class Reader:
        def read(self) -> dict[str, Any]:
            return {"t": next(times)}

    async def in_thread(read: Any) -> Any:
        return read()

    async def main() -> list[list[float]]:
        sampler = Sampler(Reader(), in_thread)  # type: ignore[arg-type]
        histories = []
        for _ in range(4):
            await sampler.sample()
            histories.append([sample["t"] for sample in sampler.past()])
        return histories

    assert asyncio.run(main()) == [[100.0], [100.0, 101.0], [40.0], [40.0, 41.0]]


def test_events_have_the_history_and_then_each_sample(door: Door) -> None:
    def listen(count: int) -> list[tuple[str, Any]]:
        connection = http.client.HTTPConnection("127.0.0.1", door.port, timeout=20)
        connection.request("GET", "/console/events", headers={"Authorization": "Bearer admin"})
        answer, events = connection.getresponse(), list[tuple[str, Any]]()
        assert answer.getheader("content-type", "").startswith("text/event-stream")
        while len(events) < count:
            name, data, _ = answer.readline(), answer.readline(), answer.readline()
            events.append((name.decode().strip().removeprefix("event: "), json.loads(data.removeprefix(b"data: "))))
        connection.close()
        return events

    pages: list[list[tuple[str, Any]]] = []
    threads = [threading.Thread(target=lambda: pages.append(listen(3))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert [[name for name, _ in page] for page in pages] == [["history", "sample", "sample"]] * 3
    times = [data["t"] for name, data in pages[0] if name == "sample"]
    assert times == sorted(set(times))
    samples = {data["t"] for page in pages for name, data in page if name == "sample"}
    assert len(samples) <= 4  # taken once for all pages, not once for each
    last = pages[0][-1][1]
    assert {table["name"]: table["rows"] for table in last["tables"]}["events"] >= 121
    assert last["flows"]["write_stage_seconds_count_by_stage"]["journal"] > 0


def test_the_history_of_a_new_page_is_bounded() -> None:
    def sampled(tables: int) -> list[dict[str, Any]]:
        sampler = Sampler(None, None)  # type: ignore[arg-type]
        contents: dict[str, Any] = {"tables": [{}] * tables, "consumers": []}
        sampler.history.extend({"t": float(second), **contents} for second in range(2_000))
        return sampler.past()

    few, many = sampled(3), sampled(1_000)
    assert len(few) == 120 + (900 - 120) // 6
    assert [sample["t"] for sample in few] == sorted(sample["t"] for sample in few)
    assert few[-1]["t"] == many[-1]["t"] == 1_999.0
    assert len(many) == 5


def test_members_of_a_cluster_are_listed(tmp_path: Path) -> None:
    from penstock.cli.cluster import member_roles

    with LocalCluster(tmp_path, serve=True) as cluster:
        served = cluster.served

        def write_file() -> None:
            lines = [f'cluster = "{cluster.cluster.hex()}"\n']
            for number, (name, (host, port)) in enumerate(served.items(), 1):
                lines.append(f'[members.{name}]\nclients = "{host}:{port}"\nmembers = "{host}:{number}"\n')
            (tmp_path / "cluster.toml").write_text("".join(lines))

        def roles() -> dict[str, str]:
            return {member["name"]: member["role"] for member in at.read("members")["members"]}

        write_file()
        leader = cluster.leader()
        console_settings = ConsoleSettings(members=member_roles(tmp_path, TOKEN))
        settings = HttpSettings(rights_of=tokens().rights_of, console=console_settings)
        with cluster.connect() as connected, serve_http(connected, settings) as port:
            at = Door(port)
            assert at.read("hello")["cluster"] is True
            members = at.read("members")["members"]
            assert [(member["name"], member["address"]) for member in members] == [
                (name, f"{host}:{port}") for name, (host, port) in served.items()
            ]
            await_true(lambda: sorted(roles().values()) == ["follows", "follows", "leads"], "three members")
            leader = cluster.leader()
            follower = next(name for name in served if name != leader)
            cluster.stop(follower)
            assert roles()[follower] == "away"
            served[follower], served[leader] = served[leader], served[follower]  # their file has other addresses
            write_file()
            await_true(lambda: roles()[follower] != "away", "the new address is asked")
            sample = at.read("sample")
            assert sample["flows"]["consensus_is_leader"] in {0, 1}


def test_a_store_that_does_not_answer_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class Away:
        def statistics(self) -> None:
            raise penstock.errors.WaitExpired("the owner did not answer")

    clock = FakeClock()
    sample = console_sampling.StoreReader(Away(), clock).read()
    assert sample["error"] == "the owner did not answer"


def test_labels_of_metrics_are_read_back() -> None:
    text = '# HELP x y\npenstock_a_total{table="a\\"b\\\\c\\nd",shard="0"} 3.5\npenstock_b 1e-05\nnot a line\n'
    assert list(parse_metrics(text)) == [("a_total", {"table": 'a"b\\c\nd', "shard": "0"}, 3.5), ("b", {}, 1e-05)]


def test_watching_a_store_freezes_no_memtable(tmp_path: Path) -> None:
    with penstock.open(tmp_path / "store") as owner, penstock.connect(owner.path) as connected:
        owner.kv("rows").put_many({b"%d" % number: b"v" for number in range(10)})
        owner.series("metrics").write("cpu", 0.5, {"host": "a"})
        owner.vector("docs", dimensions=2).upsert("a", [1.0, 0.0], {})
        owner.flush()
        assert connected.vector("docs").get("a") is not None  # applied

        def memtables() -> dict[str, tuple[float, ...]]:
            sizes: dict[str, list[float]] = {}
            for name, labels, value in parse_metrics(owner.metrics.exposition()):
                if name in ("frozen_memtables", "active_memtable_size") and labels["table"] != "_ledger":
                    sizes.setdefault(labels["table"], []).append(value)
            return {table: tuple(values) for table, values in sizes.items()}

        before, reader = memtables(), StoreReader(connected, FakeClock())
        assert all(active > 0 and not frozen for active, frozen in before.values()), before
        for _ in range(2 * console_sampling.SIZES_EVERY):
            sample = reader.read()
        assert {entry["name"]: entry["rows"] for entry in sample["tables"]} == {"rows": 10, "metrics": 1, "docs": 1}
        assert memtables() == before
        for table in ("rows", "metrics", "docs"):  # the control: the owner's own are of one LSN
            owner.table(table).statistics()
        assert [active for active, _ in memtables().values()] == [0.0, 0.0, 0.0]
