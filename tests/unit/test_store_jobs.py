"""Jobs and chunks as a person sees them: states, a retry, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.errors import Closed, Invalid, NotFound
from penstock.store.store import Store

OURS = 64  # a kind of job that the store does not know, so that nobody else runs it


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with penstock.open(tmp_path / "store") as opened:
        opened.kv("users").put(b"ada", b"1815", durable=True)
        yield opened


def failed_job(store: Store, table: str) -> int:
    """A job that failed for good: its handler would say why."""
    info = store.port.table(table)
    assert info is not None
    job = store._jobs.enqueue(OURS, db_id=info.table_id, payload=b"p")
    lease = store._jobs.acquire("worker", {OURS})
    assert lease is not None
    store._jobs.fail(lease, ValueError("the disk is tired"), retry=False)
    return job


@pytest.mark.parametrize("how", ["open", "connect"])
def test_a_failed_job_is_seen_and_retried_once(store: Store, how: str) -> None:
    client: Any = store if how == "open" else penstock.connect(store.path)
    number = failed_job(store, "users")
    (job,) = [one for one in client.jobs() if one.job == number]
    assert (job.kind, job.table, job.state, job.attempts) == ("kind 64", "users", "failed", 1)
    assert "the disk is tired" in job.error
    assert job.finished_us is not None
    assert job.created_us <= job.finished_us
    new = client.retry_job(number)
    (again,) = [one for one in client.jobs() if one.job == new]
    assert (again.state, again.kind) == ("pending", "kind 64")
    with pytest.raises(penstock.errors.UniqueJobAlreadyPending):
        client.retry_job(number)
    with pytest.raises(Invalid, match="not failed for good"):
        client.retry_job(new)
    if how == "connect":
        client.close()


@pytest.mark.parametrize("job", [0, -1, True, 1.5, float("nan"), "1", None, 1 << 64])
def test_wrong_numbers_are_refused(store: Store, job: Any) -> None:
    with pytest.raises(Invalid):
        store.retry_job(job)
    with penstock.connect(store.path) as client, pytest.raises(Invalid):
        client.retry_job(job)


@pytest.mark.parametrize("method", ["compact", "run_jobs"])
def test_a_compaction_takes_in_what_nobody_waited_for(tmp_path: Path, method: str) -> None:
    with penstock.open(tmp_path / "store", settings=penstock.StoreSettings(flush_interval_s=3_600.0)) as store:
        table = store.kv("t", shards=2)
        table.put_many({b"%d" % number: b"v" for number in range(100)})
        getattr(store, method)("t")
        assert sum(chunk.rows for chunk in store.chunks("t")) == 100


def test_chunks_follow_flush_and_compaction(store: Store) -> None:
    assert store.chunks("users") == []
    assert store.run_jobs("users") == 0
    (chunk,) = store.chunks("users")
    assert (chunk.rows, chunk.level, chunk.start, chunk.end) == (1, 0, b"ada", b"ada\0")
    assert (Path(store.path) / chunk.file).stat().st_size == chunk.size_bytes
    with penstock.connect(store.path) as client:
        assert client.chunks("users") == [chunk]
    for name in ("absent", "", 1, None):
        with pytest.raises((Invalid, NotFound)):
            store.chunks(name)  # type: ignore[arg-type]
    with pytest.raises(NotFound):
        store.run_jobs("absent")
    with pytest.raises(NotFound):
        store.retry_job(999_999)


def test_a_closed_store_answers_nothing(tmp_path: Path) -> None:
    store = penstock.open(tmp_path / "store")
    store.close()
    for call in (store.jobs, lambda: store.chunks("x"), lambda: store.retry_job(1), lambda: store.run_jobs("x")):
        with pytest.raises(Closed):
            call()


def test_jobs_of_a_dropped_table_have_no_name(store: Store) -> None:
    number = failed_job(store, "users")
    store.drop("users")
    assert [job.table for job in store.jobs() if job.job == number] in ([""], [])
