from __future__ import annotations

import contextlib
import itertools
import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lsm_files import STORE, ModelRows, columns, puts, write

from penstock.archive.chunk import ChunkIdentity, Sealing
from penstock.errors import CorruptionError, Invalid, UnsupportedVersion
from penstock.host.os_files import OsFileSystem
from penstock.lsm import sstable as sstable_module
from penstock.lsm import writer as writer_module
from penstock.lsm.index import PAGE_BYTES, build_slots, fingerprint_mask, hash_keys
from penstock.lsm.inspect import dump, statistics, verify
from penstock.lsm.operators import ADD_I64
from penstock.lsm.probe import ABSENT, PRESENT, ProbedKeys
from penstock.lsm.ranges import RangeDelete, RangeDeletes
from penstock.lsm.rows import DELETE, NEVER, PUT, RANGE_DELETE, Columns
from penstock.lsm.sstable import Sstable
from penstock.lsm.writer import SstableWriter, index_path
from penstock.testing.disk import Fault, SimulatedDisk


class Keys:
    def current(self) -> int:
        return 1

    def key(self, version: int) -> bytes:
        return bytes(32)


CONTAINERS = [Sealing(), Sealing(codec="zstd"), Sealing(codec="lz4", keys=Keys()), Sealing(keys=Keys())]


def opened(disk: SimulatedDisk, path: str = "/t.sst", **options: Any) -> Sstable:
    return Sstable.open(path, fs=disk, keys=Keys(), **options)


def listed(table: Sstable, *bounds: Any, reverse: bool = False) -> list[tuple[bytes, bytes]]:
    return [
        pair for piece in table.scan(*bounds, reverse=reverse) for pair in zip(piece.keys, piece.values, strict=True)
    ]


def mixed(n: int, seed: int = 1) -> ModelRows:
    chance = random.Random(seed)
    rows: ModelRows = {}
    for i in range(n):
        kind = chance.choice([PUT, PUT, PUT, DELETE, ADD_I64])
        value = (
            chance.randbytes(8)
            if kind == ADD_I64
            else b""
            if kind == DELETE
            else chance.randbytes(chance.randrange(300))
        )
        rows[chance.randbytes(chance.randrange(1, 20))] = (kind, value, 1 + i, chance.choice([NEVER, NEVER, 5, 10**15]))
    return rows


row_values = st.tuples(st.sampled_from([PUT, DELETE, ADD_I64]), st.binary(max_size=12), st.integers(1, 2**64 - 1),
                       st.sampled_from([NEVER, 0, 7]))  # fmt: skip
keys_strategy = st.binary(max_size=3) | st.binary(max_size=3).map(lambda tail: b"a long shared beginning" + tail)


@given(
    rows=st.dictionaries(keys_strategy, row_values, min_size=1, max_size=60),
    ranges=st.lists(st.tuples(keys_strategy, keys_strategy, st.integers(1, 99)), max_size=4),
    how=st.sampled_from(CONTAINERS),
    batch_rows=st.sampled_from([1, 2, 7, 1 << 16]),
    probes=st.lists(keys_strategy, max_size=20),
)
@settings(max_examples=250, deadline=None)
def test_a_file_answers_like_a_sorted_dict(
    rows: ModelRows, ranges: list[RangeDelete], how: Sealing, batch_rows: int, probes: list[bytes]
) -> None:
    disk = SimulatedDisk()
    before = writer_module.BATCH_ROWS
    writer_module.BATCH_ROWS = batch_rows
    try:
        summary = write(disk, "/t.sst", rows, ranges=ranges, sealing=how, chunk_rows=5)
    finally:
        writer_module.BATCH_ROWS = before
    table = opened(disk)
    disjoint = RangeDeletes.of(ranges)
    assert table.range_deletes == disjoint
    assert table.summary == summary
    assert summary.rows == len(rows) + len(disjoint)
    keys = [*rows, *probes]
    assert [table.get(key) for key in keys] == [rows.get(key) for key in keys]
    assert [table._get_sorted(key) for key in keys] == [rows.get(key) for key in keys]
    outcomes = zip(keys, table.probe(ProbedKeys(keys), np.arange(len(keys))).tolist(), strict=True)
    for key, outcome in outcomes if table.mapped else ():
        assert (outcome == ABSENT) == (key not in rows)
        assert outcome != PRESENT or rows[key][::3] == (PUT, NEVER)
    pairs = [(key, rows[key][1]) for key in sorted(rows)]
    assert listed(table) == pairs
    assert listed(table, reverse=True) == pairs[::-1]
    for low in probes[:5]:
        for high in [*probes[5:10], None]:
            inside = [pair for pair in pairs if low <= pair[0] and (high is None or pair[0] < high)]
            assert listed(table, low, high) == inside
            assert listed(table, low, high, reverse=True) == inside[::-1]
            batches = list(table.scan_arrow(low, high))
            stored = [row["key"] for batch in batches for row in batch.to_pylist() if row["kind"] != RANGE_DELETE]
            assert stored == [key for key, _ in inside]
            for batch in batches:
                batch.validate(full=True)
    for key in keys:
        assert table.summary.start <= key < table.summary.end or key not in rows
    assert verify("/t.sst", fs=disk, keys=Keys()) == []


@pytest.mark.parametrize("how", CONTAINERS)
def test_many_batches_in_every_container(how: Sealing) -> None:
    disk = SimulatedDisk()
    rows = {b"%08d" % (i * 3): (PUT, b"%d" % i, 1, NEVER) for i in range(150_000)}
    write(disk, "/t.sst", rows, sealing=how, chunk_rows=4_096)
    table = opened(disk)
    chance = random.Random(1)
    for i in chance.sample(range(150_000), 300):
        assert table.get(b"%08d" % (i * 3)) == (PUT, b"%d" % i, 1, NEVER)
        assert table.get(b"%08d" % (i * 3 + 1)) is None
    assert listed(table, b"%08d" % 196_600, b"%08d" % 196_620) == [
        (b"%08d" % (i * 3), b"%d" % i) for i in range(65_534, 65_540)
    ]
    assert sum(len(piece.keys) for piece in table.scan()) == 150_000
    assert sum(batch.num_rows for batch in table.scan_arrow()) == 150_000


def test_a_file_that_is_not_mapped_keeps_few_batches_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "BATCH_ROWS", 10)
    disk = SimulatedDisk()
    rows = puts({b"%04d" % i: b"v" * i for i in range(600)})
    write(disk, "/t.sst", rows, sealing=Sealing(codec="lz4"))
    table = opened(disk)
    assert [table.get(key) for key in rows] == list(rows.values())
    assert sum(batch is not None for batch in table._batches) <= sstable_module._OPEN_BATCHES_MAX
    assert not table.mapped


def test_batches_are_cut_by_bytes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "BATCH_BYTES", 10_000)
    disk = SimulatedDisk()
    rows = puts({b"%04d" % i: bytes(20_000 if i % 50 == 3 else 90) for i in range(500)})
    write(disk, "/t.sst", rows)
    table = opened(disk)
    assert {key: table.get(key) for key in rows} == rows
    sizes = [batch.nbytes for batch in table.scan_arrow()]
    assert max(sizes) < 25_000
    assert len(sizes) > 10


def test_a_plain_file_opens_in_pyarrow_and_polars(tmp_path: Path) -> None:
    path = f"{tmp_path}/t.sst"
    rows = mixed(1_000)
    write(OsFileSystem(), path, rows, chunk_id=42)
    with pa.memory_map(path) as source:
        table = pa.ipc.open_file(source).read_all()
        table.validate(full=True)
        assert table.schema.metadata == {b"penstock.store": STORE.hex().encode(), b"penstock.chunk": b"42"}
        assert table["key"].to_pylist() == sorted(rows)
        assert table["expires_us"].to_pylist() == [
            None if rows[key][3] == NEVER else rows[key][3] for key in sorted(rows)
        ]
    frame = pl.read_ipc(path)
    assert frame.columns == ["key", "lsn", "kind", "expires_us", "value"]
    assert frame["value"].to_list() == [rows[key][1] for key in sorted(rows)]


def flips(size: int, chance: random.Random) -> list[int]:
    """Bits in every page, and many in the first and the last."""
    pages = [
        min(start + chance.randrange(PAGE_BYTES), size - 1) for start in range(0, size, PAGE_BYTES) for _ in range(6)
    ]
    ends = [chance.randrange(min(size, 400)) for _ in range(60)] + [
        size - 1 - chance.randrange(min(size, 400)) for _ in range(60)
    ]
    return [at * 8 + chance.randrange(8) for at in pages + ends]


@pytest.mark.parametrize("how", [Sealing(), Sealing(codec="zstd")])
@pytest.mark.parametrize("name", ["/t.sst", "/t.idx"])
def test_a_flipped_bit_never_gives_a_wrong_answer(name: str, how: Sealing) -> None:
    disk = SimulatedDisk()
    rows = mixed(3_000)
    ranges = [(b"\x10", b"\x11", 99)]
    write(disk, "/t.sst", rows, ranges=ranges, sealing=how)
    chance = random.Random(name)
    expected = sorted((key, row[1]) for key, row in rows.items())
    caught = 0
    probes = [*chance.sample(sorted(rows), 60), b"absent"]
    for bit in flips(disk.open(name).size(), chance):
        disk.flip(name, bit)
        try:
            table = opened(disk)
            assert table.range_deletes == RangeDeletes.of(ranges)
            assert [table.get(key) for key in probes] == [rows.get(key) for key in probes]
            assert listed(table) == expected
        except (CorruptionError, UnsupportedVersion):
            caught += 1
        disk.flip(name, bit)
    assert caught > 50


def test_every_flipped_bit_of_a_page_is_found_by_verify() -> None:
    disk = SimulatedDisk()
    write(disk, "/t.sst", mixed(2_000))
    chance = random.Random(3)
    for name in ("/t.sst", "/t.idx"):
        for bit in flips(disk.open(name).size(), chance)[::8]:
            disk.flip(name, bit)
            with contextlib.suppress(UnsupportedVersion):
                assert verify("/t.sst", fs=disk)
            disk.flip(name, bit)
    assert verify("/t.sst", fs=disk) == []


def test_without_checksums_a_flip_is_not_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the tests above: it is the checksum that catches a flip, not luck."""
    disk = SimulatedDisk()
    rows = puts({b"%04d" % i: bytes(100) for i in range(100)})
    write(disk, "/t.sst", rows)
    monkeypatch.setattr(sstable_module, "crc32c", None)
    offset = int(opened(disk)._index.batches[0]["values"])
    disk.flip("/t.sst", 8 * (offset + 50))
    assert opened(disk).get(b"0000") != rows[b"0000"]


def test_an_index_of_another_file_is_refused() -> None:
    disk = SimulatedDisk()
    write(disk, "/a.sst", puts({b"a": b"1"}))
    write(disk, "/b.sst", puts({b"b": b"2"}))
    disk.rename("/a.idx", "/b.idx")
    with pytest.raises(CorruptionError):
        Sstable.open("/b.sst", fs=disk).get(b"a")


def test_a_short_file_is_an_error_not_a_signal(tmp_path: Path) -> None:
    path = f"{tmp_path}/t.sst"
    write(OsFileSystem(), path, mixed(1_000))
    size = Path(path).stat().st_size
    with open(path, "r+b") as file:
        file.truncate(size // 2)
    with pytest.raises(CorruptionError):
        Sstable.open(path)


def test_reading_needs_only_pyarrow_numpy_and_the_standard_library(tmp_path: Path) -> None:
    path = f"{tmp_path}/t.sst"
    rows = puts({b"%04d" % i: b"value %d" % i for i in range(1_000)})
    write(OsFileSystem(), path, rows, ranges=[(b"0500", b"0600", 9)])
    code = f"""
import sys
before = set(sys.modules)
for name in ("google_crc32c", "xxhash", "lmdb", "msgspec", "cryptography", "polars", "pandas", "typer"):
    sys.modules[name] = None
from penstock.lsm.sstable import Sstable
table = Sstable.open({path!r})
assert table.get(b"0042")[1] == b"value 42"
assert table.get(b"0500")[1] == b"value 500"
assert table.get(b"nothing") is None and table.get(b"") is None
assert sum(len(piece.keys) for piece in table.scan()) == 1000
assert sum(batch.num_rows for batch in table.scan_arrow()) == 1001
assert list(table.range_deletes) == [(b"0500", b"0600", 9)]
allowed = {{"penstock", "numpy", "pyarrow"}}
loaded = {{
    name.partition(".")[0]
    for name, module in sys.modules.items()
    if name not in before and "site-packages" in (getattr(module, "__file__", None) or "")
}}
print(sorted(loaded - allowed))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_an_adopted_file_has_one_lsn() -> None:
    disk = SimulatedDisk()
    write(disk, "/t.sst", puts({b"a": b"1"}, 3), ranges=[(b"x", b"y", 2)])
    table = opened(disk, lsn=50)
    assert table.get(b"a") == (PUT, b"1", 50, NEVER)
    assert list(table.range_deletes) == [(b"x", b"y", 50)]
    assert [row[2] for row in next(table.scan()).rows()] == [50]


def test_rows_out_of_order_or_of_wrong_form_are_refused() -> None:
    disk = SimulatedDisk()

    def writer() -> SstableWriter:
        return SstableWriter(disk, "/t.sst", ChunkIdentity(store=STORE, chunk_id=1))

    def refuse(*parts: Columns) -> None:
        out = writer()
        with pytest.raises(Invalid):
            for part in parts:
                out.append(part)
            out.finish()
        out.abort()

    refuse()
    refuse(Columns.of([b"b", b"a"], [b"", b""], 1))
    refuse(Columns.of([b"a", b"a"], [b"", b""], 1))
    refuse(Columns.of([b"b"], [b""], 1), Columns.of([b"b"], [b""], 1))
    refuse(Columns.of([bytes(65_537)], [b""], 1))
    refuse(Columns.of([b"a"], [b"b"], 1, np.array([RANGE_DELETE])))
    with pytest.raises(Invalid):
        Columns.of([b"a"], [b"b", b"c"], 1)
    assert disk.listdir("/") == []
    with pytest.raises(Invalid):
        index_path("/t.arrow")


def test_a_file_holds_a_bounded_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "ROWS_MAX", 10)
    with pytest.raises(Invalid, match="at most 10 rows"):
        write(SimulatedDisk(), "/t.sst", puts({b"%02d" % i: b"" for i in range(11)}))


@pytest.mark.parametrize("mode", ["strict", "kept", "torn"])
def test_a_crash_leaves_nothing_or_sound_files(mode: Any) -> None:
    disk = SimulatedDisk()
    disk.on_image = lambda: 0
    rows = mixed(400)
    write(disk, "/t.sst", rows)
    assert len(disk.images) >= 8
    for image in disk.images:
        after = image.restore(mode, seed=3)
        if after.exists("/t.sst"):
            assert after.open("/t.sst").size() == disk.open("/t.sst").size()
        if after.exists("/t.sst") and after.exists("/t.idx"):
            assert verify("/t.sst", fs=after) == []
    assert verify("/t.sst", fs=disk.image().restore(mode)) == []


def test_a_failing_disk_raises_and_the_name_stays_free() -> None:
    for kind in ("eio", "enospc"):
        for at in range(1, 12):
            disk = SimulatedDisk(faults=(Fault(at=at, kind=kind),))
            try:
                write(disk, "/t.sst", mixed(300))
            except OSError:
                write(disk, "/u.sst", mixed(300))
                assert verify("/u.sst", fs=disk) == []


def test_hash_slots_find_every_row_with_crowded_homes() -> None:
    chance = np.random.default_rng(4)
    hashes = chance.integers(0, 2**32, 5_000, dtype=np.uint32)
    hashes[:2_000] |= np.uint32(0x0000FFF0)  # all of them at home in the last slots
    bits = (5_000).bit_length()
    slots, homes = build_slots(hashes, np.arange(1, 5_001, dtype=np.uint32), bits)
    mask = fingerprint_mask(bits)
    for row in range(0, 5_000, 7):
        at = int(hashes[row]) & (homes - 1)
        while int(slots[at]) != (int(hashes[row]) & mask) | (row + 1):
            assert slots[at] != 0
            at += 1
    assert slots[-1] == 0
    assert len(np.flatnonzero(slots)) == 5_000


@pytest.mark.parametrize("how", [Sealing(), Sealing(codec="lz4")])
def test_batches_of_any_size_are_found_and_keep_their_hashes(monkeypatch: pytest.MonkeyPatch, how: Sealing) -> None:
    monkeypatch.setattr(writer_module, "BATCH_ROWS", 64)
    monkeypatch.setattr(writer_module, "BATCH_ROWS_LEAST", 20)
    disk = SimulatedDisk()
    rows = puts({b"%05d" % (3 * i): b"v" * (i % 7) for i in range(1_000)})
    whole = columns(rows)
    writer = SstableWriter(disk, "/t.sst", ChunkIdentity(store=STORE, chunk_id=1), sealing=how)
    writer.delete_ranges(RangeDeletes.of([(b"00300", b"00400", 1)]))
    cuts = [0, 5, 30, 31, 130, 200, 255, 500, 990, 1_000]
    for low, high in itertools.pairwise(cuts):
        writer.append(whole.slice(low, high))
    writer.finish()
    table = opened(disk)
    sizes = table._index.batches["rows"].tolist()
    assert len(set(sizes)) > 2
    assert max(sizes) <= 64
    assert [table.get(b"%05d" % i) for i in range(3_000)] == [rows.get(b"%05d" % i) for i in range(3_000)]
    for key, row in rows.items():
        assert table.find(key) in (row[1], row)
    for piece in table.pieces(0, table.summary.rows):
        stored = table.columns(*piece, hashes=True)
        points = stored.kinds != RANGE_DELETE
        assert stored.hashes is not None
        assert stored.hashes[points].tolist() == hash_keys(stored.list_keys())[points].tolist()


def test_a_probe_checks_each_page_of_slots_before_it_uses_it() -> None:
    disk = SimulatedDisk()
    keys = [b"%06d" % i for i in range(20_000)]
    write(disk, "/t.sst", puts(dict.fromkeys(keys, b"")))
    index = opened(disk)._index
    pages = -(-index.slots // (PAGE_BYTES // 4))
    assert pages > 2
    disk.flip("/t.idx", 8 * (index._slots_at + PAGE_BYTES + 100))  # in the second page
    table = opened(disk)
    wrong = 0
    for key in keys:
        try:
            assert table.find(key) == b""
        except CorruptionError:
            wrong += 1
    assert 0.5 < wrong * pages / len(keys) < 2  # the share of one page
    assert not table._index.ready


def test_any_number_of_threads_read_one_file() -> None:
    disk = SimulatedDisk()
    rows = mixed(3_000)
    write(disk, "/t.sst", rows, sealing=Sealing(codec="lz4"))
    table = opened(disk)
    wrong: list[bytes] = []

    def read(seed: int) -> None:
        for key in random.Random(seed).sample(sorted(rows), 500):
            if table.get(key) != rows[key]:
                wrong.append(key)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong


def test_inspection_shows_rows_and_figures() -> None:
    disk = SimulatedDisk()
    rows: ModelRows = {b"a": (PUT, b"xyz", 4, 9), b"b": (DELETE, b"", 5, NEVER), b"c": (ADD_I64, bytes(8), 6, NEVER)}
    write(disk, "/t.sst", rows, ranges=[(b"b", b"q", 7)])
    dumped = [(row.key, row.kind, row.lsn, row.expires_us, row.value) for row in dump(opened(disk))]
    assert dumped == [
        (b"a", "put", 4, 9, b"xyz"),
        (b"b", "range delete", 7, None, b"q"),
        (b"b", "delete", 5, None, b""),
        (b"c", "merge add_i64", 6, None, bytes(8)),
    ]
    figures = statistics("/t.sst", fs=disk)
    assert figures.rows_by_kind == {"put": 1, "range delete": 1, "delete": 1, "merge add_i64": 1}
    assert (figures.summary.start, figures.summary.end) == (b"a", b"q")
    assert (figures.summary.lsn_min, figures.summary.lsn_max) == (4, 7)
    assert (figures.key_bytes, figures.value_bytes, figures.batches, figures.mapped) == (4, 12, 1, True)


def test_columns_from_lists_are_those_of_arrow() -> None:
    rows = mixed(50)
    run = columns(rows)
    assert run.keys.equals(pa.array(sorted(rows), pa.binary()))
    run.record_batch().validate(full=True)
