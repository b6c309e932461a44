"""A reader that waits until a partition has applied every entry up to an LSN, and may want its state of that moment.

Thread: one thread waits; the thread that applies to the partition resolves the marker, between two entries.
Invariants: (1) a state goes to the reader or is closed, whoever comes first. (2) a wait has a deadline.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

from penstock.host import threads
from penstock.partition.machine import PartitionStateMachine


class Marker:
    """A reader that waits at a position between two entries of a partition."""

    def __init__(self, lsn: int, *, takes_state: bool = False) -> None:
        self.lsn = lsn
        self.is_reached = False
        self.state: Any = None  # a snapshot, or the error that taking it raised
        self.is_abandoned = False
        self._takes_state = takes_state
        self._lock = threading.Lock()  # guards the hand-over of the state
        self._signal = threading.Lock()
        self._signal.acquire()

    def resolve(self, machine: PartitionStateMachine) -> None:
        """Take the state and wake the reader. Requires: nothing is applied to the machine meanwhile."""
        state: Any = None
        if self._takes_state and not self.is_abandoned and not self.is_reached:
            try:
                state = machine.snapshot()
            except Exception as error:  # any: it is the reader's, and no reason to set an entry aside
                threads.raise_interrupt(error)
                state = error
        with self._lock:
            if not self.is_abandoned and not self.is_reached:
                self.state, state = state, None
                self.is_reached = True
        if state is not None and not isinstance(state, Exception):
            state.close()
        with suppress(RuntimeError):  # resolved twice, after an interrupt
            self._signal.release()

    def abandon(self) -> None:
        """Give up: the reader's time is over, or it was interrupted."""
        with self._lock:
            self.is_abandoned = True
            state, self.state = self.state, None
        if state is not None and not isinstance(state, Exception):
            state.close()

    def wait(self, timeout_s: float) -> bool:
        """Sleep until the marker is reached; False if time ran out first."""
        if not self.is_reached:
            self._signal.acquire(timeout=max(0.0, timeout_s))
        return self.is_reached
