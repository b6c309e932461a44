"""What the tree of every shard goes through between crashes: records, flushes, compactions, collection, reopening.

The history holds every record, and what was told to be stored: a resumed tree may not have stored less. It holds, too,
when work begins and ends: `reached` counts the crashes within a flush, a compaction and a collection, so that a suite
can assert that there were some.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from typing import Generic, TypeVar

from tree_place import TreePlace

from penstock.errors import OutcomeUnknown, PenstockError
from penstock.manifest.records import JobKind
from penstock.testing import History, SimulatedDisk, Violation

P = TypeVar("P", bound=TreePlace)


class PlaceScenario(ABC, Generic[P]):
    """The part of a scenario that does not depend on what the records hold."""

    records: int
    flush_every: int
    compact_every: int  # every second time, everything

    def __init__(self) -> None:
        self.reached: Counter[str] = Counter()  # crashes, by the work in which they came

    @abstractmethod
    def make(self, disk: SimulatedDisk) -> P: ...

    @abstractmethod
    def write(self, place: P, history: History, number: int) -> None:
        """Note a record, then write it."""

    @abstractmethod
    def check(self, place: P, history: History) -> None:
        """Raise `Violation` if the shard does not answer as the noted records say."""

    def run(self, disk: SimulatedDisk, history: History) -> None:
        place = self.make(disk)
        try:
            for number in range(1, self.records + 1):
                self.write(place, history, number)
                self._maintain(place, history, number)
        finally:
            place.close()
        history.note("closed")

    def _maintain(self, place: P, history: History, number: int) -> None:
        try:
            if number % self.flush_every == 0:
                self.store(place, history)
            if number % self.compact_every == 0:
                everything = number % (2 * self.compact_every) == 0
                self.reached["compacted files"] += self.compact(place, history, everything=everything)
            self.collect(place, history)
        except (OSError, PenstockError) as error:
            if isinstance(error, OutcomeUnknown) or not place.disk.is_faulty:
                raise
            place.clock.advance(120)  # past the backoff of a failed job
        self.check(place, history)

    def store(self, place: P, history: History) -> None:
        history.note("begun", "flush")
        place.flush()
        history.note("stored", place.tree.stored)

    def compact(self, place: P, history: History, *, everything: bool = True) -> int:
        """Compact; return how many files that made."""
        before = _files(place)
        history.note("begun", "compaction")
        place.compact(everything=everything)
        history.note("compacted")
        return len(_files(place) - before)

    def missing(self, *work: str) -> list[str]:
        """Return the work in which no crash came. A compaction that found nothing to do is not one."""
        return [name for name in ("compacted files", *work) if not self.reached[name]]

    def collect(self, place: P, history: History) -> None:
        history.note("begun", "collection")
        place.collector.collect()
        history.note("collected")

    def reopen(self, disk: SimulatedDisk, history: History) -> P:
        """Open what a crash left, and finish its jobs; what was told to be stored must be."""
        if history.events and history.events[-1][0] == "begun":
            self.reached[history.events[-1][1]] += 1
        place = self.make(disk)
        try:
            place.jobs.compensate_orphans()
            place.maintenance.run(JobKind.FLUSH, JobKind.COMPACTION)
            stored = max([0, *(event[1] for event in history.events if event[0] == "stored")])
            if place.tree.stored < stored:
                raise Violation(f"stored went back from {stored} to {place.tree.stored}")
            history.note("stored", place.tree.stored)
        except BaseException:
            place.close()
            raise
        return place


def _files(place: TreePlace) -> set[str]:
    """The files of a tree, without an operation on its disk."""
    return {file.meta.file_name for file in place.tree._version.files()}
