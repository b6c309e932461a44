"""Space kept back on the disk, so that deletes can be written when it is full.

Thread: `claim` from opening and one task of the scheduler, `release` from whoever meets a full disk.
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
        """Have the space; False if the disk does not give it."""
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
        """Whether the reserve is gone and the disk has no room for it: what is left is for deletes."""
        free = self.free_bytes()
        return free is not None and free < 2 * self.size_bytes and not self._fs.exists(self._path)

    def free_bytes(self) -> int | None:
        """How much the disk has beside it; None where nobody knows."""
        return self._fs.free_bytes(self._root)

    def release(self) -> bool:
        """Give the space free; False if there was none."""
        return self._fs.exists(self._path) and remove_file(self._fs, self._path)
