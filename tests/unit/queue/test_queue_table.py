"""A queue as a table of a store: writing, reading, trimming, retention, tokens, batches, snapshots, staged files."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import polars
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from queue_model import build, contents, machine_of, open_queues, payloads, staged_table
from store_model import START_US

from penstock.errors import (
    Closed,
    CorruptionError,
    DiskFull,
    Invalid,
    KindMismatch,
    NotFound,
    OutcomeUnknown,
    PartitionPaused,
    TokenTooOld,
)
from penstock.journal.consensus import Alone
from penstock.journal.partitions import PartitionId, shard_of
from penstock.partition.pending import PendingDelta
from penstock.partition.reference import sealed
from penstock.queue import section
from penstock.queue.files import DataWriter
from penstock.queue.messages import Messages, encode_payloads
from penstock.queue.options import Retention, encode_queue_options, queue_options
from penstock.queue.qmft import data_files
from penstock.queue.staged import STAGED_SCHEMA
from penstock.queue.table import Position
from penstock.queue.view import Message
from penstock.store.settings import StoreSettings
from penstock.store.store import Store, open_store
from penstock.testing import FakeClock, SimulatedDisk
from penstock.testing.locks import LockOrderChecker


@pytest.fixture
def disk() -> SimulatedDisk:
    return SimulatedDisk()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(time_us=START_US)


@pytest.fixture
def store(disk: SimulatedDisk, clock: FakeClock) -> Any:
    opened = open_queues(disk, clock)
    yield opened
    opened.close()


def files_of(store: Store, name: str, shard: int = 0) -> list[str]:
    info = store._ledger.table(name)
    assert info is not None
    return list(data_files(store._fs, f"{store.path}/tables/{info.table_id}/{shard}"))


# -- writing and reading


def test_what_is_put_is_read(store: Store) -> None:
    queue = store.queue("events")
    queue.put(b"one", time=5)
    queue.put(b"two", key=b"k", time=datetime(2026, 1, 2, tzinfo=UTC))
    queue.put(b"", key=b"")
    assert queue.read() == [], "messages are seen when they have a number"
    store.flush()
    second_us = int(datetime(2026, 1, 2, tzinfo=UTC).timestamp()) * 1_000_000
    assert queue.read() == [
        Message(0, 1, 5, None, b"one"),
        Message(0, 2, second_us, b"k", b"two"),
        Message(0, 3, START_US, b"", b""),
    ]
    assert queue.read(from_sequence=2, limit=1) == [Message(0, 2, second_us, b"k", b"two")]
    assert queue.read(from_sequence=4) == []
    assert queue.read(limit=0) == []
    assert [bounds.next for bounds in queue.bounds()] == [4]


@pytest.mark.parametrize("rename", ["timestamp", "time"])
def test_what_was_read_as_arrow_can_be_put_again(store: Store, rename: str) -> None:
    """The time of a message is `timestamp` where queues are read, `time` where a user gives it: both are taken."""
    source = store.queue("events", shards=2, headers=True)
    source.put_many([b"a", b"b"], keys=[b"1", None], headers=[{"h": b"v"}, None])
    source.put(b"c", time=-7)
    store.flush()
    read = source.to_arrow()
    rows = read.rename_columns([rename if name == "timestamp" else name for name in read.column_names])
    store.queue("put", headers=True).put_many(rows, durable=True)
    store.queue("loaded", headers=True)
    store.load("loaded", rows)
    numbers = rows.set_column(2, rename, rows.column(2).cast(pa.int64()))  # microseconds
    store.load("loaded", numbers)
    messages = read.drop_columns(["shard", "sequence"])
    for name, expected in (("put", messages), ("loaded", pa.concat_tables([messages, messages]))):
        assert store.queue(name).to_arrow().drop_columns(["shard", "sequence"]).to_pylist() == expected.to_pylist()
    twice = read.append_column("time", read.column("timestamp"))
    for act in (lambda: source.put_many(twice), lambda: store.load("events", twice)):
        with pytest.raises(Invalid, match="payload, and perhaps key, timestamp, headers, not shard, sequence"):
            act()


def test_append_tells_the_position(store: Store) -> None:
    queue = store.queue("events", shards=2)
    store.kv("other").put(b"a", b"b", durable=True)
    queue.put(b"pending", key=b"a")
    shard = shard_of(b"a", 2)
    where = queue.append(b"waited", key=b"a")
    assert where == Position(shard, 2, store._ledger.tree.lsn)
    assert queue.read(where.shard, where.sequence) == [Message(shard, 2, START_US, b"a", b"waited")]
    later = queue.append(b"again", key=b"a", time=-7)
    assert later == Position(shard, 3, where.lsn + 1)
    assert machine_of(store, "events", shard).queue.read(3)[0].lsn == later.lsn


def test_the_lsn_of_an_append_is_that_of_its_own_record(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may be applied between the append's record and the moment its caller looks."""
    queue = store.queue("events")
    wait = type(store._port).wait_applied

    def wait_and_write(port: Any, epoch: int, timeout_s: float = 60.0) -> None:
        wait(port, epoch, timeout_s)
        with monkeypatch.context() as inner:
            inner.setattr(type(store._port), "wait_applied", wait)
            store.queue("events").put(b"later", durable=True)

    with monkeypatch.context() as patch:
        patch.setattr(type(store._port), "wait_applied", wait_and_write)
        where = queue.append(b"first")
    assert [(batch.first, batch.lsn) for batch in machine_of(store, "events").queue.read(1)] == [
        (1, where.lsn),
        (2, where.lsn + 1),
    ]


TIMES = pa.array([-1_000_001, 0, 7], pa.int64())
FORMS = [
    [b"a", b"", b"c"],
    (b"a", b"", b"c"),
    iter([b"a", b"", b"c"]),
    pa.array([b"a", b"", b"c"]),
    pa.chunked_array([[b"a"], [b"", b"c"]]),
    pa.array(["a", "", "c"]),
    pa.array([b"a", b"", b"c"], pa.large_binary()),
    pa.array([b"x", b"a", b"", b"c"]).slice(1),
    polars.Series([b"a", b"", b"c"]),
    pa.table({"payload": [b"a", b"", b"c"]}),
    pa.record_batch({"payload": [b"a", b"", b"c"]}),
    pa.table({"payload": [b"a", b"", b"c"]}).to_reader(),
]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: type(form).__name__)
def test_many_at_once(store: Store, form: Any) -> None:
    if hasattr(form, "read_all"):  # a reader is used up by one test
        form = pa.table({"payload": [b"a", b"", b"c"]}).to_reader()
    queue = store.queue("events")
    queue.put_many(form if not hasattr(form, "__next__") else iter([b"a", b"", b"c"]), durable=True)
    assert queue.read() == [Message(0, n, START_US, None, payload) for n, payload in enumerate([b"a", b"", b"c"], 1)]


def test_many_with_keys_and_times(store: Store) -> None:
    queue = store.queue("events")
    queue.put_many([b"a", b"b"], keys=[b"k", None])
    queue.put_many([b"g"], keys=iter([b"h"]))  # type: ignore[arg-type]
    queue.put_many([b"n"], keys=iter([None]))  # type: ignore[arg-type]
    table = pa.table(
        {"time": TIMES.cast(pa.timestamp("us", "UTC")), "payload": [b"x", b"y", b"z"], "key": [b"1", None, b""]}
    )
    queue.put_many(table.slice(0, 2))
    queue.put_many(table.slice(2).to_batches()[0])
    queue.put_many(pa.table({"payload": [b"t"], "time": pa.array([0], pa.timestamp("s"))}))
    store.flush()
    assert [message[2:5] for message in queue.read()] == [
        (START_US, b"k", b"a"),
        (START_US, None, b"b"),
        (START_US, b"h", b"g"),
        (START_US, None, b"n"),
        (-1_000_001, b"1", b"x"),
        (0, None, b"y"),
        (7, b"", b"z"),
        (0, None, b"t"),
    ]


def test_one_key_stays_in_one_shard_and_in_order(store: Store) -> None:
    queue = store.queue("events", shards=4)
    for number in range(40):
        key = b"k%d" % (number % 5)
        if number % 2:
            queue.put(b"%d" % number, key=key)
        else:
            queue.put_many([b"%d" % number], keys=[key])
    queue.put_many([b"%d" % n for n in range(40, 60)], keys=[b"k%d" % (n % 5) for n in range(40, 60)], durable=True)
    rows = queue.to_arrow().to_pylist()
    for key in {row["key"] for row in rows}:
        mine = [row for row in rows if row["key"] == key]
        assert len({row["shard"] for row in mine}) == 1
        numbers = [int(row["payload"]) for row in mine]
        assert numbers == sorted(numbers)
        assert len(numbers) == 12
    assert len({row["shard"] for row in rows}) > 1


def test_messages_without_a_key_are_shared_out(store: Store) -> None:
    queue = store.queue("events", shards=3)
    for number in range(9):
        queue.put(b"%d" % number)
    queue.put_many([b"x", b"y"], durable=True)
    assert sorted(len(shard) for shard in contents(queue)) == [3, 3, 5]


def test_arrow(store: Store) -> None:
    queue = store.queue("events", shards=2)
    queue.put_many([b"%d" % n for n in range(10)], keys=[b"%d" % n for n in range(10)], durable=True)
    assert queue.read_arrow().schema == queue.schema == queue.to_arrow().schema
    assert pa.table(queue).num_rows == 10
    shard = queue.read_arrow(shard=1, from_sequence=2, to_sequence=4)
    assert shard.column("sequence").to_pylist() == [2, 3]
    assert set(shard.column("shard").to_pylist()) == {1}
    assert queue.read_arrow(shard=1, from_sequence=100).num_rows == 0


def test_many_small_records_and_many_files_are_one_queue(store: Store) -> None:
    queue = store.queue("events")
    for number in range(60):
        queue.put(b"%d" % number * 20, durable=True)
    assert queue.statistics().files > 3
    assert payloads(queue) == [b"%d" % number * 20 for number in range(60)]
    assert [message.sequence for message in queue.read(from_sequence=31, limit=7)] == list(range(31, 38))


@pytest.mark.parametrize("key", [None, b"k"])
def test_much_may_wait_for_one_flush(store: Store, key: bytes | None) -> None:
    """More than one batch may hold: it is cut, and nothing fails where nothing may."""
    queue = store.queue("events")
    for number in range(70):
        queue.put(bytes([number]) * (1 << 20), key=key)
    queue.put(bytes(5 << 20), key=key)
    store.flush()
    assert [(message.sequence, message.payload[0]) for message in queue.read(limit=70)] == [
        (number + 1, number) for number in range(70)
    ]
    assert queue.append(b"after").sequence == 72


def test_the_largest_message(store: Store) -> None:
    queue = store.queue("events")
    payload, key = bytes(64 << 20), bytes(64 << 10)
    queue.put(payload, key=key, durable=True)
    queue.put_many([payload], keys=[key], durable=True)
    queue.put_many([payload], durable=True)
    assert [(len(message.payload), len(message.key or b"")) for message in queue.read()] == [
        (64 << 20, 64 << 10),
        (64 << 20, 64 << 10),
        (64 << 20, 0),
    ]


def test_seek_by_time(store: Store, clock: FakeClock) -> None:
    queue = store.queue("events")
    for number in range(30):
        queue.put(b"%d" % number * 30, durable=True)
        clock.advance(10)
    assert queue.seek(START_US - 5) == 1
    assert queue.seek(START_US + 95_000_000) == 11
    assert queue.seek(datetime.fromtimestamp(START_US / 1e6, UTC) + timedelta(seconds=200)) == 21
    assert queue.seek(START_US + 10_000_000_000) == 31
    queue.trim(15, durable=True)
    assert queue.seek(0) == 15


def test_statistics(store: Store) -> None:
    queue = store.queue("events", shards=2)
    queue.put_many([b"%d" % n for n in range(10)], keys=[b"%d" % n for n in range(10)], durable=True)
    queue.trim(2, shard=0, durable=True)
    queue.consumer("c").seek({0: 3})
    totals = queue.statistics()
    assert totals.messages == 9
    assert totals.shards[0].first == 2
    assert (totals.files, totals.bytes > 100) == (2, True)
    assert [(position.consumer, position.shard, position.floor) for position in totals.consumers] == [("c", 0, 3)]


# -- wrong use


@pytest.mark.parametrize(
    "wrong",
    [
        lambda queue: queue.put("text"),
        lambda queue: queue.put(b"x", key="text"),
        lambda queue: queue.put(bytearray(b"x")),
        lambda queue: queue.put(b"x", time=1.5),
        lambda queue: queue.put(b"x", time=1 << 62),
        lambda queue: queue.put(b"x", time=datetime(2026, 1, 1)),
        lambda queue: queue.put(b"x", key=b"k" * 70_000),
        lambda queue: queue.put(bytes((64 << 20) + 1)),
        lambda queue: queue.put(b"x", token="p"),
        lambda queue: queue.put_many(b"bytes"),
        lambda queue: queue.put_many("text"),
        lambda queue: queue.put_many(5),
        lambda queue: queue.put_many([b"a", "b"]),
        lambda queue: queue.put_many([b"a", None]),
        lambda queue: queue.put_many([b"a"], keys=[b"a", b"b"]),
        lambda queue: queue.put_many([b"a"], keys=["b"]),
        lambda queue: queue.put_many(pa.array([b"a", None])),
        lambda queue: queue.put_many(pa.array([1, 2])),
        lambda queue: queue.put_many(pa.table({"value": [b"a"]})),
        lambda queue: queue.put_many(pa.table({"payload": [b"a"], "more": [1]})),
        lambda queue: queue.put_many(pa.table([[b"a"], [b"b"]], names=["payload", "payload"])),
        lambda queue: queue.put_many(pa.table({"payload": [b"a"], "time": pa.array([None], pa.timestamp("us"))})),
        lambda queue: queue.put_many(pa.table({"payload": [b"a"], "time": pa.array([-(1 << 63)], pa.timestamp("us"))})),
        lambda queue: queue.put_many(pa.table({"payload": [b"a"]}), keys=[b"k"]),
        lambda queue: queue.put_many([bytes(33 << 20), bytes(33 << 20)]),
        lambda queue: queue.append("text"),
        lambda queue: queue.trim(0),
        lambda queue: queue.trim("1"),
        lambda queue: queue.trim(1 << 64),
        lambda queue: queue.trim(1, shard=1),
        lambda queue: queue.read(shard=1),
        lambda queue: queue.read(from_sequence=-1),
        lambda queue: queue.read(limit=-1),
        lambda queue: queue.read(limit=1.5),
        lambda queue: queue.read_arrow(from_sequence=-1),
        lambda queue: queue.read_arrow(shard=-1),
        lambda queue: queue.seek("yesterday"),
        lambda queue: queue.seek(0, shard=9),
    ],
)
def test_wrong_use_changes_nothing(store: Store, wrong: Any) -> None:
    queue = store.queue("events")
    queue.put(b"there", durable=True)
    before = store._coordinator.last
    with pytest.raises(Invalid):
        wrong(queue)
    assert store._coordinator.last == before
    store.flush()
    assert payloads(queue) == [b"there"]


def test_what_differs_in_number_is_named(store: Store) -> None:
    queue = store.queue("events", headers=True)
    with pytest.raises(Invalid, match=r"keys and payloads differ in number \(2 and 1\): give as many keys as payloads"):
        queue.put_many([b"a"], keys=[b"a", b"b"])
    with pytest.raises(Invalid, match=r"headers and payloads differ in number \(1 and 2\)"):
        queue.put_many([b"a", b"b"], headers=[None])
    with pytest.raises(Invalid, match="not bytes: give a list, or use put"):
        queue.put_many(b"abc")  # type: ignore[arg-type]


def test_huge_numbers_are_only_far_away(store: Store) -> None:
    queue = store.queue("events")
    queue.put(b"there", durable=True)
    assert len(queue.read(limit=1 << 70)) == 1
    assert queue.read(from_sequence=(1 << 64) - 1) == []
    assert queue.read(from_sequence=1 << 70) == []


def test_the_other_kind_and_other_shapes_are_refused(store: Store) -> None:
    store.kv("keys")
    store.queue("events", shards=2, retention=Retention(age_s=5))
    with pytest.raises(KindMismatch):
        store.queue("keys")
    with pytest.raises(KindMismatch):
        store.kv("events")
    with pytest.raises(KindMismatch):
        store.queue("events", shards=3)
    with pytest.raises(KindMismatch):
        store.queue("events", retention=Retention(age_s=6))
    with pytest.raises(NotFound):
        store.queue("absent", create=False)
    with pytest.raises(Invalid):
        Retention(age_s=0)
    with pytest.raises(Invalid):
        Retention(bytes_max=-1)
    assert store.queue("events").shards == 2


# -- sections


@given(
    st.lists(
        st.one_of(
            st.tuples(st.binary(max_size=8), st.none() | st.binary(max_size=4), st.none() | st.integers(-5, 5)),
            st.lists(st.binary(max_size=6), min_size=1, max_size=3),
        ),
        min_size=1,
        max_size=12,
    )
)
@settings(max_examples=100, deadline=None)
def test_a_section_holds_the_same_messages_when_decoded(parts: list[Any]) -> None:
    delta, expected = PendingDelta(), list[tuple[bytes, bytes | None, int | None]]()
    for part in parts:
        if isinstance(part, tuple):
            section.put(delta, PartitionId(7), part, None)
            expected.append(part)
        else:
            section.put_many(delta, PartitionId(7), section.encoded(Messages.of(part)), None)
            expected += [(payload, None, None) for payload in part]
    puts = delta.groups[0].sections[PartitionId(7)]
    decoded = section.decode(section.encode(puts))
    assert isinstance(decoded, section.Encoded)
    assert len(decoded) == len(puts) == len(expected)
    assert section.encode(decoded) == section.encode(puts)
    disk = SimulatedDisk()
    store = open_queues(disk, FakeClock(time_us=99))
    queue = store.queue("q")
    info = store._ledger.table("q")
    assert info is not None
    store._port.write(
        PartitionId(info.table_id << 16), lambda d, p, a, b: d.begin().update({p: decoded}), 10, None, None
    )
    store.flush()
    rows = [(message.payload, message.key, message.time_us) for message in queue.read()]
    assert rows == [(payload, key, 99 if time is None else time) for payload, key, time in expected]


@pytest.mark.parametrize("data", [b"", bytes(7), b"\x02" + bytes(7), section.encode(section.Trim(5)) + b"x"])
def test_other_bytes_are_no_section(data: bytes) -> None:
    with pytest.raises(CorruptionError):
        section.decode(data)


def test_a_section_that_is_cut_anywhere_does_not_decode() -> None:
    puts = section.Puts()
    puts.add((b"payload", b"key", 5))
    puts.add_many(Messages.of([b"more", b"of", b"it"]))
    data = section.encode(puts)
    for length in range(len(data)):
        with pytest.raises(CorruptionError):
            section.decode(data[:length])


# -- trim and retention


def test_trim(store: Store) -> None:
    queue = store.queue("events")
    for number in range(40):
        queue.put(b"%d" % number * 30, durable=True)
    before = len(files_of(store, "events"))
    queue.trim(21, durable=True)
    assert [message.sequence for message in queue.read()][:2] == [21, 22]
    assert queue.read(limit=3) == queue.read(from_sequence=21, limit=3), "from the oldest, wherever that is"
    for sequence in (2, 5, 20):
        with pytest.raises(NotFound, match="begins at 21"):
            queue.read(from_sequence=sequence, limit=2)
    store._port.maintain()
    assert len(files_of(store, "events")) < before
    assert payloads(queue) == [b"%d" % number * 30 for number in range(20, 40)]
    queue.trim(5, durable=True)  # a floor does not go down
    assert queue.bounds()[0].first == 21


def test_trim_of_everything_and_more(store: Store) -> None:
    queue = store.queue("events")
    queue.put_many([b"a", b"b"], durable=True)
    queue.trim(1_000, durable=True)
    queue.put(b"c", durable=True)
    assert queue.read() == [Message(0, 3, START_US, None, b"c")]
    store._port.maintain()
    queue.put(b"d", durable=True)
    assert payloads(queue) == [b"c", b"d"]


def test_a_trim_counts_from_its_place_among_the_writes(store: Store) -> None:
    """In one record, and in one batch: what was put after the trim stays."""
    queue = store.queue("events")
    queue.put(b"a")
    queue.trim(100)
    queue.put(b"b")
    store.flush()
    assert contents(queue)[0] == {2: b"b"}
    with store.batch() as batch:
        batch.queue("events").put(b"c")
        batch.queue("events").trim(100)
        batch.queue("events").put(b"d")
    assert contents(queue)[0] == {4: b"d"}


@pytest.mark.parametrize("crash", [True, False])
def test_a_trim_survives_although_a_later_roll_synced_the_files(
    disk: SimulatedDisk, clock: FakeClock, crash: bool
) -> None:
    """A roll makes the files durable past the trim; the journal still has to be replayed for it."""
    store = open_queues(disk, clock)
    queue = store.queue("events")
    queue.put(b"a" * 500, durable=True)
    queue.put(b"b" * 500, durable=True)
    queue.trim(1_000, durable=True)
    for number in range(4):
        queue.put(b"%d" % number * 900, durable=True)  # each rolls
    expected = contents(queue)
    assert list(expected[0]) == [3, 4, 5, 6]
    if not crash:
        store.close()
    store = open_queues(disk.image().restore("strict") if crash else disk, clock)
    assert contents(store.queue("events")) == expected
    store.checkpoint()
    store.close()


def test_retention_by_age(disk: SimulatedDisk, clock: FakeClock) -> None:
    store = open_queues(disk, clock)
    queue = store.queue("events", retention=Retention(age_s=100))
    for number in range(30):
        queue.put(b"%d" % number * 30, durable=True)
        clock.advance(10)
    store._port.maintain()
    store.flush()
    store._port.maintain()
    assert list(contents(queue)[0]) == list(range(21, 31))
    assert len(files_of(store, "events")) < 5
    clock.advance(1_000)
    store._port.maintain()
    store.flush()
    store._port.maintain()
    assert contents(queue) == [{}]
    store.close()
    store = open_queues(disk, clock)
    assert store.queue("events").append(b"next").sequence == 31
    store.close()


def test_retention_by_size(store: Store) -> None:
    queue = store.queue("events", retention=Retention(bytes_max=5_000))
    for number in range(100):
        queue.put(b"%03d" % number * 30, durable=True)
    store._port.maintain()
    store.flush()
    store._port.maintain()
    sequences = list(contents(queue)[0])
    assert sequences == list(range(sequences[0], 101))
    assert 2_000 < queue.statistics().bytes <= 5_000
    assert queue.statistics().files == len(files_of(store, "events"))


def test_retention_by_acknowledgement(store: Store) -> None:
    queue = store.queue("events", shards=2, retention=Retention(acknowledged=True))
    names = {shard: next(b"%d" % n for n in range(99) if shard_of(b"%d" % n, 2) == shard) for shard in (0, 1)}

    def maintain() -> list[list[int]]:
        store._port.maintain()
        store.flush()
        store._port.maintain()
        return [list(shard) for shard in contents(queue)]

    for _ in range(3):
        queue.put(b"m", key=names[0], durable=True)
    assert maintain() == [[1, 2, 3], []], "there is no consumer yet"
    fast, slow = queue.consumer("fast"), queue.consumer("slow")
    fast.ack(fast.get())
    slow.ack(slow.get(1))
    assert maintain() == [[2, 3], []], "one of them is behind"
    queue.put(b"m", key=names[1], durable=True)
    fast.ack(fast.get())
    assert maintain() == [[2, 3], [1]], "the slow one never got anything of that shard, but will"
    slow.ack(slow.get())
    assert maintain() == [[], []]
    queue.put_many([b"m", b"m"], keys=[names[0]] * 2, durable=True)
    fast.ack(fast.get())
    assert maintain() == [[4, 5], []]
    slow.forget()
    assert maintain() == [[], []]


def test_a_bad_queue_keeps_no_other_from_its_retention(store: Store, clock: FakeClock, caplog: Any) -> None:
    bad = store.queue("a", retention=Retention(age_s=1))
    good = store.queue("b", shards=2, retention=Retention(age_s=1))
    for queue in (bad, good):
        queue.put_many([b"x"], keys=[b"k"], durable=True)
    clock.advance(10)
    machine_of(store, "a").queue._failure = OSError("bad sector")
    store._port.maintain()
    assert "maintenance of table a failed" in caplog.text
    store.flush()
    assert contents(good) == [{}, {}]


# -- tokens and batches


def test_tokens(disk: SimulatedDisk, store: Store) -> None:
    queue = store.queue("events", shards=3)
    for _ in range(3):
        queue.put(b"one", key=b"a", token=("p", 5_000))
        queue.put_many([b"two", b"three"], keys=[b"a", b"b"], token=("p", 5_001))
    with pytest.raises(TokenTooOld):
        queue.put(b"four", token=("p", 1))
    with pytest.raises(TokenTooOld):
        queue.put_many([b"four"], token=("p", 2))
    assert sorted(payload for shard in range(3) for payload in payloads(queue, shard)) == [b"one", b"three", b"two"]
    again = open_queues(disk.image().restore("strict"))
    table = again.queue("events")
    table.put(b"one", key=b"a", token=("p", 5_000))
    table.put_many([b"two", b"three"], keys=[b"a", b"b"], token=("p", 5_001))
    assert table.statistics().messages == 3
    again.close()


def test_many_with_a_token_are_in_one_record(disk: SimulatedDisk) -> None:
    """Whatever a crash leaves, it is all shards or none."""
    store = open_queues(disk)
    queue = store.queue("events", shards=4)
    disk.on_image = lambda: 0
    keys = [b"k%d" % n for n in range(8)]
    queue.put_many([b"m"] * 8, keys=keys, token=("p", 1))
    counts = set()
    for image in [*disk.images, disk.image()]:
        after = open_queues(image.restore("strict"))
        count = after.queue("events", create=False).statistics().messages
        counts.add(count)
        after.queue("events").put_many([b"m"] * 8, keys=keys, token=("p", 1))
        assert after.queue("events").statistics().messages == 8
        after.close()
    assert counts == {0, 8}


def test_batches(store: Store) -> None:
    queue, keys = store.queue("events", shards=2), store.kv("keys")
    with store.batch(token=("p", 1)) as batch:
        batch.queue("events").put(b"a", key=b"k")
        batch.queue("events").put_many([b"b", b"c"], keys=[b"k", b"other"])
        batch.kv("keys").put(b"done", b"yes")
    shard = shard_of(b"k", 2)
    assert payloads(queue, shard)[:2] == [b"a", b"b"]
    assert keys[b"done"] == b"yes"
    with store.batch(token=("p", 1)) as batch:
        batch.queue("events").put(b"again")
    assert batch.duplicate
    with pytest.raises(RuntimeError), store.batch() as batch:
        batch.queue("events").put(b"never")
        raise RuntimeError
    store.flush()
    assert queue.statistics().messages == 3
    with store.batch() as batch:
        for refused in (
            lambda: batch.queue("events").append(b"x"),
            lambda: batch.queue("events").read(),
            lambda: batch.queue("events").put(b"x", token=("p", 2)),
            lambda: batch.queue("events").consumer("c").get(),
            lambda: batch.queue("events").bounds(),
        ):
            with pytest.raises(Invalid):
                refused()
    assert queue.statistics().messages == 3


# -- snapshots


def test_a_snapshot_shows_its_moment_while_files_go(store: Store) -> None:
    queue = store.queue("events")
    for number in range(30):
        queue.put(b"%d" % number * 30, durable=True)
    queue.trim(6, durable=True)
    snapshot = store.snapshot()
    expected = contents(queue)
    for number in range(30, 60):
        queue.put(b"%d" % number * 30, durable=True)
    queue.trim(55, durable=True)
    store._port.maintain()
    for _ in range(2):
        assert contents(snapshot.queue("events")) == expected  # type: ignore[arg-type]
        store.checkpoint()
        store._port.maintain()
    assert [message.sequence for message in snapshot.queue("events").read(limit=2)] == [6, 7]
    pieces = snapshot._port.pieces(PartitionId(store._ledger.table("events").table << 16), 4)  # type: ignore[union-attr]
    assert len(pieces) == 4
    assert all(piece.size_bytes for piece in pieces)
    scans = [batch for piece in pieces for batch in snapshot._port.scan_arrow(piece.partition, piece.start, piece.end)]
    assert [s for batch in scans for s in batch.column("sequence").to_pylist()] == list(range(6, 31))
    files = len(files_of(store, "events"))
    snapshot.close()
    with pytest.raises(Closed):
        snapshot.queue("events").read()
    store._port.maintain()
    assert len(files_of(store, "events")) < files
    assert list(contents(queue)[0]) == list(range(55, 61))


def test_live_reads_hold_no_files(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody closes what a live read looks at; it must let go by itself."""
    monkeypatch.setattr("penstock.queue.pieces.BATCH_ROWS", 1)
    queue = store.queue("events")
    for number in range(30):
        queue.put(b"%d" % number * 30, durable=True)
    queue.read()
    queue.to_arrow()
    half = queue.scan_arrow()
    next(half)
    queue.trim(31, durable=True)
    files = len(files_of(store, "events"))
    store._port.maintain()
    assert len(files_of(store, "events")) == files > 1, "somebody reads"
    assert sum(batch.num_rows for batch in half) == 30 - 1
    del half
    store._port.maintain()
    assert len(files_of(store, "events")) == 1


def test_a_snapshot_of_a_dropped_queue_is_still_read(store: Store) -> None:
    store.queue("events").put(b"x", durable=True)
    with store.snapshot() as snapshot:
        store.drop("events")
        store._tasks.retry()
        assert [message.payload for message in snapshot.queue("events").read()] == [b"x"]


def test_dropping(disk: SimulatedDisk, store: Store) -> None:
    queue = store.queue("events", shards=2)
    info = store._ledger.table("events")
    assert info is not None
    queue.put_many([b"a", b"b"], keys=[b"1", b"2"], durable=True)
    consumer = queue.consumer("c")
    messages = consumer.get()
    consumer.ack(messages[:1])
    store.drop("events")
    store._tasks.retry()
    assert str(info.table_id) not in disk.listdir("/store/tables")
    assert list(store._port.ledger_rows(b"k")) == []
    for use in (
        lambda: queue.put(b"x"),
        lambda: queue.append(b"x"),
        queue.read,
        consumer.get,
        lambda: consumer.ack(messages[1:]),
        queue.statistics,
    ):
        with pytest.raises(NotFound):
            use()
    fresh = store.queue("events")
    assert fresh.append(b"first").sequence == 1
    assert [message.payload for message in fresh.consumer("c").get()] == [b"first"]
    assert list(store._port._services.running()) == [store._ledger.table("events").table_id]  # type: ignore[union-attr]


def test_a_write_that_a_drop_overtakes_leaves_nothing(store: Store) -> None:
    """Admitted before the drop, judged after it: no row of a dropped queue is made."""
    queue = store.queue("events")
    queue.put_many([b"a", b"b"], durable=True)
    queue.consumer("c").get()  # its count of deliveries is pending
    store.drop("events")
    assert list(store._port.ledger_rows(b"k")) == []


# -- what stays after a restart


def test_a_checkpoint_lets_the_journal_go_and_numbers_stay(disk: SimulatedDisk, clock: FakeClock) -> None:
    store = open_queues(disk, clock)
    queue = store.queue("events", shards=2)
    for number in range(60):
        queue.put(b"%d" % number * 20, key=b"%d" % (number % 7), durable=True)
    queue.trim(4, shard=1, durable=True)
    assert store.checkpoint().segments_dropped > 3
    expected = contents(queue)
    for round_ in range(3):
        store = open_queues(disk.image().restore("strict"), clock)
        assert contents(store.queue("events")) == expected
        shard = shard_of(b"0", 2)
        where = store.queue("events").append(b"r%d" % round_, key=b"0")
        expected[shard][where.sequence] = b"r%d" % round_
        assert list(expected[shard]) == list(range(where.sequence - len(expected[shard]) + 1, where.sequence + 1))
        disk = store._fs  # type: ignore[assignment]
        store.checkpoint()
    store.close()
    assert contents(open_queues(disk, clock).queue("events")) == expected


@pytest.mark.parametrize("with_keys", [False, True])
def test_a_journal_is_not_read_again_after_a_clean_end(
    disk: SimulatedDisk, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, with_keys: bool
) -> None:
    """Closing stores what is in it, in memory or in files that were not synced."""
    monkeypatch.setattr("penstock.store.journal_trimming.LEAVE_BYTES", 0)
    store = open_queues(disk, clock)
    queue = store.queue("events")
    store.kv("idle")
    for number in range(20):
        queue.put(b"%d" % number * 30, durable=True)
    if with_keys:
        store.kv("keys").put(b"a", b"b", durable=True)
    queue.consumer("c").ack(queue.consumer("c").get(5))
    expected = contents(queue)
    for _ in range(2):
        store.close()
        read: list[int] = []
        records = Alone.records

        def noted(self: Alone, first: int, read: list[int] = read, records: Any = records) -> Any:
            for lsn, body in records(self, first):
                read.append(lsn)
                yield lsn, body

        with monkeypatch.context() as patch:
            patch.setattr(Alone, "records", noted)
            store = open_queues(disk, clock)
        assert not read
        assert contents(store.queue("events")) == expected
        assert store.queue("events").consumer("c").lag == 15
        if with_keys:
            assert store.kv("keys")[b"a"] == b"b"
    assert store.queue("events").append(b"more").sequence == 21
    store = open_queues(disk.image().restore("strict"), clock)
    assert payloads(store.queue("events"))[-1] == b"more"
    store.close()


def test_files_that_lost_messages_are_refused(disk: SimulatedDisk, clock: FakeClock) -> None:
    """A queue's folder that is gone is damage, and no queue that begins anew at 1."""
    store = open_queues(disk, clock)
    queue = store.queue("events")
    for number in range(20):
        queue.put(b"%d" % number * 50, durable=True)
    store.checkpoint()
    info = store._ledger.table("events")
    assert info is not None
    store.close()
    folder = f"/store/tables/{info.table_id}/0"
    for path in [*data_files(disk, folder), "manifest.current", "manifest.1", "manifest.2"]:
        if disk.exists(f"{folder}/{path}"):
            disk.unlink(f"{folder}/{path}")
    with pytest.raises(CorruptionError, match="comes next"):
        open_queues(disk, clock).queue("events").read()


def test_a_failed_sync_of_queue_files_holds_no_journal_back(
    disk: SimulatedDisk, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is spilled like any other partition that cannot store; nothing is lost, and others go on."""
    queue, keys = store.queue("events"), store.kv("keys")
    for number in range(30):
        queue.put(b"%d" % number * 20, durable=True)
        keys.put(b"%d" % number, b"x" * 50, durable=True)
    files = machine_of(store, "events").queue._files

    def fail() -> None:
        raise OSError("simulated eio")

    with monkeypatch.context() as patch:
        patch.setattr(files, "sync", fail)
        report = store.checkpoint()
    assert report.spilled >= 1
    assert report.segments_dropped > 0
    keys.put(b"after", b"x", durable=True)
    queue.put(b"after", durable=True)  # durable in the journal; its shard is behind
    with pytest.raises(PartitionPaused):
        queue.append(b"refused")
    again = open_queues(disk.image().restore("strict"))
    assert payloads(again.queue("events")) == [*(b"%d" % n * 20 for n in range(30)), b"after"]
    again.close()


def test_a_shard_that_had_no_room_goes_on(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is durable waits in the journal; nothing was written by halves."""
    queue = store.queue("events")
    queue.append(b"a")

    def full(*_: object) -> None:
        raise DiskFull("simulated")

    with monkeypatch.context() as patch:
        patch.setattr(DataWriter, "claim", full)
        queue.put(b"b", durable=True)
        queue.put_many([b"c", b"d"], durable=True)
        with pytest.raises(PartitionPaused):
            queue.read()
        with pytest.raises(OutcomeUnknown, match="durable and has no number yet"):
            queue.append(b"e")  # no refusal: it will be there
    store.resume("events")
    assert contents(queue) == [{1: b"a", 2: b"b", 3: b"c", 4: b"d", 5: b"e"}]
    assert queue.append(b"f").sequence == 6


def test_a_full_disk_takes_trims(disk: SimulatedDisk, store: Store) -> None:
    queue = store.queue("events")
    for number in range(20):
        queue.put(b"%d" % number * 50, durable=True)
    store._space.release_reserve()
    with pytest.raises(Exception, match="full"):
        queue.put(b"x")
    queue.trim(11, durable=True)
    assert queue.bounds()[0].first == 11


# -- staged files


def test_staged_files_are_applied_replayed_and_discarded(disk: SimulatedDisk, clock: FakeClock) -> None:
    store = open_queues(disk, clock)
    queue = store.queue("events", shards=2)
    queue.put(b"before", key=b"a", durable=True)
    shard = shard_of(b"a", 2)
    staged = store.stage("events", shard)[0]
    assert staged.file_name.endswith(".arrow")
    with store.batch(token=("load", 1)) as batch:
        batch.adopt("events", [build(disk, "/store", staged, staged_table(b"s1", b"s2"))], shard)
    queue.put(b"after", key=b"a", durable=True)
    expected = {1: b"before", 2: b"s1", 3: b"s2", 4: b"after"}
    assert contents(queue)[shard] == expected
    assert [message.time_us for message in queue.read(shard)] == [START_US, 0, 0, START_US], "1970 is a time too"
    after_crash = disk.image().restore("strict")
    again = open_queues(after_crash, clock)
    assert contents(again.queue("events"))[shard] == expected
    with again.batch(token=("load", 1)) as batch:
        batch.adopt("events", [staged], shard)
    assert batch.duplicate
    machine_of(again, "events", shard).store_now()
    assert not after_crash.exists(f"/store/{staged.file_name}")
    last = open_queues(after_crash.image().restore("strict"), clock)
    assert contents(last.queue("events"))[shard] == expected
    last.close()


@pytest.mark.parametrize("damage", ["flip", "gone"])
@pytest.mark.usefixtures("quiet")
def test_a_staged_file_that_rotted_is_noticed_when_it_is_replayed(
    disk: SimulatedDisk, clock: FakeClock, damage: str
) -> None:
    store = open_queues(disk, clock)
    store.queue("events")
    staged = store.stage("events")[0]
    with store.batch() as batch:
        batch.adopt("events", [build(disk, "/store", staged, staged_table(b"payload of a message"))])
    after_crash = disk.image().restore("strict")
    path = f"/store/{staged.file_name}"
    file = after_crash.open(path, write=True)
    at = file.pread(file.size(), 0).index(b"payload of a")
    file.pwrite(b"P", at)  # which Arrow would not notice
    if damage == "gone":
        after_crash.unlink(path)
    again = open_queues(after_crash, clock)
    with pytest.raises(PartitionPaused, match=path):
        for _ in range(10):
            again._tasks.retry()
        again.queue("events").put(b"later", durable=True)


def test_staged_files_that_are_none_are_refused(disk: SimulatedDisk, store: Store) -> None:
    store.queue("events")
    good = staged_table(b"x")
    bad = [
        good.drop_columns(["time"]),
        pa.table({"payload": [b"a"]}),
        good.cast(pa.schema([*STAGED_SCHEMA][:2] + [pa.field("time", pa.timestamp("ns", tz="UTC"), nullable=False)])),
    ]
    for table in bad:
        built = build(disk, "/store", store.stage("events")[0], table)
        with pytest.raises(Invalid), store.batch() as batch:
            batch.adopt("events", [built])
    staged = store.stage("events")[0]
    built = build(disk, "/store", staged, good)
    data = disk.open(f"/store/{staged.file_name}")
    size = data.size()
    for at in range(0, size, 7):
        broken = store.stage("events")[0]
        file = disk.create(f"/store/{broken.file_name}")
        file.pwrite(data.pread(size, 0)[:at], 0)
        with pytest.raises(Invalid), store.batch() as batch:
            batch.adopt("events", [sealed(disk, "/store", broken)])
    with store.batch() as batch:
        batch.adopt("events", [built])
    assert payloads(store.queue("events")) == [b"x"]


def test_a_staged_file_without_messages_adds_none(disk: SimulatedDisk, store: Store) -> None:
    queue = store.queue("events")
    with store.batch() as batch:
        batch.adopt("events", [build(disk, "/store", store.stage("events")[0], staged_table())])
    assert queue.append(b"x").sequence == 1


# -- threads


def test_locks_are_taken_in_one_order(tmp_path: Any) -> None:
    checker = LockOrderChecker()
    with checker.installed():
        store = open_store(str(tmp_path / "s"), settings=StoreSettings(flush_interval_s=0.01))
        queue, dead = store.queue("events", shards=2, retention=Retention(acknowledged=True)), store.queue("dead")
        consumer = queue.consumer("c", deliveries_max=1, dead_letter="dead")
        queue.put_many([b"%d" % n for n in range(20)], keys=[b"%d" % n for n in range(20)], durable=True)
        consumer.nack(consumer.get(10, 5.0))
        with store.batch() as batch:
            batch.kv(store.kv("keys").name).put(b"a", b"b")
            consumer.ack(consumer.get(5, 5.0), batch=batch)
        with store.snapshot() as snapshot:
            store._port.maintain()
            snapshot.queue("events").to_arrow()
        store.checkpoint()
        store.drop("dead")
        assert dead.name == "dead"
        store.close()


@given(st.lists(st.binary(max_size=40), min_size=1, max_size=40))
def test_a_list_of_payloads_is_encoded_as_its_columns_are(payloads: list[bytes]) -> None:
    assert encode_payloads(payloads, lsn=7, time_us=-3) == Messages.of(payloads).encode(lsn=7, time_us=-3)


def test_payloads_that_are_no_bytes() -> None:
    for wrong in ([b"a", "b"], [None], [memoryview(b"abcd").cast("I")], [5]):
        with pytest.raises(Invalid):
            encode_payloads(wrong, lsn=0, time_us=0)  # type: ignore[arg-type]
    with pytest.raises(Invalid):
        encode_payloads([bytes((64 << 20) + 1)], lsn=0, time_us=0)
    with pytest.raises(Invalid):
        encode_payloads([bytes(33 << 20)] * 2, lsn=0, time_us=0)


def test_the_bytes_of_sections() -> None:
    """Written out by hand from docs/format/journal.md."""
    puts = section.Puts()
    puts.add((b"abc", b"k", 5))
    puts.add((b"de", None, 6))
    puts.add((b"f", None, None))
    head = b"\x00\x00\x00\x00" + b"\x02\x00\x00\x00"
    no_time = b"\x00" * 7 + b"\x80"
    first = bytes(8) + no_time + b"\x02\x00\x00\x00" + b"\x07\x00" + b"\x00\x00"
    first += (5).to_bytes(8, "little") + (6).to_bytes(8, "little")
    first += b"\x01" + bytes(7)  # the first of them has a key
    first += bytes(4) + b"\x01\x00\x00\x00" * 2 + bytes(4) + b"k" + bytes(7)
    first += bytes(4) + b"\x03\x00\x00\x00" + b"\x05\x00\x00\x00" + bytes(4) + b"abcde" + bytes(3)
    second = bytes(8) + no_time + b"\x01\x00\x00\x00" + bytes(4) + bytes(4) + b"\x01\x00\x00\x00" + b"f" + bytes(7)
    sizes = len(first).to_bytes(8, "little") + len(second).to_bytes(8, "little")
    assert section.encode(puts) == head + sizes + first + second
    assert section.encode(section.Trim(258)) == b"\x01" + bytes(7) + b"\x02\x01" + bytes(6)


# -- options


def test_a_retention_is_altered(store: Store, disk: SimulatedDisk, clock: FakeClock) -> None:
    queue = store.queue("events", retention=Retention(age_s=3600))
    queue.put_many([b"%d" % n for n in range(5)], durable=True)
    assert queue.retention == Retention(age_s=3600)
    queue.alter(retention=Retention(age_s=10))
    assert queue.retention == store.queue("events").retention == Retention(age_s=10)
    assert store.queue("events", retention=Retention(age_s=10.0)).name == "events"
    with pytest.raises(KindMismatch, match="alter"):
        store.queue("events", retention=Retention(age_s=3600))
    clock.advance(30)
    store._port.maintain()
    store.flush()
    assert payloads(queue) == [], "the service follows"
    again = open_queues(disk.image().restore("strict"), clock)
    assert again.queue("events").retention == Retention(age_s=10), "it was durable when alter returned"
    again.close()


def test_a_queue_that_keeps_everything_again(store: Store, clock: FakeClock) -> None:
    queue = store.queue("events", retention=Retention(age_s=10))
    queue.alter(retention=Retention())
    queue.put(b"m", durable=True)
    clock.advance(30)
    store._port.maintain()
    store.flush()
    assert payloads(queue) == [b"m"]
    with pytest.raises(Invalid):
        queue.alter(retention=None)
    with store.snapshot() as snapshot:
        store.drop("events")
        with pytest.raises(NotFound):
            queue.alter(retention=Retention())
        store.queue("events")
        with pytest.raises(NotFound):
            queue.alter(retention=Retention(age_s=1))
        assert snapshot.queue("events").to_arrow().num_rows == 1
    assert store.queue("events").retention == Retention()


def test_an_alteration_that_comes_second_is_done_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    queue, port = store.queue("events"), store._port
    alter, others = port.alter, [Retention(age_s=1), Retention(age_s=2)]

    def after_another(info: Any, options: bytes) -> Any:
        if others:
            alter(info, encode_queue_options(queue_options(others.pop())))
        return alter(info, options)

    monkeypatch.setattr(port, "alter", after_another)
    queue.alter(retention=Retention(age_s=9))
    assert queue.retention == Retention(age_s=9)
    assert others == []


# -- all shards


def test_all_shards_are_read(store: Store) -> None:
    queue = store.queue("spread", shards=3)
    for n in range(30):
        queue.put(b"%d" % n, key=b"%d" % n)
    store.flush()
    messages = queue.read()
    assert len(messages) == 30
    assert messages == [message for shard in range(3) for message in queue.read(shard)]
    assert queue.read(limit=12) == messages[:12]
    assert queue.read(limit=0) == []
    assert queue.read(from_sequence=4) == [message for message in messages if message.sequence >= 4]
    with store.snapshot() as snapshot:
        assert snapshot.queue("spread").read() == messages
    queue.trim(3, shard=1, durable=True)
    assert queue.read() == [message for message in messages if message.shard != 1 or message.sequence >= 3]
    with pytest.raises(NotFound):
        queue.read(from_sequence=2)


def test_all_shards_are_read_at_one_moment(store: Store) -> None:
    """A batch that is committed while the first shard is read is not in the second either."""
    queue = store.queue("spread", shards=2)
    queue.put_many([b"a"] * 4, keys=[b"0", b"1", b"2", b"3"], durable=True)
    batches = queue.scan_arrow()
    first = next(batches)
    queue.put_many([b"b"] * 4, keys=[b"0", b"1", b"2", b"3"], durable=True)
    assert [row["payload"] for batch in (first, *batches) for row in batch.to_pylist()] == [b"a"] * 4
