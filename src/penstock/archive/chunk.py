"""Chunks: their identity, encoding, writer and reader protocols.

Thread: a writer belongs to one thread; a `Chunk` may be read by any number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

from penstock.errors import CorruptionError, Invalid
from penstock.host.files import Buffer
from penstock.host.randomness import Random, system_random

crc32c: Callable[[bytes], int] | None
try:  # A reader on another machine may lack it: then checksums are not verified.
    from google_crc32c import value as crc32c
except ImportError:
    crc32c = None

Codec: TypeAlias = Literal["none", "zstd", "lz4"]
CODECS: tuple[Codec, ...] = ("none", "zstd", "lz4")


LEVEL_MIN, LEVEL_MAX = 1, 22  # of zstd


class KeyRing(Protocol):
    """Keys of 32 bytes by number; they wrap the data key of each chunk."""

    def current(self) -> int:
        """Return the number of the key that wraps new data keys."""

    def key(self, version: int) -> bytes:
        """Return the key of a number, which a chunk's header holds; `KeyMissing` if it is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkIdentity:
    """The UUID of a chunk's store, and its id in that store."""

    store: bytes
    chunk_id: int

    def __post_init__(self) -> None:
        if len(self.store) != 16 or not 0 <= self.chunk_id < 1 << 64:
            raise Invalid("a chunk needs the 16 bytes of its store's UUID and an id that fits 64 bits")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sealing:
    """Compression and encryption of new chunks; none by default."""

    codec: Codec = "none"
    level: int = 1  # of zstd: higher ones take longer to write and less space
    keys: KeyRing | None = None
    random: Random = field(default_factory=system_random)

    def __post_init__(self) -> None:
        if self.codec not in CODECS:
            raise Invalid(f"codec {self.codec!r} is unknown: use one of {', '.join(CODECS)}")
        if not LEVEL_MIN <= self.level <= LEVEL_MAX:
            raise Invalid(f"a level of zstd is from {LEVEL_MIN} to {LEVEL_MAX}, not {self.level}")

    @property
    def plain(self) -> bool:
        return self.codec == "none" and self.keys is None


PLAIN = Sealing()


def check_key(path: str, key: int, expected: int | None) -> None:
    """Raise `CorruptionError` if a chunk names another key than expected (0: it is plain); None expects nothing."""
    if expected is None or key == expected:
        return
    if not key:
        raise CorruptionError(path, 0, "it is not encrypted, and its table is")
    table = f"has key {expected}" if expected else "is not encrypted"
    raise CorruptionError(path, 0, f"it is encrypted with key {key}, and its table {table}")


class Chunk(Protocol):
    """The content of a chunk, open for reading."""

    @property
    def path(self) -> str: ...

    @property
    def size(self) -> int:
        """The size of the content in bytes."""

    @property
    def key(self) -> int:
        """The number of the key that its blocks are encrypted, and so authenticated, with; 0 if they are plain."""

    @property
    def lazy(self) -> bool:
        """Whether bytes of `view` are valid only once `read` has returned them."""

    @property
    def view(self) -> memoryview | None:
        """The whole content, if it is mapped or kept in memory; None if it is decoded block by block each time."""

    def read(self, start: int, end: int) -> memoryview:
        """Return the bytes [start, end) of the content; `CorruptionError` if they are missing or damaged."""

    def read_again(self, start: int, end: int) -> memoryview:
        """Return the bytes [start, end) from the file, although they may be in memory."""

    def close(self) -> None: ...


class ChunkWriter(Protocol):
    """A chunk being written; `finish` gives it its name."""

    def write(self, data: Buffer) -> None: ...

    def finish(self) -> int:
        """Sync the chunk, give it its name, and return its size on disk."""

    def abort(self) -> None:
        """Remove the unfinished file."""
