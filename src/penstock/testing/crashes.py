"""Run a scenario through every crash, every crash during recovery, and every fault crossed with crashes.

A scenario has two halves. `run` uses the thing under test on an empty disk. `resume` opens what a crash left, checks
it against the history, and goes on using it. Both write into a `History` what they tried before trying it, and what
they were told after being told. The history is cut at the image, so `resume` sees just what the outside world knew
at the moment of the crash.

What `resume` *sees* it must put into the history too: whatever was shown to someone has to survive the next crash.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from penstock.errors import CorruptionError, Invalid, PenstockError
from penstock.testing.disk import Fault, FaultKind, Image, Mode, SimulatedDisk


class Violation(AssertionError):
    """A promise was broken: the message says which, and `where` says at which crash."""


class History:
    """What has been tried and told so far, in order."""

    def __init__(self, events: Sequence[tuple[Any, ...]] = ()) -> None:
        self.events: list[tuple[Any, ...]] = list(events)

    def note(self, *event: Any) -> None:
        """Add an event: a word and its values."""
        self.events.append(event)

    def cut(self, length: int) -> History:
        """The history as it was when it had this many events."""
        return History(self.events[:length])


class Scenario(Protocol):
    """A workload, its recovery and its checker."""

    def run(self, disk: SimulatedDisk, history: History) -> None:
        """Use the thing on an empty disk. Under faults it may end with an OSError or a PenstockError."""

    def resume(self, disk: SimulatedDisk, history: History) -> None:
        """Open what is on the disk, raise `Violation` if it breaks a promise, and go on using it."""


@dataclass(frozen=True, kw_only=True)
class Faults:
    """Which faults to inject, and how finely to cross them with crashes."""

    kinds: tuple[FaultKind, ...] = ("eio", "enospc", "short", "rot")
    every: int = 1  # inject at every n-th operation ...
    operations: tuple[str, ...] = ()  # ... of these names only; all if empty
    images_every: int = 1  # and take every n-th crash image after it


@dataclass
class CrashReport:
    """What was tried."""

    operations: int = 0
    crashes: int = 0
    crashes_in_recovery: int = 0
    faults: int = 0
    labels: set[str] = field(default_factory=set)


def explore(
    scenario: Scenario,
    *,
    modes: tuple[Mode, ...] = ("strict", "torn", "kept", "restart"),
    torn_seeds: int = 1,
    recovery_modes: tuple[Mode, ...] = ("strict", "torn"),
    depth: int = 2,
    faults: Faults | None = None,
) -> CrashReport:
    """Try every crash (and fault); raise the first `Violation`, saying where it happened."""
    explorer = _Explorer(scenario, modes, recovery_modes, torn_seeds)
    explorer.crashes(depth)
    if faults is not None:
        explorer.faults(faults, depth)
    return explorer.report


class _Explorer:
    def __init__(
        self, scenario: Scenario, modes: tuple[Mode, ...], recovery_modes: tuple[Mode, ...], torn_seeds: int
    ) -> None:
        self._scenario = scenario
        self._modes = modes
        self._recovery_modes = recovery_modes
        self._torn_seeds = torn_seeds
        self._labels: dict[int, str] = {}  # of each operation of the run that changes something
        self.report = CrashReport()

    def crashes(self, depth: int) -> None:
        disk, history = self._run(())
        self.report.operations = disk.operations
        self._labels = {image.operation: image.label.split()[0] for image in disk.images[:-1]}
        self.report.labels = set(self._labels.values())
        self._crash_everywhere(disk.images, history, depth, "")

    def faults(self, faults: Faults, depth: int) -> None:
        for kind in faults.kinds:
            for at in self._places(faults):
                self.report.faults += 1
                disk, history = self._run((Fault(at, kind),))
                after = [image for image in disk.images if image.operation >= at]
                images = [*after[at % faults.images_every :: faults.images_every], disk.images[-1]]
                self._crash_everywhere(images, history, depth, f"{kind} at {at}, ")

    def _places(self, faults: Faults) -> list[int]:
        if not faults.operations:
            return list(range(1, self.report.operations + 1, faults.every))
        named = [at for at, label in self._labels.items() if label in faults.operations]
        if not named:
            raise Invalid(f"no operation of the scenario is one of {faults.operations}: it has {self.report.labels}")
        return named[:: faults.every]

    def _run(self, faults: tuple[Fault, ...]) -> tuple[SimulatedDisk, History]:
        disk, history = SimulatedDisk(faults=faults), History()
        disk.on_image = lambda: len(history.events)
        try:
            self._scenario.run(disk, history)
        except CorruptionError as error:
            if not disk.damaged:
                raise Violation(f"sound data was called corrupt [{faults}]") from error
        except (OSError, PenstockError):
            if all(fault.kind == "short" for fault in faults):  # a short write is no failure
                raise
        disk.images.append(disk.image())
        return disk, history

    def _crash_everywhere(self, images: Sequence[Image], history: History, depth: int, where: str) -> None:
        recovering = "then " in where
        for image, mode, seed in self._choices(images, self._recovery_modes if recovering else self._modes):
            place = f"{where}{mode} crash (seed {seed}) before operation {image.operation} ({image.label})"
            disk, told = image.restore(mode, seed), history.cut(image.mark)
            if depth > 1:
                disk.on_image = lambda told=told: len(told.events)
            self._resume(disk, told, place)
            self.report.crashes += not recovering
            self.report.crashes_in_recovery += recovering
            if depth > 1:
                disk.images.append(disk.image())
                self._crash_everywhere(disk.images, told, depth - 1, f"{place}, then ")

    def _resume(self, disk: SimulatedDisk, told: History, place: str) -> None:
        try:
            self._scenario.resume(disk, told)
        except Violation as violation:
            raise Violation(f"{violation} [{place}]") from violation
        except CorruptionError:
            if not disk.damaged:  # it is the right answer to bit rot, and to nothing else
                raise Violation(f"sound data was called corrupt [{place}]") from None
        except Exception as error:
            raise Violation(f"recovery failed: {error!r} [{place}]") from error

    def _choices(self, images: Sequence[Image], modes: tuple[Mode, ...]) -> Iterator[tuple[Image, Mode, int]]:
        seen: set[tuple[int, int]] = set()
        for image in images:
            for mode in modes:
                if mode == "strict":  # nothing synced and nothing told since the last one: the same disk
                    if (image.synced_version, image.mark) in seen:
                        continue
                    seen.add((image.synced_version, image.mark))
                for seed in range(self._torn_seeds if mode == "torn" else 1):
                    yield image, mode, seed
