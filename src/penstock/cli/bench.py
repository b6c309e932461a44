"""`penstock bench FOLDER`: how fast a disk and a machine are for a store, in a few seconds.

The figures are of this machine and of one caller; `make bench` compares with other stores.

Thread: one.
Invariant: works in a new folder inside FOLDER and removes it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

import penstock
from penstock.cli.app import app
from penstock.cli.maintenance import Json
from penstock.cli.output import Output
from penstock.errors import Invalid
from penstock.host.clock import SystemClock
from penstock.host.randomness import system_random


@app.command()
def bench(
    folder: Annotated[Path, typer.Argument(help="on the disk to try; a temporary store is made inside")],
    rows: Annotated[int, typer.Option(min=1_000, max=10_000_000, help="to write, of 100 bytes")] = 200_000,
    json: Json = False,
) -> None:
    """Write, read and scan rows in a temporary store; print the rates."""
    if not folder.is_dir():
        raise Invalid(f"{folder} is not a folder: give one on the disk to try")
    out = Output(json=json)
    with (
        out.progress("measuring", left="the temporary store was removed"),
        tempfile.TemporaryDirectory(dir=folder, prefix="penstock-bench-") as path,
        penstock.open(path) as store,
    ):
        measured = _measure(store, rows)
    out.rows(("what", "per second", "microseconds each"), measured)


def _measure(store: penstock.Store, rows: int) -> list[tuple[str, int, float]]:
    table, queue = store.kv("rows"), store.queue("messages")
    value, keys = system_random().randbytes(100), [b"%012d" % number for number in range(rows)]
    few, single = keys[:: max(1, rows // 5_000)], keys[: min(300, rows)]
    return [
        _timed("put, in batches of 1,000", rows, lambda: _put_in_batches(store, keys, value)),
        _timed("put, durable", len(single), lambda: [table.put(key, value, durable=True) for key in single]),
        _timed("get", len(few), lambda: [table.get(key) for key in few]),
        _timed("scan", rows, lambda: sum(batch.num_rows for batch in table.scan_arrow())),
        _timed("queue: put, durable, by 1,000", rows, lambda: _send(queue, rows, value)),
    ]


def _put_in_batches(store: penstock.Store, keys: list[bytes], value: bytes) -> None:
    table = store.kv("rows")
    for start in range(0, len(keys), 1_000):
        table.put_many(dict.fromkeys(keys[start : start + 1_000], value))
    store.flush()


def _send(queue: penstock.QueueTable, count: int, value: bytes) -> None:
    for start in range(0, count, 1_000):
        queue.put_many([value] * min(1_000, count - start), durable=True)


def _timed(name: str, count: int, work: Callable[[], object]) -> tuple[str, int, float]:
    begin = SystemClock().monotonic_s()
    work()
    elapsed = SystemClock().monotonic_s() - begin
    return name, round(count / elapsed), round(elapsed / count * 1e6, 2)
