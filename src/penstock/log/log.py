"""A log: segments in a folder as one sequence of records, numbered from 1.

Thread: one writer calls all methods that change the log; any thread may use a `Cursor` of its own and read `first`,
`last` and `synced`.

Invariants:
(1) `first - 1 <= synced <= last`; cursors return records up to `synced` only.
(2) a record carries the value of `synced` when it was written, which tells damage below it from a torn tail.
(3) after a failed write or fsync the log is poisoned: bytes past the last good sync are never trusted again, by this
    process or the next, and nothing is retried. `recover` continues in a new segment.
(4) what `open` returns is durable: a tail that may be in the page cache only is rewritten and synced first.
(5) `incarnation` rises at each open, `recover` and cut, durably: `(incarnation, index)` identifies a record for good.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import takewhile

from penstock.errors import Closed, CorruptionError, DiskFull, Invalid, NotFound, Poisoned, ProcessLimit
from penstock.host.file_operations import make_dirs, remove_file
from penstock.host.files import FileSystem
from penstock.host.randomness import Random
from penstock.log.chain import Chain, SegmentName, is_damaged_name, is_segment, read_names
from penstock.log.cursor import Cursor
from penstock.log.record import HEADER, INCARNATION_MAX, KIND_DATA, LARGE_BYTES, Index, Record, check_bodies
from penstock.log.segment import (
    HEADER_BYTES,
    TEMPORARY,
    SegmentHeader,
    SegmentReader,
    SegmentWriter,
    SparseIndex,
    reseal,
    scan_tail,
)
from penstock.log.settings import LogEnd, LogSettings, LogStatistics, Repair

logger = logging.getLogger(__name__)

_NOTHING_WRITTEN = (DiskFull, ProcessLimit, Invalid, NotFound)  # raised before a byte was written


class Log:
    """An append-only, truncatable sequence of records in a folder."""

    def __init__(self, fs: FileSystem, folder: str, *, random: Random, settings: LogSettings, identity: bytes) -> None:
        self._fs = fs
        self._folder = folder
        self._random = random
        self._settings = settings
        self._identity = identity
        self._chain = Chain([], [])  # replaced whole, never changed: cursors read it without a lock
        self._active: SegmentWriter | None = None  # None: the next append starts a segment
        self._incarnation = 0
        self.last = Index(0)  # the newest record; `first - 1` if there is none
        self.synced = Index(0)  # the last record that is durable
        self._dead: set[SegmentName] = set()  # superseded, possibly still in the folder
        self._cuts: list[int] = []  # every index the log was truncated to since it was opened
        self._failure: BaseException | None = None
        self._closed = False
        self.closed_cleanly = False  # everything appended is durable, and nothing follows
        self.repair: Repair | None = None

    @classmethod
    def open(
        cls,
        fs: FileSystem,
        folder: str,
        *,
        random: Random,
        settings: LogSettings | None = None,
        identity: bytes = bytes(16),
        check_end: Callable[[LogEnd], None] | None = None,
    ) -> Log:
        """Open or create the log in `folder`. The caller ensures that it is open only once.

        `check_end` gets the end of the log before anything is changed, and raises if records are missing.
        """
        if len(identity) != 16:
            raise Invalid(f"a log's identity has 16 bytes, not {len(identity)}")
        log = cls(fs, folder, random=random, settings=settings or LogSettings(), identity=identity)
        log._open(check_end)
        return log

    # -- reading

    @property
    def first(self) -> Index:
        """The index of the oldest record, or of the next one if there is none."""
        return Index(self._chain[0].first)

    @property
    def incarnation(self) -> int:
        return self._incarnation

    def statistics(self) -> LogStatistics:
        return LogStatistics(
            self.first, self.last, self.synced, self._incarnation, len(self._chain), self._failure is not None
        )

    def segment_starts(self) -> list[int]:
        """Return the first index of each segment: the front is truncated by whole segments."""
        return list(self._chain.firsts)

    def cursor(self, start: int | None = None) -> Cursor:
        """Return a cursor before the record `start` (the oldest if None)."""
        return Cursor(self, self.first if start is None else start)

    def read(self, index: int) -> Record:
        """Return one durable record."""
        with self.cursor(index) as cursor:
            for record in cursor.read(records_max=1):
                return record
        raise NotFound(f"record {index} is not in {self._folder}: it holds {self.first} to {self.synced}")

    def __iter__(self) -> Iterator[Record]:
        """Iterate over all durable records, oldest first; `CorruptionError` at a damaged one."""
        with self.cursor() as cursor:
            yield from cursor

    # -- writing

    def append(self, bodies: Sequence[bytes], *, kind: int = KIND_DATA, flags: int = 0) -> Index:
        """Write records as one batch; return the index of the last. They are durable after `sync`.

        On `DiskFull` and `ProcessLimit` nothing was written, and the call may be repeated.
        """
        if not KIND_DATA <= kind <= 255 or not 0 <= flags <= 255:
            raise Invalid(f"kind must be {KIND_DATA} to 255 and flags 0 to 255, not {kind} and {flags}")
        size = check_bodies(bodies)
        with self._writing():
            segment = self._segment_for(size)
            with segment.file.pin():
                segment.claim(size)
                segment.write(bodies, first=self.last + 1, synced=self.synced, kind=kind, flags=flags)
            self.last = Index(self.last + len(bodies))
        return self.last

    def commit(self, bodies: Sequence[bytes]) -> Index:
        """Append records as one batch and make it durable; return the index of the last. For errors see `append`.

        The same as `append` and `sync` in one use of the file: the hot path of the journal.
        """
        body = bodies[0] if len(bodies) == 1 else None
        if type(body) is bytes and len(body) < LARGE_BYTES:  # nearly always
            size = HEADER.size + len(body) + (-len(body) & 7)
        else:
            size = check_bodies(bodies)
        if self._closed or self._failure is not None:
            self._check_writable()
        try:
            segment = self._active
            if segment is None or segment.end + size > min(segment.claimed, self._settings.segment_bytes):
                segment = self._segment_for(size)
                segment.file.hold()
                segment.claim(size)
            if self.synced < self.last:  # records were appended without a sync
                self._sync()
            segment.write_synced(bodies, first=self.last + 1, synced=self.synced)
            self.last = self.synced = self.last + len(bodies)  # type: ignore[assignment]  # Index() is a call
        except _NOTHING_WRITTEN:
            raise
        except BaseException as error:
            self._failure = error
            raise
        return self.last

    def sync(self) -> Index:
        """Make everything appended durable; return the last durable index."""
        with self._writing():
            self._sync()
        return self.synced

    def _sync(self) -> None:
        if self._active is not None and self.synced < self.last:
            self._active.file.fdatasync()
            self.synced = self.last

    def _segment_for(self, size: int) -> SegmentWriter:
        active = self._active
        if active is not None and (active.end + size <= self._settings.segment_bytes or not active.index.offsets):
            return active
        return self._next_segment()

    def roll(self) -> None:
        """Seal the active segment, if it has records, and start another."""
        with self._writing():
            if self._active is None or self._active.index.offsets:
                self._next_segment()

    def _next_segment(self) -> SegmentWriter:
        if self._active is not None:
            self._sync()  # before the seal: it claims that all before it is synced
            self._active.seal(self.last)
            self._close_active()
        return self._install(self._create(self.last + 1, cut=False))

    def _create(self, first: int, *, cut: bool, tail: Sequence[Record] = ()) -> SegmentWriter:
        """Create a segment from `first` on that begins with `tail`; it supersedes all records at or above `first`."""
        if self._incarnation > INCARNATION_MAX:
            raise Invalid(f"{self._folder} has used up its incarnations: copy its records into a new log")
        header = SegmentHeader(
            first=first,
            incarnation=self._incarnation,
            salt=int.from_bytes(self._random.randbytes(4), "little"),
            identity=self._identity,
            cut=cut,
        )
        sizes = self._settings
        self._dead.add(header.name)  # until it is installed: after a failure it may exist, and must be removed first
        return SegmentWriter.create(
            self._fs,
            self._folder,
            header,
            tail,
            allocate_bytes=sizes.allocate_bytes,
            index_bytes=sizes.index_bytes,
        )

    def _install(self, segment: SegmentWriter) -> SegmentWriter:
        self._dead.discard(segment.header.name)  # before the chain: a live segment is never in this set
        self._chain = self._chain.with_segment(segment.header.name)
        self._active = segment
        return segment

    def _close_active(self) -> None:
        if self._active is not None:
            self._active.file.close()
        self._active = None

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Raise if closed or poisoned; poison on every failure except those before the first byte."""
        self._check_writable()
        try:
            yield
        except _NOTHING_WRITTEN:
            raise
        except BaseException as error:
            self._failure = error
            raise

    def _check_writable(self) -> None:
        if self._closed:
            self._check_open()
        if self._failure is not None:
            raise Poisoned(f"{self._folder} failed before ({self._failure}): recover() or reopen it") from self._failure

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"the log {self._folder} is closed: open it again")

    # -- truncation

    def truncate_front(self, before: int) -> Index:
        """Drop records below `before`, by whole segments; return the new first index."""
        with self._writing():
            if before > self.last + 1:
                raise Invalid(f"cannot drop records before {before}: the last one is {self.last}")
            if not self._remove_dead(set()):  # before the segment that supersedes them is removed
                return self.first
            while len(self._chain) > 1 and self._chain[1].first <= before:
                # One by one, oldest first: names must disappear in order, or a crash leaves a gap.
                oldest = self._chain[0]
                removed = self._remove(oldest)
                if not removed and self._fs.exists(f"{self._folder}/{oldest}"):
                    break
                self._chain = self._chain.without_oldest()
                if not removed:  # a crash may bring its name back: the next one must wait
                    self._dead.add(oldest)
                    break
        return self.first

    def _remove(self, *names: SegmentName) -> bool:
        """Unlink segments durably; False if one may still exist: later ones must then wait for the next attempt."""
        try:
            with self._fs.folder(self._folder) as folder:  # opened first: without a descriptor nothing is unlinked
                removed = [remove_file(self._fs, f"{self._folder}/{name}") for name in names]
                folder.fsync()
        except OSError as error:
            logger.warning("%s could not be synced after a clean-up (%s): this is retried later", self._folder, error)
            return False
        return all(removed)

    def truncate_back(self, after: int) -> None:
        """Drop every record past `after`, durably."""
        with self._writing():
            if not self.first - 1 <= after <= self.last:
                raise Invalid(f"cannot truncate to {after}: the log has records {self.first} to {self.last}")
            if after == self.last:
                return
            if after > self.synced:
                self._sync()
            self._cut(after)

    def recover(self) -> None:
        """Continue after a failure: keep what was synced, drop the rest. If this fails, the log stays poisoned."""
        self._check_open()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            try:
                with self._writing():
                    self._cut(self.synced)
            except BaseException:
                self._failure = failure
                raise

    def _cut(self, after: int) -> None:
        """Continue after `after` in a new segment of a new incarnation. Requires: `after <= synced`."""
        count = self._chain.position_of(after) + 1
        dropped = {self._chain[position] for position in range(count, len(self._chain))}
        replaced = next((name for name in dropped if name.first == after + 1), None)
        cut = True if replaced is None else self._is_cut(replaced)
        active = self._active
        self._incarnation += 1
        try:
            segment = self._create(after + 1, cut=cut)  # takes effect by one rename
            self._drop_after(after)  # before the chain: no cursor may read past it
        except (DiskFull, ProcessLimit, Invalid):
            self._incarnation -= 1  # before the rename: nothing has changed
            raise
        except BaseException:
            # The segment may exist, and then all past `after` is superseded: nothing may be appended there.
            self._drop_after(after)
            raise
        self._install(segment)
        if active is not None:
            active.file.close()
        self._remove_dead(dropped)

    def _drop_after(self, after: int) -> None:
        self.synced = self.last = Index(after)
        self._cuts.append(after)

    def _is_cut(self, name: SegmentName) -> bool:
        """Return whether a segment's header says that its predecessor may lack the closing record."""
        reader = self.open_segment(name)
        reader.close()
        return reader.header.cut

    def _remove_dead(self, names: set[SegmentName]) -> bool:
        """Unlink dead segments; False if one may remain: it would be live again without its successor."""
        self._dead |= names
        if self._dead and not self._remove(*sorted(self._dead)):
            return False
        self._dead.clear()
        return True

    # -- opening and closing

    def _open(self, check_end: Callable[[LogEnd], None] | None) -> None:
        make_dirs(self._fs, self._folder)
        # Names may be visible but not yet durable: sync them before anything is unlinked because of them.
        self._fs.fsync_dir(self._folder)
        self._chain, dead, incarnation, others = read_names(self._fs.listdir(self._folder))
        self._incarnation = incarnation + 1
        self._check_other_files(others)
        if not self._chain:
            if check_end is not None:
                check_end(LogEnd(self._folder, 0, 1, 0, 0))
            self._install(self._create(1, cut=False))
            return
        name = self._chain[-1]
        reader = self.open_segment(name)
        try:
            tail = scan_tail(reader)
        finally:
            reader.close()
        if check_end is not None:
            check_end(LogEnd(reader.file.path, tail.end, self.first, tail.last, incarnation))
        for position in {self._chain.position_of(name.first) for name in dead}:
            self.open_segment(
                self._chain[position]
            ).close()  # opened, so that a name alone never decides what is unlinked
        self._remove_dead(dead)
        if tail.seal is not None:
            reseal(self._fs, reader, tail)
        else:
            self._report(Repair(reader.file.path, tail.end, len(tail.unsynced), tail.torn))
        replaced = name.first == tail.synced + 1  # replaced whole: then the end of its predecessor counts
        cut = reader.header.cut if replaced else tail.seal is None
        self._install(self._create(tail.synced + 1, cut=cut, tail=tail.unsynced))
        self.synced = self.last = Index(tail.last)
        if replaced:
            self._remove_dead({name})

    def _check_other_files(self, others: Iterable[str]) -> None:
        """Handle files that are not segments: remove temporary ones, raise for damage, report the others."""
        left: list[str] = []
        for file in others:
            if is_damaged_name(file):  # ignoring it would lose a segment silently
                raise CorruptionError(f"{self._folder}/{file}", 0, "it looks like a segment, but its name is damaged")
            if file.endswith(TEMPORARY) and is_segment(file.removesuffix(TEMPORARY)):
                remove_file(self._fs, f"{self._folder}/{file}")
            else:
                left.append(file)
        if left:
            logger.warning(
                "%s has %d files that are not Penstock's, such as %r: move them elsewhere",
                self._folder,
                len(left),
                left[0],
            )

    def _report(self, repair: Repair) -> None:
        self.repair = repair
        if repair.torn is not None:
            logger.warning("%s: torn tail dropped at byte %d (%s)", repair.path, repair.offset, repair.torn)

    def close(self) -> None:
        """Sync, seal and close the log. A poisoned log is closed as it is."""
        if self._closed:
            return
        try:
            if self._failure is None and self._active is not None:
                # Without a seal the next open takes a little longer.
                with self._writing(), suppress(DiskFull, ProcessLimit):
                    self._sync()
                    self.closed_cleanly = True
                    self._active.seal(self.last)
        finally:
            self._closed = True
            self._close_active()

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def copy_to(
        self, folder: str, first: int, records: Iterable[Record] | None = None, incarnation: int | None = None
    ) -> Index:
        """Write records from `first` on to another folder, as a log that was closed; return the last index.

        By default all that are durable now, of this log's incarnation.
        """
        last, sizes = self.synced, self._settings
        header = SegmentHeader(
            first=first,
            incarnation=incarnation or self._incarnation,
            salt=int.from_bytes(self._random.randbytes(4), "little"),
            identity=self._identity,
            cut=False,
        )
        with ExitStack() as ends:
            segment = SegmentWriter.create(
                self._fs, folder, header, (), allocate_bytes=sizes.allocate_bytes, index_bytes=sizes.index_bytes
            )
            ends.callback(segment.file.close)
            if records is None:
                cursor = ends.enter_context(self.cursor(first)) if first <= last else ()
                records = takewhile(lambda record: record.index <= last, cursor)
            end = first - 1
            for record in records:
                segment.copy(record)
                end = record.index
            segment.file.fsync()  # before the seal: it claims that all before it is synced
            segment.seal(end)
        return Index(end)

    # -- for cursors

    def locate(self, index: int) -> tuple[SegmentName, SegmentName | None]:
        """Return the segment with `index`, and its successor (None for the last)."""
        self._check_open()
        chain = self._chain
        position = chain.position_of(index)
        if position < 0:
            raise NotFound(f"record {index} is no longer in {self._folder}: it begins at {chain[0].first}")
        return chain[position], chain[position + 1] if position + 1 < len(chain) else None

    def cuts_since(self, count: int) -> tuple[int, int | None]:
        """Return how often the log was truncated so far, and the lowest index of the cuts since `count`."""
        cuts = self._cuts[count:]
        return count + len(cuts), min(cuts, default=None)

    def open_segment(self, name: SegmentName) -> SegmentReader:
        """Open one segment for reading."""
        try:
            reader = SegmentReader.open(self._fs, self._folder, name, self._identity)
        except FileNotFoundError:
            raise NotFound(f"segment {name} of {self._folder} was truncated away: it begins at {self.first}") from None
        return reader

    def sparse_index(self, reader: SegmentReader) -> SparseIndex:
        """Return the sparse index of a segment: stored, the writer's, or (without a closing record) made by reading."""
        active = self._active
        if active is not None and active.header.name == reader.header.name:
            return active.index
        if (sealed := reader.sparse_index()) is not None:  # after the check of `active`: by now it is sealed
            return sealed
        name, successor = self.locate(reader.header.first)
        index = SparseIndex(self._settings.index_bytes)
        if successor is None or name != reader.header.name:
            return index
        if not self._is_cut(successor):
            raise CorruptionError(reader.file.path, reader.file.size(), "the closing record is damaged")
        for offset, record in reader.records(HEADER_BYTES):
            index.add(record.index, offset)
            if record.index >= successor.first - 1:
                break
        return index
