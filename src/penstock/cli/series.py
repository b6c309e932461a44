"""`penstock series …`: samples by selector, PromQL with a plot in the terminal, and writing a sample.

Thread: one.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import typer

from penstock.cli.app import group
from penstock.cli.formatting import format_value, parse_time
from penstock.cli.output import first_of
from penstock.cli.plot import COLORS, plot
from penstock.cli.session import Limit, Name, Session, command
from penstock.errors import Invalid
from penstock.host.clock import SystemClock

series_group = group("series", "Samples of a series table.")

COLUMNS = ("metric", "labels", "time", "value")
LINES_MAX = 6  # of a plot
Start = Annotated[str | None, typer.Option(help="2026-03-01T12:00:00Z, or seconds since 1970")]
End = Annotated[str | None, typer.Option(help="a time; it is not included by select")]


def _series(session: Session, name: str) -> Any:
    return session.store.series(name, create=False)


def _moment(text: str | None) -> datetime | None:
    return None if text is None else parse_time(text)


@command(series_group, numbers=True)
def write(
    session: Session,
    table: Name,
    sample: Annotated[str, typer.Argument(help="""a metric with labels, such as 'cpu{host="a"}'""")],
    value: Annotated[float, typer.Argument()],
    time: Annotated[str | None, typer.Option(help="of the sample; default: now")] = None,
) -> None:
    """Write a sample, durably."""
    metric, labels = _parse_series(sample)
    _series(session, table).write(metric, value, labels, time=_moment(time), durable=True)
    session.out.done("written, and durable", metric=metric, labels=labels, value=value)


def _parse_series(text: str) -> tuple[str, dict[str, str]]:
    """Parse the name of one series: a selector that has only `=`."""
    from penstock.series.selectors import parse_selector

    labels: dict[str, str] = {}
    for matcher in parse_selector(text):
        if matcher.operator != "=":
            raise Invalid(f"{text} names many series: a sample has labels with = only")
        labels[matcher.name] = matcher.value
    metric = labels.pop("__name__", "")
    if not metric:
        raise Invalid(f'{text} has no metric: give one, such as cpu{{host="a"}}')
    return metric, labels


@command(series_group)
def select(  # noqa: PLR0917 - typer reads the signature
    session: Session,
    table: Name,
    selector: Annotated[str, typer.Argument(help="""such as 'cpu{host=~"a.*"}'""")],
    start: Start = None,
    end: End = None,
    limit: Limit = None,
) -> None:
    """Print the samples of a selector."""
    batches = _series(session, table).scan_arrow(selector, _moment(start), _moment(end))
    session.out.rows(COLUMNS, first_of(_samples(batches)), limit=session.out.limit(limit))


def _samples(batches: Iterator[pa.RecordBatch]) -> Iterator[tuple[Any, ...]]:
    for batch in batches:
        for row in batch.to_pylist():
            yield row["metric"], dict(row["labels"]), row["time"], row["value"]


@command(series_group)
def query(  # noqa: PLR0917 - typer reads the signature
    session: Session,
    table: Name,
    promql: Annotated[str, typer.Argument(help="such as 'sum by (host) (rate(requests_total[5m]))'")],
    start: Start = None,
    end: Annotated[str | None, typer.Option(help="a time; default: now")] = None,
    step: Annotated[float | None, typer.Option(help="seconds between two values; default: 72 values")] = None,
    last: Annotated[float | None, typer.Option(help="seconds back from --end; instead of --start")] = None,
    limit: Limit = None,
) -> None:
    """Evaluate PromQL: at one time, or over a range (--start or --last), drawn as a plot at a terminal."""
    series = _series(session, table)
    until = _moment(end) or datetime.fromtimestamp(SystemClock().time_us() / 1e6, UTC)
    if start is not None and last is not None:
        raise Invalid("--start and --last exclude each other: give one of them")
    if last is not None and not 0 < last < 1e10:
        raise Invalid(f"--last is {last}: give seconds above 0")
    try:
        since = until - timedelta(seconds=last) if last is not None else _moment(start)
    except OverflowError:
        raise Invalid(f"--last {last:g} begins before the year 1: give fewer seconds") from None
    if since is None:
        if step is not None:
            raise Invalid("--step goes with --start or --last: give one of them")
        result = series.query(promql, until)
    else:
        chosen = max(1.0, math.ceil((until - since).total_seconds() / 72)) if step is None else step
        result = series.query_range(promql, since, until, chosen)
        if session.out.terminal and not session.out.json:
            _draw(result, color=session.out.color)
            return
    session.out.rows(COLUMNS, _samples(iter(result.to_batches())), limit=session.out.limit(limit))


def _draw(result: pa.Table, *, color: bool) -> None:
    """Draw the first lines of a result; say how many were left out."""
    lines: dict[str, tuple[list[float], list[float]]] = {}
    for metric, labels, time, value in _samples(iter(result.to_batches())):
        name = metric + "".join(f" {key}={format_value(text)}" for key, text in labels.items())
        times, values = lines.setdefault(name, ([], []))
        times.append(time.timestamp())
        values.append(value)
    drawn = list(lines.items())[:LINES_MAX]
    size = shutil.get_terminal_size()
    arrays = [(np.array(times), np.array(values)) for _, (times, values) in drawn]
    for text in plot(
        arrays, width=max(20, min(size.columns - 14, 120)), height=max(6, min(size.lines - 10, 16)), color=color
    ):
        print(text)
    for number, (name, _) in enumerate(drawn):
        mark = f"\x1b[{COLORS[number % len(COLORS)]}m━\x1b[0m" if color else "━"
        print(f"{mark} {format_value(name)}")
    if len(lines) > len(drawn):
        print(f"and {len(lines) - len(drawn):,} more: narrow the query, or print it with --json")
