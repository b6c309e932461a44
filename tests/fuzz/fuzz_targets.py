"""What is fuzzed: for each format good bytes to begin with, and a function that takes any bytes.

A target decodes the bytes as they are and, where the format has a checksum, with the right one too: otherwise a fuzzer
would only ever see the checksum. It asserts that (1) nothing but the format's own errors is raised, (2) what is
accepted survives encoding and decoding, (3) what passes the rules for clients can be applied. It returns whether
something was accepted. `fuzz.py` drives targets by coverage, `test_fuzz_targets.py` by mutations of the good bytes.
"""

from __future__ import annotations

import contextlib
import json
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
from fuzz_files import FILE_TARGETS

from penstock import errors
from penstock.errors import (
    CorruptionError,
    Invalid,
    ManifestCorrupted,
    PenstockError,
    UnsupportedManifestVersion,
    UnsupportedVersion,
)
from penstock.journal import record as journal_record
from penstock.kv import section as kv_section
from penstock.kv import validation as kv_received
from penstock.kv.values import VALUE_TYPES, Options, encode_options
from penstock.log import record as log_record
from penstock.log.chain import SegmentName
from penstock.log.segment import SegmentHeader, SegmentReader, scan_tail
from penstock.lsm.index import BATCH, HEADER_BYTES, PAGE_BYTES, Index
from penstock.lsm.operators import ADD_I64, APPEND, CHAIN
from penstock.lsm.rows import DELETE, NEVER, PUT
from penstock.lsm.sstable import Sstable
from penstock.manifest import codec, tables
from penstock.partition.ledger_records import Condition, TableInfo, Verdict, decode_condition, encode_condition
from penstock.partition.reference import Reference, StagedFile, decode_reference, encode_reference
from penstock.protocol import wire
from penstock.queue import section as queue_section
from penstock.queue import validation as queue_received
from penstock.queue.messages import Messages
from penstock.queue.options import encode_queue_options, queue_options
from penstock.queue.positions import (
    ACK,
    CONDITIONS,
    DELIVER,
    FORGET,
    MOVE,
    SEEK,
    Ack,
    Deliver,
    ForgetConsumer,
    Move,
    Seek,
    argument,
)
from penstock.queue.qmft import ActiveFileState, FileEntry, FileTable, QmftManifest
from penstock.series import section as series_section
from penstock.series import section_codec as series_codec
from penstock.series.labels import LabelTable, check_labels
from penstock.series.rules import receive_section as receive_series
from penstock.series.selectors import parse_selector, selector_text
from penstock.testing import SimulatedDisk
from penstock.vector import section as vector_section
from penstock.vector.options import VectorOptions

GOLDEN = Path(__file__).parents[1] / "golden"


@dataclass(frozen=True)
class Target:
    """A format."""

    seeds: Callable[[], list[bytes]]
    one: Callable[[bytes], bool]


def _same(value: object, again: object) -> None:
    assert value == again, f"{value!r} came back as {again!r}"


# -- the log and the journal

_IDENTITY = bytes(range(16))
_SEGMENT = SegmentHeader(first=1, incarnation=1, salt=7, identity=_IDENTITY, cut=False)


def _log_seeds() -> list[bytes]:
    whole = log_record.encode([b"one", b"", b"two" * 50], salt=7, incarnation=1, first=1, synced=0)
    return [whole, _SEGMENT.encode() + whole, *(path.read_bytes() for path in (GOLDEN / "log").glob("*.log"))]


def _log(data: bytes) -> bool:
    accepted = False
    with contextlib.suppress(CorruptionError):
        record = log_record.decode(data, 0, salt=7)
        again = log_record.encode(
            [record.body],
            salt=7,
            incarnation=record.incarnation,
            first=record.index,
            synced=record.synced,
            kind=record.kind,
            flags=record.flags,
        )
        _same(log_record.decode(again, 0, salt=7), record)
        accepted = True
    for content in (data, _SEGMENT.encode() + data):
        disk = SimulatedDisk()
        disk.put_atomically(f"/{SegmentName(1, 1)}", content)
        with contextlib.suppress(CorruptionError, UnsupportedVersion):
            scan_tail(SegmentReader.open(disk, "", SegmentName(1, 1), _IDENTITY))
            accepted = accepted or content is data  # behind a sound header anything is a torn tail
    return accepted


def _journal_seeds() -> list[bytes]:
    return [path.read_bytes() for path in (GOLDEN / "journal").glob("*.bin")]


def _journal(data: bytes) -> bool:
    try:
        record = journal_record.decode(data)
    except CorruptionError:
        return False
    _same(journal_record.decode(journal_record.encode(record)), record)
    return True


# -- messages between clients and owners


def _wire_seeds() -> list[bytes]:
    file = StagedFile(7, "a/b.sst", 12, bytes(32))
    group = wire.SentGroup(
        encode_condition(Condition(("p", 1))), False, [wire.SentSection(5, b"x" * 9), wire.SentSection(6, b"", [file])]
    )
    info = TableInfo(2, "events", "queue", 2, b"", 9)
    messages: list[Any] = [
        wire.Hello(),
        wire.FindTable("events"),
        wire.Lookup("", 131072, [b"a", b"bb"]),
        wire.CutPieces("s", 131072, 4, b"a", None),
        wire.CallService(2, "get", b"\x80"),
        wire.CreateTable("t", "kv", 3, b"\x91\xa5bytes"),
        wire.ConfigureTable(2, b"", b"\x00\x01\x80"),
        wire.AlterTable(2, b"\x91\x93\xc0\xc0\xc2", b"\x91\x93\xc0\xc0\xc3"),
        wire.StageFiles(131072, 3, 60.0),
        wire.SendFile(131072, 7, "a/b.sst", 0, b"data"),
        wire.TakeSnapshot(30.0, "query"),
        wire.FinishOffer("offer", [b"", b"result"]),
        wire.Write([group, group], True),
        wire.Scan("name", "", 131072, b"a", None, True, False),
        wire.More("name"),
        wire.Outcomes([wire.Outcome(0), wire.Outcome(3, wire.ErrorMessage("Invalid", "no", []), True)]),
        wire.SnapshotHandle("s", 7, 9, [info]),
        wire.fault_of(CorruptionError("path", 7, "reason")),
        wire.send_pieces([]),
        [info],
    ]
    return [wire.pack(message)[4:] for message in messages]


def _wire(data: bytes) -> bool:
    accepted = False
    for message in (data, struct.pack("<I", google_crc32c.value(data)) + data):
        with contextlib.suppress(Invalid):
            request = wire.unpack_request(message)
            packed = wire.pack(request)
            _same(wire.pack(wire.unpack_request(packed)), packed)
            accepted = True
            if isinstance(request, wire.ReceivedWrite):
                groups = wire.groups_of(request)
                again = wire.unpack_request(wire.pack(wire.Write(groups, request.again)))
                assert isinstance(again, wire.ReceivedWrite)
                _same(wire.groups_of(again), groups)
        with contextlib.suppress(Invalid):
            reading = wire.unpack_reading(message)
            _same(wire.unpack_reading(wire.pack(reading)), reading)
            accepted = True
        for kind in (wire.Outcomes, wire.SnapshotHandle, wire.Owner, list[TableInfo]):
            with contextlib.suppress(Invalid):
                answer = wire.unpack(message, kind)
                _same(wire.unpack(wire.pack(answer), kind), answer)
                accepted = True
        with contextlib.suppress(Invalid):
            wire.received_pieces(message)
            accepted = True
    fault = wire.decode_fault(data)
    if fault is not None:
        error = wire.error_of(fault)
        assert isinstance(error, PenstockError)
        assert type(error).__module__ == errors.__name__
        accepted = True
    return accepted


# -- sections of kinds


def _rows(**rows: Any) -> bytes:
    section = kv_section.Rows()
    for key, row in rows.items():
        section[key.encode()] = row
        section.plain = section.plain and isinstance(row, bytes)
    return kv_section.encode(section)


def _kv_seeds() -> list[bytes]:
    number = bytes(8)
    chain = b"".join(bytes([kind]) + struct.pack("<I", len(x)) + x for kind, x in ((APPEND, b"x"), (ADD_I64, number)))
    return [
        _rows(k=b"value", j=b"", long=b"x" * 300),
        _rows(k=b'{"a": [1, null]}'),
        _rows(k=number, j=(ADD_I64, number, NEVER)),
        _rows(k=(DELETE, b"", NEVER), j=(PUT, b"x", 1), a=(APPEND, "ä".encode(), NEVER), c=(CHAIN, chain, NEVER)),
        kv_section.encode(kv_section.Ranges([(b"a", b"b"), (b"", b"\xff")])),
    ]


def _kv(data: bytes) -> bool:
    with contextlib.suppress(CorruptionError):
        section = kv_section.decode(data)
        again = kv_section.decode(kv_section.encode(section))
        _same((type(again), list(again)), (type(section), list(section)))
        if isinstance(section, kv_section.Rows) and isinstance(again, kv_section.Rows) and section:
            _same((again.plain, dict(again)), (section.plain, dict(section)))
        if section and len(section) == kv_section.row_count(data):  # no key twice
            _same(kv_section.encode(section)[4:], data[4:])  # the first four: form and padding
    assert kv_received.weight(data) >= 0
    accepted = False
    for value_type in VALUE_TYPES:
        with contextlib.suppress(Invalid):
            rows = kv_received.receive(data, encode_options(Options(value_type)))
            kv_section.to_edit([rows, rows], 1, 0)
            accepted = True
    with contextlib.suppress(Invalid):
        kv_received.check_options(data)
    return accepted


def _queue_seeds() -> list[bytes]:
    puts = queue_section.Puts()
    puts.add((b"payload", b"key", None))
    puts.add((b"", None, None))
    puts.add((b"later", None, 5))
    puts.add_many(Messages.of([b"a", b"bb", b""], [b"k", None, b""], [1, 2, 3]))
    plain = queue_section.Puts()
    plain.add((b"payload", None, None))
    return [queue_section.encode(section) for section in (puts, plain, queue_section.Trim(17))]


def _queue(data: bytes) -> bool:
    with contextlib.suppress(CorruptionError):
        section = queue_section.decode(data)
        again = queue_section.decode(queue_section.encode(section))
        if isinstance(section, queue_section.Trim):
            assert isinstance(again, queue_section.Trim)
            _same(again.before, section.before)
        else:
            assert isinstance(again, queue_section.Encoded)
            _same(list(map(bytes, again.bodies())), list(map(bytes, section.bodies())))
    assert queue_received.weight(data) >= 0
    with contextlib.suppress(Invalid):
        queue_received.check_options(data)
    try:
        messages = queue_received.receive(data, b"\x92\x93\xc0\xc0\xc2\xc3")  # of a queue that takes headers
    except Invalid:
        return False
    assert len(messages) > 0
    return True


# -- conditions

_QUEUE = TableInfo(2, "events", "queue", 4, encode_queue_options(queue_options(None)), 1)
_ARGUMENTS: dict[str, Ack | Move | Deliver | Seek | ForgetConsumer] = {
    ACK: Ack("c", [(0, [(1, 3), (5, 6)]), (2, [(1, 2)])], [[7, 8], [9]]),
    MOVE: Move("c", [(0, 1, 5), (3, 1, 1)]),
    DELIVER: Deliver("c", [(0, 1, [(1, 3)]), (1, 4, [(4, 9)])]),
    SEEK: Seek("c", [(0, 9), (1, 1)], "leased"),
    FORGET: ForgetConsumer("c", 4),
}


def _condition_seeds() -> list[bytes]:
    arguments = [(name, argument(2, request)) for name, request in _ARGUMENTS.items()]
    whole = [Condition(("producer", 7)), Condition(None, tuple(arguments)), Condition(("p", 0), (arguments[1],))]
    return [*(encode_condition(condition) for condition in whole), *(each for _, each in arguments)]


def _condition(data: bytes) -> bool:
    accepted, others = False, [(name, data) for name in CONDITIONS]
    with contextlib.suppress(CorruptionError):
        condition = decode_condition(data)
        _same(decode_condition(encode_condition(condition)), condition)
        others += condition.others
        accepted = True
    ledger: dict[bytes, bytes] = {}

    def put(key: bytes, value: bytes | None) -> None:
        if value is None:
            ledger.pop(key, None)
        else:
            ledger[key] = value

    for name, payload in others:
        with contextlib.suppress(Invalid):
            queue_received.check_condition(_QUEUE, name, payload, own=True)
            for _ in range(2):  # on rows of its own, too
                assert isinstance(CONDITIONS[name](payload, ledger.get, put), Verdict)
            accepted = True
    with contextlib.suppress(Invalid):
        queue_received.check_call(_QUEUE, data)
        queue_received.waits("get", data)
    return accepted


def _reference_seeds() -> list[bytes]:
    files = (StagedFile(7, "kv/2/0/7.sst", 12, bytes(32)), StagedFile(8, "x.arrow"))
    return [encode_reference(Reference(files)), encode_reference(Reference(()))]


def _reference(data: bytes) -> bool:
    try:
        reference = decode_reference(data)
    except CorruptionError:
        return False
    _same(decode_reference(encode_reference(reference)), reference)
    return True


# -- files


@cache
def _sstable() -> tuple[bytes, bytes]:
    """The bytes of an sstable and of its index."""
    data = (GOLDEN / "sstable" / "plain.sst").read_bytes()
    return data, (GOLDEN / "sstable" / "plain.idx").read_bytes()


def _index_seeds() -> list[bytes]:
    return [_sstable()[1]]


def _index(data: bytes) -> bool:
    accepted = False
    for content in (data, _with_index_sum(data)):
        with contextlib.suppress(CorruptionError, UnsupportedVersion):
            _read_index(content)
            accepted = True
    return accepted


def _with_index_sum(data: bytes) -> bytes:
    """With the right checksum of its head, as far as it says how long that is."""
    if len(data) < HEADER_BYTES:
        return data
    header = data[: HEADER_BYTES - 4]
    batches, ranges, pages, body_bytes = (struct.unpack_from("<I", data, at)[0] for at in (12, 104, 108, 112))
    body, tail = bytearray(data[HEADER_BYTES : HEADER_BYTES + body_bytes]), data[HEADER_BYTES + body_bytes :]
    at = BATCH.itemsize * batches + 4 * (ranges + pages)
    for start in range(0, len(tail), PAGE_BYTES):
        if at + 4 <= len(body):
            struct.pack_into("<I", body, at, google_crc32c.value(tail[start : start + PAGE_BYTES]))
            at += 4
    return header + struct.pack("<I", google_crc32c.value(header + bytes(body))) + bytes(body) + tail


def _read_index(content: bytes) -> None:
    disk = SimulatedDisk()
    disk.put_atomically("/x.sst", _sstable()[0])
    disk.put_atomically("/x.idx", content)
    table = Sstable.open("/x.sst", fs=disk)
    index = table._index
    assert isinstance(index, Index)
    for page in range(index.pages):
        index.page(page)
    index.hashes(0, table.summary.rows)
    for part in table.scan():
        assert len(part.keys) == len(part.values)
    with contextlib.suppress(Invalid):
        kv_received.check_table(table, Options())  # its merges are for others to refuse
    table.check_locations()  # what passes this is read by key
    for key in (b"", b"counter", b"row/007", b"zzzz", *(b"row/%03d" % number for number in range(9))):
        table.get(key)


def _qmft_seeds() -> list[bytes]:
    files = FileTable.of(
        [FileEntry(f"2026/01/01/000000000{n}.data", 10 * n, 10 * n + 9, 4096) for n in range(1, 4)]
        + [FileEntry("x.data", 100, 200, 1)]
    )
    manifest = QmftManifest(201, ActiveFileState(5, 4096, 3, "2026/01/02/0000000005.data"), files)
    return [
        manifest.encode(),
        QmftManifest.fresh().encode(),
        *(p.read_bytes() for p in (GOLDEN / "queue").glob("man*")),
    ]


def _qmft(data: bytes) -> bool:
    accepted = False
    zeroed = data[:20] + bytes(4) + data[24:]
    for content in (data, data[:20] + struct.pack("<I", zlib.crc32(zeroed)) + data[24:]):
        with contextlib.suppress(ManifestCorrupted, UnsupportedManifestVersion):
            manifest = QmftManifest.decode(content, "manifest.1")
            _same(QmftManifest.decode(manifest.encode(), "manifest.1"), manifest)
            entries = list(manifest.files)
            assert [entry.start_sequence for entry in entries] == manifest.files.starts.tolist()
            manifest.files.index_of(5)
            accepted = True
    return accepted


def _manifest_seeds() -> list[bytes]:
    """The number of the table, the length of the key, the key, the payload."""
    names = [table.name for table in tables.ALL]
    seeds = []
    rows = [json.loads((GOLDEN / "manifest" / name).read_text()) for name in ("v2.json", "v3.json")]
    for row in {**rows[0], **rows[1]}.values():
        if row["table"] in names:
            key, value = bytes.fromhex(row["key"]), bytes.fromhex(row["value"])
            seeds.append(bytes([names.index(row["table"]), len(key)]) + key + value[6:])
    return seeds


def _manifest(data: bytes) -> bool:
    if len(data) < 2:
        return False
    table: tables.Table[Any, Any] = tables.ALL[data[0] % len(tables.ALL)]
    key, payload = data[2 : 2 + data[1]], data[2 + data[1] :]
    accepted = False
    for value in (payload, codec.pack_value(table.name, key, table.codec.version, payload)):
        with contextlib.suppress(CorruptionError, UnsupportedVersion):
            record = table.codec.decode(key, value)
            _same(table.codec.decode(key, table.codec.encode(key, record)), record)
            accepted = True
    return accepted


def _vector_seeds() -> list[bytes]:
    matrix = np.arange(1, 5, dtype=np.float32).reshape(2, 2)
    rows = vector_section.Upserts([b"c", b"\xc3\xa9"], matrix, [b'{"n":1}', b""])
    parts = ((rows,), (vector_section.Deletes([b"a", b"b"]), rows))
    return [vector_section.encode_section(vector_section.VectorSection(*some)) for some in parts]


def _vector(data: bytes) -> bool:
    assert vector_section.section_weight(data) >= 0
    with contextlib.suppress(CorruptionError):
        section = vector_section.decode_section(data)
        again = vector_section.decode_section(vector_section.encode_section(section))
        assert vector_section.encode_section(again) == vector_section.encode_section(section)
    with contextlib.suppress(Invalid):
        payload = vector_section.encode_section(vector_section.receive_section(data, VectorOptions(dimensions=2)))
        again = vector_section.receive_section(payload, VectorOptions(dimensions=2))
        assert vector_section.encode_section(again) == payload
        return True
    return False


def _series_seeds() -> list[bytes]:
    sets = [check_labels("cpu", {"host": host, "dc": "é"}) for host in "abc"]
    index, times = np.array([0, 1, 2, 1], np.uint32), np.array([-5, 5, 5, 6], np.int64)
    block = series_section.SampleBlock(LabelTable.of(sets), index, times, np.arange(4, dtype=np.uint64))
    same = series_section.SampleBlock(LabelTable.of(sets), index[:3].copy(), times[[1, 1, 1]], block.bits[:3])
    parts = (series_section.MetricMetadata("cpu", "gauge"), series_section.SeriesDelete('cpu{host=~"a.*"}', 0, 9))
    seeds = [series_codec.encode_section(series_section.SeriesSection(*some)) for some in ((block,), (same, *parts))]
    return [*seeds, series_codec.compressed(seeds[0])]


def _series(data: bytes) -> bool:
    assert series_codec.section_weight(data) >= 0
    accepted = False
    with contextlib.suppress(CorruptionError):
        section = series_codec.decode_section(data)
        again = series_codec.decode_section(series_codec.encode_section(section))
        assert series_codec.encode_section(again) == series_codec.encode_section(section)
    with contextlib.suppress(Invalid):
        for part in receive_series(data).parts:
            if isinstance(part, series_section.SampleBlock):
                assert len(part.series.fingerprints) == len(part.series.label_bytes()) == len(part.series)
                part.series.labels(int(part.index[-1]))
        accepted = True
    return accepted


def _selector_seeds() -> list[bytes]:
    texts = ['cpu{host="a",dc=~"eu.*"}', '{"my.metric", "a b"!="\\n\\u00e9", c!~`x|y`}', "a:b:c"]
    return [text.encode() for text in texts]


def _selector(data: bytes) -> bool:
    try:
        matchers = parse_selector(data.decode(errors="surrogateescape"))
    except Invalid:
        return False
    assert parse_selector(selector_text(matchers)) == matchers
    for matcher in matchers:
        matcher.matches("eu-1")
    return True


TARGETS: dict[str, Target] = {
    "series_section": Target(_series_seeds, _series),
    "vector_section": Target(_vector_seeds, _vector),
    "selector": Target(_selector_seeds, _selector),
    "log": Target(_log_seeds, _log),
    "journal": Target(_journal_seeds, _journal),
    "wire": Target(_wire_seeds, _wire),
    "kv_section": Target(_kv_seeds, _kv),
    "queue_section": Target(_queue_seeds, _queue),
    "condition": Target(_condition_seeds, _condition),
    "reference": Target(_reference_seeds, _reference),
    "sstable_index": Target(_index_seeds, _index),
    "qmft": Target(_qmft_seeds, _qmft),
    "manifest_record": Target(_manifest_seeds, _manifest),
}
TARGETS.update({name: Target(*two) for name, two in FILE_TARGETS.items()})
