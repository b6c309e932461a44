"""Every value, field, job kind and operation of seed 000 is set and read by production code; an unused one is named.

The source is walked, not run: a field counts as set if a call of its record passes it, or a `replace` does; as read, if
something outside its own module takes it as an attribute, or matches it. Names are not resolved to types, so a field
whose name others share may be counted for them: `test_an_unused_name_is_found` says what the walk does see.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

import penstock
from penstock.manifest import operations, records
from penstock.manifest.jobs import JobQueue, UniqueJobGate
from penstock.manifest.keys import ChunkKey, ComponentId, MetricKey, PendingJobKey, WalStateKey
from penstock.manifest.manifest import Manifest, ManifestTxn
from penstock.manifest.recovery import RecoveredState
from penstock.manifest.waiters import GenerationWaiters, WaitHandle

SOURCE = Path(penstock.__file__).parent
OWN = {"manifest/records.py", "manifest/keys.py"}  # what a module does with its own values does not count

# Seed 000, field by field; `record_version` is the codec's, in front of every value.
SEED: dict[type, str] = {
    records.DbDescriptorRecord: "created_at_epoch_ms name config_hash wal_shards options status",
    records.ManifestDbOptions: "wal_dir chunk_dir compression encryption retention",
    records.WalStateRecord: (
        "last_sealed_segment last_applied_lsn last_checkpoint_generation restart_epoch flush_gate_state"
    ),
    records.FlushGateState: "active_job_id last_success_at_epoch_ms errored_since_epoch_ms",
    records.ChunkEntryRecord: (
        "file_name generation size_bytes compression encrypted residency wal_range uploaded_at_epoch_ms "
        "purge_after_epoch_ms"
    ),
    records.JobRecord: "job_id created_at_epoch_ms db_id kind state payload last_error",
    records.MetricRecord: "sum count min max bucket_counts updated_at_epoch_ms",
    records.GenerationRecord: "current_generation last_committed_at_epoch_ms blocked_waiters",
    records.GenerationWaiterSnapshot: "waiter_id target_generation deadline_epoch_ms",
    records.Tombstoned: "tombstoned_at_epoch_ms",
    records.RemoteArchived: "object verified",
    records.InFlight: "worker_id leased_at_ms",
    records.Completed: "finished_at_ms",
    records.FailedPermanent: "finished_at_ms",
}
SEED_OPERATIONS = (
    "PutDb PutWalState DeleteWalState UpsertChunk DeleteChunk PutJob UpdateJobState RemoveJob UpsertPendingIndex "
    "DeletePendingIndex MergeMetric BumpGeneration"
)
SEED_KEYS: dict[type, str] = {
    WalStateKey: "db_id shard",
    ChunkKey: "db_id chunk_id",
    PendingJobKey: "db_id kind",
    MetricKey: "scope kind",
}


class Uses:
    """What a tree of modules does with names."""

    def __init__(self, modules: dict[str, str]) -> None:
        self.callees: set[str] = set()  # classes that are called
        self.named: set[str] = set()  # names that stand anywhere but in an import or as the function of a call
        self.members: set[tuple[str, str]] = set()  # of enumerations: (class, member)
        self.all_members: set[str] = set()  # classes whose members are looked up by a name or a number
        self.passed: dict[str, set[str | int]] = defaultdict(set)  # by class: keywords, and positions, of its calls
        self.replaced: set[str] = set()  # keywords of calls of `replace` and of dictionaries that become keywords
        self.read: set[str] = set()  # attributes that are loaded, keywords of patterns
        for source in modules.values():
            self._walk(ast.parse(source))

    def _walk(self, tree: ast.AST) -> None:
        called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                self._call(node)
            elif isinstance(node, ast.MatchClass):
                self.named.add(_name(node.cls))
                self.read |= set(node.kwd_attrs)
            elif isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
                self.all_members.add(node.value.id)
            if isinstance(node, ast.Attribute):
                if isinstance(node.ctx, ast.Load):
                    self.read.add(node.attr)
                self.members.add((_name(node.value), node.attr))
            elif isinstance(node, ast.Name) and id(node) not in called:
                self.named.add(node.id)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                self.read |= {node.value} & {"stored_lsn"}  # attrgetter takes names as texts

    def _call(self, node: ast.Call) -> None:
        name = _name(node.func)
        self.callees.add(name)
        self.all_members |= {name}
        keywords = {keyword.arg for keyword in node.keywords if keyword.arg is not None}
        self.passed[name] |= keywords
        if any(isinstance(argument, ast.Starred) for argument in node.args):
            self.passed[name] |= set(range(64))
        self.passed[name] |= set(range(len(node.args)))
        if name == "replace":
            self.replaced |= keywords
            for keyword in node.keywords:
                if keyword.arg is None and isinstance(keyword.value, ast.Dict):
                    self.replaced |= {str(key.value) for key in keyword.value.keys if isinstance(key, ast.Constant)}


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def sources() -> dict[str, str]:
    """Return production code by its path: without the tests that are shipped, and the modules under test."""
    paths = {path.relative_to(SOURCE).as_posix(): path for path in SOURCE.rglob("*.py")}
    return {
        name: path.read_text() for name, path in paths.items() if not name.startswith("testing/") and name not in OWN
    }


def faults(uses: Uses, fields_of: dict[type, list[str]], enums: list[type[IntEnum]]) -> Iterator[str]:
    """Yield what is never set, or never read."""
    for record, fields in fields_of.items():
        name, passed = record.__name__, uses.passed[record.__name__]
        if name not in uses.callees and not (set(fields) and set(fields) <= uses.replaced):
            yield f"{name} is never made"
        order: list[str] = list(getattr(record, "__struct_fields__", ()) or getattr(record, "_fields", ()))
        for field in fields:
            if field not in passed and order.index(field) not in passed and field not in uses.replaced:
                yield f"{name}.{field} is never set"
            if field not in uses.read:
                yield f"{name}.{field} is never read"
        if not fields and name not in uses.named:
            yield f"{name} is never looked for"
    for enum in enums:
        for member in enum:
            if (enum.__name__, member.name) not in uses.members and enum.__name__ not in uses.all_members:
                yield f"{enum.__name__}.{member.name} is never used"


def stored_records() -> dict[type, list[str]]:
    """Return every struct of the manifest, with its fields."""
    types = [value for value in vars(records).values() if isinstance(value, type)]
    return {
        record: list(record.__struct_fields__)
        for record in types
        if issubclass(record, records.ManifestRecord) and record is not records.ManifestRecord
    }


def test_the_records_have_all_that_the_seed_names() -> None:
    for record, fields in SEED.items():
        assert set(fields.split()) <= set(stored_records()[record]), record
    for key, fields in SEED_KEYS.items():
        assert tuple(fields.split()) == key._fields, key  # type: ignore[attr-defined]
    assert set(SEED_OPERATIONS.split()) <= {operation.__name__ for operation in get_args(operations.ManifestOp)}
    states = {state.__name__ for state in get_args(records.JobDurableState)}
    assert states == {"Pending", "InFlight", "Completed", "FailedPermanent"}
    assert {state.__name__ for state in get_args(records.DbLifecycle)} == {"Active", "Draining", "Tombstoned"}
    assert {state.__name__ for state in get_args(records.ChunkResidency)} == {"Local", "RemoteArchived", "Evicted"}


def test_everything_is_set_and_read_by_production_code() -> None:
    uses = Uses(sources())
    uses.callees |= set(penstock.__all__)  # users make these
    public = {record: fields for record, fields in stored_records().items() if record.__name__ in penstock.__all__}
    for record, fields in public.items():
        uses.passed[record.__name__] |= set(fields)
    keys: dict[type, list[str]] = {key: list(fields.split()) for key, fields in SEED_KEYS.items()}
    unused = list(faults(uses, {**stored_records(), **keys}, [ComponentId, records.Codec]))
    for kind in records.JobKind:
        if ("JobKind", kind.name) not in uses.members:
            unused.append(f"JobKind.{kind.name} is never used")
    assert unused == [], "\n".join(unused)


def test_every_operation_is_made_and_applied() -> None:
    callees = Uses({name: text for name, text in sources().items() if name != "manifest/operations.py"}).callees
    applied = (SOURCE / "manifest" / "edit.py").read_text()
    for operation in get_args(operations.ManifestOp):
        assert operation.__name__ in callees, f"{operation.__name__} is never made"
        assert applied.count(operation.__name__) > 1, f"{operation.__name__} is never applied"


# What seed 000 gives the manifest's users, and production reaches by the operations themselves (ADR 0082).
ONLY_BY_TESTS = {
    "ManifestTxn.put_db",
    "ManifestTxn.delete_db",
    "ManifestTxn.delete_pending_index",
    "ManifestTxn.delete_metrics",
}


def test_every_method_is_called_by_production_code_or_named_here() -> None:
    uses = Uses(sources())
    uncalled = {
        f"{each.__name__}.{name}"
        for each in (Manifest, ManifestTxn, JobQueue, UniqueJobGate, RecoveredState, GenerationWaiters, WaitHandle)
        for name in vars(each)
        if not name.startswith("_") and callable(getattr(each, name)) and name not in uses.read
    }
    assert uncalled == ONLY_BY_TESTS


class Seeded(msgspec.Struct, frozen=True):
    used: int = 0
    never_set: int = 0
    never_read: int = 0


class Colour(IntEnum):
    RED = 1
    GREEN = 2


@pytest.mark.parametrize(
    ("source", "missing"),
    [
        ("x = Seeded(1)\nprint(x.used, x.never_set)", "never_set:set never_read:set never_read:read"),
        ("x = Seeded(1, never_set=2, never_read=3)\nprint(x.used, x.never_set)", "never_read:read"),
        ("x = replace(Seeded(1, 2), never_read=3)\nprint(x.used, x.never_set, x.never_read)", ""),
        ("x = Seeded(*values)\nmatch x:\n    case Seeded(used=a, never_set=b, never_read=c): pass", ""),
        (
            "def f(x: Seeded): return x.used",
            "used:set never_set:set never_set:read never_read:set never_read:read",
        ),
    ],
)
def test_an_unused_name_is_found(source: str, missing: str) -> None:
    fields: dict[type, list[str]] = {Seeded: list(Seeded.__struct_fields__)}
    unused = {fault for fault in faults(Uses({"a": source}), fields, []) if "." in fault}
    expected = [pair.split(":") for pair in missing.split()]
    assert unused == {f"Seeded.{field} is never {use}" for field, use in expected}


def test_an_unused_member_is_found() -> None:
    assert list(faults(Uses({"a": "x = Colour.RED"}), {}, [Colour])) == ["Colour.GREEN is never used"]
    assert list(faults(Uses({"a": "x = Colour[name]"}), {}, [Colour])) == []


def test_a_field_that_nothing_uses_is_found_among_the_real_ones() -> None:
    """A seeded fault: a record with one more field, in the real sources."""
    grown: Any = msgspec.defstruct(
        "JobRecord", [*records.JobRecord.__struct_fields__, "shelved_by"], bases=(records.ManifestRecord,), frozen=True
    )
    unused = list(faults(Uses(sources()), {grown: list(grown.__struct_fields__)}, []))
    assert unused == ["JobRecord.shelved_by is never set", "JobRecord.shelved_by is never read"]
