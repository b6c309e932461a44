"""The changes of a vector shard: what a record does to its ids, for the change feed; see `kinds.changes`.

A part (see docs/format/changes.md): a header, the type of each change, the lengths of ids and attributes, the ids, the
attributes, and the vectors of the changes that have one.

Thread: the one that applies; decoding in any.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from penstock.errors import CorruptionError
from penstock.kinds.changes import INSERT, PART_BYTES, POSTIMAGE, PREIMAGE, REMOVAL, ChangePart, Feed
from penstock.lsm.tree import Tree
from penstock.partition.machine import Entry
from penstock.vector.keys import dictionary_keys
from penstock.vector.options import VectorOptions
from penstock.vector.rows import schema_of, vector_type
from penstock.vector.section import Deletes, Upserts, VectorSection
from penstock.vector.stored import get_record

Record = tuple[bytes, bytes]  # vector, attributes
Change = tuple[int, bytes, Record | None]  # type, external id, record; None: of a delete without preimages
_HEADER = struct.Struct("<BBxxI")  # form, whether deletes have records, changes
_FORM = 0


def record_changes(
    feed: Feed, tree: Tree, options: VectorOptions, entry: Entry, sections: Sequence[VectorSection]
) -> None:
    """Record what the sections of an entry change."""
    written: dict[bytes, Record | None] = {}
    for part in (part for section in sections for part in section.parts):
        if isinstance(part, Upserts):
            vectors = np.ascontiguousarray(part.vectors, "<f4")
            packed = vectors.view(f"V{options.vector_bytes}").reshape(-1).tolist()
            written.update(zip(part.ids, zip(packed, part.attributes_of(), strict=True), strict=True))
        elif isinstance(part, Deletes):
            written.update(dict.fromkeys(part.ids))
    feed.record(entry.lsn, entry.time_us, _in_parts(_changes(feed, tree, options, written)))


def _changes(feed: Feed, tree: Tree, options: VectorOptions, written: dict[bytes, Record | None]) -> Iterator[Change]:
    view, preimages = tree.view, feed.options.preimages
    had = view.existing(dictionary_keys(list(written))).tolist()
    for (external, record), exists in zip(written.items(), had, strict=True):
        older: Record | None = None
        if not exists:
            if record is not None:
                yield INSERT, external, record
            continue
        if preimages:
            preimage = get_record(view.get, external)
            assert preimage is not None  # its id leads to it
            older = preimage[: options.vector_bytes], preimage[options.vector_bytes :]
        if record is None:
            yield REMOVAL, external, older
            continue
        if older is not None:
            yield PREIMAGE, external, older
        yield POSTIMAGE, external, record


def _in_parts(changes: Iterator[Change]) -> Iterator[ChangePart]:
    pending, size = list[Change](), 0
    for change in changes:
        pending.append(change)
        size += len(change[1]) + (0 if change[2] is None else len(change[2][0]) + len(change[2][1]))
        if size >= PART_BYTES and change[0] != PREIMAGE:
            yield _part(pending)
            pending, size = [], 0
    if pending:
        yield _part(pending)


def _part(changes: list[Change]) -> ChangePart:
    types, ids, records = zip(*changes, strict=True)
    has_records = any(kind == REMOVAL and record is not None for kind, _, record in changes)
    attributes = [b"" if record is None else record[1] for record in records]
    vectors = [record[0] for record in records if record is not None]
    lengths = struct.pack(f"<{2 * len(ids)}I", *map(len, ids), *map(len, attributes))
    header = _HEADER.pack(_FORM, has_records, len(changes))
    return ChangePart(len(changes), (b"".join((header, bytes(types), lengths, *ids, *attributes, *vectors)),))


def change_schema(options: VectorOptions) -> pa.Schema:
    """Return the columns of a vector table in its change feed. A delete without preimages has its id alone."""
    return pa.schema([field.with_nullable(field.name != "id") for field in schema_of(options)])


def read_changes(data: bytes, options: VectorOptions) -> tuple[bytes, pa.RecordBatch]:
    """Decode a part: the types of the changes, and the records."""
    try:
        form, has_records, count = _HEADER.unpack_from(data)
        if form != _FORM:
            raise ValueError(f"it has the form {form}")
        types = np.frombuffer(data, np.uint8, count, _HEADER.size)
        lengths = np.frombuffer(data, "<u4", 2 * count, _HEADER.size + count).astype(np.int64)
        ends = _HEADER.size + 9 * count + np.cumsum(lengths)
        end = int(ends[-1]) if count else _HEADER.size
        present = np.ones(count, np.bool_) if has_records else types != REMOVAL
        if len(data) != end + int(present.sum()) * options.vector_bytes or (count and types.max() > REMOVAL):
            raise ValueError("its length is wrong")
        items = [data[at - size : at] for at, size in zip(ends.tolist(), lengths.tolist(), strict=True)]
        ids = pa.array([item.decode() for item in items[:count]], pa.string())
        attributes = pa.array([item.decode() or None for item in items[count:]], pa.string())
    except (ValueError, struct.error) as error:
        raise CorruptionError("a change feed", 0, f"changes of vectors do not decode ({error})") from None
    flat = pa.array(np.frombuffer(data, "<f4", offset=end), pa.float32())
    vectors = pa.FixedSizeListArray.from_arrays(flat, type=vector_type(options))
    if not present.all():
        vectors = vectors.take(pa.array(np.cumsum(present) - 1, pa.int64(), mask=~present))
    return types.tobytes(), pa.record_batch([ids, vectors, attributes], schema=change_schema(options))
