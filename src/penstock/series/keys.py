"""Keys of the rows of a series shard: bucket, row type, and what the type needs.

    bucket | 1 | fingerprint 16 bytes    ids of the series with this fingerprint, u32 each (mostly one)
    bucket | 2 | id u32                  canonical labels
    bucket | 3 | name, 0, value          set of the ids that have this label (operator `SERIES_IDS`)
    bucket | 4 | group u32 | slice u64   block of samples of 64 neighbouring ids (operator `SERIES_SAMPLES`)
    bucket | 6 | group u32               where the slices of a group begin, if it has more than one
    bucket | 7 | hour u32                nothing: the LSN of the row is that of the last change of samples of this hour
    bucket | 9                           set of the ids whose samples were all deleted, and none was written since
    2**32-1 | 5 | metric                 its metadata
    2**32-1 | 8                          of a rollup table: how far it is computed
    2**32-1 | 10                         u32: retention has deleted the buckets below this one

Numbers of keys are big-endian. A bucket is a u32, so a range of keys holds all that belongs to it. Ids count from 1 in
each bucket; the samples of an id are in the group `id >> GROUP_SHIFT`. A group with many samples is divided by time
into slices, each named by its first time plus 2**63; the first is 0.

Thread: pure functions.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from penstock.series.labels import U32, U64

DICTIONARY, FORWARD, INVERTED, SAMPLES, METADATA, SLICES, CHANGES, PROGRESS, EMPTY, TRIMMED = range(1, 11)
GROUP_SHIFT = 6
ALL_METRICS = (1 << 32) - 1  # stands for the bucket in keys of rows that belong to none
_PREFIX = struct.Struct(">IB")
_NUMBERED = struct.Struct(">IBI")
_SLICED = struct.Struct(">IBIQ")
_TIME_ZERO = 1 << 63
_HOUR_ZERO = 1 << 31
FIRST_SLICE = -_TIME_ZERO  # where the first slice of every group begins


def prefix(bucket: int, row_type: int) -> bytes:
    """Return the common prefix of the keys of one type."""
    return _PREFIX.pack(bucket, row_type)


def bucket_range(first: int, end: int) -> tuple[bytes, bytes]:
    """Return the key range of the buckets [first, end)."""
    return struct.pack(">I", first), struct.pack(">I", min(end, ALL_METRICS))


def change_key(bucket: int, hour: int) -> bytes:
    """Return the key of the mark that samples of an hour, counted from 1970, have changed."""
    return _NUMBERED.pack(bucket, CHANGES, hour + _HOUR_ZERO)


def hour_of(key: bytes) -> int:
    """Return the hour of a mark."""
    return number_of(key) - _HOUR_ZERO


def forward_key(bucket: int, number: int) -> bytes:
    """Return the key of a series' labels."""
    return _NUMBERED.pack(bucket, FORWARD, number)


def samples_key(bucket: int, group: int, start: int = FIRST_SLICE) -> bytes:
    """Return the key of the slice of a group that begins at a time."""
    return _SLICED.pack(bucket, SAMPLES, group, start + _TIME_ZERO)


def group_of(key: bytes) -> int:
    """Return the group of a key of samples."""
    return int(_SLICED.unpack(key)[2])


def slices_key(bucket: int, group: int) -> bytes:
    """Return the key of where the slices of a group begin."""
    return _NUMBERED.pack(bucket, SLICES, group)


def metadata_key(metric: str) -> bytes:
    """Return the key of a metric's metadata."""
    return prefix(ALL_METRICS, METADATA) + metric.encode()


def inverted_key(bucket: int, name: str, value: str) -> bytes:
    """Return the key of the series with a label, or the first keys of values that begin so."""
    return b"%b%b\0%b" % (prefix(bucket, INVERTED), name.encode(), value.encode())


def bucket_of(key: bytes) -> int:
    """Return the bucket of a key."""
    return int.from_bytes(key[:4], "big")


def number_of(key: bytes) -> int:
    """Return the id of a forward key."""
    return int.from_bytes(key[-4:], "big")


def label_of(key: bytes) -> tuple[str, str]:
    """Return the name and the value of a key of the inverted index."""
    name, _, value = key[_PREFIX.size :].partition(b"\0")
    return name.decode(), value.decode()


def dictionary_keys(bucket: int, fingerprints: U64) -> list[bytes]:
    """Return the dictionary keys of many fingerprints (series x 2)."""
    start = prefix(bucket, DICTIONARY)
    lanes: Any = np.ascontiguousarray(fingerprints, ">u8").view("V16").reshape(-1)
    return [start + lane for lane in lanes.tolist()]


def forward_keys(bucket: int, ids: U32) -> list[bytes]:
    """Return the forward keys of many ids."""
    start = prefix(bucket, FORWARD)
    numbers: Any = np.ascontiguousarray(ids, ">u4").view("V4")
    return [start + number for number in numbers.tolist()]
