"""Settings and fixtures for the whole suite."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest


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
