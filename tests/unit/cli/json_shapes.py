"""The shape of JSON that a command prints: names and types of its fields, nothing missing and nothing more.

A shape is a type (`int`, `str | None`, `datetime`), a list with the shape of its elements, or a dictionary of fields by
name. `...` as the name of a field allows others beside those named.
"""

from __future__ import annotations

from datetime import datetime
from functools import reduce
from operator import or_
from typing import Annotated, Any, TypeAlias

import msgspec

Shape: TypeAlias = Any
Moment = Annotated[datetime, msgspec.Meta(tz=True)]  # ISO 8601, with its zone
Natural = Annotated[int, msgspec.Meta(ge=0)]
Plain: Any = reduce(or_, (bool, int, float, str, None))
Data = str | dict[str, str]  # bytes: as text, or as {"hex": …}


def mismatch(shape: Shape, line: bytes) -> str:
    """Return what is wrong with a line of JSON; empty if it has the shape."""
    try:
        msgspec.json.decode(line, type=_type_of(shape))
    except msgspec.DecodeError as error:
        return str(error)
    return ""


def _type_of(shape: Shape) -> Any:
    if isinstance(shape, list):
        return list[_type_of(shape[0])]  # type: ignore[misc]
    if not isinstance(shape, dict):
        return shape
    names = [name for name in shape if name is not ...]
    fields = [(f"field_{number}", _type_of(shape[name])) for number, name in enumerate(names)]
    json_names = {f"field_{number}": name for number, name in enumerate(names)}
    return msgspec.defstruct("Fields", fields, rename=json_names, forbid_unknown_fields=... not in shape)
