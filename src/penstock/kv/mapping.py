"""The mapping interface of a kv table, built on its scans, gets and writes.

A table is larger than a dict: `len` counts the rows by reading them, and equality reads them all. Methods that read
before they write (`pop`, `setdefault`, `del`) are two steps, between which others may write; `get`, `put` and `delete`
are one.

Thread: any.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, MutableMapping, ValuesView
from typing import Any, TypeVar

from penstock.errors import Invalid
from penstock.kinds import InThisProcess

K = TypeVar("K", bytes, str)
V = TypeVar("V")


class KvItems(ItemsView[K, V]):
    """(key, value) pairs in key order, as of the beginning of each iteration."""

    _mapping: ReadableMapping[K, V]

    def __iter__(self) -> Iterator[tuple[K, V]]:
        return self._mapping.scan()


class KvValues(ValuesView[V]):
    """Values in key order, as of the beginning of each iteration."""

    _mapping: ReadableMapping[Any, V]

    def __iter__(self) -> Iterator[V]:
        return (value for _, value in self._mapping.scan())

    def __contains__(self, value: object) -> bool:
        return any(item == value for item in self)


class ReadableMapping(InThisProcess, Mapping[K, V]):
    """A kv table as a read-only mapping."""

    @abstractmethod
    def scan(self, *, limit: int | None = None) -> Iterator[Any]:
        """Return (key, value) pairs in key order."""

    @abstractmethod
    def count(self) -> int:
        """Count the keys."""

    def __iter__(self) -> Iterator[K]:
        return (key for key, _ in self.scan())

    def __len__(self) -> int:
        return self.count()

    def __bool__(self) -> bool:
        return any(True for _ in self.scan(limit=1))

    def keys(self) -> KeysView[K]:
        """Return a view of the keys, in order.

        >>> list(users.keys())
        [b'ada']
        """
        return KeysView(self)

    def items(self) -> KvItems[K, V]:
        """Return a view of the (key, value) pairs, in key order.

        >>> list(users.items())
        [(b'ada', b'1815')]
        """
        return KvItems(self)

    def values(self) -> KvValues[V]:
        """Return a view of the values, in key order.

        >>> list(users.values())
        [b'1815']
        """
        return KvValues(self)


class NotIterable(Invalid, TypeError):
    """As `Invalid`; Python's own mappings raise a `TypeError` for it."""


def _pairs(rows: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    for row in rows:
        try:
            key, value = row
        except (TypeError, ValueError) as error:
            raise Invalid(f"update takes a mapping, or (key, value) pairs ({error})") from None
        yield key, value


class WritableMapping(ReadableMapping[K, V], MutableMapping[K, V]):
    """A kv table as a mutable mapping."""

    @abstractmethod
    def put_many(self, pairs: Mapping[K, V] | Iterable[tuple[K, V]]) -> Any:
        """Set many keys, all of them or none."""

    @abstractmethod
    def delete(self, key: K) -> Any:
        """Delete a key."""

    def __delitem__(self, key: K) -> None:
        if key not in self:
            raise KeyError(key)
        self.delete(key)

    def update(self, *pairs: Any, **by_name: Any) -> None:
        """Set many keys, all of them or none."""
        if len(pairs) > 1:
            raise Invalid("update takes one mapping, or (key, value) pairs")
        rows: dict[Any, V] = {}
        for each in pairs:
            if hasattr(each, "keys"):
                rows.update({key: each[key] for key in each.keys()})  # noqa: SIM118
            elif isinstance(each, Iterable):
                rows.update(_pairs(each))
            else:
                raise NotIterable(f"update takes a mapping, or (key, value) pairs, not {type(each).__name__}")
        rows.update(by_name)  # names are text: a table of bytes refuses them
        self.put_many(rows)
