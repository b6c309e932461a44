"""Both engines by the same tests, then what only threads or the registry do."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import Backpressure, Closed, DiskFull, Invalid, WaitExpired
from penstock.scheduler.engines import Engine, Engines, EngineSettings, PooledEngine, process_engine, thread_engine
from penstock.scheduler.work import PAYLOAD_BYTES_MAX, Plain, WorkCancelled, WorkFailed, pack, unpack
from penstock.testing.locks import LockOrderChecker

WAIT_S = 30.0  # only ever waited in full by a test that fails
HERE = "scheduler_functions:"

Make = Callable[..., PooledEngine]


def wait_for_file(path: Path) -> str:
    """What a function announced, once it has begun."""
    for _ in range(int(WAIT_S / 0.01)):
        if path.exists():
            return path.read_text()
        time.sleep(0.01)
    raise AssertionError(f"{path} never came")


@pytest.fixture(params=[thread_engine, process_engine], ids=["thread", "process"])
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    engines: list[PooledEngine] = []
    maker: Make = request.param

    def make_one(**settings: float) -> PooledEngine:
        engine = maker(EngineSettings(**settings))  # type: ignore[arg-type]
        engines.append(engine)
        return engine

    yield make_one
    for engine in engines:
        engine.shutdown(0.0)


def test_plain_values_go_in_and_come_out(make: Make, tmp_path: Path) -> None:
    engine = make(workers_max=1)
    arguments: dict[str, Plain] = {
        "none": None,
        "yes": True,
        "least": -(1 << 63),
        "most": (1 << 64) - 1,
        "float": 0.1,
        "text": "Grüße \U0001f600",
        "bytes": bytes(range(256)),
        "list": [1, [b"", {"a": "b"}]],
    }
    assert engine.submit(HERE + "echo", arguments).result(WAIT_S) == arguments
    (tmp_path / "in").write_text("a\nb\nc\n")
    names: dict[str, Plain] = {"source": str(tmp_path / "in"), "target": str(tmp_path / "out")}
    assert engine.submit(HERE + "count_lines", names).result(WAIT_S) == {"file": str(tmp_path / "out")}
    assert (tmp_path / "out").read_text() == "3"


def test_errors_come_out_with_their_kind_their_trace_and_whether_to_try_again(make: Make) -> None:
    engine = make(workers_max=1)
    for function, kind, permanent in (
        ("fail", "OSError", False),
        ("corrupt", "CorruptionError", True),
        ("unplain", "Invalid", True),
        ("leave", "SystemExit", False),
        ("absent", "Invalid", True),
        ("NOT_A_FUNCTION", "Invalid", True),
    ):
        handle = engine.submit(HERE + function, {})
        with pytest.raises(WorkFailed) as caught:
            handle.result(WAIT_S)
        assert (caught.value.kind, caught.value.permanent) == (kind, permanent)
        assert f"{kind}" in caught.value.trace
    assert str(caught.value).startswith("Invalid: work scheduler_functions:NOT_A_FUNCTION is not")
    with pytest.raises(WorkFailed, match="no_such_module"):
        engine.submit("no_such_module.at_all:f", {}).result(WAIT_S)
    assert engine.submit(HERE + "echo", {}).result(WAIT_S) == {}
    statistics = engine.statistics()
    assert (statistics.succeeded, statistics.failed, statistics.workers_lost) == (1, 7, 0)


def test_a_full_disk_is_the_same_error_wherever_the_work_ran(make: Make) -> None:
    engine = make(workers_max=1)
    with pytest.raises(DiskFull, match=r"^the disk of the store has no room: free some space, then retry$"):
        engine.submit(HERE + "fill_the_disk", {}).result(WAIT_S)


def test_what_is_not_plain_or_not_a_name_is_refused_at_once(make: Make) -> None:
    engine = make()
    for function in ("", "os", "os:", ":f", "os.path:join:x", "os path:f", "os:f()", "../x:f"):
        with pytest.raises(Invalid, match="module:function"):
            engine.submit(function, {})
    for value in (object(), 1 << 64, len):
        with pytest.raises(Invalid, match="plain"):
            engine.submit(HERE + "echo", {"value": value})  # type: ignore[dict-item]
    with pytest.raises(Invalid, match="file name"):
        engine.submit(HERE + "echo", {"value": bytes(PAYLOAD_BYTES_MAX)})


def test_large_values_travel_and_larger_ones_are_an_error(make: Make) -> None:
    engine = make(workers_max=1)
    value = os.urandom(8 << 20)
    assert engine.submit(HERE + "echo", {"value": value}).result(WAIT_S) == {"value": value}
    with pytest.raises(WorkFailed, match="file name"):
        engine.submit(HERE + "large", {"size": PAYLOAD_BYTES_MAX}).result(WAIT_S)
    assert engine.submit(HERE + "echo", {}).result(WAIT_S) == {}


def test_many_callers_get_their_own_results(make: Make) -> None:
    engine = make(workers_max=2, waiting_max=1_000)
    wrong: list[Plain] = []

    def call(caller: int) -> None:
        handles = [(n, engine.submit(HERE + "echo", {"n": [caller, n]})) for n in range(50)]
        wrong.extend(n for n, handle in handles if handle.result(WAIT_S) != {"n": [caller, n]})

    callers = [threading.Thread(target=call, args=(number,)) for number in range(6)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(WAIT_S)
    assert wrong == []
    assert engine.statistics().succeeded == 300


def test_waiting_calls_are_bounded_and_can_be_cancelled(make: Make, tmp_path: Path) -> None:
    engine = make(workers_max=1, waiting_max=2)
    running = engine.submit(HERE + "obey", {"began": str(tmp_path / "began")})
    wait_for_file(tmp_path / "began")
    waiting = [engine.submit(HERE + "echo", {"n": n}) for n in range(2)]
    with pytest.raises(Backpressure, match="2 calls wait"):
        engine.submit(HERE + "echo", {})
    with pytest.raises(WaitExpired):
        waiting[0].result(0.01)
    waiting[0].cancel()
    with pytest.raises(WorkCancelled, match="before it began"):
        waiting[0].result(0.0)
    extra = engine.submit(HERE + "echo", {"n": 2})
    running.cancel()
    with pytest.raises(WorkCancelled):
        running.result(WAIT_S)
    assert waiting[1].result(WAIT_S) == {"n": 1}
    assert extra.result(WAIT_S) == {"n": 2}
    running.cancel()  # too late, and harmless
    assert extra.done()


def test_two_calls_run_side_by_side(make: Make, tmp_path: Path) -> None:
    engine = make(workers_max=2)
    assert engine.submit(HERE + "echo", {}).result(WAIT_S) == {}  # one slot now idles, and must not be counted twice
    handles = [engine.submit(HERE + "obey", {"began": str(tmp_path / str(n))}) for n in range(2)]
    for n in range(2):
        wait_for_file(tmp_path / str(n))
    assert engine.statistics().running == 2
    for handle in handles:
        handle.cancel()


def test_shutdown_signals_what_runs_and_answers_what_waits(make: Make, tmp_path: Path) -> None:
    engine = make(workers_max=1)
    running = engine.submit(HERE + "obey", {"began": str(tmp_path / "began")})
    wait_for_file(tmp_path / "began")
    waiting = engine.submit(HERE + "echo", {})
    assert engine.shutdown(WAIT_S)
    with pytest.raises(WorkCancelled, match="heard it"):
        running.result(0.0)
    with pytest.raises(WorkCancelled, match="not begun"):
        waiting.result(0.0)
    with pytest.raises(Closed):
        engine.submit(HERE + "echo", {})
    assert engine.shutdown(0.0)


def test_an_idle_slot_ends_and_the_next_call_gets_another(make: Make) -> None:
    engine = make(workers_max=1, idle_s=0.01)
    for _ in range(3):
        before = {thread for thread in threading.enumerate() if thread.name.startswith(("penstock-th", "penstock-pr"))}
        assert engine.submit(HERE + "echo", {}).result(WAIT_S) == {}
        for thread in set(threading.enumerate()) - before:
            if thread.name.startswith(("penstock-th", "penstock-pr")):
                thread.join(WAIT_S)
                assert not thread.is_alive()


def test_a_thread_that_hangs_is_left_behind_and_its_caller_is_answered(tmp_path: Path) -> None:
    engine = thread_engine(EngineSettings(workers_max=1))
    handle = engine.submit(HERE + "hang", {"began": str(tmp_path / "began")})
    wait_for_file(tmp_path / "began")
    handle.cancel()
    assert not handle.done()  # it runs on, and says so
    assert not engine.shutdown(0.05)
    with pytest.raises(WorkCancelled, match="had not ended"):
        handle.result(0.0)


def test_engines_take_their_locks_in_one_order(tmp_path: Path) -> None:
    with LockOrderChecker().installed() as checker:
        engine = thread_engine(EngineSettings(workers_max=3, idle_s=0.001))
        handles = []
        for n in range(200):
            handles.append(engine.submit(HERE + "echo", {"n": n}))
            if n % 7 == 0:
                handles[-1].cancel()
            engine.statistics()
            if n % 50 == 0:
                time.sleep(0.01)  # long enough for slots to end for want of work
        assert engine.shutdown(WAIT_S)
        assert all(handle.done() for handle in handles)
        assert checker.violations == []


def test_engines_are_found_by_name_made_once_and_shut_down_together() -> None:
    engines = Engines()
    with pytest.raises(Invalid, match="there are process, thread"):
        engines.get("spark")
    spark_engines: list[Engine] = []

    def make() -> Engine:
        spark_engines.append(thread_engine())
        return spark_engines[-1]

    engines.add("spark", make)
    with pytest.raises(Invalid, match="exists"):
        engines.add("spark", make)
    assert engines.get("spark") is engines.get("spark") is spark_engines[0]
    assert engines.get("thread") is not spark_engines[0]
    assert engines.shutdown(WAIT_S)
    with pytest.raises(Closed):
        engines.get("thread")
    with pytest.raises(Closed):
        spark_engines[0].submit(HERE + "echo", {})


def test_settings_of_an_engine_are_checked() -> None:
    for bad in ({"workers_max": 0}, {"waiting_max": 0}, {"idle_s": 0.0}, {"start_timeout_s": float("inf")}):
        with pytest.raises(Invalid):
            EngineSettings(**bad)


leaves = st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats(allow_nan=False) | st.binary()
names = st.text("ab\0\xe9\u20ac", max_size=4)
plain = st.recursive(
    leaves | names, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=4), max_leaves=8
)


@given(plain)
def test_packing_keeps_every_plain_value(value: Plain) -> None:
    assert unpack(pack(value)) == value
