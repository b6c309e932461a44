"""What a run looks like while it runs: a panel in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table

from examples.run import Run, Sample, percentile

BARS = " ▁▂▃▄▅▆▇█"
REFRESH_S = 0.25
LINE_EVERY_S = 10.0


@contextmanager
def display(run: Run) -> Iterator[None]:
    """Show `run` until the block ends."""
    console, ended = Console(), threading.Event()
    show = _panel if console.is_terminal else _lines
    thread = threading.Thread(target=show, args=(console, run, ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _panel(console: Console, run: Run, ended: threading.Event) -> None:
    with Live(_picture(run, console.width), console=console, auto_refresh=False, transient=True) as live:
        while not ended.wait(REFRESH_S):
            live.update(_picture(run, console.width), refresh=True)


def _lines(console: Console, run: Run, ended: threading.Event) -> None:
    due_s = time.monotonic() + LINE_EVERY_S
    while not ended.wait(REFRESH_S):
        if time.monotonic() >= due_s:
            due_s += LINE_EVERY_S
            console.print(
                f"  {run.now_s:4.0f} s  {run.produced:>10,} in  {max(0, run.produced - run.backlog):>10,} committed  "
                f"{run.backlog:>8,} waiting  {_latencies(run)[0]:>8}  {len(run.kills)} kills  {run.stage}",
                highlight=False,
                soft_wrap=True,
            )


def _picture(run: Run, columns: int) -> Panel:
    table, width = Table.grid(padding=(0, 3)), min(40, max(4, columns - 62))  # of a bar: no line is wrapped
    table.add_column(style="dim", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    into, out = _rates(run.samples)
    committed, planned = max(0, run.produced - run.backlog), run.rate * run.seconds or 1
    backlogs, rows = [one.backlog for one in run.samples], [batch.rows for batch in run.batches]
    table.add_row("events in", f"{run.produced:,}", f"{_bar(run.produced / planned, width)} {into:,.0f}/s")
    table.add_row("waiting, or in Spark", f"{run.backlog:,}", _sparkline(backlogs, width))
    table.add_row("committed", f"{committed:,}", f"{_bar(committed / planned, width)} {out:,.0f}/s")
    table.add_row("lag", f"{_lag_s(run):,.1f} s", f"{_sparkline(rows, width)}  rows a batch" if rows else "")
    table.add_row("put to visible", *_latencies(run))
    if run.wild:
        survived = sum(any(batch.at_s > kill for batch in run.batches) for kill in run.kills)
        table.add_row("kills survived", f"{survived} of {len(run.kills)}", "the query, with its checkpoint deleted")
    return Panel(table, title=run.stage, title_align="left", width=min(104, columns))


def _lag_s(run: Run) -> float:
    """The age of the oldest event that is not committed: when as many were produced as are committed now."""
    if not run.backlog:
        return 0.0
    last = run.samples[-1]
    committed = last.produced - last.backlog
    return last.at_s - next((one.at_s for one in reversed(run.samples) if one.produced <= committed), 0.0)


def _rates(samples: list[Sample], seconds: float = 3.0) -> tuple[float, float]:
    """Events in and committed, a second, over the last seconds."""
    if len(samples) < 2:
        return 0.0, 0.0
    last = samples[-1]
    first = next(one for one in samples if one.at_s >= last.at_s - seconds)
    took = last.at_s - first.at_s
    if not took:
        return 0.0, 0.0
    into = last.produced - first.produced
    return into / took, max(0.0, (into - (last.backlog - first.backlog)) / took)


def _latencies(run: Run) -> tuple[str, str]:
    """The percentiles of the last hundred readings while Spark was up."""
    recent = sorted(latency.ms for latency in run.latencies[-100:] if not latency.while_starting)
    if not recent:
        return "-", "Spark starts" if run.up_since_s is None else ""
    shares = "   ".join(
        f"{name} {percentile(recent, share):,.0f} ms" for name, share in (("90 %", 0.9), ("99 %", 0.99))
    )
    return f"{percentile(recent, 0.5):,.0f} ms", shares


def _bar(share: float, width: int) -> str:
    full = int(min(1.0, share) * width)
    return "█" * full + "░" * (width - full)


def _sparkline(values: list[int], width: int) -> str:
    last = values[-width:]
    top = max(last, default=0) or 1
    return "".join(BARS[value * (len(BARS) - 1) // top] for value in last)
