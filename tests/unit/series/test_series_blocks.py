"""Blocks of samples: bit-exact, canonical, decoded only where needed; and the operators that fold them."""

from __future__ import annotations

from contextlib import suppress
from itertools import pairwise

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from pyroaring import BitMap

import penstock.series.blocks as blocks_module
from penstock.errors import CorruptionError
from penstock.lsm.operators import SERIES_IDS, SERIES_SAMPLES, Operand, fold, fold_all
from penstock.lsm.rows import DELETE, PUT
from penstock.series.blocks import CHUNK_SAMPLES_MAX, CHUNK_SAMPLES_MIN, Block, encode
from penstock.series.operators import decode_ids, encode_ids
from penstock.series.samples import Samples, Tombstones, concat, sorted_distinct, union, without

STALE = 0x7FF0000000000002
FOREVER = 1 << 60


def columns(rows: list[tuple[int, int, int]]) -> Samples:
    ids, times, bits = zip(*rows, strict=True) if rows else ((), (), ())
    return Samples(np.array(ids, np.uint32), np.array(times, np.int64), np.array(bits, np.uint64))


def rows(samples: Samples) -> list[tuple[int, int, int]]:
    return list(zip(samples.ids.tolist(), samples.times.tolist(), samples.bits.tolist(), strict=True))


def tombstones(ranges: list[tuple[int, int, int]]) -> Tombstones:
    ids, starts, ends = zip(*ranges, strict=True) if ranges else ((), (), ())
    return union([Tombstones(np.array(ids, np.uint32), np.array(starts, np.int64), np.array(ends, np.int64))])


bits = st.one_of(st.sampled_from([STALE, 0x7FF8000000000001, 0xFFFFFFFFFFFFFFFF, 1 << 63]), st.integers(0, 2**64 - 1))
written = st.lists(st.tuples(st.integers(1, 5), st.integers(-20, 20), bits), max_size=40)
deleted = st.lists(st.tuples(st.integers(1, 5), st.integers(-20, 15), st.integers(-20, 20)), max_size=3)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks_module, "CHUNK_SAMPLES_MIN", 3)
    monkeypatch.setattr(blocks_module, "CHUNK_SAMPLES_MAX", 7)


@pytest.mark.usefixtures("small_chunks")
@settings(max_examples=150, deadline=None)
@given(written, deleted, st.lists(st.integers(1, 5), unique=True), st.integers(-20, 20), st.integers(-20, 20))
def test_a_block_returns_what_was_written(
    writes: list[tuple[int, int, int]], deletes: list[tuple[int, int, int]], ids: list[int], start: int, end: int
) -> None:
    newest = sorted({(number, time): value for number, time, value in writes}.items())
    expected = [(number, time, value) for (number, time), value in newest]
    samples, some = sorted_distinct(columns(writes)), tombstones(deletes)
    assert rows(samples) == expected
    block = Block(encode(samples, some))
    assert rows(block.read()) == expected
    assert len(block) == len(expected)
    assert block.deleted.ids.tolist() == some.ids.tolist()
    selected_ids = np.array(sorted(ids), np.uint32)
    assert rows(block.between(block.select(selected_ids, start, end), start, end)) == [
        row for row in expected if row[0] in ids and start <= row[1] < end
    ]
    remaining = [row for row in expected if not any(n == row[0] and a <= row[1] < b for n, a, b in deletes)]
    assert rows(without(samples, some)) == remaining


@pytest.mark.usefixtures("small_chunks")
@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(written, deleted), min_size=3, max_size=3), st.booleans())
def test_folding_blocks_is_associative_byte_for_byte(
    parts: list[tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]]], base: bool
) -> None:
    model: dict[tuple[int, int], int] = {}
    for some, deletes in parts:
        model = {k: v for k, v in model.items() if not any(n == k[0] and a <= k[1] < b for n, a, b in deletes)}
        model |= {(number, time): value for number, time, value in some}
    a, b, c = ((SERIES_SAMPLES, encode(sorted_distinct(columns(some)), tombstones(deletes))) for some, deletes in parts)
    if base:
        a = (PUT, fold(None, a)[1])
    left, right = fold(fold(a, b), c), fold(a, fold(b, c))
    assert left == right == fold_all(a, [b, c], base)
    assert rows(Block(left[1]).read()) == [(*key, value) for key, value in sorted(model.items())]
    onto_nothing = fold((DELETE, b""), left)
    assert onto_nothing[0] == PUT
    assert not len(Block(onto_nothing[1]).deleted)
    assert onto_nothing[1] == fold((DELETE, b""), fold(a, fold(b, c)))[1]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sets(st.one_of(st.integers(1, 40), st.integers(60_000, 70_000))), min_size=3, max_size=3))
def test_sets_of_ids_unite_byte_for_byte(sets: list[set[int]]) -> None:
    a, b, c = ((SERIES_IDS, encode_ids(BitMap(some))) for some in sets)
    left, right = fold(fold(a, b), c), fold(a, fold(b, c))
    assert left == right == fold_all(None, [a, b, c], False)
    assert set(decode_ids(left[1])) == set().union(*sets)


def test_values_are_bit_exact_in_long_chunks() -> None:
    some = np.random.default_rng(1).normal(size=5_000)
    values = some.view(np.uint64).copy()
    values[[0, 17, 4_999]] = STALE, 0xFFF8000000000123, 1 << 63
    samples = Samples(np.full(5_000, 9, np.uint32), np.arange(5_000) * 1_000, values)
    assert np.array_equal(Block(encode(samples)).read().bits, values)


def regular(ids: range, count: int, *, step: int = 15_000_000, shift: int = 0) -> Samples:
    number = len(ids) * count
    return Samples(
        np.repeat(np.array(ids, np.uint32), count),
        np.tile(np.arange(count) * step, len(ids)) + shift,
        np.arange(number, dtype=np.float64).view(np.uint64),
    )


def test_long_series_have_chunks_of_their_own_and_short_ones_share_one() -> None:
    long, short = CHUNK_SAMPLES_MAX * 2 + 10, 100
    samples = sorted_distinct(concat([regular(range(1, 2), long), regular(range(2, 50), short)]))
    block = Block(encode(samples))
    counts = block.runs["count"].tolist()
    assert len([c for c in counts if c > short]) == 3
    assert all(CHUNK_SAMPLES_MIN <= c <= CHUNK_SAMPLES_MAX for c in counts if c > short)
    values = [c for c, t in zip(block._chunks["count"].tolist(), block._chunks["type"].tolist(), strict=True) if t == 1]
    assert values[3:] == [48 * short]


def test_equal_times_are_stored_once() -> None:
    rng = np.random.default_rng(1)
    shared = np.sort(rng.integers(0, 10**12, 500))
    same = Samples(np.repeat(np.arange(1, 65, dtype=np.uint32), 500), np.tile(shared, 64), np.zeros(32_000, np.uint64))
    block = Block(encode(same))
    assert block._columns["count"].tolist() == [500]
    assert len(encode(same)) < 500 * 8 + 3_000


def test_a_regular_column_of_times_takes_no_room() -> None:
    assert len(encode(regular(range(1, 2), 1_000))) < 8_000


def test_a_read_decodes_only_the_chunks_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    block = Block(encode(regular(range(1, 65), 2_000)))
    decoded: list[int] = []
    right = Block._decoded

    def decode(self: Block, chunk: int, kind: int, data: list[bytes]) -> object:
        decoded.append(chunk)
        return right(self, chunk, kind, data)

    monkeypatch.setattr(Block, "_decoded", decode)
    seven = np.array([7], np.uint32)
    assert len(block.between(block.select(seven, 0, FOREVER), 0, FOREVER)) == 2_000
    assert len(decoded) == 2  # one of times, one of values
    assert not len(block.between(block.select(seven, FOREVER, FOREVER + 1), FOREVER, FOREVER + 1))
    assert len(decoded) == 2


def test_the_directory_has_the_statistics_of_each_run() -> None:
    values = np.array([3.0, np.nan, -1.5, 4.0])
    samples = Samples(np.full(4, 5, np.uint32), np.arange(4) * 10, values.view(np.uint64))
    runs = Block(encode(samples)).runs
    statistics = {name: runs[name][0].item() for name in runs}
    assert statistics["id"] == 5
    assert (
        statistics["count"],
        statistics["nans"],
        statistics["sum"],
        statistics["minimum"],
        statistics["maximum"],
    ) == (4, 1, 5.5, -1.5, 4.0)
    assert (statistics["first_time"], statistics["last_time"]) == (0, 30)
    assert (statistics["first"], statistics["last"]) == (samples.bits[0], samples.bits[3])


def test_infinities_and_series_of_nan_have_statistics() -> None:
    values = np.array([np.inf, -np.inf, np.nan, np.nan])
    samples = Samples(np.array([1, 1, 2, 2], np.uint32), np.array([1, 2, 1, 2]), values.view(np.uint64))
    runs = Block(encode(samples)).runs
    assert np.isnan(runs["sum"][0])
    assert (runs["minimum"][0], runs["maximum"][0]) == (-np.inf, np.inf)
    assert np.isnan(runs["minimum"][1])
    assert runs["nans"].tolist() == [0, 2]


def test_damaged_blocks_are_refused() -> None:
    data = encode(regular(range(1, 4), 1_500))
    for size in (0, 5, 27, 40, len(data) // 2, len(data) - 1):
        with pytest.raises(CorruptionError):
            Block(data[:size]).read()
    with pytest.raises(CorruptionError, match="version"):
        Block(b"\x07" + data[1:])


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 400), st.integers(1, 255))
def test_a_flipped_byte_is_refused_or_changes_values_only(at: int, flip: int) -> None:
    """Pages of files have checksums; beyond that, damage must never end in another kind of error."""
    data = bytearray(encode(regular(range(1, 4), 30)))
    data[at % len(data)] ^= flip
    with suppress(CorruptionError):
        Block(bytes(data)).read()


def test_tombstones_of_a_series_are_disjoint() -> None:
    some = tombstones([(1, 5, 9), (1, 9, 12), (1, 0, 3), (2, 0, 3), (1, 6, 7), (3, 4, 4)])
    ranges = list(zip(some.ids.tolist(), some.starts.tolist(), some.ends.tolist(), strict=True))
    assert ranges == [(1, 0, 3), (1, 5, 12), (2, 0, 3)]
    assert all(a < b for a, b in pairwise(ranges))


def test_ids_far_apart_are_sorted() -> None:
    ids = np.array([70_000, 3, 70_000, 65_539, 3], np.uint32)
    samples = Samples(ids, np.array([2, 9, 1, 5, 9]), np.arange(5, dtype=np.uint64))
    assert rows(sorted_distinct(samples)) == [(3, 9, 4), (65_539, 5, 3), (70_000, 1, 2), (70_000, 2, 0)]


def test_an_operand_alone_is_not_encoded_again() -> None:
    operand: Operand = (SERIES_SAMPLES, encode(regular(range(1, 3), 10)))
    assert fold(None, operand) == (PUT, operand[1])
