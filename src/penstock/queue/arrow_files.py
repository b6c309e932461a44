"""Reads the record batches of an Arrow file that another process built: validated, and never compressed.

Compressed files are rejected, because a few bytes can expand to more than the memory, and Arrow has no limit. Arrow's
messages are read in order. Of the footer, which could point elsewhere, only the number of batches is used; a truncated
file has no footer.

Thread: pure functions.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow as pa

from penstock.errors import Invalid

_MAGIC = b"ARROW1\0\0"
_RECORD_BATCH = 3  # a header's type, see format/Message.fbs
_HEADER_TYPE, _HEADER = 1, 2  # fields of a Message
_COMPRESSION = 3  # a field of a RecordBatch


def validated_batches(data: bytes, schemas: Sequence[Any], path: str) -> Iterator[Any]:
    """Yield the record batches of an Arrow file; `Invalid` if it is malformed or has none of these schemas."""
    try:
        expected = pa.ipc.open_file(pa.BufferReader(data)).num_record_batches
        messages = pa.ipc.MessageReader.open_stream(pa.BufferReader(pa.py_buffer(data).slice(len(_MAGIC))))
        schema = pa.ipc.read_schema(messages.read_next_message())
        if schema not in schemas:
            raise Invalid(f"{path} has other columns than {schemas[0].names}: build it again")
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
        raise Invalid(f"{path} is not a valid Arrow file ({error}): build it again") from None


def _is_compressed(metadata: bytes) -> bool:
    """Whether a record batch is compressed, by its header (a flatbuffer); True if it is not a record batch."""
    message = _fields(metadata, struct.unpack_from("<I", metadata)[0])
    header = message(_HEADER)
    if metadata[message(_HEADER_TYPE)] != _RECORD_BATCH or not header:
        return True  # not a record batch
    return _fields(metadata, header + struct.unpack_from("<I", metadata, header)[0])(_COMPRESSION) != 0


def _fields(data: bytes, at: int) -> Callable[[int], int]:
    """Return a function from a field's number to its offset in the flatbuffer table at `at`; 0 if absent."""
    directory = at - struct.unpack_from("<i", data, at)[0]
    size = struct.unpack_from("<H", data, directory)[0]

    def field_offset(number: int) -> int:
        entry = 4 + 2 * number
        offset: int = struct.unpack_from("<H", data, directory + entry)[0] if entry < size else 0
        return at + offset if offset else 0

    return field_offset
