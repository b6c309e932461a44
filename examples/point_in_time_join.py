"""Point-in-time join: each alarm beside the latest reading of its device at or before it.

python -m examples.point_in_time_join [FOLDER]
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from pyspark.sql import SparkSession

import penstock
import penstock.spark
from examples import run

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
READINGS = [("d0", second, 20.0 + second / 4) for second in range(0, 60, 4)] + [("d1", 30, 5.0), ("d1", 50, 6.0)]
ALARMS = [("d0", 7, "smoke"), ("d0", 8, "heat"), ("d0", 90, "heat"), ("d1", 10, "smoke"), ("d1", 49, "door")]

# Both in one column of time: one sort for each device, where a join by `<=` would compare every pair. Where an alarm
# and a reading have the same time, the reading comes first.
JOIN = """
SELECT * FROM (
  SELECT device, time, alarm, last_value(reading) IGNORE NULLS OVER (
    PARTITION BY device ORDER BY time, alarm IS NOT NULL, sequence ROWS UNBOUNDED PRECEDING) AS reading
  FROM (
    SELECT CAST(key AS STRING) AS device, timestamp AS time, sequence, CAST(NULL AS STRING) AS alarm,
      CAST(CAST(payload AS STRING) AS DOUBLE) AS reading FROM readings
    UNION ALL
    SELECT CAST(key AS STRING), timestamp, sequence, CAST(payload AS STRING), NULL FROM alarms))
WHERE alarm IS NOT NULL ORDER BY device, time"""


def fill(store: penstock.Store) -> None:
    """Two queues; a message's key is its device, and its time when it was measured."""
    with store.batch(token=("example", 1)) as batch:
        for device, second, value in READINGS:
            time = NOON + timedelta(seconds=second)
            batch.queue("readings").put(b"%.2f" % value, key=device.encode(), time=time)
        for device, second, alarm in ALARMS:
            batch.queue("alarms").put(alarm.encode(), key=device.encode(), time=NOON + timedelta(seconds=second))


def main(spark: SparkSession, folder: str) -> list[tuple[str, str, float | None]]:
    """Device, alarm and reading; None where there was no reading yet."""
    with penstock.open(folder) as owner:
        owner.queue("readings", shards=2)
        owner.queue("alarms")
        fill(owner)
        # Both tables of one moment, while others go on writing.
        with penstock.connect(folder) as store, store.snapshot() as snapshot:
            penstock.spark.views(spark, folder, snapshot=snapshot.id)
            joined = spark.sql(JOIN)
            joined.show(truncate=False)
            return [(row.device, row.alarm, row.reading) for row in joined.collect()]


if __name__ == "__main__":
    run(main)
