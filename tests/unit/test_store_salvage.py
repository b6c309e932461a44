"""Salvage: what can be read of a damaged store is copied, nothing else is, and the rest is in the report."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from backup_kill_child import make_tables, write_round

import penstock
from penstock.errors import Closed, CorruptionError, DiskFull, Invalid, NotFound, PartitionPaused, StoreLocked
from penstock.host.clock import SystemClock
from penstock.queue.kind import QueueKind
from penstock.store import salvage
from penstock.store.snapshot_port import SnapshotPort

ROUNDS = 40


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of all kinds, partly in files, partly in the journal, with a copy of its manifest."""
    path = tmp_path_factory.mktemp("sound") / "store"
    with penstock.open(path) as store:
        make_tables(store)
        for number in range(ROUNDS):
            write_round(store, number)
            if number in (10, 25):
                for name in ("users", "metrics", "docs"):
                    store.compact(name)
                store._maintenance.flush(store._ledger.tree)  # it knows the tables
                store._manifest.backup()
    return path


def contents(path: Path) -> dict[str, set[Any]]:
    with penstock.open(path) as store, store.snapshot() as snapshot:
        tables: dict[str, set[Any]] = {}
        if "users" in snapshot.tables():
            tables["users"] = {(key, value) for key, value in snapshot.kv("users").scan() if key != b"round"}
        if "events" in snapshot.tables():
            events = snapshot.queue("events").to_arrow()
            tables["events"] = set(zip(events["key"].to_pylist(), events["payload"].to_pylist(), strict=True))
        if "metrics" in snapshot.tables():
            samples = snapshot.series("metrics").select("rounds")
            tables["metrics"] = set(zip(samples["time"].to_pylist(), samples["value"].to_pylist(), strict=True))
        if "docs" in snapshot.tables():
            docs = snapshot.vector("docs").to_arrow()
            tables["docs"] = set(zip(docs["id"].to_pylist(), map(tuple, docs["vector"].to_pylist()), strict=True))
        return tables


@pytest.fixture(scope="module")
def written(original: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[Any]]:
    copy = tmp_path_factory.mktemp("written") / "store"
    shutil.copytree(original, copy)
    tables = contents(copy)
    assert {name: len(rows) for name, rows in tables.items()} == dict.fromkeys(
        ("users", "events", "metrics", "docs"), ROUNDS
    )
    return tables


def test_a_sound_store_is_copied_whole(original: Path, written: dict[str, set[Any]], tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in original.rglob("*") if path.is_file()}
    report = penstock.salvage(original, tmp_path / "rescued")
    assert (report.lost, report.damage) == ([], [])
    assert {path: path.read_bytes() for path in original.rglob("*") if path.is_file()} == before
    assert contents(tmp_path / "rescued") == written


FILES = (
    "STORE",
    "manifest",
    "journal/*.log",
    "tables/1/*/*.sst",  # the ledger's
    "tables/1/*/*.idx",
    "tables/2/*/*.sst",
    "tables/4/*/*.idx",
    "tables/*/*/*/*/*/*.data",
    "tables/*/*/manifest.*",
)


@pytest.mark.parametrize("how", ["flip", "cut", "lose"])
@pytest.mark.parametrize("pattern", FILES)
def test_a_damaged_file(original: Path, written: dict[str, set[Any]], tmp_path: Path, pattern: str, how: str) -> None:
    """One damaged file of each sort: only rows that were written are copied, and all of them if nothing is lost."""
    copy = tmp_path / "store"
    shutil.copytree(original, copy)
    path = sorted(copy.glob(pattern))[0]
    content = bytearray(path.read_bytes())
    if how == "lose":
        path.unlink()
    elif how == "cut":
        path.write_bytes(content[: len(content) // 2])
    else:
        content[len(content) * 2 // 3 if path.name != "manifest" else 100] ^= 1
        path.write_bytes(content)
    report = penstock.salvage(copy, tmp_path / "rescued")
    tables = contents(tmp_path / "rescued")
    for name, rows in tables.items():
        assert rows <= written[name], name
        assert report.rows[name] >= len(rows)
    if not report.lost:
        assert tables == written
    if pattern not in ("STORE", "manifest"):
        assert sum(map(len, tables.values())) >= ROUNDS  # the rest is in other files


def test_without_a_manifest_nothing_can_be_salvaged(original: Path, tmp_path: Path) -> None:
    copy = tmp_path / "store"
    shutil.copytree(original, copy)
    for path in copy.glob("manifest*"):
        path.unlink()
    with pytest.raises(CorruptionError, match="neither it nor a copy of it can be read"):
        penstock.salvage(copy, tmp_path / "rescued")


def test_wrong_arguments(original: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="there is no store"):
        penstock.salvage(tmp_path / "nothing", tmp_path / "rescued")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter").write_text("dear")
    with pytest.raises(Invalid, match="is not empty"):
        penstock.salvage(original, tmp_path / "full")
    with penstock.open(tmp_path / "store"), pytest.raises(StoreLocked):
        penstock.salvage(tmp_path / "store", tmp_path / "another")
    assert not (tmp_path / "another").exists()
    penstock.salvage(tmp_path / "store", tmp_path / "another")  # it can be tried again


def test_an_interrupt_ends_it(original: Path, tmp_path: Path) -> None:
    """It is not taken for damage: no report tells of rows that were never tried."""
    calls: list[int] = []

    def stop() -> bool:
        calls.append(1)
        return len(calls) > 2

    with pytest.raises(Closed, match="the salvage was interrupted"):
        salvage.salvage_store(
            str(original),
            lambda: penstock.open(tmp_path / "rescued"),
            clock=SystemClock(),
            random=random.Random(1),
            stop=stop,
        )
    assert len(calls) == 3


def test_errors_of_the_new_store_are_not_damage(
    original: Path, written: dict[str, set[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = penstock.Store.load

    def fail(self: penstock.Store, name: str, rows: Any, **options: Any) -> Any:
        if name == "metrics":
            raise error
        return load(self, name, rows, **options)

    monkeypatch.setattr(penstock.Store, "load", fail)
    error: Exception = DiskFull("the disk is full")
    with pytest.raises(DiskFull):
        penstock.salvage(original, tmp_path / "full")
    error = Invalid("a label is too long")  # rows that a newer rule refuses: the others are copied
    report = penstock.salvage(original, tmp_path / "rescued")
    assert report.damage == []
    assert report.lost == [f"{ROUNDS} rows of metrics, which the new store refuses: a label is too long"]
    assert contents(tmp_path / "rescued") == {**written, "metrics": set()}


def test_large_tables_are_read_in_pieces(
    original: Path, written: dict[str, set[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranges: list[tuple[int, bytes]] = []
    scan = SnapshotPort.scan_arrow

    def scanned(self: SnapshotPort, partition: Any, start: bytes, end: bytes | None) -> Iterator[Any]:
        ranges.append((partition, start))
        return scan(self, partition, start, end)

    monkeypatch.setattr(SnapshotPort, "scan_arrow", scanned)
    monkeypatch.setattr(salvage, "PIECE_BYTES", 1_000)
    report = penstock.salvage(original, tmp_path / "rescued")
    assert (report.lost, report.damage) == ([], [])
    counts = Counter(partition for partition, _ in ranges)
    assert len(ranges) == len(set(ranges))
    assert sum(count > 5 for count in counts.values()) >= 1  # of a queue; a few rows of others are one piece
    assert contents(tmp_path / "rescued") == written


def test_a_shard_that_fails_between_two_pieces_is_not_copied_twice(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scan = SnapshotPort.scan_arrow

    def scanned(self: SnapshotPort, partition: Any, start: bytes, end: bytes | None) -> Iterator[Any]:
        if start > b"\0" * 7 + b"\x05":
            raise PartitionPaused("its files do not answer")
        return scan(self, partition, start, end)

    monkeypatch.setattr(SnapshotPort, "scan_arrow", scanned)
    monkeypatch.setattr(salvage, "PIECE_BYTES", 1_000)
    report = penstock.salvage(original, tmp_path / "rescued")
    assert 0 < report.rows["events"] < ROUNDS
    assert [lost for lost in report.lost if "of events: its files do not answer" in lost]


def test_messages_in_the_files_of_a_queue_that_cannot_be_opened(
    original: Path, written: dict[str, set[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "store"
    shutil.copytree(original, copy)
    for path in copy.glob("tables/*/*/manifest.*"):
        path.write_bytes(b"damaged")
    report = penstock.salvage(copy, tmp_path / "rescued")
    assert contents(tmp_path / "rescued") == written  # the sound store was closed: all is in the files
    assert len([lost for lost in report.lost if "parts of shard" in lost]) == 2
    monkeypatch.setattr(QueueKind, "rows_in_files", lambda *_: iter(()))
    assert penstock.salvage(copy, tmp_path / "without").rows["events"] == 0


def test_a_target_inside_the_damaged_store_is_refused(original: Path) -> None:
    with pytest.raises(Invalid, match="is not beside the store"):
        penstock.salvage(original, original / "tables" / "rescued")
    assert not (original / "tables" / "rescued").exists()
