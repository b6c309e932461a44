"""Conditions on attributes: which rows of Arrow columns pass.

A condition is a dict, whose conditions must all hold, or a pyarrow expression:

    {"lang": "en"}                       equal
    {"lang": ["en", "de"]}               one of these (list, tuple, set)
    {"year": {">=": 1990, "<": 2000}}    a range; the operators are = != < <= > >= and in
    {"lang": None}                       without this attribute
    pc.field("year") >= 1990

A row without an attribute meets no comparison with it, also not `!=`; None meets `None` and `[None, ...]` alone. An
attribute that no row has is one that each row is without. Numbers are compared by their exact value, also an int with a
float; a bool is not a number, and a text is compared with texts.

Thread: pure functions; a Condition is immutable.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.arguments import in_short
from penstock.errors import Backpressure, Invalid
from penstock.vector.attributes import as_text

Mask: TypeAlias = npt.NDArray[np.bool_]
Where: TypeAlias = Mapping[str, Any] | pc.Expression

VALUES_MAX = 100_000  # in a set
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
        _rows_that_pass(schema.empty_table(), where)
        return AttributeCondition(lambda table: _rows_that_pass(table, where))
    if not isinstance(where, Mapping):
        raise Invalid(f"where is a dict such as {{'lang': 'en'}}, or a pyarrow expression, not {in_short(where)}")
    tests = [_tests(name, wanted, schema) for name, wanted in where.items()]
    flat = [test for some in tests for test in some]
    return AttributeCondition(lambda table: _all_pass(table, flat))


def condition_key(where: Any) -> Hashable | None:
    """Return a key that equal conditions share, for caches; None if there is none, as for expressions."""
    try:
        return tuple((name, _key(where[name])) for name in sorted(where)) if type(where) is dict else None
    except TypeError:
        return None


def _key(wanted: Any) -> Hashable:
    if wanted is None or type(wanted) in (str, int, float, bool):
        return (type(wanted), wanted)
    if isinstance(wanted, dict):
        return ("dict", tuple((operator, _key(wanted[operator])) for operator in sorted(wanted)))
    if isinstance(wanted, (list, tuple, set, frozenset)):
        return ("in", frozenset(_key(value) for value in wanted))
    raise TypeError


# -- dicts


class _Test(NamedTuple):
    """What the values of one column must pass."""

    name: str
    passes: Callable[[Any], Any] | None  # a boolean column of a column; None: no value passes
    null_passes: bool = False


def _tests(name: Any, wanted: Any, schema: pa.Schema) -> list[_Test]:
    if not isinstance(name, str):
        raise Invalid(f"where names an attribute by a str, not {in_short(name)}")
    if not isinstance(wanted, Mapping):
        wanted = {"in" if isinstance(wanted, (list, tuple, set, frozenset)) else "=": wanted}
    if not wanted:
        raise Invalid(f"where has no operator for attribute {name!r}: give a value, a list or a dict of operators")
    kind = _kind(schema.field(name).type) if schema.get_field_index(name) >= 0 else pa.null()
    return [_test(name, operator, value, kind) for operator, value in wanted.items()]


def _kind(kind: pa.DataType) -> pa.DataType:
    """Return the type of a column's values."""
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _test(name: str, operator: Any, value: Any, kind: pa.DataType) -> _Test:
    if operator == "in":
        return _membership(name, value, kind)
    compare = _COMPARE.get(operator) if isinstance(operator, str) else None
    if compare is None:
        raise Invalid(f"{in_short(operator)} is not an operator of where: use one of {', '.join(_COMPARE)}, in")
    if value is None:
        if operator not in ("=", "!="):
            raise Invalid(f"where compares attribute {name!r} with None by {operator!r}: use '=' or '!='")
        return _Test(name, pc.is_null, True) if operator == "=" else _Test(name, pc.is_valid)
    operator, scalar = _comparable(name, operator, value, kind)
    if scalar is None:
        return _Test(name, pc.is_valid if operator == "always" else None)
    exact = _COMPARE[operator]
    return _Test(name, lambda column: exact(column, scalar))


def _membership(name: str, values: Any, kind: pa.DataType) -> _Test:
    if not isinstance(values, (list, tuple, set, frozenset)):
        raise Invalid(f"where wants a list of values for 'in' of attribute {name!r}, not {in_short(values)}")
    if len(values) > VALUES_MAX:
        raise Invalid(f"where has {len(values):,} values for attribute {name!r}: give at most {VALUES_MAX:,}")
    scalars = [_comparable(name, "=", value, kind)[1] for value in values if value is not None]
    known = pa.array([scalar.as_py() for scalar in scalars if scalar is not None], kind)
    if None in values:
        return _Test(name, lambda column: pc.or_(pc.is_null(column), pc.is_in(column, value_set=known)), True)
    return _Test(name, (lambda column: pc.is_in(column, value_set=known)) if len(known) else None)


def _comparable(name: str, operator: str, value: Any, kind: pa.DataType) -> tuple[str, Any]:
    """Return an operator and a scalar of a column's type that mean the same; without a scalar: "always" or "never"."""
    if isinstance(value, np.generic):
        value = value.item()
    if not isinstance(value, (str, int, float, bool)):
        raise Invalid(f"where compares attribute {name!r} with {in_short(value)}: use a str, int, float, bool or None")
    if isinstance(value, float) and math.isnan(value):
        raise Invalid(f"where compares attribute {name!r} with NaN, which equals nothing: use None for an absent one")
    if pa.types.is_null(kind):
        return "never", None
    number = not isinstance(value, (str, bool))
    if number and pa.types.is_integer(kind):
        return _as_integer(operator, value, kind)
    if number and pa.types.is_floating(kind):
        return _as_float(operator, value, kind)
    if isinstance(value, bool) != pa.types.is_boolean(kind) or isinstance(value, str) != _is_text(kind):
        raise Invalid(
            f"where compares attribute {name!r} with {in_short(value)}, but it is {_type_name(kind)}: "
            f"give {_type_name(kind)}"
        )
    try:
        return operator, pa.scalar(value, kind)
    except (pa.ArrowException, UnicodeEncodeError) as error:
        raise Invalid(f"where compares attribute {name!r} with {in_short(value)}: {error}") from None


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _type_name(kind: pa.DataType) -> str:
    if pa.types.is_boolean(kind):
        return "a bool"
    if _is_text(kind):
        return "a str"
    return "a number" if pa.types.is_integer(kind) or pa.types.is_floating(kind) else f"of type {kind}"


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


def _all_pass(table: pa.Table, tests: list[_Test]) -> Mask:
    passes = np.ones(table.num_rows, np.bool_)
    for test in tests:
        at = table.schema.get_field_index(test.name)
        if at < 0 or test.passes is None:
            passes &= at < 0 and test.null_passes
            continue
        column = table.column(at)
        if pa.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        passes &= _as_mask(test.passes(column))
    return passes


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
    columns = {}
    for field in schema:
        at = table.schema.get_field_index(field.name)
        columns[field.name] = pa.nulls(table.num_rows, field.type) if at < 0 else _as_type(table.column(at), field)
    return pa.table(columns)


def _as_type(column: Any, field: pa.Field) -> Any:
    if column.type == field.type:
        return column
    if pa.types.is_string(field.type):
        return pa.array([value if value is None else as_text(value) for value in column.to_pylist()], pa.string())
    try:
        return column.cast(field.type, safe=False)
    except pa.ArrowException:
        raise Backpressure(f"attribute {field.name!r} was just written with another type: search again") from None


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
