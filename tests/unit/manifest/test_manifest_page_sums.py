"""Sums of pages: LMDB follows no page that was not compared, every flip in use is found, and opening is flat."""

from __future__ import annotations

import random
import re
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash
from google_crc32c import value as crc32c
from interrupts import interrupted_at

from penstock.errors import CorruptionError
from penstock.host.os_files import OsFileSystem
from penstock.manifest import examine, page_sums
from penstock.manifest.engine import TABLES
from penstock.manifest.environment import LmdbEngine
from penstock.manifest.jobs import JobQueue
from penstock.manifest.keys import ChunkKey, WalStateKey
from penstock.manifest.manifest import Manifest
from penstock.manifest.operations import DeleteChunk, ManifestOp, PutWalState, UpsertChunk
from penstock.manifest.page_sums import PageReader, UncheckedPages
from penstock.manifest.pages import read_meta
from penstock.manifest.records import ChunkEntryRecord, WalStateRecord
from penstock.manifest.recovery import recover

ROWS = 4_000  # trees of three levels
LONG = 40  # the detail of each so many rows is on overflow pages
PAGE = 4_096

Rows = dict[str, list[tuple[bytes, bytes]]]


def chunk_op(number: int) -> ManifestOp:
    detail = bytes(9_000 if number % LONG == 0 else 60)
    return UpsertChunk(ChunkKey(1 + number % 7, number), ChunkEntryRecord(f"f{number}", 1, 1, detail=detail))


def fill(path: str, rows: int) -> None:
    with Manifest.open(path) as manifest:
        numbers = list(range(1, rows + 1))
        random.Random(1).shuffle(numbers)
        for start in range(0, rows, 1_000):
            manifest.apply([chunk_op(number) for number in numbers[start : start + 1_000]])
        manifest.apply([PutWalState(WalStateKey(1, shard), WalStateRecord()) for shard in range(1, 200)])


def all_rows(manifest: Manifest) -> Rows:
    return manifest.read(lambda view: {table: list(view.scan(table)) for table in TABLES})


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, bytes, Rows]:
    """A file, the stamp of its close, and its rows."""
    path = tmp_path_factory.mktemp("sums") / "manifest"
    fill(str(path), ROWS)
    content, stamp = path.read_bytes(), Path(f"{path}.owner").read_bytes()
    with Manifest.open(str(path)) as manifest:
        return content, stamp, all_rows(manifest)


@pytest.fixture(autouse=True)
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """These files count as large, and their tables too."""
    monkeypatch.setattr(examine, "OPENING_PAGES_MAX", 0)
    monkeypatch.setattr(page_sums, "TABLE_PAGES_SMALL", 4)


@pytest.fixture
def path(tmp_path: Path, original: tuple[bytes, bytes, Rows]) -> str:
    lay_out(tmp_path / "manifest", original)
    return str(tmp_path / "manifest")


def lay_out(path: Path, original: tuple[bytes, bytes, Rows]) -> None:
    path.write_bytes(original[0])
    Path(f"{path}.owner").write_bytes(original[1])


def engine_of(manifest: Manifest) -> LmdbEngine:
    assert isinstance(manifest._engine, LmdbEngine)
    return manifest._engine


def pages_in_use(path: str) -> dict[str, set[int]]:
    """The pages of each tree; those of the tree of tables and the meta pages under `main`."""
    file = OsFileSystem().open(path)
    meta = read_meta(file)
    pages = PageReader(file, meta.page_bytes)
    used: dict[str, set[int]] = {"main": {0, 1}}
    pages.walk(meta.main, used["main"].update)
    for name, tree in examine._trees(file, meta).items():
        used[name] = set()
        if tree.depth:
            pages.walk(tree, used[name].update)
    file.close()
    return used


def last_keys(path: str) -> dict[str, list[bytes]]:
    """The last key of each leaf of each table: a read up to there steps to the next leaf."""
    file, ends = OsFileSystem().open(path), dict[str, list[bytes]]()
    pages = PageReader(file, PAGE)
    for table, numbers in pages_in_use(path).items():
        for number in sorted(numbers):
            own, _, flags = struct.unpack_from("<QHH", pages.read(number))
            if own == number and flags == 2:
                page, nodes = pages._nodes(number)
                key_bytes = struct.unpack_from("<H", page, nodes[-1] + 6)[0]
                ends.setdefault(table, []).append(page[nodes[-1] + 8 : nodes[-1] + 8 + key_bytes])
    file.close()
    return ends


def wrong(number: int, page: bytes) -> bytes:
    """A page that LMDB follows without harm, with other keys, or other children or values."""
    changed = bytearray(page)
    own, _, flags, lower, _ = struct.unpack_from("<QHHHH", page)
    if own != number or flags & 4:  # with or without a header, a page of a long value
        return (page[:16] if own == number else b"\xff" * 16) + b"\xff" * (PAGE - 16)
    for at in struct.unpack_from(f"<{(lower - 16) // 2}H", page, 16):
        key_bytes = struct.unpack_from("<H", page, at + 6)[0]
        changed[at + 8 : at + 8 + key_bytes] = bytes(key_bytes)
        if flags & 1:
            first = struct.unpack_from("<H", page, 16)[0]
            changed[at : at + 6] = page[first : first + 6]
    return bytes(changed)


class Falsified:
    """A file whose pages are wrong whenever LMDB may look, except for those that were compared."""

    def __init__(self, path: str, patch: pytest.MonkeyPatch) -> None:
        self._path = path
        self._content = Path(path).read_bytes()
        self._used = pages_in_use(path)
        self._changed: list[int] = []
        self.changes = 0
        for name in ("check_read", "check_table"):
            patch.setattr(UncheckedPages, name, self._around(getattr(UncheckedPages, name)))

    def _around(self, check: Callable[..., None]) -> Callable[..., None]:
        def checked(unchecked: UncheckedPages, *arguments: Any) -> None:
            self.restore()
            check(unchecked, *arguments)
            numbers = {number for table in unchecked.trees for number in self._used[table]}
            self._write([(n, wrong(n, self._page(n))) for n in sorted(numbers) if not unchecked._same[n]])

        return checked

    def _page(self, number: int) -> bytes:
        return self._content[number * PAGE : (number + 1) * PAGE]

    def _write(self, pages: list[tuple[int, bytes]]) -> None:
        with open(self._path, "r+b", buffering=0) as file:
            for number, page in pages:
                file.seek(number * PAGE)
                file.write(page)
        self._changed = [number for number, _ in pages]
        self.changes += len(pages)

    def restore(self) -> None:
        self._write([(number, self._page(number)) for number in self._changed])
        self._changed = []


def random_reads(path: str, rows: Rows, seed: int) -> Iterator[bool]:
    """Open the file and read at random; whether each read gave what is there."""
    chance, ends = random.Random(seed), last_keys(path)
    for _ in range(8):
        with pytest.MonkeyPatch.context() as patch:
            falsified = Falsified(path, patch)
            with Manifest.open(path) as manifest:
                for _ in range(6):
                    table = chance.choice(["chunk_catalog", "chunk_files", "wal_state"])
                    keys = [key for key, _ in rows[table]]
                    last = chance.choice([chance.randrange(len(keys)), keys.index(chance.choice(ends[table]))])
                    first = max(0, last - chance.choice([0, 1, 5, 60, 900]))
                    start = keys[first] if chance.random() < 0.7 else keys[first] + b"\0"
                    stop = chance.choice([keys[last], keys[last] + b"\0"])
                    expected = [(key, value) for key, value in rows[table] if start <= key < stop]
                    with engine_of(manifest).read() as view:
                        yield list(view.scan(table, start, stop)) == expected
                        yield view.get(table, start) == dict(rows[table]).get(start)
                falsified.restore()
            assert falsified.changes > 0


def test_lmdb_follows_no_page_that_was_not_compared(path: str, original: tuple[bytes, bytes, Rows]) -> None:
    assert all(random_reads(path, original[2], 1))


def no_next_leaf(self: UncheckedPages, number: int, start: bytes | None, stop: bytes | None) -> Any:
    parts = UNCHANGED(self, number, start, stop)
    return [part for part in parts if part[1:] != (b"", b"")] if len(parts) > 1 else parts


UNCHANGED = UncheckedPages._parts


def test_a_reader_that_compares_too_little_is_caught(
    path: str, original: tuple[bytes, bytes, Rows], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(UncheckedPages, "_parts", no_next_leaf)
    assert not all(random_reads(path, original[2], 1))


def test_writes_compare_whole_tables_and_leave_the_others(
    path: str, original: tuple[bytes, bytes, Rows], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        falsified = Falsified(path, patch)
        with Manifest.open(path) as manifest:
            for first in range(150, 300, 15):
                shards = range(first, first + 15)
                manifest.apply([PutWalState(WalStateKey(1, shard), WalStateRecord(1, 2, 3, 4)) for shard in shards])
            unchecked = engine_of(manifest)._unchecked
            assert unchecked is not None
            assert {"chunk_catalog", "chunk_files"} <= set(unchecked.trees)
            falsified.restore()
    with Manifest.open(path) as manifest:
        rows = all_rows(manifest)
    assert len(rows["wal_state"]) == 299
    assert rows["chunk_catalog"] == original[2]["chunk_catalog"]
    assert rows["chunk_files"] == original[2]["chunk_files"]


def test_every_flip_in_a_page_in_use_is_found(tmp_path: Path, original: tuple[bytes, bytes, Rows]) -> None:
    target = tmp_path / "manifest"
    lay_out(target, original)
    used = set[int]().union(*(pages for name, pages in pages_in_use(str(target)).items()))
    chance, detections = random.Random(4), 0
    for _ in range(60):
        at = chance.randrange(len(original[0]))
        content = bytearray(original[0])
        content[at] ^= 1 << chance.randrange(8)
        lay_out(target, (bytes(content), *original[1:]))
        try:
            with Manifest.open(str(target)) as manifest:
                assert all_rows(manifest) == original[2]
                manifest.backup()
                manifest.reserve_job_id()
            assert at // PAGE not in used
        except CorruptionError as error:
            assert error.path == str(target)
            assert at // PAGE in used
            detections += 1
    assert detections > 30


def flip(path: str, table: str) -> None:
    """Flip a bit of a leaf of a table."""
    content = bytearray(Path(path).read_bytes())
    leaves = [n for n in pages_in_use(path)[table] if content[n * PAGE + 10] == 2]
    content[leaves[len(leaves) // 2] * PAGE + 3_000] ^= 1
    Path(path).write_bytes(content)


def test_damage_stays_once_it_is_found(path: str) -> None:
    flip(path, "chunk_files")
    manifest = Manifest.open(path)
    manifest.reserve_job_id()  # other tables are not touched by it
    with pytest.raises(CorruptionError, match="changed since the file was closed"):
        manifest.backup()
    for use in (manifest.reserve_chunk_id, lambda: manifest.get_job(1), manifest.backup, lambda: manifest.apply([])):
        with pytest.raises(CorruptionError, match=re.escape(path)):
            use()
    manifest.close()
    assert Path(f"{path}.owner").read_bytes() == b"open"


def test_maintenance_finds_damage_that_nobody_met(path: str) -> None:
    flip(path, "chunk_catalog")
    with Manifest.open(path) as manifest:
        engine_of(manifest).maintain()
        with pytest.raises(CorruptionError, match=re.escape(path)):
            manifest.get_job(1)


def test_maintenance_compares_all(path: str) -> None:
    with Manifest.open(path) as manifest:
        assert engine_of(manifest)._unchecked is not None
        engine_of(manifest).maintain()
        assert engine_of(manifest)._unchecked is None


def test_a_close_does_not_accept_what_was_not_compared(path: str) -> None:
    flip(path, "chunk_catalog")
    for number in range(3):
        with Manifest.open(path) as manifest:
            manifest.apply([PutWalState(WalStateKey(2, number), WalStateRecord())])
            assert engine_of(manifest)._unchecked is not None
        assert Path(f"{path}.owner").read_bytes()[:8] == b"PSTKEN2\0"
    with Manifest.open(path) as manifest, pytest.raises(CorruptionError, match=re.escape(path)):
        all_rows(manifest)


def test_a_large_file_is_read_again_and_again(path: str, original: tuple[bytes, bytes, Rows]) -> None:
    """Sums are carried from close to close, while tables grow, shrink and move."""
    chance, model = random.Random(6), dict(original[2]["chunk_catalog"])
    for turn in range(6):
        with Manifest.open(path) as manifest:
            if turn % 2:
                for number in chance.sample(range(1, ROWS), 150):
                    txn = manifest.begin_write()
                    txn.delete_chunk(ChunkKey(1 + number % 7, number))
                    txn.commit()
                    model.pop(ChunkKey(1 + number % 7, number).pack(), None)
            else:
                manifest.apply([PutWalState(WalStateKey(turn + 3, shard), WalStateRecord()) for shard in range(100)])
    with Manifest.open(path) as manifest:
        assert dict(all_rows(manifest)["chunk_catalog"]) == model


def test_reads_and_writes_at_once(path: str, original: tuple[bytes, bytes, Rows]) -> None:
    """Readers of tables that are not compared yet, a writer that changes them, and the maintenance."""
    values = dict(original[2]["chunk_files"])
    names, errors, stop = sorted(values), list[BaseException](), threading.Event()

    def read(seed: int) -> None:
        chance = random.Random(seed)
        try:
            while not stop.is_set():
                name, other = sorted(chance.sample(names, 2))
                with engine_of(manifest).read() as view:
                    assert view.get("chunk_files", name) == values[name]
                    assert view.get("chunk_catalog", ChunkKey(9, 9).pack()) is None
                    assert len(list(view.scan("chunk_files", name, other[: len(name)] + b"\0"))) >= 1
        except BaseException as error:
            errors.append(error)

    for _ in range(3):
        with Manifest.open(path) as manifest:
            readers = [threading.Thread(target=read, args=(seed,)) for seed in range(3)]
            for reader in readers:
                reader.start()
            for number in range(ROWS + 1, ROWS + 60):
                manifest.apply([chunk_op(number), PutWalState(WalStateKey(1, 1), WalStateRecord())])
                if number == ROWS + 30:
                    engine_of(manifest).maintain()
            stop.set()
            for reader in readers:
                reader.join()
            stop.clear()
        assert errors == []


def test_a_long_list_of_free_pages_is_compared(path: str) -> None:
    with Manifest.open(path) as manifest:
        manifest.apply([DeleteChunk(ChunkKey(1 + number % 7, number)) for number in range(1, ROWS - 50)])
    for number in range(5):
        with Manifest.open(path) as manifest:
            manifest.apply([chunk_op(number + 1)])
            assert len(all_rows(manifest)["chunk_catalog"]) == 51 + number + 1
    content, numbers = bytearray(Path(path).read_bytes()), sorted(pages_in_use(path)[page_sums.FREE_PAGES])
    content[numbers[len(numbers) // 2] * PAGE + 50] ^= 1
    Path(path).write_bytes(content)
    with Manifest.open(path) as manifest, pytest.raises(CorruptionError, match=re.escape(path)):
        manifest.apply([chunk_op(100)])


@pytest.mark.parametrize("alarm", [False, True])
def test_an_interrupt_while_pages_are_compared_is_not_damage(
    path: str, original: tuple[bytes, bytes, Rows], alarm: bool
) -> None:
    with Manifest.open(path) as manifest:
        unchecked = engine_of(manifest)._unchecked
        assert unchecked is not None
        trees, interrupts = dict(unchecked.trees), 0

        def compare() -> None:
            assert unchecked is not None
            unchecked.check_read("wal_state", b"", None)
            unchecked.check_table("wal_state")

        for point in range(1, 400, 7):
            unchecked.trees.update(trees)
            unchecked._same[:] = bytes(len(unchecked._same))
            interrupts += interrupted_at(point, compare, alarm=alarm) >= point
            assert unchecked.damage is None
        assert interrupts > 5
        assert all_rows(manifest) == original[2]


def pages_compared_by_opening(path: str) -> int:
    with Manifest.open(path) as manifest:
        recover(manifest, JobQueue(manifest, random=random.Random(1)))
        unchecked = engine_of(manifest)._unchecked
        assert unchecked is not None
        return sum(unchecked._same)


def test_opening_compares_as_many_pages_for_many_rows_as_for_few(path: str, tmp_path: Path) -> None:
    fill(str(tmp_path / "few"), 100)
    few, many = pages_compared_by_opening(str(tmp_path / "few")), pages_compared_by_opening(path)
    assert few - 2 <= many <= few + 2
    assert len(Path(path).read_bytes()) // PAGE > 20 * many


def test_a_disk_that_fails_is_damage(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> bytes:
        raise OSError(5, "no")

    with Manifest.open(path) as manifest:
        with monkeypatch.context() as patch:
            patch.setattr(PageReader, "read", fails)
            with pytest.raises(CorruptionError, match="cannot be read"):
                all_rows(manifest)
        with pytest.raises(CorruptionError, match="cannot be read"):
            manifest.reserve_job_id()


@pytest.mark.parametrize("damaged", [False, True])
def test_a_stamp_of_the_first_version_is_compared_at_once(
    path: str, damaged: bool, original: tuple[bytes, bytes, Rows]
) -> None:
    content = original[0]
    file = OsFileSystem().open(path)
    meta = read_meta(file)
    file.close()
    digest = xxhash.xxh3_128_digest(content[: meta.used_bytes])
    stamp = struct.pack("<8sQQ16s", b"PSTKEND\0", meta.transaction, meta.used_bytes, digest)
    Path(f"{path}.owner").write_bytes(stamp + struct.pack("<I", crc32c(stamp)))
    if damaged:
        flip(path, "chunk_catalog")
        with pytest.raises(CorruptionError, match=re.escape(path)):
            Manifest.open(path)
    else:
        with Manifest.open(path) as manifest:
            assert engine_of(manifest)._unchecked is None
            assert all_rows(manifest) == original[2]


@pytest.mark.parametrize("cut", [1, 8, 44])
def test_a_stamp_that_is_not_whole_does_not_count(path: str, cut: int, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []
    monkeypatch.setattr(examine, "_examine", lambda file, _: looked.append(file.path))
    stamp = Path(f"{path}.owner").read_bytes()
    Path(f"{path}.owner").write_bytes(stamp[:-cut])
    Manifest.open(path).close()
    assert looked == [path]


def test_a_read_only_store_compares_every_page(path: str) -> None:
    from penstock.host.clock import SystemClock
    from penstock.manifest.memory import ReadOnlyEngine
    from penstock.manifest.settings import ManifestSettings

    ReadOnlyEngine(path, ManifestSettings(), OsFileSystem(), SystemClock())
    flip(path, "wal_state")
    with pytest.raises(CorruptionError, match=re.escape(path)):
        ReadOnlyEngine(path, ManifestSettings(), OsFileSystem(), SystemClock())
