"""Reading a log from any index.

Thread: a cursor belongs to one thread; the log's writer runs concurrently.
Invariants: (1) it returns records in order, each once, and only durable ones. (2) if the log was truncated below what a
cursor has returned, it raises and never continues on another history.
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
    """A position in a log, before the record `next`."""

    def __init__(self, log: Log, start: int) -> None:
        self._log = log
        self._next = start
        self._cuts, _ = log.cuts_since(0)
        self._reader: SegmentReader | None = None
        self._offset = 0
        log.locate(start)  # raises if the start was truncated away

    @property
    def next(self) -> Index:
        """The index of the next record."""
        return Index(self._next)

    def read(self, *, records_max: int = 1024, bytes_max: int = 1 << 20) -> list[Record]:
        """Return the next durable records: none at the end, otherwise at least one, up to either limit."""
        if records_max < 1 or bytes_max < 1:
            raise Invalid(f"records_max {records_max}, bytes_max {bytes_max}: give at least 1")
        start = self._next
        while True:
            self._check_history()
            try:
                records = self._read(records_max, bytes_max)
            except BaseException as error:
                self.close()
                self._next = start  # nothing was returned, so it is read again
                if self._was_cut() and isinstance(error, CorruptionError | NotFound):
                    continue  # it is not damage: the log was truncated meanwhile
                if isinstance(error, FileNotFoundError):  # it had no descriptor when it was unlinked
                    raise NotFound(f"record {start} was truncated while it was read: open a new cursor") from None
                raise
            if not self._was_cut():
                return records
            self.close()
            self._next = start

    def _was_cut(self) -> bool:
        return self._log.cuts_since(self._cuts)[1] is not None

    def _read(self, records_max: int, bytes_max: int) -> list[Record]:
        synced = self._log.synced
        records: list[Record] = []
        size = 0
        while self._next <= synced and len(records) < records_max and size < bytes_max:
            reader, limit = self._open()
            stop = min(synced, limit - 1)
            for offset, record in reader.records(self._offset):
                self._check(record, reader.file.path, offset)
                records.append(record)
                size += len(record.body)
                self._next += 1
                self._offset = offset + encoded_size(len(record.body))
                if record.index >= stop or len(records) >= records_max or size >= bytes_max:
                    break
        return records

    def __iter__(self) -> Iterator[Record]:
        while batch := self.read():
            yield from batch

    def _check_history(self) -> None:
        self._cuts, lowest = self._log.cuts_since(self._cuts)
        if lowest is None:
            return
        self.close()
        if lowest < self._next - 1:
            raise NotFound(f"the log was truncated to {lowest}, below this cursor at {self._next}: open a new cursor")

    def _check(self, record: Record, path: str, offset: int) -> None:
        if record.kind == KIND_SEAL or record.index != self._next:
            raise CorruptionError(path, offset, f"record {self._next} is missing")

    def _open(self) -> tuple[SegmentReader, int]:
        """Return a reader positioned before the next record, and the index at which its segment ends."""
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
