"""Series for the conformance suite: counters with resets, gaps, staleness, NaN, infinities, histograms, label churn.

The same numbers on every run: golden files were recorded over them. Times are milliseconds, as Prometheus has them.
"""

from __future__ import annotations

import math
import random
import struct
from dataclasses import dataclass

START_MS = 1_700_000_000_000
STEP_MS = 15_000
SAMPLES = 240  # an hour
STALE = struct.unpack("<d", struct.pack("<Q", 0x7FF0000000000002))[0]
NAN = struct.unpack("<d", struct.pack("<Q", 0x7FF8000000000001))[0]
INF = math.inf


@dataclass(frozen=True)
class Series:
    labels: dict[str, str]
    times_ms: list[int]
    values: list[float]


def dataset() -> list[Series]:
    rng = random.Random(20)
    return [
        *_counters(rng),
        *_gauges(rng),
        *_odd_values(rng),
        *_endings(rng),
        *_histograms(rng),
        *_infos(),
    ]


def _times(rng: random.Random, *, jitter: int = 0, first: int = 0, last: int = SAMPLES) -> list[int]:
    return [START_MS + STEP_MS * n + (rng.randrange(jitter) if jitter else 0) for n in range(first, last)]


def _counters(rng: random.Random) -> list[Series]:
    series = []
    for job in ("api", "web"):
        for instance in ("a:80", "b:80"):
            for code in ("200", "404", "500"):
                if (job, code) == ("web", "500"):
                    continue
                times = _times(rng, jitter=700)
                value, values = rng.random() * 100, []
                for _ in times:
                    value += rng.random() * (10 if code == "200" else 1)
                    if rng.random() < 0.015:
                        value = rng.random() * 3  # a restart
                    values.append(value)
                scrapes = [n for n in range(len(times)) if rng.random() > 0.05]  # lost scrapes
                if (job, instance, code) == ("web", "b:80", "404"):
                    scrapes = [n for n in scrapes if not 60 <= n < 110]  # a long gap
                labels = {"__name__": "requests_total", "job": job, "instance": instance, "code": code}
                series.append(Series(labels, [times[n] for n in scrapes], [values[n] for n in scrapes]))
    for number, (first, last) in enumerate([(0, 90), (80, 170), (165, 240)]):  # pods come and go
        times = _times(rng, first=first, last=last)
        labels = {"__name__": "requests_total", "job": "pods", "instance": f"pod-{number}", "code": "200"}
        series.append(Series(labels, times, [float(n * n % 997) for n in range(len(times))]))
    return series


def _gauges(rng: random.Random) -> list[Series]:
    series = []
    for floor, room in (("1", "hall"), ("1", "lab"), ("2", "hall"), ("2", "roof")):
        times = _times(rng, jitter=3_000)
        phase = rng.random() * 6
        values = [20 * math.sin(n / 17 + phase) + rng.gauss(0, 1) for n in range(len(times))]
        series.append(Series({"__name__": "temperature", "floor": floor, "room": room}, times, values))
    for instance in ("a:80", "b:80"):
        for mode in ("idle", "user", "system"):
            times = _times(rng)
            values = [rng.random() for _ in times]
            series.append(Series({"__name__": "cpu", "instance": instance, "mode": mode}, times, values))
        times = _times(rng)
        series.append(
            Series({"__name__": "up", "instance": instance}, times, [float(n % 50 > 4) for n in range(len(times))])
        )
    times = _times(rng)
    series.append(Series({"__name__": "epoch"}, times, [1_700_000_000.0 + 86_400.5 * n for n in range(len(times))]))
    return series


def _odd_values(rng: random.Random) -> list[Series]:
    count = SAMPLES
    kinds = {
        "constant": [7.25] * count,
        "zero": [0.0] * count,
        "nan": [NAN] * count,
        "inf": [INF] * count,
        "neginf": [-INF] * count,
        "nans": [NAN if n % 5 == 2 else float(n) for n in range(count)],
        "infs": [INF if n % 11 == 3 else -INF if n % 31 == 7 else n / 3 for n in range(count)],
        "huge": [1e308 * (1 if n % 2 else 0.9) for n in range(count)],
        "cancel": [1e16 * (1 if n % 2 else -1) + n for n in range(count)],
        "tiny": [1e-300 * (n + 1) for n in range(count)],
        "offset": [1e9 + rng.random() for _ in range(count)],
        "negative": [-rng.random() * 50 for _ in range(count)],
        "steps": [float(n // 13) for n in range(count)],
    }
    return [Series({"__name__": "odd", "kind": kind}, _times(rng), values) for kind, values in kinds.items()]


def _endings(rng: random.Random) -> list[Series]:
    times = _times(rng)
    ended = [STALE if 100 <= n < 102 else float(n) for n in range(SAMPLES)]
    flapping = [STALE if n % 40 == 20 else n * 0.5 for n in range(SAMPLES)]
    series = [
        Series({"__name__": "ending", "how": "gap"}, times[:101] + times[170:], ended[:101] + ended[170:]),
        Series({"__name__": "ending", "how": "flap"}, times, flapping),
        Series({"__name__": "ending", "how": "early"}, times[:60], [float(n) for n in range(60)]),
        Series({"__name__": "ending", "how": "late"}, times[200:], [float(n) for n in range(40)]),
    ]
    for minutes in (2, 4, 7):
        sparse = list(range(START_MS + 20_000, START_MS + STEP_MS * SAMPLES, minutes * 60_000))
        labels = {"__name__": "sparse", "minutes": str(minutes)}
        series.append(Series(labels, sparse, [rng.random() * 10 for _ in sparse]))
    return series


def _histograms(rng: random.Random) -> list[Series]:
    bounds = ["0.05", "0.1", "0.25", "0.5", "1", "2.5", "+Inf"]
    series = []
    for job in ("api", "web"):
        counts = [0.0] * len(bounds)
        columns: list[list[float]] = [[] for _ in bounds]
        total, sums = 0.0, []
        for n in range(SAMPLES):
            for _ in range(rng.randrange(5)):
                latency = rng.expovariate(2.0 if job == "api" else 0.8)
                total += latency
                for index, bound in enumerate(bounds):
                    counts[index] += latency <= float(bound)
            if n == 120 and job == "web":
                counts, total = [0.0] * len(bounds), 0.0
            for column, count in zip(columns, counts, strict=True):
                column.append(count)
            sums.append(total)
        times = _times(rng)
        for bound, column in zip(bounds, columns, strict=True):
            series.append(Series({"__name__": "latency_bucket", "job": job, "le": bound}, times, column))
        series.append(Series({"__name__": "latency_count", "job": job}, times, columns[-1]))
        series.append(Series({"__name__": "latency_sum", "job": job}, times, sums))
    times = _times(rng)
    for case, buckets in {
        "falling": {"1": 10.0, "2": 8.0, "5": 20.0, "+Inf": 20.0},
        "open": {"1": 10.0, "2": 18.0},
        "lone": {"+Inf": 3.0},
        "empty": {"1": 0.0, "+Inf": 0.0},
        "below": {"-2": 1.0, "-1": 4.0, "0": 6.0, "3": 9.0, "+Inf": 12.0},
        "bad": {"x": 10.0, "1": 2.0, "+Inf": 4.0},
        "twice": {"1": 2.0, "1.0": 3.0, "2": 9.0, "+Inf": 10.0},
    }.items():
        for bound, value in buckets.items():
            labels = {"__name__": "shape_bucket", "case": case, "le": bound}
            series.append(Series(labels, times, [value * (1 + n // 60) for n in range(SAMPLES)]))
    partial = _times(rng, last=150)
    series.append(Series({"__name__": "part_bucket", "le": "1"}, partial, [float(n) for n in range(150)]))
    series.append(Series({"__name__": "part_bucket", "le": "2"}, times, [1.5 * n for n in range(SAMPLES)]))
    series.append(Series({"__name__": "part_bucket", "le": "+Inf"}, times, [2.0 * n for n in range(SAMPLES)]))
    return series


def _infos() -> list[Series]:
    times = [START_MS + STEP_MS * n for n in range(SAMPLES)]
    series = []
    for instance, version, moments in (
        ("a:80", "1.0", times[:120]),
        ("a:80", "1.1", times[120:]),
        ("b:80", "1.0", times),
    ):
        values = [1.0] * len(moments)
        if version == "1.0" and instance == "a:80":
            values, moments = [*values, STALE], [*moments, times[120]]
        labels = {"__name__": "build_info", "instance": instance, "version": version}
        series.append(Series(labels, moments, values))
    series.append(Series({"__name__": "limit", "job": "api"}, times, [5.0] * SAMPLES))
    series.append(Series({"__name__": "limit", "job": "web"}, times, [2.0] * SAMPLES))
    series.append(Series({"__name__": "paths", "path": "/a/b2", "host": "h10"}, times, [1.0] * SAMPLES))
    series.append(Series({"__name__": "paths", "path": "/a/b10", "host": "h9"}, times, [2.0] * SAMPLES))
    series.append(Series({"__name__": "paths", "path": "/c\nd", "host": "é"}, times, [3.0] * SAMPLES))
    return series
