"""Many keys that are looked up together: their hashes and bytes as columns, so that numpy can compare them.

Thread: values, shared freely.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.lsm.index import hash_keys
from penstock.lsm.rows import I64

if TYPE_CHECKING:
    import numpy.typing as npt

ABSENT, PRESENT, UNSURE = range(3)  # what a file knows of a key; UNSURE: it has a row, but not a put that never expires


class ProbedKeys:
    """Keys with their hashes, and their bytes once a file has one with the same hash."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        self.keys = keys
        self.hashes = hash_keys(keys)

    @cached_property
    def _columns(self) -> tuple[I64, I64, bytes]:
        lengths = np.fromiter(map(len, self.keys), np.int64, len(self.keys))
        return lengths, np.cumsum(lengths) - lengths, b"".join(self.keys)

    def equal(self, numbers: I64, source: Any, starts: I64, sizes: I64) -> npt.NDArray[np.bool_]:
        """Return, for some keys by number, whether `source` has the same bytes at `starts`, in the given sizes."""
        lengths, own_starts, data = self._columns
        result: npt.NDArray[np.bool_] = sizes == lengths[numbers]
        for size in _distinct(sizes[result]):  # of a longer one, `data` may not even have that many bytes
            if size:
                some = np.flatnonzero(result & (sizes == size))
                ours = _windows(data, size)[own_starts[numbers[some]]]
                result[some] = ours == _windows(source, size)[starts[some]]
        return result


def _distinct(sizes: I64) -> list[int]:
    first = int(sizes[0]) if len(sizes) else 0
    distinct: list[int] = [first] if (sizes == first).all() else np.unique(sizes).tolist()  # nearly always one
    return distinct


def _windows(data: Any, size: int) -> npt.NDArray[np.void]:
    """Return an item of `size` bytes for every byte of `data` that one can begin at, without a copy."""
    return np.ndarray((len(data) - size + 1,), f"V{size}", data, 0, (1,))
