"""`penstock.open` against an owner that does not answer: the caller's deadline holds for every step."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock
from penstock.errors import StoreLocked, WaitExpired
from penstock.host import file_locks
from penstock.host.os_files import OsFileSystem
from penstock.protocol import locator
from penstock.server import opening


@pytest.fixture
def silent(tmp_path: Path) -> Iterator[Path]:
    """A store whose owner has a control socket and answers nobody, as one that is stopped."""
    path = tmp_path / "s"
    path.mkdir()
    lock = OsFileSystem().lock(f"{path}/LOCK")
    os.mkdir(f"{path}/run", 0o700)
    listener = locator.listen(f"{path}/run")
    yield path
    listener.close()
    lock.release()


def questions(path: Path, timeout_s: float, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long each question of an opening may take."""
    allowed: list[float] = []
    ask_owner = locator.ask_owner

    def noted(path: str, ask: locator.Request, timeout_s: float) -> locator.Answer | None:
        allowed.append(timeout_s)
        return ask_owner(path, ask, min(timeout_s, 0.05))

    monkeypatch.setattr(locator, "ask_owner", noted)
    monkeypatch.setattr(file_locks, "_locks", set())  # its owner is this process, and stands for another
    with pytest.raises(StoreLocked, match="does not answer"):
        penstock.open(path, timeout_s=timeout_s)
    return allowed


def test_no_question_outlasts_the_deadline(silent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = questions(silent, 0.5, monkeypatch)
    assert allowed
    assert max(allowed) <= 0.5


def test_a_question_that_outlasts_it_is_seen(silent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: as it was, five seconds whatever the caller said."""

    def as_it_was(path: str, locked: StoreLocked, *_: object) -> None:
        try:
            locator.ask_owner(path, "yield", 5.0)
        except WaitExpired:
            raise StoreLocked("its owner does not answer") from locked

    monkeypatch.setattr(opening, "_ask_to_yield", as_it_was)
    assert max(questions(silent, 0.5, monkeypatch)) > 0.5
