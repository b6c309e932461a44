"""Plain containers: a chunk's content as is, mapped and read without a copy.

Thread: a writer belongs to one thread; a chunk may be read by any number.
Invariant: a chunk appears under its name whole and synced, or not at all.
"""

from __future__ import annotations

from penstock.errors import CorruptionError
from penstock.host.file_operations import publish, remove_file
from penstock.host.files import Buffer, FileSystem

WRITE_BYTES = 1 << 20


class TemporaryFile:
    """A file that is renamed to its target when it is complete."""

    def __init__(self, fs: FileSystem, target: str) -> None:
        self._fs = fs
        self._target = target
        temporary = target + ".tmp"
        if fs.exists(temporary):  # left by an attempt that ended early; this attempt owns the name
            fs.unlink(temporary)
        self.file = fs.create(temporary)

    def publish(self) -> None:
        publish(self._fs, self.file, self._target)
        self.file.close()

    def abort(self) -> None:
        self.file.close()
        remove_file(self._fs, self.file.path)


class PlainWriter:
    """Writes content as is."""

    def __init__(self, fs: FileSystem, path: str) -> None:
        self._out = TemporaryFile(fs, path)
        self._parts: list[Buffer] = []
        self._pending = 0
        self._at = 0

    def write(self, data: Buffer) -> None:
        if len(data) >= WRITE_BYTES:  # large enough to be written on its own, without a copy
            self._drain()
            self._parts = [data]
            self._drain()
            return
        self._parts.append(data)
        self._pending += len(data)
        if self._pending >= WRITE_BYTES:
            self._drain()

    def _drain(self) -> None:
        if not self._parts:
            return
        data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts, self._pending = [], 0
        self._out.file.pwrite(data, self._at)
        self._at += len(data)

    def finish(self) -> int:
        self._drain()
        self._out.publish()
        return self._at

    def abort(self) -> None:
        self._out.abort()


class PlainChunk:
    """Mapped content."""

    lazy = False
    key = 0

    def __init__(self, path: str, view: memoryview) -> None:
        self._path = path
        self._view: memoryview | None = view
        self._size = len(view)

    @property
    def path(self) -> str:
        return self._path

    @property
    def size(self) -> int:
        return self._size

    @property
    def view(self) -> memoryview | None:
        return self._view

    def read(self, start: int, end: int) -> memoryview:
        if self._view is None or not 0 <= start <= end <= self._size:
            raise CorruptionError(self._path, self._size, f"bytes {start} to {end} are missing")
        return self._view[start:end]

    read_again = read

    def close(self) -> None:
        self._view = None  # unmapped when its last slice is freed
