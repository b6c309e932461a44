"""Charts of the benchmark page, as SVG text: ratios as bars, growth as lines, both on logarithmic axes.

No plotting library: a chart is a few rectangles and lines, and the same figures must give the same bytes, so that a
change of the page shows only what was measured anew. Colours suit a white and a dark page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from xml.sax.saxutils import escape

WIDTH = 860
WIN, LOSE, GREY, TEXT = "#2a9d8f", "#e76f51", "#9aa0a6", "#7d8590"
LINES = ("#2a9d8f", "#8d6cab")
LABEL_WIDTH = 400
BAR_HEIGHT = 20
PANEL_HEIGHT = 190


def _document(height: float, body: Sequence[str]) -> str:
    box = f'viewBox="0 0 {WIDTH} {height:.0f}" font-family="sans-serif" font-size="12"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {box}>', *body, "</svg>"]) + "\n"


def _text(x: float, y: float, text: str, *, anchor: str = "start", colour: str = TEXT) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, *, colour: str = GREY, width: float = 0.5) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" stroke-width="{width}"/>'


def power_of_ten(exponent: int) -> str:
    """A mark of a logarithmic axis, as people write it: 0.1, 100, 10 k, 1 M."""
    for size, letter in ((9, " G"), (6, " M"), (3, " k")):
        if exponent > size or exponent == size != 3:  # 1,000 is as short as 1 k
            return f"{10 ** (exponent - size)}{letter}"
    return f"{10.0**exponent:,.0f}" if exponent >= 0 else f"{10.0**exponent:g}"


def ratio_bars(ratios: Sequence[tuple[str, float]]) -> str:
    """Bars from 1 to the ratio of ours to the best peer: to the right where we win, to the left where a peer does."""
    low = math.log10(min(0.1, *(ratio for _, ratio in ratios)) / 1.2)
    high = math.log10(max(10.0, *(ratio for _, ratio in ratios)) * 2.5)
    room = WIDTH - LABEL_WIDTH - 10

    def x_of(value: float) -> float:
        return LABEL_WIDTH + room * (math.log10(value) - low) / (high - low)

    height = BAR_HEIGHT * len(ratios) + 40
    body = []
    for exponent in range(math.ceil(low), math.floor(high) + 1):
        x = x_of(10.0**exponent)
        label = _text(x, height - 2, f"{10.0**exponent:g} x", anchor="middle" if x < WIDTH - 30 else "end")
        body += [_line(x, 20, x, height - 16), label]
    for at, (name, ratio) in enumerate(ratios):
        y = 24 + at * BAR_HEIGHT
        left, right = sorted((x_of(1.0), x_of(ratio)))
        colour = WIN if ratio >= 1 else LOSE
        body += [
            _text(LABEL_WIDTH - 8, y + 12, name if len(name) < 62 else f"{name[:60]}…", anchor="end"),
            f'<rect x="{left:.1f}" y="{y}" width="{max(right - left, 1):.1f}" height="15" fill="{colour}"/>',
            _text(right + 4, y + 12, f"{ratio:.2f}"),
        ]
    body.append(_line(x_of(1.0), 20, x_of(1.0), height - 16, colour=TEXT, width=1.5))
    return _document(height, body)


def panels_of(panels: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]], *, over_time: bool = False) -> str:
    """A panel for each measure, two in a row: its curves against rows, or against minutes; values are logarithmic."""
    body: list[str] = []
    across = WIDTH / 2
    for at, (title, curves) in enumerate(panels.items()):
        left, top = (at % 2) * across + 60, (at // 2) * PANEL_HEIGHT + 30
        body += _panel(title, curves, (left, top, across - 96, PANEL_HEIGHT - 60), over_time)
    return _document(math.ceil(len(panels) / 2) * PANEL_HEIGHT + 10, body)


def _panel(
    title: str,
    curves: Mapping[str, Sequence[tuple[float, float]]],
    box: tuple[float, float, float, float],
    over_time: bool,
) -> list[str]:
    left, top, width, height = box
    points = [point for curve in curves.values() for point in curve if point[1] > 0]
    if not points:
        return []
    scale: Callable[[float], float] = float if over_time else math.log10
    x_low, x_high = (scale(pick(x for x, _ in points)) for pick in (min, max))
    low, high = (math.log10(pick(y for _, y in points)) for pick in (min, max))
    y_low, y_high = math.floor(low), math.ceil(high + 1e-9)

    def across(x: float) -> float:
        return left + width * (scale(x) - x_low) / ((x_high - x_low) or 1)

    def down(y: float) -> float:
        return top + height * (1 - (math.log10(y) - y_low) / ((y_high - y_low) or 1))

    body = [_text(left, top - 8, title)]
    for exponent in range(y_low, y_high + 1):
        y = down(10.0**exponent)
        body += [_line(left, y, left + width, y), _text(left - 4, y + 4, power_of_ten(exponent), anchor="end")]
    if over_time:
        marks = [(x_high * part / 4, f"{x_high * part / 4:.0f} min") for part in range(5)]
    else:
        marks = [(10.0**at, power_of_ten(at)) for at in range(math.ceil(x_low), math.floor(x_high) + 1)]
        marks[-1:] = [(x, f"{text} rows") for x, text in marks[-1:]]
    body += [_text(across(x), top + height + 15, text, anchor="middle") for x, text in marks if scale(x) >= x_low]
    for number, (name, curve) in enumerate(curves.items()):
        path = " ".join(f"{across(x):.1f},{down(y):.1f}" for x, y in curve if y > 0)
        colour = LINES[number % len(LINES)]
        body.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        body.append(_text(left + width - 120 + 70 * number, top - 8, name, colour=colour))
    return body
