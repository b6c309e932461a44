"""Merges cut by key and done by others: same rows, in files that do not meet; and what becomes of bad drivers."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from lsm_files import STORE, ModelRows, write

from penstock.errors import PenstockError
from penstock.lsm import merge_offers, writer
from penstock.lsm.collection import CollectionSettings
from penstock.lsm.merge import MergeInput, MergePlan, merge, outputs_max, sstable_path
from penstock.lsm.merge_offers import merge_part, share
from penstock.lsm.operators import OPERATORS
from penstock.lsm.ranges import RangeDelete, RangeDeletes
from penstock.lsm.rows import DELETE, NEVER, PUT, RANGE_DELETE
from penstock.lsm.sstable import Sstable
from penstock.manifest.records import JobKind
from penstock.scheduler.offers import Offer
from penstock.scheduler.work import pack, unpack
from penstock.store.settings import StoreSettings
from penstock.store.store import Store, open_store
from penstock.testing import SimulatedDisk

NOW_US = 1_000
ADD = OPERATORS["add_i64"]


def random_run(chance: random.Random, lsn: int) -> tuple[ModelRows, list[RangeDelete]]:
    rows: ModelRows = {}
    for _ in range(chance.randrange(1, 120)):
        kind = chance.choice([PUT, PUT, PUT, DELETE, ADD])
        value = b"" if kind == DELETE else chance.randrange(1 << 40).to_bytes(8, "little")
        expires = chance.choice([NEVER, NEVER, NOW_US - 1, NOW_US + 1]) if kind == PUT else NEVER
        rows[b"%03d" % chance.randrange(300)] = (kind, value, lsn, expires)
    ranges = []
    for _ in range(chance.randrange(3)):
        start, end = sorted(b"%03d" % chance.randrange(300) for _ in range(2))
        if start < end:
            ranges.append((start, end, lsn))
    return rows, ranges


def contents(disk: SimulatedDisk, paths: list[str]) -> tuple[list[Any], list[RangeDelete]]:
    """All rows of some files in order, and all they delete by range."""
    rows: list[Any] = []
    ranges: list[RangeDelete] = []
    for path in paths:
        table = Sstable.open(path, fs=disk)
        for batch in table.scan_arrow():
            rows += [row for row in batch.to_pylist() if row["kind"] != RANGE_DELETE]
        ranges += list(table.range_deletes)
        table.close()
    return rows, list(RangeDeletes.of(ranges))


@pytest.mark.parametrize("seed", range(40))
def test_the_parts_of_a_merge_are_the_merge(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "BATCH_ROWS", 16)
    monkeypatch.setattr(writer, "BATCH_ROWS_LEAST", 8)
    chance, disk = random.Random(seed), SimulatedDisk()
    disk.mkdir("/s")
    inputs = []
    for number in range(chance.randrange(1, 6)):  # the oldest first
        rows, ranges = random_run(chance, lsn=10 + number)
        inputs.append(f"in{number:03d}.sst")
        write(disk, f"/s/{inputs[-1]}", rows, ranges=ranges, chunk_id=1 + number, chunk_rows=8)
    plan = MergePlan(
        inputs=tuple(MergeInput(path=name) for name in reversed(inputs)),
        folder="out",
        store=STORE,
        chunk_ids=(1_000,),
        now_us=NOW_US,
        bottom=chance.random() < 0.5,
        lsn_floor=chance.randrange(20),
        output_bytes=chance.choice([400, 1 << 27]),
    )
    disk.mkdir("/s/out")
    whole = replace(plan, chunk_ids=tuple(range(1_000, 1_100))).under("/s")
    expected = contents(disk, [sstable_path("/s/out", s.chunk_id) for s in merge(whole, fs=disk)])
    ids = iter(range(2_000, 9_000))
    tables = [Sstable.open(f"/s/{source.path}", fs=disk) for source in plan.inputs]
    parts = list(share(plan, tables, chance.randrange(1, 9), lambda count: [next(ids) for _ in range(count)]))
    summaries = [summary for part in parts for summary in merge(part.under("/s"), fs=disk)]
    assert contents(disk, [sstable_path("/s/out", summary.chunk_id) for summary in summaries]) == expected
    assert all(one.end <= other.start for one, other in pairwise(summaries))
    assert len({summary.chunk_id for summary in summaries}) == len(summaries)


def test_a_part_gets_enough_ids() -> None:
    counts: list[int] = []
    disk = SimulatedDisk()
    disk.mkdir("/s")
    write(disk, "/s/a.sst", {b"%05d" % n: (PUT, bytes(100), 1, NEVER) for n in range(2_000)})
    table = Sstable.open("/s/a.sst", fs=disk)
    plan = MergePlan(inputs=(MergeInput(path="a.sst"),), folder="", store=STORE, chunk_ids=(1,), now_us=0)

    def reserve(count: int) -> list[int]:
        counts.append(count)
        return list(range(count))

    assert len(list(share(plan, [table], 4, reserve))) == 1  # one batch: there is nothing to cut at
    assert counts[0] >= outputs_max(2_000, 220_000)


# -- drivers


Answer = Callable[[Store, Offer], "list[bytes] | None"]


def do_all(store: Store, offer: Offer) -> list[bytes]:
    """What a good driver hands in."""
    results = []
    for part in offer.parts:
        arguments: Any = unpack(part.arguments)
        results.append(pack(merge_part({**arguments, "root": store.path}, threading.Event())))
    return results


@contextmanager
def driver(store: Store, answer: Answer) -> Iterator[list[Offer]]:
    """A driver in a thread; None as an answer: it failed."""
    taken: list[Offer] = []
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(0.01):
            offer = store.offers.take(2)
            if offer is None:
                continue
            taken.append(offer)
            results = answer(store, offer)
            if results is None:
                store.offers.fail(offer.offer, "it could not")
            else:
                store.offers.finish(offer.offer, results)

    thread = threading.Thread(target=run)
    store.offers.take(2)  # it is there before anything is compacted
    thread.start()
    try:
        yield taken
    finally:
        ended.set()
        thread.join(60)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setattr(writer, "BATCH_ROWS", 512)
    monkeypatch.setattr(writer, "BATCH_ROWS_LEAST", 256)
    monkeypatch.setattr(merge_offers, "PART_BYTES_MIN", 1)
    settings = StoreSettings(offer_bytes_min=1, collection=CollectionSettings(grace_s=0))
    with open_store(str(tmp_path / "store"), settings=settings) as opened:
        fill(opened)
        yield opened


def fill(store: Store) -> None:
    table = store.kv("t")
    for number in range(3):
        table.put_many({b"%05d" % (n * 7 % 5_000): b"%d" % (n + number) for n in range(3_000)}, durable=True)
        flush(store)


def flush(store: Store) -> None:
    for tree, _ in store._maintenance.trees():
        store._maintenance.flush(tree)


def files(store: Store) -> set[int]:
    """The ids of the files of table t."""
    table = store.port.table("t")
    assert table is not None
    return {key.chunk_id for key, _ in store._manifest.scan_chunks(table.table_id)}


def test_a_driver_merges_and_the_owner_commits(store: Store) -> None:
    before = dict(store.kv("t").scan())
    output_ids: list[int] = []

    def note(store: Store, offer: Offer) -> list[bytes]:
        results = do_all(store, offer)
        for result in results:
            ids: Any = unpack(result)
            output_ids.extend(ids)
        return results

    with driver(store, note) as taken:
        store.compact("t")
    assert len(taken) == 1
    assert len(taken[0].parts) == 4
    assert files(store) == set(output_ids)
    assert dict(store.kv("t").scan()) == before


def overlapping(store: Store, offer: Offer) -> list[bytes]:
    """Every part merges all keys."""
    results = []
    for part in offer.parts:
        arguments: Any = unpack(part.arguments)
        arguments |= {"root": store.path, "start": b"", "end": None}
        results.append(pack(merge_part(arguments, threading.Event())))
    return results


def not_built(store: Store, offer: Offer) -> list[bytes]:
    results = do_all(store, offer)
    for part in offer.parts:
        for name in part.writes:
            Path(store.path, name).unlink(missing_ok=True)
    return results


@pytest.mark.parametrize(
    "answer",
    [
        lambda store, offer: None,
        lambda store, offer: [],
        lambda store, offer: [pack([1]) for _ in offer.parts],
        lambda store, offer: [pack("x") for _ in offer.parts],
        overlapping,
        not_built,
    ],
    ids=["fails", "nothing", "other ids", "no ids", "overlapping", "not built"],
)
def test_what_a_bad_driver_leaves_is_never_taken(store: Store, answer: Answer) -> None:
    before, inputs = dict(store.kv("t").scan()), files(store)
    with driver(store, answer) as taken:
        store.compact("t")
    assert len(taken) == 1
    assert dict(store.kv("t").scan()) == before
    listed = files(store)
    assert not listed & inputs
    reserved_ids = offered_ids(taken[0])
    assert not listed & reserved_ids
    store._collector.collect()
    store._collector.collect()
    folder = next(Path(store.path).glob(f"tables/*/0/{min(listed):020d}.sst")).parent
    assert not {int(path.name.split(".")[0]) for path in folder.iterdir()} & reserved_ids  # the leavings are gone


def offered_ids(offer: Offer) -> set[int]:
    chunk_ids: set[int] = set()
    for part in offer.parts:
        arguments: Any = unpack(part.arguments)
        chunk_ids.update(arguments["chunk_ids"])
    return chunk_ids


def test_nothing_is_offered_when_it_is_small_or_nobody_is_there(tmp_path: Path) -> None:
    with open_store(str(tmp_path / "small")) as store:  # far below the default
        fill(store)
        with driver(store, do_all) as taken:
            store.compact("t")
        assert taken == []
    with open_store(str(tmp_path / "alone"), settings=StoreSettings(offer_bytes_min=1)) as store:
        fill(store)
        store.compact("t")
        assert len(files(store)) == 1


def test_inputs_that_changed_meanwhile_are_not_committed(store: Store) -> None:
    before = dict(store.kv("t").scan())

    def overtaken(store: Store, offer: Offer) -> list[bytes]:
        """Somebody else compacts the same files while the driver works, the first time."""
        if len(taken) > 1:
            return do_all(store, offer)
        maintenance = store._maintenance
        tree, catalog = next((t, c) for t, c in maintenance.trees() if c.folder in offer.parts[0].reads[0])
        compaction = tree.pick(everything=True)
        assert compaction is not None
        metas = [file.meta for file in compaction.inputs]
        plan = MergePlan(
            inputs=tuple(MergeInput(path=meta.file_name, lsn=meta.lsn) for meta in metas),
            folder=catalog.folder,
            store=store.identity,
            chunk_ids=tuple(maintenance._work.reserve(4)),
            now_us=0,
        )
        outputs = maintenance._files.open_all(
            [catalog.describe(s, level=1, run=0) for s in merge(plan.under(store.path))]
        )
        store._manifest.apply(catalog.publish([file.meta for file in outputs], metas))
        tree.end_compaction(compaction, outputs)
        return do_all(store, offer)

    with driver(store, overtaken) as taken:
        with pytest.raises(PenstockError, match="changed while it ran"):
            store.compact("t")
        listed = files(store)
        assert not listed & offered_ids(taken[0])
        assert dict(store.kv("t").scan()) == before
        store.kv("t").put(b"new", b"row", durable=True)
        flush(store)
        tree = next(tree for tree, catalog in store._maintenance.trees() if catalog.db_id == _table(store))
        while store._jobs.gate(_table(store), JobKind.COMPACTION).pending_job_id() is not None:
            store._maintenance.run(JobKind.COMPACTION)  # the job is tried again, with the inputs of now
            tree.wait_for_change(0.05)
    assert dict(store.kv("t").scan()) == before | {b"new": b"row"}


def _table(store: Store) -> int:
    info = store.port.table("t")
    assert info is not None
    return info.table_id


def test_a_store_closes_over_an_offer(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "store"), settings=StoreSettings(offer_bytes_min=1))
    fill(store)
    before = dict(store.kv("t").scan())
    tree = next(tree for tree, catalog in store._maintenance.trees() if catalog.db_id == _table(store))
    store.offers.take(1)
    store._maintenance.request_compaction(tree, everything=True)
    store._wake("compaction")
    while store.offers.take(1) is None:  # until the job is on the board, and ours
        tree.wait_for_change(0.01)
    store.close()
    with open_store(str(tmp_path / "store")) as again:
        assert dict(again.kv("t").scan()) == before
