"""Bring the records of older versions up to date when a manifest is opened.

`meta` holds one row per table with the version that all its records have. Opening compares those rows and walks a
table only if its row is behind; a row is written after its table is done, so that a crash in between only repeats
work.

Thread: the one that opens the manifest, before anyone else sees it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, TypeAlias

from penstock.errors import CorruptionError, UnsupportedVersion
from penstock.manifest.codec import record_version
from penstock.manifest.engine import Engine, ReadView
from penstock.manifest.tables import ALL, Table

# From the value of one version to the value of the next, both with their version in front.
Upgrade: TypeAlias = Callable[[bytes], bytes]

# (table, version it upgrades from). Version 1 is the first of every table.
UPGRADES: Mapping[tuple[str, int], Upgrade] = {}

ROWS_PER_TRANSACTION = 10_000

_VERSION = struct.Struct(">H")


def migrate(
    engine: Engine,
    tables: Sequence[Table[Any, Any]] = ALL,
    upgrades: Mapping[tuple[str, int], Upgrade] = UPGRADES,
) -> int:
    """Upgrade every table that is behind; how many records were rewritten."""
    with engine.read() as view:
        behind = [(table, version) for table in tables if (version := _schema(view, table)) != table.codec.version]
    rewritten = 0
    for table, version in behind:
        if version is not None:  # None: a new, empty table
            rewritten += _upgrade_table(engine, table, upgrades)
    if behind:
        with engine.write() as view:
            for table, _ in behind:
                view.put("meta", _schema_key(table), _VERSION.pack(table.codec.version))
    return rewritten


def is_current(view: ReadView) -> bool:
    """Whether every table has the version that this Penstock writes."""
    return all(view.get("meta", _schema_key(table)) in (None, _VERSION.pack(table.codec.version)) for table in ALL)


def _schema(view: ReadView, table: Table[Any, Any]) -> int | None:
    value = view.get("meta", _schema_key(table))
    if value is None:
        for key, _ in view.scan(table.name):
            raise CorruptionError(f"manifest table {table.name}", 0, f"it has rows ({key.hex()}) and no schema version")
        return None
    version = record_version(value, f"manifest schema of table {table.name}")
    if version > table.codec.version:
        raise UnsupportedVersion(
            f"manifest table {table.name} has version {version}, this Penstock knows {table.codec.version}: upgrade it"
        )
    return version


def _schema_key(table: Table[Any, Any]) -> bytes:
    return f"schema/{table.name}".encode()


def _upgrade_table(engine: Engine, table: Table[Any, Any], upgrades: Mapping[tuple[str, int], Upgrade]) -> int:
    rewritten, start = 0, b""
    while True:
        with engine.write() as view:
            rows = list(islice(view.scan(table.name, start), ROWS_PER_TRANSACTION))
            for key, value in rows:
                where = f"manifest table {table.name} key {key.hex()}"
                upgraded = _upgrade_value(table, value, where, upgrades)
                if upgraded is not value:
                    view.put(table.name, key, upgraded)
                    rewritten += 1
        if len(rows) < ROWS_PER_TRANSACTION:
            return rewritten
        start = rows[-1][0] + b"\0"


def _upgrade_value(
    table: Table[Any, Any], value: bytes, where: str, upgrades: Mapping[tuple[str, int], Upgrade]
) -> bytes:
    version = record_version(value, where)
    while version < table.codec.version:
        upgrade = upgrades.get((table.name, version))
        if upgrade is None:
            raise UnsupportedVersion(f"{where} has version {version}, from which this Penstock cannot upgrade")
        value = upgrade(value)
        if (reached := record_version(value, where)) <= version:
            raise AssertionError(f"the upgrade of {table.name} from version {version} gave version {reached}")
        version = reached
    table.codec.decode(value, where)  # what is written must be readable
    return value
