"""README, first page, tutorial, guides and examples: every code block runs, in order, and imports only public names."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.page_blocks import PAGES, ROOT, PageRun, blocks, needs_spark
from tests.test_surface import PUBLIC

PUBLIC_MODULES = {"penstock", "penstock.aio", "penstock.errors", "penstock.spark", "penstock.testing"}


def imported(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def strangers(source: str) -> list[str]:
    """Modules of Penstock that a piece of code imports although they are internal."""
    return [name for name in imported(source) if name.split(".")[0] == "penstock" and name not in PUBLIC_MODULES]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_imports_public_names_only(page: Path) -> None:
    assert [(line, names) for _, line, source in blocks(page, "python") if (names := strangers(source))] == []
    text = re.sub(r"^```(sh|console)\n.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    spelt = re.findall(r"(?<!-m )\bpenstock\.(?!toml\b)(\w+)(?:\.(\w+))?", text)  # also between blocks
    assert [".".join(name) for name in spelt if not is_public(*name)] == []


def is_public(first: str, second: str) -> bool:
    """Whether penstock.FIRST, or penstock.FIRST.SECOND, is a name that users may use."""
    if f"penstock.{first}" in PUBLIC_MODULES:
        return not second or second in PUBLIC[f"penstock.{first}"].split()
    return first in PUBLIC["penstock"].split()


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_an_example_imports_public_names_only(path: Path) -> None:
    assert strangers(path.read_text()) == []


@pytest.mark.parametrize("page", [page for page in PAGES if not needs_spark(page)], ids=lambda page: page.name)
def test_a_page_runs_from_top_to_bottom(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with PageRun(page, tmp_path) as run:
        run.run()
    assert [block.line for block in run.ran if block.language == "python"] == [
        block.line for block in blocks(page, "python")
    ]


def test_every_page_runs_somewhere() -> None:
    """The ones with Spark in tests/spark/test_spark_guide.py, the others here; and each has blocks."""
    assert {page.name for page in PAGES if needs_spark(page)} == {"README.md", "tutorial.md", "spark.md"}
    assert [page.name for page in PAGES if not list(blocks(page))] == []
    others = set((ROOT / "docs").rglob("*.md")) - {*PAGES, *(ROOT / "docs" / "internals").glob("*.md")}
    assert [page for page in others if list(blocks(page, "python"))] == []  # code that no test runs


def test_a_page_that_does_not_run_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nx = 1\n```\ntext\n```python\nassert x == 2\n```\n```sh\npenstock nothing\n```\n")
    with PageRun(page, tmp_path) as run, pytest.raises(AssertionError):
        run.run()
    page.write_text("```sh\npenstock nothing\n```\n")
    with PageRun(page, tmp_path) as run, pytest.raises(AssertionError, match="page.md:2"):
        run.run()


def test_the_rules_can_fail() -> None:
    assert strangers("from penstock.queue.options import Retention") == ["penstock.queue.options"]
    assert strangers("import penstock.lsm") == ["penstock.lsm"]
    assert not is_public("lsm", "operators")
    assert not is_public("spark", "nothing")
    assert is_public("errors", "")
    assert is_public("Retention", "")
    assert strangers("import penstock.spark\nfrom penstock import errors\nimport json") == []
