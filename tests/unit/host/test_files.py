from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.errors import Invalid, PenstockError, ProcessLimit
from penstock.host.file_errors import ran_out_of_space, translate_os_errors
from penstock.host.file_operations import make_dirs, read_fully, write_fully
from penstock.host.os_files import OsFileSystem
from penstock.testing import SimulatedDisk


def test_short_writes_and_interruptions_are_looped() -> None:
    written = bytearray()

    def some(rest: memoryview, offset: int) -> int:
        assert offset == 100 + len(written)
        if len(written) == 3 and not calls:
            calls.append(1)
            raise InterruptedError
        written.extend(rest[:3])
        return len(rest[:3])

    calls: list[int] = []
    write_fully(some, b"0123456789", 100)
    assert written == b"0123456789"
    assert calls


def test_a_write_without_progress_is_an_error() -> None:
    with pytest.raises(OSError, match="no progress"):
        write_fully(lambda rest, offset: 0, b"x", 0)


def test_short_reads_and_interruptions_are_looped() -> None:
    data, interrupted = b"0123456789", [True]

    def some(size: int, offset: int) -> bytes:
        if interrupted:
            interrupted.pop()
            raise InterruptedError
        return data[offset : offset + min(size, 3)]

    assert read_fully(some, 8, 1) == b"12345678"
    assert read_fully(some, 100, 1) == b"123456789"
    assert read_fully(some, 5, 10) == b""


@pytest.mark.parametrize("name", ["fsync", "fdatasync"])
def test_a_failed_sync_is_raised_and_not_tried_again(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def fail(fd: int) -> None:
        calls.append(fd)
        raise OSError(errno.EIO, "no")

    file = OsFileSystem().create(str(tmp_path / "f"))
    monkeypatch.setattr(os, name, fail)
    with pytest.raises(OSError, match="no"):
        getattr(file, name)()
    assert len(calls) == 1


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    script = (
        "import sys,os; from penstock.host.os_files import OsFileSystem;"
        " lock = OsFileSystem().lock(sys.argv[1]); print('held', flush=True); os.kill(os.getpid(), 9)"
    )
    child = subprocess.run([sys.executable, "-c", script, str(tmp_path / "l")], stdout=subprocess.PIPE, check=False)
    assert child.stdout == b"held\n"
    OsFileSystem().lock(str(tmp_path / "l")).release()


def test_folders_one_may_pass_but_not_read_are_no_obstacle() -> None:
    class Guarded(SimulatedDisk):
        def fsync_dir(self, path: str) -> None:
            if path == "/":
                raise PermissionError(errno.EACCES, "not yours", path)
            super().fsync_dir(path)

    disk = Guarded()
    disk.mkdir("/home")
    make_dirs(disk, "/home/me/data")
    assert disk.exists("/home/me/data")
    with pytest.raises(PermissionError):
        make_dirs(disk, "/new")


@pytest.mark.parametrize("write", [False, True])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, make: Callable[[Path], None], write: bool) -> None:
    """Opening a fifo would wait for ever for its other end; a folder would fail later, without its name."""
    make(tmp_path / "x")
    with pytest.raises(Invalid, match=f"{tmp_path}/x is not a file"), translate_os_errors():
        OsFileSystem().open(str(tmp_path / "x"), write=write)


@pytest.mark.parametrize("code", sorted(errno.errorcode))
def test_no_bare_error_of_the_system_reaches_a_caller(code: int) -> None:
    with pytest.raises(PenstockError, match="/store/STORE .*: ") as caught, translate_os_errors():
        raise OSError(code, os.strerror(code), "/store/STORE")
    assert isinstance(caught.value.__cause__, OSError)
    assert ran_out_of_space(caught.value) == (code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG))


def test_an_error_that_says_what_to_do_is_left_as_it_is() -> None:
    with pytest.raises(ProcessLimit, match="none is left"), translate_os_errors():
        raise ProcessLimit("none is left")
