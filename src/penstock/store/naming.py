"""Finds tables by name and kind, for a store, a batch and a snapshot; creates them in a store.

Thread: any.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import msgspec

from penstock.arguments import flag
from penstock.errors import KindMismatch, NotFound
from penstock.kinds import InThisProcess, Kind, Port
from penstock.kinds.change_reading import as_changing
from penstock.kinds.changes import ChangeOptions, change_options
from penstock.partition.ledger_records import TableInfo
from penstock.partition.storage_options import StorageOptions, encode_storage
from penstock.registry import BUILT_IN, check_name, check_shards


class NamedTables(InThisProcess, ABC):
    """Base of the classes that have tables by name."""

    @abstractmethod
    def _find(self, name: str) -> TableInfo | None:
        """Return a table's info, None if there is no such table; raises if this object was closed."""

    @abstractmethod
    def _unknown(self, name: str) -> NotFound:
        """Return the error for a table that does not exist."""

    def _info(self, name: str, kind: Kind | None = None) -> TableInfo:
        """Return a table's info; `NotFound` if it does not exist, `KindMismatch` if it is of another kind."""
        info = self._find(check_name(name))
        if info is None:
            raise self._unknown(name)
        if kind is not None:
            check_kind(info, kind)
        return info


class CreatedTables(NamedTables):
    """Base of a store: tables that it lacks are created."""

    _port: Port
    _durable: bool

    def _find_cached(self, name: str) -> TableInfo | None:
        """Return a table as `_find` does; a client may return what the owner told it a moment ago."""
        return self._find(name)

    def _current(self, info: TableInfo) -> TableInfo:
        """Return a table as it is now: a client may have been told of it before its options changed."""
        return self._find(info.name) or info

    def _find_fitting(self, name: str, kind: Kind, shards: int, options: bytes) -> TableInfo | None:
        """Return a table; if a cached description does not fit the arguments, look the table up again."""
        info = self._find_cached(name)
        if info is None:
            return None
        fits = info.kind == kind.name and shards in (1, info.shards) and options in (kind.options_default, info.options)
        return info if fits else self._find(name)

    def _table(
        self,
        name: str,
        kind: Kind,
        shards: int,
        options: bytes,
        *,
        create: bool,
        storage: StorageOptions | None = None,
        encrypted: bool | None = None,
    ) -> TableInfo:
        name, shards, create = check_name(name), check_shards(shards), flag(create, "create")
        stored = b"" if storage is None else encode_storage(storage)
        encrypted = None if encrypted is None else flag(encrypted, "encrypted")
        info = self._find_fitting(name, kind, shards, options)
        if info is None:
            if not create:
                raise self._unknown(name)
            info = self._port.create(name, kind.name, shards, options, stored, encrypted=encrypted)
        check_kind(info, kind)
        if storage is not None and not (is_stored(info, storage) or is_stored(self._current(info), storage)):
            raise KindMismatch(f"table {name} has other storage options: leave storage= out, or call store.alter")
        if shards not in (1, info.shards):
            count = "1 shard" if info.shards == 1 else f"{info.shards} shards"
            raise KindMismatch(f"table {name} has {count}, not {shards}: leave shards= out")
        if encrypted not in (None, info.key is not None):
            state = "without encryption" if encrypted else "encrypted"
            raise KindMismatch(f"table {name} was created {state}, which is fixed: leave encrypted= out, or copy it")
        return info


def is_stored(info: TableInfo, storage: StorageOptions) -> bool:
    """Whether a table has these storage options; which master key wraps its key is not among them."""
    actual = info.storage_options
    if storage.encryption is None or actual.encryption is not None:
        storage = msgspec.structs.replace(storage, encryption=actual.encryption)
    return actual == storage


def check_feed(info: TableInfo, kind: Kind, changes: bool | ChangeOptions) -> None:
    """`KindMismatch` if a table lacks the change feed that was requested, or has one with other options."""
    options = change_options(changes)
    if options is None:
        return
    actual = as_changing(kind, info).change_options(info.options)
    if isinstance(changes, ChangeOptions) and actual != options:
        raise KindMismatch(f"the change feed of table {info.name} has other options ({actual}): say changes=True")


def check_kind(info: TableInfo, kind: Kind) -> None:
    """`KindMismatch` if a table is of another kind."""
    if info.kind != kind.name:
        call = f"{info.kind if info.kind in BUILT_IN else 'table'}({info.name!r})"
        raise KindMismatch(f"table {info.name} is of the kind {info.kind}, not {kind.name}: use {call}")
