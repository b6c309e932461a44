"""Keys and records: their bytes, their order, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import CorruptionError, Invalid, UnsupportedVersion
from penstock.host.clock import SystemClock
from penstock.manifest import tables
from penstock.manifest.codec import pack_value
from penstock.manifest.keys import ChunkKey, MetricKey, PendingJobKey, WalStateKey, pack_id
from penstock.manifest.memory import MemoryView
from penstock.manifest.migrations import is_current, migrate
from penstock.manifest.records import (
    ChunkEntryRecord,
    ChunkFileRecord,
    Codec,
    CompressionConfig,
    DbDescriptorRecord,
    EncryptionConfig,
    Evicted,
    FailedPermanent,
    FlushGateState,
    GenerationRecord,
    GenerationWaiterSnapshot,
    InFlight,
    JobErrorSnapshot,
    JobKind,
    JobRecord,
    ManifestDbOptions,
    MetricDelta,
    MetricRecord,
    PendingJobRecord,
    RemoteArchived,
    RetentionPolicy,
    Tombstoned,
    WalStateRecord,
)
from penstock.manifest.settings import ManifestSettings
from penstock.testing import SimulatedDisk
from penstock.testing.manifest import MemoryEngine


def descriptor(name: str = "events", **changes: Any) -> DbDescriptorRecord:
    fields: dict[str, Any] = {
        "created_at_epoch_ms": 1_700_000_000_000,
        "name": name,
        "config_hash": bytes(range(32)),
        "wal_shards": 4,
        "options": ManifestDbOptions(
            wal_dir=f"{name}/log",
            chunk_dir=f"{name}/chunks",
            compression=CompressionConfig(Codec.ZSTD, 3),
            encryption=EncryptionConfig("master", 2),
            retention=RetentionPolicy(age_ms_max=86_400_000, bytes_max=1 << 30),
        ),
    }
    return DbDescriptorRecord(**{**fields, **changes})


def chunk(name: str = "events/chunks/1.arrow", **changes: Any) -> ChunkEntryRecord:
    fields: dict[str, Any] = {"file_name": name, "generation": 3, "size_bytes": 4096, "wal_range": (10, 20)}
    return ChunkEntryRecord(**{**fields, **changes})


def job(job_id: int, kind: int = JobKind.COMPACTION, db_id: int | None = 1, **changes: Any) -> JobRecord:
    return JobRecord(job_id=job_id, created_at_epoch_ms=5, db_id=db_id, kind=int(kind), **changes)


# (name, table, key, record): the golden file holds the bytes of each.
SAMPLES: list[tuple[str, tables.Table[Any, Any], Any, Any]] = [
    ("db-active", tables.DB, 1, descriptor()),
    ("db-tombstoned", tables.DB, 2**63, descriptor("old", status=Tombstoned(1_700_000_000_001))),
    (
        "wal_state",
        tables.WAL_STATE,
        WalStateKey(1, 0),
        WalStateRecord(
            stored_lsn=5,
            last_applied_lsn=7,
            durable_lsn=9,
            highest_lsn=2**64 - 1,
            last_sealed_segment=3,
            last_checkpoint_generation=2,
            restart_epoch=6,
            flush_gate_state=FlushGateState(11, 12, None),
            other_gates=((3, FlushGateState(None, None, 13)),),
            detail=b"\x00state",
        ),
    ),
    ("chunk-local", tables.CHUNKS, ChunkKey(1, 2), chunk(staged=True, purge_after_epoch_ms=9, detail=b"level 0")),
    (
        "chunk-archived",
        tables.CHUNKS,
        ChunkKey(1, 3),
        chunk(residency=RemoteArchived("s3/a", True), uploaded_at_epoch_ms=8, compression=Codec.LZ4, encrypted=True),
    ),
    ("chunk-evicted", tables.CHUNKS, ChunkKey(1, 4), chunk(residency=Evicted("s3/b"))),
    ("chunk_files", tables.CHUNK_FILES, "events/chunks/1.arrow", ChunkFileRecord(1, 2)),
    (
        "job-in-flight",
        tables.JOBS,
        7,
        job(
            7,
            state=InFlight("worker-1", 6, 2),
            payload=b"\x01\x02",
            attempts=2,
            last_error=JobErrorSnapshot(5, "OSError", "no space"),
        ),
    ),
    (
        "job-repair",
        tables.JOBS,
        8,
        job(8, JobKind.REPAIR, None, repairs_job_id=7, repairs_kind=3, state=FailedPermanent(99)),
    ),
    ("job_pending_index", tables.PENDING, PendingJobKey(1, 0x8003), PendingJobRecord(8)),
    ("metrics", tables.METRICS, MetricKey(2**40, 17), MetricRecord(1.5, 2, 0.5, 1.0, (1, 0, 1), 77)),
    (
        "generation_watermarks",
        tables.GENERATIONS,
        16,
        GenerationRecord(64, 1_700_000_000_002, (GenerationWaiterSnapshot(1, 65, 1_700_000_000_500),)),
    ),
]


GOLDEN = Path(__file__).parents[2] / "golden" / "manifest"
IDS = [name for name, *_ in SAMPLES]


def golden_rows() -> dict[str, dict[str, str]]:
    """Return the bytes of each sample in the version of its table: 3 of `db`, 2 of the others."""
    rows = [json.loads((GOLDEN / name).read_text()) for name in ("v2.json", "v3.json")]
    return {**rows[0], **rows[1]}


@pytest.mark.parametrize(("name", "table", "key", "record"), SAMPLES, ids=IDS)
def test_bytes_are_those_of_the_version(name: str, table: tables.Table[Any, Any], key: Any, record: Any) -> None:
    golden = golden_rows()[name]
    assert golden["table"] == table.name
    view = MemoryView({table.name: {}})
    table.put(view, key, record)
    assert [(k.hex(), v.hex()) for k, v in view.scan(table.name)] == [(golden["key"], golden["value"])]
    stored = MemoryView({table.name: {bytes.fromhex(golden["key"]): bytes.fromhex(golden["value"])}})
    assert list(table.scan(stored)) == [(key, record)]
    assert table.get(stored, key) == record


@pytest.mark.parametrize("version", [1, 2])
def test_rows_of_earlier_versions_are_brought_up_to_date(version: int) -> None:
    """Every golden row of an earlier version, in one manifest, becomes the row of the current one."""
    engine = MemoryEngine("manifest", ManifestSettings(), SimulatedDisk(), SystemClock())
    old, new = json.loads((GOLDEN / f"v{version}.json").read_text()), golden_rows()
    with engine.write() as view:
        for table in tables.ALL:
            key, number = f"schema/{table.name}".encode(), version.to_bytes(2, "big")
            view.put("meta", key, number if version == 1 else pack_value("meta", key, 2, number))
        for row in old.values():
            view.put(row["table"], bytes.fromhex(row["key"]), bytes.fromhex(row["value"]))
    assert migrate(engine) == (len(old) if version == 1 else sum(row["table"] == "db" for row in old.values()))
    with engine.read() as view:
        for row in new.values():
            stored = view.get(row["table"], bytes.fromhex(row["key"]))
            assert stored is not None
            assert stored.hex() == row["value"]
        assert is_current(view)
    assert migrate(engine) == 0


@pytest.mark.parametrize(("name", "table", "key", "record"), SAMPLES, ids=IDS)
def test_bytes_that_were_not_written_are_refused(
    name: str, table: tables.Table[Any, Any], key: Any, record: Any
) -> None:
    packed, value = table.packed(key, record)
    for damaged in (value + b"\0", value[:-1], value[:1], b"", value[:2], value[:2] + b"\xc0", b"\0\0" + value[2:]):
        with pytest.raises(CorruptionError, match=table.name):
            table.codec.decode(packed, damaged)
    newer = pack_value(table.name, packed, 4, value[6:])
    with pytest.raises(UnsupportedVersion, match="version 4"):
        table.codec.decode(packed, newer)


@pytest.mark.parametrize(("name", "table", "key", "record"), SAMPLES, ids=IDS)
def test_every_flipped_bit_of_a_row_is_noticed(name: str, table: tables.Table[Any, Any], key: Any, record: Any) -> None:
    packed, value = table.packed(key, record)
    row = packed + value
    for bit in range(8 * len(row)):
        flipped = bytearray(row)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptionError):
            table.codec.decode(bytes(flipped[: len(packed)]), bytes(flipped[len(packed) :]))


def test_a_row_under_another_name_is_noticed() -> None:
    key, value = tables.PENDING.packed(PendingJobKey(1, 2), PendingJobRecord(3))
    with pytest.raises(CorruptionError, match="checksum"):
        tables.PENDING.codec.decode(PendingJobKey(1, 3).pack(), value)
    with pytest.raises(CorruptionError, match="checksum"):
        tables.WAL_STATE.codec.decode(key, value)


def test_a_record_that_breaks_its_own_rule_is_corrupt_on_disk() -> None:
    unordered = msgspec.msgpack.encode((9, 8, 8, 8, 0, 0, 0, (None, None, None), (), b""))
    with pytest.raises(CorruptionError, match="watermarks"):
        tables.WAL_STATE.codec.decode(b"key", pack_value("wal_state", b"key", 2, unordered))


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**16 - 1)), min_size=2))
def test_the_order_of_keys_is_the_order_of_numbers(pairs: list[tuple[int, int]]) -> None:
    keys = [WalStateKey(*pair) for pair in pairs]
    assert sorted(keys) == [WalStateKey.unpack(packed) for packed in sorted(key.pack() for key in keys)]
    chunks = [ChunkKey(*pair) for pair in pairs]
    assert sorted(chunks) == [ChunkKey.unpack(packed) for packed in sorted(key.pack() for key in chunks)]
    metrics = [MetricKey(*pair) for pair in pairs]
    assert sorted(metrics) == [MetricKey.unpack(packed) for packed in sorted(key.pack() for key in metrics)]


def test_keys_out_of_range_are_refused() -> None:
    for key in (WalStateKey(2**64, 0), WalStateKey(1, 2**16), ChunkKey(-1, 0), PendingJobKey(1, -1)):
        with pytest.raises(Invalid, match="must fit"):
            key.pack()
    with pytest.raises(CorruptionError):
        WalStateKey.unpack(b"short")
    with pytest.raises(Invalid):
        pack_id(-1)


@pytest.mark.parametrize("path", ["/etc/passwd", "../up", "a/../../b", "", "a\0b"])
def test_paths_stay_in_the_store(path: str) -> None:
    with pytest.raises(Invalid, match="relative"):
        chunk(path)
    with pytest.raises(Invalid, match="relative"):
        ManifestDbOptions(wal_dir="log", chunk_dir=path)


def test_records_check_themselves() -> None:
    cases: list[Any] = [
        lambda: chunk("x" * 121),
        lambda: chunk(wal_range=(2, 1)),
        lambda: chunk(staged=True),
        lambda: descriptor(config_hash=b"short"),
        lambda: descriptor(wal_shards=0),
        lambda: descriptor(""),
        lambda: job(1, 63),
        lambda: job(1, 0x8000),
        lambda: job(1, JobKind.REPAIR),
        lambda: job(1, repairs_job_id=2, repairs_kind=1),
        lambda: job(1, attempts_max=0),
        lambda: MetricDelta(float("nan"), 1, 0.0, 1.0),
        lambda: MetricDelta(1.0, 1, 2.0, 1.0),
        lambda: MetricDelta(1.0, 1, float("nan"), 1.0),
        lambda: MetricDelta(0.0, -1, 0.0, 0.0),
        lambda: MetricDelta(0.0, 1, 0.0, 0.0, (1,) * 65),
        lambda: WalStateRecord(stored_lsn=1),
        lambda: tables.JOBS.codec.encode(b"key", job(2**64)),
    ]
    for case in cases:
        with pytest.raises(Invalid):
            case()


def test_metrics_add_up() -> None:
    record = MetricRecord(1.0, 1, 1.0, 1.0, (1,), 10)
    merged = record.merged(MetricDelta(5.0, 2, -1.0, 6.0, (0, 2)), 9)
    assert merged == MetricRecord(6.0, 3, -1.0, 6.0, (1, 2), 10)
    assert record.merged(MetricDelta(0.0, 0, math.inf, -math.inf), 11) is record


def test_gates_are_kept_apart_by_kind() -> None:
    record = WalStateRecord().with_gate(9, FlushGateState(1)).with_gate(3, FlushGateState(2))
    record = record.with_gate(JobKind.FLUSH, FlushGateState(3))
    assert [record.gate(kind).active_job_id for kind in (1, 2, 3, 9)] == [3, None, 2, 1]
    assert [kind for kind, _ in record.gates()] == [1, 3, 9]
