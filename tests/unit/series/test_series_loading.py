"""Large loads: staged as files, judged by the owner, applied once, and discarded when they are stored."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import penstock
from penstock.errors import Invalid, PenstockError
from penstock.series import loading
from penstock.series.machine import SeriesMachine
from penstock.store.store import Store, open_store
from penstock.testing import FakeClock, History, SimulatedDisk, Violation, explore
from penstock.testing.manifest import MemoryEngine

T0 = 1_700_000_000_000_000
QUIET = penstock.StoreSettings(background=False)


@pytest.fixture(params=["open", "connect"])
def stores(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Any, Any]]:
    monkeypatch.setattr(loading, "INLINE_BYTES_MAX", 2_000)
    monkeypatch.setattr(loading, "FILE_BYTES", 20_000)
    monkeypatch.setattr(loading, "ROWS_MAX", 300)
    with penstock.open(tmp_path / "store") as owner:
        if request.param == "open":
            yield owner, owner
        else:
            with penstock.connect(owner.path) as client:
                yield owner, client


def rows(count: int, first: int = 0, time: int = T0) -> pa.Table:
    numbers = np.arange(first, first + count)
    return pa.table(
        {
            "metric": ["cpu"] * count,
            "host": [f"h{number % 7}" for number in numbers],
            "time": time + numbers,
            "value": numbers.astype(float),
        }
    )


def staged(store: Any) -> list[Path]:
    return sorted(Path(store.path).glob("tables/*/*/*.samples"))


def values(table: Any) -> list[float]:
    return sorted(table.to_arrow().column("value").to_pylist())


def test_a_large_load(stores: tuple[Any, Any]) -> None:
    owner, store = stores
    metrics = owner.series("metrics", shards=2)
    assert store.load("metrics", rows(10_000), token=("loader", 1)).rows == 10_000
    assert store.load("metrics", rows(10_000), token=("loader", 1)).duplicate
    assert values(metrics) == list(map(float, range(10_000)))
    assert staged(owner) == []
    again = rows(3_000).set_column(3, "value", pa.array(np.full(3_000, -1.0)))
    store.load("metrics", again)
    assert values(metrics) == [-1.0] * 3_000 + list(map(float, range(3_000, 10_000)))
    assert metrics.cardinality().metrics == {"cpu": 7}
    assert owner.troubles() == []


def test_loads_of_several_processes(stores: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Sections join the files of their shard; very many sections become files."""
    owner, store = stores
    metrics = owner.series("metrics")
    parts = [store.prepare("metrics", rows(2_000)), store.prepare("metrics", rows(20, 2_000))]
    assert [part.parts[-1].file is None for part in parts] == [False, True]
    with store.batch() as batch:
        assert batch.load("metrics", parts) == 2_020
    monkeypatch.setattr(loading, "BUNDLE_BYTES_MAX", 1_000)
    with store.batch(token=("loader", 2)) as batch:
        batch.load("metrics", [store.prepare("metrics", rows(20, 3_000 + 20 * part)) for part in range(10)])
    assert values(metrics) == list(map(float, [*range(2_020), *range(3_000, 3_200)]))
    assert staged(owner) == []


def test_what_the_owner_refuses(stores: tuple[Any, Any]) -> None:
    owner, store = stores
    metrics = owner.series("metrics", options=penstock.SeriesOptions(series_max=5, window_s=None))
    with pytest.raises(Invalid, match="holds 0 series and this write adds 7"):
        store.load("metrics", rows(5_000))
    metrics.alter(series_max=7)
    late = rows(5_000, time=metrics._port.now_us() + 2 * 86_400_000_000)
    with pytest.raises(Invalid, match="in the future, and table metrics accepts 86,400 s"):
        store.load("metrics", late)
    with pytest.raises(Invalid, match="in the future"):
        store.prepare("metrics", late.slice(0, 1))
    owner.series("rolled", options=penstock.SeriesOptions(rollup=penstock.Rollup(source="metrics", step_s=60)))
    with pytest.raises(Invalid, match="table rolled is a rollup of metrics: write there"):
        store.load("rolled", rows(1))
    assert metrics.to_arrow().num_rows == 0
    store.load("metrics", rows(5_000))
    assert metrics.to_arrow().num_rows == 5_000


def open_here(disk: SimulatedDisk, clock: FakeClock) -> Store:
    settings = penstock.StoreSettings(background=False, reserve_bytes=4096)
    return open_store("/s", fs=disk, clock=clock, random=random.Random(1), engine=MemoryEngine, settings=settings)


class LoadScenario:
    """A series and a kv table are loaded under one token; then again, as whoever does not know the outcome does."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.rows = rows(60, time=self.clock.time_us() - 1_000_000)
        self.keys = pa.table({"key": [b"a"], "value": [b"1"]})

    def run(self, disk: SimulatedDisk, history: History) -> None:
        store = open_here(disk, self.clock)
        store.series("metrics", shards=2)
        store.kv("users")
        store.flush()
        history.note("made")
        self.load(store, history)
        store.series("metrics").write("up", 1.0, time=5, durable=True)
        store.close()

    def load(self, store: Store, history: History) -> None:
        with store.batch(token=("load", 1)) as batch:
            batch.load("metrics", self.rows)
            batch.load("users", self.keys)
        history.note("loaded")

    def row_counts(self, store: Store) -> tuple[int, int]:
        if "users" not in store.tables():
            return 0, 0
        return store.series("metrics").select("cpu").num_rows, len(dict(store.kv("users").scan()))

    def resume(self, disk: SimulatedDisk, history: History) -> None:
        store = open_here(disk, self.clock)
        if self.row_counts(store) not in ([(60, 1)] if ("loaded",) in history.events else [(0, 0), (60, 1)]):
            raise Violation(f"{self.row_counts(store)} rows of a load are there")
        if ("made",) in history.events:
            self.load(store, history)
            if self.row_counts(store) != (60, 1):
                raise Violation(f"{self.row_counts(store)} rows of a load that was done again are there")
        store.close()


@pytest.mark.parametrize("files", [True, False])
def test_a_crash_anywhere_leaves_all_of_a_load_or_nothing(files: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "INLINE_BYTES_MAX", 0 if files else 1 << 20)
    report = explore(LoadScenario(), modes=("strict",), depth=1, faults=None)
    assert report.crashes > 20
    assert not files or report.missing("unlink .samples", "fsync .samples") == []


def discarded_too_early(patch: pytest.MonkeyPatch) -> None:
    """The files are deleted before their samples are stored."""
    right = SeriesMachine._store_loaded

    def store_loaded(self: SeriesMachine, files: Any) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(type(self._maintenance), "flush", lambda *_: None)
            right(self, files)

    patch.setattr(SeriesMachine, "_store_loaded", store_loaded)


def test_seeded_bug_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "INLINE_BYTES_MAX", 0)
    discarded_too_early(monkeypatch)
    with pytest.raises((Violation, PenstockError)):
        explore(LoadScenario(), modes=("strict",), depth=1, faults=None)


def test_samples_that_cannot_be_stored_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are readable; after a crash the files are read again, and only then discarded."""
    monkeypatch.setattr(loading, "INLINE_BYTES_MAX", 0)
    disk, clock = SimulatedDisk(), FakeClock()
    store = open_here(disk, clock)
    metrics, some = store.series("metrics"), rows(1_000, time=clock.time_us() - 1_000_000)
    table = store._info("metrics").table_id

    def fail(*_: Any) -> None:
        raise OSError("the disk fails")

    with monkeypatch.context() as patch:
        patch.setattr(SeriesMachine, "_store_loaded", fail)
        store.load("metrics", some)
        clock.advance(10_000)
        store._dispatcher.retry()
        assert len(values(metrics)) == 1_000
    assert store._staging.purge([table]) == 0  # a record names the file
    store = open_here(disk.image().restore("strict"), clock)
    assert len(values(store.series("metrics"))) == 1_000
    assert [name for name in store._fs.listdir(f"/s/tables/{table}/0") if name.endswith(".samples")] == []
    store.close()


def test_a_file_that_two_batches_name_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "INLINE_BYTES_MAX", 2_000)
    with penstock.open(tmp_path / "store", settings=QUIET) as store:
        metrics = store.series("metrics")
        prepared = store.prepare("metrics", rows(1_000))
        with store.batch() as batch:
            batch.load("metrics", prepared)
        with pytest.raises(Invalid, match=r"is not staged \(any more\)"), store.batch() as batch:
            batch.load("metrics", prepared)
        assert len(values(metrics)) == 1_000
