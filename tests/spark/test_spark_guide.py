"""The pages that need Spark run as they stand, from top to bottom."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from tests.page_blocks import PAGES, PageRun, blocks, needs_spark
from tests.test_docstrings import example_of, failures, public_objects

import penstock

# What a reader would do by hand: end what runs until a signal ends it.
SUBSTITUTES = {
    "batch=route)": "batch=route, available_now=True)",
    'maintain(spark, "/abs/data")': 'maintain(spark, "/abs/data", stop=ended)',
}


@pytest.mark.parametrize("page", [page for page in PAGES if needs_spark(page)], ids=lambda page: page.name)
def test_a_page_runs_from_top_to_bottom(
    page: Path, spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with PageRun(page, tmp_path, SUBSTITUTES) as run:
        run.names["ended"] = ended = threading.Event()
        ended.set()
        try:
            run.run()
        finally:
            for query in spark.streams.active:
                query.stop()
        if page.name == "tutorial.md":
            check_tutorial(run.names)
    assert sum(block.language == "python" for block in run.ran) == len(list(blocks(page, "python"))) > 1


def test_the_examples_in_docstrings_run(spark: Any, tmp_path: Path) -> None:
    """`stream` and `commit` first: others show what they led to."""
    path = str(tmp_path / "store")
    with penstock.open(path) as store:
        store.kv("users", value="utf8").put(b"ada", "Ada")
        store.kv("totals", value="int64")
        store.queue("events").put(b"hello", key=b"ada", durable=True)
        names = {"penstock": penstock, "spark": spark, "path": path, "store": store, "threading": threading}
        public = dict(public_objects("penstock.spark"))
        first = [f"penstock.spark.{name}" for name in ("views", "stream", "commit")]
        for name in [*first, *sorted(set(public) - set(first))]:
            example = example_of(name, public[name], names)
            assert example is not None, f"{name} has no example in its docstring"
            assert failures(example) == ""
            names |= {"query": example.globs.get("query")}


def check_tutorial(names: dict[str, Any]) -> None:
    """What its comments say."""
    with penstock.connect("logs") as store:
        assert dict(store.kv("totals", value="int64")) == {b"accounts": 100, b"shop": 150, b"web": 101}
        assert dict(store.kv("errors", value="int64")) == {b"checkout": 10, b"login": 10, b"search": 10}
        assert (store.queue("lines").statistics().messages, store.queue("dead").statistics().messages) == (353, 2)
    assert names["counts"].num_rows == 3
