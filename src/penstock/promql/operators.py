"""What the operators do to two numbers.

Thread: pure functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from penstock.promql.values import F64, Mask

ARITHMETIC: Mapping[str, Callable[[F64, F64], F64]] = MappingProxyType(
    {
        "+": np.add,
        "-": np.subtract,
        "*": np.multiply,
        "/": np.divide,
        "%": np.fmod,
        "^": np.power,
        "atan2": np.arctan2,
    }
)
COMPARISONS: Mapping[str, Callable[[F64, F64], Mask]] = MappingProxyType(
    {
        "==": np.equal,
        "!=": np.not_equal,
        ">": np.greater,
        "<": np.less,
        ">=": np.greater_equal,
        "<=": np.less_equal,
    }
)
SET_OPERATORS = ("and", "or", "unless")
