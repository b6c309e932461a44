"""What must exist is written down: journals and spills that lost an end, older copies, first files that are gone."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.errors import CorruptionError
from penstock.log import LogSettings
from penstock.partition.checkpoint import CheckpointSettings
from penstock.partition.extent import JournalExtent
from penstock.partition.spill import SpillLog
from penstock.store.settings import StoreSettings
from penstock.store.store import Store, open_store

SETTINGS = StoreSettings(
    background=False,
    reserve_bytes=512,
    journal=LogSettings(segment_bytes=2_048, allocate_bytes=512, index_bytes=256),
    checkpoint=CheckpointSettings(segments_max=1),
)


def opened(root: Path) -> Store:
    return open_store(str(root), settings=SETTINGS)


def segments(root: Path, folder: str = "journal") -> list[Path]:
    return sorted((root / folder).glob("*.log"))


def put(store: Store, first: int, last: int) -> None:
    for number in range(first, last):
        store.kv("t").put(b"%04d" % number, b"x" * 40, durable=True)


def store_all(store: Store) -> None:
    for tree, _ in store._maintenance.trees():
        store._maintenance.flush(tree)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A closed store whose rows are in files, with several segments of journal."""
    with opened(tmp_path / "store") as store:
        put(store, 0, 60)
        store_all(store)
    return tmp_path / "store"


def last_segment_gone(root: Path) -> None:
    segments(root)[-1].unlink()


def cut_to_its_header(root: Path) -> None:
    last = segments(root)[-1]
    last.write_bytes(last.read_bytes()[:100])


def last_record_cut_off(root: Path) -> None:
    last = segments(root)[-1]
    last.write_bytes(last.read_bytes()[:-150])


def folder_gone(root: Path) -> None:
    shutil.rmtree(root / "journal")


def folder_empty(root: Path) -> None:
    for path in segments(root):
        path.unlink()


def first_segment_gone(root: Path) -> None:
    segments(root)[0].unlink()


@pytest.mark.parametrize(
    "damage",
    [last_segment_gone, cut_to_its_header, last_record_cut_off, folder_gone, folder_empty, first_segment_gone],
)
def test_a_journal_that_lost_an_end_is_not_opened(root: Path, damage: Callable[[Path], None]) -> None:
    damage(root)
    before = sorted(path.name for path in segments(root)) if (root / "journal").exists() else []
    for _ in range(2):  # and it is not made whole by trying
        with pytest.raises(CorruptionError, match="journal"):
            opened(root)
        assert [path.name for path in segments(root)] == before


def test_without_the_row_a_lost_end_goes_unnoticed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: this is what the row is for."""
    monkeypatch.setattr(JournalExtent, "check", lambda self, end: None)
    last_segment_gone(root)
    with opened(root) as store:
        store.kv("t").put(b"later", b"acknowledged", durable=True)
    with opened(root) as store:
        assert store.kv("t").get(b"later") is None


def test_an_older_copy_of_the_journal_is_noticed(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "journal", tmp_path / "copy")
    with opened(root) as store:
        put(store, 60, 61)
    shutil.rmtree(root / "journal")
    shutil.copytree(tmp_path / "copy", root / "journal")
    with pytest.raises(CorruptionError, match="journal"):
        opened(root)


def test_an_older_copy_of_the_manifest_is_noticed(root: Path, tmp_path: Path) -> None:
    for name in ("manifest", "manifest.owner"):
        shutil.copy(root / name, tmp_path / name)
    with opened(root) as store:
        put(store, 60, 61)
    for name in ("manifest", "manifest.owner"):
        shutil.copy(tmp_path / name, root / name)
    with pytest.raises(CorruptionError, match="older copy"):
        opened(root)


def test_a_journal_cut_behind_a_manifest_of_before_is_noticed(root: Path, tmp_path: Path) -> None:
    """The manifest of before needs records that were given up since."""
    with opened(root) as store:
        shutil.copy(root / "manifest", tmp_path / "manifest")  # of an open store, as after a kill
        put(store, 60, 120)
        store_all(store)
        store.checkpoint()
    shutil.copy(tmp_path / "manifest", root / "manifest")
    (root / "manifest.owner").write_bytes(b"open")
    with pytest.raises(CorruptionError, match="beginning is missing, or the manifest is an older copy"):
        opened(root)


def test_a_killed_store_may_have_written_more_than_it_noted(root: Path, tmp_path: Path) -> None:
    with opened(root) as store:
        put(store, 60, 90)
        shutil.copytree(root, tmp_path / "killed")
    with opened(tmp_path / "killed") as store:
        assert len(dict(store.kv("t").scan())) == 90


def test_a_killed_store_has_at_least_what_it_stored(root: Path, tmp_path: Path) -> None:
    with opened(root) as store:
        put(store, 60, 90)
        store_all(store)
        shutil.copytree(root, tmp_path / "killed")
    segments(tmp_path / "killed")[-1].unlink()
    with pytest.raises(CorruptionError, match="was durable: its end is missing"):
        opened(tmp_path / "killed")


@pytest.mark.parametrize("name", ["STORE", "manifest"])
def test_first_files_that_are_gone_are_not_made_anew(root: Path, name: str) -> None:
    (root / name).unlink()
    with pytest.raises(CorruptionError, match=f"{name}.*missing"):
        opened(root)
    assert not (root / name).exists()


def test_an_identity_is_checked(root: Path) -> None:
    content = (root / "STORE").read_bytes()
    assert len(content) == 20
    (root / "STORE").write_bytes(bytes([content[0] ^ 1]) + content[1:])
    with pytest.raises(CorruptionError, match="STORE"):
        opened(root)
    (root / "STORE").write_bytes(content[:16])  # of the first version
    opened(root).close()


# -- spills


@pytest.fixture
def spilled(tmp_path: Path) -> Path:
    """A closed store with rows that only a spill log holds, in several segments of it."""
    root = tmp_path / "spilled"
    for part in range(3):
        with opened(root) as store:
            put(store, 60 * part, 60 * part + 60)
            report = store.checkpoint()
            assert report.spilled
            assert report.segments_dropped
    assert len(segments(root, "tables/2/0-log")) >= 3
    return root


def test_spilled_rows_are_read_back(spilled: Path) -> None:
    with opened(spilled) as store:
        assert len(dict(store.kv("t").scan())) == 180


def spill_gone(root: Path) -> None:
    shutil.rmtree(root / "tables/2/0-log")


def spill_begins_later(root: Path) -> None:
    segments(root, "tables/2/0-log")[0].unlink()


def spill_has_a_hole(root: Path) -> None:
    segments(root, "tables/2/0-log")[1].unlink()


def spill_ends_earlier(root: Path) -> None:
    for path in segments(root, "tables/2/0-log")[2:]:
        path.unlink()


@pytest.mark.parametrize("damage", [spill_gone, spill_begins_later, spill_has_a_hole, spill_ends_earlier])
def test_a_spill_that_lost_a_part_is_noticed(spilled: Path, damage: Callable[[Path], None]) -> None:
    damage(spilled)
    with pytest.raises(CorruptionError, match="tables/2/0-log"), opened(spilled) as store:
        store.kv("t").get(b"0001")


def test_without_the_reach_a_lost_spill_goes_unnoticed(spilled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    init = SpillLog.__init__
    monkeypatch.setattr(
        SpillLog, "__init__", lambda self, *args, reach, **options: init(self, *args, reach=(0, 0), **options)
    )
    spill_gone(spilled)
    with opened(spilled) as store:
        assert len(dict(store.kv("t").scan())) < 180


def test_a_spill_whose_rows_are_stored_need_not_be_there(spilled: Path) -> None:
    with opened(spilled) as store:
        store.kv("t").get(b"0001")
        store_all(store)
        store.checkpoint()
    spill_gone(spilled)
    with opened(spilled) as store:
        assert len(dict(store.kv("t").scan())) == 180


# -- listed files


def sstables(root: Path) -> list[Path]:
    return sorted((root / "tables/2/0").glob("*.sst"))


def sstable_gone(root: Path) -> None:
    sstables(root)[0].unlink()


def index_gone(root: Path) -> None:
    sstables(root)[0].with_suffix(".idx").unlink()


def sstables_swapped(root: Path) -> None:
    """With their indexes, so that each by itself is sound."""
    one, other = sstables(root)[:2]
    for suffix in (".sst", ".idx"):
        first, second = one.with_suffix(suffix).read_bytes(), other.with_suffix(suffix).read_bytes()
        one.with_suffix(suffix).write_bytes(second)
        other.with_suffix(suffix).write_bytes(first)


@pytest.mark.parametrize("damage", [sstable_gone, index_gone, sstables_swapped])
def test_a_listed_file_must_be_there_and_be_itself(root: Path, damage: Callable[[Path], None]) -> None:
    with opened(root) as store:
        put(store, 60, 120)
        store_all(store)
    damage(root)
    with pytest.raises(CorruptionError, match="tables/2/0/.*(missing|not the file)"), opened(root) as store:
        list(store.kv("t").scan())
