"""Rows of samples: which group and slice a sample belongs to, and how a flush divides a slice that grew too large.

A group of series is one row of a bucket as long as that is small. When a flush would make it larger than SLICE_BYTES,
it writes what the files have and its own samples anew, as several slices by time, and the row that says where they
begin.
So a row, and with it the memory of a merge or a read, has a bound, however dense the samples are.

Thread: pure functions.
Invariants: (1) slices of a group are disjoint by time and cover all of it; a tombstone is cut at their borders. (2) the
row with the borders and the rows of new slices are in one flush; a slice that was divided is a put, so that nothing of
it is read from older files.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from penstock.lsm.memtable import Readable
from penstock.lsm.operators import SERIES_SAMPLES
from penstock.lsm.rows import PUT
from penstock.series.blocks import Block, encode
from penstock.series.keys import FIRST_SLICE, GROUP_SHIFT, samples_key, slices_key
from penstock.series.operators import fold_columns
from penstock.series.samples import I64, U32, Contents, Samples, Tombstones

SLICE_BYTES = 4 << 20  # a flush divides a larger slice
LAST = (1 << 63) - 1  # the end of the last slice

SliceRow = tuple[bytes, int, bytes]  # key, kind, value


def by_group(samples: Samples, deleted: Tombstones) -> Iterator[tuple[int, Contents]]:
    """Yield the groups of sorted samples and tombstones."""
    samples_at, deletes_at = _borders(samples.ids), _borders(deleted.ids)
    for group in sorted({*samples_at, *deletes_at}):
        low, high = samples_at.get(group, (0, 0))
        first, last = deletes_at.get(group, (0, 0))
        some = Samples(samples.ids[low:high], samples.times[low:high], samples.bits[low:high])
        tombstones = Tombstones(deleted.ids[first:last], deleted.starts[first:last], deleted.ends[first:last])
        yield group, (some, tombstones)


def _borders(ids: U32) -> dict[int, tuple[int, int]]:
    """Return where each group begins and ends in sorted ids."""
    if not len(ids):
        return {}
    groups = ids >> GROUP_SHIFT
    starts = np.flatnonzero(np.append(True, groups[1:] != groups[:-1]))
    ends = [*starts[1:].tolist(), len(ids)]
    return dict(zip(groups[starts].tolist(), zip(starts.tolist(), ends, strict=True), strict=True))


def slice_starts(files: Readable, bucket: int, group: int) -> list[int]:
    """Return where the slices of a group begin, ascending."""
    stored = files.live_values(slices_key(bucket, group))
    return [FIRST_SLICE, *(np.frombuffer(stored[0], "<i8").tolist() if stored else ())]


def slices_between(starts: list[int], start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield the slices that overlap [start, end): the start of each, and the part of the range in it."""
    for first, last in zip(starts, [*starts[1:], LAST], strict=True):
        if first < end and start < last:
            yield first, max(start, first), min(end, last)


def group_rows(files: Readable | None, bucket: int, group: int, contents: Contents) -> list[SliceRow]:
    """Return the rows that add samples and tombstones to a group; None: `files` have nothing of it."""
    starts = [FIRST_SLICE] if files is None else slice_starts(files, bucket, group)
    rows: list[SliceRow] = []
    borders: list[int] = []
    for first, low, high in slices_between(starts, FIRST_SLICE, LAST):
        some = contents if len(starts) == 1 else _clipped(contents, low, high)
        if not len(some[0]) and not len(some[1]):
            continue
        key, block = samples_key(bucket, group, first), encode(*some)
        stored = [] if files is None else files.live_values(key)
        size = len(block) + sum(map(len, stored))
        if size <= SLICE_BYTES:
            rows.append((key, SERIES_SAMPLES, block))
        else:
            parts = _divided(stored, some, first, size)
            rows += [(samples_key(bucket, group, at), PUT, encode(samples)) for at, samples in parts]
            borders += [at for at, _ in parts[1:]]
    if borders:
        merged = np.array(sorted([*starts[1:], *borders]), "<i8").tobytes()
        rows.append((slices_key(bucket, group), PUT, merged))
    return rows


def _clipped(contents: Contents, start: int, end: int) -> Contents:
    samples, deleted = contents
    inside = (deleted.starts < end) & (deleted.ends > start)
    tombstones = Tombstones(
        deleted.ids[inside], np.maximum(deleted.starts[inside], start), np.minimum(deleted.ends[inside], end)
    )
    return samples.take((samples.times >= start) & (samples.times < end)), tombstones


def _divided(stored: list[bytes], added: Contents, first: int, size: int) -> list[tuple[int, Samples]]:
    """Fold all that a slice holds, and divide it by time into parts of half the limit at most, by their samples."""
    blocks = [Block(value) for value in reversed(stored)]
    samples, _ = fold_columns([*((block.read(), block.deleted) for block in blocks), added])
    count = 1 + 2 * size // SLICE_BYTES
    times: I64 = np.sort(samples.times)
    at = np.arange(1, count) * len(times) // count
    borders = [time for time in np.unique(times[at]).tolist() if time > times[0]] if len(times) else []
    edges = [first, *borders, LAST]
    return [(low, samples.take((samples.times >= low) & (samples.times < high))) for low, high in pairwise(edges)]
