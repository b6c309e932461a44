"""Wrong uses of every public call, in the owner and through a connection: one typed error in one line, and no harm.

Each row of `CALLS` is a call with right arguments, and for some of them the sort of thing they must be. Every bad value
of that sort is tried in its place. Afterwards the store holds what it held before, still works, and reopens.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from interrupts import every_point

import penstock
from penstock.errors import Closed, FixTheCall, Invalid, KindMismatch, NotFound, PenstockError

SOME_OBJECT = object()
PERSON = pa.struct([pa.field("name", pa.string(), nullable=False)])
NUMBERS = [None, "1", b"1", True, 1.5, math.nan, -1, [1], SOME_OBJECT]
BAD: dict[str, list[Any]] = {
    "key": [None, "k", 1, True, 1.5, [b"k"], b"k" * 65_537, SOME_OBJECT],
    "border": [None, "k", 1, True, 1.5, [b"k"], SOME_OBJECT],  # of a read: one that is too long finds nothing
    "optional border": ["k", 1, True, 1.5, [b"k"], SOME_OBJECT],
    "optional key": ["k", 1, True, 1.5, [b"k"], b"k" * 65_537, SOME_OBJECT],
    "bytes": [None, "v", 1, True, 1.5, [b"v"], SOME_OBJECT],
    "int64": [None, "1", b"1", 1.5, math.nan, 1 << 63, [1], SOME_OBJECT],
    "text": [None, b"v", 1, True, "\ud800", SOME_OBJECT],
    "json": [b"v", SOME_OBJECT, math.nan, {1, 2}, {"a": SOME_OBJECT}],
    "count": NUMBERS,
    "optional count": NUMBERS[1:],
    "seconds": [None, "1", b"1", True, math.nan, -1, [1], SOME_OBJECT],
    "ttl": ["1", b"1", True, math.nan, -1, 0, math.inf, 1e300, SOME_OBJECT],
    "flag": ["yes", 1, 0.0, b"", [], SOME_OBJECT],
    "name": [None, 1, True, b"t", "", "T", "a b", "a" * 64, "ü", "../a", "a\n", SOME_OBJECT],
    "consumer": [None, 1, True, b"c", "", "c" * 256, "\ud800", SOME_OBJECT],
    "shards": [None, "2", True, 0, -1, 1.5, math.nan, 1 << 20, SOME_OBJECT],
    "shard": ["0", True, -1, 99, 0.5, math.nan, SOME_OBJECT],
    "token": ["t", ("t",), ("t", True), ("t", -1), ("t", 1.0), (1, 1), ("", 1), ("t", 1 << 80), ("t", 1, 2), 7],
    "decimal": [None, "1", b"1", True, 1.5, math.nan, Decimal("NaN"), Decimal("0.001"), Decimal(10) ** 20, SOME_OBJECT],
    "float64": [None, "1", b"1", True, 10**400, [1], SOME_OBJECT],
    "struct": [None, "x", b"x", 1, {}, {"name": 1}, {"name": None}, {"name": "x", "more": 1}, {1: 2}, SOME_OBJECT],
    "text key": [None, b"k", 1, True, "\ud800", "k" * 65_537, SOME_OBJECT],
    "key type": [1, "text", b"utf8", True, str, SOME_OBJECT],
    "operator": [None, 1, "plus", b"add_i64", "append", SOME_OBJECT],
    "value type": [1, "int", b"bytes", True, int, SOME_OBJECT],
    "retention": [1, "1d", {"age_s": 1}, True, SOME_OBJECT],
    "new retention": [None, 1, "1d", {"age_s": 1}, True, SOME_OBJECT],
    "headers": [1, "a", b"a", True, {"a": 1}, {1: b"v"}, {"": b"v"}, {"a": b"v"}, SOME_OBJECT],
    "optional seconds": ["1", b"1", True, math.nan, 0, -1, math.inf, [1], SOME_OBJECT],
    "messages": [None, 1, SOME_OBJECT, ["m"], [1], "m"],
    "pairs": [None, 1, [1], [(b"k",)], {"k": b"v"}, {b"k": "v"}, [(b"k", b"v", 1)], SOME_OBJECT],
    "keys": [None, 1, b"k", ["k"], [1], SOME_OBJECT],
    "leased": [None, 1, "m", [1], SOME_OBJECT],
    "position": [None, "first", 0, -1, True, 1.5, {0: 0}, {9: 1}, {"0": 1}, SOME_OBJECT],
    "time": ["now", True, math.nan, b"1", SOME_OBJECT],
    "epoch": ["1", True, -1, 1.5, 1 << 80, SOME_OBJECT],
    "age": ["1", b"1", True, math.nan, -1, math.inf, 1e300, SOME_OBJECT],
    "selector": [None, 1, b"cpu", "", "cpu{", 'cpu{host="a}', '{a=~"("}', "cpu{}x", "\ud800", SOME_OBJECT],
    "metric": [None, 1, b"cpu", "", True, "m" * 5_000, "\ud800", SOME_OBJECT],
    "label": [None, 1, b"l", "", True, "l" * 300, "a\0b", SOME_OBJECT],
    "labels": [1, "a", [("a", "b")], {1: "b"}, {"a": 1}, {"a": None}, {"": "b"}, {"__name__": "b"}, SOME_OBJECT],
    "number": [None, "1", b"1", True, [1.0], 10**400, SOME_OBJECT],
    "values": [None, "1", 1.0, ["a"], [[1.0]], [1.0, 2.0], [None], SOME_OBJECT],
    "times": [None, "now", 1, ["a"], [1.5], [1, 2], [1 << 62], [-(1 << 62)], SOME_OBJECT],
    "far time": ["now", True, math.nan, b"1", 1 << 62, -(1 << 62), 4_000_000_000_000_000, SOME_OBJECT],
    "function": [None, 1, b"sum", "", "median", "quantile", SOME_OBJECT],
    "by": [None, 1, "host", [1], [None], ["host", "host"], [""], SOME_OBJECT],
    "step": ["1", b"1", True, 0, -1, math.nan, math.inf, SOME_OBJECT],
    "quantile": ["1", True, -1, 2, math.nan, 0.5, SOME_OBJECT],
    "distance": [1, b"dot", "", "l2", SOME_OBJECT],
    "vector ids": [None, 1, b"a", [1], [b"a"], [""], ["x" * 2_000], ["\ud800"], [None], "", SOME_OBJECT],
    "vectors": [
        "1",
        1.0,
        [1.0, 2.0],
        [["a", "b"]],
        [[1.0]],
        [[math.nan, 1.0]],
        [[math.inf, 1.0]],
        [[0.0, 0.0]],
        [[None, 1.0]],
        SOME_OBJECT,
    ],
    "attributes": [1, "a", {"a": 1}, [1], [{1: 2}], [{"a": [1]}], [{"a": math.nan}], [{"a": 1 << 70}], SOME_OBJECT],
    "query vector": [None, "1", 1.0, [1.0], ["a", "b"], [math.nan, 1.0], [0.0, 0.0], SOME_OBJECT],
    "where": [1, "lang = 1", [("a", 1)], {1: 2}, {"a": SOME_OBJECT}, {"a": {"~": 1}}, SOME_OBJECT],
    "series options": [1, "1d", {"bucket_s": 300}, True, SOME_OBJECT],
    "samples": [
        None,
        1,
        "cpu",
        [1],
        {"value": [1.0]},
        SOME_OBJECT,
        pa.table({"time": [1], "value": [1.0]}),
        pa.table({"metric": ["a"], "time": [1]}),
        pa.table({"metric": ["a"], "value": [1.0]}),
        pa.table({"metric": [None], "time": [1], "value": [1.0]}),
        pa.table({"metric": ["a"], "time": [None], "value": [1.0]}),
        pa.table({"metric": ["a"], "time": [1], "value": ["x"]}),
        pa.table({"metric": ["a"], "time": [1], "value": [1.0], "host": [1]}),
    ],
    "metric type": [None, 1, b"gauge", "gauge!", SOME_OBJECT],
    "description": [None, 1, b"s", "h" * 5_000, SOME_OBJECT],
}


@dataclass(frozen=True)
class Call:
    """A call with right arguments, and of what sort some of them are."""

    name: str
    act: Callable[..., Any]
    right: dict[str, Any] = field(default_factory=dict)
    sorts: dict[str, str] = field(default_factory=dict)


def in_batch(act: Callable[..., Any]) -> Callable[..., Any]:
    def run(store: Any, **arguments: Any) -> None:
        with store.batch() as batch:
            act(batch, **arguments)

    return run


def drained(act: Callable[..., Any]) -> Callable[..., Any]:
    return lambda store, **arguments: list(act(store, **arguments))


BORDER, PAIR = {"key": "border"}, {"key": b"k", "value": b"v"}
CALLS = [
    Call("kv", lambda s, **a: s.kv(**a), {"name": "bytes"},
         {"name": "name", "shards": "shards", "value": "value type", "key": "key type", "create": "flag"}),
    Call("queue", lambda s, **a: s.queue(**a), {"name": "events"},
         {"name": "name", "shards": "shards", "retention": "retention", "headers": "flag", "create": "flag"}),
    Call("compact", lambda s, **a: s.compact(**a), {"name": "bytes"}, {"name": "name", "timeout_s": "seconds"}),
    Call("table", lambda s, **a: s.table(**a), {"name": "bytes"}, {"name": "name"}),
    Call("drop", lambda s, **a: s.drop(**a), {"name": "unknown"}, {"name": "name"}),
    Call("flush", lambda s, **a: s.flush(**a), {}, {"epoch": "epoch"}),
    Call("batch", lambda s, **a: s.batch(**a), {}, {"token": "token", "durable": "flag"}),
    Call("get", lambda s, **a: s.kv("bytes").get(**a), {"key": b"k"}, BORDER),
    Call("getitem", lambda s, key: s.kv("bytes")[key], {"key": b"a"}, BORDER),
    Call("contains", lambda s, key: key in s.kv("bytes"), {"key": b"a"}, BORDER),
    Call("multi_get", lambda s, **a: s.kv("bytes").multi_get(**a), {"keys": [b"k"]}, {"keys": "keys"}),
    Call("scan", drained(lambda s, **a: s.kv("bytes").scan(**a)), {},
         {"start": "border", "end": "optional border", "prefix": "border",
          "limit": "optional count", "reverse": "flag"}),
    Call("scan_arrow", drained(lambda s, **a: s.kv("bytes").scan_arrow(**a)), {},
         {"start": "border", "end": "optional border", "prefix": "border"}),
    Call("get_row", lambda s, **a: s.kv("bytes").get_row(**a), {"key": b"k"}, BORDER),
    Call("put", lambda s, **a: s.kv("bytes").put(**a), PAIR,
         {"key": "key", "value": "bytes", "ttl_s": "ttl", "durable": "flag", "if_lsn": "optional count",
          "if_absent": "flag"}),
    Call("setitem", lambda s, **a: s.kv("bytes").__setitem__(*a.values()), PAIR, {"key": "key", "value": "bytes"}),
    Call("put int64", lambda s, **a: s.kv("numbers").put(**a), {"key": b"k", "value": 1}, {"value": "int64"}),
    Call("put text", lambda s, **a: s.kv("texts").put(**a), {"key": b"k", "value": "v"}, {"value": "text"}),
    Call("put json", lambda s, **a: s.kv("documents").put(**a), {"key": b"k", "value": {}}, {"value": "json"}),
    Call("put decimal", lambda s, **a: s.kv("money").put(**a), {"key": b"k", "value": 1}, {"value": "decimal"}),
    Call("put struct", lambda s, **a: s.kv("people").put(**a), {"key": b"k", "value": {"name": "x"}},
         {"value": "struct"}),
    Call("put text key", lambda s, **a: s.kv("named").put(**a), {"key": "k", "value": b"v"}, {"key": "text key"}),
    Call("merge float64", lambda s, **a: s.kv("floats").merge(**a), {"key": b"k", "operand": 1, "operator": "add_f64"},
         {"operand": "float64", "operator": "operator"}),
    Call("count", lambda s, **a: s.kv("bytes").count(**a), {}, {"start": "border", "end": "optional border"}),
    Call("put_many", lambda s, **a: s.kv("bytes").put_many(**a), {"pairs": {b"k": b"v"}},
         {"pairs": "pairs", "durable": "flag"}),
    Call("delete", lambda s, **a: s.kv("bytes").delete(**a), {"key": b"k"},
         {"key": "key", "durable": "flag", "if_lsn": "optional count"}),
    Call("delete_range", lambda s, **a: s.kv("bytes").delete_range(**a), {"start": b"x", "end": b"y"},
         {"start": "key", "end": "key", "durable": "flag"}),
    Call("merge", lambda s, **a: s.kv("numbers").merge(**a), {"key": b"k", "operand": 1, "operator": "add_i64"},
         {"key": "key", "operand": "int64", "operator": "operator", "ttl_s": "ttl", "durable": "flag"}),
    Call("queue put", lambda s, **a: s.queue("events").put(**a), {"payload": b"m"},
         {"payload": "bytes", "key": "optional key", "time": "time", "headers": "headers", "token": "token",
          "durable": "flag"}),
    Call("queue put_many", lambda s, **a: s.queue("events").put_many(**a), {"messages": [b"m"]},
         {"messages": "messages", "headers": "headers", "token": "token", "durable": "flag"}),
    Call("append", lambda s, **a: s.queue("events").append(**a), {"payload": b"m"},
         {"payload": "bytes", "key": "optional key", "time": "time", "headers": "headers"}),
    Call("read", lambda s, **a: s.queue("events").read(**a), {},
         {"shard": "shard", "from_sequence": "optional count", "limit": "optional count"}),
    Call("trim", lambda s, **a: s.queue("events").trim(**a), {"before": 1},
         {"before": "count", "shard": "shard", "durable": "flag"}),
    Call("seek time", lambda s, **a: s.queue("events").seek(**a), {"time": 0}, {"time": "time", "shard": "shard"}),
    Call("consumer", lambda s, **a: s.queue("events").consumer(**a), {"name": "c"},
         {"name": "consumer", "visibility_timeout_s": "seconds", "deliveries_max": "optional count"}),
    Call("consumer get", lambda s, **a: s.queue("events").consumer("c").get(**a), {},
         {"max": "count", "timeout_s": "seconds"}),
    Call("ack", lambda s, **a: s.queue("events").consumer("c").ack(**a), {"messages": []}, {"messages": "leased"}),
    Call("ack in a batch", lambda s, batch: s.queue("events").consumer("c").ack([], batch=batch), {"batch": None},
         {"batch": "flag"}),
    Call("nack", lambda s, **a: s.queue("events").consumer("c").nack(**a), {"messages": []},
         {"messages": "leased", "delay_s": "seconds"}),
    Call("extend", lambda s, **a: s.queue("events").consumer("c").extend(**a), {"messages": []},
         {"messages": "leased", "visibility_timeout_s": "optional seconds"}),
    Call("alter", lambda s, **a: s.queue("altered").alter(**a), {"retention": penstock.Retention()},
         {"retention": "new retention", "headers": "flag"}),
    Call("consumer seek", lambda s, **a: s.queue("events").consumer("c").seek(**a), {"to": 1}, {"to": "position"}),
    Call("series", lambda s, **a: s.series(**a), {"name": "metrics"},
         {"name": "name", "shards": "shards", "options": "series options", "create": "flag"}),
    Call("write", lambda s, **a: s.series("metrics").write(**a), {"metric": "cpu", "value": 1.0, "time": 1},
         {"metric": "metric", "value": "number", "labels": "labels", "time": "far time", "durable": "flag"}),
    Call("write_columns", lambda s, **a: s.series("metrics").write_columns(**a),
         {"metric": "cpu", "values": [1.0], "times": [1]},
         {"metric": "metric", "values": "values", "times": "times", "labels": "labels", "durable": "flag"}),
    Call("write_arrow", lambda s, **a: s.series("metrics").write_arrow(**a),
         {"rows": pa.table({"metric": ["cpu"], "time": [1], "value": [1.0]})}, {"rows": "samples", "durable": "flag"}),
    Call("select", lambda s, **a: s.series("metrics").select(**a), {"selector": "cpu"},
         {"selector": "selector", "start": "time", "end": "time", "timeout_s": "seconds"}),
    Call("scan samples", drained(lambda s, **a: s.series("metrics").scan_arrow(**a)), {},
         {"selector": "selector", "start": "time", "end": "time"}),
    Call("aggregate", lambda s, **a: s.series("metrics").aggregate(**a), {"selector": "cpu", "function": "sum"},
         {"selector": "selector", "start": "time", "function": "function", "by": "by", "step": "step",
          "quantile": "quantile"}),
    Call("label_values", lambda s, **a: s.series("metrics").label_values(**a), {"name": "host"},
         {"name": "label", "selector": "selector", "start": "time"}),
    Call("cardinality", lambda s, **a: s.series("metrics").cardinality(**a), {},
         {"start": "time", "top": "optional count"}),
    Call("delete samples", lambda s, **a: s.series("metrics").delete(**a), {"selector": "gone"},
         {"selector": "selector", "start": "time", "end": "time", "durable": "flag"}),
    Call("set_metadata", lambda s, **a: s.series("metrics").set_metadata(**a), {"metric": "cpu"},
         {"metric": "metric", "type": "metric type", "unit": "description", "help": "description", "durable": "flag"}),
    Call("alter series", lambda s, **a: s.series("metrics").alter(**a), {"future_s": 86_400.0},
         {"window_s": "ttl", "future_s": "age", "retention_s": "ttl", "series_max": "count",
          "metric_series_max": "count"}),
    Call("batch series", in_batch(lambda b, **a: b.series("metrics").write(**a)),
         {"metric": "cpu", "value": 1.0, "time": 1}, {"metric": "metric", "value": "number", "labels": "labels"}),
    Call("vector", lambda s, **a: s.vector(**a), {"name": "docs"},
         {"name": "name", "shards": "shards", "dimensions": "optional count", "metric": "distance", "create": "flag"}),
    Call("upsert", lambda s, **a: s.vector("docs").upsert(**a), {"ids": ["a"], "vectors": [[1.0, 2.0]]},
         {"ids": "vector ids", "vectors": "vectors", "attributes": "attributes", "durable": "flag"}),
    Call("delete vectors", lambda s, **a: s.vector("docs").delete(**a), {"ids": ["gone"]},
         {"ids": "vector ids", "durable": "flag"}),
    Call("get vectors", lambda s, **a: s.vector("docs").get(**a), {"ids": ["a"]}, {"ids": "vector ids"}),
    Call("search", lambda s, **a: s.vector("docs").search(**a), {"vector": [1.0, 2.0]},
         {"vector": "query vector", "k": "count", "where": "where", "probes": "optional count", "exact": "flag"}),
    Call("batch vector", in_batch(lambda b, **a: b.vector("docs").upsert(**a)),
         {"ids": ["a"], "vectors": [[1.0, 2.0]]}, {"ids": "vector ids", "vectors": "vectors"}),
    Call("batch put", in_batch(lambda b, **a: b.kv("bytes").put(**a)), PAIR,
         {"key": "key", "value": "bytes", "ttl_s": "ttl"}),
    Call("batch kv", in_batch(lambda b, **a: b.kv(**a)), {"name": "bytes"}, {"name": "name"}),
    Call("batch queue put", in_batch(lambda b, **a: b.queue("events").put(**a)), {"payload": b"m"},
         {"payload": "bytes", "key": "optional key", "time": "time"}),
]  # fmt: skip


def wrong_uses(call: Call) -> Iterator[tuple[str, Any]]:
    for argument, sort in call.sorts.items():
        yield from ((argument, value) for value in BAD[sort])


def refused(store: Any, call: Call) -> list[str]:
    """Try every bad argument of a call; what was not refused as it should be."""
    wrong = []
    for argument, value in wrong_uses(call):
        text = f"{call.name}({argument}={value!r:.40})"
        try:
            call.act(store, **{**call.right, argument: value})
        except FixTheCall as error:
            if not one_line(error):
                wrong.append(f"{text}: {error}")
        except BaseException as error:
            wrong.append(f"{text}: {error!r}")
        else:
            wrong.append(f"{text}: taken")
    return wrong


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def owner(folder: Path) -> Iterator[penstock.Store]:
    with penstock.open(folder) as store:
        store.kv("bytes").put(b"a", b"1")
        store.kv("numbers", value="int64").put(b"a", 1)
        store.kv("texts", value="utf8").put(b"a", "1")
        store.kv("documents", value="json").put(b"a", [1])
        store.kv("money", value=pa.decimal128(18, 2)).put(b"a", 1)
        store.kv("people", value=PERSON).put(b"a", {"name": "a"})
        store.kv("named", key="utf8").put("a", b"1")
        store.kv("floats", value="float64").put(b"a", 1)
        store.queue("events", shards=2).put(b"m", key=b"k")
        store.series("metrics", shards=2).write("cpu", 1.0, {"host": "a"}, time=1)
        store.vector("docs", dimensions=2).upsert("a", [1.0, 2.0], {"n": 1})
        store.queue("altered")
        store.flush()
        yield store
    with penstock.open(folder) as store:
        assert store.kv("bytes").get(b"a") == b"1", "it reopens"


@pytest.fixture(scope="module", params=["open", "connect"])
def store(request: pytest.FixtureRequest, owner: penstock.Store) -> Iterator[Any]:
    if request.param == "open":
        yield owner
    else:
        with penstock.connect(owner.path) as client:
            yield client


def content(store: Any) -> Any:
    store.flush()
    with store.snapshot() as snapshot:
        tables = {name: snapshot.table(name).to_arrow() for name in snapshot.tables()}
        return {
            name: sorted(map(repr, table.drop_columns([n for n in ("lsn",) if n in table.column_names]).to_pylist()))
            for name, table in tables.items()
        }


def one_line(error: BaseException) -> bool:
    return bool(str(error)) and "\n" not in str(error) and len(str(error)) < 400


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_bad_arguments(store: Any, call: Call) -> None:
    assert refused(store, call) == []


def test_how_many_there_are() -> None:
    assert sum(len(list(wrong_uses(call))) for call in CALLS) > 150


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_the_same_call_with_right_arguments(store: Any, call: Call) -> None:
    """The control: what is refused above is refused for its bad argument."""
    if call.name == "drop":
        with pytest.raises(NotFound):
            call.act(store, **call.right)
    else:
        call.act(store, **call.right)


def test_nothing_was_changed(owner: penstock.Store) -> None:
    before = content(owner)
    for call in CALLS:
        refused(owner, call)
    assert content(owner) == before
    assert owner.troubles() == []


def test_another_kind(store: Any) -> None:
    for act in (lambda: store.kv("events"), lambda: store.queue("bytes"), lambda: store.kv("bytes", value="int64")):
        with pytest.raises(KindMismatch) as caught:
            act()  # type: ignore[no-untyped-call]
        assert one_line(caught.value)
    with store.snapshot() as snapshot, pytest.raises(KindMismatch):
        snapshot.kv("events")
    with pytest.raises(KindMismatch), store.batch() as batch:
        batch.queue("bytes")


def test_a_dropped_table(store: Any) -> None:
    table, queue = store.kv("gone"), store.queue("gone_queue")
    consumer = queue.consumer("c")
    table.put(b"k", b"v", durable=True)
    store.drop("gone")
    store.drop("gone_queue")
    for act in (
        lambda: table.put(b"k", b"v", durable=True), lambda: table.get(b"k"), lambda: list(table.scan()),
        lambda: table.merge(b"k", b"v", operator="append", durable=True), lambda: queue.put(b"m", durable=True),
        lambda: consumer.get(1), queue.read, queue.bounds, lambda: store.table("gone"),
    ):  # fmt: skip
        with pytest.raises(PenstockError) as caught:
            act()
        assert isinstance(caught.value, NotFound), caught.value
        assert one_line(caught.value)


@pytest.mark.parametrize("how", ["open", "connect"])
def test_everything_after_close(tmp_path: Path, how: str) -> None:
    penstock.open(tmp_path).close()
    store: Any = penstock.open(tmp_path) if how == "open" else penstock.connect(tmp_path)
    table, queue = store.kv("users"), store.queue("events")
    consumer, snapshot, batch = queue.consumer("c"), store.snapshot(), store.batch()
    reader, scan = snapshot.kv("users"), table.scan()
    batch.kv("users").put(b"k", b"v")
    store.close()
    store.close()
    for act in (
        lambda: store.kv("users"), store.tables, store.flush, store.batch,
        store.snapshot, lambda: store.drop("users"), lambda: table.put(b"k", b"v"), lambda: table.get(b"k"),
        lambda: table.put(b"k", b"v", durable=True), lambda: list(table.scan()), lambda: table.multi_get([b"k"]),
        lambda: queue.put(b"m"), queue.read, lambda: consumer.get(1, 10), lambda: consumer.lag,
        lambda: reader.get(b"k"), lambda: list(reader.scan()), batch.commit,
        *([lambda: list(scan)] if how == "open" else []),  # a client has its first page
    ):  # fmt: skip
        with pytest.raises(Closed) as caught:
            act()
        assert one_line(caught.value), caught.value
    snapshot.close()


def test_a_batch_that_has_ended(store: Any) -> None:
    with store.batch() as batch:
        table = batch.kv("bytes")
    for act in (lambda: batch.kv("bytes"), lambda: table.put(b"k", b"v"), batch.commit):
        with pytest.raises(Invalid, match="ended"):
            act()


def test_another_thread(store: Any) -> None:
    """Every call works in any thread, and refuses there what it refuses here."""
    with ThreadPoolExecutor(4) as pool:
        assert [wrong for some in pool.map(lambda call: refused(store, call), CALLS) for wrong in some] == []


def test_a_forked_child(store: Any) -> None:
    """Nothing of the parent's store works there, and all of it says so at once."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        wrong = []
        for call in CALLS:
            try:
                call.act(store, **call.right)
                wrong.append(f"{call.name}: taken")
            except Closed as error:
                wrong += [] if one_line(error) and "fork" in str(error) else [f"{call.name}: {error}"]
            except BaseException as error:
                wrong.append(f"{call.name}: {error!r}")
        os.write(writing, "\n".join(wrong).encode()[:60_000])
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        assert pipe.read() == ""
    os.waitpid(child, 0)
    store.kv("bytes").put(b"t", b"v", durable=True)
    store.kv("bytes").delete(b"t", durable=True)


def test_after_an_interrupt(store: Any) -> None:
    """Wherever it comes in a call, what is wrong is refused afterwards, and what is right is done."""
    table, points = store.kv("bytes"), 0
    for _ in every_point(lambda: table.put(b"t", b"v", durable=True), step=13):
        with pytest.raises(Invalid) as caught:
            table.put(None, b"v")
        assert one_line(caught.value)
        table.put(b"t", b"w", durable=True)
        assert table[b"t"] == b"w"
        points += 1
    assert points > 2
    table.delete(b"t", durable=True)
