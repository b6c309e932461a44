"""Settings and fixtures for the whole suite.

Run by several workers, files go out whole, the slow ones first: what comes last should be short, or one worker is busy
with it when the others have ended. All of Spark's tests go to one worker: a session takes a while to start.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent
# A process reads the kinds of other packages once: the toy kind's package must be there before the first test asks.
sys.path.append(str(TESTS / "contract" / "accounts_package"))
SLOWEST_FIRST = ("spark/", "cluster/", "crash/", "model/", "unit/client/", "unit/server/", "unit/scheduler/")


def _rank(item: pytest.Item) -> int:
    name = str(item.path.relative_to(TESTS))
    return next((rank for rank, folder in enumerate(SLOWEST_FIRST) if name.startswith(folder)), len(SLOWEST_FIRST))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):  # by hand, quick ones first are better
        items.sort(key=_rank)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Exclude what is loaded by now, all tests among it, from garbage collection: each would look through it again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Files go out whole, in the order above."""
    from xdist.scheduler import LoadFileScheduling

    class SlowFilesFirst(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return "spark" if nodeid.startswith("tests/spark/") else str(super()._split_scope(nodeid))

    if config.option.dist != "loadfile":
        return None
    config.option.loadscopereorder = False  # it would begin with the files that have the most tests
    return SlowFilesFirst(config, log)


@pytest.fixture
def quiet() -> Iterator[None]:
    """For faults that are injected by the thousand: what is logged about them is of no use."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """The folder of a store whose detached owners end with the test."""
    from owner_processes import owners, until

    folder = tmp_path / "store"
    yield folder
    for pid in owners(folder):
        os.kill(pid, signal.SIGKILL)
    until(lambda: not owners(folder))
