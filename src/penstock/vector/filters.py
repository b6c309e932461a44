"""Conditions on attributes: which rows of Arrow columns pass.

A condition is a dict, whose conditions must all hold, or a pyarrow expression:

    {"lang": "en"}                       equal
    {"lang": ["en", "de"]}               one of these (list, tuple, set)
    {"year": {">=": 1990, "<": 2000}}    a range; the operators are = != < <= > >= and in
    {"lang": None}                       without this attribute
    pc.field("year") >= 1990

A row without an attribute meets no comparison with it, also not `!=`; None meets `None` and `[None, ...]` alone. An
attribute that no row has is one that each row is without. Numbers are compared by their exact value, also an int with a
float; a bool is not a number. Values of several classes under one name are columns of one name (see `attributes`): a
number is compared with the numbers, and rows with a text there do not pass. If no row has a number there, and some have
texts, the comparison is refused. An expression sees the first class of these: numbers, texts, bools.

Thread: pure functions; a Condition is immutable.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.arguments import in_short
from penstock.errors import Backpressure, Invalid
from penstock.vector.attributes import class_column, value_class

Mask: TypeAlias = npt.NDArray[np.bool_]
Where: TypeAlias = Mapping[str, Any] | pc.Expression

VALUES_MAX = 100_000  # in a set
ABSENT_MAX = 4  # attributes that no row has, of an expression
_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "=": pc.equal,
    "!=": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}
_UNKNOWN = re.compile(r"FieldRef\.Name\((.*?)\)")
_ROW = ""  # the column of row numbers: no attribute has this name


class BoundCondition(NamedTuple):
    """A condition on columns of a schema: an expression of another process has their positions; and a table whose
    parts have an attribute with different types has one type for all."""

    where: Where
    schema: pa.Schema


class AttributeCondition:
    """A condition that was checked against a schema."""

    __slots__ = ("_mask",)

    def __init__(self, mask: Callable[[pa.Table], Mask]) -> None:
        self._mask = mask

    def mask(self, table: pa.Table) -> Mask:
        """Return which rows pass. Requires: the columns have the types of the schema, or are absent."""
        return self._mask(table)


def compile_condition(where: Any, schema: pa.Schema) -> AttributeCondition:
    """Check a condition; `Invalid` if it does not fit the attributes."""
    if isinstance(where, BoundCondition):
        bound = compile_condition(where.where, where.schema)
        return AttributeCondition(lambda table: bound.mask(_arranged(table, where.schema)))
    if isinstance(where, pc.Expression):
        if len(set(schema.names)) != len(schema.names):
            return compile_condition(BoundCondition(where, one_column_each(schema)), schema)
        _rows_that_pass(schema.empty_table(), where)
        return AttributeCondition(lambda table: _rows_that_pass(table, where))
    if not isinstance(where, Mapping):
        raise Invalid(f"where is a dict such as {{'lang': 'en'}}, or a pyarrow expression, not {in_short(where)}")
    tests = [alternatives for name, requirement in where.items() for alternatives in _tests(name, requirement, schema)]
    return AttributeCondition(lambda table: _all_pass(table, tests))


def condition_key(where: Any) -> Hashable | None:
    """Return a key that equal conditions share, for caches; None if there is none, as for expressions."""
    if isinstance(where, BoundCondition):
        key = condition_key(where.where)
        return None if key is None else (key, where.schema.to_string())
    try:
        return tuple((name, _key(where[name])) for name in sorted(where)) if type(where) is dict else None
    except TypeError:
        return None


def _key(requirement: Any) -> Hashable:
    if requirement is None or type(requirement) in (str, int, float, bool):
        return (type(requirement), requirement)
    if isinstance(requirement, dict):
        return ("dict", tuple((operator, _key(requirement[operator])) for operator in sorted(requirement)))
    if isinstance(requirement, (list, tuple, set, frozenset)):
        return ("in", frozenset(_key(value) for value in requirement))
    raise TypeError


# -- dicts


class _Test(NamedTuple):
    """What a row must pass: the columns of one attribute."""

    name: str
    passes: Callable[[Any], Any] | None  # a boolean column of a column; None: no value passes
    values: str = ""  # the class of the values that are compared; "": none, `null` alone counts
    null: bool | None = None  # whether rows without the attribute pass (True), or rows with it (False)


def _tests(name: Any, requirement: Any, schema: pa.Schema) -> list[list[_Test]]:
    """Return tests of which one in each list must pass."""
    if not isinstance(name, str):
        raise Invalid(f"where names an attribute by a str, not {in_short(name)}")
    if not isinstance(requirement, Mapping):
        requirement = {"in" if isinstance(requirement, (list, tuple, set, frozenset)) else "=": requirement}
    if not requirement:
        raise Invalid(f"where has no operator for attribute {name!r}: give a value, a list or a dict of operators")
    kinds = [_kind(schema.field(at).type) for at in schema.get_all_field_indices(name)]
    return [_test(name, operator, value, kinds) for operator, value in requirement.items()]


def _kind(kind: pa.DataType) -> pa.DataType:
    """Return the type of a column's values."""
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _test(name: str, operator: Any, value: Any, kinds: list[pa.DataType]) -> list[_Test]:
    if operator == "in":
        return _membership(name, value, kinds)
    compare = _COMPARE.get(operator) if isinstance(operator, str) else None
    if compare is None:
        raise Invalid(f"{in_short(operator)} is not an operator of where: use one of {', '.join(_COMPARE)}, in")
    if value is None:
        if operator not in ("=", "!="):
            raise Invalid(f"where compares attribute {name!r} with None by {operator!r}: use '=' or '!='")
        return [_Test(name, None, null=operator == "=")]
    kind = _fitting(name, value, kinds)
    if kind is None:
        return [_Test(name, None)]
    operator, scalar = _comparable(name, operator, value, kind)
    if scalar is None:
        return [_Test(name, pc.is_valid if operator == "always" else None, value_class(kind))]
    exact = _COMPARE[operator]
    return [_Test(name, lambda column: exact(column, scalar), value_class(kind))]


def _membership(name: str, values: Any, kinds: list[pa.DataType]) -> list[_Test]:
    if not isinstance(values, (list, tuple, set, frozenset)):
        raise Invalid(f"where wants a list of values for 'in' of attribute {name!r}, not {in_short(values)}")
    if len(values) > VALUES_MAX:
        raise Invalid(f"where has {len(values):,} values for attribute {name!r}: give at most {VALUES_MAX:,}")
    tests = [_Test(name, None, null=True)] if None in values else []
    scalars: dict[pa.DataType, list[Any]] = {}
    for value in values:
        kind = None if value is None else _fitting(name, value, kinds)
        scalar = None if kind is None else _comparable(name, "=", value, kind)[1]
        if scalar is not None:
            scalars.setdefault(kind, []).append(scalar.as_py())
    for kind, members in scalars.items():
        if pa.types.is_floating(kind) and 0.0 in members:
            members += [0.0, -0.0]  # Arrow looks values up by their bits, which differ for these two
        tests.append(_Test(name, partial(pc.is_in, value_set=pa.array(members, kind)), value_class(kind)))
    return tests or [_Test(name, None)]


def _fitting(name: str, value: Any, kinds: list[pa.DataType]) -> pa.DataType | None:
    """Return the type of the column whose values can be compared with a value; None if no row has the attribute."""
    if isinstance(value, np.generic):
        value = value.item()
    if not isinstance(value, (str, int, float, bool)):
        raise Invalid(f"where compares attribute {name!r} with {in_short(value)}: use a str, int, float, bool or None")
    if isinstance(value, float) and math.isnan(value):
        raise Invalid(f"where compares attribute {name!r} with NaN, which equals nothing: use None for an absent one")
    class_name = "bool" if isinstance(value, bool) else "str" if isinstance(value, str) else "number"
    present = [kind for kind in kinds if value_class(kind)]
    for kind in present:
        if value_class(kind) == class_name:
            return kind
    if present:
        classes = " or ".join(f"a {value_class(kind)}" for kind in present)
        raise Invalid(f"where compares attribute {name!r} with {in_short(value)}, but it is {classes}: give {classes}")
    return None


def _comparable(name: str, operator: str, value: Any, kind: pa.DataType) -> tuple[str, Any]:
    """Return an operator and a scalar of a column's type that mean the same; without a scalar: "always" or "never".

    Requires: the value fits the type.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if pa.types.is_integer(kind):
        return _as_integer(operator, value, kind)
    if pa.types.is_floating(kind):
        return _as_float(operator, value, kind)
    try:
        return operator, pa.scalar(value, kind)
    except (pa.ArrowException, UnicodeEncodeError) as error:
        raise Invalid(f"where compares attribute {name!r} with {in_short(value)}: {error}") from None


def _as_integer(operator: str, value: Any, kind: pa.DataType) -> tuple[str, Any]:
    """Compare an integer column with a number: a fraction lies between two integers, and most are out of range."""
    if isinstance(value, float) and math.isinf(value):
        return _beyond(operator, above=value > 0)
    if value != int(value):
        if operator in ("=", "!="):
            return ("never" if operator == "=" else "always"), None
        low = math.floor(value)
        operator, value = ("<=", low) if operator in ("<", "<=") else (">", low)
    try:
        return operator, pa.scalar(int(value), kind)
    except (pa.ArrowException, OverflowError):
        return _beyond(operator, above=value > 0)


def _as_float(operator: str, value: Any, kind: pa.DataType) -> tuple[str, Any]:
    """Compare a column of floats with a number, which may not be a float of that type."""
    try:
        rounded = float(value)
    except OverflowError:
        rounded = math.inf if value > 0 else -math.inf
    if not pa.types.is_float64(kind):
        rounded = float(np.dtype(kind.to_pandas_dtype()).type(rounded))
    if rounded != value:
        if operator in ("=", "!="):
            return ("never" if operator == "=" else "always"), None
        if operator in ("<", "<="):
            operator = "<" if rounded > value else "<="
        else:
            operator = ">=" if rounded > value else ">"
    return operator, pa.scalar(rounded, kind)


def _beyond(operator: str, *, above: bool) -> tuple[str, None]:
    """Compare with a number above, or below, every value."""
    return ("always" if operator == "!=" or operator.startswith("<" if above else ">") else "never"), None


def _all_pass(table: pa.Table, tests: list[list[_Test]]) -> Mask:
    passes = np.ones(table.num_rows, np.bool_)
    for alternatives in tests:
        any_pass = np.zeros(table.num_rows, np.bool_)
        for test in alternatives:
            any_pass |= _mask_of(table, test)
        passes &= any_pass
    return passes


def _mask_of(table: pa.Table, test: _Test) -> Mask:
    columns = [table.column(at) for at in table.schema.get_all_field_indices(test.name)]
    mask = np.full(table.num_rows, test.null is True)
    for column in columns:
        if test.null is not None:
            present = _as_mask(pc.is_valid(column))
            mask = mask & ~present if test.null else mask | present
        elif test.passes is not None and value_class(column.type) == test.values:
            if pa.types.is_dictionary(column.type):
                column = column.cast(column.type.value_type)
            mask |= _as_mask(test.passes(column))
    return mask


def _as_mask(column: Any) -> Mask:
    """Return a boolean column as an array, where null is False."""
    filled = pc.fill_null(column, False)
    if isinstance(filled, pa.ChunkedArray):
        filled = filled.combine_chunks()
    mask: Mask = filled.to_numpy(zero_copy_only=False)
    return mask


# -- expressions


def _arranged(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return the columns of a schema, null where the table lacks one."""
    if not len(schema):
        return table.select([])
    return pa.Table.from_arrays([_as_field(table, field) for field in schema], schema.names)


def _as_field(table: pa.Table, field: pa.Field) -> Any:
    if pa.types.is_integer(field.type):
        for at in table.schema.get_all_field_indices(field.name):
            if pa.types.is_floating(table.schema.field(at).type):
                raise Backpressure(f"attribute {field.name!r} was just written with another type: search again")
    return class_column(table, field.name, value_class(field.type), field.type)


def one_column_each(schema: pa.Schema) -> pa.Schema:
    """Return a schema with the first column of each name: what an expression sees."""
    first: dict[str, pa.Field] = {}
    for field in schema:
        first.setdefault(field.name, field)
    return pa.schema(list(first.values()))


def encode_expression(where: pc.Expression, schema: pa.Schema) -> bytes:
    """Encode an expression on attributes for another process; an attribute that no row has may be of any class."""
    try:
        return _encoded(where, one_column_each(schema), ABSENT_MAX)
    except (pa.ArrowException, TypeError, ValueError) as error:
        line = (str(error).splitlines() or [""])[0]
        raise Invalid(f"the expression does not fit the attributes: {line}") from None


def _encoded(where: pc.Expression, schema: pa.Schema, absent_max: int) -> bytes:
    """Encode an expression; attributes that the schema lacks get the first type with which it can be encoded."""
    try:
        return bytes(where.to_substrait(schema))
    except pa.ArrowException as error:
        unknown = _UNKNOWN.search(str(error))
        if unknown is None or unknown[1] in schema.names or not absent_max:
            raise
        last = error
    for kind in (pa.float64(), pa.string(), pa.bool_()):
        try:
            return _encoded(where, schema.append(pa.field(unknown[1], kind)), absent_max - 1)
        except pa.ArrowException as error:
            last = error
    raise last


def _rows_that_pass(table: pa.Table, where: pc.Expression) -> Mask:
    """Return which rows pass a pyarrow expression; columns that it names and that are absent are null."""
    rows = table.append_column(_ROW, pa.array(np.arange(table.num_rows)))
    absent: set[str] = set()
    while True:
        try:
            passed = rows.filter(where).column(_ROW)
            break
        except pa.ArrowException as error:
            unknown = _UNKNOWN.search(str(error))
            if unknown is None or unknown[1] in absent:
                raise Invalid(f"where does not fit the attributes: {str(error).splitlines()[0]}") from None
            absent.add(unknown[1])
            rows = rows.append_column(unknown[1], pa.nulls(table.num_rows))
        except (TypeError, ValueError) as error:
            raise Invalid(f"where does not fit the attributes: {str(error).splitlines()[0]}") from None
    mask = np.zeros(table.num_rows, np.bool_)
    mask[passed.to_numpy()] = True
    return mask
