"""A durable queue of messages in a folder, numbered from 1.

A standalone queue is its own log: `append`, `sync`, and readers see what is synced. In a store (`cut_after_lsn`) the
journal is the log: what is appended is already durable, readers see it at once, and after a crash the store appends
again what the files had not stored, to the same sequences.

Thread: one writer calls the methods that change the queue; any thread may read it and its properties.

Invariants:
(1) every acknowledged message is in a file that the durable manifest names; what a manifest says of a file was synced
    before.
(2) the records of an LSN are written together, to one file; LSNs rise, record times never fall.
(3) after a failed write or fsync the queue is poisoned: bytes past the last good sync are never trusted again, by this
    process or the next, and nothing is retried. `recover` continues in a new file.
(4) standalone, what `open` makes visible is durable: a tail that may be only in the page cache is first written again.
(5) opening reads the manifest, the write position it names and what follows; it lists no folder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from penstock.errors import Closed, CorruptionError, DiskFull, Invalid, NotFound, Poisoned, ProcessLimit, Restore
from penstock.host import threads
from penstock.host.clock import Clock
from penstock.host.file_errors import is_disk_full, unreadable
from penstock.host.files import FileSystem
from penstock.host.randomness import Random
from penstock.kinds import OwnFile
from penstock.log.record import Record, encoded_size
from penstock.queue.chain import FileChain, QueueRepair, QueueSettings
from penstock.queue.coding import PLAIN_CODING, BodyCoding
from penstock.queue.files import KIND_TRIM, encode_trim
from penstock.queue.messages import SCHEMA, MessageBatch, Messages, stamped
from penstock.queue.qmft import QmftWriter
from penstock.queue.reading import FilesView, QueueReader, Span

T = TypeVar("T")

_TIME_US_MAX = 253_402_300_799_999_999  # the end of the year 9999: a folder's name has four digits


@dataclass(frozen=True, slots=True)
class QueueStatistics:
    """A queue at one moment. The messages [first, next) can be read."""

    first: int
    next: int
    appended: int  # the sequence after the last one appended
    stored_lsn: int
    files: int  # including the active one
    bytes: int
    poisoned: bool


class PersistentQueue:
    """A queue of messages in a folder."""

    def __init__(
        self,
        fs: FileSystem,
        folder: str,
        *,
        random: Random,
        clock: Clock,
        settings: QueueSettings,
        identity: bytes,
        cut_after_lsn: int | None,
        coding: BodyCoding,
    ) -> None:
        self._fs = fs
        self._coding = coding
        self._folder = folder
        self._clock = clock
        self._cut_after_lsn = cut_after_lsn  # None: standalone
        self._files = FileChain(
            fs, folder, random=random, settings=settings, identity=identity, of_shard=cut_after_lsn is not None
        )
        self._view = FilesView()  # replaced whole, never changed: readers use it without a lock
        self._reader = QueueReader(fs, folder, identity, coding)
        self._failure: Exception | None = None
        self._closed = False
        self.repair: QueueRepair | None = None

    @classmethod
    def open(
        cls,
        fs: FileSystem,
        folder: str,
        *,
        random: Random,
        clock: Clock,
        settings: QueueSettings | None = None,
        identity: bytes = bytes(16),
        cut_after_lsn: int | None = None,
        coding: BodyCoding = PLAIN_CODING,
    ) -> PersistentQueue:
        """Open or create the queue in `folder`. Requires: nobody else has it open.

        In a store, `cut_after_lsn` is the last LSN that the store recorded as stored; the caller then appends all
        records after `stored_lsn` again.
        """
        if len(identity) != 16:
            raise Invalid(f"a queue's identity has 16 bytes, not {len(identity)}")
        queue = cls(
            fs,
            folder,
            random=random,
            clock=clock,
            settings=settings or QueueSettings(),
            identity=identity,
            cut_after_lsn=cut_after_lsn,
            coding=coding,
        )
        queue.repair = queue._files.open(cut_after_lsn)
        queue._show()
        return queue

    # -- contents

    @property
    def view(self) -> FilesView:
        """The files and messages that readers may see now."""
        return self._readable()

    @property
    def first_sequence(self) -> int:
        """The sequence of the oldest message, or the next sequence if there is none."""
        return self._view.first

    @property
    def next_sequence(self) -> int:
        """The sequence after the last readable message."""
        return self._view.next

    @property
    def stored_lsn(self) -> int:
        """Every record up to this LSN is durable in the queue's own files."""
        return max(self._files.synced.last_lsn, self._cut_after_lsn or 0)

    @property
    def last_lsn(self) -> int:
        """Every record up to this LSN was appended, or precedes the queue; the next LSN must be higher."""
        return max(self._files.position.last_lsn, self._cut_after_lsn or 0)

    @property
    def changed_lsn(self) -> int:
        """The LSN of the last record in the files, or before them."""
        return self._files.position.last_lsn

    def statistics(self) -> QueueStatistics:
        view = self._view
        return QueueStatistics(
            first=view.first,
            next=view.next,
            appended=self._files.position.next_sequence,
            stored_lsn=self.stored_lsn,
            files=len(view.files) + bool(view.active.path),
            bytes=int(view.files.sizes.sum()) + view.active.size,
            poisoned=self._failure is not None,
        )

    def read(
        self,
        from_sequence: int,
        *,
        limit_messages: int = 10_000,
        limit_bytes: int = 8 << 20,
        past_damage: bool = False,
    ) -> list[MessageBatch]:
        """Return batches from a message on: none at the end, else at least one message, then within both limits.

        `CorruptionError` for an unreadable record; with `past_damage` it is skipped, and the batches' sequences show
        the gap.
        """

        def read(view: FilesView) -> list[MessageBatch]:
            if from_sequence < view.first:
                raise NotFound(f"message {from_sequence} was trimmed: {self._folder} begins at {view.first}")
            return self._reader.read(
                view, from_sequence, limit_messages=limit_messages, limit_bytes=limit_bytes, past_damage=past_damage
            )

        return self._read_view(read)

    def scan_arrow(self, from_sequence: int | None = None, to_sequence: int | None = None) -> Any:
        """Return the messages [from, to), by default all readable ones, as an Arrow `RecordBatchReader`."""
        start = self.first_sequence if from_sequence is None else from_sequence
        stop = self.next_sequence if to_sequence is None else min(to_sequence, self.next_sequence)

        def batches() -> Iterator[Any]:
            at = start
            while at < stop:
                for batch in self.read(at):
                    at = batch.next
                    yield batch.slice(batch.first, stop).record_batch()
                    if at >= stop:
                        return

        return pa.RecordBatchReader.from_batches(SCHEMA, batches())

    def seek_time(self, time_us: int) -> int:
        """Return the first sequence whose record has this time or a later one; the next sequence if there is none."""
        return self._read_view(lambda view: self._reader.seek_time(view, time_us))

    def changes(self, lsn: int) -> Iterator[tuple[int, Record]]:
        """Yield the records of messages and trims from an LSN on, each with the bytes of the files from it on.

        Requires: its files are not removed meanwhile.
        """
        return self._reader.changes(self._readable(), lsn)

    def message_records(self, low: int, high: int) -> Iterator[Record]:
        """Yield the records that hold the messages [low, high). Requires: as for `changes`, and they are there."""
        return self._reader.message_records(self._readable(), low, high)

    def first_since(self, lsn: int) -> int:
        """Return the first sequence of the oldest file with a record of this LSN or a later one."""
        if self.changed_lsn < lsn:
            return self.next_sequence
        return self._read_view(lambda view: view.span(self._reader.files_before_lsn(view, lsn)).first)

    def first_within(self, bytes_max: int) -> int:
        """Return the first sequence of the newest whole files that together take at most `bytes_max`."""
        view = self._view
        room = bytes_max - view.active.size
        fits = np.cumsum(view.files.sizes[::-1]) <= room
        count = len(view.files) - int(fits.sum())
        return view.span(count).first if count else view.first

    def _read_view(self, read: Callable[[FilesView], T]) -> T:
        """Read from the current view; retry if one of its files was trimmed meanwhile."""
        while True:
            view = self._readable()
            try:
                return read(view)
            except FileNotFoundError as error:
                if self._view is view:
                    raise CorruptionError(str(error.filename), 0, "the data file is missing") from None

    def _readable(self) -> FilesView:
        self._check_open()
        if self._failure is not None and self._cut_after_lsn is not None:
            raise self._poisoned()  # the view includes bytes that are not synced, and may be lost
        return self._view

    # -- writing

    def append(self, messages: Messages, *, lsn: int | None = None, time_us: int | None = None) -> int:
        """Write a batch as one record and return the sequence of its first message. It is durable after `sync`.

        `DiskFull`, `ProcessLimit`: nothing was written; retry when there is room.
        """
        number = self.last_lsn + 1 if lsn is None else lsn
        time = self._record_time(time_us)
        messages.check()
        if not len(messages):
            return self._files.position.next_sequence
        return self.append_bodies([messages.encode(lsn=number, time_us=time)], lsn=number, time_us=time)

    def _record_time(self, time_us: int | None) -> int:
        self._check_open()
        time = self._clock.time_us() if time_us is None else time_us
        if not 0 <= time <= _TIME_US_MAX:
            raise Invalid(f"a record's time is in microseconds from 1970 to 9999, not {time}")
        return max(time, self._files.position.last_time_us)  # a clock that was set back must not put files out of order

    def append_bodies(
        self,
        bodies: Sequence[bytes | memoryview],
        *,
        lsn: int,
        time_us: int,
        trimmed: tuple[int, int] | None = None,
    ) -> int:
        """Write encoded batches as records of one LSN, visible together; return the first message's sequence.

        `trimmed`, for a change feed: the first message before and after a trim, which is written before them.
        """
        with self._writing():
            files, first = self._files, self._files.position.next_sequence
            if lsn <= self.last_lsn:
                raise Invalid(f"LSN {lsn} is already in {self._folder}, which holds all up to {self.last_lsn}")
            time = self._record_time(time_us)
            trim = None if trimmed is None else encode_trim(*trimmed, lsn=lsn, time_us=time)
            coded = [self._coding.encode(stamped(body, lsn=lsn, time_us=time)) for body in bodies]
            size = sum(encoded_size(len(body)) for body in coded) + (0 if trim is None else encoded_size(len(trim)))
            file = files.file_for(size, time)  # one file for all: no LSN spans two
            with file.file.pin(), self._refused_if_full(), file.whole():
                file.claim(size)
                if trim is not None:
                    file.write(trim, synced=files.synced.next_sequence - 1, kind=KIND_TRIM)
                for body in coded:
                    file.write(body, synced=files.synced.next_sequence - 1)
            self._show()
            return first

    def opened(self, record: Record) -> bytes:
        """Return the body of a record of messages as it was before it was compressed and sealed."""
        return self._coding.decode(record.body, self._folder, 0)

    def show(self) -> None:
        """Make all that was appended visible, after an interrupt stopped `append_bodies` before it did."""
        with self._writing():
            self._show()

    @contextmanager
    def _refused_if_full(self) -> Iterator[None]:
        """Turn a full disk into `DiskFull`, in a store: the same append is repeated, to the same offset.

        A standalone queue is poisoned instead: another append might follow, and after a crash the bytes that this one
        left could pass for a record.
        """
        try:
            yield
        except OSError as error:
            if self._cut_after_lsn is None or not is_disk_full(error):
                raise
            raise DiskFull(f"{self._folder} has no room for messages: free some space, then retry") from error

    def contents(self) -> tuple[tuple[tuple[str, int], ...], tuple[tuple[str, bytes], ...]]:
        """Return the data files with their synced sizes, and the bytes of the manifest's. Requires: all is synced."""
        files, active = self._files, self._files.active
        names = [(entry.path, entry.size) for entry in files.sealed]
        if active is not None:
            names.append((active.path, files.synced.offset))
        return tuple(names), files.manifest_files()

    def sync(self) -> int:
        """Make all appended messages durable and return the sequence after the last."""
        with self._writing():
            self._files.sync()
            self._show()
        return self._files.synced.next_sequence

    def _show(self) -> None:
        """Publish the current files to readers, and only then unlink dropped files."""
        files = self._files
        file, position = files.active, files.synced if self._cut_after_lsn is None else files.position
        if file is not None:
            span = Span(file.path, file.opening.first, position.next_sequence, position.offset, file.index)
            self._view = FilesView(files.sealed, span)
        files.unlink_obsolete()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Refuse if closed or poisoned; poison on every failure except those raised before anything was written.

        An interrupt is not a failure: what it stopped can be repeated.
        """
        self._check_open()
        if self._failure is not None:
            raise self._poisoned()
        self._files.take_over()
        try:
            yield
        except (DiskFull, ProcessLimit, Invalid, NotFound, CorruptionError):
            raise
        except Exception as error:
            threads.raise_interrupt(error)
            self._failure = error
            raise

    @property
    def poisoned(self) -> bool:
        """Whether a write or a sync failed."""
        return self._failure is not None

    def _poisoned(self) -> Poisoned:
        error = Poisoned(f"{self._folder} failed before ({self._failure}): recover() or reopen it")
        error.__cause__ = self._failure
        return error

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"the queue {self._folder} is closed: open it again")

    # -- trimming

    def trim(self, *, before_sequence: int | None = None, before_time_us: int | None = None) -> int:
        """Drop whole files of messages before a sequence, or of records before a time; return the new first."""
        if (before_sequence is None) == (before_time_us is None):
            raise Invalid("trim takes before_sequence or before_time_us, one of the two")
        with self._writing():
            files, position = self._files, self._files.position
            sequence, time = before_sequence or 0, before_time_us or 0
            if sequence > position.next_sequence:
                raise Invalid(f"cannot trim before {sequence}: the next message is {position.next_sequence}")
            everything = sequence == position.next_sequence or time > position.last_time_us
            if everything and files.active is not None and files.active.messages:
                files.roll(position.last_time_us)
                self._show()
            if before_sequence is not None:
                count = files.sealed.index_of(sequence)
            else:
                count = self._read_view(lambda view: self._reader.files_before(view, time))
            if count:
                files.drop_oldest(count)
                self._show()
        return self.first_sequence

    def own_files(self) -> list[OwnFile]:
        """Return the files that hold all that is synced, with a manifest that names them. Requires: `sync`."""
        return self._files.own_files()

    def damaged_manifest(self) -> list[tuple[str, str]]:
        """Return (path, reason) if the manifest on disk cannot be read. Requires: nothing is written meanwhile."""
        try:
            QmftWriter(self._fs, self._folder).read_latest()
        except CorruptionError as error:
            return [(error.path, error.reason)]
        except Restore as error:
            return [(self._folder, str(error))]
        except OSError as error:
            damage = unreadable(error, self._folder)
            return [(damage.path, damage.reason)]
        return []

    def damaged_files(self) -> list[tuple[str, str]]:
        """Read every data file; return (path, reason) for each damage."""
        damage: list[tuple[str, str]] = []
        view = self._readable()
        for span in (view.span(index) for index in range(len(view.files) + bool(view.active.path))):
            try:
                damage += [(error.path, f"byte {error.offset}: {error.reason}") for error in self._reader.damage(span)]
            except FileNotFoundError:
                if span.first >= self._view.first:  # else it was trimmed meanwhile
                    damage.append((f"{self._folder}/{span.path}", "it is missing"))
        return damage

    def collect(self) -> int:
        """Remove data files that the manifest does not list (crashes leave them); return how many. Lists folders."""
        with self._writing():
            return self._files.collect()

    # -- recovering, closing

    def recover(self) -> None:
        """Continue after a failure with what was synced; the rest is lost. If this fails, the queue stays poisoned."""
        self._check_open()
        if self._failure is None:
            return
        failure, self._failure = self._failure, None
        try:
            with self._writing():
                self._files.recover()
                self._show()
        except BaseException:
            self._failure = failure
            raise

    def close(self) -> None:
        """Sync, write the final manifest and close the files. A poisoned queue is closed as it is."""
        if self._closed:
            return
        try:
            if self._failure is None:
                with self._writing():
                    self._files.sync()
                    # Without the index record the next open has to scan more.
                    with suppress(DiskFull, ProcessLimit):
                        self._files.finish()
        finally:
            self._closed = True
            self._reader.forget()
            self._files.close()

    def __enter__(self) -> PersistentQueue:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
