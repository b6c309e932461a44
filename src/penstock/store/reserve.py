"""Disk space held back, so that deletes can be written when the disk is full.

Thread: `claim` by opening and one scheduler task, `release` by any thread that meets a full disk.
"""

from __future__ import annotations

from penstock.host.file_operations import publish, remove_file, zero_fill
from penstock.host.files import FileSystem


class Reserve:
    """A file of zeros beside the journal."""

    def __init__(self, fs: FileSystem, root: str, size_bytes: int) -> None:
        self._fs = fs
        self._root = root
        self._path = f"{root}/RESERVE"
        self.size_bytes = size_bytes

    def claim(self) -> bool:
        """Allocate the reserve; False if the disk has no room for it."""
        if self._fs.exists(self._path):
            return True
        if self.lacks_space():
            return False
        temporary = f"{self._path}.tmp"
        try:
            if self._fs.exists(temporary):  # of a process that died
                self._fs.unlink(temporary)
            file = self._fs.create(temporary)
            try:
                zero_fill(file, 0, self.size_bytes)
                publish(self._fs, file, self._path)
            finally:
                file.close()
        except OSError:
            remove_file(self._fs, temporary)
            return False
        return True

    def lacks_space(self) -> bool:
        """Whether the reserve was released and the disk has no room for it: the rest is for deletes."""
        free = self.free_bytes()
        return free is not None and free < 2 * self.size_bytes and not self._fs.exists(self._path)

    def free_bytes(self) -> int | None:
        """Return the free bytes of the disk, without the reserve; None if unknown."""
        return self._fs.free_bytes(self._root)

    def release(self) -> bool:
        """Free the reserve; False if there was none."""
        return self._fs.exists(self._path) and remove_file(self._fs, self._path)
