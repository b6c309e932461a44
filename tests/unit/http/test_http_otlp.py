"""OTLP: points become samples as Prometheus names them, logs become JSON."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from penstock.errors import Invalid
from penstock.http.otlp import decode_logs, decode_metrics
from penstock.series.section import STALE_BITS

NOW = 1_700_000_000_000_000
NS = 1_600_000_000_000_000_000


def attribute(key: str, **value: Any) -> dict[str, Any]:
    return {"key": key, "value": value}


def request(*metrics: dict[str, Any]) -> bytes:
    resource: Any = {
        "attributes": [
            attribute("service.name", string_value="shop"),
            attribute("service.namespace", string_value="eu"),
        ]
    }
    sent: Any = [{"resource": resource, "scope_metrics": [{"metrics": metrics}]}]
    message = ExportMetricsServiceRequest(resource_metrics=sent)
    body: bytes = message.SerializeToString()
    return body


def samples(body: bytes) -> dict[str, float]:
    columns = decode_metrics(body, NOW)
    texts = []
    for labels in map(dict, columns.series):
        rest = {k: v for k, v in labels.items() if k not in ("__name__", "job")}
        texts.append(labels["__name__"] + "".join(f" {k}={v}" for k, v in sorted(rest.items())))
        assert labels["job"] == "eu/shop"
    return {texts[series]: value for series, value in zip(columns.index.tolist(), columns.values.tolist(), strict=True)}


POINT = {
    "time_unix_nano": NS,
    "attributes": [attribute("http.route", string_value="/"), attribute("code", int_value=200)],
}


def test_gauges_and_sums() -> None:
    body = request(
        {
            "name": "room.temp",
            "unit": "C",
            "description": "warm",
            "gauge": {"data_points": [{**POINT, "as_double": 1.5}]},
        },
        {
            "name": "hits",
            "sum": {"data_points": [{**POINT, "as_int": 7}], "aggregation_temporality": 2, "is_monotonic": True},
        },
        {"name": "9lives", "sum": {"data_points": [{"as_int": -7}], "aggregation_temporality": 2}},
    )
    assert samples(body) == {
        "room_temp code=200 http_route=/": 1.5,
        "hits_total code=200 http_route=/": 7.0,
        "_9lives": -7.0,
    }
    columns = decode_metrics(body, NOW)
    assert columns.times_us.tolist() == [NS // 1000, NS // 1000, NOW]
    assert [(m.metric, m.type, m.unit, m.help) for m in columns.metadata] == [
        ("room_temp", "gauge", "C", "warm"),
        ("hits_total", "counter", "", ""),
        ("_9lives", "gauge", "", ""),
    ]


def test_histograms_and_summaries() -> None:
    histogram = {"bucket_counts": [1, 2, 3], "explicit_bounds": [0.5, 10], "count": 6, "sum": 20.5}
    summary = {"count": 4, "sum": 8.0, "quantile_values": [{"quantile": 0.99, "value": 3.0}]}
    body = request(
        {"name": "lat", "histogram": {"data_points": [histogram], "aggregation_temporality": 2}},
        {"name": "old", "summary": {"data_points": [summary]}},
    )
    assert samples(body) == {
        "lat_bucket le=0.5": 1.0,
        "lat_bucket le=10": 3.0,
        "lat_bucket le=+Inf": 6.0,
        "lat_count": 6.0,
        "lat_sum": 20.5,
        "old quantile=0.99": 3.0,
        "old_count": 4.0,
        "old_sum": 8.0,
    }


def test_what_is_not_stored_is_counted() -> None:
    body = request(
        {"name": "d", "sum": {"data_points": [{"as_int": 1}] * 2, "aggregation_temporality": 1}},
        {"name": "e", "exponential_histogram": {"data_points": [{"count": 1}]}},
        {"name": "nothing"},
    )
    columns = decode_metrics(body, NOW)
    assert (len(columns), columns.left_out) == (0, 3)


def test_a_point_without_a_value_is_a_staleness_marker() -> None:
    columns = decode_metrics(request({"name": "g", "gauge": {"data_points": [{"flags": 1}]}}), NOW)
    assert columns.values.view(np.uint64).tolist() == [int(STALE_BITS)]


def test_attributes_that_become_one_label_are_joined() -> None:
    point = {"as_int": 1, "attributes": [attribute("a.b", string_value="x"), attribute("a_b", bool_value=True)]}
    assert samples(request({"name": "g", "gauge": {"data_points": [point]}})) == {"g a_b=x;true": 1.0}


@pytest.mark.parametrize(
    ("metric", "reason"),
    [
        ({"name": "g", "gauge": {"data_points": [{"time_unix_nano": (1 << 64) - 1, "as_int": 1}]}}, None),
        (
            {
                "name": "h",
                "histogram": {
                    "aggregation_temporality": 2,
                    "data_points": [{"bucket_counts": [1], "explicit_bounds": [1, 2]}],
                },
            },
            "buckets",
        ),
    ],
)
def test_odd_metrics(metric: dict[str, Any], reason: str | None) -> None:
    if reason is None:
        assert decode_metrics(request(metric), NOW).times_us.tolist() == [((1 << 64) - 1) // 1000]
    else:
        with pytest.raises(Invalid, match=reason):
            decode_metrics(request(metric), NOW)


def logs(*records: dict[str, Any]) -> bytes:
    resource: Any = {"attributes": [attribute("service.name", string_value="shop")]}
    scope = {"scope": {"name": "app"}, "log_records": records}
    sent: Any = [{"resource": resource, "scope_logs": [scope]}]
    message = ExportLogsServiceRequest(resource_logs=sent)
    body: bytes = message.SerializeToString()
    return body


def test_logs_become_json() -> None:
    nested = {"kvlist_value": {"values": [attribute("n", array_value={"values": [{"double_value": float("nan")}]})]}}
    body = logs(
        {
            "time_unix_nano": NS,
            "severity_text": "WARN",
            "body": {"string_value": "it is late"},
            "attributes": [attribute("user", int_value=5), {"key": "more", "value": nested}],
            "trace_id": b"\x01" * 16,
        },
        {"body": {"bytes_value": b"\xff"}, "severity_number": 9},
    )
    first, second = map(json.loads, decode_logs(body, NOW))
    assert first == {
        "time_us": NS // 1000,
        "severity": "WARN",
        "body": "it is late",
        "attributes": {"user": 5, "more": {"n": ["nan"]}},
        "resource": {"service.name": "shop"},
        "scope": "app",
        "trace_id": "01" * 16,
        "span_id": "",
    }
    assert (second["time_us"], second["severity"], second["body"]) == (NOW, 9, "ff")


def test_nesting_and_sizes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    value: dict[str, Any] = {"int_value": 1}
    for _ in range(30):
        value = {"array_value": {"values": [value]}}
    with pytest.raises(Invalid, match="nested"):
        decode_logs(logs({"body": value}), NOW)
    monkeypatch.setattr("penstock.http.otlp.LOGS_MAX", 1)
    with pytest.raises(Invalid, match="at most 1 log"):
        decode_logs(logs({}, {}), NOW)
    monkeypatch.setattr("penstock.http.otlp.BODY_BYTES_MAX", 5)
    with pytest.raises(Invalid, match="at most 5"):
        decode_metrics(b"x" * 6, NOW)


@given(st.binary(max_size=200))
def test_random_bytes_are_refused_or_decoded(body: bytes) -> None:
    for decode in (decode_metrics, decode_logs):
        try:
            decode(body, NOW)
        except Invalid as refused:
            assert "\n" not in str(refused)
