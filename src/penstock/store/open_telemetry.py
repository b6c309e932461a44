"""Stages of writes as spans of OpenTelemetry, for programs that trace themselves with it.

Thread: the one that does the work; making a span is quick, and exporting it is the business of the user's processor.
Invariant: a span ends when its stage was reported: it is off by the time between the two, some microseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.errors import Invalid
from penstock.host.clock import SystemClock
from penstock.store.tracing import WriteStage


def open_telemetry(provider: object = None) -> Callable[[WriteStage], None]:
    """Return a function for `StoreSettings.trace` that makes a span of every stage of a write.

    `provider` is a tracer provider; None means the one of this process. The spans are `penstock.encode`,
    `penstock.journal`, `penstock.apply` and `penstock.dispatch`, with the LSN, the bytes, and the table of an apply.

    >>> settings = penstock.StoreSettings(trace=penstock.open_telemetry())
    >>> with penstock.open("spans/", settings=settings) as traced:
    ...     epoch = traced.kv("users").put(b"ada", b"1815", durable=True)
    """
    try:
        from opentelemetry import trace
    except ImportError as missing:
        raise Invalid("open_telemetry needs OpenTelemetry: pip install 'penstock[otel]'") from missing
    tracers: Any = trace if provider is None else provider
    if not hasattr(tracers, "get_tracer"):
        raise Invalid(f"open_telemetry takes a tracer provider, not {type(provider).__name__}")
    tracer = tracers.get_tracer("penstock")
    time_us = SystemClock().time_us

    def make_span(stage: WriteStage) -> None:
        end_ns = time_us() * 1_000
        attributes: dict[str, str | int] = {"penstock.lsn": stage.lsn, "penstock.bytes": stage.size}
        if stage.table:
            attributes |= {"penstock.table": stage.table, "penstock.shard": stage.shard}
        start_ns = end_ns - int(stage.duration_s * 1e9)
        tracer.start_span(f"penstock.{stage.stage}", start_time=start_ns, attributes=attributes).end(end_ns)

    return make_span
