"""Spark follows the change feed of a table: whole commits, every change once, whatever ends in between."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

import penstock
import penstock.spark
from penstock.spark.batch_runner import BatchRunner
from penstock.store.store import Store

COLUMNS = ["key", "value", "_change_type", "_commit_version", "_commit_timestamp", "_shard"]


def route(changes: Any) -> dict[str, Any]:
    """A line of the log for each change."""
    line = "concat_ws(' ', _commit_version, _change_type, CAST(key AS STRING), value) AS payload"
    return {"log": changes.selectExpr(line)}


def follow(spark: Any, folder: str, **options: Any) -> penstock.spark.StreamProgress:
    query = penstock.spark.stream(
        spark, folder, source="users", consumer="log", batch=route, available_now=True, **options
    )
    return penstock.spark.wait(query, timeout_s=120)


def logged(store: Store) -> Counter[bytes]:
    return Counter(message.payload for message in store.queue("log").read())


def lines(store: Store) -> Counter[bytes]:
    rows = store.kv("users").changes().to_arrow().to_pylist()
    parts = [[str(row["_commit_version"]), row["_change_type"], row["key"].decode(), row["value"]] for row in rows]
    return Counter(" ".join(part for part in some if part is not None).encode() for some in parts)


def test_every_change_counts_once(
    spark: Any, store: Store, folder: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    users = store.kv("users", value="utf8", shards=2, changes=penstock.ChangeOptions(preimages=True))
    store.queue("log")
    users.put_many({b"k%d" % number: "one" for number in range(50)}, durable=True)
    users.put(b"k1", "two", durable=True)
    checkpoint, commit = str(tmp_path / "checkpoint"), BatchRunner.commit

    def dies(runner: BatchRunner, *args: Any) -> None:
        """The commit happened, and Spark does not know it."""
        commit(runner, *args)
        raise RuntimeError("the driver died")

    monkeypatch.setattr(BatchRunner, "commit", dies)
    with pytest.raises(RuntimeError, match="died"):
        follow(spark, folder, checkpoint=checkpoint)
    monkeypatch.setattr(BatchRunner, "commit", commit)
    users.delete(b"k2", durable=True)
    users.delete_range(b"k3", b"k4", durable=True)
    follow(spark, folder, checkpoint=checkpoint, max_rows=5)
    users.put(b"k1", "three", durable=True)
    assert follow(spark, folder).lag == 0  # the checkpoint is lost
    assert logged(store) == lines(store)
    assert max(logged(store).values()) == 1


def test_samples_count_once_and_are_read_in_batches(spark: Any, store: Store, folder: str) -> None:
    cpu = store.series("users", shards=2, changes=True)
    store.queue("log")
    for host in "abc":
        cpu.write_columns("cpu", [1.0, 2.0], {"host": host}, times=[1, 2], durable=True)
    first = cpu.changes().to_arrow()["_commit_version"][-1].as_py()
    line = "concat_ws(' ', _commit_version, _change_type, labels['host'], unix_micros(time), value) AS payload"

    def logging(changes: Any) -> dict[str, Any]:
        return {"log": changes.selectExpr(line)}

    for _ in range(2):
        query = penstock.spark.stream(
            spark, folder, source="users", consumer="log", batch=logging, available_now=True, max_rows=4
        )
        assert penstock.spark.wait(query, timeout_s=120).lag == 0
        if cpu.changes(after=first).to_arrow().num_rows == 0:
            cpu.delete('{host="b"}', durable=True)
            cpu.write("cpu", 5.0, {"host": "c"}, time=2, durable=True)

    def lines(rows: list[dict[str, Any]]) -> Counter[bytes]:
        return Counter(
            " ".join(
                str(part)
                for part in (
                    row["_commit_version"],
                    row["_change_type"],
                    dict(row["labels"])["host"],
                    row["time"].microsecond,
                    row["value"],
                )
                if part is not None
            ).encode()
            for row in rows
        )

    everything = cpu.changes().to_arrow().to_pylist()
    assert logged(store) == lines(everything)
    assert {row["_change_type"] for row in everything} == {"insert", "update_postimage", "delete"}

    def read(**options: object) -> list[Any]:
        reader = spark.read.format("penstock").option("table", "users").option("changes", "true")
        return list(reader.options(**options).load(folder).collect())

    versions = Counter(row["_commit_version"] for row in everything)
    assert Counter(row._commit_version for row in read()) == versions
    until = {lsn: count for lsn, count in versions.items() if lsn <= first}
    assert Counter(row._commit_version for row in read(until=first)) == until
    assert Counter(row._commit_version for row in read(after=first)) == versions - Counter(until)
    assert read(after=first, until=first) == []
    wrong = {"after": 1 << 40, "until": "x", "snapshot": "none", "start": 1}
    for name, value in wrong.items():
        with pytest.raises(Exception, match=f"not there|option {name}|no snapshot|snapshot"):
            read(**{name: value})


def test_a_plain_stream_and_its_refusals(spark: Any, store: Store, folder: str, tmp_path: Any) -> None:
    users = store.kv("users", value="int64", changes=True)
    store.kv("plain")
    store.queue("dead")
    users.put(b"a", 1, durable=True)

    def reader(table: str, **options: str) -> Any:
        return spark.readStream.format("penstock").option("table", table).options(**options).load(folder)

    frame = reader("users", changes="true")
    assert frame.columns == COLUMNS
    writer = frame.writeStream.format("memory").queryName("fed").trigger(availableNow=True)
    writer.option("checkpointLocation", str(tmp_path / "fed")).start().awaitTermination(120)
    rows = spark.table("fed").collect()
    assert [(row.key, row.value, row._change_type) for row in rows] == [(b"a", 1, "insert")]
    with pytest.raises(Exception, match="has no change feed"):
        reader("plain", changes="true")
    with pytest.raises(penstock.errors.KindMismatch, match="has no change feed"):
        penstock.spark.stream(spark, folder, source="plain", consumer="x", batch=route)
    with pytest.raises(penstock.errors.Invalid, match="change feed"):
        penstock.spark.stream(spark, folder, source="users", consumer="x", batch=route, dead_letter="dead")


def test_changes_of_a_queue_count_once_beside_its_messages(spark: Any, store: Store, folder: str) -> None:
    """The stream of the feed has inserts and deletes; that of the messages, of the same consumer, is apart."""
    orders = store.queue("users", shards=2, changes=True)
    store.queue("log")
    for number in range(6):
        orders.put(b"%d" % number, key=b"%d" % number, durable=True)
    orders.trim(2, shard=0, durable=True)

    def logging(changes: Any) -> dict[str, Any]:
        line = "concat_ws(' ', _commit_version, _change_type, shard, sequence, CAST(payload AS STRING)) AS payload"
        return {"log": changes.selectExpr(line)}

    def messages(frame: Any) -> dict[str, Any]:
        assert "_change_type" not in frame.columns
        return {}

    for _ in range(2):
        query = penstock.spark.stream(
            spark,
            folder,
            source="users",
            consumer="log",
            batch=logging,
            available_now=True,
            changes=True,
            max_rows=4,
        )
        assert penstock.spark.wait(query, timeout_s=120).lag == 0
        orders.trim(9, shard=1, durable=True)
    plain = penstock.spark.stream(spark, folder, source="users", consumer="log", batch=messages, available_now=True)
    penstock.spark.wait(plain, timeout_s=120)
    rows = orders.changes().to_arrow().to_pylist()
    names = ("_commit_version", "_change_type", "shard", "sequence", "payload")
    expected = [[row[name] for name in names] for row in rows]
    texts = [
        " ".join(part.decode() if isinstance(part, bytes) else str(part) for part in parts if part is not None)
        for parts in expected
    ]
    assert logged(store) == Counter(text.encode() for text in texts[: sum(logged(store).values())])
    assert {row["_change_type"] for row in rows} == {"insert", "delete"}
    reader = spark.read.format("penstock").option("table", "users").option("changes", "true")
    assert reader.load(folder).count() == len(rows)
    with pytest.raises(penstock.errors.KindMismatch, match="has no change feed"):
        penstock.spark.stream(spark, folder, source="log", consumer="x", batch=route, changes=True)
