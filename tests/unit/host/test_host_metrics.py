"""Metrics and their text: as Prometheus' own parser reads it."""

from __future__ import annotations

import math
import threading

import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.host.metrics import (
    SECONDS,
    Histogram,
    MetricFamily,
    Metrics,
    MetricSamples,
    bucket_counts,
    counter,
    exposition,
    gauge,
    histogram,
)


def parsed(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_are_read_at_each_export_and_only_here() -> None:
    metrics, other = Metrics(), Metrics()
    commits: MetricSamples = {("users",): 3.0}
    metrics.collect_from(lambda: [counter("commits", "Commits", {**commits}, ("table",))])
    metrics.collect_from(lambda: [gauge("memory_bytes", "Memory", 7)])
    assert 'penstock_commits_total{table="users"} 3.0' in metrics.exposition()
    commits[("users",)] = 4.0
    assert 'penstock_commits_total{table="users"} 4.0' in metrics.exposition()
    assert "penstock_memory_bytes 7\n" in metrics.exposition()
    assert other.exposition() == ""


def test_the_text_is_what_prometheus_reads() -> None:
    took = Histogram()
    for value in (0.000_01, 0.000_011, 0.2, 0.25, 99.0):
        took.observe(value)
    odd = 'a"b\\c\nd'
    families = [
        histogram("flush_seconds", "Time", took.read()),
        counter("things", 'Lines\nand "quotes" and \\', {(odd, "é"): 1 << 60, ("", "x"): 0}, ("a", "b")),
        gauge("limits", "Limits", {("inf",): math.inf, ("-inf",): -math.inf, ("nan",): math.nan}, ("of",)),
        gauge("nothing", "No samples", {}, ("table",)),
    ]
    samples = parsed(exposition(families))
    assert samples["penstock_flush_seconds_bucket", (("le", "1e-05"),)] == 1
    assert samples["penstock_flush_seconds_bucket", (("le", "0.25"),)] == 4
    assert samples["penstock_flush_seconds_bucket", (("le", "10.0"),)] == 4
    assert samples["penstock_flush_seconds_bucket", (("le", "+Inf"),)] == 5
    assert samples["penstock_flush_seconds_count", ()] == 5
    assert samples["penstock_flush_seconds_sum", ()] == pytest.approx(99.450_021)
    assert samples["penstock_things_total", (("a", odd), ("b", "é"))] == 1 << 60
    assert samples["penstock_limits", (("of", "inf"),)] == math.inf
    assert math.isnan(samples["penstock_limits", (("of", "nan"),)])


def test_a_histogram_counts_each_value_once() -> None:
    took = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 3.0):
        took.observe(value)
    now = took.read()
    assert (now.counts, now.total, now.sum, now.min, now.max) == ((2, 2, 1), 5, 8.0, 0.5, 3.0)
    assert bucket_counts(1.0, (1.0, 2.0)) == (1, 0, 0)
    assert bucket_counts(9.0, (1.0, 2.0)) == (0, 0, 1)
    assert len(SECONDS) == 19
    assert list(SECONDS) == sorted(SECONDS)


def test_noted_values_are_counted_once() -> None:
    took = Histogram((1.0, 2.0))
    took.note(0.5)
    took.observe(1.5)
    assert took.read().counts == (1, 1, 0)
    took.note(3.0)
    took.count_noted()
    took.count_noted()
    assert took.read().counts == (1, 1, 1)
    assert took.read().sum == 5.0


def test_values_that_are_noted_while_others_count_them_are_not_lost() -> None:
    took = Histogram((1.0,))
    reader = threading.Thread(target=lambda: [took.read() for _ in range(300)])
    reader.start()
    for _ in range(20_000):
        took.note(0.5)
    reader.join()
    assert took.read().counts == (20_000, 0)


def test_a_client_sees_the_tables_it_may_read() -> None:
    metrics = Metrics()
    families: list[MetricFamily] = [
        gauge("rows", "Rows", {("0", "mine"): 1, ("0", "yours"): 2}, ("shard", "table")),
        gauge("threads", "Threads", 3),
    ]
    metrics.collect_from(lambda: families)
    assert [family.samples for family in metrics.read(lambda table: table == "mine")] == [{("0", "mine"): 1}, {(): 3}]
