"""Whether a history of one register could have happened one operation at a time.

An operation has an interval; between its ends it took effect at once. The search (Wing and Gong's) takes an operation
that began before every other one ended, applies it to the value, and goes on with the rest; states that were tried are
remembered. A write whose outcome is not known may take effect at any time after it began, or never.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Operation:
    """A read or a write of the register."""

    begin: float
    end: float  # infinite: its outcome is not known
    is_write: bool
    value: bytes | None  # what was written, or read


def is_linearizable(history: list[Operation], initial: bytes | None = None) -> bool:
    """Whether some order explains every value that was read."""
    operations = sorted((each for each in history if each.is_write or each.end < math.inf), key=lambda one: one.begin)
    left, states = frozenset(range(len(operations))), set[tuple[frozenset[int], bytes | None]]()
    stack = [(left, initial)]
    while stack:
        left, value = stack.pop()
        if all(operations[number].end == math.inf for number in left):
            return True
        if (left, value) in states:
            continue
        states.add((left, value))
        first_end = min(operations[number].end for number in left)
        for number in left:
            operation = operations[number]
            if operation.begin > first_end:
                continue
            if operation.is_write:
                stack.append((left - {number}, operation.value))
            elif operation.value == value:
                stack.append((left - {number}, value))
    return False
