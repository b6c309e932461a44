"""Sections that are logs of parts (see `part_log`), as bytes:

    version u8, 3 zero bytes, parts u32
    for each part:   type u8, 3 zero bytes, length u32, body

A kind encodes and decodes the bodies.

Thread: pure functions.
Invariant: malformed bytes raise `CorruptionError`, or `Invalid` if another process sent them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec

from penstock.errors import CorruptionError, Invalid
from penstock.partition.part_log import PartLog

PartSection = TypeVar("PartSection", bound=PartLog[Any])

HEADER = struct.Struct("<BxxxI")
PART = struct.Struct("<BxxxI")


def encode_parts(version: int, parts: Sequence[tuple[int, Sequence[bytes | memoryview]]]) -> bytes:
    """Encode parts, each as its type and the pieces of its body; a view is one of bytes."""
    pieces: list[bytes | memoryview] = [HEADER.pack(version, len(parts))]
    for number, body in parts:
        pieces.append(PART.pack(number, sum(map(len, body))))
        pieces += body
    return b"".join(pieces)


def decode_parts(payload: bytes, version: int, decoders: Mapping[int, Callable[[memoryview], Any]]) -> Iterable[Any]:
    """Return the parts, decoded by type. Requires: within `decoding`."""
    stored_version, count = HEADER.unpack_from(payload)
    if stored_version != version:
        raise ValueError(f"its version is {stored_version}")
    at, view = HEADER.size, memoryview(payload)
    if count > (len(payload) - at) // PART.size:
        raise ValueError("it is cut short")
    parts: list[Any] = []
    for _ in range(count):
        number, size = PART.unpack_from(payload, at)
        at += PART.size
        if at + size > len(payload):
            raise ValueError("it is cut short")
        parts.append(decoders[number](view[at : at + size]))
        at += size
    if at != len(payload):
        raise ValueError("its length is wrong")
    return parts


@contextmanager
def decoding(kind: str) -> Iterator[None]:
    """Raise `CorruptionError` for whatever decoding a section of a kind meets in malformed bytes."""
    try:
        yield
    except CorruptionError:
        raise
    except (ValueError, KeyError, struct.error, msgspec.DecodeError) as error:
        raise CorruptionError(f"{kind} section", 0, f"it does not decode ({error})") from None


def receive_parts(kind: str, decode: Callable[[bytes], PartSection], payload: bytes) -> PartSection:
    """Decode a section from another process; `Invalid` if it is malformed or empty. Its parts are yet to be checked."""
    try:
        section = decode(payload)
    except CorruptionError as error:
        raise Invalid(f"a section of a {kind} table is malformed: {error.reason}") from None
    if not section.log:
        raise Invalid(f"a section of a {kind} table holds nothing")
    return section
