"""What came of a run: everything counted at one LSN, dead letters by reason, and a join on Spark."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import penstock
from examples import metrics

CONSUMER = "router"
READING = "device string, site string, n long, value double, put_us long"  # the fields of a payload


def account(store: penstock.Store) -> dict[str, int]:
    """Count everything at one LSN; the last number is the difference."""
    position = store.queue("events").consumer(CONSUMER).position
    with store.snapshot() as snapshot:
        expected = dict(snapshot.kv("expected", value="int64").scan())
        totals = sum(value for _, value in snapshot.kv("totals", value="int64").scan())
        dead = snapshot.queue("dead").to_arrow().num_rows
        produced = snapshot.queue("events").to_arrow().num_rows
        samples = metrics.count_samples(snapshot)
        rolled = {name: metrics.count_rolled(snapshot, name) for name in metrics.ROLLUPS}
    read = sum(place - 1 for place in position.values())
    sound, broken = expected.get(b"sound", 0), expected.get(b"broken", 0)
    pairs = [(produced, sound + broken), (produced, read), (sound, totals), (sound, samples), (broken, dead)]
    pairs += [(samples, count) for count in rolled.values()]
    return {
        "produced": produced,
        "read by Spark": read,
        "accepted (sound records produced)": sound,
        "in the running totals": totals,
        "samples in the series": samples,
        **{f"samples in the rollup {name}": count for name, count in rolled.items()},
        "dead-lettered": dead,
        "difference": sum(abs(one - other) for one, other in pairs),
    }


def reasons(store: penstock.Store) -> dict[str, int]:
    """Count the dead letters by the reason they carry."""
    payloads = store.queue("dead").to_arrow().column("payload").to_pylist()
    return dict(Counter(json.loads(payload)["reason"] for payload in payloads).most_common())


JOIN = """
SELECT a.device, a.value AS high, count(*) AS readings_before, round(avg(b.value), 2) AS mean_before
FROM readings a JOIN readings b
  ON a.device = b.device AND b.put_us <= a.put_us AND b.put_us > a.put_us - 10000000
WHERE a.value >= 24.99
GROUP BY a.device, a.value, a.put_us ORDER BY high DESC, a.device LIMIT 5"""


def join(spark: Any, folder: str) -> list[dict[str, object]]:
    """Join each high reading with what was known of its device in the ten seconds before, at one snapshot."""
    from pyspark.sql import functions as F

    import penstock.spark

    penstock.spark.views(spark, folder)
    parsed = F.from_json(F.col("payload").cast("string"), READING)
    spark.table("events").select(parsed.alias("r")).select("r.*").createOrReplaceTempView("readings")
    return [row.asDict() for row in spark.sql(JOIN).collect()]
