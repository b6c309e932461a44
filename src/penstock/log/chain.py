"""Which segments of a folder are live, decided from their names alone.

A segment is named `<first index, 20 digits>-<incarnation, 10 digits>.log`. A segment that starts at index n in a higher
incarnation supersedes all records at n and above. So truncating a log at its end, continuing after a failed fsync and
rewriting a torn tail are each one atomic rename, and opening a log opens no segment but the last (ADR 0022).

Thread: pure functions; a `Chain` never changes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_INDEX_DIGITS, _INCARNATION_DIGITS = 20, 10
_SUFFIX = ".log"
_NAME_CHARACTERS = _INDEX_DIGITS + 1 + _INCARNATION_DIGITS + len(_SUFFIX)


class SegmentName(NamedTuple):
    """A segment's file name."""

    first: int
    incarnation: int

    def __str__(self) -> str:
        return f"{self.first:0{_INDEX_DIGITS}d}-{self.incarnation:0{_INCARNATION_DIGITS}d}{_SUFFIX}"


@dataclass(frozen=True, slots=True)
class Chain(Sequence[SegmentName]):
    """Live segments by first index, as two columns: a folder may have tens of thousands."""

    firsts: Sequence[int]
    incarnations: Sequence[int]

    def __len__(self) -> int:
        return len(self.firsts)

    def __getitem__(self, position: int) -> SegmentName:  # type: ignore[override]
        return SegmentName(self.firsts[position], self.incarnations[position])

    def __iter__(self) -> Iterator[SegmentName]:
        return map(SegmentName, self.firsts, self.incarnations)

    def position_of(self, index: int) -> int:
        """Return the position of the segment with `index`; -1 if it is below all of them."""
        return bisect_right(self.firsts, index) - 1

    def with_segment(self, name: SegmentName) -> Chain:
        """Return the chain with a segment of the highest incarnation added, which supersedes those at or above it."""
        count = self.position_of(name.first - 1) + 1
        return Chain([*self.firsts[:count], name.first], [*self.incarnations[:count], name.incarnation])

    def without_oldest(self) -> Chain:
        return Chain(self.firsts[1:], self.incarnations[1:])


def read_names(files: Iterable[str]) -> tuple[Chain, set[SegmentName], int, list[str]]:
    """Return the live chain of a folder, dead segments, the highest incarnation, and names of other files."""
    files = list(files)
    names = [file for file in files if len(file) == _NAME_CHARACTERS and file.endswith(_SUFFIX) and file.isascii()]
    text = np.frombuffer("".join(names).encode(), dtype=np.uint8).reshape(-1, _NAME_CHARACTERS)
    digits = np.delete(text[:, : -len(_SUFFIX)], _INDEX_DIGITS, axis=1).astype(np.uint64) - np.uint64(ord("0"))
    # A first digit of 0 keeps an index well inside 64 bits.
    valid = (digits <= 9).all(axis=1) & (text[:, _INDEX_DIGITS] == ord("-")) & (digits[:, 0] == 0)
    others = [name for name, is_valid in zip(names, valid.tolist(), strict=True) if not is_valid]
    if len(names) < len(files):
        others += set(files) - set(names)
    digits = digits[valid]
    first = _number(digits[:, :_INDEX_DIGITS])
    incarnation = _number(digits[:, _INDEX_DIGITS:])
    order = np.lexsort((first, incarnation))
    first, incarnation = first[order], incarnation[order]
    # A segment is live if all segments of later incarnations start above it.
    later = np.minimum.accumulate(first[::-1])[::-1]
    alive = np.ones(len(first), dtype=bool)
    alive[:-1] = first[:-1] < later[1:]
    dead = {SegmentName(*pair) for pair in zip(first[~alive].tolist(), incarnation[~alive].tolist(), strict=True)}
    chain = Chain(first[alive].tolist(), incarnation[alive].tolist())
    return chain, dead, int(incarnation.max(initial=0)), others


def is_damaged_name(file: str) -> bool:
    """Return whether an invalid name has the form of a segment's: then it was one, and is damaged."""
    return len(file) == _NAME_CHARACTERS and file.endswith(_SUFFIX)


def is_segment(file: str) -> bool:
    """Return whether a file name is a segment's."""
    return len(read_names([file])[0]) == 1


def _number(digits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    powers = np.uint64(10) ** np.arange(digits.shape[1] - 1, -1, -1, dtype=np.uint64)
    return digits @ powers
