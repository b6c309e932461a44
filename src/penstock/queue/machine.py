"""The state machine of a queue shard: applies sections to a persistent queue.

The queue's files are the shard's storage: applied messages are in them, and a checkpoint only syncs them. A trim moves
the floor, below which nothing is read; files below it are deleted later, when no snapshot and no change feed needs
them.

Thread: see `partition.machine`; `_lock` serializes apply, sync and the removal of files; any thread may read, without
waiting for any of these.
Invariants: (1) `stored` is committed to the manifest after the files are synced: opening cuts the files after it.
(2) the floor and the next sequence that are committed with it are those of the same LSN. The files may be ahead of it,
because a roll syncs them too: a replay counts messages that the files already hold, and does not write them again.
(3) nothing is removed at or above the floor, or while a snapshot may read it.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from penstock.errors import Closed, CorruptionError, Invalid
from penstock.host import threads
from penstock.host.file_operations import remove_file
from penstock.journal.partitions import PartitionId
from penstock.journal.record import REFERENCE
from penstock.kinds import Machine, MachineContext, OwnFile, Piece, SealedFile, ShardSnapshot
from penstock.kinds.changes import ChangeOptions
from penstock.manifest.keys import ChunkKey, WalStateKey
from penstock.manifest.records import WalStateRecord
from penstock.partition.machine import Entry, PartitionContent, PartitionDescriptor, readable
from penstock.partition.reference import StagedFile, Staging, check_intact, decode_reference
from penstock.queue import section
from penstock.queue.changes import FeedFloor, QueueFeed, QueueFeedView
from penstock.queue.coding import BodyCoding
from penstock.queue.messages import Messages
from penstock.queue.options import has_headers, no_headers
from penstock.queue.persistent import PersistentQueue
from penstock.queue.pieces import describe_piece, gathered
from penstock.queue.qmft import DATA_SUFFIX
from penstock.queue.staged import staged_batches

SCAN_BYTES = 8 << 20  # of messages that a scan holds in memory
KEY = struct.Struct(">Q")  # a sequence as a key: big-endian, so that keys sort by sequence
_STAGED = re.compile(r"([0-9]{20})\.arrow")
_STORED = struct.Struct("<QQ")  # floor and next sequence, as of the LSN that is stored
_STORED_FEED = struct.Struct("<QQ")  # after it, with a change feed: where the feed begins


class _Progress(NamedTuple):
    """The progress of a shard as of one LSN: replaced whole, so that no reader sees half of a record."""

    lsn: int
    floor: int  # nothing below it is read
    next: int  # the sequence of the next message
    changed: int  # the last LSN that put or trimmed messages, or a later one


class QueueMachine(Machine):
    """The state machine of a queue shard. Messages get their sequence, and become visible, when they are applied."""

    stores_cheaply = True

    def __init__(
        self, descriptor: PartitionDescriptor, context: MachineContext, changes: ChangeOptions | None = None
    ) -> None:
        self._descriptor = descriptor
        self._changes = changes
        self._context = context
        self._key = WalStateKey(descriptor.table_id, descriptor.shard)
        self._folder = f"{context.root}/{descriptor.folder}"
        self._lock = threads.lock("queue.machine")  # held while files are written: no reader takes it
        self._open()
        self._pin_lock = threads.lock("queue.pins")
        # Guarded by _pin_lock: the first sequence that each snapshot may read. Weak: an unreferenced snapshot pins
        # nothing.
        self._pins: WeakKeyDictionary[QueueState, int] = WeakKeyDictionary()
        self._taken: list[StagedFile] = []  # guarded by _lock: files whose messages are applied but not stored
        self.changed: Callable[[], None] = _ignore  # called when there are more messages
        self.closed = False  # guarded by _lock
        self._collected = False  # guarded by _lock: whether unlisted files were searched for

    def _open(self) -> None:
        context = self._context
        state = context.manifest.get_wal_state(self._key) or WalStateRecord()
        self._stored = state.stored_lsn  # guarded by _lock
        floor, following = _STORED.unpack_from(state.detail) if state.detail else (1, 1)
        left = state.detail[_STORED.size :]  # of a change feed
        self.feed: QueueFeed | None = None
        if self._changes is not None:
            self.feed = QueueFeed(self._changes, FeedFloor(*_STORED_FEED.unpack(left)) if left else FeedFloor())
        self.queue = PersistentQueue.open(
            context.fs,
            self._folder,
            random=context.random,
            clock=context.clock,
            settings=context.settings,
            identity=context.identity,
            cut_after_lsn=state.stored_lsn,
            coding=BodyCoding(context.files_of(self._descriptor.table_id), self._descriptor.partition),
        )
        if self.queue.next_sequence < following:
            raise self._torn_apart(following)
        changed = min(self.queue.changed_lsn, state.stored_lsn)
        now = _Progress(state.stored_lsn, floor, following, changed)
        self._progress = now, now  # after the last record applied, and before it; guarded by _lock

    @property
    def broken(self) -> bool:
        return self.queue.poisoned and not self.closed

    def renew(self) -> None:
        with self._lock:
            self.queue.close()
            self._open()
            self._taken = []

    @property
    def folder(self) -> str:
        """The folder of its files, relative to the store."""
        return self._descriptor.folder

    @property
    def applied(self) -> int:
        return self._progress[0].lsn

    @property
    def stored(self) -> int:
        return self._stored

    @property
    def encrypted(self) -> bool:
        """Whether its messages are encrypted in files."""
        return self._context.files_of(self._descriptor.table_id).keys is not None

    @property
    def takes_headers(self) -> bool:
        """Whether its messages may have headers, now."""
        return has_headers(self._context.options_of(self._descriptor.table_id))

    def _visible(self) -> _Progress:
        """Return the progress that readers may see: all sections of its record, in every table, are applied."""
        now, before = self._progress
        return now if now.lsn <= self._context.published() else before

    @property
    def first(self) -> int:
        """The sequence of the oldest readable message, or the next sequence if there is none."""
        return max(self._visible().floor, self.queue.first_sequence)

    @property
    def next(self) -> int:
        """The sequence after the newest readable message."""
        return self._visible().next

    def apply(self, entry: Entry) -> None:
        with self._lock:
            bodies: list[section.Body] = []
            puts: list[tuple[section.Puts | section.Encoded, int]] = []  # with the sequence of the first message
            before = self._progress[0]
            floor, following, files = before.floor, before.next, list[StagedFile]()
            for number, part in enumerate(entry.sections):
                if part.header.form == REFERENCE:
                    staged = readable(decode_reference, part.payload).files
                    for file in staged if entry.decoded is None else ():  # a replay: no caller has just checked it
                        check_intact(self._context.fs, self._context.root, file)
                    content: section.Section = section.Encoded(self._bodies_of(staged))
                    files += staged
                elif entry.decoded is not None:
                    content = entry.decoded[number]
                else:
                    content = readable(section.decode, part.payload)
                if isinstance(content, section.Trim):
                    floor = max(floor, min(content.before, following))
                    continue
                puts.append((content, following))
                bodies += content.bodies()
                following += len(content)
            moved = floor > before.floor
            self._append(bodies, entry, before.next, (before.floor, floor) if moved and self.feed is not None else None)
            for source, first in puts:
                source.lsn, source.first = entry.lsn, first  # in this order: a writer that finds the second has both
            self._taken += files  # before it counts as applied: listing a file twice is harmless
            changed = entry.lsn if bodies or moved else before.changed
            self._progress = _Progress(entry.lsn, floor, following, changed), before
        self.changed()

    def _append(
        self, bodies: list[section.Body], entry: Entry, following: int, trimmed: tuple[int, int] | None
    ) -> None:
        """Write messages, unless the files hold them already, after a replay or an interrupt right after the write.

        `trimmed`: the first message before and after a trim that is written, too.
        """
        if not bodies and trimmed is None:
            return
        if entry.lsn > self.queue.last_lsn:
            if self.queue.next_sequence != following:
                raise self._torn_apart(following)
            self.queue.append_bodies(bodies, lsn=entry.lsn, time_us=entry.time_us, trimmed=trimmed)
        else:
            self.queue.show()

    def _torn_apart(self, following: int) -> CorruptionError:
        reason = f"its files end before message {self.queue.next_sequence}, but {following} comes next"
        return CorruptionError(self._folder, 0, reason)

    def _bodies_of(self, files: Sequence[StagedFile]) -> list[section.Body]:
        batches = (
            Messages.from_arrow(batch)
            for file in files
            for batch in staged_batches(self._context.fs, f"{self._context.root}/{file.file_name}")
        )
        return [section.encoded(batch) for batch in batches if len(batch)]

    def check_staged(self, files: Sequence[StagedFile]) -> None:
        for file in files:
            for batch in staged_batches(self._context.fs, f"{self._context.root}/{file.file_name}"):
                messages = Messages.from_arrow(batch)
                messages.check()
                if messages.headers is not None and not self.takes_headers:
                    raise no_headers(self._descriptor.name)

    # -- reading

    def get(self, key: bytes) -> bytes | None:
        state = self.snapshot()
        try:
            return state.get(key)
        finally:
            state.close()

    def snapshot(self) -> QueueState:
        with self._pin_lock:
            visible, oldest = self._visible(), self.queue.first_sequence
            state = QueueState(self, self._descriptor.partition, max(visible.floor, oldest), visible.next)
            self._pins[state] = state.first
            if self.feed is not None:
                self._pins[state] = oldest
                state.feed = QueueFeedView(
                    state.queue, self._descriptor.shard, self.feed, lsn=visible.lsn, last=visible.changed
                )
            return state

    def maintain_feed(self, now_us: int) -> bool:
        """See `FeedKeeping`. Its trims need no record."""
        if self.feed is not None:
            state = self.snapshot()  # keeps the files
            try:
                self.feed.maintain(self.queue, self._visible().lsn, now_us)
            finally:
                state.close()
        return False

    def unpin(self, state: QueueState) -> None:
        with self._pin_lock:
            self._pins.pop(state, None)

    # -- files

    def is_read(self) -> bool:
        with self._pin_lock:
            return bool(self._pins)

    def memory_bytes(self) -> int:
        return 0

    def store_now(self) -> None:
        """Sync the files and commit the progress; then discard the staged files that were copied."""
        with self._lock:
            self._store()
            taken, self._taken = self._taken, []
        if taken:
            context = self._context
            staging = Staging(
                context.manifest, fs=context.fs, root=context.root, clock=context.clock, remove=context.remove
            )
            staging.discard(self._descriptor.table_id, taken)

    def _store(self) -> WalStateRecord:
        """Sync the files and commit the progress; return it. Requires: _lock."""
        lsn, floor, following, _ = self._progress[0]
        feed, detail = self.feed, _STORED.pack(floor, following)
        left = None if feed is None else feed.floor
        if left is not None:
            detail += _STORED_FEED.pack(*left)
        state = WalStateRecord(lsn, lsn, lsn, lsn, detail=detail)
        if self._stored != lsn or (feed is not None and feed.committed != left):
            self.queue.sync()
            txn = self._context.manifest.begin_write()
            txn.put_wal_state(self._key, state)
            txn.commit()
            self._stored = lsn
            if feed is not None and left is not None:
                feed.committed = left
        return state

    @contextmanager
    def exported(self) -> Iterator[PartitionContent]:
        self.store_now()
        state = self.snapshot()
        try:
            with self._lock:
                with self._pin_lock:
                    self._pins[state] = self.queue.first_sequence  # also files that are below the floor
                progress, following = self._store(), self._progress[0].next
                # Data files only grow, so that they can be copied later. The manifest changes in place.
                files, copied = self.queue.contents()
            yield PartitionContent(
                progress.stored_lsn, following - 1, ((0, progress),), (), files, copied, damaged=self.damaged_files
            )
        finally:
            state.close()

    def own_files(self) -> list[OwnFile]:
        """Return the files of the queue, as far as they are synced."""
        with self._lock:
            self.queue.sync()
            return [file._replace(path=f"{self.folder}/{file.path}") for file in self.queue.own_files()]

    def sealed_files(self) -> list[SealedFile]:
        """Return the data files that get no more messages, as the queue's manifest lists them."""
        return [
            SealedFile(
                number=int(entry.path.rpartition("/")[2].removesuffix(DATA_SUFFIX)),
                path=f"{self.folder}/{entry.path}",
                size=entry.size,
                rows=entry.end_sequence + 1 - entry.start_sequence,
                start=KEY.pack(entry.start_sequence),
                end=KEY.pack(entry.end_sequence + 1),
            )
            for entry in self.queue.view.files
        ]

    def damaged_files(self) -> list[tuple[str, str]]:
        """Read every file; return (path, reason) for each damage."""
        with self._lock:
            damage = self.queue.damaged_manifest()
        return damage + self.queue.damaged_files()

    def drop_files(self) -> None:
        """Remove files below the floor that no snapshot reads; the first time, also files that a crash left."""
        with self._lock:  # a backup lists the files under it, after it forbade their removal
            if not self._context.may_remove():
                return
            if not self._collected:
                self.queue.collect()
                self._collect_staged()
                self._collected = True
            needed = [] if self.feed is None else [self.feed.needed_from(self.queue)]
            with self._pin_lock:  # a later snapshot begins at a floor that is not below this one
                before = min([self._visible().floor, *self._pins.values(), *needed])
            if before > self.queue.first_sequence:
                if self.feed is not None:
                    self._store()  # first: no file goes that the committed floor of the feed still needs
                self.queue.trim(before_sequence=before)

    def _collect_staged(self) -> None:
        """Remove staged files that have no row any more: a crash came before the end of a backup."""
        context, table = self._context, self._descriptor.table_id
        for name in context.fs.listdir(self._folder):
            match = _STAGED.fullmatch(name)
            if match and context.manifest.get_chunk(ChunkKey(table, int(match[1]))) is None:
                remove_file(context.fs, f"{self._folder}/{name}")

    def close(self) -> None:
        with self._lock:
            self.closed = True
            self.queue.close()


def _ignore() -> None:
    """The default of `changed`: no consumer waits."""


class QueueState(ShardSnapshot):
    """A snapshot of a shard: the messages [first, next)."""

    def __init__(self, machine: QueueMachine, partition: PartitionId, first: int, next_sequence: int) -> None:
        self._machine: QueueMachine | None = machine
        self._folder = machine.folder
        self._partition = partition
        self.first = first
        self.next = next_sequence
        self.feed: QueueFeedView | None = None
        self._headers = machine.takes_headers  # whether scans have the column
        self._encrypted = machine.encrypted

    def queue(self) -> PersistentQueue:
        """Return the queue; `Closed` if the snapshot, or the queue, was closed."""
        if self._machine is None:
            raise Closed("the snapshot was closed: take another")
        if self._machine.closed:
            raise Closed("the queue was dropped, or the store was closed: its messages can no longer be read")
        return self._machine.queue

    def bounds(self, start: bytes, end: bytes | None) -> tuple[int, int]:
        """Return the sequences [from, to) of a key range, within this snapshot."""
        low = max(self.first, sequence_of(start))
        return low, max(low, self.next if end is None else min(self.next, sequence_of(end)))

    def get(self, key: bytes) -> bytes | None:
        low = sequence_of(key)
        if not self.first <= low < self.next:
            return None
        payload: bytes = self.queue().read(low, limit_messages=1)[0].payloads[0].as_py()
        return payload

    def scan(self, start: bytes, end: bytes | None, *, reverse: bool) -> Iterator[tuple[bytes, bytes]]:
        """Return (sequence as eight bytes, payload) pairs."""
        if reverse:
            raise Invalid("a queue cannot be scanned in reverse: scan it forwards")
        for batch in self.scan_arrow(start, end):
            keys = map(KEY.pack, batch.column("sequence").to_pylist())
            yield from zip(keys, batch.column("payload").to_pylist(), strict=True)

    def scan_arrow(self, start: bytes, end: bytes | None) -> Iterator[Any]:
        low, high = self.bounds(start, end)
        return gathered(self._batches(low, high))

    def _batches(self, low: int, high: int) -> Iterator[Any]:
        while low < high:
            # Limited by bytes alone, so that a record of very many messages is decoded once.
            batches = self.queue().read(low, limit_messages=high - low, limit_bytes=SCAN_BYTES)
            if not batches:
                raise CorruptionError(self._folder, 0, f"message {low} is not in the files, but {high} comes next")
            for batch in batches:
                part = batch.slice(low, high)
                low = part.next
                if len(part):
                    yield part.record_batch(headers=self._headers)
                if low >= high:
                    break

    def pieces(self, count: int, start: bytes = b"", end: bytes | None = None) -> list[Piece]:
        """Divide a key range into `count` pieces with similar numbers of messages."""
        view, folder = self.queue().view, self._folder
        first = max(self.first, sequence_of(start))
        last = max(first, self.next if end is None else min(self.next, sequence_of(end)))
        borders = [first + (last - first) * index // count for index in range(count)] + [last]
        return [
            Piece(
                self._partition,
                KEY.pack(low),
                KEY.pack(high),
                *describe_piece(view, folder, low, high, self._headers, self._encrypted),
            )
            for low, high in pairwise(borders)
            if low < high
        ]

    def close(self) -> None:
        if self._machine is not None:
            self._machine.unpin(self)
            self._machine = None


def sequence_of(key: bytes) -> int:
    """Return the sequence that a key encodes; a key shorter than eight bytes is padded with zeros."""
    return KEY.unpack(key[:8].ljust(8, b"\0"))[0]  # type: ignore[no-any-return]
