"""What clients and owners say to each other, and how errors travel.

A message is `crc32c u32 | MessagePack`; a write's sections are in it in the form they have in the journal. Arrow goes
one way only, from the owner to clients. An error travels as its class and its one line.

Thread: values and pure functions.
Invariant: nothing of a request is decoded before its length, its checksum and the counts in it were looked at: it takes
a few times its bytes, whatever they are.
"""

from __future__ import annotations

import struct
from typing import Annotated, Any, TypeVar

import google_crc32c
import msgspec

from penstock import errors
from penstock.errors import Invalid, PenstockError
from penstock.kinds import QUERY_BYTES_MAX, Piece
from penstock.partition.ledger import TableInfo
from penstock.partition.reference import StagedFile
from penstock.registry import SHARDS_MAX

PROTOCOL = "1"
MESSAGE_BYTES_MAX = 80 << 20  # of a request; the largest value has 64 MiB
ANSWER_BYTES_MAX = 256 << 20
SMALL_BYTES_MAX = 1 << 20  # of a request that carries names, numbers and a key or two
RESULTS_BYTES_MAX = 8 << 20  # of the results of an offer
GROUPS_MAX = 512  # in one message: a repeated one must be within the window of tokens
SECTIONS_MAX = 65_536  # in all groups of one message
FILES_MAX = 65_536  # the same, of sections that are files
CONDITION_BYTES_MAX = 4 << 20  # of one group
KEYS_MAX = 10_000  # of one lookup
RESULTS_MAX = 10_000  # of one offer
RANGES_MAX = SHARDS_MAX  # of one table
TABLES_MAX = 1_024  # of one batch
PAGE_BYTES = 4 << 20  # of a scan
PIECE_BYTES = 4 << 20  # of a file that is sent

_CHECKSUM = struct.Struct("<I")
T = TypeVar("T")
KeyRange = tuple[int, bytes, bytes | None]  # partition, start, end


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
    """The values of keys of a shard; live, or in a snapshot.

    The answer has a value or None for each of the first keys, at least one: as many as fit. Ask for the rest.
    """

    snapshot: str
    partition: int
    keys: Annotated[list[bytes], msgspec.Meta(min_length=1, max_length=KEYS_MAX)]


class CutPieces(_Message, frozen=True):
    """A range of a shard of a snapshot in parts."""

    snapshot: str
    partition: int
    count: int
    start: bytes = b""
    end: bytes | None = None


class CutRanges(_Message, frozen=True):
    """The keys at which ranges of a table are cut for tasks that read them; live, or in a snapshot.

    Without `bytes_max` about `count` parts, as many of each range. Otherwise a multiple of `count` (readers that work
    at the same time), shared among the ranges by size: about none above `bytes_max`, and few below `bytes_min`.
    """

    snapshot: str
    ranges: Annotated[list[KeyRange], msgspec.Meta(min_length=1, max_length=RANGES_MAX)]
    count: int
    bytes_min: int = 0
    bytes_max: int = 0


class PlanBatch(_Message, frozen=True):
    """All that a batch needs to know of the tables it writes to, and of the one it is streamed from, if it is."""

    tables: Annotated[list[str], msgspec.Meta(max_length=TABLES_MAX)]
    source: str = ""
    consumer: str = ""  # whose position is wanted
    start: Annotated[list[tuple[int, int]], msgspec.Meta(max_length=SHARDS_MAX)] = []  # by shard: the end is wanted
    rows_max: int = 0  # of a batch from there; 0: no limit
    bytes_max: int = 0


class SourceState(msgspec.Struct, frozen=True, array_like=True):
    """How far a table that is streamed has come; sequences by shard."""

    table: TableInfo
    earliest: dict[int, int]
    latest: dict[int, int]  # of the message that comes next
    position: dict[int, int]  # of the consumer that was named
    end: dict[int, int]  # of a batch from `start`, or from the earliest if that is later


class BatchPlan(msgspec.Struct, frozen=True, array_like=True):
    """The answer to `PlanBatch`."""

    time_us: int  # the store's
    tables: list[TableInfo]  # those that exist
    source: SourceState | None  # None: there is no such table, or none was named


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
    results: Annotated[list[bytes], msgspec.Meta(max_length=RESULTS_MAX)]


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


class SnapshotHandle(msgspec.Struct, frozen=True, array_like=True):
    """A snapshot, as a client knows it."""

    snapshot: str
    lsn: int
    time_us: int
    tables: list[TableInfo]


class SentSection(msgspec.Struct, frozen=True, array_like=True):
    """A section of a group: the bytes of a kind, or files."""

    partition: int
    payload: bytes
    files: Annotated[list[StagedFile], msgspec.Meta(max_length=FILES_MAX)] | None = None


class SentGroup(msgspec.Struct, frozen=True, array_like=True):
    """A group. One that is `plain` holds writes that happened to come together."""

    condition: bytes
    plain: bool
    sections: list[SentSection]


class Write(_Message, frozen=True):
    """Groups, in order. `again`: an answer was lost, so that some of them may have happened."""

    groups: list[SentGroup]
    again: bool


class ReceivedWrite(Write, frozen=True, tag="Write"):
    """A `Write` as it comes: its groups are decoded by `groups_of`, by who looks at them."""

    groups: msgspec.Raw  # type: ignore[assignment]
    again: bool


class _UncheckedGroup(msgspec.Struct, frozen=True, array_like=True):
    """A `SentGroup` of which only the number of sections was looked at."""

    condition: Annotated[bytes, msgspec.Meta(max_length=CONDITION_BYTES_MAX)]
    plain: bool
    sections: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=SECTIONS_MAX)]


GONE = "Gone"  # a fault: the owner lets go of the store, and did nothing
ENDING = "Ending"  # a fault: the store was closed over it


class ErrorMessage(msgspec.Struct, frozen=True, array_like=True):
    """An error on its way."""

    name: str
    message: str
    detail: list[Any] = []


class Outcome(msgspec.Struct, frozen=True, array_like=True):
    """What became of a group: judged, or refused before anything was written."""

    verdict: int
    fault: ErrorMessage | None = None
    happened: bool = False  # a duplicate, because an earlier sending of this group was accepted
    refused_by: int | None = None  # the index of the condition that refused it


class Outcomes(msgspec.Struct, frozen=True, array_like=True):
    """Of the first groups of a message; those after them were not looked at."""

    outcomes: list[Outcome]


_Other = (
    Hello
    | ListTables
    | FindTable
    | ReadTime
    | Lookup
    | CutPieces
    | CutRanges
    | PlanBatch
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
)
Request = _Other | Write
_LARGE = {"Lookup", "CallService", "SendFile", "WriteOffered", "Write"}  # what carries data


class Scan(_Message, frozen=True):
    """Begin to read a range; the client gives it a name by which it asks for more."""

    scan: str
    snapshot: str
    partition: int
    start: bytes
    end: bytes | None
    arrow: bool  # record batches as the kind makes them; otherwise keys and values
    reverse: bool = False


class ScanRanges(_Message, frozen=True):
    """Begin to read several ranges of one table at one moment, as record batches: each says of which range it is."""

    scan: str
    snapshot: str
    ranges: Annotated[list[KeyRange], msgspec.Meta(min_length=1, max_length=RANGES_MAX)]


class RunQuery(_Message, frozen=True):
    """Begin a query of a table's kind; its pages are read as those of a scan."""

    scan: str
    snapshot: str
    table: int
    name: str
    argument: bytes
    timeout_s: float  # for each batch


class More(_Message, frozen=True):
    """The next page of a scan or a query."""

    scan: str


Begin = Scan | ScanRanges | RunQuery
Reading = Begin | More

_encode = msgspec.msgpack.Encoder().encode
_requests = msgspec.msgpack.Decoder(_Other | ReceivedWrite)
_listed = msgspec.msgpack.Decoder(Annotated[list[msgspec.Raw], msgspec.Meta(max_length=GROUPS_MAX)])
_groups = msgspec.msgpack.Decoder(_UncheckedGroup)
_sections = msgspec.msgpack.Decoder(SentSection)
_readings = msgspec.msgpack.Decoder(Reading)
_faults = msgspec.msgpack.Decoder(ErrorMessage)


def pack(message: Any) -> bytes:
    """A message or an answer as bytes."""
    body = _encode(message)
    return _CHECKSUM.pack(google_crc32c.value(body)) + body


def unpack_request(data: bytes) -> Request:
    """What a client asks; `Invalid` for anything else."""
    body = _body(data, MESSAGE_BYTES_MAX)
    kind = _kind_of(body)
    limit = RESULTS_BYTES_MAX if kind == "FinishOffer" else MESSAGE_BYTES_MAX if kind in _LARGE else SMALL_BYTES_MAX
    _check_length(len(data), limit)
    request: Request = _decode(body, _requests)
    return request


def unpack_reading(data: bytes) -> Reading:
    """Which page a client wants; `Invalid` for anything else."""
    body = _body(data, QUERY_BYTES_MAX + SMALL_BYTES_MAX)
    if _kind_of(body) != "RunQuery":
        _check_length(len(data), SMALL_BYTES_MAX)
    reading: Reading = _decode(body, _readings)
    return reading


def unpack(data: bytes, kind: type[T]) -> T:
    """An answer."""
    return _decode(_body(data, ANSWER_BYTES_MAX), msgspec.msgpack.Decoder(kind))


def _check_length(length: int, bytes_max: int) -> None:
    if not _CHECKSUM.size < length <= bytes_max:
        raise Invalid(f"a message has {length} bytes: at most {bytes_max} are taken, send it in parts")


def _body(data: bytes, bytes_max: int) -> bytes:
    _check_length(len(data), bytes_max)
    body = data[_CHECKSUM.size :]
    if google_crc32c.value(body) != _CHECKSUM.unpack_from(data)[0]:
        raise Invalid("a message does not have its checksum: it was damaged on its way, send it again")
    return body


def _decode(body: bytes | msgspec.Raw, decoder: msgspec.msgpack.Decoder[T]) -> T:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, PenstockError) as error:
        raise Invalid(
            f"a message does not decode, or has too many groups or parts ({error}): is it of the same Penstock?"
        ) from None


def _kind_of(body: bytes) -> str:
    """The class of a request: it opens as a short array does whose first element is a short text."""
    if len(body) < 2 or body[0] >> 4 != 0x9 or body[1] >> 5 != 0x5:
        return ""
    return body[2 : 2 + (body[1] & 0x1F)].decode("ascii", "replace")


def groups_of(write: ReceivedWrite) -> list[SentGroup]:
    """The groups of a message, decoded one by one while their numbers in all are within the limits."""
    groups: list[SentGroup] = []
    sections_count = files_count = 0
    for raw in _decode(write.groups, _listed):
        group = _decode(raw, _groups)
        sections_count += len(group.sections)
        if sections_count > SECTIONS_MAX:
            raise Invalid(f"a message has more than {SECTIONS_MAX} sections: send its groups in several")
        sections: list[SentSection] = []
        for section in group.sections:
            sections.append(sent := _decode(section, _sections))
            files_count += 0 if sent.files is None else len(sent.files)
            if files_count > FILES_MAX:
                raise Invalid(f"a message names more than {FILES_MAX} files: commit them in several")
        groups.append(SentGroup(group.condition, group.plain, sections))
    return groups


# -- pages


def mark_batch(source: int, more: bool) -> bytes:
    """What goes beside a record batch: of which range it is, and, with the last of a page, whether another follows."""
    return (b"+" if more else b"-") + source.to_bytes(2, "big")


def read_mark(mark: bytes) -> tuple[int, bool]:
    """(range, more) as `mark_batch` was given them."""
    return int.from_bytes(mark[1:], "big"), mark[:1] == b"+"


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


def fault_of(error: PenstockError, hidden: str = "") -> ErrorMessage:
    """An error as it travels; paths in a `hidden` folder are told as they are within it."""
    detail = list(error.__reduce__()[1]) if isinstance(error, (errors.CorruptionError, errors.ManifestNotFound)) else []
    message = str(error)
    if hidden:
        message = message.replace(f"{hidden}/", "").replace(hidden, "the store")
        detail = [part.replace(f"{hidden}/", "") if isinstance(part, str) else part for part in detail]
    return ErrorMessage(type(error).__name__, message, detail)


def error_of(fault: ErrorMessage) -> PenstockError:
    """The error that a fault stands for; a class that this Penstock lacks becomes the base of all."""
    kind = getattr(errors, fault.name, PenstockError)
    if not isinstance(kind, type) or not issubclass(kind, PenstockError):
        kind = PenstockError
    try:
        return kind(*fault.detail) if fault.detail else kind(fault.message)
    except TypeError:
        return PenstockError(fault.message)


def encode_fault(fault: ErrorMessage) -> bytes:
    """A fault beside a status of the transport."""
    return _encode(fault)


def decode_fault(data: bytes) -> ErrorMessage | None:
    """The fault beside a status; None if the transport itself failed."""
    try:
        return _faults.decode(data) if data else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
