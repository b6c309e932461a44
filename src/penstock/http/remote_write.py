"""Prometheus remote write: the body of a request becomes columns. Version 1.0 repeats labels, 2.0 has a table of texts.

The messages are described here, with the fields that are read; others are skipped by the decoder. Native histograms are
counted and left out.

Thread: pure functions. The package protobuf is imported with the first request.
"""

from __future__ import annotations

import importlib
from functools import lru_cache
from typing import Any

import pyarrow as pa

from penstock.errors import Invalid
from penstock.http.samples import ReceivedSamples, SampleCollector
from penstock.series.labels import LABELS_MAX, METRIC
from penstock.series.options import TIME_MAX, TIME_MIN

BODY_BYTES_MAX = 32 << 20  # of a decompressed body
CONTENT_TYPE = "application/x-protobuf"
VERSIONS = {"prometheus.WriteRequest": 1, "io.prometheus.write.v2.Request": 2}
METRIC_TYPES = ("unknown", "counter", "gauge", "histogram", "histogram", "summary", "info", "stateset")

# name, number, type (of descriptor.proto, or a message), repeated
_DOUBLE, _INT64, _INT32, _STRING, _UINT32, _BYTES = 1, 3, 5, 9, 13, 12
_MESSAGES: dict[str, list[tuple[str, int, int | str, bool]]] = {
    "Label": [("name", 1, _STRING, False), ("value", 2, _STRING, False)],
    "Sample": [("value", 1, _DOUBLE, False), ("timestamp", 2, _INT64, False)],
    "MetricMetadataV1": [
        ("type", 1, _INT32, False),
        ("metric_family_name", 2, _STRING, False),
        ("help", 4, _STRING, False),
        ("unit", 5, _STRING, False),
    ],
    "TimeSeriesV1": [("labels", 1, "Label", True), ("samples", 2, "Sample", True), ("histograms", 4, _BYTES, True)],
    "RequestV1": [("timeseries", 1, "TimeSeriesV1", True), ("metadata", 3, "MetricMetadataV1", True)],
    "MetricMetadataV2": [("type", 1, _INT32, False), ("help_ref", 3, _UINT32, False), ("unit_ref", 4, _UINT32, False)],
    "TimeSeriesV2": [
        ("labels_refs", 1, _UINT32, True),
        ("samples", 2, "Sample", True),
        ("histograms", 3, _BYTES, True),
        ("metadata", 5, "MetricMetadataV2", False),
    ],
    "RequestV2": [("symbols", 4, _STRING, True), ("timeseries", 5, "TimeSeriesV2", True)],
}


def write_version(content_type: str) -> int:
    """Return the version that a content type announces, 1 or 2; `Invalid` for others (answer 415)."""
    kind, *parameters = (part.strip() for part in content_type.split(";"))
    if kind.lower() != CONTENT_TYPE:
        raise Invalid(f"remote write takes {CONTENT_TYPE}, not {kind[:80]!r}")
    named = [part[6:].strip('"') for part in parameters if part.lower().startswith("proto=")]
    version = VERSIONS.get(named[0] if named else "prometheus.WriteRequest")
    if version is None:
        raise Invalid(f"remote write knows {' and '.join(VERSIONS)}, not {named[0][:80]!r}")
    return version


def decode_write(body: bytes, version: int) -> ReceivedSamples:
    """Decompress and decode a request of version 1 or 2; `Invalid` if it is malformed or too large."""
    data = decompressed(body)
    messages = _messages()
    request = messages[f"RequestV{version}"]()
    try:
        request.ParseFromString(data)
    except messages["error"] as error:
        raise Invalid(f"the body is not a request of remote write {version}.0: {str(error)[:80]}") from None
    return _decoded_v1(request) if version == 1 else _decoded_v2(request)


def decompressed(body: bytes) -> bytes:
    """Decompress snappy's block format; the length that it declares is checked first."""
    size = shift = used = 0
    for byte in body[:5]:
        size |= (byte & 127) << shift
        shift, used = shift + 7, used + 1
        if byte < 128:
            break
    else:
        raise Invalid("the body is not compressed by snappy: its length is malformed")
    if size > BODY_BYTES_MAX:
        raise Invalid(f"the body has {size} bytes when decompressed: at most {BODY_BYTES_MAX} are allowed")
    if not size:
        if len(body) != used:
            raise Invalid("the body is not compressed by snappy: it has more bytes than it declares")
        return b""
    try:
        data: bytes = pa.Codec("snappy").decompress(body, size, asbytes=True)
    except (OSError, pa.ArrowException):
        raise Invalid("the body is not compressed by snappy in its block format") from None
    return data


def _decoded_v1(request: Any) -> ReceivedSamples:
    found = SampleCollector()
    for series in request.timeseries:
        if len(series.labels) > LABELS_MAX:
            raise Invalid(f"a series has {len(series.labels)} labels: at most {LABELS_MAX} are allowed")
        labels = {label.name: label.value for label in series.labels}
        if len(labels) != len(series.labels):
            raise Invalid("a series names a label twice")
        _add(found, labels, series)
    for known in request.metadata:
        found.describe(known.metric_family_name, type=_type(known.type), unit=known.unit, help=known.help)
    return found.result()


def _decoded_v2(request: Any) -> ReceivedSamples:
    symbols = list(request.symbols)
    if symbols[:1] not in ([], [""]):
        raise Invalid("the first symbol of remote write 2.0 is the empty text")
    found = SampleCollector()
    for series in request.timeseries:
        refs = list(series.labels_refs)
        if len(refs) % 2 or len(refs) > 2 * LABELS_MAX:
            raise Invalid(f"labels_refs are pairs, at most {LABELS_MAX} of them, not {len(refs)} numbers")
        texts = [_symbol(symbols, ref) for ref in refs]
        labels = dict(zip(texts[::2], texts[1::2], strict=True))
        if 2 * len(labels) != len(refs):
            raise Invalid("a series names a label twice")
        _add(found, labels, series)
        about = series.metadata
        if about.type or about.help_ref or about.unit_ref:
            unit, text = _symbol(symbols, about.unit_ref), _symbol(symbols, about.help_ref)
            found.describe(_family(labels, about.type), type=_type(about.type), unit=unit, help=text)
    return found.result()


def _symbol(symbols: list[str], ref: int) -> str:
    if ref >= len(symbols):
        raise Invalid(f"the symbol {ref} is named, but there are only {len(symbols)}")
    return symbols[ref]


def _add(found: SampleCollector, labels: dict[str, str], series: Any) -> None:
    if not labels.get(METRIC):
        raise Invalid(f"a series has no {METRIC}: name its metric")
    found.check_room(len(series.samples))
    found.left_out += len(series.histograms)
    times = [sample.timestamp * 1000 for sample in series.samples]
    if times and not TIME_MIN <= min(times) <= max(times) < TIME_MAX:
        raise Invalid("a sample's time is outside the years 1 to 9999: it is in milliseconds since 1970")
    found.add(labels, times, [sample.value for sample in series.samples])


def _type(number: int) -> str:
    return METRIC_TYPES[number] if 0 < number < len(METRIC_TYPES) else "unknown"


def _family(labels: dict[str, str], number: int) -> str:
    """Return the metric that metadata describe: histograms and summaries have series of several names."""
    metric = labels[METRIC]
    if _type(number) in ("histogram", "summary"):
        for suffix in ("_bucket", "_count", "_sum"):
            if metric.endswith(suffix):
                return metric.removesuffix(suffix)
    return metric


@lru_cache(1)
def _messages() -> dict[str, Any]:
    """Return the classes of the messages, and the error of their decoder."""
    try:
        descriptors = importlib.import_module("google.protobuf.descriptor_pb2")
        pools = importlib.import_module("google.protobuf.descriptor_pool")
        factory = importlib.import_module("google.protobuf.message_factory")
        decode_error = importlib.import_module("google.protobuf.message").DecodeError
    except ImportError as missing:
        raise Invalid("remote write needs the package protobuf: pip install 'penstock[http]'") from missing
    file = descriptors.FileDescriptorProto(name="penstock/remote_write.proto", package="penstock", syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field_name, number, kind, repeated in fields:
            added = message.field.add(name=field_name, number=number, label=3 if repeated else 1)
            if isinstance(kind, str):
                added.type, added.type_name = 11, f".penstock.{kind}"
            else:
                added.type = kind
    pool = pools.DescriptorPool()
    pool.Add(file)
    classes = {name: factory.GetMessageClass(pool.FindMessageTypeByName(f"penstock.{name}")) for name in _MESSAGES}
    return {**classes, "error": decode_error}
