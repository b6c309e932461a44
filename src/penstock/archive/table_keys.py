"""The keys of encrypted tables in this process, as chunks and sections need them.

A chunk's header holds a key number, `table << 16 | generation`, so that a file says itself which table's key unwraps
its data key. Files are opened deep inside trees, merges, checks and tasks of Spark; rather than pass keys through all
of them, a process that may read a store's files registers a source of table keys once (`lend`), under the identity that
the store's files carry. The owner lends keys that it unwraps with the master keys, a task of Spark those that it gets
from the owner.

Thread: any; `_lock` guards the list.
Invariant: master keys never leave the owner; only keys of single tables are lent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from weakref import WeakMethod

from penstock.errors import KeyMissing
from penstock.host import threads

GENERATION_BITS = 16
GENERATION = 1  # of a table's key; others are not made yet

TableKeySource = Callable[[int], bytes]  # returns the key of a table; `KeyMissing` if it has none

_lock = threads.lock("archive.table_keys")
# Guarded by _lock; by the identity in the files of a store. Methods are weak references: lending must not keep a
# connection alive that nobody closed.
_lent: dict[bytes, list[Callable[[], TableKeySource | None]]] = {}


def key_number(table_id: int, encrypted: bool = True) -> int:
    """Return the number under which chunks name the key of a table; 0 if the table is not encrypted."""
    return table_id << GENERATION_BITS | GENERATION if encrypted else 0


class TableKeyRing:
    """The keys of a store's tables as the container needs them; new chunks get that of one table."""

    def __init__(self, source: TableKeySource, table_id: int) -> None:
        self._source = source
        self._table_id = table_id

    def __repr__(self) -> str:
        return f"<the key of table {self._table_id}>"

    def current(self) -> int:
        return key_number(self._table_id)

    def key(self, version: int) -> bytes:
        table_id, generation = version >> GENERATION_BITS, version & ((1 << GENERATION_BITS) - 1)
        if generation != GENERATION:
            raise KeyMissing(f"key {generation} of table {table_id} is not known: open it with a newer Penstock")
        return self._source(table_id)


@contextmanager
def lending(identity: bytes, source: TableKeySource) -> Iterator[None]:
    """Let this process open encrypted files of a store during a block."""
    lend(identity, source)
    try:
        yield
    finally:
        take_back(identity, source)


def lend(identity: bytes, source: TableKeySource) -> None:
    """Let this process open encrypted files of a store, until `take_back`."""
    with _lock:
        _lent.setdefault(identity, []).append(_reference(source))


def take_back(identity: bytes, source: TableKeySource) -> None:
    """Undo `lend`."""
    with _lock:
        left = [reference for reference in _lent.get(identity, ()) if reference() not in (None, source)]
        if left:
            _lent[identity] = left
        else:
            _lent.pop(identity, None)


def _reference(source: TableKeySource) -> Callable[[], TableKeySource | None]:
    return WeakMethod(source) if isinstance(source, MethodType) else lambda: source


def lent_keys(identity: bytes, table_id: int = 0) -> list[TableKeyRing]:
    """Return the keys that were lent for a store's files, the last first.

    There may be several: a restored copy of a store, open beside it, has the identity of the original in its files.
    """
    with _lock:
        sources = [source for reference in reversed(_lent.get(identity, ())) if (source := reference()) is not None]
    return [TableKeyRing(source, table_id) for source in sources]
