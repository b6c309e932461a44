"""The kinds of tables there are. Stores, clients and Spark find a kind here by its name.

Thread: values.
"""

from __future__ import annotations

import re
from typing import Any

from penstock.arguments import in_short, whole
from penstock.errors import Invalid, KindMismatch
from penstock.kinds import Kind, Port
from penstock.kv.kind import KvKind
from penstock.partition.ledger import KindCondition, TableInfo
from penstock.queue.kind import QueueKind

_NAME = re.compile(r"[a-z][a-z0-9_]{0,62}")
SHARDS_MAX = 1_024

KINDS: dict[str, Kind] = {kind.name: kind for kind in (KvKind(), QueueKind())}


def kind_named(name: str, table: str) -> Kind:
    """The kind of a table; `KindMismatch` if a newer Penstock made it."""
    kind = KINDS.get(name)
    if kind is None:
        raise KindMismatch(f"table {table} is of the kind {name}, which this Penstock lacks")
    return kind


def streamed_table(port: Port, info: TableInfo) -> Any:
    """A table that hands out offsets; `KindMismatch` for one that cannot be streamed."""
    table = kind_named(info.kind, info.name).table(port, info, durable=False)
    if not hasattr(table, "offsets"):
        raise KindMismatch(f"table {info.name} is of the kind {info.kind}, which cannot be streamed: read it instead")
    return table


def check_name(name: Any) -> str:
    """A table's name as plain text; `Invalid` if a table cannot have it."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise Invalid(f"{in_short(name)} is not a table name: use a-z, 0-9 and _, a letter first, at most 63")
    return str.__str__(name)


def check_shards(shards: Any) -> int:
    """A number of shards; `Invalid` if a table cannot have so many."""
    return whole(shards, "the number of shards", 1, SHARDS_MAX)


def check_create(name: Any, kind: Any, shards: Any, options: Any) -> None:
    """`Invalid` if a table cannot be made so. The one judgement of a table, whoever asks for it.

    What passes here the ledger can decode at every replay, and every shard of it can be opened.
    """
    if check_name(name) is not name or type(check_shards(shards)) is not type(shards) or type(options) is not bytes:
        raise Invalid(f"table {in_short(name)} is described by more than plain values")
    if not isinstance(kind, str) or kind not in KINDS:
        raise Invalid(f"there is no kind {in_short(kind)}")
    KINDS[kind].check_options(options)


def conditions() -> dict[str, KindCondition]:
    """What groups may depend on, beside tokens."""
    return {name: judge for kind in KINDS.values() for name, judge in kind.conditions.items()}


def kind_of_condition(name: str) -> Kind:
    """Whose condition it is."""
    return next(kind for kind in KINDS.values() if name in kind.conditions)
