"""Sums of floats and decimals, keys of text, rows of frames, integers of numpy: the types of a kv table."""

from __future__ import annotations

import asyncio
import math
import random
from collections import UserDict
from collections.abc import Iterator
from datetime import datetime
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import penstock
import penstock.aio
from penstock.errors import ConditionFailed, Invalid, KindMismatch, OutcomeUnknown
from penstock.kv.table import KvTable

MONEY = pa.decimal128(18, 2)


@pytest.fixture(scope="module", params=["open", "connect"])
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with penstock.open(tmp_path_factory.mktemp("store")) as owner:
        if request.param == "open":
            yield owner
        else:
            with penstock.connect(owner.path) as client:
                yield client


# -- sums


def test_a_sum_of_floats_does_not_depend_on_the_order(tmp_path: Path) -> None:
    chance = random.Random(1)
    numbers = [chance.choice([1, -1]) * chance.random() * 10.0 ** chance.randint(-200, 200) for _ in range(200)]
    total = float(sum(map(Fraction, numbers)))
    with penstock.open(tmp_path) as store:
        table = store.kv("t", value="float64")
        for key, order in ((b"as is", numbers), (b"sorted", sorted(numbers)), (b"back", numbers[::-1])):
            for at, number in enumerate(order):
                table.merge(key, number, operator="add_f64")
                if at % 50 == 49:
                    store.flush()
                    if at == 99:
                        store.compact("t")
        assert dict(table) == {b"as is": total, b"sorted": total, b"back": total}
        store.compact("t")
        assert table.to_arrow().column("value").to_pylist() == [total] * 3
        assert table.to_arrow().schema.field("value").type == pa.float64()
        assert next(iter(table.values())) == total
    with penstock.open(tmp_path) as store:
        table = store.kv("t", value="float64")
        table.put(b"back", 1.0)
        table.merge(b"back", 0.5, operator="add_f64")
        assert (table[b"sorted"], table[b"back"]) == (total, 1.5)


def test_sums_of_floats_through_every_door(store: Any) -> None:
    table = store.kv("floats", value="float64")
    with store.batch() as batch:
        for number in (1e300, 1.0, -1e300, np.float32(0.5)):
            batch.kv("floats").merge(b"k", number, operator="add_f64")
    store.load("floats", pa.table({"key": [b"k", b"l"], "value": [0.25, 0.25], "op": ["add_f64", "put"]}))
    assert dict(table) == {b"k": 1.75, b"l": 0.25}
    table.merge(b"k", 1e-30, operator="add_f64")
    table.merge(b"k", 1.5, operator="min_f64", durable=True)
    with store.snapshot() as snapshot:
        assert snapshot.kv("floats").get(b"k") == 1.5
    table.merge(b"n", math.nan, operator="add_f64")
    table.merge(b"n", 1, operator="add_f64")
    assert math.isnan(table[b"n"])
    with pytest.raises(Invalid, match="add_f64"):
        store.kv("plain").merge(b"k", bytes(8), operator="add_f64")


def test_a_merge_never_replaces_a_value_it_does_not_fit(store: Any) -> None:
    table = store.kv("misfits")
    table.put(b"k", b"a name", durable=True)
    for _ in range(2):
        table.merge(b"k", (1).to_bytes(8, "little"), operator="add_i64")
        table.merge(b"k", penstock.union_of({b"x"}), operator="union")
        assert table[b"k"] == b"a name"
        store.flush()
    assert table[b"k"] == b"a name"


def test_decimals(store: Any) -> None:
    table = store.kv("money", value=MONEY, shards=2)
    table.put(b"a", Decimal("1.10"))
    table.put(b"b", 7)
    table.put_many({b"c": Decimal("-0.01"), b"d": np.int64(3)}, durable=True)
    for _ in range(10):
        table.merge(b"a", Decimal("0.10"), operator="add_decimal")
        table.merge(b"c", Decimal("0.01"), operator="min_decimal")
        table.merge(b"new", Decimal("2.5"), operator="max_decimal")
    expected = {b"a": "2.10", b"b": "7.00", b"c": "-0.01", b"d": "3.00", b"new": "2.50"}
    assert dict(table) == {key: Decimal(text) for key, text in expected.items()}
    assert {key: str(value) for key, value in table.items()} == expected
    arrow = table.to_arrow()
    assert arrow.schema.field("value").type == MONEY == table.value_type
    assert dict(zip(arrow["key"].to_pylist(), arrow["value"].to_pylist(), strict=True)) == dict(table)
    store.load("money", pa.table({"key": [b"e"], "value": pa.array([Decimal("9.99")], pa.decimal128(5, 2))}))
    assert table[b"e"] == Decimal("9.99")
    assert store.kv("money", value=MONEY).get_row(b"e").value == Decimal("9.99")
    for wrong in (1.5, "1.10", Decimal("1.001"), Decimal("NaN"), Decimal(10) ** 17, True, None):
        with pytest.raises(Invalid):
            table.put(b"k", wrong)
    for other in (pa.decimal128(18, 3), "int64"):
        with pytest.raises(KindMismatch, match="decimal128"):
            store.kv("money", value=other)
    with pytest.raises(Invalid, match="unknown"):
        store.kv("more", value=pa.decimal256(60, 2))


# -- integers of numpy


def test_integers_of_numpy_are_integers(store: Any) -> None:
    table = store.kv("integers", value="int64", shards=np.int32(1))
    table.put(b"a", np.int64(5))
    table.put_many({b"b": np.uint8(6)})
    table.merge(b"a", np.int16(2), operator="add_i64")
    assert dict(table) == {b"a": 7, b"b": 6}
    assert len(list(table.scan(limit=np.int64(1)))) == 1
    with pytest.raises(Invalid):
        table.put(b"c", np.uint64(1 << 63))
    with pytest.raises(Invalid):
        table.put(b"c", np.bool_(True))
    row = table.get_row(b"a")
    table.put(b"a", 1, if_lsn=np.int64(row.lsn))
    with store.batch(token=("numpy", np.int64(1))):
        pass


# -- rows of frames


def test_rows_of_frames(store: Any) -> None:
    table = store.kv("frames", value="int64", shards=2)
    columns = {"key": [b"a", b"b", b"a"], "value": [1, 2, 3]}
    for frame in (pa.table(columns), pd.DataFrame(columns), pl.DataFrame(columns), pa.record_batch(columns)):
        table.clear()
        table.put_many(frame, durable=True)
        assert dict(table) == {b"a": 3, b"b": 2}
    table.put_many(table.to_arrow())  # with its column of LSNs
    with store.batch() as batch:
        batch.kv("frames").put_many(pa.table({"key": [b"c"], "value": [4]}))
    assert dict(table) == {b"a": 3, b"b": 2, b"c": 4}
    for wrong in (
        {"key": [b"a"]},
        {"key": [b"a"], "value": ["1"]},
        {"key": ["a"], "value": [1]},
        {"key": [b"a", None], "value": [1, 2]},
        {"key": [b"a"], "value": [None]},
        {"key": [b"a"], "value": [1], "op": ["delete"]},
        {"key": [b"k" * 65_537], "value": [1]},
    ):
        with pytest.raises(Invalid):
            table.put_many(pa.table(wrong))
    assert dict(table) == {b"a": 3, b"b": 2, b"c": 4}
    assert table.put_many(pa.table({"key": pa.array([], pa.binary()), "value": pa.array([], pa.int64())})) == 0


def test_frames_as_they_come(store: Any) -> None:
    """A pandas frame that was filtered has an index without a name; categories and bytes of one length are common."""
    frame = pd.DataFrame({"key": ["x", "a", "b"], "value": ["0", "1", "1"], "n": [0, 1, 2]})
    filtered = frame[frame["n"] > 0][["key", "value"]]
    assert any(name.startswith("__index") for name in pa.table(filtered).column_names)
    categories = [
        filtered.astype("category"),
        pl.DataFrame({"key": ["a", "b"], "value": ["1", "1"]}).with_columns(pl.all().cast(pl.Categorical)),
        pa.table({"key": pa.array(["a", "b"]).dictionary_encode(), "value": pa.array(["1", "1"]).dictionary_encode()}),
    ]
    table = store.kv("as_they_come", key="utf8", value="utf8")
    for rows in (filtered, *categories):
        for write in (table.put_many, lambda rows: store.load("as_they_come", rows)):
            table.clear()
            write(rows)
            assert dict(table) == {"a": "1", "b": "1"}
    ids, queue = pa.array([b"ab", b"cd"], pa.binary(2)), store.queue("frames_as_they_come")
    uuids = store.kv("uuids")
    uuids.put_many(pa.table({"key": ids, "value": ids}))
    assert dict(uuids) == {b"ab": b"ab", b"cd": b"cd"}
    queue.put_many(filtered.rename(columns={"value": "payload"}), durable=True)
    queue.put_many(categories[1].rename({"value": "payload"}), durable=True)
    assert [(message.key, message.payload) for message in queue.read()] == [(b"a", b"1"), (b"b", b"1")] * 2
    null = pa.table({"key": pa.array(["a", None]).dictionary_encode(), "value": ["1", "2"]})
    with pytest.raises(Invalid, match="null"):
        table.put_many(null)


def test_text_from_arrow_must_be_utf8(store: Any) -> None:
    bad = pa.Array.from_buffers(pa.string(), 1, pa.array([b"\xff"]).buffers())  # Arrow trusts a producer's text
    values = {"texts8": "utf8", "structs8": pa.struct([("a", pa.string())])}
    columns = {"texts8": bad, "structs8": pa.StructArray.from_arrays([bad], ["a"])}
    for name, value in values.items():
        table = store.kv(name, key="utf8", value=value)
        good = pa.array(["x" if value == "utf8" else {"a": "x"}])
        for rows in (
            pa.table({"key": ["a"], "value": columns[name]}),
            pa.table({"key": bad, "value": good}),
        ):
            for write in (table.put_many, lambda rows, name=name: store.load(name, rows)):
                with pytest.raises(Invalid, match="UTF8"):
                    write(rows)
        assert dict(table) == {}


@pytest.mark.parametrize("shards", [1, 2])
def test_rows_of_uneven_sizes_fit_into_the_parts(store: Any, shards: int, monkeypatch: pytest.MonkeyPatch) -> None:
    table = store.kv(f"uneven{shards}", shards=shards)
    monkeypatch.setattr(type(table._port), "write_bytes_max", property(lambda self: 10_000))
    submit, sizes = KvTable._put_rows, list[int]()

    def counted(self: Any, rows: Any, size: int) -> Any:
        sizes.append(size)
        return submit(self, rows, size)

    monkeypatch.setattr(KvTable, "_put_rows", counted)
    rows = {b"a": b"", b"large": b"v" * 8_400, **{b"%d" % i: b"v" * 900 for i in range(20)}, b"last": b"v" * 8_000}
    table.put_many(rows)
    assert dict(table) == rows
    assert max(sizes) <= 10_000
    with pytest.raises(Invalid, match="a row takes"):  # before anything is written
        table.put_many({b"b": b"", b"too large": b"v" * 10_001, b"c": b""})
    assert dict(table) == rows


def test_what_is_larger_than_a_write_is_written_in_parts(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for shards in (1, 2):
        table = store.kv(f"large{shards}", shards=shards)
        port = type(table._port)
        monkeypatch.setattr(port, "write_bytes_max", property(lambda self: 10_000))
        submit, sizes = KvTable._put_rows, list[int]()

        def counted(self: Any, rows: Any, size: int, submit: Any = submit, sizes: list[int] = sizes) -> Any:
            sizes.append(size)
            return submit(self, rows, size)

        monkeypatch.setattr(KvTable, "_put_rows", counted)
        rows = {b"%05d" % i: b"v" * 50 for i in range(500)}
        table.put_many(rows)
        assert dict(table) == rows
        assert len(sizes) > 10
        assert max(sizes) <= 10_000
        table.put_many(pa.table({"key": list(rows), "value": [b"w"] * 500}))
        assert set(table.values()) == {b"w"}

        def failing(self: Any, rows: Any, size: int, submit: Any = submit, sizes: list[int] = sizes) -> Any:
            if len(sizes) > 2:
                raise Invalid("it fails")
            return counted(self, rows, size)

        sizes.clear()
        monkeypatch.setattr(KvTable, "_put_rows", failing)
        with pytest.raises(OutcomeUnknown, match=r"first \d+ of 500 rows are durable") as failed:
            table.put_many(rows)
        durable = int(str(failed.value).split()[2])
        assert [value for _, value in table.scan()].count(b"v" * 50) == durable > 0
        monkeypatch.undo()


def test_a_batch_larger_than_a_write_says_what_to_do(tmp_path: Path) -> None:
    with penstock.open(tmp_path, settings=penstock.StoreSettings(memory_bytes_max=256 << 20)) as store:
        table = store.kv("t")
        rows = {b"%d" % i: bytes(1 << 20) for i in range(30)}
        table.put_many(rows)
        assert table.count() == 30
        with pytest.raises(Invalid, match="fit"), store.batch() as batch:
            batch.kv("t").put_many({key + b"!": value for key, value in rows.items()})
        assert table.count() == 30


# -- keys of text


def test_keys_of_text(store: Any) -> None:
    table = store.kv("texts", key="utf8", value="int64", shards=2)
    table["b"] = 2
    table.put("ä", 3)
    table.put_many({"a": 1, "": 0}, durable=True)
    assert dict(table) == {"": 0, "a": 1, "b": 2, "ä": 3}
    assert list(table) == ["", "a", "b", "ä"]
    assert (table.get("a"), table.get("none"), table.get("none", 5), table["ä"]) == (1, None, 5, 3)
    assert "a" in table
    assert "none" not in table
    assert table.multi_get(["ä", "x"]) == [3, None]
    assert list(table.scan("a", "c")) == [("a", 1), ("b", 2)] == list(table.scan(end="c", start="a"))
    assert list(table.scan(prefix="ä", reverse=True)) == [("ä", 3)]
    assert table.count(prefix="a") == 1
    arrow = table.to_arrow()
    assert arrow.schema.field("key").type == pa.string() == table.schema.field("key").type
    assert sorted(arrow["key"].to_pylist()) == ["", "a", "b", "ä"]
    assert pa.table(table) == arrow
    row = table.get_row("a")
    table.put("a", 10, if_lsn=row.lsn)
    with pytest.raises(ConditionFailed) as failed:
        table.put("a", 11, if_lsn=row.lsn)
    assert failed.value.key == "a"
    table.merge("a", 1, operator="add_i64")
    table.update(c=4)
    assert table.pop("a") == 11
    del table["b"]
    with pytest.raises(KeyError, match="none"):
        table["none"]
    table.delete_range("c", "d")
    table.delete("ä", durable=True)
    assert dict(table) == {"": 0}
    with store.batch() as batch:
        batch.kv("texts", key="utf8").put("x", 1)
        batch.kv("texts").put("y", 2, if_absent=True)
    with store.snapshot() as snapshot:
        assert dict(snapshot.kv("texts", key="utf8")) == {"": 0, "x": 1, "y": 2}
    table.put_many(pl.DataFrame({"key": ["p"], "value": [9]}))
    store.load("texts", pa.table({"key": ["q"], "value": [9]}))
    assert dict(store.kv("texts")) == {"": 0, "p": 9, "q": 9, "x": 1, "y": 2}
    assert "TextKvTable 'texts' of int64, 2 shards" in repr(table)
    table.clear()
    assert not table


def test_changes_of_keys_of_text(store: Any) -> None:
    table = store.kv("told_texts", key="utf8", changes=True)
    for key in ("a", "b"):
        table.put(key, b"", durable=True)
    changes = table.changes().to_arrow()
    assert changes["key"].to_pylist() == ["a", "b"]
    first = changes["_commit_version"][0].as_py()
    assert table.changes(until=first).to_arrow()["key"].to_pylist() == ["a"]
    assert table.changes(after=first).to_arrow()["key"].to_pylist() == ["b"]


def test_wrong_keys_of_text(store: Any) -> None:
    table = store.kv("strict", key="utf8")
    for wrong in (b"a", 1, None, "\ud800", True):
        for act in (
            table.get,
            lambda key: table.put(key, b"v"),
            table.delete,
            table.get_row,
            lambda key: table.put_many({key: b"v"}),
            lambda key: table.multi_get([key]),
            lambda key: key in table,
            lambda key: list(table.scan(prefix=key)),
        ):
            with pytest.raises(Invalid, match="text"):
                act(wrong)
    with pytest.raises(Invalid):
        store.load("strict", pa.table({"key": [b"a"], "value": [b"v"]}))
    with pytest.raises(KindMismatch, match="say key='utf8'"):
        store.kv("strict", key="bytes")
    with pytest.raises(Invalid, match="unknown"):
        store.kv("other", key="text")
    assert not table


def test_keys_of_text_in_asyncio(tmp_path: Path) -> None:
    async def use() -> None:
        async with penstock.aio.open(str(tmp_path)) as store:
            table = await store.kv("t", key="utf8", value="int64")
            await table.put("a", 1, if_absent=True)
            row = await table.get_row("a")
            assert row is not None
            assert row.value == 1
            assert await table.get("a") == 1
            async with store.batch() as batch:
                batch.kv("t", key="utf8", value="int64").put("b", 2, if_absent=True)
            assert [pair async for pair in table.scan()] == [("a", 1), ("b", 2)]
            assert await table.count() == 2
            async with store.snapshot() as snapshot:
                assert await snapshot.kv("t", key="utf8", value="int64").get("b") == 2

    asyncio.run(use())


# -- statistics


def test_statistics(tmp_path: Path) -> None:
    with penstock.open(tmp_path) as owner, penstock.connect(owner.path) as client:
        table, remote = owner.kv("t", shards=2), client.kv("t", shards=2)
        empty = table.statistics()
        assert (empty.shards, empty.rows_max, empty.files, empty.file_bytes, empty.runs_max) == (2, 0, 0, 0, 0)
        table.put_many({b"%d" % i: b"v" * 100 for i in range(1_000)}, durable=True)
        before = table.statistics()
        assert before.rows_max == 1_000
        assert before.memory_bytes > 100_000
        assert before.files == 0
        assert before == remote.statistics()
        with client.snapshot() as snapshot:
            owner.compact("t")
            after = table.statistics()
            assert (after.rows_max, after.memory_bytes, after.files, after.runs_max) == (1_000, 0, 2, 1)
            assert after.file_bytes > 100_000
            assert after == remote.statistics()
            assert snapshot.kv("t").statistics() == before
        assert owner.kv("text", key="utf8").statistics().rows_max == 0


# -- structs

PERSON = pa.struct([pa.field("name", pa.string(), nullable=False), ("born", pa.int32()), ("seen", pa.timestamp("us"))])
POINT = pa.struct([("x", pa.float64())])
WIDER = pa.struct([*PERSON, ("paid", pa.decimal128(9, 2)), ("tags", pa.list_(pa.string())), ("at", POINT)])
MOMENT = datetime(2026, 1, 2, 3, 4, 5, 678901)


def test_structs(store: Any) -> None:
    table = store.kv("people", value=PERSON, shards=2)
    table.put(b"ada", {"name": "Ada", "born": np.int32(1815), "seen": MOMENT})
    table.put_many({b"bob": {"name": "Bob"}}, durable=True)
    ada = {"name": "Ada", "born": 1815, "seen": MOMENT}
    bob = {"name": "Bob", "born": None, "seen": None}
    assert dict(table) == {b"ada": ada, b"bob": bob}
    assert table.get_row(b"ada").value == ada
    arrow = table.to_arrow()
    assert arrow.schema.field("value").type == PERSON == table.value_type
    assert pc.struct_field(arrow["value"], "name").to_pylist().count("Ada") == 1
    for wrong in (
        {"born": 1},
        {"name": 1},
        {"name": "x", "born": 1.5},
        {"name": "x", "more": 1},
        "x",
        None,
        {"name": None},
    ):
        with pytest.raises(Invalid):
            table.put(b"wrong", wrong)
    rows = pa.table({"key": [b"eve"], "value": pa.array([{"name": "Eve", "born": 1, "seen": None}], PERSON)})
    store.load("people", rows)
    table.put_many(rows.set_column(0, "key", pa.array([b"fay"])))
    assert table[b"eve"] == table[b"fay"] == {"name": "Eve", "born": 1, "seen": None}
    with pytest.raises(Invalid):
        table.merge(b"ada", {"name": "x"}, operator="append")

    wider = store.kv("people", value=WIDER)  # more fields, which may be null
    more = {"paid": None, "tags": None, "at": None}
    assert wider[b"ada"] == ada | more
    full = {"name": "Gil", "born": 2, "seen": MOMENT, "paid": Decimal("1.10"), "tags": ["a", None], "at": {"x": 0.5}}
    wider.put(b"gil", full, durable=True)
    assert wider[b"gil"] == full
    assert table[b"gil"] == {name: full[name] for name in ("name", "born", "seen")}, "an older program reads on"
    table.put(b"hal", {"name": "Hal"})
    assert store.kv("people", value=PERSON)[b"hal"] == {"name": "Hal", "born": None, "seen": None} | more
    assert wider.to_arrow().schema.field("value").type == WIDER
    assert set(pc.struct_field(wider.to_arrow()["value"], "paid").to_pylist()) == {None, Decimal("1.10")}
    with store.snapshot() as snapshot:
        assert snapshot.kv("people").get(b"gil") == full
    fewer = pa.struct([("name", pa.int64())])
    for other in (fewer, pa.struct([*WIDER, pa.field("must", pa.int64(), nullable=False)]), "json"):
        with pytest.raises(KindMismatch):
            store.kv("people", value=other)
    for impossible in (pa.struct([]), pa.struct([("u", pa.dense_union([pa.field("a", pa.int64())]))])):
        with pytest.raises(Invalid):
            store.kv("impossible", value=impossible)
    with store.batch() as batch:
        batch.kv("people").put(b"ida", {"name": "Ida"}, if_absent=True)
    assert len(wider) == 7


NUMBERS = pa.struct([("wide", pa.float64()), ("narrow", pa.float32()), ("at", pa.timestamp("us")), ("on", pa.date32())])


def test_a_struct_stores_no_other_number_than_it_was_given(store: Any) -> None:
    table = store.kv("numbers", value=NUMBERS)
    for wrong in (
        {"wide": True},
        {"narrow": np.True_},
        {"narrow": 1e300},
        {"narrow": -(10**40)},
        {"at": 1.5},
        {"on": 1.5},
    ):
        with pytest.raises(Invalid):
            table.put(b"wrong", wrong)
    valid = {"wide": 1.5, "narrow": math.inf, "at": datetime(2026, 1, 31), "on": datetime(2026, 1, 31).date()}
    table.put_many({b"kept": valid, b"most": {"narrow": 3.4028235e38, "at": 5, "wide": 1}}, durable=True)
    assert table[b"kept"] == valid
    assert math.isfinite(table[b"most"]["narrow"])
    assert table.count() == 2


def test_frames_may_lack_fields_that_may_be_null(store: Any) -> None:
    table = store.kv("partial", value=WIDER)
    nulls = dict.fromkeys([field.name for field in WIDER])
    for frame in (
        pa.table({"key": [b"arrow"], "value": [{"name": "A", "paid": Decimal("1.10")}]}),
        pl.DataFrame({"key": [b"polars"], "value": [{"name": "A", "tags": ["x"]}]}),
        pd.DataFrame({"key": [b"pandas"], "value": [{"name": "A", "at": {"x": 1.5}}]}),
    ):
        value = pa.table(frame)["value"].to_pylist()[0]
        key = pa.table(frame)["key"].to_pylist()[0]
        table.put_many(frame, durable=True)
        assert table[key] == nulls | value
        table.delete(key)
        store.load("partial", frame)
        assert table[key] == nulls | value
    for wrong in (
        {"born": 1},  # the name must not be null
        {"name": "A", "more": 1},
        {"name": "A", "at": {"x": 1.5, "y": 1.5}},
        {"paid": Decimal("1.10"), "name": "A"},  # in another order
    ):
        with pytest.raises(Invalid):
            table.put_many(pa.table({"key": [b"k"], "value": pa.array([wrong])}))
    assert b"k" not in table


def test_a_sum_may_have_more_digits_than_its_operands(store: Any) -> None:
    """Nothing is lost up to 38 digits; a reader of typed columns needs a table that was declared with enough."""
    table = store.kv("sums", value=pa.decimal128(3, 1))
    for _ in range(30):
        table.merge(b"k", Decimal("99.9"), operator="add_decimal", durable=True)
    assert table[b"k"] == Decimal("2997.0")
    assert table.to_arrow()["value"].to_pylist() == [Decimal("2997.0")]
    with pytest.raises(Invalid, match="decimals of 3 digits"):
        table.put(b"k", table[b"k"])


def test_structs_stay_across_a_restart_and_compaction(tmp_path: Path) -> None:
    with penstock.open(tmp_path) as store:
        store.kv("t", value=PERSON, key="utf8").put("a", {"name": "A", "seen": MOMENT})
        store.compact("t")
        wider: Any = store.kv("t", value=WIDER)
        wider.put("b", {"name": "B", "tags": ["x"]})
    with penstock.open(tmp_path) as store:
        table: Any = store.kv("t", key="utf8")
        assert table.value_type == WIDER
        store.compact("t")
        assert [(key, value["name"], value["tags"]) for key, value in table.items()] == [
            ("a", "A", None),
            ("b", "B", ["x"]),
        ]


def test_a_refused_opening_adds_no_fields(store: Any) -> None:
    store.kv("narrow", value=PERSON, shards=2)
    for wrong in ({"key": "utf8"}, {"shards": 3}):
        with pytest.raises(KindMismatch):
            store.kv("narrow", value=WIDER, **wrong)
    assert store.kv("narrow").value_type == PERSON
    with pytest.raises(Invalid, match="fields of a struct take"):
        store.kv("wide", value=pa.struct([(f"{number:01000}", pa.int64()) for number in range(300)]))


def test_a_struct_that_could_not_be_read_is_refused(store: Any) -> None:
    strict = pa.list_(pa.field("item", pa.int32(), nullable=False))
    fields = [
        ("at", pa.timestamp("us")),
        ("day", pa.date32()),
        ("times", pa.list_(pa.timestamp("s"))),
        ("ints", strict),
    ]
    table = store.kv("readable", value=pa.struct([*fields, ("place", POINT)]))
    late = {"at": 1 << 62, "day": (1 << 31) - 1, "times": [1 << 62], "ints": [1, None]}
    for wrong in [{name: value} for name, value in late.items()]:
        with pytest.raises(Invalid):
            table.put(b"k", wrong)
        loose = pa.struct([*fields[:3], ("ints", pa.list_(pa.int32())), ("place", POINT)])
        rows = pa.table({"key": [b"k"], "value": pa.array([wrong], loose)})
        for write in (table.put_many, lambda rows: store.load("readable", rows)):
            with pytest.raises(Invalid):
                write(rows)
    # What Arrow would change silently: fractions, and pairs and tuples instead of a mapping.
    for name, value in (("ints", np.array([1.5])), ("ints", {1}), ("place", [("y", 1.5)]), ("place", (1.5,))):
        with pytest.raises(Invalid):
            table.put(b"k", {name: value})
    assert dict(table) == {}
    table.put(b"k", UserDict(at=MOMENT, ints=np.array([1, 2]), place=UserDict(x=0.5)))
    assert table[b"k"] == {"at": MOMENT, "day": None, "times": None, "ints": [1, 2], "place": {"x": 0.5}}
    with pytest.raises(Invalid, match="time zone is unknown"):
        store.kv("nowhere", value=pa.struct([("at", pa.timestamp("us", "Nowhere/X"))]))
