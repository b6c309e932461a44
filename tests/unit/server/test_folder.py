"""Which paths `open` and `connect` take for a store, and which they refuse before anything is made."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.errors import CorruptionError, Invalid, PenstockError

OPENERS: list[Callable[[Any], Any]] = [penstock.open, lambda path: penstock.connect(path, create=True)]
both = pytest.mark.parametrize("opener", OPENERS, ids=["open", "connect"])


def tree(path: Path) -> set[str]:
    return {str(one.relative_to(path)) for one in path.rglob("*")}


@both
@pytest.mark.parametrize("path", [None, 3, True, b"data", "", "a\0b", "\ud800", ["data"], 1.5])
def test_what_is_not_a_path(opener: Callable[[Any], Any], path: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Invalid, match="not a path"):
        opener(path)
    assert not tree(tmp_path)


@both
@pytest.mark.parametrize("url", ["s3://bucket/data", "file:///data", "hdfs://host/data", "gs:/bucket"])
def test_a_url_is_not_a_folder(opener: Callable[[Any], Any], url: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    for path in (url, Path(url)):
        with pytest.raises(Invalid, match="URL"):
            opener(path)
    assert not tree(tmp_path)


def test_a_served_store_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Invalid, match=r"is a URL.*: penstock\.connect takes it"):
        penstock.open("penstock://127.0.0.1:9999")
    with pytest.raises(Invalid, match=r"is a URL.*: give its path, or penstock://host:port"):
        penstock.connect("http://127.0.0.1:9999")
    assert not tree(tmp_path)


@both
def test_a_file_is_not_a_folder(opener: Callable[[Any], Any], tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(Invalid, match="is a file"):
        opener(tmp_path / "notes.txt")
    assert (tmp_path / "notes.txt").read_text() == "mine"


@both
def test_a_file_above_is_named(opener: Callable[[Any], Any], tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(Invalid, match=r"/notes\.txt is not a folder, but the store needs one there: move it elsewhere"):
        opener(tmp_path / "notes.txt" / "deep" / "store")
    assert tree(tmp_path) == {"notes.txt"}


def test_a_backup_does_not_go_to_a_file(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with penstock.open(tmp_path / "store") as store, pytest.raises(Invalid, match=r"/notes\.txt is not a folder"):
        store.backup(tmp_path / "notes.txt")
    assert (tmp_path / "notes.txt").read_text() == "mine"


@both
def test_a_name_that_is_too_long(opener: Callable[[Any], Any], tmp_path: Path) -> None:
    with pytest.raises(Invalid, match=r"(?i)too long.*: give a shorter one|too long.*give another path"):
        opener(tmp_path / ("a" * 300))
    assert not tree(tmp_path)


@both
def test_other_files_are_left_alone(opener: Callable[[Any], Any], tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "src").mkdir()
    before = tree(tmp_path)
    with pytest.raises(Invalid, match=r"notes\.txt.*empty folder"):
        opener(tmp_path)
    assert tree(tmp_path) == before


@both
def test_an_empty_folder_may_have_hidden_files(opener: Callable[[Any], Any], tmp_path: Path) -> None:
    (tmp_path / ".gitkeep").touch()
    (tmp_path / "lost+found").mkdir()
    with opener(tmp_path) as store:
        store.kv("users").put(b"ada", b"1", durable=True)


def test_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with penstock.open("~/data") as store:
        assert store.path == str(tmp_path / "data")
    with penstock.connect("~/data") as client:
        assert client.tables() == []


@pytest.mark.parametrize("left", ["LOCK", "OPENING", "RESERVE", "STORE.tmp", "run"])
def test_a_store_whose_making_was_cut_short(tmp_path: Path, left: str) -> None:
    (tmp_path / left).mkdir() if left == "run" else (tmp_path / left).touch()
    (tmp_path / "notes.txt").touch()
    with penstock.open(tmp_path) as store:
        store.kv("users").put(b"ada", b"1", durable=True)
    with penstock.open(tmp_path) as store:  # a stray file beside a store does no harm
        assert store.kv("users").get(b"ada") == b"1"


def test_a_store_that_lost_its_first_files_is_damaged_and_not_new(tmp_path: Path) -> None:
    with penstock.open(tmp_path) as store:
        store.kv("users").put(b"ada", b"1", durable=True)
    for name in ("LOCK", "OPENING", "RESERVE", "STORE"):
        os.unlink(tmp_path / name)
    with pytest.raises(CorruptionError, match="identity"):
        penstock.open(tmp_path)


def test_a_folder_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: object) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    folder = tmp_path / "data"
    folder.mkdir()
    monkeypatch.setattr(os, "listdir", refuse)
    with pytest.raises(PenstockError, match="data"):
        penstock.open(folder)
