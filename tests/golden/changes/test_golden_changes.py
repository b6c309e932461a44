"""Rows of a change feed of format version 1 as they were first written: they must open for ever.

To make them anew after a deliberate change of the format: PENSTOCK_GOLDEN=write pytest tests/golden/changes
"""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from store_model import open_simulated

import penstock
from penstock.kinds.changes import CHANGES, NAMES
from penstock.kv.changes import read_changes
from penstock.kv.values import Options
from penstock.series.changes import read_changes as read_series_changes
from penstock.testing import FakeClock, SimulatedDisk
from penstock.vector.changes import read_changes as read_vector_changes
from penstock.vector.options import VectorOptions

HERE = Path(__file__).parent
HEADER_BYTES = 24
DOCS_LSN = (12).to_bytes(8, "big")  # the first record of `docs`, after its creation
CPU_LSN = (16).to_bytes(8, "big")


def written() -> bytes:
    clock = FakeClock()
    with open_simulated(SimulatedDisk(), clock) as store:
        table = store.kv("t", changes=penstock.ChangeOptions(preimages=True))
        plain = store.kv("plain", changes=True)
        for some in (table, plain):
            some.put_many({b"a": b"1", b"bb": b""}, durable=True)
            some.put(b"a", b"22", durable=True)
            some.put(b"t", b"x", ttl_s=1, durable=True)
            clock.advance(2)
            some.delete(b"a", durable=True)
        docs = store.vector("docs", dimensions=2, changes=penstock.ChangeOptions(preimages=True))
        docs.upsert(["a", "ä"], [[1.0, 0.5], [-2.0, 0.0]], attributes=[{"lang": "en"}, {}], durable=True)
        docs.upsert(["a"], [[3.0, 4.0]], durable=True)
        docs.delete(["ä"], durable=True)
        cpu = store.series("cpu", changes=penstock.ChangeOptions(preimages=True))
        cpu.write_columns("cpu", [1.0, 2.5], {"host": "ä"}, times=[1_000_000, 2_000_000], durable=True)
        cpu.write("cpu", 3.0, {"host": "ä"}, time=2_000_000, durable=True)
        cpu.delete('{host="ä"}', end=2_000_000, durable=True)
        return b"".join(
            b"%s %s\n" % (key.hex().encode(), value.hex().encode())
            for tree, catalog in store._maintenance.trees()
            if catalog.folder.endswith(CHANGES)
            for key, value in tree.scan()
        )


def test_rows_of_version_1() -> None:
    rows, path = written(), HERE / "rows.txt"
    if os.environ.get("PENSTOCK_GOLDEN") == "write":
        path.write_bytes(rows)
    assert path.read_bytes() == rows


def test_they_are_read() -> None:
    kv_changes: list[tuple[str, bytes, bytes | None]] = []
    vectors: list[tuple[Any, ...]] = []
    samples: list[tuple[Any, ...]] = []
    for line in (HERE / "rows.txt").read_text().splitlines():
        key, _, value = line.partition(" ")
        if bytes.fromhex(key)[:1] == b"c":
            data = bytes.fromhex(value)[HEADER_BYTES:]
            if bytes.fromhex(key)[1:9] >= CPU_LSN:
                types, rows = read_series_changes(data)
                samples += zip((NAMES[one] for one in types), *rows.to_pydict().values(), strict=True)
                continue
            if bytes.fromhex(key)[1:9] >= DOCS_LSN:
                types, rows = read_vector_changes(data, VectorOptions(dimensions=2))
                vectors += zip((NAMES[one] for one in types), *rows.to_pydict().values(), strict=True)
                continue
            types, rows = read_changes(data, Options())
            columns = rows.to_pydict()
            kv_changes += zip((NAMES[one] for one in types), columns["key"], columns["value"], strict=True)
    with_preimages = [
        ("insert", b"a", b"1"),
        ("insert", b"bb", b""),
        ("update_preimage", b"a", b"1"),
        ("update_postimage", b"a", b"22"),
        ("insert", b"t", b"x"),
        ("delete", b"a", b"22"),
        ("delete", b"t", b"x"),
    ]
    without = [(kind, key, None if kind == "delete" else value) for kind, key, value in with_preimages]
    assert kv_changes == [*with_preimages, *(one for one in without if one[0] != "update_preimage")]
    assert vectors == [
        ("insert", "a", [1.0, 0.5], '{"lang":"en"}'),
        ("insert", "ä", [-2.0, 0.0], None),
        ("update_preimage", "a", [1.0, 0.5], '{"lang":"en"}'),
        ("update_postimage", "a", [3.0, 4.0], None),
        ("delete", "ä", [-2.0, 0.0], None),
    ]
    series = "cpu", [("host", "ä")]
    first, second = (datetime(1970, 1, 1, 0, 0, second, tzinfo=UTC) for second in (1, 2))
    assert samples == [
        ("insert", *series, first, 1.0),
        ("insert", *series, second, 2.5),
        ("update_preimage", *series, second, 2.5),
        ("update_postimage", *series, second, 3.0),
        ("delete", *series, first, 1.0),
    ]
