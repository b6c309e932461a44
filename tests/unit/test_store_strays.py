"""Files and folders of others in every folder of a store: nobody minds them, nobody removes them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock
from penstock.errors import CorruptionError, PenstockError
from penstock.log import LogSettings, log
from penstock.lsm import collection
from penstock.lsm.collection import CollectionSettings
from penstock.partition.ledger_records import LEDGER_TABLE
from penstock.store import dropped
from penstock.store.settings import StoreSettings
from penstock.store.store import Store, open_store

JOURNAL = LogSettings(segment_bytes=4096, allocate_bytes=512, index_bytes=512)  # so that a checkpoint spills
SETTINGS = StoreSettings(background=False, journal=JOURNAL, collection=CollectionSettings(grace_s=0.0))
FILES = [
    ".DS_Store", "Thumbs.db", "notes.txt", "copy of 1", "#1.sst#", "1.sst~", "\N{SUPERSCRIPT TWO}",
    "\N{FULLWIDTH DIGIT TWO}", "007", "12345678901234567890123", "123.txt", "x.tmp", "x.log", "x.sst", "x.data",
    "00000000000000000001.sst.bak", "00000000000000000001-0000000001.log~", "0000000001.data.orig", "f-notes",
    "manifest.bak", "0-old", "-gone", "1.tmp.tmp", "12",
]  # fmt: skip
FOLDERS = ["lost+found", ".Trash", "backup.tmp", "backup.log", "backup.sst", "f-folder", "0-log-old"]


def fill(path: str) -> None:
    """A store with every folder that there is, of tables and of one that is dropped when it is opened next."""
    with penstock.open(path), penstock.connect(path) as client:
        client.tables()  # makes the folder of sockets, and what is in it
    with open_store(path, settings=SETTINGS) as store:
        for name in ("t", "gone"):
            store.kv(name, shards=2).put_many({b"%d" % n: b"x" for n in range(100)}, durable=True)
            store.queue(f"{name}_q", shards=2).put_many([b"m%d" % n for n in range(10)])
        store.flush()
        store.compact("t")
        store.compact("gone")
        for name in ("t", "gone"):
            for n in range(100):
                store.kv(name).put(b"%d" % n, b"y", durable=True)
        assert store.checkpoint().spilled
        store.drop("gone")
        store.drop("gone_q")


def folders(path: str) -> Iterator[str]:
    for folder, _, _ in os.walk(path):
        yield folder


def put_strays(path: str) -> set[str]:
    """In every folder, and in the folders of the dropped table."""
    strays = set()
    for folder in list(folders(path)):
        for name in FILES:
            if not os.path.exists(f"{folder}/{name}"):
                Path(f"{folder}/{name}").write_bytes(b"somebody's")
                strays.add(f"{folder}/{name}")
        for name in FOLDERS:
            os.mkdir(f"{folder}/{name}")
            Path(f"{folder}/{name}/.DS_Store").write_bytes(b"somebody's")
            strays.add(f"{folder}/{name}/.DS_Store")
    return strays


def check(store: Store) -> None:
    assert dict(store.kv("t").scan()) == {b"%d" % n: b"y" for n in range(100)}
    assert sum(len(list(store.queue("t_q").read(shard))) for shard in range(2)) == 10
    assert store.tables() == ["t", "t_q"]


def live_through(path: str) -> None:
    """Everything that lists a folder."""
    for _ in range(2):
        with open_store(path, settings=SETTINGS) as store:
            check(store)
            store.kv("t").put_many({b"%d" % n: b"y" for n in range(100)}, durable=True)
            store.compact("t")
            store.checkpoint()
            store._collector.collect()
            store._collector.collect()
            store._dropped.remove()
            store._tasks.clean_up()
            check(store)


def test_strays_are_left_alone_and_harm_nothing(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    fill(path)
    strays = put_strays(path)
    assert len({os.path.dirname(stray) for stray in strays}) > 15
    live_through(path)
    with penstock.open(path) as served, penstock.connect(path) as client:
        check(served)
        assert client.kv("t").get(b"1") == b"y"
    left = {f"{folder}/{name}" for folder, _, names in os.walk(path) for name in names}
    moved = {re.sub(r"-gone[0-9]*/", "/", name) for name in left}  # with the folder they were in
    assert {stray for stray in strays if stray not in left and stray not in moved} == set()


def test_of_a_dropped_table_nothing_of_ours_is_left(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    fill(path)
    strays = put_strays(path)
    alive = tables(path)
    live_through(path)
    for table in set(os.listdir(f"{path}/tables")) - alive:
        for folder, _, names in os.walk(f"{path}/tables/{table}"):
            for name in names:
                assert re.sub(r"-gone[0-9]*/", "/", f"{folder}/{name}") in strays


def tables(path: str) -> set[str]:
    with open_store(path, settings=SETTINGS) as store:
        return {str(LEDGER_TABLE), *(str(info.table_id) for info in store._port.tables())}


def test_without_strays_a_dropped_table_leaves_nothing(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    fill(path)
    live_through(path)
    assert set(os.listdir(f"{path}/tables")) == tables(path)


TAKEN = [
    "LOCK", "OPENING", "STORE.tmp", "RESERVE", "RESERVE.tmp", "manifest.new", "manifest.owner", "run/control",
    "run/bell", "run/elsewhere", "run/queries", "run/f-0123456789abcdef",
]  # fmt: skip


@pytest.mark.parametrize("name", TAKEN)
def test_a_folder_in_the_place_of_a_file_is_named(tmp_path: Path, name: str) -> None:
    """Either it does no harm, or the error says where it is."""
    path = tmp_path / "s" / name
    path.mkdir(parents=True)
    (path / "mine").write_bytes(b"somebody's")
    try:
        with penstock.open(tmp_path / "s", timeout_s=1.0) as store:
            store.kv("t").put(b"a", b"1", durable=True)
            assert store.kv("t").get(b"a") == b"1"
    except PenstockError as error:
        assert name in str(error)
        assert "move" in str(error)
    assert (path / "mine").read_bytes() == b"somebody's"


@pytest.mark.parametrize("name", ["tables", "journal", "run", "."])
def test_a_file_in_the_place_of_a_folder_is_named(tmp_path: Path, name: str) -> None:
    path = tmp_path / "s" / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"somebody's")
    with pytest.raises(PenstockError, match="move it"):
        penstock.open(tmp_path / "s", timeout_s=1.0)
    assert path.read_bytes() == b"somebody's"


def test_a_segment_whose_name_has_rotted_is_missed(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    fill(path)
    segment = min(name for name in os.listdir(f"{path}/journal"))
    os.rename(f"{path}/journal/{segment}", f"{path}/journal/{segment.replace('0', 'p', 1)}")
    with pytest.raises(CorruptionError, match="name"):
        open_store(path, settings=SETTINGS)


BUGS = {
    "numbers only": (collection, "_FILE", re.compile(r"([0-9]+)\..*")),
    "all names": (dropped, "_FILE", re.compile(".*")),
    "every temporary file": (log, "is_segment", lambda name: True),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_stray_that_is_removed_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bug: str) -> None:
    """The negative controls."""
    module, name, seeded = BUGS[bug]
    monkeypatch.setattr(module, name, seeded)
    with pytest.raises((AssertionError, PenstockError)):
        test_strays_are_left_alone_and_harm_nothing(tmp_path)
