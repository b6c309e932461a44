"""What a queue promises, as scenarios for `penstock.testing.explore`: alone, and under a store's journal.

Alone, the history holds, in order: `append` (first sequence, payloads) before it is tried; `synced` (next sequence)
when told; `trim` (sequence) before a trim is tried; `cut` (next sequence) when a recovery was told to be done; `state`
(first, {sequence: payload}) for what an opened queue showed.

In a store the history is the journal: `record` (lsn, time, payloads) is durable the moment it is noted; `stored` (lsn)
when told; `trim` (sequence) when journalled.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.errors import DiskFull, Poisoned
from penstock.host.files import FileSystem
from penstock.queue import Messages, PersistentQueue, QueueSettings
from penstock.testing import FakeClock, History, SimulatedDisk, Violation

SETTINGS = QueueSettings(file_bytes=1600, file_age_us=3_600_000_000, allocate_bytes=512, index_bytes=128)
FOLDER = "/queue"
START_US = 1_769_040_000_000_000  # 2026-01-22, at midnight
HOUR_US = 3_600_000_000


def open_queue(
    fs: FileSystem, seed: int, *, cut_after_lsn: int | None = None, time_us: int = START_US
) -> PersistentQueue:
    return PersistentQueue.open(
        fs,
        FOLDER,
        random=random.Random(seed),
        clock=FakeClock(time_us=time_us),
        settings=SETTINGS,
        cut_after_lsn=cut_after_lsn,
    )


def observe(queue: PersistentQueue) -> tuple[int, dict[int, bytes]]:
    """Everything that can be read."""
    messages: dict[int, bytes] = {}
    at = first = queue.first_sequence
    while batches := queue.read(at, limit_messages=3, limit_bytes=500):
        for batch in batches:
            messages.update(enumerate(batch.payloads.to_pylist(), batch.first))
            at = batch.next
    if at != queue.next_sequence:
        raise Violation(f"reading ends at {at}, the next sequence is {queue.next_sequence}")
    return first, messages


@dataclass
class Model:
    """What the world may find, worked out from what it was told."""

    possible: dict[int, set[bytes]] = field(default_factory=dict)
    floor: int = 1  # all below was acknowledged ...
    vouched: int = 1  # ... and below here a later record says so on the disk itself
    front: int = 1  # ... and may be missing only below here

    @classmethod
    def of(cls, history: History) -> Model:
        model = cls()
        for word, *values in history.events:
            getattr(model, "_" + word)(*values)
        return model

    def _append(self, first: int, payloads: list[bytes]) -> None:
        for sequence, payload in enumerate(payloads, first):
            self.possible.setdefault(sequence, set()).add(payload)

    def _synced(self, until: int) -> None:
        if until > self.floor:
            self.vouched, self.floor = self.floor, until

    def _trim(self, before: int) -> None:
        self.front = max(self.front, before)

    def _cut(self, until: int) -> None:
        self.possible = {sequence: p for sequence, p in self.possible.items() if sequence < until}

    def _state(self, first: int, messages: dict[int, bytes]) -> None:
        self.possible = {sequence: {payload} for sequence, payload in messages.items()}
        self.floor = max(messages, default=first - 1) + 1
        self.front = max(self.front, first)

    def check(self, first: int, messages: dict[int, bytes], *, damaged: bool) -> None:
        floor = self.vouched if damaged else self.floor  # rot in the last batch looks like a torn tail
        until = first + len(messages)
        if list(messages) != list(range(first, until)):
            raise Violation(f"sequences have gaps: {list(messages)}")
        if first > self.front and self.floor > self.front:
            raise Violation(f"acknowledged messages below {first} are lost (trimmed to {self.front})")
        if until < floor:
            raise Violation(f"acknowledged messages are lost: the queue ends before {until}, {floor} was acknowledged")
        for sequence, payload in messages.items():
            if payload not in self.possible.get(sequence, set()):
                raise Violation(f"message {sequence} was never written so: {payload[:40]!r}")


class User:
    """Somebody who uses a queue and writes down what happens."""

    def __init__(self, queue: PersistentQueue, history: History, tag: str, time_us: int = START_US) -> None:
        self.queue, self.history, self.tag, self.time_us = queue, history, tag, time_us
        self.count = 0

    def append(self, *sizes: int) -> None:
        payloads = []
        for size in sizes:
            self.count += 1
            payloads.append(f"{self.tag}{self.count}:".encode().ljust(size, b"x"))
        self.history.note("append", self.queue.statistics().appended, payloads)
        self.time_us += 60_000_000
        self.queue.append(Messages.of(payloads, [b"k"] * len(payloads)), time_us=self.time_us)

    def write(self, *batches: tuple[int, ...]) -> None:
        for sizes in batches:
            self.append(*sizes)
        self.sync()

    def sync(self) -> None:
        self.history.note("synced", self.queue.sync())
        self.look()

    def look(self) -> None:
        """Read what was written, without the end of the file it came from."""
        model = Model.of(self.history)
        for batch in self.queue.read(max(self.queue.first_sequence, self.queue.next_sequence - 4)):
            for sequence, payload in enumerate(batch.payloads.to_pylist(), batch.first):
                if payload not in model.possible.get(sequence, set()):
                    raise Violation(f"reading back message {sequence} gives {payload[:40]!r}")

    def trim(self, before: int) -> None:
        self.history.note("trim", before)
        self.queue.trim(before_sequence=before)

    def later(self, hours: int) -> None:
        self.time_us += hours * HOUR_US

    def close(self) -> None:
        """A clean end vouches for all, if it is told."""
        next_sequence = self.queue.sync()
        self.history.note("synced", next_sequence)
        self.queue.close()

    def recover(self) -> None:
        self.queue.recover()
        self.history.note("cut", self.queue.next_sequence)


class QueueScenario:
    """Creation, append, roll by size and by age, trim, shutdown, reopening; after a fault: recover and go on."""

    def run(self, disk: SimulatedDisk, history: History) -> None:
        queue = open_queue(disk, 1)
        user = User(queue, history, "a")
        steps: list[Callable[[], None]] = [
            lambda: user.write((10,)),
            lambda: user.write((0, 7, 300), (8,)),
            lambda: user.write((700, 1), (400,)),  # rolls by size
            lambda: user.append(20, 300),
            lambda: user.later(30),
            lambda: user.write((33,), (600,)),  # rolls by age, into the next day
            lambda: user.trim(4),
            lambda: user.write((900,), (900,)),
            lambda: user.trim(queue.statistics().appended),  # all of it
            lambda: user.write((25,), (5, 5, 5)),
        ]
        for step in steps:
            self.step(user, step)
        user.close()
        queue = open_queue(disk, 2)
        history.note("state", *observe(queue))
        again = User(queue, history, "b", user.time_us)
        self.step(again, lambda: again.write((50,)))
        self.step(again, lambda: again.append(440, 440))
        self.step(again, lambda: again.append(440))  # may tear so that a later one is whole

    def step(self, user: User, step: Callable[[], None]) -> None:
        try:
            step()
        except DiskFull:
            return
        except (OSError, Poisoned):
            user.recover()

    def resume(self, disk: SimulatedDisk, history: History) -> None:
        queue = open_queue(disk, len(history.events))
        first, messages = observe(queue)
        Model.of(history).check(first, messages, damaged=disk.damaged)
        history.note("state", first, messages)  # shown to someone: it must survive the next crash
        if queue.statistics().appended != queue.next_sequence:
            raise Violation("an opened queue shows less than it holds")
        self.go_on(queue, User(queue, history, f"r{len(history.events)}-", START_US + 48 * HOUR_US))

    def go_on(self, queue: PersistentQueue, user: User) -> None:
        user.write((440,))  # as long as one that may have been torn: what stands behind it must not join in
        user.write((0, 400), (900,))
        queue.collect()
        user.write((3,))


class StoreScenario:
    """The same files under a journal: after a crash the journal is applied again, to the same sequences."""

    def run(self, disk: SimulatedDisk, history: History) -> None:
        queue = open_queue(disk, 1, cut_after_lsn=0)
        sizes = [(10,), (300, 5), (700,), (500, 1), (), (600,), (40,), (900,), (30, 30), (900,), (20,)]
        for number, batch in enumerate(sizes, 1):
            payloads = [f"{number}.{n}:".encode().ljust(size, b"x") for n, size in enumerate(batch)]
            history.note("record", 3 * number, START_US + number * HOUR_US // 3, payloads)  # durable in the journal
            queue = self.step(disk, history, queue, number in (3, 7, 8))
            if number in (5, 9):
                history.note("trim", 4)
                queue.trim(before_sequence=4)
        queue.close()
        history.note("stored", 33)

    def step(self, disk: SimulatedDisk, history: History, queue: PersistentQueue, checkpoint: bool) -> PersistentQueue:
        for _ in range(3):
            try:
                replay(queue, history)
                if checkpoint:
                    queue.sync()
                    history.note("stored", queue.stored_lsn)
                return queue
            except DiskFull:
                continue
            except (OSError, Poisoned):
                queue.recover()
        raise Poisoned("it fails again and again")

    def resume(self, disk: SimulatedDisk, history: History) -> None:
        stored = max((event[1] for event in history.events if event[0] == "stored"), default=0)
        queue = open_queue(disk, len(history.events), cut_after_lsn=stored)
        if queue.stored_lsn < stored:
            raise Violation(f"stored is {queue.stored_lsn}, {stored} was told")
        self.check(queue, history, up_to=queue.stored_lsn, damaged=disk.damaged)
        replay(queue, history)
        self.check(queue, history, up_to=1 << 60, damaged=disk.damaged)
        lsn = 3 + max((event[1] for event in history.events if event[0] == "record"), default=0)
        history.note("record", lsn, START_US + 9 * HOUR_US, [b"resumed".ljust(440, b"y")] * 2)
        replay(queue, history)
        queue.sync()
        history.note("stored", queue.stored_lsn)
        queue.collect()
        self.check(queue, history, up_to=1 << 60, damaged=disk.damaged)

    def check(self, queue: PersistentQueue, history: History, *, up_to: int, damaged: bool) -> None:
        """The queue holds the records up to an LSN, at the sequences they had from the beginning."""
        expected: dict[int, bytes] = {}
        front = max((event[1] for event in history.events if event[0] == "trim"), default=1)
        for word, *values in history.events:
            if word == "record" and values[0] <= up_to:
                for payload in values[2]:
                    expected[len(expected) + 1] = payload
        first, messages = observe(queue)
        if first > max(front, 1) or {s: p for s, p in expected.items() if s >= first} != messages:
            raise Violation(f"the queue holds {sorted(messages)} from {first}, the journal {len(expected)} messages")


def replay(queue: PersistentQueue, history: History) -> None:
    """Apply what the journal has and the queue has not."""
    done = queue.last_lsn
    for word, *values in list(history.events):
        if word == "record" and values[0] > done and values[2]:
            queue.append(Messages.of(values[2]), lsn=values[0], time_us=values[1])
