"""PromQL beside Prometheus: the same 10,000 series over 24 hours at 15 seconds, twenty queries of dashboards by HTTP.

A hundred instances of ten jobs have a hundred series each: CPU times, requests, a classic histogram, gauges. Prometheus
gets them by remote write, slice by slice, as it would from an agent; we get the columns of each series. Then both
answer the same queries over one kept connection each, in turn, and the median of the ratios is judged. Their answers
are compared, too. See `bench/prometheus.py` for where Prometheus is looked for.

QUICK=1 makes the run short: 2 hours, and fewer rounds.
"""

from __future__ import annotations

import http.client
import json
import math
import statistics
import sys
import time
import urllib.parse
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

import penstock
from bench.harness import QUICK, Figure, folder, tell
from bench.prometheus import field, free_port, label_fields, peer_binary, prometheus, serving

HOURS = 2 if QUICK else 24
ROUNDS = 3 if QUICK else 5
INSTANCES, JOBS = 100, 10
STEP_S = 15
SAMPLES = HOURS * 3_600 // STEP_S
SLICE = 20  # samples of each series in one request of remote write
START_S = 1_790_000_000 // 86_400 * 86_400
END_S = START_S + (SAMPLES - 1) * STEP_S
GATE, GOAL = 0.5, 1.0
WRITE_GOAL, ONE_SERIES_GOAL_MS = 200_000, 2.0
SEND_SAMPLES, SENDERS = 2_000, 4  # of a request, and at the same time: what Prometheus does by default
MODES = ("idle", "iowait", "irq", "nice", "softirq", "steal", "system", "user")
BOUNDS = ("0.005", "0.01", "0.025", "0.05", "0.1", "0.25", "0.5", "1", "2.5", "5", "10", "+Inf")
GAUGES = (
    *("up", "node_load1", "node_memory_MemAvailable_bytes", "node_memory_MemTotal_bytes"),
    *("process_resident_memory_bytes", "go_goroutines"),
    *(f"gauge_{number:02d}" for number in range(19)),
)

H1, H6, DAY = (3_600, 15), (6 * 3_600, 60), (24 * 3_600, 300)  # seconds of a panel, and its step
QUERIES: tuple[tuple[str, tuple[int, int] | None], ...] = (  # None: an instant
    ("count(up == 1)", None),
    ("sum by (job) (up)", None),
    ("topk(5, sum by (instance) (rate(http_requests_total[5m])))", None),
    ('increase(http_requests_total{instance="host-042:9100"}[1h])', None),
    ("sum(rate(http_requests_total[5m]))", H1),
    ("sum by (handler) (rate(http_requests_total[5m]))", H6),
    ('sum(rate(http_requests_total{code="500"}[5m])) / sum(rate(http_requests_total[5m]))', H6),
    ("sum by (job) (rate(http_requests_total[5m]))", DAY),
    ("histogram_quantile(0.99, sum by (le) (rate(http_request_duration_seconds_bucket[5m])))", H1),
    ('histogram_quantile(0.9, sum by (le, handler) (rate(http_request_duration_seconds_bucket{job="job-3"}[5m])))', H6),
    ("sum(rate(http_request_duration_seconds_sum[5m])) / sum(rate(http_request_duration_seconds_count[5m]))", H6),
    ('100 - 100 * avg by (instance) (rate(node_cpu_seconds_total{mode="idle"}[5m]))', H1),
    ('sum by (mode) (rate(node_cpu_seconds_total{instance="host-042:9100"}[5m]))', H6),
    ("1 - node_memory_MemAvailable_bytes / node_memory_MemTotal_bytes", H1),
    ('1 - node_memory_MemAvailable_bytes{job="job-3"} / node_memory_MemTotal_bytes{job="job-3"}', DAY),
    ('node_load1{instance="host-042:9100"}', DAY),
    ('avg_over_time(node_load1{job="job-3"}[1h])', DAY),
    ("max by (job) (node_load1)", H6),
    ("quantile(0.95, go_goroutines)", H6),
    ("sum by (job) (process_resident_memory_bytes)", DAY),
)


# -- the data


def label_sets() -> list[dict[str, str]]:
    series: list[dict[str, str]] = []
    for number in range(INSTANCES):
        base = {"instance": f"host-{number:03d}:9100", "job": f"job-{number % JOBS}"}
        for cpu in range(4):
            series += [{"__name__": "node_cpu_seconds_total", "cpu": str(cpu), "mode": mode, **base} for mode in MODES]
        for handler in ("/", "/api", "/login", "/search", "/static"):
            for code in ("200", "404", "500"):
                series.append({"__name__": "http_requests_total", "code": code, "handler": handler, **base})
        for handler in ("/api", "/search"):
            name = "http_request_duration_seconds"
            series += [{"__name__": f"{name}_bucket", "handler": handler, "le": le, **base} for le in BOUNDS]
            series += [{"__name__": f"{name}_{suffix}", "handler": handler, **base} for suffix in ("sum", "count")]
        series += [{"__name__": name, **base} for name in GAUGES]
    return series


def values_of(labels: list[dict[str, str]]) -> npt.NDArray[np.float64]:
    """Series x samples: counters with resets now and then, buckets that nest, gauges that walk."""
    rng = np.random.default_rng(7)
    values = np.empty((len(labels), SAMPLES))
    for row, series in enumerate(labels):
        name = series["__name__"]
        if name == "node_cpu_seconds_total":
            values[row] = np.round(np.cumsum(rng.random(SAMPLES) * (14 if series["mode"] == "idle" else 0.5)), 2)
        elif name.endswith("_bucket"):
            rank = BOUNDS.index(series["le"]) + 1
            if rank == 1:
                steps = rng.multinomial(40, np.full(len(BOUNDS), 1 / len(BOUNDS)), SAMPLES)
                nested = np.cumsum(np.cumsum(steps, axis=1), axis=0).T
            values[row] = nested[rank - 1]
        elif name == "up":
            values[row] = rng.random(SAMPLES) > 0.001
        elif name == "node_memory_MemTotal_bytes":
            values[row] = 16 << 30
        elif "total" in name or name.endswith(("_sum", "_count")):
            values[row] = np.cumsum(rng.integers(0, 100, SAMPLES))
            if rng.random() < 0.2:  # a restart
                at = int(rng.integers(1, SAMPLES))
                values[row, at:] -= values[row, at - 1]
        else:
            values[row] = np.round(50 + np.cumsum(rng.normal(0, 0.3, SAMPLES)), 1)
    return values


class WriteBodies:
    """Requests of remote write 1.0, built by numpy: every sample has 18 bytes at a known offset."""

    def __init__(self, labels: list[dict[str, str]], samples: int) -> None:
        parts: list[bytes] = []
        at, starts = 0, []
        for label_set in labels:
            series = field(1, label_fields(label_set) + samples * SAMPLE)
            starts.append(at + len(series) - samples * len(SAMPLE))
            parts.append(series)
            at += len(series)
        self._template = np.frombuffer(b"".join(parts), np.uint8)
        self._offsets = np.array(starts)[:, None] + len(SAMPLE) * np.arange(samples)

    def body(self, times_ms: npt.NDArray[np.int64], values: npt.NDArray[np.float64]) -> bytes:
        """Return a compressed request: `times_ms` of each sample, values as series x samples."""
        request = self._template.copy()
        raw = np.ascontiguousarray(values).view(np.uint8).reshape(*values.shape, 8)
        shifts = 7 * np.arange(6)
        digits = ((times_ms[:, None] >> shifts) & 127 | np.where(shifts < 35, 128, 0)).astype(np.uint8)
        for byte in range(8):
            request[self._offsets + 3 + byte] = raw[:, :, byte]
        for byte in range(6):
            request[self._offsets + 12 + byte] = digits[:, byte]
        packed: bytes = pa.Codec("snappy").compress(request.tobytes(), asbytes=True)
        return packed


SAMPLE = b"\x12\x10\x09" + bytes(8) + b"\x10" + bytes(6)  # a value, and milliseconds in six digits of seven bits


# -- the two servers


class Server:
    """A kept connection to one of them."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)

    def post(self, path: str, body: bytes, **headers: str) -> bytes:
        self._connection.request("POST", path, body, {name.replace("_", "-"): text for name, text in headers.items()})
        answer = self._connection.getresponse()
        data = answer.read()
        assert answer.status in (200, 204), (answer.status, data[:300])
        return data

    def write(self, body: bytes) -> None:
        self.post("/api/v1/write", body, Content_Type="application/x-protobuf", Content_Encoding="snappy")

    def ask(self, query: str, panel: tuple[int, int] | None) -> bytes:
        parameters: dict[str, Any] = {"query": query}
        if panel is None:
            parameters["time"] = END_S
        else:
            parameters |= {"start": END_S - min(panel[0], END_S - START_S), "end": END_S, "step": panel[1]}
        body = urllib.parse.urlencode(parameters).encode()
        path = "/api/v1/query" if panel is None else "/api/v1/query_range"
        return self.post(path, body, Content_Type="application/x-www-form-urlencoded")


@contextmanager
def ours(path: Path) -> Iterator[Server]:
    """`penstock http` and, beside it, the owner that it starts: each a process, as users have them."""
    port = free_port()
    command = [sys.executable, "-m", "penstock", "http", str(path), "--table", "metrics", "--port", str(port)]
    with serving([*command, "--write"], port):
        yield Server(port)


# -- the runs


def load(labels: list[dict[str, str]], peer: Server, path: Path) -> None:
    values = values_of(labels)
    times_s = START_S + STEP_S * np.arange(SAMPLES)
    began = time.perf_counter()
    bodies = WriteBodies(labels, SLICE)
    for at in range(0, SAMPLES, SLICE):
        peer.write(bodies.body(times_s[at : at + SLICE] * 1_000, values[:, at : at + SLICE]))
    print(f"  Prometheus has {values.size:,} samples after {time.perf_counter() - began:.0f} s", flush=True)
    began = time.perf_counter()
    with penstock.open(path) as store:
        table = store.series("metrics", options=penstock.SeriesOptions(future_s=None))
        store.series("written", options=penstock.SeriesOptions(future_s=None))
        for row, series in enumerate(labels):
            rest = {name: value for name, value in series.items() if name != "__name__"}
            table.write_columns(series["__name__"], values[row], rest, times=times_s * 1_000_000)
        store.flush()
        store.compact("metrics")
    print(f"  Penstock has them after {time.perf_counter() - began:.0f} s", flush=True)


def timed_ms(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) * 1_000


def difference(one: bytes, other: bytes) -> str | None:
    """Return how two answers differ: other series, other times, or a value farther than 1e-9."""

    def read(answer: bytes) -> dict[Any, dict[float, float]]:
        data = json.loads(answer)["data"]["result"]
        return {
            tuple(sorted(some["metric"].items())): {
                at: float(value) for at, value in some.get("values", [some.get("value")])
            }
            for some in data
        }

    a, b = read(one), read(other)
    if a.keys() != b.keys():
        return f"{len(a)} and {len(b)} series"
    for key, points in a.items():
        if points.keys() != b[key].keys():
            return f"other times of {key}"
        for at, value in points.items():
            same = math.isclose(value, b[key][at], rel_tol=1e-9) or (math.isnan(value) and math.isnan(b[key][at]))
            if not same:
                return f"{value} and {b[key][at]} of {key}"
    return None


def compare(peer: Server, mine: Server) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for query, panel in QUERIES:
        wrong = difference(peer.ask(query, panel), mine.ask(query, panel))
        theirs, own = [], []
        for _ in range(ROUNDS):
            theirs.append(timed_ms(partial(peer.ask, query, panel)))
            own.append(timed_ms(partial(mine.ask, query, panel)))
        row: dict[str, Any] = {"query": query, "seconds": 0 if panel is None else panel[0], "difference": wrong}
        row |= {"prometheus_ms": statistics.median(theirs), "ours_ms": statistics.median(own)}
        row["ratio"] = row["prometheus_ms"] / row["ours_ms"]
        rows.append(row)
        print(
            f"  {query[:84]:<84} {row['seconds'] // 3600:>3} h {row['prometheus_ms']:>8.1f} {row['ours_ms']:>8.1f} ms"
            f" {row['ratio']:>6.2f} x{'' if wrong is None else '  DIFFERS: ' + wrong}",
            flush=True,
        )
    return rows


def written_rate(labels: list[dict[str, str]], port: int) -> float:
    """Samples a second by remote write, each request durable, from several connections as Prometheus has them."""
    parts = [labels[at : at + SEND_SAMPLES] for at in range(0, len(labels), SEND_SAMPLES)]
    makers = [WriteBodies(part, 1) for part in parts]
    rounds = 20 if QUICK else 60
    rng = np.random.default_rng(3)
    bodies = []
    for number in range(rounds):
        times_ms = np.array([(START_S + number * STEP_S) * 1_000])
        bodies += [m.body(times_ms, rng.random((len(p), 1))) for m, p in zip(makers, parts, strict=True)]
    lines = [bodies[number::SENDERS] for number in range(SENDERS)]

    def send(line: list[bytes]) -> None:
        server = Server(port)
        for body in line:
            server.post(
                "/prometheus/written/api/v1/write",
                body,
                Content_Type="application/x-protobuf",
                Content_Encoding="snappy",
            )

    with ThreadPoolExecutor(SENDERS) as pool:
        list(pool.map(send, [line[:2] for line in lines]))
        began = time.perf_counter()
        list(pool.map(send, [line[2:] for line in lines]))
        took = time.perf_counter() - began
    return sum(len(line) - 2 for line in lines) * SEND_SAMPLES / took


def main() -> bool:
    if peer_binary() is None:
        print("\npromql  (skipped: there is no prometheus in PENSTOCK_PEERS or on the path)")
        return True
    labels = label_sets()
    print(f"\npromql  ({len(labels):,} series x {HOURS} h at {STEP_S} s, by HTTP; medians of {ROUNDS}, in turn)")
    report: dict[str, Any] = {"hours": HOURS, "series": len(labels)}
    with folder() as root, prometheus(Path(root) / "prometheus") as port:
        peer = Server(port)
        store = Path(root) / "store"
        load(labels, peer, store)
        with ours(store) as mine:
            report["queries"] = compare(peer, mine)
            one = 'up{instance="host-042:9100"}'
            report["one series by HTTP, ms"] = statistics.median(
                timed_ms(lambda: mine.ask(one, None)) for _ in range(200)
            )
            report["Prometheus, one series, ms"] = statistics.median(
                timed_ms(lambda: peer.ask(one, None)) for _ in range(200)
            )
            report["remote write, samples/s"] = written_rate(labels, mine._connection.port)
        with penstock.open(store) as embedded:
            table = embedded.series("metrics")
            report["one series embedded, ms"] = statistics.median(
                timed_ms(lambda: table.query(one, END_S * 1_000_000)) for _ in range(200)
            )
    median = statistics.median(row["ratio"] for row in report["queries"])
    wrong = [row["query"] for row in report["queries"] if row["difference"] is not None]
    typical = "twenty dashboard queries, the median of their speeds, of Prometheus'"
    return tell(
        "promql",
        [
            Figure(name=typical, value=median, unit="x", least=GATE, gate=True),
            Figure(name=f"{typical} (goal)", value=median, unit="x", least=GOAL),
            Figure(name="queries with another answer", value=len(wrong), unit="", most=0, gate=True),
            Figure(
                name="one series by HTTP",
                value=report["one series by HTTP, ms"],
                unit="ms",
                most=ONE_SERIES_GOAL_MS,
            ),
            Figure(name="one series by HTTP: Prometheus", value=report["Prometheus, one series, ms"], unit="ms"),
            Figure(name="one series, embedded", value=report["one series embedded, ms"], unit="ms"),
            Figure(
                name="remote write, durable, of series that were sent before",
                value=report["remote write, samples/s"],
                unit="/s",
                least=WRITE_GOAL,
            ),
        ],
        report=report,
    )


if __name__ == "__main__":
    sys.exit(not main())
