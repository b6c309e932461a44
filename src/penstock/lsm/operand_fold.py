"""Folds merge operands for a whole slice of a compaction: numbers by numpy, everything else group by group.

A group is the rows of one key, newest first. Its *chain* is the leading operands; its *base* is the row after them, if
there is one. A row that has expired counts as a delete.

Thread: pure functions.
Invariant: the result is that of `operators.fold` from the oldest row of the chain to the newest.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.lsm.operators import fold_all, fold_numbers, is_number
from penstock.lsm.order import Flags, Values
from penstock.lsm.rows import I64, MERGE, NEVER, PUT, U8


@dataclass(frozen=True, slots=True)
class Folded:
    """One row for each group."""

    kinds: U8
    expires: I64
    values: list[bytes]


@dataclass(frozen=True, slots=True)
class _FoldWork:
    """The rows in order, and for each group the start and end of its chain, and its base."""

    order: I64
    kinds: U8
    expires: I64
    values: Values
    start: I64
    chain_end: I64
    has_base: Flags
    base_is_put: Flags
    bottom: bool


def fold_groups(
    *,
    order: I64,
    same: Flags,
    groups: I64,
    kinds: U8,
    expires: I64,
    values: Values,
    now_us: int,
    bottom: bool,
) -> Folded:
    """Fold the numbered groups; each begins with an operand that has not expired."""
    kinds, expires = kinds[order], expires[order]
    operand = (kinds >= MERGE) & (expires > now_us)
    put = (kinds == PUT) & (expires > now_us)
    n = len(order)
    starts = np.append(np.flatnonzero(~same), n)
    start, end = starts[groups], starts[groups + 1]
    # For each position, the next one without an operand.
    stop = np.minimum.accumulate(np.where(operand, n, np.arange(n))[::-1])[::-1]
    chain_end = np.minimum(stop[start], end)
    has_base = chain_end < end
    base_is_put = has_base & put[np.minimum(chain_end, n - 1)]
    work = _FoldWork(order, kinds, expires, values, start, chain_end, has_base, base_is_put, bottom)
    result = Folded(np.zeros(len(groups), np.uint8), np.full(len(groups), NEVER, np.int64), [b""] * len(groups))
    easy = _numeric(work)
    _fold_numeric(np.flatnonzero(easy), work, result)
    for i in np.flatnonzero(~easy).tolist():
        _fold_one(i, work, result)
    return result


def _numeric(work: _FoldWork) -> Flags:
    """Return which groups have one numeric operator over 8-byte values that never expire."""
    last = work.chain_end + work.base_is_put
    odd = np.concatenate([[0], np.cumsum((work.values.lengths(work.order) != 8) | (work.expires != NEVER))])
    changes = np.concatenate([[0], np.cumsum(work.kinds[1:] != work.kinds[:-1])])
    uniform: Flags = changes[work.chain_end - 1] == changes[work.start]
    numeric: Flags = uniform & is_number(work.kinds[work.start]) & (odd[last] == odd[work.start])
    return numeric


def _fold_numeric(which: I64, work: _FoldWork, result: Folded) -> None:
    last = work.chain_end + work.base_is_put
    operators = work.kinds[work.start[which]]
    for kind in np.unique(operators).tolist():
        group = which[operators == kind]
        counts = (last - work.start)[group]
        heads = np.cumsum(counts) - counts
        indexes = np.repeat(work.start[group] - heads, counts) + np.arange(int(counts.sum()))
        data = fold_numbers(kind, work.values.numbers(work.order[indexes]), heads).astype("<i8").tobytes()
        result.kinds[group] = np.where(work.has_base[group] | work.bottom, PUT, kind)
        for j, i in enumerate(group.tolist()):
            result.values[i] = data[8 * j : 8 * j + 8]


def _fold_one(i: int, work: _FoldWork, result: Folded) -> None:
    indexes = range(int(work.start[i]), int(work.chain_end[i]) + int(work.base_is_put[i]))
    certain = bool(work.has_base[i]) or work.bottom  # what is below the chain is known: a put, or nothing
    rows = [(int(work.kinds[at]), work.values.value(int(work.order[at]))) for at in reversed(indexes)]
    base = rows.pop(0) if work.base_is_put[i] else None
    row = fold_all(base, rows, certain)
    result.kinds[i], result.values[i] = row
    result.expires[i] = next((int(work.expires[at]) for at in indexes if work.expires[at] != NEVER), NEVER)
