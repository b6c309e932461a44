"""Options of a table that cannot be read: its shards do not open, and leave nothing open behind them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.errors import CorruptionError
from penstock.series.machine import open_series_machine
from penstock.vector.machine import open_vector_machine


class Trees:
    """Stands for the maintenance of a store: counts the trees that are open."""

    def __init__(self) -> None:
        self.count = 0

    def open_tree(self, *_: Any, **__: Any) -> None:
        self.count += 1

    def close_tree(self, *_: Any) -> None:
        self.count -= 1


def test_a_shard_that_does_not_open_leaves_no_tree_open() -> None:
    trees: Any = Trees()
    descriptor: Any = SimpleNamespace(table_id=1, shard=0, folder="f")
    site: Any = SimpleNamespace(maintenance=trees)
    with pytest.raises(CorruptionError):
        open_vector_machine(trees, descriptor, b"damaged", 0)
    with pytest.raises(CorruptionError):
        open_series_machine(site, descriptor, b"damaged")
    assert trees.count == 0
