"""Stages of writes as spans of OpenTelemetry."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.errors import Invalid

sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="OpenTelemetry's SDK is not installed")


def test_every_stage_of_a_write_is_a_span(tmp_path: Path) -> None:
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    spans, provider = InMemorySpanExporter(), sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    settings = penstock.StoreSettings(trace=penstock.open_telemetry(provider))
    with penstock.open(tmp_path / "store", settings=settings) as store:
        store.kv("users").put(b"ada", b"1815", durable=True)
        lsn = store.statistics().durable_lsn
    ended: list[Any] = list(spans.get_finished_spans())
    stages = {span.name: span for span in ended if span.attributes["penstock.lsn"] == lsn}
    assert set(stages) == {"penstock.encode", "penstock.journal", "penstock.apply", "penstock.dispatch"}
    assert dict(stages["penstock.apply"].attributes)["penstock.table"] == "users"
    assert all(span.end_time >= span.start_time for span in stages.values())
    provider.shutdown()


@pytest.mark.parametrize("provider", [1, "x", True, float("nan"), object()])
def test_only_a_provider_is_taken(provider: Any) -> None:
    with pytest.raises(Invalid, match="takes a tracer provider"):
        penstock.open_telemetry(provider)


def test_without_opentelemetry_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(Invalid, match=r"penstock\[otel\]"):
        penstock.open_telemetry()
