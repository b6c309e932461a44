"""Keys sorted by number are those of a sorted list, at every index and in every slice."""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right

import pytest

from penstock.lsm.key_order import NumberedKeys, sort_keys

_chance = random.Random(4)
SHAPES = {
    "one": [b"k"],
    "the empty key, and zeros": [b"", b"\0", b"\0\0", b"\0" * 8, b"\0" * 9, b"\1"],
    "of one length": [_chance.randbytes(20) for _ in range(10_000)],
    "of many lengths": list({_chance.randbytes(_chance.randrange(12)) for _ in range(10_000)}),
    "a long shared prefix": [b"tenant/0001/region/eu-west/%d" % (n * 7919 % 100_003) for n in range(70_000)],
    "prefixes of each other": [b"ab" * n for n in range(50)][::-1],
}


@pytest.mark.parametrize("shape", SHAPES)
def test_numbered_keys_are_as_a_sorted_list(shape: str) -> None:
    keys = list(SHAPES[shape])
    numbered, expected = NumberedKeys(keys), sorted(keys)
    assert len(numbered) == len(expected)
    assert list(numbered) == expected
    assert numbered[:] == expected
    assert numbered[::3] == expected[::3]
    assert numbered[2:700] == expected[2:700]
    assert numbered[5:5] == []
    assert numbered[-1] == expected[-1]
    for key in _chance.sample(keys, min(len(keys), 50)):
        for other in (key, key + b"\0", key[:-1]):
            assert bisect_left(numbered, other) == bisect_left(expected, other)
            assert bisect_right(numbered, other) == bisect_right(expected, other)
    keys.clear()  # they are its own
    assert numbered[:] == expected


def test_many_keys_are_sorted_as_few_are() -> None:
    keys = [b"k%d" % (n * 7919 % 100_003) for n in range(70_000)]
    for count in (0, 10, 70_000):
        assert list(sort_keys(keys[:count])) == sorted(keys[:count])
    assert isinstance(sort_keys(keys), NumberedKeys)
