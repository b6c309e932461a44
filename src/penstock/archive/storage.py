"""How the files of a table are written: the codec of each level of its tree, and its keys if it is encrypted.

A table key is random, made with the table and never changed; it wraps the data key of each of the table's chunks and
seals its sections. It is itself wrapped by a master key of the user (`WrappedKey`, in the table's row of the ledger):
a rotation of the master key wraps as many keys as there are encrypted tables, and touches no file.

Thread: immutable values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias, cast

import msgspec

from penstock.archive.chunk import LEVEL_MIN, PLAIN, Codec, KeyRing, Sealing
from penstock.archive.sealer import ByteSealer
from penstock.host.randomness import Random, system_random

LEVELS_MAX = 16
CodecOfLevel: TypeAlias = tuple[str, int]  # a codec, and the level of zstd; 0 is its default


class WrappedKey(msgspec.Struct, frozen=True, array_like=True):
    """A key that was encrypted with a master key, by the master key's version."""

    version: int
    nonce: bytes
    wrapped: bytes


class FileStorage:
    """How the files of one table are written, now: codecs may be changed while the table is in use."""

    def __init__(
        self,
        codecs: Callable[[], Sequence[CodecOfLevel]] = lambda: (),
        keys: KeyRing | None = None,
        sealer: ByteSealer | None = None,
        random: Random | None = None,
    ) -> None:
        self._codecs = codecs  # by level of the tree, the last one for all deeper; none: not compressed
        self._random = random
        self.keys = keys  # None: not encrypted
        self.sealer = sealer  # of bytes that have no file of their own; None: not encrypted

    @property
    def key(self) -> int:
        """The number of the key that its files are encrypted with; 0: they are not."""
        return 0 if self.keys is None else self.keys.current()

    def sealing(self, level: int) -> Sealing:
        """Return how a new file of a level is written; files that are not of a tree are of level 0."""
        codecs = self._codecs()
        if not codecs and self.keys is None:  # nearly always
            return PLAIN
        codec, strength = codecs[min(level, len(codecs) - 1)] if codecs else ("none", 0)
        if codec == "none" and self.keys is None:
            return PLAIN
        return Sealing(
            codec=cast(Codec, codec),
            level=strength or LEVEL_MIN,
            keys=self.keys,
            random=self._random or system_random(),
        )


PLAIN_FILES = FileStorage()
