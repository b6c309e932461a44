"""Keys that are looked up together: the answers are those of one lookup for each."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from tree_under_test import TreeUnderTest, Write

from penstock.lsm import index as index_module
from penstock.lsm import merge, sstable, view
from penstock.lsm.probe import PRESENT, ProbedKeys

KEYS = [
    *(b"%d" % number for number in range(60)),
    *(b"a long shared beginning %04d" % number for number in range(60)),
    *(bytes(size) for size in range(1, 20)),  # the shorter are beginnings of the longer, with zeros after them
    *(b"x" + bytes(size) + b"y" for size in range(1, 20)),
    bytes(20_000),  # longer than all others together
]


def check_history(seed: int, *, deletes: bool) -> None:
    """Write at random, and ask for all keys after each step."""
    shard, chance = TreeUnderTest(), random.Random(seed)
    try:
        for _ in range(25):
            writes = [Write("put", key, chance.randbytes(chance.choice([0, 5]))) for key in chance.sample(KEYS, 20)]
            if deletes:
                writes += [Write("delete", key) for key in chance.sample(KEYS, 3)]
                soon_us = shard.clock.time_us() + 2_000_000
                writes += [Write("put", key, b"", soon_us) for key in chance.sample(KEYS, 2)]
                writes += [Write("add_i64", key, bytes(8)) for key in (b"sum 1", b"sum 2")]
                if chance.random() < 0.1:
                    start, end = sorted(chance.sample(KEYS, 2))
                    writes.append(Write("delete_range", start, end))
            shard.write(list({write.key: write for write in writes}.values()))
            shard.clock.advance(1)
            if chance.random() < 0.5:
                shard.flush()
            if chance.random() < 0.3:
                shard.compact(everything=chance.random() < 0.5)
            sample = chance.sample([*KEYS, *(b"absent %d" % number for number in range(40)), b"sum 1"], 150)
            reader = shard.tree.view
            assert reader.existing(sample).tolist() == [reader.get(key) is not None for key in sample]
    finally:
        shard.close()


@pytest.fixture(params=["hashes", "equal hashes"])
def hashed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """All keys, however few, are probed together, in files of a few rows; if wanted, their hashes are the same."""
    monkeypatch.setattr(sstable, "_PROBED_MIN", 0)
    monkeypatch.setattr(merge, "OUTPUT_BYTES", 1_000)
    if request.param == "equal hashes":
        for module in (index_module, sstable):
            monkeypatch.setattr(module, "hash64", lambda key: 0xFFFF_FFFF)


@pytest.mark.usefixtures("hashed")
@pytest.mark.parametrize("deletes", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_many_keys_are_found_as_each_alone_is(seed: int, deletes: bool) -> None:
    check_history(seed, deletes=deletes)


@pytest.mark.parametrize("bug", ["bytes are not compared", "lengths are not compared", "rows of all kinds are values"])
def test_the_check_catches(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sstable, "_PROBED_MIN", 0)
    equal = ProbedKeys.equal

    def careless(keys: ProbedKeys, numbers: Any, source: Any, starts: Any, sizes: Any) -> Any:
        if bug == "lengths are not compared":
            return equal(keys, numbers, source, starts, keys._columns[0][numbers])
        return sizes == keys._columns[0][numbers]

    if bug == "rows of all kinds are values":
        monkeypatch.setattr(sstable, "UNSURE", PRESENT)
    else:
        monkeypatch.setattr(ProbedKeys, "equal", careless)
        for module in (index_module, sstable):
            monkeypatch.setattr(module, "hash64", lambda key: 0xFFFF_FFFF)
    with pytest.raises(AssertionError):
        check_history(1, deletes=bug == "rows of all kinds are values")


def test_keys_outside_the_files_are_not_even_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    shard = TreeUnderTest()
    shard.write([Write("put", b"m%03d" % number) for number in range(100)])
    shard.flush()
    monkeypatch.setattr(view, "ProbedKeys", None)
    for letter in (b"a", b"z"):
        assert not shard.tree.view.existing([letter + b"%03d" % number for number in range(100)]).any()
    with pytest.raises(TypeError):
        shard.tree.view.existing([b"m%03d" % number for number in range(100)])
    shard.close()


def test_keys_of_no_length_are_equal() -> None:
    nothing = np.zeros(1, np.int64)
    assert ProbedKeys([b""]).equal(nothing, b"", nothing, nothing).tolist() == [True]
