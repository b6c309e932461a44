"""A manifest engine in memory, whose commit is one atomic operation of the simulated disk.

LMDB is C and outside the file seam, so crash images of the layers above the manifest are taken with this engine. It
passes the same contract suite as the real one: `Manifest.open("manifest", fs=disk, engine=MemoryEngine)`.

Thread: reads from any thread; one writer at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from penstock.errors import Closed, CommitFailed, Invalid
from penstock.host.clock import Clock
from penstock.host.files import FileSystem
from penstock.manifest.engine import TABLES
from penstock.manifest.memory import MemoryView
from penstock.manifest.settings import ManifestSettings
from penstock.testing.disk import SimulatedDisk

_STATE = msgspec.msgpack.Decoder(dict[str, dict[bytes, bytes]])


class MemoryEngine:
    """The manifest's engine on a simulated disk."""

    def __init__(self, path: str, settings: ManifestSettings, fs: FileSystem, clock: Clock) -> None:
        if not isinstance(fs, SimulatedDisk):
            raise Invalid("the memory engine works on a SimulatedDisk only")
        self._path = path
        self._disk = fs
        self._writing = threading.Lock()
        self._owner = fs.lock(path + ".owner")
        self._closed = False
        self._tables: dict[str, dict[bytes, bytes]] = {name: {} for name in TABLES}
        try:
            if fs.exists(path):
                file = fs.open(path)
                self._tables.update(_STATE.decode(file.pread(file.size(), 0)))
        except BaseException:
            self._owner.release()
            raise

    @contextmanager
    def read(self) -> Iterator[MemoryView]:
        self._check_open()
        yield MemoryView(self._tables)

    @contextmanager
    def write(self) -> Iterator[MemoryView]:
        with self._writing:
            self._check_open()
            view = MemoryView(self._tables)
            yield view
            try:
                self._disk.put_atomically(self._path, msgspec.msgpack.encode(view.tables))
            except OSError as error:
                raise CommitFailed(f"{self._path}: nothing was committed ({error})") from error
            self._tables = view.tables

    def grow(self, *, for_deletes: bool) -> bool:
        return False

    def maintain(self) -> None:
        self._check_open()

    def copy(self, target: str) -> None:
        with self.read() as view:
            file = self._disk.create(target)
            file.pwrite(msgspec.msgpack.encode(view.tables), 0)
            file.close()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._owner.release()

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"{self._path} is closed: open it again")
