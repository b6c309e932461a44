"""Linearizable reads: a quorum confirms that this member leads, and all that was committed is applied, before a read.

Each confirmation is an entry of the members in the journal (a barrier). Reads that wait at the same time share one; but
a read never takes one that began before it, because a write may have been acknowledged in between.

Thread: any.
Invariant: `confirm` returns after a barrier that began after it was called.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.errors import Closed, PenstockError, RetryLater, WaitExpired
from penstock.host import threads
from penstock.host.clock import Clock
from penstock.server.work import OwnerLeaving

CONFIRM_S = 10.0


class ReadConfirmation:
    """Confirms reads of one store."""

    def __init__(self, barrier: Callable[[], int], await_applied: Callable[[int, float], object], clock: Clock) -> None:
        """`barrier` returns an LSN at or past every acknowledged record; `await_applied` waits for it here."""
        self._barrier, self._await_applied, self._clock = barrier, await_applied, clock
        self._changed = threads.condition("server.confirming")
        self._begun = self._ended = 0  # guarded by _changed: numbers of barriers
        self._running = False  # guarded by _changed
        self._outcome: int | PenstockError = 0  # guarded by _changed: of the last barrier that ended

    def confirm(self) -> None:
        """Wait until what was acknowledged before this call can be read here.

        `OwnerLeaving` if this member does not lead.
        """
        deadline_s = self._clock.monotonic_s() + CONFIRM_S
        try:
            lsn = self._shared_barrier(deadline_s)
            self._await_applied(lsn, max(0.0, deadline_s - self._clock.monotonic_s()))
        except (Closed, RetryLater):
            raise OwnerLeaving(untouched=True) from None  # the client asks the next leader

    def _shared_barrier(self, deadline_s: float) -> int:
        with self._changed:
            number = self._begun + 1
            while self._running and self._ended < number:
                rest_s = deadline_s - self._clock.monotonic_s()
                if rest_s <= 0:
                    raise WaitExpired(f"no quorum confirmed this read within {CONFIRM_S:g} s: try again")
                self._changed.wait(rest_s)
            if self._ended >= number:
                return self._result()
            self._running, self._begun = True, number
        outcome: int | PenstockError = Closed("the barrier was interrupted: try again")
        try:
            outcome = self._barrier()
        except PenstockError as error:
            outcome = error
        finally:
            with self._changed:
                self._running, self._ended, self._outcome = False, number, outcome
                self._changed.notify_all()
        with self._changed:
            return self._result()

    def _result(self) -> int:
        if isinstance(self._outcome, PenstockError):
            raise Closed(str(self._outcome)) from self._outcome
        return self._outcome
