"""Every public class and function has an example in its docstring, and the examples run.

They find `penstock` and a `store` with a table `users` of one row and a queue `events` of one message; Spark's, which
tests/spark runs, also find `spark` and the store's `path`.
"""

from __future__ import annotations

import asyncio
import decimal
import doctest
import hashlib
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from tests.test_surface import PUBLIC

import penstock
import penstock.aio
import penstock.testing
from penstock.cli.certificates import make_certificates


def public_objects(module: str) -> Iterator[tuple[str, Any]]:
    """The public classes and functions of a module; errors explain themselves in a table."""
    for name in PUBLIC[module].split():
        public = getattr(importlib.import_module(module), name)
        if inspect.isclass(public) or inspect.isfunction(public):
            yield f"{module}.{name}", public


def example_of(name: str, public: Any, names: dict[str, Any]) -> doctest.DocTest | None:
    """The example in an object's own docstring; None if there is none."""
    text = inspect.getdoc(public) or ""
    found = doctest.DocTestParser().get_doctest(text, names, name, None, 0)
    return found if found.examples else None


def failures(example: doctest.DocTest) -> str:
    """What an example does otherwise than it says; empty if nothing."""
    told: list[str] = []
    doctest.DocTestRunner(verbose=False).run(example, out=told.append, clear_globs=False)
    return "".join(told)


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
