"""Chunk containers: every byte of a chunk is written and read through here.

A *plain* container is the content itself (`plain.py`), a *framed* one is compressed or encrypted by block
(`framed.py`). Readers get byte ranges of the content from either: `Chunk.read`.
docs/format/container.md gives the bytes.

Thread: any.
"""

from __future__ import annotations

from penstock.archive.chunk import PLAIN, Chunk, ChunkIdentity, ChunkWriter, KeyRing, Sealing, check_key
from penstock.archive.framed import MAGIC, FramedChunk, FramedWriter, StoredBlocks
from penstock.archive.plain import PlainChunk, PlainWriter
from penstock.host.files import FileSystem


def create_chunk(fs: FileSystem, path: str, identity: ChunkIdentity, sealing: Sealing = PLAIN) -> ChunkWriter:
    """Start writing a chunk; it appears as `path` when it is finished."""
    if sealing.plain:
        return PlainWriter(fs, path)
    return FramedWriter(fs, path, identity, sealing)


def open_chunk(
    fs: FileSystem, path: str, keys: KeyRing | None = None, *, key: int | None = None, resident: bool = False
) -> Chunk:
    """Open a chunk of either kind; without `keys`, those that were lent to this process (`table_keys`) are used.

    `key`: the number of the key that it must be encrypted with, 0 if it must be plain, None if that is not known. A
    plain file does not say where it comes from: a caller that knows its table must not take it for an encrypted chunk.
    `resident`: keep what is decoded in memory while it is open, if there is room (`framed.decoded_memory`).
    """
    file = fs.open(path)
    try:
        size = file.size()
        if file.pread(len(MAGIC), 0) == MAGIC:
            return FramedChunk(file, size, keys, key=key, resident=resident)
        check_key(path, 0, key)
        view = file.map(size)
    except BaseException:
        file.close()
        raise
    file.close()  # the mapping stays
    return PlainChunk(path, view)


def check_blocks(fs: FileSystem, path: str, key: int | None = None) -> int:
    """Check what needs no key in a chunk: its framing and the checksum of every block; return its key's number.

    A plain chunk has no blocks: the file's own format has checksums. `key`: as in `open_chunk`.
    """
    file = fs.open(path)
    try:
        if file.pread(len(MAGIC), 0) != MAGIC:
            check_key(path, 0, key)
            return 0
        blocks = StoredBlocks(file, file.size())
        check_key(path, blocks.header.key, key)
        for number in range(blocks.header.blocks):
            blocks.read(number)
        return blocks.header.key
    finally:
        file.close()


def key_of(fs: FileSystem, path: str) -> int:
    """Return the number of the key that a chunk names, 0 if it is plain; `CorruptionError` if its header is damaged."""
    file = fs.open(path)
    try:
        return StoredBlocks(file, file.size()).header.key if file.pread(len(MAGIC), 0) == MAGIC else 0
    finally:
        file.close()
