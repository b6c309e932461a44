"""Records to bytes and back.

A value is `record_version` (u16, big-endian) and the MessagePack of an array: the record's fields in their order. Equal
records give equal bytes; bytes that do not decode to a sound record, to the last one, are corrupt.

Thread: any.
"""

from __future__ import annotations

import struct
from typing import Generic, TypeVar

import msgspec

from penstock.errors import CorruptionError, Invalid, UnsupportedVersion
from penstock.manifest.records import Record

_VERSION = struct.Struct(">H")

R = TypeVar("R", bound=Record)


class RecordCodec(Generic[R]):
    """Values of one table, to bytes and back."""

    def __init__(self, record: type[R], version: int = 1) -> None:
        self.version = version
        self._prefix = _VERSION.pack(version)
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(record).decode

    def encode(self, record: R) -> bytes:
        """The bytes of a record; `Invalid` if a number does not fit."""
        try:
            return self._prefix + self._encode(record)
        except OverflowError:
            raise Invalid(f"{record!r} holds a number that does not fit 64 bits") from None

    def decode(self, data: bytes, where: str, key: bytes | None = None) -> R:
        """The record in a value; `where` and the key name it in errors."""
        try:
            if data.startswith(self._prefix):
                return self._decode(data[_VERSION.size :])
        except (msgspec.DecodeError, Invalid, UnicodeDecodeError) as error:
            raise CorruptionError(_place(where, key), _VERSION.size, f"the record does not decode ({error})") from None
        where = _place(where, key)
        version = record_version(data, where)
        if version > self.version:
            raise UnsupportedVersion(f"{where} has record version {version}, this Penstock reads {self.version}")
        raise CorruptionError(where, 0, f"record version {version} was not migrated to {self.version}")


def _place(where: str, key: bytes | None) -> str:
    return where if key is None else f"{where} key {key.hex()}"


def record_version(data: bytes, where: str) -> int:
    """The version a value was written with."""
    if len(data) < _VERSION.size:
        raise CorruptionError(where, 0, f"a value of {len(data)} bytes has no record version")
    return int(_VERSION.unpack_from(data)[0])
