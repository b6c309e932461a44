"""Functions of one number.

Thread: pure functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from penstock.promql.values import F64, Mask

UNARY_FUNCTIONS: Mapping[str, Callable[[F64], F64]] = MappingProxyType(
    {
        "abs": np.abs,
        "acos": np.arccos,
        "acosh": np.arccosh,
        "asin": np.arcsin,
        "asinh": np.arcsinh,
        "atan": np.arctan,
        "atanh": np.arctanh,
        "ceil": np.ceil,
        "cos": np.cos,
        "cosh": np.cosh,
        "deg": lambda x: x * 180 / np.pi,
        "exp": np.exp,
        "floor": np.floor,
        "ln": np.log,
        "log10": np.log10,
        "log2": np.log2,
        "rad": lambda x: x * np.pi / 180,
        "sgn": lambda x: np.where(x < 0, -1.0, np.where(x > 0, 1.0, x)),
        "sin": np.sin,
        "sinh": np.sinh,
        "sqrt": np.sqrt,
        "tan": np.tan,
        "tanh": np.tanh,
    }
)


def lesser(one: F64, other: F64) -> F64:
    """Return the lesser of two; beside NaN the result is NaN, unless one is -Inf, which nothing is less than."""
    return np.where(np.isneginf(one) | np.isneginf(other), -np.inf, np.minimum(one, other))


def greater(one: F64, other: F64) -> F64:
    """Return the greater of two; beside NaN the result is NaN, unless one is +Inf, which nothing is greater than."""
    return np.where(np.isposinf(one) | np.isposinf(other), np.inf, np.maximum(one, other))


def clamped(values: F64, low: F64, high: F64) -> tuple[F64, Mask]:
    """Return values within bounds, and at which steps the bounds are in order."""
    return greater(low, lesser(high, values)), ~(high < low)


def rounded(values: F64, nearest: F64) -> F64:
    """Return the nearest multiples; halves are rounded up."""
    inverse = 1.0 / nearest
    multiples: F64 = np.floor(values * inverse + 0.5) / inverse
    return multiples
