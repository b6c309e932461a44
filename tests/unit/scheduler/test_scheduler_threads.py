"""The scheduler with its own threads: concurrency, lock order, shutdown, exit."""

from __future__ import annotations

import gc
import itertools
import random
import subprocess
import sys
import threading
from collections import Counter

import pytest

from penstock.errors import Backpressure, Closed, Invalid
from penstock.scheduler import task_table
from penstock.scheduler.scheduler import Scheduler, SchedulerSettings
from penstock.scheduler.task import Outcome, TaskContext
from penstock.testing.locks import LockOrderChecker

WAIT_S = 20.0  # only ever waited in full by a test that fails


class Blocking:
    """A task that says when it runs and goes on when it is let go."""

    priority = 0
    runs_after = ()

    def __init__(self, name: str, *, obedient: bool = False) -> None:
        self.name = name
        self.interval_s = 1_000.0
        self.began = threading.Event()
        self.let_go = threading.Event()
        self.ended = threading.Event()
        self._obedient = obedient

    def execute(self, context: TaskContext) -> Outcome:
        self.began.set()
        (context.shutdown if self._obedient else self.let_go).wait(WAIT_S)
        self.ended.set()
        return None


def worker_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("penstock-scheduler")]


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> object:
    yield
    for thread in worker_threads():
        thread.join(WAIT_S)
    assert worker_threads() == []


def test_a_timer_runs_a_task_again_and_again() -> None:
    class Ticking(Blocking):
        def execute(self, context: TaskContext) -> Outcome:
            if context.run_id == 5:
                self.ended.set()
            return None

    task = Ticking("ticking")
    task.interval_s = 0.005
    with Scheduler() as scheduler:
        scheduler.register(task)
        assert task.ended.wait(WAIT_S)


def test_no_more_runs_at_a_time_than_workers_and_the_urgent_one_next() -> None:
    first, second = Blocking("first"), Blocking("second")
    low, high = Blocking("low"), Blocking("high")
    high.priority = 3
    with Scheduler(settings=SchedulerSettings(workers=2)) as scheduler:
        scheduler.register(first).register(second)
        assert first.began.wait(WAIT_S)
        assert second.began.wait(WAIT_S)
        scheduler.register(low).register(high)
        assert scheduler.statistics().workers_busy == 2
        assert not low.began.is_set()
        assert not high.began.is_set()
        first.let_go.set()
        assert high.began.wait(WAIT_S)
        assert not low.began.is_set()
        second.let_go.set()
        high.let_go.set()
        assert low.began.wait(WAIT_S)
        low.let_go.set()


def test_a_failing_task_does_not_keep_the_others_from_running() -> None:
    class Failing(Blocking):
        def execute(self, context: TaskContext) -> Outcome:
            raise SystemExit("this must not end the only worker")

    good = Blocking("good")
    good.let_go.set()
    with Scheduler(settings=SchedulerSettings(workers=1)) as scheduler:
        scheduler.register(Failing("bad")).register(good)
        assert good.ended.wait(WAIT_S)
    assert scheduler.statistics().tasks["bad"].failures == 1


def test_no_wake_up_is_lost() -> None:
    """Everything produced before a wake-up is seen by a run after it, with no timer to help."""
    produced = itertools.count(1)
    latest = [0]
    position = [0]
    all_seen = threading.Event()
    rounds, producers = 300, 4

    class Consuming(Blocking):
        def execute(self, context: TaskContext) -> Outcome:
            position[0] = latest[0]
            if position[0] == rounds * producers:
                all_seen.set()
            return None

    with Scheduler() as scheduler:
        scheduler.register(Consuming("consuming"))
        lock = threading.Lock()

        def produce() -> None:
            for _ in range(rounds):
                with lock:
                    latest[0] = next(produced)
                scheduler.wake("consuming")

        runners = [threading.Thread(target=produce) for _ in range(producers)]
        for runner in runners:
            runner.start()
        for runner in runners:
            runner.join(WAIT_S)
        assert all_seen.wait(WAIT_S), position


def test_stress_under_the_lock_order_checker() -> None:
    """Many tasks and callers at once: no two runs of one task overlap, nothing spawned is lost, no order of locks
    that could deadlock, and no lock held while a task runs."""
    checker = LockOrderChecker()
    with checker.installed():
        scheduler = Scheduler(settings=SchedulerSettings(workers=6, spawned_waiting_max=50, retry_s_min=0.001))
    inside: Counter[str] = Counter()
    overlaps: list[str] = []
    spawned = itertools.count()
    accepted = itertools.count()

    class Busy(Blocking):
        def execute(self, context: TaskContext) -> Outcome:
            checker.check_io(self.name)
            inside[self.name] += 1
            if inside[self.name] > 1:
                overlaps.append(self.name)
            chance = random.Random(f"{self.name} {context.run_id}")
            scheduler.wake(f"task-{chance.randrange(12)}")
            scheduler.statistics()
            inside[self.name] -= 1
            if chance.random() < 0.2:
                raise OSError("now and then")
            return chance.choice([None, 0.0, 0.001])

    for number in range(12):
        task = Busy(f"task-{number}")
        task.interval_s = 0.002
        task.runs_after = tuple(f"task-{n}" for n in range(number) if n % 3 == 0)  # type: ignore[assignment]
        scheduler.register(task)
    stop = threading.Event()

    def call(seed: int) -> None:
        chance = random.Random(seed)
        while not stop.is_set():
            scheduler.trigger(f"task-{chance.randrange(12)}")
            scheduler.statistics()
            try:
                scheduler.spawn(lambda: next(spawned))
                next(accepted)
            except Backpressure:
                stop.wait(0.001)

    callers = [threading.Thread(target=call, args=(seed,)) for seed in range(4)]
    scheduler.start()
    for caller in callers:
        caller.start()
    stop.wait(1.5)
    stop.set()
    for caller in callers:
        caller.join(WAIT_S)
    assert scheduler.shutdown(WAIT_S).clean
    assert checker.violations == []
    assert overlaps == []
    statistics = scheduler.statistics()
    assert next(spawned) == next(accepted) == statistics.spawned_runs
    assert all(task.runs > task.failures for task in statistics.tasks.values())


def test_shutdown_waits_for_a_task_that_runs() -> None:
    task = Blocking("flush")
    scheduler = Scheduler().start()
    scheduler.register(task)
    assert task.began.wait(WAIT_S)
    threading.Timer(0.05, task.let_go.set).start()
    assert scheduler.shutdown(WAIT_S).clean
    assert task.ended.is_set()
    assert worker_threads() == []


def test_a_task_that_heeds_the_signal_ends_early() -> None:
    task = Blocking("flush", obedient=True)
    with Scheduler() as scheduler:
        scheduler.register(task)
        assert task.began.wait(WAIT_S)
    assert task.ended.is_set()


def test_shutdown_does_not_wait_for_ever_for_a_task_that_hangs() -> None:
    hung, fine = Blocking("hung"), Blocking("fine", obedient=True)
    scheduler = Scheduler().start()
    scheduler.register(hung).register(fine)
    assert hung.began.wait(WAIT_S)
    assert fine.began.wait(WAIT_S)
    report = scheduler.shutdown(0.1)
    assert (report.running, report.clean) == (("hung",), False)
    assert scheduler.shutdown(0.0).running == ("hung",)
    hung.let_go.set()
    assert scheduler.shutdown(WAIT_S).clean


def test_shutdown_runs_what_was_spawned_and_begins_nothing_else() -> None:
    gate = Blocking("gate")
    done: list[int] = []
    scheduler = Scheduler(settings=SchedulerSettings(workers=1)).start()
    scheduler.register(gate)
    assert gate.began.wait(WAIT_S)
    late = Blocking("late")
    late.let_go.set()
    scheduler.register(late)
    for number in range(20):
        scheduler.spawn(lambda number=number: done.append(number))  # type: ignore[misc]
    threading.Timer(0.05, gate.let_go.set).start()
    assert scheduler.shutdown(WAIT_S).clean
    assert done == list(range(20))
    assert not late.began.is_set()
    with pytest.raises(Closed):
        scheduler.spawn(lambda: None)


def test_what_was_spawned_and_finds_no_time_is_counted_and_never_runs() -> None:
    gate = Blocking("gate")
    done: list[int] = []
    scheduler = Scheduler(settings=SchedulerSettings(workers=1)).start()
    scheduler.register(gate)
    assert gate.began.wait(WAIT_S)
    scheduler.spawn(lambda: done.append(1))
    report = scheduler.shutdown(0.05)
    assert (report.running, report.dropped) == (("gate",), 1)
    gate.let_go.set()
    assert scheduler.shutdown(WAIT_S).clean
    assert done == []


def test_shutdown_from_many_threads_at_once() -> None:
    scheduler = Scheduler().start()
    scheduler.register(Blocking("flush", obedient=True))
    clean: list[bool] = []
    callers = [threading.Thread(target=lambda: clean.append(scheduler.shutdown(WAIT_S).clean)) for _ in range(8)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(WAIT_S)
    assert clean == [True] * 8


def test_a_task_that_shuts_its_own_scheduler_down_is_told_so() -> None:
    errors: list[Exception] = []
    done = threading.Event()
    with Scheduler() as scheduler:

        def suicide() -> None:
            try:
                scheduler.shutdown()
            except Invalid as error:
                errors.append(error)
            done.set()

        scheduler.spawn(suicide)
        assert done.wait(WAIT_S)
    assert len(errors) == 1


def test_the_workers_of_a_scheduler_that_nobody_holds_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_table, "_WAIT_S_MAX", 0.02)
    task = Blocking("flush")
    task.let_go.set()
    scheduler = Scheduler().start()
    scheduler.register(task)
    assert task.ended.wait(WAIT_S)
    workers = worker_threads()
    assert len(workers) == 4
    del scheduler
    gc.collect()
    for worker in workers:
        worker.join(WAIT_S)
    assert worker_threads() == []


def run_script(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-"], input=script, capture_output=True, text=True, timeout=60, check=False)


_EXITS = """
import threading
from penstock.scheduler.scheduler import Scheduler, SchedulerSettings

class Task:
    name, interval_s, priority, runs_after = "flush", 1.0, 0, ()
    began = threading.Event()
    def execute(self, context):
        self.began.set()
        {wait}
        print("saved", flush=True)

scheduler = Scheduler(settings=SchedulerSettings(shutdown_timeout_s={timeout_s})).start()
scheduler.register(Task())
Task.began.wait(20)
print("leaving", flush=True)
"""


def test_the_interpreters_exit_lets_a_running_task_end() -> None:
    done = run_script(_EXITS.format(wait="context.shutdown.wait(20)", timeout_s=20.0))
    assert (done.stdout.split(), done.stderr, done.returncode) == (["leaving", "saved"], "", 0)


def test_the_interpreters_exit_does_not_wait_for_ever() -> None:
    done = run_script(_EXITS.format(wait="threading.Event().wait(1_000)", timeout_s=0.1))
    assert (done.stdout.split(), done.returncode) == (["leaving"], 0)
    assert "flush" in done.stderr
