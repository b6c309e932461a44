"""Reading the pages of an LMDB file without LMDB, checking each of them.

LMDB maps its file and follows page numbers: a damaged one kills the process by a signal, or silently hides rows. Here
every page of both trees is read as bytes, and everything that LMDB relies on is checked: page numbers, kinds and
bounds, the order of keys within and between pages, the row and page counts of each tree, and that no page is used twice
or both used and free. The content of the rows is left to the caller.

The layout is that of LMDB 0.9 on 64 bits, little-endian; docs/format/manifest.md names what of it we rely on.

Thread: the one that opens the manifest, before it is mapped.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from penstock.errors import CorruptionError
from penstock.host.files import File

_PAGE = struct.Struct("<QHHHH")  # its own number, pad, flags, end of the pointers, start of the nodes
_OVERFLOW_COUNT = struct.Struct("<I")  # where other pages have the last two
_NODE = struct.Struct("<HHHH")  # low and high half of a size, flags, bytes of the key (a child: 48 bits of its number)
_TREE = struct.Struct("<IHHQQQQQ")  # pad, flags, depth, branch pages, leaf pages, overflow pages, rows, root
_META = struct.Struct("<QHH4xIIQQ48s48sQQ")  # page, pad, flags, magic, format, address, map, two trees, last page, txn
_U64 = struct.Struct("<Q")
assert (_PAGE.size, _NODE.size, _TREE.size, _META.size) == (16, 8, 48, 152)

_MAGIC, _FORMAT = 0xBEEFC0DE, 1
_BRANCH, _LEAF, _OVERFLOW, _META_PAGE = 1, 2, 4, 8  # flags of a page
_ELSEWHERE, _SUBTREE = 1, 2  # flags of a node: its value is on overflow pages; it is the root of a named table
_INTEGER_KEYS = 8  # flags of a tree
_ONE_FILE = 0x4000  # among the flags of the free-page tree: the environment is a file, not a folder
_NO_ROOT = 2**64 - 1
_DEPTH_MAX = 32
_PAGE_SIZES = frozenset(512 << n for n in range(8))


@dataclass(frozen=True, slots=True)
class TreeRoot:
    """The header of a B+ tree."""

    pad: int
    flags: int
    depth: int
    branch_pages: int
    leaf_pages: int
    overflow_pages: int
    rows: int
    root: int


@dataclass(frozen=True, slots=True)
class MetaPage:
    """The newer of the two meta pages: the last commit."""

    page_bytes: int
    last_page: int
    transaction: int
    free: TreeRoot
    main: TreeRoot

    @property
    def used_bytes(self) -> int:
        return (self.last_page + 1) * self.page_bytes


def read_meta(file: File) -> MetaPage:
    """Return the last commit; `CorruptionError` if the two meta pages do not belong together."""
    first = _read_meta_page(file, 0, 0)
    second = _read_meta_page(file, 1, first.page_bytes)
    # Each transaction writes the page of its own parity, so that the two are neighbours. A new file has 0 twice.
    transactions = (first.transaction, second.transaction)
    if transactions != (0, 0) and (abs(first.transaction - second.transaction) != 1 or first.transaction & 1):
        raise CorruptionError(file.path, 0, f"its meta pages have the transactions {transactions}: not consecutive")
    newest = max(first, second, key=lambda meta: meta.transaction)
    if newest.used_bytes > file.size():
        raise CorruptionError(file.path, file.size(), f"it ends here, but has pages up to byte {newest.used_bytes}")
    return newest


def _read_meta_page(file: File, number: int, offset: int) -> MetaPage:
    data = file.pread(_META.size, offset)
    if len(data) < _META.size:
        raise CorruptionError(file.path, offset, "it ends inside its meta pages")
    page, _, flags, magic, layout, _, _, free, main, last_page, transaction = _META.unpack(data)
    trees = TreeRoot(*_TREE.unpack(free)), TreeRoot(*_TREE.unpack(main))
    valid = (page, flags, magic, layout) == (number, _META_PAGE, _MAGIC, _FORMAT)
    if not valid or trees[0].pad not in _PAGE_SIZES or (offset and trees[0].pad != offset):
        raise CorruptionError(file.path, offset, "this is not an LMDB meta page")
    return MetaPage(trees[0].pad, last_page, transaction, *trees)


class PageWalk:
    """One pass over all pages of a file."""

    def __init__(self, file: File, meta: MetaPage) -> None:
        self._file = file
        self._meta = meta
        self._taken = bytearray(meta.last_page + 1)  # 1: visited
        self._taken[: min(2, len(self._taken))] = b"\1\1"[: len(self._taken)]
        self._counts = [0, 0, 0]  # branch, leaf and overflow pages of the tree that is walked
        self.tables: set[str] = set()  # whose rows were read

    def rows(self) -> Iterator[tuple[str, bytes, bytes]]:
        """Iterate over (table, key, value) of every row, in order. The file is valid only if the iteration ends."""
        for table, tree in self.roots().items():
            self.tables.add(table)
            for key, row, flags in self._tree(tree, 0):
                if flags & _SUBTREE:
                    raise self._damage(self._meta.main.root, "a row is marked as a table")
                yield table, key, row
        self._check_free()

    def roots(self) -> dict[str, TreeRoot]:
        """Return the root of each table, by name. No page of a table is read."""
        tables = [(key, value) for key, value, flags in self._tree(self._meta.main, 0) if self._is_subtree(key, flags)]
        if any(len(value) != _TREE.size for _, value in tables):
            raise self._damage(self._meta.main.root, "the root of a table has a wrong size")
        return {name.decode(errors="replace"): TreeRoot(*_TREE.unpack(value)) for name, value in tables}

    def _is_subtree(self, key: bytes, flags: int) -> bool:
        if flags != _SUBTREE:
            raise self._damage(self._meta.main.root, f"{key!r} is not marked as a table")
        return True

    def _check_free(self) -> None:
        """Check that no free page is in use or free twice: LMDB would overwrite it."""
        for key, value, _ in self._tree(self._meta.free, _INTEGER_KEYS):
            count = _U64.unpack_from(value)[0] if len(value) >= _U64.size else _NO_ROOT
            if (count + 1) * _U64.size > len(value) or _U64.unpack(key)[0] > self._meta.transaction:
                raise self._damage(self._meta.free.root, "a list of free pages is cut short or from the future")
            for number in struct.unpack_from(f"<{count}Q", value, _U64.size):
                self._take(number)

    def _tree(self, tree: TreeRoot, flags: int) -> Iterator[tuple[bytes, bytes, int]]:
        """Iterate over (key, value, flags) of a tree's leaves, and check them against its header."""
        self._counts, rows = [0, 0, 0], 0
        integer = flags == _INTEGER_KEYS
        if tree.flags & ~_ONE_FILE != flags or (tree.pad and not integer) or tree.depth > _DEPTH_MAX:
            raise self._damage(tree.root, f"a tree's root has the flags {tree.flags} and the depth {tree.depth}")
        if (tree.root == _NO_ROOT) != (tree.depth == 0):
            raise self._damage(0, "a tree has a depth and no root, or a root and no depth")
        if tree.depth:
            for row in self._subtree(tree.root, tree.depth, None, None, integer):
                rows += 1
                yield row
        if (*self._counts, rows) != (tree.branch_pages, tree.leaf_pages, tree.overflow_pages, tree.rows):
            reason = f"a tree has {rows} rows where it should have {tree.rows}, or other pages than it says"
            raise self._damage(tree.root, reason)

    def _subtree(
        self, number: int, depth: int, low: bytes | None, high: bytes | None, integer: bool
    ) -> Iterator[tuple[bytes, bytes, int]]:
        """Iterate over the leaves below a page, whose keys must all be in [low, high)."""
        page = self._page(number, _BRANCH if depth > 1 else _LEAF)
        nodes = self._nodes(number, page)
        self._counts[0 if depth > 1 else 1] += 1

        def order(key: bytes) -> bytes:
            return key[::-1] if integer else key  # integers are little-endian

        before = low
        for position, (size, flags, start, end) in enumerate(nodes):
            key = page[start:end]
            if integer and len(key) != _U64.size and (depth == 1 or position):
                raise self._damage(number, "a key has a wrong size")
            if depth > 1 and position == 0:
                key = low if low is not None else b""  # the first key of a branch is not used
            elif (before is not None and order(key) < order(before)) or (position and before == key):
                raise self._damage(number, "keys are out of order")
            if high is not None and order(key) >= order(high):
                raise self._damage(number, "keys are out of order")
            before = key
            if depth == 1:
                yield key, self._value(number, page, size, flags, end), flags
                continue
            following = nodes[position + 1] if position + 1 < len(nodes) else None
            until = high if following is None else page[following[2] : following[3]]
            child = size | flags << 32
            yield from self._subtree(child, depth - 1, key if position else low, until, integer)

    def _page(self, number: int, kind: int) -> bytes:
        self._take(number)
        size = self._meta.page_bytes
        page = self._read(number * size, size)
        own, _, flags, _, _ = _PAGE.unpack_from(page)
        if own != number or flags != kind:
            raise self._damage(number, f"this should be page {number} of kind {kind}, not {own} of kind {flags}")
        return page

    def _read(self, offset: int, size: int) -> bytes:
        data = self._file.pread(size, offset)
        if len(data) < size:
            raise CorruptionError(self._file.path, offset, "it ends inside a page")
        return data

    def _nodes(self, number: int, page: bytes) -> list[tuple[int, int, int, int]]:
        """Return (size or child, flags, start and end of the key) of each node of a page."""
        lower, upper = _PAGE.unpack_from(page)[3:]
        count = (lower - _PAGE.size) // 2
        if not _PAGE.size < lower <= upper <= len(page) or lower & 1:
            raise self._damage(number, "a page's bounds are outside the page")
        nodes: list[tuple[int, int, int, int]] = []
        for position in struct.unpack_from(f"<{count}H", page, _PAGE.size):
            if not upper <= position <= len(page) - _NODE.size:
                raise self._damage(number, "a row begins outside its page")
            low, high, flags, key_bytes = _NODE.unpack_from(page, position)
            start = position + _NODE.size
            if start + key_bytes > len(page):
                raise self._damage(number, "a key reaches beyond its page")
            nodes.append((low | high << 16, flags, start, start + key_bytes))
        return nodes

    def _value(self, number: int, page: bytes, size: int, flags: int, start: int) -> bytes:
        if flags not in (0, _ELSEWHERE, _SUBTREE):
            raise self._damage(number, f"a row has the flags {flags}")
        end = start + (_U64.size if flags & _ELSEWHERE else size)
        if end > len(page):
            raise self._damage(number, "a value reaches beyond its page")
        if not flags & _ELSEWHERE:
            return page[start:end]
        return self._overflow(_U64.unpack(page[start:end])[0], size)

    def _overflow(self, number: int, size: int) -> bytes:
        head = self._page(number, _OVERFLOW)
        count = _OVERFLOW_COUNT.unpack_from(head, 12)[0]
        if count * self._meta.page_bytes < _PAGE.size + size:
            raise self._damage(number, "a value is longer than its pages")
        for following in range(number + 1, number + count):
            self._take(following)
        self._counts[2] += count
        return self._read(number * self._meta.page_bytes + _PAGE.size, size)

    def _take(self, number: int) -> None:
        if number >= len(self._taken) or self._taken[number]:
            raise self._damage(number, "this page is used twice, both free and used, or past the last page")
        self._taken[number] = 1

    def _damage(self, number: int, reason: str) -> CorruptionError:
        return CorruptionError(self._file.path, min(number, len(self._taken)) * self._meta.page_bytes, reason)
