"""A real Prometheus sends what it scrapes, by remote write 1.0 and 2.0, while our owner is killed and started again.

No sample is missing and none is different from its own database. Ten seconds by default; the campaign takes a minute.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from bench.prometheus import free_port, peer_binary
from owner_processes import owners, until
from prometheus_peer import PrometheusPeer

import penstock
from penstock.http.application import HttpSettings
from penstock.http.serving import serve_http

SETTLES_S = 40.0
EVERYTHING = '{__name__=~".+"}'


@pytest.mark.parametrize(
    ("message", "scrapes_s"),
    [
        pytest.param("prometheus.WriteRequest", 8, id="1.0"),
        pytest.param("io.prometheus.write.v2.Request", 8, id="2.0"),
        pytest.param("prometheus.WriteRequest", 60, id="1.0 for a minute", marks=pytest.mark.campaign),
        pytest.param("io.prometheus.write.v2.Request", 60, id="2.0 for a minute", marks=pytest.mark.campaign),
    ],
)
def test_everything_scraped_arrives(tmp_path: Path, message: str, scrapes_s: int) -> None:
    binary = peer_binary()
    if binary is None:
        pytest.skip("there is no prometheus on PATH or in PENSTOCK_PEERS")
    port = free_port()
    folder = tmp_path / "store"
    with penstock.open(folder) as owner:
        owner.series("metrics")
    killed = 0
    with penstock.connect(folder) as store, serve_http(store, HttpSettings(table="metrics", write=True)) as ours:
        (tmp_path / "prometheus.yml").write_text(
            f"global: {{ scrape_interval: 500ms, scrape_timeout: 500ms }}\n"
            f"scrape_configs: [{{ job_name: self, static_configs: [{{ targets: ['127.0.0.1:{port}'] }}] }}]\n"
            f"remote_write: [{{ url: 'http://127.0.0.1:{ours}/api/v1/write', protobuf_message: '{message}' }}]\n"
        )
        command = [
            *(binary, f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"),
            *(f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"),
        ]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            try:
                peer = PrometheusPeer(f"http://127.0.0.1:{port}")
                for _ in range(2):
                    time.sleep(scrapes_s / 3)
                    until(lambda: owners(folder))  # the next one may be starting
                    for pid in owners(folder):
                        os.kill(pid, signal.SIGKILL)
                        killed += 1
                time.sleep(scrapes_s / 3)
                moment_ms = int(time.time() * 1000)
                selector = f"{EVERYTHING}[{scrapes_s + 30}s]"
                peer_samples = samples(peer.instant(selector, moment_ms)["data"]["result"])
                end_s = time.monotonic() + SETTLES_S
                while True:
                    store_samples = table_samples(store.series("metrics").query(selector, moment_ms * 1000))
                    if peer_samples.items() <= store_samples.items() or time.monotonic() > end_s:
                        break
                    time.sleep(0.5)
            finally:
                process.kill()
        for pid in owners(folder):
            os.kill(pid, signal.SIGTERM)
    assert killed >= 2
    assert len(peer_samples) > 1_000
    assert [key for key, value in peer_samples.items() if store_samples.get(key) != value] == []
    assert {key for key in store_samples if key[1] <= moment_ms} <= peer_samples.keys()  # nothing that it does not have


def samples(result: Any) -> dict[Any, str]:
    return {
        (tuple(sorted(series["metric"].items())), round(moment * 1000)): repr(float(value))
        for series in result
        for moment, value in series["values"]
    }


def table_samples(table: Any) -> dict[Any, str]:
    rows = table.to_pylist()
    return {
        (
            tuple(sorted({"__name__": row["metric"], **dict(row["labels"])}.items())),
            round(row["time"].timestamp() * 1000),
        ): repr(row["value"])
        for row in rows
    }
