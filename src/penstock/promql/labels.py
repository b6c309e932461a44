"""Label sets as a matrix of codes: a row for each series, a column for each name.

Thread: immutable values; any.
Invariants: (1) names are sorted and distinct. (2) code 0 means that the label is absent, and `values[column][0]` is "".
(3) the values of a column are distinct.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.errors import Invalid
from penstock.promql.tree import RESERVED_LABELS

Codes: TypeAlias = npt.NDArray[np.int32]
Rows: TypeAlias = npt.NDArray[np.int64]
_KEY_MAX = 1 << 62
CELLS_MAX = 1 << 27  # series x names


class LabelMatrix:
    """Label sets of many series."""

    __slots__ = ("codes", "names", "values")

    def __init__(self, names: Sequence[str], values: Sequence[Sequence[str]], codes: Codes) -> None:
        self.names = tuple(names)
        self.values = tuple(values)
        self.codes = codes  # series x names

    @staticmethod
    def empty(rows: int = 0) -> LabelMatrix:
        """Return label sets without labels."""
        return LabelMatrix((), (), np.zeros((rows, 0), np.int32))

    @staticmethod
    def of(label_sets: Sequence[Mapping[str, str] | Iterable[tuple[str, str]]]) -> LabelMatrix:
        """Return the matrix of label sets; empty values mean that a label is absent."""
        codes_by_name: dict[str, dict[str, int]] = {}
        entries: list[tuple[int, str, int]] = []
        for row, labels in enumerate(label_sets):
            for name, value in labels.items() if isinstance(labels, Mapping) else labels:
                if value:
                    codes = codes_by_name.setdefault(name, {"": 0})
                    entries.append((row, name, codes.setdefault(value, len(codes))))
        names = sorted(codes_by_name)
        if len(names) * len(label_sets) > CELLS_MAX:
            raise Invalid(f"{len(label_sets)} series have {len(names)} names of labels: narrow the selectors")
        column_of = {name: column for column, name in enumerate(names)}
        matrix = np.zeros((len(label_sets), len(names)), np.int32)
        if entries:
            rows, columns, numbers = zip(*((r, column_of[n], c) for r, n, c in entries), strict=True)
            matrix[list(rows), list(columns)] = numbers
        return LabelMatrix(names, [list(codes_by_name[name]) for name in names], matrix)

    def __len__(self) -> int:
        return len(self.codes)

    def take(self, rows: Rows | npt.NDArray[np.bool_]) -> LabelMatrix:
        """Return the label sets of some rows."""
        return LabelMatrix(self.names, self.values, self.codes[rows])

    def column(self, name: str) -> tuple[Sequence[str], Codes]:
        """Return the distinct values of a label, and each row's code."""
        if name not in self.names:
            return [""], np.zeros(len(self), np.int32)
        column = self.names.index(name)
        return self.values[column], self.codes[:, column]

    def keeping(self, names: Iterable[str]) -> LabelMatrix:
        """Return the matrix with these labels only."""
        name_set = set(names)
        return self._columns([column for column, name in enumerate(self.names) if name in name_set])

    def without(self, names: Iterable[str]) -> LabelMatrix:
        """Return the matrix without these labels."""
        name_set = set(names)
        return self._columns([column for column, name in enumerate(self.names) if name not in name_set])

    def _columns(self, columns: list[int]) -> LabelMatrix:
        if len(columns) == len(self.names):
            return self
        return LabelMatrix([self.names[p] for p in columns], [self.values[p] for p in columns], self.codes[:, columns])

    def without_reserved(self, rows: npt.NDArray[np.bool_]) -> LabelMatrix:
        """Return the matrix with the metric, and what else describes it, removed from some rows."""
        columns = [column for column, name in enumerate(self.names) if name in RESERVED_LABELS]
        if not columns or not rows.any():
            return self
        codes = self.codes.copy()
        codes[np.ix_(np.flatnonzero(rows), np.array(columns))] = 0
        return LabelMatrix(self.names, self.values, codes)

    def replacing(self, name: str, values: Sequence[str], codes: npt.NDArray[np.integer]) -> LabelMatrix:
        """Return the matrix with another column for a name; `values` may repeat, and "" means absent."""
        distinct = {"": 0}
        new = np.array([distinct.setdefault(value, len(distinct)) for value in values], np.int32)
        rest = self.without([name])
        position = sum(other < name for other in rest.names)
        names = [*rest.names[:position], name, *rest.names[position:]]
        columns = [*rest.values[:position], list(distinct), *rest.values[position:]]
        column = new[codes] if len(values) else np.zeros(len(self), np.int32)
        return LabelMatrix(names, columns, np.insert(rest.codes, position, column, axis=1))

    def groups(self) -> tuple[Rows, Rows]:
        """Return the number of each row's label set, counted from 0, and the first row of each number."""
        key = np.zeros(len(self), np.int64)
        size = 1
        for column, values in enumerate(self.values):
            if size * len(values) >= _KEY_MAX:
                key = np.unique(key, return_inverse=True)[1].reshape(-1)
                size = len(self)
            key = key * len(values) + self.codes[:, column]
            size *= max(1, len(values))
        if not len(self):
            return key, key
        _, first, numbers = np.unique(key, return_index=True, return_inverse=True)
        # Numbered in the order of their first rows: results keep the order of series.
        order = np.argsort(first, kind="stable")
        rank = np.empty(len(order), np.int64)
        rank[order] = np.arange(len(order))
        return rank[numbers.reshape(-1)], first[order]

    def characters(self) -> Rows:
        """Return how many characters the names and values of each row have."""
        total: Rows = np.zeros(len(self), np.int64)
        for column, (name, values) in enumerate(zip(self.names, self.values, strict=True)):
            sizes = np.array([0, *(len(name) + len(value) for value in values[1:])], np.int64)
            total += sizes[self.codes[:, column]]
        return total

    def label_sets(self) -> list[dict[str, str]]:
        """Return each row as a dict."""
        pairs = list(zip(self.names, self.values, strict=True))
        return [
            {name: values[code] for (name, values), code in zip(pairs, row, strict=True) if code}
            for row in self.codes.tolist()
        ]


def joined(one: LabelMatrix, other: LabelMatrix) -> LabelMatrix:
    """Return the rows of one matrix, then those of another, with common codes."""
    names = sorted({*one.names, *other.names})
    columns, matrix = [], np.zeros((len(one) + len(other), len(names)), np.int32)
    for position, name in enumerate(names):
        values, codes = one.column(name)
        more, others = other.column(name)
        matrix[: len(one), position] = codes
        if values is more:
            matrix[len(one) :, position] = others
            columns.append(values)
            continue
        distinct = {value: code for code, value in enumerate(values)}
        mapped = np.array([distinct.setdefault(value, len(distinct)) for value in more], np.int32)
        matrix[len(one) :, position] = mapped[others]
        columns.append(list(distinct))
    return LabelMatrix(names, columns, matrix)
