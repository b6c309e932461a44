"""Reads from a queue while its writer appends.

A `FilesView` is what readers may see: the sealed files, and the active one up to an offset. The writer replaces it
whole; a reader takes one reference and sees one state. An open file stays readable after it is unlinked.

Thread: any number of readers; one lock guards the few files that are kept open.
Invariant: batches are in the order of their sequences, each message once, and never beyond the view.
A file that was unlinked before it was opened raises `FileNotFoundError`: the caller checks whether its view is old.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock.errors import CorruptionError, UnsupportedVersion
from penstock.host.file_errors import unreadable
from penstock.host.files import FileSystem
from penstock.host.threads import lock
from penstock.log.record import Record, encoded_size
from penstock.queue.coding import PLAIN_CODING, PREFIX, BodyCoding, lent_coding, partition_of
from penstock.queue.files import KIND_MESSAGES, KIND_TRIM, OPENING_BYTES, DataReader, FileIndex, Opening
from penstock.queue.messages import MessageBatch, decode_batch
from penstock.queue.qmft import FileTable, data_files

_OPEN_FILES_MAX = 16
_READ_BYTES_MIN, _READ_BYTES_MAX = 64 << 10, 256 << 10  # of one read call


@dataclass(frozen=True, slots=True)
class Span:
    """One file of a view: the messages [first, next) in its first `size` bytes."""

    path: str
    first: int
    next: int
    size: int
    index: FileIndex | None  # None: the file holds it


@dataclass(frozen=True, slots=True)
class FilesView:
    """The files and messages that readers may see."""

    files: FileTable = field(default_factory=FileTable)
    active: Span = Span("", 1, 1, 0, None)

    @property
    def first(self) -> int:
        """The oldest sequence, or the next one if there is none."""
        return int(self.files.starts[0]) if len(self.files) else self.active.first

    @property
    def next(self) -> int:
        return self.active.next

    def span(self, index: int) -> Span:
        """Return the file at an index; the active one is last."""
        if index >= len(self.files):
            return self.active
        entry = self.files[index]
        return Span(entry.path, entry.start_sequence, entry.end_sequence + 1, entry.size, None)


class QueueReader:
    """Finds and decodes records for readers."""

    def __init__(self, fs: FileSystem, folder: str, identity: bytes, coding: BodyCoding = PLAIN_CODING) -> None:
        self._coding = coding
        self._fs = fs
        self._folder = folder
        self._identity = identity
        self._lock = lock("queue.reader")
        self._open: OrderedDict[str, DataReader] = OrderedDict()  # guarded by _lock; least recently used first

    def read(
        self, view: FilesView, start: int, *, limit_messages: int, limit_bytes: int, past_damage: bool
    ) -> list[MessageBatch]:
        """Return batches from `start` on: none at the end, else at least one message, then within both limits."""
        batches: list[MessageBatch] = []
        while start < view.next and limit_messages > 0 and limit_bytes > 0:
            span = view.span(view.files.index_of(start))
            start = max(start, span.first)
            for batch in self._batches(span, start, limit_bytes, past_damage):
                if batch.first > start and not past_damage:
                    raise CorruptionError(f"{self._folder}/{span.path}", 0, f"message {start} is missing")
                part = _within(batch.slice(start, batch.next), limit_messages, limit_bytes, first=not batches)
                start = part.next
                if len(part):
                    batches.append(part)
                    limit_messages -= len(part)
                    limit_bytes -= part.messages.size_bytes()
                if start < batch.next or limit_messages <= 0 or limit_bytes <= 0:
                    return batches
            if start < span.next:
                if not past_damage:
                    raise CorruptionError(f"{self._folder}/{span.path}", span.size, f"message {start} is missing")
                start = span.next
        return batches

    def _batches(self, span: Span, start: int, limit_bytes: int, past_damage: bool) -> Iterator[MessageBatch]:
        """Yield the batches of one file, beginning with the one that holds `start`."""
        reader = self._of(span)
        sequence, offset = reader.hint
        if sequence != start:
            offset = (span.index or reader.index(span.size)).before(start)
        read_bytes = min(max(limit_bytes, _READ_BYTES_MIN), _READ_BYTES_MAX)
        for at, record in reader.records(offset, span.size, past_damage=past_damage, read_bytes=read_bytes):
            if record.kind != KIND_MESSAGES or record.index + PREFIX.unpack_from(record.body)[2] <= start:
                continue
            batch = decode_batch(record, path=reader.file.path, offset=at, coding=self._coding)
            reader.hint = (batch.next, at + encoded_size(len(record.body)))  # a guess at where the next read begins
            yield batch

    def seek_time(self, view: FilesView, time_us: int) -> int:
        """Return the sequence of the first record at or after a time; the next sequence if there is none."""
        span = view.span(self.files_before(view, time_us))
        if not span.path:
            return view.next
        reader = self._of(span)
        offset = (span.index or reader.index(span.size)).before_time(time_us)
        for _, record in reader.records(offset, span.size):
            if record.kind == KIND_MESSAGES and PREFIX.unpack_from(record.body)[1] >= time_us:
                return record.index
        return span.next

    def files_before(self, view: FilesView, time_us: int) -> int:
        """Count the oldest sealed files that hold only records older than a time."""
        return self._sealed_while(view, lambda following: following.last_time_us < time_us)

    def files_before_lsn(self, view: FilesView, lsn: int) -> int:
        """Count the oldest sealed files that hold only records of lower LSNs."""
        return self._sealed_while(view, lambda following: following.last_lsn < lsn)

    def _sealed_while(self, view: FilesView, holds: Callable[[Opening], bool]) -> int:
        """Count the oldest sealed files for whose successor's opening `holds`. Opens at most about twenty."""
        low, high = 0, len(view.files)
        while low < high:
            middle = (low + high) // 2
            following = view.span(middle + 1)
            if following.path and holds(self.opening(following.path)):
                low = middle + 1
            else:
                high = middle
        return low

    def changes(self, view: FilesView, lsn: int) -> Iterator[tuple[int, Record]]:
        """Yield the records of messages and trims from an LSN on, each with the bytes of the files from it on."""
        first = self.files_before_lsn(view, lsn)
        left = int(view.files.sizes[first:].sum()) + view.active.size
        for number in range(first, len(view.files) + bool(view.active.path)):
            span = view.span(number)
            reader = self._of(span)
            start = reader.before_lsn(lsn, span.size, span.index) if number == first else OPENING_BYTES
            for offset, record in reader.records(start, span.size):
                if record.kind in (KIND_MESSAGES, KIND_TRIM) and PREFIX.unpack_from(record.body)[0] >= lsn:
                    yield left - offset, record
            left -= span.size

    def message_records(self, view: FilesView, low: int, high: int) -> Iterator[Record]:
        """Yield the records that hold the messages [low, high). Requires: the view has them."""
        number = view.files.index_of(low)
        while low < high:
            span = view.span(number)
            reader = self._of(span)
            start = (span.index or reader.index(span.size)).before(low)
            for _, record in reader.records(start, span.size):
                if record.kind == KIND_MESSAGES and record.index < high:
                    following = record.index + PREFIX.unpack_from(record.body)[2]
                    if record.index > low:
                        raise CorruptionError(reader.file.path, 0, f"message {low} is missing")
                    if following > low:
                        low = following
                        yield record
            if low < min(high, span.next):
                raise CorruptionError(reader.file.path, span.size, f"message {low} is missing")
            number += 1

    def damage(self, span: Span) -> list[CorruptionError]:
        """Read a file to its end; return what is damaged or missing."""
        damage: list[CorruptionError] = []
        try:
            reader = self._of(span)
            expected = span.first
            for offset, record in reader.records(OPENING_BYTES, span.size, past_damage=True, damage=damage):
                if record.kind != KIND_MESSAGES:
                    continue
                if record.index != expected and not damage:
                    damage.append(CorruptionError(reader.file.path, offset, f"message {expected} is missing"))
                expected = record.index + PREFIX.unpack_from(record.body)[2]
            if expected < span.next and not damage:
                damage.append(CorruptionError(reader.file.path, span.size, f"message {expected} is missing"))
        except CorruptionError as error:
            damage.append(error)
        except UnsupportedVersion as error:
            damage.append(CorruptionError(f"{self._folder}/{span.path}", 0, str(error)))
        except FileNotFoundError:
            raise
        except OSError as error:
            damage.append(unreadable(error, f"{self._folder}/{span.path}"))
        return damage

    def opening(self, path: str) -> Opening:
        return self._file(path).opening

    def _of(self, span: Span) -> DataReader:
        reader = self._file(span.path)
        if reader.opening.first != span.first:
            reason = f"it begins at message {reader.opening.first}, but the manifest says {span.first}"
            raise CorruptionError(reader.file.path, 0, reason)
        return reader

    def _file(self, path: str) -> DataReader:
        with self._lock:
            reader = self._open.get(path)
            if reader is not None:
                self._open.move_to_end(path)
                return reader
        reader = DataReader.open(self._fs, self._folder, path, self._identity)
        with self._lock:
            self._open[path] = reader
            if len(self._open) > _OPEN_FILES_MAX:
                self._open.popitem(last=False)  # not closed: another reader may use it; the last one closes it
        return reader

    def forget(self) -> None:
        """Forget every open file."""
        with self._lock:
            self._open.clear()


def _within(batch: MessageBatch, limit_messages: int, limit_bytes: int, *, first: bool) -> MessageBatch:
    """Return as much of a batch as both limits allow; at least one message if it is the `first`."""
    count = min(limit_messages, int(np.searchsorted(batch.messages.ends(), limit_bytes, side="right")))
    return batch.slice(batch.first, batch.first + max(count, int(first)))


def rows_in_files(fs: FileSystem, folder: str, identity: bytes) -> Iterator[Any]:
    """Yield record batches of every message that can be read in a queue's folder, each once, without its manifest."""
    following, coding = 0, lent_coding(identity, partition_of(folder))
    for path in sorted(data_files(fs, folder), key=lambda path: path.rpartition("/")[2]):
        try:
            reader = DataReader.open(fs, folder, path, identity)
        except (CorruptionError, UnsupportedVersion, OSError):
            continue
        with suppress(OSError):  # the rest of this file cannot be read; the caller knows that some may be missing
            for offset, record in reader.records(OPENING_BYTES, reader.file.size(), past_damage=True):
                if record.kind != KIND_MESSAGES or record.index < following:
                    continue  # a file that continues after a failure repeats the end of the one before
                try:
                    batch = decode_batch(record, path=reader.file.path, offset=offset, coding=coding)
                except (CorruptionError, UnsupportedVersion):
                    continue
                following = batch.next
                yield batch.record_batch(headers=batch.messages.headers is not None)
        reader.file.close()
