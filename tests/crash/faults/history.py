"""What a process writes down of what it does: an operation before it is tried, and its outcome after.

A killed process leaves an operation without an outcome. Keys, values and payloads are text here, for people to read.

Thread: any number may write; a line is one write to a file that is only appended to.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

EffectKind: TypeAlias = Literal["put", "delete", "range", "add", "message"]
Word: TypeAlias = Literal["done", "duplicate", "refused", "unknown", "written"]

# The first letter of a key says what it is for.
MARK, STREAM, WHOLE, WORK = "m", "s", "w", "d"  # written once: that it is there says that its operation happened
HOT, COUNT, EXPIRING, EPHEMERAL = "h", "c", "x", "e"
UNIQUE = frozenset({MARK, STREAM, WHOLE, WORK})


class Effect(msgspec.Struct, array_like=True, frozen=True):
    """One change to one table."""

    kind: EffectKind
    table: str
    key: str
    value: str = ""  # of a range: its end
    amount: int = 0
    ttl_s: float = 0.0  # 0: for ever

    @property
    def unique(self) -> bool:
        """Whether what it leaves shows that it happened."""
        return self.kind == "message" or (self.kind == "put" and self.key[0] in UNIQUE)


class Operation(msgspec.Struct, tag="operation", frozen=True):
    """What is about to be tried."""

    actor: str
    number: int
    kind: str
    effects: list[Effect] = []
    token: int | None = None
    conditional: bool = False  # it may be refused when it is applied, or happen later than it was written
    table: str = ""  # that is made or dropped
    birth: int = 0  # of that table: the number of the operation that made it
    messages: list[tuple[int, int]] = []  # (shard, sequence) that are acknowledged
    client: bool = False
    begun_s: float = 0.0


class Outcome(msgspec.Struct, tag="outcome", frozen=True):
    """What became of it."""

    actor: str
    number: int
    word: Word
    error: str = ""
    position: tuple[int, int] | None = None  # of an append: shard and sequence
    ended_s: float = 0.0


class Saw(msgspec.Struct, tag="saw", frozen=True):
    """Keys of other actors that somebody read who may only see what is durable."""

    actor: str
    table: str
    keys: list[str]


class Reopened(msgspec.Struct, tag="reopened", frozen=True):
    """The store was opened again in this process: what an earlier opening had kept is dropped."""

    actor: str


class Violation(msgspec.Struct, tag="violation", frozen=True):
    """Something that must not be."""

    actor: str
    text: str


class Note(msgspec.Struct, tag="note", frozen=True):
    """For the report: how often something happened."""

    text: str


Event: TypeAlias = Operation | Outcome | Saw | Reopened | Violation | Note

_decoder = msgspec.json.Decoder(Event)


class HistoryWriter:
    """Appends events to a file."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def write(self, event: Event) -> None:
        os.write(self._fd, msgspec.json.encode(event) + b"\n")


def read_history(path: Path) -> list[Event]:
    """All events of a process; a last line that is cut short counts as not written."""
    lines = path.read_bytes().split(b"\n") if path.exists() else [b""]
    return [_decoder.decode(line) for line in lines[:-1]]


class Message(msgspec.Struct, array_like=True, frozen=True):
    """A message of a queue."""

    shard: int
    sequence: int
    payload: str


class Dump(msgspec.Struct):
    """What a store held when nobody wrote to it."""

    begun_s: float
    ended_s: float = 0.0
    tables: dict[str, dict[str, str]] = {}
    queues: dict[str, list[Message]] = {}
    delivered: dict[str, list[tuple[int, int]]] = {}  # (shard, sequence) that a consumer still gets, by its name


def identify(actor: str, number: int, part: int = 0) -> str:
    """The name of a part of an operation, as payloads begin with it."""
    return f"{actor}.{number}.{part}"
