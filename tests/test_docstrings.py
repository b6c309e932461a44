"""Every public class, function and method has a summary and an example in its docstring, and the examples run.

They find `penstock` and a `store` with a table `users` of one row and a queue `events` of one message; those of methods
also find `metrics` (a series table with one sample), `documents` (two vectors), a `snapshot` and a `worker` (a consumer
of `events`). Spark's, which tests/spark runs, find `spark` and the store's `path`.
"""

from __future__ import annotations

import asyncio
import decimal
import doctest
import hashlib
import importlib
import inspect
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from tests.test_surface import INTERNAL, PUBLIC

import penstock
import penstock.aio
import penstock.testing
from penstock.cli.certificates import make_certificates
from penstock.host.clock import Clock
from penstock.host.files import FileSystem
from penstock.host.metrics import Metrics

# Classes whose methods have their example in another class, where the same method has the same arguments.
TWINS: dict[str, type] = {
    "AsyncMetrics": Metrics,
    "AsyncSnapshot": penstock.StoreSnapshot,
    "AsyncSubscription": penstock.StoreSubscription,
    "AsyncBatch": penstock.StoreBatch,
    "AsyncTextKvReader": penstock.KvReader,
    "AsyncTextKvTable": penstock.KvTable,
    "FakeClock": Clock,
    "RemoteStore": penstock.Store,
    "SimulatedDisk": FileSystem,
    "TextKvReader": penstock.KvReader,
    "TextKvTable": penstock.KvTable,
}
SEAMS = (Clock, FileSystem)  # what only Penstock calls, and what a user implements


def public_objects(module: str) -> Iterator[tuple[str, Any]]:
    """The public classes and functions of a module; errors explain themselves in a table."""
    for name in PUBLIC[module].split():
        public = getattr(importlib.import_module(module), name)
        if inspect.isclass(public) or inspect.isfunction(public):
            yield f"{module}.{name}", public


def example_of(name: str, public: Any, names: dict[str, Any]) -> doctest.DocTest | None:
    """The example in an object's own docstring; None if there is none."""
    text = inspect.getdoc(public) or ""
    example = doctest.DocTestParser().get_doctest(text, names, name, None, 0)
    return example if example.examples else None


def failures(example: doctest.DocTest) -> str:
    """What an example does otherwise than it says; empty if nothing."""
    lines: list[str] = []
    doctest.DocTestRunner(verbose=False).run(example, out=lines.append, clear_globs=False)
    return "".join(lines)


EXAMPLES = [
    pytest.param(name, public, id=name)
    for module in ("penstock", "penstock.aio", "penstock.testing")
    for name, public in public_objects(module)
]


@pytest.mark.parametrize(("name", "public"), EXAMPLES)
def test_an_example_runs(name: str, public: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"penstock": penstock, "pyarrow": pyarrow, "asyncio": asyncio, "decimal": decimal}
    if name.startswith("penstock.testing."):
        names |= {key: getattr(penstock.testing, key) for key in penstock.testing.__all__}
    if name.endswith("serve_tcp"):
        make_certificates(str(tmp_path), ["localhost"], 1)
        token = hashlib.sha256(b"change-me").hexdigest()
        Path("tokens.toml").write_text(f'[tokens.me]\nsha256 = "{token}"\nrights = {{ "*" = "admin" }}\n')
    with penstock.open("store", archive=f"file://{tmp_path}/archive") as store:
        store.kv("users").put(b"ada", b"1815")
        store.queue("events").put(b"hello", key=b"ada", durable=True)
        names["store"] = store
        example = example_of(name, public, names)
        assert example is not None, f"{name} has no example in its docstring"
        assert failures(example) == ""


def twin_of(name: str) -> type | None:
    """The class that has the examples of another one's methods."""
    sync = name.removeprefix("Async")
    return TWINS.get(name) or (getattr(penstock, sync, None) if sync != name else None)


def public_methods(name: str, public: type) -> Iterator[tuple[str, Any]]:
    """The methods and properties that a class of ours has or inherits from one, without internal ones."""
    members: dict[str, Any] = {}
    for home in reversed(public.__mro__):
        if home.__module__.startswith("penstock."):
            members |= vars(home)
    for member, value in members.items():
        if member.startswith("_") or member in INTERNAL.get(name, ()):
            continue
        if inspect.isfunction(value) or isinstance(value, property):
            yield member, value


def is_protocol(public: type) -> bool:
    return getattr(public, "_is_protocol", False)


CLASSES = [
    (name.rpartition(".")[2], public)
    for module in ("penstock", "penstock.aio", "penstock.testing", "penstock.spark")
    for name, public in public_objects(module)
    if inspect.isclass(public)
]


def undocumented(name: str, public: type) -> list[str]:
    """Members without a summary of one line, and methods that users call without an example."""
    problems, twin = [], twin_of(name)
    for member, value in public_methods(name, public):
        other = getattr(twin, member, None)
        texts = [inspect.getdoc(each) or "" for each in (value, other)]
        summary = next((text for text in texts if text), "").partition("\n")[0]
        if not summary.endswith((".", "?")):
            problems.append(f"{name}.{member}: no summary of one line")
        called = inspect.isfunction(value) and not is_protocol(public) and (twin not in SEAMS or other is None)
        if called and not any(">>>" in text for text in texts):
            problems.append(f"{name}.{member}: no example")
    return problems


def test_every_method_has_a_summary_and_an_example() -> None:
    assert [line for name, public in CLASSES for line in undocumented(name, public)] == []


def homes() -> dict[type, dict[str, Any]]:
    """The methods with an example, by the class that defines them and in their order."""
    by_class: dict[type, dict[str, Any]] = {}
    for public in [*(public for _, public in CLASSES), Metrics]:
        for home in public.__mro__:
            if home.__module__.startswith("penstock.") and home not in by_class:
                examples = {
                    key: value
                    for key, value in vars(home).items()
                    if not key.startswith("_") and ">>>" in (inspect.getdoc(value) or "") and not inspect.isclass(value)
                }
                if examples:
                    by_class[home] = examples
    return by_class


@pytest.mark.parametrize("home", homes(), ids=lambda home: home.__name__)
def test_the_examples_of_methods_run(home: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with penstock.open("store", archive=f"file://{tmp_path}/archive") as store:
        users, events = store.kv("users", changes=True), store.queue("events")
        metrics, documents = store.series("metrics"), store.vector("documents", dimensions=2, changes=True)
        events.put(b"hello", key=b"ada")
        metrics.write("cpu", 0.5, {"host": "a"}, time=datetime(2024, 1, 1, tzinfo=UTC))
        documents.upsert(["a", "b"], [[1.0, 0.0], [0.0, 1.0]], [{"lang": "en"}, None], durable=True)
        wrong = []
        for member, value in homes()[home].items():
            users.clear()
            users.put(b"ada", b"1815", durable=True)
            with store.snapshot() as snapshot:
                names = {"penstock": penstock, "pyarrow": pyarrow, "store": store, "snapshot": snapshot}
                names |= {"users": users, "events": events, "metrics": metrics, "documents": documents}
                names |= {"worker": events.consumer(f"for-{member}"), "datetime": datetime, "timedelta": timedelta}
                names |= {key: getattr(penstock.testing, key) for key in penstock.testing.__all__} | {"UTC": UTC}
                example = example_of(f"{home.__name__}.{member}", value, names)
                assert example is not None
                wrong.append(failures(example))
        assert "".join(wrong) == ""


def test_a_method_without_an_example_is_noticed() -> None:
    class Silent:
        __module__ = "penstock.seeded"

        def call(self) -> None:
            """Do something."""

        @property
        def size(self) -> int:
            return 1

    assert undocumented("Silent", Silent) == ["Silent.call: no example", "Silent.size: no summary of one line"]


def test_a_wrong_example_is_noticed() -> None:
    def wrong() -> None:
        """Do nothing.

        >>> 1 + 1
        3
        """

    def silent() -> None:
        """Do nothing."""

    example = example_of("wrong", wrong, {})
    assert example is not None
    assert "Expected" in failures(example)
    assert example_of("silent", silent, {}) is None
