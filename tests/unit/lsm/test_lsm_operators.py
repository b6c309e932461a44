from __future__ import annotations

import math
import struct
from fractions import Fraction
from functools import reduce
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import Invalid
from penstock.lsm import exact_sum, operators
from penstock.lsm.operators import CHAIN, OPERATORS, check_operand, fold, fold_numbers, union_items, union_of
from penstock.lsm.rows import DELETE, PUT

ADD, MIN, MAX = OPERATORS["add_i64"], OPERATORS["min_i64"], OPERATORS["max_i64"]
MIN_F, MAX_F, APPEND, UNION = (OPERATORS[name] for name in ("min_f64", "max_f64", "append", "union"))


def i64(n: int) -> bytes:
    return struct.pack("<q", n)


def f64(x: float) -> bytes:
    return struct.pack("<d", x)


ADD_F, ADD_D, MIN_D, MAX_D = (OPERATORS[name] for name in ("add_f64", "add_decimal", "min_decimal", "max_decimal"))
numbers = st.binary(min_size=8, max_size=8) | st.sampled_from([f64(x) for x in (0.0, -0.0, float("nan"), float("inf"))])
decimals = st.binary(min_size=16, max_size=16)
sums = st.lists(st.floats(), min_size=1, max_size=3).map(lambda xs: reduce(exact_sum.add, map(f64, xs)))
operands = st.one_of(
    st.tuples(st.sampled_from([ADD, MIN, MAX, MIN_F, MAX_F]), numbers),
    st.tuples(st.just(ADD_F), numbers | sums),
    st.tuples(st.sampled_from([ADD_D, MIN_D, MAX_D]), decimals),
    st.tuples(st.just(APPEND), st.binary(max_size=6)),
    st.tuples(st.just(UNION), st.sets(st.binary(max_size=2), max_size=4).map(union_of)),
)
rows = operands | st.tuples(st.just(PUT), numbers | st.binary(max_size=9) | decimals | sums) | st.just((DELETE, b""))


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


def test_a_value_that_does_not_fit_stays_as_it_is() -> None:
    for value in (b"", b"abc", bytes(9)):
        for kind in (ADD, MIN, MAX, MIN_F, MAX_F, ADD_F):
            assert fold((PUT, value), (kind, i64(4))) == (PUT, value)
            assert fold((PUT, value), fold((kind, i64(4)), (kind, i64(5)))) == (PUT, value)
        assert fold((PUT, value), (ADD_D, bytes(16))) == (PUT, value)
    assert fold((PUT, b"\xff"), (UNION, union_of({b"a"}))) == (PUT, b"\xff")
    assert fold((PUT, b""), (UNION, union_of({b"a"}))) == (PUT, union_of({b"a"})), "the empty set"


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
    assert check_operand("add_f64", exact_sum.add(f64(1), f64(1e-30))) == ADD_F
    for name, operand in (
        ("add_f64", bytes(16)),
        ("add_decimal", i64(1)),
        ("plus", i64(1)),
        ("add_i64", b"1"),
        ("union", b"\1\0\0\0"),
        ("union", b"x"),
    ):
        with pytest.raises(Invalid):
            check_operand(name, operand)
    with pytest.raises(Invalid):
        union_of({bytes(1_021)})
    with pytest.raises(Invalid):
        union_items(b"x")


# -- exact sums


def read(state: bytes) -> float:
    return float(struct.unpack_from("<d", state)[0])


@given(numbers=st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=12), seed=st.integers())
@settings(max_examples=500, deadline=None)
def test_a_sum_of_floats_is_exact_in_any_order(numbers: list[float], seed: int) -> None:
    chance, states = Random(seed), [f64(x) for x in numbers]
    while len(states) > 1:  # in any order, in any grouping
        chance.shuffle(states)
        states.append(exact_sum.add(states.pop(), states.pop()))
    (state,) = states
    total = sum(map(Fraction, numbers))
    try:
        expected = float(total)
    except OverflowError:
        expected = math.inf if total > 0 else -math.inf
    assert read(state) == expected
    assert exact_sum.is_state(state)
    assert len(state) <= exact_sum.STATE_BYTES_MAX
    if len(numbers) > 1:
        assert state == reduce(exact_sum.add, map(f64, sorted(numbers)))


def test_what_a_sum_must_remember() -> None:
    big, small = f64(1e300), f64(1e-300)
    assert read(reduce(exact_sum.add, [big, small, f64(-1e300)])) == 1e-300
    over = exact_sum.add(f64(1.7e308), f64(1.7e308))
    assert read(over) == math.inf
    assert exact_sum.is_state(over)
    assert read(exact_sum.add(over, f64(-1.7e308))) == 1.7e308
    assert read(exact_sum.add(exact_sum.add(over, f64(-1.7e308)), f64(-1.7e308))) == 0.0
    assert read(reduce(exact_sum.add, [f64(0.1)] * 10)) == 1.0
    assert math.isnan(read(exact_sum.add(f64(math.inf), f64(-math.inf))))
    assert read(exact_sum.add(over, f64(-math.inf))) == -math.inf
    for wrong in (
        b"",
        bytes(16),
        bytes(7),
        bytes(800),
        f64(1) + f64(1),
        f64(math.nan) + f64(1),
        f64(math.inf) + bytes(8),
    ):
        assert not exact_sum.is_state(wrong)
        assert exact_sum.add(wrong, f64(1)) == wrong
    # The least of a sum and a number is that of the rounded sum.
    assert fold((PUT, exact_sum.add(f64(1), small)), (MIN_F, f64(2))) == (PUT, f64(1))
