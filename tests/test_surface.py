"""What users may import, held as a list: a change of it is a decision, and stands in the diff."""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import penstock

ROOT = Path(__file__).parents[1]

PUBLIC = {
    "penstock": """
        Acknowledgement AggregateFunction ArchivePolicy ArchiveReport ArchiveSettings ArrowSource BackupReport
        Cardinality ChangeFeed ChangeOptions CheckReport CheckpointReport CheckpointSettings ChunkSummary Codec
        CollectionSettings CompactionReport CompressionConfig Consumer ConsumerPosition ConsumerSettings
        ConsumerSummary CopyProgress DecimalType DispatcherSettings Durability EncryptionConfig Epoch EvictReport
        FileDamage Hit JobGate JobSettings JobSummary Json Keys KvReader KvRow KvStatistics KvTable LeasedMessage
        LoadReport LogSettings ManifestSettings Message Metric MetricMetadata PartitionStatistics Position
        PreparedLoad QueueSettings QueueTable QueueTotals QueueView ReattachReport RemoteSnapshot RemoteStore
        RestoreReport Retention RetentionPolicy Rollup RotationReport SalvageReport SchedulerSettings SeriesOptions
        SeriesReader SeriesStatistics SeriesTable ShardBounds ShardProgress StagedFile StorageOptions Store StoreBatch
        StoreSettings StoreSnapshot StoreStatistics StoreSubscription StoreView StreamTotals StructType TableDescription
        TableSize TextKvReader TextKvTable Trouble ValueType VectorReader VectorRecord VectorStatistics VectorTable
        VerifyReport WriteStage __version__ check_backup connect errors open open_telemetry reattach restore
        restore_manifest salvage serve_tcp union_items union_of
    """,
    "penstock.aio": """
        AsyncBatch AsyncConsumer AsyncKvReader AsyncKvTable AsyncMetrics AsyncQueueTable AsyncQueueView
        AsyncSeriesReader AsyncSeriesTable AsyncSnapshot AsyncStore AsyncSubscription AsyncTextKvReader AsyncTextKvTable
        AsyncVectorReader AsyncVectorTable connect open
    """,
    "penstock.errors": """
        ArchiveUnavailable Backpressure Closed CommitFailed ConditionFailed CorruptionError DiskFailed DiskFull
        FixTheCall GateShut Invalid KeyMissing KindMismatch LeaseLost Lost ManifestCorrupted ManifestFull
        ManifestNotFound NotFound NotLeader OutcomeUnknown PartitionPaused PenstockError Poisoned PositionConflict
        ProcessLimit ReadOnly Reopen Restore RetryLater StoreLocked StreamFailed TableDraining TokenTooOld
        UniqueJobAlreadyPending UnsupportedManifestVersion UnsupportedVersion WaitExpired WrongKey
    """,
    "penstock.spark": """
        Committed Damage StreamProgress caught_up commit dead_letter_payload export maintain progress promql register
        search session stream verify views wait
    """,
    "penstock.testing": """
        CrashReport FakeClock Fault Faults History Scenario SearchBudget SimulatedDisk Violation explore
    """,
}

# Members of public classes that serve other packages of Penstock, and say so in their docstrings or names.
ANY_KIND = {"table", "create"}  # tables of whatever kind, also of one that Penstock does not know
INTERNAL = {
    "Store": {
        "port",
        "clock",
        "files",
        "check_folder",
        "after_background",
        "at_close",
        "readers",
        "settings",
        "open",
        "collect",
        "confirm_lead",
        "follow_time",
        "clock_us",
        "begin_background",
        "view",
        "wait_view",
        *ANY_KIND,
    },
    "StoreSettings": {"coordinator", "tree", "of_kind", "queue"},
    "RemoteStore": {"port", "query_snapshot", *ANY_KIND},
    "RemoteSnapshot": {"port", "info", "pieces", "read", *ANY_KIND},
    "SeriesReader": {"evaluate"},
    "SeriesTable": {"evaluate", "write_block"},
    "SeriesOptions": {"bucket", "buckets", "bucket_start", "bucket_us", "by_bucket"},
    "StoreBatch": {"add_section", "add_files", "require", "look_ahead", "time_us", "wait_for_entry", *ANY_KIND},
    "StoreSnapshot": ANY_KIND,
    "PreparedLoad": {"parts"},
    "KvTable": {"update"},  # that of `MutableMapping`, whose overloads no signature but this one fits
    "TextKvTable": {"update"},
    "open": {"fs", "clock", "random", "engine"},  # the seams that `penstock.testing` has stand-ins for
}
# What may stand in an annotation beside public names.
ANNOTATION_NAMES = {
    *vars(builtins),
    *("Callable", "ClassVar", "Iterable", "Iterator", "Literal", "Mapping", "Sequence", "TracebackType"),
    *("Decimal", "Path", "datetime", "pa", "Schema", "Table", "RecordBatch", "K", "V", "Default"),
    "Conditional",  # a batch, for a consumer's `ack`
    *("timedelta", "np", "npt", "ArrayLike", "EllipsisType"),
    *("KeysView", "KvItems", "KvValues"),  # views of a mapping, as those of a dict
}


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_a_package_has_exactly_these_public_names(name: str) -> None:
    module = importlib.import_module(name)
    names = PUBLIC[name].split()
    exported = getattr(module, "__all__", None) or [key for key in vars(module) if not key.startswith("_")]
    assert sorted(set(exported) - {"annotations"}) == sorted(names)
    if name != "penstock.spark":  # which needs Spark for most of them
        assert [key for key in names if getattr(module, key, None) is None] == []


def test_type_checkers_and_programs_find_the_same_names() -> None:
    """The table of homes, `__all__`, `dir()` and the imports for type checkers agree."""
    tree = ast.parse((ROOT / "src" / "penstock" / "__init__.py").read_text())
    checked = next(node for node in tree.body if isinstance(node, ast.If))
    imports = {
        alias.name: node.module for node in checked.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert imports.pop("errors") == "penstock"
    assert imports == {name: f"penstock.{home}" for name, home in penstock._HOMES.items()}
    assert {*imports, "errors", "__version__"} == set(penstock.__all__)
    assert penstock.__all__ == sorted(penstock.__all__)
    assert dir(penstock) == sorted({*penstock.__all__, *(name.partition(".")[2] for name in PUBLIC if "." in name)})
    for name, home in imports.items():
        public = getattr(penstock, name)
        if inspect.isclass(public) or inspect.isfunction(public):
            assert (public.__module__, public.__name__) == (home, name)


def test_tab_shows_public_names_only() -> None:
    """In a fresh process, before and after the store was used, which imports packages of ours."""
    code = """
import tempfile, penstock
before = dir(penstock)
with tempfile.TemporaryDirectory() as folder:
    penstock.open(folder).close()
import penstock.aio, penstock.testing
assert before == dir(penstock), set(dir(penstock)) - set(before)
for name in before:
    if name != "spark":
        getattr(penstock, name)
print(*before)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert ran.stdout.split() == dir(penstock)
    for name in ("penstock.aio", "penstock.testing", "penstock.spark"):
        assert dir(importlib.import_module(name)) == sorted(PUBLIC[name].split())


def test_an_unknown_name_is_told() -> None:
    with pytest.raises(AttributeError, match="penstock has no 'nothing'"):
        getattr(penstock, "nothing")  # noqa: B009 - mypy knows that there is none


def test_importing_penstock_is_cheap() -> None:
    """Spark's tasks import it for little: without a warning, nothing of others and no package of ours comes along."""
    code = "import sys; old = set(sys.modules); import penstock, penstock.errors; print(*(set(sys.modules) - old))"
    command = [sys.executable, "-W", "error", "-c", code]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (ran.returncode, ran.stderr) == (0, "")
    imported = ran.stdout.split()
    assert {name for name in imported if name.startswith("penstock")} == {"penstock", "penstock.errors"}
    assert {name.split(".")[0] for name in imported} - sys.stdlib_module_names == {"penstock"}


@pytest.mark.parametrize("used", ["penstock.open", "penstock.connect", "penstock.aio.open", "penstock.testing.explore"])
def test_a_name_is_imported_without_warnings_and_without_what_is_optional(used: str) -> None:
    optional = ("pyspark", "faiss", "starlette", "uvicorn", "promql_parser", "pysyncobj", "obstore", "opentelemetry")
    code = f"import sys, penstock.aio, penstock.testing; {used}; print(*(n for n in {optional} if n in sys.modules))"
    command = [sys.executable, "-W", "error", "-c", code]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (ran.returncode, ran.stdout.strip(), ran.stderr) == (0, "", "")


def test_a_client_does_not_import_the_owner() -> None:
    """Every process of Spark and of the command connects, and starts the sooner."""
    owners = ("penstock.store.store", "penstock.store.opening", "penstock.store.backup", "penstock.store.flusher")
    heavy = ("pyarrow.compute", "numpy.typing", "pandas")
    code = f"import sys, penstock; penstock.connect; print(*(n for n in {owners + heavy} if n in sys.modules))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert ran.stdout.strip() == ""


def annotations_of(name: str, member: Any) -> list[str]:
    """The annotations of a function, a property or a method, by the overloads where it has some."""
    if isinstance(member, property):
        member = member.fget
    if isinstance(member, (classmethod, staticmethod)):
        member = member.__func__
    if not inspect.isfunction(member):
        return []
    overloads = __import__("typing").get_overloads(member) or [member]
    return [
        str(text)
        for function in overloads
        for parameter, text in inspect.get_annotations(function).items()
        if parameter not in INTERNAL.get(name, ())
    ]


def public_annotations(name: str) -> list[tuple[str, str]]:
    """(where, annotation) of all that a user sees of a public name."""
    public = getattr(penstock, name)
    if inspect.isfunction(public):
        return [(name, text) for text in annotations_of(name, public)]
    if not inspect.isclass(public) or public.__module__.split(".")[0] != "penstock":
        return []
    annotations, overridden = [], set[str]()  # a member that is overridden is not seen
    for home in public.__mro__:
        if home.__module__.split(".")[0] != "penstock":
            continue
        for field, text in inspect.get_annotations(home).items():
            if not field.startswith("_") and field not in overridden and field not in INTERNAL.get(name, ()):
                annotations.append((f"{name}.{field}", getattr(text, "__forward_arg__", str(text))))
        for member, value in vars(home).items():
            if not member.startswith("_") and member not in overridden and member not in INTERNAL.get(name, ()):
                annotations += [(f"{name}.{member}", text) for text in annotations_of(name, value)]
        overridden |= set(vars(home))
    return annotations


def names_in(text: str) -> set[str]:
    """The names that an annotation refers to."""
    names = set()
    for node in ast.walk(ast.parse(text, mode="eval")):
        if isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            names.add("str")  # of a Literal
    return names


def test_what_users_see_of_public_names_is_public() -> None:
    """Whoever is given a value can name its type; and nothing is `Any`."""
    allowed = ANNOTATION_NAMES | set(penstock.__all__)
    strangers = [
        f"{where}: {text}"
        for name in penstock.__all__
        for where, text in public_annotations(name)
        if names_in(text) - allowed
    ]
    assert strangers == []


def test_the_rules_see_what_they_must() -> None:
    annotations = dict(public_annotations("KvTable"))
    assert annotations["KvTable.scan"] == "Iterator[tuple[bytes, V]]"
    assert ("Store.kv", "KvTable[int]") in public_annotations("Store")
    assert names_in("list[Any] | Hidden") == {"list", "Any", "Hidden"}
    assert not names_in("Hidden") <= ANNOTATION_NAMES
