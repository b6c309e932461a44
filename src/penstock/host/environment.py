"""Environment variables.

Thread: any.
"""

from __future__ import annotations

import os

KEYS_VARIABLE = "PENSTOCK_KEYS"  # file:PATH or env:NAME, for an owner that gets no keys=


def environment_variable(name: str) -> str | None:
    """Return the value of an environment variable; None if it is not set."""
    return os.environ.get(name)
