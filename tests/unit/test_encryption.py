"""Encrypted tables: what is on disk, which keys open it, rotation, and what a damaged or foreign file says."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from typer.testing import CliRunner

import penstock
from penstock.archive.chunk import ChunkIdentity
from penstock.cli.program import app
from penstock.errors import CorruptionError, Invalid, KeyMissing, KindMismatch, PenstockError, WrongKey
from penstock.journal.partitions import partition_id
from penstock.journal.record import Section, SegmentedRecordHeader
from penstock.lsm.rows import Columns
from penstock.lsm.writer import SstableWriter
from penstock.partition.machine import Entry
from penstock.partition.reference import sealed
from penstock.queue.coding import FLAG_ZSTD, PREFIX, BodyCoding
from penstock.store.settings import StoreSettings

KEYS = {1: b"1" * 32}
MARKER = "Zx9Marker"
RAW = MARKER.encode()
FLOATS = np.array([1.1875e9, -7.53125e5, 3.14159e7, 2.71828e-9], np.float32)  # bytes that no other file holds
LZ4 = penstock.StorageOptions(compression=penstock.CompressionConfig(penstock.Codec.LZ4))
BY_HAND = StoreSettings(background=False, serve=False)


def files_under(folder: Path) -> Iterator[Path]:
    for root, _, names in os.walk(folder):
        yield from (path for name in names if (path := Path(root) / name).is_file())


def leaks(folder: Path) -> list[str]:
    """The files that hold a marker, or in whose name it is."""
    names = []
    for path in files_under(folder):
        data = path.read_bytes()
        for secret in (RAW, MARKER.encode("utf-16-le"), FLOATS.tobytes(), FLOATS[:2].tobytes()):
            if secret in data or MARKER in str(path):
                names.append(str(path.relative_to(folder)))
                break
    return names


def fill(store: penstock.Store, number: int) -> None:
    """Write markers to every kind of table, in everything that a user can put there."""
    with store.batch() as batch:
        batch.kv("users").put(RAW + b"key%d" % number, RAW + b"value" * 30)
        batch.queue("events").put(RAW + b"payload", key=RAW + b"k", headers={MARKER: RAW})
    for each in range(40):
        store.kv("users").put(RAW + b"%d-%d" % (number, each), RAW * 20)
    store.kv("users").merge(RAW + b"sum", RAW, operator="append")
    store.kv("users").put(RAW + b"gone", RAW, durable=True)
    store.kv("users").delete_range(RAW + b"gone", RAW + b"gonf")
    store.queue("events").put_many([RAW * 50] * 20, keys=[RAW] * 20)
    store.series("metrics").write(MARKER, 0.5 + number, labels={MARKER: MARKER + "x"})
    store.vector("docs").upsert([MARKER + str(number)], FLOATS[None, :], attributes=[{MARKER: MARKER}])
    store.flush()


def load(store: penstock.Store, number: int) -> None:
    """Staged files: rows that do not go through the journal."""
    count = 30_000
    keys = pa.array([RAW + b"load%d-%06d" % (number, each) for each in range(count)])
    store.load("users", pa.table({"key": keys, "value": pa.array([RAW * 5] * count)}))
    store.load("events", pa.table({"payload": pa.array([RAW * 5] * count)}))


def create(store: penstock.Store) -> None:
    levels = (penstock.CompressionConfig(), penstock.CompressionConfig(penstock.Codec.ZSTD, 3))
    store.kv("users", changes=True, storage=penstock.StorageOptions(level_compression=levels))
    store.queue("events", headers=True, changes=True, storage=LZ4)
    store.queue("letters", headers=True)
    store.series("metrics", changes=True)
    store.vector("docs", dimensions=4, metric="euclidean", changes=True)


def contents(store: penstock.Store) -> dict[str, Any]:
    with store.snapshot() as snapshot:
        return {
            "users": snapshot.kv("users").to_arrow().drop(["lsn"]).to_pylist(),
            "events": snapshot.queue("events").to_arrow().to_pylist(),
            "letters": snapshot.queue("letters").to_arrow().to_pylist(),
            "metrics": store.series("metrics").select(MARKER).to_pylist(),
            "docs": [(hit.id, hit.attributes) for hit in store.vector("docs").search(FLOATS, k=3)],
        }


def dead_letter(store: penstock.Store) -> None:
    consumer = store.queue("events").consumer("c", deliveries_max=1, dead_letter="letters")
    for message in consumer.get(2):
        consumer.nack(message)
    consumer.get(1)


def test_nothing_of_an_encrypted_table_is_readable_on_disk(tmp_path: Path) -> None:
    """Markers in all that users give, through flush, compaction, spill, checkpoint, load, snapshot and backup."""
    path = tmp_path / "store"
    store = penstock.open(path, keys=KEYS, encrypt=True, settings=BY_HAND)
    create(store)
    fill(store, 1)
    assert leaks(path) == []
    store._consensus.roll()
    assert store.checkpoint().spilled
    fill(store, 2)
    load(store, 1)
    store._maintenance.flush(store._maintenance.trees()[1][0])
    dead_letter(store)
    for name in ("users", "metrics", "docs"):
        store.keep_snapshot(name)
        store.compact(name)
    fill(store, 3)
    before = contents(store)
    store.backup(tmp_path / "backups")
    assert leaks(tmp_path) == []
    assert store.check().ok
    store.close()
    assert leaks(tmp_path) == []
    with penstock.open(path, keys=KEYS, settings=BY_HAND) as again:
        assert contents(again) == before
        assert len(before["users"]) > 30_000
    assert penstock.check_backup(tmp_path / "backups") == []
    penstock.restore(tmp_path / "backups", tmp_path / "copy")
    with pytest.raises(KeyMissing):
        penstock.open(tmp_path / "copy", settings=BY_HAND)
    with penstock.open(tmp_path / "copy", keys=KEYS, settings=BY_HAND) as copy:
        assert contents(copy) == before
    assert leaks(tmp_path) == []


def test_the_search_finds_what_a_plain_table_leaves(tmp_path: Path) -> None:
    """The control: without encryption every kind of file holds the marker."""
    store = penstock.open(tmp_path, settings=BY_HAND)
    create(store)
    fill(store, 1)
    for name in ("metrics", "docs"):
        store.compact(name)
    names = leaks(tmp_path)
    assert any(name.startswith("journal/") for name in names)
    for table in ("users", "events", "metrics", "docs"):
        store.keep_snapshot(table)
        number = store.port.table(table)
        assert number is not None
        assert [each for each in leaks(tmp_path) if each.startswith(f"tables/{number.table_id}/")], table
    store.close()
    assert "manifest" in leaks(tmp_path)  # the first and last keys of files


@pytest.mark.parametrize(
    ("keys", "error", "says"),
    [
        (None, KeyMissing, "open the store with keys="),
        ({1: b"2" * 32}, WrongKey, "not the one that table users was encrypted with"),
        ({2: b"1" * 32}, KeyMissing, "does not hold master key 1"),
        ("env:PENSTOCK_TEST_UNSET", KeyMissing, "is not set"),
        (lambda version: (2, b"1" * 32), KeyMissing, "returned master key 2, not 1"),
        (lambda version: 1 / 0, KeyMissing, "ZeroDivisionError"),
        (lambda version: b"1" * 32, Invalid, "must return"),
    ],
)
def test_a_store_opens_with_its_own_key_only(tmp_path: Path, keys: Any, error: type[PenstockError], says: str) -> None:
    with penstock.open(tmp_path, keys=KEYS, settings=BY_HAND) as store:
        store.kv("users", encrypted=True).put(b"a", b"1", durable=True)
    for _ in range(2):  # a refused opening changes nothing
        with pytest.raises(error, match=says):
            penstock.open(tmp_path, keys=keys, settings=BY_HAND)
    with penstock.open(tmp_path, keys=KEYS, settings=BY_HAND) as store:
        assert store.kv("users").get(b"a") == b"1"


def test_a_table_in_the_journal_alone_needs_its_key_too(tmp_path: Path) -> None:
    store = penstock.open(tmp_path / "s", keys=KEYS, settings=BY_HAND)
    store.kv("users", encrypted=True).put(b"a", b"1", durable=True)
    store.backup(tmp_path / "b")
    store.close()
    penstock.restore(tmp_path / "b", tmp_path / "copy")
    for keys, error in ((None, KeyMissing), ({1: b"x" * 32}, WrongKey)):
        with pytest.raises(error):
            penstock.open(tmp_path / "copy", keys=keys, settings=BY_HAND)
    with penstock.open(tmp_path / "copy", keys=KEYS, settings=BY_HAND) as copy:
        assert copy.kv("users").get(b"a") == b"1"
        assert copy.troubles() == []


def test_keys_come_from_a_file_the_environment_or_a_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# ours\n1 {KEYS[1].hex()}  # the first\n")
    monkeypatch.setenv("OUR_KEYS", f"1 {KEYS[1].hex()}")
    sources: list[Any] = [f"file:{file}", "env:OUR_KEYS", lambda version: (1, KEYS[1]), KEYS]
    for number, keys in enumerate(sources):
        with penstock.open(tmp_path / "s", keys=keys, encrypt=True, settings=BY_HAND) as store:
            store.kv("users").put(b"%d" % number, b"x", durable=True)
            assert len(store.kv("users")) == number + 1
    monkeypatch.setenv("PENSTOCK_KEYS", "env:OUR_KEYS")
    with penstock.open(tmp_path / "s", settings=BY_HAND) as store:
        assert len(store.kv("users")) == len(sources)


@pytest.mark.parametrize(
    "keys",
    [
        "file:",
        "abc",
        b"1" * 32,
        7,
        True,
        {0: b"1" * 32},
        {1: b"short"},
        {"1": b"1" * 32},
        {True: b"1" * 32},
        [b"1" * 32],
    ],
)
def test_what_is_not_keys_is_refused(tmp_path: Path, keys: Any) -> None:
    with pytest.raises(Invalid) as caught:
        penstock.open(tmp_path / "s", keys=keys, settings=BY_HAND)
    assert "1111" not in str(caught.value)


@pytest.mark.parametrize(
    "line", ["1", "1 abc", "x " + "0" * 64, "1 " + "0" * 64 + " 2", "0 " + "0" * 64, "1 " + "zz" * 32]
)
def test_a_malformed_key_file_is_named_without_its_content(tmp_path: Path, line: str) -> None:
    (tmp_path / "keys").write_text(f"7 {'a' * 64}\n{line}\n")
    with pytest.raises(Invalid, match="line 2 of .*keys") as caught:
        penstock.open(tmp_path / "s", keys=f"file:{tmp_path}/keys", encrypt=True, settings=BY_HAND).kv("a")
    assert "aaa" not in str(caught.value)
    assert "000" not in str(caught.value)


def test_rotation_wraps_the_keys_of_tables_and_touches_no_file(tmp_path: Path) -> None:
    both = {1: KEYS[1], 2: b"2" * 32}
    with penstock.open(tmp_path, keys=KEYS, settings=BY_HAND) as store:
        users, events = store.kv("users", encrypted=True), store.queue("events", encrypted=True)
        store.kv("open").put(b"a", b"plain")
        users.put(b"a", b"1", durable=True)
        store.compact("users")
        events.append(b"message")
        assert store.rotate_keys() == penstock.RotationReport(1, [])
    with penstock.open(tmp_path, keys=both, settings=BY_HAND) as store:
        tables = [
            path for path in files_under(tmp_path / "tables") if not str(path).startswith(f"{tmp_path}/tables/1/")
        ]
        files = {path: path.read_bytes() for path in tables}
        assert store.rotate_keys() == penstock.RotationReport(2, ["events", "users"])
        assert {path: path.read_bytes() for path in tables} == files
        assert store.rotate_keys() == penstock.RotationReport(2, [])
        store.kv("users").put(b"b", b"2", durable=True)
    with pytest.raises(KeyMissing, match="does not hold master key 2"):
        penstock.open(tmp_path, keys=KEYS, settings=BY_HAND)
    with penstock.open(tmp_path, keys={2: both[2]}, settings=BY_HAND) as store:
        assert dict(store.kv("users").scan()) == {b"a": b"1", b"b": b"2"}
        assert [message.payload for message in store.queue("events").read()] == [b"message"]


def test_keys_are_made_and_rotated_from_a_shell(tmp_path: Path) -> None:
    file, path = tmp_path / "keys", tmp_path / "s"

    def run(*words: object) -> str:
        result = CliRunner().invoke(app, [str(word) for word in words])
        assert result.exit_code == 0, result.output
        return str(result.output)

    run("keys", "new", file)
    assert file.stat().st_mode & 0o777 == 0o600
    with penstock.open(path, keys=f"file:{file}", encrypt=True) as store:
        store.kv("users").put(b"a", b"1", durable=True)
        first = file.read_text()
        run("keys", "new", file)
        assert file.read_text().startswith(first)  # read again when it is needed
        assert "master key 2" in run("keys", "rotate", path)
        assert '"rewrapped":[]' in run("keys", "rotate", path, "--json")
    file.write_text(file.read_text().splitlines()[1])
    with penstock.open(path, keys=f"file:{file}", settings=BY_HAND) as store:
        assert store.kv("users").get(b"a") == b"1"


def test_encryption_is_chosen_when_a_table_is_created(tmp_path: Path) -> None:
    with penstock.open(tmp_path, settings=BY_HAND) as store:
        with pytest.raises(KeyMissing, match="keys="):
            store.kv("users", encrypted=True)
        assert store.tables() == []
        store.kv("open").put(b"a", b"1")
        with pytest.raises(KindMismatch, match="without encryption"):
            store.kv("open", encrypted=True)
        for bad in (1, "yes", 0.0):
            with pytest.raises(Invalid):
                store.kv("bad", encrypted=bad)  # type: ignore[call-overload]
        assert store.tables() == ["open"]
    with penstock.open(tmp_path, keys=KEYS, encrypt=True, settings=BY_HAND) as store:
        assert store.kv("open").get(b"a") == b"1"
        store.kv("secret").put(b"a", b"1")
        store.kv("plain", encrypted=False)
        with pytest.raises(KindMismatch, match="was created encrypted"):
            store.kv("secret", encrypted=False)
        storages = {info.name: info.key is not None for info in store.port.tables()}
        assert storages == {"open": False, "secret": True, "plain": False}


def test_dead_letters_of_an_encrypted_queue_stay_encrypted(tmp_path: Path) -> None:
    with penstock.open(tmp_path, keys=KEYS, settings=BY_HAND) as store:
        store.queue("events", encrypted=True).put(b"x", durable=True)
        store.queue("letters")
        with pytest.raises(Invalid, match="name an encrypted one"):
            store.queue("events").consumer("c", deliveries_max=1, dead_letter="letters").get(1)


def encrypted_chunks(folder: Path) -> list[Path]:
    return [path for path in files_under(folder / "tables") if path.read_bytes()[:8] == b"PENCHNK1"]


@pytest.mark.parametrize("harm", ["flip", "cut", "swap"])
def test_a_damaged_encrypted_file_is_named(tmp_path: Path, harm: str) -> None:
    with penstock.open(tmp_path, keys=KEYS, encrypt=True, settings=BY_HAND) as store:
        for name in ("one", "two"):
            for each in range(3_000):
                store.kv(name).put(b"%06d" % each, os.urandom(60))
            store.flush()
            store.compact(name)
    one, two = sorted(path for path in encrypted_chunks(tmp_path) if path.suffix == ".sst")[:2]
    data = bytearray(one.read_bytes())
    if harm == "flip":
        data[len(data) // 2] ^= 4
    elif harm == "cut":
        del data[-100:]
    else:  # a whole file of another table, which its own key opens
        data = bytearray(two.read_bytes())
    one.write_bytes(data)
    with penstock.open(tmp_path, keys=KEYS, settings=BY_HAND) as store:
        with pytest.raises((CorruptionError, WrongKey), match=one.name):
            dict(store.kv("one").scan())
        assert len(dict(store.kv("two").scan())) == 3_000
        assert not store.check().ok


def test_sealed_sections_that_were_exchanged_are_refused(tmp_path: Path) -> None:
    """Whoever can write the journal still cannot move rows of one table into another, or make up some."""
    with penstock.open(tmp_path, keys=KEYS, encrypt=True, settings=BY_HAND) as store:
        store.kv("one", shards=2), store.kv("two")
        one, two = (info.table_id for info in store.port.tables())
        keys, opener = store._keys, store._keys.opener(one)
        assert opener is not None
        own = keys.seal_section(partition_id(one, 0), b"section")
        assert opener(Entry(1, 0, (own,))).sections[0].payload == b"section"
        for other in (partition_id(one, 1), partition_id(two, 0)):
            moved = Section(own.header, keys.seal_section(other, b"section").payload)
            with pytest.raises(CorruptionError, match="not sealed"):
                opener(Entry(1, 0, (moved,)))
        plain = Section(SegmentedRecordHeader(own.header.partition, own.header.form), b"made up")
        with pytest.raises(CorruptionError, match="is not encrypted, and its table is"):
            opener(Entry(1, 0, (plain,)))


def test_a_plain_file_in_the_place_of_an_encrypted_one_is_refused(tmp_path: Path) -> None:
    """Whoever can write the folder knows what the header of a file says, but not the key."""
    with penstock.open(tmp_path, keys=KEYS, encrypt=True, settings=BY_HAND) as store:
        store.kv("users").put(b"a", b"1")
        store.flush()
        store.compact("users")
        [chunk] = store.chunks("users")
        identity, files = ChunkIdentity(store=store.identity, chunk_id=chunk.chunk), store.files
    path = tmp_path / chunk.file
    for each in (path, path.with_suffix(".idx")):
        each.unlink()
    writer = SstableWriter(files, str(path), identity)
    writer.append(Columns.of([b"a"], [b"made up"], chunk.lsn_max, [0]))
    writer.finish()
    with penstock.open(tmp_path, keys=KEYS, settings=BY_HAND) as store:
        with pytest.raises(CorruptionError, match="is not encrypted, and its table is"):
            store.kv("users").get(b"a")
        store.kv("users").put(b"b", b"2")
        store.flush()
        with pytest.raises(PenstockError):  # nor is it merged into an encrypted one
            store.compact("users")


def test_plain_messages_in_an_encrypted_queue_are_refused(tmp_path: Path) -> None:
    with penstock.open(tmp_path, keys=KEYS, encrypt=True, settings=BY_HAND) as store:
        store.queue("events")
        [info] = store.port.tables()
        coding = BodyCoding(store._keys.files_of(info.table_id), partition_id(info.table_id, 0))
        for flags in (0, FLAG_ZSTD):
            with pytest.raises(CorruptionError, match="not encrypted, and their table is"):
                coding.decode(PREFIX.pack(1, 1, 1, flags, 0) + b"made up", "queue", 0)


def test_a_client_needs_no_key(tmp_path: Path) -> None:
    with penstock.open(tmp_path / "s", keys=KEYS, encrypt=True) as store, penstock.connect(tmp_path / "s") as client:
        users = client.kv("users", storage=LZ4)
        users.put(RAW, RAW * 5)
        client.queue("events").put(RAW)
        client.flush()
        count = 30_000
        keys = pa.array([RAW + b"%06d" % each for each in range(count)])
        assert client.load("users", pa.table({"key": keys, "value": keys})).rows == count
        assert users.get(RAW + b"000007") == RAW + b"000007"
        assert len(users) == count + 1
        assert client.rotate_keys().version == 1
        assert store.port.table("users").key is not None  # type: ignore[union-attr]
        assert leaks(tmp_path / "s") == []
    assert leaks(tmp_path / "s") == []


def test_archived_files_are_encrypted_and_read_again(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/bucket"
    by_hand = StoreSettings(background=False, serve=False, archive=penstock.ArchiveSettings(grace_s=0.0))
    with penstock.open(tmp_path / "s", keys=KEYS, encrypt=True, settings=by_hand, archive=url) as store:
        users = store.kv("users", storage=LZ4)
        users.put_many([(RAW + b"%d" % each, RAW * 9) for each in range(500)])
        store.queue("events").put(RAW, durable=True)
        store.compact("users")
        store.archive()
        assert store.evict("users").files == 1
        assert len(dict(users.scan())) == 500
        assert store.check().ok
    assert leaks(tmp_path) == []
    penstock.reattach(url, tmp_path / "again")
    with pytest.raises(KeyMissing):
        penstock.open(tmp_path / "again", settings=by_hand, archive=url)
    with penstock.open(tmp_path / "again", keys=KEYS, settings=by_hand, archive=url) as store:
        assert len(dict(store.kv("users").scan())) == 500
    assert leaks(tmp_path) == []


def test_what_is_set_aside_quotes_no_row(tmp_path: Path) -> None:
    with penstock.open(tmp_path, keys=KEYS, encrypt=True, settings=BY_HAND) as store:
        store.kv("users")
        (info,) = store.port.tables()
        section = store._keys.seal_section(partition_id(info.table_id, 0), RAW)
        store._aside.add("users", 5, 0, (section,), Invalid(f"the key {MARKER} is not a key"))
        assert "encrypted" in store.troubles()[0].reason
    assert leaks(tmp_path) == []


def test_an_encrypted_store_is_read_without_an_owner(tmp_path: Path) -> None:
    with penstock.open(tmp_path, keys=KEYS, encrypt=True, settings=BY_HAND) as store:
        store.kv("users").put(b"a", b"1", durable=True)
    with pytest.raises(KeyMissing):
        penstock.open(tmp_path, read_only=True)
    with penstock.open(tmp_path, read_only=True, keys=KEYS) as store:
        assert store.kv("users").get(b"a") == b"1"


def test_codecs_change_for_new_files_while_a_table_is_in_use(tmp_path: Path) -> None:
    with penstock.open(tmp_path, settings=BY_HAND) as store:
        users, events = store.kv("users"), store.queue("events")
        sizes = []
        for codec in (penstock.Codec.NONE, penstock.Codec.LZ4, penstock.Codec.ZSTD):
            for name in ("users", "events"):
                store.alter(name, compression=penstock.CompressionConfig(codec))
            users.put_many([(b"%d" % each, RAW * 20) for each in range(2_000)])
            events.put_many([RAW * 20] * 500, durable=True)
            store.flush()
            store.compact("users")
            newest = max(path for path in files_under(tmp_path / "tables" / "2") if path.suffix == ".sst")
            sizes.append(newest.stat().st_size)
        assert sizes[0] > 4 * max(sizes[1:])
        assert len(users) == 2_000
        assert [message.payload for message in events.read(limit=2_000)] == [RAW * 20] * 1_500
        with pytest.raises(Invalid, match="rotate_keys|encrypted"):
            store.alter("users", encryption=penstock.EncryptionConfig("other"))
    with penstock.open(tmp_path, settings=BY_HAND) as store:
        assert len(store.queue("events").read(limit=2_000)) == 1_500


def test_compaction_in_another_process_keeps_the_files_encrypted(tmp_path: Path) -> None:
    with penstock.open(tmp_path, keys=KEYS, encrypt=True, settings=StoreSettings(serve=False)) as store:
        users = store.kv("users", storage=LZ4)
        for part in range(3):
            users.put_many([(RAW + b"%d-%d" % (part, each), RAW * 9) for each in range(500)])
            store.flush()
            store._maintenance.flush(users_tree(store))
        store.compact("users")
        assert len(users) == 1_500
    assert leaks(tmp_path) == []


def users_tree(store: penstock.Store) -> Any:
    table = store.port.table("users")
    assert table is not None
    return next(tree for tree, catalog in store._maintenance.trees() if catalog.db_id == table.table_id)


def test_a_plain_file_is_not_adopted_by_an_encrypted_table(tmp_path: Path) -> None:
    with penstock.open(tmp_path, keys=KEYS, encrypt=True, settings=BY_HAND) as store:
        store.kv("users")
        [staged] = store.stage("users")
        identity = ChunkIdentity(store=store.identity, chunk_id=staged.chunk_id)
        writer = SstableWriter(store.files, f"{store.path}/{staged.file_name}", identity)
        writer.append(Columns.of([b"a"], [b"1"], 1, [0]))
        writer.finish()
        with pytest.raises(Invalid, match="is not encrypted with the key of its table"), store.batch() as batch:
            batch.adopt("users", [sealed(store.files, store.path, staged)])
        assert len(store.kv("users")) == 0


def test_salvage_reads_encrypted_tables_with_their_key_and_says_what_it_cannot(tmp_path: Path) -> None:
    with penstock.open(tmp_path / "s", keys=KEYS, settings=BY_HAND) as store:
        store.kv("secret", encrypted=True).put(RAW, RAW, durable=True)
        store.queue("events", encrypted=True).put(RAW, durable=True)
        store.kv("open").put(b"a", b"1", durable=True)
        store.compact("secret")
    report = penstock.salvage(tmp_path / "s", tmp_path / "rescued", keys=KEYS)
    assert report.lost == []
    assert report.rows == {"secret": 1, "events": 1, "open": 1}
    assert leaks(tmp_path / "rescued") == []
    with penstock.open(tmp_path / "rescued", keys=KEYS, settings=BY_HAND) as store:
        assert store.kv("secret").get(RAW) == RAW
    partial = penstock.salvage(tmp_path / "s", tmp_path / "partly")
    assert partial.rows["open"] == 1
    assert sorted(each.split(":")[0] for each in partial.lost) == ["table events", "table secret"]
