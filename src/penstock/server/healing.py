"""Recovers a store whose writes failed, for owners that no program tends: a detached one, and `penstock serve`.

After a failed write or sync a store refuses writes until `recover()`. In a program that opened it, its author decides
when; here nobody would. What was kept is written again once, in a new segment of the journal. If that fails again and
again the owner ends: the next one begins with what is on the disk, and clients send again what they have no answer to.

Thread: one.
"""

from __future__ import annotations

import logging

from penstock.errors import PenstockError
from penstock.host.clock import Clock
from penstock.store.store import Store

logger = logging.getLogger(__name__)

TRIES_MAX = 8
WAIT_S_MIN, WAIT_S_MAX = 0.25, 10.0  # between two tries, doubled each time: half a minute in all


class Healer:
    """Looks after the writes of one store."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._tries = 0  # that failed, one after the other
        self._next_s = 0.0  # no try before

    def heal(self) -> bool:
        """Recover if writes failed and it is time to; False: it is in vain, end this process. Called all the time."""
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
        logger.error("%s: writes failed (%s): it recovers", self._store.path, failure)
        try:
            self._store.recover()
        except (OSError, PenstockError) as error:
            self._tries += 1
            self._next_s = self._clock.monotonic_s() + min(WAIT_S_MIN * 2**self._tries, WAIT_S_MAX)
            logger.error("%s: recovery failed %d times (%s)", self._store.path, self._tries, error)
            return self._tries < TRIES_MAX
        logger.warning("%s: it recovered, and takes writes", self._store.path)
        return True
