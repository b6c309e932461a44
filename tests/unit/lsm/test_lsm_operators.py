from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import Invalid
from penstock.lsm import operators
from penstock.lsm.operators import CHAIN, OPERATORS, check_operand, fold, fold_numbers, union_items, union_of
from penstock.lsm.rows import DELETE, PUT

ADD, MIN, MAX = OPERATORS["add_i64"], OPERATORS["min_i64"], OPERATORS["max_i64"]
MIN_F, MAX_F, APPEND, UNION = (OPERATORS[name] for name in ("min_f64", "max_f64", "append", "union"))


def i64(n: int) -> bytes:
    return struct.pack("<q", n)


def f64(x: float) -> bytes:
    return struct.pack("<d", x)


numbers = st.binary(min_size=8, max_size=8) | st.sampled_from([f64(x) for x in (0.0, -0.0, float("nan"), float("inf"))])
operands = st.one_of(
    st.tuples(st.sampled_from([ADD, MIN, MAX, MIN_F, MAX_F]), numbers | st.binary(max_size=3)),
    st.tuples(st.just(APPEND), st.binary(max_size=6)),
    st.tuples(st.just(UNION), st.sets(st.binary(max_size=2), max_size=4).map(union_of) | st.binary(max_size=6)),
)
rows = operands | st.tuples(st.just(PUT), numbers | st.binary(max_size=9)) | st.just((DELETE, b""))


@given(a=rows, b=rows, c=rows, d=rows)
@settings(max_examples=2_000, deadline=None)
def test_folding_is_associative(
    a: tuple[int, bytes], b: tuple[int, bytes], c: tuple[int, bytes], d: tuple[int, bytes]
) -> None:
    left = fold(fold(fold(a, b), c), d)
    assert left == fold(a, fold(b, fold(c, d)))
    assert left == fold(fold(a, b), fold(c, d))
    # Nothing below, for certain, is the same as a delete below.
    assert fold(None, fold(a, b)) == fold((DELETE, b""), fold(a, b))


def test_each_operator() -> None:
    assert fold((PUT, i64(5)), (ADD, i64(-7))) == (PUT, i64(-2))
    assert fold((PUT, i64(2**63 - 1)), (ADD, i64(1))) == (PUT, i64(-(2**63)))
    assert fold((MIN, i64(5)), (MIN, i64(-7))) == (MIN, i64(-7))
    assert fold((MAX, i64(5)), (MAX, i64(-7))) == (MAX, i64(5))
    assert fold((PUT, f64(-1.5)), (MIN_F, f64(-2.5))) == (PUT, f64(-2.5))
    assert fold((PUT, f64(0.0)), (MIN_F, f64(-0.0))) == (PUT, f64(-0.0))
    assert fold((PUT, f64(3.0)), (MAX_F, f64(float("inf")))) == (PUT, f64(float("inf")))
    assert fold((DELETE, b""), (APPEND, b"b")) == (PUT, b"b")
    assert fold((PUT, b"a"), (APPEND, b"b")) == (PUT, b"ab")
    kind, value = fold((PUT, union_of({b"x", b"a"})), (UNION, union_of({b"m", b"a"})))
    assert (kind, union_items(value)) == (PUT, [b"a", b"m", b"x"])


def test_operands_of_several_operators_keep_their_order() -> None:
    chain = fold(fold((ADD, i64(1)), (MAX, i64(3))), (ADD, i64(10)))
    assert chain[0] == CHAIN
    assert fold((PUT, i64(5)), chain) == (PUT, i64(16))
    assert fold((PUT, i64(1)), chain) == (PUT, i64(13))
    assert fold(None, chain) == (PUT, i64(13))


def test_what_is_not_of_the_operators_form_counts_as_absent() -> None:
    assert fold((PUT, b"abc"), (ADD, i64(4))) == (PUT, i64(4))
    assert fold((PUT, b"\xff"), (UNION, union_of({b"a"}))) == (PUT, union_of({b"a"}))


def test_results_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "VALUE_BYTES_MAX", 5)
    monkeypatch.setattr(operators, "UNION_ITEMS_MAX", 2)
    assert fold((PUT, b"abcd"), (APPEND, b"efg")) == (PUT, b"abcde")
    assert fold((PUT, union_of({b"b", b"c"})), (UNION, union_of({b"a"}))) == (PUT, union_of({b"a", b"b"}))


def test_groups_fold_at_once() -> None:
    bits = np.array([1, 2, 3, -4, 9], np.int64)
    starts = np.array([0, 2, 4])
    assert fold_numbers(ADD, bits, starts).tolist() == [3, -1, 9]
    assert fold_numbers(MIN, bits, starts).tolist() == [1, -4, 9]
    floats = np.array([1.0, -2.0, -3.0, -4.0, 0.5]).view(np.int64)
    assert fold_numbers(MAX_F, floats, starts).view(np.float64).tolist() == [1.0, -3.0, 0.5]


def test_admission_refuses_bad_operands() -> None:
    assert check_operand("add_i64", i64(1)) == ADD
    assert check_operand("union", union_of({b"a"})) == UNION
    for name, operand in (("add_f64", f64(1)), ("add_i64", b"1"), ("union", b"\1\0\0\0"), ("union", b"x")):
        with pytest.raises(Invalid):
            check_operand(name, operand)
    with pytest.raises(Invalid):
        union_of({bytes(1_021)})
    with pytest.raises(Invalid):
        union_items(b"x")
