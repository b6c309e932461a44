"""Conditions on attributes against plain Python, and what is refused."""

from __future__ import annotations

import operator as operators
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.errors import Invalid
from penstock.kinds import partitions_of
from penstock.store.store import Store
from penstock.vector.filters import BoundCondition, compile_condition, condition_key

KINDS = {"text": pa.string(), "whole": pa.int64(), "real": pa.float64(), "flag": pa.bool_()}
SCHEMA = pa.schema(KINDS)
COMPARE = {
    "=": operators.eq,
    "!=": operators.ne,
    "<": operators.lt,
    "<=": operators.le,
    ">": operators.gt,
    ">=": operators.ge,
}

texts = st.sampled_from(["", "a", "b", "ab", "é", "😀", "a\0"])
wholes = st.sampled_from([0, 1, -1, 2, 2**53, 2**53 + 1, 2**63 - 1, -(2**63)]) | st.integers(-3, 3)
inf = float("inf")
reals = st.sampled_from([0.0, -0.0, 0.5, 1.5, -1.0, 2.0**53, 1e300, inf, -inf]) | st.integers(-3, 3).map(float)
values = {"text": texts, "whole": wholes, "real": reals | st.just(float("nan")), "flag": st.booleans()}
numbers = wholes | reals | st.sampled_from([2**70, -(2**70), 10**400, 1e-320])
operands = {"text": texts, "whole": numbers, "real": numbers, "flag": st.booleans()}

rows = st.lists(st.fixed_dictionaries({name: st.none() | some for name, some in values.items()}), max_size=12)


@st.composite
def conditions(draw: Any) -> dict[str, Any]:
    condition: dict[str, Any] = {}
    for name in draw(st.lists(st.sampled_from([*KINDS, "absent"]), unique=True, max_size=3)):
        some = operands.get(name, texts)
        ranges = st.dictionaries(st.sampled_from([*COMPARE]), some, min_size=1, max_size=2)
        sets = st.lists(st.none() | some, max_size=4)
        condition[name] = draw(st.none() | some | ranges | sets | sets.map(tuple) | st.just({"!=": None}))
    return condition


def passes(row: dict[str, Any], condition: dict[str, Any]) -> bool:
    """The same in plain Python."""
    for name, want in condition.items():
        value = row.get(name)
        if isinstance(want, (list, tuple)):
            if value is None and None not in want:
                return False
            if value is not None and not any(value == some for some in want if some is not None):
                return False
            continue
        for operator, right in (want if isinstance(want, dict) else {"=": want}).items():
            if right is None:
                if (value is None) != (operator == "="):
                    return False
            elif value is None or not COMPARE[operator](value, right):
                return False
    return True


@settings(max_examples=300, deadline=None)
@example(rows=[{"real": -0.0}, {"real": 0.0}], condition={"real": [0]}, chunks=False, encoded=False)
@given(rows=rows, condition=conditions(), chunks=st.booleans(), encoded=st.booleans())
def test_a_dict_passes_the_rows_that_plain_python_passes(
    rows: list[dict[str, Any]], condition: dict[str, Any], chunks: bool, encoded: bool
) -> None:
    table = pa.Table.from_pylist(rows, SCHEMA)
    if encoded:
        table = table.set_column(0, "text", table.column("text").dictionary_encode())
    if chunks:
        table = pa.concat_tables([table.slice(0, len(rows) // 2), table.slice(len(rows) // 2)])
    mask = compile_condition(condition, table.schema).mask(table)
    assert mask.tolist() == [passes(row, condition) for row in rows]


def test_expressions_pass_rows_and_absent_attributes_are_null() -> None:
    table = pa.table({"year": [1989, 1990, None, 2001], "lang": ["en", "de", "en", None]})

    def passed(where: pc.Expression) -> list[bool]:
        return list(map(bool, compile_condition(where, table.schema).mask(table)))

    assert passed(pc.field("year") >= 1990) == [False, True, False, True]
    assert passed((pc.field("lang") == "en") & (pc.field("year") < 1990)) == [True, False, False, False]
    assert passed(pc.field("lang").isin(["de", "fr"])) == [False, True, False, False]
    assert passed(pc.field("nothing") == "x") == [False] * 4
    assert passed(pc.field("nothing").is_null() & (pc.field("year") > 1995)) == [False, False, False, True]


def test_a_row_without_any_column_passes_none_and_absent() -> None:
    table = pa.table({"a": [1, 2]}).select([])
    absent = pc.field("a").is_null()
    cases = [({"a": 1}, False), ({"a": None}, True), ({"a": [None, 1]}, True), ({}, True), (absent, True)]
    for where, expected in cases:
        assert compile_condition(where, table.schema).mask(table).tolist() == [expected] * 2


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("lang", "where is a dict such as"),
        ({1: "x"}, "names an attribute by a str, not 1"),
        ({"text": 1}, "'text' with 1, but it is a str: give a str"),
        ({"whole": "1"}, "'whole' with '1', but it is a number: give a number"),
        ({"whole": True}, "'whole' with True, but it is a number"),
        ({"flag": 1}, "'flag' with 1, but it is a bool"),
        ({"real": float("nan")}, "with NaN, which equals nothing"),
        ({"text": {}}, "has no operator for attribute 'text'"),
        ({"text": {"~": "x"}}, "'~' is not an operator of where: use one of =, !=, <, <=, >, >=, in"),
        ({"text": {"<": None}}, "with None by '<'"),
        ({"text": {"in": "abc"}}, "wants a list of values for 'in'"),
        ({"text": ["a", 1]}, "'text' with 1, but it is a str"),
        ({"text": b"a"}, "use a str, int, float, bool or None"),
        ({"text": "\ud800"}, "'text'"),
        ({"whole": range(100_001)}, "use a str, int, float, bool or None"),
        ({"whole": list(range(100_001))}, "give at most 100,000"),
        (pc.field("whole") == "x", "does not fit the attributes"),
        (pc.field("whole") + 1, "does not fit the attributes"),
    ],
)
def test_what_is_refused(where: Any, message: str) -> None:
    with pytest.raises(Invalid, match=message.replace("(", r"\(")):
        compile_condition(where, SCHEMA)


def test_equal_conditions_have_equal_keys() -> None:
    assert condition_key({"a": 1, "b": ["x", "y"]}) == condition_key({"b": ("y", "x"), "a": 1})
    assert condition_key({"a": {">": 1, "<": 5}}) == condition_key({"a": {"<": 5, ">": 1}})
    different = [{"a": 1}, {"a": 1.0}, {"a": True}, {"a": "1"}, {"a": [1]}, {"a": {"<": 1}}, {"a": {">": 1}}, {"b": 1}]
    assert len({condition_key(where) for where in different}) == len(different)
    assert condition_key(pc.field("a") == 1) is None
    assert condition_key({"a": b"x"}) is None


def test_an_expression_from_another_process_finds_its_columns_by_name() -> None:
    """Substrait has positions in a schema; the columns of a shard may be fewer, and in another order."""
    schema = pa.schema({"a": pa.int64(), "b": pa.string(), "c": pa.float64()})
    where = BoundCondition((pc.field(0) == 1) | (pc.field(1) == "x") | (pc.field(2) > 2), schema)
    table = pa.table({"c": pa.array([1, 3, None]), "b": pa.array(["x", None, "y"])})
    assert compile_condition(where, table.schema).mask(table).tolist() == [True, True, False]
    nothing = pa.table({"z": [1, 2]})
    assert compile_condition(where, nothing.schema).mask(nothing).tolist() == [False, False]


def test_conditions_that_are_cached_keep_no_older_columns(store: Store) -> None:
    """Conditions that never come twice, as those with a time, beside a writer."""
    docs = store.vector("docs", dimensions=2)
    older = list[Any]()
    for number in range(5):
        docs.upsert(str(number), [1.0, number], {"n": number}, durable=True)
        assert len(docs.search([1.0, 0.0], where={"n": {">=": -number}})) == number + 1
        info = store.port.table("docs")
        assert info is not None
        machine: Any = store.port.machine(partitions_of(info)[0])
        columns, allowed = machine.live.cache.columns, machine.live.cache._allowed
        assert [entry[0] is columns for entry in allowed.values()] == [True]
        assert columns not in older
        older.append(columns)
    assert len(docs.search([1.0, 0.0], where={"n": {"<": 3}})) == 3
    assert len(machine.live.cache._allowed) == 2
