"""What a caller may pass by mistake, and what happens around searches: all of it is refused or answered correctly."""

from __future__ import annotations

import gc
import sys
from enum import IntEnum
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from vector_under_test import OPTIONS, VectorUnderTest, upserts

from penstock.errors import Invalid
from penstock.journal.partitions import shard_of
from penstock.kinds import partitions_of
from penstock.store.store import Store
from penstock.vector import lists as lists_module
from penstock.vector.draft import VectorDraft
from penstock.vector.index import VectorIndex
from penstock.vector.loaded import LoadedIndex
from penstock.vector.section import IndexChange
from penstock.vector.stored import Generations, read_generations

RNG = np.random.default_rng(11)


def ids(hits: Any) -> list[str]:
    return [hit.id for hit in hits]


def machine_of(store: Store, name: str = "docs") -> Any:
    info = store.port.table(name)
    assert info is not None
    return store.port.machine(partitions_of(info)[0])


class Name(str):
    __slots__ = ()


class Number(IntEnum):
    ONE = 1
    TWO = 2


def deep(levels: int = 100_000) -> Any:
    value: Any = [1]
    for _ in range(levels):
        value = [value]
    return value


def test_searches_of_any_form(any_store: Any) -> None:
    docs = any_store.vector("docs", dimensions=2)
    docs.upsert(["a", "b"], [[1.0, 0.0], [0.0, 1.0]], [{"n": 1}, {"n": 2}], durable=True)
    rows = [[1.0], [1.0, 2.0]]
    masked = np.ma.array([1.0, 2.0], mask=[False, True])
    wrong: list[dict[str, Any]] = [
        {"vector": rows}, {"vector": masked}, {"vector": masked[None]}, {"vector": pa.array([1.0, None])},
        {"vector": pa.array([True, False])}, {"vector": pa.array(["1", "2"])}, {"vector": deep()},
        *({"vector": np.array([value, 0.0], np.float32)} for value in (np.nan, np.inf, 1e20, 3e38, 0.0, 1e-45)),
        {"timeout_s": None}, {"timeout_s": "1"}, {"timeout_s": 0}, {"timeout_s": -1}, {"timeout_s": float("nan")},
        {"timeout_s": True}, {"timeout_s": 61}, {"k": np.timedelta64(5, "s")}, {"where": {"n": deep()}},
    ]  # fmt: skip
    for arguments in wrong:
        for query in ([1.0, 0.1], [[1.0, 0.1]]):
            with pytest.raises(Invalid):
                docs.search(**{"vector": query, **arguments})
    right: list[Any] = [
        pa.array([1.0, 0.1]), pa.chunked_array([[1.0], [0.1]]), np.array([1.0, 0.1], ">f4"),
        np.array([1.0, 0.1], np.float16),
        np.array([1.0, 0.1], np.longdouble), np.array([[1.0, 9.0, 0.1, 9.0]], np.float32)[0, ::2],
        np.ma.array([1.0, 0.1], mask=False),
    ]  # fmt: skip
    for query in right:
        assert ids(docs.search(query, k=np.int8(1), timeout_s=np.float64(5))) == ["a"]
        assert ids(docs.search(query, k=1, where={"n": 2}, timeout_s=np.float64(5))) == ["b"]
    for where in ({Name("n"): Number.TWO}, {"n": np.int64(2)}, {"n": [Number.TWO]}, {"n": {Name(">"): Number.ONE}}):
        assert ids(docs.search([1.0, 0.1], where=where)) == ["b"]
    for value in ("", 5, "x" * 2_000, None):
        with pytest.raises(Invalid):
            assert value in docs


def test_rows_of_any_form(any_store: Any) -> None:
    docs = any_store.vector("docs", dimensions=2)
    masked = np.ma.array([[1.0, 2.0]], mask=[[False, True]])
    for arguments in ((["a"], masked), ([], [[1.0], [1.0, 2.0]]), (["a", "b"], [[1.0], [1.0, 2.0]]), (["a"], deep())):
        with pytest.raises(Invalid):
            docs.upsert(*arguments)
    for value in (np.complex128(1), np.timedelta64(5, "ns"), np.datetime64(5, "ns"), np.array(1.5), np.void(b"12")):
        with pytest.raises(Invalid, match="the attribute 'x'"):
            docs.upsert("a", [1.0, 1.0], {"x": value})
    twice = pa.StructArray.from_arrays([pa.array([1]), pa.array([2])], names=["x", "x"])
    with pytest.raises(Invalid):
        docs.upsert(pa.table({"id": ["a"], "vector": [[1.0, 1.0]], "attributes": twice}))
    assert docs.count() == 0
    docs.upsert([], [])
    docs.upsert("b", pa.array([1.0, 2.0]), {"yes": np.bool_(True), "whole": np.uint8(3), "part": np.float32(0.5)})
    attributes = docs.get("b").attributes
    assert attributes == {"yes": True, "whole": 3, "part": 0.5}
    assert [type(value) for _, value in sorted(attributes.items())] == [float, int, bool]
    for kind in (pa.string_view(), pa.dictionary(pa.int8(), pa.string()), pa.large_string()):
        docs.upsert(
            pa.table({"id": pa.array(["c"]).cast(kind), "vector": [[1.0, 2.0]], "t": pa.array(["x"]).cast(kind)})
        )
        assert docs.get("c").attributes == {"t": "x"}


def test_large_whole_numbers_and_floats_under_one_name(any_store: Any) -> None:
    docs = any_store.vector("docs", dimensions=1, metric="dot")
    docs.upsert(["a", "b", "c"], [[3.0], [2.0], [1.0]], [{"n": (1 << 60) + 1}, {"n": 0.5}, {"n": 7}], durable=True)
    assert ids(docs.search([1.0], where={"n": 0.5})) == ["b"]
    assert ids(docs.search([1.0], where={"n": {">": 0.5}})) == ["a", "c"]
    assert ids(docs.search([1.0], where=pc.field("n") > 0.5)) == ["a", "c"]


def test_an_attribute_of_any_name_in_an_expression(any_store: Any) -> None:
    docs = any_store.vector("docs", dimensions=1, metric="dot")
    names = ["row number of a condition", "a.b", "a)b", "x\0y", "__row"]
    docs.upsert(names, [[1.0]] * len(names), [{name: 1} for name in names], durable=True)
    for name in names:
        assert ids(docs.search([1.0], where=pc.field(name) == 1)) == [name]
        assert ids(docs.search([1.0], where={name: 1})) == [name]


def test_an_attribute_with_another_type_in_each_shard(any_store: Any) -> None:
    """A text is compared with texts, a number with numbers, wherever they are."""
    docs = any_store.vector("docs", dimensions=1, metric="dot", shards=2)
    names = [str(n) for n in range(20)]
    attributes = [{"n": n if shard_of(str(n).encode(), 2) else str(n), "part": 1.0} for n in range(20)]
    docs.upsert(names, [[1.0]] * 20, attributes, durable=True)
    for number in range(20):
        as_number, as_text = ([str(number)], []) if shard_of(str(number).encode(), 2) else ([], [str(number)])
        assert ids(docs.search([1.0], where={"n": number})) == as_number
        assert ids(docs.search([1.0], where={"n": str(number)})) == as_text
        assert ids(docs.search([1.0], where={"n": [number, str(number)], "part": 1})) == [str(number)]
        assert ids(docs.search([1.0], where=pc.field("n") == number)) == as_number
    assert len(docs.search([1.0], k=20, where={"n": {"!=": None}})) == 20
    assert docs.search([1.0], where={"n": None}) == []
    with pytest.raises(Invalid, match="a number or a str"):
        docs.search([1.0], where={"n": True})


@pytest.mark.parametrize("shards", [1, 2])
def test_one_record_of_another_type_changes_nothing_for_the_others(any_store: Any, shards: int) -> None:
    docs = any_store.vector("docs", dimensions=1, metric="dot", shards=shards)
    docs.upsert([str(n) for n in range(20)], [[1.0]] * 20, [{"year": 1990 + n} for n in range(20)], durable=True)
    for where in ({"year": {">=": 2005}}, pc.field("year") >= 2005):
        before = sorted(ids(docs.search([1.0], k=20, where=where)))
        assert before == ["15", "16", "17", "18", "19"]
        docs.upsert("stray", [1.0], {"year": "2010"}, durable=True)
        assert sorted(ids(docs.search([1.0], k=20, where=where))) == before
        assert ids(docs.search([1.0], k=20, where={"year": "2010"})) == ["stray"]
        docs.delete("stray", durable=True)


def test_a_write_that_is_not_applied_has_an_attribute_of_another_type(store: Store) -> None:
    docs: Any = store.vector("docs", dimensions=1, metric="dot")
    docs.upsert("a", [1.0], {"n": 1}, durable=True)
    for name, value in (("b", 0.5), ("c", "x"), ("d", True)):
        docs.upsert(name, [1.0], {"n": value})
        assert docs.search([[1.0]], where={"n": value}).column("id").to_pylist() == [name]
    assert ids(docs.search([1.0], where={"n": {">": 0}}, after=docs.upsert("e", [1.0]))) == ["a", "b"]


def test_a_search_whose_records_are_always_replaced_answers(store: Store) -> None:
    docs: Any = store.vector("docs", dimensions=1, metric="dot")
    docs.upsert(["a", "b"], [[2.0], [1.0]], durable=True)
    live = machine_of(store).live
    find, writes = live.cache.record, list[int]()

    def replaced_first(number: int, get: Any) -> Any:
        if len(writes) < 50:
            writes.append(number)
            docs.upsert(["a", "b"], [[2.0], [1.0]], durable=True)
        return find(number, get)

    live.cache.record = replaced_first
    assert ids(docs.search([1.0])) == ["a", "b"]
    assert writes


def test_a_draft_that_is_taken_in_again_while_a_kernel_is_loaded_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    shard = VectorUnderTest()
    shard.write(upserts({"a": ((1.0, 2.0, 3.0), {})}))
    live, read = shard.machine.live, LoadedIndex._read
    live.load()
    draft = VectorDraft(OPTIONS, shard.tree.view, shard.tree.lsn + 1)
    draft.add(upserts({"b": ((1.0, 2.0, 4.0), {})}))

    def interrupted(size: int) -> bool:
        raise KeyboardInterrupt

    def write_meanwhile(loaded: LoadedIndex, view: Any) -> None:
        read(loaded, view)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(live, "_has_room", interrupted)
            live.applied(draft)
        live.applied(draft)

    monkeypatch.setattr(LoadedIndex, "_read", write_meanwhile)
    live.refresh()
    assert live.load().count == 2
    shard.close()


def test_a_step_of_an_index_that_was_dropped_since_changes_nothing() -> None:
    for steps in (1, 2):
        shard = VectorUnderTest()
        shard.write(upserts({str(n): ((1.0 + n, 2.0, 3.0), {}) for n in range(8)}))
        for _ in range(steps):
            shard.write(shard.step())
        late = shard.step()
        shard.write(IndexChange(generation=0, use=True))
        shard.write(late)
        assert read_generations(shard.tree.view) == Generations()
        shard.close()


def test_kernels_of_older_snapshots_count(store: Store) -> None:
    docs: Any = store.vector("docs", dimensions=64, metric="euclidean")
    rows = RNG.normal(size=(1_000, 64)).astype(np.float32)
    docs.upsert([str(n) for n in range(1_000)], rows, durable=True)
    live = machine_of(store).live
    live._budget.bytes_max = 1_000_000  # three kernels
    snapshots = []

    def in_memory() -> int:
        kernels = [some for some in gc.get_objects() if type(some) is VectorIndex and some.dimensions == 64]
        return sum(kernel.memory_bytes() for kernel in kernels)

    for number in range(6):
        snapshots.append(store.snapshot())
        docs.upsert("new", rows[number], durable=True)
    try:
        docs.search(rows[0])
        for snapshot in snapshots:
            early: Any = snapshot.vector("docs")
            assert ids(early.search(rows[7], k=1)) == ["7"]
            assert in_memory() <= docs.statistics().memory_bytes <= 1_000_000
        assert live.index is not None
    finally:
        for snapshot in snapshots:
            snapshot.close()
    del early, snapshots, snapshot
    assert docs.statistics().memory_bytes < 400_000


def test_replaced_vectors_that_a_snapshot_keeps_count(store: Store) -> None:
    docs: Any = store.vector("docs", dimensions=64, metric="euclidean")
    rows = RNG.normal(size=(200, 64)).astype(np.float32)
    names = [str(n) for n in range(200)]
    docs.upsert(names, rows, durable=True)
    live = machine_of(store).live
    live._budget.bytes_max = 400_000
    docs.search(rows[0])
    with store.snapshot() as snapshot:
        early: Any = snapshot.vector("docs")
        for number in range(1, 31):
            docs.upsert(names, rows + number, durable=True)
            assert ids(early.search(rows[7], k=1)) == ["7"]
            assert ids(docs.search(rows[7] + number, k=1)) == ["7"]
            assert docs.statistics().memory_bytes <= 800_000  # arrays grow in steps


def test_a_kernel_that_is_lost_is_loaded_again(store: Store) -> None:
    docs: Any = store.vector("docs", dimensions=1, metric="dot")
    docs.upsert(["a", "b"], [[2.0], [1.0]], durable=True)
    docs.search([1.0])
    live = machine_of(store).live
    with store.snapshot() as snapshot:
        docs.delete("b", durable=True)
        early: Any = snapshot.vector("docs")
        assert ids(early.search([1.0])) == ["a", "b"]
        live.index._kernel = None  # as after an error within a change
        assert ids(early.search([1.0])) == ["a", "b"]
        assert ids(docs.search([1.0])) == ["a"]


def test_internal_ids_may_be_large() -> None:
    pytest.importorskip("faiss")
    rows = RNG.normal(size=(6_000, 4)).astype(np.float32)
    first = 1 << 40
    index, numbers = VectorIndex(4, "euclidean"), np.arange(first, first + 6_000).astype(np.uint64)
    index.load(numbers, rows, np.zeros(6_000, np.int32), rows[:1])
    pin = index.pin()
    index.remove(numbers[:1])
    assert index.search(rows[:1], 1)[1][0, 0] != first
    assert index.search(rows[1:2], 1)[1][0, 0] == first + 1
    assert index.search(rows[1:2], 1, allowed=numbers[1:5_000])[1][0, 0] == first + 1
    assert index.search(rows[1:2], 1, allowed=numbers[2:5_000])[1][0, 0] != first + 1
    del pin


def test_an_index_that_was_made_without_faiss(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("faiss")
    shard = VectorUnderTest()
    shard.write(upserts({str(n): (tuple(RNG.normal(size=3).tolist()), {}) for n in range(400)}))
    shard.write(shard.step())
    while read_generations(shard.tree.view).assigned < 401:
        shard.write(shard.step())
    with monkeypatch.context() as patch:
        patch.setattr(lists_module, "_faiss", None)
        patch.setitem(sys.modules, "faiss", None)
        shard.write(shard.step())
    assert read_generations(shard.tree.view).current == 1
    index = shard.machine.live.load()
    assert index.lists > 16
    assert index.probes == index.lists // 8  # not measured: many rather than one
    shard.close()
