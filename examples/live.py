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

from examples.run import Run

BARS = " ▁▂▃▄▅▆▇█"
REFRESH_S = 0.25
LINE_EVERY_S = 10.0


@contextmanager
def shown(run: Run) -> Iterator[None]:
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
    with Live(_picture(run), console=console, auto_refresh=False, transient=True) as live:
        while not ended.wait(REFRESH_S):
            live.update(_picture(run), refresh=True)


def _lines(console: Console, run: Run, ended: threading.Event) -> None:
    due_s = time.monotonic() + LINE_EVERY_S
    while not ended.wait(REFRESH_S):
        if time.monotonic() >= due_s:
            due_s += LINE_EVERY_S
            console.print(
                f"  {run.now_s:4.0f} s  {run.produced:>10,} produced  {run.backlog:>8,} waiting  {run.stage}",
                highlight=False,
                soft_wrap=True,
            )


def _picture(run: Run) -> Panel:
    table = Table.grid(padding=(0, 3))
    table.add_column(style="dim")
    table.add_column(justify="right")
    table.add_column()
    table.add_row("produced", f"{run.produced:,}", _bar(run.produced / (run.rate * run.seconds or 1)))
    table.add_row("waiting to be read", f"{run.backlog:,}", _sparkline([sample.backlog for sample in run.samples]))
    table.add_row("micro-batches", f"{len(run.batches):,}", _sparkline([batch.rows for batch in run.batches]))
    table.add_row("put to visible", f"{run.latencies[-1].ms:,.0f} ms" if run.latencies else "-", "")
    if run.wild:
        table.add_row("killed", f"{len(run.kills)}", "the query and its checkpoint, again and again")
    return Panel(table, title=run.stage, title_align="left", width=100)


def _bar(share: float, width: int = 40) -> str:
    full = int(min(1.0, share) * width)
    return "█" * full + "░" * (width - full)


def _sparkline(values: list[int], width: int = 40) -> str:
    last = values[-width:]
    top = max(last, default=0) or 1
    return "".join(BARS[value * (len(BARS) - 1) // top] for value in last)
