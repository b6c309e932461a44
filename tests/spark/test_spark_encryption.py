"""Encrypted tables on Spark: tasks read, write and compact encrypted files with a key that the owner sends them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from test_spark_maintenance import SETTINGS, maintaining, wait_for_driver

import penstock
from penstock.archive.chunk import ChunkIdentity
from penstock.lsm.rows import Columns
from penstock.lsm.writer import SstableWriter, index_path

KEYS = {1: b"1" * 32}
MARKER = "Zx9Marker"
ROWS = 40_000
MORE = " more" * 40  # so much that tasks write files, not sections
ZSTD = penstock.StorageOptions(compression=penstock.CompressionConfig(penstock.Codec.ZSTD, 3))


def leaks(folder: str) -> list[str]:
    return [str(path) for path in Path(folder).rglob("*") if path.is_file() and MARKER.encode() in path.read_bytes()]


def replace_by_a_plain_file(store: penstock.Store, table: str) -> None:
    """Put a file in the place of an encrypted one, with all that its name, header and index can show but the key."""
    chunk = store.chunks(table)[0]
    path = f"{store.path}/{chunk.file}"
    for name in (path, index_path(path)):
        store.files.unlink(name)
    writer = SstableWriter(store.files, path, ChunkIdentity(store=store.identity, chunk_id=chunk.chunk))
    writer.append(Columns.of([b"made up"], [b"by somebody"], 1, [0]))
    writer.finish()


def test_tasks_read_write_and_compact_encrypted_files(spark: Any, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with penstock.open(folder, keys=KEYS, encrypt=True, settings=SETTINGS) as store:
        users = store.kv("users", value="utf8", storage=ZSTD)
        store.queue("events", storage=ZSTD)
        names = spark.range(ROWS).selectExpr(
            "cast(concat('Zx9Marker', id) as binary) as key",
            "concat('Zx9Marker value ', id, repeat(' more', 40)) as value",
        )
        for _ in range(2):
            names.write.format("penstock").option("table", "users").mode("append").save(folder)
        names.selectExpr("cast(value as binary) as payload").write.format("penstock").option("table", "events").mode(
            "append"
        ).save(folder)
        frame = spark.read.format("penstock").option("table", "users").load(folder)
        assert frame.selectExpr("count(*)", "min(value)").first()[:] == (ROWS, "Zx9Marker value 0" + MORE)
        assert spark.read.format("penstock").option("table", "events").load(folder).count() == ROWS
        plans: list[bytes] = []
        take = store.offers.take

        def taken(*arguments: Any) -> Any:
            offer = take(*arguments)
            plans.append(msgspec.msgpack.encode(offer))
            return offer

        monkeypatch.setattr(store.offers, "take", taken)
        with maintaining(spark, folder) as done:
            wait_for_driver(store)
            store.compact("users")
        assert done == [1]
        key = store._keys.table_key(store.port.table("users").table_id)  # type: ignore[union-attr]
        assert plans
        assert not any(secret in plan for plan in plans for secret in (key, key.hex().encode(), *KEYS.values()))
        assert len(users) == ROWS
        assert users.get(b"Zx9Marker77") == "Zx9Marker value 77" + MORE
        assert leaks(folder) == []
        replace_by_a_plain_file(store, "users")
        with pytest.raises(Exception, match="it is not encrypted, and its table is"):
            frame.count()
    assert leaks(folder) == []
