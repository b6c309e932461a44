"""Keys sorted by number are those of a sorted list, and scans of a memtable that has them see its newest rows."""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right

import numpy as np
import pytest

from penstock.lsm import memtable as module
from penstock.lsm.key_order import NumberedKeys
from penstock.lsm.memtable import Edit, Memtable, merged
from penstock.lsm.operators import APPEND
from penstock.lsm.rows import DELETE, NEVER, PUT, Row
from penstock.lsm.version import Version
from penstock.lsm.view import View

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
    array = np.array(keys, np.object_)
    numbered, expected = NumberedKeys(array, array, 1), sorted(keys)
    assert numbered.rows(0, len(keys)) == expected
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


# -- in a memtable


@pytest.fixture
def always_numbered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TAIL_KEYS_MAX", 3)
    monkeypatch.setattr(module, "NUMBERED_MIN", 1)
    monkeypatch.setattr(module, "_BARE_PUTS_MIN", 5)


def scan(*memtables: Memtable, reverse: bool = False) -> list[tuple[bytes, bytes]]:
    """Scan memtables, the newest and active one first."""
    active, *frozen = memtables
    version = Version(active, tuple(frozen), ((),), active.lsn_last, 0, 0)
    return list(View(version, lambda: 500).scan(reverse=reverse))


@pytest.mark.usefixtures("always_numbered")
def test_a_scan_sees_rows_that_were_replaced_since_the_keys_were_sorted() -> None:
    memtable = Memtable()
    memtable.apply(Edit(lsn=1, time_us=0, puts={b"%d" % n: b"old" for n in range(9)}))
    assert {value for _, value in scan(memtable)} == {b"old"}
    order = memtable.orders()[0]
    assert isinstance(order, NumberedKeys)
    assert order.rows(0, 2) == [b"old", b"old"]
    memtable.put(b"3", b"new", 2, 0)
    assert dict(scan(memtable))[b"3"] == b"new"
    memtable.apply(Edit(lsn=3, time_us=0, puts={b"%d" % n: b"newer" for n in range(9)}))
    assert {value for _, value in scan(memtable, reverse=True)} == {b"newer"}
    assert memtable.orders()[0] is order
    assert order.rows(0, 2) is None  # what was replaced is released


@pytest.mark.usefixtures("always_numbered")
def test_rows_of_an_edit_that_is_being_applied_are_looked_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    memtable = Memtable()
    memtable.apply(Edit(lsn=1, time_us=0, puts={b"%d" % n: b"old" for n in range(9)}))
    edit = Edit(lsn=2, time_us=0, rows={b"%d" % n: (PUT, b"row", 2, NEVER) for n in range(5)}, puts={b"7": b"put"})

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(memtable, "_add_puts", interrupted)
        with pytest.raises(KeyboardInterrupt):
            memtable.apply(edit)
    assert dict(scan(memtable))[b"7"] == b"old"  # sorts in the middle of the edit
    memtable.apply(memtable.remainder(edit))
    assert dict(scan(memtable))[b"7"] == b"put"


def _random_edit(chance: random.Random, lsn: int) -> Edit:
    keys = [b"%02d" % chance.randrange(40) for _ in range(chance.randrange(1, 12))]
    if chance.random() < 0.5:
        return Edit(lsn=lsn, time_us=0, puts=dict.fromkeys(keys, b"%d" % lsn))
    value = b"%d" % lsn
    shapes: list[Row] = [
        (PUT, value, lsn, NEVER),
        (PUT, value, lsn, 400),
        (PUT, value, lsn, 600),
        (DELETE, b"", lsn, NEVER),
        (APPEND, value, lsn, NEVER),
    ]
    rows = {key: chance.choice(shapes) for key in keys}
    return Edit(lsn=lsn, time_us=0, rows=rows, ranges=[(min(keys), max(keys))] if chance.random() < 0.1 else ())


@pytest.mark.parametrize("seed", range(30))
def test_scans_by_number_are_those_by_list(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(seed)
    listed, numbered = [Memtable()], [Memtable()]  # the newest first
    for lsn in range(1, 60):
        edit = _random_edit(chance, lsn)
        freezes, merges, scans, reverse = (chance.random() < share for share in (0.1, 0.5, 0.7, 0.5))
        results = []
        for memtables, minimum in ((listed, 1 << 20), (numbered, 1)):
            monkeypatch.setattr(module, "NUMBERED_MIN", minimum)
            monkeypatch.setattr(module, "TAIL_KEYS_MAX", 3)
            memtables[0].apply(edit)
            if freezes:
                memtables.insert(0, Memtable(lsn))
                if merges and len(memtables) > 2:
                    memtables[1:3] = [merged((memtables[2], memtables[1]), 0)]
            if scans:
                results.append(scan(*memtables, reverse=reverse))
        assert not scans or results[0] == results[1]
    assert any(isinstance(order, NumberedKeys) for memtable in numbered for order in memtable.orders())
