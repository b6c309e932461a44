"""Arguments of tables, of their creation and of consumers, wrong in every way: a typed error, and the store goes on."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, tzinfo
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import penstock
from penstock.errors import FixTheCall, Invalid, KindMismatch
from penstock.kv.table import KvTable
from penstock.queue.calls import LeasedMessage
from penstock.queue.options import Retention
from penstock.queue.table import QueueTable
from penstock.store.tables import Tables

INF, NAN, HUGE = float("inf"), float("nan"), 10**5_000
NOT_WHOLE: list[Any] = [True, 1.0, "1", None, NAN, INF, -1, np.float64(1), np.bool_(True), [1], b"1", 1j]
NOT_SECONDS: list[Any] = [True, "1", NAN, -1, -INF, np.bool_(True), [1], b"1", 1j, HUGE]
NOT_BYTES: list[Any] = ["text", None, 1, True, 1.5, ["x"], {"a": 1}, np.int64(3)]
NOT_TEXT: list[Any] = [b"t", None, 1, True, "", "A", "a b", "a" * 64, ["a"], "\ud800", "../t", np.array(["a", "b"])]
FORGED = LeasedMessage(0, 1, 0, None, b"", 1, 1)


class Zone(tzinfo):
    def utcoffset(self, _: datetime | None) -> None:
        return None

    dst = utcoffset

    def tzname(self, _: datetime | None) -> str:
        return "nowhere"


class Sub(bytes):
    """A subclass of bytes, as numpy has one."""


class Hostile(bytes):
    def __len__(self) -> int:
        return 0


class Name(StrEnum):
    ENUM = "made_by_enum"


class Count(IntEnum):
    TWO = 2


class Liar(int):
    """A number that passes for any other: in comparisons, and when it is converted."""

    def __int__(self) -> int:
        return 10**30

    def __le__(self, _: object) -> bool:
        return True

    __ge__ = __le__

    def __lt__(self, _: object) -> bool:
        return True

    def __gt__(self, _: object) -> bool:
        return False


class LyingSeconds(float):
    def __float__(self) -> float:
        return NAN

    def __le__(self, _: object) -> bool:
        return True

    __ge__ = __le__


LIAR = Liar(10**30)
MANY_LINES = pa.table({"payload": [b"a"]})  # its repr has several


class RaisesInRepr:
    def __repr__(self) -> str:
        raise RuntimeError("no text")


Call = Callable[[Tables, KvTable[Any], QueueTable, Any], object]


def cases() -> Iterator[tuple[str, Call, Any]]:
    """(name, call, wrong argument)."""
    table: list[tuple[str, Call, list[Any]]] = [
        ("shards of a kv table", lambda s, t, q, x: s.kv("new", shards=x), [*NOT_WHOLE, 0, 1_025, HUGE]),
        ("shards of a queue", lambda s, t, q, x: s.queue("new", shards=x), [*NOT_WHOLE, 0, 1_025, HUGE]),
        ("name of a kv table", lambda s, t, q, x: s.kv(x), NOT_TEXT),
        ("name of a queue", lambda s, t, q, x: s.queue(x), NOT_TEXT),
        ("name to drop", lambda s, t, q, x: s.drop(x), NOT_TEXT),
        ("name to find", lambda s, t, q, x: s.table(x), NOT_TEXT),
        ("name in a batch", lambda s, t, q, x: s.batch().kv(x), NOT_TEXT),
        (
            "value type",
            lambda s, t, q, x: s.kv("new", value=x),
            ["int32", 1, True, ["bytes"], b"bytes", np.array([1, 2])],
        ),
        (
            "retention",
            lambda s, t, q, x: s.queue("new", retention=x),
            [{"age_s": 1}, 60, 60.0, "1h", True, [None, None, True], Retention],
        ),
        ("age_s", lambda s, t, q, x: s.queue("new", retention=Retention(age_s=x)), [*NOT_SECONDS, 0, INF, 1e12]),
        (
            "bytes_max",
            lambda s, t, q, x: s.queue("new", retention=Retention(bytes_max=x)),
            [item for item in NOT_WHOLE if item is not None] + [0, HUGE],
        ),
        (
            "acknowledged",
            lambda s, t, q, x: s.queue("new", retention=Retention(acknowledged=x)),
            [1, 0, None, "yes", np.bool_(True)],
        ),
        (
            "key",
            lambda s, t, q, x: t.put(x, b""),
            [*NOT_BYTES, Sub(b"k"), np.bytes_(b"k"), bytearray(b"k"), bytes(65_537)],
        ),
        ("key to get", lambda s, t, q, x: t.get(x), [*NOT_BYTES, Sub(b"k"), np.bytes_(b"k")]),
        ("keys to get", lambda s, t, q, x: t.multi_get(x), [b"ab", None, 1, [b"a", "b"], [Sub(b"k")]]),
        ("key to delete", lambda s, t, q, x: t.delete(x), [*NOT_BYTES, Sub(b"k")]),
        ("range", lambda s, t, q, x: t.delete_range(b"", x), [*NOT_BYTES, b"", Sub(b"k")]),
        ("value", lambda s, t, q, x: t.put(b"k", x), [*NOT_BYTES, RaisesInRepr()]),
        (
            "pairs",
            lambda s, t, q, x: t.put_many(x),
            [1, None, [1], [b"a"], {b"a": 1}, {"a": b""}, {None: b""}, {Sub(b"k"): b""}],
        ),
        ("ttl_s", lambda s, t, q, x: t.put(b"k", b"", ttl_s=x), [*NOT_SECONDS, 0, INF, 1e12, LIAR, MANY_LINES]),
        (
            "ttl_s of a merge",
            lambda s, t, q, x: t.merge(b"k", b"", operator="append", ttl_s=x),
            [*NOT_SECONDS, 0, INF, 1e12],
        ),
        ("operator", lambda s, t, q, x: t.merge(b"k", b"", operator=x), ["", "add", None, 1, ["append"], b"append"]),
        ("operand", lambda s, t, q, x: t.merge(b"k", x, operator="append"), [*NOT_BYTES]),
        ("number", lambda s, t, q, x: t.merge(b"k", x, operator="add_i64"), [b"", b"1234567", bytes(9), 1]),
        ("set", lambda s, t, q, x: t.merge(b"k", x, operator="union"), [b"\1", b"\1\0\0\0", bytes(4) + bytes(4)]),
        ("scan", lambda s, t, q, x: list(t.scan(x)), [*NOT_BYTES, Sub(b"k"), np.bytes_(b"k")]),
        ("limit", lambda s, t, q, x: list(t.scan(limit=x)), [item for item in NOT_WHOLE if item is not None]),
        ("text", lambda s, t, q, x: s.kv("texts", value="utf8").put(b"k", x), [b"x", 1, None, "\ud800"]),
        (
            "operand of text",
            lambda s, t, q, x: s.kv("texts", value="utf8").merge(b"k", x, operator="append"),
            [b"\xff", b"x", 1],
        ),
        (
            "whole number",
            lambda s, t, q, x: s.kv("wholes", value="int64").put(b"k", x),
            [1 << 63, -(1 << 63) - 1, LIAR, 1.0, True, "1", HUGE, np.uint64(1 << 63), np.bool_(True), bytes(8)],
        ),
        (
            "operand of a whole number",
            lambda s, t, q, x: s.kv("wholes", value="int64").merge(b"k", x, operator="add_i64"),
            [1 << 63, 1.0, b"123", bytes(9), "1", None],
        ),
        ("float", lambda s, t, q, x: s.kv("floats").put(b"k", x), ["1", True, HUGE, 10**400, np.bool_(True), None]),
        ("JSON", lambda s, t, q, x: s.kv("jsons").put(b"k", x), [NAN, {1, 2}, b"x", deep(201), deep(5_000), endless()]),
        ("payload", lambda s, t, q, x: q.put(x), [*NOT_BYTES, Sub(b"p"), np.bytes_(b"p"), bytearray(b"p")]),
        ("key of a message", lambda s, t, q, x: q.put(b"", key=x), ["k", 1, Sub(b"k"), np.bytes_(b"k"), bytes(65_537)]),
        (
            "time",
            lambda s, t, q, x: q.put(b"", time=x),
            [
                LIAR,
                True,
                1.5,
                "now",
                HUGE,
                1 << 60,
                -(1 << 60),
                datetime(2020, 1, 1),
                datetime(2020, 1, 1, tzinfo=Zone()),
            ],
        ),
        (
            "payloads",
            lambda s, t, q, x: q.put_many(x),
            [b"ab", "ab", None, 1, ["a"], [None], [1], [np.arange(3)], {"a": 1}],
        ),
        (
            "wide payloads",
            lambda s, t, q, x: q.put_many(x, keys=[b"k"]),
            [[np.arange(3)], [array("i", [1, 2])], ["a"]],
        ),
        (
            "keys of messages",
            lambda s, t, q, x: q.put_many([b"a"], keys=x),
            [1, [1], ["a"], [b"a", b"b"], [np.arange(3)]],
        ),
        (
            "Arrow payloads",
            lambda s, t, q, x: q.put_many(x),
            [pa.table({"x": [b"a"]}), pa.table({"payload": [None]}), pa.array([[1]]), pa.table({"payload": [1]})],
        ),
        ("token", lambda s, t, q, x: q.put(b"", token=x), bad_tokens()),
        ("token of a batch", lambda s, t, q, x: s.batch(token=x), bad_tokens()),
        ("trim", lambda s, t, q, x: q.trim(x), [*NOT_WHOLE, 0, 1 << 62, HUGE]),
        ("shard", lambda s, t, q, x: q.trim(1, shard=x), [*NOT_WHOLE, 2, HUGE, LIAR, Liar(-5), MANY_LINES]),
        ("shard to read", lambda s, t, q, x: q.read(x), [*(x for x in NOT_WHOLE if x is not None), 2, HUGE]),
        ("sequence to read", lambda s, t, q, x: q.read(0, x), NOT_WHOLE),
        ("time to seek", lambda s, t, q, x: q.seek(x), [True, 1.5, "now", None, 1 << 60, datetime(2020, 1, 1)]),
        (
            "start",
            lambda s, t, q, x: q.offsets(x),
            [1, None, "", "x", "time:", "time:--5", "²", "time:²", "{}", "consumer:"],
        ),
        ("consumer", lambda s, t, q, x: q.consumer(x), [b"c", None, 1, True, "", "c" * 256, "\ud800", ["c"]]),
        (
            "visibility",
            lambda s, t, q, x: q.consumer("c", visibility_timeout_s=x),
            [*NOT_SECONDS, 0, INF, 1e7, None],
        ),
        (
            "deliveries",
            lambda s, t, q, x: q.consumer("c", deliveries_max=x),
            [item for item in NOT_WHOLE if item is not None] + [0, 255],
        ),
        (
            "dead letters",
            lambda s, t, q, x: q.consumer("c", deliveries_max=1, dead_letter=x),
            [1, b"d", "", True, ["d"]],
        ),
        ("how many", lambda s, t, q, x: q.consumer("c").get(x), [*NOT_WHOLE, 0]),
        ("timeout of get", lambda s, t, q, x: q.consumer("c").get(1, timeout_s=x), [*NOT_SECONDS, None]),
        ("messages to ack", lambda s, t, q, x: q.consumer("c").ack(x), forged()),
        ("messages to nack", lambda s, t, q, x: q.consumer("c").nack(x), forged()),
        ("delay", lambda s, t, q, x: q.consumer("c").nack([], delay_s=x), [*NOT_SECONDS, INF, 1e7, None]),
        (
            "seek",
            lambda s, t, q, x: q.consumer("c").seek(x),
            [*NOT_WHOLE, 0, "first", {0: 0}, {2: 1}, {True: 1}, {0: 99}],
        ),
        ("epoch", lambda s, t, q, x: s.flush(x), [True, 1.0, "1", -1, NAN, [1]]),
        ("timeout of flush", lambda s, t, q, x: s.flush(timeout_s=x), NOT_SECONDS),
        ("shard to stage", lambda s, t, q, x: s.stage("t", x), [*NOT_WHOLE, 1, HUGE]),
        ("files to stage", lambda s, t, q, x: s.stage("t", count=x), [*NOT_WHOLE, 0, 10_001, HUGE]),
        ("lease to stage", lambda s, t, q, x: s.stage("t", lease_s=x), [*NOT_SECONDS, 0, INF, None]),
        ("files to adopt", lambda s, t, q, x: s.batch().adopt("t", x), [[1], ["x"], [FORGED]]),
        ("shard to adopt", lambda s, t, q, x: s.batch().adopt("t", [], x), [*NOT_WHOLE, 1]),
        ("condition", lambda s, t, q, x: require(s, *x), [("x", b""), (1, b""), ("queue.ack", b"x"), ("queue.ack", 1)]),
    ]
    for name, call, wrong in table:
        for number, argument in enumerate(wrong):
            yield f"{name}-{number}", call, argument


def deep(levels: int) -> Any:
    value: Any = None
    for _ in range(levels):
        value = [value]
    return value


def endless() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


def bad_tokens() -> list[Any]:
    producers = [("", 1), (b"p", 1), (None, 1), ("p" * 513, 1), ("\ud800", 1)]
    return [1, "p", ["p", 1], ("p",), ("p", 1, 2), *producers, *(("p", number) for number in NOT_WHOLE), ("p", 1 << 63)]


def forged() -> list[Any]:
    numbers: list[Any] = ["0", None, 1.5, -1, 1 << 70, np.int64(0)]
    return [None, 1, b"x", ["x"], *(LeasedMessage(0, number, 0, None, b"", 1, 1) for number in numbers)] + [
        *(LeasedMessage(number, 1, 0, None, b"", 1, 1) for number in numbers),
        *(LeasedMessage(0, 1, 0, None, b"", 1, number) for number in numbers),
    ]


def require(store: Tables, condition: Any, argument: Any) -> None:
    with store.batch() as batch:
        batch.require(condition, argument)


CASES = list(cases())
# A wrong number is wrong for the one that looks at it; one that is only nobody's is not.
LOST = {"messages to ack", "messages to nack"}


@pytest.fixture(scope="module")
def owner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[penstock.Store]:
    with penstock.open(tmp_path_factory.mktemp("arguments") / "store") as store:
        make(store)
        yield store


@pytest.fixture(scope="module")
def client(owner: penstock.Store) -> Iterator[Tables]:
    with penstock.connect(owner.path) as store:
        yield store


def make(store: Tables) -> None:
    store.kv("t")
    for name, value in (("texts", "utf8"), ("wholes", "int64"), ("floats", "float64"), ("jsons", "json")):
        store.kv(name, value=value)  # type: ignore[call-overload]
    store.queue("q", shards=2)


@pytest.mark.parametrize("side", ["owner", "client"])
@pytest.mark.parametrize(("name", "call", "wrong"), CASES, ids=[case[0] for case in CASES])
def test_a_wrong_argument(name: str, call: Call, wrong: Any, side: str, owner: penstock.Store, client: Tables) -> None:
    store: Tables = owner if side == "owner" else client
    before = store.tables()
    with pytest.raises(FixTheCall) as error:
        call(store, store.kv("t"), store.queue("q"), wrong)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 600
    assert store.tables() == before
    store.kv("t").put(b"good", name.encode(), durable=True)
    assert owner.kv("t").get(b"good") == name.encode()


def test_a_number_is_what_it_holds_not_what_its_class_says(tmp_path: Path) -> None:
    with penstock.open(tmp_path / "store") as store:
        make(store)
        store.kv("wholes", value="int64").put(b"k", Liar(7))
        store.kv("t").put(b"k", b"", ttl_s=LyingSeconds(3600.0))
        store.queue("q").put(b"", time=Liar(8))
        store.flush()  # the thread that writes for everybody met nothing that it could not encode
        assert store.kv("wholes", value="int64").get(b"k") == 7
        assert [message.time_us for shard in (0, 1) for message in store.queue("q").read(shard)] == [8]


WRONG_SETTINGS: dict[str, list[Any]] = {
    "memory_bytes_max": [*NOT_WHOLE, 1 << 20, HUGE],
    "reserve_bytes": [*NOT_WHOLE, HUGE],
    "offer_bytes_min": [*NOT_WHOLE, HUGE],
    "flush_interval_s": [*NOT_SECONDS, 0, INF, 1e300, None],
    "flush_bytes": [0, -1, 1.5, True, "8", None, 1 << 40],
    "waiting_writes_max": [-1, 1.5, True, "8", None, 1 << 40],
    **{key: ["no", 1, None] for key in ("durable", "background", "serve", "trust_clock")},
    **{key: [1, None, {}] for key in ("journal", "dispatcher", "checkpoint", "collection")},
    "kinds": [
        1,
        None,
        {},
        [penstock.QueueSettings()],
        (1,),
        (penstock.QueueSettings,),
        (penstock.QueueSettings(),) * 2,
    ],
}


@pytest.mark.parametrize("name", WRONG_SETTINGS)
def test_a_wrong_setting(name: str) -> None:
    for wrong in WRONG_SETTINGS[name]:
        with pytest.raises(Invalid, match=name):
            penstock.StoreSettings(**{name: wrong})


NUMBERS_OF_SETTINGS = [
    (kind, field)
    for kind in (
        penstock.ArchiveSettings,
        penstock.CheckpointSettings,
        penstock.CollectionSettings,
        penstock.DispatcherSettings,
        penstock.JobSettings,
        penstock.LogSettings,
        penstock.ManifestSettings,
        penstock.QueueSettings,
        penstock.SchedulerSettings,
        penstock.StoreSettings,
    )
    for field in dataclasses.fields(kind)
    if type(field.default) in (int, float)
]
IDS_OF_NUMBERS = [f"{kind.__name__}-{field.name}" for kind, field in NUMBERS_OF_SETTINGS]


@pytest.mark.parametrize(("kind", "field"), NUMBERS_OF_SETTINGS, ids=IDS_OF_NUMBERS)
def test_a_wrong_number_among_settings(kind: Callable[..., Any], field: dataclasses.Field[Any]) -> None:
    """NaN would be a limit that nothing reaches; a fraction of an attempt was written, and nothing could read it."""
    wrongs = [*(NOT_WHOLE if isinstance(field.default, int) else NOT_SECONDS), INF, None]
    for wrong in wrongs[:-1] if "None" in str(field.type) else wrongs:
        with pytest.raises(Invalid, match=field.name):
            kind(**{field.name: wrong})


@pytest.mark.parametrize(("kind", "field"), NUMBERS_OF_SETTINGS, ids=IDS_OF_NUMBERS)
def test_numbers_among_settings_are_plain(kind: Callable[..., Any], field: dataclasses.Field[Any]) -> None:
    """Those of numpy would overflow, in the sum of two sizes or in the room that is left for writes."""
    number: Any = field.default
    values = [Liar(number), np.uint64(number)] if isinstance(number, int) else [np.float64(number)]
    for value in values:
        settings = kind(**{field.name: value})
        assert type(getattr(settings, field.name)) is type(number)
        assert getattr(settings, field.name) == number


@pytest.mark.parametrize("opener", [penstock.open, penstock.connect])
@pytest.mark.parametrize("wrong", [None, 3, b"x", ["x"], "", "\0", "\ud800"])
def test_what_is_no_path_is_not_made_into_one(
    opener: Callable[[Any], object], wrong: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Invalid, match="is not a path"):
        opener(wrong)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("wrong", [1, "x", {}, penstock.StoreSettings])
def test_settings_of_another_type(wrong: Any, tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="StoreSettings"):
        penstock.open(tmp_path / "store", settings=wrong)


def test_a_wrong_timeout_of_a_compaction(owner: penstock.Store) -> None:
    for wrong in [*NOT_SECONDS, None]:
        with pytest.raises(Invalid, match="timeout_s"):
            owner.compact("t", timeout_s=wrong)


def test_afterwards_the_store_opens_and_works(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with penstock.open(path) as store:
        make(store)
        for _, call, wrong in CASES:
            with pytest.raises(FixTheCall):
                call(store, store.kv("t"), store.queue("q"), wrong)
        store.kv("t").put(b"k", b"1")
        store.queue("q").append(b"1")
        assert store.troubles() == []
    with penstock.open(path) as store:
        assert store.tables() == ["floats", "jsons", "q", "t", "texts", "wholes"]
        assert dict(store.kv("t").scan()) == {b"k": b"1"}
        assert sum(bounds.next - 1 for bounds in store.queue("q").bounds()) == 1
        assert store.troubles() == []


def test_subclasses_become_plain_values(owner: penstock.Store, client: Tables) -> None:
    """What looks like a text, a number or bytes and is more than that is written as what it looks like."""
    for store in (owner, client):
        assert store.kv(Name.ENUM, shards=Count.TWO).shards == 2
        assert store.queue("kept", retention=Retention(age_s=np.float64(60), bytes_max=Count.TWO)).shards == 1
        assert store.queue("kept", retention=Retention(age_s=60, bytes_max=2)).shards == 1
        with pytest.raises(KindMismatch):
            store.queue("kept", retention=Retention(age_s=61))
        table = store.kv("plain")
        table.put(b"k", Sub(b"base"))
        table.merge(b"k", np.bytes_(b"+"), operator="append", durable=True)
        table.put(b"hostile", Hostile(b"four"), durable=True)
        assert (table.get(b"k"), type(table.get(b"k"))) == (b"base+", bytes)
        assert table.get(b"hostile") == b"four"
        store.kv("texts", value="utf8").put(b"k", np.str_("x"), durable=True)
        assert store.kv("texts", value="utf8").get(b"k") == "x"
        store.queue("q").put(b"", time=datetime(1, 1, 1, tzinfo=UTC), token=(Name.ENUM, Count.TWO))
        assert store.queue("q").consumer(Name.ENUM).name == "made_by_enum"
        store.drop("plain")


def test_an_argument_in_short() -> None:
    from penstock.arguments import in_short, seconds, text, whole

    assert in_short(HUGE) == "a value of the type int"
    assert in_short(RaisesInRepr()) == "a value of the type RaisesInRepr"
    assert len(in_short("x" * 1_000)) < 100
    assert type(whole(Count.TWO, "n")) is int
    assert type(seconds(np.float64(1), "s", 5)) is float
    assert type(text(Name.ENUM, "t", 20)) is str
    assert seconds(INF, "s", INF) == INF
    with pytest.raises(Invalid, match="s is -1: give seconds from 0 on$"):
        seconds(-1, "s", INF)
    with pytest.raises(Invalid):
        seconds(INF, "s", 5)


@pytest.mark.parametrize(("time", "unit"), [(1_700_000_000, "seconds"), (1_700_000_000_123, "milliseconds")])
def test_a_time_that_looks_like_another_unit_is_taken_with_a_warning(tmp_path: Path, time: int, unit: str) -> None:
    """It may be meant; most likely it is not. The warning is at the line of the program."""
    with penstock.open(tmp_path) as store:
        events, metrics = store.queue("events"), store.series("metrics")
        calls: list[Callable[[], object]] = [
            lambda: events.put(b"m", time=time),
            lambda: events.seek(time),
            lambda: metrics.write("cpu", 1.0, time=time),
            lambda: metrics.write_columns("cpu", [1.0], times=[time]),
            lambda: metrics.select("cpu", start=time),
        ]
        for call in calls:
            with pytest.warns(UserWarning, match=f"{time}, in microseconds .* 1970: if these are {unit}") as caught:
                call()
            assert caught[0].filename == __file__
        metrics.write("cpu", 1.0, time=3_000)
        metrics.write("cpu", 1.0, time=time * 1_000_000 if unit == "seconds" else time * 1_000)
