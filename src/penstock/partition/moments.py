"""How partitions are read at one LSN, and how readers wait for those that are late.

A reader takes the turn for a moment. Partitions with nothing waiting give their state at once. For the others it leaves
a marker behind the entries dispatched so far; the thread that applies takes the state when it gets there. So all states
are of one LSN, however late a partition is, and nothing is copied. A partition that is paused or frozen answers at
once, with an error of its own.

Thread: any, without a lock; every wait has a deadline.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from penstock.errors import (
    Closed,
    NotFound,
    PenstockError,
    ProcessLimit,
    WaitExpired,
)
from penstock.host import threads
from penstock.journal.partitions import PartitionId, partition_id
from penstock.partition.ledger_records import TableInfo, dropped_table
from penstock.partition.marker import Marker
from penstock.partition.partition import Partition
from penstock.partition.roster import POLL_S, Roster

T = TypeVar("T")
WAIT_S = 60.0  # how long a reader waits for a partition that is late and makes progress


class Moments(Roster):
    """Reads partitions at one LSN."""

    @abstractmethod
    def finish(self) -> None:
        """Finish a record that an interrupt left half applied, so that the state is between two records."""

    def catch_up(self, partition: Partition, lsn: int | None = None, timeout_s: float = WAIT_S) -> None:
        """Wait until a partition has applied every record dispatched so far, or up to `lsn`; raise if it cannot."""
        with self.turn:
            self.finish()
            lsn = self.published if lsn is None else min(lsn, self.published)
            if not partition.late or partition.has_applied(lsn):
                return
            marker = Marker(lsn)
            self._mark(partition, marker)
        self._await(partition, marker, self._clock.monotonic_s() + timeout_s)

    def wait_for(self, lsn: int, tables: Sequence[TableInfo], timeout_s: float) -> int:
        """Wait until tables have applied every record up to an LSN; return the LSN that all of them have reached.

        Requires: `published` is at least `lsn`. An idle partition is passed at once: see ADR 0013.
        """
        deadline_s, reached = self._clock.monotonic_s() + timeout_s, self.published
        for info in tables:
            for shard in range(info.shards):
                number = partition_id(info.table_id, shard)
                if number in self._unopened:
                    self.partition(number)
                partition = self._partitions.get(number)
                if partition is not None and partition.late:
                    self.catch_up(partition, lsn, deadline_s - self._clock.monotonic_s())
                    reached = lsn
        return reached

    def _mark(self, partition: Partition, marker: Marker) -> None:
        """Add a marker in LSN order. Requires: the turn."""
        markers = partition.markers
        if any(other.is_abandoned for other in markers):  # of a partition that hangs none is ever reached
            partition.markers = markers = deque(other for other in markers if not other.is_abandoned)
        index = len(markers)
        while index and markers[index - 1].lsn > marker.lsn:
            index -= 1
        markers.insert(index, marker)

    def _await(self, partition: Partition, marker: Marker, deadline_s: float) -> None:
        """Wait for a marker; raise at once if the partition is paused, frozen or dropped. Requires: no lock."""
        try:
            while not marker.is_reached:
                self._refuse_waiting(partition)
                left_s = deadline_s - self._clock.monotonic_s()
                if left_s <= 0:
                    raise WaitExpired(
                        f"shard {partition.descriptor.shard} of {partition.descriptor.name} has not applied record "
                        f"{marker.lsn} in time ({len(partition.backlog)} entries wait): retry later"
                    )
                if not partition.is_claimed:
                    self.backlogs.schedule(partition)
                    self.backlogs.workers.staff()
                marker.wait(min(left_s, POLL_S, self.admission.settings.stall_s))
        except BaseException:
            marker.abandon()
            raise

    def _refuse_waiting(self, partition: Partition) -> None:
        if partition.is_dropped:
            table = partition.descriptor.table_id
            raise dropped_table(table, self.ledger.dropped_name(table))
        if self._closed:
            raise Closed("the store was closed: open it again")
        refusal = self.admission.reading_refused(partition)
        if refusal is not None:
            raise refusal

    def freeze(
        self, partitions: Sequence[Partition], also: Callable[[int], T], timeout_s: float = WAIT_S
    ) -> tuple[int, list[Any], T]:
        """Return one LSN, the states of partitions as of it, and what `also(lsn)` returned at that moment."""
        states, result = list[Any](), None
        deadline_s = self._clock.monotonic_s() + timeout_s
        try:
            with self.turn:
                self.finish()
                lsn, result = self.published, also(self.published)
                for partition in partitions:
                    states.append(self._state_of(partition, lsn))
            for index, partition in enumerate(partitions):
                if isinstance(states[index], Marker):
                    self._await(partition, states[index], deadline_s)
                    states[index] = _state_in(states[index])
        except BaseException:
            _discard(states)
            raise
        return lsn, states, result

    def _state_of(self, partition: Partition, lsn: int) -> Any:
        """Return the state of a partition, or a marker for it if the partition is late. Requires: the turn."""
        if not partition.late:
            return partition.machine.snapshot()
        marker = Marker(lsn, takes_state=True)
        self._mark(partition, marker)
        return marker

    def snapshot(self, timeout_s: float = WAIT_S) -> tuple[int, list[TableInfo], dict[PartitionId, Any]]:
        """Return one LSN, all tables, and each shard's state at that LSN, or an error for a shard that is behind."""
        failed: dict[PartitionId, PenstockError] = {}
        states: dict[PartitionId, Any] = {}
        deadline_s = self._clock.monotonic_s() + timeout_s
        try:
            while True:
                with self.turn:
                    self.finish()
                    tables = self.ledger.tables()
                    numbers = [partition_id(info.table_id, shard) for info in tables for shard in range(info.shards)]
                    closed = [number for number in numbers if number not in self._partitions and number not in failed]
                    if not closed:
                        for number in numbers:
                            states[number] = self._state_or_error(number, failed)
                        lsn = self.ledger.tree.lsn
                        break
                if self.backlogs.workers.count:
                    for number in closed:  # all at once: those that hang are waited for together
                        self.begin_opening(number)
                for number in closed:  # without the turn: their files may hang
                    self._open_or_note(number, failed)
            for number, state in states.items():
                if isinstance(state, Marker):
                    states[number] = self._awaited_state(self._partitions.get(number), state, deadline_s)
        except BaseException:
            _discard(states.values())
            raise
        return lsn, tables, states

    def _state_or_error(self, number: PartitionId, failed: dict[PartitionId, PenstockError]) -> Any:
        """Return the state of a shard, a marker for it, or its error. Requires: the turn."""
        partition = self._partitions.get(number)
        if partition is None:
            return failed[number]
        try:
            return self.admission.reading_refused(partition) or self._state_of(partition, self.ledger.tree.lsn)
        except PenstockError as error:
            return error

    def _awaited_state(self, partition: Partition | None, marker: Marker, deadline_s: float) -> Any:
        """Return the state that a marker got, or the error of a shard that cannot be read: the others still can."""
        if partition is None:  # dropped meanwhile
            return _state_in(marker) if marker.is_reached else NotFound("this table was dropped: take another snapshot")
        try:
            self._await(partition, marker, deadline_s)
            return _state_in(marker)
        except Closed:
            raise
        except PenstockError as error:
            return error

    def _open_or_note(self, number: PartitionId, failed: dict[PartitionId, PenstockError]) -> None:
        """Open a shard for a snapshot; if that fails, note its error: the others can still be read."""
        try:
            self.partition(number)
        except ProcessLimit as error:
            if number not in self._unopened:
                raise
            reason = f"is behind ({error}): it is tried again"
            failed[number] = self._paused(number, reason)
        except Closed:
            raise
        except PenstockError as error:
            failed[number] = error
        except Exception as error:
            threads.raise_interrupt(error)
            failed[number] = self._paused(number, f"cannot be opened ({error})")


def _state_in(marker: Marker) -> Any:
    """Return the state that a marker got; raise the error if taking it failed."""
    if isinstance(marker.state, Exception):
        raise marker.state
    return marker.state


def _discard(states: Iterable[Any]) -> None:
    """Close states and give up markers that nobody will use."""
    for state in states:
        if isinstance(state, Marker):
            state.abandon()
        elif not isinstance(state, PenstockError):
            state.close()
