"""The API of vector tables: in the owner and through a client, in batches and snapshots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock
from penstock.errors import Invalid, KindMismatch, NotFound
from penstock.kinds import partitions_of
from penstock.store.store import Store
from penstock.vector.attributes import encode_attributes, encode_columns

RNG = np.random.default_rng(7)


def record(docs: Any, name: Any) -> Any:
    return docs.get(name)


def ids(hits: Any) -> list[str]:
    return [hit.id for hit in hits]


def test_what_is_written_is_found(any_store: Any) -> None:
    docs = any_store.vector("docs", dimensions=4)
    epoch = docs.upsert(
        ["a", "b", "ü"], np.eye(4)[:3], [{"lang": "en", "year": 1990}, {"lang": "de", "score": 0.5}, None]
    )
    hits = docs.search([1.0, 0.1, 0.0, 0.0], k=2, after=epoch)
    assert ids(hits) == ["a", "b"]
    assert hits[0].attributes == {"lang": "en", "year": 1990}
    assert hits[0].distance == pytest.approx(1 - 1 / np.sqrt(1.01), abs=1e-6)
    assert docs.get("ü").vector.tolist() == [0, 0, 1, 0]
    assert docs.get("nobody") is None
    assert [record and record.id for record in docs.get(["b", "nobody", "a"])] == ["b", None, "a"]
    assert "a" in docs
    assert "x" not in docs
    assert docs.count() == 3
    epoch = docs.upsert("a", [0, 0, 0, 1.0])  # the whole record: its attributes go
    assert docs.search([0, 0, 0, 1.0], k=1, after=epoch)[0] == penstock.Hit("a", 0.0, {})
    docs.delete(["b", "nobody"], durable=True)
    assert sorted(ids(docs.search([1.0, 1, 1, 1], k=10))) == ["a", "ü"]
    assert docs.to_arrow().column("id").to_pylist() == ["ü", "a"]
    assert pa.table(docs).equals(docs.to_arrow())
    assert repr(docs) == "<VectorTable 'docs': 4 dimensions, cosine>"


def test_a_matrix_of_queries_gives_a_table(any_store: Any) -> None:
    docs = any_store.vector("docs", dimensions=8, metric="euclidean", shards=3)
    rows = RNG.normal(size=(40, 8)).astype(np.float32)
    epoch = docs.upsert([f"id {n}" for n in range(40)], rows, [{"n": n} for n in range(40)])
    table = docs.search(rows[:5], k=3, after=epoch)
    assert table.schema.names == ["query", "rank", "id", "distance", "attributes"]
    assert table.column("query").to_pylist() == [n for n in range(5) for _ in range(3)]
    assert table.column("rank").to_pylist() == [1, 2, 3] * 5
    truth = np.linalg.norm(rows[:5, None] - rows[None], axis=2)
    expected = [f"id {n}" for row in np.argsort(truth, axis=1)[:, :3] for n in row]
    assert table.column("id").to_pylist() == expected
    np.testing.assert_allclose(table.column("distance").to_numpy(), np.sort(truth, axis=1)[:, :3].ravel(), atol=1e-3)
    assert table.column("attributes").to_pylist()[0] == '{"n":0}'
    assert ids(docs.search(rows[7], k=1)) == ["id 7"]  # one vector, several shards
    assert docs.search(np.zeros((0, 8)), k=3).num_rows == 0
    many = docs.search(np.repeat(rows[:1], 40_000, axis=0), k=1)  # more than one request holds
    assert many.column("query").to_pylist() == list(range(40_000))


def test_conditions(any_store: Any) -> None:
    docs = any_store.vector("docs", dimensions=2, metric="dot", shards=2)
    attributes = [{"n": n, "kind": "abc"[n % 3], "even": n % 2 == 0, "part": n / 4} for n in range(12)]
    epoch = docs.upsert([str(n) for n in range(12)], [[n, 1.0] for n in range(12)], attributes)
    cases: list[tuple[Any, list[int]]] = [
        ({"kind": "a"}, [9, 6, 3, 0]),
        ({"kind": ["a", "b"], "even": True}, [10, 6, 4, 0]),
        ({"n": {">=": 3, "<": 6}}, [5, 4, 3]),
        (pc.field("part") >= 2.5, [11, 10]),
        ((pc.field("kind") == "c") & (pc.field("n") > 2), [11, 8, 5]),
        ({"nothing": 1}, []),
    ]
    for where, expected in cases:
        for exact in (False, True):
            hits = docs.search([1.0, 0.0], k=20, where=where, exact=exact, after=epoch)
            assert ids(hits) == [str(n) for n in expected], where
    epoch = docs.upsert(["0"], [[100, 1.0]], [{"kind": "a"}])
    assert ids(docs.search([1.0, 0.0], k=1, where={"kind": "a"}, after=epoch)) == ["0"]
    docs.delete(["0"], durable=True)
    assert ids(docs.search([1.0, 0.0], k=1, where={"kind": "a"})) == ["9"]


def test_batches_and_snapshots(any_store: Any) -> None:
    docs, users = any_store.vector("docs", dimensions=2), any_store.kv("users")
    with pytest.raises(ZeroDivisionError), any_store.batch() as batch:
        batch.vector("docs").upsert("a", [1.0, 0.0])
        raise ZeroDivisionError
    for duplicate in (False, True):
        with any_store.batch(token=("loader", 1)) as batch:
            batch.vector("docs").upsert(["a", "b"], [[1.0, 0.0], [0.0, 1.0]])
            batch.vector("docs").delete("b")
            batch.kv("users").put(b"a", b"1")
        assert batch.duplicate is duplicate
    assert docs.count() == 1
    assert users.get(b"a") == b"1"
    with any_store.snapshot() as snapshot:
        docs.upsert("a", [0.0, 1.0], {"new": True}, durable=True)
        docs.upsert("c", [1.0, 0.1], durable=True)
        early = snapshot.vector("docs")
        assert early.search([1.0, 0.0], k=5) == [penstock.Hit("a", 0.0, {})]
        assert ids(early.search([1.0, 0.0], k=5, exact=True)) == ["a"]
        assert early.get("a").attributes == {}
        assert early.get(["c"]) == [None]
        assert early.count() == 1
        assert ids(docs.search([1.0, 0.0], k=5)) == ["c", "a"]
    with pytest.raises(Invalid, match="a batch takes writes only"), any_store.batch() as batch:
        batch.vector("docs").search([1.0, 0.0])


def test_a_process_reads_its_own_writes(store: Store) -> None:
    """Records at once; searches when they are applied, or with `after`."""
    docs = store.vector("docs", dimensions=2, shards=2)
    for number in range(50):
        docs.upsert(str(number), [1.0, number], {"n": number})
        assert record(docs, str(number)).attributes == {"n": number}
        assert record(docs, [str(number), "none"])[0].vector.tolist() == [1.0, number]
        assert docs.count() == number + 1
        assert ids(docs.search([1.0, number], k=1, where={"n": number})) == [str(number)]
    docs.delete("7")
    assert docs.get("7") is None


def test_the_last_write_of_an_id_wins(store: Store) -> None:
    docs = store.vector("docs", dimensions=1, metric="dot")
    epoch = docs.upsert(["a", "b", "a"], [[1.0], [2.0], [3.0]], [{"n": 1}, None, {"m": 2}])
    store.flush(epoch)
    assert (record(docs, "a").vector.tolist(), record(docs, "a").attributes) == ([3.0], {"m": 2})
    assert docs.count() == 2
    with store.batch() as batch:
        table = batch.vector("docs")
        table.delete("a")
        table.upsert("a", [5.0])
        table.upsert("c", [6.0])
        table.delete("c")
    assert (record(docs, "a").vector.tolist(), docs.get("c"), docs.count()) == ([5.0], None, 2)


def test_arrow_rows(any_store: Any) -> None:
    docs = any_store.vector("docs", dimensions=2)
    types = [
        pa.list_(pa.float32()), pa.list_(pa.float64(), 2), pa.large_list(pa.int32()), pa.list_(pa.float16()),
    ]  # fmt: skip
    for number, kind in enumerate(types):
        vectors = pa.array([[1, number], [number, 1]], pa.list_(pa.float32())).cast(kind)
        docs.upsert(pa.table({"id": [f"a{number}", f"b{number}"], "vector": vectors, "n": [number, None]}))
    store_rows = docs.to_arrow()
    assert store_rows.num_rows == 8
    assert docs.get("a3").attributes == {"n": 3}
    assert docs.get("b3").attributes == {}
    other = any_store.vector("other", dimensions=2)
    other.upsert(store_rows)  # what is read can be written
    assert other.to_arrow().equals(store_rows)
    struct = pa.table({"id": ["s"], "vector": [[1.0, 1.0]], "attributes": [{"x": 1, "y": None, "z": "t"}], "w": [0.5]})
    other.upsert(struct)
    assert other.get("s").attributes == {"x": 1, "z": "t", "w": 0.5}
    pairs = pa.array([[("k", "v")]], pa.map_(pa.string(), pa.string()))
    other.upsert(pa.table({"id": ["m"], "vector": [[1.0, 1.0]], "attributes": pairs}))
    assert other.get("m").attributes == {"k": "v"}
    assert any_store.load("other", pa.table({"id": ["l"], "vector": [[2.0, 2.0]], "tag": ["x"]})).rows == 1
    assert other.get("l").attributes == {"tag": "x"}


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"ids": ["a"], "vectors": [[1.0, float("nan")]]}, "NaN or infinity"),
    ({"ids": ["a"], "vectors": [[1.0, float("inf")]]}, "NaN or infinity"),
    ({"ids": ["a"], "vectors": [[1e300, 1.0]]}, "NaN or infinity"),
    ({"ids": ["a"], "vectors": [[1e20, 1.0]]}, "longer than"),
    ({"ids": ["a"], "vectors": [[0.0, 0.0]]}, "no direction for cosine"),
    ({"ids": ["a"], "vectors": [[1e-30, 0.0]]}, "no direction for cosine"),
    ({"ids": ["ok", "a"], "vectors": [[1.0, 0.0], [0.0, 0.0]]}, "row 1 is zero"),
    ({"ids": ["a"], "vectors": [[1.0, 2.0, 3.0]]}, "2 dimensions"),
    ({"ids": ["a"], "vectors": [1.0, 2.0]}, "a matrix of 1 rows"),
    ({"ids": ["a", "b"], "vectors": [[1.0, 2.0]]}, "a matrix of 2 rows"),
    ({"ids": ["a"], "vectors": [["1", "2"]]}, "arrays of numbers"),
    ({"ids": ["a"], "vectors": [[True, False]]}, "arrays of numbers"),
    ({"ids": ["a"], "vectors": [[1 + 2j, 1]]}, "arrays of numbers"),
    ({"ids": ["a"], "vectors": [[1.0, None]]}, "numbers"),
    ({"ids": ["a"], "vectors": None}, "ids and a matrix"),
    ({"ids": [b"a"], "vectors": [[1.0, 1.0]]}, "a text of 1 to 1024 bytes"),
    ({"ids": [""], "vectors": [[1.0, 1.0]]}, "a text of 1 to 1024 bytes"),
    ({"ids": ["x" * 1025], "vectors": [[1.0, 1.0]]}, "a text of 1 to 1024 bytes"),
    ({"ids": ["\ud800"], "vectors": [[1.0, 1.0]]}, "a text of 1 to 1024 bytes"),
    ({"ids": [5], "vectors": [[1.0, 1.0]]}, "a text of 1 to 1024 bytes"),
    ({"ids": 5, "vectors": [[1.0, 1.0]]}, "a list of texts"),
    ({"ids": ["a"], "vectors": [[1.0, 1.0]], "attributes": [{"x": [1]}]}, "the attribute 'x'"),
    ({"ids": ["a"], "vectors": [[1.0, 1.0]], "attributes": [{"x": float("nan")}]}, "the attribute 'x'"),
    ({"ids": ["a"], "vectors": [[1.0, 1.0]], "attributes": [{"x": 1 << 63}]}, "the attribute 'x'"),
    ({"ids": ["a"], "vectors": [[1.0, 1.0]], "attributes": [{"x": b"1"}]}, "the attribute 'x'"),
    ({"ids": ["a"], "vectors": [[1.0, 1.0]], "attributes": [{1: 1}]}, "the name of an attribute"),
    ({"ids": ["a"], "vectors": [[1.0, 1.0]], "attributes": [{"": 1}]}, "the name of an attribute"),
    ({"ids": ["a"], "vectors": [[1.0, 1.0]], "attributes": []}, "1 ids and 0 attributes"),
    ({"ids": ["a"], "vectors": [[1.0, 1.0]], "attributes": {"x": 1}}, "a list with a dict"),
    ({"ids": ["a"], "vectors": [[1.0, 1.0]], "durable": 1}, "durable"),
    ({"ids": "a", "vectors": [[1.0, 1.0]]}, "2 numbers"),
    ({"ids": pa.table({"id": ["a"]})}, "vector is missing"),
    ({"ids": pa.table({"id": ["a"], "vector": [[1.0]]})}, "2 dimensions"),
    ({"ids": pa.table({"id": ["a", "b"], "vector": [[1.0, 1.0], [1.0]]})}, "one length"),
    ({"ids": pa.table({"id": ["a"], "vector": [None]})}, "lists of numbers"),
    ({"ids": pa.table({"id": [None], "vector": [[1.0, 1.0]]})}, "give texts"),
    ({"ids": pa.table({"id": ["a"], "vector": [[1.0, 1.0]], "x": [[1]]})}, "the column 'x'"),
    ({"ids": pa.table({"id": ["a"], "vector": [[1.0, 1.0]], "attributes": ["[]"]})}, "JSON of flat objects"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_wrong_rows_are_refused_before_anything_is_written(
    store: Store, arguments: dict[str, Any], message: str
) -> None:
    docs = store.vector("docs", dimensions=2)
    with pytest.raises(Invalid, match=message):
        docs.upsert(**arguments)
    with pytest.raises(Invalid, match=message), store.batch() as batch:
        batch.vector("docs").upsert(**arguments)
    assert docs.count() == 0


def test_wrong_searches_are_refused(any_store: Any) -> None:
    docs = any_store.vector("docs", dimensions=2)
    docs.upsert("a", [1.0, 0.0], {"n": 1}, durable=True)
    wrong: list[dict[str, Any]] = [
        {"vector": [1.0]}, {"vector": [0.0, 0.0]}, {"vector": [float("nan"), 1.0]}, {"vector": "text"},
        {"vector": [[1.0, 2.0, 3.0]]}, {"vector": np.array([float("inf"), 0], np.float32)},
        {"k": 0}, {"k": 10_001}, {"k": 1.5},
        {"probes": 0}, {"probes": "2"}, {"exact": 1}, {"where": "n = 1"}, {"where": {"n": object()}},
        {"where": {"n": 1 << 70}}, {"where": pc.field("n") == "x"},
        {"after": -1}, {"after": "1"}, {"timeout_s": 0.0, "where": {"n": 1}},
    ]  # fmt: skip
    for arguments in wrong:
        with pytest.raises(Invalid):
            docs.search(**{"vector": [1.0, 0.0], **arguments})
    assert ids(docs.search([1.0, 0.0])) == ["a"]
    for absent in (
        pc.field("nothing") > 1,
        (pc.field("no") == "x") & (pc.field("nothing") == 1),
        pc.field("no").isin(["x"]),
    ):
        assert ids(docs.search([1.0, 0.0], where=absent)) == []
        assert ids(docs.search([1.0, 0.0], where=absent | (pc.field("n") == 1))) == ["a"]


def test_options_are_fixed(any_store: Any) -> None:
    with pytest.raises(Invalid, match="needs dimensions="):
        any_store.vector("docs")
    with pytest.raises(NotFound):
        any_store.vector("docs", dimensions=3, create=False)
    for wrong in ({"dimensions": 0}, {"dimensions": 1 << 20}, {"dimensions": "3"}, {"dimensions": 3, "metric": "l2"}):
        with pytest.raises(Invalid):
            any_store.vector("docs", **wrong)
    docs = any_store.vector("docs", dimensions=3, metric="dot")
    assert (docs.dimensions, docs.metric) == (3, "dot")
    assert any_store.vector("docs").metric == "dot"
    for other in ({"dimensions": 4}, {"dimensions": 3, "metric": "cosine"}, {"metric": "euclidean"}):
        with pytest.raises(KindMismatch, match="has 3 dimensions and the metric dot"):
            any_store.vector("docs", **other)
    any_store.kv("users")
    with pytest.raises(KindMismatch, match="kv"):
        any_store.vector("users", dimensions=3)
    with pytest.raises(KindMismatch, match="vector"):
        any_store.kv("docs")


@pytest.mark.parametrize("metric", ["cosine", "dot", "euclidean"])
def test_metrics(store: Store, metric: Any) -> None:
    docs = store.vector("docs", dimensions=5, metric=metric)
    rows, query = RNG.normal(size=(30, 5)).astype(np.float32), RNG.normal(size=5).astype(np.float32)
    epoch = docs.upsert([str(n) for n in range(30)], rows)
    dots = rows @ query
    truth = {
        "cosine": 1 - dots / np.linalg.norm(rows, axis=1) / np.linalg.norm(query),
        "dot": -dots,
        "euclidean": np.linalg.norm(rows - query, axis=1),
    }[metric]
    hits = docs.search(query, k=30, after=epoch)
    assert ids(hits) == [str(n) for n in np.argsort(truth)]
    np.testing.assert_allclose([hit.distance for hit in hits], np.sort(truth), atol=1e-4)


def test_deleted_vectors_give_their_space_back(store: Store) -> None:
    docs = store.vector("docs", dimensions=256)
    rows = RNG.normal(size=(2_000, 256)).astype(np.float32)
    docs.upsert([str(n) for n in range(2_000)], rows, durable=True)
    store.compact("docs")
    full = docs.statistics().file_bytes
    docs.delete([str(n) for n in range(100, 2_000)], durable=True)
    store.compact("docs")
    assert docs.statistics().file_bytes < full / 10
    assert docs.count() == 100
    assert docs.statistics().memory_bytes_per_vector >= 0


def test_reads_of_pieces(store: Store) -> None:
    docs = store.vector("docs", dimensions=3, shards=2)
    docs.upsert([str(n) for n in range(500)], RNG.normal(size=(500, 3)), durable=True)
    with store.snapshot() as snapshot:
        info = store.port.table("docs")
        assert info is not None
        for partition in partitions_of(info):
            whole = pa.Table.from_batches(list(snapshot._port.scan_arrow(partition, b"", None)))
            pieces = snapshot._port.pieces(partition, 4)
            assert len(pieces) == 4
            scan = snapshot._port.scan_arrow
            parts = [batch for piece in pieces for batch in scan(partition, piece.start, piece.end)]
            assert pa.Table.from_batches(parts).equals(whole)


def test_what_does_not_fit_memory_is_searched_in_files(store: Store) -> None:
    docs = store.vector("docs", dimensions=8, metric="euclidean")
    rows = RNG.normal(size=(3_000, 8)).astype(np.float32)
    docs.upsert([str(n) for n in range(2_000)], rows[:2_000], [{"n": n % 7} for n in range(2_000)], durable=True)
    info = store.port.table("docs")
    assert info is not None
    machine: Any = store.port.machine(partitions_of(info)[0])
    assert ids(docs.search(rows[5], k=1)) == ["5"]
    expected: Any = docs.search(rows[:20], k=4)
    filtered: Any = docs.search(rows[:20], k=4, where={"n": 3})
    assert machine.live._budget.bytes_max == 1 << 30  # that of the store
    machine.live._budget.bytes_max = 100_000
    docs.upsert([str(n) for n in range(2_000, 3_000)], 1e3 + rows[2_000:], durable=True)  # it grows too large
    machine = store.port.machine(partitions_of(info)[0])  # waits until it is applied
    assert machine.live.index is None
    docs.upsert("5", rows[5], {"n": 5}, durable=True)
    assert ids(docs.search(rows[5], k=1)) == ["5"]
    assert docs.search(rows[:20], k=4).column("id").equals(expected.column("id"))  # type: ignore[union-attr]
    assert docs.search(rows[:20], k=4, where={"n": 3}).column("id").equals(filtered.column("id"))  # type: ignore[union-attr]
    assert machine.live.index is None
    assert docs.statistics().memory_bytes < 100_000


def test_reopening_reads_nothing_until_it_is_searched(tmp_path: Path) -> None:
    with penstock.open(tmp_path / "store") as store:
        docs = store.vector("docs", dimensions=64)
        docs.upsert([str(n) for n in range(3_000)], RNG.normal(size=(3_000, 64)), [{"n": n} for n in range(3_000)])
        docs.search([1.0] * 64)
        store.compact("docs")
    with penstock.open(tmp_path / "store") as store:
        docs = store.vector("docs")
        info = store.port.table("docs")
        assert info is not None
        machine: Any = store.port.machine(partitions_of(info)[0])
        assert machine.live.index is None
        assert docs.count() == 3_000
        assert machine.live.index is None
        assert len(docs.search([1.0] * 64)) == 10
        assert machine.live.index is not None
        assert machine.live.cache.columns is None  # attributes are not read for that
        statistics = docs.statistics()
        assert 256 <= statistics.memory_bytes_per_vector < 400


VALUES: dict[str, Any] = {
    "bool": st.booleans(),
    "int8": st.integers(-128, 127),
    "int64": st.integers(-(2**63), 2**63 - 1),
    "uint64": st.integers(0, 2**63 - 1),
    "float": st.floats(allow_nan=False, allow_infinity=False, width=32),
    "double": st.floats(allow_nan=False, allow_infinity=False),
    "string": st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    "large_string": st.sampled_from(["", "null", '"\\\n\x00', "}{", "é\u2028"]),
}


@given(st.data())
def test_columns_of_attributes_are_encoded_as_dicts_are(data: st.DataObject) -> None:
    """What is stored does not depend on whether attributes came as columns, with or without nulls, or as dicts."""
    kinds = data.draw(st.lists(st.sampled_from(sorted(VALUES)), min_size=1, max_size=4))
    names = data.draw(st.lists(st.text('az"\\é_', min_size=1, max_size=3), min_size=4, max_size=4, unique=True))
    count, nulls = data.draw(st.integers(1, 4)), data.draw(st.booleans())
    columns = {}
    for name, kind in zip(names, kinds, strict=False):
        one = st.none() | VALUES[kind] if nulls else VALUES[kind]
        values = data.draw(st.lists(one, min_size=count, max_size=count))
        columns[name] = pa.array(values, pa.type_for_alias(kind))
    rows = [{name: column[row].as_py() for name, column in columns.items()} for row in range(count)]
    fast = encode_columns(list(columns), list(columns.values()))
    expected = [encode_attributes(row) for row in rows]
    assert fast in (None, expected)
    if not nulls and "uint64" not in kinds:
        assert fast is not None


def test_wrong_columns_of_attributes_are_refused(tmp_path: Path) -> None:
    with penstock.open(tmp_path / "store") as store:
        docs = store.vector("docs", dimensions=2)
        vectors = pa.array([[1.0, 2.0], [3.0, 4.0]], pa.list_(pa.float32(), 2))
        for name, column in (
            ("x", pa.array([1.0, float("nan")])),
            ("x", pa.array([1.0, float("-inf")])),
            ("x", pa.array([1, 2**64 - 1], pa.uint64())),
            ("x" * 257, pa.array([1, 2])),
            ("", pa.array([1, 2])),
            ("x", pa.array(["a", "b" * 70_000])),
            ("x", pa.array([b"a", b"b"])),
        ):
            with pytest.raises(Invalid):
                docs.upsert(pa.table({"id": ["a", "b"], "vector": vectors, name: column}))
        docs.upsert(pa.table({"id": ["a", "b"], "vector": vectors, "n": [1, None], "s": ["null", "é"]}), durable=True)
        hits = docs.search([1.0, 2.0], k=2)
        assert {hit.id: dict(hit.attributes) for hit in hits} == {"a": {"n": 1, "s": "null"}, "b": {"s": "é"}}
