"""The page that `make run` writes: it says what was proved, or that something is missing."""

from __future__ import annotations

import io
import time
from pathlib import Path
from typing import Any

import pytest
from examples import fingerprints, live, metrics, questions, report
from examples.fingerprints import OddDevice
from examples.metrics import MetricsSummary
from examples.run import Latency, MicroBatch, Run, Sample, percentile
from rich.console import Console

import penstock


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(rate=100, seconds=3, folder=tmp_path / "store", wild=True)
    run.samples = [Sample(float(second), 100 * second, 50 - second) for second in range(4)]
    run.batches = [MicroBatch(1.0, 100, 12.0), MicroBatch(2.0, 200, 15.0)]
    run.latencies = [Latency(0.1, 5_000.0, while_starting=True)]
    run.latencies += [Latency(number / 10, 10.0 * number, while_starting=False) for number in range(1, 11)]
    run.kills = [1.5]
    return run


def page(run: Run, *, produced: int, difference: int = 0, before: int = 0, **more: Any) -> str:
    earlier = {"produced": before, "dead-lettered": 0, "difference": 0}
    after = {"produced": produced, "dead-lettered": 3, "difference": difference}
    rows = [{"device": "<b>", "high": 24.99}]
    path = report.write(
        run,
        before=earlier,
        after=after,
        reasons={"no device": (1, 3)},
        sql="SELECT 1 < 2",
        joined=rows,
        measured=MetricsSummary({"north": 22.504, "east": 22.4}, {"metrics_1m": 1_200}, 2, 0),
        odd=[OddDevice("device-117", 8.254, "device-042")],
        size_bytes=9_000,
        **more,
    )
    return path.read_text()


def test_a_run_that_accounts_for_everything(run: Run) -> None:
    text = page(run, produced=300)
    assert "Each of 300 events went through Spark and counts exactly once although the query was killed" in text
    assert "deleted once" in text
    assert text.count("<svg") == 4, "throughput, backlog, micro-batches, latencies"
    assert "<td>no device</td><td>3</td>" in text
    assert "&lt;b&gt;" in text, "data is not markup"
    assert "SELECT 1 &lt; 2" in text
    assert "10 readings while Spark was up. 1 more waited" in text
    assert "this run" not in text
    assert "<td>east</td><td>22.40</td></tr><tr><td>north</td><td>22.50</td>" in text
    assert "steps of series in the rollups: metrics_1m 1,200; jobs on Spark: 2<" in text
    assert "<td>device-117</td><td>8.25</td><td>device-042</td>" in text
    assert "temperature{site=~&quot;north|east&quot;}" in text


def test_a_run_on_a_folder_that_was_used_before(run: Run) -> None:
    text = page(run, produced=300, before=100)
    assert "Each of 200 events" in text
    assert "<td>produced</td><td>100</td><td>200</td><td>300</td>" in text
    assert "<td>no device</td><td>1</td><td>2</td><td>3</td>" in text
    assert "<td>difference</td><td></td><td></td><td>0</td>" in text


def test_a_difference_is_said_first(run: Run) -> None:
    text = page(run, produced=300, difference=2)
    assert "2 events are NOT accounted for" in text
    assert "exactly once" not in text


def test_a_run_that_was_too_short_for_charts(tmp_path: Path) -> None:
    run = Run(1, 1, tmp_path / "store", wild=False)
    text = page(run, produced=1)
    assert (text.count("too few points"), text.count("<svg")) == (4, 0)
    run.batches = [MicroBatch(1.0, 100, 12.0)]
    text = page(run, produced=1)
    assert (text.count("too few points"), text.count("<svg")) == (3, 1), "one micro-batch is a bar"


def test_latencies_leave_out_what_waited_for_spark(run: Run) -> None:
    assert run.steady_ms() == [10.0 * number for number in range(1, 11)]
    assert (percentile(run.steady_ms(), 0.5), percentile(run.steady_ms(), 1.0)) == (60.0, 100.0)
    assert percentile([], 0.5) == 0.0


def test_what_was_built_and_asked_is_on_the_page(run: Run, tmp_path: Path) -> None:
    with penstock.open(tmp_path / "asked") as store:
        metrics.create(store)
        fingerprints.create(store)
        store.kv("totals", value="int64").put(b"<device>", 7, durable=True)
        store.queue("events").put_many([b"x"] * 3, durable=True)
        now = time.time_ns() // 1_000
        for number in range(30):
            for site in ("north", "east"):
                store.series(metrics.TABLE).write(
                    "temperature", 20.0 + number, {"site": site}, time=now - (30 - number) * 1_000_000
                )
        vectors = [[float(number)] * len(fingerprints.FEATURES) for number in range(12)]
        store.vector(fingerprints.TABLE).upsert([f"device-{n}" for n in range(110, 122)], vectors, durable=True)
        store.flush()
        tables, answers = questions.tables_made(store), questions.ask(store)
    sizes = {table.name: (table.kind, table.rows) for table in tables}
    assert (sizes["totals"], sizes["events"], sizes["fingerprints"]) == (("kv", 1), ("queue", 3), ("vector", 12))
    assert [answer.kind for answer in answers] == ["kv", "queue", "series", "vector"]
    assert "&lt;device&gt;" in answers[0].answer
    assert "north" in answers[2].answer
    assert answers[3].answer.count("<li>") == 8
    text = page(run, produced=300, built=tables, questions=answers)
    assert "<td>totals</td><td>kv</td><td>1</td>" in text
    assert f"penstock console {run.folder}" in text


def test_the_live_view_says_what_is_known(run: Run) -> None:
    console = Console(width=120, record=True, file=io.StringIO())
    run.produced, run.up_since_s = 300, 0.0
    console.print(live._picture(run, 120))
    text = console.export_text()
    for words in ("events in", "committed", "253", "90 % 100 ms", "kills survived", "1 of 1"):
        assert words in text, words


@pytest.mark.parametrize("columns", [80, 100, 200])
def test_the_live_view_fits_a_terminal(run: Run, columns: int) -> None:
    console = Console(width=columns, record=True, file=io.StringIO())
    run.produced, run.up_since_s = 9_999_999, 0.0
    run.samples[:] = [Sample(float(second), 1_000_000 * second, 900_000 * second) for second in range(200)]
    console.print(live._picture(run, columns))
    lines = console.export_text().splitlines()
    assert len(lines) == 6 + 2  # a line each, and the frame
    assert not any("…" in line for line in lines)
    assert max(map(len, lines)) <= columns


def test_the_lag_is_the_age_of_the_oldest_event(run: Run) -> None:
    run.samples[:] = [Sample(float(second), min(100 * second, 1_000), 0) for second in range(30)]
    assert live._lag_s(run) == 0.0
    run.samples.append(Sample(30.0, 1_000, 600))  # 400 are committed, and nothing comes in any more
    assert live._lag_s(run) == 26.0
