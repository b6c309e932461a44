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
        """`n` random bytes."""

    def random(self) -> float:
        """A float in [0, 1)."""


def system_random() -> Random:
    """The operating system's entropy."""
    return random.SystemRandom()
