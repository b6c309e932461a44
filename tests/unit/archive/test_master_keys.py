"""Where master keys come from: key files that are none, keys that are none, and `penstock keys new` beside itself."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import penstock
from penstock.archive.master_keys import format_key, key_versions
from penstock.cli.program import app
from penstock.errors import Backpressure, Invalid, KeyMissing, PenstockError
from penstock.host.os_files import OsFileSystem
from penstock.store.settings import StoreSettings

BY_HAND = StoreSettings(background=False, serve=False)
KEY = b"k" * 32


def missing(path: Path) -> None:
    pass


def itself(path: Path) -> None:
    path.symlink_to(path)


def below_a_file(path: Path) -> None:
    path.parent.rmdir()
    path.parent.write_text("")


def of(content: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(content)


LINE = format_key(1, KEY).encode()


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (missing, KeyMissing, "there is no key file"),
        (Path.mkdir, Invalid, "is not a key file that this user can read"),
        (os.mkfifo, Invalid, "is not a key file that this user can read"),
        (below_a_file, Invalid, "is not a key file that this user can read"),
        (itself, Invalid, "is a link to itself"),
        (of(b""), KeyMissing, "holds no key"),
        (of(b"# a comment\n\n"), KeyMissing, "holds no key"),
        (of(b"\xff\xfe" + LINE), Invalid, "line 1 of"),
        (of(b"\xef\xbb\xbf" + LINE), Invalid, "line 1 of"),
        (of(LINE + LINE), Invalid, "line 2 of"),
        (of(LINE[:-2]), Invalid, "line 1 of"),
        (of(b"+" + LINE), Invalid, "line 1 of"),
        (of(b"1_0" + LINE[1:]), Invalid, "line 1 of"),
        (of(b"9" * 5_000 + LINE[1:]), Invalid, "line 1 of"),
        (of(b"#" * (1 << 20) + LINE), Invalid, "too large for a key file"),
    ],
)
def test_what_is_not_a_key_file_is_named_and_its_content_is_not(
    tmp_path: Path, make: Callable[[Path], object], error: type[PenstockError], says: str
) -> None:
    file = tmp_path / "folder" / "keys"
    file.parent.mkdir()
    make(file)
    with penstock.open(tmp_path / "s", keys=f"file:{file}", settings=BY_HAND) as store:
        with pytest.raises(error, match=says) as raised:
            store.kv("users", encrypted=True)
        assert str(file) in str(raised.value)
        assert KEY.hex()[:16] not in str(raised.value)
        assert store.tables() == []
    assert os.listdir(tmp_path / "s" / "tables") == ["1"]


@pytest.mark.parametrize("keys", [0, False, "", [], (), b"", {}])
def test_what_is_empty_does_not_mean_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: Any
) -> None:
    monkeypatch.setenv("MY_KEYS", format_key(1, KEY))
    monkeypatch.setenv("PENSTOCK_KEYS", "env:MY_KEYS")
    with pytest.raises((Invalid, KeyMissing), match="keys="):
        penstock.open(tmp_path, keys=keys, encrypt=True, settings=BY_HAND).kv("users")
    monkeypatch.setenv("PENSTOCK_KEYS", "")  # as if it were not set
    with pytest.raises(KeyMissing, match="needs a master key"):
        penstock.open(tmp_path / "other", encrypt=True, settings=BY_HAND).kv("users")


def test_a_key_file_that_others_can_read_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "keys"
    file.write_bytes(LINE)
    for mode, warned in ((0o600, False), (0o640, True), (0o604, True)):
        file.chmod(mode)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            penstock.open(tmp_path / "s", keys=f"file:{file}", settings=BY_HAND).close()
        assert (f"the key file {file} can be read by other users" in caplog.text) == warned


def test_keys_are_added_one_at_a_time_and_none_is_lost(tmp_path: Path) -> None:
    """Two that add a key of one version: what one of them printed, and somebody used, would be replaced."""
    file, fs = tmp_path / "keys", OsFileSystem()

    def add() -> Any:
        return CliRunner().invoke(app, ["keys", "new", str(file)])

    assert add().exit_code == 0
    lock = fs.lock(f"{file}.lock")
    try:
        assert isinstance(add().exception, Backpressure)
    finally:
        lock.release()
    first = file.read_text()
    assert add().exit_code == 0
    assert file.read_text().startswith(first)
    assert key_versions(fs, str(file)) == [1, 2]
    assert file.stat().st_mode & 0o777 == 0o600
    link = tmp_path / "link"
    link.symlink_to(file)
    assert CliRunner().invoke(app, ["keys", "new", str(link)]).exit_code == 0
    assert link.is_symlink()
    assert key_versions(fs, str(file)) == [1, 2, 3]


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, itself, below_a_file, of(b"no key")])
def test_a_key_is_added_to_key_files_alone(tmp_path: Path, make: Callable[[Path], object]) -> None:
    file = tmp_path / "folder" / "keys"
    file.parent.mkdir()
    make(file)
    result = CliRunner().invoke(app, ["keys", "new", str(file)])
    assert isinstance(result.exception, Invalid)
    assert not list(tmp_path.rglob("*.new"))
