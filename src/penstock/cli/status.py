"""`penstock status` and `penstock top`: one page about a store, once or live.

Thread: one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

import penstock
from penstock.cli.app import app
from penstock.cli.formatting import format_bytes, format_value
from penstock.cli.output import screen
from penstock.cli.session import Session, command
from penstock.errors import Invalid, PenstockError
from penstock.host.clock import SystemClock
from penstock.host.waiting import pause
from penstock.kinds import statistics_of

BOLD, DIM, GREEN, YELLOW, RED = "1", "2", "32", "33", "31"
STATE_COLORS = {"active": GREEN, "throttled": YELLOW, "frozen": RED, "paused": RED}
GRAVITY = ("active", "throttled", "frozen", "paused")  # of a partition's states, the worst last


@dataclass(frozen=True)
class TableLine:
    """A table on the page."""

    table: str
    kind: str
    shards: int
    rows: int | None  # None: it does not answer, or its kind has no statistics
    bytes: int | None
    behind: int  # entries that are durable and not applied
    state: str
    error: str


@dataclass(frozen=True)
class ConsumerLine:
    """A consumer on the page."""

    queue: str
    consumer: str
    lag: int
    leased: int
    seen: datetime | None
    rows_in: int | None  # this and the next ones of the streams that move it
    rows_out: int | None
    duplicates: int | None


@dataclass(frozen=True)
class Page:
    """All that `status` prints."""

    store: str
    numbers: penstock.StoreStatistics
    tables: list[TableLine]
    consumers: list[ConsumerLine]
    troubles: list[str]

    @property
    def well(self) -> bool:
        return not self.troubles and not self.numbers.error and all(table.state == "active" for table in self.tables)


def read_page(store: penstock.RemoteStore, address: str) -> Page:
    """Ask the store for the page; a table that does not answer is shown as such."""
    numbers, tables, consumers = store.statistics(), [], []
    troubles = [
        f"{trouble.table}, shard {trouble.shard}, LSN {trouble.lsn}: {trouble.reason}" for trouble in store.troubles()
    ]
    for info in store.port.tables():
        parts = [partition for partition in numbers.partitions if partition.table == info.name]
        state = max((partition.state for partition in parts), key=GRAVITY.index, default="active")
        error = next((partition.error for partition in parts if partition.error), "")
        rows = size = None
        try:
            table = store.table(info.name)
            statistics = statistics_of(table)
            if statistics is not None:
                rows, size = statistics.size.rows, statistics.size.file_bytes
            if isinstance(table, penstock.QueueTable):
                consumers += [_consumer(info.name, consumer) for consumer in table.consumers()]
        except PenstockError as failed:
            error = error or str(failed)
        behind = sum(partition.enqueued_ops for partition in parts)
        tables.append(TableLine(info.name, info.kind, info.shards, rows, size, behind, state, error))
    return Page(address, numbers, tables, consumers, troubles)


def _consumer(queue: str, consumer: Any) -> ConsumerLine:
    last_seen = None if consumer.last_seen_us is None else datetime.fromtimestamp(consumer.last_seen_us / 1e6, UTC)
    rows_in, rows_out, duplicates = (None,) * 3
    if consumer.stream is not None:
        rows_in, rows_out, duplicates = consumer.stream.rows_in, consumer.stream.rows_out, consumer.stream.duplicates
    return ConsumerLine(queue, consumer.name, consumer.lag, consumer.leased, last_seen, rows_in, rows_out, duplicates)


@command(app)
def status(session: Session) -> None:
    """Print a page about a store: its health, its tables, its consumers; the exit code is 1 if something is wrong."""
    page = read_page(session.store, session.address)
    if session.out.json:
        session.out.document(page_fields(page))
    else:
        for line in page_lines(page, None, 0.0, color=session.out.color):
            print(line)
    if not page.well:
        raise typer.Exit(1)


@command(app)
def top(
    session: Session,
    every_s: Annotated[float, typer.Option(help="seconds between two looks")] = 1.0,
    count: Annotated[int, typer.Option(min=0, help="looks; 0: until Ctrl-C")] = 0,
) -> None:
    """Show the page of `status` live, with rates, until Ctrl-C."""
    if not 0.1 <= every_s <= 3600:
        raise Invalid(f"--every-s is {every_s}: give 0.1 to 3600 seconds")
    try:
        _watch(session, every_s, count)
    finally:
        if session.out.draws and not session.out.json:
            print()  # the prompt comes below the page


def _watch(session: Session, every_s: float, count: int) -> None:
    clock, draws = SystemClock(), session.out.draws
    before, moment, refreshes = None, clock.monotonic_s(), 0
    while True:
        page, now = read_page(session.store, session.address), clock.monotonic_s()
        if session.out.json:
            session.out.document(page_fields(page))
        else:
            lines = page_lines(page, before, now - moment, color=session.out.color, urgent_first=True)
            print(screen(lines) if draws else "\n".join(lines), end="" if draws else "\n", flush=True)
        before, moment, refreshes = page, now, refreshes + 1
        if refreshes == count:
            return
        pause(every_s)


def page_fields(page: Page) -> dict[str, Any]:
    """Return the page for --json."""
    numbers = page.numbers
    fields = {name: getattr(numbers, name) for name in numbers.__dataclass_fields__ if name != "partitions"}
    return {
        "store": page.store,
        "well": page.well,
        **fields,
        "tables": [vars(table) for table in page.tables],
        "consumers": [vars(consumer) for consumer in page.consumers],
        "troubles": page.troubles,
    }


def page_lines(
    page: Page, before: Page | None, elapsed_s: float, *, color: bool, urgent_first: bool = False
) -> list[str]:
    """Return the page as lines; with the page of `elapsed_s` seconds before, it shows rates.

    What is wrong stands last, above the prompt; with `urgent_first` on top, where a live page is never cut.
    """

    def style(text: str, *codes: str) -> str:
        return f"\x1b[{';'.join(codes)}m{text}\x1b[0m" if color and codes else text

    numbers = page.numbers
    health = style("healthy", BOLD, GREEN) if page.well else style("needs attention", BOLD, RED)
    head = f"{style(format_value(page.store), BOLD)}  {health}"
    lines = [""]
    lines += _aligned([
        ("writes", f"{numbers.writes:,}", _rate(page, before, "writes", elapsed_s)),
        ("written", format_bytes(numbers.written_bytes), _rate(page, before, "written_bytes", elapsed_s)),
        ("durable", f"LSN {numbers.durable_lsn:,}", _rate(page, before, "durable_lsn", elapsed_s)),
        ("applied", f"LSN {numbers.applied_lsn:,}", f"{numbers.durable_lsn - numbers.applied_lsn:,} behind"),
        ("journal", f"LSN {numbers.first_lsn:,} and later", f"needed from {numbers.needed_from:,}"),
        ("waiting", f"{numbers.waiting_writes:,} writes", f"{numbers.refused_writes:,} refused"),
        ("pending", format_bytes(numbers.pending_bytes), f"{format_bytes(numbers.in_flight_bytes)} in flight"),
        ("flushes", f"{numbers.flushes:,}", f"{numbers.flush_failures:,} failed"),
    ])  # fmt: skip
    lines += ["", style("tables", BOLD)] + (
        _tables(page.tables, style) if page.tables else ["none: see `penstock table create`"]
    )
    if page.consumers:
        rows: list[tuple[str, ...]] = [
            ("queue", "consumer", "lag", "leased", "rows in", "rows out", "duplicates", "seen")
        ]
        for c in page.consumers:
            counts = ["" if count is None else f"{count:,}" for count in (c.rows_in, c.rows_out, c.duplicates)]
            rows.append((c.queue, c.consumer, f"{c.lag:,}", f"{c.leased:,}", *counts, _ago(c.seen)))
        if all(c.rows_in is None for c in page.consumers):  # no streams
            rows = [(*row[:4], row[-1]) for row in rows]
        lines += ["", style("consumers", BOLD), *_aligned(rows)]
    wrong = [*([numbers.error] if numbers.error else []), *page.troubles, *_errors(page.tables)]
    urgent = ["", style("what is wrong", BOLD, RED), *map(format_value, wrong)] if wrong else []
    return [head, *urgent, *lines] if urgent_first else [head, *lines, *urgent]


def _tables(tables: list[TableLine], style: Any) -> list[str]:
    rows = [("name", "state", "kind", "rows", "in files", "shards", "behind")]
    for table in tables:
        rows_text = "?" if table.rows is None else f"{table.rows:,}"
        size = "?" if table.bytes is None else format_bytes(table.bytes)
        rows.append((table.table, table.state, table.kind, rows_text, size, str(table.shards), f"{table.behind:,}"))
    lines = _aligned(rows)
    at = lines[0].index("state")
    for number, table in enumerate(tables, 1):  # after the widths are known, which colours would change
        line, end = lines[number], at + len(table.state)
        lines[number] = line[:at] + style(line[at:end], STATE_COLORS[table.state]) + line[end:]
    return lines


def _errors(tables: list[TableLine]) -> list[str]:
    return [f"{table.table}: {table.error}" for table in tables if table.error]


def _aligned(rows: Iterable[tuple[str, ...]]) -> list[str]:
    cells = [tuple(map(format_value, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def _rate(page: Page, before: Page | None, name: str, elapsed_s: float) -> str:
    if before is None or elapsed_s <= 0 or page.numbers.incarnation != before.numbers.incarnation:
        return ""
    rate = (getattr(page.numbers, name) - getattr(before.numbers, name)) / elapsed_s
    return f"{format_bytes(rate)}/s" if name.endswith("bytes") else f"{rate:,.0f}/s"


def _ago(moment: datetime | None) -> str:
    if moment is None:
        return "not since the store was opened"
    seconds = max(0, int(SystemClock().time_us() / 1e6 - moment.timestamp()))
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // size} {unit} ago"
    return f"{seconds} s ago"
