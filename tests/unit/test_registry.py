"""Kinds of other packages are found by their entry points; one that does not load stops nobody else."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from penstock.errors import Invalid
from penstock.queue.chain import QueueSettings
from penstock.store.settings import StoreSettings

NAMES = ("Takes", "Unnamed", "Broken", "Absent", "Sound", "Conditions")
CODE = """
from penstock.testing.kinds.accounts.kind import AccountsKind

class Takes(AccountsKind):
    name = "kv"

class Unnamed(AccountsKind):
    name = "No Name"

class Broken:
    def __init__(self):
        raise OSError("no licence")

class Sound(AccountsKind):
    name = "sound"

class Conditions(AccountsKind):
    name = "conditions"
    conditions = {"queue.ack": None}
"""


def run(folder: Path, script: str) -> list[str]:
    (folder / "others-1.0.dist-info").mkdir()
    (folder / "others-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: others\nVersion: 1.0\n")
    names = "\n".join(f"{name} = others:{name}" for name in NAMES)
    (folder / "others-1.0.dist-info" / "entry_points.txt").write_text(f"[penstock.kinds]\n{names}\n")
    (folder / "others.py").write_text(CODE)
    # Without the packages that other tests put there.
    before = f"import sys; sys.path[:] = [*(p for p in sys.path if 'accounts' not in p), {str(folder)!r}]\n"
    done = subprocess.run(
        [sys.executable, "-c", before + textwrap.dedent(script)],
        capture_output=True,
        timeout=60,
        check=False,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_packages_are_read_when_a_name_is_unknown(tmp_path: Path) -> None:
    lines = run(
        tmp_path,
        f"""
        import penstock, penstock.registry as registry
        with penstock.open({str(tmp_path / "store")!r}) as store:
            store.kv("users").put(b"a", b"1", durable=True)
            print(sorted(registry.KINDS), "others" in sys.modules)
            store.create("bank", "sound").book("a", 1, durable=True)
            print(sorted(registry.KINDS), type(registry.KINDS["kv"]).__name__)
            try:
                registry.kind_named("graph", "g")
            except penstock.errors.KindMismatch as error:
                print(error)
        """,
    )
    assert lines[0] == "['kv', 'queue'] False"  # the others are loaded at their first use
    assert lines[1] == "['kv', 'queue', 'series', 'sound', 'vector'] KvKind"
    assert lines[2].startswith("table g is of the kind graph, which this Penstock lacks: install the package")
    assert [name for name in NAMES if f"others:{name} (" in lines[2]] == [name for name in NAMES if name != "Sound"]


def test_a_store_without_the_package_keeps_its_other_tables(tmp_path: Path) -> None:
    run(
        tmp_path,
        f"""
        import penstock
        with penstock.open({str(tmp_path / "store")!r}) as store:
            store.create("bank", "sound").book("a", 1, durable=True)
            store.kv("users").put(b"a", b"1", durable=True)
        """,
    )
    script = f"""
import penstock
with penstock.open({str(tmp_path / "store")!r}) as store:
    print(store.kv("users").get(b"a"))
    try:
        store.table("bank")
    except penstock.errors.KindMismatch as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60, check=True, text=True)
    assert done.stdout.splitlines() == [
        "b'1'",
        "table bank is of the kind sound, which this Penstock lacks: install the package that has it",
    ]


def test_settings_are_those_of_a_kind() -> None:
    assert StoreSettings(kinds=(QueueSettings(),)).kinds
    for wrong in ((1,), (None,), (QueueSettings(), QueueSettings()), QueueSettings(), (StoreSettings(),)):
        with pytest.raises(Invalid):
            StoreSettings(kinds=wrong)  # type: ignore[arg-type]
