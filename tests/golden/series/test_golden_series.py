"""Blocks and rows of format version 1 as they were first written: they must open for ever.

To make them anew after a deliberate change of the format: PENSTOCK_GOLDEN=write pytest tests/golden/series
The bytes of chunks are pcodec's: another release of it may write others, so blocks are compared by what they hold.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from pyroaring import BitMap

from penstock.series.blocks import Block, encode
from penstock.series.keys import (
    dictionary_keys,
    forward_key,
    inverted_key,
    metadata_key,
    samples_key,
    slices_key,
)
from penstock.series.labels import decode_labels, encode_labels, fingerprint_of
from penstock.series.operators import decode_ids, encode_ids
from penstock.series.samples import Samples, union
from penstock.series.samples import Tombstones as Deletes

HERE = Path(__file__).parent
LABELS = (("__name__", "cpu"), ("host", "é"), ("zone", "a\0b"))


def samples() -> Samples:
    """A long series, short ones with shared and with irregular times, and every special value."""
    ids = np.repeat(np.array([64, 65, 66, 127], np.uint32), [2_500, 4, 4, 6])
    irregular = np.array([-10, -7, 3, 3_000_000_000, 3_000_000_001, 9_000_000_000])
    times = np.concatenate([np.arange(2_500) * 15_000_000 - 1_000, irregular[:4], irregular[:4], irregular])
    values = np.concatenate([np.round(np.sin(np.arange(2_500)) * 100, 1), np.arange(8) * 1.5, np.zeros(6)])
    bits = values.astype(np.float64).view(np.uint64)
    bits[-6:] = [0x7FF0000000000002, 0x7FF8000000000001, 0xFFF0000000000000, 1 << 63, 0, 0xFFFFFFFFFFFFFFFF]
    return Samples(ids, times.astype(np.int64), bits)


def deletes() -> Deletes:
    return union([Deletes(np.array([64, 100], np.uint32), np.array([-5, 0]), np.array([5, 1 << 40]))])


def golden(name: str, data: bytes) -> bytes:
    path = HERE / name
    if os.environ.get("PENSTOCK_GOLDEN") == "write":
        path.write_bytes(data)
    return path.read_bytes()


def test_a_block_of_version_1() -> None:
    block, expected = Block(golden("block.bin", encode(samples(), deletes()))), samples()
    actual = block.read()
    assert np.array_equal(actual.ids, expected.ids)
    assert np.array_equal(actual.times, expected.times)
    assert np.array_equal(actual.bits, expected.bits)
    assert block.deleted.ids.tolist() == [64, 100]
    assert block.deleted.starts.tolist() == [-5, 0]
    assert block.deleted.ends.tolist() == [5, 1 << 40]
    assert block.runs["count"].tolist() == [2_500, 4, 4, 6]
    assert block.runs["time_column"].tolist() == [0, 1, 1, 2]
    assert block.runs["nans"].tolist() == [0, 0, 0, 3]


def test_the_header_of_a_block() -> None:
    data = golden("block.bin", encode(samples(), deletes()))
    assert data[:4] == b"\1\1\0\0"
    assert np.frombuffer(data, "<u4", 4, 4).tolist() == [4, 3, 4, 2]  # runs, time columns, chunks, tombstones


def test_keys_labels_and_sets_of_ids() -> None:
    fingerprint = np.array([fingerprint_of(LABELS)], np.uint64)
    lines = [
        dictionary_keys(1 << 31, fingerprint)[0],
        forward_key(1 << 31, 7),
        inverted_key((1 << 31) - 1, "host", "é"),
        samples_key(1 << 31, 3),
        samples_key(1 << 31, 3, -1),
        slices_key(1 << 31, 3),
        metadata_key("cpu"),
        encode_labels(LABELS),
        encode_ids(BitMap([1, 2, 3, 70_000, *range(100, 200)])),
    ]
    text = "\n".join(line.hex() for line in lines) + "\n"
    assert golden("rows.txt", text.encode()).decode() == text
    assert decode_labels(lines[7]) == LABELS
    assert len(decode_ids(lines[8])) == 104
