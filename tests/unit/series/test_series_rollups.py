"""Rollup tables: what they hold, late samples and deletes, repeated jobs, jobs in other processes."""

from __future__ import annotations

import math
import struct
import threading
import time as clock
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import penstock
from penstock.errors import Invalid, KindMismatch, NotFound
from penstock.registry import series_kind
from penstock.series import rollups
from penstock.series.section import STALE_BITS
from penstock.store.store import Store, open_store
from penstock.testing import FakeClock

MINUTE, HOUR, DAY = 60_000_000, 3_600_000_000, 86_400_000_000
T0 = 1_700_000_000_000_000 // DAY * DAY
STALE = struct.unpack("<d", struct.pack("<Q", STALE_BITS))[0]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with penstock.open(tmp_path / "store", settings=penstock.StoreSettings(background=False)) as opened:
        yield opened


def make(store: Any, step_s: int = 300, **more: Any) -> tuple[Any, Any]:
    source = store.series("metrics", shards=2, options=penstock.SeriesOptions(bucket_s=7200, future_s=None))
    options = penstock.SeriesOptions(rollup=penstock.Rollup(source="metrics", step_s=step_s), **more)
    return source, store.series("rolled", shards=3, options=options)


def rolled(table: Any) -> dict[tuple[str, str, int], float]:
    rows = table.to_arrow()
    times = rows.column("time").cast("int64").to_pylist()
    return {
        (row["metric"], dict(row["labels"]).get("host", ""), time): row["value"]
        for row, time in zip(rows.to_pylist(), times, strict=True)
    }


def expected(samples: dict[tuple[str, str, int], float], step_s: int) -> dict[tuple[str, str, int], float]:
    steps: dict[tuple[str, str, int], list[tuple[int, float]]] = {}
    for (metric, host, time), value in sorted(samples.items()):
        if struct.pack("<d", value) != struct.pack("<d", STALE):
            steps.setdefault((metric, host, time // (step_s * 10**6) * step_s * 10**6), []).append((time, value))
    result: dict[tuple[str, str, int], float] = {}
    for (metric, host, time), some in steps.items():
        values = [value for _, value in some]
        totals = (len(values), math.fsum(values), min(values), max(values), values[-1])
        for name, value in zip(rollups.ROLLED, totals, strict=True):
            result[f"{metric}:{name}", host, time] = value
    return result


@pytest.mark.parametrize("step_s", [60, 300, 3600])
def test_a_rollup_follows_its_source(store: Store, step_s: int) -> None:
    source, target = make(store, step_s)
    samples: dict[tuple[str, str, int], float] = {}

    def write(host: str, minute: int, value: float) -> None:
        source.write("cpu", value, {"host": host}, time=T0 + minute * MINUTE)
        samples["cpu", host, T0 + minute * MINUTE] = value

    for minute in range(0, 300, 7):
        for host in "abc":
            write(host, minute, float(minute))
    write("a", 1, STALE)
    assert store.roll_up("rolled") == 1
    assert rolled(target) == expected(samples, step_s)
    assert store.roll_up("rolled") == 0  # nothing changed
    write("a", 3, -5.0)  # late
    write("b", -3000, 9.0)  # very late
    source.delete('cpu{host="c"}', T0 + 70 * MINUTE, T0 + 130 * MINUTE)
    for key in [k for k in samples if k[1] == "c" and T0 + 70 * MINUTE <= k[2] < T0 + 130 * MINUTE]:
        del samples[key]
    assert store.roll_up("rolled") == 1
    assert rolled(target) == expected(samples, step_s)
    store.checkpoint()
    store.compact("metrics")
    assert store.roll_up("rolled") == 0  # compaction changes no sample
    write("d", 500, 1.0)
    assert store.roll_up("rolled") == 1
    assert rolled(target) == expected(samples, step_s)


def test_a_long_backlog_is_done_in_several_commits(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollups, "HOURS_MAX", 5)
    source, target = make(store)
    samples = {("cpu", "a", T0 + hour * HOUR): float(hour) for hour in range(17)}
    for (metric, host, time), value in samples.items():
        source.write(metric, value, {"host": host}, time=time)
    assert store.roll_up("rolled") == 4
    assert rolled(target) == expected(samples, 300)
    assert store.roll_up("rolled") == 0


def test_a_job_that_is_repeated_or_late_does_no_harm(store: Store) -> None:
    source, target = make(store)
    source.write("cpu", 1.0, time=T0, durable=True)
    info = store.port.table("rolled")
    assert info is not None
    early = series_kind().derive(info, store.port)
    assert early is not None
    results = store._derived._run_here(early)
    source.write("cpu", 3.0, time=T0 + 1)
    source.write("mem", 3.0, time=T0 + HOUR)
    assert store.roll_up("rolled") == 1
    right = rolled(target)
    for _ in range(2):  # it computed an older state, and comes after a newer one
        early.commit(results)
    early.close()
    assert rolled(target) != right
    assert store.roll_up("rolled") == 1  # what it undid is due again
    assert rolled(target) == right


def test_a_rollup_is_read_only_and_keeps_its_own_retention(store: Store) -> None:
    source, target = make(store, retention_s=86_400)
    for write in (
        lambda: target.write("cpu", 1.0, time=T0),
        lambda: target.write_columns("cpu", [1.0], times=[T0]),
        lambda: target.delete("cpu"),
    ):
        with pytest.raises(Invalid, match="table rolled is a rollup of metrics: write there"):
            write()  # type: ignore[no-untyped-call]
    source.write("cpu", 1.0, time=T0)
    store.roll_up("rolled")
    assert target.to_arrow().num_rows == 5
    store.port.maintain()
    store.flush()
    assert target.to_arrow().num_rows == 0
    assert source.to_arrow().num_rows == 1
    assert store.roll_up("rolled") == 0
    with pytest.raises(KindMismatch, match="not computed from another"):
        store.roll_up("metrics")


@pytest.mark.parametrize("through", ["open", "connect"])
@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ("metrcs", NotFound, "there is no table metrcs to make a rollup of: create it first, or correct source="),
        ("users", KindMismatch, "table users is of the kind kv: a rollup is made of a series table"),
        ("rolled", Invalid, "table rolled cannot be a rollup of itself"),
    ],
)
def test_a_source_that_cannot_be(tmp_path: Path, through: str, source: str, error: Any, message: str) -> None:
    options = penstock.SeriesOptions(rollup=penstock.Rollup(source=source, step_s=60))
    with penstock.open(tmp_path / "store") as store, penstock.connect(store.path) as client:
        store.series("metrics")
        store.kv("users")
        with pytest.raises(error, match=message):
            (store if through == "open" else client).series("rolled", options=options)
        assert [info.name for info in store.port.tables()] == ["metrics", "users"]


def test_a_source_with_many_samples_in_no_file(store: Store) -> None:
    """More than a part of a job can carry: they are stored first."""
    source, target = make(store, 3600)
    count = 200_000
    source.write_columns("cpu", [1.0] * count, times=range(T0, T0 + count))
    assert source.statistics().files == 0
    assert store.roll_up("rolled") == 1
    assert rolled(target)["cpu:count", "", T0] == count


@pytest.mark.parametrize("samples_again", [True, False])
def test_a_source_that_was_dropped_and_created_again(store: Store, samples_again: bool) -> None:
    source, target = make(store)
    source.write_columns("old", [1.0, 2.0], times=[T0, T0 + 5 * HOUR])
    assert store.roll_up("rolled") == 1
    before = rolled(target)
    store.drop("metrics")
    assert store.roll_up("rolled") == 0
    assert rolled(target) == before  # it keeps what it has, until there is another source
    source, target = make(store)
    if samples_again:
        source.write("new", 3.0, time=T0)
    assert store.roll_up("rolled") == 1
    assert rolled(target) == (expected({("new", "", T0): 3.0}, 300) if samples_again else {})
    assert store.roll_up("rolled") == 0


def test_progress_of_an_earlier_release_goes_on(store: Store) -> None:
    """It has no id of its source: what the rollup holds is kept."""
    source, target = make(store)
    source.write("cpu", 1.0, time=T0, durable=True)
    info = store.port.table("rolled")
    assert info is not None
    plan = series_kind().derive(info, store.port)
    assert plan is not None
    plan._after = msgspec.structs.replace(plan._after, source=0)
    plan.commit(store._derived._run_here(plan))
    plan.close()
    source.write("cpu", 2.0, time=T0 + 3 * HOUR)
    assert store.roll_up("rolled") == 1
    assert rolled(target) == expected({("cpu", "", T0): 1.0, ("cpu", "", T0 + 3 * HOUR): 2.0}, 300)


@pytest.mark.parametrize(
    "wrong",
    [
        {"source": "", "step_s": 60},
        {"source": 1, "step_s": 60},
        {"source": "a", "step_s": 7},
        {"source": "a", "step_s": 7200},
    ],
)
def test_wrong_rollups(wrong: dict[str, Any]) -> None:
    with pytest.raises(Invalid, match="of a rollup"):
        penstock.Rollup(**wrong)


def test_jobs_run_by_themselves_in_another_process(tmp_path: Path) -> None:
    with penstock.open(tmp_path / "store") as store:
        source, target = make(store)
        samples = {("cpu", "a", T0 + n * MINUTE): float(n) for n in range(30)}
        for (metric, host, time), value in samples.items():
            source.write(metric, value, {"host": host}, time=time)
        store.flush()
        store._scheduler.trigger("derived-tables")
        for _ in range(600):
            if rolled(target) == expected(samples, 300):
                break
            store._scheduler.trigger("derived-table-jobs")
            clock.sleep(0.1)
        assert rolled(target) == expected(samples, 300)


def test_an_older_computation_does_not_replace_a_newer_one(store: Any) -> None:
    source, table = make(store)
    source.write("cpu", 1.0, time=T0, durable=True)
    derived, planned, go_on = store._derived, threading.Event(), threading.Event()

    def slow(plan: Any) -> list[Any]:
        planned.set()
        assert go_on.wait(30)
        results: list[Any] = derived._run_here(plan)
        return results

    older = threading.Thread(target=derived._derive, args=(store._info("rolled"), slow))
    older.start()
    assert planned.wait(30)
    source.write("cpu", 2.0, time=T0 + 1)
    newer = threading.Thread(target=store.roll_up, args=("rolled",))
    newer.start()
    newer.join(0.3)
    go_on.set()
    older.join(30)
    newer.join(30)
    assert rolled(table)["cpu:sum", "", T0] == 3.0


# -- many samples


def many(source: Any, hosts: int = 5, hours: int = 3) -> dict[tuple[str, str, int], float]:
    samples = {
        ("cpu", f"h{host}", T0 + minute * MINUTE): float(host * minute)
        for host in range(hosts)
        for minute in range(0, 60 * hours, 2)
    }
    by_host: dict[str, list[tuple[int, float]]] = {}
    for (_, host, time), value in samples.items():
        by_host.setdefault(host, []).append((time, value))
    for host, some in by_host.items():
        source.write_columns("cpu", [value for _, value in some], {"host": host}, times=[time for time, _ in some])
    return samples


@pytest.fixture
def small_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollups, "JOB_RESULTS", 100)
    monkeypatch.setattr(rollups, "PART_RESULTS", 20)
    monkeypatch.setattr(rollups, "COMMIT_BYTES", 1_000)


@pytest.mark.usefixtures("small_jobs")
@pytest.mark.parametrize("step_s", [60, 3600])
def test_jobs_and_commits_have_a_bound(store: Store, monkeypatch: pytest.MonkeyPatch, step_s: int) -> None:
    source, target = make(store, step_s)
    samples = many(source)
    sizes: list[int] = []
    submit = store.port.commit_and_wait

    def counted(group: Any, size: int) -> Any:
        sizes.append(size)
        return submit(group, size)

    monkeypatch.setattr(store.port, "commit_and_wait", counted)
    assert store.roll_up("rolled") == (3 if step_s == 60 else 1)
    assert rolled(target) == expected(samples, step_s)
    labels = 600  # of a section
    assert len(sizes) > 2
    assert max(sizes) < 2 * 1_000 + 3 * (1_024 + 2 * labels)
    source.delete('cpu{host="h3"}', T0 + 30 * MINUTE, T0 + 150 * MINUTE)
    samples = {k: v for k, v in samples.items() if k[1] != "h3" or not 30 <= (k[2] - T0) // MINUTE < 150}
    assert store.roll_up("rolled") > 0
    assert rolled(target) == expected(samples, step_s)


@pytest.mark.usefixtures("small_jobs")
@pytest.mark.parametrize("anew", [False, True])
def test_a_job_that_ends_between_its_commits_is_repeated(
    store: Store, monkeypatch: pytest.MonkeyPatch, anew: bool
) -> None:
    source, target = make(store)
    if anew:
        source.write("old", 1.0, time=T0 - 50 * HOUR)
        assert store.roll_up("rolled") == 1
        store.drop("metrics")
        source, target = make(store)
    samples = many(source)
    submit, left = store.port.commit_and_wait, 0

    def failing(*arguments: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError("the disk is gone")
        return submit(*arguments)

    monkeypatch.setattr(store.port, "commit_and_wait", failing)
    for commits in (0, 1, 2, 3):
        left = commits
        with pytest.raises(OSError, match="gone"):
            store.roll_up("rolled")
    left = 1_000
    assert store.roll_up("rolled") > 0
    assert rolled(target) == expected(samples, 300)
    assert store.roll_up("rolled") == 0


# -- retention of the source


@pytest.mark.parametrize(("bucket_s", "step_s"), [(86_400, 300), (3_600, 3_600), (300, 60), (1_000, 3_600)])
def test_late_samples_where_retention_deleted_others(tmp_path: Path, bucket_s: int, step_s: int) -> None:
    """They must not replace what the rollup has of the samples that are gone."""
    fake = FakeClock()
    with open_store(str(tmp_path / "store"), clock=fake, settings=penstock.StoreSettings(background=False)) as store:
        options = penstock.SeriesOptions(bucket_s=bucket_s, retention_s=7_200)
        source = store.series("metrics", shards=2, options=options)
        table_options = penstock.SeriesOptions(rollup=penstock.Rollup(source="metrics", step_s=step_s))
        target = store.series("rolled", options=table_options)
        start = fake.time_us() // DAY * DAY + 5 * MINUTE
        samples = {("cpu", host, start + n * MINUTE): float(n) for n in range(0, 60, 3) for host in "abcdef"}
        for (metric, host, time), value in samples.items():
            source.write(metric, value, {"host": host}, time=time)
        store.roll_up("rolled")
        before = rolled(target)
        assert before == expected(samples, step_s)
        fake.advance((7_200 + 40 * 60) if bucket_s < 86_400 else 2 * 86_400)
        store.port.maintain()  # deletes buckets of the source: the first half of the hour, or the day
        store.flush()
        deleted_count = len(samples) - source.to_arrow().num_rows
        assert deleted_count
        for back_s in (0, 5_000):  # a clock that goes back opens nothing
            fake.jump(-back_s)
            for n in (1, 58):
                source.write("cpu", 1_000.0 + n, {"host": "z"}, time=start + n * MINUTE)
            store.roll_up("rolled")
            after = rolled(target)
            assert {key: value for key, value in after.items() if key[1] != "z"} == before
