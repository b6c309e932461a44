"""Record batches out of an Arrow file that somebody else built: validated, and none of them compressed.

Few compressed bytes can stand for more than there is memory, and Arrow inflates them without asking. The messages are
read in their order; of the footer, which could point at others, only the number of batches counts: a file that was cut
short has none.

Thread: pure functions.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa

from penstock.errors import Invalid

_MAGIC = b"ARROW1\0\0"
_RECORD_BATCH = 3  # a header's type, of format/Message.fbs
_HEADER_TYPE, _HEADER = 1, 2  # fields of a Message
_COMPRESSION = 3  # a field of a RecordBatch


def validated_batches(data: bytes, schema: Any, path: str) -> Iterator[Any]:
    """The record batches of an Arrow file of that schema; `Invalid` if it is none."""
    try:
        expected = pa.ipc.open_file(pa.BufferReader(data)).num_record_batches
        messages = pa.ipc.MessageReader.open_stream(pa.BufferReader(pa.py_buffer(data).slice(len(_MAGIC))))
        if pa.ipc.read_schema(messages.read_next_message()) != schema:
            raise Invalid(f"{path} has other columns than {schema.names}: build it again")
        for message in messages:
            expected -= 1
            if message.type != "record batch" or _is_compressed(message.metadata.to_pybytes()):
                raise Invalid(f"{path} is compressed, or holds more than record batches: build it again")
            batch = pa.ipc.read_record_batch(message, schema)
            batch.validate(full=True)
            yield batch
        if expected:
            raise Invalid(f"{path} does not hold what its footer says: build it again")
    except (pa.ArrowException, OSError, StopIteration, struct.error) as error:
        raise Invalid(f"{path} is no sound Arrow file ({error}): build it again") from None


def _is_compressed(metadata: bytes) -> bool:
    """Whether a record batch is, by its header, a flatbuffer."""
    message = _fields(metadata, struct.unpack_from("<I", metadata)[0])
    place = message(_HEADER)
    if metadata[message(_HEADER_TYPE)] != _RECORD_BATCH or not place:
        return True  # no record batch at all
    return _fields(metadata, place + struct.unpack_from("<I", metadata, place)[0])(_COMPRESSION) != 0


def _fields(data: bytes, at: int) -> Callable[[int], int]:
    """Where a field of the flatbuffer table at `at` is; 0 if it is not there."""
    directory = at - struct.unpack_from("<i", data, at)[0]
    size = struct.unpack_from("<H", data, directory)[0]

    def place(number: int) -> int:
        entry = 4 + 2 * number
        offset: int = struct.unpack_from("<H", data, directory + entry)[0] if entry < size else 0
        return at + offset if offset else 0

    return place
