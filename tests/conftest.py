"""Settings for the whole suite."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture
def quiet() -> Iterator[None]:
    """For faults that are injected by the thousand: what is logged about them is of no use."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
