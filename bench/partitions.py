"""Durable puts of tables that are well: alone, beside a table that hangs, and beside one with ten times the writes.

A figure is 1 / p99, so that more is better: within 1.5 times of the undisturbed p99 is a ratio of 0.67.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import penstock
from bench.harness import Case, Goal, folder, run
from penstock.errors import PenstockError
from penstock.queue.machine import QueueMachine

PUTS = 3_000
TABLES = 4
NAMES = ("p99 of durable puts beside a blocked table", "p99 of durable puts beside a table with 10 times the writes")
UNDISTURBED = "p99 of durable puts, undisturbed"


@contextmanager
def blocked() -> Iterator[None]:
    """The apply of the queue `sick` hangs."""
    apply, healed = QueueMachine.apply, threading.Event()

    def patched(machine: QueueMachine, entry: Any) -> None:
        if machine._descriptor.name == "sick":
            healed.wait()
        apply(machine, entry)

    QueueMachine.apply = patched  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        healed.set()
        QueueMachine.apply = apply  # type: ignore[method-assign]


def p99_of_puts(store: Any) -> float:
    tables, times = [store.kv(f"t{number}") for number in range(TABLES)], list[float]()
    for number in range(PUTS):
        begin = time.perf_counter()
        tables[number % TABLES].put(b"%d" % number, bytes(100), durable=True)
        times.append(time.perf_counter() - begin)
    return 1 / sorted(times)[PUTS * 99 // 100]


def undisturbed() -> float:
    with folder() as path, penstock.open(f"{path}/store") as store:
        store.queue("sick").put(b"0", durable=True)
        return p99_of_puts(store)


def beside_blocked() -> float:
    settings = penstock.StoreSettings(dispatcher=penstock.DispatcherSettings(stall_s=0.5))
    with folder() as path, penstock.open(f"{path}/store", settings=settings) as store, blocked():
        store.queue("sick").put(b"0", durable=True)
        time.sleep(0.6)
        with disturbed(lambda: store.queue("sick").put(bytes(100)), pause_s=0.01):
            return p99_of_puts(store)


def beside_heavy() -> float:
    with folder() as path, penstock.open(f"{path}/store") as store:
        sick = store.queue("sick")
        with disturbed(lambda: sick.put_many([bytes(100)] * 10), pause_s=0.0005):
            return p99_of_puts(store)


@contextmanager
def disturbed(act: Callable[[], object], *, pause_s: float) -> Iterator[None]:
    """Call `act` again and again in a thread, whatever it raises."""
    done = threading.Event()

    def repeat() -> None:
        while not done.wait(pause_s):
            try:
                act()
            except PenstockError:
                continue

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def main() -> bool:
    cases = [
        Case(name=NAMES[0], run=beside_blocked),
        Case(name=NAMES[1], run=beside_heavy),
        Case(name=UNDISTURBED, run=undisturbed, peer_of=NAMES[0]),
        Case(name=f"{UNDISTURBED} (again)", run=undisturbed, peer_of=NAMES[1]),
    ]
    goals = [Goal(ours=name, ratio=round(1 / 1.5, 2), gate=True) for name in NAMES]
    return run("partitions", cases, goals)


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
