"""Python functions of a batch that report their failures, while its broken records are searched.

An error in a Python function ends its process, and a new one takes a second to start: a search that provokes dozens of
errors would take minutes. So the functions that a batch function uses are wrapped while it makes the plan of a search:
in an evaluation (see `RowSearch.java`) a wrapped function catches an error, writes it to the evaluation's file with the
numbers of the rows that fail, and goes on. The numbers are hints: the search evaluates such rows alone.

Wrapped are `mapInArrow`, `mapInPandas`, `udf` and `pandas_udf` of series; other functions fail as usual.

Thread: `reporting` affects the calling thread; the wrapped functions run in tasks.
"""

from __future__ import annotations

import base64
import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pyspark import TaskContext
from pyspark.sql.udf import UserDefinedFunction
from pyspark.util import PythonEvalType

REPORT = "penstock.evaluation"  # as in RowSearch.java
FAILURES_MAX = 10_000  # of one evaluation
NO_ROW = 2**31 - 1  # the number for an error that no row has alone
_here = threading.local()
_original: Any = UserDefinedFunction._judf


@contextmanager
def reporting() -> Iterator[None]:
    """Wrap the Python functions that this thread uses in DataFrames."""
    UserDefinedFunction._judf = property(_judf)  # type: ignore[assignment, method-assign]
    _here.active = True
    try:
        yield
    finally:
        _here.active = False


def _judf(function: Any) -> Any:
    """Return a function for the JVM; for other threads as Spark makes it."""
    wrapper = _WRAPPERS.get(function.evalType)
    if wrapper is None or not getattr(_here, "active", False):
        return _original.fget(function)
    return function._create_judf(wrapper(function.func), include_transpiled=False)


class FailureReport:
    """Writes the failures of one evaluation to its file."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.calls = 0
        self._failures = 0

    def add(self, row: int, error: Exception) -> None:
        """Report that the row of this number fails."""
        self._failures += 1
        if self._failures <= FAILURES_MAX:
            text = f"{type(error).__module__}.{type(error).__name__}: {error}".removeprefix("builtins.")
            with Path(self.path).open("a") as file:
                file.write(f"{row} {base64.b64encode(text.encode(errors='replace')).decode()}\n")


class SoftFunction:
    """A function of rows; `None` where it fails."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self._report: FailureReport | None = None

    def report(self) -> FailureReport | None:
        """Return the report of this evaluation; None in any other task."""
        context = TaskContext.get()
        path = None if context is None else context.getLocalProperty(REPORT)
        if path is None:
            return None
        if self._report is None or self._report.path != path:  # the process serves many evaluations
            self._report = FailureReport(path)
        return self._report

    def __call__(self, *args: Any, **named: Any) -> Any:
        report = self.report()
        if report is None:
            return self.function(*args, **named)
        report.calls += 1
        try:
            return self.function(*args, **named)
        except Exception as error:
            report.add(report.calls - 1, error)
            return None


class SoftSeriesFunction(SoftFunction):
    """A function of pandas series; nulls where it fails."""

    def __call__(self, *args: Any, **named: Any) -> Any:
        report, rows = self.report(), len(args[0]) if args else 0
        if report is None:
            return self.function(*args, **named)
        first = report.calls
        report.calls += rows
        try:
            return self.function(*args, **named)
        except Exception as error:
            pandas: Any = importlib.import_module("pandas")

            def attempt(low: int, high: int) -> None:
                self.function(
                    *(series.iloc[low:high] for series in args), **{k: v.iloc[low:high] for k, v in named.items()}
                )

            if not _report_rows(attempt, rows, first, report):
                report.add(NO_ROW, error)
            return pandas.Series([None] * rows, dtype=object)


class SoftMap(SoftFunction):
    """A function of an iterator of batches; no output where it fails."""

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        report = self.report()
        if report is None:
            yield from self.function(batches)
            return
        batch_list = list(batches)
        try:
            output = list(self.function(iter(batch_list)))
        except Exception as error:
            self._find(batch_list, error, report)
            return
        yield from output

    def _find(self, batches: list[Any], error: Exception, report: FailureReport) -> None:
        first, named = 0, False
        for batch in batches:

            def attempt(low: int, high: int, batch: Any = batch) -> None:
                part = batch.iloc[low:high] if hasattr(batch, "iloc") else batch.slice(low, high - low)
                for _ in self.function(iter([part])):
                    pass

            named |= _report_rows(attempt, len(batch), first, report)
            first += len(batch)
        if not named:
            report.add(NO_ROW, error)


def _report_rows(attempt: Callable[[int, int], None], rows: int, first: int, report: FailureReport) -> bool:
    """Report each row of [0, rows) that fails alone; return whether there is one."""
    ranges, has_failures = [(0, rows)] if rows else [], False
    while ranges:
        low, high = ranges.pop()
        try:
            attempt(low, high)
        except Exception as cause:
            if high - low > 1:
                middle = (low + high) // 2
                ranges += [(middle, high), (low, middle)]
            else:
                has_failures = True
                report.add(first + low, cause)
    return has_failures


_WRAPPERS: dict[int, type[SoftFunction]] = {
    PythonEvalType.SQL_BATCHED_UDF: SoftFunction,
    PythonEvalType.SQL_ARROW_BATCHED_UDF: SoftFunction,
    PythonEvalType.SQL_SCALAR_PANDAS_UDF: SoftSeriesFunction,
    PythonEvalType.SQL_MAP_ARROW_ITER_UDF: SoftMap,
    PythonEvalType.SQL_MAP_PANDAS_ITER_UDF: SoftMap,
}
