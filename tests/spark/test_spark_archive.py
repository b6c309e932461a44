"""Spark reads a table whose files were evicted: its tasks fetch the objects themselves, by the keys in their plan."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import penstock

ROWS = 2_000


def test_tasks_fetch_evicted_files_themselves(spark: Any, tmp_path: Path) -> None:
    path, url = str(tmp_path / "store"), f"file://{tmp_path}/archive"
    with penstock.open(path, archive=url) as store:
        users = store.kv("users", shards=2)
        users.put_many([(b"%06d" % key, b"%d" % key) for key in range(ROWS)], durable=True)
        store.compact("users")
        store.archive()
        assert store.evict("users").files == 2
        frame = spark.read.format("penstock").option("table", "users").load(path)
        assert frame.count() == ROWS
        assert not any((Path(path) / "cache").glob("*")), "the owner fetched them, not the tasks"
        values = {bytes(row.key): bytes(row.value) for row in frame.collect()}
        assert values == {b"%06d" % key: b"%d" % key for key in range(ROWS)}
        assert not any((Path(path) / "cache").glob("*"))
    shutil.rmtree(path)
    penstock.reattach(url, path)
    with penstock.open(path):  # its indexes are here, its files are not
        again = spark.read.format("penstock").option("table", "users").load(path)
        assert again.count() == ROWS
