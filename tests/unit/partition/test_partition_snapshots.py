"""Partition snapshots: a damaged table of any kind is repaired with all that was written since, whatever happens."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from store_model import open_simulated

import penstock
from penstock.errors import Closed, CorruptionError, Invalid, PartitionPaused, RetryLater, UnsupportedVersion
from penstock.journal.partitions import PartitionId, partition_id
from penstock.partition import checkpoint, snapshots
from penstock.partition.snapshot_folder import SnapshotFolder, decode_header, encode_header
from penstock.store.store import Store
from penstock.testing import FakeClock, SimulatedDisk

QUIET = penstock.StoreSettings(background=False, serve=False)
KINDS = ("kv", "feed", "queue", "series", "vector")


def table_of(store: Any, kind: str) -> Any:
    if kind == "kv":
        return store.kv("t", shards=2)
    if kind == "feed":
        return store.kv("t", changes=True)
    if kind == "queue":
        return store.queue("t", shards=2)
    return store.series("t") if kind == "series" else store.vector("t", dimensions=2)


def write(store: Any, kind: str, start: int, end: int) -> None:
    table = table_of(store, kind)
    for number in range(start, end):
        if kind in ("kv", "feed"):
            table.put(b"%d" % number, bytes(50), durable=True)
        elif kind == "queue":
            table.put(b"%d" % number, key=b"%d" % number, durable=True)
        elif kind == "series":
            table.write("cpu", float(number), time=number, durable=True)
        else:
            table.upsert([f"{number}"], np.array([[1.0, number]], np.float32), durable=True)


def content(store: Any, kind: str) -> list[Any]:
    table = table_of(store, kind)
    if kind == "feed":
        return [pa.table(table.to_arrow()).to_pylist(), table.changes().to_arrow().to_pylist()]
    if kind == "series":
        return table.select("cpu").to_pylist()  # type: ignore[no-any-return]
    return pa.table(table.to_arrow()).to_pylist()  # type: ignore[no-any-return]


def damage(root: Path) -> int:
    """Overwrite the middle of every data file of the first table's shards."""
    count = 0
    for folder in sorted((root / "tables").iterdir()):
        for path in sorted(folder.rglob("*")):
            shard = path.relative_to(folder).parts[0]
            if shard.isdigit() and path.suffix in (".sst", ".idx", ".data") and int(folder.name) > 1:
                data = bytearray(path.read_bytes())
                size = 512 if path.suffix == ".data" else len(data)  # a queue's file is longer than what is in it
                data[size // 4 : size // 2] = b"\xff" * (size // 2 - size // 4)
                path.write_bytes(data)
                count += 1
    return count


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reopens", [False, True])
def test_a_damaged_table_is_repaired_with_all_that_came_since(kind: str, reopens: bool, tmp_path: Path) -> None:
    root = tmp_path / "store"
    with penstock.open(root) as store:
        write(store, kind, 0, 10)
        assert min(store.keep_snapshot("t")) > 0
        write(store, kind, 10, 20)
        store.checkpoint()
        write(store, kind, 20, 30)
        expected = content(store, kind)
        if not reopens:
            assert damage(root)
            with penstock.connect(root) as client:
                assert client.repair("t") == []
                assert content(client, kind) == expected
                assert min(client.keep_snapshot("t")) > 0
            assert content(store, kind) == expected
            write(store, kind, 30, 31)
    if reopens:
        assert damage(root)
    with penstock.open(root) as store:
        if reopens:
            assert store.repair("t") == []
            assert content(store, kind) == expected
        write(store, kind, 40, 41)
        expected = content(store, kind)
    with penstock.open(root) as store:
        assert content(store, kind) == expected


def test_without_a_snapshot_it_says_what_to_do(tmp_path: Path) -> None:
    with penstock.open(tmp_path) as store:
        store.kv("t").put(b"a", b"1", durable=True)
        with pytest.raises(Invalid, match="has no snapshot: restore the store from a backup"):
            store.repair("t")
        store.keep_snapshot("t")
        store.drop_snapshot("t")
        with pytest.raises(Invalid, match="has no snapshot"):
            store.repair("t")
        store.keep_snapshot("t")
        store.drop("t")
        store.kv("t").put(b"b", b"2", durable=True)
        with pytest.raises(Invalid, match="has no snapshot"):
            store.repair("t")
    with penstock.open(tmp_path) as store:
        assert dict(store.kv("t").scan()) == {b"b": b"2"}
        store._tasks.remove_dropped()
    assert not list(tmp_path.glob("tables/*/*-snapshot"))


def test_repairs_beside_writers_and_readers_lose_nothing(tmp_path: Path) -> None:
    with penstock.open(tmp_path) as store:
        table, queue, ended, written = store.kv("t"), store.queue("q"), threading.Event(), list[int]()
        table.put(b"first", b"", durable=True)
        queue.put(b"first", durable=True)
        for name in ("t", "q"):
            store.keep_snapshot(name)
        strange: list[Exception] = []

        def work() -> None:
            number = 0
            while not ended.is_set():
                number += 1
                try:
                    with store.batch(token=("w", number)) as batch:
                        batch.kv("t").put(b"%d" % number, b"")
                        batch.queue("q").put(b"%d" % number)
                    written.append(number)
                    len(list(table.scan()))
                except (PartitionPaused, RetryLater, Closed):  # while it is closed; a later batch may succeed
                    continue
                except Exception as error:
                    strange.append(error)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        for _ in range(5):
            for name in ("t", "q"):
                assert store.repair(name) == []
                store.keep_snapshot(name)
        ended.set()
        thread.join(30)
        assert strange == []
        keys = {int(key) for key, _ in table.scan() if key != b"first"}
        messages = [int(text) for text in queue.to_arrow().column("payload").to_pylist() if text != b"first"]
        assert set(written) <= keys
        assert messages == sorted(keys)


def test_a_table_loaded_after_its_snapshot_is_not_made_worse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.kv.loading.INLINE_BYTES_MAX", 0)
    with penstock.open(tmp_path) as store:
        table = store.kv("t")
        table.put(b"a", b"1", durable=True)
        store.keep_snapshot("t")
        store.load("t", pa.table({"key": [b"b"], "value": [b"2"]}))
        with pytest.raises(Invalid, match="was loaded from files after its snapshot"):
            store.repair("t")
        assert dict(table.scan()) == {b"a": b"1", b"b": b"2"}
        store._consensus.roll()
        store.checkpoint()  # takes another snapshot
        assert store.repair("t") == []
        assert dict(table.scan()) == {b"a": b"1", b"b": b"2"}


# -- on a simulated disk


def fill(store: Store, start: int, end: int, name: str = "t") -> None:
    for number in range(start, end):
        store.kv(name).put(b"%d" % number, bytes(200), durable=True)


def number_of(store: Store, name: str = "t") -> PartitionId:
    info = store._ledger.table(name)
    assert info is not None
    return partition_id(info.table_id, 0)


def numbers_of(store: Store, name: str = "t") -> list[PartitionId]:
    info = store._ledger.table(name)
    assert info is not None
    return [partition_id(info.table_id, shard) for shard in range(info.shards)]


def saved(store: Store, name: str = "t") -> SnapshotFolder:
    descriptor = store._dispatcher.describe(number_of(store, name))
    row = store._snapshots.row_of(descriptor)
    assert row is not None
    return store._snapshots._saved(descriptor, row.stored_lsn)


def test_the_header_says_where_it_was_taken() -> None:
    with open_simulated(SimulatedDisk()) as store:
        fill(store, 0, 3)
        fill(store, 0, 5, "other")
        (lsn,) = store.keep_snapshot("t")
        header = saved(store).header()
        assert header is not None
        assert (header.lsn, header.partition_index) == (lsn, lsn)
        assert header.index == store.statistics().applied_lsn > header.lsn
        assert header.term == store._consensus.incarnation
        assert decode_header(encode_header(header), "x") == header


def test_the_log_keeps_what_came_since_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    disk, clock = SimulatedDisk(), FakeClock()
    with open_simulated(disk, clock) as store:
        fill(store, 0, 10)
        store.keep_snapshot("t")
        fill(store, 10, 60)
        store.compact("t")
        report = store.checkpoint()
        assert report.segments_dropped > 0, "the log covers what the journal drops"
        partition = store._dispatcher.partition(number_of(store))
        assert len(list(partition.spill.entries(0))) > 10
        monkeypatch.setattr(snapshots, "LOG_BYTES_MIN", 0)  # the log is longer than the snapshot: a new one
        fill(store, 60, 90)
        before = partition.spill.floor
        store.checkpoint()
        assert partition.spill.floor is not None
        assert before is not None
        assert partition.spill.floor > before
        store.checkpoint()
        assert list(partition.spill.entries(partition.spill.floor)) == []
        expected = dict(store.kv("t").scan())
        store.repair("t")
        assert dict(store.kv("t").scan()) == expected
    with open_simulated(disk.image().restore("strict"), clock) as store:
        assert dict(store.kv("t").scan()) == expected


def test_a_log_that_lost_its_end_is_noticed() -> None:
    disk, clock = SimulatedDisk(), FakeClock()
    with open_simulated(disk, clock) as store:
        fill(store, 0, 10)
        store.keep_snapshot("t")
        fill(store, 10, 60)
        store.compact("t")
        store.checkpoint()
        folder = f"/store/{store._dispatcher.describe(number_of(store)).folder}-log"
    for name in disk.listdir(folder):
        disk.unlink(f"{folder}/{name}")
    disk.rmdir(folder)
    with open_simulated(disk, clock) as store, pytest.raises(CorruptionError, match="what was spilled here ends at"):
        store.kv("t").get(b"1")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"store": bytes(16)}, "another store, table or shard"),
        ({"partition": 9 << 17}, "another store, table or shard"),
        ({"kind": "queue"}, "another store, table or shard"),
        ({"index": 1 << 40}, "of another history"),
        ({"term": 99}, "of another history"),
        ({"lsn": 1, "index": 2}, "of another history|are deleted: take a newer one"),
    ],
)
def test_a_snapshot_that_does_not_fit_changes_nothing(change: dict[str, Any], message: str) -> None:
    disk = SimulatedDisk()
    with open_simulated(disk) as store:
        fill(store, 0, 40)
        store.compact("t")
        store.checkpoint()
        store.keep_snapshot("t")
        header = saved(store).header()
        assert header is not None
        source = SnapshotFolder(disk, "/elsewhere")
        source.receive(saved(store))
        source.seal(msgspec.structs.replace(header, **change))
        with pytest.raises(Invalid, match=message):
            store._snapshots.install(number_of(store), source)
        assert len(dict(store.kv("t").scan())) == 40


def test_damaged_snapshots_are_refused_before_anything_changes() -> None:
    disk = SimulatedDisk()
    with open_simulated(disk) as store:
        fill(store, 0, 20)
        store.keep_snapshot("t")
        folder = saved(store)
        header = folder.header()
        assert header is not None
        file = disk.open(f"{folder.path}/{header.files[0].name}", write=True)
        file.pwrite(b"\xff" * 16, header.files[0].size // 2)
        file.close()
        with pytest.raises(CorruptionError, match="not the one in the snapshot"):
            store.repair("t")
        assert len(dict(store.kv("t").scan())) == 20
        data = encode_header(header)
        for at in range(0, len(data), 7):
            with pytest.raises((CorruptionError, UnsupportedVersion)):
                decode_header(data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :], "x")
            with pytest.raises(CorruptionError):
                decode_header(data[:at], "x")


@pytest.mark.parametrize("then", ["keep_snapshot", "drop_snapshot"])
def test_a_repair_that_was_refused_is_not_finished_later(
    then: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its copy is older than what the table's log keeps from then on: an opening that installed it would lose rows."""

    def refuse(*_: object) -> None:
        raise PartitionPaused("the files of this table do not answer")

    root = tmp_path / "store"
    with penstock.open(root) as store:
        write(store, "kv", 0, 10)
        store.keep_snapshot("t")
        write(store, "kv", 10, 20)
        with monkeypatch.context() as patch:
            patch.setattr(store._dispatcher, "replace", refuse)
            with pytest.raises(PartitionPaused):
                store.repair("t")
        getattr(store, then)("t")
        store._checkpoint.clear()
        expected = content(store, "kv")
    with penstock.open(root) as store:
        assert content(store, "kv") == expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("renews", ["keep_snapshot", "checkpoint"])
def test_a_damaged_file_never_replaces_a_good_copy(
    kind: str, renews: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "store"
    with penstock.open(root, settings=QUIET) as store:
        write(store, kind, 0, 10)
        before = store.keep_snapshot("t")
        write(store, kind, 10, 20)
        expected = content(store, kind)
        store._checkpoint.clear()  # everything is in files, and the log has it, too
        assert damage(root)
        write(store, kind, 20, 21)
        if renews == "checkpoint":
            monkeypatch.setattr(snapshots, "LOG_BYTES_MIN", -1)
            monkeypatch.setattr(snapshots.PartitionSnapshots, "log_bytes_max", lambda *_: -1)
            store._consensus.roll()
            store.checkpoint()  # other tables must not suffer
        else:
            with pytest.raises(CorruptionError):
                store.keep_snapshot("t")
        assert [store._dispatcher.partition(number).spill.floor for number in numbers_of(store)] == before
        assert store.repair("t") == []
        write(store, kind, 21, 22)
        rows = content(store, kind)
        assert len(rows) >= len(expected)
        assert store.keep_snapshot("t") != before, "a repaired table has a new snapshot"
        assert content(store, kind) == rows


def test_a_checkpoint_does_not_wait_without_end_for_a_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs, goes_on, ended = threading.Event(), threading.Event(), list[bool]()
    save = snapshots.PartitionSnapshots.save

    def hanging(self: snapshots.PartitionSnapshots, partition: Any) -> Any:
        hangs.set()
        ended.append(goes_on.wait(20))
        return save(self, partition)

    with penstock.open(tmp_path / "store") as store:
        write(store, "kv", 0, 10)
        store.keep_snapshot("t")
        write(store, "kv", 10, 20)
        store._consensus.roll()
        monkeypatch.setattr(snapshots.PartitionSnapshots, "log_bytes_max", lambda *_: -1)
        monkeypatch.setattr(snapshots.PartitionSnapshots, "save", hanging)
        monkeypatch.setattr(checkpoint, "STORE_WAIT_S", 0.05)
        try:
            assert store.checkpoint().segments_dropped == 0, "the journal keeps what the log does not have"
            assert hangs.is_set()
            assert not ended, "it returned while the snapshot was being taken"
        finally:
            goes_on.set()
        expected = content(store, "kv")
    with penstock.open(tmp_path / "store") as store:
        assert content(store, "kv") == expected
