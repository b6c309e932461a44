"""Messages in a file that was built elsewhere: an Arrow IPC file with the columns payload, and perhaps key and time.

Thread: pure functions over a file.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from penstock.errors import Invalid
from penstock.host.files import FileSystem

STAGED_SCHEMA = pa.schema(
    [
        pa.field("payload", pa.binary(), nullable=False),
        pa.field("key", pa.binary()),
        pa.field("time", pa.timestamp("us", tz="UTC"), nullable=False),
    ]
)
BATCH_BYTES = 8 << 20  # of a batch in such a file


def staged_batches(fs: FileSystem, path: str) -> Iterator[Any]:
    """The record batches of a staged file; `Invalid` if it is none."""
    file = fs.open(path)
    try:
        data = file.pread(file.size(), 0)
    finally:
        file.close()
    try:
        reader = pa.ipc.open_file(pa.BufferReader(data))
        if reader.schema != STAGED_SCHEMA:
            raise Invalid(f"{path} has other columns than {STAGED_SCHEMA.names}: build it again")
        for number in range(reader.num_record_batches):
            batch = reader.get_batch(number)
            batch.validate(full=True)
            yield batch
    except pa.ArrowException as error:
        raise Invalid(f"{path} is no sound Arrow file ({error}): build it again") from None
