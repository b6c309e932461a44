"""Protobuf's wire format: the fields of a message, read in place.

Strangers send these bytes. A library turns two of them into an object of a hundred, so bodies are walked here first:
remote write is decoded without such objects, and those of OTLP are counted before the library builds them.

Thread: pure functions.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from penstock.errors import Invalid

VARINT, FIXED64, BLOCK, FIXED32 = 0, 1, 2, 5  # the type of a field: the lowest three bits of its tag
FIELDS_MAX = 4_000_000  # of one body
_VARINT_BYTES_MAX = 10


class MalformedMessage(ValueError):
    """The bytes are not a message."""


def read_varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """Return an unsigned number and the position after it."""
    value = shift = 0
    for position in range(at, min(end, at + _VARINT_BYTES_MAX)):
        byte = data[position]
        value |= (byte & 127) << shift
        if byte < 128:
            return value & 0xFFFF_FFFF_FFFF_FFFF, position + 1
        shift += 7
    raise MalformedMessage("a number is cut short or too long")


class FieldBudget:
    """How many fields of one body are still read: two bytes may be one, and reading it takes half a microsecond."""

    __slots__ = ("left",)

    def __init__(self) -> None:
        self.left = FIELDS_MAX


def read_fields(data: bytes, at: int, end: int, budget: FieldBudget) -> Iterator[tuple[int, int, int, int]]:
    """Yield (tag, begin, start, end) of each field: it begins at `begin`, its content is from `start` to `end`.

    Of a varint, `start` is its value.
    """
    while at < end:
        budget.left -= 1
        if budget.left < 0:
            raise Invalid(f"the body has more than {FIELDS_MAX} fields: send less at once")
        begin = at
        tag = data[at]
        if tag < 128:
            at += 1
        else:
            tag, at = read_varint(data, at, end)
        kind = tag & 7
        if kind == BLOCK:
            size = data[at] if at < end else 0
            if at < end and size < 128:
                at += 1
            else:
                size, at = read_varint(data, at, end)
        elif kind == VARINT:
            start, at = read_varint(data, at, end)
            yield tag, begin, start, at
            continue
        elif kind == FIXED64:
            size = 8
        elif kind == FIXED32:
            size = 4
        else:
            raise MalformedMessage(f"a field has the type {kind}")
        if tag < 8 or size > end - at:
            raise MalformedMessage("a field has no number, or is cut short")
        yield tag, begin, at, at + size
        at += size


def signed(value: int) -> int:
    """Return a varint as a signed number."""
    return value - (1 << 64) if value >> 63 else value


def check_messages(data: bytes, descriptor: Any, blocks_max: int) -> None:
    """Raise `Invalid` if a message of a described type has more texts and messages in it than allowed, at any depth."""
    budget = FieldBudget()
    waiting = [(descriptor, 0, len(data))]
    count = 0
    while waiting:
        kind, at, end = waiting.pop()
        inner = _messages_in(kind)
        for tag, _, start, stop in read_fields(data, at, end, budget):
            if tag & 7 == BLOCK:
                count += 1
                if count > blocks_max:
                    raise Invalid(f"the body has more than {blocks_max} texts and messages: send less at once")
                child = inner.get(tag >> 3)
                if child is not None and stop > start:
                    waiting.append((child, start, stop))


@lru_cache(256)
def _messages_in(descriptor: Any) -> dict[int, Any]:
    """Return the fields of a message that are messages: number to descriptor."""
    return {field.number: field.message_type for field in descriptor.fields if field.message_type is not None}
