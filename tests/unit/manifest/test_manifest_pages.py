"""The reader of LMDB's pages: it sees what LMDB sees, and every flipped bit that would matter."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import pytest

from penstock.errors import CorruptionError
from penstock.host.os_files import OsFileSystem
from penstock.manifest.pages import MetaPage, PageWalk, TreeRoot, read_meta

Rows = list[tuple[str, bytes, bytes]]
TABLES = ("few", "long", "many")


def walked(path: Path) -> Rows:
    file = OsFileSystem().open(str(path))
    try:
        return list(PageWalk(file, read_meta(file)).rows())
    finally:
        file.close()


def used_bytes(path: Path) -> int:
    file = OsFileSystem().open(str(path))
    try:
        return read_meta(file).used_bytes
    finally:
        file.close()


def fill(path: Path, *, transactions: int = 60) -> Rows:
    """A file with trees of two levels, values on overflow pages and many freed pages; what LMDB says is in it."""
    chance = random.Random(5)
    env = lmdb.open(str(path), subdir=False, map_size=64 << 20, max_dbs=len(TABLES))
    tables = {name: env.open_db(name.encode()) for name in TABLES}
    for _ in range(transactions):
        with env.begin(write=True) as txn:
            for _ in range(chance.randint(1, 30)):
                key = b"%05d" % chance.randint(1, 900)
                if chance.random() < 0.4:
                    txn.delete(key, db=tables["many"])
                else:
                    txn.put(key, chance.randbytes(chance.choice([0, 9, 120])), db=tables["many"])
            txn.put(b"%03d" % chance.randint(1, 20), chance.randbytes(chance.choice([3_000, 9_000])), db=tables["long"])
    with env.begin() as txn:
        rows = [(name, key, value) for name in TABLES for key, value in txn.cursor(db=tables[name])]
    env.close()
    return rows


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Rows]:
    path = tmp_path_factory.mktemp("pages") / "file"
    return path, fill(path)


def test_rows_are_those_that_lmdb_shows(filled: tuple[Path, Rows]) -> None:
    path, rows = filled
    assert walked(path) == rows
    assert len({table for table, _, _ in rows}) == 2


def test_a_new_file_and_a_compact_copy(filled: tuple[Path, Rows], tmp_path: Path) -> None:
    lmdb.open(str(tmp_path / "new"), subdir=False).close()
    assert walked(tmp_path / "new") == []
    env = lmdb.open(str(filled[0]), subdir=False, max_dbs=3)
    env.copy(str(tmp_path / "copy"), compact=True)
    env.close()
    assert walked(tmp_path / "copy") == filled[1]


def flips_that_matter(path: Path, rows: Rows, offsets: list[int], scratch: Path) -> int:
    """How many flips were not found, and changed more than one row: that one has a checksum of its own, above this."""
    content, missed = path.read_bytes(), 0
    for at in offsets:
        damaged = bytearray(content)
        damaged[at] ^= 1 << at % 8
        scratch.write_bytes(damaged)
        try:
            scratch_rows = walked(scratch)
        except CorruptionError as error:
            assert error.path == str(scratch)
        else:
            missed += len(scratch_rows) != len(rows) or sum(map(operator.ne, scratch_rows, rows)) > 1
    return missed


def offsets_of(path: Path, count: int) -> list[int]:
    """Offsets all over a file, and every byte of its meta pages and of the heads of some pages."""
    chance, size = random.Random(11), used_bytes(path)
    heads = [page + at for page in chance.sample(range(0, size, 4096), 10) for at in range(32)]
    return [*range(16, 152), *range(4096 + 16, 4096 + 152), *heads, *chance.sample(range(size), count)]


def test_flipped_bits_are_found_or_change_one_row_alone(filled: tuple[Path, Rows], tmp_path: Path) -> None:
    path, rows = filled
    assert flips_that_matter(path, rows, offsets_of(path, 150), tmp_path / "damaged") == 0


def uncounted(self: PageWalk, tree: TreeRoot, flags: int) -> Any:
    return self._subtree(tree.root, tree.depth, None, None, flags != 0) if tree.depth else iter(())


def unchecked_metas(file: Any) -> MetaPage:
    from penstock.manifest import pages

    first = pages._read_meta_page(file, 0, 0)
    newest = max(first, pages._read_meta_page(file, 1, first.page_bytes), key=lambda meta: meta.transaction)
    if newest.used_bytes > file.size():
        raise CorruptionError(file.path, 0, "too short")
    return newest


def free_list_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PageWalk, "_check_free", lambda self: None)


def rows_uncounted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PageWalk, "_tree", uncounted)


def metas_believed(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(globals(), "read_meta", unchecked_metas)


@pytest.mark.parametrize("seed_bug", [rows_uncounted, metas_believed])
def test_a_reader_that_believes_more_is_caught(
    filled: tuple[Path, Rows], tmp_path: Path, seed_bug: Callable[[pytest.MonkeyPatch], None]
) -> None:
    path, rows = filled
    offsets = offsets_of(path, 150)
    with pytest.MonkeyPatch.context() as patch:
        seed_bug(patch)
        assert flips_that_matter(path, rows, offsets, tmp_path / "damaged") > 0


def test_a_free_page_that_is_in_use_is_found(filled: tuple[Path, Rows], tmp_path: Path) -> None:
    """LMDB would write over it."""
    path, _ = filled
    content = bytearray(path.read_bytes())
    file = OsFileSystem().open(str(path))
    meta = read_meta(file)
    walk = PageWalk(file, meta)
    lists = [(key, value) for key, value, _ in walk._tree(meta.free, 8)]
    file.close()
    _, value = max(lists, key=lambda row: len(row[1]))
    at = content.index(value, 2 * 4096) + 8
    content[at : at + 8] = meta.main.root.to_bytes(8, "little")
    (tmp_path / "damaged").write_bytes(content)
    with pytest.raises(CorruptionError, match="used twice, both free and used"):
        walked(tmp_path / "damaged")
    with pytest.MonkeyPatch.context() as patch:
        free_list_ignored(patch)
        walked(tmp_path / "damaged")  # nothing else sees it
