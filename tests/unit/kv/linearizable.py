"""A checker of recorded histories: is there one order of all operations that explains every answer?

The operations are those of one register: read, compare and set, write. The search is that of Wing and Gong with Lowe's
memory of states that were tried: an operation may be put next if no other one, still unplaced, ended before it began.

An operation whose outcome is unknown may be placed anywhere after its beginning, or nowhere.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple

ABSENT = None


class Operation(NamedTuple):
    """One call: when it began and ended, what it asked, and what it got."""

    begin: float
    end: float  # infinite if its outcome is unknown
    name: str  # "read", "cas" or "write"
    expected: Hashable = ABSENT  # of a cas: the value that must be there
    value: Hashable = ABSENT  # what it read, or what it writes
    done: bool | None = True  # of a cas: whether it was done; None: unknown

    def step(self, state: Hashable) -> tuple[bool, Hashable]:
        """Return whether the answer fits the state, and the next state."""
        if self.name == "read":
            return state == self.value, state
        if self.name == "write":
            return True, self.value
        holds = state == self.expected
        if self.done is None:
            return holds, self.value  # if it happens, it is like this; if not, it is not placed
        return holds is self.done, self.value if self.done else state


def is_linearizable(history: Sequence[Operation], state: Hashable = ABSENT) -> bool:
    """Whether one order of the operations, in which none precedes one that ended before it began, explains them."""
    operations = sorted(history, key=lambda operation: operation.begin)
    everything = (1 << len(operations)) - 1
    unknown = sum(1 << i for i, operation in enumerate(operations) if operation.end == math.inf)
    tried: set[tuple[int, Hashable]] = set()
    stack = [(0, state)]
    while stack:
        placed, state = stack.pop()
        choices: list[tuple[int, Hashable]] = []
        while True:
            if placed | unknown == everything:
                return True
            choices, same = _next(operations, placed, state)
            if not same:
                break
            placed |= same  # what fits and changes nothing may as well come at once
        if (placed, state) not in tried:
            tried.add((placed, state))
            stack += choices
    return False


def _next(operations: Sequence[Operation], placed: int, state: Hashable) -> tuple[list[tuple[int, Hashable]], int]:
    """Return what may come next and changes the state, and a mask of what may come next and does not."""
    choices: list[tuple[int, Hashable]] = []
    same = 0
    first_end = math.inf  # of the operations that are not placed
    for i, operation in enumerate(operations):
        if placed >> i & 1:
            continue
        if operation.begin > first_end:
            break
        first_end = min(first_end, operation.end)
        fits, after = operation.step(state)
        if fits and after == state and operation.end != math.inf:
            same |= 1 << i
        elif fits:
            choices.append((placed | 1 << i, after))
    return choices, same
