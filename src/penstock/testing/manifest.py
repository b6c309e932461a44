"""A manifest engine in memory, whose commit is one atomic operation of the simulated disk.

LMDB is C and outside the file seam, so crash images of the layers above the manifest are taken with this engine. It
passes the same contract suite as the real one: `Manifest.open("manifest", fs=disk, engine=MemoryEngine)`.

Thread: reads from any thread; one writer at a time.
"""

from __future__ import annotations

import msgspec

from penstock.errors import CommitFailed, Invalid
from penstock.host.clock import Clock
from penstock.host.files import FileSystem
from penstock.manifest.engine import TABLES
from penstock.manifest.memory import MemoryTables, MemoryView
from penstock.manifest.settings import ManifestSettings
from penstock.testing.disk import SimulatedDisk

_STATE = msgspec.msgpack.Decoder(dict[str, dict[bytes, bytes]])


class MemoryEngine(MemoryTables):
    """The manifest's engine on a simulated disk."""

    def __init__(self, path: str, settings: ManifestSettings, fs: FileSystem, clock: Clock) -> None:
        if not isinstance(fs, SimulatedDisk):
            raise Invalid("the memory engine works on a SimulatedDisk only")
        super().__init__(path, {name: {} for name in TABLES})
        self._disk = fs
        self._owner = fs.lock(path + ".owner")
        try:
            if fs.exists(path):
                file = fs.open(path)
                self._tables.update(_STATE.decode(file.pread(file.size(), 0)))
        except BaseException:
            self._owner.release()
            raise

    def _make_durable(self, tables: dict[str, dict[bytes, bytes]]) -> None:
        try:
            self._disk.put_atomically(self._path, msgspec.msgpack.encode(tables))
        except OSError as error:
            raise CommitFailed(f"{self._path}: nothing was committed ({error})") from error

    def copy(self, target: str) -> None:
        with self.read() as view:
            file = self._disk.create(target)
            file.pwrite(msgspec.msgpack.encode(view.tables), 0)
            file.close()

    def read_copy(self, path: str) -> MemoryView:
        file = self._disk.open(path)
        return MemoryView(_STATE.decode(file.pread(file.size(), 0)))

    def close(self) -> None:
        if not self._closed:
            super().close()
            self._owner.release()
