"""Each example gives what plain Python makes of the same data; what one who copies from them gets wrong is one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyspark
import pytest
from examples import batch, bulk_load, point_in_time_join, several_tables, streaming

import penstock.spark
from penstock.errors import Invalid, KindMismatch, NotFound, PositionConflict
from penstock.spark.offset_log import OffsetLog
from penstock.store.store import Store

ROOT = Path(__file__).parents[2]


def test_batch(spark: Any, folder: str) -> None:
    readings = [(["roof", "roof", "cellar"][number % 3], 20 + number % 7) for number in range(1_000)]
    expected = {}
    for site in ("roof", "cellar"):
        values = [value for where, value in readings if where == site]
        expected[site] = sum(values) / len(values)
    assert batch.main(spark, folder) == expected


def test_batch_as_a_command(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, "-m", "examples.batch", "data"],
        cwd=tmp_path / "here",
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    assert "1,000 events with the columns shard, sequence, timestamp, key, payload" in ran.stdout
    assert "|cellar|     333|              23.0|" in ran.stdout
    assert (tmp_path / "here" / "data" / "STORE").exists()


def windows(minutes: Iterable[int]) -> dict[str, int]:
    return dict(Counter(f"2026-01-01 12:{minute // 5 * 5:02d}" for minute in minutes))


def test_streaming(spark: Any, folder: str) -> None:
    passed = max(streaming.FIRST) - 10  # where the watermark is when the later ones come
    minutes = streaming.FIRST + [minute for minute in streaming.LATER if minute // 5 * 5 + 5 > passed]
    assert len(minutes) == len(streaming.FIRST) + len(streaming.LATER) - 1
    over = [minute for minute in minutes if minute // 5 * 5 + 5 <= max(minutes) - 10]
    assert streaming.main(spark, folder) == windows(over)


def test_several_tables(spark: Any, folder: str) -> None:
    sold: Counter[str] = Counter()
    for number in range(400):
        if number % 10 != 9:
            sold[["bolt", "nut", "gear"][number % 3]] += 1 + number % 4
    expected = {"stock": {item: -amount for item, amount in sold.items()}, "ledger": 360, "parcels": 360, "dead": 40}
    assert several_tables.main(spark, folder) == {"read": [200, 200], **expected}
    assert several_tables.main(spark, folder) == {"read": [0, 0], **expected}


def test_bulk_load(spark: Any, folder: str) -> None:
    prices = {b"item-%07d" % number: number * 3 for number in range(100_000, bulk_load.ROWS)}
    prices |= {b"item-%07d" % number: 7 for number in range(1_000)}
    summary = bulk_load.main(spark, folder)
    assert (summary["left"], summary["tries"]) == (len(prices), [False, True])
    assert summary["prices"] == prices | {b"item-new": 100}
    assert summary["loads"] == {b"2026-01-01": "done"}


def test_point_in_time_join(spark: Any, folder: str) -> None:
    expected = []
    for device, second, alarm in sorted(point_in_time_join.ALARMS):
        before = [(at, value) for of, at, value in point_in_time_join.READINGS if of == device and at <= second]
        expected.append((device, alarm, max(before)[1] if before else None))
    assert point_in_time_join.main(spark, folder) == expected
    assert [reading for _, _, reading in expected] == [21.0, 22.0, 34.0, None, 5.0]


# -- what somebody who copies from them gets wrong


def test_streams_that_cannot_begin(spark: Any, store: Store, folder: str, tmp_path: Path) -> None:
    """Each mistake is one line, before Spark does anything."""
    store.kv("totals", value="int64")
    events = store.queue("events")
    store.queue("others", shards=2)
    options: dict[str, Any] = {"source": "events", "consumer": "c", "batch": lambda frame: {}, "available_now": True}
    for wrong, error, words in (
        ({"source": "totals"}, KindMismatch, "table totals of the kind kv has no change feed: .*changes=True"),
        ({"dead_letter": "totals"}, Invalid, "dead_letter is totals, which takes no messages .*: give a queue"),
        ({"dead_letter": "ded"}, NotFound, "there is no table ded in .*: it has events, others, totals; make a new"),
        ({"consumer": ""}, Invalid, "say who reads: consumer='name'"),
        ({"max_rows": 0}, Invalid, "option max_rows is '0': give a whole number above 0"),
    ):
        with pytest.raises(error, match=words):
            penstock.spark.stream(spark, folder, **(options | wrong))
    with pytest.raises(Invalid, match="no store can be at s3://bucket/data: give an absolute path, or penstock://host"):
        penstock.spark.stream(spark, "s3://bucket/data", **options)
    with pytest.raises(Invalid, match="list was given for totals: give a DataFrame"):
        penstock.spark.commit(folder, {"totals": []})  # type: ignore[dict-item]

    events.put(b"x", durable=True)
    for output in (None, spark.range(1)):
        query = penstock.spark.stream(spark, folder, **(options | {"batch": lambda frame, output=output: output}))
        with pytest.raises(Invalid, match=f"the batch function gave {type(output).__name__}: give DataFrames by table"):
            penstock.spark.wait(query)

    options["checkpoint"] = str(tmp_path / "checkpoint")
    assert penstock.spark.wait(penstock.spark.stream(spark, folder, **options)).rows_in == 1
    for wrong in ({"consumer": "d"}, {"source": "others"}):
        with pytest.raises(PositionConflict, match="the checkpoint is ahead of consumer ., or another queue's"):
            penstock.spark.stream(spark, folder, **(options | wrong))


def test_an_owner_that_fails_as_a_stream_starts_is_one_line(
    spark: Any, store: Store, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.queue("events")
    monkeypatch.setattr(OffsetLog, "check", lambda log, consumer: store.drop("events"))
    with pytest.raises(NotFound, match=r"^there is no table events in [^\n]*$"):
        penstock.spark.stream(spark, folder, source="events", consumer="c", batch=lambda frame: {})


SUBMITTED = """
import json, penstock.spark
spark = penstock.spark.session(spark__sql__ansi__enabled="false")
names = "spark.master", "spark.sql.shuffle.partitions", "spark.sql.ansi.enabled", "spark.sql.session.timeZone"
print(json.dumps([spark.conf.get(name) for name in names]))
"""


def test_a_session_takes_what_spark_submit_was_told(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(SUBMITTED)
    submit = Path(pyspark.__file__).parent / "bin" / "spark-submit"
    arguments = ["--conf", "spark.sql.shuffle.partitions=3", "--conf", "spark.sql.ansi.enabled=true"]
    ran = subprocess.run(
        [str(submit), "--master", "local[1]", *arguments, "app.py"],
        cwd=tmp_path,
        env={**os.environ, "PYSPARK_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    assert json.loads(ran.stdout.splitlines()[-1]) == ["local[1]", "3", "false", "UTC"]
