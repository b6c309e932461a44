"""The job runner, against a source in memory and against the manifest."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Container, Iterator
from pathlib import Path

import msgspec
import pytest

from penstock.errors import Backpressure, CorruptionError, Invalid, LeaseLost
from penstock.host.randomness import system_random
from penstock.manifest.jobs import JobQueue, JobSettings, Lease
from penstock.manifest.manifest import Manifest
from penstock.manifest.records import Completed, FailedPermanent, JobKind, JobRecord, Pending
from penstock.scheduler.engines import Engines
from penstock.scheduler.runner import JobResult, JobRunner, JobRunnerSettings, JobSignal, run_job
from penstock.scheduler.scheduler import Scheduler, SchedulerSettings
from penstock.scheduler.task import Outcome, StopSignal, TaskContext, TaskLoad
from penstock.testing import FakeClock

WAIT_S = 30.0  # only ever waited in full by a test that fails
HERE = "scheduler_functions:"
KIND, OTHER = 64, 65


class MemorySource:
    """Jobs in lists, with leases that a test can take away; unlike the manifest it believes whatever it is told."""

    def __init__(self, *kinds: int) -> None:
        self.waiting = [
            JobRecord(job_id=n, created_at_epoch_ms=0, db_id=None, kind=kind) for n, kind in enumerate(kinds)
        ]
        self.outcomes: list[tuple[str, int]] = []
        self.lost: set[int] = set()
        self.renewed = threading.Semaphore(0)
        self.renew_error: Exception | None = None

    def acquire(self, worker_id: str, kinds: Container[int] | None = None) -> Lease | None:
        assert kinds is not None
        match = next((job for job in self.waiting if job.kind in kinds), None)
        if match is None:
            return None
        self.waiting.remove(match)
        return Lease(job=match, worker_id=worker_id, token=1)

    def renew(self, lease: Lease) -> None:
        self.renewed.release()
        if self.renew_error is not None:
            raise self.renew_error
        if lease.job.job_id in self.lost:
            raise LeaseLost(f"job {lease.job.job_id} is another's")

    def complete(self, lease: Lease) -> None:
        self.outcomes.append(("complete", lease.job.job_id))

    def fail(self, lease: Lease, error: BaseException, *, retry: bool = True) -> None:
        self.outcomes.append((f"{error}; again: {retry}", lease.job.job_id))

    def expire_leases(self) -> object:
        return []


def done(lease: Lease, stop: StopSignal) -> JobResult:
    return JobResult.DONE


def context(shutdown: threading.Event | None = None) -> TaskContext:
    return TaskContext(task_name="jobs", run_id=1, shutdown=shutdown or threading.Event())


@pytest.fixture
def engines() -> Iterator[Engines]:
    engines = Engines()
    yield engines
    assert engines.shutdown(WAIT_S)


def keepers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("penstock-lease")]


def test_jobs_of_the_handled_kinds_are_run_in_order_and_completed() -> None:
    source = MemorySource(KIND, OTHER, KIND)
    ran: list[int] = []

    def handler(lease: Lease, stop: StopSignal) -> JobResult:
        ran.append(lease.job.job_id)
        return JobResult.DONE

    scheduler = Scheduler(clock=FakeClock())
    runner = JobRunner("jobs", source, {KIND: handler})
    scheduler.register(runner)
    assert scheduler.run_pending() == ["jobs"] * 3  # two jobs, and one look that finds none
    assert ran == [0, 2]
    assert source.outcomes == [("complete", 0), ("complete", 2)]
    assert runner.statistics().completed == 2
    assert scheduler.statistics().tasks["jobs"].interval_s < 1.0  # it was busy: it looks again soon, then less often
    assert keepers() == []


def test_a_handler_that_committed_its_job_is_not_completed_twice() -> None:
    source = MemorySource(KIND)
    JobRunner("jobs", source, {KIND: lambda lease, stop: JobResult.COMMITTED}).execute(context())
    assert source.outcomes == []


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (OSError("no luck"), "no luck; again: True"),
        (Backpressure("full"), "full; again: True"),
        (Invalid("wrong"), "wrong; again: False"),
        (CorruptionError("a", 1, "bad"), "a at byte 1: bad; restore this file from a copy; again: False"),
    ],
)
def test_an_error_fails_the_job_and_not_the_runner(error: Exception, outcome: str) -> None:
    source = MemorySource(KIND, OTHER)

    def handler(lease: Lease, stop: StopSignal) -> JobResult:
        raise error

    runner = JobRunner("jobs", source, {KIND: handler, OTHER: done})
    assert [runner.execute(context()) for _ in range(3)] == [0.0, 0.0, TaskLoad.IDLE]
    assert source.outcomes == [(outcome, 0), ("complete", 1)]
    assert (runner.statistics().failed, runner.statistics().completed) == (1, 1)


@pytest.mark.parametrize("engine", ["thread", "process"])
def test_a_handler_calls_functions_on_an_engine(engines: Engines, engine: str) -> None:
    source = MemorySource(KIND, OTHER)
    results: list[object] = []

    def handler(lease: Lease, stop: StopSignal) -> JobResult:
        results.append(engines.get(engine).submit(HERE + "echo", {"job": lease.job.job_id}).wait(stop.is_set))
        engines.get(engine).submit(HERE + "corrupt", {}).wait(stop.is_set)
        return JobResult.DONE

    JobRunner("jobs", source, {KIND: handler}).execute(context())
    assert results == [{"job": 0}]
    ((outcome, job_id),) = source.outcomes
    assert job_id == 0
    assert outcome.startswith("CorruptionError: a.sst at byte 7")
    assert outcome.endswith("again: False")


def test_a_lease_is_renewed_while_its_job_runs() -> None:
    source = MemorySource(KIND)

    def handler(lease: Lease, stop: StopSignal) -> JobResult:
        source.renew_error = Backpressure("busy")  # now and then a renewal fails, and is tried again
        assert source.renewed.acquire(timeout=WAIT_S)
        source.renew_error = None
        for _ in range(3):
            assert source.renewed.acquire(timeout=WAIT_S)
        return JobResult.DONE

    settings = JobRunnerSettings(renew_every_s=0.01)
    JobRunner("jobs", source, {KIND: handler}, settings=settings).execute(context())
    assert source.outcomes == [("complete", 0)]
    assert keepers() == []


@pytest.mark.parametrize("engine", ["thread", "process"])
def test_a_job_whose_lease_is_lost_is_stopped_and_neither_completed_nor_failed(
    engines: Engines, engine: str, tmp_path: Path
) -> None:
    source = MemorySource(KIND)
    began = tmp_path / "began"

    def handler(lease: Lease, stop: StopSignal) -> JobResult:
        engines.get(engine).submit(HERE + "obey", {"began": str(began)}).wait(stop.is_set)
        raise AssertionError("it was cancelled")

    def lose() -> None:
        while not began.exists():
            time.sleep(0.01)
        source.lost.add(0)

    threading.Thread(target=lose).start()
    settings = JobRunnerSettings(renew_every_s=0.01)
    runner = JobRunner("jobs", source, {KIND: handler}, settings=settings)
    assert runner.execute(context()) == 0.0
    assert source.outcomes == []
    assert runner.statistics().lost == 1
    assert engines.get(engine).submit(HERE + "echo", {}).result(WAIT_S) == {}  # nothing is left running


def test_a_handler_that_ends_well_after_its_lease_was_lost_does_not_complete() -> None:
    source = MemorySource(KIND)

    def handler(lease: Lease, stop: StopSignal) -> JobResult:
        source.lost.add(0)
        assert stop.wait(WAIT_S)
        return JobResult.DONE

    settings = JobRunnerSettings(renew_every_s=0.01)
    runner = JobRunner("jobs", source, {KIND: handler}, settings=settings)
    runner.execute(context())
    assert (source.outcomes, runner.statistics().completed, runner.statistics().lost) == ([], 0, 1)


def test_a_shutdown_cancels_the_running_call_and_gives_the_job_back(engines: Engines, tmp_path: Path) -> None:
    source = MemorySource(KIND)
    began = tmp_path / "began"

    def handler(lease: Lease, stop: StopSignal) -> JobResult:
        engines.get("process").submit(HERE + "hang", {"began": str(began)}).wait(stop.is_set)
        raise AssertionError("it was cancelled")

    scheduler = Scheduler(settings=SchedulerSettings(workers=1)).start()
    scheduler.register(JobRunner("jobs", source, {KIND: handler}))
    while not began.exists():
        time.sleep(0.01)
    assert scheduler.shutdown(WAIT_S).clean
    assert source.outcomes == [(f"{HERE}hang was cancelled while it ran; again: True", 0)]


@pytest.mark.parametrize("error", [OSError("no luck"), KeyboardInterrupt("Ctrl-C")])
def test_a_job_run_by_a_caller_fails_before_its_error_is_raised(error: BaseException) -> None:
    source = MemorySource(KIND)
    lease = source.acquire("here", {KIND})
    assert lease is not None

    def handler(lease: Lease, stop: StopSignal) -> JobResult:
        raise error

    with pytest.raises(type(error)):
        run_job(source, lease, handler, threading.Event(), renew_every_s=WAIT_S)
    assert source.outcomes == [(f"{error}; again: True", 0)]
    assert keepers() == []


def test_a_source_that_fails_is_the_schedulers_to_retry() -> None:
    class Broken(MemorySource):
        def acquire(self, worker_id: str, kinds: Container[int] | None = None) -> Lease | None:
            raise Backpressure("the manifest is busy")

    scheduler = Scheduler(clock=FakeClock())
    scheduler.register(JobRunner("jobs", Broken(), {KIND: done}))
    assert scheduler.run_pending() == ["jobs"]
    assert scheduler.statistics().tasks["jobs"].failures == 1


def test_the_signal_of_a_job_is_either_of_two() -> None:
    shutdown = threading.Event()
    signal = JobSignal(shutdown)
    assert not signal.wait(0.0)
    assert not signal.wait(0.01)
    shutdown.set()
    assert signal.wait(None)
    other = JobSignal(threading.Event())
    other.lost.set()
    assert other.is_set()
    assert other.wait(1_000)


def test_settings_of_a_runner_are_checked() -> None:
    for bad in ({"interval_s": 0.0}, {"renew_every_s": 0.0}):
        with pytest.raises(Invalid):
            JobRunnerSettings(**bad)  # type: ignore[arg-type]


# -- against the manifest


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def manifest(tmp_path: Path) -> Iterator[Manifest]:
    with Manifest.open(str(tmp_path / "manifest.lmdb")) as manifest:
        yield manifest


def state_of(manifest: Manifest, job_id: int) -> object:
    job = manifest.get_job(job_id)
    assert job is not None
    return job.state


def test_jobs_of_the_manifest_run_in_processes_and_end_durably(
    manifest: Manifest, engines: Engines, tmp_path: Path
) -> None:
    queue = JobQueue(manifest, random=system_random(), settings=JobSettings(backoff_s=0.0))
    (tmp_path / "in").write_text("a\nb\n")
    payload = {"source": str(tmp_path / "in"), "target": str(tmp_path / "out")}
    good = queue.enqueue(JobKind.COMPACTION, db_id=1, payload=msgspec.msgpack.encode(payload))
    bad = queue.enqueue(JobKind.COMPACTION, db_id=2, payload=msgspec.msgpack.encode({}), attempts_max=3)

    def handler(lease: Lease, stop: StopSignal) -> JobResult:
        arguments = msgspec.msgpack.decode(lease.job.payload)
        function = "count_lines" if arguments else "fail"
        engines.get("process").submit(HERE + function, arguments).wait(stop.is_set)
        queue.complete(lease)
        return JobResult.COMMITTED

    runner = JobRunner("jobs", queue, {JobKind.COMPACTION: handler}, settings=JobRunnerSettings(interval_s=0.01))
    with Scheduler() as scheduler:
        scheduler.register(runner)
        wait_until(lambda: isinstance(state_of(manifest, bad), FailedPermanent))
        wait_until(lambda: isinstance(state_of(manifest, good), Completed))
    assert (tmp_path / "out").read_text() == "2"
    record = manifest.get_job(bad)
    assert record is not None
    assert record.attempts == 3
    assert record.last_error is not None
    assert record.last_error.message == "OSError: no luck"
    assert not queue.gate(1, JobKind.COMPACTION).is_shut()


def test_a_job_given_back_at_shutdown_waits_for_the_next_time(
    manifest: Manifest, engines: Engines, tmp_path: Path
) -> None:
    queue = JobQueue(manifest, random=system_random())
    job_id = queue.enqueue(KIND)

    def handler(lease: Lease, stop: StopSignal) -> JobResult:
        engines.get("thread").submit(HERE + "obey", {"began": str(tmp_path / "began")}).wait(stop.is_set)
        raise AssertionError("it was cancelled")

    with Scheduler() as scheduler:
        scheduler.register(JobRunner("jobs", queue, {KIND: handler}))
        wait_until((tmp_path / "began").exists)
    assert isinstance(state_of(manifest, job_id), Pending)
    assert not queue.gate(None, KIND).is_shut()


def test_a_worker_that_stalls_past_its_lease_is_replaced_by_a_repair(tmp_path: Path) -> None:
    """The first runner never renews: its job is repaired by the second, and what the first says then is refused."""
    clock = FakeClock()
    with Manifest.open(str(tmp_path / "manifest.lmdb"), clock=clock) as manifest:
        queue = JobQueue(manifest, random=system_random(), settings=JobSettings(lease_s=30.0))
        job_id = queue.enqueue(KIND)
        repaired: list[int] = []

        def repair(lease: Lease, stop: StopSignal) -> JobResult:
            assert lease.job.kind == JobKind.REPAIR
            assert lease.job.repairs_job_id == job_id
            repaired.append(lease.job.job_id)
            return JobResult.DONE

        second = JobRunner("second", queue, {KIND: repair})

        def stall(lease: Lease, stop: StopSignal) -> JobResult:
            clock.advance(31.0)
            assert second.execute(context()) == 0.0
            return JobResult.DONE

        settings = JobRunnerSettings(renew_every_s=1_000.0)
        first = JobRunner("first", queue, {KIND: stall}, settings=settings)
        first.execute(context())
        assert (first.statistics().completed, first.statistics().lost) == (0, 1)
        assert second.statistics().completed == 1
        assert isinstance(state_of(manifest, job_id), FailedPermanent)
        assert isinstance(state_of(manifest, repaired[0]), Completed)
        assert not queue.gate(None, KIND).is_shut()


def test_runners_side_by_side_never_share_a_job(manifest: Manifest, engines: Engines) -> None:
    queue = JobQueue(manifest, random=system_random(), settings=JobSettings(backoff_s=0.0))
    tables, rounds = 4, 5
    lock = threading.Lock()
    inside: set[int | None] = set()
    ran: list[int] = []
    clashes: list[int | None] = []

    def handler(lease: Lease, stop: StopSignal) -> JobResult:
        table = lease.job.db_id
        with lock:
            clashes.extend([table] if table in inside else [])
            inside.add(table)
        engines.get("thread").submit(HERE + "echo", {}).wait(stop.is_set)
        with lock:
            inside.discard(table)
            ran.append(lease.job.job_id)
        return JobResult.DONE

    settings = JobRunnerSettings(interval_s=0.005)
    enqueued: list[int] = []
    with Scheduler(settings=SchedulerSettings(workers=3)) as scheduler:
        for number in range(3):
            scheduler.register(JobRunner(f"jobs-{number}", queue, {KIND: handler}, settings=settings))
        for _ in range(rounds):
            for table in range(1, tables + 1):
                wait_until(lambda table=table: queue.gate(table, KIND).pending_job_id() is None)  # type: ignore[misc]
                enqueued.append(queue.enqueue(KIND, db_id=table))
        wait_until(lambda: len(ran) >= len(enqueued))
    assert sorted(ran) == sorted(enqueued)
    assert clashes == []


def wait_until(condition: Callable[[], object]) -> None:
    for _ in range(int(WAIT_S / 0.01)):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it never came")


def test_a_runner_is_a_background_task() -> None:
    runner = JobRunner("jobs", MemorySource(), {KIND: done}, settings=JobRunnerSettings(priority=4))
    outcome: Outcome = runner.execute(context())
    assert outcome is TaskLoad.IDLE
    assert (runner.name, runner.interval_s, runner.priority, runner.runs_after) == ("jobs", 1.0, 4, ())
