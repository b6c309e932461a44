"""Sealed bytes and wrapped keys: their bytes, what opens them, and what does not."""

from __future__ import annotations

import random

import pytest

from penstock.archive.master_keys import master_keys, unwrap, wrap
from penstock.archive.sealer import OVERHEAD_BYTES, ByteSealer
from penstock.archive.storage import WrappedKey
from penstock.errors import KeyMissing, WrongKey
from penstock.host.os_files import OsFileSystem

KEY, STORE = bytes(range(32)), bytes(range(16))
# Written by this version: a change of them makes stored bytes unreadable.
SEALED = bytes.fromhex("f5b165224a58b791df6af1d8303e61cd000000000000000093d9520d0332da5965e05f2fe22489c88a0efa4ce0")
WRAPPED = WrappedKey(
    3,
    bytes.fromhex("6ea687766eacfb9cf05e915f"),
    bytes.fromhex("f5eb857bb4c5f18d2a2e2eefd529f6336b4d97725ad5d1f3971c9d42cc042b018dbfcc6d3938e4503afe50140e994f5a"),
)


def test_bytes_of_this_version_are_read_for_ever() -> None:
    assert ByteSealer(KEY, random.Random(1)).seal(b"a row", b"context") == SEALED
    assert ByteSealer(KEY, random.Random(2)).open(SEALED, b"context") == b"a row"
    masters = master_keys({3: b"m" * 32}, OsFileSystem())
    assert unwrap(WRAPPED, masters, STORE, "users") == KEY


def test_only_the_key_and_the_context_open_what_was_sealed() -> None:
    one, other = ByteSealer(KEY, random.Random(1)), ByteSealer(b"x" * 32, random.Random(1))
    sealed = one.seal(b"a row", b"context")
    assert len(sealed) == len(b"a row") + OVERHEAD_BYTES
    assert one.open(sealed, b"another") is None
    assert other.open(sealed, b"context") is None
    for at in range(len(sealed)):
        damaged = bytearray(sealed)
        damaged[at] ^= 1
        assert one.open(bytes(damaged), b"context") is None
        assert one.open(sealed[:at], b"context") is None


def test_a_sealer_repeats_no_nonce_and_neither_do_two() -> None:
    chance = random.Random(3)
    nonces = {ByteSealer(KEY, chance).seal(b"", b"")[:24] for _ in range(50)}
    sealer = ByteSealer(KEY, chance)
    nonces |= {sealer.seal(b"", b"")[:24] for _ in range(50)}
    assert len(nonces) == 100


def test_bytes_of_many_earlier_openings_are_read() -> None:
    chance = random.Random(4)
    sealed = [ByteSealer(KEY, chance).seal(b"%d" % number, b"") for number in range(100)]
    reader = ByteSealer(KEY, chance)
    assert [reader.open(each, b"") for each in (*sealed, *sealed)] == [b"%d" % (each % 100) for each in range(200)]


def test_a_wrapped_key_opens_for_its_store_and_master_key_alone() -> None:
    masters = master_keys({1: b"1" * 32, 2: b"2" * 32}, OsFileSystem())
    assert masters is not None
    wrapped = wrap(KEY, masters, masters.current(), STORE, random.Random(1))
    assert wrapped.version == 2
    assert unwrap(wrapped, masters, STORE, "users") == KEY
    with pytest.raises(WrongKey):
        unwrap(wrapped, masters, bytes(16), "users")
    with pytest.raises(WrongKey):
        unwrap(wrapped, master_keys({2: b"1" * 32}, OsFileSystem()), STORE, "users")
    with pytest.raises(WrongKey):  # not even under another version
        unwrap(WrappedKey(1, wrapped.nonce, wrapped.wrapped), masters, STORE, "users")
    with pytest.raises(KeyMissing):
        unwrap(wrapped, master_keys({1: b"2" * 32}, OsFileSystem()), STORE, "users")
    with pytest.raises(KeyMissing):
        unwrap(wrapped, None, STORE, "users")
    assert "2222" not in repr(masters)
