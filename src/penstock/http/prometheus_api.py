"""Prometheus' HTTP API on a series table: parameters in, JSON out.

Thread: pure functions of a table; each call runs in a thread of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

from penstock.arguments import in_short, microseconds
from penstock.errors import FixTheCall, Invalid
from penstock.host.clock import Clock
from penstock.http.query_json import query_json
from penstock.http.result_json import result_json
from penstock.promql import QueryBudget, QueryLimits, StepGrid, parse_query, step_grid
from penstock.promql.evaluator import EvaluationSettings, check_range_query
from penstock.promql.formatting import format_query
from penstock.promql.limits import STEPS_MAX, SampleRoom
from penstock.series.labels import METRIC
from penstock.series.reader import SeriesReader
from penstock.series.selectors import parse_selector

T = TypeVar("T")
Parameters: TypeAlias = Mapping[str, Sequence[str]]
PROMETHEUS_VERSION = "3.5.0"  # whose API this is
TIMEOUT_S, TIMEOUT_S_MAX = 30.0, 60.0
SECONDS_MAX = 1e10  # of a duration
LIMIT_MAX = 1_000_000  # rows of one answer that is a list
TOP_MAX = 10_000  # metrics and labels of `status/tsdb`, as in Prometheus
_DURATION = re.compile(r"(?:[0-9]+(?:ms|[smhdwy]))+")
_DURATION_PART = re.compile(r"([0-9]+)(ms|[smhdwy])")
_UNITS_US = {"ms": 10**3, "s": 10**6, "m": 60 * 10**6, "h": 3_600 * 10**6, "d": 86_400 * 10**6}
_UNITS_US |= {"w": 7 * _UNITS_US["d"], "y": 365 * _UNITS_US["d"]}


class ExecutionRefused(FixTheCall):
    """The query is well formed, but cannot be evaluated."""


class ReadRequest:
    """A request that reads: its parameters, its clock, and whether its client still waits."""

    def __init__(self, parameters: Parameters, clock: Clock, room: SampleRoom | None = None) -> None:
        self.parameters = parameters
        self.clock = clock
        self._room = room
        self._budget: QueryBudget | None = None
        self._cancelled = False
        self.warnings: list[str] = []

    def cancel(self) -> None:
        """Make the query end soon. Any thread may call it."""
        self._cancelled = True
        if self._budget is not None:
            self._budget.cancel()

    def close(self) -> None:
        """Give back what the query holds."""
        if self._budget is not None:
            self._budget.close()

    def budget(self) -> QueryBudget:
        """Return the budget of the query; `Invalid` if the timeout is malformed."""
        timeout_s = TIMEOUT_S
        if self.parameters.get("timeout"):
            timeout_s = min(parse_duration(_one(self.parameters, "timeout"), "timeout") / 1e6, TIMEOUT_S_MAX)
        self._budget = QueryBudget(QueryLimits(timeout_s=timeout_s), self.clock, self._room)
        if self._cancelled:  # before there was one
            self._budget.cancel()
        return self._budget


# -- parameters


def _one(parameters: Parameters, name: str) -> str:
    values = parameters.get(name, ())
    if len(values) != 1 or not values[0]:
        raise Invalid(f"the parameter {name} is needed, once")
    return values[0]


def parse_moment(text: str, name: str) -> int:
    """Return a time, in seconds since 1970 or RFC 3339, in microseconds."""
    try:
        return microseconds(round(float(text) * 1e6), name)
    except (ValueError, OverflowError):
        pass
    try:
        return microseconds(datetime.fromisoformat(text), name)
    except ValueError:
        raise Invalid(f"{name} is seconds since 1970 or 2026-01-31T12:00:00Z, not {in_short(text)}") from None


def parse_duration(text: str, name: str) -> int:
    """Return a duration, in seconds or as 1h30m, in microseconds."""
    try:
        if _DURATION.fullmatch(text) and len(text) < 64:
            seconds = sum(int(number) * _UNITS_US[unit] for number, unit in _DURATION_PART.findall(text)) / 1e6
        else:
            seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < SECONDS_MAX:
        raise Invalid(f"{name} is a duration above 0 such as 15 or 1h30m, not {in_short(text)}")
    return max(1, round(seconds * 1e6))


def _times(parameters: Parameters) -> tuple[int | None, int | None]:
    """Return the range of time of a request for labels: both ends included there, the end excluded here."""
    start = parse_moment(_one(parameters, "start"), "start") if parameters.get("start") else None
    end = parse_moment(_one(parameters, "end"), "end") + 1 if parameters.get("end") else None
    return start, end


def _is_empty(times: tuple[int | None, int | None]) -> bool:
    start, end = times
    return start is not None and end is not None and end <= start


def _selectors(parameters: Parameters, *, needed: bool) -> list[str]:
    selectors = list(parameters.get("match[]", ()))
    if needed and not selectors:
        raise Invalid("the parameter match[] is needed: give a selector such as up")
    for selector in selectors:
        if all(matcher.matches("") for matcher in parse_selector(selector)):
            raise Invalid(f"the parameter match[] selects everything by {in_short(selector)}: name a label that is set")
    return selectors or ["{}"]


def _limit(parameters: Parameters) -> int:
    text = _one(parameters, "limit") if parameters.get("limit") else "0"
    if not text.isdecimal() or len(text) > 9:
        raise Invalid(f"limit is a whole number, not {in_short(text)}")
    return int(text) or LIMIT_MAX


def _limited(rows: list[T], request: ReadRequest) -> list[T]:
    """Return at most as many rows as the request wants, and warn if there are more."""
    limit = _limit(request.parameters)
    if len(rows) > limit:
        request.warnings.append("results truncated due to limit")
    return rows[:limit]


def _settings(parameters: Parameters) -> EvaluationSettings:
    if not parameters.get("lookback_delta"):
        return EvaluationSettings()
    return EvaluationSettings(lookback_us=parse_duration(_one(parameters, "lookback_delta"), "lookback_delta"))


# -- answers


def _query(table: SeriesReader, request: ReadRequest) -> Any:
    parameters = request.parameters
    text = _one(parameters, "query")
    parse_query(text)
    moment = parse_moment(_one(parameters, "time"), "time") if parameters.get("time") else request.clock.time_us()
    return _evaluated(table, text, StepGrid(moment, 1, 1), request, instant=True)


def _query_range(table: SeriesReader, request: ReadRequest) -> Any:
    parameters = request.parameters
    text = _one(parameters, "query")
    check_range_query(parse_query(text))
    start, end = (parse_moment(_one(parameters, name), name) for name in ("start", "end"))
    grid = step_grid(start, end, parse_duration(_one(parameters, "step"), "step"))
    if grid.steps > STEPS_MAX:
        raise Invalid(f"exceeded maximum resolution of {STEPS_MAX - 1:,} points per time series: give a longer step")
    return _evaluated(table, text, grid, request, instant=False)


def _format_query(table: SeriesReader, request: ReadRequest) -> Any:
    return format_query(parse_query(_one(request.parameters, "query")))


def _parse_query(table: SeriesReader, request: ReadRequest) -> Any:
    return query_json(parse_query(_one(request.parameters, "query")))


def _evaluated(table: SeriesReader, text: str, grid: StepGrid, request: ReadRequest, *, instant: bool) -> Any:
    _limit(request.parameters)  # before the work
    settings, budget = _settings(request.parameters), request.budget()
    try:
        answer = result_json(table.evaluate(text, grid, budget, instant=instant, settings=settings))
    except Invalid as refused:
        raise ExecutionRefused(str(refused)) from None
    if answer["resultType"] in ("vector", "matrix"):
        answer["result"] = _limited(answer["result"], request)
    return answer


def _query_exemplars(table: SeriesReader, request: ReadRequest) -> Any:
    """Answer with none: exemplars are not stored."""
    parse_query(_one(request.parameters, "query"))
    _times(request.parameters)
    return []


def _series(table: SeriesReader, request: ReadRequest) -> Any:
    limit, label_sets, budget = _limit(request.parameters), {}, request.budget()
    selectors, times = _selectors(request.parameters, needed=True), _times(request.parameters)
    for selector in () if _is_empty(times) else selectors:
        rows = table.series(selector, *times, timeout_s=budget.remaining_s())
        for batch in rows.to_batches(max_chunksize=8_192):
            budget.check()
            for row in batch.to_pylist():
                labels = {METRIC: row["metric"], **dict(row["labels"])}
                label_sets[tuple(sorted(labels.items()))] = labels
            if len(label_sets) > limit:
                return _limited(list(label_sets.values()), request)
    return list(label_sets.values())


def _labels(table: SeriesReader, request: ReadRequest) -> Any:
    budget, times, names = request.budget(), _times(request.parameters), set()
    selectors = _selectors(request.parameters, needed=False)
    for selector in () if _is_empty(times) else selectors:
        names.update(table.labels(selector, *times, timeout_s=budget.remaining_s()))
    return _limited(sorted(names), request)


def label_values(table: SeriesReader, name: str, request: ReadRequest) -> list[str]:
    """Return the values of a label."""
    budget, times, values = request.budget(), _times(request.parameters), set()
    selectors = _selectors(request.parameters, needed=False)
    for selector in () if _is_empty(times) else selectors:
        values.update(table.label_values(name, selector, *times, timeout_s=budget.remaining_s()))
    return _limited(sorted(values), request)


def _metadata(table: SeriesReader, request: ReadRequest) -> Any:
    parameters = request.parameters
    metric = _one(parameters, "metric") if parameters.get("metric") else None
    metadata = list(table.metadata(metric).items())[: _limit(parameters)]
    return {name: [{"type": each.type or "unknown", "help": each.help, "unit": each.unit}] for name, each in metadata}


def _buildinfo(table: SeriesReader, request: ReadRequest) -> Any:
    return {"version": PROMETHEUS_VERSION, "revision": "penstock", "branch": "", "buildUser": "", "buildDate": ""}


def _tsdb(table: SeriesReader, request: ReadRequest) -> Any:
    text = _one(request.parameters, "limit") if request.parameters.get("limit") else "10"
    if not text.isdecimal() or len(text) > 9 or not 0 < int(text) <= TOP_MAX:
        raise Invalid(f"limit is a number from 1 to {TOP_MAX:,}, not {in_short(text)}")
    cardinality = table.cardinality(top=int(text))

    def rows(counts: Mapping[str, int]) -> list[dict[str, Any]]:
        return [{"name": name, "value": count} for name, count in counts.items()]

    return {
        "headStats": {"numSeries": cardinality.series},
        "seriesCountByMetricName": rows(cardinality.metrics),
        "labelValueCountByLabelName": rows(cardinality.labels),
    }


Answer: TypeAlias = Callable[[SeriesReader, ReadRequest], Any]
ANSWERS: Mapping[str, Answer] = MappingProxyType(
    {
        "query": _query,
        "query_range": _query_range,
        "series": _series,
        "labels": _labels,
        "metadata": _metadata,
        "format_query": _format_query,
        "parse_query": _parse_query,
        "query_exemplars": _query_exemplars,
        "rules": lambda *_: {"groups": []},
        "alerts": lambda *_: {"alerts": []},
        "status/buildinfo": _buildinfo,
        "status/tsdb": _tsdb,
    }
)
