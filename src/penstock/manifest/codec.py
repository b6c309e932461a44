"""Encoding of records.

A value is `record_version` (u16, big-endian), a CRC32C (u32, big-endian) and the MessagePack of an array: the record's
fields in order. The checksum covers the names of table and row too, so that a row that appears under another key is not
taken for that one. Values of version 1 have no checksum. Equal rows have equal bytes; bytes that do not decode, to the
last one, are corrupt.

Thread: any.
"""

from __future__ import annotations

import struct
from typing import Generic, TypeVar

import msgspec
from google_crc32c import value as crc32c

from penstock.errors import CorruptionError, Invalid, UnsupportedVersion
from penstock.manifest.records import ManifestRecord

VERSION = 2  # of all records
_VERSION = struct.Struct(">H")
_HEAD = struct.Struct(">HI")  # version, checksum: from version 2 on

R = TypeVar("R", bound=ManifestRecord)


def pack_value(table: str, key: bytes, version: int, payload: bytes) -> bytes:
    """Encode the value of a row."""
    if version == 1:
        return _VERSION.pack(version) + payload
    return _HEAD.pack(version, crc32c(b"%b %d %b" % (table.encode(), version, key) + payload)) + payload


def unpack_value(table: str, key: bytes, value: bytes, where: str) -> tuple[int, bytes]:
    """Return version and payload of a row's value; `CorruptionError` if its checksum does not match."""
    version = record_version(value, where)
    if version == 1:
        return 1, value[_VERSION.size :]
    payload = value[_HEAD.size :]
    if pack_value(table, key, version, payload) != value:
        raise CorruptionError(where, 0, "the record does not match its checksum")
    return version, payload


def record_version(value: bytes, where: str) -> int:
    """Return the version of a value."""
    if len(value) < _VERSION.size:
        raise CorruptionError(where, 0, f"a value of {len(value)} bytes has no record version")
    return int(_VERSION.unpack_from(value)[0])


class RecordCodec(Generic[R]):
    """The encoding of one table's values."""

    def __init__(self, table: str, record: type[R], version: int = VERSION) -> None:
        self.version = version
        self._table = table
        self._where = f"manifest table {table}"
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(record).decode

    def encode(self, key: bytes, record: R) -> bytes:
        """Encode the value of a row; `Invalid` if a number does not fit."""
        try:
            return pack_value(self._table, key, self.version, self._encode(record))
        except OverflowError:
            raise Invalid(f"{record!r} has a number that does not fit 64 bits") from None

    def decode(self, key: bytes, value: bytes) -> R:
        """Decode the record in a row's value."""
        if not value.startswith(_VERSION.pack(self.version)):
            raise self._other_version(key, value)
        _, payload = unpack_value(self._table, key, value, self._where)
        try:
            return self._decode(payload)
        except (msgspec.DecodeError, Invalid, UnicodeDecodeError) as error:
            reason = f"the record does not decode ({error})"
            raise CorruptionError(self._location(key), _HEAD.size, reason) from None

    def _other_version(self, key: bytes, value: bytes) -> Exception:
        where = self._location(key)
        version = record_version(value, where)
        if value[_VERSION.size :] == pack_value(self._table, key, self.version, value[_HEAD.size :])[_VERSION.size :]:
            return CorruptionError(where, 0, f"record version {version} does not match the checksum")
        if version > self.version:
            return UnsupportedVersion(f"{where} has record version {version}, this Penstock reads {self.version}")
        return CorruptionError(where, 0, f"record version {version} was not migrated to {self.version}")

    def _location(self, key: bytes) -> str:
        return f"{self._where} key {key.hex()}"
