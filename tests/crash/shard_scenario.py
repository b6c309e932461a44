"""What the tree of every shard goes through between crashes: records, flushes, compactions, collection, reopening.

The history holds every record, and what was told to be stored: a resumed tree may not have stored less. It holds, too,
when work begins and ends: `reached` counts the crashes within a flush, a compaction and a collection, so that a suite
can assert that there were some.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from typing import Generic, TypeVar

from tree_under_test import ShardUnderTest

from penstock.errors import OutcomeUnknown, PenstockError
from penstock.manifest.records import JobKind
from penstock.testing import History, SimulatedDisk, Violation

S = TypeVar("S", bound=ShardUnderTest)


class ShardScenario(ABC, Generic[S]):
    """The part of a scenario that does not depend on what the records hold."""

    records: int
    flush_every: int
    compact_every: int  # every second time, everything

    def __init__(self) -> None:
        self.reached: Counter[str] = Counter()  # crashes, by the work in which they came

    @abstractmethod
    def make(self, disk: SimulatedDisk) -> S: ...

    @abstractmethod
    def write(self, shard: S, history: History, number: int) -> None:
        """Note a record, then write it."""

    @abstractmethod
    def check(self, shard: S, history: History) -> None:
        """Raise `Violation` if the shard does not answer as the noted records say."""

    def run(self, disk: SimulatedDisk, history: History) -> None:
        shard = self.make(disk)
        try:
            for number in range(1, self.records + 1):
                self.write(shard, history, number)
                self._maintain(shard, history, number)
        finally:
            shard.close()
        history.note("closed")

    def _maintain(self, shard: S, history: History, number: int) -> None:
        try:
            if number % self.flush_every == 0:
                self.store(shard, history)
            if number % self.compact_every == 0:
                everything = number % (2 * self.compact_every) == 0
                self.reached["compacted files"] += self.compact(shard, history, everything=everything)
            self.collect(shard, history)
        except (OSError, PenstockError) as error:
            if isinstance(error, OutcomeUnknown) or not shard.disk.is_faulty:
                raise
            shard.clock.advance(120)  # past the backoff of a failed job
        self.check(shard, history)

    def store(self, shard: S, history: History) -> None:
        history.note("begun", "flush")
        shard.flush()
        history.note("stored", shard.tree.stored)

    def compact(self, shard: S, history: History, *, everything: bool = True) -> int:
        """Compact; return how many files that made."""
        before = _files(shard)
        history.note("begun", "compaction")
        shard.compact(everything=everything)
        history.note("compacted")
        return len(_files(shard) - before)

    def missing(self, *work: str) -> list[str]:
        """Return the work in which no crash came. A compaction that found nothing to do is not one."""
        return [name for name in ("compacted files", *work) if not self.reached[name]]

    def collect(self, shard: S, history: History) -> None:
        history.note("begun", "collection")
        shard.collector.collect()
        history.note("collected")

    def reopen(self, disk: SimulatedDisk, history: History) -> S:
        """Open what a crash left, and finish its jobs; what was told to be stored must be."""
        if history.events and history.events[-1][0] == "begun":
            self.reached[history.events[-1][1]] += 1
        shard = self.make(disk)
        try:
            shard.jobs.compensate_orphans()
            shard.maintenance.run(JobKind.FLUSH, JobKind.COMPACTION)
            stored = max([0, *(event[1] for event in history.events if event[0] == "stored")])
            if shard.tree.stored < stored:
                raise Violation(f"stored went back from {stored} to {shard.tree.stored}")
            history.note("stored", shard.tree.stored)
        except BaseException:
            shard.close()
            raise
        return shard


def _files(shard: ShardUnderTest) -> set[str]:
    """The files of a tree, without an operation on its disk."""
    return {file.meta.file_name for file in shard.tree._version.files()}
