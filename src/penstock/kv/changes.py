"""The changes of a kv shard: what a record does to its keys, for the change feed; see `kinds.changes`.

The state before a record is judged at the time of the record before it. So a row that expired since then is a change of
this record: a delete, or an update if the record writes the key.

A part is one of two forms (see docs/format/changes.md):
    PUTS       puts that never expire, as a section, with a bit for each: whether the key had a value
    CHANGES    the type, key and value of each change

Thread: the one that applies; decoding in any.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.errors import CorruptionError
from penstock.journal.record import REFERENCE
from penstock.kinds.changes import INSERT, PART_BYTES, POSTIMAGE, PREIMAGE, REMOVAL, ChangePart, Feed
from penstock.kv import section
from penstock.kv.values import Options, arrow_type, arrow_values, key_type
from penstock.lsm.maintenance import Maintenance
from penstock.lsm.memtable import Edit
from penstock.lsm.ranges import RangeDeletes
from penstock.lsm.rows import DELETE, MERGE, NEVER, Row, binary_column, bytes_list
from penstock.lsm.tree import Tree
from penstock.lsm.version import TableFile
from penstock.lsm.view import View
from penstock.partition.machine import Entry

Change = tuple[int, bytes, bytes | None]  # type, key, value; None: no value, in a delete without preimages
_PUTS, _CHANGES = 0, 1
_HEADER = struct.Struct("<BBxxI")  # form, whether deletes have values, rows


def record_changes(feed: Feed, tree: Tree, entry: Entry, sections: Sequence[section.Section]) -> None:
    """Record what the sections of an entry change."""
    lsn, time_us = entry.lsn, entry.time_us
    payload = entry.sections[0].payload if len(entry.sections) == 1 else None
    before = _before(tree)
    deadlines = feed.deadlines.due(lsn, tree.time_us, time_us)
    plain = all(isinstance(part, section.Rows) and part.plain for part in sections)
    if deadlines or not plain or feed.options.preimages:
        edit = section.to_edit(sections, lsn, time_us)
        changes = _changes(before, edit, _expired(before, deadlines), feed.options.preimages)
        feed.record(lsn, time_us, _in_parts(changes), len(deadlines))
        return
    if len(sections) == 1 and (pair := section.only_put(sections[0])) is not None:
        bit = b"\0" if before.get(pair[0]) is None else b"\1"
        data = section.encode(sections[0]) if payload is None else payload
        feed.record_one(lsn, time_us, ChangePart(1, (_HEADER.pack(_PUTS, 0, 1), bit, data)))
        return
    puts = section.to_edit(sections, lsn, time_us).puts
    if not puts:
        feed.record(lsn, time_us, ())
        return
    if payload is None or section.row_count(payload) != len(puts):  # of several sections, or with a key twice
        payload = section.encode(section.Rows.of(dict(puts)))
    parts = _puts_parts(before, list(puts), payload)
    if len(payload) <= 2 * PART_BYTES:
        feed.record_one(lsn, time_us, next(parts))
    else:
        feed.record(lsn, time_us, parts)


def records_in_memory(feed: Feed, tree: Tree, entry: Entry) -> bool:
    """Whether recording and applying an entry reads no file: a few puts to a table that has none yet."""
    if tree.view.version.runs or len(entry.sections) != 1 or not entry.decoded:
        return False
    part, payload = entry.decoded[0], entry.sections[0].payload
    if entry.sections[0].header.form == REFERENCE or type(part) is not section.Rows or not part.plain:
        return False
    return len(payload) <= PART_BYTES and feed.deadlines.holds(entry.time_us) and not feed.is_trim_step(entry.time_us)


def record_load(feed: Feed, maintenance: Maintenance, tree: Tree, entry: Entry, chunk_ids: Sequence[int]) -> None:
    """Record what files change that a tree is about to adopt."""
    lsn, time_us = entry.lsn, entry.time_us
    before = _before(tree)
    expired = _expired(before, feed.deadlines.due(lsn, tree.time_us, time_us))
    loaded = maintenance.staged_view(tree, chunk_ids, lsn, time_us)
    removed = expired if loaded is None else _removed_by(loaded, before, expired)
    written = iter(()) if loaded is None else _loaded(before, loaded, feed)
    feed.record_files(lsn, time_us, chain(written, _in_parts(_removals(before, removed, feed.options.preimages))))


def _before(tree: Tree) -> View:
    applied_us = tree.time_us
    return View(tree.view.version, lambda: applied_us)


def _expired(before: View, deadlines: Iterable[tuple[int, bytes]]) -> list[bytes]:
    """Return the keys whose rows still have these deadlines; the others were written again since."""
    return [key for at_us, key in deadlines if (row := before.get_row(key)) is not None and row[3] == at_us]


def _changes(before: View, edit: Edit, expired: Iterable[bytes], preimages: bool) -> Iterator[tuple[Change, int]]:
    """Yield the changes of an edit, each with the expiry of the new row."""
    deleted = RangeDeletes.of((start, end, edit.lsn) for start, end in edit.ranges)
    at_record = View(before.version, lambda: edit.time_us)
    written: dict[bytes, Row | bytes] = {**edit.rows, **edit.puts}
    for key in expired:
        written.setdefault(key, (DELETE, b"", edit.lsn, NEVER))
    for key, operation in written.items():
        older = before.get(key)
        if isinstance(operation, bytes):
            value, expires = operation, NEVER
        else:
            if operation[0] >= MERGE:
                operation = at_record.fold(key, operation, deleted.lsn_over(key))
            value, expires = operation[1], operation[3]
            if operation[0] == DELETE or expires <= edit.time_us:
                if older is not None:
                    yield (REMOVAL, key, older if preimages else None), NEVER
                continue
        if older is not None and preimages:
            yield (PREIMAGE, key, older), NEVER
        yield (INSERT if older is None else POSTIMAGE, key, value), expires
    for start, end, _ in deleted:  # last, and one by one: they may be more than memory holds
        for key, older in before.scan(start, end):
            if key not in written:
                yield (REMOVAL, key, older if preimages else None), NEVER


def _removals(before: View, keys: Iterable[bytes], preimages: bool) -> Iterator[tuple[Change, int]]:
    for key in keys:
        older = before.get(key)
        if older is not None:
            yield (REMOVAL, key, older if preimages else None), NEVER


def _removed_by(loaded: View, before: View, expired: Iterable[bytes]) -> Iterator[bytes]:
    """Yield each key that files delete, alone or in a range, or that has expired, unless they have a value for it."""
    files = list(loaded.version.files())
    ranges = RangeDeletes.of((start, end, 1) for file in files for start, end, _ in file.table().range_deletes)
    alone = dict.fromkeys(chain(chain.from_iterable(map(_deleted_in, files)), expired))
    yield from (key for key in alone if not ranges.lsn_over(key) and loaded.get(key) is None)
    for start, end, _ in ranges:
        yield from (key for key, _ in before.scan(start, end) if loaded.get(key) is None)


def _deleted_in(file: TableFile) -> Iterator[bytes]:
    """Yield the keys that a file deletes one by one."""
    table = file.table()
    for piece in table.pieces(0, file.meta.rows) if file.meta.deletes else ():
        columns = table.columns(*piece)
        keys = columns.list_keys()
        yield from (keys[at] for at in np.flatnonzero(columns.kinds == DELETE).tolist())


def _loaded(before: View, loaded: View, feed: Feed) -> Iterator[ChangePart]:
    """Yield the changes by the rows of files."""
    for columns in loaded.scan_columns():
        keys, values, expires = columns.list_keys(), bytes_list(columns.values), columns.expires
        if not feed.options.preimages and (expires == NEVER).all():
            puts = section.Rows.of(dict(zip(keys, values, strict=True)))
            yield from _puts_parts(before, keys, section.encode(puts))
            continue
        rows = ((key, value, int(at)) for key, value, at in zip(keys, values, expires.tolist(), strict=True))
        yield from _in_parts(_writes(before, rows, feed.options.preimages))


def _writes(before: View, rows: Iterable[tuple[bytes, bytes, int]], preimages: bool) -> Iterator[tuple[Change, int]]:
    for key, value, expires in rows:
        older = before.get(key)
        if older is not None and preimages:
            yield (PREIMAGE, key, older), NEVER
        yield (INSERT if older is None else POSTIMAGE, key, value), expires


# -- bytes


def _puts_parts(before: View, keys: Sequence[bytes], payload: bytes) -> Iterator[ChangePart]:
    """Yield the changes by puts that never expire, encoded in a payload: in one part, unless they are many."""
    flags = before.existing(keys)
    whole = len(payload) <= 2 * PART_BYTES
    for start, end, data in [(0, len(keys), payload)] if whole else section.divided(payload, PART_BYTES):
        bits = np.packbits(flags[start:end], bitorder="little").tobytes()
        yield ChangePart(end - start, (_HEADER.pack(_PUTS, 0, end - start), bits, data))


def _in_parts(changes: Iterable[tuple[Change, int]]) -> Iterator[ChangePart]:
    """Encode changes in parts of about PART_BYTES."""
    pending, deadlines, size = list[Change](), list[tuple[int, bytes]](), 0
    for change, expires in changes:
        pending.append(change)
        if expires != NEVER:
            deadlines.append((expires, change[1]))
        size += len(change[1]) + len(change[2] or b"") + 16
        if size >= PART_BYTES:  # a preimage may end a part: two of the largest values do not fit into one row
            yield _part(pending, deadlines)
            pending, deadlines, size = [], [], 0
    if pending:
        yield _part(pending, deadlines)


def _part(changes: list[Change], deadlines: list[tuple[int, bytes]]) -> ChangePart:
    types, keys, values = zip(*changes, strict=True)
    has_values = any(kind == REMOVAL and value is not None for kind, _, value in changes)
    contents = [value or b"" for value in values]
    lengths = struct.pack(f"<{2 * len(keys)}I", *map(len, keys), *map(len, contents))
    header = _HEADER.pack(_CHANGES, has_values, len(changes))
    return ChangePart(len(changes), (b"".join((header, bytes(types), lengths, *keys, *contents)),), deadlines)


def change_schema(options: Options) -> pa.Schema:
    """Return the columns of a kv table in its change feed. The value of a delete is null, unless it has preimages."""
    return pa.schema(
        [pa.field("key", key_type(options), nullable=False), pa.field("value", arrow_type(options), nullable=True)]
    )


def read_changes(data: bytes, options: Options) -> tuple[bytes, pa.RecordBatch]:
    """Decode a part: the types of the changes, and their keys and values."""
    try:
        form, has_values, count = _HEADER.unpack_from(data)
        at = _HEADER.size
        if form == _PUTS:
            size = -(-count // 8)
            flags = np.unpackbits(np.frombuffer(data, np.uint8, size, at), count=count, bitorder="little")
            types = (flags * POSTIMAGE).astype(np.uint8)
            pairs = section.decode(data[at + size :])
            if not isinstance(pairs, section.Rows) or len(pairs) != count:
                raise ValueError("its keys are not those of its flags")
            keys, values = list(pairs), list[Any](pairs.values())
        elif form == _CHANGES:
            types = np.frombuffer(data, np.uint8, count, at)
            lengths = np.frombuffer(data, "<u4", 2 * count, at + count).astype(np.int64)
            ends = at + 9 * count + np.cumsum(lengths)
            if count and (ends[-1] != len(data) or types.max() > REMOVAL):
                raise ValueError("its length is wrong")
            items = [data[end - size : end] for end, size in zip(ends.tolist(), lengths.tolist(), strict=True)]
            keys, values = items[:count], items[count:]
        else:
            raise ValueError(f"it has the form {form}")
    except (ValueError, struct.error, CorruptionError) as error:
        raise CorruptionError("a change feed", 0, f"changes of kv do not decode ({error})") from None
    present = np.ones(count, np.bool_) if has_values else types != REMOVAL
    column = arrow_values(
        binary_column([value for value, has_value in zip(values, present, strict=True) if has_value]), options
    )
    if not present.all():
        positions = np.cumsum(present) - 1
        column = column.take(pa.array(positions, pa.int64(), mask=~present))
    rows = pa.record_batch([binary_column(keys).cast(key_type(options)), column], schema=change_schema(options))
    return types.tobytes(), rows
