"""A page with the numbers of a run and two charts, in one file that needs nothing else."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

WIDTH, HEIGHT, LEFT, BOTTOM = 720, 220, 60, 24

PAGE = """<!doctype html>
<meta charset="utf-8"><title>Penstock: a run</title>
<style>
 body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 760px; margin: 40px auto; color: #1d2733; }}
 h1 {{ font-size: 22px; }} h2 {{ font-size: 16px; margin-top: 32px; }}
 table {{ border-collapse: collapse; }} td {{ padding: 4px 24px 4px 0; }} td + td {{ text-align: right; }}
 tr:last-child td {{ border-top: 2px solid #1d2733; font-weight: 600; }}
 svg {{ background: #f6f8fa; }} text {{ font-size: 11px; fill: #57606a; }} pre {{ background: #f6f8fa; padding: 12px; }}
</style>
<h1>Every event, accounted for</h1>
<table>{rows}</table>
<h2>Events produced in each second</h2>{rate}
<h2>From put to visible, in milliseconds</h2>{latency}
<h2>A point-in-time join</h2><pre>{joined}</pre>
"""


def write(
    path: Path,
    rows: Sequence[tuple[str, int]],
    produced: Sequence[tuple[float, int]],
    latencies: Sequence[tuple[float, float]],
    joined: str,
) -> Path:
    """Write the page; its path."""
    table = "".join(f"<tr><td>{html.escape(name)}</td><td>{value:,}</td></tr>" for name, value in rows)
    page = PAGE.format(
        rows=table, rate=chart(per_second(produced)), latency=chart(list(latencies)), joined=html.escape(joined)
    )
    path.write_text(page, encoding="utf-8")
    return path


def per_second(produced: Sequence[tuple[float, int]]) -> list[tuple[float, float]]:
    """Events in each second, from counts that only grow."""
    last: dict[int, int] = {}
    for moment, count in produced:
        last[int(moment)] = count
    counts = [0, *(last[second] for second in sorted(last))]
    return [
        (float(second), float(after - before))
        for second, before, after in zip(sorted(last), counts[:-1], counts[1:], strict=True)
    ]


def chart(points: Sequence[tuple[float, float]]) -> str:
    """A line through points, with its extremes written beside it."""
    if len(points) < 2:
        return "<p>too few points</p>"
    right, top = max(x for x, _ in points) or 1.0, max(y for _, y in points) or 1.0
    line = " ".join(
        f"{LEFT + x / right * (WIDTH - LEFT - 10):.1f},{HEIGHT - BOTTOM - y / top * (HEIGHT - BOTTOM - 16):.1f}"
        for x, y in points
    )
    base = HEIGHT - BOTTOM
    return (
        f'<svg width="{WIDTH}" height="{HEIGHT}" role="img">'
        f'<line x1="{LEFT}" y1="{base}" x2="{WIDTH - 10}" y2="{base}" stroke="#8c959f"/>'
        f'<polyline points="{line}" fill="none" stroke="#0969da" stroke-width="1.5"/>'
        f'<text x="4" y="20">{top:,.0f}</text><text x="4" y="{base}">0</text>'
        f'<text x="{LEFT}" y="{HEIGHT - 6}">0 s</text>'
        f'<text x="{WIDTH - 60}" y="{HEIGHT - 6}">{right:,.0f} s</text></svg>'
    )
