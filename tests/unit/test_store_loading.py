"""Bulk loads by hand: `store.load`, `store.prepare` and `batch.load`, in the owner and in a client."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import pickle
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest

import penstock
from penstock.errors import (
    Backpressure,
    ConditionFailed,
    DiskFull,
    Invalid,
    KindMismatch,
    NotFound,
    PenstockError,
    TokenTooOld,
)
from penstock.journal.partitions import partition_id
from penstock.kinds import PreparedRows
from penstock.kv import loading as kv_loading
from penstock.kv import section as kv_section
from penstock.lsm.writer import SstableWriter
from penstock.partition.reference import StagedFile
from penstock.queue import staged as queue_loading
from penstock.series import loading as series_loading
from penstock.store.loading import PreparedLoad
from penstock.store.settings import StoreSettings
from penstock.store.store import Store, open_store
from penstock.testing import FakeClock, History, SimulatedDisk, Violation, explore
from penstock.testing.manifest import MemoryEngine

ROWS = 30_000  # of 100 bytes: more than goes through the journal
T0 = 1_700_000_000_000_000
BOTH = ["owner", "client", "far client"]


def rows(count: int = ROWS, *, seed: int = 1, value: bytes = b"v") -> pa.Table:
    """Rows in no order."""
    numbers = list(range(count))
    random.Random(seed).shuffle(numbers)
    keys = [b"key-%08d" % number for number in numbers]
    return pa.table({"key": keys, "value": [value * 80 + b"%d" % number for number in numbers]})


def pairs(table: pa.Table) -> dict[bytes, bytes]:
    return dict(zip(table.column("key").to_pylist(), table.column("value").to_pylist(), strict=True))


@pytest.fixture(params=BOTH)
def store(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[penstock.Store | penstock.RemoteStore]:
    with penstock.open(tmp_path / "data") as owner:
        if request.param == "owner":
            yield owner
            return
        if request.param == "far client":  # one that does not see the folder
            monkeypatch.setattr("penstock.client.building.read_uuid", lambda fs, root: None)
        with penstock.connect(tmp_path / "data") as client:
            yield client


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("count", [0, 1, 500, ROWS])
def test_all_rows_are_there(store: Any, shards: int, count: int) -> None:
    table = store.kv("t", shards=shards)
    table.put(b"key-00000000", b"before")
    table.put(b"other", b"kept")
    loaded = rows(count)
    report = store.load("t", loaded)
    assert (report.rows, report.duplicate) == (count, False)
    expected = {b"key-00000000": b"before", b"other": b"kept", **pairs(loaded)}
    assert dict(table.scan()) == expected
    table.put(b"key-00000000", b"after", durable=True)
    assert table[b"key-00000000"] == b"after"


def test_a_load_is_one_moment(store: Any) -> None:
    store.kv("t", shards=2)
    store.load("t", rows(value=b"a"))
    with store.snapshot() as before:
        store.load("t", rows(value=b"b", seed=2))
        assert {value[:1] for _, value in before.kv("t").scan()} == {b"a"}
    assert {value[:1] for _, value in store.kv("t").scan()} == {b"b"}


def test_a_token_counts_once(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store.kv("t")
    assert store.load("t", rows(), token=("nightly", 5)).rows == ROWS
    store.kv("t").delete_range(b"", b"z", durable=True)
    monkeypatch.setattr(kv_loading.Loader, "run", _fail)  # a duplicate is known before any work
    again = store.load("t", rows(), token=("nightly", 5))
    assert (again.rows, again.duplicate) == (0, True)
    assert dict(store.kv("t").scan()) == {}
    monkeypatch.undo()
    store.load("t", rows(1), token=("nightly", 5_000))
    with pytest.raises(TokenTooOld):
        store.load("t", rows(1), token=("nightly", 6))


def test_several_tables_and_other_writes_in_one_batch(store: Any) -> None:
    store.kv("t"), store.kv("u", value="int64"), store.queue("q", shards=2), store.kv("state")
    numbers = pa.table({"key": [b"a", b"b"], "value": [1, 2]})
    messages = pa.table({"payload": [b"m%d" % number for number in range(1_000)]})
    with store.batch(token=("all", 1)) as batch:
        assert batch.load("t", rows()) == ROWS
        assert batch.load("t", rows(10, value=b"later")) == 10
        assert batch.load("u", numbers) == 2
        assert batch.load("q", messages) == 1_000
        batch.kv("state").put(b"loaded", b"1")
    assert not batch.duplicate
    assert len(dict(store.kv("t").scan())) == ROWS
    assert dict(store.kv("u").scan()) == {b"a": 1, b"b": 2}
    assert sorted(store.queue("q").to_arrow().column("payload").to_pylist()) == sorted(messages["payload"].to_pylist())
    assert store.kv("state")[b"loaded"] == b"1"


def test_a_failed_block_loads_nothing(store: Any) -> None:
    store.kv("t")
    with pytest.raises(ZeroDivisionError), store.batch() as batch:
        batch.load("t", rows())
        raise ZeroDivisionError
    assert dict(store.kv("t").scan()) == {}
    with pytest.raises(Invalid, match="ended"):
        batch.load("t", rows(1))


def test_what_several_processes_prepared_is_one_commit(store: Any, tmp_path: Path) -> None:
    store.kv("t", shards=2)
    with penstock.connect(tmp_path / "data") as worker:
        loads = [worker.prepare("t", rows(ROWS, value=b"%d" % number)) for number in range(2)]
    loads.append(store.prepare("t", pa.table({"key": [b"small"], "value": [b"1"]})))
    assert dict(store.kv("t").scan()) == {}
    loads = pickle.loads(pickle.dumps(loads))  # as to another process
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(loads), type=list[PreparedLoad]) == loads
    with store.batch() as batch:
        assert batch.load("t", loads) == 2 * ROWS + 1
    contents = dict(store.kv("t").scan())
    assert len(contents) == ROWS + 1
    assert contents[b"small"] == b"1"


def test_rows_that_are_deleted_and_merged(store: Any) -> None:
    table = store.kv("t", value="int64")
    table.put_many({b"a": 1, b"b": 2})
    change = pa.table({"key": [b"a", b"b", b"c"], "value": [5, None, 7], "op": ["add_i64", "delete", "put"]})
    store.load("t", change)
    assert dict(table.scan()) == {b"a": 6, b"c": 7}


@pytest.mark.parametrize("shards", [1, 2])
def test_a_later_row_of_a_key_counts_also_after_merges(store: Any, shards: int) -> None:
    table = store.kv("sums", value="int64", shards=shards)
    table.put_many(dict.fromkeys((b"put", b"deleted", b"merged", b"again"), 100))
    rows = [
        (b"put", 1, "add_i64"),
        (b"deleted", 1, "add_i64"),
        (b"merged", 5, "put"),
        (b"again", 1, "add_i64"),
        (b"put", 5, "put"),
        (b"deleted", None, "delete"),
        (b"merged", 1, "add_i64"),
        (b"again", 7, None),
        (b"again", 1, "add_i64"),
    ]
    keys, values, ops = zip(*rows, strict=True)
    batches = [
        pa.record_batch(
            {"key": keys[start:end], "value": pa.array(values[start:end], pa.int64()), "op": ops[start:end]}
        )
        for start, end in ((0, 6), (6, 9))
    ]
    store.load("sums", pa.Table.from_batches(batches))
    assert dict(table) == {b"put": 5, b"merged": 6, b"again": 8}


def test_the_last_row_of_a_key_counts(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_loading, "SORT_BYTES", 1 << 18)  # several sorted files that are merged at the end
    table = store.kv("t")
    twice = pa.concat_tables([rows(10_000, value=b"old"), rows(10_000, value=b"new", seed=2)])
    assert store.load("t", twice).rows == 20_000
    assert {value[:3] for _, value in table.scan()} == {b"new"}
    assert len(dict(table.scan())) == 10_000


def test_a_load_that_fails_leaves_no_file_and_no_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_loading, "WRITTEN_ROWS", 1_000)
    append, appended = SstableWriter.append, 0

    def fails(writer: Any, columns: Any) -> None:
        nonlocal appended
        appended += 1
        if appended == 3:
            raise OSError(errno.ENOSPC, "no room", "a file")
        append(writer, columns)

    monkeypatch.setattr(SstableWriter, "append", fails)
    with penstock.open(tmp_path) as store:
        table = store.kv("t")
        table.put(b"k", b"v", durable=True)
        before = {path for path in tmp_path.rglob("*") if path.is_file()}
        with pytest.raises(DiskFull) as failed:
            store.load("t", rows())
        links = {os.readlink(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd") if _is_open(number)}
        assert failed.value is not None  # its traceback keeps what a leak would leave
        left = {path for path in tmp_path.rglob("*") if path.is_file()} - before
        assert left == set()
        assert not [name for name in links if ".sst" in name]
        assert dict(table) == {b"k": b"v"}


def _is_open(number: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{number}")


def test_large_batches_are_cast_in_slices(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.arrow_input.SLICE_BYTES", 1_000)
    table = store.kv("t", shards=2)
    large = rows(999).cast(pa.schema({"key": pa.large_binary(), "value": pa.large_binary()}))
    assert store.load("t", large).rows == 999
    assert dict(table.scan()) == pairs(large)


def test_rows_of_other_libraries(store: Any) -> None:
    polars = pytest.importorskip("polars")
    table, text = store.kv("t"), store.kv("text", value="utf8")
    store.load("t", polars.DataFrame({"key": [b"a", b"b"], "value": [b"1", b"2"]}))
    store.load("text", polars.DataFrame({"key": [b"a"], "value": ["one"]}))
    assert (dict(table.scan()), dict(text.scan())) == ({b"a": b"1", b"b": b"2"}, {b"a": "one"})
    store.kv("copy")
    assert store.load("copy", table).rows == 2  # a table is a stream of rows, too
    assert store.load("copy", rows(2).to_batches()[0]).rows == 2
    assert len(dict(store.kv("copy").scan())) == 4
    reader = pa.RecordBatchReader.from_batches(rows(1).schema, iter(rows(5).to_batches(max_chunksize=2)))
    assert store.load("copy", reader).rows == 5


def table_of(**columns: Any) -> pa.Table:
    return pa.table(columns)


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ([(b"a", b"1")], Invalid, "takes an Arrow table or stream, or what prepare returned, not"),
        (None, Invalid, "takes an Arrow table or stream"),
        (pa.chunked_array([[1]]), Invalid, "takes an Arrow table or stream"),
        (table_of(key=[b"a"]), Invalid, "have the columns key and value"),
        (table_of(key=[b"a"], value=[b"1"], more=[1]), Invalid, "have the columns key and value"),
        (table_of(key=["a"], value=[b"1"]), Invalid, "column key is string, but the table holds binary: cast it"),
        (table_of(key=[b"a"], value=[1]), Invalid, "column value is int64, but the table holds binary: cast it"),
        (table_of(key=[b"a", None], value=[b"1", b"2"]), Invalid, "null"),
        (table_of(key=[b"a" * 70_000], value=[b"1"]), Invalid, "at most 65536"),
        (table_of(key=[b"a"], value=[b"1"], op=["add_f64"]), Invalid, "op is 'add_f64'"),
        ([PreparedLoad("t", 0, ()), 1], Invalid, "takes an Arrow table or stream"),
    ],
)
def test_wrong_rows_are_one_line_and_change_nothing(store: Any, source: Any, error: type, message: str) -> None:
    store.kv("t")
    with pytest.raises(error, match=message) as raised, store.batch() as batch:
        batch.load("t", source)
    assert "\n" not in str(raised.value)
    assert dict(store.kv("t").scan()) == {}


def test_wrong_use(store: Any) -> None:
    store.kv("t"), store.kv("other"), store.kv("small", value="int64")
    numbers = pa.table({"key": [b"a"], "value": [1]})
    with pytest.raises(NotFound, match="nowhere"):
        store.load("nowhere", rows(1))
    with pytest.raises(Invalid, match="lease_s"):
        store.prepare("t", rows(1), lease_s=0)
    with pytest.raises(Invalid, match="prepared for table t were given for other"), store.batch() as batch:
        batch.load("other", store.prepare("t", rows(1)))
    with pytest.raises(Invalid, match="and also writes to it"), store.batch() as batch:
        batch.load("t", rows(1))
        batch.kv("t").put(b"a", b"1")
    with pytest.raises(Invalid, match="column value is double"):
        store.load("small", pa.table({"key": [b"a"], "value": pa.array([1.5])}))
    store.kv("floats", value="float64")
    with pytest.raises(Invalid, match="the rows do not fit the types of the table"):
        store.load("floats", pa.table({"key": [b"a"], "value": pa.array([(1 << 53) + 1])}))
    forged = PreparedLoad("t", 1, (PreparedRows(store.prepare("t", rows(1)).parts[0].partition, b"no section"),))
    with pytest.raises(PenstockError), store.batch() as batch:
        batch.load("t", forged)
    section = kv_section.encode(kv_section.Rows.of({b"a": b"123"}))  # it decodes, and no reader could read the value
    forged = PreparedLoad("small", 1, (PreparedRows(store.prepare("small", numbers).parts[0].partition, section),))
    with pytest.raises(Invalid, match="8 bytes"), store.batch() as batch:
        batch.load("small", forged)
    assert dict(store.kv("small").scan()) == {}
    with pytest.raises(KindMismatch):
        store.kv("small", value="utf8")
    assert dict(store.kv("t").scan()) == {}


def test_rows_that_were_prepared_for_another_store_are_refused(tmp_path: Path) -> None:
    """Its table has the same number and name, and holds text: the bytes of an integer would have become one."""
    with penstock.open(tmp_path / "a") as first, penstock.open(tmp_path / "b") as second:
        first.kv("t", value="int64")
        second.kv("t", value="utf8")
        prepared = first.prepare("t", pa.table({"key": [b"a"], "value": [7]}))
        with penstock.connect(tmp_path / "b") as client:
            for other in (second, client):
                with pytest.raises(Invalid, match="prepared for another store: .*this one"), other.batch() as batch:
                    batch.load("t", prepared)
        assert len(second.kv("t")) == 0
        with penstock.connect(tmp_path / "a") as client, client.batch() as batch:
            batch.load("t", prepared)
        assert dict(first.kv("t", value="int64")) == {b"a": 7}


def test_rows_that_were_prepared_for_the_original_of_a_restored_store_are_refused(tmp_path: Path) -> None:
    """The files of both have one identity; tables that were created since have the same numbers and other types."""
    with penstock.open(tmp_path / "a") as original:
        original.backup(tmp_path / "backups")
        penstock.restore(tmp_path / "backups", tmp_path / "b")
        original.kv("t", value="int64")
        prepared = original.prepare("t", pa.table({"key": [b"a"], "value": [7]}))
        with penstock.open(tmp_path / "b") as copy, penstock.connect(tmp_path / "b") as client:
            copy.kv("other", value="float64")
            for store in (copy, client):
                with pytest.raises(Invalid, match="prepared for another store"), store.batch() as batch:
                    batch.load("other", prepared)
                store.load("other", pa.table({"key": [b"a"], "value": [7.5]}))
            assert dict(copy.kv("other", value="float64")) == {b"a": 7.5}


def test_an_error_of_the_rows_themselves_is_the_callers_own(store: Any) -> None:
    store.kv("t")

    def broken() -> Iterator[pa.RecordBatch]:
        yield from rows(10).to_batches()
        raise FileNotFoundError("the caller's file")

    with pytest.raises(OSError, match="the caller's file") as raised:
        store.load("t", pa.RecordBatchReader.from_batches(rows(1).schema, broken()))
    assert not isinstance(raised.value, PenstockError)
    assert dict(store.kv("t").scan()) == {}


# -- on a simulated disk: what a crash leaves


def open_here(disk: SimulatedDisk, clock: FakeClock) -> Store:
    settings = StoreSettings(background=False, reserve_bytes=4096)
    return open_store("/s", fs=disk, clock=clock, random=random.Random(1), engine=MemoryEngine, settings=settings)


class LoadScenario:
    """Two tables are loaded under one token; then again, as whoever does not know the outcome does."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.rows = rows(40)

    def run(self, disk: SimulatedDisk, history: History) -> None:
        store = open_here(disk, self.clock)
        store.kv("t", shards=2)
        store.kv("u")
        store.flush()
        history.note("made")
        self.load(store, history)
        store.close()

    def load(self, store: Store, history: History) -> None:
        with store.batch(token=("load", 1)) as batch:
            batch.load("t", self.rows)
            batch.load("u", self.rows.slice(0, 5))
        history.note("loaded")

    def resume(self, disk: SimulatedDisk, history: History) -> None:
        store = open_here(disk, self.clock)
        contents = [dict(store.kv(name).scan()) for name in ("t", "u") if name in store.tables()]
        everything = [pairs(self.rows), pairs(self.rows.slice(0, 5))]
        if contents != everything and (("loaded",) in history.events or any(contents)):
            raise Violation(f"{[len(some) for some in contents]} rows of a load are there")
        if ("made",) in history.events:
            self.load(store, history)
            if [dict(store.kv(name).scan()) for name in ("t", "u")] != everything:
                raise Violation("a load that was done again is not there")
        store.close()


@pytest.mark.parametrize("inline_bytes", [0, 1 << 20], ids=["as files", "as sections"])
def test_a_crash_anywhere_leaves_all_of_a_load_or_nothing(
    inline_bytes: int, monkeypatch: pytest.MonkeyPatch, quiet: None
) -> None:
    monkeypatch.setattr(kv_loading, "INLINE_BYTES_MAX", inline_bytes)
    report = explore(LoadScenario(), modes=("strict", "torn"), depth=1, faults=None)
    assert report.crashes > 40  # distinct states: 43 as sections


def test_what_is_never_committed_goes_when_its_lease_ends() -> None:
    disk, clock = SimulatedDisk(), FakeClock()
    store = open_here(disk, clock)
    store.kv("t")
    table = store._info("t").table_id
    prepared = store.prepare("t", rows(20_000), lease_s=60.0)
    store.flush()
    disk = disk.image().restore("restart")
    store = open_here(disk, clock)
    assert dict(store.kv("t").scan()) == {}
    with store.batch() as batch:
        batch.load("t", prepared)  # its process may have died: another one commits
    assert len(dict(store.kv("t").scan())) == prepared.rows == 20_000
    store.prepare("t", rows(20_000), lease_s=60.0)
    late = store.prepare("t", rows(20_000), lease_s=60.0)
    clock.advance(61)
    assert store._staging.purge([table]) == 2
    with pytest.raises(Invalid, match="not staged"), store.batch() as batch:
        batch.load("t", late)


def test_a_full_disk_is_told_and_nothing_is_loaded() -> None:
    disk, clock = SimulatedDisk(), FakeClock()
    store = open_here(disk, clock)
    store.kv("t")
    disk.capacity_bytes = disk._used_bytes() + (1 << 20)
    with pytest.raises(DiskFull):
        store.load("t", rows())
    assert dict(store.kv("t").scan()) == {}


def _fail(*_: object) -> None:
    raise AssertionError("no file may be built")


PREPARED: dict[str, tuple[Callable[[Any], object], pa.Table]] = {
    "kv": (lambda store: store.kv("t"), pa.table({"key": [b"a", b"b"], "value": [b"1", b"2"]})),
    "queue": (lambda store: store.queue("t"), pa.table({"payload": [b"a", b"b"]})),
    "series": (
        lambda store: store.series("t"),
        pa.table({"metric": ["m", "m"], "time": [T0, T0 + 1], "value": [1.0, 2.0]}),
    ),
}


@pytest.fixture(params=PREPARED)
def prepared(request: pytest.FixtureRequest, store: Any, monkeypatch: pytest.MonkeyPatch) -> PreparedLoad:
    """Two rows for the table `t`, in a file."""
    for module in (kv_loading, queue_loading, series_loading):
        monkeypatch.setattr(module, "INLINE_BYTES_MAX", -1)
    make, loaded = PREPARED[request.param]
    make(store)
    return store.prepare("t", loaded)  # type: ignore[no-any-return]


def test_prepared_rows_are_committed_once(store: Any, prepared: PreparedLoad) -> None:
    """A queue deletes such a file when it has stored the rows: a second record would name what is gone."""
    assert all(part.file is not None for part in prepared.parts)
    with pytest.raises(ConditionFailed), store.batch() as batch:
        batch.load("t", prepared)
        batch.kv(store.kv("state").name).put(b"k", b"v", if_lsn=999)
    with store.batch() as batch:  # nothing was written before
        assert batch.load("t", prepared) == 2
    for token in (None, ("loader", 1)):
        with (
            pytest.raises(Invalid, match=r"prepare them again|not staged \(any more\)"),
            store.batch(token=token) as batch,
        ):
            batch.load("t", prepared)
    assert store.table("t").to_arrow().num_rows == 2


def test_prepared_rows_that_are_repeated_with_their_token(store: Any, prepared: PreparedLoad) -> None:
    for duplicate in (False, True):
        with store.batch(token=("loader", 1)) as batch:
            batch.load("t", prepared)
        assert batch.duplicate is duplicate
    assert store.table("t").to_arrow().num_rows == 2


def test_prepared_rows_that_many_commit_at_once(store: Any, prepared: PreparedLoad) -> None:
    def commit() -> bool:
        try:
            with store.batch() as batch:
                batch.load("t", prepared)
        except Invalid:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(lambda _: commit(), range(8))) == 1
    assert store.table("t").to_arrow().num_rows == 2
    assert store.tables()


@pytest.mark.parametrize("kind", PREPARED)
def test_committed_rows_are_not_committed_again_after_a_crash(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (kv_loading, queue_loading, series_loading):
        monkeypatch.setattr(module, "INLINE_BYTES_MAX", -1)
    disk, clock = SimulatedDisk(), FakeClock()
    make, loaded = PREPARED[kind]
    store = open_here(disk, clock)
    make(store)
    prepared = store.prepare("t", loaded)
    with store.batch() as batch:
        batch.load("t", prepared)
    store = open_here(disk.image().restore("strict"), clock)
    with pytest.raises(Invalid, match=r"prepare them again|not staged \(any more\)"), store.batch() as batch:
        batch.load("t", prepared)
    store.checkpoint()
    assert store.table("t").to_arrow().num_rows == 2
    assert store.troubles() == []
    store.close()


def test_a_write_of_a_staged_file_that_hangs_deletes_nothing_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client sends the file again and commits it: the first request must not begin the file anew."""
    disk, clock = SimulatedDisk(), FakeClock()
    store = open_here(disk, clock)
    store.queue("t")
    partition = partition_id(store._info("t").table_id, 0)
    (staged,) = store.stage("t")
    with io.BytesIO() as out:
        with pa.ipc.new_file(out, queue_loading.STAGED_SCHEMA) as writer:
            time = pa.array([T0], queue_loading.STAGED_SCHEMA.field("time").type)
            writer.write_table(pa.table([[b"m"], pa.nulls(1, pa.binary()), time], schema=queue_loading.STAGED_SCHEMA))
        data = out.getvalue()
    file = StagedFile(staged.chunk_id, staged.file_name, len(data), hashlib.sha256(data).digest())
    path, hangs, goes_on = f"/s/{staged.file_name}", threading.Event(), threading.Event()
    exists = disk.exists

    def slow(name: str) -> bool:
        if name == path and threading.current_thread() is hanging:
            hangs.set()
            assert goes_on.wait(30)
        return exists(name)

    def send() -> None:
        store._port.write_staged(partition, staged.chunk_id, staged.file_name, 0, data)

    def commit() -> None:
        with store.batch() as batch:
            batch.adopt("t", [file])

    monkeypatch.setattr(disk, "exists", slow)
    hanging = threading.Thread(target=send)
    hanging.start()
    assert hangs.wait(30)
    for act in (send, commit):
        with pytest.raises(Backpressure, match="still writing"):
            act()
    goes_on.set()
    hanging.join()
    send()
    commit()
    with pytest.raises(Invalid, match="not staged"):
        send()
    assert [message.payload for message in store.queue("t").read()] == [b"m"]
    store.close()
