"""Seals short byte strings with a table's key: sections of the journal, records of queues, rows of the manifest.

    salt 16 bytes | count u64 | AES-256-GCM of the bytes, with its tag of 16 bytes

A sealer draws a random salt when it is made, derives a key of its own from the table's key and that salt
(HKDF-SHA256), and counts what it seals: the count is the nonce. So no nonce is used twice under a key, whatever
crashed, was restored from a backup or runs on another replica, and no number of writes wears a key out. The context
(what the bytes are, and where they belong) is authenticated with them: a section cannot be moved to another shard.

Thread: any.
Invariant: bytes that were not sealed under this key and context are never returned.
"""

from __future__ import annotations

import itertools
import struct
from collections import OrderedDict
from typing import Any

from penstock.archive.framed import aes_gcm
from penstock.host import threads
from penstock.host.randomness import Random

SALT_BYTES = 16
_COUNT = struct.Struct(">Q")
_NONCE_HEAD = bytes(4)
OVERHEAD_BYTES = SALT_BYTES + _COUNT.size + 16
_SALTS_MAX = 64  # derived keys kept: a store that was opened often has sections of many sealers
_INFO = b"penstock sealed bytes 1"


class ByteSealer:
    """Seals and opens byte strings of one table."""

    def __init__(self, key: bytes, random: Random) -> None:
        self._key = key
        self._salt = random.randbytes(SALT_BYTES)
        self._own = self._derived(self._salt)
        self._counts = itertools.count()
        self._lock = threads.lock("archive.sealer")
        self._others: OrderedDict[bytes, Any] = OrderedDict()  # guarded by _lock

    def seal(self, data: bytes | memoryview, context: bytes) -> bytes:
        """Return `data` sealed; `open` needs the same context."""
        count = _COUNT.pack(next(self._counts))
        return b"".join((self._salt, count, self._own.encrypt(_NONCE_HEAD + count, data, context)))

    def open(self, sealed: bytes | memoryview, context: bytes) -> bytes | None:
        """Return the bytes; None if they were not sealed with this key, in this context."""
        from cryptography.exceptions import InvalidTag

        if len(sealed) < OVERHEAD_BYTES:
            return None
        salt, at = bytes(sealed[:SALT_BYTES]), SALT_BYTES + _COUNT.size
        aead = self._own if salt == self._salt else self._other(salt)
        try:
            data: bytes = aead.decrypt(_NONCE_HEAD + bytes(sealed[SALT_BYTES:at]), sealed[at:], context)
        except InvalidTag:
            return None
        return data

    def _other(self, salt: bytes) -> Any:
        with self._lock:
            aead = self._others.get(salt)
            if aead is None:
                aead = self._others[salt] = self._derived(salt)
                if len(self._others) > _SALTS_MAX:
                    self._others.popitem(last=False)
            else:
                self._others.move_to_end(salt)
            return aead

    def _derived(self, salt: bytes) -> Any:
        aes_gcm(bytes(32))  # first: a missing package has an error message of its own
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        return aes_gcm(HKDF(algorithm=SHA256(), length=32, salt=salt, info=_INFO).derive(self._key))
