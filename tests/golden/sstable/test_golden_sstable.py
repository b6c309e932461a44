"""Files of format version 1 as they were first written: they must open for ever, and be written the same.

To make them anew after a deliberate change of the format: PENSTOCK_GOLDEN=write pytest tests/golden/sstable
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from penstock.archive.chunk import ChunkIdentity, Sealing
from penstock.host.os_files import OsFileSystem
from penstock.lsm.inspect import dump, verify
from penstock.lsm.operators import ADD_I64, APPEND, fold
from penstock.lsm.ranges import RangeDeletes
from penstock.lsm.rows import DELETE, NEVER, PUT, Columns
from penstock.lsm.sstable import Sstable
from penstock.lsm.writer import SstableWriter

HERE = Path(__file__).parent
CHAIN = fold((ADD_I64, (7).to_bytes(8, "little")), (APPEND, b"!"))

ROWS = [
    (b"", PUT, b"the empty key", 1, NEVER),
    (b"a", PUT, b"", 2, NEVER),
    (b"a\0", DELETE, b"", 3, NEVER),
    (b"b", PUT, b"later", 4, 1_700_000_000_000_000),
    (b"counter", ADD_I64, (-3).to_bytes(8, "little", signed=True), 5, NEVER),
    (b"mixed", *CHAIN, 6, NEVER),
    *[(b"row/%03d" % i, PUT, b"value %d " % i * 3, 10 + i, NEVER) for i in range(40)],
    (b"z" * 100, PUT, bytes(range(256)), 99, NEVER),
]
RANGES = [(b"b", b"c", 50), (b"row/010", b"row/020", 12), (b"zz", b"zzz", 60)]


class Keys:
    def current(self) -> int:
        return 3

    def key(self, version: int) -> bytes:
        assert version == 3
        return bytes(range(32))


def sealings() -> dict[str, Sealing]:
    return {
        "plain": Sealing(),
        "zstd": Sealing(codec="zstd"),
        "lz4_aes": Sealing(codec="lz4", keys=Keys(), random=random.Random(1)),
    }


def write(folder: Path, name: str) -> None:
    identity = ChunkIdentity(store=bytes.fromhex("00112233445566778899aabbccddeeff"), chunk_id=77)
    writer = SstableWriter(OsFileSystem(), f"{folder}/{name}.sst", identity, sealing=sealings()[name])
    writer.delete_ranges(RangeDeletes.of(RANGES))
    keys, kinds, values, lsns, expires = (list(column) for column in zip(*ROWS, strict=True))
    writer.append(Columns.of(keys, values, lsns, kinds, expires))
    writer.finish()


if os.environ.get("PENSTOCK_GOLDEN") == "write":
    for golden in sealings():
        write(HERE, golden)


@pytest.mark.parametrize("name", list(sealings()))
def test_a_golden_file_reads_as_it_was_written(name: str) -> None:
    path = f"{HERE}/{name}.sst"
    assert verify(path, keys=Keys()) == []
    table = Sstable.open(path, keys=Keys())
    assert table.summary.store.hex() == "00112233445566778899aabbccddeeff"
    assert table.summary.chunk_id == 77
    assert list(table.range_deletes) == RANGES
    for key, kind, value, lsn, expires in ROWS:
        assert table.get(key) == (kind, value, lsn, expires)
    stored = [(row.key, row.value, row.lsn) for row in dump(table) if row.kind != "range delete"]
    assert stored == [(key, value, lsn) for key, _, value, lsn, _ in ROWS]


def test_the_index_and_the_data_are_still_written_byte_for_byte(tmp_path: Path) -> None:
    """The Arrow file's framing is pyarrow's, so the data is compared as rows; the index is all ours."""
    write(tmp_path, "plain")
    fresh, golden = Sstable.open(f"{tmp_path}/plain.sst"), Sstable.open(f"{HERE}/plain.sst")
    assert list(dump(fresh)) == list(dump(golden))
    if (tmp_path / "plain.sst").read_bytes() == (HERE / "plain.sst").read_bytes():
        assert (tmp_path / "plain.idx").read_bytes() == (HERE / "plain.idx").read_bytes()
