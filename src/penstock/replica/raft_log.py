"""The journal as the log of Raft: what PySyncObj appends, cuts and asks for.

Raft numbers its entries by an *index*; the records of the store among them have LSNs without a gap. The difference is
the members' own entries (`NO_OP`: a new leader's first, and barriers), which the store never sees. A record that was
written before the store had members has no term in it, and counts as term 0.

Thread: the loop's thread appends, cuts and syncs; `_lock` guards the log against truncation, which comes from another.
Invariants: (1) an entry is cut from the back only if it is not committed. (2) `committed` covers only entries that are
synced here. (3) the entry before the first is known by index and term (`base`), so that a follower can be asked for it.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

import msgspec
from pysyncobj.journal import Journal

from penstock.errors import CorruptionError, Invalid, NotFound
from penstock.host import threads
from penstock.journal.record import Lsn
from penstock.log import Log
from penstock.log.record import KIND_DATA, Record
from penstock.replica.state import LogBase, RaftState, StateFile, joined

KIND_ENTRY = KIND_DATA + 1  # a record with its term before it
KIND_NO_OP = KIND_DATA + 2  # an entry of the members themselves, with its term
CUT_SEGMENTS = 64  # that are dropped at once: the state file names each, and entries wait meanwhile
LAG_SEGMENTS = 16  # of journal that are kept for a member that is behind; then it gets a snapshot
CACHE_BYTES = 16 << 20  # of the newest entries, kept in memory to be sent and applied
READ_BYTES = 1 << 20  # of them that are read at once
_TERM = struct.Struct("<Q")


class Command(NamedTuple):
    """The record in an entry: PySyncObj carries it and never looks into it."""

    body: bytes


NO_OP = b"\x01"  # what PySyncObj itself appends when it becomes the leader


class RaftEntry(NamedTuple):
    """An entry, in PySyncObj's order."""

    command: Command | bytes
    index: int  # type: ignore[assignment]  # it hides a method of tuples, which nobody calls here
    term: int


class _Shape(NamedTuple):
    """Where the log begins, and what its entries are; replaced whole, so that any thread sees one state of it."""

    base: LogBase
    term_starts: list[tuple[int, int]]  # (index, term): the term of the entries from there on; only appended to
    own: list[int]  # the indexes of the members' own entries; only appended to


class RaftLog(Journal):  # type: ignore[misc]  # PySyncObj has no types
    """The log-store contract of PySyncObj over a `Log`."""

    def __init__(self, log: Log, state: StateFile) -> None:
        self._log, self._state = log, state
        self._lock = threads.lock("replica.log")
        self._shape = _Shape(self._base(), [], [])
        self._cache: deque[RaftEntry] = deque()  # the newest entries, at least those that are not synced
        self._cache_bytes = 0
        self.lag_segments = LAG_SEGMENTS
        self._holds: dict[object, int] = {}  # guarded by _lock: entries that members with a snapshot will need
        self.committed = self.base.index
        for record in log:
            self._note(_entry(record))

    def _base(self) -> LogBase:
        before = self._log.first - 1
        for base in self._state.state.bases:
            if base.index == before:
                return base
        raise CorruptionError("raft", 0, f"the entry before {before + 1}, where the journal begins, is not known")

    # -- positions

    @property
    def state(self) -> RaftState:
        """What this member must not forget, besides its entries."""
        return self._state.state

    def join(self, born: tuple[tuple[str, int], ...], *, founded: bool) -> None:
        """Note, durably, that this member votes from now on."""
        with self._lock:
            self._state.save(joined(self._state.state, born, founded=founded))

    @property
    def base(self) -> LogBase:
        """The entry before the first one."""
        return self._shape.base

    @property
    def last(self) -> int:
        """The index of the newest entry."""
        return self._log.last

    @property
    def synced(self) -> int:
        return self._log.synced

    def term_at(self, index: int) -> int:
        """Return the term of an entry, or of the base. Requires: `base.index <= index <= last`."""
        base, term_starts, _ = self._shape
        position = bisect_right(term_starts, index, key=_first)
        return term_starts[position - 1][1] if position else base.term

    def lsn_at(self, index: int) -> Lsn:
        """Return the LSN of the last record at or before an index."""
        base, _, own = self._shape
        return Lsn(base.lsn + index - base.index - bisect_right(own, index))

    def lsn_known(self, index: int) -> Lsn:
        """Return the LSN up to which a member has all records whose last entry has this index; 0 if that is unknown."""
        return self.lsn_at(min(index, self.last)) if index >= self.base.index else Lsn(0)

    def kept_from(self) -> Lsn:
        """Return the LSN below which records are not kept for a member that is behind."""
        starts = self.segment_starts()
        return Lsn(starts[-self.lag_segments] if len(starts) > self.lag_segments else 0)

    def index_of(self, lsn: int) -> int:
        """Return the index of a record, or of the next entry if it does not exist yet."""
        base, _, own = self._shape
        index = first = lsn - base.lsn + base.index
        while (candidate := first + bisect_right(own, index)) != index:
            index = candidate
        return index

    def has(self, index: int, term: int) -> bool:
        """Whether the log has this entry, or begins right after it."""
        return self.base.index <= index <= self.last and self.term_at(index) == term

    # -- PySyncObj's contract. It asks for the first and the last entry by position, for their index and term only.

    def __len__(self) -> int:
        return self.last - self.base.index + 1  # the base counts as an entry

    def __getitem__(self, position: Any) -> RaftEntry:
        if position not in (0, -1):
            raise Invalid(f"only the first and the last entry are asked for by position, not {position}")
        index = self.base.index if position == 0 else self.last
        return RaftEntry(b"", index, self.term_at(index))

    def add(self, command: Command | bytes, idx: int, term: int) -> None:
        """Append an entry; it is durable after `sync`."""
        if idx != self.last + 1:
            raise Invalid(f"entry {idx} does not follow {self.last}")
        entry = RaftEntry(command, idx, term)
        kind, body = (KIND_ENTRY, command.body) if isinstance(command, Command) else (KIND_NO_OP, b"")
        with self._lock:
            self._log.append([_TERM.pack(term) + body], kind=kind)
            self._note(entry)

    def deleteEntriesFrom(self, entryFrom: int) -> None:
        self.cut_back(self.base.index + entryFrom - 1)

    def setRaftCommitIndex(self, raftCommitIndex: int) -> None:
        """Advance `committed`, after a sync: a leader counts its own log, too."""
        if raftCommitIndex > self.committed:
            if raftCommitIndex > self.synced:
                self.sync()
            self.committed = raftCommitIndex

    def getRaftCommitIndex(self) -> int:
        return self.committed

    def setCurrentTerm(self, term: int, votedForNodeId: str | None) -> None:
        """Store term and vote, durably: it is called before a message carries them."""
        with self._lock:
            self._state.save(msgspec.structs.replace(self._state.state, term=term, vote=votedForNodeId))

    def getCurrentTerm(self) -> int:
        return self._state.state.term

    def getVotedForNodeId(self) -> str | None:
        return self._state.state.vote

    def onOneSecondTimer(self) -> None:
        pass

    def _destroy(self) -> None:
        pass  # the log belongs to whoever opened it

    # -- writing

    def append(self, bodies: Sequence[bytes], term: int) -> int:
        """Append records in one write; return the index of the last."""
        head = _TERM.pack(term)
        with self._lock:
            first = self.last + 1
            self._log.append([head + body for body in bodies], kind=KIND_ENTRY)
            for index, body in enumerate(bodies, first):
                self._note(RaftEntry(Command(body), index, term))
        return self.last

    def sync(self) -> None:
        """Make every entry durable."""
        with self._lock:
            self._log.sync()

    def cut_back(self, after: int) -> None:
        """Drop every entry past an index, durably."""
        if after < self.committed:
            raise CorruptionError("raft", after, f"a leader asks to drop entry {after + 1}, which is committed here")
        with self._lock:
            self._log.truncate_back(after)
            self._forget_after(after)

    def _forget_after(self, after: int) -> None:
        while self._cache and self._cache[-1].index > after:
            self._cache_bytes -= _size(self._cache.pop())
        base, term_starts, own = self._shape
        count = bisect_right(term_starts, after, key=_first)
        self._shape = _Shape(base, term_starts[:count], own[: bisect_right(own, after)])

    def cut_front(self, before_lsn: int, needed_from: int) -> Lsn:
        """Drop records below an LSN, by whole segments; return the LSN of the first that stays.

        Entries from the index `needed_from` on stay, because another member may need them; but a member that is
        behind by more than `lag_segments` does not keep the journal from being cut.
        """
        with self._lock:
            if before_lsn > self.lsn_at(self.last) + 1:
                raise Invalid(f"cannot drop records before {before_lsn}: the last one is {self.lsn_at(self.last)}")
            kept_from = max(self._kept_for_others(needed_from), int(self._log.first))
            before = min(self.index_of(before_lsn), self.committed + 1, kept_from)
            starts = [start for start in self._log.segment_starts() if self._log.first < start <= before][:CUT_SEGMENTS]
            before = starts[-1] if starts else before
            bases = [LogBase(at - 1, self.term_at(at - 1), self.lsn_at(at - 1)) for at in starts]
            if bases:  # of each segment: a crash may leave any of them as the first
                self._state.save(
                    msgspec.structs.replace(
                        self._state.state, bases=(*self._state.state.bases[-CUT_SEGMENTS:], self.base, *bases)
                    )
                )
            self._log.truncate_front(before)  # also if nothing is dropped: it raises if the log is closed or failed
            first = int(self._log.first)
            if first > self.base.index + 1:
                _, term_starts, own = self._shape
                count = bisect_right(term_starts, first, key=_first)
                terms = [(first, term_starts[count - 1][1]), *term_starts[count:]] if count else list(term_starts)
                base = next(base for base in bases if base.index == first - 1)
                self._shape = _Shape(base, terms, own[bisect_left(own, first) :])
            return Lsn(self.base.lsn + 1)

    def hold(self, index: int) -> Callable[[], None]:
        """Keep entries from an index on, for a member that takes a snapshot; return a function that ends this."""
        key = object()
        with self._lock:
            self._holds[key] = index

        def release() -> None:
            self._holds.pop(key, None)

        return release

    def _kept_for_others(self, needed_from: int) -> int:
        """Return the index from which entries stay for other members. A member that is far behind gets a snapshot."""
        starts = self._log.segment_starts()
        if len(starts) > self.lag_segments:
            needed_from = max(needed_from, starts[-self.lag_segments])
        return min([needed_from, *self._holds.values()])

    def copy_to(self, folder: str, first_lsn: int) -> tuple[LogBase, LogBase]:
        """Write the committed entries from a record on to another folder, as a closed log.

        Returns the entry before its first one, and its last.
        """
        last = self.committed
        first = max(self.base.index + 1, min(self.index_of(first_lsn), last + 1))
        before, end = (LogBase(at, self.term_at(at), self.lsn_at(at)) for at in (first - 1, last))
        with self._log.cursor(first) as cursor:
            records = takewhile(lambda record: record.index <= last, cursor) if first <= last else iter(())
            self._log.copy_to(folder, first, records)
        return before, end

    def roll(self) -> None:
        with self._lock:
            self._log.roll()

    def recover(self) -> None:
        """Continue after a failed write: entries that were not synced are gone."""
        with self._lock:
            self._log.recover()
            if self._log.last > self._log.synced:  # an interrupt came between writing and syncing
                self._log.truncate_back(self._log.synced)
            self._forget_after(self._log.last)

    # -- reading

    def segment_starts(self) -> list[int]:
        """Return the LSN of the first record at or after the start of each segment."""
        with self._lock:
            return [self.lsn_at(start - 1) + 1 for start in self._log.segment_starts()]

    def entries(self, first: int, bytes_max: int) -> list[RaftEntry]:
        """Return entries from an index on, synced or not: at least one, then up to `bytes_max`."""
        entries = self._cached(first, bytes_max)
        if entries is not None:
            return entries
        with self._log.cursor(first) as cursor:
            return _limited(map(_entry, cursor), bytes_max)

    def _cached(self, first: int, bytes_max: int) -> list[RaftEntry] | None:
        """Return entries from an index on that are in memory; None if the first one is not."""
        with self._lock:
            if not self._cache or first < self._cache[0].index:
                return None
            skipped = first - self._cache[0].index
            return _limited((self._cache[at] for at in range(skipped, len(self._cache))), bytes_max)

    def bodies(self) -> Iterator[bytes]:
        """Iterate over all records of the log, committed or not."""
        with self._log.cursor(self.base.index + 1) as cursor:
            for record in cursor:
                if isinstance(command := _entry(record).command, Command):
                    yield command.body

    def records(self, start: int) -> Iterator[tuple[Lsn, bytes]]:
        """Iterate over the committed records from an LSN on."""
        if start <= self.base.lsn:
            raise NotFound(f"record {start} was truncated away: the journal begins at {self.base.lsn + 1}")
        lsn, first, last = start, self.index_of(start), self.committed
        while first <= last and (entries := self._cached(first, READ_BYTES)) is not None:
            for command, index, _ in entries:
                if index <= last and isinstance(command, Command):
                    yield Lsn(lsn), command.body
                    lsn += 1
            first += len(entries)
            if first > last:
                return
        with self._log.cursor(first) as cursor:
            if first > last:
                return
            for record in cursor:
                if record.kind != KIND_NO_OP:
                    yield Lsn(lsn), record.body if record.kind == KIND_DATA else record.body[_TERM.size :]
                    lsn += 1
                if record.index >= last:
                    return

    def _note(self, entry: RaftEntry) -> None:
        _, term_starts, own = self._shape
        if not term_starts or term_starts[-1][1] != entry.term:
            term_starts.append((entry.index, entry.term))
        if not isinstance(entry.command, Command):
            own.append(entry.index)
        self._cache.append(entry)
        self._cache_bytes += _size(entry)
        while self._cache_bytes > CACHE_BYTES and self._cache[0].index <= self._log.synced:
            self._cache_bytes -= _size(self._cache.popleft())


def _first(start: tuple[int, int]) -> int:
    return start[0]


def _size(entry: RaftEntry) -> int:
    return 64 + (len(entry.command.body) if isinstance(entry.command, Command) else 0)


def _entry(record: Record) -> RaftEntry:
    if record.kind == KIND_DATA:
        return RaftEntry(Command(record.body), record.index, 0)
    (term,) = _TERM.unpack_from(record.body)
    return RaftEntry(NO_OP if record.kind == KIND_NO_OP else Command(record.body[_TERM.size :]), record.index, term)


def _limited(entries: Iterator[RaftEntry], bytes_max: int) -> list[RaftEntry]:
    taken: list[RaftEntry] = []
    size = 0
    for entry in entries:
        size += _size(entry)
        if taken and size > bytes_max:
            break
        taken.append(entry)
    return taken
