"""A connected store does what an owned one does: same answers, same errors, snapshots, large results, lost answers."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.client import connection, flusher
from penstock.client.connect import connect
from penstock.client.store import RemoteStore
from penstock.errors import (
    Closed,
    GateShut,
    Invalid,
    KindMismatch,
    LeaseLost,
    NotFound,
    OutcomeUnknown,
    PartitionPaused,
    PenstockError,
    Poisoned,
    PositionConflict,
    TokenTooOld,
    WaitExpired,
)
from penstock.host.waiting import pause
from penstock.journal.partitions import PartitionId
from penstock.kv.machine import KvMachine
from penstock.lsm.rows import KEY_BYTES_MAX
from penstock.partition.ledger_records import Condition, encode_condition
from penstock.partition.reference import sealed
from penstock.protocol import wire
from penstock.registry import KV, QUEUE
from penstock.store.store import Store
from penstock.store.tables import Tables


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Store]:
    with penstock.open(tmp_path / "store") as store:
        yield store


@pytest.fixture
def store(owner: Store) -> Iterator[RemoteStore]:
    with connect(owner.path) as client:
        yield client


def in_process(code: str, *arguments: object, timeout_s: float = 60.0) -> Any:
    """What a script in a process of its own prints, as JSON."""
    script = "import sys, json, penstock\n" + textwrap.dedent(code)
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)], capture_output=True, timeout=timeout_s, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)


# -- the same answers


def use_kv(store: Tables) -> list[Any]:
    answers: list[Any] = []
    users = store.kv("users", shards=3)
    users.put(b"ada", b"1815")
    users[b"bob"] = b""
    users.put_many({b"k%03d" % n: b"v%d" % n for n in range(500)})
    answers += [users[b"ada"], users.get(b"none"), users.get(b"none", 7), b"bob" in users, b"eve" in users]
    answers += [users.multi_get([b"k001", b"none", b"k499", b"ada"])]
    users.delete(b"k001")
    users.delete_range(b"k1", b"k2")
    answers += [
        list(users.scan(prefix=b"k0", limit=5)),
        list(users.scan(b"k45", b"k46", reverse=True)),
        len(list(users)),
    ]
    counts = store.kv("counts", value="int64")
    for _ in range(10):
        counts.merge(b"n", 5, operator="add_i64")
    counts.merge(b"n", 3, operator="min_i64")
    answers += [counts[b"n"]]
    texts = store.kv("texts", value="json")
    texts.put(b"a", {"x": [1, None, "é"]})
    texts.put(b"soon", 1, ttl_s=3600)
    answers += [dict(texts.items()), texts.to_arrow().drop_columns(["lsn"]).to_pylist(), texts.schema.names]
    with pytest.raises(KeyError):
        users[b"k150"]
    answers += [sorted(store.tables()), users.shards, store.table("counts").get(b"n")]
    return answers


def use_queue(store: Tables) -> list[Any]:
    events = store.queue("events", shards=2)
    answers: list[Any] = [events.append(b"first", key=b"k", time=-5)[:2]]
    events.put_many([b"m%d" % n for n in range(50)], keys=[b"%d" % (n % 7) for n in range(50)])
    events.put(b"tokened", token=("p", 1))
    events.put(b"tokened", token=("p", 1))
    answers += [
        [(m.sequence, m.key, m.payload) for m in events.read(1, 2, 5)],
        events.bounds(),
        events.to_arrow().num_rows,
    ]
    events.trim(3, shard=1, durable=True)
    answers += [events.bounds(), events.seek(0, shard=0)]
    consumer = events.consumer("c", visibility_timeout_s=600.0)
    got = consumer.get(10)
    consumer.ack(got[:4])
    answers += [len(got), consumer.nack(got[4:6]), consumer.lag, consumer.position]
    again = consumer.get(2)
    answers += [sorted((m.shard, m.sequence, m.deliveries) for m in again)]
    with pytest.raises(LeaseLost):
        consumer.ack(got[4:5])
    consumer.seek("earliest")
    answers += [consumer.lag, events.statistics().messages]
    consumer.forget()
    answers += [consumer.get(timeout_s=0.0) != []]
    return answers


def use_batches(store: Tables) -> list[Any]:
    users, events = store.kv("users"), store.queue("events")
    answers: list[Any] = []
    for _ in range(2):
        with store.batch(token=("loader", 17)) as batch:
            batch.kv("users").put(b"ada", b"1852")
            batch.kv("users").delete_range(b"x", b"y")
            batch.queue("events").put(b"hello")
        answers.append(batch.duplicate)
    consumer = events.consumer("c")
    got = consumer.get()
    with store.batch() as batch:
        consumer.ack(got, batch=batch)
        batch.kv("users").put(b"seen", got[0].payload)
    answers += [users[b"seen"], consumer.lag]
    with pytest.raises(LeaseLost), store.batch() as batch:
        consumer.ack(got, batch=batch)
        batch.kv("users").put(b"seen", b"twice")
    with pytest.raises(ZeroDivisionError), store.batch() as batch:
        batch.kv("users").put(b"seen", b"never")
        _ = 1 / 0
    answers += [users[b"seen"]]
    store.batch(token=("old", 5_000)).commit()
    with pytest.raises(TokenTooOld):
        store.batch(token=("old", 1)).commit()
    return answers


@pytest.mark.parametrize("use", [use_kv, use_queue, use_batches])
def test_a_connected_store_answers_as_an_owned_one(tmp_path: Path, use: Callable[[Tables], list[Any]]) -> None:
    with penstock.open(tmp_path / "a") as owned:
        expected = use(owned)
    with penstock.open(tmp_path / "b"), connect(tmp_path / "b") as connected:
        assert use(connected) == expected


def test_errors_are_of_the_same_classes(store: RemoteStore) -> None:
    users = store.kv("users")
    with pytest.raises(NotFound, match="the store has users"):
        store.kv("user", create=False)
    with pytest.raises(KindMismatch):
        store.queue("users")
    with pytest.raises(Invalid):
        store.kv("../x")
    with pytest.raises(Invalid):
        users.put(b"k" * (KEY_BYTES_MAX + 1), b"")
    with pytest.raises(NotFound):
        store.drop("nothing")
    with pytest.raises(Invalid):
        store.port.pieces(PartitionId(2 << 16), 1)  # of no snapshot
    with pytest.raises(KindMismatch):
        store.port.call(store.port.table("users"), "fly", b"")  # type: ignore[arg-type]


def test_a_client_reads_what_it_wrote_and_others_after_a_flush(owner: Store, store: RemoteStore) -> None:
    mine = store.kv("users")
    mine.put(b"a", b"1")
    assert mine[b"a"] == b"1"  # sent before it was read
    epoch = mine.put(b"a", b"2")
    assert store.flush(epoch).epoch >= epoch
    assert owner.kv("users")[b"a"] == b"2"
    owner.kv("users").put(b"a", b"3", durable=True)  # others see what is durable
    assert mine[b"a"] == b"3"


# -- snapshots


def test_a_snapshot_is_read_by_its_id_in_another_process(owner: Store, store: RemoteStore) -> None:
    users = store.kv("users", shards=2)
    users.put_many({b"%04d" % n: b"x" for n in range(1_000)})
    with store.snapshot() as snapshot:
        users.put_many({b"%04d" % n: b"later" for n in range(900, 1_100)}, durable=True)
        code = """
            with penstock.connect(sys.argv[1]) as store:
                with store.snapshot(sys.argv[2]) as snap:
                    rows = sum(batch.num_rows for piece in snap.pieces("users", 5) for batch in snap.read(piece))
                    first = [snap.lsn, rows, snap.kv("users").get(b"0950").decode(), len(snap.pieces("users", 5))]
                with store.snapshot(sys.argv[2]) as again:
                    print(json.dumps([*first, again.kv("users").get(b"1050")]))
        """
        lsn, rows, value, pieces, later = in_process(code, owner.path, snapshot.id)
        assert (lsn, rows, value, later) == (snapshot.lsn, 1_000, "x", None)
        assert pieces >= 2
        assert snapshot.kv("users")[b"0950"] == b"x"  # who joined and closed did not take it away
    with pytest.raises(Closed):
        store.snapshot(snapshot.id)


def test_a_snapshot_that_nobody_uses_lapses(store: RemoteStore) -> None:
    users = store.kv("users")
    users.put(b"a", b"1")
    used, unused = store.snapshot(lease_s=2.0), store.snapshot(lease_s=0.2)
    for _ in range(40):
        assert used.kv("users")[b"a"] == b"1"  # use renews it
        pause(0.1)
    with pytest.raises(Closed, match="lease"):
        unused.kv("users").get(b"a")
    used.close()
    with pytest.raises(Closed):
        used.kv("users").get(b"a")


def test_pieces_read_from_files_are_what_the_owner_has(owner: Store, store: RemoteStore) -> None:
    users = store.kv("users")
    users.put_many({b"%06d" % n: b"x" * 50 for n in range(50_000)}, durable=True)
    compact(owner, "users")
    users.put(b"000000", b"new", durable=True)
    with store.snapshot() as snapshot:
        rows = []
        for piece in snapshot.pieces("users", 4):
            batches = KV.read_piece(piece, store.path, store.identity)
            assert batches is not None
            rows += [(key, value) for b in batches for key, value in zip(*map(b.column, ("key", "value")), strict=True)]
        assert len(rows) == 50_000
        assert (rows[0][0].as_py(), rows[0][1].as_py()) == (b"000000", b"new")


def compact(store: Store, name: str) -> None:
    """As soon as no background job works on the table."""
    while True:
        try:
            store.compact(name)
            return
        except GateShut:
            pause(0.05)


# -- large results, in pages


def test_a_large_scan_takes_little_memory_on_both_sides(tmp_path: Path) -> None:
    with penstock.open(tmp_path / "store") as store:
        table, events = store.kv("big"), store.queue("events")
        for part in range(32):
            if part == 26:
                store.flush()
                compact(store, "big")  # and the rest stays in memory, where the next owner has it from the start
            table.put_many({b"%05d%02d" % (n, part): random.randbytes(300) for n in range(20_000)})
            events.put_many([random.randbytes(150)] * 20_000)
        store.flush()
        store.checkpoint()  # nothing is left to be done by the next owner but to answer
    code = """
        import resource
        def memory(pid="self"):
            lines = open(f"/proc/{pid}/status").read().splitlines()
            return sum(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))
        store = penstock.connect(sys.argv[1])
        owner = int(open(sys.argv[1] + "/pid").read())
        highest, rows = [0, 0], [0, 0, 0]
        def look():
            highest[:] = max(highest[0], memory()), max(highest[1], memory(owner))
        list(store.kv("big").scan(limit=10)); store.queue("events").read()
        before = memory(), memory(owner)
        for number, pair in enumerate(store.kv("big").scan()):
            rows[0] += 1
            if number % 2_000 == 0: look()
        for number, source in ((1, store.kv("big")), (2, store.queue("events"))):
            for batch in source.scan_arrow():
                rows[number] += batch.num_rows
                look()
        print(json.dumps([rows, highest[0] - before[0], highest[1] - before[1]]))
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock.server", str(tmp_path / "store")],
        stdout=subprocess.PIPE,
        env={**os.environ, "ARROW_DEFAULT_MEMORY_POOL": "system"},  # the others keep much of what was given back
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b'{"fault":null}\n'
        (tmp_path / "store" / "pid").write_text(str(process.pid))
        rows, client_kib, owner_kib = in_process(code, tmp_path / "store", timeout_s=200)
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
    assert rows == [640_000] * 3
    assert client_kib < 48 << 10, "of 200 MB"
    assert owner_kib < 48 << 10, "a few slices of what it merges"


def test_scans_that_are_not_ended_are_let_go(owner: Store, store: RemoteStore) -> None:
    from penstock.server.service import service_of

    table = store.kv("big")
    table.put_many({b"%05d" % n: bytes(2_000) for n in range(5_000)})
    scans = [table.scan() for _ in range(5)]
    for scan in scans:
        next(scan)
    service = service_of(owner)
    assert service is not None
    held_scans = service.gateway()._scans
    assert len(held_scans) == 5
    del scans, scan
    assert len(held_scans) == 0
    assert len(list(table.scan())) == 5_000
    assert len(held_scans) == 0


def test_large_values_go_both_ways(store: RemoteStore) -> None:
    table = store.kv("large")
    value = random.randbytes(1 << 20) * 60
    table.put(b"a", value)
    assert table[b"a"] == value
    table.put_many({b"%d" % n: value[: 5 << 20] for n in range(6)})
    assert [len(item or b"") for item in table.multi_get([b"%d" % n for n in range(6)])] == [5 << 20] * 6
    assert [key for key, _ in table.scan()] == [b"0", b"1", b"2", b"3", b"4", b"5", b"a"]
    events = store.queue("events")
    events.put(value[: 9 << 20], durable=True)
    assert events.consumer("c").get()[0].payload == value[: 9 << 20]


def test_many_keys_and_many_groups(store: RemoteStore) -> None:
    table = store.kv("t", value="int64")
    for n in range(2_000):  # more groups than one message may have
        table.put(b"%04d" % n, n)
        table.delete_range(b"a", b"b")
    values = table.multi_get([b"%04d" % n for n in range(25_000)])
    assert values == [*range(2_000), *[None] * (25_000 - 2_000)]


# -- writes that are refused


def test_writes_to_a_dropped_table_fail_and_the_others_do_not(owner: Store, store: RemoteStore) -> None:
    healthy, dropped = store.kv("kept"), store.kv("dropped")
    owner.drop("dropped")
    dropped.put(b"a", b"1")
    healthy.put(b"a", b"1")  # in the same group
    epoch = dropped.put(b"b", b"1")
    for _ in range(2):
        with pytest.raises(NotFound, match="dropped"):
            store.flush(epoch)
    assert healthy[b"a"] == b"1"
    healthy.put(b"b", b"2", durable=True)  # who waited was told; nobody else is
    dropped.put(b"b", b"1")
    assert healthy[b"b"] == b"2"
    with pytest.raises(NotFound):
        healthy.put(b"c", b"1")  # nobody waited: the next is told, once
    healthy.put(b"c", b"1", durable=True)


def test_a_table_by_its_name_in_a_loop_is_one_request(
    owner: Store, store: RemoteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests: list[str] = []
    ask = connection.Connection.ask_raw

    def counted(self: connection.Connection, request: Any, **more: Any) -> bytes:
        requests.append(type(request).__name__)
        return ask(self, request, **more)

    monkeypatch.setattr(connection.Connection, "ask_raw", counted)
    monkeypatch.setattr("penstock.client.port.RECENT_S", 100.0)
    for number in range(300):
        store.kv("users").put(b"%d" % number, b"x")
        store.queue("events").put(b"x")
    assert requests.count("FindTable") == 2, requests
    assert store.kv("users").count() == 300
    for number in range(20):
        with store.batch() as batch:  # one for each message, as a consumer may write
            batch.kv("users").put(b"%d" % number, b"y")
            batch.queue("events").put(b"y")
    assert requests.count("FindTable") == 2, requests

    store.drop("users")  # by this client: it knows
    with pytest.raises(NotFound, match="there is no table users"):
        store.kv("users", create=False)
    store.kv("users").put(b"k", b"1", durable=True)
    store.queue("events").alter(headers=True)
    assert "headers" in store.queue("events").schema.names

    retention = penstock.Retention(age_s=5)
    store.queue("altered")
    owner.queue("altered").alter(headers=True, retention=retention)
    assert "headers" in store.queue("altered", headers=True, retention=retention).schema.names
    store.kv("remade")
    owner.drop("remade")
    owner.queue("remade", shards=2)
    assert store.queue("remade", shards=2).shards == 2, "another kind is not judged by what was told before"

    owner.drop("users")  # by another process: the call that finds it gone is told, and the next one goes on
    owner.kv("users")
    with pytest.raises(NotFound, match="table users was dropped: get it from the store again"):
        store.kv("users").put(b"k", b"2", durable=True)
    store.kv("users").put(b"k", b"3", durable=True)
    assert owner.kv("users")[b"k"] == b"3"
    monkeypatch.setattr("penstock.client.port.RECENT_S", 0.0)
    store._port._recent.clear()
    assert store.kv("users").get(b"k") == b"3"
    owner.drop("users")
    assert store.kv("users").get(b"k") is None


def test_a_dropped_table_is_named_by_a_later_owner(tmp_path: Path) -> None:
    """It has no name for the table, whose number it was given; the client has."""
    with penstock.open(tmp_path) as first:
        first.kv("users").put(b"k", b"1", durable=True)
        client = connect(tmp_path)
        users = client.kv("users")
        assert users.get(b"k") == b"1"
        first.drop("users")
    with penstock.open(tmp_path), client:
        for act in (
            lambda: users.get(b"k"),
            lambda: list(users.scan()),
            lambda: users.put(b"k", b"2", durable=True),
            lambda: users.put(b"k", b"2", if_absent=True),
        ):
            with pytest.raises(NotFound, match="^table users was dropped: get it from the store again"):
                act()


def test_a_batch_without_a_condition_is_refused_as_a_whole(owner: Store, store: RemoteStore) -> None:
    healthy, _ = store.kv("kept"), store.kv("dropped")
    with pytest.raises(NotFound), store.batch() as batch:
        batch.kv("kept").put(b"a", b"1")
        batch.kv("dropped").put(b"a", b"1")
        owner.drop("dropped")
    assert healthy.get(b"a") is None
    with pytest.raises(NotFound), store.batch(token=("p", 1)) as batch:
        batch.kv("kept").put(b"a", b"1")
        store.kv("dropped")
        batch.kv("dropped").put(b"a", b"1")
        owner.drop("dropped")
    assert healthy.get(b"a") is None


def test_a_paused_table_stops_nobody_else(owner: Store, store: RemoteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    bad, good = store.kv("bad"), store.kv("good")
    bad.put(b"a", b"0", durable=True)
    apply = KvMachine.apply

    def fail(machine: KvMachine, entry: Any) -> None:
        if machine._descriptor.name == "bad":
            raise OSError("no")
        apply(machine, entry)

    monkeypatch.setattr(KvMachine, "apply", fail)
    bad.put(b"a", b"1", durable=True)  # durable, though it cannot be applied
    for _ in range(200):
        owner._dispatcher.retry()
        if owner._dispatcher.partition(owner.port.table("bad").table << 16).refusal is not None:  # type: ignore[union-attr, arg-type]
            break
        pause(0.05)
    bad.put(b"a", b"2")
    good.put(b"a", b"1")
    with pytest.raises(PartitionPaused):
        store.flush()
    assert good[b"a"] == b"1"
    with pytest.raises(PartitionPaused), store.batch() as batch:
        batch.kv("bad").put(b"a", b"3")
    monkeypatch.undo()
    owner.resume("bad")
    assert bad[b"a"] == b"1"


# -- lost answers


class Lossy:
    """Loses some answers to writes, after the owner did them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, chance: float) -> None:
        self.lost = 0
        whole = connection.Connection._send
        draw = random.Random(7)

        def send(line: connection.Connection, *arguments: Any) -> bytes:
            answer = whole(line, *arguments)
            if isinstance(wire.unpack_request(arguments[1]), wire.Write) and draw.random() < chance:
                self.lost += 1
                raise connection.GoneError("the answer was lost", untouched=False)
            return answer

        monkeypatch.setattr(connection.Connection, "_send", send)


def write_through_losses(store: RemoteStore) -> tuple[int, int, list[bool]]:
    counts, events = store.kv("counts", value="int64"), store.queue("events")
    for n in range(30):
        counts.merge(b"n", 1, operator="add_i64", durable=True)
        events.put(b"%d" % n, durable=True)
    consumer = events.consumer("c")
    while got := consumer.get(7):
        with store.batch() as batch:  # without a token: the client's own makes it safe to send again
            consumer.ack(got, batch=batch)
            for _ in got:
                batch.kv("counts", value="int64").merge(b"acked", 1, operator="add_i64")
    duplicates = []
    for n in range(10):
        with store.batch(token=("p", n // 2)) as batch:
            batch.kv("counts", value="int64").merge(b"tokened", 1, operator="add_i64")
        duplicates.append(batch.duplicate)
    return counts[b"n"], counts[b"acked"], [counts[b"tokened"] == 5, *duplicates[1::2]]


def test_what_is_sent_again_happens_once(store: RemoteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    lossy = Lossy(monkeypatch, 0.3)
    assert write_through_losses(store) == (30, 30, [True] * 6)
    assert lossy.lost > 10


@pytest.mark.parametrize("chance", [0.0, 0.5])
def test_who_moves_a_consumer_that_was_moved_before_is_told_so(
    store: RemoteStore, monkeypatch: pytest.MonkeyPatch, chance: float
) -> None:
    """Also when answers are lost: that a sending happened before is not that the move had been made by another."""
    lossy = Lossy(monkeypatch, chance)
    counts = store.kv("counts", value="int64")
    store.queue("events")
    info = store._port.table("events")
    assert info is not None
    duplicates = []
    for n in range(20):
        with store.batch() as batch:
            batch.kv("counts", value="int64").merge(b"n", 1, operator="add_i64")
            batch.require(*QUEUE.move(info, "c", [(0, 1 + n // 2, 2 + n // 2)]))
        duplicates.append(batch.duplicate)
    assert duplicates == [False, True] * 10
    assert counts[b"n"] == 10
    assert (lossy.lost > 5) == (chance > 0)


@pytest.mark.parametrize("remote", [False, True])
def test_the_condition_that_refused_a_batch_decides_its_error(
    owner: Store, store: RemoteStore, *, remote: bool
) -> None:
    """An acknowledgement that holds beside a move that does not: the move is what was refused, and says so."""
    tables: Tables = store if remote else owner
    events = tables.queue("events")
    events.put_many([b"a", b"b"], durable=True)
    consumer, info = events.consumer("leased"), owner.port.table("events")
    assert info is not None
    moved = QUEUE.move(info, "streamed", [(0, 1, 2)])
    with tables.batch() as batch:
        batch.require(*moved)
    wrong = QUEUE.move(info, "streamed", [(0, 1, 3)])
    messages = consumer.get(2)
    with pytest.raises(PositionConflict, match="streamed"), tables.batch() as batch:
        consumer.ack(messages, batch=batch)
        batch.require(*wrong)
    consumer.ack(messages)  # nothing of the batch happened


def test_without_tokens_losses_would_be_seen(store: RemoteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    Lossy(monkeypatch, 0.3)

    def no_token(_: object, others: tuple[tuple[str, bytes], ...] = ()) -> bytes:
        return encode_condition(Condition(None, others)) if others else b""

    monkeypatch.setattr(flusher.RemoteFlusher, "_own_condition", no_token)
    counts = store.kv("counts", value="int64")
    for _ in range(30):
        counts.merge(b"n", 1, operator="add_i64", durable=True)
    assert counts[b"n"] > 30


def test_a_call_that_may_not_be_repeated_says_so(store: RemoteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    events = store.queue("events")
    whole = connection.Connection._send
    lose = [wire.CallService]

    def send(line: connection.Connection, *arguments: Any) -> bytes:
        answer = whole(line, *arguments)
        if lose and isinstance(wire.unpack_request(arguments[1]), lose[0]):
            lose.clear()
            raise connection.GoneError("the answer was lost", untouched=False)
        return answer

    monkeypatch.setattr(connection.Connection, "_send", send)
    with pytest.raises(OutcomeUnknown):
        events.append(b"x")
    assert [bounds.next for bounds in events.bounds()] == [2]
    lose.append(wire.CallService)
    assert [bounds.next for bounds in events.bounds()] == [2]  # asked again by itself
    assert not lose


def test_writes_are_kept_while_no_owner_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "store"
    owner = penstock.open(path)
    store = RemoteStore(
        _locator(path), durable=False, clock=penstock_clock(), random=random.Random(1), owner_timeout_s=0.3, send_s=0.5
    )
    counts = store.kv("counts", value="int64")
    counts.merge(b"n", 1, operator="add_i64", durable=True)
    owner.close()
    hidden = penstock.open(path, settings=penstock.StoreSettings(serve=False))  # owns it, and does not answer
    epoch = counts.merge(b"n", 1, operator="add_i64")
    with pytest.raises(WaitExpired):
        store.flush(epoch)  # it is still being sent
    for _ in range(200):
        if store._port._coordinator.failure is not None:
            break
        pause(0.05)
    with pytest.raises(OutcomeUnknown):
        store.flush(epoch)
    with pytest.raises(Poisoned):
        counts.merge(b"n", 1, operator="add_i64")
    hidden.close()
    with penstock.open(path) as owner:
        store.recover()  # sends what was kept
        assert counts[b"n"] == 2
        store.close()
        assert owner.kv("counts", value="int64")[b"n"] == 2


def _locator(path: Path) -> Any:
    from penstock.client.connect import LocalOwnerLocator

    return LocalOwnerLocator(str(path), create=False, clock=penstock_clock())


def penstock_clock() -> Any:
    from penstock.host.clock import SystemClock

    return SystemClock()


# -- files that are built elsewhere


def test_a_staged_file_is_sent_by_one_who_does_not_see_the_folder(store: RemoteStore, tmp_path: Path) -> None:
    import pyarrow as pa

    from penstock.host.os_files import OsFileSystem
    from penstock.queue.staged import STAGED_SCHEMA

    fs, events = OsFileSystem(), store.queue("events")
    staged = store.stage("events")[0]
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / staged.file_name).parent.mkdir(parents=True)
    table = pa.table(
        {
            "payload": [random.randbytes(1_000) for _ in range(9_000)],
            "key": pa.nulls(9_000, pa.binary()),
            "time": pa.array(range(9_000), pa.timestamp("us", "UTC")),
        },
        schema=STAGED_SCHEMA,
    )
    with pa.OSFile(str(elsewhere / staged.file_name), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=1_000)
    ready = sealed(fs, str(elsewhere), staged)
    partition = store.port.table("events").table << 16  # type: ignore[union-attr]
    for _ in range(2):  # again, as after a lost answer
        file = fs.open(str(elsewhere / staged.file_name))
        store.port.send_file(partition, staged, staged.file_name, file)  # type: ignore[arg-type]
        file.close()
    for _ in range(2):
        with store.batch(token=("load", 1)) as batch:
            batch.adopt("events", [ready])
    assert batch.duplicate
    assert events.to_arrow().column("payload").equals(table.column("payload").cast(pa.binary()))
    with pytest.raises(Invalid, match="is not a file of tables"):
        store.port._connection.ask(wire.SendFile(partition, staged.chunk_id, "../../x", 0, b"x"), type(None))


# -- processes


def test_a_forked_child_is_refused(store: RemoteStore) -> None:
    users = store.kv("users")
    users.put(b"a", b"1", durable=True)
    snapshot = store.snapshot()
    uses: list[Callable[[], Any]] = [
        lambda: store.kv("users"),
        lambda: users.get(b"a"),
        lambda: users.put(b"a", b"2"),
        lambda: list(users.scan()),
        lambda: snapshot.kv("users").get(b"a"),
        store.batch,
    ]
    reader, writer = os.pipe()
    if os.fork() == 0:
        report = b""
        for use in uses:
            try:
                use()
                report += b"-"
            except Closed as error:
                report += b"+" if "fork" in str(error) else b"?"
        store.close()
        os.write(writer, report)
        os._exit(0)
    assert os.read(reader, 100) == b"+" * len(uses)
    os.close(reader)
    os.close(writer)
    os.wait()
    assert users[b"a"] == b"1"


def test_a_forked_child_can_end(tmp_path: Path) -> None:
    """Of one who owns and serves, and of one who is connected."""
    code = """
        import os
        with penstock.open(sys.argv[1]) as owner, penstock.connect(sys.argv[1]) as store:
            store.kv("users").put(b"a", b"1", durable=True)
            child = os.fork()
            if child == 0:
                sys.exit(7)
            _, status = os.waitpid(child, 0)
            assert store.kv("users")[b"a"] == b"1"
            print(os.waitstatus_to_exitcode(status))
    """
    assert in_process(code, tmp_path / "store") == 7


def test_nothing_works_after_close(store: RemoteStore) -> None:
    users = store.kv("users")
    users.put(b"a", b"1")
    store.close()
    store.close()
    for use in (lambda: store.kv("users"), lambda: users.get(b"a"), lambda: users.put(b"a", b"2"), store.tables):
        with pytest.raises(Closed):
            use()


def test_writes_are_sent_when_the_process_ends(owner: Store) -> None:
    code = """
        store = penstock.connect(sys.argv[1])
        store.kv("users").put(b"last", b"word")
        print(1)
    """
    in_process(code, owner.path)
    assert owner.kv("users")[b"last"] == b"word"


def test_faults_become_the_errors_they_were() -> None:
    from penstock import errors

    for error in (
        errors.CorruptionError("path", 7, "bad"),
        errors.ManifestNotFound("path"),
        errors.Backpressure("full"),
        errors.OutcomeUnknown("who knows"),
    ):
        again = wire.error_of(wire.fault_of(error))
        assert (type(again), str(again)) == (type(error), str(error))
    assert type(wire.error_of(wire.ErrorMessage("Newer", "x"))) is PenstockError
    assert type(wire.error_of(wire.ErrorMessage("annotations", "x"))) is PenstockError
