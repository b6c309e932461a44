"""What came of a run: everything counted at one LSN, dead letters by reason, and a join on Spark."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter

import penstock

CONSUMER = "router"
JOIN_S_MAX = 600


def account(store: penstock.Store) -> dict[str, int]:
    """Count everything at one LSN; the last number is the difference."""
    position = store.queue("events").consumer(CONSUMER).position
    with store.snapshot() as snapshot:
        expected = dict(snapshot.kv("expected", value="int64").scan())
        totals = sum(value for _, value in snapshot.kv("totals", value="int64").scan())
        dead = snapshot.queue("dead").to_arrow().num_rows
        produced = snapshot.queue("events").to_arrow().num_rows
    read = sum(place - 1 for place in position.values())
    sound, broken = expected.get(b"sound", 0), expected.get(b"broken", 0)
    difference = abs(produced - sound - broken) + abs(produced - read) + abs(sound - totals) + abs(broken - dead)
    return {
        "produced": produced,
        "read by Spark": read,
        "accepted (sound records produced)": sound,
        "in the running totals": totals,
        "dead-lettered": dead,
        "difference": difference,
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


def point_in_time(folder: str) -> list[dict[str, object]]:
    """Join each high reading with what was known of its device in the ten seconds before, at one snapshot."""
    command = [sys.executable, "-m", "examples.accounting", folder]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=JOIN_S_MAX)
    except subprocess.TimeoutExpired:
        raise SystemExit(f"the join did not end within {JOIN_S_MAX} s: is the machine busy?") from None
    lines = ran.stdout.splitlines()
    if ran.returncode or not lines:
        raise SystemExit(f"the join failed: {ran.stderr.strip().splitlines()[-1:]}")
    found: list[dict[str, object]] = json.loads(lines[-1])
    return found


def join(folder: str) -> None:
    from pyspark.sql import functions as F

    import penstock.spark

    spark = penstock.spark.session("join")
    penstock.spark.views(spark, folder)
    parsed = F.from_json(F.col("payload").cast("string"), "device string, n long, value double, put_us long")
    spark.table("events").select(parsed.alias("r")).select("r.*").createOrReplaceTempView("readings")
    rows = [row.asDict() for row in spark.sql(JOIN).collect()]
    spark.stop()
    print(json.dumps(rows))


if __name__ == "__main__":
    join(sys.argv[1])
