"""What a tree promises across crashes, as a scenario: a flush or a compaction loses nothing and leaves nothing.

A tree has no journal of its own. The history holds every edit (`edit`), and what was told to be stored (`stored`): a
resumed tree must answer, after the edits above its `stored` are applied again, exactly what the model answers, and
`stored` must not have gone back. That catches a lost file and a file counted twice: edits hold merges.
"""

from __future__ import annotations

from typing import Any

from tree_place import Model, Place, Write

from penstock.errors import OutcomeUnknown, PenstockError
from penstock.lsm.rows import NEVER
from penstock.manifest.records import JobKind
from penstock.testing import History, SimulatedDisk, Violation


def one() -> bytes:
    return (1).to_bytes(8, "little")


def batch(number: int) -> list[Write]:
    return [
        Write("put", b"p%d" % (number % 7), b"v%d" % number * 8),
        Write("add_i64", b"count", one()),
        Write("append", b"log%d" % (number % 2), b"%d," % number),
        Write("delete", b"p%d" % ((number + 3) % 7)),
        Write("put", b"t%d" % number, b"x", NEVER if number % 2 else 1_700_000_000_000_000 + 5_000_000),
        *([Write("delete_range", b"p5", b"p7")] if number % 4 == 0 else []),
    ]


class TreeScenario:
    """Edits, flushes, compactions, collection, reopening."""

    def run(self, disk: SimulatedDisk, history: History) -> None:
        place = Place(disk, grace_s=0)
        try:
            for number in range(1, 10):
                self._write(place, history, number)
                self._maintain(place, history, number)
        finally:
            place.close()
        history.note("closed")

    def _write(self, place: Place, history: History, number: int) -> None:
        history.note("edit", number, place.clock.time_us())
        place.write(batch(number))

    def _maintain(self, place: Place, history: History, number: int) -> None:
        try:
            place.maintenance.flush(place.tree)
            history.note("stored", place.tree.stored)
            if number % 3 == 0:
                place.maintenance.compact(place.tree, everything=number % 6 == 0)
            place.collector.collect()
        except (OSError, PenstockError) as error:
            if isinstance(error, OutcomeUnknown) or not place.disk.is_faulty:
                raise
            place.clock.advance(120)  # past the backoff of a failed job
        self._check(place, history)

    def resume(self, disk: SimulatedDisk, history: History) -> None:
        place = Place(disk, grace_s=0)
        try:
            place.jobs.compensate_orphans()
            place.maintenance.run(JobKind.FLUSH, JobKind.COMPACTION)
            stored = max([0, *(value for word, value, *_ in _events(history) if word == "stored")])
            if place.tree.stored < stored:
                raise Violation(f"stored went back from {stored} to {place.tree.stored}")
            history.note("stored", place.tree.stored)
            for word, *values in history.events:
                if word == "edit" and values[0] > place.tree.stored:
                    place.write_at(batch(values[0]), values[0], values[1])
            self._check(place, history)
            place.collector.collect()
            place.clock.advance(1)
            place.collector.collect()
            self._no_strays(place)
            self._write(place, history, 1 + max([0, *(v for w, v, *_ in _events(history) if w == "edit")]))
            place.maintenance.flush(place.tree)
            history.note("stored", place.tree.stored)
            place.maintenance.compact(place.tree, everything=True)
            place.collector.collect()
            self._check(place, history)
            self._no_strays(place)
        finally:
            place.close()

    def _check(self, place: Place, history: History) -> None:
        model = Model()
        for word, *values in history.events:
            if word == "edit":
                model.write(batch(values[0]), values[1])
        expected = model.live(max(place.clock.time_us(), place.tree.time_us))
        found = dict(place.tree.scan())
        if found != expected:
            wrong = {k: (found.get(k), expected.get(k)) for k in {*found, *expected} if found.get(k) != expected.get(k)}
            raise Violation(f"the tree answers otherwise than it was told (found, expected): {wrong}")

    def _no_strays(self, place: Place) -> None:
        listed = {file.meta.file_name.rsplit("/", 1)[-1] for file in place.tree._version.files()}
        names = {*listed, *(name.replace(".sst", ".idx") for name in listed)}
        strays = set(place.files()) - names
        if strays:
            raise Violation(f"files that nobody lists are left: {sorted(strays)}")


def _events(history: History) -> list[tuple[Any, ...]]:
    return [event for event in history.events if len(event) > 1]
