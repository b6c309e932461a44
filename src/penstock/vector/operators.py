"""The merge operator of vector tables: sets of internal ids. Posting lists and the set of deleted ids are such sets.

`lsm.operators` finds it by name, so that every process that merges files folds alike. A shard has one operator only:
operands of several would be folded at every apply (see `lsm.tree`).

Thread: pure functions.
Invariant: it is associative, byte for byte: equal sets have equal bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from pyroaring import BitMap64

from penstock.errors import CorruptionError
from penstock.vector.keys import U64


def encode_ids(ids: BitMap64) -> bytes:
    """Encode a set of internal ids: a Roaring bitmap of 64 bits in the portable format, run-optimised."""
    ids.run_optimize()
    data: bytes = ids.serialize()
    return data


def decode_ids(value: bytes | None) -> BitMap64:
    """Decode a set of internal ids; None is the empty set."""
    if value is None:
        return BitMap64()
    try:
        return BitMap64.deserialize(value)
    except (ValueError, TypeError, MemoryError) as error:
        raise CorruptionError("set of internal ids", 0, f"it does not decode ({error})") from None


def id_array(ids: BitMap64) -> U64:
    """Return the internal ids of a set, ascending."""
    return np.frombuffer(ids.to_array(), np.uint64) if ids else np.zeros(0, np.uint64)


def vector_ids(values: Sequence[bytes], final: bool) -> bytes:
    """Return the union of sets of internal ids."""
    if len(values) == 1:
        return values[0]
    united = BitMap64()
    for value in values:
        united |= decode_ids(value)
    return encode_ids(united)
