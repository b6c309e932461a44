"""What came of a run: everything counted at one LSN, dead letters by reason, and a join on Spark."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import penstock
from examples import fingerprints, metrics

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
        devices, torn = fingerprints.check(snapshot)
    read = sum(sequence - 1 for sequence in position.values())
    good, broken = expected.get(b"sound", 0), expected.get(b"broken", 0)
    pairs = [(produced, good + broken), (produced, read), (good, totals), (good, samples), (broken, dead)]
    pairs += [(samples, count) for count in rolled.values()] + [(torn, 0)]
    return {
        "produced": produced,
        "read by Spark": read,
        "accepted (sound records produced)": good,
        "in the running totals": totals,
        "samples in the series": samples,
        **{f"samples in the rollup {name}": count for name, count in rolled.items()},
        "devices with a fingerprint": devices,
        "fingerprints of another commit than the reading": torn,
        "dead-lettered": dead,
        "difference": sum(abs(one - other) for one, other in pairs),
    }


def reasons(store: penstock.Store) -> dict[str, int]:
    """Count the dead letters by the reason they carry."""
    payloads = store.queue("dead").to_arrow().column("payload").to_pylist()
    return dict(Counter(json.loads(payload)["reason"] for payload in payloads).most_common())


JOIN = """
WITH readings AS (SELECT labels['device'] AS device, time, value FROM metrics WHERE metric = 'temperature')
SELECT a.device, a.value AS high, count(*) AS readings_before, round(avg(b.value), 2) AS mean_before,
  any_value(t.value) AS readings_in_all,
  round(CAST(any_value(f.vector[1]) AS DOUBLE), 2) AS deviation_in_the_last_window
FROM readings a
  JOIN readings b ON a.device = b.device AND b.time <= a.time AND b.time > a.time - INTERVAL 10 SECONDS
  JOIN totals t ON CAST(t.key AS STRING) = a.device
  JOIN fingerprints f ON f.id = a.device
WHERE a.value >= 24.99
GROUP BY a.device, a.value, a.time ORDER BY high DESC, a.device LIMIT 5"""


def join(spark: Any, folder: str) -> list[dict[str, object]]:
    """Join each high reading with what is known of its device in series, kv and vectors, at one snapshot."""
    import penstock.spark

    with penstock.connect(folder) as store, store.snapshot() as snapshot:
        penstock.spark.views(spark, folder, snapshot=snapshot.id)
        return [row.asDict() for row in spark.sql(JOIN).collect()]
