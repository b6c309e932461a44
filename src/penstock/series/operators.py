"""The merge operators of series tables: blocks of samples, and sets of series ids.

`lsm.operators` finds them by name, so that every process that merges files folds alike.

Thread: pure functions.
Invariants: (1) both are associative, byte for byte. (2) `final` says that nothing is below the values: tombstones,
which delete only what is below, are dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from pyroaring import BitMap

from penstock.series.blocks import Block, encode
from penstock.series.samples import (
    NO_TOMBSTONES,
    U32,
    Contents,
    Samples,
    Tombstones,
    concat,
    sorted_distinct,
    union,
    without,
)

_NO_RUNS = 12_346  # the cookie of a Roaring bitmap without run containers
_SINGLE = np.dtype(  # a bitmap of one element: its container has a cardinality, less 1, of 0
    [("cookie", "<u4"), ("containers", "<u4"), ("high", "<u2"), ("less", "<u2"), ("offset", "<u4"), ("low", "<u2")]
)
assert _SINGLE.itemsize == 18


def series_samples(values: Sequence[bytes], final: bool) -> bytes:
    """Fold blocks of one group, oldest first: the last write of an (id, time) wins, tombstones delete older samples."""
    blocks = [Block(value) for value in values]
    if len(blocks) == 1 and not (final and len(blocks[0].deleted)):
        return values[0]
    samples, deleted = fold_columns((block.read(), block.deleted) for block in blocks)
    return encode(samples, union([]) if final else deleted)


def fold_columns(parts: Iterable[Contents]) -> Contents:
    """Fold samples and the tombstones below each, oldest first, into sorted, distinct samples and their tombstones."""
    samples: list[Samples] = []
    deletes: list[Tombstones] = []
    for some, deleted in parts:
        if len(deleted):
            samples = [without(sorted_distinct(concat(samples)), deleted)]
            deletes.append(deleted)
        samples.append(some)
    tombstones = union(deletes) if deletes else NO_TOMBSTONES
    return sorted_distinct(concat([some for some in samples if len(some)])), tombstones


def encode_ids(ids: BitMap) -> bytes:
    """Encode a set of ids; equal sets give equal bytes."""
    ids.run_optimize()
    data: bytes = ids.serialize()
    return data


def encode_single_ids(ids: U32) -> list[bytes]:
    """Encode sets of one id each, as `encode_ids` does."""
    sets = np.zeros(len(ids), _SINGLE)
    sets["cookie"], sets["containers"], sets["offset"] = _NO_RUNS, 1, 16
    sets["high"], sets["low"] = ids >> np.uint32(16), ids & np.uint32(0xFFFF)
    encoded: list[bytes] = sets.view(f"V{_SINGLE.itemsize}").tolist()
    return encoded


def decode_ids(value: bytes) -> BitMap:
    """Decode a set of ids."""
    return BitMap.deserialize(value)


def series_ids(values: Sequence[bytes], final: bool) -> bytes:
    """Return the union of sets of ids."""
    if len(values) == 1:
        return values[0]
    return encode_ids(BitMap.union(*map(decode_ids, values)))
