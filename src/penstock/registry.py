"""The registry of table kinds. Stores, clients and Spark look up a kind here by name, and in no other way.

Penstock's own kinds are listed in `BUILT_IN`. A kind of another package is an entry point:

    [project.entry-points."penstock.kinds"]
    graph = "graphs.kind:GraphKind"

It is available in every process that has the package installed: the owner (including a detached one that a client
started), clients, and Spark's Python workers. A process reads the entry points once, at the first lookup of an unknown
name. Neither a store's folder nor a client can name code to load.

Kinds in `LATE` are imported at their first use: without them a client, a Spark worker or a command starts sooner.

Thread: any; `_lock` guards the loading.
Invariant: a name, a condition and a settings type belong to one kind, the same one for the life of the process.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any, cast

from penstock.arguments import in_short, whole
from penstock.errors import Invalid, KindMismatch
from penstock.host import threads
from penstock.kinds import Kind, as_row_conditional
from penstock.kv.kind import KvKind
from penstock.partition.ledger_records import KindCondition, TableInfo
from penstock.partition.storage_options import check_change, check_storage
from penstock.queue.kind import QueueKind

if TYPE_CHECKING:
    from penstock.series.kind import SeriesKind
    from penstock.vector.kind import VectorKind

_NAME = re.compile(r"[a-z][a-z0-9_]{0,62}")
SHARDS_MAX = 1_024
GROUP = "penstock.kinds"  # of entry points

KV, QUEUE = KvKind(), QueueKind()
LATE = {"series": ("penstock.series.kind", "SeriesKind"), "vector": ("penstock.vector.kind", "VectorKind")}
BUILT_IN = (KV.name, QUEUE.name, *LATE)


class _Kinds(dict[str, Kind]):
    """The kinds that are loaded, by name; a late one is loaded at its first lookup."""

    def __missing__(self, name: str) -> Kind:
        module, kind = LATE[name]
        return self.setdefault(name, getattr(import_module(module), kind)())


KINDS = _Kinds({kind.name: kind for kind in (KV, QUEUE)})  # kinds of other packages are added on loading


def series_kind() -> SeriesKind:
    """Return the kind of series tables."""
    return cast("SeriesKind", KINDS["series"])


def vector_kind() -> VectorKind:
    """Return the kind of vector tables."""
    return cast("VectorKind", KINDS["vector"])


def known_kinds() -> list[Kind]:
    """Return Penstock's own kinds, and those of other packages that are loaded."""
    return [KINDS[name] for name in (*BUILT_IN, *(name for name in tuple(KINDS) if name not in BUILT_IN))]


class _Packages:
    """The kinds of other packages."""

    def __init__(self) -> None:
        self._lock = threads.lock("registry")
        self._is_read = False  # guarded by _lock
        self.failures: list[str] = []  # guarded by _lock: entry points that did not load, and why

    def load(self) -> None:
        """Read the entry points, once: one that fails does not stop the others."""
        with self._lock:
            if self._is_read:
                return
            failures: list[str] = []
            for entry in metadata.entry_points(group=GROUP):
                try:
                    kind: Kind = entry.load()()
                    if type(KINDS.get(kind.name)) is not type(kind):  # present if an interrupt ended an earlier attempt
                        _check_new(kind)
                        KINDS[kind.name] = kind
                except Exception as error:  # whatever another package raises
                    failures.append(f"{entry.value} ({error})")
            self.failures = failures
            self._is_read = True


_packages = _Packages()


def find_kind(name: str) -> Kind | None:
    """Return the kind called `name`; None if this process has none."""
    if name in BUILT_IN:
        return KINDS[name]
    if name not in KINDS:
        _packages.load()
    return KINDS.get(name)


def _check_new(kind: Kind) -> None:
    """Raise `Invalid` if a kind claims a name, a condition or a settings type that is not its own."""
    if not _NAME.fullmatch(kind.name) or kind.name in KINDS or kind.name in BUILT_IN:
        raise Invalid(f"{in_short(kind.name)} is not the name of a new kind")
    for condition in kind.conditions:
        if not condition.startswith(f"{kind.name}."):
            raise Invalid(f"the condition {condition} must begin with the name of its kind: {kind.name}.")
    if type(kind.settings) in _settings_types():
        raise Invalid(f"{type(kind.settings).__name__} are the settings of another kind")


def kind_named(name: str, table: str) -> Kind:
    """Return the kind of a table; `KindMismatch` if this process does not have it."""
    kind = find_kind(name)
    if kind is None:
        failed = f"; these do not load: {', '.join(_packages.failures)}" if _packages.failures else ""
        raise KindMismatch(
            f"table {table} is of the kind {name}, which this Penstock lacks: install the package that has it{failed}"
        )
    return kind


def check_name(name: Any) -> str:
    """Return a table's name as plain text; `Invalid` if a table cannot have it."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise Invalid(f"{in_short(name)} is not a table name: use a-z, 0-9 and _, a letter first, at most 63")
    return str.__str__(name)


def check_shards(shards: Any) -> int:
    """Return a number of shards; `Invalid` if a table cannot have that many."""
    return whole(shards, "the number of shards", 1, SHARDS_MAX)


def check_create(name: Any, kind: Any, shards: Any, options: Any, storage: Any = b"") -> None:
    """Raise `Invalid` if a table cannot be created like this. Every request to create a table is checked here.

    The ledger can decode a table that passes at every replay, and all its shards can be opened.
    """
    if check_name(name) is not name or type(check_shards(shards)) is not type(shards) or type(options) is not bytes:
        raise Invalid(f"table {in_short(name)} is described by more than plain values")
    known_kind = find_kind(kind) if isinstance(kind, str) else None
    if known_kind is None:
        raise Invalid(f"there is no kind {in_short(kind)}")
    known_kind.check_options(options)
    known_kind.check_retention(check_storage(storage).retention)


def check_altered(info: TableInfo, options: Any) -> None:
    """Raise `Invalid` if the options of a table cannot become `options`. Every request to alter one is checked here."""
    kind = kind_named(info.kind, info.name)
    if type(options) is not bytes:
        raise Invalid(f"the options of table {info.name} are bytes, as its kind encodes them")
    kind.check_options(options)
    kind.check_altered(info, options)


def check_configured(info: TableInfo, storage: Any) -> None:
    """Raise `Invalid` if the storage options of a table cannot become `storage`. Every such request is checked here."""
    before, after = info.storage_options, check_storage(storage)
    kind_named(info.kind, info.name).check_retention(after.retention)
    check_change(info.name, before, after)
    if before.encryption != after.encryption:
        raise Invalid(f"the master key of table {info.name} is not changed by an option: call store.rotate_keys()")


def check_settings(all_settings: tuple[object, ...]) -> None:
    """Raise `Invalid` if one of these is not the settings of a kind, or if two are of one kind."""
    for index, settings in enumerate(all_settings):
        if type(settings) not in _settings_types():
            _packages.load()
        if type(settings) not in (types := _settings_types()):
            names = ", ".join(kind.__name__ for kind in types)
            raise Invalid(f"kinds of the settings holds {in_short(settings)}, and takes {names}")
        if any(type(other) is type(settings) for other in all_settings[:index]):
            raise Invalid(f"kinds of the settings holds {type(settings).__name__} twice: give one")


def _settings_types() -> list[type]:
    return [type(kind.settings) for kind in known_kinds() if kind.settings is not None]


# -- conditions: their names begin with the name of their kind, as in queue.ack


def find_condition(name: str) -> Kind | None:
    """Return the kind that has a condition; None if there is no such condition."""
    kind = find_kind(name.partition(".")[0])
    return kind if kind is not None and name in kind.conditions else None


def kind_of_condition(name: str) -> Kind:
    """Return the kind that a condition's name begins with; `KindMismatch` if this process does not have it."""
    kind = find_kind(name.partition(".")[0])
    if kind is None:
        raise KindMismatch(
            f"the condition {name} is of a kind that this Penstock lacks: install the package that has it"
        )
    return kind


def is_row_condition(name: str) -> bool:
    """Whether a condition is about rows: the owner judges it before the write, and the ledger never sees it."""
    kind = find_kind(name.partition(".")[0])
    rows = None if kind is None else as_row_conditional(kind)
    return rows is not None and name == rows.row_condition


class _Conditions(Mapping[str, KindCondition]):
    """What groups may depend on, besides tokens. A missing kind is an error: it must not count as a refusal."""

    def __getitem__(self, name: str) -> KindCondition:
        return kind_of_condition(name).conditions[name]

    def __iter__(self) -> Iterator[str]:
        return (name for kind in known_kinds() for name in kind.conditions)

    def __len__(self) -> int:
        return sum(len(kind.conditions) for kind in known_kinds())


CONDITIONS = _Conditions()
