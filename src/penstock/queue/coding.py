"""The bodies of records of a compressed or encrypted queue.

A body keeps its prefix (LSN, record time, number of messages, flags), with flags that say how the rest is coded:
compressed (the size of the rest u32, then its codec's bytes), and then sealed with the table's key. Sealed
bytes are bound to their shard and prefix, and open nowhere else; they are not bound to a file, so a record can be
copied to the next file unchanged.

Thread: any.
Invariant: nothing is decompressed before its declared size is checked.
"""

from __future__ import annotations

import struct
from typing import Any

from penstock.archive.chunk import CODECS, PLAIN
from penstock.archive.framed import arrow_codec
from penstock.archive.sealer import ByteSealer
from penstock.archive.storage import PLAIN_FILES, FileStorage
from penstock.archive.table_keys import lent_keys
from penstock.errors import CorruptionError, KeyMissing
from penstock.host.randomness import system_random
from penstock.journal.partitions import PartitionId, partition_id, table_of
from penstock.log.record import BODY_BYTES_MAX

PREFIX = struct.Struct("<QqIHH")  # lsn, record time, count, flags, reserved
assert PREFIX.size == 24
FLAG_ZSTD, FLAG_LZ4, FLAG_SEALED = 16, 32, 64
FLAGS_CODED = FLAG_ZSTD | FLAG_LZ4 | FLAG_SEALED
_CODEC_FLAGS = {"zstd": FLAG_ZSTD, "lz4": FLAG_LZ4}
_SIZE = struct.Struct("<I")
_CONTEXT = struct.Struct("<8sQ")  # a label, the partition; the prefix follows
_LABEL = b"messages"
COMPRESSED_BYTES_MIN = 256  # of a body: less is not worth it


class BodyCoding:
    """Codes and decodes the bodies of one shard's records."""

    def __init__(self, storage: FileStorage, partition: int) -> None:
        self._storage = storage
        self._partition = partition
        self._sealer = storage.sealer

    def encode(self, body: bytes) -> bytes:
        """Return a body coded as its table wants it now."""
        sealing = self._storage.sealing(0)
        if sealing is PLAIN:
            return body
        lsn, time_us, count, flags, reserved = PREFIX.unpack_from(body)
        rest: bytes | memoryview = memoryview(body)[PREFIX.size :]
        if sealing.codec != "none" and len(rest) >= COMPRESSED_BYTES_MIN:
            packed = bytes(arrow_codec(CODECS.index(sealing.codec), sealing.level).compress(bytes(rest)))
            if len(packed) + _SIZE.size < len(rest):
                flags |= _CODEC_FLAGS[sealing.codec]
                rest = _SIZE.pack(len(rest)) + packed
        if self._sealer is not None:
            flags |= FLAG_SEALED
        prefix = PREFIX.pack(lsn, time_us, count, flags, reserved)
        if self._sealer is not None:
            rest = self._sealer.seal(rest, self._context(prefix))
        return prefix + rest

    def decode(self, body: bytes, path: str, offset: int) -> bytes:
        """Return the body that was coded; `path` and `offset` are for error messages only."""
        lsn, time_us, count, flags, reserved = PREFIX.unpack_from(body)
        if self._sealer is not None and not flags & FLAG_SEALED:  # an encrypted table never wrote this
            raise CorruptionError(path, offset, "these messages are not encrypted, and their table is")
        if not flags & FLAGS_CODED:
            return body
        rest = body[PREFIX.size :]
        if flags & FLAG_SEALED:
            if self._sealer is None:
                raise KeyMissing(f"{path} is encrypted: open the store with keys=")
            opened = self._sealer.open(rest, self._context(body[: PREFIX.size]))
            if opened is None:
                raise CorruptionError(path, offset, "these messages were not sealed with their table's key")
            rest = opened
        if flags & (FLAG_ZSTD | FLAG_LZ4):
            rest = _decompressed(rest, 1 if flags & FLAG_ZSTD else 2, path, offset)
        return PREFIX.pack(lsn, time_us, count, flags & ~FLAGS_CODED, reserved) + rest

    def _context(self, prefix: bytes) -> bytes:
        return _CONTEXT.pack(_LABEL, self._partition) + prefix


def _decompressed(data: bytes, codec: int, path: str, offset: int) -> bytes:
    if len(data) < _SIZE.size:
        raise CorruptionError(path, offset, "compressed messages are cut short")
    (size,) = _SIZE.unpack_from(data)
    if size > BODY_BYTES_MAX:
        raise CorruptionError(path, offset, f"messages that declare {size} bytes are more than a record can hold")
    try:  # into exactly `size` bytes
        body: Any = bytes(arrow_codec(codec).decompress(data[_SIZE.size :], decompressed_size=size))
    except OSError as error:
        raise CorruptionError(path, offset, f"messages do not decompress ({error})") from None
    if len(body) != size:
        raise CorruptionError(path, offset, f"messages decompress to {len(body)} bytes, not {size}")
    return bytes(body)


PLAIN_CODING = BodyCoding(PLAIN_FILES, 0)


def partition_of(folder: str) -> PartitionId:
    """Return the partition whose files are in a folder of a store, by its last two names: the table and the shard."""
    table, shard = folder.rstrip("/").split("/")[-2:]
    return partition_id(int(table), int(shard)) if table.isdecimal() and shard.isdecimal() else PartitionId(0)


def lent_coding(identity: bytes, partition: PartitionId, encrypted: bool | None = None) -> BodyCoding:
    """Return the coding of a shard in a process that only reads its files, with the key that was lent to it.

    `encrypted`: whether its table is encrypted (then `KeyMissing` if no key was lent); None: if a key was lent.
    """
    for keys in lent_keys(identity, table_of(partition)) if encrypted is not False else ():
        try:
            sealer = ByteSealer(keys.key(keys.current()), system_random())
        except KeyMissing:
            continue  # of another copy of the store, or the table is not encrypted
        return BodyCoding(FileStorage(keys=keys, sealer=sealer), partition)
    if encrypted:
        raise KeyMissing(f"table {table_of(partition)} is encrypted, and this process has no key for its files")
    return PLAIN_CODING
