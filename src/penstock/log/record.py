"""The bytes of one record.

A record is a header of 32 bytes, a body, and zeros up to a multiple of 8. The checksum covers everything after itself,
padding included, and starts from a random salt of the segment, so that neither a record of another segment nor a body
that looks like a record is taken for one.

Thread: pure functions.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NewType

import google_crc32c
import msgspec

from penstock.errors import CorruptionError, Invalid

Index = NewType("Index", int)

HEADER = struct.Struct("<IIBBHIQQ")  # checksum, length, kind, flags, reserved, incarnation, index, synced
assert HEADER.size == 32
_REST = struct.Struct("<IBBHIQQ")  # the header without its checksum
_CHECKSUM = struct.Struct("<I")
assert _CHECKSUM.size + _REST.size == HEADER.size

BODY_BYTES_MAX = 256 << 20
INCARNATION_MAX = (1 << 32) - 1

# Kinds of record. 0 is never written: zero-filled space must not look like a record. 1 to 15 are the log's own.
KIND_SEGMENT = 1
KIND_SEAL = 2
KIND_DATA = 16

LARGE_BYTES = 1 << 20  # a body of this size is written on its own
COPIED_BYTES_MAX = 4_096  # a record from this size on is copied once, not three times
_PADDING = tuple(bytes(n) for n in range(8))


class Record(msgspec.Struct, frozen=True, gc=False):
    """A record as read; `(incarnation, index)` identifies it for good."""

    index: Index
    incarnation: int
    synced: Index  # the last index known to be synced when this record was written
    kind: int
    flags: int
    body: bytes


def encoded_size(body_bytes: int) -> int:
    """Return the size of a record with a body of `body_bytes`."""
    return HEADER.size + body_bytes + (-body_bytes & 7)


def checksum(salt: int, *covered: bytes) -> int:
    """Return a record's checksum over everything after it, passed whole or in pieces."""
    for piece in covered:
        salt = google_crc32c.extend(salt, piece)
    return salt


def encode(bodies: Sequence[bytes], **header: int) -> bytes:
    """Encode consecutive records; for the header see `encode_pieces`."""
    return b"".join(encode_pieces(bodies, **header))


def encode_pieces(
    bodies: Sequence[bytes],
    *,
    salt: int,
    incarnation: int,
    first: int,
    synced: int,
    kind: int = KIND_DATA,
    flags: int = 0,
) -> list[bytes]:
    """Encode consecutive records, numbered from `first`, as pieces: a large body is a piece of its own, not copied."""
    pieces: list[bytes] = []
    parts: list[bytes] = []  # of the next piece
    for index, body in enumerate(bodies, first):
        length = len(body)
        rest, padding = _REST.pack(length, kind, flags, 0, incarnation, index, synced), _PADDING[-length & 7]
        if length >= LARGE_BYTES:
            sum_ = google_crc32c.extend(google_crc32c.extend(google_crc32c.extend(salt, rest), body), padding)
            pieces += (b"".join((*parts, _CHECKSUM.pack(sum_), rest)), body)
            parts = [padding]
        else:
            rest += body + padding
            parts += (_CHECKSUM.pack(google_crc32c.extend(salt, rest)), rest)
    if last := b"".join(parts):
        pieces.append(last)
    return pieces


def encode_one(body: bytes, salt: int, incarnation: int, index: int, synced: int) -> bytes:
    """Encode one data record, as `encode_pieces` does, only faster: nearly every commit is one."""
    length = len(body)
    head, padding = _REST.pack(length, KIND_DATA, 0, 0, incarnation, index, synced), _PADDING[-length & 7]
    if length >= COPIED_BYTES_MAX:
        sum_ = google_crc32c.extend(google_crc32c.extend(google_crc32c.extend(salt, head), body), padding)
        return b"".join((_CHECKSUM.pack(sum_), head, body, padding))
    rest = head + body + padding
    return _CHECKSUM.pack(google_crc32c.extend(salt, rest)) + rest


def decode(buffer: bytes, at: int, *, salt: int, path: str = "", base: int = 0) -> Record:
    """Decode the record at `buffer[at]`; `CorruptionError` if there is none.

    `path` and `base` (the file offset of `buffer[0]`) are for the message only.
    """
    room = len(buffer) - at
    if at < 0 or room < HEADER.size:
        raise CorruptionError(path, base + at, "a record's header is cut short")
    stored, length, kind, flags, reserved, incarnation, index, synced = HEADER.unpack_from(buffer, at)
    if kind == 0:
        raise CorruptionError(path, base + at, "there is no record")
    size = encoded_size(length)
    if length > BODY_BYTES_MAX or size > room:
        raise CorruptionError(path, base + at, f"a record's body of {length} bytes is cut short")
    if checksum(salt, buffer[at + 4 : at + size]) != stored:
        raise CorruptionError(path, base + at, "a record's checksum does not match")
    if reserved or synced > index:
        raise CorruptionError(path, base + at, "a record's header contradicts itself")
    start = at + HEADER.size
    return Record(index, incarnation, synced, kind, flags, buffer[start : start + length])


def check_bodies(bodies: Sequence[bytes]) -> int:
    """Return the size of the records of these bodies; `Invalid` if one cannot be written."""
    total = 0
    for body in bodies:
        if not isinstance(body, bytes):
            raise Invalid(f"a record's body must be bytes, not {type(body).__name__}")
        if len(body) > BODY_BYTES_MAX:
            raise Invalid(f"a record's body has {len(body)} bytes: at most {BODY_BYTES_MAX} are allowed")
        total += HEADER.size + len(body) + (-len(body) & 7)  # `encoded_size`, without a call
    return total
