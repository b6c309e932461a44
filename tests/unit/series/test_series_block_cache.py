"""Blocks that are kept decoded: the same samples, within bounds, and never those of another file."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import penstock
from penstock.series import block_cache, reading
from penstock.series.block_cache import BlockCache
from penstock.series.blocks import Block
from penstock.series.promql_source import MatrixCache
from penstock.series.queries import SeriesQuery, encode_query

SERIES, COUNT = 5, 1_500  # each has chunks of its own
BASE = 1_700_000_000 // 86_400 * 86_400 * 1_000_000


def us(second: int) -> int:
    return BASE + second * 1_000_000


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch) -> BlockCache:
    cache = BlockCache()
    monkeypatch.setattr(reading, "BLOCKS", cache)
    return cache


def filled(store: Any) -> Any:
    table = store.series("metrics")
    for number in range(SERIES):
        values = np.arange(COUNT) + number / 8
        table.write_columns("m", values, {"n": str(number)}, times=us(0) + np.arange(COUNT) * 1_000_000)
    store.flush()
    store.compact("metrics")
    return table


def rows(table: pa.Table) -> list[tuple[str, int, float]]:
    labels = [dict(pairs)["n"] for pairs in table.column("labels").to_pylist()]
    times = table.column("time").cast(pa.int64()).to_pylist()
    return list(zip(labels, times, table.column("value").to_pylist(), strict=True))


def expected(start: int, end: int) -> list[tuple[str, int, float]]:
    moments = range(max(0, start), min(COUNT, end))
    return [(str(n), us(moment), moment + n / 8) for n in range(SERIES) for moment in moments]


def test_what_is_kept_is_what_was_read(tmp_path: Path, cache: BlockCache, monkeypatch: pytest.MonkeyPatch) -> None:
    with penstock.open(tmp_path / "store") as store:
        table = filled(store)
        for start, end in ((0, COUNT), (100, 200), (-5, 3), (COUNT - 1, COUNT + 9), (700, 701), (500, 500)):
            for _ in range(2):
                samples = table.select("m", us(start), us(end))
                assert rows(samples) == expected(start, end)
        assert len(cache) == 1
        monkeypatch.setattr(Block, "_decode", None)  # nothing is decoded again
        assert rows(table.select("m", us(0), us(COUNT))) == expected(0, COUNT)


def test_a_change_is_seen(tmp_path: Path, cache: BlockCache) -> None:
    """A new sample, a delete and another file are read at once, and the old ones are not."""
    with penstock.open(tmp_path / "store") as store:
        table = filled(store)
        everything = expected(0, COUNT)
        assert rows(table.select("m")) == everything
        table.write("m", -1.0, {"n": "2"}, time=us(7))
        changed = [(n, at, -1.0 if (n, at) == ("2", us(7)) else value) for n, at, value in everything]
        assert rows(table.select("m")) == changed
        table.delete('m{n="3"}', durable=True)
        changed = [row for row in changed if row[0] != "3"]
        assert rows(table.select("m")) == changed
        store.compact("metrics")
        assert rows(table.select("m")) == changed
        for value in cache._entries.values():
            for chunk in value.chunks.values():
                with pytest.raises(ValueError, match="read-only"):
                    chunk[0] = 0


@pytest.mark.parametrize("bytes_max", [0, 1, 3_000, 20_000, 40_000])
def test_it_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bytes_max: int) -> None:
    cache = BlockCache(bytes_max)
    monkeypatch.setattr(reading, "BLOCKS", cache)
    with penstock.open(tmp_path / "store") as store:
        table = filled(store)
        for number in range(SERIES):
            assert rows(table.select(f'm{{n="{number}"}}')) == [r for r in expected(0, COUNT) if r[0] == str(number)]
            cached_bytes = sum(chunk.nbytes for entry in cache._entries.values() for chunk in entry.chunks.values())
            assert cached_bytes <= cache._bytes <= bytes_max
        assert rows(table.select("m")) == expected(0, COUNT)


def test_many_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = BlockCache(30_000)  # so small that entries come and go
    monkeypatch.setattr(reading, "BLOCKS", cache)
    with penstock.open(tmp_path / "store") as store, ThreadPoolExecutor(4) as pool:
        table = filled(store)

        def read(number: int) -> bool:
            return rows(table.select("m", us(number), us(900))) == expected(number, 900)

        assert all(pool.map(read, range(40)))
        assert cache._bytes == sum(entry.bytes for entry in cache._entries.values())


def test_the_default_is_what_the_limits_say() -> None:
    page = (Path(__file__).parents[3] / "docs" / "limits.md").read_text()
    assert f"{block_cache.CACHE_BYTES_MAX >> 20} MiB" in page


@pytest.mark.parametrize("step", [1, 7, 60, 10_000])
@pytest.mark.parametrize("where", ["files", "memory", "both"])
def test_only_the_last_sample_before_each_step(tmp_path: Path, cache: BlockCache, step: int, where: str) -> None:
    """What PromQL reads for instants: the last sample at or before each step is there, and few others."""
    with penstock.open(tmp_path / "store") as store:
        table = filled(store) if where != "memory" else store.series("metrics")
        if where != "files":
            for number in range(SERIES):
                table.write_columns("m", [-1.0, -2.0], {"n": str(number)}, times=[us(7) + 500_000, us(8)])
        start, end = us(3), us(900)
        arguments: dict[str, Any] = {"steps_from": start, "step": step * 1_000_000}
        argument = encode_query(SeriesQuery("m", BASE, end + 1, **arguments))
        info = store.port.table("metrics")
        assert info is not None
        batches = list(store.port.query(info, "runs", argument))
        by_series: dict[int, dict[int, float]] = {}
        for batch in batches:
            for labels, at, value in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                if labels is not None:
                    series = by_series.setdefault(len(by_series), {})
                series[at] = value
        assert len(by_series) == SERIES
        every = {(n, at): value for n, at, value in rows(table.select("m", BASE, end + 1))}
        for number, samples in by_series.items():
            mine = {at: value for (n, at), value in every.items() if n == str(number)}
            assert samples.items() <= mine.items()
            needed = {
                max(at for at in mine if at <= time)
                for time in range(start, end + 1, step * 1_000_000)
                if min(mine) <= time
            }
            assert needed <= samples.keys()
            assert len(samples) <= len(needed) + 2


@pytest.mark.parametrize("make", [BlockCache, MatrixCache])
def test_a_forked_child_does_not_wait_for_a_lock_of_its_parent(make: Any) -> None:
    cache = make()
    with cache._lock:
        child = os.fork()
        if not child:
            os._exit(0 if cache._lock.acquire(blocking=False) else 1)
    assert os.waitpid(child, 0)[1] == 0
