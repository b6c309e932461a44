"""Pieces of a queue snapshot for readers in other processes: the files that hold them, and offsets.

Applied messages are in the files, though perhaps not synced, so a process on the same machine reads them there. A
process without access to the files reads from the owner.

Thread: any; the snapshot that a piece was made from pins its files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import pyarrow as pa

from penstock.errors import CorruptionError
from penstock.host.os_files import OsFileSystem
from penstock.queue.coding import BodyCoding, lent_coding, partition_of
from penstock.queue.files import KIND_MESSAGES, DataReader
from penstock.queue.messages import decode_batch
from penstock.queue.reading import FilesView

BATCH_ROWS = 16_384  # small records are combined, because each batch has a cost for readers


class _Span(msgspec.Struct, frozen=True, array_like=True):
    """A part of a data file."""

    path: str
    size: int
    offset: int  # of a record at or before the first wanted message; 0: use the file's own index


class _QueuePiece(msgspec.Struct, frozen=True, array_like=True):
    """The content of a piece's `detail`."""

    folder: str
    spans: list[_Span]
    headers: bool = False  # whether its batches have that column
    encrypted: bool = False  # whether its messages are: plain ones are refused then


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(_QueuePiece)


def describe_piece(  # noqa: PLR0917 - where it is, then what it is
    view: FilesView, folder: str, low: int, high: int, headers: bool, encrypted: bool
) -> tuple[bytes, int]:
    """Encode which files hold the messages [low, high), and estimate the bytes to read."""
    spans: list[_Span] = []
    index = view.files.index_of(low)
    while index <= len(view.files):
        span = view.span(index)
        if span.first >= high:
            break
        offset = 0 if span.index is None else span.index.before(max(low, span.first))
        spans.append(_Span(span.path, span.size, offset))
        index += 1
    return _encode(_QueuePiece(folder, spans, headers, encrypted)), sum(span.size - span.offset for span in spans)


def read_piece(detail: bytes, low: int, high: int, root: str, identity: bytes) -> Iterator[Any] | None:
    """Return record batches of [low, high) from the files of a piece; None if they cannot be read from here."""
    described = _decoder.decode(detail)
    folder, fs = f"{root}/{described.folder}", OsFileSystem()
    try:
        files = [(span, DataReader.open(fs, folder, span.path, identity)) for span in described.spans]
    except FileNotFoundError:
        return None
    coding = lent_coding(identity, partition_of(folder), described.encrypted)
    return gathered(_batches(files, low, high, folder, described.headers, coding))


def _batches(  # noqa: PLR0917
    files: list[tuple[_Span, DataReader]], at: int, end: int, folder: str, headers: bool, coding: BodyCoding
) -> Iterator[Any]:
    for span, reader in files:
        offset = span.offset or reader.index(span.size).before(at)
        for record_offset, record in reader.records(offset, span.size):
            if record.kind != KIND_MESSAGES:
                continue
            batch = decode_batch(record, path=reader.file.path, offset=record_offset, coding=coding)
            if batch.next <= at:
                continue
            if batch.first > at:
                break
            part = batch.slice(at, end)
            at = part.next
            if len(part):
                yield part.record_batch(headers=headers)
            if at >= end:
                return
    if at < end:
        raise CorruptionError(folder, 0, f"message {at} is missing")


def gathered(batches: Iterable[Any]) -> Iterator[Any]:
    """Combine small batches into batches of at least BATCH_ROWS rows."""
    pending: list[Any] = []
    rows = 0
    for batch in batches:
        pending.append(batch)
        rows += batch.num_rows
        if rows >= BATCH_ROWS:
            yield pending[0] if len(pending) == 1 else pa.concat_batches(pending)
            pending, rows = [], 0
    if pending:
        yield pending[0] if len(pending) == 1 else pa.concat_batches(pending)
