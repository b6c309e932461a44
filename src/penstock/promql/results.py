"""What a query returns.

Thread: immutable values; any.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa

from penstock.errors import Invalid
from penstock.promql.labels import LabelMatrix
from penstock.promql.limits import QueryTooLarge
from penstock.promql.matching import SAME_LABELS
from penstock.promql.source import SelectedSamples
from penstock.promql.tree import METRIC_NAME
from penstock.promql.values import I64, ScalarValue, StepGrid, VectorValue, merged

LABEL_CHARACTERS_MAX = 1 << 29
ResultKind: TypeAlias = Literal["scalar", "vector", "matrix", "string"]


@dataclass(frozen=True, slots=True)
class QueryResult:
    """Samples of series, as columns; a scalar is one series without labels, a string has no samples."""

    kind: ResultKind
    samples: SelectedSamples
    text: str = ""

    def to_arrow(self, schema: Any) -> pa.Table:
        """Return the samples as rows of metric, labels, time and value; a metric that was dropped is ""."""
        if self.kind == "string":
            raise Invalid("the query is a text, and not an expression that has numbers")
        size = int((self.samples.labels.characters() * np.diff(self.samples.starts)).sum())
        if size > LABEL_CHARACTERS_MAX:  # more does not fit into a column
            problem = f"the rows of the result repeat {size} characters of labels: ask for fewer series or steps"
            raise QueryTooLarge(problem)
        metrics: list[str] = []
        maps: list[list[tuple[str, str]]] = []
        for labels in self.samples.labels.label_sets():
            metrics.append(labels.pop(METRIC_NAME, ""))
            maps.append(sorted(labels.items()))
        rows = pa.array(np.repeat(np.arange(len(metrics)), np.diff(self.samples.starts)))
        columns = {
            "metric": pa.array(metrics, pa.string()).take(rows),
            "labels": pa.array(maps, schema.field("labels").type).take(rows),
            "time": pa.array(self.samples.times).cast(schema.field("time").type),
            "value": pa.array(self.samples.values, from_pandas=False),
        }
        return pa.table([columns[name] for name in schema.names], schema=schema)


def of_vector(vector: VectorValue, grid: StepGrid, kind: ResultKind) -> QueryResult:
    """Return the result of a query: names are dropped now, and series that differ by nothing else become one."""
    labels = vector.labels.without_reserved(vector.unnamed)
    named = np.zeros(len(vector), np.bool_)  # what was to be dropped is dropped
    vector = merged(VectorValue(labels, vector.values, vector.present, named), SAME_LABELS)
    return QueryResult(kind, samples_of_vector(vector, grid))


def samples_of_vector(vector: VectorValue, grid: StepGrid) -> SelectedSamples:
    """Return the values of a vector as samples at the times of its steps."""
    starts: I64 = np.concatenate(([0], np.cumsum(vector.present.sum(axis=1, dtype=np.int64))))
    times = np.broadcast_to(grid.times(), vector.present.shape)[vector.present]
    return SelectedSamples(vector.labels, starts, times, vector.values[vector.present])


def of_scalar(scalar: ScalarValue, grid: StepGrid, kind: ResultKind) -> QueryResult:
    """Return a number for each step."""
    starts: I64 = np.array([0, grid.steps])
    return QueryResult(kind, SelectedSamples(LabelMatrix.empty(1), starts, grid.times(), scalar.values.copy()))
