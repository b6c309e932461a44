"""Recovers a store whose writes failed, for owners without a program of their own: detached ones, and `penstock serve`.

After a failed write or sync a store refuses writes until `recover()`. A program that opened it decides when to call
that; here the healer does. The unwritten batches are written once more, to a new journal segment. If that keeps failing
the owner ends: the next one starts from what is on the disk, and clients resend what was not answered.

Thread: one.
"""

from __future__ import annotations

import logging

from penstock.errors import PenstockError
from penstock.host.clock import Clock
from penstock.store.store import Store

logger = logging.getLogger(__name__)

TRIES_MAX = 8
WAIT_S_MIN, WAIT_S_MAX = 0.25, 10.0  # between two tries, doubled each time: half a minute in total


class Healer:
    """Recovers one store when its writes fail."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._tries = 0  # failed in a row
        self._next_s = 0.0  # the earliest time of the next try

    def heal(self) -> bool:
        """Recover if writes failed and a try is due; False if the process must end. Called continually."""
        try:
            self._store.check_folder()
        except PenstockError as error:
            logger.error("%s", error)
            return False
        failure = self._store.port.failure
        if failure is None:
            self._tries = 0
            return True
        if self._clock.monotonic_s() < self._next_s:
            return True
        logger.error("%s: writes failed (%s): recovering", self._store.path, failure)
        try:
            self._store.recover()
        except (OSError, PenstockError) as error:
            self._tries += 1
            self._next_s = self._clock.monotonic_s() + min(WAIT_S_MIN * 2**self._tries, WAIT_S_MAX)
            logger.error("%s: recovery failed %d times (%s)", self._store.path, self._tries, error)
            return self._tries < TRIES_MAX
        logger.warning("%s: recovered, and accepts writes", self._store.path)
        return True
