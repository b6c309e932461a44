"""What a chunk is to those who write and read it: its identity, how it is sealed, its writer and its reader.

Thread: a writer belongs to one thread; a `Chunk` may be read by any number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

from penstock.errors import Invalid
from penstock.host.randomness import Random, system_random
from penstock.host.files import Buffer

crc32c: Callable[[bytes], int] | None
try:  # A reader shipped to another machine may be without it: checksums are then not verified.
    from google_crc32c import value as crc32c
except ImportError:
    crc32c = None

Codec: TypeAlias = Literal["none", "zstd", "lz4"]
CODECS: tuple[Codec, ...] = ("none", "zstd", "lz4")


class KeyRing(Protocol):
    """Master keys of 32 bytes by version; they wrap the data key of each chunk."""

    def current(self) -> int:
        """The version that wraps new keys."""

    def key(self, version: int) -> bytes:
        """The master key of a version; `NotFound` if it was removed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkIdentity:
    """Whose chunk it is: the store's UUID and the chunk's id there."""

    store: bytes
    chunk_id: int

    def __post_init__(self) -> None:
        if len(self.store) != 16 or not 0 <= self.chunk_id < 1 << 64:
            raise Invalid("a chunk needs the 16 bytes of its store's UUID and an id that fits 64 bits")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sealing:
    """How new chunks are contained. The default is plain."""

    codec: Codec = "none"
    keys: KeyRing | None = None
    random: Random = field(default_factory=system_random)

    def __post_init__(self) -> None:
        if self.codec not in CODECS:
            raise Invalid(f"codec {self.codec!r} is unknown: use one of {', '.join(CODECS)}")

    @property
    def plain(self) -> bool:
        return self.codec == "none" and self.keys is None


PLAIN = Sealing()


class Chunk(Protocol):
    """The content of a chunk, open for reading."""

    @property
    def path(self) -> str: ...

    @property
    def size(self) -> int:
        """Bytes of content."""

    @property
    def view(self) -> memoryview | None:
        """All of the content where it is mapped; None where it is opened block by block."""

    def read(self, start: int, end: int) -> memoryview:
        """The content's bytes [start, end); `CorruptionError` if they are not there or not sound."""

    def close(self) -> None: ...


class ChunkWriter(Protocol):
    """A chunk being written; it has no name until `finish`."""

    def write(self, data: Buffer) -> None: ...

    def finish(self) -> int:
        """Sync, give it its name, and return its bytes on disk."""

    def abort(self) -> None:
        """Remove what has no name yet."""
