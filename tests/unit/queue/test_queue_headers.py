"""Headers of messages: written in every way, read in every way, and no trace of them where there are none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from queue_model import build, open_queues

import penstock
from penstock.errors import Invalid, KindMismatch, UnsupportedVersion
from penstock.log.record import KIND_DATA, Index, Record
from penstock.queue import section
from penstock.queue.coding import PREFIX
from penstock.queue.headers import BYTES_MAX, COUNT_MAX, HEADERS, checked_headers, dicts, from_arrow
from penstock.queue.messages import Messages, decode_batch, encode_payloads
from penstock.queue.options import (
    QueueOptions,
    Retention,
    decode_queue_options,
    encode_queue_options,
    has_headers,
    queue_options,
)
from penstock.queue.staged import STAGED_WITH_HEADERS
from penstock.queue.validation import receive
from penstock.queue.view import TABLE_SCHEMA
from penstock.testing import SimulatedDisk

WITH, WITHOUT = (encode_queue_options(queue_options(None, headers)) for headers in (True, False))
some_headers = st.none() | st.dictionaries(
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8), st.binary(max_size=9), max_size=4
)
some_messages = st.lists(
    st.tuples(st.binary(max_size=9), st.none() | st.binary(max_size=3), some_headers), min_size=1, max_size=12
)


def decoded(body: bytes) -> Messages:
    return decode_batch(Record(Index(1), 1, Index(0), KIND_DATA, 0, body), path="p", offset=0).messages


def plain(headers: Any) -> list[dict[str, bytes] | None]:
    return [each or None for each in headers]


# -- batches


@settings(deadline=None, max_examples=50)
@given(some_messages, st.data())
def test_what_is_encoded_is_decoded(messages: list[tuple[bytes, bytes | None, Any]], data: Any) -> None:
    payloads, keys, headers = map(list, zip(*messages, strict=True))
    batch = Messages.of(payloads, keys, None, headers)
    batch.check()
    body = batch.encode(lsn=0, time_us=section.NO_TIME)
    again = decoded(body)
    assert again.payloads.to_pylist() == payloads
    assert again.headers is None or again.headers.type == HEADERS
    assert (dicts(again.headers) if again.headers is not None else [None] * len(messages)) == plain(headers)
    assert again.encode(lsn=0, time_us=section.NO_TIME) == body, "there is one way to write it"
    assert int(again.ends()[-1]) == again.size_bytes() == batch.size_bytes()
    low = data.draw(st.integers(0, len(messages)))
    high = data.draw(st.integers(low, len(messages)))
    part = again.slice(low, high)
    assert (dicts(part.headers) if part.headers is not None else [None] * len(part)) == plain(headers[low:high])
    if len(part):
        part.check()
        copied = decoded(part.encode(lsn=0, time_us=section.NO_TIME))
        assert (dicts(copied.headers) if copied.headers is not None else [None] * len(part)) == plain(headers[low:high])
        assert int(part.ends()[-1]) == part.size_bytes()
    encoded = section.Puts()
    encoded.add_many(body)
    assert len(receive(section.encode(encoded), WITH)) == len(messages)


def test_a_batch_without_headers_has_the_bytes_it_always_had() -> None:
    payloads = [b"a", b"", b"ccc"]
    plain_body = encode_payloads(payloads, lsn=1, time_us=2)
    assert Messages.of(payloads, headers=[None, {}, None]).encode(lsn=1, time_us=2) == plain_body
    assert (
        encode_queue_options(queue_options(Retention(age_s=5))) == b"\x91\x93\xcb@\x14\x00\x00\x00\x00\x00\x00\xc0\xc2"
    )
    assert decode_queue_options(b"\x91\x93\xc0\xc0\xc2") == QueueOptions()
    with_headers = Messages.of(payloads, headers=[{"a": b"1"}, None, None]).encode(lsn=1, time_us=2)
    # What an earlier Penstock reads of it: the same columns at the same places.
    assert with_headers[PREFIX.size : len(plain_body)] == plain_body[PREFIX.size :]


def test_golden_bytes() -> None:
    headers = [{"trace": b"\x01", "n": b""}, None, {"é": b"xyz"}]
    body = Messages.of([b"a", b"", b"ccc"], [b"k", None, b""], [5, 6, 7], headers).encode(lsn=7, time_us=8)
    assert body == bytes.fromhex(
        "0700000000000000 0800000000000000 03000000 0f00 0000"  # LSN, time, messages, all flags
        "0500000000000000 0600000000000000 0700000000000000 0500000000000000"  # times; which keys are there
        "00000000 01000000 01000000 01000000 6b00000000000000"  # keys
        "00000000 01000000 01000000 04000000 6163636300000000"  # payloads
        "00000000 02000000 02000000 03000000"  # headers of each message
        "00000000 05000000 06000000 08000000 7472616365 6e c3a9"  # names
        "00000000 01000000 01000000 04000000 01 78797a 00000000"  # values
    )
    assert dicts(decoded(body).headers) == headers


def test_a_flag_of_the_future_is_refused() -> None:
    body = bytearray(encode_payloads([b"a"], lsn=0, time_us=0))
    body[20] |= 16
    with pytest.raises(UnsupportedVersion):
        decoded(bytes(body))


@pytest.mark.parametrize("options", [WITH, WITHOUT])
def test_hostile_headers_are_refused(options: bytes) -> None:
    def sent(batch: Messages, change: Any = lambda body: body) -> bytes:
        puts = section.Puts()
        puts._parts = [(0, change(batch.encode(lsn=0, time_us=section.NO_TIME)))]
        return section.encode(puts)

    good = Messages.of([b"a", b"b"], None, None, [{"one": b"1", "two": b"2"}, {"one": b"3"}])
    if options == WITHOUT:
        with pytest.raises(Invalid, match="takes no headers"):
            receive(sent(good), options)
        return
    receive(sent(good), options)
    wrong = [
        Messages(good.payloads, headers=from_arrow(pa.array([[("a", b"1"), ("a", b"2")], []], HEADERS))),
        Messages(good.payloads, headers=from_arrow(pa.array([[("", b"1")], None], HEADERS))),
        Messages(good.payloads, headers=from_arrow(pa.array([[("n" * 256, b"1")], None], HEADERS))),
        Messages(good.payloads, headers=from_arrow(pa.array([[("a", bytes(BYTES_MAX))], None], HEADERS))),
        Messages(good.payloads, headers=from_arrow(pa.array([[(str(n), b"") for n in range(65)], None], HEADERS))),
    ]
    for batch in wrong:
        with pytest.raises(Invalid):
            receive(sent(batch), options)
    body = good.encode(lsn=0, time_us=section.NO_TIME)
    start = len(Messages.of([b"a", b"b"]).encode(lsn=0, time_us=section.NO_TIME))
    for at in range(start, len(body)):
        for flip in (0x01, 0x80):
            damaged = bytearray(body)
            damaged[at] ^= flip
            payload = sent(good, lambda _, damaged=damaged: bytes(damaged))
            try:
                messages = receive(payload, options)
            except Invalid:
                continue
            assert len(messages) == 2, "another letter is a header, too"


def test_what_is_not_a_header() -> None:
    assert checked_headers({"a": "é", "b": b""}) == {"a": "é".encode(), "b": b""}
    many = {str(number): b"" for number in range(COUNT_MAX + 1)}
    long: list[Any] = [{"n" * 256: b""}, {"a": bytes(BYTES_MAX)}, {"\ud800": b""}, {"a": "\ud800"}]
    wrong: list[Any] = [1, "a", b"a", [("a", b"b")], {1: b""}, {"a": 1}, {"a": None}, {b"a": b""}, {"": b""}, many]
    for headers in (*wrong, *long, {"a": bytearray(b"x")}):
        with pytest.raises(Invalid) as caught:
            checked_headers(headers)
        assert "\n" not in str(caught.value)


# -- tables


@pytest.fixture(scope="module")
def owner(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with penstock.open(tmp_path_factory.mktemp("headers") / "store") as store:
        yield store


@pytest.fixture(scope="module", params=["open", "connect"])
def store(request: pytest.FixtureRequest, owner: penstock.Store) -> Any:
    if request.param == "open":
        yield owner
    else:
        with penstock.connect(owner.path) as client:
            yield client


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    letters = "".join(letter if letter.isalnum() else "_" for letter in request.node.name.lower())
    return letters.strip("_")[:60]


def test_in_every_way_and_out_again(store: Any, name: str) -> None:
    queue = store.queue(name, headers=True)
    queue.put(b"1", headers={"a": "x", "b": b"\xff"})
    queue.put(b"2")
    queue.put(b"3", headers={})
    queue.put(b"4", key=b"k", time=5, headers={"c": b""})
    queue.put_many([b"5", b"6", b"7"], keys=[b"k", None, b"k"], headers=[{"a": b"5"}, None, {"a": b"7"}])
    columns = {"payload": [b"8", b"9"], "headers": pa.array([[("a", "8")], None], pa.map_(pa.string(), pa.string()))}
    queue.put_many(pa.table(columns))
    queue.put_many([b"10"], headers=[{"d": b"token"}], token=(name, 1))
    queue.append(b"11", headers={"e": "appended"})
    with store.batch() as batch:
        batch.queue(name).put(b"12", headers={"f": b"batch"})
    store.load(name, pa.table({"payload": [b"13", b"14"], "headers": pa.array([None, [("g", b"load")]], HEADERS)}))
    expected = {
        b"1": {"a": b"x", "b": b"\xff"}, b"2": None, b"3": None, b"4": {"c": b""}, b"5": {"a": b"5"}, b"6": None,
        b"7": {"a": b"7"}, b"8": {"a": b"8"}, b"9": None, b"10": {"d": b"token"}, b"11": {"e": b"appended"},
        b"12": {"f": b"batch"}, b"13": None, b"14": {"g": b"load"},
    }  # fmt: skip
    assert {message.payload: message.headers for message in queue.read()} == expected
    assert list(queue.read()[0]._fields)[-1] == "headers"
    table = queue.to_arrow()
    assert table.schema == queue.schema == TABLE_SCHEMA.append(pa.field("headers", HEADERS))
    rows = {row["payload"]: row["headers"] and dict(row["headers"]) for row in table.to_pylist()}
    assert rows == expected
    with store.snapshot() as snapshot:
        assert snapshot.queue(name).to_arrow() == table
    consumer = queue.consumer("c")
    messages = consumer.get()
    assert {message.payload: message.headers for message in messages} == expected
    consumer.ack(messages)
    copied = store.queue(f"copied_{name}"[:63], headers=True)
    store.load(copied.name, table)
    assert {message.payload: message.headers for message in copied.read()} == expected


def test_names_from_arrow_must_be_text(store: Any, name: str) -> None:
    queue = store.queue(name, headers=True)
    text = pa.Array.from_buffers(pa.string(), 1, pa.array([b"\xff"]).buffers())
    for names in (text, text.cast(pa.large_string())):
        headers = pa.MapArray.from_arrays([0, 1], names, pa.array([b"1"]))
        rows = pa.table({"payload": [b"x"], "headers": headers})
        for write in (queue.put_many, lambda rows: store.load(name, rows)):
            with pytest.raises(Invalid, match="UTF-?8"):
                write(rows)
    with pytest.raises(Invalid, match="headers and payloads differ in number"):
        queue.put_many([b"x"], headers=[])
    queue.put_many([b"x"], headers=[None], durable=True)
    assert [message.payload for message in queue.read()] == [b"x"]


def test_a_queue_without_headers(store: Any, name: str) -> None:
    queue = store.queue(name)
    acts: list[Callable[[], object]] = [
        lambda: queue.put(b"m", headers={"a": b"1"}),
        lambda: queue.append(b"m", headers={"a": b"1"}),
        lambda: queue.put_many([b"m"], headers=[{"a": b"1"}]),
        lambda: queue.put_many(pa.table({"payload": [b"m"], "headers": pa.array([[("a", b"1")]], HEADERS)})),
        lambda: store.load(name, pa.table({"payload": [b"m"], "headers": pa.array([[("a", b"1")]], HEADERS)})),
    ]
    for act in acts:
        with pytest.raises(Invalid, match="headers"):
            act()
    with pytest.raises(Invalid, match="takes no headers"), store.batch() as batch:
        batch.queue(name).put(b"m", headers={"a": b"1"})
    with pytest.raises(KindMismatch, match=r"alter\(headers=True\)"):
        store.queue(name, headers=True)
    queue.put(b"m", headers=None, durable=True)
    assert [message.headers for message in queue.read()] == [None]
    assert queue.to_arrow().schema == TABLE_SCHEMA
    assert [message.headers for message in queue.consumer("c").get()] == [None]


def test_a_queue_that_gets_headers_later(store: Any, owner: penstock.Store, name: str) -> None:
    queue, earlier = store.queue(name, retention=Retention(age_s=9e6)), owner.queue(name)
    queue.put(b"old", durable=True)
    queue.alter(headers=True)
    assert queue.takes_headers
    assert queue.retention == Retention(age_s=9e6)
    queue.put(b"new", headers={"a": b"1"})
    earlier.put(b"also", headers={"a": b"2"})  # a table from before looks again
    store.flush()
    owner.flush()
    read = {message.payload: message.headers for message in store.queue(name).read()}
    assert read == {b"old": None, b"new": {"a": b"1"}, b"also": {"a": b"2"}}
    assert dict(zip(*[queue.to_arrow()[column].to_pylist() for column in ("payload", "headers")], strict=True)) == {
        b"old": None, b"new": [("a", b"1")], b"also": [("a", b"2")],
    }  # fmt: skip
    queue.alter(retention=Retention())
    assert queue.takes_headers
    with pytest.raises(Invalid, match="keep them"):
        queue.alter(headers=False)
    with pytest.raises(Invalid, match="alter what"):
        queue.alter()


def test_dead_letters_keep_their_headers(store: Any, name: str) -> None:
    queue, plain_letters = store.queue(name, headers=True), store.queue(f"plain_{name}"[:63])
    letters = store.queue(f"dead_{name}"[:63], headers=True)
    queue.put(b"m", headers={"a": b"1"}, durable=True)
    with pytest.raises(Invalid, match=r"alter\(headers=True\)"):
        queue.consumer("c", deliveries_max=1, dead_letter=plain_letters.name).get()
    consumer = queue.consumer("c", deliveries_max=1, dead_letter=letters.name)
    consumer.nack(consumer.get())
    assert consumer.get() == []
    assert [(message.payload, message.headers) for message in letters.read()] == [(b"m", {"a": b"1"})]


# -- crashes and files


def test_headers_survive_a_crash_and_an_opening() -> None:
    disk = SimulatedDisk()
    store = open_queues(disk)
    queue = store.queue("events", headers=True)
    queue.put(b"1", headers={"a": b"x"}, durable=True)
    store.queue("later").put(b"0", durable=True)
    store.queue("later").alter(headers=True)
    store.queue("later").put(b"1", headers={"a": b"y"}, durable=True)
    for image in (disk.image().restore("strict"), disk.image().restore("kept")):
        again = open_queues(image)
        assert [message.headers for message in again.queue("events").read()] == [{"a": b"x"}]
        assert [message.headers for message in again.queue("later").read()] == [None, {"a": b"y"}]
        assert again.queue("later").to_arrow()["headers"].to_pylist() == [None, [("a", b"y")]]
        again.close()
        once_more = open_queues(image)
        assert [message.headers for message in once_more.queue("later").read()] == [None, {"a": b"y"}]
        once_more.close()
    store.close()


def test_a_staged_file_with_headers_is_for_a_queue_that_takes_them() -> None:
    disk = SimulatedDisk()
    store = open_queues(disk)
    rows = pa.table(
        [
            [b"m"],
            pa.array([None], pa.binary()),
            pa.array([5], pa.timestamp("us", "UTC")),
            pa.array([[("a", b"1")]], HEADERS),
        ],
        schema=STAGED_WITH_HEADERS,
    )
    for name, headers in (("with_headers", True), ("without", False)):
        store.queue(name, headers=headers)
        file = build(disk, store.path, store.stage(name)[0], rows)
        batch = store.batch()
        batch.adopt(name, [file])
        if headers:
            batch.commit()
        else:
            with pytest.raises(Invalid, match="takes no headers"):
                batch.commit()
    assert [message.headers for message in store.queue("with_headers").read()] == [{"a": b"1"}]
    assert store.queue("without").read() == []
    store.close()


def test_many_messages_are_loaded_by_files(owner: penstock.Store, tmp_path: Path) -> None:
    queue = owner.queue("loaded", headers=True, shards=2)
    count = 3_000
    rows = pa.table(
        {
            "payload": [bytes(1_000)] * count,
            "key": [b"%d" % number for number in range(count)],
            "headers": pa.array([[("n", b"%d" % number)] if number % 3 else None for number in range(count)], HEADERS),
        }
    )
    owner.load("loaded", rows)
    read = {row["key"]: row["headers"] for row in queue.to_arrow().to_pylist()}
    assert read == {b"%d" % n: [("n", b"%d" % n)] if n % 3 else None for n in range(count)}
    assert has_headers(queue._info.options)
