"""Charts of the report, as SVG inside the page: lines, bars on an axis of time, a histogram, bars with names."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

from examples.run import MicroBatch, percentile

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 860, 220, 66, 28, 16, 14
COLORS = ("c1", "c2", "c3", "c4", "c5")
TOO_FEW = '<p class="note">There are too few points for a chart.</p>'
LABELS_MAX = 12


@dataclass(frozen=True)
class Line:
    """Points that are joined by a line."""

    name: str
    points: Sequence[tuple[float, float]]


class _Frame:
    """The axes of a chart: places of values, grid, and figures beside it."""

    def __init__(self, right: float, top: float, unit: str, *, low: float = 0.0, width: int = WIDTH) -> None:
        self.right, self.top, self.unit, self.low, self.width = right or 1.0, top or 1.0, unit, low, width
        self.base = HEIGHT - BOTTOM

    def x(self, value: float) -> float:
        return LEFT + value / self.right * (self.width - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return self.base - (value - self.low) / ((self.top - self.low) or 1.0) * (self.base - TOP)

    def axes(self) -> str:
        parts = []
        for share in (0.0, 0.5, 1.0):
            value = self.low + share * (self.top - self.low)
            y = self.y(value)
            parts.append(f'<line class="grid" x1="{LEFT}" y1="{y:.1f}" x2="{self.width - RIGHT}" y2="{y:.1f}"/>')
            parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{figure(value)}</text>')
        for share in (0.0, 0.25, 0.5, 0.75, 1.0):
            at = share * self.right
            anchor = "start" if share == 0 else "end" if share == 1 else "middle"
            text = f"{figure(at)} {self.unit}" if share in (0.0, 1.0) else figure(at)
            parts.append(f'<text x="{self.x(at):.1f}" y="{HEIGHT - 8}" text-anchor="{anchor}">{text}</text>')
        return "".join(parts)

    def marks(self, moments: Sequence[float]) -> str:
        return "".join(
            f'<line class="kill" x1="{self.x(at):.1f}" y1="{TOP}" x2="{self.x(at):.1f}" y2="{self.base}"/>'
            f'<text class="killed" x="{self.x(at):.1f}" y="{TOP - 4}" text-anchor="middle">✕</text>'
            for at in moments
        )


def figure(value: float) -> str:
    """A number in few characters: 12.5k."""
    if abs(value) >= 1e6:
        return f"{value / 1e6:.3g}M"
    if abs(value) >= 1e4:
        return f"{value / 1e3:.3g}k"
    return f"{value:,.0f}" if abs(value) >= 10 or value == int(value) else f"{value:.2g}"


def _svg(inside: str, label: str, width: int = WIDTH) -> str:
    return f'<svg viewBox="0 0 {width} {HEIGHT}" role="img" aria-label="{html.escape(label)}">{inside}</svg>'


def lines(
    drawn: Sequence[Line], *, label: str, marks: Sequence[float] = (), width: int = WIDTH, zoom: bool = False
) -> str:
    """Lines over an axis of seconds, with their names below; marks are vertical. `zoom`: not from 0 upwards."""
    drawn = [line for line in drawn if len(line.points) > 1]
    if not drawn:
        return TOO_FEW
    every = [point for line in drawn for point in line.points]
    top, low = max(y for _, y in every), min(y for _, y in every) if zoom else 0.0
    room = 0.1 * (top - low) if zoom else 0.0
    frame = _Frame(max(x for x, _ in every), top + room, "s", low=low - room, width=width)
    shapes = []
    for number, line in enumerate(drawn):
        points = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in line.points)
        color = COLORS[number % len(COLORS)]
        if number == 0 and len(drawn) == 1:
            first, last = frame.x(line.points[0][0]), frame.x(line.points[-1][0])
            area = f"{first:.1f},{frame.base} {points} {last:.1f},{frame.base}"
            shapes.append(f'<polygon class="area {color}" points="{area}"/>')
        shapes.append(f'<polyline class="{color}" points="{points}"/>')
    names = "".join(
        f'<span><i class="{COLORS[n % len(COLORS)]}"></i>{html.escape(line.name)}</span>'
        for n, line in enumerate(drawn)
        if line.name
    )
    legend = f'<p class="legend">{names}</p>' if names else ""
    return _svg(frame.axes() + frame.marks(marks) + "".join(shapes), label, width) + legend


def time_bars(batches: Sequence[MicroBatch], *, label: str, marks: Sequence[float] = ()) -> str:
    """Micro-batches on an axis of time: as wide as they took, as high as their rows; kills are marked."""
    if not batches:
        return TOO_FEW
    frame = _Frame(max([batch.at_s for batch in batches] + list(marks)), max(batch.rows for batch in batches), "s")
    shapes = []
    for batch in batches:
        left = frame.x(max(0.0, batch.at_s - batch.ms / 1e3))
        width, y = max(1.6, frame.x(batch.at_s) - left - 0.6), frame.y(batch.rows)
        title = f"{batch.rows:,} rows in {batch.ms:,.0f} ms"
        shapes.append(
            f'<rect class="c1" x="{left:.1f}" y="{y:.1f}" width="{width:.1f}" height="{max(0.8, frame.base - y):.1f}">'
            f"<title>{title}</title></rect>"
        )
    return _svg(frame.axes() + "".join(shapes) + frame.marks(marks), label)


def histogram(values: Sequence[float], *, label: str, columns: int = 48) -> str:
    """How many of the ordered values lie in each of equal steps, up to the 99th percentile, with the median marked."""
    if not values:
        return TOO_FEW
    most = percentile(values, 0.99) or 1.0
    counts = [0] * columns
    for value in values:
        if value <= most:
            counts[min(columns - 1, int(value / most * columns))] += 1
    frame = _Frame(most, max(counts), "ms")
    step = (WIDTH - LEFT - RIGHT) / columns
    shapes = [
        f'<rect class="c2" x="{LEFT + number * step + 0.8:.1f}" y="{frame.y(count):.1f}" width="{step - 1.6:.1f}" '
        f'height="{frame.base - frame.y(count):.1f}"/>'
        for number, count in enumerate(counts)
    ]
    middle = frame.x(percentile(values, 0.5))
    median = f'<line class="median" x1="{middle:.1f}" y1="{TOP}" x2="{middle:.1f}" y2="{frame.base}"/>'
    named = f'<text x="{middle + 5:.1f}" y="{TOP + 10}">median</text>'
    return _svg(frame.axes() + "".join(shapes) + median + named, label)


def named_bars(rows: Sequence[tuple[str, float]]) -> str:
    """A bar for each name, the value beside it."""
    if not rows:
        return TOO_FEW
    top = max(abs(value) for _, value in rows) or 1.0
    items = "".join(
        f'<li><span>{html.escape(name)}</span><i style="width:{max(0.5, abs(value) / top * 100):.1f}%"></i>'
        f"<b>{figure(value) if abs(value) >= 100 else f'{value:.2f}'}</b></li>"
        for name, value in rows[:LABELS_MAX]
    )
    return f'<ol class="bars">{items}</ol>'
