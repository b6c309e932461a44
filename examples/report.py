"""A page about a run, in one file that needs nothing else: what it proves, its numbers, and charts."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from examples import fingerprints, metrics
from examples.fingerprints import OddDevice
from examples.metrics import MetricsSummary
from examples.run import Run, machine, percentile

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 720, 200, 64, 24, 14
BLUE, RED, GREY = "#0969da", "#cf222e", "#8c959f"

PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Penstock: every event accounted for</title>
<style>
 body {{ font: 15px/1.55 system-ui, sans-serif; max-width: 760px; margin: 40px auto; padding: 0 16px; color: #1d2733; }}
 h1 {{ font-size: 24px; margin-bottom: 4px; }} h2 {{ font-size: 17px; margin: 36px 0 6px; }}
 .proof {{ font-size: 18px; background: {tint}; border-left: 4px solid {tone}; padding: 12px 16px; }}
 .about, .note {{ color: #57606a; font-size: 13px; }}
 table {{ border-collapse: collapse; margin: 8px 0; }} th {{ text-align: left; font-weight: 600; }}
 td, th {{ padding: 4px 28px 4px 0; }} td + td, th + th {{ text-align: right; }}
 .sums tr:last-child td {{ border-top: 2px solid #1d2733; font-weight: 600; }}
 svg {{ background: #f6f8fa; width: 100%; height: auto; }} text {{ font-size: 11px; fill: #57606a; }}
 pre {{ background: #f6f8fa; padding: 12px; overflow-x: auto; font-size: 13px; }}
</style>
<h1>Every event, accounted for</h1>
<p class="about">{about}</p>
<p class="proof">{proof}</p>
{sums}
<h2>Waiting to be read</h2>{backlog}
<h2>Rows in each micro-batch</h2>{batches}
<h2>From put to visible</h2>{latency}{waits}
<h2>Dead letters</h2>{reasons}
<h2>The fleet's metrics</h2>{measured}<pre>{query}</pre>
<h2>Odd devices, by the distance of their fingerprint to its neighbours</h2>{odd}<pre>{nearest}</pre>
<h2>Each high reading beside series, kv and vectors of its device, at one snapshot</h2>{joined}<pre>{sql}</pre>
</html>
"""


def proved(run: Run, before: Mapping[str, int], after: Mapping[str, int]) -> str:
    """Say in one sentence what the run proves."""
    new = after["produced"] - before["produced"]
    if after["difference"]:
        return f"{after['difference']:,} events are NOT accounted for: please report this with the folder {run.folder}."
    times = "once" if len(run.kills) == 1 else f"{len(run.kills)} times"
    killed = f" although the query was killed and its checkpoint deleted {times}" if run.kills else ""
    return f"Each of {new:,} events went through Spark and counts exactly once{killed}: the difference is 0."


def sums(before: Mapping[str, int], after: Mapping[str, int]) -> list[list[object]]:
    """Return a row for each number: its name, and if there was an earlier run what is old and what is new, and all.

    The difference, the last one, is a state: what an interrupted run left to be read is not new.
    """
    if not before["produced"]:
        return [[name, after[name]] for name in after]
    rows: list[list[object]] = [[name, before[name], after[name] - before[name], after[name]] for name in after]
    rows[-1][1:3] = ["", ""]
    return rows


def measured_lines(measured: MetricsSummary) -> list[str]:
    """Say what the selector query returns, and what the rollups hold."""
    means = ", ".join(f"{site} {mean:.2f}" for site, mean in sorted(measured.means.items())) or "no samples"
    points = ", ".join(f"{name} {count:,}" for name, count in measured.points.items())
    late = f" and {measured.late_commits:,} in the owner" if measured.late_commits else ""
    return [
        f"mean of {metrics.SELECTOR} by site: {means}",
        f"steps of series in the rollups: {points}; jobs on Spark: {measured.spark_jobs:,}{late}",
    ]


def write(
    run: Run,
    *,
    before: Mapping[str, int],
    after: Mapping[str, int],
    reasons: Mapping[str, tuple[int, int]],
    sql: str,
    joined: Sequence[Mapping[str, object]],
    measured: MetricsSummary,
    odd: Sequence[OddDevice],
    size_bytes: int,
) -> Path:
    """Write the page beside the store; return its path."""
    again = bool(before["produced"])
    waits = run.steady_ms()
    starting = [latency.ms for latency in run.latencies if latency.while_starting]
    shares = [(name, f"{percentile(waits, share):,.0f} ms") for name, share in SHARES] if waits else []
    ok = not after["difference"]
    page = PAGE.format(
        tint="#dafbe1" if ok else "#ffebe9",
        tone="#1a7f37" if ok else RED,
        about=html.escape(
            f"{run.began}: {run.rate:,} events a second for {run.seconds:.0f} s, on {machine()}; the store is "
            f"{run.folder}, with {size_bytes / max(1, after['produced']):,.0f} bytes on disk for each event."
        ),
        proof=html.escape(proved(run, before, after)),
        sums=table(["", "before", "this run", "in all"] if again else ["", ""], sums(before, after), name="sums"),
        backlog=chart([(sample.at_s, sample.backlog) for sample in run.samples], marks=run.kills) + _marks_note(run),
        batches=chart([(batch.at_s, batch.rows) for batch in run.batches], marks=run.kills, bars=True),
        latency=histogram(waits),
        waits=table(["", ""], shares)
        + note(f"{len(waits):,} readings while Spark was up. {len(starting):,} more waited for Spark to start."),
        reasons=_reasons(reasons, again=again),
        measured=_measured(measured),
        query=html.escape(metrics.QUERY),
        odd=table(["device", "distance", "nearest"], [[one.device, f"{one.distance:.2f}", one.nearest] for one in odd])
        if odd
        else note("There are too few devices."),
        nearest=html.escape(fingerprints.QUERY),
        joined=table(list(joined[0]), [list(row.values()) for row in joined])
        if joined
        else note("No reading was high."),
        sql=html.escape(sql.strip()),
    )
    path = run.folder.parent / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


SHARES = (("median", 0.5), ("90 %", 0.9), ("99 %", 0.99), ("longest", 1.0))


def _reasons(reasons: Mapping[str, tuple[int, int]], *, again: bool) -> str:
    """Dead letters by reason: before this run and in all."""
    if not reasons:
        return note("There are none.")
    header = ["reason", "before", "this run", "in all"] if again else ["reason", "records"]
    rows = [
        [reason, *([before, after - before] if again else []), after] for reason, (before, after) in reasons.items()
    ]
    return table(header, rows)


def _measured(measured: MetricsSummary) -> str:
    """The rows of the selector query, and a sentence about the rollups."""
    rows = [[site, f"{mean:.2f}"] for site, mean in sorted(measured.means.items())]
    return table(["site", "mean"], rows) + note(measured_lines(measured)[1])


def _marks_note(run: Run) -> str:
    return note("Red lines: the query was killed and its checkpoint deleted.") if run.kills else ""


def note(text: str) -> str:
    return f'<p class="note">{html.escape(text)}</p>'


def table(header: Sequence[str], rows: Iterable[Sequence[object]], name: str = "") -> str:
    """Rows as a table; numbers with separators."""

    def cell(value: object) -> str:
        return html.escape(f"{value:,}" if isinstance(value, int) else str(value))

    head = "".join(f"<th>{html.escape(title)}</th>" for title in header) if any(header) else ""
    body = "".join("<tr>" + "".join(f"<td>{cell(value)}</td>" for value in row) + "</tr>" for row in rows)
    return f'<table class="{name}"><tr>{head}</tr>{body}</table>'


def histogram(values: Sequence[float], columns: int = 36) -> str:
    """How many values lie in each of equal steps, up to the 99th percentile."""
    if not values:
        return note("There are too few points for a chart.")
    most = percentile(values, 0.99) or 1.0
    counts = [0] * columns
    for value in values:
        if value <= most:
            counts[min(columns - 1, int(value / most * columns))] += 1
    points = [((column + 0.5) * most / columns, count) for column, count in enumerate(counts)]
    return chart(points, bars=True, unit="ms", right=most)


def chart(
    points: Sequence[tuple[float, float]],
    *,
    marks: Sequence[float] = (),
    bars: bool = False,
    unit: str = "s",
    right: float | None = None,
) -> str:
    """A line through points, or a bar for each, with its extremes written beside it."""
    if len(points) < (1 if bars else 2):
        return note("There are too few points for a chart.")
    right, top = right or max(x for x, _ in points) or 1.0, max(y for _, y in points) or 1.0
    base = HEIGHT - BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        return LEFT + x / right * (WIDTH - LEFT - 10), base - y / top * (base - TOP)

    drawn = [place(x, y) for x, y in points]
    if bars:
        width = max(1.5, (WIDTH - LEFT) / len(points) * 0.7)
        shape = "".join(
            f'<rect x="{x - width / 2:.1f}" y="{y:.1f}" width="{width:.1f}" height="{base - y:.1f}" fill="{BLUE}"/>'
            for x, y in drawn
        )
    else:
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in drawn)
        shape = f'<polyline points="{line}" fill="none" stroke="{BLUE}" stroke-width="1.5"/>'
    killed = "".join(
        f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{base}" stroke="{RED}" stroke-dasharray="3 3"/>'
        for x, _ in (place(mark, 0) for mark in marks)
    )
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{killed}{shape}'
        f'<line x1="{LEFT}" y1="{base}" x2="{WIDTH - 10}" y2="{base}" stroke="{GREY}"/>'
        f'<text x="4" y="{TOP + 8}">{top:,.0f}</text><text x="4" y="{base}">0</text>'
        f'<text x="{LEFT}" y="{HEIGHT - 6}">0 {unit}</text>'
        f'<text x="{WIDTH - 70}" y="{HEIGHT - 6}">{right:,.0f} {unit}</text></svg>'
    )
