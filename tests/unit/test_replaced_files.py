"""Files of encrypted tables that were replaced: whoever reads one by its name knows which key it must have.

Readers here are those that are not the tree of the owner: pieces of clients and Spark tasks, merges in processes and
by drivers, checks, snapshots, salvage, staged files.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock
from penstock.archive import chunk as chunks
from penstock.archive import container, framed
from penstock.archive.chunk import ChunkIdentity, Sealing
from penstock.archive.table_keys import lend, take_back
from penstock.errors import CorruptionError, Invalid, KeyMissing
from penstock.host.randomness import system_random
from penstock.journal.partitions import partition_id
from penstock.kinds import FileReadable
from penstock.lsm.merge import MergeInput, MergePlan, merge
from penstock.lsm.merge_offers import MergeOffers
from penstock.lsm.rows import Columns
from penstock.lsm.sstable import Sstable
from penstock.lsm.writer import SstableWriter
from penstock.partition.reference import sealed
from penstock.queue.coding import PLAIN_CODING, lent_coding, partition_of
from penstock.registry import kind_named
from penstock.scheduler.offers import OfferBoard
from penstock.store.settings import StoreSettings

KEYS = {1: b"1" * 32}
BY_HAND = StoreSettings(background=False, serve=False)
REFUSED = {
    "plain": "it is not encrypted, and its table is",
    "other": "it is encrypted with key .*, and its table has key ",
}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[penstock.Store]:
    with penstock.open(tmp_path / "s", keys=KEYS, encrypt=True, settings=BY_HAND) as opened:
        opened.kv("users").put(b"a", b"1")
        opened.kv("others").put(b"a", b"1")
        opened.series("metrics").write("m", 1.0)
        opened.vector("docs", dimensions=2).upsert(["a"], [[1.0, 2.0]])
        opened.flush()
        for name in ("users", "metrics", "docs"):
            opened.compact(name)
        yield opened


def sealing_of(store: penstock.Store, table: str) -> Sealing:
    info = store.port.table(table)
    assert info is not None
    return store._keys.files_of(info.table_id).sealing(0)


def replaced(store: penstock.Store, table: str, how: str) -> Path:
    """Put a file of the same name, store and id in the place of a table's: plain, or with the key of another table."""
    [chunk] = store.chunks(table)
    path = Path(store.path) / chunk.file
    old = Sstable.open(str(path))
    [columns] = [old.columns(*piece) for piece in old.pieces(0, old.summary.rows)]
    for name in (path, path.with_suffix(".idx")):
        name.unlink()
    made_up = sealing_of(store, "others") if how == "other" else Sealing()
    writer = SstableWriter(
        store.files, str(path), ChunkIdentity(store=store.identity, chunk_id=chunk.chunk), sealing=made_up
    )
    writer.append(columns)
    writer.finish()
    old.close()
    return path


@pytest.mark.parametrize("how", ["plain", "other"])
@pytest.mark.parametrize("table", ["users", "metrics", "docs"])
def test_a_reader_by_name_refuses_a_replaced_file(store: penstock.Store, table: str, how: str) -> None:
    """As a task of Spark does: the piece comes from the owner, the files are read here."""
    info = store.port.table(table)
    assert info is not None
    kind = kind_named(info.kind, table)
    assert isinstance(kind, FileReadable)
    with store.snapshot() as snapshot:
        [piece] = snapshot._port.pieces(partition_id(info.table_id, 0), 1)
        batches = kind.read_piece(piece, store.path, store.identity)
        assert batches is not None
        assert sum(batch.num_rows for batch in batches) == 1
        path = replaced(store, table, how)
        with pytest.raises(CorruptionError, match=REFUSED[how]):
            list(kind.read_piece(piece, store.path, store.identity) or ())
        damage = kind.check_piece(piece, store.path, store.identity)
        assert damage is not None
        assert {where for where, _ in damage} <= {str(path), str(path.with_suffix(".idx"))}
        assert damage


def test_the_refusal_is_by_the_key_alone(store: penstock.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: without the check a plain file of the right name, store and id is read as the table's."""
    info = store.port.table("users")
    assert info is not None
    with store.snapshot() as snapshot:
        [piece] = snapshot._port.pieces(partition_id(info.table_id, 0), 1)
        replaced(store, "users", "plain")
        for module in (chunks, container, framed):
            monkeypatch.setattr(module, "check_key", lambda *_: None)
        kind = kind_named("kv", "users")
        assert isinstance(kind, FileReadable)
        assert [batch.num_rows for batch in kind.read_piece(piece, store.path, store.identity) or ()] == [1]


@pytest.mark.parametrize("how", ["plain", "other"])
def test_a_merge_in_another_process_refuses_a_replaced_input(store: penstock.Store, how: str) -> None:
    path, info = replaced(store, "users", how), store.port.table("users")
    assert info is not None
    plan = MergePlan(
        inputs=(MergeInput(path=str(path)),), folder=str(path.parent), store=store.identity, chunk_ids=(99,), now_us=0,
        table_id=info.table_id, sealing=("none", 1, True),
    )  # fmt: skip
    with pytest.raises(CorruptionError, match=REFUSED[how]):
        merge(plan)
    assert not (path.parent / f"{99:020d}.sst").exists()


@pytest.mark.parametrize("how", ["plain", "other"])
def test_what_a_driver_merged_must_have_the_tables_key(store: penstock.Store, how: str) -> None:
    path, info = replaced(store, "users", how), store.port.table("users")
    assert info is not None
    [chunk] = store.chunks("users")
    plan = MergePlan(
        inputs=(MergeInput(path="x"),), folder=str(Path(chunk.file).parent), store=store.identity,
        chunk_ids=(chunk.chunk,), now_us=0, table_id=info.table_id, sealing=("none", 1, True),
    )  # fmt: skip
    offers = MergeOffers(
        OfferBoard(clock=store.clock, random=system_random()), fs=store.files, root=store.path, bytes_min=0
    )
    with pytest.raises(CorruptionError, match=REFUSED[how]):
        offers._accept_outputs(plan, [chunk.chunk], {chunk.chunk})
    assert path.exists()


@pytest.mark.parametrize("how", ["plain", "other"])
def test_checks_snapshots_and_salvage_name_a_replaced_file(store: penstock.Store, tmp_path: Path, how: str) -> None:
    path = replaced(store, "users", how)
    report = store.check()
    assert {Path(each.path).stem for each in report.damage} == {path.stem}
    with pytest.raises(CorruptionError, match=REFUSED[how]):
        store.keep_snapshot("users")
    store.close()
    salvaged = penstock.salvage(tmp_path / "s", tmp_path / "rescued", keys=KEYS)
    assert any(path.name in each for each in salvaged.lost)
    assert salvaged.rows == {"users": 0, "others": 1, "metrics": 1, "docs": 1}


@pytest.mark.parametrize("how", ["plain", "other"])
def test_a_file_without_its_tables_key_is_not_adopted(store: penstock.Store, how: str) -> None:
    def adopt(table: str, sealing: Sealing) -> None:
        [staged] = store.stage(table)
        identity = ChunkIdentity(store=store.identity, chunk_id=staged.chunk_id)
        writer = SstableWriter(store.files, f"{store.path}/{staged.file_name}", identity, sealing=sealing)
        writer.append(Columns.of([b"b"], [b"2"], 1, [0]))
        writer.finish()
        with store.batch() as batch:
            batch.adopt(table, [sealed(store.files, store.path, staged)])

    store.kv("open", encrypted=False)
    with pytest.raises(Invalid, match="is not encrypted with the key of its table: build it with store.load"):
        adopt("users", Sealing() if how == "plain" else sealing_of(store, "others"))
    with pytest.raises(Invalid, match="is not plain, as its table is: build it with store.load"):
        adopt("open", sealing_of(store, "others"))
    adopt("users", sealing_of(store, "users"))
    adopt("open", Sealing())
    assert (store.kv("users").get(b"b"), store.kv("open").get(b"b")) == (b"2", b"2")


def test_a_piece_of_a_queue_says_whether_its_messages_are_encrypted(tmp_path: Path) -> None:
    """A reader whose key is gone must not take what it finds for a plain queue."""
    with penstock.open(tmp_path, keys=KEYS, encrypt=True, settings=BY_HAND) as store:
        store.queue("events").put(b"one", durable=True)
        kind, identity = kind_named("queue", "events"), store.identity
        assert isinstance(kind, FileReadable)
        with store.snapshot() as snapshot:
            [piece] = snapshot._port.pieces(partition_id(store.port.tables()[0].table_id, 0), 1)
            read = [batch.num_rows for batch in kind.read_piece(piece, store.path, identity) or ()]
            assert read == [1]
            take_back(identity, store._keys.table_key)
            try:
                with pytest.raises(KeyMissing, match="is encrypted, and this process has no key"):
                    list(kind.read_piece(piece, store.path, identity) or ())
                partition = partition_of(f"{store.path}/tables/1/0")
                assert lent_coding(identity, partition) is PLAIN_CODING  # what the reader did before
            finally:
                lend(identity, store._keys.table_key)


@pytest.mark.parametrize("harm", ["none", "plain", "cut"])
def test_salvage_takes_evicted_files_of_encrypted_tables(tmp_path: Path, harm: str) -> None:
    """Their indexes are here, their keys in the ledger, which is not open when files are looked at."""
    archive = f"file://{tmp_path / 'archive'}"
    with penstock.open(tmp_path / "s", keys=KEYS, encrypt=True, settings=BY_HAND, archive=archive) as store:
        store.kv("users").put(b"a", b"1")
        store.flush()
        store.compact("users")
        store.archive()
        assert store.evict("users").files == 1
        [chunk] = store.chunks("users")
    index = (tmp_path / "s" / chunk.file).with_suffix(".idx")
    if harm != "none":
        index.write_bytes(index.read_bytes()[:100] if harm == "cut" else b"made up" * 100)
    report = penstock.salvage(tmp_path / "s", tmp_path / "rescued", keys=KEYS)
    assert (report.rows, bool(report.lost)) == ({"users": int(harm == "none")}, harm != "none")
    assert all(chunk.file in each for each in report.lost)
