"""Randomness, passed in so that a test can repeat a run.

The protocol is the part of `random.Random` that Penstock uses: the operating system's entropy in production, a
seeded generator in tests.
"""

from __future__ import annotations

import random
from typing import Protocol


class Random(Protocol):
    """A source of random numbers."""

    def randbytes(self, n: int, /) -> bytes:
        """Return `n` random bytes."""

    def random(self) -> float:
        """Return a float in [0, 1)."""


def system_random() -> Random:
    """Return a source that uses the operating system's entropy."""
    return random.SystemRandom()
