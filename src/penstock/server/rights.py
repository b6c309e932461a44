"""The rights of clients, and the file that lists tokens.

    [tokens.loader]                                # a name, for the log
    sha256 = "2bb8…"                               # of the token, in hex: the file reveals no token
    rights = { "*" = "read", events = "write" }    # by table; "*": every other one
    producers = "nightly"                          # optional: whose producers it uses; default: its own

`read`: reading. `write`: also writing and consuming. `admin`: also creating and dropping the table.

The producers of batch tokens (`store.batch(token=("loader", 17))`) belong to a client: ("loader", 17) of two clients
are two tokens, so that no client can use up another's. The owner and the clients of its local socket share the
producers of the store, whose name is "".

Thread: immutable values.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from penstock.errors import Invalid, NotFound
from penstock.partition.ledger_records import dropped_table
from penstock.registry import check_name

Right = Literal["read", "write", "admin"]
READ: Right = "read"
WRITE: Right = "write"
ADMIN: Right = "admin"
_NAME = re.compile(r"[A-Za-z0-9_.@-]{1,100}")
_ORDER = {READ: 1, WRITE: 2, ADMIN: 3}
EVERY_TABLE = "*"


@dataclass(frozen=True, kw_only=True)
class Rights:
    """The rights of one client."""

    client: str
    tables: Mapping[str, Right] = field(default_factory=dict)
    producers: str | None = None  # whose producers it uses; None: its own
    process: str = ""  # of local clients, which share their name: each has limits of its own

    @property
    def budget(self) -> str:
        """Whose requests are counted together."""
        return self.client or f"\0{self.process}"

    def own_token(self, token: tuple[str, int]) -> tuple[str, int]:
        """Return a token as the ledger stores it: prefixed with the owner of its producer."""
        producer, number = token
        if "\0" in producer:
            raise Invalid("the name of a producer has no zero character: use another")
        owner = self.client if self.producers is None else self.producers
        return (f"{owner}\0{producer}", number) if owner else token

    def allows_anywhere(self, right: Right) -> bool:
        """Whether the client has a right to some table, perhaps one that does not exist yet."""
        return any(_ORDER[granted] >= _ORDER[right] for granted in self.tables.values())

    def allows_everywhere(self, right: Right) -> bool:
        """Whether the client has a right to every table, without exception."""
        return EVERY_TABLE in self.tables and all(_ORDER[granted] >= _ORDER[right] for granted in self.tables.values())

    def check_anywhere(self, right: Right) -> None:
        """Raise `Invalid` if the client has this right to no table."""
        if not self.allows_anywhere(right):
            raise self._refusal(right, "any table")

    def check_everywhere(self, right: Right) -> None:
        """Raise `Invalid` if the client lacks this right to any table."""
        if not self.allows_everywhere(right):
            raise self._refusal(right, "every table")

    def _refusal(self, right: Right, table: str) -> Invalid:
        return Invalid(f"the token of {self.client} does not give the right to {right} {table}: ask for one that does")

    def dropped_table(self, table: int, name: str | None) -> NotFound:
        """Return the error for a table that was dropped, with its name if the client may read that."""
        return dropped_table(table, name if name is not None and self.allows(READ, name) else None)

    def allows(self, right: Right, table: str) -> bool:
        """Whether the client has a right to a table."""
        granted = self.tables.get(table, self.tables.get(EVERY_TABLE))
        return granted is not None and _ORDER[granted] >= _ORDER[right]

    def check(self, right: Right, table: str) -> None:
        """Raise `Invalid` if the client lacks a right to a table."""
        if not self.allows(right, table):
            raise self._refusal(right, table)


LOCAL = Rights(client="", tables={EVERY_TABLE: ADMIN})  # a process that can open the socket can read the files anyway


class _Listed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    sha256: str
    rights: dict[str, Right]
    producers: str | None = None


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tokens: dict[str, _Listed]


class Tokens:
    """The known tokens, by their hash."""

    def __init__(self, listed: Mapping[str, tuple[bytes, Rights]]) -> None:
        self._listed = list(listed.values())

    @classmethod
    def parse(cls, text: str) -> Tokens:
        """Parse the file of tokens; `Invalid` if it is not well formed."""
        try:
            file = msgspec.convert(tomllib.loads(text), _File)
            hashes = {name: bytes.fromhex(listed.sha256) for name, listed in file.tokens.items()}
        except (tomllib.TOMLDecodeError, msgspec.ValidationError, ValueError) as error:
            raise Invalid(f"the file of tokens is not well formed ({error}): see docs/guide/server.md") from None
        if not hashes or any(len(digest) != hashlib.sha256().digest_size for digest in hashes.values()):
            raise Invalid("the file of tokens lists none, or one whose sha256 has not 64 hex digits")
        names = [*file.tokens, *(listed.producers or "x" for listed in file.tokens.values())]
        if not all(map(_NAME.fullmatch, names)):
            raise Invalid("a name in the file of tokens has 1 to 100 letters, digits, and _.@- only")
        for table in {table for listed in file.tokens.values() for table in listed.rights} - {EVERY_TABLE}:
            check_name(table)  # a misspelt name would silently fall back to the rights of "*"
        return cls(
            {
                name: (hashes[name], Rights(client=name, tables=listed.rights, producers=listed.producers))
                for name, listed in file.tokens.items()
            }
        )

    def rights_of(self, token: str) -> Rights | None:
        """Return the rights of a token; None if it is unknown. Takes the same time for every token."""
        digest = hashlib.sha256(token.encode()).digest()
        match = None
        for expected, rights in self._listed:
            if hmac.compare_digest(expected, digest):
                match = rights
        return match
