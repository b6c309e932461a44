"""A store, and the table API in its owner and in a client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.store.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with penstock.open(tmp_path / "store") as opened:
        yield opened


@pytest.fixture(params=["owner", "client"])
def any_store(request: Any, store: Store) -> Iterator[Any]:
    if request.param == "owner":
        yield store
    else:
        with penstock.connect(store.path) as client:
            yield client
