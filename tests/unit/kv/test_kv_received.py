"""Sections and files that others made are judged by the table's declared type; long chains and cut texts do no harm."""

from __future__ import annotations

import random
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from store_model import SETTINGS, open_simulated

import penstock
from penstock.archive.chunk import ChunkIdentity
from penstock.errors import CorruptionError, Invalid
from penstock.kv import section
from penstock.kv.validation import check_options, receive
from penstock.kv.values import VALUE_TYPES, Options, ValueType, decode_options, encode_options
from penstock.lsm import exact_sum
from penstock.lsm.operators import ADD_F64, ADD_I64, APPEND, CHAIN, MAX_F64, UNION, union_of
from penstock.lsm.rows import DELETE, NEVER, PUT, VALUE_BYTES_MAX, Columns, binary_column
from penstock.lsm.writer import SstableWriter
from penstock.partition.reference import StagedFile, sealed
from penstock.store.store import Store
from penstock.testing import FakeClock, SimulatedDisk


def payload(**rows: Any) -> bytes:
    part = section.Rows()
    for key, row in rows.items():
        part[key.encode()] = row
        part.plain = part.plain and isinstance(row, bytes)
    return section.encode(part)


def link(kind: int, operand: bytes) -> bytes:
    return bytes([kind]) + len(operand).to_bytes(4, "little") + operand


NUMBER = bytes(8)
SUM = exact_sum.add(struct.pack("<d", 1.0), struct.pack("<d", 1e-30))
GOOD: list[tuple[ValueType, bytes]] = [
    *((value_type, payload(k=(DELETE, b"", NEVER))) for value_type in VALUE_TYPES),
    *((value_type, section.encode(section.Ranges([(b"a", b"b")]))) for value_type in VALUE_TYPES),
    ("bytes", payload(k=b"\xff")),
    ("bytes", payload(k=(UNION, union_of({b"x"}), NEVER))),
    ("bytes", payload(k=(CHAIN, link(APPEND, b"x") + link(ADD_I64, NUMBER), NEVER))),
    ("utf8", payload(k="ä".encode(), j=b"")),
    ("utf8", payload(k=(APPEND, "ä".encode(), NEVER))),
    ("utf8", payload(k=(PUT, b"x", 1))),
    ("json", payload(k=b'{"a": [1, null]}')),
    ("int64", payload(k=NUMBER, j=(ADD_I64, NUMBER, NEVER))),
    ("float64", payload(k=NUMBER, j=(MAX_F64, NUMBER, 5))),
    ("float64", payload(k=SUM, j=(ADD_F64, SUM, NEVER), i=(ADD_F64, NUMBER, NEVER))),
]
BAD: list[tuple[ValueType, bytes]] = [
    *((value_type, payload()) for value_type in VALUE_TYPES),
    *((value_type, b"") for value_type in VALUE_TYPES),
    *((value_type, section._HEADER.pack(section.FULL, 0)) for value_type in VALUE_TYPES),
    *((value_type, section.encode(section.Ranges())) for value_type in VALUE_TYPES),
    *((value_type, section.encode(section.Ranges([(b"b", b"a")]))) for value_type in VALUE_TYPES),
    *((value_type, payload(k=(kind, NUMBER, NEVER))) for value_type in VALUE_TYPES for kind in (2, 4, 27, 255)),
    *((value_type, payload(k=(DELETE, b"x", NEVER))) for value_type in VALUE_TYPES),
    *((value_type, payload(k=(DELETE, b"", 5))) for value_type in VALUE_TYPES),
    *((value_type, payload(k=(PUT, NUMBER, -1))) for value_type in VALUE_TYPES[3:]),
    *((value_type, payload(k=(CHAIN, link(250, NUMBER) * 2, NEVER))) for value_type in VALUE_TYPES),
    *((value_type, payload(k=(CHAIN, link(ADD_I64, NUMBER), NEVER))) for value_type in VALUE_TYPES),
    *((value_type, payload(**{"k" * 65_537: NUMBER})) for value_type in VALUE_TYPES[3:]),
    ("bytes", payload(k=(ADD_I64, b"123", NEVER))),
    ("bytes", payload(k=(UNION, b"123", NEVER))),
    ("utf8", payload(a=b"good", k=b"\xff")),
    ("utf8", payload(k="ä".encode()[:1], j="ä".encode()[1:])),  # text together, and not alone
    ("utf8", payload(k=(PUT, b"\xff", NEVER))),
    ("utf8", payload(k=(APPEND, b"\xff", NEVER))),
    ("utf8", payload(k=(ADD_I64, NUMBER, NEVER))),
    ("utf8", payload(k=(CHAIN, link(APPEND, b"x") + link(ADD_I64, NUMBER), NEVER))),
    ("json", payload(k=b"")),
    ("json", payload(k=b"{")),
    ("json", payload(k=b"NaN")),
    ("json", payload(k=b"\xff")),
    ("json", payload(k=b"[" * 201 + b"]" * 201)),
    ("json", payload(k=b"[" * 100_000)),
    ("json", payload(k=b"[" * 201 + b'"' + b'\\"' * 1_000_000)),  # a text without an end, tried once
    ("json", payload(k=(APPEND, b"1", NEVER))),
    ("int64", payload(k=b"123")),
    ("int64", payload(k=(PUT, b"", NEVER))),
    ("int64", payload(k=(MAX_F64, NUMBER, NEVER))),
    ("float64", payload(k=(ADD_I64, NUMBER, NEVER))),
    ("float64", payload(k=bytes(9))),
    ("float64", payload(k=SUM + SUM)),
    ("float64", payload(k=(ADD_F64, SUM[8:] + SUM[:8], NEVER))),
    ("int64", payload(k=SUM)),
    ("bytes", payload(k=(ADD_F64, NUMBER, NEVER))),
]


@pytest.mark.parametrize(("value_type", "sent"), GOOD)
def test_a_section_that_fits_is_taken(value_type: ValueType, sent: bytes) -> None:
    assert section.encode(receive(sent, encode_options(Options(value_type)))) == sent


@pytest.mark.parametrize(("value_type", "sent"), BAD)
def test_a_section_that_does_not_fit_is_refused(value_type: ValueType, sent: bytes) -> None:
    with pytest.raises(Invalid):
        receive(sent, encode_options(Options(value_type)))


def test_options_that_pass_decode_for_ever() -> None:
    for value_type in VALUE_TYPES:
        assert check_options(encode_options(Options(value_type))) == Options(value_type)
    chance = random.Random(5)
    for _ in range(2_000):
        data = chance.randbytes(chance.randrange(8))
        try:
            check_options(data)
        except Invalid:
            with pytest.raises(CorruptionError):
                decode_options(data)
        else:
            decode_options(data)


# -- files


def build(store: Store, disk: SimulatedDisk, staged: StagedFile, rows: Columns) -> StagedFile:
    identity = ChunkIdentity(store=store.identity, chunk_id=staged.chunk_id)
    writer = SstableWriter(disk, f"/store/{staged.file_name}", identity)
    writer.append(rows)
    writer.finish()
    return sealed(disk, "/store", staged)


@pytest.mark.parametrize(
    ("value_type", "good", "bad"),
    [("utf8", b"x", b"\xff"), ("json", b"[]", b"["), ("int64", NUMBER, b"1"), ("float64", NUMBER, bytes(9))],
)
def test_a_file_is_judged_as_a_section_is(value_type: ValueType, good: bytes, bad: bytes) -> None:
    disk = SimulatedDisk()
    with open_simulated(disk, FakeClock()) as store:
        store.kv("t", value=value_type)
        for value, kinds in ((bad, [PUT, PUT, PUT]), (good, [PUT, PUT, DELETE])):
            values = [good, value, good if kinds[2] == PUT else b""]
            columns = Columns.of([b"a", b"b", b"c"], values, 1, kinds)
            file = build(store, disk, store.stage("t")[0], columns)
            batch = store.batch()
            batch.adopt("t", [file])
            if value == bad:
                with pytest.raises(Invalid, match="this table holds"):
                    batch.commit()
            else:
                batch.commit()
        assert store.kv("t").to_arrow().num_rows == 2


def test_a_file_whose_keys_are_in_no_order_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SimulatedDisk()
    with open_simulated(disk, FakeClock()) as store:
        store.kv("t")
        append = SstableWriter.append

        def shuffled(writer: SstableWriter, columns: Columns) -> None:
            append(writer, columns)
            writer._waiting[-1] = replace(writer._waiting[-1], keys=binary_column([b"b", b"a"]), key_list=None)

        monkeypatch.setattr(SstableWriter, "append", shuffled)
        file = build(store, disk, store.stage("t")[0], Columns.of([b"a", b"b"], [b"1", b"2"], 1))
        batch = store.batch()
        batch.adopt("t", [file])
        with pytest.raises(Invalid, match="in order"):
            batch.commit()


def test_a_file_that_two_batches_name_is_taken_once() -> None:
    disk, clock = SimulatedDisk(), FakeClock()
    with open_simulated(disk, clock) as store:
        store.kv("t")
        file = build(store, disk, store.stage("t")[0], Columns.of([b"a"], [b"1"], 1))
        first, second = store.batch(durable=False), store.batch(durable=False)
        for batch in (first, second):
            batch.adopt("t", [file, file])
        first.commit()
        with pytest.raises(Invalid, match="these rows were committed before"):
            second.commit()
        store.flush()
        assert dict(store.kv("t").scan()) == {b"a": b"1"}
        store.kv("t").put(b"b", b"2", durable=True)
        store.compact("t")
        assert store.troubles() == []
    with open_simulated(disk, clock) as store:
        assert dict(store.kv("t").scan()) == {b"a": b"1", b"b": b"2"}


# -- chains and cuts at their real size


def test_a_batch_whose_operands_are_longer_than_a_value(tmp_path: Path) -> None:
    large = bytes(40 << 20)
    with penstock.open(tmp_path / "s") as store:
        store.kv("t").put(b"other", b"1")
        with store.batch() as batch:
            batch.kv("t").merge(b"k", large, operator="append")
            batch.kv("t").merge(b"k", NUMBER, operator="add_i64")
            batch.kv("t").merge(b"k", large, operator="append")
        assert len(store.kv("t")[b"k"]) == VALUE_BYTES_MAX  # the number does not fit the value, which stays
    with penstock.open(tmp_path / "s") as store:  # a replay
        assert store.troubles() == []
        assert len(store.kv("t")[b"k"]) == VALUE_BYTES_MAX  # the number does not fit the value, which stays
        assert store.kv("t").get(b"other") == b"1"
        store.compact("t")
        assert len(store.kv("t")[b"k"]) == VALUE_BYTES_MAX  # the number does not fit the value, which stays


def test_a_text_that_append_cut_in_a_character_is_still_text(tmp_path: Path) -> None:
    with penstock.open(tmp_path / "s") as store:
        table = store.kv("t", value="utf8")
        table.put(b"k", "x" * (VALUE_BYTES_MAX - 1))
        table.merge(b"k", "äö", operator="append", durable=True)
        table.put(b"j", "ü", durable=True)
        assert table.get(b"k") == "x" * (VALUE_BYTES_MAX - 1)
        assert [len(value) for _, value in table.scan()] == [1, VALUE_BYTES_MAX - 1]
        assert table.to_arrow()["value"].to_pylist()[0] == "ü"


def test_operands_of_several_operators_never_become_a_chain_in_files() -> None:
    """A chain grows with every file that it passes through, and no file would hold it one day."""
    disk, clock = SimulatedDisk(), FakeClock()
    table_operands = [("append", b"x"), ("union", union_of({b"y"})), ("add_i64", NUMBER)]
    for round_ in range(3):
        with open_simulated(disk, clock, SETTINGS) as store:
            for name, operand in table_operands:
                store.kv("t").merge(b"k", operand, operator=name, durable=True)
                tree = next(tree for tree, catalog in store._maintenance.trees() if catalog.db_id > 1)
                store._maintenance.flush(tree)
                files = [file.table() for file in tree._version.files()]
                kinds = np.concatenate([file.columns(*piece).kinds for file in files for piece in file.pieces(0, 1)])
                assert CHAIN not in kinds
                assert len(set(kinds[kinds > DELETE].tolist())) <= 1
            assert tree.operators is not None, round_
