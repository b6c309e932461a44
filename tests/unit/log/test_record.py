from __future__ import annotations

import struct
import tracemalloc

import google_crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import CorruptionError, Invalid
from penstock.log.record import (
    BODY_BYTES_MAX,
    HEADER,
    LARGE_BYTES,
    Index,
    Record,
    check_bodies,
    decode,
    encode,
    encode_pieces,
    encoded_size,
)


@given(
    bodies=st.lists(st.binary(max_size=100), max_size=5),
    salt=st.integers(0, 2**32 - 1),
    incarnation=st.integers(0, 2**32 - 1),
    first=st.integers(1, 2**63),
    kind=st.integers(1, 255),
    flags=st.integers(0, 255),
)
def test_what_is_encoded_is_decoded(
    bodies: list[bytes], salt: int, incarnation: int, first: int, kind: int, flags: int
) -> None:
    data = encode(bodies, salt=salt, incarnation=incarnation, first=first, synced=first - 1, kind=kind, flags=flags)
    assert len(data) == check_bodies(bodies)
    at = 0
    for index, body in enumerate(bodies, first):
        expected = Record(Index(index), incarnation, Index(first - 1), kind, flags, body)
        assert decode(data, at, salt=salt) == expected
        at += encoded_size(len(body))
    assert at == len(data)


def test_a_large_body_is_a_piece_of_its_own_and_not_a_copy() -> None:
    large = bytes(LARGE_BYTES + 3)
    bodies = [b"a", large, b"bb", b"", large]
    pieces = encode_pieces(bodies, salt=5, incarnation=1, first=1, synced=0)
    assert [piece is large for piece in pieces] == [False, True, False, True, False]
    assert b"".join(pieces) == encode(bodies, salt=5, incarnation=1, first=1, synced=0)
    assert decode(b"".join(pieces), encoded_size(1), salt=5).body == large


@given(data=st.binary(max_size=200), at=st.integers(-5, 220), salt=st.integers(0, 2**32 - 1))
def test_any_bytes_give_a_record_or_corruption(data: bytes, at: int, salt: int) -> None:
    try:
        decode(data, at, salt=salt, path="p", base=7)
    except CorruptionError as error:
        assert error.path == "p"
        assert error.offset == at + 7


@given(body=st.binary(max_size=60), data=st.data())
def test_any_flipped_bit_is_corruption(body: bytes, data: st.DataObject) -> None:
    encoded = encode([body], salt=9, incarnation=1, first=5, synced=4)
    bit = data.draw(st.integers(0, len(encoded) * 8 - 1))
    rotten = bytearray(encoded)
    rotten[bit // 8] ^= 1 << bit % 8
    with pytest.raises(CorruptionError):
        decode(bytes(rotten), 0, salt=9)


def test_a_declared_length_takes_no_memory() -> None:
    header = HEADER.pack(0, BODY_BYTES_MAX, 16, 0, 0, 1, 1, 0)
    tracemalloc.start()
    with pytest.raises(CorruptionError, match="cut short"):
        decode(header + bytes(100), 0, salt=0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100_000


def test_a_record_of_another_segment_never_passes() -> None:
    data = encode([b"recycled"], salt=1, incarnation=1, first=1, synced=0)
    for salt in (0, 2, 3, 2**32 - 1):
        with pytest.raises(CorruptionError, match="checksum"):
            decode(data, 0, salt=salt)


def test_a_sound_checksum_over_a_senseless_header_is_corruption() -> None:
    rest = struct.pack("<IBBHIQQ", 0, 16, 0, 0, 1, 5, 6)  # knew a later record to be synced
    data = struct.pack("<I", google_crc32c.extend(0, rest)) + rest
    with pytest.raises(CorruptionError, match="contradicts"):
        decode(data, 0, salt=0)


def test_bodies_are_checked_before_anything_is_written() -> None:
    with pytest.raises(Invalid, match="must be bytes, not str"):
        check_bodies(["text"])  # type: ignore[list-item]
