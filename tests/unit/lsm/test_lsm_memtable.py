"""Bare values of a memtable: what stands for their LSNs, and when they are put down in full."""

from __future__ import annotations

import gc
import random
import threading

import pytest

from penstock.lsm import memtable as module
from penstock.lsm.memtable import Edit, Memtable, merged
from penstock.lsm.rows import DELETE, NEVER, PUT, Columns, Row, bytes_list


def put(memtable: Memtable, lsn: int, *keys: bytes) -> None:
    memtable.apply(Edit(lsn=lsn, time_us=lsn, puts=dict.fromkeys(keys, b"%d" % lsn)))


def rows_of(columns: Columns) -> dict[bytes, Row]:
    kinds, lsns, expires = columns.kinds.tolist(), columns.lsns.tolist(), columns.expires.tolist()
    rows = zip(kinds, bytes_list(columns.values), lsns, expires, strict=True)
    return dict(zip(columns.list_keys(), rows, strict=True))


def plain_rows(lsns: dict[bytes, int]) -> dict[bytes, Row]:
    return {key: (PUT, b"%d" % lsn, lsn, NEVER) for key, lsn in sorted(lsns.items())}


@pytest.fixture(autouse=True)
def always_bare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BARE_PUTS_MIN", 1)


def test_each_row_has_the_lsn_of_its_own_edit() -> None:
    memtable = Memtable()
    put(memtable, 3, b"a", b"b", b"c")
    assert memtable.rows == {b"a": b"3", b"b": b"3", b"c": b"3"}
    put(memtable, 5, b"d", b"b")
    put(memtable, 6, b"b")  # nothing new: no place to note
    put(memtable, 9, b"e")
    expected = {b"a": 3, b"b": 6, b"c": 3, b"d": 5, b"e": 9}
    assert memtable.full_rows() == plain_rows(expected)
    assert rows_of(memtable.columns()) == plain_rows(expected)
    assert rows_of(memtable.columns(b"b", b"d")) == plain_rows({b"b": 6, b"c": 3})
    put(memtable, 10, b"c", b"f")  # the columns were remembered by then
    expected |= {b"c": 10, b"f": 10}
    assert rows_of(memtable.columns()) == plain_rows(expected)


def test_a_few_puts_are_rows_among_bare_values(monkeypatch: pytest.MonkeyPatch) -> None:
    memtable = Memtable()
    put(memtable, 1, b"a", b"b")
    monkeypatch.setattr(module, "_BARE_PUTS_MIN", 3)
    put(memtable, 2, b"c")
    put(memtable, 3, b"d", b"e", b"f")
    assert memtable.rows[b"c"] == (PUT, b"2", 2, NEVER)
    assert not memtable.all_bare
    assert memtable.full_rows() == plain_rows({b"a": 1, b"b": 1, b"c": 2, b"d": 3, b"e": 3, b"f": 3})


def test_a_range_tells_rows_before_it_from_rows_after_it() -> None:
    memtable = Memtable()
    put(memtable, 1, b"a", b"b")
    before = memtable.bytes
    memtable.apply(Edit(lsn=2, time_us=2, ranges=[(b"a", b"c")]))
    assert memtable.bytes > before
    put(memtable, 3, b"b", b"c")
    assert memtable.row(b"a") == (PUT, b"1", 1, NEVER)
    assert memtable.deleted_below(b"a") == 2
    assert memtable.row(b"b") == (PUT, b"3", 3, NEVER)
    assert memtable.full_rows() == plain_rows({b"a": 1, b"b": 3, b"c": 3})


def test_a_bare_value_is_later_than_all_before_its_memtable() -> None:
    memtable = Memtable(7)
    rows: list[Row | None] = []

    class Watched(dict[bytes, bytes]):
        def __len__(self) -> int:
            rows.append(memtable.row(b"a"))  # in the middle of the edit: the row may be there, its LSN is not
            return super().__len__()

    memtable.apply(Edit(lsn=8, time_us=0, puts=Watched({b"a": b"1"}), put_bytes=2))
    assert (PUT, b"1", 7, NEVER) in rows  # a range delete up to 7 is not above it
    assert memtable.row(b"a") == (PUT, b"1", 8, NEVER)


@pytest.mark.parametrize("seed", range(20))
def test_memtables_as_one_have_the_lsns_of_each(seed: int) -> None:
    chance = random.Random(seed)
    whole, parts = Memtable(), [Memtable() for _ in range(4)]
    for lsn in range(1, 41):
        part = parts[(lsn - 1) // 10]
        keys = [b"%03d" % chance.randrange(900) for _ in range(chance.randint(1, 6))]
        kind = chance.random()
        if kind < 0.8:
            edit = Edit(lsn=lsn, time_us=0, puts=dict.fromkeys(keys, b"%d" % lsn))
        elif kind < 0.95 or seed % 2:
            edit = Edit(lsn=lsn, time_us=0, rows=dict.fromkeys(keys, (DELETE, b"", lsn, NEVER)))
        else:
            edit = Edit(lsn=lsn, time_us=0, ranges=[(min(keys), max(keys))])
        whole.apply(edit)
        part.apply(edit)
    for result in (merged(parts, 0), merged([merged(parts[:2], 0), merged(parts[2:], 0)], 0)):
        assert result.full_rows() == whole.full_rows()
        assert rows_of(result.columns()) == rows_of(whole.columns())
        assert list(result.ranges) == list(whole.ranges)
        assert result.plain == whole.plain


def test_the_garbage_collector_does_not_visit_bare_values() -> None:
    class Rows(dict[bytes, bytes]):
        """As the sections of a kv table, which it does visit."""

    memtable = Memtable()
    for lsn in (1, 2):
        puts = Rows((b"%d/%d" % (lsn, n), b"") for n in range(100))
        assert gc.is_tracked(puts)
        memtable.apply(Edit(lsn=lsn, time_us=0, puts=puts))
        assert list(memtable.rows)[-100:] == list(puts)
    assert not gc.is_tracked(memtable.rows)


def test_sizes_that_are_known_are_not_measured_again() -> None:
    memtable, with_size = Memtable(), Memtable()
    puts = {b"a": b"123", b"bb": b"4"}
    memtable.apply(Edit(lsn=1, time_us=0, puts=puts))
    with_size.apply(Edit(lsn=1, time_us=0, puts=puts, put_bytes=7))
    assert memtable.bytes == with_size.bytes
    assert Edit(lsn=1, time_us=0, puts=puts, rows={b"ccc": (PUT, b"", 1, NEVER)}).size_bytes() == 10


def test_a_reader_beside_the_writer_never_misses_a_row() -> None:
    memtable, wrong, stop = Memtable(), [], threading.Event()
    put(memtable, 1, *(b"%04d" % n for n in range(500)))

    def read() -> None:
        while not stop.is_set():
            for n in range(0, 500, 50):
                row = memtable.row(b"%04d" % n)
                if row is None or row[2] < 1:
                    wrong.append(row)
            if len(memtable.sorted_keys()) < 500:
                wrong.append(None)

    reader = threading.Thread(target=read)
    reader.start()
    for lsn in range(2, 60):
        if lsn == 30:
            memtable.apply(Edit(lsn=lsn, time_us=0, ranges=[(b"x", b"y")]))
        else:
            put(memtable, lsn, *(b"%04d" % n for n in range(lsn * 20, lsn * 20 + 300)))
    stop.set()
    reader.join()
    assert not wrong
