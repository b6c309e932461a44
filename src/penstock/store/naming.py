"""Finding a table by its name and kind: the part that a store, a batch and a snapshot share.

Thread: any.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from penstock.errors import KindMismatch, NotFound
from penstock.kinds import InThisProcess, Kind
from penstock.partition.ledger import TableInfo
from penstock.registry import check_name


class NamedTables(InThisProcess, ABC):
    """Something that has tables."""

    @abstractmethod
    def _find(self, name: str) -> TableInfo | None:
        """Return what is known of a table; an error if this cannot be used any more."""

    @abstractmethod
    def _unknown(self, name: str) -> NotFound:
        """Return the error for a table that is not there."""

    def _info(self, name: str, kind: Kind | None = None) -> TableInfo:
        """Return what is known of a table; `NotFound`, or `KindMismatch` if it is not of the kind."""
        info = self._find(check_name(name))
        if info is None:
            raise self._unknown(name)
        if kind is not None:
            check_kind(info, kind)
        return info


def check_kind(info: TableInfo, kind: Kind) -> None:
    """`KindMismatch` if a table is of another kind."""
    if info.kind != kind.name:
        raise KindMismatch(f"table {info.name} is of the kind {info.kind}, not {kind.name}: use table({info.name!r})")
