"""The kinds of tables there are. Stores, clients and Spark find a kind here by its name.

Thread: values.
"""

from __future__ import annotations

from penstock.errors import KindMismatch
from penstock.kinds import Kind
from penstock.kv.kind import KvKind
from penstock.partition.ledger import KindCondition
from penstock.queue.kind import QueueKind

KINDS: dict[str, Kind] = {kind.name: kind for kind in (KvKind(), QueueKind())}


def kind_named(name: str, table: str) -> Kind:
    """The kind of a table; `KindMismatch` if a newer Penstock made it."""
    kind = KINDS.get(name)
    if kind is None:
        raise KindMismatch(f"table {table} is of the kind {name}, which this Penstock lacks")
    return kind


def conditions() -> dict[str, KindCondition]:
    """What groups may depend on, beside tokens."""
    return {name: judge for kind in KINDS.values() for name, judge in kind.conditions.items()}


def kind_of_condition(name: str) -> Kind:
    """Whose condition it is."""
    return next(kind for kind in KINDS.values() if name in kind.conditions)
