"""An open partition: its state machine, its own log, and the fields that say how far it is and who works on it.

Thread: any; the dispatcher's turn guards every field, unless it says otherwise. `backlog` changes them.
Invariant: `late` is True while an entry waits.
"""

from __future__ import annotations

import copy
import threading
from collections import deque
from collections.abc import Callable

from penstock.errors import PartitionPaused, PenstockError, Restore
from penstock.journal.tracker import SegmentedWatermarks
from penstock.lsm.tree import Tree
from penstock.partition.admission import Reservation
from penstock.partition.machine import Entry, PartitionDescriptor, PartitionStateMachine
from penstock.partition.marker import Marker
from penstock.partition.spill import SpillLog


class Partition:
    """An open partition and its backlog."""

    def __init__(self, descriptor: PartitionDescriptor, machine: PartitionStateMachine, spill: SpillLog) -> None:
        self.descriptor = descriptor
        self.machine = machine
        self.spill = spill
        self.opener: Callable[[Entry], Entry] | None = None  # opens sealed sections; None: the table is not encrypted
        self.backlog: deque[Entry] = deque()  # durable and not applied
        self.backlog_bytes = 0
        self.deferred_from: int | None = None  # entries from this LSN up to `highest` wait outside memory
        self.deferred_operations = self.deferred_bytes = 0
        self.admitted: deque[Reservation] = deque()  # writes that are not dispatched; guarded by the admission's lock
        self.admitted_bytes = 0
        self.highest = machine.applied
        self.late = False  # entries wait or an apply failed: readers wait, or are refused. Read without a lock
        self.guarded = False  # writers must call `PartitionAdmission.admit`; read without a lock
        self.is_draining = False  # its table takes no new rows; then it is guarded, too
        self.slow_tree: Tree | None = None  # its maintenance is behind: writers are slowed. Read without a lock
        self.claim: threading.Thread | None = None  # the thread that applies the backlog
        self.is_scheduled = False  # a worker will claim it; a hint
        self.is_dropped = False
        self.is_storing = False  # a checkpoint writes its files, or hangs in them
        self.progress_s = 0.0  # when an entry was last applied or begun, or the backlog began
        self.markers: deque[Marker] = deque()  # readers that wait, in LSN order
        self.first_error: Exception | None = None  # of an apply that failed outside the backlog
        self.failures = 0  # consecutive
        self.failures_total = 0  # applies that failed since the partition was opened
        self.out_of_space = False  # the cause of the last failure
        self.retry_at_s = 0.0
        self.error: Exception | None = None  # of the last failure
        self.refusal: PenstockError | None = None  # why writes are refused until `resume`

    @property
    def is_claimed(self) -> bool:
        """Whether another thread applies the backlog. A claim of this one is what an interrupt left behind."""
        return self.claim is not None and self.claim is not threading.current_thread()

    @property
    def behind(self) -> PenstockError | None:
        """Why the partition cannot be read: an acknowledged write could not be applied. None if it can."""
        if not self.failures:
            return None
        if isinstance(self.error, Restore):
            return copy.copy(self.error)  # the caller has to restore a file: the error names it
        descriptor = self.descriptor
        return self.refusal or PartitionPaused(
            f"shard {descriptor.shard} of {descriptor.name} is behind after a failure ({self.error}): it is tried "
            "again",
            descriptor.partition,
            descriptor.name,
            descriptor.shard,
            "throttled",
        )

    def unguard(self, guards_all: bool) -> None:
        """Let writers pass without a check, unless this partition, or `guards_all`, requires one."""
        self.guarded = guards_all
        # Read after that, because there is no lock: a thread that sets one of these sets `guarded` afterwards.
        if self.is_draining or self.slow_tree is not None or self.failures:
            self.guarded = True

    def has_applied(self, lsn: int) -> bool:
        """Whether it has applied every entry up to an LSN, although later ones wait. Requires: the turn."""
        first = self.first_waiting
        return first is not None and first > lsn and not self.failures

    @property
    def first_waiting(self) -> int | None:
        """The LSN of the oldest entry that is not applied; None if all are."""
        try:
            return self.backlog[0].lsn
        except IndexError:
            return self.deferred_from

    @property
    def waiting_operations(self) -> int:
        """The number of entries that are durable and not applied."""
        return len(self.backlog) + self.deferred_operations

    @property
    def waiting_bytes(self) -> int:
        return self.backlog_bytes + self.deferred_bytes

    @property
    def is_used(self) -> bool:
        """Whether a thread works in its files."""
        return self.is_claimed or self.is_storing

    @property
    def watermarks(self) -> SegmentedWatermarks:
        applied = self.machine.applied
        return SegmentedWatermarks(min(self.machine.stored, applied), applied, self.highest, self.highest)
