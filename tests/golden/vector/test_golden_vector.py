"""Rows and sections of format version 1 as they were first written: they must open for ever.

To make them anew after a deliberate change of the format: PENSTOCK_GOLDEN=write pytest tests/golden/vector
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from pyroaring import BitMap64
from vector_under_test import VectorUnderTest, deletes, upserts

from penstock.vector.operators import decode_ids, encode_ids, vector_ids
from penstock.vector.section import IndexChange, VectorSection, decode_section, encode_section

HERE = Path(__file__).parent


def golden(name: str, data: bytes) -> bytes:
    path = HERE / name
    if os.environ.get("PENSTOCK_GOLDEN") == "write":
        path.write_bytes(data)
    return path.read_bytes()


def changes() -> list[IndexChange]:
    one, other = (np.array(row, "<f4").tobytes() for row in ([1.0, 0.5, -2.0], [0.0, 3.0, 1.0]))
    first = encode_ids(BitMap64([1, 2, 1 << 40]))
    return [
        IndexChange(generation=1, centroids=[(0, one), (7, other)]),
        IndexChange(generation=1, added=[(0, first)], assigned=3),
        IndexChange(generation=1, forgotten=encode_ids(BitMap64([9])), use=True, probes=2),
    ]


def sections() -> list[VectorSection]:
    rows = upserts({"a": ((1.0, 2.0, 3.0), {"lang": "en", "n": 5}), "ä": ((-0.5, 0.0, 1e-3), {})})
    later = upserts({"a": ((4.0, 4.0, 4.0), {"on": True, "part": 0.25})})
    return [VectorSection(rows, deletes("b")), *map(VectorSection, changes()), VectorSection(later, deletes("ä"))]


def test_sections_of_version_1() -> None:
    payloads = [encode_section(section) for section in sections()]
    stored = golden("sections.txt", b"\n".join(payload.hex().encode() for payload in payloads) + b"\n")
    assert [bytes.fromhex(line) for line in stored.decode().split()] == payloads
    for payload in payloads:
        assert encode_section(decode_section(payload)) == payload


def test_rows_of_version_1() -> None:
    shard = VectorUnderTest()
    for section in sections():
        shard.write(*section.log)
    lines = [f"{key.hex()} {value.hex()}" for key, value in shard.tree.scan()]
    stored = golden("rows.txt", "".join(f"{line}\n" for line in lines).encode())
    assert stored.decode().splitlines() == lines


def test_sets_of_internal_ids() -> None:
    sets = [BitMap64(range(100)), BitMap64([5, 1 << 33]), BitMap64(range(1 << 20, (1 << 20) + 70_000, 3))]
    encoded = [encode_ids(ids) for ids in sets]
    assert decode_ids(golden("ids.bin", encoded[2])) == sets[2]
    together = vector_ids(encoded, True)
    assert vector_ids([encoded[0], vector_ids(encoded[1:], False)], True) == together
    assert vector_ids([vector_ids(encoded[:2], False), encoded[2]], True) == together
    assert decode_ids(together) == sets[0] | sets[1] | sets[2]
