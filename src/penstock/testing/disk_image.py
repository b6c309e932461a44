"""What a crash can leave of a simulated disk.

A file holds its synced bytes and the list of changes since; a folder does the same for its names. A crash keeps the
synced part and, by mode, some of the changes: `strict` keeps only what was synced; `kept` keeps everything; `torn`
keeps a random choice, cut at 512-byte sectors, with sizes and names chosen independently of the data; `restart` kills
only the process: the operating system keeps running, and still knows which pages it failed to write.

Thread: an image never changes; the lock of the disk guards the rest.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from penstock.testing.disk import SimulatedDisk

SECTOR_BYTES = 512
_NO_CHANCE = random.Random(0)  # for modes that leave nothing to chance: a generator takes a while to make

Mode: TypeAlias = Literal["strict", "kept", "torn", "restart"]
# A change to a file: bytes at an offset, or (data None) a new size.
Change: TypeAlias = "tuple[int, bytes | None]"
# A change to a folder: (name, its new node or None, name that is removed with it or None).
NameChange: TypeAlias = "tuple[str, int | None, str | None]"


class DiskInode:
    """A file: its live bytes, its synced bytes, and the changes between."""

    def __init__(self, synced: bytes = b"") -> None:
        self.live = bytearray(synced)
        self.synced = synced
        self.changes: list[tuple[Change, bool]] = []  # each with whether a failed fsync lost it


class DiskFolder:
    """A folder: its live names, its synced names, and the changes between."""

    def __init__(self) -> None:
        self.live: dict[str, int] = {}
        self.synced: dict[str, int] = {}
        self.changes: list[NameChange] = []


@dataclass(frozen=True, slots=True)
class Image:
    """The disk before one operation: enough to build the state after any crash there."""

    operation: int
    label: str
    mark: int  # what `on_image` returned: the length of the history by then
    damaged: bool
    capacity_bytes: int | None
    files: dict[int, tuple[bytes, tuple[tuple[Change, bool], ...]]]
    folders: dict[int, tuple[dict[str, int], tuple[NameChange, ...]]]

    def restore(self, mode: Mode, seed: int = 0) -> SimulatedDisk:
        """Return the disk that the machine (in mode `restart`, the next process) sees after the crash."""
        chance = random.Random(f"{seed}/{self.operation}") if mode in ("torn", "kept") else _NO_CHANCE
        odds = chance.choice((0.1, 0.5, 0.9))

        def survives() -> bool:
            return mode == "kept" or (mode == "torn" and chance.random() < odds)

        from penstock.testing.disk import SimulatedDisk

        disk = SimulatedDisk()
        disk._inodes.clear()
        disk._folders.clear()
        for number, (synced, changes) in self.files.items():
            if mode in ("restart", "strict"):
                inode = DiskInode(synced)
            else:
                inode = DiskInode(_survivor(synced, changes, survives, chance))
            if mode == "restart":
                for change, _ in changes:
                    apply(inode.live, change)
                inode.changes = list(changes)
            disk._inodes[number] = inode
        for number, (names, renames) in self.folders.items():
            folder = DiskFolder()
            folder.live = dict(names)
            for rename in renames:
                if mode == "restart" or survives():
                    apply_name(folder.live, rename)
            folder.synced = dict(names) if mode == "restart" else dict(folder.live)
            folder.changes = list(renames) if mode == "restart" else []
            disk._folders[number] = folder
        disk.damaged = self.damaged
        disk.capacity_bytes = self.capacity_bytes
        disk._next_node = 1 + max([*self.files, *self.folders])
        return disk


def apply(content: bytearray, change: Change) -> None:
    """Change the content of a file."""
    offset, data = change
    if data is None:
        if offset < len(content):
            del content[offset:]
        else:
            content.extend(bytes(offset - len(content)))
        return
    if len(content) < offset:
        content.extend(bytes(offset - len(content)))
    content[offset : offset + len(data)] = data


def apply_name(names: dict[str, int], change: NameChange) -> None:
    """Change the names of a folder."""
    name, node, old_name = change
    if old_name is not None:
        names.pop(old_name, None)
    if node is None:
        names.pop(name, None)
    else:
        names[name] = node


def _survivor(
    synced: bytes,
    changes: tuple[tuple[Change, bool], ...],
    survives: Callable[[], bool],
    chance: random.Random,
) -> bytes:
    if not changes:
        return synced
    content = bytearray(synced)
    for (offset, data), _ in changes:
        if data is None:
            if survives():
                apply(content, (offset, None))
            continue
        for start, end in _sectors(offset, len(data)):
            if survives():
                apply(content, (start, data[start - offset : end - offset]))
        # The size may reach the disk without the data: the file then ends in zeros.
        if len(content) < offset + len(data) and survives() and chance.random() < 0.5:
            apply(content, (offset + len(data), None))
    return bytes(content)


def _sectors(offset: int, size: int) -> list[tuple[int, int]]:
    cuts = [offset, *range((offset // SECTOR_BYTES + 1) * SECTOR_BYTES, offset + size, SECTOR_BYTES), offset + size]
    return [(a, b) for a, b in itertools.pairwise(cuts) if a < b]
