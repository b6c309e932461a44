"""A real Prometheus on loopback, with the dataset in it: the oracle of the conformance suite."""

from __future__ import annotations

import json
import struct
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import bench.prometheus
import pyarrow as pa
from bench.prometheus import field, label_fields, varint
from promql_dataset import Series

FEATURES = "promql-experimental-functions"
DELAYED = "promql-delayed-name-removal"


class PrometheusPeer:
    def __init__(self, url: str) -> None:
        self._url = url

    def query(self, path: str, **parameters: str) -> dict[str, Any]:
        """The answer of the API: `data`, or `error`."""
        body = urllib.parse.urlencode(parameters).encode()
        try:
            with urllib.request.urlopen(f"{self._url}/api/v1/{path}", body, timeout=30) as answer:
                reply: dict[str, Any] = json.load(answer)
        except urllib.error.HTTPError as refused:
            reply = json.load(refused)
        return reply

    def range(self, expression: str, start_ms: int, end_ms: int, step_ms: int) -> dict[str, Any]:
        times = {"start": f"{start_ms / 1000}", "end": f"{end_ms / 1000}", "step": f"{step_ms / 1000}"}
        return self.query("query_range", query=expression, **times)

    def instant(self, expression: str, time_ms: int) -> dict[str, Any]:
        return self.query("query", query=expression, time=f"{time_ms / 1000}")

    def write(self, series: Sequence[Series]) -> None:
        """Send all samples by remote write, in slices of time: the head takes nothing an hour older than its latest."""
        first = min(entry.times_ms[0] for entry in series)
        last = max(entry.times_ms[-1] for entry in series)
        for start in range(first, last + 1, 600_000):
            parts = [_series(entry, start, start + 600_000) for entry in series]
            body = b"".join(field(1, part) for part in parts if part)
            packed = pa.Codec("snappy").compress(body, asbytes=True)
            request = urllib.request.Request(f"{self._url}/api/v1/write", packed)
            request.add_header("Content-Encoding", "snappy")
            request.add_header("Content-Type", "application/x-protobuf")
            urllib.request.urlopen(request, timeout=30).close()


def _series(series: Series, start_ms: int, end_ms: int) -> bytes:
    samples = [
        field(2, b"\x09" + struct.pack("<d", value) + b"\x10" + varint(moment))
        for moment, value in zip(series.times_ms, series.values, strict=True)
        if start_ms <= moment < end_ms
    ]
    return label_fields(series.labels) + b"".join(samples) if samples else b""


@contextmanager
def prometheus(folder: Path, series: Sequence[Series], *features: str) -> Iterator[PrometheusPeer]:
    """A Prometheus that holds these series and scrapes nothing."""
    enabled = f"--enable-feature={','.join((FEATURES, *features))}"
    with bench.prometheus.prometheus(folder, enabled) as port:
        peer = PrometheusPeer(f"http://127.0.0.1:{port}")
        peer.write(series)
        yield peer
