"""Lines of samples as characters, two by four dots in each.

Thread: pure functions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

BRAILLE = 0x2800
DOTS = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]])  # of a cell, by row and column
COLORS = (36, 33, 35, 32, 34, 31)  # of terminals: they distinguish the first lines


def plot(
    lines: Sequence[tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]],
    *,
    width: int = 72,
    height: int = 12,
    color: bool = False,
) -> list[str]:
    """Draw lines, each of times and values, on one pair of axes; values that are not finite are left out."""
    finite = [(times[np.isfinite(values)], values[np.isfinite(values)]) for times, values in lines]
    points = [(times, values) for times, values in finite if len(times)]
    if not points:
        return ["nothing to draw"]
    left, right = min(times.min() for times, _ in points), max(times.max() for times, _ in points)
    low, high = min(values.min() for _, values in points), max(values.max() for _, values in points)
    cells = np.zeros((height, width), np.int64)
    owner = np.full((height, width), -1)
    for number, (times, values) in enumerate(points):
        across = _scaled(times, left, right, width * 2)
        up = _scaled(values, low, high, height * 4)
        rows, columns = height * 4 - 1 - up, across
        np.bitwise_or.at(cells, (rows // 4, columns // 2), DOTS[rows % 4, columns % 2])
        owner[rows // 4, columns // 2] = number
    labels = [_number(high - (high - low) * row / max(height - 1, 1)) for row in range(height)]
    margin = max(map(len, labels))
    picture = []
    for row in range(height):
        text = "".join(_cell(int(cells[row, at]), int(owner[row, at]), color) for at in range(width))
        picture.append(f"{labels[row]:>{margin}} {text.rstrip()}")
    return picture


def _scaled(values: npt.NDArray[np.float64], low: float, high: float, steps: int) -> npt.NDArray[np.int64]:
    """Return where values lie between two bounds, in whole steps from 0 to `steps` - 1."""
    with np.errstate(all="ignore"):
        span = high / 2 - low / 2  # halves: the difference of two floats may be infinite
        part = np.full(len(values), 0.5) if span <= 0 else (values / 2 - low / 2) / span
    return np.clip((part * (steps - 1)).round(), 0, steps - 1).astype(np.int64)


def _cell(dots: int, line: int, color: bool) -> str:
    text = chr(BRAILLE + dots) if dots else " "
    return f"\x1b[{COLORS[line % len(COLORS)]}m{text}\x1b[0m" if color and dots else text


def _number(value: float) -> str:
    if value and (abs(value) >= 1e6 or abs(value) < 1e-3):
        return f"{value:.2e}"
    return f"{value:.3f}".rstrip("0").rstrip(".") if not math.isinf(value) else str(value)
