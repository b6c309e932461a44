"""The index of a series shard, read from a view of its tree: matchers to ids, ids to labels, values of labels.

Thread: pure functions of an unchanging view.
Invariant: a lookup reads the rows of the labels it names, not those of other series.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import TypeAlias

import msgspec
import numpy as np
from pyroaring import BitMap

from penstock.errors import CorruptionError
from penstock.lsm.view import View
from penstock.series.keys import (
    ALL_METRICS,
    CHANGES,
    EMPTY,
    FORWARD,
    INVERTED,
    METADATA,
    PROGRESS,
    TRIMMED,
    bucket_of,
    bucket_range,
    forward_key,
    hour_of,
    inverted_key,
    label_of,
    number_of,
    prefix,
)
from penstock.series.labels import METRIC, U32, decode_labels
from penstock.series.operators import decode_ids
from penstock.series.section import MetricMetadata, RollupProgress
from penstock.series.selectors import Matcher

Check: TypeAlias = Callable[[], None]  # raises when a query is out of time
_CHECK_VALUES = 16  # of a label, that are tested between two checks: a regular expression may take milliseconds
_BUCKETS_FEW = 4  # are looked up one by one
_GET_MAX = 64  # ids looked up one by one; more are scanned if they are close together
_TRIMMED = struct.Struct("<I")
_pack = msgspec.msgpack.Encoder().encode
_metadata = msgspec.msgpack.Decoder(MetricMetadata)
_progress = msgspec.msgpack.Decoder(RollupProgress)


# -- values of rows


def encode_metadata(metadata: MetricMetadata) -> bytes:
    """Encode a metric's metadata."""
    return _pack(metadata)


def encode_progress(progress: RollupProgress) -> bytes:
    """Encode how far a rollup is computed."""
    return _pack(progress)


def rollup_progress(view: View) -> RollupProgress:
    """Return how far a rollup is computed; LSN 0 if it is not."""
    stored = view.get(prefix(ALL_METRICS, PROGRESS))
    return RollupProgress(0) if stored is None else _progress.decode(stored)


def encode_trimmed(bucket: int) -> bytes:
    """Encode the bucket below which retention has deleted all."""
    return _TRIMMED.pack(bucket)


def trimmed_bucket(view: View) -> int:
    """Return the bucket below which retention has deleted all that was written before; 0 if it has not."""
    stored = view.get(prefix(ALL_METRICS, TRIMMED))
    return 0 if stored is None else int(_TRIMMED.unpack(stored)[0])


def changed_hours(view: View, bucket: int) -> Iterator[tuple[int, int]]:
    """Yield the hours of a bucket whose samples were ever changed, each with the LSN of the last change."""
    for columns in view.scan_columns(prefix=prefix(bucket, CHANGES)):
        yield from zip(map(hour_of, columns.list_keys()), columns.lsns.tolist(), strict=True)


def dictionary_values(ids: U32) -> list[bytes]:
    """Encode each id for the dictionary, where the ids of one fingerprint follow each other."""
    values: list[bytes] = np.ascontiguousarray(ids, "<u4").view("V4").tolist()
    return values


def dictionary_ids(value: bytes | None) -> list[int]:
    """Return the ids of a dictionary row."""
    ids: list[int] = np.frombuffer(value or b"", "<u4").tolist()
    return ids


# -- buckets and ids


def buckets(view: View, first: int, end: int) -> Iterator[int]:
    """Yield the buckets in [first, end) that have series, ascending."""
    skips = end - first > _BUCKETS_FEW
    while first < end:
        if skips:
            key = view.first_key(*bucket_range(first, end))
            if key is None:
                return
            first = bucket_of(key)
        if view.get(forward_key(first, 1)) is not None:  # every bucket that was not dropped has a first series
            yield first
        first += 1


def last_id(view: View, bucket: int) -> int:
    """Return the highest id of a bucket, which is its number of series; 0 if it has none."""
    row = next(view.scan(prefix=prefix(bucket, FORWARD), reverse=True, limit=1), None)
    return 0 if row is None else number_of(row[0])


def empty_ids(view: View, bucket: int) -> BitMap:
    """Return the ids of the series whose samples were all deleted."""
    stored = view.get(prefix(bucket, EMPTY))
    return BitMap() if stored is None else decode_ids(stored)


def unchecked() -> None:
    """Do nothing: the check of callers without a deadline."""


def match(view: View, bucket: int, matchers: Sequence[Matcher], check: Check = unchecked) -> BitMap:
    """Return the ids of the series that all matchers accept, but for those whose samples were all deleted."""
    return match_any(view, bucket, matchers, check) - empty_ids(view, bucket)


def match_any(view: View, bucket: int, matchers: Sequence[Matcher], check: Check = unchecked) -> BitMap:
    """Return the ids of the series that all matchers accept, with samples or without."""
    result: BitMap | None = None
    for matcher in sorted(matchers, key=lambda matcher: matcher.matches_empty):  # those that name few series first
        if matcher.matches_empty:
            if result is None:
                result = _every_id(view, bucket)
            result = result - _rejected(view, bucket, matcher, check)
        else:
            ids = _accepted(view, bucket, matcher, check)
            result = ids if result is None else result & ids
        if not result:
            return result
    return _every_id(view, bucket) if result is None else result


def _every_id(view: View, bucket: int) -> BitMap:
    return BitMap(range(1, last_id(view, bucket) + 1))


def _accepted(view: View, bucket: int, matcher: Matcher, check: Check) -> BitMap:
    """Return the ids with a value that a matcher accepts, which is not the empty one."""
    if matcher.exact is not None and not matcher.negative:
        return _union(ids_with(view, bucket, matcher.name, value) for value in matcher.exact)
    start = "" if matcher.negative else matcher.prefix
    return _union(ids for value, ids in values(view, bucket, matcher.name, start, check) if matcher.matches(value))


def _rejected(view: View, bucket: int, matcher: Matcher, check: Check) -> BitMap:
    """Return the ids with a value that a matcher, which accepts the empty one, does not accept."""
    if matcher.exact is not None and matcher.negative:
        return _union(ids_with(view, bucket, matcher.name, value) for value in matcher.exact)
    start = matcher.prefix if matcher.negative else ""
    return _union(ids for value, ids in values(view, bucket, matcher.name, start, check) if not matcher.matches(value))


def _union(sets: Iterable[BitMap]) -> BitMap:
    united, rest = BitMap(), iter(sets)
    while some := list(islice(rest, 1_024)):  # one by one would be slower, and all at once would take much memory
        united |= BitMap.union(*some)
    return united


def ids_with(view: View, bucket: int, name: str, value: str) -> BitMap:
    """Return the ids of the series with a label."""
    return _union(map(decode_ids, view.live_values(inverted_key(bucket, name, value))))


def values(
    view: View, bucket: int, name: str, start: str = "", check: Check = unchecked
) -> Iterator[tuple[str, BitMap]]:
    """Yield the values of a label that begin with `start`, with the ids that have each."""
    for count, (key, ids) in enumerate(view.scan(prefix=inverted_key(bucket, name, start))):
        if not count % _CHECK_VALUES:
            check()
        yield label_of(key)[1], decode_ids(ids)


# -- labels


def labels_of(view: View, bucket: int, ids: U32) -> list[bytes]:
    """Return the canonical labels of each id."""
    if len(ids) > _GET_MAX and int(ids[-1]) - int(ids[0]) < 4 * len(ids):
        low, high = forward_key(bucket, int(ids[0])), forward_key(bucket, int(ids[-1])) + b"\0"
        scanned = {number_of(key): labels for key, labels in view.scan(low, high)}
        label_sets: list[bytes | None] = list(map(scanned.get, ids.tolist()))
    else:
        label_sets = [view.get(forward_key(bucket, number)) for number in ids.tolist()]
    if None in label_sets:
        raise CorruptionError("series", 0, f"series {ids[label_sets.index(None)]} of bucket {bucket} has no labels")
    return label_sets  # type: ignore[return-value]


def label_names(view: View, bucket: int, ids: BitMap | None, check: Check = unchecked) -> set[str]:
    """Return the names of the labels of some series, or of all."""
    names: set[str] = set()
    empty = empty_ids(view, bucket) if ids is None else BitMap()
    if empty:
        for key, members in view.scan(prefix=prefix(bucket, INVERTED)):
            check()
            name = label_of(key)[0]
            if name not in names and decode_ids(members) - empty:
                names.add(name)
        return names
    if ids is None:
        start, end = prefix(bucket, INVERTED), prefix(bucket, INVERTED + 1)
        while (row := next(view.scan(start, end, limit=1), None)) is not None:
            check()
            name = label_of(row[0])[0]
            names.add(name)
            start = prefix(bucket, INVERTED) + name.encode() + b"\1"
        return names
    numbers = np.array(ids, np.uint32)
    for at in range(0, len(numbers), 4_096):
        check()
        for labels in labels_of(view, bucket, numbers[at : at + 4_096]):
            names.update(name for name, _ in decode_labels(labels))
    return names


def label_values(view: View, bucket: int, name: str, ids: BitMap | None, check: Check = unchecked) -> Iterator[str]:
    """Yield the values of a label of some series, or of all."""
    empty = empty_ids(view, bucket) if ids is None else BitMap()
    for value, members in values(view, bucket, name, check=check):
        if members.intersect(ids) if ids is not None else not empty or members - empty:
            yield value


def metric_counts(view: View, bucket: int, check: Check = unchecked) -> Iterator[tuple[str, int]]:
    """Yield each metric with its number of series."""
    empty = empty_ids(view, bucket)
    ids_by_value = values(view, bucket, METRIC, check=check)
    counts = ((value, len(ids - empty) if empty else len(ids)) for value, ids in ids_by_value)
    return (pair for pair in counts if pair[1])


def metadata(view: View) -> Iterator[MetricMetadata]:
    """Yield what was written about metrics, ordered by metric."""
    for _, value in view.scan(prefix=prefix(ALL_METRICS, METADATA)):
        yield _metadata.decode(value)
