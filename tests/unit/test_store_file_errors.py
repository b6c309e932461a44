"""What the system refuses a store: every call says which file it was and what to do, and nothing waits for ever."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from penstock.errors import DiskFailed, GateShut, Invalid, PenstockError
from penstock.host.files import File
from penstock.host.os_files import OsFileSystem
from penstock.store.settings import StoreSettings
from penstock.store.store import Store, open_store

SETTINGS = StoreSettings(background=False)


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A closed store with a shard of each kind that has files."""
    folder = str(tmp_path / "store")
    with open_store(folder, settings=SETTINGS) as store:
        store.kv("rows").put(b"a", b"1", durable=True)
        store.queue("messages").put(b"m", durable=True)
        store.compact("rows")
    with open_store(folder, settings=SETTINGS) as store:
        store.checkpoint()  # so that the next opening need not open a shard
    return folder


def use(path: str) -> None:
    with open_store(path, settings=SETTINGS) as store:
        store.kv("rows").put(b"b", b"2", durable=True)
        store.queue("messages").put(b"n", durable=True)
        store.queue("messages").read()
        store.compact("rows")
        store.checkpoint()


def files_of(path: str) -> list[str]:
    paths = [os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names]
    return [file for file in paths if "/tables/2/" not in file]  # sstables are mapped when they are read


def loop(file: str) -> None:
    os.symlink(file, file)


@pytest.mark.parametrize("put", [os.mkfifo, os.mkdir, loop])
def test_something_else_in_the_place_of_each_file(path: str, put: Callable[[str], None]) -> None:
    copy = f"{path}-copy"
    for file in files_of(path):
        shutil.copytree(path, copy)
        damaged = file.replace(path, copy, 1)
        os.unlink(damaged)
        put(damaged)
        try:
            use(copy)
        except PenstockError as error:
            assert copy in str(error)
        shutil.rmtree(copy)


class RefusingFileSystem(OsFileSystem):
    """Refuses every file of the tables, from a moment on."""

    code = 0

    def open(self, path: str, *, write: bool = False) -> File:
        self._refuse(path)
        return super().open(path, write=write)

    def create(self, path: str) -> File:
        self._refuse(path)
        return super().create(path)

    def _refuse(self, path: str) -> None:
        if self.code and "/tables/" in path:
            raise OSError(self.code, os.strerror(self.code), path)


USES: list[Callable[[Store], object]] = [
    lambda store: store.queue("messages").put(b"n"),
    lambda store: store.queue("messages").read(),
    lambda store: store.kv("rows").put(b"b", b"2", durable=True) and store.compact("rows"),
    lambda store: store.kv("rows").put(b"b", b"2", durable=True) and store.checkpoint(),
]


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.EROFS])
@pytest.mark.parametrize("use", USES)
def test_a_shard_whose_files_the_system_refuses(path: str, use: Callable[[Store], object], code: int) -> None:
    fs = RefusingFileSystem()
    with open_store(path, settings=SETTINGS, fs=fs) as store:
        fs.code = code
        with pytest.raises(DiskFailed if code == errno.EIO else Invalid, match=f"{path}/tables/.* cannot be used"):
            use(store)
        fs.code = 0
        with suppress(GateShut):  # a job that failed a moment ago waits before it is tried again
            use(store)
        store.queue("messages").put(b"last", durable=True)  # nothing was poisoned
    with open_store(path, settings=SETTINGS) as store:
        assert store.kv("rows").get(b"a") == b"1"
        assert [message.payload for message in store.queue("messages").read()][-1] == b"last"
