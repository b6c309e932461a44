"""What a dead process left of the archive's moves is finished after the next opening, by a durable job."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.manifest.operations import SetResidency
from penstock.manifest.records import JobKind, Local, RemoteArchived
from penstock.store.archiving import StoreArchive
from penstock.testing.members import await_true


def opened(folder: Path, *, background: bool = False) -> Any:
    settings = penstock.StoreSettings(background=background, serve=False)
    return penstock.open(folder / "store", settings=settings, archive=f"file://{folder}/archive")


def states(store: Any) -> list[str]:
    return [chunk.residency for chunk in store.chunks("users")]


def verify_jobs(store: Any) -> list[str]:
    return [job.state for job in store.jobs() if job.kind == JobKind.VERIFY.name.lower()]


def filled(folder: Path) -> dict[bytes, bytes]:
    """Make a store with an archived table."""
    rows = {b"%06d" % key: random.Random(key).randbytes(100) for key in range(200)}
    with opened(folder) as store:
        store.kv("users").put_many(list(rows.items()), durable=True)
        store.compact("users")
        store.archive()
        assert states(store) == ["archived"]
    return rows


def unverify(folder: Path) -> None:
    """Leave the row as a crash between upload and verification does."""
    with opened(folder) as store:
        ((key, row),) = store._archive.moves.rows([store._info("users").table_id])
        assert isinstance(row.residency, RemoteArchived)
        store._manifest.apply([SetResidency(key, Local())])
        store._manifest.apply([SetResidency(key, RemoteArchived(row.residency.object))])
        assert states(store) == ["unverified"]


def run_pending(store: Any) -> None:
    """Do what the tasks of the archive do in the background."""
    store._archive.check_due()
    lease = store._jobs.acquire("test", (JobKind.VERIFY,))
    if lease is not None:
        store._archive.handle(lease, store._archive._stopping)
        store._jobs.complete(lease)


def test_an_upload_that_was_not_verified_is_verified_after_the_opening(tmp_path: Path) -> None:
    rows = filled(tmp_path)
    unverify(tmp_path)
    with opened(tmp_path) as store:
        store._archive.check_due()
        assert verify_jobs(store) == ["pending"]  # durable: a crash here does not lose it
        store._archive.check_due()
        assert verify_jobs(store) == ["pending"]
    with opened(tmp_path) as store:
        run_pending(store)
        assert states(store) == ["archived"]
        assert dict(store.kv("users").scan()) == rows
        run_pending(store)
        run_pending(store)
        assert verify_jobs(store) == ["done"]  # nothing is left, and no further job


def test_a_damaged_upload_is_forgotten_and_made_again(tmp_path: Path) -> None:
    filled(tmp_path)
    unverify(tmp_path)
    with opened(tmp_path) as store:
        (path,) = [path for path in (tmp_path / "archive").rglob("*") if path.name == Path(key_of(store)).name]
        path.write_bytes(bytes(path.stat().st_size))
        run_pending(store)
        assert states(store) == ["local"]
        store.archive()
        assert states(store) == ["archived"]
        assert store.verify_archive().damage == []


def key_of(store: Any) -> str:
    return str(store.chunks("users")[0].object)


def test_the_file_that_an_eviction_left_goes_after_the_opening(tmp_path: Path) -> None:
    rows = filled(tmp_path)
    with opened(tmp_path) as store:
        file = tmp_path / "store" / store.chunks("users")[0].file
        shutil.copy(file, tmp_path / "copy")
        assert store.evict("users").files == 1
        assert not file.exists()
    shutil.copy(tmp_path / "copy", file)  # as a crash before the unlink leaves it
    with opened(tmp_path) as store:
        run_pending(store)
        assert not file.exists()
        assert states(store) == ["evicted"]
        assert dict(store.kv("users").scan()) == rows  # through the cache
        assert verify_jobs(store) == ["done"]


def test_a_store_without_such_chunks_gets_no_job(tmp_path: Path) -> None:
    filled(tmp_path)
    with opened(tmp_path) as store:
        store.evict("users")
    with opened(tmp_path) as store:
        run_pending(store)
        assert verify_jobs(store) == []


def test_it_happens_by_itself(tmp_path: Path) -> None:
    filled(tmp_path)
    unverify(tmp_path)
    with opened(tmp_path, background=True) as store:
        store.trigger("archive")
        await_true(lambda: states(store) == ["archived"])


def test_a_step_that_is_left_out_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A seeded fault: openings that request nothing leave the chunk as it was."""
    filled(tmp_path)
    unverify(tmp_path)
    monkeypatch.setattr(StoreArchive, "_request_finish", lambda self: None)
    with opened(tmp_path) as store:
        run_pending(store)
        assert states(store) == ["unverified"]
