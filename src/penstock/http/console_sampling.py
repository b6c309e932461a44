"""Samples of a store for the console's pages: taken once a second for all of them, and kept for a while.

A sample has what the owner counts (statistics and metrics, two requests) and, every few seconds, the sizes of tables
and the lag of consumers, which need a request for each table. Counts are sums since the store was created: a page
subtracts two samples to get a rate, so a lost sample changes nothing.

Thread: `Sampler.run` is a task of the event loop, and reads in a thread of the pool; `sample` and `history` are for the
event loop.
Invariants: (1) without pages nothing is read. (2) at most HISTORY samples are kept, and at most one waits for
each page: a page that reads slowly misses samples and delays nothing. (3) a page gets only the tables that its rights
name.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict
from typing import Any, TypeAlias

from penstock.errors import PenstockError
from penstock.host.clock import Clock
from penstock.kinds import TableStatistics, statistics_of
from penstock.server.rights import READ, Rights

log = logging.getLogger(__name__)
EVERY_S = 1.0
SIZES_EVERY = 4  # samples between two reads of the sizes of tables
HISTORY = 900  # samples
PAGES_MAX = 64  # that listen at the same time
TABLES_MAX = 200  # whose sizes are read
CONSUMERS_MAX = 200
LAGS_MAX = 40  # consumers whose lag is also measured in seconds
NEWEST = 120  # samples of the history that a new page gets all of; of older ones, one in STRIDE
STRIDE = 6
HISTORY_ROWS_MAX = 5_000  # tables and consumers in all samples that a new page gets: a few megabytes
Sample: TypeAlias = dict[str, Any]
Metric: TypeAlias = tuple[str, dict[str, str], float]
_LINE = re.compile(r"penstock_(\w+)(?:\{(.*)\})? (\S+)$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ESCAPES = {r"\\": "\\", r"\n": "\n", r"\"": '"'}


def parse_metrics(text: str) -> Iterator[Metric]:
    """Yield (name without prefix, labels, value) of each line of Prometheus' text format."""
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is not None:
            name, labels, value = match.groups()
            pairs = {label: _unescaped(value_text) for label, value_text in _LABEL.findall(labels or "")}
            yield name, pairs, float(value)


def _unescaped(text: str) -> str:
    return re.sub(r"\\.", lambda escape: _ESCAPES.get(escape[0], escape[0]), text) if "\\" in text else text


class StoreReader:
    """Reads samples of a store. `read` blocks: call it in a thread, one at a time."""

    def __init__(self, store: Any, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._count = 0
        self._sizes: dict[str, Sample] = {}  # by table, as last read
        self._consumers: list[Sample] = []

    def read(self) -> Sample:
        """Return a sample; if the store does not answer, one that says so."""
        now_us = self._clock.time_us()
        try:
            return self._read(now_us)
        except PenstockError as failed:
            return {"t": now_us / 1e6, "error": str(failed)}

    def _read(self, now_us: int) -> Sample:
        numbers = self._store.statistics()
        infos = self._store.port.tables()
        if self._count % SIZES_EVERY == 0 or {info.name for info in infos} != set(self._sizes):
            self._read_tables(infos, now_us)
        self._count += 1
        metrics = list(parse_metrics(self._store.metrics.exposition()))
        flows, by_table = _flows(metrics)
        tables = [self._table(info, numbers.partitions, by_table.get(info.name, {})) for info in infos]
        whole = {name: value for name, value in asdict(numbers).items() if name != "partitions"}
        return {
            "t": now_us / 1e6,
            "store": whole,
            "flows": flows,
            "tables": tables,
            "consumers": _with_totals(self._consumers, metrics),
            "troubles": [_fields(trouble) for trouble in self._store.troubles()[:100]],
        }

    def _table(self, info: Any, partitions: Any, flows: Sample) -> Sample:
        parts = [partition for partition in partitions if partition.table == info.name]
        states = {partition.state for partition in parts}
        return {
            "name": info.name,
            "kind": info.kind,
            "shards": info.shards,
            "state": next((state for state in ("paused", "frozen", "throttled") if state in states), "active"),
            "behind": sum(partition.enqueued_ops for partition in parts),
            "age_ms": max((partition.backlog_age_ms for partition in parts), default=0),
            "error": next((partition.error for partition in parts if partition.error), ""),
            **self._sizes.get(info.name, {}),
            **flows,
        }

    # -- what needs a request for each table

    def _read_tables(self, infos: list[Any], now_us: int) -> None:
        sizes: dict[str, Sample] = {info.name: {} for info in infos}
        consumers: list[Sample] = []
        for info in infos[:TABLES_MAX]:
            try:
                table = self._store.table(info.name)
                sizes[info.name] = _size(statistics_of(table))
                if info.kind == "queue":
                    room = CONSUMERS_MAX - len(consumers)
                    consumers += [
                        self._consumer(table, consumer, now_us, len(consumers)) for consumer in table.consumers()[:room]
                    ]
            except PenstockError as failed:
                sizes[info.name] = {"error": str(failed)}
        self._sizes, self._consumers = sizes, consumers

    def _consumer(self, table: Any, consumer: Any, now_us: int, number: int) -> Sample:
        return {
            "queue": table.name,
            "name": consumer.name,
            "mode": consumer.mode,
            "lag": consumer.lag,
            "leased": consumer.leased,
            "position": {str(shard): at for shard, at in consumer.position.items()},
            "seen": None if consumer.last_seen_us is None else consumer.last_seen_us / 1e6,
            "lag_s": None if number >= LAGS_MAX else _lag_s(table, consumer, now_us),
            "stream": None if consumer.stream is None else _fields(consumer.stream),
        }


def _lag_s(table: Any, consumer: Any, now_us: int) -> float | None:
    """Return the age of the oldest message that a consumer has not acknowledged; 0 if there is none."""
    if not consumer.lag:
        return 0.0
    oldest: list[int] = []
    for shard, at in consumer.position.items():
        try:
            oldest += [message.time_us for message in table.read(shard, at, 1)]
        except PenstockError:  # trimmed meanwhile
            continue
    return max(0.0, (now_us - min(oldest)) / 1e6) if oldest else None


def _size(statistics: TableStatistics | None) -> Sample:
    """Return rows and bytes of a table; nothing if its kind has no statistics."""
    if statistics is None:
        return {}
    size = statistics.size
    return {
        "rows": size.rows,
        "bytes": size.file_bytes,
        "memory": size.memory_bytes,
        "files": size.files,
        "runs": size.runs,
    }


# Metrics that a sample has as sums over their labels.
_SUMS = {
    "memtable_bytes", "frozen_memtables", "flush_pending", "compaction_running", "memtable_flushed_bytes_total",
    "compacted_bytes_total", "memtable_flush_seconds_count", "memtable_flush_seconds_sum", "compaction_seconds_count",
    "compaction_seconds_sum", "fsync_failures_total", "fsync_retries_total", "admission_retries_total",
    "journal_segments",
    "checkpoints_total", "scheduler_workers", "scheduler_workers_busy", "consensus_is_leader", "clock_ahead_seconds",
    "level_bytes", "level_counts",
}  # fmt: skip
_WORST = {"tree_stall"}
# Metrics that a sample has for each value of one label.
_BY = {
    "level_bytes": "level", "level_counts": "level", "admission_rejects_total": "limit",
    "write_stage_seconds_sum": "stage", "write_stage_seconds_count": "stage", "groups_refused_total": "verdict",
    "requests_total": "request",
}  # fmt: skip
_OF_TABLE = {"memtable_flushed_bytes_total": "flushed", "compacted_bytes_total": "compacted", "tree_stall": "stall"}


def _with_totals(consumers: list[Sample], metrics: list[Metric]) -> list[Sample]:
    """Return consumers with the totals of their streams as of now, not as of when consumers were last read."""
    totals: dict[tuple[str, str], Sample] = {}
    for name, labels, value in metrics:
        if name.startswith("stream_") and labels.get("reads") == "messages":
            of = totals.setdefault((labels["table"], labels["consumer"]), {})
            of[name.removeprefix("stream_").removesuffix("_total")] = int(value)
    return [
        {**consumer, "stream": consumer["stream"] | totals.get((consumer["queue"], consumer["name"]), {})}
        if consumer["stream"]
        else consumer
        for consumer in consumers
    ]


def _flows(metrics: list[Metric]) -> tuple[Sample, dict[str, Sample]]:
    """Return the metrics of a sample, of the store and by table."""
    flows: Sample = {"fsync": {}}
    by_table: dict[str, Sample] = {}
    for name, labels, value in metrics:
        if name in _SUMS:
            flows[name] = flows.get(name, 0.0) + value
        if name in _WORST:
            flows[name] = max(flows.get(name, 0.0), value)
        if name in _BY:
            group = flows.setdefault(f"{name}_by_{_BY[name]}", {})
            group[labels.get(_BY[name], "")] = group.get(labels.get(_BY[name], ""), 0.0) + value
        if name == "fsync_latency_seconds_bucket":
            flows["fsync"][labels["le"]] = value
        if name in _OF_TABLE and "table" in labels:
            of = by_table.setdefault(labels["table"], {})
            of[_OF_TABLE[name]] = of.get(_OF_TABLE[name], 0.0) + value
    return flows, by_table


def _fields(struct: Any) -> Sample:
    return {name: getattr(struct, name) for name in struct.__struct_fields__}


def visible(sample: Sample, rights: Rights) -> Sample:
    """Return the part of a sample that a client may see: of the tables that it may read."""
    if "error" in sample or rights.allows_everywhere(READ):
        return sample
    return {
        **sample,
        "tables": [entry for entry in sample["tables"] if rights.allows(READ, entry["name"])],
        "consumers": [entry for entry in sample["consumers"] if rights.allows(READ, entry["queue"])],
        "troubles": [entry for entry in sample["troubles"] if rights.allows(READ, entry["table"])],
    }


class Sampler:
    """Takes samples while pages listen, and hands each to all of them."""

    def __init__(self, reader: StoreReader, in_thread: Callable[[Callable[[], Any]], Awaitable[Any]]) -> None:
        self._reader = reader
        self._in_thread = in_thread
        self.history: deque[Sample] = deque(maxlen=HISTORY)
        self._pages: set[asyncio.Queue[Sample]] = set()
        self._task: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()  # held while a sample is read
        self.stopping = False

    async def sample(self) -> Sample:
        """Return the newest sample, taken now if nobody listens."""
        if self._pages and self.history:
            return self.history[-1]
        return await self._take()

    async def _take(self) -> Sample:
        newest = self._newest()
        async with self._turn:
            taken = self._newest()
            if taken is not None and taken is not newest:
                return taken  # while this one waited for its turn
            sample: Sample = await self._in_thread(self._reader.read)
            if taken is not None and sample["t"] < taken["t"]:  # the clock was set back: rates begin anew
                self.history.clear()
            self.history.append(sample)
            return sample

    def _newest(self) -> Sample | None:
        return self.history[-1] if self.history else None

    def past(self) -> list[Sample]:
        """Return the history for a new page: fewer samples the older they are, and the more each of them holds."""
        samples = list(self.history)
        newest, older = samples[-NEWEST:], samples[:-NEWEST]
        thinned = older[::STRIDE] + newest
        rows = max((len(sample.get("tables", ())) + len(sample.get("consumers", ())) for sample in newest), default=0)
        return thinned[-max(2, HISTORY_ROWS_MAX // max(1, rows)) :]

    def open_page(self) -> asyncio.Queue[Sample] | None:
        """Return a queue that gets each new sample, until `close_page`; None if PAGES_MAX pages are open."""
        if len(self._pages) >= PAGES_MAX:
            return None
        page: asyncio.Queue[Sample] = asyncio.Queue(1)
        self._pages.add(page)
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._run())
        return page

    def close_page(self, page: asyncio.Queue[Sample]) -> None:
        """Send no more samples to a page."""
        self._pages.discard(page)

    async def _run(self) -> None:
        """Take samples until nobody listens."""
        while self._pages and not self.stopping:
            try:
                sample = await self._take()
            except Exception:  # of the machinery, not of the store: pages show that nothing comes
                log.exception("a sample for the console failed")
                sample = {"t": 0.0, "error": "the console cannot read the store: see its log"}
            for page in self._pages:
                if page.full():
                    page.get_nowait()
                page.put_nowait(sample)
            await asyncio.sleep(EVERY_S)
