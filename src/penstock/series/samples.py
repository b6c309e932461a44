"""Columns of samples and of tombstones: sorting, deleting, uniting.

A *tombstone* deletes samples of one series in a range of time that were written before it.

Thread: pure functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

U32: TypeAlias = npt.NDArray[np.uint32]
U64: TypeAlias = npt.NDArray[np.uint64]
I64: TypeAlias = npt.NDArray[np.int64]
Flags: TypeAlias = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Samples:
    """Columns of samples."""

    ids: U32
    times: I64
    bits: U64  # of float64 values

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, which: Any) -> Samples:
        return Samples(self.ids[which], self.times[which], self.bits[which])

    @property
    def nbytes(self) -> int:
        return self.ids.nbytes + self.times.nbytes + self.bits.nbytes


@dataclass(frozen=True, slots=True)
class SampleSteps:
    """Times `start`, `start + step`, ...: of each series only the last sample at or before each of them counts."""

    start: int
    step: int

    def last(self, times: I64) -> I64:
        """Return the positions of such samples among the ascending times of one series."""
        return np.flatnonzero(np.append(self._changes(times), True)) if len(times) else np.zeros(0, np.int64)

    def last_between(self, times: I64, low: int, high: int) -> Any:
        """Return the positions of such samples of one series between two positions, as a slice or an array."""
        if low < high and times[high - 1] <= self.start:  # an instant has no step before its only one
            return slice(high - 1, high)
        return low + self.last(times[low:high])

    def thinned(self, samples: Samples) -> Samples:
        """Return such samples of several series, which are sorted by series and time."""
        if not len(samples):
            return samples
        return samples.take(np.append(self._changes(samples.times) | (samples.ids[1:] != samples.ids[:-1]), True))

    def _changes(self, times: I64) -> Flags:
        steps = np.maximum(-((self.start - times) // self.step), 0)  # the first step at or after each: rounded up
        changes: Flags = steps[1:] != steps[:-1]
        return changes


@dataclass(frozen=True, slots=True)
class Tombstones:
    """Deletes of older samples: of a series, with times in [start, end)."""

    ids: U32
    starts: I64
    ends: I64

    def __len__(self) -> int:
        return len(self.ids)


Contents: TypeAlias = tuple[Samples, Tombstones]  # sorted samples, and deletes of older ones
NO_SAMPLES = Samples(np.zeros(0, np.uint32), np.zeros(0, np.int64), np.zeros(0, np.uint64))
NO_TOMBSTONES = Tombstones(np.zeros(0, np.uint32), np.zeros(0, np.int64), np.zeros(0, np.int64))


def concat(parts: Sequence[Samples]) -> Samples:
    """Concatenate columns."""
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return NO_SAMPLES
    return Samples(
        np.concatenate([part.ids for part in parts]),
        np.concatenate([part.times for part in parts]),
        np.concatenate([part.bits for part in parts]),
    )


def sorted_distinct(samples: Samples) -> Samples:
    """Sort samples, given in write order, by id and time; the last write of an (id, time) wins."""
    if len(samples) < 2:
        return samples
    if not _ascends(samples):
        samples = samples.take(_order_of_ids(samples.ids))
        if not _ascends(samples):
            samples = samples.take(np.lexsort((samples.times, samples.ids)))
    again = (samples.ids[1:] == samples.ids[:-1]) & (samples.times[1:] == samples.times[:-1])
    if again.any():
        samples = samples.take(np.append(~again, True))
    return samples


def _ascends(samples: Samples) -> bool:
    ids, times = samples.ids, samples.times
    same = ids[1:] == ids[:-1]
    return bool(((ids[1:] > ids[:-1]) | (same & (times[1:] >= times[:-1]))).all())


def _order_of_ids(ids: U32) -> I64:
    """Return the stable order of ids: numpy sorts 16 bits at a time by radix, many times faster than by comparison."""
    low = ids.min()
    offsets = ids - low
    order: I64 = np.argsort(offsets.astype(np.uint16), kind="stable")
    if offsets.max() >> 16:
        order = order[np.argsort((offsets >> np.uint32(16)).astype(np.uint16)[order], kind="stable")]
    return order


def without(samples: Samples, deleted: Tombstones) -> Samples:
    """Return the samples that no tombstone deletes."""
    keep = ~deleted_by(samples, deleted)
    return samples if keep.all() else samples.take(keep)


def deleted_by(samples: Samples, deleted: Tombstones) -> Flags:
    """Return, for each sample, whether a tombstone deletes it."""
    is_deleted = np.zeros(len(samples), np.bool_)
    while len(deleted) and len(samples):  # the first tombstone of every series, then the second, ...
        numbers, first = np.unique(deleted.ids, return_index=True)
        at = np.minimum(np.searchsorted(numbers, samples.ids), len(numbers) - 1)
        mine = first[at]
        inside = (samples.times >= deleted.starts[mine]) & (samples.times < deleted.ends[mine])
        is_deleted |= inside & (numbers[at] == samples.ids)
        others = np.ones(len(deleted), np.bool_)
        others[first] = False
        deleted = Tombstones(deleted.ids[others], deleted.starts[others], deleted.ends[others])
    return is_deleted


def union(parts: Sequence[Tombstones]) -> Tombstones:
    """Return the union of tombstones: sorted, disjoint, none touching another of its series."""
    ids = np.concatenate([NO_TOMBSTONES.ids, *(part.ids for part in parts)])
    starts = np.concatenate([NO_TOMBSTONES.starts, *(part.starts for part in parts)])
    ends = np.concatenate([NO_TOMBSTONES.ends, *(part.ends for part in parts)])
    order = np.lexsort((ends, starts, ids))
    order = order[starts[order] < ends[order]]
    ids, starts, ends = ids[order], starts[order], ends[order]
    if (ids[1:] != ids[:-1]).all():  # one for each series, as a delete makes them
        return Tombstones(ids, starts, ends)
    merged: list[list[int]] = []
    for number, start, end in zip(ids.tolist(), starts.tolist(), ends.tolist(), strict=True):
        if merged and merged[-1][0] == number and merged[-1][2] >= start:
            merged[-1][2] = max(merged[-1][2], end)
        else:
            merged.append([number, start, end])
    columns = list(zip(*merged, strict=True))
    return Tombstones(np.array(columns[0], np.uint32), np.array(columns[1], np.int64), np.array(columns[2], np.int64))
