"""What a log promises, as a scenario for `penstock.testing.explore`.

The history holds, in order: `append` (index, body) before it is tried; `synced` (index) when told; `front` and `back`
(index) before a truncation is tried; `cut` (index) when a truncation from the back, or a recovery, was told to be done;
`state` (first, {index: (incarnation, body)}) of an opened log.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.errors import DiskFull, Poisoned
from penstock.host.files import FileSystem
from penstock.log import Log, LogSettings
from penstock.testing import History, SimulatedDisk, Violation

SETTINGS = LogSettings(segment_bytes=1400, allocate_bytes=512, index_bytes=128)
FOLDER = "/store/journal"


@dataclass
class Model:
    """What the world may find, worked out from what it was told."""

    possible: dict[int, set[bytes]] = field(default_factory=dict)  # bodies that may stand at an index
    floor: int = 0  # all up to here was acknowledged ...
    vouched: int = 0  # ... and up to here a later record says so on the disk itself
    front: int = 1  # ... and may be missing only below here
    named: dict[tuple[int, int], bytes] = field(default_factory=dict)  # (incarnation, index) -> body, as it was shown

    @classmethod
    def of(cls, history: History) -> Model:
        model = cls()
        for word, *values in history.events:
            getattr(model, "_" + word)(*values)
        return model

    def _append(self, index: int, body: bytes) -> None:
        self.possible.setdefault(index, set()).add(body)

    def _synced(self, index: int) -> None:
        if index > self.floor:
            self.vouched, self.floor = self.floor, index

    def _front(self, index: int) -> None:
        self.front = max(self.front, index)

    def _back(self, index: int) -> None:
        self.floor = min(self.floor, index)
        self.vouched = min(self.vouched, index)

    def _cut(self, index: int) -> None:
        self.floor = min(self.floor, index)
        self.vouched = min(self.vouched, index)
        self.possible = {i: bodies for i, bodies in self.possible.items() if i <= index}

    def _state(self, first: int, records: dict[int, tuple[int, bytes]]) -> None:
        self.possible = {index: {body} for index, (_, body) in records.items()}
        for index, (incarnation, body) in records.items():
            self.named[incarnation, index] = body
        self.floor = max(records, default=first - 1)
        self.front = max(self.front, first)

    def check(self, first: int, records: dict[int, tuple[int, bytes]], *, damaged: bool) -> None:
        floor = self.vouched if damaged else self.floor  # rot in the last batch looks like a torn tail
        last = first - 1 + len(records)
        if list(records) != list(range(first, last + 1)):
            raise Violation(f"indexes have gaps: {list(records)}")
        if first > self.front and self.floor >= self.front:
            raise Violation(f"acknowledged records below {first} are lost (truncated to {self.front})")
        if last < floor:
            raise Violation(f"acknowledged records are lost: the log ends at {last}, {floor} was acknowledged")
        for index, (incarnation, body) in records.items():
            if body not in self.possible.get(index, set()):
                raise Violation(f"record {index} was never written so: {body[:40]!r}")
            if self.named.setdefault((incarnation, index), body) != body:
                raise Violation(f"record ({incarnation}, {index}) means two things")


class User:
    """Somebody who uses a log and writes down what happens."""

    def __init__(self, log: Log, history: History, tag: str) -> None:
        self.log, self.history, self.tag = log, history, tag
        self.count = 0
        self.meanings: dict[tuple[int, int], bytes] = {}

    def append(self, *sizes: int) -> None:
        bodies = []
        for index, size in enumerate(sizes, self.log.last + 1):
            self.count += 1
            bodies.append(f"{self.tag}{self.count}:".encode().ljust(size, b"x"))
            self.history.note("append", index, bodies[-1])
        self.log.append(bodies)

    def write(self, *batches: tuple[int, ...]) -> None:
        for sizes in batches:
            self.append(*sizes)
        self.sync()

    def sync(self) -> None:
        self.history.note("synced", self.log.sync())
        self.look()

    def look(self) -> None:
        """Read what was written: right bytes, and names that mean one thing."""
        model = Model.of(self.history)
        for record in self.log.cursor(max(self.log.first, self.log.synced - 3)):
            if record.body not in model.possible.get(record.index, set()):
                raise Violation(f"reading back record {record.index} gives {record.body[:40]!r}")
            if self.meanings.setdefault((record.incarnation, record.index), record.body) != record.body:
                raise Violation(f"record ({record.incarnation}, {record.index}) means two things")

    def front(self, before: int) -> None:
        self.history.note("front", before)
        self.log.truncate_front(before)

    def back(self, after: int) -> None:
        self.history.note("back", after)
        self.log.truncate_back(after)
        self.history.note("cut", after)

    def recover(self) -> None:
        self.log.recover()
        self.history.note("cut", self.log.last)


class LogScenario:
    """Append, batches, roll, sync, truncation both ways, reopening; after a fault: recover and go on."""

    def open(self, fs: FileSystem, seed: int) -> Log:
        return Log.open(fs, FOLDER, random=random.Random(seed), settings=SETTINGS)

    def run(self, disk: SimulatedDisk, history: History) -> None:
        log = self.open(disk, 1)
        user = User(log, history, "a")
        steps: list[Callable[[], None]] = [
            lambda: user.write((10,)),
            lambda: user.write((0, 7, 300)),
            lambda: user.write((8,), (700, 1)),
            lambda: user.write((600,), (90, 90)),
            lambda: user.append(20, 500),
            lambda: user.back(log.last - 1),
            lambda: user.write((33,)),
            lambda: user.back(log.last - 3),
            lambda: user.write((40,), (41,)),
            lambda: user.write((900,), (900,)),
            lambda: user.front(log.last - 1),
            lambda: user.write((25,), (5, 5, 5)),
        ]
        for step in steps:
            self._step(user, step)
        log.close()
        log = self.open(disk, 2)
        history.note("state", *observe(log))
        user = User(log, history, "b")
        self._step(user, lambda: user.write((50,)))
        self._step(user, lambda: user.append(440, 440, 440))  # may tear so that a later one is whole

    def _step(self, user: User, step: Callable[[], None]) -> None:
        try:
            step()
        except DiskFull:
            return
        except (OSError, Poisoned):
            user.recover()

    def resume(self, disk: SimulatedDisk, history: History) -> None:
        log = self.open(disk, len(history.events))
        first, records = observe(log)
        Model.of(history).check(first, records, damaged=disk.damaged)
        history.note("state", first, records)  # shown to someone: it must survive the next crash
        if log.synced != log.last or log.last != first - 1 + len(records):
            raise Violation("an opened log shows less than it holds")
        user = User(log, history, f"r{len(history.events)}-")
        user.meanings = dict(Model.of(history).named)
        user.append(440)  # as long as one that may have been torn: what stands behind it must not join in
        user.sync()
        user.append(0, 400)
        user.sync()


def observe(log: Log) -> tuple[int, dict[int, tuple[int, bytes]]]:
    return log.first, {record.index: (record.incarnation, record.body) for record in log}
