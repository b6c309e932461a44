"""Spark on a cluster: bulk writes by file, reads of any member, a commit that counts once across leader changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import functions as F

import penstock.spark
from penstock.testing.members import TOKEN, LocalCluster

ROWS = 60_000  # more than goes through the journal


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path, serve=True) as members:
        monkeypatch.setenv("PENSTOCK_TOKEN", TOKEN)
        monkeypatch.setenv("PENSTOCK_AUTHORITY", str(members.folder / "certificates" / "authority.pem"))
        yield members


def _address(cluster: LocalCluster, *names: str) -> str:
    chosen = [cluster.served[name] for name in names or cluster.names]
    return "penstock://" + ",".join(f"{host}:{port}" for host, port in chosen)


def test_spark_writes_to_the_leader_and_reads_any_member(spark: Any, cluster: LocalCluster) -> None:
    address = _address(cluster)
    with cluster.connect() as store:
        store.kv("loaded"), store.kv("totals", value="int64")
        events = store.queue("events", shards=2)
        events.put_many([b"%d" % number for number in range(500)], keys=[b"%d" % (number % 7) for number in range(500)])
        store.flush()
    rows = spark.range(0, ROWS, 1, 2).select(
        F.format_string("%08d", F.col("id")).cast("binary").alias("key"), F.lit(b"x" * 40).alias("value")
    )
    authority = str(cluster.folder / "certificates" / "authority.pem")
    writer = rows.write.format("penstock").option("table", "loaded").option("token", TOKEN)
    writer.option("authority", authority).mode("append").save(address)

    def reader(table: str) -> Any:
        read = spark.read.format("penstock").option("table", table).option("token", TOKEN)
        return read.option("authority", authority)

    cluster.await_agreement()
    for name in cluster.names:  # the files came to all of them
        assert reader("loaded").option("reads", "local").load(_address(cluster, name)).count() == ROWS

    counts = reader("events").load(address).groupBy("key").agg(F.count("*").alias("value"))
    counts = counts.withColumn("op", F.lit("add_i64"))
    with cluster.connect() as store:
        start, end = store.queue("events").offsets("earliest"), store.queue("events").offsets("latest")
    where: dict[str, Any] = {"source": "events", "consumer": "c", "start": start, "end": end}
    cluster.stop(cluster.leader())  # the commit finds the next leader
    assert not penstock.spark.commit(address, {"totals": counts}, **where).duplicate
    cluster.start(next(name for name in cluster.names if name not in cluster.members))
    cluster.await_agreement()
    cluster.stop(cluster.leader())  # and the next one knows that it happened
    assert penstock.spark.commit(address, {"totals": counts}, **where).duplicate
    with cluster.connect(reads="linearizable") as store:
        totals: dict[Any, Any] = dict(store.kv("totals").scan())
    assert totals == Counter(b"%d" % (number % 7) for number in range(500))
