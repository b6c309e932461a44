"""Upgrade records of older versions when a manifest is opened.

`meta` has one row per table with the version of all its records. Opening reads a table only if its version is old; the
row is written after the table is upgraded, so that a crash in between only repeats work.

Thread: the one that opens the manifest, before any other uses it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, TypeAlias

import msgspec

from penstock.errors import CorruptionError, UnsupportedVersion
from penstock.manifest.codec import VERSION, pack_value, record_version, unpack_value
from penstock.manifest.engine import ManifestEngine, ReadView
from penstock.manifest.tables import ALL, Table

# From the MessagePack of one version to that of the next.
Upgrade: TypeAlias = Callable[[bytes], bytes]


def _unchanged(payload: bytes) -> bytes:
    return payload


def _longer_descriptor(payload: bytes) -> bytes:
    """Add an archive policy to the options of a table, and its kind and generation."""
    fields: list[Any] = msgspec.msgpack.decode(payload)
    fields[4] = [*fields[4], None]
    return msgspec.msgpack.encode([*fields, "", 0])


# (table, version it upgrades from). Version 2 has the fields of version 1, and a checksum. Version 3 of `db` has more
# fields, with defaults, and keeps an older Penstock, which would not obey them, from opening the store.
UPGRADES: Mapping[tuple[str, int], Upgrade] = {
    **{(table.name, 1): _unchanged for table in ALL},
    ("db", 2): _longer_descriptor,
}

ROWS_PER_TRANSACTION = 10_000

_VERSION = struct.Struct(">H")
_META = "meta"


def migrate(
    engine: ManifestEngine,
    tables: Sequence[Table[Any, Any]] = ALL,
    upgrades: Mapping[tuple[str, int], Upgrade] = UPGRADES,
) -> int:
    """Upgrade every table with an old version; return the number of records rewritten."""
    with engine.read() as view:
        behind = [(table, version) for table in tables if (version := _schema(view, table)) != table.codec.version]
    rewritten = 0
    for table, version in behind:
        if version is not None:  # None: a new, empty table
            rewritten += _upgrade_table(engine, table, upgrades)
    if behind:
        with engine.write() as view:
            for table, _ in behind:
                view.put(_META, *_schema_row(table))
    return rewritten


def is_current(view: ReadView) -> bool:
    """Return whether every table has the current version, or none because it is new."""
    return all(_schema(view, table) in (None, table.codec.version) for table in ALL)


def _schema(view: ReadView, table: Table[Any, Any]) -> int | None:
    key, _ = _schema_row(table)
    value = view.get(_META, key)
    if value is None:
        for key, _ in view.scan(table.name):
            raise CorruptionError(f"manifest table {table.name}", 0, f"it has rows ({key.hex()}) and no schema version")
        return None
    where = f"manifest schema of table {table.name}"
    # The row of version 1 is the bare number; later ones are encoded as records are.
    payload = value if len(value) == _VERSION.size else unpack_value(_META, key, value, where)[1]
    if len(payload) != _VERSION.size:
        raise CorruptionError(where, 0, "this is not a version")
    version = record_version(payload, where)
    if version > table.codec.version:
        raise UnsupportedVersion(
            f"manifest table {table.name} has version {version}, this Penstock knows {table.codec.version}: upgrade it"
        )
    return version


def _schema_row(table: Table[Any, Any]) -> tuple[bytes, bytes]:
    key = f"schema/{table.name}".encode()
    return key, pack_value(_META, key, VERSION, _VERSION.pack(table.codec.version))


def _upgrade_table(engine: ManifestEngine, table: Table[Any, Any], upgrades: Mapping[tuple[str, int], Upgrade]) -> int:
    rewritten, start = 0, b""
    while True:
        with engine.write() as view:
            rows = list(islice(view.scan(table.name, start), ROWS_PER_TRANSACTION))
            for key, value in rows:
                where = f"manifest table {table.name} key {key.hex()}"
                upgraded = _upgrade_value(table, key, value, where, upgrades)
                if upgraded is not value:
                    view.put(table.name, key, upgraded)
                    rewritten += 1
        if len(rows) < ROWS_PER_TRANSACTION:
            return rewritten
        start = rows[-1][0] + b"\0"


def _upgrade_value(
    table: Table[Any, Any], key: bytes, value: bytes, where: str, upgrades: Mapping[tuple[str, int], Upgrade]
) -> bytes:
    version, payload = unpack_value(table.name, key, value, where)
    if version >= table.codec.version:
        return value
    while version < table.codec.version:
        upgrade = upgrades.get((table.name, version))
        if upgrade is None:
            raise UnsupportedVersion(f"{where} has version {version}, from which this Penstock cannot upgrade")
        payload, version = upgrade(payload), version + 1
    value = pack_value(table.name, key, version, payload)
    table.codec.decode(key, value)  # check that what is written can be read
    return value
