from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.errors import CorruptionError, Invalid, PenstockError, ProcessLimit, StoreLocked
from penstock.host.file_errors import ran_out_of_space, translate_os_errors
from penstock.host.file_operations import make_dirs, publish, read_fully, write_fully, zero_fill
from penstock.host.files import FileSystem
from penstock.host.os_files import OsFileSystem
from penstock.testing import SimulatedDisk


@pytest.fixture(params=["os", "simulated"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[FileSystem, str]:
    """The same promises, kept by both implementations."""
    return (OsFileSystem(), str(tmp_path)) if request.param == "os" else (SimulatedDisk(), "")


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


def test_files(place: tuple[FileSystem, str]) -> None:
    fs, root = place
    path = f"{root}/f"
    file = fs.create(path)
    assert file.path == path
    file.pwrite(b"hello", 2)
    file.pwrite(bytearray(b"J"), 2)
    assert (file.size(), file.pread(100, 0), file.pread(2, 3)) == (7, b"\0\0Jello", b"el")
    file.truncate(4)
    file.allocate(0, 10)
    assert file.pread(20, 0) == b"\0\0Je" + bytes(6)
    zero_fill(file, 2, 12)
    assert file.pread(20, 0) == bytes(12)
    file.fsync()
    file.fdatasync()
    assert bytes(file.map(12)) == bytes(12)
    assert bytes(file.map(0)) == b""
    with pytest.raises(CorruptionError, match="13 bytes were expected"):
        file.map(13)
    file.close()
    file.close()
    with pytest.raises(OSError, match="closed|Bad file"):
        file.pread(1, 0)
    with pytest.raises(FileExistsError):
        fs.create(path)
    with pytest.raises(OSError, match="writing|Bad file"):
        fs.open(path).pwrite(b"x", 0)


def test_names(place: tuple[FileSystem, str]) -> None:
    fs, root = place
    make_dirs(fs, f"{root}/a/b")
    make_dirs(fs, f"{root}/a/b")
    fs.mkdir(f"{root}/a/b")
    assert fs.exists(f"{root}/a/b")
    publish(fs, fs.create(f"{root}/a/x.tmp"), f"{root}/a/x")
    publish(fs, fs.create(f"{root}/a/y.tmp"), f"{root}/a/x")
    assert sorted(fs.listdir(f"{root}/a")) == ["b", "x"]
    for missing in (
        lambda: fs.open(f"{root}/a/y"),
        lambda: fs.unlink(f"{root}/a/y"),
        lambda: fs.rename(f"{root}/a/y", f"{root}/a/z"),
        lambda: fs.listdir(f"{root}/c"),
        lambda: fs.fsync_dir(f"{root}/c"),
    ):
        with pytest.raises(FileNotFoundError):
            missing()
    with pytest.raises(FileExistsError):
        fs.mkdir(f"{root}/a/x")
    with pytest.raises(OSError, match="not empty"):
        fs.rmdir(f"{root}/a")
    fs.rmdir(f"{root}/a/b")
    fs.unlink(f"{root}/a/x")
    assert not fs.exists(f"{root}/a/x")


def test_a_lock_is_held_once(place: tuple[FileSystem, str]) -> None:
    fs, root = place
    lock = fs.lock(f"{root}/lock")
    with pytest.raises(StoreLocked, match="locked by another process"):
        fs.lock(f"{root}/lock")
    lock.release()
    fs.lock(f"{root}/lock").release()


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


def test_every_protocol_method_is_there() -> None:
    methods: list[Callable[..., object]] = [getattr(SimulatedDisk, n) for n in vars(FileSystem) if n[0] != "_"]
    assert len(methods) == 12


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
    assert ran_out_of_space(caught.value) == (code in (errno.ENOSPC, errno.EDQUOT))


def test_an_error_that_says_what_to_do_is_left_as_it_is() -> None:
    with pytest.raises(ProcessLimit, match="none is left"), translate_os_errors():
        raise ProcessLimit("none is left")
