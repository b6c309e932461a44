"""README, guides and examples: every code block runs, and imports nothing but what is public."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.test_surface import PUBLIC

import penstock

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "guide").glob("*.md"))]
PUBLIC_MODULES = {"penstock", "penstock.aio", "penstock.errors", "penstock.spark", "penstock.testing"}
ELSEWHERE = ("spark", "db.example")  # blocks that need a Spark session (tests/spark runs them) or another machine

# What a page's blocks find: a store in the folder `data`, with the tables that the page talks about.
TABLES = """
import pyarrow
users, latest, prices = store.kv("users"), store.kv("latest"), store.kv("prices", value="int64")
rows = pyarrow.table({"key": [b"a", b"b"], "value": [1, 2]})
totals = store.kv("totals", value="int64")
events, failed = store.queue("events", shards=4), store.queue("failed")
events.put_many([b"%d" % number for number in range(100)], keys=[b"%d" % number for number in range(100)])
consumer, messages = events.consumer("docs"), events.consumer("docs").get(2)
time = 1_700_000_000_000_000
metrics, times = store.series("metrics"), pyarrow.array(range(time, time + 4)).to_numpy()
metrics.write("cpu", 0.5, {"host": "a"}, time=time)
store.flush()
"""


def blocks(page: Path) -> Iterator[tuple[int, str]]:
    """The Python blocks of a page: line of the first one, and source."""
    text = page.read_text()
    for found in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield text.count("\n", 0, found.start(1)) + 1, found[1]


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
    assert [(line, names) for line, source in blocks(page) if (names := strangers(source))] == []
    text = re.sub(r"^```(sh|console)\n.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    spelt = re.findall(r"(?<!-m )\bpenstock\.(\w+)(?:\.(\w+))?", text)  # also between blocks
    assert [".".join(name) for name in spelt if not is_public(*name)] == []


def is_public(first: str, second: str) -> bool:
    """Whether penstock.FIRST, or penstock.FIRST.SECOND, is a name that users may use."""
    if f"penstock.{first}" in PUBLIC_MODULES:
        return not second or second in PUBLIC[f"penstock.{first}"].split()
    return first in PUBLIC["penstock"].split()


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_an_example_imports_public_names_only(path: Path) -> None:
    assert strangers(path.read_text()) == []


def runnable() -> Iterator[object]:
    for page in PAGES:
        for line, source in blocks(page):
            if not any(word in source or word in page.stem for word in ELSEWHERE):
                yield pytest.param(source, id=f"{page.name}:{line}")


@pytest.mark.parametrize("source", list(runnable()))
def test_a_block_runs(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"penstock": penstock, "handle": len}
    if re.search(r"penstock\.(aio\.)?open\(", source):
        exec(compile(source, "block", "exec"), names)
        return
    with penstock.open("data") as store:
        names["store"] = store
        exec(compile(TABLES, "tables", "exec"), names)
        exec(compile(source, "block", "exec"), names)


def test_all_pages_have_blocks_that_run() -> None:
    ids = " ".join(parameter.id for parameter in runnable())  # type: ignore[attr-defined]
    assert [name for name in ("README.md", "kv.md", "queue.md", "series.md", "server.md") if name not in ids] == []


def test_the_rules_can_fail() -> None:
    assert strangers("from penstock.queue.options import Retention") == ["penstock.queue.options"]
    assert strangers("import penstock.lsm") == ["penstock.lsm"]
    assert not is_public("lsm", "operators")
    assert not is_public("spark", "nothing")
    assert is_public("errors", "")
    assert is_public("Retention", "")
    assert strangers("import penstock.spark\nfrom penstock import errors\nimport json") == []
