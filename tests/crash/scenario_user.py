"""Somebody who uses a store in a scenario and notes what happens. After a failure: recover, and continue."""

from __future__ import annotations

from collections.abc import Callable

from penstock.errors import PenstockError
from penstock.store.store import Store
from penstock.testing import FakeClock, History


class ScenarioUser:
    """Each event is noted with a number before it is tried, then as `told` if it was acknowledged."""

    def __init__(self, store: Store, history: History, clock: FakeClock) -> None:
        self.store, self.history, self.clock = store, history, clock
        self._count = max([0, *(v[0] for w, *v in history.events if w not in ("told", "never", "time", "fed"))])

    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.history.note("time", self.clock.time_us())

    def maintain(self, act: Callable[[], object]) -> None:
        """Work that users do not see: it may fail."""
        try:
            act()
        except (OSError, PenstockError):
            self._expect_fault()
            self.advance(120)  # past the backoff of a failed job
            self._mend()

    def _try(self, word: str, *values: object, act: Callable[[], object], flush: bool = True) -> None:
        self._count += 1
        self.history.note(word, self._count, *values)
        before = self.store._coordinator.last
        try:
            act()
        except (OSError, PenstockError):
            self._expect_fault()
            if self.store._coordinator.last == before:
                self.history.note("never", self._count)
            self._mend()
        if flush:
            self._acknowledge()

    def _acknowledge(self) -> None:
        self.history.note("told", self._count)

    def _expect_fault(self) -> None:
        """Where no fault was injected nothing fails: a step that always did would be covered by nothing."""
        if not self.store._fs.is_faulty:  # type: ignore[attr-defined]
            raise  # noqa: PLE0704 - called while an error is handled

    def _mend(self) -> None:
        self.store.recover()
        self.store.flush()
