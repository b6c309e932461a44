"""Any line may raise while a record is applied; and searches run while records are."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from interrupts import interrupted_at
from vector_under_test import Records, VectorUnderTest, contents, deletes, nearest, upserts

import penstock
from penstock.host import threads
from penstock.partition.machine import Entry
from penstock.vector.section import IndexChange, Part, VectorSection
from penstock.vector.stored import read_generations
from penstock.vector.training import nearest_list


def rows(*names: str, at: float) -> Records:
    return {name: ((at + number, 1.0, 2.0), {"n": number}) for number, name in enumerate(names)}


def parts_of_last() -> list[Part]:
    return [upserts(rows("a", "x", "y", at=9.0)), deletes("b", "nobody")]


def prepared_shard() -> VectorUnderTest:
    """A shard with an index, whose kernel is loaded."""
    shard = VectorUnderTest()
    shard.write(upserts(rows("a", "b", "c", "d", at=1.0)))
    for _ in range(3):
        shard.write(shard.step())
    shard.machine.live.load()
    return shard


def test_a_kernel_keeps_its_own_centroids_when_an_index_is_made_anew() -> None:
    """Also one that got the number of the kernel's: as on a follower, which does not load another kernel for it."""
    pytest.importorskip("faiss")
    shard = prepared_shard()
    kernel = shard.machine.live.load()
    lists: Any = kernel._kernel
    shard.write(IndexChange(generation=0, use=True))
    shard.write(upserts({f"far{n}": ((100.0 * n, -50.0, 7.0 * n), {}) for n in range(40)}))
    shard.write(shard.step())
    while read_generations(shard.tree.view).building:
        shard.write(shard.step())
    assert read_generations(shard.tree.view).current == 1
    shard.write(upserts({f"new{n}": ((100.0 * n + 1, -50.0, 7.0 * n), {}) for n in range(40)}))
    assert shard.machine.live.index is kernel
    ids = np.arange(45, 85, dtype=np.uint64)
    nearest_of = nearest_list(lists.vectors(ids), lists.centroids, "euclidean")
    assert lists.lists_of(ids).tolist() == nearest_of.tolist()
    shard.close()


def test_an_apply_that_is_interrupted_anywhere_is_repeated() -> None:
    whole = prepared_shard()
    whole.write(*parts_of_last())
    expected, lsn = dict(whole.tree.scan()), whole.tree.lsn
    point, reached = 0, 0
    while reached >= point:
        point += 5 if point > 40 else 1
        shard = prepared_shard()
        entry = Entry(lsn, shard.clock.time_us(), (), (VectorSection(*parts_of_last()),))
        reached = interrupted_at(point, lambda: shard.machine.apply(entry))  # noqa: B023
        if shard.machine.applied < lsn:  # what the owner asks before it repeats a record
            shard.machine.apply(entry)
        assert shard.machine.applied == lsn
        assert dict(shard.tree.scan()) == expected
        state = shard.machine.snapshot()
        assert set(contents(state)) == {"a", "c", "d", "x", "y"}
        assert [name for name, _ in nearest(state, [9.0, 1.0, 2.0], 2)] == ["a", "x"]
        index = shard.machine.live.load()
        assert index.count == 5
        state.close()
        shard.close()
    assert point > 100


def test_an_interrupt_between_the_tree_and_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner repeats a record if `applied` is below it; searches find it without another write."""
    shard = prepared_shard()
    lsn = shard.tree.lsn + 1
    entry = Entry(lsn, shard.clock.time_us(), (), (VectorSection(*parts_of_last()),))

    def interrupt(draft: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shard.machine.live, "applied", interrupt)
        shard.machine.apply(entry)
    assert shard.tree.lsn == lsn
    assert shard.machine.applied == lsn - 1
    shard.machine.apply(entry)
    assert shard.machine.applied == lsn
    assert shard.machine.live.load().count == 5
    shard.close()


def test_searches_see_whole_records(tmp_path: Path) -> None:
    """Each record replaces both vectors: a search finds each id once, and both of one record."""
    with penstock.open(tmp_path / "store") as store:
        docs = store.vector("docs", dimensions=2, metric="euclidean")
        docs.upsert(["a", "b"], [[0.0, 1.0], [0.0, 2.0]], [{"n": 0}, {"n": 0}], durable=True)
        ended = threading.Event()

        def write() -> None:
            for number in range(1, 150):
                docs.upsert(["a", "b"], [[0.1 * number, 1.0], [0.1 * number, 2.0]], [{"n": number}] * 2, durable=True)
            ended.set()

        writer, looks = threads.spawn(write, name="writer"), 0
        while not ended.is_set() or not looks:
            hits: Any = docs.search(np.array([0.0, 0.0], np.float32), k=10)
            assert sorted(hit.id for hit in hits) == ["a", "b"]
            assert hits[0].attributes == hits[1].attributes
            looks += 1
        writer.join()
        assert looks


@pytest.mark.parametrize("k", [1, 3])
def test_a_batch_of_vectors_and_keys_is_seen_as_a_whole(tmp_path: Path, k: int) -> None:
    with penstock.open(tmp_path / "store") as store:
        docs, numbers = store.vector("docs", dimensions=1, metric="dot"), store.kv("seen")
        for number in range(20):
            with store.batch(token=("writer", number)) as batch:
                batch.vector("docs").upsert(str(number), [1.0 + number])
                batch.kv("seen").put(b"last", b"%d" % number)
            hits: Any = docs.search([1.0], k=k)
            assert hits[0].id == str(number) == (numbers.get(b"last") or b"").decode()
