"""The lock of a folder beside others that come and go in the middle of an attempt."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.errors import StoreLocked
from penstock.host.file_locks import OsLock, OsReadLock

LOCKS = pytest.mark.parametrize("kind", [OsLock, OsReadLock])


@pytest.fixture
def other(tmp_path: Path) -> Iterator[int]:
    """A descriptor of the file, as another process has one."""
    fd = os.open(tmp_path / "LOCK", os.O_CREAT | os.O_RDWR)
    yield fd
    os.close(fd)


@LOCKS
def test_an_owner_that_ends_between_two_looks(
    tmp_path: Path, other: int, monkeypatch: pytest.MonkeyPatch, kind: Callable[[str], OsLock | OsReadLock]
) -> None:
    fcntl.flock(other, fcntl.LOCK_EX)
    flock = fcntl.flock

    def end_after(fd: int, operation: int) -> None:
        try:
            flock(fd, operation)
        except BlockingIOError:
            flock(other, fcntl.LOCK_UN)
            raise

    monkeypatch.setattr("penstock.host.file_locks.fcntl.flock", end_after)
    kind(str(tmp_path / "LOCK")).release()


def test_one_that_shares_it_for_a_moment(tmp_path: Path, other: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others do while they look who has it."""
    fcntl.flock(other, fcntl.LOCK_SH)
    monkeypatch.setattr("penstock.host.file_locks.time.sleep", lambda _: fcntl.flock(other, fcntl.LOCK_UN))
    OsLock(str(tmp_path / "LOCK")).release()


def test_a_reader_is_named(tmp_path: Path, other: int) -> None:
    fcntl.flock(other, fcntl.LOCK_SH)
    OsReadLock(str(tmp_path / "LOCK")).release()
    with pytest.raises(StoreLocked, match="open read-only") as caught:
        OsLock(str(tmp_path / "LOCK"))
    assert caught.value.read_only


@LOCKS
def test_an_owner_is_no_reader(tmp_path: Path, other: int, kind: Callable[[str], OsLock | OsReadLock]) -> None:
    fcntl.flock(other, fcntl.LOCK_EX)
    with pytest.raises(StoreLocked, match="locked by another process") as caught:
        kind(str(tmp_path / "LOCK"))
    assert not caught.value.read_only
