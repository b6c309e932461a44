"""Sections of vector tables: how writes fold, what their bytes are, and what is refused from other processes."""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from penstock.errors import CorruptionError, Invalid
from penstock.vector.attributes import (
    attribute_table,
    decode_attributes,
    encode_all,
    encode_attributes,
    join_tables,
)
from penstock.vector.options import VectorOptions
from penstock.vector.section import (
    Deletes,
    IndexChange,
    Upserts,
    VectorSection,
    decode_section,
    encode_section,
    receive_section,
)

OPTIONS = VectorOptions(dimensions=2)


def rows(*ids: str, at: float = 1.0) -> Upserts:
    matrix = np.array([[at + number, 1.0] for number in range(len(ids))], np.float32)
    return Upserts([some.encode() for some in ids], matrix, [b'{"n":%d}' % at] * len(ids))


def folded(section: VectorSection) -> list[tuple[str, list[str], list[float]]]:
    return [
        (
            type(part).__name__,
            [] if isinstance(part, IndexChange) else [some.decode() for some in part.ids],
            part.vectors[:, 0].tolist() if isinstance(part, Upserts) else [],
        )
        for part in section.parts
    ]


def test_the_last_write_of_an_id_wins() -> None:
    section = VectorSection(rows("a", "b", "a"), Deletes([b"b", b"x"]), rows("c", "x", at=10.0), Deletes([b"c"]))
    assert folded(section) == [("Deletes", ["b", "c"], []), ("Upserts", ["a", "x"], [3.0, 11.0])]
    again = decode_section(encode_section(section))
    assert folded(again) == folded(section)
    assert encode_section(again) == encode_section(section)
    assert section.get(b"x") == np.array([11.0, 1.0], "<f4").tobytes() + b'{"n":10}'
    assert section.find(b"b") is True
    assert section.find(b"y") is False


def test_a_change_of_the_index_keeps_its_place() -> None:
    change = IndexChange(generation=1, centroids=[(0, bytes(8))], use=True)
    section = VectorSection(rows("a"), change, rows("a", at=2.0))
    assert [name for name, _, _ in folded(section)] == ["Upserts", "IndexChange", "Upserts"]
    (decoded,) = [part for part in decode_section(encode_section(section)).parts if isinstance(part, IndexChange)]
    assert decoded == change


def test_what_other_processes_send_is_checked() -> None:
    good = VectorSection(rows("a", "b"), Deletes([b"c"]))
    assert len(receive_section(encode_section(good), OPTIONS)) == 3
    twice = VectorSection(rows("a"))
    twice._cache = (1, [rows("a"), rows("a")])  # an encoder that does not fold
    wrong = [
        VectorSection(Upserts([b"a"], np.ones((1, 3), np.float32), [])),
        VectorSection(Upserts([b"a" * 1_025], np.ones((1, 2), np.float32), [])),
        VectorSection(Upserts([b"a"], np.ones((1, 2), np.float32), [b'{"b":1,"a":2}'])),  # not canonical
        VectorSection(Upserts([b"a"], np.ones((1, 2), np.float32), [b'{"a":null}'])),
        VectorSection(Upserts([b"a"], np.ones((1, 2), np.float32), [b'{"a":1e999}'])),
        twice,
    ]
    for section in wrong:
        with pytest.raises(Invalid):
            receive_section(encode_section(section), OPTIONS)
    payload = encode_section(good)
    for cut in range(len(payload)):
        with pytest.raises(CorruptionError):
            decode_section(payload[:cut])


def test_attributes_keep_their_types() -> None:
    attributes = {"text": 'ü"\\', "int": -(1 << 63), "float": 1.0, "yes": True, "none": None, "e": ""}
    data = encode_attributes(attributes)
    decoded = decode_attributes(data)
    assert decoded == {name: value for name, value in attributes.items() if value is not None}
    assert [type(value) for value in decoded.values()] == [str, float, int, str, bool]  # by name
    assert encode_attributes(np_numbers := {"a": np.float32(0.5), "b": np.int16(3)}) == b'{"a":0.5,"b":3}', np_numbers
    assert encode_attributes({}) == encode_attributes(None) == b""


class Name(str):
    __slots__ = ()


ODD: list[Any] = [
    {"a": 1}, {}, None, {"a": Name("x")}, {Name("a"): 1}, {"a": (1 << 63) - 1}, {"a": 1 << 63}, {"a": -(1 << 63) - 1},
    {"a": math.nan}, {"a": math.inf}, {"a": -0.0}, {"a": None, "b": True}, {"": 1}, {"ü" * 128: 1}, {"ü" * 129: 1},
    {"x" * 65: 1}, {"a\nb": "c\n\u2028"}, {"a": "\ud800"}, {"\ud800": 1}, {"a": np.int64(3)}, {"a": [1]}, {"a": b"x"},
    {"a": Decimal(1)}, {1: "a"}, {str(n): n for n in range(129)}, {"a": "x" * 70_000}, "ab", [("a", 1)], {"a": "null"},
]  # fmt: skip


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: ascii(odd)[:20])
def test_attributes_are_encoded_together_as_they_are_one_by_one(odd: Any) -> None:
    rows = [{"b": 1.5, "a": "x"}, odd, {"c": 7}]
    try:
        expected = [encode_attributes(some) for some in rows]
    except Invalid as error:
        with pytest.raises(Invalid, match=re.escape(str(error))):
            encode_all(rows)
    else:
        assert encode_all(rows) == expected


def test_columns_of_attributes() -> None:
    encoded = [encode_attributes(some) for some in ({"a": 1, "b": "x"}, None, {"a": 1.5}, {"b": 2, "c": True})]
    table = attribute_table(encoded)
    expected = [
        ("a", [1.0, None, 1.5, None]),
        ("b", [None, None, None, 2]),
        ("b", ["x", None, None, None]),
        ("c", [None, None, None, True]),
    ]
    assert [
        (name, column.to_pylist()) for name, column in zip(table.column_names, table.columns, strict=True)
    ] == expected
    parts = join_tables([attribute_table(encoded[:1]), attribute_table(encoded[1:3]), attribute_table(encoded[3:])])
    assert parts.equals(table)
    assert attribute_table([b"", b""]).num_rows == join_tables([attribute_table([b""])] * 2).num_rows == 2
