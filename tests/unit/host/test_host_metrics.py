"""The registry of metrics."""

from __future__ import annotations

import pytest
from prometheus_client import REGISTRY, generate_latest

from penstock.errors import Invalid
from penstock.host.metrics import Metrics


def test_metrics_are_shown_with_the_projects_prefix_and_only_here() -> None:
    metrics, other = Metrics(), Metrics()
    metrics.counter("commits", "Commits", ["table"]).labels("users").inc(3)
    metrics.gauge("memory_bytes", "Memory").set(7)
    metrics.histogram("flush_seconds", "Flush").observe(0.2)
    text = metrics.exposition().decode()
    assert 'penstock_commits_total{table="users"} 3.0' in text
    assert "penstock_memory_bytes 7.0" in text
    assert 'penstock_flush_seconds_bucket{le="0.25"} 1.0' in text
    assert other.exposition() == b""
    assert b"penstock" not in generate_latest(REGISTRY)


def test_asking_again_gives_the_same_metric_and_another_shape_is_refused() -> None:
    metrics = Metrics()
    commits = metrics.counter("commits", "Commits", ["table"])
    assert metrics.counter("commits", "Commits", ["table"]) is commits
    with pytest.raises(Invalid):
        metrics.counter("commits", "Commits", ["kind"])
    with pytest.raises(Invalid):
        metrics.gauge("commits", "Commits", ["table"])
