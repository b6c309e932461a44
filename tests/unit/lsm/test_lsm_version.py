"""Files of a version: mapped when they are read, forgotten when others need room, and as many as one likes."""

from __future__ import annotations

import errno
import gc
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from lsm_files import ModelRows, puts, write

import penstock.lsm.version as version_module
from penstock.errors import ProcessLimit
from penstock.host import mappings
from penstock.host.files import FileSystem
from penstock.host.mappings import Mappings
from penstock.host.os_files import OsFileSystem
from penstock.lsm.memtable import Memtable
from penstock.lsm.merge import MergeInput, MergePlan, merge
from penstock.lsm.rows import DELETE, NEVER
from penstock.lsm.sstable import Sstable
from penstock.lsm.version import FileMeta, TableFile, Version, arrange
from penstock.lsm.view import View
from penstock.testing import SimulatedDisk

MANY = 2_000
LATER = 1 << 60  # an expiry: such rows are looked at one by one


class Files:
    """Sstables in a folder, as a version."""

    def __init__(self, fs: FileSystem, root: str) -> None:
        self.fs, self.root = fs, root
        self.metas: list[FileMeta] = []
        self.opened = 0

    def add(self, rows: ModelRows, *, level: int, run: int = 0, ranges: Any = ()) -> None:
        chunk_id = len(self.metas) + 1
        summary = write(self.fs, f"{self.root}/{chunk_id}.sst", rows, chunk_id=chunk_id, ranges=ranges)
        self.metas.append(
            FileMeta(
                chunk_id=chunk_id,
                file_name=f"{self.root}/{chunk_id}.sst",
                level=level,
                run=run,
                start=summary.start,
                end=summary.end,
                rows=summary.rows,
                size_bytes=summary.file_bytes,
                deletes=summary.deletes,
                lsn_min=summary.lsn_min,
                lsn_max=summary.lsn_max,
                has_ranges=summary.range_deletes > 0,
                expires=summary.expiring > 0,
            )
        )

    def open(self, meta: FileMeta) -> Sstable:
        self.opened += 1
        return Sstable.open(meta.file_name, fs=self.fs, lsn=meta.lsn)

    def version(self) -> Version:
        return Version(Memtable(), (), arrange(TableFile(meta, self.open) for meta in self.metas), 9, 9, 0)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> Mappings:
    """At most four files are mapped."""
    registry = Mappings(lambda: 4)
    monkeypatch.setattr(version_module, "MAPPINGS", registry)
    monkeypatch.setattr(mappings, "MAPPINGS", registry)
    return registry


def small_files(root: str, count: int) -> Files:
    files = Files(OsFileSystem(), root)
    for number in range(count):
        files.add(puts({b"%03d" % number: b"v%d" % number}), level=1)
    files.add(puts({b"%03d" % number: b"new" for number in range(0, count, 7)}, 5), level=0, run=1)
    return files


def mapped(root: str) -> int:
    return Path("/proc/self/maps").read_text().count(root)


def test_few_files_are_mapped_at_a_time(tmp_path: Path, few: Mappings) -> None:
    files = small_files(str(tmp_path), 40)
    expected = {b"%03d" % n: b"new" if n % 7 == 0 else b"v%d" % n for n in range(40)}
    version = files.version()
    view = View(version, lambda: 0)
    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        assert {key: view.get(key) for key in expected} == expected
        assert mapped(str(tmp_path)) <= 8
    assert dict(view.scan()) == expected
    assert dict(view.scan(reverse=True)) == expected
    batches = [batch.column("value").to_pylist() for batch in view.scan_arrow()]
    assert [value for values in batches for value in values] == list(expected.values())
    del batches
    gc.collect()
    assert mapped(str(tmp_path)) <= 8
    assert files.opened > 80
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 1  # idle ones of the cache come and go
    for file in version.files():
        file.forget()
    gc.collect()
    assert mapped(str(tmp_path)) == 0


def test_without_a_limit_all_of_them_stay(tmp_path: Path) -> None:
    files = small_files(str(tmp_path), 40)
    view = View(files.version(), lambda: 0)
    assert len(dict(view.scan())) == 40
    assert mapped(str(tmp_path)) == 2 * 41


def test_a_reader_goes_on_with_a_file_that_was_forgotten(tmp_path: Path, few: Mappings) -> None:
    files = small_files(str(tmp_path), 20)
    version = files.version()
    scan = View(version, lambda: 0).scan()
    first = next(scan)
    for file in version.files():
        file.forget()
    assert len([first, *scan]) == 20


def test_a_run_of_one_file_does_not_hold_on_to_it(tmp_path: Path) -> None:
    files = small_files(str(tmp_path), 3)
    version = files.version()
    run, view = version.runs[0], View(version, lambda: 0)
    assert len(run.files) == 1
    assert view.get(b"000") == b"new"
    assert run.find is not None  # the short way of a get
    again = files.version().runs[0].files[0]
    assert again is not run.files[0]
    run.files[0].forget()
    gc.collect()
    assert run.find is None
    assert view.get(b"000") == b"new"
    assert run.find is not None


def test_range_deletes_stay_in_memory(tmp_path: Path) -> None:
    """A version that is made after a commit must not fail for want of a descriptor."""
    files = Files(OsFileSystem(), str(tmp_path))
    files.add(puts({b"a": b"1", b"b": b"2"}), level=1)
    files.add({}, level=0, run=1, ranges=[(b"a", b"b", 7)])
    version = files.version()
    for file in version.files():
        file.forget()
    before = files.opened
    again = Version(Memtable(), (), version.levels, 9, 9, 0)
    assert files.opened == before
    assert View(again, lambda: 0).get(b"a") is None
    assert View(again, lambda: 0).get(b"b") == b"2"


def test_a_file_that_cannot_be_opened_now_is_opened_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = small_files(str(tmp_path), 3)
    view = View(files.version(), lambda: 0)
    real = mappings._map

    def none_left(fd: int, size: int) -> object:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(mappings, "MAPPINGS", Mappings(lambda: 9))
    monkeypatch.setattr(mappings, "_map", none_left)
    with pytest.raises(ProcessLimit):
        view.get(b"001")
    monkeypatch.setattr(mappings, "_map", real)
    assert view.get(b"001") == b"v1"


def test_gets_beside_files_that_are_forgotten(tmp_path: Path, few: Mappings) -> None:
    files = small_files(str(tmp_path), 30)
    version = files.version()
    view, wrong, stop = View(version, lambda: 0), list[object](), threading.Event()

    def look() -> None:
        try:
            while not stop.is_set():
                for n in range(30):
                    value = view.get(b"%03d" % n)
                    if value != (b"new" if n % 7 == 0 else b"v%d" % n):
                        wrong.append((n, value))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=look) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(200):
        for file in version.files():
            file.forget()
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong


# -- thousands of files


@pytest.fixture(scope="module")
def thousands() -> Files:
    """A run of files with a row each, under a file whose rows lie one by one between theirs: it is cut at each."""
    files = Files(SimulatedDisk(), "")
    for number in range(MANY):
        files.add(puts({b"%06d" % (2 * number): b"old"}), level=1)
    newer = {b"%06d" % (2 * n + 1): (0, b"new", 5, LATER) for n in range(MANY)}
    newer |= {b"%06d" % (2 * n): (DELETE, b"", 5, NEVER) for n in range(0, 100, 10)}
    files.add(newer, level=0, run=1)
    return files


def rows_of_thousands() -> dict[bytes, bytes]:
    old = {b"%06d" % (2 * n): b"old" for n in range(MANY) if n >= 100 or n % 10}
    return dict(sorted({**old, **{b"%06d" % (2 * n + 1): b"new" for n in range(MANY)}}.items()))


@pytest.mark.parametrize("reverse", [False, True])
def test_a_scan_of_thousands_of_files(thousands: Files, reverse: bool) -> None:
    assert sys.getrecursionlimit() < MANY
    expected = rows_of_thousands()
    pairs = list(View(thousands.version(), lambda: 0).scan(reverse=reverse))
    assert pairs == (list(expected.items())[::-1] if reverse else list(expected.items()))


def test_an_arrow_scan_and_a_merge_of_thousands_of_files(thousands: Files) -> None:
    expected = rows_of_thousands()
    batches = list(View(thousands.version(), lambda: 0).scan_arrow())
    assert [key for batch in batches for key in batch.column("key").to_pylist()] == list(expected)
    newest_first = [thousands.metas[-1], *thousands.metas[:-1]]
    plan = MergePlan(
        inputs=tuple(MergeInput(path=meta.file_name) for meta in newest_first),
        folder="/out",
        store=bytes(range(16)),
        chunk_ids=(9_999,),
        now_us=0,
        bottom=True,
        lsn_floor=100,
    )
    thousands.fs.mkdir("/out")
    (summary,) = merge(plan, fs=thousands.fs)
    assert summary.rows == len(expected)
