"""Rows of Arrow tables and data frames for `put_many`, divided so that each part fits into one write.

Thread: pure functions.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.arrow_input import SourceError, cast_batches, open_batches
from penstock.errors import Invalid
from penstock.kv.loading import load_schema
from penstock.kv.values import Options, stored_values
from penstock.lsm.rows import bytes_list


def frame_rows(frame: Any, options: Options) -> Iterator[dict[bytes, bytes]]:
    """Yield the rows of Arrow data with the columns key and value, encoded; the last row of a key counts."""
    schema, batches = open_batches(frame, "put_many")
    target = load_schema(schema, options)
    if "op" in target.names:
        raise Invalid("put_many takes the columns key and value: for rows with op, use store.load")
    try:
        for batch in cast_batches(batches, target):
            keys, values = batch.column("key").cast(pa.binary()), batch.column("value")
            if keys.null_count or values.null_count:
                raise Invalid("a key or a value is null: leave such rows out")
            yield dict(zip(bytes_list(keys), bytes_list(stored_values(values, options)), strict=True))
    except SourceError as error:
        raise error.__cause__ or error from None


def parts_of(rows: dict[bytes, bytes], row_bytes: int, bytes_max: int) -> Iterator[dict[bytes, bytes]]:
    """Divide rows, in their order, into parts of less than `bytes_max`; each row counts `row_bytes` more.

    A row that is larger than half of that stands alone. `Invalid` if one is larger than all of it.
    """
    keys, values = list(rows), list(rows.values())
    sizes = np.fromiter(map(len, keys), np.int64) + np.fromiter(map(len, values), np.int64) + row_bytes
    if sizes.max() > bytes_max:
        raise Invalid(
            f"a row takes {sizes.max():,} bytes, and at most {bytes_max:,} fit into one write: open the store with a "
            "larger memory_bytes_max"
        )
    part_of, large = np.cumsum(sizes) // (bytes_max // 2), sizes > bytes_max // 2
    borders = [0, *(np.flatnonzero(np.diff(part_of).astype(bool) | large[1:] | large[:-1]) + 1).tolist(), len(keys)]
    return (dict(zip(keys[start:end], values[start:end], strict=True)) for start, end in itertools.pairwise(borders))
