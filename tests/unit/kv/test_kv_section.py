"""Sections: gathered, encoded, decoded, folded; against one write after the other."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_model import StoreModel, Write, number

from penstock.errors import CorruptionError
from penstock.journal.partitions import PartitionId
from penstock.kv import section
from penstock.kv.section import Ranges, Rows, decode, encode, to_edit
from penstock.lsm.operators import OPERATORS, check_operand
from penstock.lsm.rows import DELETE, NEVER, PUT
from penstock.lsm.tree import Tree
from penstock.partition.pending import PendingDelta, parts
from penstock.testing import FakeClock

NOW_US = 1_000_000
keys = st.binary(max_size=3)
writes = st.one_of(
    st.builds(Write, st.just("t"), st.just("put"), keys, st.binary(max_size=9), st.sampled_from([None, 1.0])),
    st.builds(Write, st.just("t"), st.just("delete"), keys, st.just(b""), st.none()),
    st.builds(
        Write, st.just("t"), st.just("add_i64"), keys, st.integers(-5, 5).map(number), st.sampled_from([None, 2.0])
    ),
    st.builds(Write, st.just("t"), st.just("append"), keys, st.binary(max_size=3), st.sampled_from([None, 3.0])),
    st.builds(lambda a, b: Write("t", "delete_range", min(a, b), max(a, b) + b"\x00"), keys, keys),
)


def gather(delta: PendingDelta, write: Write) -> None:
    partition = PartitionId(1)
    expires = NEVER if write.ttl_s is None else NOW_US + int(write.ttl_s * 1_000_000)
    if write.kind == "delete_range":
        delta.begin()[partition] = section.Ranges([(write.key, write.value)])
        delta.open = None
    elif write.kind == "put" and write.ttl_s is None:
        section.put(delta, partition, write.key, write.value)
    elif write.kind in ("put", "delete"):
        section.operate(delta, partition, write.key, (PUT if write.kind == "put" else DELETE, write.value, expires))
    else:
        section.operate(delta, partition, write.key, (check_operand(write.kind, write.value), write.value, expires))


def sections_of(batch: list[Write]) -> list[Rows | Ranges]:
    delta = PendingDelta()
    for write in batch:
        gather(delta, write)
    return [part for group in delta.groups for pending in group.sections.values() for part in parts(pending)]


@given(st.dictionaries(keys, st.binary(max_size=40), min_size=1), st.integers(1, 200))
def test_a_section_of_puts_is_divided_into_sections(puts: dict[bytes, bytes], bytes_max: int) -> None:
    parts = list(section.divided(encode(Rows.of(puts)), bytes_max))
    assert [start for start, _, _ in parts] == [0, *(end for _, end, _ in parts[:-1])]
    pieces = [decode(data) for _, _, data in parts]
    assert [(key, value) for piece in pieces for key, value in piece.items()] == list(puts.items())  # type: ignore[union-attr]
    for (start, end, data), piece in zip(parts, pieces, strict=True):
        assert (len(piece), encode(piece)) == (end - start, data)
        assert len(data) < bytes_max + 60  # the largest row, and a header


@given(st.lists(writes, max_size=12))
def test_round_trip(batch: list[Write]) -> None:
    for part in sections_of(batch):
        again = decode(encode(part))
        assert type(again) is type(part)
        if isinstance(part, Rows):
            assert isinstance(again, Rows)
            plain = {key: (PUT, op, NEVER) if isinstance(op, bytes) else op for key, op in part.items()}
            assert {key: (PUT, op, NEVER) if isinstance(op, bytes) else op for key, op in again.items()} == plain
            assert encode(again) == encode(part)
        else:
            assert again == part


@given(st.lists(st.lists(writes, max_size=6), max_size=5), st.sampled_from([0, 1_500_000, 10_000_000]))
def test_records_do_what_their_writes_do(records: list[list[Write]], later_us: int) -> None:
    """The fold of a record, before and after encoding, is the same as one write after the other."""
    clock, model = FakeClock(time_us=NOW_US), StoreModel({"t": {}})
    trees = [Tree([], lambda meta: None, clock=clock) for _ in range(2)]  # type: ignore[arg-type, return-value]
    for lsn, batch in enumerate(records, 1):
        sections = sections_of(batch)
        trees[0].apply(to_edit(sections, lsn, NOW_US))
        trees[1].apply(to_edit([decode(encode(part)) for part in sections], lsn, NOW_US))
        model.batch(batch, NOW_US)
    clock.jump(later_us / 1_000_000)
    for tree in trees:
        assert dict(tree.scan()) == model.live("t", clock.time_us())


def test_sections_of_puts_are_one_edit_of_puts() -> None:
    first, second = Rows.of({b"a": b"1", b"b": b"1"}), Rows.of({b"b": b"22"})
    edit = to_edit([first, second], 5, NOW_US)
    assert (edit.puts, edit.rows) == ({b"a": b"1", b"b": b"22"}, {})
    assert to_edit([first], 5, NOW_US).puts is first  # taken over, not copied


def test_a_large_section_is_measured_when_it_is_encoded() -> None:
    rows = Rows.of({b"%03d" % n: bytes(n) for n in range(100)})
    encode(rows)
    cached, measured = to_edit([rows], 1, 0), to_edit([Rows.of(rows)], 1, 0)  # type: ignore[arg-type]
    assert cached.put_bytes == measured.size_bytes() == 300 + sum(range(100))
    assert measured.put_bytes is None


@given(st.binary(max_size=120))
def test_any_bytes_give_a_section_or_an_error(data: bytes) -> None:
    with suppress(CorruptionError):
        decode(data)


@given(st.lists(writes, min_size=1, max_size=5), st.data())
def test_damage_gives_a_section_or_an_error(batch: list[Write], data: st.DataObject) -> None:
    body = bytearray(encode(sections_of(batch)[0]))
    body[data.draw(st.integers(0, len(body) - 1))] ^= data.draw(st.integers(1, 255))
    with suppress(CorruptionError):
        decode(bytes(body))


def test_an_operand_after_something_that_expires_stands_apart() -> None:
    """Whether it meets the value or the gap is decided by the record's time, which is not known yet."""
    writes = [Write("t", "put", b"k", number(5), 1.0), Write("t", "add_i64", b"k", number(1))]
    assert len(sections_of(writes)) == 2


@pytest.mark.parametrize("name", sorted(OPERATORS))
def test_every_operator_goes_through(name: str) -> None:
    operand = b"" if name == "union" else bytes(16 if name.endswith("decimal") else 8)
    rows = Rows()
    rows[b"k"] = (check_operand(name, operand), operand, NEVER)
    rows.plain = False
    assert decode(encode(rows)) == rows
