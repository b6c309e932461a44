"""Chunk containers: every byte of a chunk is written and read through here.

A *plain* container is the content itself (`plain.py`), a *framed* one is compressed or encrypted by block
(`framed.py`). Readers get byte ranges of the content from either: `Chunk.read`.
docs/format/container.md gives the bytes.

Thread: any.
"""

from __future__ import annotations

from penstock.archive.chunk import PLAIN, Chunk, ChunkIdentity, ChunkWriter, KeyRing, Sealing
from penstock.archive.framed import MAGIC, FramedChunk, FramedWriter, StoredBlocks
from penstock.archive.plain import PlainChunk, PlainWriter
from penstock.host.files import FileSystem


def create_chunk(fs: FileSystem, path: str, identity: ChunkIdentity, sealing: Sealing = PLAIN) -> ChunkWriter:
    """Start writing a chunk; it appears as `path` when it is finished."""
    if sealing.plain:
        return PlainWriter(fs, path)
    return FramedWriter(fs, path, identity, sealing)


def open_chunk(fs: FileSystem, path: str, keys: KeyRing | None = None, *, resident: bool = False) -> Chunk:
    """Open a chunk of either kind; without `keys`, those that were lent to this process (`table_keys`) are used.

    `resident`: keep what is decoded in memory while it is open, if there is room (`framed.decoded_memory`).
    """
    file = fs.open(path)
    try:
        size = file.size()
        if file.pread(len(MAGIC), 0) == MAGIC:
            return FramedChunk(file, size, keys, resident=resident)
        view = file.map(size)
    except BaseException:
        file.close()
        raise
    file.close()  # the mapping stays
    return PlainChunk(path, view)


def is_encrypted(fs: FileSystem, path: str) -> bool:
    """Whether a chunk is encrypted; `CorruptionError` if that cannot be told."""
    file = fs.open(path)
    try:
        return file.pread(len(MAGIC), 0) == MAGIC and StoredBlocks(file, file.size()).header.cipher > 0
    finally:
        file.close()
