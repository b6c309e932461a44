"""What runs next and when, as pure functions."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import Invalid
from penstock.scheduler.plan import AGEING_S, TaskState, check_order, next_interval_s, ready, retry_s, wait_s
from penstock.scheduler.task import TaskLoad


def task(name: str, *, priority: int = 0, due_s: float = 0.0, after: tuple[str, ...] = (), **more: object) -> TaskState:
    return TaskState(name=name, priority=priority, due_s=due_s, runs_after=after, **more)  # type: ignore[arg-type]


def test_only_what_is_due_and_not_running_is_ready() -> None:
    states = [task("now", due_s=10.0), task("later", due_s=10.1), task("busy", due_s=1.0, running=True)]
    assert ready(states, 10.0) == ["now"]


def test_the_higher_priority_goes_first_then_the_longer_wait_then_the_name() -> None:
    states = [task("b"), task("a"), task("old", due_s=-1.0), task("urgent", priority=1)]
    assert ready(states, 0.0) == ["urgent", "old", "a", "b"]


def test_waiting_long_enough_beats_any_priority() -> None:
    low, high = task("low", due_s=0.0), task("high", priority=5, due_s=5 * AGEING_S)
    assert ready([low, high], 5 * AGEING_S) == ["low", "high"]
    assert ready([low, high], 5 * AGEING_S - 1) == ["low"]
    assert ready([task("low", due_s=1.0), high], 5 * AGEING_S) == ["high", "low"]


@pytest.mark.parametrize("earlier", [task("flush", due_s=5.0), task("flush", due_s=99.0, running=True)])
def test_a_follower_waits_for_a_task_that_is_due_or_running(earlier: TaskState) -> None:
    follower = task("compaction", priority=9, due_s=5.0, after=("flush",))
    assert "compaction" not in ready([earlier, follower], 5.0)


def test_a_follower_goes_when_the_other_is_not_due_or_not_there() -> None:
    follower = task("compaction", due_s=5.0, after=("flush", "absent"))
    assert ready([task("flush", due_s=6.0), follower], 5.0) == ["compaction"]


def test_a_follower_waits_for_one_run_that_began_since_it_was_due_and_not_for_a_second() -> None:
    follower = task("compaction", due_s=5.0, after=("flush",))
    begun_before = task("flush", due_s=6.0, last_start_s=4.9)
    begun_since = task("flush", due_s=6.0, last_start_s=5.0)
    assert ready([begun_before, follower], 7.0) == ["flush"]
    assert ready([begun_since, follower], 7.0) == ["compaction", "flush"]


def test_the_wait_ends_with_the_next_task_that_time_makes_due() -> None:
    states = [task("a", due_s=12.0), task("b", due_s=11.0), task("due", due_s=9.0), task("c", due_s=10.5, running=True)]
    assert wait_s(states, 10.0) == 1.0
    assert wait_s([task("due", due_s=9.0)], 10.0) == math.inf


def test_a_circle_is_refused_and_named() -> None:
    check_order({"a": ["b"], "b": ["c"], "c": [], "d": ["a", "c", "absent"]})
    with pytest.raises(Invalid, match="a after b after c after a"):
        check_order({"a": ["b"], "b": ["c"], "c": ["a"]})
    with pytest.raises(Invalid, match="a after a"):
        check_order({"a": ["a"]})


@st.composite
def tables(draw: st.DrawFn) -> list[TaskState]:
    """Tasks that run after earlier ones only, so without circles."""
    count = draw(st.integers(1, 8))
    times = st.integers(0, 4).map(float)
    return [
        task(
            f"t{number}",
            priority=draw(st.integers(-2, 2)),
            due_s=draw(times),
            after=tuple(f"t{earlier}" for earlier in range(number) if draw(st.booleans())),
            running=draw(st.booleans()),
            last_start_s=draw(times | st.just(-math.inf)),
        )
        for number in range(count)
    ]


@given(tables(), st.integers(0, 4))
def test_something_is_ready_whenever_something_is_due_and_nothing_runs(states: list[TaskState], now: int) -> None:
    names = ready(states, now)
    by_name = {state.name: state for state in states}
    for name in names:
        assert by_name[name].due_s <= now
        assert not by_name[name].running
        for earlier in by_name[name].runs_after:
            other = by_name[earlier]
            waits = other.running or other.due_s <= now
            assert not waits or other.last_start_s >= by_name[name].due_s
    idle = not any(state.running for state in states)
    if idle and any(state.due_s <= now for state in states):
        assert names


@given(tables())
def test_one_worker_and_tasks_that_are_always_due_starve_nobody(states: list[TaskState]) -> None:
    table = {state.name: task(state.name, priority=state.priority, after=tuple(state.runs_after)) for state in states}
    waiting, now = set(table), 0.0
    for _ in range(60):
        name = ready(table.values(), now)[0]
        old = table[name]
        now += AGEING_S / 4  # every run takes this long, and is due again when it ends
        table[name] = task(name, priority=old.priority, after=tuple(old.runs_after), due_s=now, last_start_s=now - 7.5)
        waiting.discard(name)
    assert not waiting


@given(
    st.floats(0.001, 1e6),
    st.lists(st.sampled_from([TaskLoad.BUSY, TaskLoad.IDLE, None]) | st.floats(0, 1e9), max_size=40),
)
def test_an_interval_stays_within_its_bounds(base_s: float, outcomes: list[TaskLoad | float | None]) -> None:
    current_s = base_s
    for outcome in outcomes:
        before_s, current_s = current_s, next_interval_s(base_s, current_s, outcome)
        assert current_s <= base_s * 4
        if isinstance(outcome, float):
            assert current_s == min(outcome, base_s * 4)
        else:
            assert current_s >= base_s / 16
        if outcome is TaskLoad.BUSY:
            assert current_s <= max(before_s, base_s / 16)
        if outcome is TaskLoad.IDLE:
            assert current_s >= before_s


def test_load_shortens_an_interval_and_idleness_relaxes_it() -> None:
    busy = [10.0]
    for _ in range(6):
        busy.append(next_interval_s(10.0, busy[-1], TaskLoad.BUSY))
    assert busy == [10.0, 5.0, 2.5, 1.25, 0.625, 0.625, 0.625]
    idle = [10.0]
    for _ in range(5):
        idle.append(next_interval_s(10.0, idle[-1], TaskLoad.IDLE))
    assert idle == [10.0, 15.0, 22.5, 33.75, 40.0, 40.0]
    assert next_interval_s(10.0, 40.0, TaskLoad.BUSY) == 5.0
    assert next_interval_s(10.0, 0.0, TaskLoad.IDLE) > 0.0
    assert next_interval_s(10.0, 40.0, None) == 10.0


@pytest.mark.parametrize("outcome", [-0.1, math.nan, "soon"])
def test_an_outcome_that_names_no_time_is_refused(outcome: float) -> None:
    with pytest.raises(Invalid, match="returned"):
        next_interval_s(1.0, 1.0, outcome)


def test_retries_wait_twice_as_long_each_time_up_to_a_limit() -> None:
    assert [retry_s(count, 1.0, 60.0) for count in (1, 2, 3, 7, 10_000)] == [1.0, 2.0, 4.0, 60.0, 60.0]
