"""OpenTelemetry's own SDK exports metrics and logs to us over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

import penstock
from penstock.http.application import HttpSettings
from penstock.http.serving import serve_http

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="there is no OpenTelemetry SDK")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("compression", ["none", "gzip"])
def test_metrics_and_logs(tmp_path: Path, compression: str) -> None:
    from opentelemetry._logs import SeverityNumber
    from opentelemetry.exporter.otlp.proto.http import Compression
    from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk._logs import LoggerProvider
    from opentelemetry.sdk._logs.export import SimpleLogRecordProcessor
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    from opentelemetry.sdk.resources import Resource

    packed: Any = Compression.Gzip if compression == "gzip" else Compression.NoCompression
    resource = Resource.create({"service.name": "shop", "service.namespace": "eu", "service.instance.id": "i-1"})
    with penstock.open(tmp_path / "store") as owner, penstock.connect(owner.path) as store:
        metrics, logs = owner.series("metrics"), owner.queue("logs")
        with serve_http(store, HttpSettings(table="metrics", logs="logs", write=True)) as port:
            url = f"http://127.0.0.1:{port}/v1"
            exporter = OTLPMetricExporter(f"{url}/metrics", compression=packed)
            reader = PeriodicExportingMetricReader(exporter, 3_600_000)
            provider = MeterProvider(metric_readers=[reader], resource=resource)
            meter = provider.get_meter("test")
            orders = meter.create_counter("orders", unit="1", description="orders taken")
            orders.add(3, {"country": "de"})
            orders.add(4, {"country": "de"})
            meter.create_up_down_counter("carts").add(-2)
            for took in (0.004, 0.3, 40.0):
                meter.create_histogram("latency", unit="s").record(took)
            assert provider.force_flush()
            writer = LoggerProvider(resource=resource)
            sender = OTLPLogExporter(f"{url}/logs", compression=packed)
            writer.add_log_record_processor(SimpleLogRecordProcessor(sender))
            writer.get_logger("test").emit(severity_number=SeverityNumber.WARN, body="low stock", attributes={"n": 1})
            writer.shutdown()
            provider.shutdown()
        target = {"job": "eu/shop", "instance": "i-1"}
        (row,) = metrics.query('orders_total{country="de"}').to_pylist()
        assert (dict(row["labels"]), row["value"]) == ({"country": "de", **target}, 7.0)
        assert metrics.query("carts").column("value").to_pylist() == [-2.0]
        assert metrics.query("latency_count").column("value").to_pylist() == [3.0]
        assert metrics.query('latency_bucket{le="+Inf"}').column("value").to_pylist() == [3.0]
        assert metrics.query('latency_bucket{le="5"}').column("value").to_pylist() == [2.0]
        assert metrics.metadata("orders_total")["orders_total"].help == "orders taken"
        (message,) = logs.read()
        record = msgspec.json.decode(message.payload)
        assert (record["body"], record["attributes"], record["resource"]["service.name"]) == (
            "low stock",
            {"n": 1},
            "shop",
        )
