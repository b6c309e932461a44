"""OpenTelemetry over HTTP: metrics become samples, logs become messages.

Metrics: names keep letters, digits, `_` and `:`, everything else becomes `_`; a monotonic sum ends in `_total`; a
histogram becomes classic buckets (`_bucket` with `le`, cumulative), `_count` and `_sum`; a summary its quantiles,
`_count` and `_sum`. Attributes of a point are labels, and so are `job` and `instance`, from `service.name` (with
`service.namespace`) and `service.instance.id` of the resource. Sums and histograms of deltas, and exponential
histograms, are counted and left out. A point that says "no recorded value" is a staleness marker.

Logs: one message of JSON for each record, with its resource's and its own attributes.

Thread: pure functions. The package opentelemetry-proto is imported with the first request.
"""

from __future__ import annotations

import importlib
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec

from penstock.errors import Invalid
from penstock.http.samples import ReceivedSamples, SampleCollector
from penstock.http.wire_format import MalformedMessage, check_messages
from penstock.promql.source import STALE_BITS
from penstock.series.labels import METRIC

BODY_BYTES_MAX = 32 << 20
BLOCKS_MAX = 1_000_000  # texts and messages in a body: each takes some 100 bytes when it is decoded
CHECKED_BYTES_MIN = 1 << 20  # of a body in which they are counted first
LOGS_MAX = 100_000
LOG_BYTES_MAX = 64 << 20  # of all messages of a request
ATTRIBUTES_MAX = 256  # of one point
NESTED_MAX = 16  # lists and maps within an attribute
STALE = struct.unpack("<d", struct.pack("<Q", int(STALE_BITS)))[0]
_OUTSIDE_NAME = re.compile(r"[^a-zA-Z0-9_:]")
_OUTSIDE_LABEL = re.compile(r"[^a-zA-Z0-9_]")
_CUMULATIVE = 2
_NO_VALUE = 1  # a flag of a point


def decode_metrics(body: bytes, now_us: int) -> ReceivedSamples:
    """Decode a request of metrics; points without a time are of `now_us`."""
    request = _parsed("metrics", "ExportMetricsServiceRequest", body)
    collector = SampleCollector()
    for resource in request.resource_metrics:
        base = _target(resource.resource.attributes)
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                _add_metric(collector, metric, base, now_us)
    return collector.result()


def metrics_answer(left_out: int) -> bytes:
    """Return the answer to a request of metrics, which says how many points are not stored."""
    if not left_out:
        return b""
    text = "deltas and exponential histograms are not stored: export cumulative sums and explicit buckets"
    partial = {"rejected_data_points": left_out, "error_message": text}
    answer: bytes = _service("metrics")[0].ExportMetricsServiceResponse(partial_success=partial).SerializeToString()
    return answer


def decode_logs(body: bytes, now_us: int) -> list[bytes]:
    """Decode a request of logs into messages of JSON, one for each record."""
    request = _parsed("logs", "ExportLogsServiceRequest", body)
    messages: list[bytes] = []
    size = 0
    for resource in request.resource_logs:
        about = _attributes(resource.resource.attributes)
        for scope in resource.scope_logs:
            for record in scope.log_records:
                if len(messages) == LOGS_MAX:
                    raise Invalid(f"a request has at most {LOGS_MAX} log records: send fewer at once")
                messages.append(msgspec.json.encode(_log(record, about, scope.scope.name, now_us)))
                size += len(messages[-1])
                if size > LOG_BYTES_MAX:  # each message repeats the attributes of its resource
                    raise Invalid(f"the messages of a request have more than {LOG_BYTES_MAX} bytes: send fewer at once")
    return messages


def _parsed(signal: str, message: str, body: bytes) -> Any:
    if len(body) > BODY_BYTES_MAX:
        raise Invalid(f"the body has {len(body)} bytes: at most {BODY_BYTES_MAX} are allowed")
    service, decode_error = _service(signal)
    request = getattr(service, message)()
    try:
        if len(body) > CHECKED_BYTES_MIN:  # a smaller one cannot become large
            check_messages(body, request.DESCRIPTOR, BLOCKS_MAX)
        request.ParseFromString(body)
    except (MalformedMessage, decode_error) as error:
        raise Invalid(f"the body is not a request of OTLP {signal}: {str(error)[:80]}") from None
    return request


@lru_cache
def _service(signal: str) -> tuple[Any, Any]:
    try:
        service = importlib.import_module(f"opentelemetry.proto.collector.{signal}.v1.{signal}_service_pb2")
        return service, importlib.import_module("google.protobuf.message").DecodeError
    except ImportError as missing:
        raise Invalid("OTLP needs the package opentelemetry-proto: pip install 'penstock[http]'") from missing


# -- metrics


def _add_metric(collector: SampleCollector, metric: Any, base: Mapping[str, str], now_us: int) -> None:
    kind = metric.WhichOneof("data")
    name = _metric_name(metric.name)
    if kind is None or not name:
        return
    data = getattr(metric, kind)
    delta = kind in ("sum", "histogram") and data.aggregation_temporality != _CUMULATIVE
    if kind == "exponential_histogram" or delta:
        collector.left_out += len(data.data_points)
        return
    if kind == "sum" and data.is_monotonic and not name.endswith("_total"):
        name += "_total"
    types = {"sum": "counter" if kind == "sum" and data.is_monotonic else "gauge"}
    collector.describe(name, type=types.get(kind, kind), unit=metric.unit, help=metric.description)
    for point in data.data_points:
        labels = {**base, **_labels(point.attributes)}
        time_us = point.time_unix_nano // 1_000 or now_us
        stale = bool(point.flags & _NO_VALUE)
        for suffix, more, value in _values(kind, point):
            full = {**labels, **more, METRIC: name + suffix}
            collector.add(full, time_us, STALE if stale else value)


def _values(kind: str, point: Any) -> Iterator[tuple[str, dict[str, str], float]]:
    """Yield the suffix of the name, more labels and the value of each series of a point."""
    if kind in ("gauge", "sum"):
        yield "", {}, float(point.as_int if point.WhichOneof("value") == "as_int" else point.as_double)
    elif kind == "summary":
        for quantile in point.quantile_values:
            yield "", {"quantile": _number_text(quantile.quantile)}, quantile.value
        yield "_count", {}, float(point.count)
        yield "_sum", {}, point.sum
    else:
        bounds, counts = list(point.explicit_bounds), list(point.bucket_counts)
        if counts and len(counts) != len(bounds) + 1:
            raise Invalid(f"a histogram has {len(bounds)} bounds and {len(counts)} buckets: one more is expected")
        total = 0
        for bound, count in zip(bounds, counts, strict=False):
            total += count
            yield "_bucket", {"le": _number_text(bound)}, float(total)
        yield "_bucket", {"le": "+Inf"}, float(point.count)
        yield "_count", {}, float(point.count)
        if point.HasField("sum"):
            yield "_sum", {}, point.sum


def _number_text(number: float) -> str:
    return str(int(number)) if number.is_integer() and abs(number) < 1e15 else repr(number)


def _metric_name(name: str) -> str:
    cleaned = _OUTSIDE_NAME.sub("_", name)
    return f"_{cleaned}" if cleaned[:1].isdigit() else cleaned


def _label_name(name: str) -> str:
    cleaned = _OUTSIDE_LABEL.sub("_", name)
    return f"key_{cleaned}" if cleaned[:1].isdigit() else cleaned


def _target(attributes: Iterable[Any]) -> dict[str, str]:
    """Return `job` and `instance` of a resource."""
    texts = {pair.key: _text(pair.value) for pair in attributes}
    name, space = texts.get("service.name", ""), texts.get("service.namespace", "")
    labels = {"job": f"{space}/{name}" if space and name else name, "instance": texts.get("service.instance.id", "")}
    return {key: value for key, value in labels.items() if value}


def _labels(attributes: Sequence[Any]) -> dict[str, str]:
    """Return attributes as labels; those whose names become the same are joined by `;`."""
    if len(attributes) > ATTRIBUTES_MAX:
        raise Invalid(f"a point has {len(attributes)} attributes: at most {ATTRIBUTES_MAX} are allowed")
    labels: dict[str, str] = {}
    for pair in sorted(attributes, key=lambda pair: pair.key):
        key, value = _label_name(pair.key), _text(pair.value)
        if key and value:
            labels[key] = f"{labels[key]};{value}" if key in labels else value
    return labels


def _text(value: Any) -> str:
    plain = _plain(value)
    return plain if isinstance(plain, str) else msgspec.json.encode(plain).decode()


# -- attributes and logs


def _plain(value: Any, depth: int = 0) -> Any:
    """Return an attribute's value as a Python value that JSON can hold."""
    if depth > NESTED_MAX:
        raise Invalid(f"an attribute is nested more than {NESTED_MAX} deep")
    kind = value.WhichOneof("value")
    if kind is None:
        return ""
    content = getattr(value, kind)
    if kind == "array_value":
        return [_plain(item, depth + 1) for item in content.values]
    if kind == "kvlist_value":
        return {pair.key: _plain(pair.value, depth + 1) for pair in content.values}
    if kind == "double_value" and not abs(content) < float("inf"):
        return str(content)
    return content.hex() if isinstance(content, bytes) else content


def _attributes(attributes: Iterable[Any]) -> dict[str, Any]:
    return {pair.key: _plain(pair.value) for pair in attributes}


def _log(record: Any, resource: dict[str, Any], scope: str, now_us: int) -> dict[str, Any]:
    return {
        "time_us": (record.time_unix_nano or record.observed_time_unix_nano) // 1_000 or now_us,
        "severity": record.severity_text or int(record.severity_number),
        "body": _plain(record.body),
        "attributes": _attributes(record.attributes),
        "resource": resource,
        "scope": scope,
        "trace_id": record.trace_id.hex(),
        "span_id": record.span_id.hex(),
    }
