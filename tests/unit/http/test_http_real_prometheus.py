"""A real Prometheus sends what it scrapes, by remote write 1.0 and 2.0: no sample is missing, none is different."""

from __future__ import annotations

import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from prometheus_peer import PrometheusPeer, peer_binary

import penstock
from penstock.http.application import HttpSettings
from penstock.http.serving import serve_http

SCRAPES_S = 12
SETTLES_S = 30.0


@pytest.mark.campaign
@pytest.mark.parametrize("message", ["prometheus.WriteRequest", "io.prometheus.write.v2.Request"])
def test_everything_scraped_arrives(tmp_path: Path, message: str) -> None:
    binary = peer_binary("prometheus")
    if binary is None:
        pytest.skip("there is no prometheus on PATH or in PENSTOCK_PEERS")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with penstock.open(tmp_path / "store") as owner, penstock.connect(owner.path) as store:
        metrics = owner.series("metrics")
        with serve_http(store, HttpSettings(table="metrics", write=True)) as ours:
            (tmp_path / "prometheus.yml").write_text(
                f"global: {{ scrape_interval: 1s }}\n"
                f"scrape_configs: [{{ job_name: self, static_configs: [{{ targets: ['127.0.0.1:{port}'] }}] }}]\n"
                f"remote_write: [{{ url: 'http://127.0.0.1:{ours}/api/v1/write', protobuf_message: '{message}' }}]\n"
            )
            command = [
                *(binary, f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"),
                *(f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"),
            ]
            with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
                try:
                    time.sleep(SCRAPES_S)
                    peer = PrometheusPeer(f"http://127.0.0.1:{port}")
                    # Up to some seconds ago: what is on its way is no loss.
                    moment_ms = int((time.time() - 4) * 1000)
                    wanted = samples(peer.instant('{__name__=~".+"}[8s]', moment_ms)["data"]["result"])
                    until = time.monotonic() + SETTLES_S
                    while True:
                        found = table_samples(metrics.query('{__name__=~".+"}[8s]', moment_ms * 1000))
                        if wanted.items() <= found.items() or time.monotonic() > until:
                            break
                        time.sleep(0.5)
                finally:
                    process.kill()
    assert len(wanted) > 1_000
    assert [key for key, value in wanted.items() if found.get(key) != value] == []


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
