"""Scalars and vectors on a grid of evaluation times.

Thread: immutable values; any.
Invariant: what stands in `values` where `present` is false has no meaning.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.errors import Invalid
from penstock.promql.labels import LabelMatrix, Rows, joined

F64: TypeAlias = npt.NDArray[np.float64]
I64: TypeAlias = npt.NDArray[np.int64]
Mask: TypeAlias = npt.NDArray[np.bool_]


def any_of(mask: Mask, axis: int) -> Mask:
    """Return where something is true along an axis."""
    result: Mask = np.logical_or.reduce(mask, axis=axis)
    return result


@dataclass(frozen=True, slots=True)
class StepGrid:
    """Evaluation times: `steps` of them from `start_us`, `step_us` apart."""

    start_us: int
    step_us: int
    steps: int

    @property
    def end_us(self) -> int:
        return self.start_us + self.step_us * (self.steps - 1)

    def times(self) -> I64:
        return self.start_us + self.step_us * np.arange(self.steps, dtype=np.int64)

    def shifted(self, by_us: int) -> StepGrid:
        return StepGrid(self.start_us + by_us, self.step_us, self.steps)


def step_grid(start_us: int, end_us: int, step_us: int) -> StepGrid:
    """Return the times from `start_us` to at most `end_us`; `Invalid` if there is none."""
    if end_us < start_us or step_us <= 0:
        raise Invalid(f"a range runs upwards by a step above 0, not from {start_us} to {end_us} by {step_us}")
    return StepGrid(start_us, step_us, (end_us - start_us) // step_us + 1)


@dataclass(frozen=True, slots=True)
class ScalarValue:
    """A number for each step."""

    values: F64


@dataclass(frozen=True, slots=True)
class TextValue:
    """A text."""

    text: str


@dataclass(frozen=True, slots=True)
class VectorValue:
    """Series with a number for some of the steps."""

    labels: LabelMatrix
    values: F64  # series x steps
    present: Mask  # series x steps
    unnamed: Mask  # series whose metric is dropped at the end of the query

    @staticmethod
    def empty(steps: int) -> VectorValue:
        shape = (0, steps)
        return VectorValue(LabelMatrix.empty(), np.zeros(shape), np.zeros(shape, np.bool_), np.zeros(0, np.bool_))

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: Rows | Mask) -> VectorValue:
        return VectorValue(self.labels.take(rows), self.values[rows], self.present[rows], self.unnamed[rows])

    def compact(self) -> VectorValue:
        """Return the vector without series that have no value at all."""
        rows = any_of(self.present, 1)
        return self if rows.all() else self.take(rows)

    def mapped(self, values: F64) -> VectorValue:
        """Return other values for the same series, whose metric no longer names them."""
        return VectorValue(self.labels, values, self.present, np.ones(len(self), np.bool_))

    def broadcast(self, steps: int) -> VectorValue:
        """Return a vector of one step as one of many."""
        shape = (len(self), steps)
        return VectorValue(
            self.labels, np.broadcast_to(self.values, shape), np.broadcast_to(self.present, shape), self.unnamed
        )


def lone_series(values: F64) -> VectorValue:
    """Return a vector of one series without labels."""
    shape = (1, len(values))
    return VectorValue(LabelMatrix.empty(1), values.reshape(shape), np.ones(shape, np.bool_), np.zeros(1, np.bool_))


def stacked(one: VectorValue, other: VectorValue) -> VectorValue:
    """Return the series of two vectors."""
    return VectorValue(
        joined(one.labels, other.labels),
        np.concatenate((one.values, other.values)),
        np.concatenate((one.present, other.present)),
        np.concatenate((one.unnamed, other.unnamed)),
    )


def merged(vector: VectorValue, problem: str) -> VectorValue:
    """Return the vector with one row for each label set; `Invalid` if two rows of one have a value at the same step.

    A series whose metric will be dropped differs from one that keeps it.
    """
    numbers, first = vector.labels.groups()
    if len(first) == len(vector):
        return vector
    if vector.unnamed.any() and not vector.unnamed.all():
        _, first, numbers = np.unique(2 * numbers + vector.unnamed, return_index=True, return_inverse=True)
    order = np.argsort(numbers, kind="stable")
    starts = np.searchsorted(numbers[order], np.arange(len(first)))
    counts = np.add.reduceat(vector.present[order].astype(np.int32), starts, axis=0)
    if (counts > 1).any():
        raise Invalid(problem)
    source = np.where(vector.present, np.arange(len(vector))[:, None], -1)[order]
    source = np.maximum(np.maximum.reduceat(source, starts, axis=0), 0)  # the one row that has the value
    values = np.take_along_axis(vector.values, source, axis=0)
    return VectorValue(vector.labels.take(first), values, counts > 0, vector.unnamed[first])
