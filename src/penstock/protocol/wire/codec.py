"""Messages as bytes: `crc32c u32 | MessagePack`.

Thread: pure functions.
Invariant: a request is decoded only after its length, its checksum and the counts in it were checked, so it takes at
most a few times its bytes of memory.
"""

from __future__ import annotations

import struct
from typing import Annotated, Any, TypeVar

import google_crc32c
import msgspec

from penstock.errors import Invalid, PenstockError
from penstock.host.decoders import decoder_of
from penstock.kinds import QUERY_BYTES_MAX, Piece
from penstock.protocol.wire.messages import (
    ANSWER_BYTES_MAX,
    FILES_MAX,
    GROUPS_MAX,
    MESSAGE_BYTES_MAX,
    RESULTS_BYTES_MAX,
    SECTIONS_MAX,
    SMALL_BYTES_MAX,
    OtherRequest,
    Reading,
    ReceivedWrite,
    Request,
    SentGroup,
    SentSection,
    UncheckedGroup,
)

_CHECKSUM = struct.Struct("<I")
T = TypeVar("T")
_LARGE = {"Lookup", "LookupRow", "CallService", "SendFile", "WriteOffered", "Write"}  # requests that carry data

_encode = msgspec.msgpack.Encoder().encode
_requests = msgspec.msgpack.Decoder(OtherRequest | ReceivedWrite)
_listed = msgspec.msgpack.Decoder(Annotated[list[msgspec.Raw], msgspec.Meta(max_length=GROUPS_MAX)])
_groups = msgspec.msgpack.Decoder(UncheckedGroup)
_sections = msgspec.msgpack.Decoder(SentSection)
_readings = msgspec.msgpack.Decoder(Reading)


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
    return _decode(_body(data, ANSWER_BYTES_MAX), decoder_of(kind))


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
