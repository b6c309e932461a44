"""Vectors beside faiss, usearch, hnswlib, LanceDB, sqlite-vec and Chroma: 100,000 x 128, in 1,000 clusters.

Every index is set to a recall@10 of at least 0.95 against exact search, with the cheapest setting of those tried that
reaches it; ours has its defaults. LanceDB, sqlite-vec and Chroma store durably, as we do; faiss, usearch and hnswlib
are in memory. Peers that are not installed are left out, and named (sqlite-vec also needs a SQLite that loads
extensions: a Python that was built without gets it from pysqlite3). One query has one thread, whoever answers it.

LanceDB does not sync what it writes (0.40: no fsync in 11 commits, seen with strace), so a commit of its own is in the
page cache when it returns. The benchmark syncs the new files of each commit; without that it is a case of its own.

`PENSTOCK_BENCH_VECTORS` makes it smaller (default 100,000); `PENSTOCK_BENCH_VECTORS_MILLION=1` also measures the memory
of 1,000,000 vectors, in a process of its own.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

import penstock
from bench.harness import Case, Figure, Goal, folder, rate, run, sized, tell

faiss: Any = importlib.import_module("faiss")

ROWS = int(os.environ.get("PENSTOCK_BENCH_VECTORS", sized("100000", "15000")))
DIMENSIONS = 128
CLUSTERS = 1_000
QUERIES = 1_000
K = 10
RECALL = 0.95
COMMIT_ROWS = 10_000
ONE_BY_ONE = 300
LISTS = 400
Matrix = npt.NDArray[np.float32]

_chance = np.random.default_rng(7)
_centers = _chance.normal(size=(CLUSTERS, DIMENSIONS))


def clustered(rows: int) -> Matrix:
    noise = 0.5 * _chance.normal(size=(rows, DIMENSIONS))
    return (_centers[_chance.integers(CLUSTERS, size=rows)] + noise).astype(np.float32)


def unit(matrix: Matrix) -> Matrix:
    lengths: Matrix = np.linalg.norm(matrix, axis=1, keepdims=True)
    return matrix / lengths


VECTORS = unit(clustered(ROWS))
QUERY_VECTORS = unit(clustered(QUERIES))
IDS = [f"doc-{number:07d}" for number in range(ROWS)]


def exact_truth() -> npt.NDArray[np.int64]:
    flat = faiss.IndexFlatIP(DIMENSIONS)
    flat.add(VECTORS)
    return np.asarray(flat.search(QUERY_VECTORS, K)[1])


TRUTH = exact_truth()

One = Callable[[Matrix], Any]  # the numbers of the rows nearest to a vector


def recall(search: One, count: int = 200) -> float:
    hits = [len(set(map(int, search(QUERY_VECTORS[at]))) & set(TRUTH[at].tolist())) for at in range(count)]
    return sum(hits) / (K * count)


def tuned(settings: list[int], make: Callable[[int], One]) -> tuple[One, int, float]:
    """Return a search with the first setting that reaches the recall."""
    for setting in settings:
        search = make(setting)
        if (reached := recall(search)) >= RECALL:
            break
    return search, setting, reached


def one_by_one(search: One, count: int = QUERIES) -> Callable[[], float]:
    def measured() -> float:
        def work() -> None:
            for at in range(count):
                search(QUERY_VECTORS[at])

        return rate(count, work)

    return measured


# -- peers


def module(name: str) -> Any:
    return importlib.import_module(name)


def installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None and (name != "sqlite_vec" or sqlite_module() is not None)


def sqlite_module() -> Any:
    """Return a module of SQLite that loads extensions: this Python's, or pysqlite3; None if neither does."""
    if hasattr(sqlite3.Connection, "enable_load_extension"):
        return sqlite3
    return module("pysqlite3") if importlib.util.find_spec("pysqlite3") else None


def faiss_ivf() -> Any:
    index = faiss.IndexIVFFlat(faiss.IndexFlatIP(DIMENSIONS), DIMENSIONS, LISTS, faiss.METRIC_INNER_PRODUCT)
    index.train(VECTORS)
    index.add(VECTORS)
    return index


def faiss_search(index: Any) -> One:
    def search(query: Matrix) -> Any:
        return index.search(query[None], K)[1][0]

    return search


def ivf_at(index: Any) -> Callable[[int], One]:
    def make(probes: int) -> One:
        index.nprobe = probes
        return faiss_search(index)

    return make


def hnsw_at(index: Any) -> Callable[[int], One]:
    def make(breadth: int) -> One:
        index.hnsw.efSearch = breadth
        return faiss_search(index)

    return make


def usearch_index() -> Callable[[int], One]:
    index: Any = module("usearch.index").Index(
        ndim=DIMENSIONS, metric="ip", dtype="f32", connectivity=16, expansion_add=64
    )
    index.add(np.arange(ROWS), VECTORS, threads=1)

    def make(breadth: int) -> One:
        index.expansion_search = breadth
        return lambda query: index.search(query, K, threads=1).keys

    return make


def hnswlib_index() -> Callable[[int], One]:
    index = module("hnswlib").Index(space="ip", dim=DIMENSIONS)
    index.init_index(max_elements=ROWS, ef_construction=64, M=16)
    index.add_items(VECTORS, np.arange(ROWS), num_threads=1)

    def make(breadth: int) -> One:
        index.set_ef(breadth)
        return lambda query: index.knn_query(query, k=K, num_threads=1)[0][0]

    return make


def arrow_rows(start: int, end: int) -> pa.Table:
    flat = pa.array(VECTORS[start:end].reshape(-1))
    vectors = pa.FixedSizeListArray.from_arrays(flat, DIMENSIONS)
    numbers = np.arange(start, end)
    return pa.table({"id": IDS[start:end], "number": numbers, "vector": vectors, "shelf": numbers % 100})


def lance_ingest(path: str, *, synced: bool = True) -> float:
    table, synced_paths = module("lancedb").connect(path).create_table("docs", arrow_rows(0, 1)), set[str]()
    sync_new_files(path, synced_paths)

    def work() -> None:
        for start in range(1, ROWS, COMMIT_ROWS):
            table.add(arrow_rows(start, min(start + COMMIT_ROWS, ROWS)))
            if synced:
                sync_new_files(path, synced_paths)

    return rate(ROWS, work)


def lance_unsynced(path: str) -> float:
    return lance_ingest(path, synced=False)


def sync_new_files(root: str, synced_paths: set[str]) -> None:
    """Sync the files below a folder that are not synced yet, and their folders."""
    new = [f"{at}/{name}" for at, _, names in os.walk(root) for name in names]
    new = [path for path in new if path not in synced_paths]
    synced_paths.update(new)
    for path in (*new, *{os.path.dirname(path) for path in new}):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def lance_search(path: str) -> Callable[[int], One]:
    table = module("lancedb").connect(path).open_table("docs")
    settings = module("lancedb.index").IvfFlat(distance_type="dot", num_partitions=LISTS)
    table.create_index("vector", config=settings)

    def make(probes: int) -> One:
        def search(query: Matrix) -> Any:
            hits = (
                table.search(query)
                .distance_type("dot")
                .nprobes(probes)
                .limit(K)
                .select(["number", "_distance"])
                .to_arrow()
            )
            return hits.column("number").to_pylist()

        return search

    return make


def sqlite_connect(path: str) -> Any:
    database = sqlite_module().connect(path, isolation_level=None)
    database.enable_load_extension(True)
    module("sqlite_vec").load(database)
    database.enable_load_extension(False)
    database.execute("PRAGMA journal_mode=WAL")
    database.execute("PRAGMA synchronous=FULL")
    return database


def sqlite_ingest(path: str) -> float:
    with closing(sqlite_connect(path)) as database:
        database.execute(
            f"CREATE VIRTUAL TABLE docs USING vec0(number INTEGER PRIMARY KEY, vector float[{DIMENSIONS}])"
        )

        def work() -> None:
            for start in range(0, ROWS, COMMIT_ROWS):
                rows = [(at, VECTORS[at].tobytes()) for at in range(start, min(start + COMMIT_ROWS, ROWS))]
                database.execute("BEGIN")
                database.executemany("INSERT INTO docs (number, vector) VALUES (?, ?)", rows)
                database.execute("COMMIT")

        return rate(ROWS, work)


def sqlite_search(path: str) -> One:
    database = sqlite_connect(path)

    def search(query: Matrix) -> list[int]:
        sql = "SELECT number FROM docs WHERE vector MATCH ? AND k = ?"
        return [row[0] for row in database.execute(sql, (query.tobytes(), K))]

    return search


def chroma_collection(path: str) -> Any:
    client = module("chromadb").PersistentClient(path=path)
    return client.get_or_create_collection("docs", metadata={"hnsw:space": "ip"})


def chroma_ingest(path: str) -> float:
    collection = chroma_collection(path)

    def work() -> None:
        for start in range(0, ROWS, 5_000):  # it takes no more at once
            end = min(start + 5_000, ROWS)
            collection.add(ids=[str(at) for at in range(start, end)], embeddings=VECTORS[start:end])

    return rate(ROWS, work)


def chroma_search(path: str) -> One:
    collection = chroma_collection(path)
    return lambda query: collection.query(query_embeddings=[query], n_results=K, include=[])["ids"][0]


DURABLE: dict[str, tuple[str, Callable[[str], float]]] = {
    "LanceDB": ("lancedb", lance_ingest),
    "sqlite-vec": ("sqlite_vec", sqlite_ingest),
    "Chroma": ("chromadb", chroma_ingest),
}


# -- ours


def ingest_ours(path: str) -> float:
    with penstock.open(path) as store:
        docs = store.vector("docs", dimensions=DIMENSIONS, metric="cosine")

        def work() -> None:
            for start in range(0, ROWS, COMMIT_ROWS):
                end = min(start + COMMIT_ROWS, ROWS)
                attributes = [{"shelf": number % 100} for number in range(start, end)]
                docs.upsert(IDS[start:end], VECTORS[start:end], attributes=attributes, durable=True)

        return rate(ROWS, work)


def search_ours(docs: Any, **options: Any) -> One:
    return lambda query: [hit.id[4:] for hit in docs.search(query, K, **options)]


def bare_ours(docs: Any, **options: Any) -> One:
    """The same, without the ids as numbers, which only the recall needs."""
    return lambda query: docs.search(query, K, **options)


def one_durable() -> list[Case]:
    """Cases of durable writes one by one: a vector, and a row of kv with as many bytes."""

    def vectors() -> float:
        with folder() as some, penstock.open(f"{some}/store") as store:
            docs = store.vector("docs", dimensions=DIMENSIONS, metric="cosine")
            docs.upsert(IDS[:1], VECTORS[:1], durable=True)

            def work() -> None:
                for at in range(ONE_BY_ONE):
                    docs.upsert(IDS[at : at + 1], VECTORS[at : at + 1], durable=True)

            return rate(ONE_BY_ONE, work)

    def rows() -> float:
        with folder() as some, penstock.open(f"{some}/store") as store:
            table = store.kv("rows")
            value = VECTORS[0].tobytes()
            table.put(b"first", value, durable=True)

            def work() -> None:
                for at in range(ONE_BY_ONE):
                    table.put(IDS[at].encode(), value, durable=True)

            return rate(ONE_BY_ONE, work)

    ours = "durable upsert of one vector"
    return [Case(name=ours, run=vectors), Case(name="durable put of one kv row", run=rows, peer_of=ours)]


def seconds_of(work: Callable[[], object], count: int = 5) -> float:
    took = []
    for _ in range(count):
        begin = time.perf_counter()
        work()
        took.append(time.perf_counter() - begin)
    return min(took)


def batched(search: Callable[[Matrix], object]) -> Callable[[], float]:
    return lambda: rate(QUERIES, lambda: search(QUERY_VECTORS))


MILLION = """
import json, sys, time
import penstock
from bench import vector
rows, path = 1_000_000, sys.argv[1]
def megabytes(*names):
    fields = [line.split() for line in open("/proc/self/smaps_rollup")]
    return sum(int(field[1]) for field in fields if field[0] in names) / 1024
with penstock.open(path) as store:
    docs = store.vector("docs", dimensions=128, metric="cosine")
    query, begin = vector.clustered(1)[0], time.perf_counter()
    if docs.count() < rows:
        for start in range(0, rows, 50_000):
            docs.upsert([f"{n}" for n in range(start, start + 50_000)], vector.clustered(50_000), durable=True)
        written = time.perf_counter()
        store.reindex("docs")
        report = {"ingest of 1,000,000, s": written - begin, "index of 1,000,000, s": time.perf_counter() - written}
    else:
        docs.search(query, 10)
        report = {"first answer of 1,000,000, s": time.perf_counter() - begin}
        while not docs.statistics().lists:  # maintenance loads an index as large as this one
            if time.perf_counter() > begin + 120:
                sys.exit("the index was not loaded within two minutes")
            docs.search(query, 10)
            time.sleep(0.2)
        report["index of 1,000,000 in memory, s"] = time.perf_counter() - begin
        report["MB of that index"] = docs.statistics().memory_bytes / 2**20
        report["MB of its process, without mapped files"] = megabytes("Anonymous:")
        report["MB of its process, resident"] = megabytes("Rss:")
    print(json.dumps(report))
"""


def million(report: dict[str, float]) -> None:
    environment = {**os.environ, "PENSTOCK_BENCH_VECTORS": "1000"}
    with folder() as path:
        for _ in range(2):  # write, then open anew
            done = subprocess.run(
                [sys.executable, "-c", MILLION, f"{path}/store"], env=environment, check=True, stdout=subprocess.PIPE
            )
            report.update(json.loads(done.stdout.splitlines()[-1]))


# -- the whole


def peers_in_memory(report: dict[str, float]) -> dict[str, One]:
    """Searches of the indexes in memory, each at its cheapest setting with the recall; faiss IVF first."""
    flat = faiss.IndexHNSWFlat(DIMENSIONS, 32, faiss.METRIC_INNER_PRODUCT)
    flat.add(VECTORS)
    makers: dict[str, Callable[[], Callable[[int], One]]] = {"faiss HNSW": lambda: hnsw_at(flat)}
    if installed("usearch"):
        makers["usearch"] = usearch_index
    if installed("hnswlib"):
        makers["hnswlib"] = hnswlib_index
    searches = {}
    for name, make in makers.items():
        searches[name], _, report[f"recall of {name}"] = tuned([10, 16, 32, 64, 128, 256, 512], make())
    return searches


def durable_searches(paths: dict[str, str], report: dict[str, float]) -> dict[str, One]:
    searches = {}
    if "LanceDB" in paths:
        make = lance_search(paths["LanceDB"])
        searches["LanceDB"], _, report["recall of LanceDB"] = tuned([1, 2, 4, 8, 16, 32], make)
    if "sqlite-vec" in paths:
        searches["sqlite-vec"] = sqlite_search(paths["sqlite-vec"])
    if "Chroma" in paths:
        searches["Chroma"] = chroma_search(paths["Chroma"])
    return searches


def ingest(root: str) -> tuple[dict[str, str], bool]:
    """Fill every durable store; return where, and whether the goals were met."""
    rounds, paths = iter(range(100)), dict[str, str]()

    def case(name: str, fill: Callable[[str], float]) -> Callable[[], float]:
        def measured() -> float:
            paths[name] = f"{root}/{name}-{next(rounds)}"
            return fill(paths[name])

        return measured

    ours = "durable ingest, 10,000 rows a commit"
    cases = [Case(name=ours, run=case("ours", ingest_ours))]
    for name, (module, fill) in DURABLE.items():
        if installed(module):
            cases.append(Case(name=f"{name}, ingest", run=case(name, fill), peer_of=ours))
        else:
            print(f"  {name} is not installed, and left out")
    if installed("lancedb"):
        cases.append(Case(name="LanceDB, which does not sync", run=case("LanceDB unsynced", lance_unsynced)))
    gates_met = run("vector-ingest", cases, [Goal(ours=ours, ratio=2.0)])
    return paths, gates_met


def make_index(store: Any) -> None:
    """Bring the index up to date, which background jobs would do, and load it."""
    store.reindex("docs")
    store.vector("docs").search(QUERY_VECTORS, K)  # loads it


def main() -> bool:
    report: dict[str, float] = {}
    faiss.omp_set_num_threads(1)
    ivf = faiss_ivf()
    with folder() as root:
        paths, gates_met = ingest(root)
        with penstock.open(paths["ours"]) as store:
            make_index(store)
            docs: Any = store.vector("docs")
            report["recall of ours"] = recall(search_ours(docs))
            report["probes of ours"] = float(docs.statistics().probes)
            report["bytes of memory a vector"] = docs.statistics().memory_bytes / ROWS
            best, probes, report["recall of faiss IVF"] = tuned([1, 2, 3, 4, 6, 8, 12, 16, 32], ivf_at(ivf))
            report["probes of faiss IVF"] = float(probes)
            one, durable = "search of one vector", "search of one vector, beside durable peers"
            cases = [
                Case(name=one, run=one_by_one(bare_ours(docs))),
                Case(name="faiss IVF", run=one_by_one(best), peer_of=one),
                *[Case(name=name, run=one_by_one(search)) for name, search in peers_in_memory(report).items()],
                Case(name=durable, run=one_by_one(bare_ours(docs))),
                *[
                    Case(name=name, run=one_by_one(search, 50), peer_of=durable)
                    for name, search in durable_searches(paths, report).items()
                ],
            ]
            goals = [Goal(ours=one, ratio=0.7, gate=True), Goal(ours=one, ratio=1.0)]
            if len(paths) > 1:
                goals.append(Goal(ours=durable, ratio=5.0, gate=True))
            gates_met &= run("vector", cases, goals)
            gates_met &= other_goals(docs, ivf)
        reopening(paths["ours"], ivf, root, report)
    if os.environ.get("PENSTOCK_BENCH_VECTORS_MILLION"):
        million(report)
    ours = "recall of ours"
    figures = [Figure(name=name, value=value, unit="") for name, value in report.items() if name != ours]
    return (
        tell("vector-report", [Figure(name=ours, value=report[ours], unit="", least=RECALL, gate=True), *figures])
        and gates_met
    )


def other_goals(docs: Any, ivf: Any) -> bool:
    """Batches of queries, a filter that 1 % pass, and durable writes one by one."""
    many, few = f"search of {QUERIES:,} vectors at once", "search with a filter that 1 % pass"
    cores = os.cpu_count() or 1

    def faiss_batch() -> float:
        faiss.omp_set_num_threads(cores)
        figure = rate(QUERIES, lambda: ivf.search(QUERY_VECTORS, K))
        faiss.omp_set_num_threads(1)
        return figure

    def our_batch() -> float:
        faiss.omp_set_num_threads(cores)
        figure = rate(QUERIES, lambda: docs.search(QUERY_VECTORS, K))
        faiss.omp_set_num_threads(1)
        return figure

    cases = [
        Case(name=many, run=our_batch),
        Case(name="faiss IVF, at once", run=faiss_batch, peer_of=many),
        Case(name=few, run=one_by_one(bare_ours(docs, where={"shelf": 7}))),
        Case(name="ours without a filter", run=one_by_one(bare_ours(docs)), peer_of=few),
        *one_durable(),
    ]
    goals = [
        Goal(ours=many, ratio=0.9),
        Goal(ours=few, ratio=0.5),
        Goal(ours="durable upsert of one vector", ratio=1 / 1.5),
    ]
    return run("vector-more", cases, goals)


def reopening(path: str, ivf: Any, root: str, report: dict[str, float]) -> None:
    """Opening until the first answer, beside reading a file of faiss."""
    file = f"{root}/faiss.index"
    faiss.write_index(ivf, file)

    def first_answer() -> None:
        with penstock.open(path) as store:
            store.vector("docs").search(QUERY_VECTORS[0], K)

    def all_in_memory() -> None:
        with penstock.open(path) as store:
            store.vector("docs").search(QUERY_VECTORS[:100], K)

    report["open until the first answer, s"] = seconds_of(first_answer)
    report["open until 100 answers, all vectors in memory, s"] = seconds_of(all_in_memory)
    report["faiss.read_index until the first answer, s"] = seconds_of(
        lambda: faiss.read_index(file).search(QUERY_VECTORS[:1], K)
    )


if __name__ == "__main__":
    sys.exit(not main())
