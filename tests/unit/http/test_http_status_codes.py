"""Status and kind of error of wrong requests, as a real Prometheus 3.5.3 gives them.

The list was recorded with the binary; where it is at hand (on PATH or in PENSTOCK_PEERS) the recording is compared.
"""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from bench.prometheus import free_port, peer_binary
from test_http_application import Client, T, client, store

__all__ = ["client", "store"]  # fixtures
QUERY, RANGE, SERIES = "/api/v1/query", "/api/v1/query_range", "/api/v1/series"
FINE, BAD = (200, None), (400, "bad_data")
MOMENT, HOUR = {"time": T}, {"start": T, "end": T + 3600, "step": 60}
RECORDED: list[tuple[str, dict[str, Any], tuple[int, str | None]]] = [
    (RANGE, {"query": "up", "start": 0, "end": 11_000, "step": 1}, FINE),
    (RANGE, {"query": "up", "start": 0, "end": 11_001, "step": 1}, BAD),
    (RANGE, {"query": "up", "start": 10, "end": 0, "step": 1}, BAD),
    (RANGE, {"query": "up", "start": 0, "end": 10, "step": 0}, BAD),
    (RANGE, {"query": "up", "start": 0, "end": 10, "step": -1}, BAD),
    (RANGE, {"query": "up", "start": 0, "end": 10, "step": "NaN"}, BAD),
    (RANGE, {"query": "up", "start": "x", "end": 10, "step": 1}, BAD),
    (RANGE, {"query": "up", "start": 0, "end": 10}, BAD),
    (RANGE, {"start": 0, "end": 10, "step": 1}, BAD),
    (RANGE, {"query": "up[5m]", **HOUR}, BAD),
    (RANGE, {"query": '"a"', **HOUR}, BAD),
    (RANGE, {"query": "up", **HOUR, "limit": "x"}, BAD),
    (RANGE, {"query": "up", **HOUR, "lookback_delta": "x"}, BAD),
    (QUERY, {"query": "up", "time": "x"}, BAD),
    (QUERY, {}, BAD),
    (QUERY, {"query": ""}, BAD),
    (QUERY, {"query": "up{"}, BAD),
    (QUERY, {"query": "1+1", "timeout": "x"}, BAD),
    (QUERY, {"query": "1+1", "limit": "x"}, BAD),
    (QUERY, {"query": "1+1", "limit": "-1"}, BAD),
    (QUERY, {"query": "1+1", "limit": "1"}, FINE),
    (QUERY, {"query": "up", "lookback_delta": "x"}, BAD),
    (QUERY, {"query": "up", "lookback_delta": "10m"}, FINE),
    (QUERY, {"query": "vector(1)*on()group_left vector(2)", **MOMENT}, FINE),
    (QUERY, {"query": '{__name__=~""}'}, BAD),
    (QUERY, {"query": "nosuch(up)"}, BAD),
    (QUERY, {"query": 'up{a=~"("}'}, BAD),
    (SERIES, {}, BAD),
    (SERIES, {"match[]": ""}, BAD),
    (SERIES, {"match[]": "up{"}, BAD),
    (SERIES, {"match[]": "{}"}, BAD),
    (SERIES, {"match[]": '{a=~".*"}'}, BAD),
    (SERIES, {"match[]": "up", "start": "x"}, BAD),
    (SERIES, {"match[]": "up", "start": 10, "end": 5}, FINE),
    (SERIES, {"match[]": "up", "limit": "x"}, BAD),
    ("/api/v1/labels", {"match[]": "up{"}, BAD),
    ("/api/v1/labels", {"match[]": "{}"}, BAD),
    ("/api/v1/labels", {"start": "x"}, BAD),
    ("/api/v1/labels", {"start": 10, "end": 5}, FINE),
    ("/api/v1/label/a/values", {"match[]": "{}"}, BAD),
    ("/api/v1/metadata", {"limit": "x"}, BAD),
    ("/api/v1/query_exemplars", {"query": "up", "start": 0, "end": 1}, FINE),
    ("/api/v1/query_exemplars", {"query": "up{", "start": 0, "end": 1}, BAD),
    ("/api/v1/format_query", {"query": "up{"}, BAD),
    ("/api/v1/parse_query", {"query": "up{"}, BAD),
    ("/api/v1/status/tsdb", {"limit": "x"}, BAD),
    ("/api/v1/status/tsdb", {"limit": "0"}, BAD),
    ("/api/v1/status/tsdb", {"limit": "-1"}, BAD),
    ("/api/v1/status/tsdb", {"limit": "00001000099"}, BAD),
    ("/api/v1/status/tsdb", {"limit": "3"}, FINE),
]


def answer_of(client: Client, path: str, parameters: dict[str, Any]) -> tuple[int, str | None]:
    status, reply, _ = client.send(f"{path}?{urlencode(parameters, doseq=True)}")
    return status, reply.get("errorType")


@pytest.mark.parametrize(("path", "parameters", "recorded"), RECORDED, ids=str)
def test_wrong_requests_are_answered_as_by_prometheus(
    client: Client, path: str, parameters: dict[str, Any], recorded: tuple[int, str | None]
) -> None:
    assert answer_of(client, path, parameters) == recorded


def test_prometheus_still_answers_so(tmp_path: Path) -> None:
    binary = peer_binary()
    if binary is None:
        pytest.skip("there is no prometheus on PATH or in PENSTOCK_PEERS")
    port = free_port()
    (tmp_path / "prometheus.yml").write_text("global: { scrape_interval: 1h }\n")
    command = [
        *(binary, f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"),
        *(f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"),
    ]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            peer, end_s = Client(port), time.monotonic() + 40.0
            while not is_ready(peer):
                assert time.monotonic() < end_s
                time.sleep(0.1)
            wrong = [
                (path, parameters, answer)
                for path, parameters, recorded in RECORDED
                if (answer := answer_of(peer, path, parameters)) != recorded
            ]
        finally:
            process.kill()
    assert wrong == []


def is_ready(peer: Client) -> bool:
    try:
        return peer.send("/-/ready")[0] == 200
    except OSError:
        return False


def test_a_limit_cuts_a_result_and_says_so(client: Client) -> None:
    for path, times in ((QUERY, MOMENT), (RANGE, HOUR)):
        for limit, count in (("1", 1), ("2", 2), ("0", 2)):
            status, reply, _ = client.send(f"{path}?{urlencode({'query': 'up', **times, 'limit': limit})}")
            assert (status, len(reply["data"]["result"])) == (200, count)
            assert reply.get("warnings") == (["results truncated due to limit"] if count == 1 else None)
    for path, names in (("/api/v1/labels", 2), ("/api/v1/label/job/values", 2), (SERIES + "?match[]=up", 2)):
        both = f"{path}{'&' if '?' in path else '?'}limit="
        assert "warnings" not in client.send(f"{both}{names}")[1]
        status, reply, _ = client.send(f"{both}{names - 1}")
        assert (status, len(reply["data"]), len(reply["warnings"])) == (200, names - 1, 1)


def test_a_lookback_of_the_query(client: Client) -> None:
    for lookback, count in (("1m", 0), ("600", 2), ("10m", 2)):
        parameters = {"query": "up", "time": T + 400, "lookback_delta": lookback}
        assert len(client.get(QUERY, **parameters)["result"]) == count
    assert client.get(QUERY, query="up", time=T + 400)["result"] == []
