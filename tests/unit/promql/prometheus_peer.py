"""A real Prometheus on loopback, with the dataset in it: the oracle of the conformance suite.

It is looked for in the folder PENSTOCK_PEERS and on PATH. Nothing in the package needs it.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import struct
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
from promql_dataset import Series

START_S = 30.0
FEATURES = "promql-experimental-functions"
DELAYED = "promql-delayed-name-removal"


def peer_binary(name: str) -> str | None:
    """The path of a program of Prometheus; None where there is none."""
    folder = os.environ.get("PENSTOCK_PEERS")
    for candidate in (Path(folder) / name, Path(folder) / "usr" / "bin" / name) if folder else ():
        if candidate.exists():
            return str(candidate)
    return shutil.which(name)


class PrometheusPeer:
    def __init__(self, url: str) -> None:
        self._url = url

    def query(self, path: str, **parameters: str) -> dict[str, Any]:
        """The answer of the API: `data`, or `error`."""
        body = urllib.parse.urlencode(parameters).encode()
        try:
            with urllib.request.urlopen(f"{self._url}/api/v1/{path}", body, timeout=30) as answer:
                found: dict[str, Any] = json.load(answer)
        except urllib.error.HTTPError as refused:
            found = json.load(refused)
        return found

    def range(self, expression: str, start_ms: int, end_ms: int, step_ms: int) -> dict[str, Any]:
        times = {"start": f"{start_ms / 1000}", "end": f"{end_ms / 1000}", "step": f"{step_ms / 1000}"}
        return self.query("query_range", query=expression, **times)

    def instant(self, expression: str, time_ms: int) -> dict[str, Any]:
        return self.query("query", query=expression, time=f"{time_ms / 1000}")

    def write(self, series: Sequence[Series]) -> None:
        """Send all samples by remote write, in slices of time: the head takes nothing an hour older than its latest."""
        first = min(some.times_ms[0] for some in series)
        last = max(some.times_ms[-1] for some in series)
        for start in range(first, last + 1, 600_000):
            parts = [_series(some, start, start + 600_000) for some in series]
            body = b"".join(_field(1, part) for part in parts if part)
            packed = pa.Codec("snappy").compress(body, asbytes=True)
            request = urllib.request.Request(f"{self._url}/api/v1/write", packed)
            request.add_header("Content-Encoding", "snappy")
            request.add_header("Content-Type", "application/x-protobuf")
            urllib.request.urlopen(request, timeout=30).close()


def _varint(number: int) -> bytes:
    made = bytearray()
    while number > 127:
        made.append(number & 127 | 128)
        number >>= 7
    return bytes([*made, number])


def _field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _series(series: Series, start_ms: int, end_ms: int) -> bytes:
    labels = [
        _field(1, _field(1, name.encode()) + _field(2, value.encode())) for name, value in sorted(series.labels.items())
    ]
    samples = [
        _field(2, b"\x09" + struct.pack("<d", value) + b"\x10" + _varint(moment))
        for moment, value in zip(series.times_ms, series.values, strict=True)
        if start_ms <= moment < end_ms
    ]
    return b"".join(labels + samples) if samples else b""


@contextmanager
def prometheus(folder: Path, series: Sequence[Series], *features: str) -> Iterator[PrometheusPeer]:
    """A Prometheus that holds these series and scrapes nothing."""
    binary = peer_binary("prometheus")
    assert binary is not None
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "prometheus.yml").write_text("global: {}\n")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        *(binary, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"),
        *(f"--web.listen-address=127.0.0.1:{port}", "--web.enable-remote-write-receiver", "--log.level=error"),
        *("--storage.tsdb.retention.time=100y", f"--enable-feature={','.join((FEATURES, *features))}"),
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        peer = PrometheusPeer(f"http://127.0.0.1:{port}")
        until = time.monotonic() + START_S
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/-/ready", timeout=1).close()
                break
            except OSError:
                assert process.poll() is None, "Prometheus does not start"
                assert time.monotonic() < until, "Prometheus does not start in time"
                time.sleep(0.05)
        peer.write(series)
        yield peer
    finally:
        process.kill()
        process.wait()
