"""Reading a log from any index.

Thread: a cursor belongs to one thread; the log's writer goes on beside it.
Invariants: (1) it returns records in order, each once, and only durable ones. (2) a log that was cut back below what a
cursor has returned makes it raise, never continue on another history.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from penstock.errors import CorruptionError, Invalid, NotFound
from penstock.log.record import KIND_SEAL, Index, Record, encoded_size

if TYPE_CHECKING:
    from penstock.log.log import Log
    from penstock.log.segment import SegmentReader

_NO_LIMIT = 1 << 64


class Cursor:
    """A place in a log, before the record `next`."""

    def __init__(self, log: Log, start: int) -> None:
        self._log = log
        self._next = start
        self._cuts, _ = log.cuts_since(0)
        self._reader: SegmentReader | None = None
        self._offset = 0
        log.locate(start)  # a start that was truncated away is told now

    @property
    def next(self) -> Index:
        """The index of the record that comes next."""
        return Index(self._next)

    def read(self, *, records_max: int = 1024, bytes_max: int = 1 << 20) -> list[Record]:
        """The next durable records: none at the end, else at least one, until either limit is reached."""
        if records_max < 1 or bytes_max < 1:
            raise Invalid(f"records_max {records_max}, bytes_max {bytes_max}: give at least 1")
        start = self._next
        while True:
            self._check_history()
            try:
                found = self._read(records_max, bytes_max)
            except BaseException as error:
                self.close()
                self._next = start  # what was found is not returned, so it comes again
                if self._was_cut() and isinstance(error, CorruptionError | NotFound):
                    continue  # what looked like damage is a cut under our feet
                if isinstance(error, FileNotFoundError):  # it had no descriptor when it was unlinked
                    raise NotFound(f"record {start} was truncated away while it was read: make a new cursor") from None
                raise
            if not self._was_cut():
                return found
            self.close()
            self._next = start

    def _was_cut(self) -> bool:
        return self._log.cuts_since(self._cuts)[1] is not None

    def _read(self, records_max: int, bytes_max: int) -> list[Record]:
        synced = self._log.synced
        found: list[Record] = []
        size = 0
        while self._next <= synced and len(found) < records_max and size < bytes_max:
            reader, limit = self._open()
            stop = min(synced, limit - 1)
            for offset, record in reader.records(self._offset):
                self._check(record, reader.file.path, offset)
                found.append(record)
                size += len(record.body)
                self._next += 1
                self._offset = offset + encoded_size(len(record.body))
                if record.index >= stop or len(found) >= records_max or size >= bytes_max:
                    break
        return found

    def __iter__(self) -> Iterator[Record]:
        while batch := self.read():
            yield from batch

    def _check_history(self) -> None:
        self._cuts, lowest = self._log.cuts_since(self._cuts)
        if lowest is None:
            return
        self.close()
        if lowest < self._next - 1:
            raise NotFound(f"the log was cut back to {lowest}, below this cursor at {self._next}: make a new cursor")

    def _check(self, record: Record, path: str, offset: int) -> None:
        if record.kind == KIND_SEAL or record.index != self._next:
            raise CorruptionError(path, offset, f"record {self._next} is missing")

    def _open(self) -> tuple[SegmentReader, int]:
        """A reader that stands before the next record, and the index at which its segment ends."""
        name, successor = self._log.locate(self._next)
        limit = _NO_LIMIT if successor is None else successor.first
        if self._reader is not None and self._reader.header.name == name:
            return self._reader, limit
        self.close()
        self._reader = reader = self._log.open_segment(name)
        self._offset = self._log.sparse_index(reader).before(self._next)
        for offset, record in reader.records(self._offset):
            if record.index >= self._next or record.kind == KIND_SEAL:
                self._offset = offset
                break
        return reader, limit

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
        self._reader = None

    def __enter__(self) -> Cursor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
