"""Tasks on a scheduler whose time the test moves and whose runs it makes by hand: no threads here."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

import pytest

from penstock.errors import Backpressure, Closed, Invalid, NotFound
from penstock.scheduler.scheduler import Scheduler, SchedulerSettings
from penstock.scheduler.task import Outcome, TaskContext, TaskLoad
from penstock.testing import FakeClock


class Task:
    """A task that keeps its contexts and does what it is told."""

    def __init__(
        self,
        name: str,
        *,
        interval_s: float = 10.0,
        priority: int = 0,
        after: Collection[str] = (),
        do: Callable[[], Outcome] = lambda: None,
    ) -> None:
        self.name = name
        self.interval_s = interval_s
        self.priority = priority
        self.runs_after = after
        self.do = do
        self.contexts: list[TaskContext] = []

    def execute(self, context: TaskContext) -> Outcome:
        self.contexts.append(context)
        return self.do()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def scheduler(clock: FakeClock) -> Scheduler:
    return Scheduler(clock=clock, settings=SchedulerSettings(spawned_waiting_max=3))


def fail() -> Outcome:
    raise OSError("no luck")


def test_a_task_runs_at_once_and_then_once_each_interval(scheduler: Scheduler, clock: FakeClock) -> None:
    task = Task("metrics", interval_s=5.0)
    scheduler.register(task)
    assert scheduler.run_pending() == ["metrics"]
    assert scheduler.run_pending() == []
    clock.advance(4.9)
    assert scheduler.run_pending() == []
    clock.advance(0.1)
    assert scheduler.run_pending() == ["metrics"]
    clock.advance(50.0)
    assert scheduler.run_pending() == ["metrics"]  # intervals that were missed are not made up for
    assert [(context.task_name, context.run_id) for context in task.contexts] == [("metrics", n) for n in (1, 2, 3)]
    assert not task.contexts[0].shutdown.is_set()


def test_the_interval_counts_from_the_end_of_a_run(scheduler: Scheduler, clock: FakeClock) -> None:
    scheduler.register(Task("slow", do=lambda: clock.advance(7.0)))
    scheduler.run_pending()
    clock.advance(9.0)
    assert scheduler.run_pending() == []
    clock.advance(1.0)
    assert scheduler.run_pending() == ["slow"]


def test_jumps_of_the_wall_clock_change_nothing(scheduler: Scheduler, clock: FakeClock) -> None:
    scheduler.register(Task("a"))
    scheduler.run_pending()
    clock.jump(3_600)
    assert scheduler.run_pending() == []
    clock.jump(-7_200)
    clock.advance(10)
    assert scheduler.run_pending() == ["a"]


def test_priorities_decide_among_tasks_that_are_due(scheduler: Scheduler) -> None:
    scheduler.register(Task("low", priority=-1)).register(Task("high", priority=7)).register(Task("middle"))
    assert scheduler.run_pending() == ["high", "middle", "low"]


def test_a_task_runs_after_those_it_names(scheduler: Scheduler, clock: FakeClock) -> None:
    scheduler.register(Task("cleanup", priority=9, after=["compaction", "flush"]))
    scheduler.register(Task("compaction", priority=5, after=["flush"]))
    scheduler.register(Task("flush"))
    assert scheduler.run_pending() == ["flush", "compaction", "cleanup"]
    clock.advance(10)
    assert scheduler.run_pending() == ["flush", "compaction", "cleanup"]
    scheduler.trigger("compaction")
    assert scheduler.run_pending() == ["compaction"]  # what it follows is not due: nothing to wait for


def test_a_failing_task_holds_back_its_followers_for_its_run_only(scheduler: Scheduler, clock: FakeClock) -> None:
    scheduler.register(Task("flush", interval_s=1.0, do=fail)).register(Task("compaction", after=["flush"]))
    assert scheduler.run_pending() == ["flush", "compaction"]
    clock.advance(10)
    assert scheduler.run_pending() == ["flush", "compaction"]


def test_circles_doubles_and_bad_tasks_are_refused_and_change_nothing(scheduler: Scheduler) -> None:
    scheduler.register(Task("a", after=["b"]))
    for bad, words in (
        (Task("b", after=["a"]), "depend on each other"),
        (Task("c", after=["c"]), "depend on each other"),
        (Task("a"), "registered already"),
        (Task("Not a name"), "named"),
        (Task("d", interval_s=0.0), "interval"),
        (Task("d", interval_s=float("nan")), "interval"),
    ):
        with pytest.raises(Invalid, match=words):
            scheduler.register(bad)
    assert set(scheduler.statistics().tasks) == {"a"}
    assert scheduler.run_pending() == ["a"]


def test_settings_are_checked() -> None:
    for bad in (
        {"workers": 0},
        {"spawned_waiting_max": 0},
        {"retry_s_min": 0.0},
        {"retry_s_min": 5.0, "retry_s_max": 4.0},
        {"shutdown_timeout_s": -1.0},
    ):
        with pytest.raises(Invalid):
            SchedulerSettings(**bad)


def test_an_event_wakes_a_task_before_its_time(scheduler: Scheduler, clock: FakeClock) -> None:
    scheduler.register(Task("flush"))
    scheduler.run_pending()
    scheduler.wake("flush")
    scheduler.wake("flush")
    assert scheduler.run_pending() == ["flush"]
    clock.advance(9)
    assert scheduler.run_pending() == []
    clock.advance(1)
    assert scheduler.run_pending() == ["flush"]


@pytest.mark.parametrize("wake", [Scheduler.wake, Scheduler.trigger])
def test_an_event_during_a_run_leads_to_another_run(scheduler: Scheduler, wake: Callable[..., None]) -> None:
    task = Task("flush")

    def once() -> Outcome:
        if len(task.contexts) == 1:
            wake(scheduler, "flush")
            wake(scheduler, "flush")
        return None

    task.do = once
    scheduler.register(task)
    assert scheduler.run_pending() == ["flush", "flush"]


def test_waking_or_triggering_what_is_not_registered_is_an_error(scheduler: Scheduler) -> None:
    scheduler.register(Task("flush"))
    for call in (scheduler.wake, scheduler.trigger):
        with pytest.raises(NotFound, match="registered are flush"):
            call("flsh")


def test_a_failing_task_is_reported_and_tried_again_with_longer_pauses(
    scheduler: Scheduler, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    task = Task("flush", interval_s=100.0, do=fail)
    scheduler.register(task).register(Task("metrics", interval_s=100.0))
    with caplog.at_level(logging.ERROR):
        assert scheduler.run_pending() == ["flush", "metrics"]
    (record,) = caplog.records
    assert "flush failed in run 1 (OSError: no luck)" in record.getMessage()
    assert record.exc_info is not None
    for pause_s in (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0):
        clock.advance(pause_s - 0.25)
        assert "flush" not in scheduler.run_pending()
        clock.advance(0.25)
        assert "flush" in scheduler.run_pending()
    statistics = scheduler.statistics().tasks["flush"]
    assert (statistics.runs, statistics.failures, statistics.failures_in_row) == (9, 9, 9)
    task.do = lambda: None
    clock.advance(60)
    scheduler.run_pending()
    statistics = scheduler.statistics().tasks["flush"]
    assert (statistics.runs, statistics.failures, statistics.failures_in_row) == (10, 9, 0)
    assert statistics.last_error == "OSError: no luck"
    assert statistics.next_due_s == clock.monotonic_s() + 100.0


def test_events_respect_the_pause_of_a_failing_task_and_a_trigger_does_not(
    scheduler: Scheduler, clock: FakeClock
) -> None:
    task = Task("flush", do=fail)
    scheduler.register(task)
    scheduler.run_pending()
    scheduler.wake("flush")
    assert scheduler.run_pending() == []
    scheduler.trigger("flush")
    assert scheduler.run_pending() == ["flush"]

    def failing_with(call: Callable[[str], None]) -> Callable[[], Outcome]:
        def do() -> Outcome:
            task.do = fail
            call("flush")
            return fail()

        return do

    for call, expected in ((scheduler.wake, ["flush"]), (scheduler.trigger, ["flush", "flush"])):
        clock.advance(60)
        task.do = failing_with(call)
        assert scheduler.run_pending() == expected


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, MemoryError, RecursionError])
def test_nothing_a_task_raises_stops_the_others(scheduler: Scheduler, error: type[BaseException]) -> None:
    def do() -> Outcome:
        raise error

    scheduler.register(Task("bad", do=do)).register(Task("good"))
    assert scheduler.run_pending() == ["bad", "good"]
    assert scheduler.statistics().tasks["bad"].last_error == f"{error.__name__}: "


def test_a_wrong_outcome_is_the_tasks_failure(scheduler: Scheduler) -> None:
    scheduler.register(Task("bad", do=lambda: -1.0))
    scheduler.run_pending()
    statistics = scheduler.statistics().tasks["bad"]
    assert statistics.failures == 1
    assert "Invalid: a task returned -1.0" in str(statistics.last_error)


def test_an_interval_adapts_to_what_the_task_found(scheduler: Scheduler, clock: FakeClock) -> None:
    task = Task("flush", interval_s=8.0, do=lambda: TaskLoad.BUSY)
    scheduler.register(task)
    for expected_s in (4.0, 2.0, 1.0, 0.5, 0.5):
        assert scheduler.run_pending() == ["flush"]
        assert scheduler.statistics().tasks["flush"].interval_s == expected_s
        clock.advance(expected_s)
    task.do = lambda: TaskLoad.IDLE
    for expected_s in (0.75, 1.125):
        assert scheduler.run_pending() == ["flush"]
        assert scheduler.statistics().tasks["flush"].next_due_s == clock.monotonic_s() + expected_s
        clock.advance(expected_s)
    task.do = lambda: 3.0
    assert scheduler.run_pending() == ["flush"]
    clock.advance(2.9)
    assert scheduler.run_pending() == []


def test_a_task_may_ask_to_run_again_at_once(scheduler: Scheduler) -> None:
    task = Task("jobs")
    task.do = lambda: 0.0 if len(task.contexts) < 5 else None
    scheduler.register(task)
    assert scheduler.run_pending() == ["jobs"] * 5


def test_spawned_functions_run_once_in_their_order(scheduler: Scheduler) -> None:
    done: list[int] = []
    scheduler.register(Task("urgent", priority=1)).register(Task("not-urgent", priority=-1))
    for number in range(3):
        scheduler.spawn(lambda number=number: done.append(number), name=f"once-{number}")  # type: ignore[misc]
    assert scheduler.run_pending() == ["urgent", "once-0", "once-1", "once-2", "not-urgent"]
    assert done == [0, 1, 2]
    assert scheduler.run_pending() == []


def test_too_many_spawned_functions_are_refused_until_some_have_run(scheduler: Scheduler) -> None:
    for _ in range(3):
        scheduler.spawn(fail)
    with pytest.raises(Backpressure, match="3 spawned"):
        scheduler.spawn(fail)
    assert len(scheduler.run_pending()) == 3
    scheduler.spawn(lambda: None)
    statistics = scheduler.statistics()
    assert (statistics.spawned_runs, statistics.spawned_failures, statistics.spawned_waiting) == (3, 3, 1)


def test_statistics_say_how_long_and_when(scheduler: Scheduler, clock: FakeClock) -> None:
    task = Task("flush", do=lambda: clock.advance(2.0))
    scheduler.register(task)
    before = scheduler.statistics().tasks["flush"]
    assert (before.runs, before.last_duration_s, before.last_error) == (0, None, None)
    assert before.next_due_s == clock.monotonic_s()
    scheduler.run_pending()
    clock.advance(10)
    task.do = lambda: clock.advance(3.0)
    scheduler.run_pending()
    after = scheduler.statistics().tasks["flush"]
    assert (after.runs, after.last_duration_s, after.total_duration_s) == (2, 3.0, 5.0)
    assert not after.running


def test_after_shutdown_nothing_is_accepted_and_an_event_does_nothing(scheduler: Scheduler) -> None:
    scheduler.register(Task("flush"))
    scheduler.spawn(lambda: None)
    report = scheduler.shutdown(0.0)
    assert (report.running, report.dropped, report.clean) == ((), 1, False)  # there were no workers to run it
    assert scheduler.run_pending() == []
    scheduler.wake("flush")
    for call in (
        lambda: scheduler.register(Task("other")),
        lambda: scheduler.spawn(lambda: None),
        lambda: scheduler.trigger("flush"),
    ):
        with pytest.raises(Closed):
            call()
    assert scheduler.shutdown(0.0).clean
