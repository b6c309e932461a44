"""A page about a run, in one file that needs nothing else: what it proves, its numbers, and charts."""

from __future__ import annotations

import html
import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from examples import drawing, fingerprints, metrics
from examples.fingerprints import OddDevice
from examples.metrics import MetricsSummary
from examples.questions import Question, TableMade
from examples.run import MicroBatch, Run, machine, percentile

PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>Penstock: every event accounted for</title>
<style>
 :root {{ --bg: #f2f5f8; --card: #fff; --line: #dde5ec; --text: #14212c; --dim: #586c7b; --good: #0b8a56;
  --bad: #c8323a;  --c1: #0877c2; --c2: #0d8f88; --c3: #c07000; --c4: #7a4fd0; --c5: #c93d78; }}
 @media (prefers-color-scheme: dark) {{ :root {{ --bg: #0a1016; --card: #101921; --line: #213040; --text: #e1ebf2;
  --dim: #8ba0b0; --good: #3ddc97; --bad: #ff7272; --c1: #45b8ff; --c2: #43d9d0; --c3: #ffb454; --c4: #b592ff;
  --c5: #ff7fb0; }} }}
 * {{ box-sizing: border-box; }}
 body {{ font: 15px/1.55 system-ui, "DejaVu Sans", sans-serif; background: var(--bg); color: var(--text); margin: 0;
  font-variant-numeric: tabular-nums; }}
 main {{ max-width: 980px; margin: 0 auto; padding: 36px 18px 60px; }}
 h1 {{ font-size: 27px; margin: 0 0 4px; letter-spacing: -.01em; }} h2 {{ font-size: 16px; margin: 0 0 10px; }}
 section, .proof {{ background: var(--card); border: 1px solid var(--line); border-radius: 14px; padding: 18px 20px;
  margin: 16px 0; overflow-x: auto; }}
 .proof {{ font-size: 19px; font-weight: 600; border-left: 6px solid var(--tone); }}
 .good {{ --tone: var(--good); }} .wrong {{ --tone: var(--bad); }}
 .about, .note {{ color: var(--dim); font-size: 13px; margin: 6px 0 0; }}
 .tiles {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; margin: 16px 0; }}
 .tiles div {{ background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 12px 16px; }}
 .tiles b {{ display: block; font-size: 24px; letter-spacing: -.01em; }}
 .tiles span {{ color: var(--dim); font-size: 13px; }}
 .two {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(420px, 100%), 1fr)); gap: 16px; }}
 .two section {{ margin: 0; min-width: 0; }}
 table {{ border-collapse: collapse; }} th {{ text-align: left; font-weight: 600; color: var(--dim); font-size: 13px; }}
 td, th {{ padding: 4px 28px 4px 0; }} td + td, th + th {{ text-align: right; }}
 .sums tr:last-child td {{ border-top: 2px solid var(--text); font-weight: 700; }}
 svg {{ width: 100%; height: auto; display: block; }} text {{ font-size: 11px; fill: var(--dim); }}
 .grid {{ stroke: var(--line); }} .kill, .killed {{ stroke: var(--bad); stroke-dasharray: 4 3; }}
 .killed {{ fill: var(--bad); stroke: none; font-size: 12px; }}
 .median {{ stroke: var(--text); stroke-dasharray: 3 3; }}
 polyline {{ fill: none; stroke-width: 2; stroke: var(--k); }} rect {{ fill: var(--k); }}
 .area {{ fill: var(--k); opacity: .14; }}
 .c1 {{ --k: var(--c1); }} .c2 {{ --k: var(--c2); }} .c3 {{ --k: var(--c3); }} .c4 {{ --k: var(--c4); }}
 .c5 {{ --k: var(--c5); }}
 .legend {{ display: flex; flex-wrap: wrap; gap: 4px 18px; font-size: 13px; color: var(--dim); margin: 6px 0 0; }}
 .legend i {{ display: inline-block; width: 10px; height: 10px; border-radius: 3px; background: var(--k);
  margin-right: 7px; }}
 .bars {{ list-style: none; margin: 0; padding: 0; }}
 .bars li {{ display: grid; grid-template-columns: 110px 1fr 70px; align-items: center; gap: 10px; }}
 .bars i {{ height: 16px; border-radius: 4px; background: var(--c1); opacity: .8; }} .bars b {{ text-align: right; }}
 pre {{ background: var(--bg); border-radius: 8px; padding: 11px 13px; overflow-x: auto; font-size: 12.5px;
  margin: 12px 0 0; }}
 .kind {{ font-size: 12px; font-weight: 600; color: var(--c1); border: 1px solid; border-radius: 6px; padding: 0 7px;
  margin-right: 8px; }}
</style><main>
<h1>Every event, accounted for</h1>
<p class="about">{about}</p>
<p class="proof {verdict}">{proof}</p>
<div class="tiles">{tiles}</div>
<section><h2>The accounting</h2>{sums}</section>
<section><h2>What was built</h2>{built}</section>
<section><h2>Events in, and committed by Spark</h2>{throughput}</section>
<section><h2>Waiting to be read</h2>{backlog}</section>
<section><h2>Micro-batches: as wide as they took, as high as their rows</h2>{batches}</section>
<section><h2>From put to visible</h2>{latency}{waits}</section>
<section><h2>Dead letters</h2>{reasons}</section>
<div class="two">{questions}</div>
<section><h2>The fleet's metrics</h2>{measured}<pre>{query}</pre></section>
<section><h2>Odd devices, by the distance of their fingerprint to its neighbours</h2>{odd}<pre>{nearest}</pre></section>
<section><h2>Each high reading beside series, kv and vectors of its device, at one snapshot</h2>{joined}
<pre>{sql}</pre></section>
<p class="about">The store is still there: <code>{console}</code> shows it in the browser.</p>
</main></html>
"""
TILES_MS = ((0.5, "median"), (0.99, "99 %"))


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
    built: Sequence[TableMade] = (),
    questions: Sequence[Question] = (),
) -> Path:
    """Write the page beside the store; return its path."""
    again = bool(before["produced"])
    waits = run.steady_ms()
    starting = [latency.ms for latency in run.latencies if latency.while_starting]
    shares = [(name, f"{percentile(waits, share):,.0f} ms") for name, share in SHARES] if waits else []
    ok = not after["difference"]
    page = PAGE.format(
        verdict="good" if ok else "wrong",
        tiles=_tiles(run, waits, size_bytes / max(1, after["produced"])),
        built=_built(built),
        throughput=drawing.lines(throughput(run), label="events a second", marks=run.kills) + _marks_note(run),
        questions="".join(map(_question, questions)),
        console=html.escape(console_command(run)),
        about=html.escape(
            f"{run.began}: {run.rate:,} events a second for {run.seconds:.0f} s, on {machine()}; the store is "
            f"{run.folder}, with {size_bytes / max(1, after['produced']):,.0f} bytes on disk for each event."
        ),
        proof=html.escape(proved(run, before, after)),
        sums=table(["", "before", "this run", "in all"] if again else ["", ""], sums(before, after), name="sums"),
        backlog=drawing.lines(
            [drawing.Line("", [(sample.at_s, sample.backlog) for sample in run.samples])],
            label="messages that wait to be read",
            marks=run.kills,
        ),
        batches=drawing.time_bars(run.batches, label="micro-batches", marks=run.kills),
        latency=drawing.histogram(waits, label="milliseconds from put to visible"),
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


def console_command(run: Run) -> str:
    """The command that shows the store of a run in the browser."""
    return f".venv/bin/penstock console {run.folder}"


def throughput(run: Run) -> list[drawing.Line]:
    """Events in and events committed, a second, over time."""
    spaced = run.samples[:1]
    for sample in run.samples:
        if sample.at_s >= spaced[-1].at_s + 0.95:  # a second apart
            spaced.append(sample)
    into, out = list[tuple[float, float]](), list[tuple[float, float]]()
    for before, now in itertools.pairwise(spaced):
        took = now.at_s - before.at_s or 1.0
        into.append((now.at_s, (now.produced - before.produced) / took))
        out.append((now.at_s, sum(_share(batch, before.at_s, now.at_s) for batch in run.batches) / took))
    return [drawing.Line("in", into), drawing.Line("committed", out)]


def _share(batch: MicroBatch, start_s: float, end_s: float) -> float:
    """The rows of a micro-batch that fall into a time, if it worked evenly."""
    took_s = max(batch.ms / 1e3, 1e-3)
    inside = min(end_s, batch.at_s) - max(start_s, batch.at_s - took_s)
    return batch.rows * max(0.0, inside) / took_s


def _tiles(run: Run, waits: Sequence[float], bytes_each: float) -> str:
    longest = max((sample.backlog for sample in run.samples), default=0)
    tiles = [
        (f"{run.produced:,}", "events came in"),
        (f"{len(run.batches):,}", "micro-batches"),
        *((f"{percentile(waits, share):,.0f} ms", f"put to visible, {name}") for share, name in TILES_MS if waits),
        (f"{longest:,}", "waiting at most"),
        (f"{len(run.kills)}", "kills survived"),
        (f"{bytes_each:,.0f} B", "on disk for each event"),
    ]
    return "".join(f"<div><b>{html.escape(figure)}</b><span>{html.escape(name)}</span></div>" for figure, name in tiles)


def _built(built: Sequence[TableMade]) -> str:
    if not built:
        return note("One store: queue, kv, series and vector tables, filled by one commit for each micro-batch.")
    rows = [[one.name, one.kind, one.rows, f"{one.file_bytes / 1e6:,.1f} MB"] for one in built]
    return table(["table", "kind", "rows", "in files"], rows) + note(
        "One store, one journal: each micro-batch writes to these tables and moves its position, in one commit."
    )


def _question(one: Question) -> str:
    return (
        f'<section><h2><span class="kind">{html.escape(one.kind)}</span>{html.escape(one.title)}</h2>{one.answer}'
        f"<pre>{html.escape(one.code)}</pre></section>"
    )


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
    return note("Red marks: the query was killed and its checkpoint deleted.") if run.kills else ""


def note(text: str) -> str:
    return f'<p class="note">{html.escape(text)}</p>'


def table(header: Sequence[str], rows: Iterable[Sequence[object]], name: str = "") -> str:
    """Rows as a table; numbers with separators."""

    def cell(value: object) -> str:
        return html.escape(f"{value:,}" if isinstance(value, int) else str(value))

    head = "".join(f"<th>{html.escape(title)}</th>" for title in header) if any(header) else ""
    body = "".join("<tr>" + "".join(f"<td>{cell(value)}</td>" for value in row) + "</tr>" for row in rows)
    return f'<table class="{name}"><tr>{head}</tr>{body}</table>'
