"""Partition numbers, and the shard that a key belongs to.

A partition is one shard of one table. Both rules here are formats: journal records carry partition numbers, and every
stored row lies in the shard of its key. Changing either would make stored data unreachable, so tests pin their values.

Thread: pure functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NewType

import numpy as np
import xxhash

from penstock.errors import Invalid

if TYPE_CHECKING:
    from numpy.typing import NDArray

PartitionId = NewType("PartitionId", int)  # table << SHARD_BITS | shard

SHARD_BITS = 16
TABLES_MAX, SHARDS_MAX = 1 << 48, 1 << SHARD_BITS


def partition_id(table: int, shard: int) -> PartitionId:
    """Return the number of a shard of a table; `Invalid` if either is out of range."""
    if not 0 < table < TABLES_MAX or not 0 <= shard < SHARDS_MAX:
        raise Invalid(f"table {table}, shard {shard}: a table id has 48 bits and a shard 16")
    return PartitionId(table << SHARD_BITS | shard)


def table_of(partition: int) -> int:
    """Return the id of the table that a partition belongs to."""
    return partition >> SHARD_BITS


def shard_number(partition: int) -> int:
    """Return the number of a partition's shard within its table, from 0."""
    return partition & (SHARDS_MAX - 1)


def shard_of(key: bytes, shards: int) -> int:
    """Return the shard of a key in a table of `shards` shards."""
    return xxhash.xxh3_64_intdigest(key) % shards


def shards_of(keys: Any, shards: int, *, keyless: int = 0) -> NDArray[np.int64]:
    """Return the shard of each key of an Arrow binary array; nulls go to the shard `keyless`."""
    if shards == 1:
        return np.zeros(len(keys), np.int64)
    digest, each = xxhash.xxh3_64_intdigest, keys.to_numpy(zero_copy_only=False).tolist()
    return np.fromiter((keyless if key is None else digest(key) % shards for key in each), np.int64, len(keys))
