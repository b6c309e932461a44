"""Who may do what: the rights of a client, and the file that lists tokens.

    [tokens.loader]                                # a name, for the log
    sha256 = "2bb8…"                               # of the token, in hex: the file does not give tokens away
    rights = { "*" = "read", events = "write" }    # by table; "*": every other one

`read`: reading. `write`: that, and writing and consuming. `admin`: that, and making and dropping the table.

Thread: values.
"""

from __future__ import annotations

import hashlib
import hmac
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from penstock.errors import Invalid

Right = Literal["read", "write", "admin"]
READ: Right = "read"
WRITE: Right = "write"
ADMIN: Right = "admin"
_ORDER = {READ: 1, WRITE: 2, ADMIN: 3}
EVERY_TABLE = "*"


@dataclass(frozen=True, kw_only=True)
class Rights:
    """What one client may do."""

    client: str
    tables: Mapping[str, Right] = field(default_factory=dict)

    def allows(self, right: Right, table: str) -> bool:
        """Whether it may do this to a table."""
        given = self.tables.get(table, self.tables.get(EVERY_TABLE))
        return given is not None and _ORDER[given] >= _ORDER[right]

    def check(self, right: Right, table: str) -> None:
        """`Invalid` if it may not."""
        if not self.allows(right, table):
            raise Invalid(
                f"the token of {self.client} does not give the right to {right} {table}: ask for one that does"
            )


LOCAL = Rights(client="local", tables={EVERY_TABLE: ADMIN})  # who may knock at the socket may read the files anyway


class _Listed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    sha256: str
    rights: dict[str, Right]


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tokens: dict[str, _Listed]


class Tokens:
    """All tokens that are known, by their hash."""

    def __init__(self, listed: Mapping[str, tuple[bytes, Rights]]) -> None:
        self._listed = list(listed.values())

    @classmethod
    def parse(cls, text: str) -> Tokens:
        """Tokens as their file lists them; `Invalid` if it is not well formed."""
        try:
            found = msgspec.convert(tomllib.loads(text), _File)
            hashes = {name: bytes.fromhex(listed.sha256) for name, listed in found.tokens.items()}
        except (tomllib.TOMLDecodeError, msgspec.ValidationError, ValueError) as error:
            raise Invalid(f"the file of tokens is not well formed ({error}): see docs/guide/server.md") from None
        if not hashes or any(len(digest) != hashlib.sha256().digest_size for digest in hashes.values()):
            raise Invalid("the file of tokens lists none, or one whose sha256 has not 64 hex digits")
        return cls(
            {name: (hashes[name], Rights(client=name, tables=listed.rights)) for name, listed in found.tokens.items()}
        )

    def rights_of(self, token: str) -> Rights | None:
        """What a token gives; None if it is unknown. Takes as long for every token."""
        digest = hashlib.sha256(token.encode()).digest()
        found = None
        for known, rights in self._listed:
            if hmac.compare_digest(known, digest):
                found = rights
        return found
