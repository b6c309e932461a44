"""A checksum for each page of a manifest, compared before LMDB may follow the page.

LMDB's pages have none, and a damaged page can hide rows or end the process. A clean close writes the sums (see
`examine.ClosingStamp`). Opening compares the meta pages and the tree of tables alone, so it takes as long for many rows
as for few (a file of a few megabytes is compared whole). The pages of a table are compared when they are first needed:

    a read         the pages on the path to its rows, and the leaf after them, where LMDB may step;
                   the whole table if it is small, or if the read is long
    a write        the whole table, because LMDB moves rows between neighbours; before the first, also the list of free
                   pages
    check_rest     every table that is left: by the engine's maintenance, and before a backup

That is enough because LMDB never changes a page that is in use. A table is changed only after all its pages were
compared; until then its pages are those of the opening. Pages written since the opening are ours, and are trusted.

Thread: any. Two threads may compare the same page; a table leaves `trees` before its first write.
Invariants: (1) LMDB follows a page of a table in `trees` only if its flag is set. (2) damage, once found, stays: every
later use of the engine raises it.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
from xxhash import xxh3_64_intdigest

from penstock.errors import CorruptionError
from penstock.host import threads
from penstock.host.files import File
from penstock.manifest.pages import TreeRoot

SUM_BYTES = 8
FREE_PAGES = ""  # the name, here, of LMDB's tree of free pages
TABLE_PAGES_SMALL = 32  # a table of at most this many pages is compared whole at its first use
READ_PAGES = 256  # at once
SCAN_PAGES_MAX = 1_024  # leaves; a longer read compares the whole table

_HEADER_BYTES, _NODE_BYTES = 16, 8  # of a page, of a node
_LOWER = struct.Struct("<H")  # at 12: end of the pointers
_NODE = struct.Struct("<HHHH")  # as in `pages`
_PAGE_NUMBER = struct.Struct("<Q")
_ELSEWHERE = 1  # flag of a node: its value is on overflow pages


class PageReader:
    """Pages of a file, by number. They are read, not mapped: a disk that fails must not end the process."""

    def __init__(self, file: File, page_bytes: int) -> None:
        self._file = file
        self._page_bytes = page_bytes

    def read(self, first: int, count: int = 1) -> bytes:
        """Return pages that follow each other."""
        size, offset = count * self._page_bytes, first * self._page_bytes
        data = self._file.pread(size, offset)
        if len(data) < size:
            raise CorruptionError(self._file.path, offset + len(data), "it ends inside a page")
        return data

    def sums(self, numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Iterate over (number, sum) of pages. Requires: their numbers ascend."""
        size, at = self._page_bytes, 0
        while at < len(numbers):
            first, end = numbers[at], min(at + READ_PAGES, len(numbers))
            count = next((n for n in range(1, end - at) if numbers[at + n] != first + n), end - at)
            pages = memoryview(self.read(first, count))
            for number in range(count):
                yield first + number, xxh3_64_intdigest(pages[number * size : (number + 1) * size])
            at += count

    def close(self) -> None:
        self._file.close()

    def walk(self, tree: TreeRoot, visit: Callable[[Iterable[int]], None]) -> None:
        """Call `visit` with the page numbers of a tree, level by level, before any of them is read here."""
        level = [tree.root]
        for depth in range(tree.depth, 0, -1):
            visit(level)
            if depth > 1:
                level = [child for number in level for child in self._children(number)]
            elif tree.overflow_pages:
                for number in level:
                    visit(self.overflow(number))

    def _nodes(self, number: int) -> tuple[bytes, list[int]]:
        page = self.read(number)
        count = (_LOWER.unpack_from(page, 12)[0] - _HEADER_BYTES) // 2
        return page, np.frombuffer(page, np.uint16, count, _HEADER_BYTES).tolist()

    def _children(self, number: int) -> list[int]:
        page, nodes = self._nodes(number)
        words = np.frombuffer(page, np.uint16).astype(np.int64)
        at = np.array(nodes) >> 1  # nodes begin at even bytes
        children: list[int] = (words[at] | words[at + 1] << 16 | words[at + 2] << 32).tolist()
        return children

    def overflow(self, number: int) -> list[int]:
        """Return the pages that hold values of a leaf."""
        page, nodes = self._nodes(number)
        numbers: list[int] = []
        for at in nodes:
            low, high, flags, key_bytes = _NODE.unpack_from(page, at)
            if flags & _ELSEWHERE:
                first = _PAGE_NUMBER.unpack_from(page, at + _NODE_BYTES + key_bytes)[0]
                count = (_HEADER_BYTES - 1 + (low | high << 16)) // self._page_bytes + 1
                numbers.extend(range(first, first + count))
        return numbers

    def branch(self, number: int) -> tuple[list[bytes], list[int]]:
        """Return the first key of each child of a branch page, the first one empty, and the children."""
        page, nodes = self._nodes(number)
        starts = [(at + _NODE_BYTES, at + _NODE_BYTES + _NODE.unpack_from(page, at)[3]) for at in nodes]
        keys = [page[start:end] for start, end in starts]
        return [b"", *keys[1:]], self._children(number)


class UncheckedPages:
    """The pages of a file that were not compared since its opening."""

    def __init__(self, file: File, page_bytes: int, sums: bytes) -> None:
        self._path = file.path
        self._page_bytes = page_bytes
        self._pages = PageReader(file, page_bytes)
        self.sums = sums
        self._sums = memoryview(sums).cast("Q")
        self._same = bytearray(len(self._sums))  # 1: the page has its sum
        self.trees: dict[str, TreeRoot] = {}  # not compared in full
        self.damage: CorruptionError | None = None

    def check(self, numbers: Iterable[int]) -> None:
        """Raise `CorruptionError` unless every one of these pages has its sum."""
        sums, same = self._sums, self._same
        left = sorted({number for number in numbers if number >= len(sums) or not same[number]})
        if left and left[-1] >= len(sums):
            raise self._damaged(left[-1])
        for number, value in self._pages.sums(left):
            if value != sums[number]:
                raise self._damaged(number)
            same[number] = 1

    def _damaged(self, number: int) -> CorruptionError:
        at = min(number, len(self._sums)) * self._page_bytes
        return CorruptionError(self._path, at, "this page changed since the file was closed")

    def raise_damage(self) -> None:
        """Raise the damage that was found, if any."""
        damage = self.damage
        if damage is not None:  # a new error each time: one that is raised again collects the frames of all callers
            raise CorruptionError(damage.path, damage.offset, damage.reason)

    def walk(self, tree: TreeRoot) -> None:
        """Compare every page of a tree."""
        self._pages.walk(tree, self.check)

    def close(self) -> None:
        """Close the file; nothing can be compared after that."""
        self._pages.close()

    def check_read(self, table: str, start: bytes, stop: bytes | None) -> None:
        """Compare what LMDB may follow to read rows with `start <= key <= stop`."""
        tree = self.trees.get(table)
        if tree is not None:
            small = tree.branch_pages + tree.leaf_pages + tree.overflow_pages <= TABLE_PAGES_SMALL
            if small or not self._try(table, lambda: self._check_path(tree, start, stop)):
                self.check_table(table)

    def check_table(self, table: str) -> None:
        """Compare every page of a table; from then on it needs no check."""
        tree = self.trees.get(table)
        if tree is not None:
            self._try(table, lambda: self.walk(tree))
            self.trees.pop(table, None)

    def check_rest(self) -> None:
        """Compare all pages that are left."""
        for table in list(self.trees):
            self.check_table(table)

    def _try(self, table: str, compare: Callable[[], bool | None]) -> bool:
        self.raise_damage()
        try:
            return compare() is not False
        except Exception as error:
            threads.raise_interrupt(error)  # a `TimeoutError` of an alarm: not of the disk
            if table not in self.trees:  # another thread compared all of it; since then its pages may have changed
                return True
            if isinstance(error, OSError):
                error = CorruptionError(self._path, 0, f"it cannot be read ({error})")
            if isinstance(error, CorruptionError):
                self.damage = error
            raise error

    def _check_path(self, tree: TreeRoot, start: bytes, stop: bytes | None) -> bool:
        """Compare the pages of a read; False if it is too long."""
        level: list[tuple[int, bytes | None, bytes | None]] = [(tree.root, start, stop)] if tree.depth else []
        for depth in range(tree.depth, 0, -1):
            numbers = [number for number, _, _ in level]
            if len(numbers) > SCAN_PAGES_MAX:
                return False
            self.check(numbers)
            if depth > 1:
                level = [part for page in level for part in self._parts(*page)]
            elif tree.overflow_pages:
                for number in numbers:
                    self.check(self._pages.overflow(number))
        return True

    def _parts(
        self, number: int, start: bytes | None, stop: bytes | None
    ) -> list[tuple[int, bytes | None, bytes | None]]:
        """Return the children of a branch that a read needs, each with its part of the range."""
        keys, children = self._pages.branch(number)
        first = bisect_right(keys, start) - 1 if start else 0
        last = len(keys) - 1 if stop is None else max(first, bisect_right(keys, stop) - 1)
        parts: list[tuple[int, bytes | None, bytes | None]] = []
        for at in range(first, last + 1):
            parts.append((children[at], start if at == first else b"", stop if at == last else None))
        if last + 1 < len(children):
            parts.append((children[last + 1], b"", b""))  # only its first leaf: LMDB steps there from the last one
        return parts
