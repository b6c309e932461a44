"""A shard of a queue at one moment in parts for readers elsewhere: which files hold them, and from where.

What is applied is in the files, though not synced yet, so a process on the same machine reads it there. One that does
not see the files asks the owner.

Thread: any; the snapshot that a piece was made from keeps its files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import pyarrow as pa

from penstock.errors import CorruptionError
from penstock.host.os_files import OsFileSystem
from penstock.queue.files import KIND_MESSAGES, DataReader
from penstock.queue.messages import decode_batch
from penstock.queue.reading import FilesView

BATCH_ROWS = 16_384  # small records are put together, because each batch costs its readers


class _Span(msgspec.Struct, frozen=True, array_like=True):
    """A part of a data file."""

    path: str
    size: int
    offset: int  # of a record at or before the first wanted message; 0: the file's own index says


class _QueuePiece(msgspec.Struct, frozen=True, array_like=True):
    """What a piece's `detail` holds."""

    folder: str
    spans: list[_Span]


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(_QueuePiece)


def describe_piece(view: FilesView, folder: str, low: int, high: int) -> tuple[bytes, int]:
    """The files that hold the messages [low, high), and how many bytes of them are read, about."""
    spans: list[_Span] = []
    place = view.files.place_of(low)
    while place <= len(view.files):
        span = view.span(place)
        if span.first >= high:
            break
        offset = 0 if span.index is None else span.index.before(max(low, span.first))
        spans.append(_Span(span.path, span.size, offset))
        place += 1
    return _encode(_QueuePiece(folder, spans)), sum(span.size - span.offset for span in spans)


def read_piece(detail: bytes, low: int, high: int, root: str, identity: bytes) -> Iterator[Any] | None:
    """Record batches of [low, high) out of the files of a piece; None if they are not to be seen here."""
    described = _decoder.decode(detail)
    folder, fs = f"{root}/{described.folder}", OsFileSystem()
    try:
        files = [(span, DataReader.open(fs, folder, span.path, identity)) for span in described.spans]
    except FileNotFoundError:
        return None
    return gathered(_batches(files, low, high, folder))


def _batches(files: list[tuple[_Span, DataReader]], at: int, end: int, folder: str) -> Iterator[Any]:
    for span, reader in files:
        offset = span.offset or reader.index(span.size).before(at)
        for place, record in reader.records(offset, span.size):
            if record.kind != KIND_MESSAGES:
                continue
            batch = decode_batch(record, path=reader.file.path, offset=place)
            if batch.next <= at:
                continue
            if batch.first > at:
                break
            part = batch.slice(at, end)
            at = part.next
            if len(part):
                yield part.record_batch()
            if at >= end:
                return
    if at < end:
        raise CorruptionError(folder, 0, f"message {at} is missing")


def gathered(batches: Iterable[Any]) -> Iterator[Any]:
    """The same rows in batches of some size."""
    held: list[Any] = []
    rows = 0
    for batch in batches:
        held.append(batch)
        rows += batch.num_rows
        if rows >= BATCH_ROWS:
            yield held[0] if len(held) == 1 else pa.concat_batches(held)
            held, rows = [], 0
    if held:
        yield held[0] if len(held) == 1 else pa.concat_batches(held)
