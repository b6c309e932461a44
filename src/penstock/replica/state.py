"""The small durable state of a member: its term, its vote, the last entry before the first in its log, its standing.

The file is replaced as a whole, by a rename, each time a term or a vote changes or the log's front is cut.

Thread: the loop's, and truncation under the lock of `RaftLog`.
Invariants: (1) a state is durable when `save` returns. (2) `bases` has the entry before the log's first one, whichever
segment that is after a crash within a cut.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import google_crc32c
import msgspec

from penstock.errors import CorruptionError, Invalid, UnsupportedVersion
from penstock.host.file_operations import publish
from penstock.host.files import FileSystem
from penstock.host.randomness import Random

MAGIC = b"PSRAFT\x00\x01"  # the last byte is the version
_CHECKSUM = struct.Struct("<I")
FILE_BYTES_MAX = 1 << 16
MEMBER, JOINING, FOUNDER = 0, 1, 2  # a member's standing: see `joining`


class LogBase(msgspec.Struct, frozen=True, array_like=True):
    """The entry before the first of a log: its index and term, and the LSN reached there."""

    index: int = 0
    term: int = 0
    lsn: int = 0


class RaftState(msgspec.Struct, frozen=True, array_like=True):
    """What a member must not forget."""

    term: int = 0
    vote: str | None = None  # the member it voted for in that term
    bases: tuple[LogBase, ...] = (LogBase(),)
    standing: int = MEMBER  # whether it is a member yet: see `joining`
    life: int = 0  # drawn with each new disk
    born: tuple[tuple[str, int], ...] = ()  # the lives that founded the cluster with this one
    founded: bool = False  # one of the founders brought a store: none without entries may lead
    members: tuple[str, ...] = ()  # whose disk this is, then the others: another quorum could contradict theirs


def new_disk(random: Random, *, standing: int) -> RaftState:
    """Return the state of a disk that is used for the first time."""
    return RaftState(standing=standing, life=int.from_bytes(random.randbytes(8), "little") >> 1)


def joined(state: RaftState, born: tuple[tuple[str, int], ...], *, founded: bool) -> RaftState:
    """Return the state of a member that votes from now on."""
    return msgspec.structs.replace(
        state, standing=MEMBER, born=born or state.born, founded=founded or state.founded or state.standing == FOUNDER
    )


def founding(state: RaftState, random: Random) -> RaftState:
    """Return the state of the only copy that is left of a cluster: it begins another one."""
    life = new_disk(random, standing=FOUNDER).life
    return msgspec.structs.replace(state, standing=FOUNDER, life=life, born=(), founded=False, members=())


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(RaftState)


class StateFile:
    """The file of a member's state."""

    def __init__(self, fs: FileSystem, path: str) -> None:
        self._fs, self._path = fs, path
        self.state = self._load() if fs.exists(path) else RaftState()

    def _load(self) -> RaftState:
        file = self._fs.open(self._path)
        try:
            data = file.pread(FILE_BYTES_MAX, 0)
        finally:
            file.close()
        head, body = data[: len(MAGIC)], data[len(MAGIC) + _CHECKSUM.size :]
        if head[:-1] == MAGIC[:-1] and head != MAGIC:
            raise UnsupportedVersion(f"{self._path} has version {head[-1]}, this Penstock reads {MAGIC[-1]}")
        stored = data[len(MAGIC) : len(MAGIC) + _CHECKSUM.size]
        if head != MAGIC or stored != _CHECKSUM.pack(google_crc32c.value(body)):
            raise CorruptionError(self._path, 0, "the checksum of a member's term and vote does not match")
        try:
            return _decoder.decode(body)
        except msgspec.MsgspecError as error:
            raise CorruptionError(self._path, 0, f"a member's term and vote do not decode ({error})") from None

    def claim(self, member: str, others: Sequence[str]) -> None:
        """Note, at the first start, whose disk this is; `Invalid` if it belongs to another member or other members."""
        members, disk_members = (member, *sorted(others)), self.state.members
        if disk_members and disk_members != members:
            raise Invalid(
                f"{self._path} is of member {disk_members[0]} of {', '.join(sorted(disk_members))}, not of {member} of "
                f"{', '.join(sorted(members))}: members are not added, removed or exchanged; see `penstock cluster`"
            )
        if not disk_members:
            self.save(msgspec.structs.replace(self.state, members=members))

    def save(self, state: RaftState) -> None:
        """Replace the state, durably."""
        body, temporary = _encode(state), f"{self._path}.new"
        if self._fs.exists(temporary):
            self._fs.unlink(temporary)
        file = self._fs.create(temporary)
        try:
            file.pwrite(MAGIC + _CHECKSUM.pack(google_crc32c.value(body)) + body, 0)
            publish(self._fs, file, self._path)
        finally:
            file.close()
        self.state = state
