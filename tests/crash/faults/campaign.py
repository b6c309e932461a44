"""Runs rounds against stores, holds each store against its model, and counts what failed and who was killed.

A store lives through several rounds, so that what one of them broke shows in the next. One that is wrong is left as it
is, for whoever looks into it, and the next rounds get another.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from faults import process
from faults.actor import QUEUES, TABLES, scratch_of
from faults.history import Dump, Event, Note, Operation, Outcome, Violation, Word, read_history
from faults.model import Model
from faults.plan import ACTORS, ROUNDS_PER_STORE, Round
from faults.process import Ended, Started, Task
from faults.shim import Fault, Shim, build

ROUND_S = 240.0  # the watchdogs in the processes are quicker
NUMBERS = 10_000  # of operations in a round
TOKENS = 6  # sent again after a round
PRINTED_MAX = 3  # violations of one kind in one round


@dataclass
class Report:
    """What a campaign did."""

    seed: int
    rounds: int = 0
    faults: Counter[tuple[str, str, str]] = field(default_factory=Counter)  # call, error, component
    struck: int = 0  # rules that made calls fail, however often
    kills: Counter[str] = field(default_factory=Counter)  # "point" or "time"
    modes: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def count_faults(self, faults: Iterable[Fault]) -> None:
        faults = list(faults)
        self.struck += len({(fault.call, fault.kind, fault.component) for fault in faults if not fault.kills})
        for fault in faults:
            if fault.kills:
                self.kills["point"] += 1
            self.faults[fault.call, fault.kind, fault.component] += 1

    @property
    def kill_count(self) -> int:
        return sum(self.kills.values())

    def reached(self) -> set[tuple[str, str]]:
        """Each call of each component that failed or killed."""
        return {(call, component) for call, _, component in self.faults}

    def show(self) -> str:
        lines = [
            f"seed {self.seed}: {self.rounds} rounds ({_show(self.modes)}) in {self.seconds:.0f} s, "
            f"{self.struck} faults in {self.faults.total()} calls, {self.kill_count} kills ({_show(self.kills)})",
            f"operations: {_show(self.outcomes)}",
        ]
        calls = sorted({(call, component) for call, _, component in self.faults})
        for call, component in calls:
            kinds = {kind: n for (a, kind, b), n in self.faults.items() if (a, b) == (call, component)}
            lines.append(f"  {call:10} {component:9} {_show(Counter(kinds))}")
        lines += [f"  note: {count} x {note}" for note, count in self.notes.most_common(40)]
        lines += [f"VIOLATION {violation}" for violation in self.violations]
        return "\n".join(lines)


def _show(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))


class Nursery:
    """The process that forks the others, and the block they share."""

    def __init__(self, folder: Path) -> None:
        self.shim = Shim(folder / "block", create=True)
        self._process = subprocess.Popen(
            [sys.executable, process.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**self.shim.environment(build(folder)), "PYTHONPATH": os.pathsep.join(sys.path)},
        )

    def start(self, task: Task) -> int:
        started: Started = self._ask(task, Started)
        return started.pid

    def wait(self, pid: int, end_s: float) -> int | None:
        """How a process ended; None if it has not by then."""
        handle = os.pidfd_open(pid)
        try:
            ended, _, _ = select.select([handle], [], [], max(0.0, end_s - time.monotonic()))
        finally:
            os.close(handle)
        if not ended:
            return None
        end: Ended = self._ask(pid, Ended)
        return end.code

    def _ask(self, request: Any, kind: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(msgspec.json.encode(request) + b"\n")
        self._process.stdin.flush()
        return msgspec.json.decode(self._process.stdout.readline(), type=kind)

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(10)
        self._process.stdout.close()


class Campaign:
    """Rounds, one after the other."""

    def __init__(self, folder: Path, seed: int, *, bug: str = "") -> None:
        self._folder = folder
        self._bug = bug
        self._nursery = Nursery(folder)
        self.report = Report(seed)

    def run(self, plans: Iterable[Round], enough: Callable[[Report], bool] = lambda _: False) -> Report:
        """Run rounds until there are no more, or enough was seen."""
        begun_s = time.monotonic()
        trial: Trial | None = None
        try:
            for plan in plans:
                if trial is None or plan.number % ROUNDS_PER_STORE == 0:
                    trial = Trial(self._folder / f"store-{plan.number}", self._nursery, self.report, self._bug)
                if not trial.run(plan):
                    trial = None
                if enough(self.report):
                    break
        finally:
            self.report.seconds = time.monotonic() - begun_s
            self._nursery.close()
        return self.report


class Trial:
    """One store and its model, for some rounds."""

    def __init__(self, folder: Path, nursery: Nursery, report: Report, bug: str) -> None:
        folder.mkdir()
        self._folder, self._nursery, self._report, self._bug = folder, nursery, report, bug
        self._root = str(folder / "store")
        self._model = Model(TABLES, QUEUES, [scratch_of(actor) for actor in ACTORS])
        self._later: list[Path] = []  # histories that the next look must count

    def run(self, plan: Round) -> bool:
        """One round; False if the store is wrong."""
        report, shim = self._report, self._nursery.shim
        report.rounds += 1
        report.modes[plan.mode] += 1
        shim.begin(self._root, plan.rules)
        tasks = list(self._tasks(plan))
        wrong = self._run_tasks(plan, tasks)
        shim.calm()
        faults = shim.faults()
        report.count_faults(faults)
        histories = [*self._later, *(Path(task.history) for task in tasks)]
        wrong += self._look(plan, histories)
        about = [plan, "faults:", *faults, "wrong:", *wrong]
        (self._folder / f"{plan.number:04d}.round").write_text("\n".join(map(str, about)))
        report.violations += [f"{plan.seed} ({plan.mode}): {text}" for text in _some(wrong)]
        return not wrong

    # -- processes

    def _tasks(self, plan: Round) -> Iterable[Task]:
        if plan.mode != "detached":
            actors = ACTORS[:2] if plan.mode == "owner" else ACTORS[:1]
            yield self._task(
                plan, "own", actors, kill_s=plan.owner_kill_s, ending=plan.ending, faults_at_open=plan.faults_at_open,
                serves=plan.mode == "served", compacts=plan.compacts, steps=plan.steps,
            )  # fmt: skip
        if plan.mode != "owner":
            yield self._task(plan, "use", ACTORS[1:3], kill_s=plan.client_kill_s, steps=plan.steps)
            yield self._task(plan, "use", ACTORS[3:], steps=plan.steps)

    def _task(self, plan: Round, role: str, actors: Iterable[str], **options: Any) -> Task:
        name = f"{plan.number:04d}-{role}-{''.join(actors)}"
        return Task(
            role=role,
            root=self._root,
            history=str(self._folder / f"{name}.history"),
            stacks=str(self._folder / f"{name}.stacks"),
            seed=plan.seed,
            actors=list(actors),
            first=(plan.number + 1) * NUMBERS,
            bug=self._bug,
            **options,
        )

    def _run_tasks(self, plan: Round, tasks: list[Task]) -> list[str]:
        """Start all, wait for all; what is wrong with how they ended."""
        end_s = time.monotonic() + ROUND_S
        running: dict[int, Task] = {}
        for task in tasks:
            pid = self._nursery.start(task)
            running[pid] = task
            if task.serves:
                self._wait_until_open(pid, task, end_s)
        owners = {pid: task for pid, task in running.items() if task.role == "own"}
        wrong = [text for pid, task in running.items() if pid not in owners for text in self._wait(pid, task, end_s)]
        for pid, task in owners.items():
            if task.serves:
                _signal(pid, signal.SIGTERM)
            wrong += self._wait(pid, task, end_s)
        if plan.mode != "owner":
            self._end_detached(plan)
        return wrong

    def _wait_until_open(self, pid: int, task: Task, end_s: float) -> None:
        while time.monotonic() < end_s and not self._nursery.shim.killed(pid):
            events = read_history(Path(task.history))
            if Note("opened") in events or any(isinstance(event, Violation) for event in events):
                return
            time.sleep(0.01)

    def _wait(self, pid: int, task: Task, end_s: float) -> list[str]:
        code = self._nursery.wait(pid, end_s)
        if code is None:
            _signal(pid, signal.SIGUSR1)  # shows its stacks
            time.sleep(0.5)
            _signal(pid, signal.SIGKILL)
            self._nursery.wait(pid, time.monotonic() + 10)
            return [f"hangs: {task.role} did not end; see {task.stacks}"]
        if code == -signal.SIGKILL:
            if not self._nursery.shim.killed(pid):
                self._report.kills["time"] += 1
            return []
        if code < 0:
            return [f"{task.role} was ended by signal {-code}; see {task.stacks}"]
        return []

    def _end_detached(self, plan: Round) -> None:
        """Kill the owner that clients started, or leave it to yield to the reader, which a snapshot can hold up."""
        killed = any(fault.kills for fault in self._nursery.shim.faults()) or plan.client_kill_s is not None
        for pid in _owners_of(self._root):
            if plan.number % 2 or killed:
                _signal(pid, signal.SIGKILL)
                self._report.kills["detached"] += 1

    # -- looking

    def _look(self, plan: Round, paths: list[Path]) -> list[str]:
        histories = [read_history(path) for path in paths]
        self._count(histories)
        dump = self._folder / f"{plan.number:04d}.dump"
        tokens = _tokens(histories)[-TOKENS:]
        ending = "kill" if plan.kills_reader else "close"
        task = self._task(plan, "read", ACTORS, ending=ending, tokens=tokens, dump=str(dump))
        task = msgspec.structs.replace(task, first=task.first + NUMBERS // 2, bug="")
        wrong = self._wait(self._nursery.start(task), task, time.monotonic() + ROUND_S)
        reading = read_history(Path(task.history))
        wrong += [f"{event.actor}: {event.text}" for event in reading if isinstance(event, Violation)]
        if not dump.exists():
            return ["cannot be read", *wrong]
        self._later = [Path(task.history)]
        return wrong + self._model.check(histories, msgspec.json.decode(dump.read_bytes(), type=Dump))

    def _count(self, histories: list[list[Event]]) -> None:
        for events in histories:
            for event in events:
                if isinstance(event, Note):
                    self._report.notes[event.text] += 1
                elif isinstance(event, Outcome):
                    self._report.outcomes[event.word] += 1


def _some(wrong: list[str]) -> list[str]:
    """Of each kind of violation the first few."""
    kinds: Counter[str] = Counter()
    few = []
    for text in wrong:
        kind = " ".join(word for word in text.split() if word.isalpha())[:30]
        kinds[kind] += 1
        if kinds[kind] <= PRINTED_MAX:
            few.append(text)
    return few if len(few) == len(wrong) else [*few, f"and {len(wrong) - len(few)} like these"]


def _tokens(histories: list[list[Event]]) -> list[tuple[Operation, Word]]:
    """The last operations with tokens, and what their senders know of them."""
    latest: dict[tuple[str, int], tuple[Operation, Word]] = {}
    for events in histories:
        words = {(event.actor, event.number): event.word for event in events if isinstance(event, Outcome)}
        for operation in events:
            if not isinstance(operation, Operation) or operation.token is None:
                continue
            word = words.get((operation.actor, operation.number), "unknown")
            before = latest.get((operation.actor, operation.token))
            if before is None or before[1] != "done":
                latest[operation.actor, operation.token] = operation, _merge_words(before, word)
    return list(latest.values())


def _merge_words(before: tuple[Operation, Word] | None, word: Word) -> Word:
    if word in ("done", "duplicate"):
        return "done"
    return "unknown" if word == "unknown" or (before is not None and before[1] == "unknown") else word


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _owners_of(root: str) -> list[int]:
    """Processes that clients started to own a store."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"penstock.server" in words and root.encode() in words:
            pids.append(int(path.parent.name))
    return pids
