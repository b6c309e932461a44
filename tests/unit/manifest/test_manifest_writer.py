"""Windows, waiters, limits and the end of the writer."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.errors import Backpressure, Closed, CommitFailed, Invalid, OutcomeUnknown, Poisoned, WaitExpired
from penstock.host import threads
from penstock.host.clock import Clock, SystemClock
from penstock.host.files import FileSystem
from penstock.manifest.engine import ManifestEngine, WriteView
from penstock.manifest.environment import LmdbEngine
from penstock.manifest.keys import ChunkKey, ComponentId
from penstock.manifest.manifest import Manifest
from penstock.manifest.operations import BumpGeneration, CommitReceipt, ManifestOp, UpsertChunk
from penstock.manifest.records import ChunkEntryRecord
from penstock.manifest.settings import ManifestSettings
from penstock.manifest.tables import GENERATIONS
from penstock.testing import FakeClock, SimulatedDisk
from penstock.testing.disk import Fault
from penstock.testing.manifest import MemoryEngine


class Gated:
    """An engine whose transactions can be counted, held up and failed."""

    def __init__(self, inner: ManifestEngine) -> None:
        self.inner = inner
        self.go = threading.Event()
        self.go.set()
        self.begun = threading.Event()
        self.transactions = 0
        self.attempts = 0
        self.fail_at: int | None = None
        self.fail_next: BaseException | None = None

    @contextmanager
    def write(self) -> Iterator[WriteView]:
        with self.inner.write() as view:
            yield view
            self.begun.set()
            assert self.go.wait(30)
            self.attempts += 1
            if self.attempts == self.fail_at:
                raise CommitFailed("the disk said no")
            if self.fail_next is not None:
                error, self.fail_next = self.fail_next, None
                raise error
        self.transactions += 1

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)


class Bench:
    """A manifest over a gated engine."""

    def __init__(self, opener: type[MemoryEngine] | type[LmdbEngine], path: str, fs: FileSystem | None) -> None:
        self.gated: Gated
        self.settings = ManifestSettings(channel_batches_max=100, window_batches_max=1_000)

        def engine(path: str, settings: ManifestSettings, fs: FileSystem, clock: Clock) -> ManifestEngine:
            self.gated = Gated(opener(path, settings, fs, clock))
            return self.gated  # type: ignore[return-value]

        self.manifest = Manifest.open(path, self.settings, fs=fs, clock=SystemClock(), engine=engine)

    def hold_and_queue(self, batches: list[list[ManifestOp]]) -> list[CommitReceipt | Exception]:
        """Hold one commit up, let all batches queue behind it, let go; what each was told."""
        answers: list[CommitReceipt | Exception] = [RuntimeError("unanswered")] * len(batches)

        def work(i: int) -> None:
            try:
                answers[i] = self.manifest.apply(batches[i])
            except Exception as error:
                answers[i] = error

        self.gated.begun.clear()
        self.gated.go.clear()
        first = threading.Thread(target=self.manifest.apply, args=([],))
        first.start()
        assert self.gated.begun.wait(10)
        threads = [threading.Thread(target=work, args=(i,)) for i in range(len(batches))]
        for thread in threads:
            thread.start()
        waiting = self.manifest._writer._channel
        while len(waiting) < min(len(batches), self.settings.channel_batches_max):
            threads[0].join(0.001)
        self.gated.transactions = self.gated.attempts = 0
        self.gated.go.set()
        for thread in [first, *threads]:
            thread.join(30)
        return answers


@pytest.fixture(params=["memory", "lmdb"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    if request.param == "memory":
        bench = Bench(MemoryEngine, "manifest", SimulatedDisk())
    else:
        bench = Bench(LmdbEngine, str(tmp_path / "manifest"), None)
    yield bench
    bench.gated.go.set()
    bench.manifest.close()


def chunk_op(number: int, file_name: str | None = None) -> ManifestOp:
    return UpsertChunk(ChunkKey(1, number), ChunkEntryRecord(file_name or f"f{number}", 1, 1))


def test_batches_that_wait_together_share_a_transaction(bench: Bench) -> None:
    answers = bench.hold_and_queue([[chunk_op(i)] for i in range(1, 101)])
    assert bench.gated.transactions == 2  # the one held up, and one for the hundred
    generations = sorted(answer.generation for answer in answers if isinstance(answer, CommitReceipt))
    assert generations == list(range(2, 102))
    assert len(list(bench.manifest.scan_chunks(1))) == 100


def test_a_bad_batch_fails_alone(bench: Bench) -> None:
    bench.manifest.apply([chunk_op(1_000, "taken")])
    batches = [[chunk_op(i)] for i in range(1, 101)]
    batches[41] = [chunk_op(42), chunk_op(43_000, "taken")]
    answers = bench.hold_and_queue(batches)
    assert isinstance(answers[41], Invalid)
    assert sum(isinstance(answer, CommitReceipt) for answer in answers) == 99
    assert {key.chunk_id for key, _ in bench.manifest.scan_chunks(1)} == {*range(1, 101), 1_000} - {42}


def test_a_failed_commit_is_told_to_all_and_not_run_again(bench: Bench) -> None:
    bench.gated.fail_at = 2
    answers = bench.hold_and_queue([[chunk_op(i)] for i in range(1, 11)])
    assert [str(answer) for answer in answers] == ["the disk said no"] * 10
    assert bench.gated.attempts == 2
    assert list(bench.manifest.scan_chunks(1)) == []
    assert bench.manifest.apply([chunk_op(11)]).generation == 2
    assert [key.chunk_id for key, _ in bench.manifest.scan_chunks(1)] == [11]


def test_an_unknown_outcome_reloads_the_generations(bench: Bench) -> None:
    """The commit that was told as unknown is there after all: its generation must not be given out again."""
    manifest, inner = bench.manifest, bench.gated.inner
    manifest.apply([BumpGeneration(70, 5)])
    handle = manifest.register_waiter(70, 10, timeout_s=60.0)
    bench.gated.fail_next = OutcomeUnknown("who knows")
    with pytest.raises(OutcomeUnknown):
        manifest.apply([BumpGeneration(70, 5)])
    with inner.write() as view:  # what the unknown commit would have left
        record = GENERATIONS.get(view, 70)
        assert record is not None
        GENERATIONS.put(view, 70, type(record)(10, 0))
    manifest.apply([])
    assert handle.result(0.0) == 10
    assert manifest.apply([BumpGeneration(70, 1)]).generation == 11


def test_a_full_channel_refuses(bench: Bench) -> None:
    answers = bench.hold_and_queue([[chunk_op(i)] for i in range(1, 121)])
    refused = [answer for answer in answers if isinstance(answer, Backpressure)]
    assert len(refused) == 20
    assert "limit 100" in str(refused[0])
    assert len(list(bench.manifest.scan_chunks(1))) == 100


def test_a_commit_that_is_not_begun_in_time_is_withdrawn(bench: Bench) -> None:
    bench.gated.begun.clear()
    bench.gated.go.clear()
    first = threading.Thread(target=bench.manifest.apply, args=([chunk_op(1)],))
    first.start()
    assert bench.gated.begun.wait(10)
    with pytest.raises(Backpressure, match="did not begin"):
        bench.manifest.apply([chunk_op(2)], timeout_s=0.01)
    bench.gated.go.set()
    first.join(10)
    assert bench.manifest.sync() == 1
    assert [key.chunk_id for key, _ in bench.manifest.scan_chunks(1)] == [1]


def test_sync_comes_after_what_was_submitted_before(bench: Bench) -> None:
    answers = bench.hold_and_queue([[chunk_op(i)] for i in range(1, 11)])
    assert all(isinstance(answer, CommitReceipt) for answer in answers)
    assert bench.manifest.sync() == 11


def test_closing_commits_what_waits_and_answers_everyone(bench: Bench) -> None:
    handle = bench.manifest.register_waiter(5, 1, timeout_s=60.0)
    results: list[object] = []

    def work(number: int) -> None:
        results.append(bench.manifest.apply([chunk_op(number)]))

    bench.gated.begun.clear()
    bench.gated.go.clear()
    threads = [threading.Thread(target=work, args=(i,)) for i in range(1, 11)]
    for thread in threads:
        thread.start()
    while len(bench.manifest._writer._channel) < 9:
        threads[0].join(0.001)
    closing = threading.Thread(target=bench.manifest.close)
    closing.start()
    while not bench.manifest._writer._closing:
        closing.join(0.001)
    with pytest.raises(Closed):
        bench.manifest.apply([chunk_op(99)])
    bench.gated.go.set()
    for thread in [*threads, closing]:
        thread.join(10)
    assert len(results) == 10
    with pytest.raises(Closed):
        handle.result(0.0)
    with pytest.raises(Closed):
        bench.manifest.register_waiter(5, 1, timeout_s=1.0)


def test_a_mistake_in_the_writer_thread_reaches_everyone(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    handle = bench.manifest.register_waiter(5, 1, timeout_s=60.0)
    monkeypatch.setattr(bench.manifest._writer, "_drain", lambda: 1 / 0)
    answers = bench.hold_and_queue([[chunk_op(1)]])
    assert isinstance(answers[0], Poisoned)
    with pytest.raises(Poisoned):
        handle.result(5.0)
    with pytest.raises(Closed):
        bench.manifest.apply([])


# -- waking


def test_refused_batches_among_others_leave_nobody_asleep(manifest: Manifest) -> None:
    answers: list[CommitReceipt | Invalid] = []

    def work(worker: int) -> None:
        for i in range(20):
            try:
                answers.append(manifest.apply([BumpGeneration(9, (worker + i) % 3)]))
            except Invalid as error:
                answers.append(error)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(answers) == 320
    assert manifest.generation(9) == sum((worker + i) % 3 for worker in range(16) for i in range(20))


def test_those_who_gave_up_leave_nobody_asleep(bench: Bench) -> None:
    """Their turn to wake the next comes when nobody is there."""
    answers: list[CommitReceipt | Exception] = []

    def work(number: int, timeout_s: float) -> None:
        try:
            answers.append(bench.manifest.apply([chunk_op(number)], timeout_s=timeout_s))
        except Exception as error:
            answers.append(error)

    def begin(numbers: range, timeout_s: float) -> list[threading.Thread]:
        workers = [threading.Thread(target=work, args=(number, timeout_s)) for number in numbers]
        for thread in workers:
            thread.start()
        return workers

    bench.gated.begun.clear()
    bench.gated.go.clear()
    first = begin(range(1, 2), 30.0)
    assert bench.gated.begun.wait(10)
    early = begin(range(2, 5), 1.0)
    late = begin(range(5, 9), 30.0)
    while len(bench.manifest._writer._channel) < 7:
        late[-1].join(0.001)
    window = bench.gated.begun
    window.clear()
    release = bench.gated.go
    bench.gated.go = threading.Event()  # the first goes on, and the window of the others is held
    release.set()
    assert window.wait(10)
    for thread in early:
        thread.join(30)
    assert all(isinstance(answer, OutcomeUnknown) for answer in answers if not isinstance(answer, CommitReceipt))
    bench.gated.go.set()
    for thread in first + late:
        thread.join(30)
    assert sum(isinstance(answer, CommitReceipt) for answer in answers) == 5
    assert len(list(bench.manifest.scan_chunks(1))) == 8


# -- waiting for generations


def test_waiters_wake_when_their_generation_is_there(manifest: Manifest) -> None:
    early, late = manifest.register_waiter(9, 2, timeout_s=60.0), manifest.register_waiter(9, 3, timeout_s=60.0)
    other = manifest.register_waiter(8, 1, timeout_s=60.0)
    manifest.apply([BumpGeneration(9, 2)])
    assert early.result(0.0) == 2
    assert not late.done()
    row = manifest.read(lambda view: GENERATIONS.get(view, 9))
    assert row is not None
    assert [(waiter.waiter_id, waiter.target_generation) for waiter in row.blocked_waiters] == [(late.waiter_id, 3)]
    with pytest.raises(WaitExpired):
        late.result(0.0)
    manifest.apply([BumpGeneration(9, 5)])
    assert late.result(0.0) == 7
    assert manifest.wait_for_generation(9, 7, timeout_s=0.0) == 7
    assert not other.done()


def test_waiters_expire_on_monotonic_time(manifest: Manifest, clock: FakeClock) -> None:
    soon, later = manifest.register_waiter(9, 1, timeout_s=10.0), manifest.register_waiter(9, 1, timeout_s=20.0)
    clock.jump(3600)
    manifest.sync()
    assert not soon.done()
    clock.jump(-7200)
    clock.advance(10.5)
    with pytest.raises(WaitExpired, match="deadline"):
        soon.result(10.0)
    assert not later.done()
    manifest.apply([BumpGeneration(9, 1)])
    assert later.result(0.0) == 1


def test_waiters_are_bounded(disk: SimulatedDisk, clock: FakeClock) -> None:
    settings = ManifestSettings(waiters_max=2)
    with Manifest.open("manifest", settings, fs=disk, clock=clock, engine=MemoryEngine) as manifest:
        manifest.register_waiter(9, 1, timeout_s=60.0)
        manifest.register_waiter(9, 1, timeout_s=60.0)
        with pytest.raises(Backpressure, match="2 threads"):
            manifest.register_waiter(9, 1, timeout_s=60.0)
        manifest.apply([BumpGeneration(9, 1)])
        manifest.register_waiter(9, 2, timeout_s=60.0)


def test_many_threads_commit_and_every_receipt_is_its_own(manifest: Manifest) -> None:
    generations: list[int] = []

    def work(worker: int) -> None:
        for i in range(20):
            generations.append(manifest.apply([chunk_op(worker * 1_000 + i)]).generation)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(generations) == list(range(1, 161))
    assert manifest.generation(ComponentId.MANIFEST) == 160


def test_a_fault_of_the_disk_fails_its_commit_only() -> None:
    for at in range(1, 12):
        disk = SimulatedDisk(faults=(Fault(at, "eio"),))
        try:
            manifest = Manifest.open("manifest", fs=disk, engine=MemoryEngine)
        except (CommitFailed, OSError):
            continue
        done = set()
        for number in range(1, 6):
            try:
                manifest.apply([chunk_op(number)])
                done.add(number)
            except CommitFailed:
                pass
        assert {key.chunk_id for key, _ in manifest.scan_chunks(1)} == done
        assert len(done) >= 4
        manifest.close()


class Interrupting:
    """A lock that is interrupted, as by Ctrl-C, when a function enters or leaves it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.acquire, self.release = self._lock.acquire, self._lock.release
        self.at: tuple[str, str] | None = None

    def _look(self, moment: str) -> None:
        if self.at == (moment, sys._getframe(2).f_code.co_name):
            self.at = None
            raise KeyboardInterrupt

    def __enter__(self) -> bool:
        self._look("enters")
        return self._lock.__enter__()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        self._look("leaves")


@pytest.mark.parametrize("at", [("leaves", "_take_part"), ("enters", "_pass_turn"), ("leaves", "_pass_turn")])
def test_an_interrupt_never_leaves_the_turn_taken(tmp_path: Path, at: tuple[str, str]) -> None:
    locks: list[Interrupting] = []

    def make(name: str, reentrant: bool) -> threads.Mutex:
        if name != "manifest.writer":
            return threading.RLock() if reentrant else threading.Lock()
        locks.append(Interrupting())
        return locks[-1]

    before = threads.install_lock_maker(make)
    try:
        manifest = Manifest.open(str(tmp_path / "manifest"))
    finally:
        threads.install_lock_maker(before)
    with manifest:
        locks[0].at = at
        with pytest.raises(KeyboardInterrupt):
            manifest.apply([BumpGeneration(64)])
        assert locks[0].at is None
        assert manifest.apply([BumpGeneration(64)], timeout_s=20).generation in (1, 2)


def test_odd_time_outs_change_nothing(manifest: Manifest) -> None:
    for timeout_s in (-1.0, -0.5, math.nan):
        with pytest.raises(Invalid, match="give 0 or more"):
            manifest.apply([BumpGeneration(64)], timeout_s=timeout_s)
    assert manifest.apply([BumpGeneration(64)], timeout_s=math.inf).generation == 1


def test_settings_are_checked() -> None:
    for wrong in (
        {"map_bytes": 1},
        {"map_bytes": 2 << 30, "map_bytes_max": 1 << 30},
        {"headroom_ratio": 1.0},
        {"channel_batches_max": 0},
        {"commit_latency_budget_s": -1.0},
    ):
        with pytest.raises(Invalid):
            ManifestSettings(**wrong)
