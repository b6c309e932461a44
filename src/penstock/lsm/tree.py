"""One log-structured merge tree: applies edits, serves reads, and swaps in a new version for every change.

Thread: one thread applies edits; any thread reads, takes snapshots and requests maintenance. Reads take no lock: they
read one reference. `_lock` guards every change of the version and is never held during I/O.
Invariants: (1) each row is always in the version: a flush drops its memtables in the same swap that adds its file.
(2) a snapshot lies between two edits. (3) `stored <= lsn` in each version, and both only increase.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from penstock.errors import Backpressure, Invalid
from penstock.host import threads
from penstock.host.clock import Clock
from penstock.lsm.compaction import Compaction, compact_everything, pick_compaction
from penstock.lsm.file_use import FileUse
from penstock.lsm.memtable import Edit, Memtable, merged
from penstock.lsm.operators import CHAIN
from penstock.lsm.ranges import RangeDeletes
from penstock.lsm.rows import MERGE, Row
from penstock.lsm.snapshot import TREE_CLOSED, Snapshot
from penstock.lsm.sstable import Sstable
from penstock.lsm.tree_settings import Stall, TreeSettings, TreeStatistics
from penstock.lsm.version import FileMeta, Locate, Run, TableFile, Version, arrange
from penstock.lsm.view import NewestView, View


class Tree:
    """The tree of one partition. `wake` is called with a task's name when that task has work."""

    def __init__(
        self,
        files: Iterable[FileMeta],
        open_table: Callable[[FileMeta], Sstable],
        *,
        clock: Clock,
        locate: Locate = lambda meta: None,
        settings: TreeSettings | None = None,
        stored: int = 0,
        time_us: int = 0,
        operators: frozenset[int] | None = frozenset(),
        memtable: type[Memtable] = Memtable,
        wake: Callable[[str], None] = lambda task: None,
        on_maintained: Callable[[], None] = lambda: None,
    ) -> None:
        self.settings = settings or TreeSettings()
        self.use = FileUse()
        self._open_table = open_table
        self._memtable = memtable
        self._clock = clock
        self._wake = wake
        self._on_maintained = on_maintained  # called after a flush or a compaction
        self._lock = threads.lock("lsm.tree")
        self._maintained = threads.condition("lsm.maintained")
        self._flushing: tuple[Memtable, ...] = ()  # guarded by _lock
        self._snapshots: weakref.WeakSet[Snapshot] = weakref.WeakSet()  # guarded by _lock
        self.lsn = stored  # the last LSN applied; changed under _lock
        self.time_us = time_us  # the highest record time applied; changed under _lock
        self.stored_time_us = time_us  # the highest record time in files
        self.store_first: Callable[[], None] | None = None  # called before files of a flush are published
        self.operators = operators  # of unfolded operands, in memory or in files; None: unknown
        levels = arrange(TableFile(meta, open_table, locate) for meta in files)
        version = Version(memtable(stored), (), levels, stored, stored, time_us)
        self._newest = NewestView(version, self._now_us)
        self.get = self._newest.get  # the value of a key, or None; callers bind it, so that a get is one call less
        self._install(version)

    def _install(self, version: Version) -> None:
        self._version = version
        self._view = View(version, self._now_us)
        self._newest.replace(version)

    def _now_us(self) -> int:
        return max(self.time_us, self._clock.time_us())

    # -- reading

    @property
    def view(self) -> View:
        """The current state; concurrent writes may or may not be seen."""
        return self._view

    @property
    def stored(self) -> int:
        """All edits up to this LSN are in files."""
        return self._version.stored

    def get_row(self, key: bytes) -> Row | None:
        return self._view.get_row(key)

    def row(self, key: bytes) -> tuple[bytes, int] | None:
        return self._view.row(key)

    def scan(
        self,
        start: bytes = b"",
        end: bytes | None = None,
        *,
        prefix: bytes = b"",
        reverse: bool = False,
        limit: int = -1,
    ) -> Iterator[tuple[bytes, bytes]]:
        """Yield (key, value) in order. Concurrent writes may or may not be seen; use `snapshot()` for one state."""
        return self._view.scan(start, end, prefix=prefix, reverse=reverse, limit=limit)

    def scan_arrow(self, start: bytes = b"", end: bytes | None = None, *, prefix: bytes = b"") -> Iterator[Any]:
        return self._view.scan_arrow(start, end, prefix=prefix)

    def snapshot(self) -> Snapshot:
        """Return a snapshot of the current state, valid until it or the tree is closed."""
        with self._lock:
            self._freeze()
            self._merge_small()
            snapshot = Snapshot(replace(self._version, active=None), self._now_us(), self._forget_snapshot)
            self._snapshots.add(snapshot)
            return snapshot

    def present(self) -> Snapshot:
        """Return the current state without freezing it, for counts: rows that are written meanwhile may be seen."""
        with self._lock:
            snapshot = Snapshot(self._version, self._now_us(), self._forget_snapshot)
            self._snapshots.add(snapshot)
            return snapshot

    def _forget_snapshot(self, snapshot: Snapshot) -> None:
        with self._lock:
            self._snapshots.discard(snapshot)

    # -- writing

    def apply(self, edit: Edit) -> None:
        """Install an edit in one step. It never refuses for load: writers call `admit` first.

        An edit that was interrupted half-way is passed again, and continues where it stopped.
        """
        active = self._version.active
        assert active is not None
        if active.applying == edit.lsn:
            edit = active.remainder(edit)
        edit = self._fold_operands(edit)
        with self._lock:
            active = self._version.active
            assert active is not None
            if edit.lsn <= self.lsn:
                raise Invalid(f"an edit of LSN {edit.lsn} comes after {self.lsn}")
            self.time_us = max(self.time_us, edit.time_us)  # before the rows: a reader must not see expired rows
            if active.lsn_last < edit.lsn:
                active.apply(edit)
            self.lsn = edit.lsn
            full = active.bytes >= self.settings.memtable_bytes
            if full:
                self._freeze()
        if full:
            self._wake("flush")

    def put(self, key: bytes, value: bytes, lsn: int, time_us: int) -> None:
        """Install an edit of one put that never expires: a fast `apply` for the most common write."""
        with self._lock:
            active = self._version.active
            assert active is not None
            if lsn <= self.lsn:
                raise Invalid(f"an edit of LSN {lsn} comes after {self.lsn}")
            self.time_us = max(self.time_us, time_us)
            if active.lsn_last < lsn:
                active.put(key, value, lsn, time_us)
            self.lsn = lsn
            full = active.bytes >= self.settings.memtable_bytes
            if full:
                self._freeze()
        if full:
            self._wake("flush")

    def _fold_operands(self, edit: Edit) -> Edit:
        """Fold the operands of an edit, if rows of this tree expire or it has operands of several operators.

        Whether an operand meets a live or an expired row is decided at the time of the operand's record, which rows do
        not store. Operands of several operators would become a chain that outgrows any file. Otherwise it does not
        matter when operands are folded, so they stay as they are.
        """
        in_edit = {row[0] for row in edit.rows.values() if row[0] >= MERGE} if edit.rows else None
        if not in_edit:
            return edit
        operators = None if self.operators is None else self.operators | in_edit
        if operators is not None and len(operators) == 1 and CHAIN not in operators and not self.expires():
            self.operators = operators
            return edit
        view = View(self._version, lambda: edit.time_us)
        deleted = RangeDeletes.of((start, end, edit.lsn) for start, end in edit.ranges)
        rows = {
            key: view.fold(key, row, deleted.lsn_over(key)) if row[0] >= MERGE else row
            for key, row in edit.rows.items()
        }
        return msgspec.structs.replace(edit, rows=rows)

    @property
    def folds_files(self) -> bool:
        """Whether an edit with operands may read files: see `_fold_operands`."""
        operators = self.operators
        return any(self._version.levels) and (operators is None or len(operators) > 1 or self.expires())

    def freeze(self) -> int:
        """Freeze the active memtable for the next flush; return the LSN up to which all rows are frozen."""
        with self._lock:
            self._freeze()
            return self.lsn

    def _freeze(self) -> None:
        version = self._version
        active = version.active
        assert active is not None
        if active.applying > self.lsn:
            return  # an interrupt left an edit half applied: it must finish before the freeze
        if len(active):
            self._install(
                replace(
                    version,
                    active=self._memtable(self.lsn),
                    frozen=(active, *version.frozen),
                    lsn=self.lsn,
                    time_us=self.time_us,
                )
            )
        elif version.lsn < self.lsn:
            self._install(replace(version, lsn=self.lsn, time_us=self.time_us))

    def _merge_small(self) -> None:
        """Merge tiny frozen memtables that snapshots leave; only similar sizes, so that rows are copied rarely."""
        frozen = list(self._version.frozen)
        while len(frozen) > 1:
            newer, older = frozen[0], frozen[1]
            small = newer.bytes + older.bytes <= self.settings.memtable_bytes and 2 * newer.bytes >= older.bytes
            if not small or older in self._flushing or newer in self._flushing:
                break
            frozen[:2] = [merged((older, newer), self.time_us)]
        if len(frozen) < len(self._version.frozen):
            self._install(replace(self._version, frozen=tuple(frozen)))

    # -- load

    def stall(self) -> tuple[Stall, str]:
        """Return whether writers should slow down or stop, and why."""
        version, settings = self._version, self.settings
        waiting = self.memory_bytes() / settings.memtable_bytes
        runs = len(version.levels[0])
        if waiting >= settings.memtables_stop or runs >= settings.level0_stop:
            level = Stall.STOP
        elif waiting >= settings.memtables_slow or runs >= settings.level0_slow:
            level = Stall.SLOW
        else:
            return Stall.NONE, ""
        return level, f"{waiting:.1f} memtables wait for a flush and level 0 has {runs} runs"

    def admit(self, timeout_s: float = 5.0) -> None:
        """Call before a write: return at once or after a short pause; `Backpressure` if maintenance is behind."""
        level, why = self.stall()
        if level is Stall.NONE:
            return
        self.wake_maintenance()
        with self._maintained:
            if level is Stall.SLOW:
                self._maintained.wait(min(0.001, timeout_s))
            elif not self._maintained.wait_for(lambda: self.stall()[0] is not Stall.STOP, timeout_s):
                raise Backpressure(f"{why}: maintenance is behind, retry later")

    def memory_bytes(self) -> int:
        """Return the memory of rows that are not in files."""
        return sum(memtable.bytes for memtable in self._version.memtables())

    def growing_bytes(self) -> int:
        """Return the memory of rows that are not frozen."""
        active = self._version.active
        return 0 if active is None else active.bytes

    def wake_maintenance(self) -> None:
        """Wake the tasks that can unblock writers."""
        self._wake("flush")
        self._wake("compaction")

    def _notify_maintained(self) -> None:
        with self._maintained:
            self._maintained.notify_all()
        self._on_maintained()

    # -- maintenance: called by the jobs of `maintenance`

    def wants_flush(self) -> bool:
        """Whether no flush runs, and a memtable's worth of rows or many small memtables are frozen."""
        frozen = self._version.frozen
        if self._flushing:
            return False
        return sum(memtable.bytes for memtable in frozen) >= self.settings.memtable_bytes or len(frozen) > 8

    def begin_flush(self) -> tuple[Memtable, tuple[Memtable, ...]] | None:
        """Return the oldest frozen memtables, merged and one by one; None if there are none or a flush is running.

        Their total stays within one memtable's limit (the first may exceed it): a flush needs memory of its own.
        """
        with self._lock:
            if self._flushing or not self._version.frozen:
                return None
            taken, size = 0, 0
            for memtable in reversed(self._version.frozen):
                size += memtable.bytes
                if taken and size > self.settings.memtable_bytes:
                    break
                taken += 1
            self._flushing = oldest = self._version.frozen[-taken:]
        try:
            return merged(oldest[::-1], self.time_us), oldest
        except BaseException:
            self.abandon_flush()
            raise

    def files(self) -> View:
        """Return what is stored in files."""
        return View(replace(self._version, active=None, frozen=()), self._now_us)

    def has_unflushed(self) -> bool:
        """Whether any row is in memory only."""
        version = self._version
        return bool(version.frozen) or (version.active is not None and len(version.active) > 0)

    def end_flush(self, frozen: tuple[Memtable, ...], files: Sequence[TableFile], time_us: int) -> None:
        """Swap the files in and their memtables out."""
        stored = frozen[0].lsn_last
        with self._lock:
            self.stored_time_us = max(self.stored_time_us, time_us)
            version = self._version
            others = tuple(memtable for memtable in version.frozen if memtable not in frozen)
            assert len(others) == len(version.frozen) - len(frozen)
            self._install(
                replace(version, frozen=others, levels=self._with_runs(files), stored=max(version.stored, stored))
            )
            self._flushing = ()
        self._notify_maintained()
        if self.wants_flush():
            self._wake("flush")
        if self.pick() is not None:
            self._wake("compaction")

    def abandon_flush(self) -> None:
        """End a failed flush; its memtables stay frozen."""
        with self._lock:
            self._flushing = ()

    def _with_runs(self, files: Sequence[TableFile]) -> tuple[tuple[Run, ...], ...]:
        levels = self._version.levels
        return ((*arrange(files)[0], *levels[0]), *levels[1:]) if files else levels

    def install_adopted(self, files: Sequence[TableFile], lsn: int, time_us: int) -> None:
        """Add files built outside the tree as the newest runs. Requires: every memtable is flushed."""
        with self._lock:
            version = self._version
            assert not version.frozen
            self.time_us = max(self.time_us, time_us)
            self.stored_time_us = max(self.stored_time_us, time_us)
            self.lsn = lsn
            self._install(
                replace(
                    version,
                    active=self._memtable(lsn),
                    levels=self._with_runs(files),
                    lsn=lsn,
                    stored=lsn,
                    time_us=self.time_us,
                )
            )
        self._notify_maintained()
        self._wake("compaction")

    def pick(self, *, everything: bool = False) -> Compaction | None:
        """Return the next compaction, or None."""
        levels = self._version.levels
        return compact_everything(levels) if everything else pick_compaction(levels, self.settings.limits)

    def end_compaction(self, compaction: Compaction, outputs: Sequence[TableFile]) -> None:
        """Swap outputs in and inputs out; inputs are deleted once they have no readers."""
        inputs = set(compaction.inputs)
        with self._lock:
            version = self._version
            others = [file for file in version.files() if file not in inputs]
            assert len(others) == sum(1 for _ in version.files()) - len(inputs)
            self._install(replace(version, levels=arrange([*others, *outputs])))
        self.use.retire(inputs)
        self._notify_maintained()

    def expires(self) -> bool:
        """Whether some row expires."""
        version = self._version
        return version.expires or (version.active is not None and version.active.expires)

    def wait_for_change(self, timeout_s: float) -> None:
        """Wait until a flush or a compaction ends, or time is up."""
        with self._maintained:
            self._maintained.wait(timeout_s)

    def is_current(self, compaction: Compaction) -> bool:
        """Whether all inputs of a compaction are still in the tree."""
        files = set(self._version.files())
        return all(file in files for file in compaction.inputs)

    def oldest_snapshot(self) -> int:
        """Return the LSN from which on deletes must be kept."""
        with self._lock:
            return min([snapshot.lsn for snapshot in self._snapshots] + [self._version.stored]) + 1

    def pinned_ids(self) -> set[int]:
        """Return the chunk ids of files that a snapshot holds, or that are being replaced."""
        with self._lock:
            versions = [snapshot.version for snapshot in self._snapshots if not snapshot.is_closed]
        return {file.meta.chunk_id for version in versions for file in version.files()} | self.use.ids()

    def release(self, file_names: set[str]) -> None:
        """Close these files; the next read opens them again, wherever they are then."""
        with self._lock:
            versions = [snapshot.version for snapshot in self._snapshots if not snapshot.is_closed]
        for version in (self._version, *versions):
            for file in version.files():
                if file.meta.file_name in file_names:
                    file.forget()

    def close(self) -> None:
        """End all reads, also those of snapshots: from now on another owner may use the files."""
        with self._lock:
            snapshots = list(self._snapshots)
            self._view = View(TREE_CLOSED, self._now_us)  # type: ignore[arg-type]
            self._newest.replace(TREE_CLOSED)  # type: ignore[arg-type]
        for snapshot in snapshots:
            for file in () if snapshot.is_closed else snapshot.version.files():
                file.forget()
            snapshot.end(TREE_CLOSED)
        for file in self._version.files():
            file.forget()

    def statistics(self) -> TreeStatistics:
        version = self._version
        with self._lock:
            snapshots = len(self._snapshots)
        return TreeStatistics(
            lsn=self.lsn,
            stored=version.stored,
            memtable_bytes=self.memory_bytes(),
            active_memtable_bytes=self.growing_bytes(),
            frozen_memtables=len(version.frozen),
            flush_pending=bool(version.frozen),
            level_files=tuple(sum(len(run.files) for run in level) for level in version.levels),
            level_bytes=tuple(sum(run.size_bytes for run in level) for level in version.levels),
            level0_runs=len(version.levels[0]),
            snapshots=snapshots,
            stall=self.stall()[0],
        )
