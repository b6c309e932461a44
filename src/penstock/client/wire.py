"""What clients and owners say to each other, and how errors travel.

A message is `crc32c u32 | MessagePack`; a write's sections are in it in the form they have in the journal. Arrow goes
one way only, from the owner to clients. An error travels as its class and its one line.

Thread: values and pure functions.
Invariant: nothing is decoded before its length and its checksum were looked at.
"""

from __future__ import annotations

import struct
from typing import Any, TypeVar

import google_crc32c
import msgspec

from penstock import errors
from penstock.errors import Invalid, PenstockError
from penstock.kinds import Piece
from penstock.partition.ledger import TableInfo
from penstock.partition.reference import StagedFile

PROTOCOL = "1"
MESSAGE_BYTES_MAX = 80 << 20  # of a request; the largest value has 64 MiB
ANSWER_BYTES_MAX = 256 << 20
GROUPS_MAX = 512  # in one message: a repeated one must be within the window of tokens
KEYS_MAX = 10_000  # of one lookup
PAGE_BYTES = 4 << 20  # of a scan
PIECE_BYTES = 4 << 20  # of a file that is sent

_CHECKSUM = struct.Struct("<I")
T = TypeVar("T")


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """Tagged by its class."""


class Hello(_Message, frozen=True):
    """Who is there?"""


class Owner(msgspec.Struct, frozen=True, array_like=True):
    """The answer to `Hello`."""

    identity: bytes
    path: str
    detached: bool
    durability: str


class ListTables(_Message, frozen=True):
    """All tables."""


class FindTable(_Message, frozen=True):
    """One of them, or none."""

    name: str


class ReadTime(_Message, frozen=True):
    """The store's clock."""


class Lookup(_Message, frozen=True):
    """The values of keys of a shard; live, or in a snapshot."""

    snapshot: str
    partition: int
    keys: list[bytes]


class CutPieces(_Message, frozen=True):
    """A range of a shard of a snapshot in parts."""

    snapshot: str
    partition: int
    count: int
    start: bytes = b""
    end: bytes | None = None


class CallService(_Message, frozen=True):
    """What only a kind understands."""

    table: int
    name: str
    argument: bytes


class CreateTable(_Message, frozen=True):
    """Make a table if it is absent."""

    name: str
    kind: str
    shards: int
    options: bytes


class DropTable(_Message, frozen=True):
    """Remove a table."""

    name: str


class CheckStore(_Message, frozen=True):
    """What cannot be read although it was acknowledged."""


class ResumeTable(_Message, frozen=True):
    """Let a paused table try again."""

    name: str


class StageFiles(_Message, frozen=True):
    """Places for files to be built elsewhere."""

    partition: int
    count: int
    lease_s: float


class SendFile(_Message, frozen=True):
    """Some bytes of a staged file, from one who does not see the store's folder."""

    partition: int
    chunk_id: int
    file_name: str
    offset: int
    data: bytes


class AskToken(_Message, frozen=True):
    """Whether a token was used."""

    producer: str
    number: int


class TakeSnapshot(_Message, frozen=True):
    """Everything at one LSN, held while it is used and for `lease_s` after.

    With the name of a `query`: the one snapshot of that query, made for the first who asks.
    """

    lease_s: float
    query: str = ""


class JoinSnapshot(_Message, frozen=True):
    """A snapshot that somebody else took."""

    snapshot: str


class CloseSnapshot(_Message, frozen=True):
    """It is needed no more."""

    snapshot: str


class CloseScan(_Message, frozen=True):
    """The rest of a scan is not wanted."""

    scan: str


class TakeOffer(_Message, frozen=True):
    """Work for a driver that runs so many parts at once, if there is any."""

    slots: int


class KeepOffer(_Message, frozen=True):
    """It is being worked on."""

    offer: str


class FinishOffer(_Message, frozen=True):
    """It is done: the packed result of each part."""

    offer: str
    results: list[bytes]


class FailOffer(_Message, frozen=True):
    """It was not done."""

    offer: str
    reason: str


class ReadOffered(_Message, frozen=True):
    """Some bytes of a file that an offer reads, for one who does not see the store's folder."""

    offer: str
    name: str
    offset: int


class WriteOffered(_Message, frozen=True):
    """Some bytes of a file that an offer writes."""

    offer: str
    name: str
    offset: int
    data: bytes


class Held(msgspec.Struct, frozen=True, array_like=True):
    """A snapshot, as a client knows it."""

    snapshot: str
    lsn: int
    time_us: int
    tables: list[TableInfo]


class SentSection(msgspec.Struct, frozen=True, array_like=True):
    """A section of a group: the bytes of a kind, or files."""

    partition: int
    payload: bytes
    files: list[StagedFile] | None = None


class SentGroup(msgspec.Struct, frozen=True, array_like=True):
    """A group. One that is `plain` holds writes that happened to come together."""

    condition: bytes
    plain: bool
    sections: list[SentSection]


class Write(_Message, frozen=True):
    """Groups, in order. `again`: an answer was lost, so that some of them may have happened."""

    groups: list[SentGroup]
    again: bool


GONE = "Gone"  # a fault: the owner lets go of the store, and did nothing
ENDING = "Ending"  # a fault: the store was closed over it


class Fault(msgspec.Struct, frozen=True, array_like=True):
    """An error on its way."""

    name: str
    message: str
    detail: list[Any] = []


class Outcome(msgspec.Struct, frozen=True, array_like=True):
    """What became of a group: judged, or refused before anything was written."""

    verdict: int
    fault: Fault | None = None
    happened: bool = False  # a duplicate, because an earlier sending of this group was accepted


class Outcomes(msgspec.Struct, frozen=True, array_like=True):
    """Of the first groups of a message; those after them were not looked at."""

    outcomes: list[Outcome]


Request = (
    Hello
    | ListTables
    | FindTable
    | ReadTime
    | Lookup
    | CutPieces
    | CallService
    | CreateTable
    | DropTable
    | CheckStore
    | ResumeTable
    | StageFiles
    | SendFile
    | AskToken
    | TakeSnapshot
    | JoinSnapshot
    | CloseSnapshot
    | CloseScan
    | TakeOffer
    | KeepOffer
    | FinishOffer
    | FailOffer
    | ReadOffered
    | WriteOffered
    | Write
)


class Scan(_Message, frozen=True):
    """Begin to read a range; the client gives it a name by which it asks for more."""

    scan: str
    snapshot: str
    partition: int
    start: bytes
    end: bytes | None
    arrow: bool  # record batches as the kind makes them; otherwise keys and values
    reverse: bool = False


class More(_Message, frozen=True):
    """The next page of a scan."""

    scan: str


Reading = Scan | More

_encode = msgspec.msgpack.Encoder().encode
_requests = msgspec.msgpack.Decoder(Request)
_readings = msgspec.msgpack.Decoder(Reading)
_faults = msgspec.msgpack.Decoder(Fault)


def pack(message: Any) -> bytes:
    """A message or an answer as bytes."""
    body = _encode(message)
    return _CHECKSUM.pack(google_crc32c.value(body)) + body


def unpack_request(data: bytes) -> Request:
    """What a client asks; `Invalid` for anything else."""
    found: Request = _unpack(data, _requests)
    return found


def unpack_reading(data: bytes) -> Reading:
    """Which page a client wants; `Invalid` for anything else."""
    found: Reading = _unpack(data, _readings)
    return found


def unpack(data: bytes, kind: type[T]) -> T:
    """An answer."""
    return _unpack(data, msgspec.msgpack.Decoder(kind), ANSWER_BYTES_MAX)


def _unpack(data: bytes, decoder: msgspec.msgpack.Decoder[T], bytes_max: int = MESSAGE_BYTES_MAX) -> T:
    if not _CHECKSUM.size < len(data) <= bytes_max:
        raise Invalid(f"a message has {len(data)} bytes: at most {bytes_max} are taken, send it in parts")
    body = data[_CHECKSUM.size :]
    if google_crc32c.value(body) != _CHECKSUM.unpack_from(data)[0]:
        raise Invalid("a message does not have its checksum: it was damaged on its way, send it again")
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, PenstockError) as error:
        raise Invalid(f"a message does not decode ({error}): do both sides have the same Penstock?") from None


# -- pieces


class _SentPiece(msgspec.Struct, frozen=True, array_like=True):
    partition: int
    start: bytes
    end: bytes | None
    detail: bytes
    size_bytes: int


def send_pieces(pieces: list[Piece]) -> list[_SentPiece]:
    """Pieces as they go over the wire."""
    return [_SentPiece(piece.partition, piece.start, piece.end, piece.detail, piece.size_bytes) for piece in pieces]


def received_pieces(data: bytes) -> list[Piece]:
    """Pieces as the owner made them."""
    return [
        Piece(sent.partition, sent.start, sent.end, sent.detail, sent.size_bytes)  # type: ignore[arg-type]
        for sent in unpack(data, list[_SentPiece])
    ]


# -- errors


def fault_of(error: PenstockError) -> Fault:
    """An error as it travels."""
    detail = list(error.__reduce__()[1]) if isinstance(error, (errors.CorruptionError, errors.ManifestNotFound)) else []
    return Fault(type(error).__name__, str(error), detail)


def error_of(fault: Fault) -> PenstockError:
    """The error that a fault stands for; a class that this Penstock lacks becomes the base of all."""
    kind = getattr(errors, fault.name, PenstockError)
    if not isinstance(kind, type) or not issubclass(kind, PenstockError):
        kind = PenstockError
    try:
        return kind(*fault.detail) if fault.detail else kind(fault.message)
    except TypeError:
        return PenstockError(fault.message)


def encode_fault(fault: Fault) -> bytes:
    """A fault beside a status of the transport."""
    return _encode(fault)


def decode_fault(data: bytes) -> Fault | None:
    """The fault beside a status; None if the transport itself failed."""
    try:
        return _faults.decode(data) if data else None
    except msgspec.DecodeError:
        return None
