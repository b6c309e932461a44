"""The bulk ways of a memtable: puts without rows of their own, many memtables as one, and rows in order for a flush."""

from __future__ import annotations

import random

import pytest

from penstock.lsm import sorted_rows as module
from penstock.lsm.memtable import Edit, Memtable, merged
from penstock.lsm.operators import ADD_I64
from penstock.lsm.rows import DELETE, NEVER, PUT, Row, bytes_list
from penstock.lsm.sorted_rows import SortedRows


def one(n: int) -> bytes:
    return n.to_bytes(8, "little")


def read(table: SortedRows, step: int, bytes_max: int = 1 << 20) -> list[tuple[bytes, Row]]:
    pairs: list[tuple[bytes, Row]] = []
    while len(pairs) < len(table):
        columns = table.columns(len(pairs), min(len(table), len(pairs) + step), bytes_max)
        rows = zip(
            columns.kinds.tolist(),
            bytes_list(columns.values),
            columns.lsns.tolist(),
            columns.expires.tolist(),
            strict=True,
        )
        pairs += zip(bytes_list(columns.keys), rows, strict=True)
    return pairs


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("width", [(16, 16), (0, 40)])
@pytest.mark.parametrize("large", [True, False])
def test_rows_come_in_order_whatever_the_parts(
    monkeypatch: pytest.MonkeyPatch, plain: bool, width: tuple[int, int], large: bool
) -> None:
    monkeypatch.setattr(module, "_GATHER_ROWS", 100)
    monkeypatch.setattr(module, "_LARGE_ROW_BYTES", 0 if large else 1 << 20)
    chance = random.Random(3)
    memtable = Memtable()
    expected: dict[bytes, Row] = {}
    for lsn in range(1, 8):
        puts = {chance.randbytes(chance.randint(*width)): chance.randbytes(chance.randint(0, 30)) for _ in range(150)}
        memtable.apply(Edit(lsn=lsn, time_us=0, puts=puts))
        expected |= {key: (PUT, value, lsn, NEVER) for key, value in puts.items()}
    if not plain:
        rows: dict[bytes, Row] = {
            key: chance.choice([(DELETE, b"", 9, NEVER), (PUT, b"x", 9, 77)])
            for key in chance.sample(list(memtable.rows), 200)
        }
        memtable.apply(Edit(lsn=9, time_us=0, rows=rows))
        expected |= rows
    assert memtable.plain is plain
    table = SortedRows(memtable)
    assert read(table, 64) == sorted(expected.items())
    assert table.key(5) == sorted(expected)[5]


def test_large_values_come_in_batches() -> None:
    memtable = Memtable()
    memtable.apply(Edit(lsn=1, time_us=0, puts={b"%03d" % n: bytes([n]) * 5_000 for n in range(100)}))
    table = SortedRows(memtable)
    assert len(table.columns(0, 100, 20_000)) == 4
    assert len(table.columns(0, 100, 1)) == 1  # at least one
    assert len(read(table, 1_000, 20_000)) == 100


@pytest.mark.parametrize("seed", range(20))
def test_what_a_later_range_deletes_is_left_out(seed: int) -> None:
    chance, memtable = random.Random(seed), Memtable()
    expected: dict[bytes, Row] = {}
    for lsn in range(1, 12):
        ranges = (
            [tuple(sorted((b"%02d" % chance.randrange(100), b"%02d" % chance.randrange(100))))] if lsn % 3 == 0 else []
        )
        puts = {b"%02d" % chance.randrange(100): b"%d" % lsn for _ in range(10)}
        memtable.apply(Edit(lsn=lsn, time_us=0, puts=puts, ranges=ranges))  # type: ignore[arg-type]
        expected = {key: row for key, row in expected.items() if not any(low <= key < high for low, high in ranges)}
        expected |= {key: (PUT, value, lsn, NEVER) for key, value in puts.items()}
    assert read(SortedRows(memtable), 7) == sorted(expected.items())


def test_a_memtable_of_deleted_rows_is_empty() -> None:
    memtable = Memtable()
    memtable.apply(Edit(lsn=1, time_us=0, puts={b"%d" % n: b"" for n in range(10)}))
    memtable.apply(Edit(lsn=2, time_us=0, ranges=[(b"", b"~")]))
    assert len(SortedRows(memtable)) == 0


def test_no_rows_are_in_order_too() -> None:
    assert len(SortedRows(Memtable())) == 0


def test_puts_are_rows() -> None:
    by_puts, by_rows = Memtable(), Memtable()
    by_puts.apply(Edit(lsn=4, time_us=1, puts={b"a": b"1", b"b": b"22"}))
    by_rows.apply(Edit(lsn=4, time_us=1, rows={b"a": (PUT, b"1", 4, NEVER), b"b": (PUT, b"22", 4, NEVER)}))
    assert by_puts.rows == by_rows.rows
    assert (by_puts.bytes, by_puts.plain, by_puts.lsn_last) == (by_rows.bytes, True, 4)


def test_several_memtables_as_one_are_what_one_would_have_been() -> None:
    chance = random.Random(11)
    edits: list[Edit] = []
    for lsn in range(1, 60):
        keys = [b"%02d" % chance.randrange(20) for _ in range(3)]
        kinds: list[Row] = [(PUT, one(5), lsn, NEVER), (DELETE, b"", lsn, NEVER), (ADD_I64, one(lsn), lsn, NEVER)]
        rows = {key: chance.choice(kinds) for key in keys}
        ranges = [(b"05", b"12")] if lsn % 7 == 0 else []
        edits.append(Edit(lsn=lsn, time_us=lsn, rows=rows, ranges=ranges))
    whole, parts = Memtable(), [Memtable() for _ in range(6)]
    for edit in edits:
        whole.apply(edit)
        parts[(edit.lsn - 1) // 10].apply(edit)
    once = merged(parts, 60)
    by_two = merged([merged(parts[:3], 60), merged(parts[3:], 60)], 60)
    for result in (once, by_two):
        assert result.rows == whole.rows
        assert list(result.ranges) == list(whole.ranges)
        assert (result.lsn_last, result.time_us, result.plain) == (whole.lsn_last, whole.time_us, whole.plain)
