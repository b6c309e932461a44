"""The scan of the active file after the manifest's write position: which records are valid.

Thread: the queue's writer, when a queue is opened. Changes nothing on disk.
"""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import dataclass

import numpy as np

from penstock.errors import CorruptionError
from penstock.log.record import HEADER, Record
from penstock.queue.files import KIND_MESSAGES, KIND_TRIM, DataReader, FilePosition


@dataclass(frozen=True, slots=True)
class QueueTail:
    """The records of the active file after the manifest's write position."""

    trusted: FilePosition  # everything before it is certainly durable
    unsynced: list[Record]  # valid, in order, but perhaps only in the page cache
    end: int  # the offset after them
    torn: str | None  # why the bytes after them are unreadable; None if nothing was written there


def scan_tail(reader: DataReader, position: FilePosition, cut_after_lsn: int | None) -> QueueTail:
    """Read the active file from `position` to its end, and distinguish a torn tail from damage.

    Standalone (no `cut_after_lsn`): records that a later record states to be synced are trusted; other valid records
    are kept, to be written again. In a store: records up to `cut_after_lsn` are trusted, because the store recorded
    them as synced; the journal has all others.
    """
    trusted, torn = position, None
    unsynced: deque[tuple[Record, FilePosition]] = deque()  # each with the position after it
    path, size = reader.file.path, reader.file.size()
    try:
        for offset, record in reader.records(position.offset, size):
            if record.index != position.next_sequence:
                raise CorruptionError(path, offset, f"message {record.index} is where {position.next_sequence} belongs")
            behind = position.after(record)
            if cut_after_lsn is not None and behind.last_lsn > cut_after_lsn:
                break
            position = behind
            if record.kind in (KIND_MESSAGES, KIND_TRIM):
                unsynced.append((record, position))
            while unsynced and (cut_after_lsn is not None or unsynced[0][0].index <= record.synced):
                trusted = unsynced.popleft()[1]
    except CorruptionError as error:
        rest = reader.file.pread(size - position.offset, position.offset)
        _refuse_damage(reader, position, rest, cut_after_lsn, error)
        if np.frombuffer(rest, np.uint8).any():
            torn = error.reason
    return QueueTail(trusted, [record for record, _ in unsynced], position.offset, torn)


def _refuse_damage(
    reader: DataReader, position: FilePosition, rest: bytes, cut_after_lsn: int | None, error: CorruptionError
) -> None:
    """Raise if the unreadable record at `position` was synced once: then it is damage, not a torn tail."""
    expected = position.next_sequence
    synced = any(record.synced >= expected for _, record in reader.valid_records(rest))
    if not synced and cut_after_lsn is not None and len(rest) >= HEADER.size + 8:
        # A store syncs a record before it records its LSN as stored; so a record with such an LSN was complete once.
        _, _, kind, _, _, incarnation, index, _ = HEADER.unpack_from(rest)
        (lsn,) = struct.unpack_from("<Q", rest, HEADER.size)
        ours = kind in (KIND_MESSAGES, KIND_TRIM) and (incarnation, index) == (reader.opening.file_sequence, expected)
        synced = ours and position.last_lsn <= lsn <= cut_after_lsn
    if synced:
        reason = f"the record of message {expected} was synced, but {error.reason}"
        raise CorruptionError(error.path, position.offset, reason) from None
