"""What Raft gets from outside: the way to the other members, the files that records refer to, its times.

Thread: the loop's calls them.
"""

from __future__ import annotations

from typing import Protocol

from penstock.errors import Invalid
from penstock.replica.messages import Message


class Link(Protocol):
    """The way to the other members. Messages may be lost, doubled, late and out of order."""

    def send(self, member: str, message: Message) -> None: ...

    def has_room(self, member: str) -> bool:
        """Whether more entries can be sent to a member without piling up."""


class FileGate(Protocol):
    """The files that records refer to: a follower has them before it has the record."""

    def admits(self, body: bytes, leader: str) -> bool:
        """Whether every file that a record refers to is here, durably; if not, they are fetched from the leader."""


class NoFiles:
    """The gate of a cluster whose records refer to no files."""

    def admits(self, body: bytes, leader: str) -> bool:
        return True


class RaftTimes:
    """How long members wait, in seconds."""

    def __init__(self, *, heartbeat_s: float = 0.1, election_s: float = 0.6) -> None:
        if not 0 < heartbeat_s * 3 < election_s:
            raise Invalid(f"election_s ({election_s}) must be more than three times heartbeat_s ({heartbeat_s})")
        self.heartbeat_s, self.election_s = heartbeat_s, election_s
