"""The calls of Grafana's Prometheus data source, in the form in which it sends them: each is answered as it expects."""

from __future__ import annotations

import json
import re
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bench.prometheus import peer_binary

import penstock
from penstock.http.application import HttpSettings
from penstock.http.serving import serve_http
from penstock.promql import parse_query

T = 1_700_000_000
MONITORING = Path(__file__).parents[3] / "docs" / "monitoring"
FORM = "application/x-www-form-urlencoded"
# What Grafana sends besides: its own user agent, the user's headers, and no origin, for its server calls us.
HEADERS = {"User-Agent": "Grafana/11.2.0", "X-Grafana-Org-Id": "1", "Accept-Encoding": "gzip"}


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with penstock.open(tmp_path_factory.mktemp("grafana") / "store") as owner, penstock.connect(owner.path) as store:
        metrics = owner.series("metrics")
        for job, values in (("api", [1.0, 2.0, 4.0]), ("web", [1.0, 1.0, 1.0])):
            times = [(T + 15 * number) * 10**6 for number in range(3)]
            metrics.write_columns("requests_total", values, {"job": job, "instance": f"{job}:80"}, times=times)
        metrics.set_metadata("requests_total", type="counter", help="Requests.", durable=True)
        with serve_http(store, HttpSettings(table="metrics")) as bound:
            yield bound


def call(port: int, method: str, path: str, parameters: list[tuple[str, str]] | None = None) -> Any:
    text = urllib.parse.urlencode(parameters or [])
    url = f"http://127.0.0.1:{port}{path}" + (f"?{text}" if text and method == "GET" else "")
    request = urllib.request.Request(url, text.encode() if method == "POST" else None, HEADERS, method=method)
    if method == "POST":
        request.add_header("Content-Type", FORM)
    with urllib.request.urlopen(request, timeout=20) as answer:
        assert answer.headers["Content-Type"].startswith("application/json")
        reply = json.load(answer)
    assert reply["status"] == "success"
    return reply["data"]


def test_save_and_test(port: int) -> None:
    """The health check: an instant of numbers, and who we are."""
    data = call(port, "POST", "/api/v1/query", [("query", "1+1"), ("time", f"{T}.5")])
    assert data == {"resultType": "scalar", "result": [T + 0.5, "2"]}
    assert call(port, "GET", "/api/v1/status/buildinfo").keys() >= {"version", "revision"}


def test_variables(port: int) -> None:
    range_ = [("start", str(T)), ("end", str(T + 60))]
    assert call(port, "GET", "/api/v1/label/job/values", range_) == ["api", "web"]
    match = [("match[]", 'requests_total{instance=~"api.+"}'), *range_]
    assert call(port, "GET", "/api/v1/label/job/values", match) == ["api"]
    assert call(port, "GET", "/api/v1/label/__name__/values", [*range_, ("limit", "40000")]) == ["requests_total"]
    assert call(port, "POST", "/api/v1/labels", range_) == ["__name__", "instance", "job"]
    rows = call(port, "POST", "/api/v1/series", [("match[]", "requests_total"), *range_, ("limit", "40000")])
    assert sorted(row["job"] for row in rows) == ["api", "web"]
    assert all(row["__name__"] == "requests_total" for row in rows)
    # query_result(...) of a variable
    data = call(port, "POST", "/api/v1/query", [("query", "topk(1, requests_total)"), ("time", str(T + 30))])
    assert [(row["metric"]["job"], row["value"]) for row in data["result"]] == [("api", [T + 30, "4"])]


def test_a_panel_and_explore(port: int) -> None:
    """A panel asks for a range; Explore for a range and an instant, with a step in its own form and `timeout`."""
    query = "sum by(job) (rate(requests_total[1m0s]))"
    times = [("start", f"{T}.000"), ("end", f"{T + 30}.000"), ("step", "15")]
    data = call(port, "POST", "/api/v1/query_range", [("query", query), *times, ("timeout", "30s")])
    assert data["resultType"] == "matrix"
    assert {row["metric"]["job"]: [at for at, _ in row["values"]] for row in data["result"]} == {
        "api": [T + 15, T + 30],
        "web": [T + 15, T + 30],
    }
    for points in (row["values"] for row in data["result"]):
        assert all(isinstance(at, (int, float)) and isinstance(value, str) for at, value in points)
    data = call(port, "POST", "/api/v1/query", [("query", query), ("time", str(T + 30))])
    assert data["resultType"] == "vector"
    assert call(port, "POST", "/api/v1/query_range", [("query", "nothing"), *times])["result"] == []


def test_what_the_editor_asks_for(port: int) -> None:
    metadata = call(port, "GET", "/api/v1/metadata", [("limit", "5000")])
    assert metadata == {"requests_total": [{"type": "counter", "help": "Requests.", "unit": ""}]}
    assert call(port, "GET", "/api/v1/metadata", [("metric", "requests_total")]) == metadata
    times = [("start", str(T)), ("end", str(T + 60))]
    assert call(port, "POST", "/api/v1/query_exemplars", [("query", "requests_total"), *times]) == []
    assert call(port, "GET", "/api/v1/rules") == {"groups": []}
    assert call(port, "GET", "/api/v1/alerts") == {"alerts": []}
    assert call(port, "POST", "/api/v1/format_query", [("query", "sum(rate(x[5m]))by(job)")]) == (
        "sum by (job) (rate(x[5m]))"
    )
    tree = call(port, "POST", "/api/v1/parse_query", [("query", "up > 1")])
    assert (tree["type"], tree["op"], tree["lhs"]["name"], tree["rhs"]["val"]) == ("binaryExpr", ">", "up", "1")


def test_the_dashboard_and_the_rules_use_metrics_that_there_are(tmp_path: Path) -> None:
    """Every metric that they name is exported by a store, and promtool, where there is one, accepts the rules."""
    with penstock.open(tmp_path / "store") as store:
        store.kv("users").put(b"a", b"1", durable=True)
        with penstock.connect(store.path) as client:
            exported = client.metrics.exposition() + client.metrics.exposition()  # the second counts the first
    exported_names = set(re.findall(r"^# TYPE (\S+)", exported, re.MULTILINE))
    board = json.loads((MONITORING / "grafana-dashboard.json").read_text())
    rules = (MONITORING / "alerts.yml").read_text()
    texts = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    texts += [str(variable["query"]) for variable in board["templating"]["list"]]
    texts += re.findall(r"expr: (.+)", rules)
    named = {name for text in texts for name in re.findall(r"penstock_[a-z_]+", text)}
    assert len(named) > 15
    families = {re.sub(r"_(bucket|sum|count)$", "", name) if name not in exported_names else name for name in named}
    assert families - exported_names == set()
    for text in re.findall(r"expr: (.+)", rules):
        parse_query(text)
    promtool = peer_binary("promtool")
    if promtool is not None:
        checked = subprocess.run(
            [promtool, "check", "rules", str(MONITORING / "alerts.yml")], capture_output=True, text=True, check=False
        )
        assert checked.returncode == 0, checked.stdout + checked.stderr
