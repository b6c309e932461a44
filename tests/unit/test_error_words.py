"""Errors as a user meets them: one line, with the names of the API, both types of a mismatch, and what to do."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import penstock
from penstock.errors import (
    CorruptionError,
    DiskFailed,
    GateShut,
    Invalid,
    KindMismatch,
    NotFound,
    OutcomeUnknown,
    PenstockError,
    StreamFailed,
    TokenTooOld,
)
from penstock.lsm.maintenance import Maintenance


@pytest.fixture(params=["open", "connect"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    with penstock.open(tmp_path, settings=penstock.StoreSettings(memory_bytes_max=256 << 20)) as owner:
        owner.kv("json", value="json")
        owner.kv("numbers", value="int64")
        owner.kv("texts", value="utf8")
        owner.kv("users", shards=2)
        owner.queue("events")
        if request.param == "open":
            yield owner
        else:
            with penstock.connect(tmp_path) as client:
                yield client


def rows(key: object, value: object) -> pa.Table:
    return pa.table({"key": [key], "value": [value]})


WORDS: list[tuple[Callable[[Any], object], type[PenstockError], str]] = [
    (lambda s: s.kv("users").put("ada", b"x"), Invalid, "a key is bytes, not str: encode it, or make the table with"),
    (lambda s: s.kv("users")["ada"], Invalid, "a key is bytes, not str: encode it, or make the table with key='utf8'"),
    (lambda s: s.kv("users").get(7), Invalid, "a key is bytes, not int: encode it"),
    (lambda s: s.kv("names", key="utf8").put(b"ada", b"x"), Invalid, "text (key='utf8'), not bytes: decode it"),
    (lambda s: s.kv("users").put(b"ada", 5), Invalid, "this table holds bytes, not int: encode the value"),
    (lambda s: s.kv("texts").put(b"ada", b"x"), Invalid, "this table holds text, not bytes"),
    (lambda s: s.kv("numbers").put(b"ada", "5"), Invalid, "this table holds integers of 64 bits, not '5'"),
    (lambda s: s.kv("numbers", value="utf8"), KindMismatch, "numbers holds int64, not utf8: say value='int64'"),
    (lambda s: s.queue("users"), KindMismatch, "users is of the kind kv, not queue: use kv('users')"),
    (lambda s: s.kv("events"), KindMismatch, "events is of the kind queue, not kv: use queue('events')"),
    (lambda s: s.kv("users", shards=3), KindMismatch, "users has 2 shards, not 3: leave shards= out"),
    (lambda s: s.kv("numbers", shards=3), KindMismatch, "numbers has 1 shard, not 3: leave shards= out"),
    (
        lambda s: s.drop("nobody"),
        NotFound,
        "there is no table nobody: the store has events, json, numbers, texts, users",
    ),
    (lambda s: s.kv("nobody", create=False), NotFound, "there is no table nobody: the store has events, json, numbers"),
    (lambda s: s.queue("events").put("m"), Invalid, "a payload is bytes, not str: encode it"),
    (lambda s: s.queue("events").put(b"m", key="k"), Invalid, "a key is bytes, not str: encode it"),
    (lambda s: s.queue("events").put(b"m", key=bytes(65_537)), Invalid, "a key has at most 65,536 bytes, this one has"),
    (lambda s: s.kv("users").put(bytes(65_537), b"x"), Invalid, "a key has at most 65,536 bytes, this one has 65,537"),
    (lambda s: s.kv("users").put(b"ada", bytes((64 << 20) + 1)), Invalid, "a value has at most 67,108,864 bytes, this"),
    (lambda s: s.kv("users").put(bytearray(b"ada"), b"x"), Invalid, "not bytearray: use bytes(...) of it"),
    (lambda s: s.queue("events").put(np.bytes_(b"m")), Invalid, "a payload is bytes, not bytes_: use bytes(...) of it"),
    (lambda s: s.kv("json").merge(b"k", 1, operator="add_i64"), Invalid, "a table of json: no operator does, so put"),
    (lambda s: s.kv("json").put_many(rows(b"k", {"a": 1})), Invalid, "make texts of its values with json.dumps"),
    (lambda s: s.kv("users").put_many(rows("k", b"v")), Invalid, "cast it first, or make the table with key='utf8'"),
    (lambda s: s.batch().queue("events").append(b"m"), Invalid, "which a batch has only when it has ended: use put"),
    (lambda s: penstock.connect("db.example:7878"), NotFound, "a server's address is penstock://db.example:7878, or"),
    (lambda s: s.batch(token="t"), Invalid, "a token is (producer, number)"),
    (lambda s: s.load("users", [1]), Invalid, "load takes an Arrow table or stream"),
]


@pytest.mark.parametrize(("act", "kind", "words"), WORDS, ids=[words for _, _, words in WORDS])
def test_words(store: Any, act: Callable[[Any], object], kind: type[PenstockError], words: str) -> None:
    with pytest.raises(kind) as caught:
        act(store)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_an_error_quotes_becomes_one_line() -> None:
    quoted = "the rows do not fit (first line\n\n  second line\r\nthird line): cast them"
    for kind in (Invalid, DiskFailed, OutcomeUnknown, StreamFailed):
        error = kind(quoted)
        assert str(error) == "the rows do not fit (first line second line third line): cast them"
        assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert str(Invalid("two  spaces")) == "two  spaces"
    assert str(CorruptionError("/a", 3, "one\ntwo")) == "/a at byte 3: one two; restore this file from a copy"
    assert str(Invalid()) == ""


def test_rows_that_do_not_fit_are_refused_in_one_line(store: Any) -> None:
    rows = pa.table({"key": [b"k"], "value": pa.array([b"\xff\n\n"]).view(pa.binary())})
    texts = rows.set_column(1, "value", pa.Array.from_buffers(pa.string(), 1, rows["value"].chunk(0).buffers()))
    with pytest.raises(Invalid) as caught:
        store.load("texts", texts)
    assert "\n" not in str(caught.value)


def test_a_write_that_is_too_large_names_the_setting(tmp_path: Path) -> None:
    small = penstock.StoreSettings(memory_bytes_max=256 << 20)
    words = r"split it, or open the store with a larger memory_bytes_max$"
    with penstock.open(tmp_path, settings=small) as store, pytest.raises(Invalid, match=words):
        store.kv("users").put(b"k", bytes(32 << 20))
    large = penstock.StoreSettings(memory_bytes_max=4 << 30)
    assert large.coordinator.bytes_max_remedy == "split it, or use store.load"


def test_a_dropped_table_is_named(store: Any) -> None:
    """Whatever is called: the number that it has inside the store says nothing to a user."""
    users, events = store.kv("users"), store.queue("events")
    consumer = events.consumer("c")
    store.drop("users")
    store.drop("events")
    for act, name in [
        (lambda: users.put(b"k", b"v", durable=True), "users"),
        (lambda: users.get(b"k"), "users"),
        (lambda: list(users.scan()), "users"),
        (lambda: users.delete_range(b"a", b"b", durable=True), "users"),
        (lambda: events.put(b"m", durable=True), "events"),
        (lambda: events.append(b"m"), "events"),
        (events.read, "events"),
        (lambda: consumer.get(1), "events"),
        (lambda: consumer.lag, "events"),
    ]:  # fmt: skip
        with pytest.raises(NotFound, match=f"(table|queue) {name} was dropped"):
            act()


def test_a_token_that_is_too_old(store: Any) -> None:
    with store.batch(token=("loader", 5_000)) as batch:
        batch.kv("users").put(b"k", b"new")
    with pytest.raises(TokenTooOld, match="more than 1,024 below the highest of its producer"):  # noqa: SIM117
        with store.batch(token=("loader", 1)) as batch:
            batch.kv("users").put(b"k", b"old")
    with pytest.raises(TokenTooOld, match="use a higher number for what is new"):
        store.queue("events").put(b"m", token=("loader", 1))
    assert store.kv("users")[b"k"] == b"new"


def test_a_compaction_that_waits_names_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> bool:
        raise GateShut("a flush cannot run now: try again later")

    with penstock.open(tmp_path) as store:
        store.kv("users").put(b"k", b"v", durable=True)
        with monkeypatch.context() as patched:
            patched.setattr(Maintenance, "flush", refuse)
            patched.setattr(Maintenance, "compact", refuse)
            with pytest.raises(GateShut, match="table users was not compacted: a flush cannot run now"):
                store.compact("users")
