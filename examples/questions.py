"""One question to each kind of table at the end of a run, with its answer as a chart for the report."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any, NamedTuple

import penstock
from examples import drawing, fingerprints, metrics

RECENT_S = 600
WIDTH = 440  # of a chart beside another


class Question(NamedTuple):
    """A question to a table."""

    kind: str
    title: str
    code: str
    answer: str  # a chart, as markup


class TableMade(NamedTuple):
    """A table of the store, for the list of what was built."""

    name: str
    kind: str
    rows: int
    file_bytes: int


def tables_made(store: penstock.Store) -> list[TableMade]:
    """Return the tables of the store with their sizes."""
    tables = []
    for name in store.tables():
        table: Any = store.table(name)
        numbers, kind = table.statistics(), _kind(table)
        rows = next(
            getattr(numbers, key) for key in ("messages", "rows_max", "series", "count") if hasattr(numbers, key)
        )
        tables.append(TableMade(name, kind, rows, getattr(numbers, "file_bytes", getattr(numbers, "bytes", 0))))
    return tables


def _kind(table: Any) -> str:
    names = {"Queue": "queue", "Series": "series", "Vector": "vector"}
    return next((kind for word, kind in names.items() if word in type(table).__name__), "kv")


def ask(store: penstock.Store) -> list[Question]:
    """Ask each kind of table something; a table that has too little says so."""
    return [_of_kv(store), _of_queue(store), _of_series(store), _of_vectors(store)]


def _of_kv(store: penstock.Store) -> Question:
    code = 'sorted(store.kv("totals", value="int64").scan(), key=lambda row: -row[1])[:8]'
    rows = sorted(store.kv("totals", value="int64").scan(), key=lambda row: -row[1])[:8]
    chart = drawing.named_bars([(key.decode(), float(count)) for key, count in rows])
    return Question("kv", "Readings of the devices that sent most", code, chart)


def _of_queue(store: penstock.Store) -> Question:
    code = 'Counter(second for second in store.queue("events").to_arrow().column("timestamp"))'
    stamps = store.queue("events").to_arrow().column("timestamp").cast("timestamp[s]", safe=False).cast("int64")
    counts = Counter(stamps.to_pylist())
    last = max(counts, default=0)
    recent = sorted((second, count) for second, count in counts.items() if last - second < RECENT_S)
    first = recent[0][0] if recent else 0
    points = [(float(second - first), float(count)) for second, count in recent]
    chart = drawing.lines([drawing.Line("", points)], label="messages a second", width=WIDTH)
    return Question("queue", "Messages by the second they were put in", code, chart)


def _of_series(store: penstock.Store) -> Question:
    code = f"""store.series("{metrics.TABLE}").query_range('avg by (site) (temperature)', start, end, step=…)"""
    end = time.time()
    counted = store.series(metrics.TABLE).aggregate("temperature", function="count")
    if not counted.num_rows:
        return Question("series", "Mean temperature of each site", code, drawing.TOO_FEW)
    start = end - RECENT_S
    result: Any = store.series(metrics.TABLE).query_range(
        "avg by (site) (temperature)", int(start * 1e6), int(end * 1e6), step=2.0
    )
    by_site: dict[str, list[tuple[float, float]]] = {}
    for row in result.to_pylist():
        site = dict(row["labels"]).get("site", "")
        by_site.setdefault(site, []).append((row["time"].timestamp() - start, row["value"]))
    begin = min((points[0][0] for points in by_site.values()), default=0.0)
    drawn = [drawing.Line(site, [(at - begin, value) for at, value in by_site[site]]) for site in sorted(by_site)]
    chart = drawing.lines(drawn, label="temperature", width=WIDTH, zoom=True)
    return Question("series", "Mean temperature of each site", code, chart)


def _of_vectors(store: penstock.Store) -> Question:
    code = f'store.vector("{fingerprints.TABLE}").search(fingerprint_of("device-117"), k=9)'
    table = store.vector(fingerprints.TABLE)
    record = table.get("device-117")
    hits: Any = [] if record is None else table.search(record.vector, k=9)
    rows = [(hit.id, float(hit.distance)) for hit in hits if hit.id != "device-117"]
    return Question("vector", "Distance of device-117 to its nearest neighbours", code, drawing.named_bars(rows))
