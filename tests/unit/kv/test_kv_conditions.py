"""Compare and set: a write that happens only if its row is as its writer has read it."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cas_child
import pytest
from linearizable import Operation, is_linearizable

import penstock
from penstock.errors import Closed, ConditionFailed, Invalid, TokenTooOld
from penstock.store import conditions
from penstock.store.store import open_store
from penstock.testing import FakeClock

CHILD = Path(__file__).with_name("cas_child.py")


@pytest.fixture(params=["open", "connect"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    with penstock.open(tmp_path / "store") as owner:
        if request.param == "open":
            yield owner
        else:
            with penstock.connect(owner.path) as client:
                yield client


def lsn_of(table: Any, key: bytes) -> int:
    row = table.get_row(key)
    return 0 if row is None else int(row.lsn)


@pytest.mark.parametrize("shards", [1, 3])
def test_a_row_is_written_only_as_it_was_read(store: Any, shards: int) -> None:
    table = store.kv("t", shards=shards)
    assert table.get_row(b"k") is None
    table.put(b"k", b"1", if_absent=True)
    row = table.get_row(b"k")
    assert row == penstock.KvRow(b"1", row.lsn)
    assert row.lsn > 0
    with pytest.raises(ConditionFailed, match=rf"has LSN {row.lsn} and was expected to be absent") as failed:
        table.put(b"k", b"2", if_absent=True)
    assert (failed.value.key, failed.value.expected, failed.value.lsn) == (b"k", 0, row.lsn)
    table.put(b"k", b"2", if_lsn=row.lsn)
    assert table.get(b"k") == b"2"
    assert lsn_of(table, b"k") > row.lsn
    with pytest.raises(ConditionFailed):
        table.put(b"k", b"3", if_lsn=row.lsn)
    with pytest.raises(ConditionFailed):
        table.delete(b"k", if_lsn=row.lsn)
    table.delete(b"k", if_lsn=lsn_of(table, b"k"))
    assert table.get(b"k") is None
    with pytest.raises(ConditionFailed, match="is absent and was expected at LSN 1"):
        table.put(b"k", b"3", if_lsn=1)
    table.delete(b"k", if_lsn=0)  # absent, and stays so
    table.put(b"k", b"4", if_lsn=0)
    assert table.get(b"k") == b"4"


def test_every_kind_of_write_changes_the_lsn(store: Any) -> None:
    table = store.kv("t", value="int64")
    table.put(b"k", 1)
    lsns = [lsn_of(table, b"k")]
    for change in (
        lambda: table.put(b"k", 1),
        lambda: table.merge(b"k", 1, operator="add_i64"),
        lambda: table.put_many({b"k": 1}),
        lambda: table.put_many({b"%d" % i: i for i in range(100)} | {b"k": 1}),
        lambda: (table.delete_range(b"a", b"z"), table.put(b"k", 2)),
    ):
        change()
        lsns.append(lsn_of(table, b"k"))
        with pytest.raises(ConditionFailed) as failed:
            table.put(b"k", 9, if_lsn=lsns[-2])
        assert failed.value.lsn == lsns[-1]
    assert lsns == sorted(set(lsns))
    table.delete_range(b"a", b"z")
    table.put(b"k", 5, if_absent=True)


def test_own_writes_count_before_they_are_durable(store: Any) -> None:
    table = store.kv("t")
    table.put(b"k", b"1")
    with pytest.raises(ConditionFailed):
        table.put(b"k", b"2", if_absent=True)
    table.delete(b"k")
    table.put(b"k", b"3", if_absent=True)
    assert table.get(b"k") == b"3"


def test_the_lsn_of_a_row_among_many_is_exact(store: Any) -> None:
    """Rows of a large write share a memtable with later ones, and keep their own LSN."""
    table = store.kv("t")
    table.put_many({b"%04d" % i: b"v" for i in range(500)}, durable=True)
    first = lsn_of(table, b"0007")
    table.put_many({b"%04d" % i: b"w" for i in range(500, 1_000)}, durable=True)
    assert lsn_of(table, b"0007") == first < lsn_of(table, b"0700")
    table.put(b"0007", b"x", if_lsn=first)
    lsns = dict(zip(*(table.to_arrow().column(name).to_pylist() for name in ("key", "lsn")), strict=True))
    assert {key: lsn_of(table, key) for key in (b"0007", b"0008", b"0700")} == {
        key: lsns[key] for key in (b"0007", b"0008", b"0700")
    }


def test_rows_of_a_snapshot_have_their_lsns(store: Any) -> None:
    table = store.kv("t")
    table.put(b"k", b"1", durable=True)
    with store.snapshot() as snapshot:
        before = table.get_row(b"k")
        table.put(b"k", b"2", if_lsn=before.lsn)
        assert snapshot.kv("t").get_row(b"k") == before != table.get_row(b"k")
        assert snapshot.kv("t").get_row(b"none") is None


def test_stored_rows_keep_their_lsns(tmp_path: Path) -> None:
    with penstock.open(tmp_path) as store:
        table = store.kv("t")
        table.put_many({b"%04d" % i: b"v" for i in range(300)}, durable=True)
        table.put(b"k", b"1", durable=True)
        before = lsn_of(table, b"0007"), lsn_of(table, b"k")
        store.compact("t")
        assert (lsn_of(table, b"0007"), lsn_of(table, b"k")) == before
    with penstock.open(tmp_path) as store:
        table = store.kv("t")
        assert (lsn_of(table, b"0007"), lsn_of(table, b"k")) == before
        table.put(b"k", b"2", if_lsn=before[1])


def test_an_expired_row_is_absent(tmp_path: Path) -> None:
    clock = FakeClock()
    with open_store(str(tmp_path), clock=clock) as store:
        table = store.kv("t")
        table.put(b"k", b"1", ttl_s=10, if_absent=True)
        with pytest.raises(ConditionFailed):
            table.put(b"k", b"2", if_absent=True)
        clock.advance(11)
        table.put(b"k", b"2", if_absent=True)
        assert table.get(b"k") == b"2"


def test_a_batch_depends_on_all_its_rows(store: Any) -> None:
    table, other = store.kv("t", shards=2), store.kv("other")
    table.put_many({b"a": b"1", b"b": b"1"}, durable=True)
    lsns = {key: lsn_of(table, key) for key in (b"a", b"b")}
    with store.batch() as batch:
        batch.kv("t").put(b"a", b"2", if_lsn=lsns[b"a"])
        batch.kv("t").put(b"b", b"2", if_lsn=lsns[b"b"])
        batch.kv("t").put(b"c", b"2", if_absent=True)
        batch.kv("other").put(b"x", b"2")
    assert [table.get(key) for key in (b"a", b"b", b"c")] == [b"2"] * 3
    with pytest.raises(ConditionFailed) as failed, store.batch() as batch:
        batch.kv("other").put(b"x", b"3")
        batch.kv("t").put(b"a", b"3", if_lsn=lsn_of(table, b"a"))
        batch.kv("t").delete(b"b", if_lsn=lsns[b"b"])
    assert failed.value.key == b"b"
    assert failed.value.lsn == lsn_of(table, b"b")
    assert (table.get(b"a"), table.get(b"b"), other.get(b"x")) == (b"2", b"2", b"2"), "nothing of it was written"


def test_a_batch_can_depend_on_rows_and_messages(store: Any) -> None:
    table, queue = store.kv("t"), store.queue("q")
    queue.put(b"m", durable=True)
    consumer = queue.consumer("c")
    (message,) = consumer.get(1, 5.0)
    with pytest.raises(ConditionFailed), store.batch() as batch:
        batch.kv("t").put(b"k", b"1", if_lsn=7)
        consumer.ack(message, batch=batch)
    with store.batch() as batch:
        batch.kv("t").put(b"k", b"1", if_absent=True)
        consumer.ack(message, batch=batch)
    assert table.get(b"k") == b"1"
    assert consumer.lag == 0
    with pytest.raises(penstock.errors.LeaseLost), store.batch() as batch:
        batch.kv("t").put(b"k", b"2", if_lsn=lsn_of(table, b"k"))
        consumer.ack(message, batch=batch)
    assert table.get(b"k") == b"1"


def test_a_repeated_batch_is_a_duplicate_not_a_conflict(store: Any) -> None:
    table = store.kv("t")
    for attempt in range(3):
        with store.batch(token=("loader", 7)) as batch:
            batch.kv("t").put(b"k", b"1", if_absent=True)
        assert batch.duplicate is (attempt > 0)
    with pytest.raises(ConditionFailed), store.batch(token=("loader", 8)) as batch:
        batch.kv("t").put(b"k", b"2", if_absent=True)
    with store.batch(token=("loader", 8)) as batch:  # the refused one did not use the token
        batch.kv("t").put(b"k", b"2", if_lsn=lsn_of(table, b"k"))
    assert not batch.duplicate
    assert table.get(b"k") == b"2"
    with store.batch(token=("loader", 5_000)):
        pass
    with pytest.raises(TokenTooOld), store.batch(token=("loader", 8)) as batch:
        batch.kv("t").put(b"k", b"3", if_absent=True)


def test_wrong_conditions_are_refused(store: Any) -> None:
    table = store.kv("t")
    for wrong in (
        {"if_lsn": 1, "if_absent": True},
        {"if_lsn": -1},
        {"if_lsn": True},
        {"if_lsn": "1"},
        {"if_absent": 1},
    ):
        with pytest.raises(Invalid):
            table.put(b"k", b"v", **wrong)
        with pytest.raises(Invalid), store.batch() as batch:
            batch.kv("t").put(b"k", b"v", **wrong)
    assert table.get(b"k") is None
    with pytest.raises(Invalid):
        table.get_row("k")


def test_conditions_that_are_too_large_are_refused_before_they_are_sent(store: Any) -> None:
    table = store.kv("large")
    with pytest.raises(Invalid, match="split it"), store.batch() as batch:
        for number in range(70):
            batch.kv("large").put(b"%d" % number + bytes(60_000), b"", if_absent=True)
    table.put(b"after", b"1", if_absent=True)
    with store.batch() as batch:
        for number in range(60):
            batch.kv("large").put(b"%d" % number + bytes(60_000), b"", if_absent=True)
    assert len(table) == 61


def test_a_closed_store_judges_nothing(tmp_path: Path) -> None:
    store = penstock.open(tmp_path)
    table = store.kv("t")
    store.close()
    for act in (lambda: table.put(b"k", b"v", if_absent=True), lambda: table.get_row(b"k")):
        with pytest.raises(Closed):
            act()


def test_a_write_that_comes_after_the_judgement_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last look, under the coordinator's lock, finds a write that came between the judgement and the group."""
    with penstock.open(tmp_path) as store:
        table, judged = store.kv("t"), conditions._judge

        def judge_late(*arguments: Any) -> None:
            judged(*arguments)
            monkeypatch.setattr(conditions, "_judge", judged)
            table.put(b"k", b"another writer's")

        monkeypatch.setattr(conditions, "_judge", judge_late)
        with pytest.raises(ConditionFailed):
            table.put(b"k", b"mine", if_absent=True)
        assert table.get(b"k") == b"another writer's"


# -- many threads and processes


def checked(history: list[Any]) -> dict[str, int]:
    """Check each register's history; return how many sets of each were done."""
    done: dict[str, int] = {}
    for key in {entry[0] for entry in history}:
        mine = [entry[1:] for entry in history if entry[0] == key]
        values: dict[int, Any] = {0: None}
        for _, _, name, lsn, value, _ in mine:
            if name == "read" and lsn is not None:
                assert values.setdefault(lsn, value) == value, "one LSN names one value"
        operations = [
            Operation(begin, end, name, None, value)
            if name == "read"
            else Operation(begin, end, name, values[lsn], value, succeeded)
            for begin, end, name, lsn, value, succeeded in mine
        ]
        assert is_linearizable(operations), f"no order explains what happened to {key}"
        done[key] = sum(entry[2] == "cas" and entry[5] is True for entry in mine)
    return done


def test_32_threads_are_linearizable(tmp_path: Path) -> None:
    with penstock.open(tmp_path) as store:
        done = checked(cas_child.run(store, "owner", 32, 4))
        assert min(done.values()) > 1


def test_writes_that_are_under_way_must_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A seeded bug that the history shows: two writers replace the same row, because neither sees the other."""
    monkeypatch.setattr(conditions, "_touches", lambda *_: False)
    with penstock.open(tmp_path) as store, pytest.raises(AssertionError, match="no order explains"):
        for _ in range(10):
            checked(cas_child.run(store, "owner", 32, 2))
            store.kv("registers", value="utf8").clear()


def test_4_processes_and_the_owner_are_linearizable(tmp_path: Path) -> None:
    with penstock.open(tmp_path) as store:
        store.kv("registers", value="utf8")
        children = [
            subprocess.Popen(
                [sys.executable, str(CHILD), store.path, f"p{number}", "7", "4"], stdout=subprocess.PIPE, text=True
            )
            for number in range(4)
        ]
        history = cas_child.run(store, "owner", 4, 12)
        for child in children:
            out, _ = child.communicate(timeout=120)
            assert child.returncode == 0
            history += [tuple(entry) for entry in json.loads(out)]
        done = checked(history)
        assert min(done.values()) > 1
        assert len(history) == 2 * (4 * 12 + 4 * 7 * 4)


def test_increments_add_up(store: Any) -> None:
    """A counter by compare and set, under threads: every increment that was done counts once."""
    table, increments = store.kv("t", value="int64"), 6

    def work() -> None:
        for _ in range(increments):
            while True:
                row = table.get_row(b"n")
                try:
                    table.put(b"n", (row.value if row else 0) + 1, if_lsn=row.lsn if row else 0)
                    break
                except ConditionFailed:
                    pass

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert table.get(b"n") == 6 * increments


def read(begin: float, end: float, value: Any) -> Operation:
    return Operation(begin, end, "read", None, value)


def cas(begin: float, end: float, expected: Any, value: Any, done: bool | None = True) -> Operation:
    return Operation(begin, end, "cas", expected, value, done)


@pytest.mark.parametrize(
    ("history", "fine"),
    [
        ([cas(0, 1, None, "a"), read(2, 3, "a")], True),
        ([cas(0, 1, None, "a"), read(2, 3, None)], False),  # a stale read
        ([cas(0, 5, None, "a"), read(2, 3, None), read(3.5, 4, "a")], True),
        ([cas(0, 5, None, "a"), read(2, 3, "a"), read(3.5, 4, None)], False),  # it went back
        ([cas(0, 3, None, "a"), cas(1, 4, None, "b")], False),  # both had the same row
        ([cas(0, 3, None, "a"), cas(1, 4, None, "b", False)], True),
        ([cas(0, 1, None, "a"), cas(2, 3, "a", "b", False)], False),  # refused although the row was as expected
        ([cas(0, math.inf, None, "a", None), read(2, 3, None), read(9, 10, "a")], True),
        ([cas(0, math.inf, None, "a", None), read(2, 3, "a"), read(9, 10, None)], False),
    ],
)
def test_the_checker_finds_what_is_wrong(history: list[Operation], fine: bool) -> None:
    assert is_linearizable(history) is fine
