"""Framed containers: 64 KiB blocks, each compressed (zstd, lz4) and then encrypted (AES-256-GCM), and a table of them.

Thread: a writer belongs to one thread; a chunk may be read by any number.
Invariants: (1) a chunk appears under its name whole and synced, or not at all. (2) no block is decoded before its
stored and declared sizes are checked. (3) an encrypted block can be decrypted only at its own position in its own
chunk: store, chunk id, block number and, for the last block, the block count are authenticated with it.
"""

from __future__ import annotations

import struct
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from penstock.archive.chunk import CODECS, ChunkIdentity, KeyRing, Sealing, check_key, crc32c
from penstock.archive.plain import TemporaryFile
from penstock.archive.table_keys import lent_keys
from penstock.errors import CorruptionError, Invalid, KeyMissing, UnsupportedVersion, WrongKey
from penstock.host import threads
from penstock.host.file_errors import translate_os_errors
from penstock.host.files import Buffer, File, FileSystem
from penstock.host.mappings import anonymous_memory
from penstock.host.randomness import Random

BLOCK_BYTES = 1 << 16
CACHED_BLOCKS = 64

MAGIC = b"PENCHNK1"
VERSION = 1
# magic, version, codec, cipher, block bytes, store, chunk id, content bytes, blocks, table checksum, key version,
# key nonce, wrapped key, tag of the table; then the checksum of all this.
_HEADER = struct.Struct("<8sHBBI16sQQIIQ12s48s16s")
_SUM = struct.Struct("<I")
HEADER_BYTES = _HEADER.size + _SUM.size
_ENTRY = struct.Struct("<II")  # stored bytes (top bit: the codec did not help, the block is raw), checksum of them
_RAW = 1 << 31
_TAG_BYTES = 16
_TABLE_BLOCK = 0xFFFFFFFF  # the block number under which the table is authenticated
_BLOCKS_MAX = _TABLE_BLOCK - 1


class DecodedMemory:
    """The memory that decoded chunks may keep, in this process."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self._lock = threads.lock("archive.decoded")
        self._used = 0  # guarded by _lock

    def reserve(self, size: int) -> bool:
        """Take memory for a chunk; False if there is not enough left."""
        with self._lock:
            if self._used + size > self.bytes_max:
                return False
            self._used += size
            return True

    def release(self, size: int) -> None:
        """Give back what `reserve` took."""
        with self._lock:
            self._used -= size


decoded_memory = DecodedMemory(256 << 20)


class _Cipher:
    """AES-256-GCM with a chunk's data key. A key encrypts one chunk only, so block numbers serve as nonces."""

    def __init__(self, data_key: bytes, identity: ChunkIdentity, codec: int) -> None:
        self._aead = aes_gcm(data_key)
        self._context = struct.pack("<16sQB", identity.store, identity.chunk_id, codec)

    def _nonce_and_context(self, block: int, count: int) -> tuple[bytes, bytes]:
        return block.to_bytes(12, "big"), self._context + struct.pack("<II", block, count)

    def seal(self, data: bytes, block: int, count: int, extra: bytes = b"") -> bytes:
        nonce, context = self._nonce_and_context(block, count)
        sealed: bytes = self._aead.encrypt(nonce, data, context + extra)
        return sealed

    def open(self, data: bytes, block: int, count: int, extra: bytes = b"") -> bytes | None:
        """Decrypt a block; None if it was not encrypted at this position with this key."""
        from cryptography.exceptions import InvalidTag

        nonce, context = self._nonce_and_context(block, count)
        try:
            opened: bytes = self._aead.decrypt(nonce, data, context + extra)
        except InvalidTag:
            return None
        return opened


def aes_gcm(key: bytes) -> Any:
    """Return AES-256-GCM with a key; `Invalid` if the package for it is not installed."""
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError:
        raise Invalid(
            "encrypted tables need the package cryptography: install it with pip install 'penstock[crypto]'"
        ) from None
    return AESGCM(key)


def arrow_codec(codec: int, level: int = 1) -> Any:
    """Return Arrow's implementation of a codec, by its number in CODECS."""
    from pyarrow import Codec as ArrowCodec

    return ArrowCodec("zstd", compression_level=level) if codec == 1 else ArrowCodec("lz4_raw")


@dataclass(frozen=True, slots=True)
class _Header:
    codec: int
    cipher: int
    identity: ChunkIdentity
    size: int
    blocks: int
    table_sum: int
    key_version: int
    key_nonce: bytes
    wrapped: bytes
    table_tag: bytes

    @property
    def key(self) -> int:
        """The number of the key that the chunk is encrypted with; 0 if it is not."""
        return self.key_version if self.cipher else 0

    def pack(self) -> bytes:
        head = _HEADER.pack(
            MAGIC, VERSION, self.codec, self.cipher, BLOCK_BYTES, self.identity.store, self.identity.chunk_id,
            self.size, self.blocks, self.table_sum, self.key_version, self.key_nonce, self.wrapped, self.table_tag,
        )  # fmt: skip
        return head + _SUM.pack(_checksum(head))

    @staticmethod
    def read(file: File, file_bytes: int) -> _Header:
        raw = file.pread(HEADER_BYTES, 0)
        if len(raw) < HEADER_BYTES:
            raise CorruptionError(file.path, len(raw), "the file ends inside its header")
        head = raw[: _HEADER.size]
        fields = _HEADER.unpack(head)
        if fields[1] != VERSION:
            raise UnsupportedVersion(f"{file.path} has container version {fields[1]}: open it with a newer Penstock")
        if crc32c is not None and crc32c(head) != _SUM.unpack(raw[_HEADER.size :])[0]:
            raise CorruptionError(file.path, 0, "the header's checksum does not match")
        _, _, codec, cipher, block_bytes, store, chunk_id, size, blocks, *rest = fields
        valid = codec < len(CODECS) and cipher < 2 and block_bytes == BLOCK_BYTES
        if not valid or blocks != -(-size // BLOCK_BYTES) or HEADER_BYTES + blocks * _ENTRY.size > file_bytes:
            raise CorruptionError(file.path, 0, "the header does not fit the file")
        return _Header(codec, cipher, ChunkIdentity(store=store, chunk_id=chunk_id), size, blocks, *rest)


def _checksum(data: bytes) -> int:
    if crc32c is None:
        raise Invalid("writing chunks needs the package google-crc32c: install it with pip install google-crc32c")
    return crc32c(data)


class FramedWriter:
    """Writes content as compressed and encrypted blocks."""

    def __init__(self, fs: FileSystem, path: str, identity: ChunkIdentity, sealing: Sealing) -> None:
        self._identity = identity
        self._codec = CODECS.index(sealing.codec)
        self._compress = arrow_codec(self._codec, sealing.level).compress if self._codec else None
        self._cipher: _Cipher | None = None
        self._wrapping = (0, bytes(12), bytes(48))
        if sealing.keys is not None:
            data_key = sealing.random.randbytes(32)
            self._cipher = _Cipher(data_key, identity, self._codec)
            self._wrapping = _wrap(data_key, sealing.keys, identity, sealing.random)
        self._out = TemporaryFile(fs, path)
        self._at = HEADER_BYTES
        self._pending = bytearray()
        self._entries = bytearray()
        self._stored: list[bytes] = []
        self._blocks = 0
        self._size = 0

    def write(self, data: Buffer) -> None:
        self._pending += data
        # The last block is kept back: it is encrypted with the block count, which only `finish` knows.
        whole = (len(self._pending) - 1) // BLOCK_BYTES
        for i in range(whole):
            self._block(bytes(self._pending[i * BLOCK_BYTES : (i + 1) * BLOCK_BYTES]), last=False)
        if whole > 0:
            del self._pending[: whole * BLOCK_BYTES]
            self._drain()

    def _block(self, data: bytes, *, last: bool) -> None:
        if self._blocks >= _BLOCKS_MAX:
            raise Invalid("a chunk has at most 2**32 - 2 blocks: write a smaller one")
        self._size += len(data)
        flag = 0
        if self._compress is not None:
            packed = bytes(self._compress(data))
            if len(packed) < len(data):
                data = packed
            else:
                flag = _RAW
        if self._cipher is not None:
            data = self._cipher.seal(data, self._blocks, self._blocks + 1 if last else 0, bytes([flag >> 31]))
        self._entries += _ENTRY.pack(len(data) | flag, _checksum(data))
        self._stored.append(data)
        self._blocks += 1

    def _drain(self) -> None:
        data = b"".join(self._stored)
        self._stored = []
        self._out.file.pwrite(data, self._at)
        self._at += len(data)

    def finish(self) -> int:
        if self._pending:
            self._block(bytes(self._pending), last=True)
            self._pending.clear()
        table = bytes(self._entries)
        tag = bytes(_TAG_BYTES)
        if self._cipher is not None:
            tag = self._cipher.seal(b"", _TABLE_BLOCK, self._blocks, table + struct.pack("<Q", self._size))
        self._stored.append(table)
        self._drain()
        header = _Header(
            self._codec, int(self._cipher is not None), self._identity, self._size, self._blocks, _checksum(table),
            *self._wrapping, tag,
        )  # fmt: skip
        self._out.file.pwrite(header.pack(), 0)
        self._out.publish()
        return self._at

    def abort(self) -> None:
        self._out.abort()


class StoredBlocks:
    """The blocks of a framed chunk as they are in its file: none is used before its checksum matched."""

    def __init__(self, file: File, file_bytes: int) -> None:
        self._file = file
        self.header = header = _Header.read(file, file_bytes)
        self.table_at = table_at = file_bytes - header.blocks * _ENTRY.size
        self.table = file.pread(header.blocks * _ENTRY.size, table_at)
        if crc32c is not None and crc32c(self.table) != header.table_sum:
            raise CorruptionError(file.path, table_at, "the block table's checksum does not match")
        self.entries = list(_ENTRY.iter_unpack(self.table))
        self.starts = [HEADER_BYTES]
        for stored, _ in self.entries:
            if (stored & ~_RAW) > BLOCK_BYTES + _TAG_BYTES:
                raise CorruptionError(file.path, table_at, "a block is longer than a block can be")
            self.starts.append(self.starts[-1] + (stored & ~_RAW))
        if self.starts[-1] != table_at:
            raise CorruptionError(file.path, table_at, "the blocks do not fill the file")

    def read(self, number: int) -> bytes:
        """Return the bytes of a block."""
        at, (stored, checksum) = self.starts[number], self.entries[number]
        with translate_os_errors():
            data = self._file.pread(stored & ~_RAW, at)
        if len(data) != stored & ~_RAW or (crc32c is not None and crc32c(data) != checksum):
            raise CorruptionError(self._file.path, at, f"block {number} is not what was written")
        return data


class FramedChunk:
    """Content decoded block by block: into memory that stays while it is open, or into a cache of a few blocks."""

    lazy = True

    def __init__(
        self, file: File, file_bytes: int, keys: KeyRing | None, *, key: int | None = None, resident: bool = False
    ) -> None:
        self._file = file
        self._blocks = StoredBlocks(file, file_bytes)
        self._header = header = self._blocks.header
        check_key(file.path, header.key, key)
        self._decompress = arrow_codec(header.codec).decompress if header.codec else None
        self._cipher = _unwrap(header, file.path, keys) if header.cipher else None
        if self._cipher is not None:
            extra = self._blocks.table + struct.pack("<Q", header.size)
            if self._cipher.open(header.table_tag, _TABLE_BLOCK, header.blocks, extra) is None:
                at = self._blocks.table_at
                raise CorruptionError(file.path, at, "the block table was not authenticated with this key")
        self._lock = threading.Lock()
        self._cache: OrderedDict[int, bytes] = OrderedDict()  # guarded by _lock
        self._decoded = bytearray(header.blocks)  # one flag per block of `_resident`
        self._resident: Any = None  # memory as large as the content; what was not decoded yet takes no space
        if resident and header.size and decoded_memory.reserve(header.size):
            self._resident = anonymous_memory(header.size)

    @property
    def path(self) -> str:
        return self._file.path

    @property
    def size(self) -> int:
        return self._header.size

    @property
    def identity(self) -> ChunkIdentity:
        return self._header.identity

    @property
    def key(self) -> int:
        return self._header.key

    @property
    def view(self) -> memoryview | None:
        return None if self._resident is None else memoryview(self._resident)

    def read(self, start: int, end: int) -> memoryview:
        first, last = self._blocks_of(start, end)
        resident = self._resident
        if resident is not None:
            number = self._decoded.find(0, first, last)
            while number >= 0:
                block = self._open_block(number)
                resident[number * BLOCK_BYTES : number * BLOCK_BYTES + len(block)] = block
                self._decoded[number] = 1  # after the bytes: another thread reads them without a lock
                number = self._decoded.find(0, number + 1, last)
            return memoryview(resident)[start:end]
        cache = last - first <= CACHED_BLOCKS // 4  # a long read would only flush the cache
        return self._joined([self._block(i, cache) for i in range(first, last)], start, end)

    def read_again(self, start: int, end: int) -> memoryview:
        first, last = self._blocks_of(start, end)
        return self._joined([self._open_block(i) for i in range(first, last)], start, end)

    def _blocks_of(self, start: int, end: int) -> tuple[int, int]:
        if not 0 <= start <= end <= self.size:
            raise CorruptionError(self.path, self.size, f"bytes {start} to {end} are missing")
        return start // BLOCK_BYTES, -(-end // BLOCK_BYTES)

    def _joined(self, blocks: list[bytes], start: int, end: int) -> memoryview:
        base = start // BLOCK_BYTES * BLOCK_BYTES
        data = blocks[0] if len(blocks) == 1 else b"".join(blocks)
        return memoryview(data)[start - base : end - base]

    def _block(self, number: int, cache: bool) -> bytes:
        with self._lock:
            block = self._cache.get(number)
            if block is not None:
                self._cache.move_to_end(number)
                return block
        block = self._open_block(number)
        if cache:
            with self._lock:
                self._cache[number] = block
                while len(self._cache) > CACHED_BLOCKS:
                    self._cache.popitem(last=False)
        return block

    def _open_block(self, number: int) -> bytes:
        at, raw = self._blocks.starts[number], self._blocks.entries[number][0] & _RAW
        data, count = self._blocks.read(number), self._header.blocks
        if self._cipher is not None:
            opened = self._cipher.open(data, number, count if number + 1 == count else 0, bytes([raw >> 31]))
            if opened is None:
                raise CorruptionError(self.path, at, f"block {number} was not encrypted at this position with this key")
            data = opened
        size = min(BLOCK_BYTES, self.size - number * BLOCK_BYTES)
        if self._decompress is not None and not raw:
            try:  # into exactly `size` bytes: the size that a frame declares is never trusted
                data = bytes(self._decompress(data, decompressed_size=size))
            except OSError as error:
                raise CorruptionError(self.path, at, f"block {number} does not decompress ({error})") from None
        if len(data) != size:
            raise CorruptionError(self.path, at, f"block {number} holds {len(data)} bytes, not {size}")
        return data

    def close(self) -> None:
        if self._resident is not None:
            self._resident = None  # freed with the last slice of it
            decoded_memory.release(self._header.size)
        self._file.close()


def _wrap(data_key: bytes, keys: KeyRing, identity: ChunkIdentity, random: Random) -> tuple[int, bytes, bytes]:
    version = keys.current()
    nonce = random.randbytes(12)
    context = struct.pack("<16sQQ", identity.store, identity.chunk_id, version)
    return version, nonce, aes_gcm(keys.key(version)).encrypt(nonce, data_key, context)


def _data_key(header: _Header, path: str, keys: KeyRing | None) -> bytes:
    """Unwrap a chunk's data key with `keys`, or with what was lent to this process."""
    from cryptography.exceptions import InvalidTag

    failure: KeyMissing | WrongKey = KeyMissing(f"{path} is encrypted: open the store with keys=")
    context = struct.pack("<16sQQ", header.identity.store, header.identity.chunk_id, header.key_version)
    for ring in lent_keys(header.identity.store) if keys is None else (keys,):
        try:
            data_key: bytes = aes_gcm(ring.key(header.key_version)).decrypt(header.key_nonce, header.wrapped, context)
        except KeyMissing as error:
            failure = error
        except InvalidTag:
            failure = WrongKey(f"{path}: key {header.key_version} is not the one that it was encrypted with")
        else:
            return data_key
    raise failure


def _unwrap(header: _Header, path: str, keys: KeyRing | None) -> _Cipher:
    aes_gcm(bytes(32))  # first: a missing package has an error message of its own
    return _Cipher(_data_key(header, path, keys), header.identity, header.codec)
