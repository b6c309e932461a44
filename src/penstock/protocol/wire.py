"""The messages between clients and owners, and the encoding of errors.

A message is `crc32c u32 | MessagePack`; it carries a write's sections in the form they have in the journal. Arrow is
sent only from the owner to clients. An error is sent as its class name and message.

Thread: values and pure functions.
Invariant: a request is decoded only after its length, its checksum and the counts in it were checked, so it takes at
most a few times its bytes of memory.
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
SMALL_BYTES_MAX = 1 << 20  # of a request with names, numbers and a key or two
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
    """A request, tagged with its class name."""


class Hello(_Message, frozen=True):
    """Ask which store the owner has."""


class Owner(msgspec.Struct, frozen=True, array_like=True):
    """The answer to `Hello`."""

    identity: bytes
    path: str
    detached: bool
    durability: str


class ListTables(_Message, frozen=True):
    """List all tables."""


class FindTable(_Message, frozen=True):
    """Find a table by name; the answer has one or none."""

    name: str


class ReadTime(_Message, frozen=True):
    """Read the store's time."""


class Lookup(_Message, frozen=True):
    """Look up the values of keys of a shard; live, or in a snapshot.

    The answer has a value or None for each of the first keys, as many as fit, at least one. Ask for the rest.
    """

    snapshot: str
    partition: int
    keys: Annotated[list[bytes], msgspec.Meta(min_length=1, max_length=KEYS_MAX)]


class LookupRow(_Message, frozen=True):
    """Look up a row of a shard; live, or in a snapshot. The answer has its value and its LSN, or is None."""

    snapshot: str
    partition: int
    key: bytes


class CutPieces(_Message, frozen=True):
    """Split a range of a shard of a snapshot into pieces."""

    snapshot: str
    partition: int
    count: int
    start: bytes = b""
    end: bytes | None = None


class CutRanges(_Message, frozen=True):
    """Ask for the keys at which to split ranges of a table for tasks that read them; live, or in a snapshot.

    Without `bytes_max`, about `count` parts, the same number of each range. Otherwise a multiple of `count` (the number
    of parallel readers), shared among the ranges by size: hardly any above `bytes_max`, and few below `bytes_min`.
    """

    snapshot: str
    ranges: Annotated[list[KeyRange], msgspec.Meta(min_length=1, max_length=RANGES_MAX)]
    count: int
    bytes_min: int = 0
    bytes_max: int = 0


class PlanBatch(_Message, frozen=True):
    """Ask for the state of the tables a batch writes to, and of the table it is streamed from, if any."""

    tables: Annotated[list[str], msgspec.Meta(max_length=TABLES_MAX)]
    source: str = ""
    consumer: str = ""  # whose position is wanted
    start: Annotated[list[tuple[int, int]], msgspec.Meta(max_length=SHARDS_MAX)] = []  # by shard: the end is wanted
    rows_max: int = 0  # of a batch from there; 0: no limit
    bytes_max: int = 0


class SourceState(msgspec.Struct, frozen=True, array_like=True):
    """The positions of a streamed table: sequences by shard."""

    table: TableInfo
    earliest: dict[int, int]
    latest: dict[int, int]  # of the next message to be appended
    position: dict[int, int]  # of the consumer that was named
    end: dict[int, int]  # of a batch from `start`, or from the earliest if that is later


class BatchPlan(msgspec.Struct, frozen=True, array_like=True):
    """The answer to `PlanBatch`."""

    time_us: int  # the store's
    tables: list[TableInfo]  # those that exist
    source: SourceState | None  # None: there is no such table, or none was named


class CallService(_Message, frozen=True):
    """Call a service of a table's kind; the kind defines name and argument."""

    table: int
    name: str
    argument: bytes


class CreateTable(_Message, frozen=True):
    """Create a table if it does not exist."""

    name: str
    kind: str
    shards: int
    options: bytes


class DropTable(_Message, frozen=True):
    """Delete a table."""

    name: str


class CheckStore(_Message, frozen=True):
    """List the acknowledged writes that cannot be read."""


class ResumeTable(_Message, frozen=True):
    """Let a paused table try again."""

    name: str


class StageFiles(_Message, frozen=True):
    """Reserve names for files that the client builds."""

    partition: int
    count: int
    lease_s: float


class SendFile(_Message, frozen=True):
    """Write bytes of a staged file, for a client that cannot access the store's folder."""

    partition: int
    chunk_id: int
    file_name: str
    offset: int
    data: bytes


class AskToken(_Message, frozen=True):
    """Ask whether a token was used."""

    producer: str
    number: int


class TakeSnapshot(_Message, frozen=True):
    """Take a snapshot at one LSN, held while it is used and for `lease_s` after.

    With the name of a `query`: the one snapshot of that query, taken by its first request.
    """

    lease_s: float
    query: str = ""


class JoinSnapshot(_Message, frozen=True):
    """Use a snapshot that another client took."""

    snapshot: str


class CloseSnapshot(_Message, frozen=True):
    """Close a snapshot."""

    snapshot: str


class CloseScan(_Message, frozen=True):
    """Close a scan before its end."""

    scan: str


class TakeOffer(_Message, frozen=True):
    """Take work for a driver that runs `slots` parts at once, if there is any."""

    slots: int


class KeepOffer(_Message, frozen=True):
    """Renew an offer that is being worked on."""

    offer: str


class FinishOffer(_Message, frozen=True):
    """Deliver the packed result of each part of an offer."""

    offer: str
    results: Annotated[list[bytes], msgspec.Meta(max_length=RESULTS_MAX)]


class FailOffer(_Message, frozen=True):
    """Report that the work of an offer failed."""

    offer: str
    reason: str


class ReadOffered(_Message, frozen=True):
    """Read bytes of an offer's input file, for a driver that cannot access the store's folder."""

    offer: str
    name: str
    offset: int


class WriteOffered(_Message, frozen=True):
    """Write bytes of an offer's output file."""

    offer: str
    name: str
    offset: int
    data: bytes


class SnapshotHandle(msgspec.Struct, frozen=True, array_like=True):
    """A client's handle of a snapshot."""

    snapshot: str
    lsn: int
    time_us: int
    tables: list[TableInfo]


class SentSection(msgspec.Struct, frozen=True, array_like=True):
    """A section of a group: bytes encoded by a kind, or files."""

    partition: int
    payload: bytes
    files: Annotated[list[StagedFile], msgspec.Meta(max_length=FILES_MAX)] | None = None


class SentGroup(msgspec.Struct, frozen=True, array_like=True):
    """A group. A `plain` one holds independent writes that were batched together."""

    condition: bytes
    plain: bool
    sections: list[SentSection]


class Write(_Message, frozen=True):
    """Write groups, in order. `again`: an answer was lost, so some of them may have happened."""

    groups: list[SentGroup]
    again: bool


class ReceivedWrite(Write, frozen=True, tag="Write"):
    """A `Write` as received: `groups_of` decodes its groups."""

    groups: msgspec.Raw  # type: ignore[assignment]
    again: bool


class _UncheckedGroup(msgspec.Struct, frozen=True, array_like=True):
    """A `SentGroup` whose sections are counted but not decoded."""

    condition: Annotated[bytes, msgspec.Meta(max_length=CONDITION_BYTES_MAX)]
    plain: bool
    sections: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=SECTIONS_MAX)]


GONE = "Gone"  # a fault: the owner is yielding, and did nothing
ENDING = "Ending"  # a fault: the store was closed during the request


class ErrorMessage(msgspec.Struct, frozen=True, array_like=True):
    """An error as it is sent."""

    name: str
    message: str
    detail: list[Any] = []


class Outcome(msgspec.Struct, frozen=True, array_like=True):
    """The outcome of a group: judged, or refused before anything was written."""

    verdict: int
    fault: ErrorMessage | None = None
    happened: bool = False  # a duplicate, because an earlier sending of this group was accepted
    refused_by: int | None = None  # the index of the condition that refused it


class Outcomes(msgspec.Struct, frozen=True, array_like=True):
    """The outcomes of the first groups of a message; the rest was not processed."""

    outcomes: list[Outcome]


_Other = (
    Hello
    | ListTables
    | FindTable
    | ReadTime
    | Lookup
    | LookupRow
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
_LARGE = {"Lookup", "LookupRow", "CallService", "SendFile", "WriteOffered", "Write"}  # requests that carry data


class Scan(_Message, frozen=True):
    """Begin to read a range; the client names the scan, and asks for more pages by that name."""

    scan: str
    snapshot: str
    partition: int
    start: bytes
    end: bytes | None
    arrow: bool  # record batches as the kind makes them; otherwise keys and values
    reverse: bool = False


class ScanRanges(_Message, frozen=True):
    """Begin to read several ranges of one table at one LSN, as record batches, each with its range's number."""

    scan: str
    snapshot: str
    ranges: Annotated[list[KeyRange], msgspec.Meta(min_length=1, max_length=RANGES_MAX)]


class RunQuery(_Message, frozen=True):
    """Begin a query of a table's kind; its pages are read like those of a scan."""

    scan: str
    snapshot: str
    table: int
    name: str
    argument: bytes
    timeout_s: float  # for each batch


class More(_Message, frozen=True):
    """Read the next page of a scan or a query."""

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
    """Encode a message or an answer."""
    body = _encode(message)
    return _CHECKSUM.pack(google_crc32c.value(body)) + body


def unpack_request(data: bytes) -> Request:
    """Decode a request; `Invalid` if it is malformed or too long."""
    body = _body(data, MESSAGE_BYTES_MAX)
    kind = _kind_of(body)
    limit = RESULTS_BYTES_MAX if kind == "FinishOffer" else MESSAGE_BYTES_MAX if kind in _LARGE else SMALL_BYTES_MAX
    _check_length(len(data), limit)
    request: Request = _decode(body, _requests)
    return request


def unpack_reading(data: bytes) -> Reading:
    """Decode a request for a page; `Invalid` if it is malformed or too long."""
    body = _body(data, QUERY_BYTES_MAX + SMALL_BYTES_MAX)
    if _kind_of(body) != "RunQuery":
        _check_length(len(data), SMALL_BYTES_MAX)
    reading: Reading = _decode(body, _readings)
    return reading


def unpack(data: bytes, kind: type[T]) -> T:
    """Decode an answer."""
    return _decode(_body(data, ANSWER_BYTES_MAX), msgspec.msgpack.Decoder(kind))


def _check_length(length: int, bytes_max: int) -> None:
    if not _CHECKSUM.size < length <= bytes_max:
        raise Invalid(f"a message has {length} bytes: at most {bytes_max} are allowed, send it in parts")


def _body(data: bytes, bytes_max: int) -> bytes:
    _check_length(len(data), bytes_max)
    body = data[_CHECKSUM.size :]
    if google_crc32c.value(body) != _CHECKSUM.unpack_from(data)[0]:
        raise Invalid("a message does not match its checksum: it was damaged in transit, send it again")
    return body


def _decode(body: bytes | msgspec.Raw, decoder: msgspec.msgpack.Decoder[T]) -> T:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, PenstockError) as error:
        raise Invalid(
            f"a message does not decode, or has too many groups or parts ({error}): use the same version of Penstock"
        ) from None


def _kind_of(body: bytes) -> str:
    """Return the class name of a request, which is a short MessagePack array that begins with a short text."""
    if len(body) < 2 or body[0] >> 4 != 0x9 or body[1] >> 5 != 0x5:
        return ""
    return body[2 : 2 + (body[1] & 0x1F)].decode("ascii", "replace")


def groups_of(write: ReceivedWrite) -> list[SentGroup]:
    """Decode the groups of a message one by one, while the totals stay within the limits."""
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
    """Encode the metadata of a record batch: its range, and, on the last of a page, whether another page follows."""
    return (b"+" if more else b"-") + source.to_bytes(2, "big")


def read_mark(mark: bytes) -> tuple[int, bool]:
    """Return (range, more), as passed to `mark_batch`."""
    return int.from_bytes(mark[1:], "big"), mark[:1] == b"+"


# -- pieces


class _SentPiece(msgspec.Struct, frozen=True, array_like=True):
    partition: int
    start: bytes
    end: bytes | None
    detail: bytes
    size_bytes: int


def send_pieces(pieces: list[Piece]) -> list[_SentPiece]:
    """Return pieces in the form that is sent."""
    return [_SentPiece(piece.partition, piece.start, piece.end, piece.detail, piece.size_bytes) for piece in pieces]


def received_pieces(data: bytes) -> list[Piece]:
    """Decode pieces from the owner."""
    return [
        Piece(sent.partition, sent.start, sent.end, sent.detail, sent.size_bytes)  # type: ignore[arg-type]
        for sent in unpack(data, list[_SentPiece])
    ]


# -- errors

_DETAILED = (errors.CorruptionError, errors.ManifestNotFound, errors.ConditionFailed)  # made again from their parts


def fault_of(error: PenstockError, hidden: str = "") -> ErrorMessage:
    """Return an error in the form that is sent; paths inside the `hidden` folder become relative."""
    detail = list(error.__reduce__()[1]) if isinstance(error, _DETAILED) else []
    message = str(error)
    if hidden:
        message = message.replace(f"{hidden}/", "").replace(hidden, "the store")
        detail = [part.replace(f"{hidden}/", "") if isinstance(part, str) else part for part in detail]
    return ErrorMessage(type(error).__name__, message, detail)


def error_of(fault: ErrorMessage) -> PenstockError:
    """Return the error of a fault; an unknown class becomes `PenstockError`."""
    kind = getattr(errors, fault.name, PenstockError)
    if not isinstance(kind, type) or not issubclass(kind, PenstockError):
        kind = PenstockError
    try:
        return kind(*fault.detail) if fault.detail else kind(fault.message)
    except TypeError:
        return PenstockError(fault.message)


def encode_fault(fault: ErrorMessage) -> bytes:
    """Encode a fault, which is sent beside a status of the transport."""
    return _encode(fault)


def decode_fault(data: bytes) -> ErrorMessage | None:
    """Decode the fault sent beside a status; None if the transport itself failed."""
    try:
        return _faults.decode(data) if data else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
