"""Run a scenario through every crash, every crash during recovery, and every fault crossed with crashes.

A scenario has two halves. `run` uses the system under test on an empty disk. `resume` opens what a crash left, checks
it against the history, and continues to use it. Both record in a `History` each request before they make it, and each
reply after they get it. The history is cut at the image, so `resume` sees exactly what clients knew at the crash.

`resume` must record what it *reads*, too: what a reader has seen has to survive the next crash.

A scenario that no longer reaches a step tests less than it claims, and still passes. So the report counts the steps
reached, by the next operation, as in `unlink /store/journal/#.log`: a suite asserts that `missing` returns nothing.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Protocol, TypeVar

from penstock.errors import CorruptionError, Invalid, PenstockError
from penstock.host.clock import SystemClock
from penstock.testing.disk import Fault, FaultKind, SimulatedDisk
from penstock.testing.disk_image import Image, Mode

T = TypeVar("T")


class Violation(AssertionError):
    """A promise was broken: the message says which, and at which crash.

    >>> raise Violation("b'ada' was acknowledged, and is lost")
    Traceback (most recent call last):
    penstock.testing.crashes.Violation: b'ada' was acknowledged, and is lost
    """


class Skipped(Exception):
    """Raised by a `resume` that skips an image: it is not counted."""


class History:
    """The requests and replies so far, in order.

    >>> history = History()
    >>> history.note("put", b"ada")
    >>> history.events
    [('put', b'ada')]
    """

    def __init__(self, events: Sequence[tuple[Any, ...]] = ()) -> None:
        self.events: list[tuple[Any, ...]] = list(events)

    def note(self, *event: Any) -> None:
        """Add an event: a word and its values.

        >>> History().note("put", b"ada")
        """
        self.events.append(event)

    def cut(self, length: int) -> History:
        """Return the history as it was when it had `length` events.

        >>> History([("put", b"ada"), ("flushed",)]).cut(1).events
        [('put', b'ada')]
        """
        return History(self.events[:length])


class Scenario(Protocol):
    """A workload, its recovery and its checker.

    >>> class KeepsAWord:
    ...     def run(self, disk, history):
    ...         file = disk.create("/word")
    ...         disk.fsync_dir("/")
    ...         file.pwrite(b"word", 0)
    ...         file.fsync()
    ...         history.note("kept")
    ...
    ...     def resume(self, disk, history):
    ...         if ("kept",) in history.events and disk.open("/word").pread(4, 0) != b"word":
    ...             raise Violation("the word is lost")
    >>> explore(KeepsAWord()).crashes > 3
    True
    """

    def run(self, disk: SimulatedDisk, history: History) -> None:
        """Use the system on an empty disk. Under faults it may end with an OSError or a PenstockError."""

    def resume(self, disk: SimulatedDisk, history: History) -> None:
        """Open what is on the disk, raise `Violation` if it breaks a promise, and continue to use it."""


@dataclass(frozen=True, kw_only=True)
class Faults:
    """Which faults to inject, and how finely to cross them with crashes.

    >>> Faults(kinds=("eio",), every=10).images_every
    1
    """

    kinds: tuple[FaultKind, ...] = ("eio", "enospc", "short", "rot")
    every: int = 1  # inject at every n-th operation ...
    operations: tuple[str, ...] = ()  # ... of these names only; all if empty
    images_every: int = 1  # and take every n-th crash image after it


@dataclass(frozen=True, kw_only=True)
class SearchBudget:
    """How long to look, and where first: the points are taken in a random order until the time is over.

    >>> SearchBudget(seconds=1.5, seed=7).seed
    7
    """

    seconds: float
    seed: int


@dataclass
class CrashReport:
    """What was tested. Operations are counted by name and path, with `#` for numbers.

    >>> class MakesAFile:
    ...     def run(self, disk, history):
    ...         disk.create("/file")
    ...
    ...     def resume(self, disk, history):
    ...         disk.exists("/file")
    >>> explore(MakesAFile()).missing("create /file")
    []
    """

    operations: int = 0
    crashes: int = 0  # different ones: in the disk that is left, or in what clients knew
    crashes_in_recovery: int = 0
    faults: int = 0
    labels: set[str] = field(default_factory=set)
    crashed: Counter[str] = field(default_factory=Counter)  # the operation before which a crash was recovered from
    crashed_in_recovery: Counter[str] = field(default_factory=Counter)
    faulted: Counter[str] = field(default_factory=Counter)  # the operation that failed in a run

    def missing(self, *steps: str) -> list[str]:
        """Return the steps before which there was no crash. A step is a name and, after a space, part of a path.

        >>> CrashReport().missing("create /journal/")
        ['create /journal/']
        """
        return absent(self.crashed, *steps)

    def missing_in_recovery(self, *steps: str) -> list[str]:
        """Return the same for crashes during recovery.

        >>> CrashReport().missing_in_recovery("fsync /journal/")
        ['fsync /journal/']
        """
        return absent(self.crashed_in_recovery, *steps)


def absent(reached: Counter[str], *steps: str) -> list[str]:
    """Return the steps that were not reached."""

    def is_at(step: str, label: str) -> bool:
        name, _, path = step.partition(" ")
        operation, _, operation_path = label.partition(" ")
        return operation == name and path in operation_path

    return [step for step in steps if not any(is_at(step, label) for label, count in reached.items() if count)]


def steps(images: Sequence[Image]) -> Counter[str]:
    """Count the operations before which a disk recorded an image."""
    return Counter(_step(image.label) for image in images)


def _step(label: str) -> str:
    return re.sub("[0-9]+", "#", label)


def explore(
    scenario: Scenario,
    *,
    modes: tuple[Mode, ...] = ("strict", "torn", "kept", "restart"),
    torn_seeds: int = 1,
    recovery_modes: tuple[Mode, ...] = ("strict", "torn"),
    depth: int = 2,
    every: int = 1,
    faults: Faults | None = None,
    budget: SearchBudget | None = None,
) -> CrashReport:
    """Test every crash (and fault); raise the first `Violation`, which says where it happened.

    With `every`, only each n-th crash of a run is tested, and in each mode the first one before each step. With a
    `budget`, as many as there is time for, half of it for faults if there are some.

    >>> class Forgets:
    ...     def run(self, disk, history):
    ...         disk.create("/file")  # and no fsync of its folder
    ...         history.note("created")
    ...
    ...     def resume(self, disk, history):
    ...         if ("created",) in history.events and not disk.exists("/file"):
    ...             raise Violation("the file is lost")
    >>> explore(Forgets())  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    penstock.testing.crashes.Violation: ...the file is lost...
    """
    explorer = _Explorer(scenario, modes, recovery_modes, torn_seeds, every=every, budget=budget)

    def run() -> CrashReport:
        explorer.crashes(depth, share=1.0 if faults is None else 0.5)
        if faults is not None:
            explorer.faults(faults, depth)
        return explorer.report

    return _in_a_thread(run)


def _in_a_thread(act: Callable[[], T]) -> T:
    """Call `act` in a thread of its own: from the main one, each call that no signal may interrupt would start one."""
    outcome: list[T | BaseException] = []

    def run() -> None:
        try:
            outcome.append(act())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run, name="explore", daemon=True)
    thread.start()
    thread.join()
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]


def search_order(points: Sequence[T]) -> Sequence[T]:
    """Return crash or fault points in the order to try them.

    The default is that of the run, so that the first violation is the earliest; a test may replace it.
    """
    return points


class _Explorer:
    def __init__(
        self,
        scenario: Scenario,
        modes: tuple[Mode, ...],
        recovery_modes: tuple[Mode, ...],
        torn_seeds: int,
        *,
        every: int,
        budget: SearchBudget | None,
    ) -> None:
        self._scenario = scenario
        self._modes = modes
        self._recovery_modes = recovery_modes
        self._torn_seeds = torn_seeds
        self._every, self._count = every, 0
        self._budget = budget
        self._chance = Random(budget.seed) if budget else None
        self._clock = SystemClock()
        self._began_s = self._clock.monotonic_s()
        self._share = 1.0
        self._tested: set[tuple[str, Mode]] = set()  # steps
        self._labels: dict[int, str] = {}  # of each operation of the run that changes something
        self.report = CrashReport()

    def crashes(self, depth: int, *, share: float) -> None:
        self._share = share
        disk, history = self._run(())
        self.report.operations = disk.operations
        self._labels = {image.operation: image.label for image in disk.images[:-1]}
        self.report.labels = {label.split()[0] for label in self._labels.values()}
        self._crash_everywhere(disk.images, history, depth, "")
        self._share = 1.0

    def _is_over(self) -> bool:
        if self._budget is None:
            return False
        return self._clock.monotonic_s() - self._began_s >= self._budget.seconds * self._share

    def _order(self, points: Sequence[T]) -> Sequence[T]:
        if self._chance is None:
            return search_order(points)
        return self._chance.sample(points, len(points))

    def faults(self, faults: Faults, depth: int) -> None:
        for kind in faults.kinds:
            for at in self._order(self._fault_points(faults)):
                if self._is_over():
                    return
                self.report.faults += 1
                self.report.faulted[_step(self._labels.get(at, "read"))] += 1
                disk, history = self._run((Fault(at, kind),))
                after = [image for image in disk.images if image.operation >= at]
                images = [*after[at % faults.images_every :: faults.images_every], disk.images[-1]]
                self._crash_everywhere(images, history, depth, f"{kind} at {at}, ")

    def _fault_points(self, faults: Faults) -> list[int]:
        if not faults.operations:
            return list(range(1, self.report.operations + 1, faults.every))
        named = [at for at, label in self._labels.items() if label.split()[0] in faults.operations]
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
            if all(fault.kind == "short" for fault in faults):  # a short write is not a failure
                raise
        disk.images.append(disk.image())
        return disk, history

    def _crash_everywhere(
        self, images: Sequence[Image], history: History, depth: int, where: str, *, recovering: bool = False
    ) -> None:
        reached = self.report.crashed_in_recovery if recovering else self.report.crashed
        modes = self._recovery_modes if where.endswith("then ") else self._modes
        first = self._chance.randrange(1 << 30) if self._chance else 0  # of the torn ones: new ones in each campaign
        torn = range(first, first + self._torn_seeds)
        seeds = [(mode, seed) for mode in modes for seed in (torn if mode == "torn" else range(1))]
        tried: dict[tuple[int, int], bool] = {}  # by the disk and what clients knew: whether it was resumed
        for image in self._order(images):
            if self._is_over():
                return
            for mode, seed in seeds:
                disk = image.restore(mode, seed)
                state = (disk.state(), image.mark)
                if state not in tried and (recovering or self._takes(_step(image.label), mode)):
                    point = f"{where}{mode} crash (seed {seed}) before operation {image.operation} ({image.label})"
                    tried[state] = self._crash(disk, history.cut(image.mark), depth, point, recovering=recovering)
                reached[_step(image.label)] += tried.get(state, False)

    def _takes(self, step: str, mode: Mode) -> bool:
        """Whether to test the next crash."""
        self._count += 1
        is_first = (step, mode) not in self._tested
        self._tested.add((step, mode))
        return is_first or not self._count % self._every

    def _crash(self, disk: SimulatedDisk, past: History, depth: int, where: str, *, recovering: bool) -> bool:
        """Resume after this crash; return False if the scenario skipped it."""
        if depth > 1:
            disk.on_image = lambda: len(past.events)
        resumed = self._resume(disk, past, where)
        self.report.crashes += resumed and not recovering
        self.report.crashes_in_recovery += resumed and recovering
        if depth > 1:
            disk.images.append(disk.image())
            self._crash_everywhere(disk.images, past, depth - 1, f"{where}, then ", recovering=resumed)
        return resumed

    def _resume(self, disk: SimulatedDisk, past: History, where: str) -> bool:
        try:
            self._scenario.resume(disk, past)
        except Skipped:
            return False
        except Violation as violation:
            raise Violation(f"{violation} [{where}]") from violation
        except CorruptionError:
            if not disk.damaged:  # the right answer to bit rot, and to nothing else
                raise Violation(f"sound data was called corrupt [{where}]") from None
        except Exception as error:
            raise Violation(f"recovery failed: {error!r} [{where}]") from error
        return True
