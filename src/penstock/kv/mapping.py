"""What makes a kv table a Python mapping, over its scans, gets and writes.

A mapping of this size is not a dict: `len` counts the rows, equality reads them all, and what reads before it writes
(`pop`, `setdefault`, `del`) is two steps, between which others may write. `get`, `put` and `delete` are one.

Thread: any.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, MutableMapping, ValuesView
from typing import Any, TypeVar

from penstock.errors import Invalid
from penstock.kinds import InThisProcess

V = TypeVar("V")


class KvItems(ItemsView[bytes, V]):
    """(key, value) pairs, in order of the keys, at the moment at which an iteration begins."""

    _mapping: ReadableMapping[V]

    def __iter__(self) -> Iterator[tuple[bytes, V]]:
        return self._mapping.scan()


class KvValues(ValuesView[V]):
    """Values in order of their keys, at the moment at which an iteration begins."""

    _mapping: ReadableMapping[V]

    def __iter__(self) -> Iterator[V]:
        return (value for _, value in self._mapping.scan())

    def __contains__(self, value: object) -> bool:
        return any(found == value for found in self)


class ReadableMapping(InThisProcess, Mapping[bytes, V]):
    """A kv table as a mapping that is read."""

    @abstractmethod
    def scan(self, start: bytes = b"", end: bytes | None = None, *, limit: int | None = None) -> Iterator[Any]:
        """Return (key, value) pairs in order of the keys."""

    @abstractmethod
    def count(self) -> int:
        """Count the keys."""

    def __iter__(self) -> Iterator[bytes]:
        return (key for key, _ in self.scan())

    def __len__(self) -> int:
        return self.count()

    def __bool__(self) -> bool:
        return any(True for _ in self.scan(limit=1))

    def keys(self) -> KeysView[bytes]:
        """Return a view of the keys, in their order."""
        return KeysView(self)

    def items(self) -> KvItems[V]:
        """Return a view of the (key, value) pairs, in order of the keys."""
        return KvItems(self)

    def values(self) -> KvValues[V]:
        """Return a view of the values, in order of their keys."""
        return KvValues(self)


class WritableMapping(ReadableMapping[V], MutableMapping[bytes, V]):
    """A kv table as a mapping that is written, too."""

    @abstractmethod
    def put_many(self, pairs: Mapping[bytes, V] | Iterable[tuple[bytes, V]]) -> Any:
        """Set many keys, all of them or none."""

    @abstractmethod
    def delete(self, key: bytes) -> Any:
        """Remove a key."""

    def __delitem__(self, key: bytes) -> None:
        if key not in self:
            raise KeyError(key)
        self.delete(key)

    def update(self, *pairs: Any, **by_name: Any) -> None:
        """Set many keys, all of them or none."""
        if by_name or len(pairs) > 1:
            raise Invalid("update takes one mapping, or (key, value) pairs: keys are bytes, and names are not")
        for each in pairs:
            self.put_many({key: each[key] for key in each.keys()} if hasattr(each, "keys") else each)  # noqa: SIM118
