"""Durable puts of tables that are well, beside a table like them, one that hangs, and one with ten times its share.

Two threads write in every run. The first writes to four tables that are well, and is measured. The second writes to the
table `sick`, one message at a time, durably; that table is well, or hangs, or gets ten messages at a time.
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
from penstock.errors import PenstockError, RetryLater
from penstock.queue.machine import QueueMachine

PUTS = 3_000
TABLES = 4
SHARE = 10
NAMES = ("p99 of durable puts beside a blocked table", "p99 of durable puts beside a table with 10 times the writes")
UNDISTURBED = "p99 of durable puts, undisturbed"
SETTINGS = penstock.StoreSettings(dispatcher=penstock.DispatcherSettings(stall_s=0.5))


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
    with folder() as path, penstock.open(f"{path}/store", settings=SETTINGS) as store:
        sick = store.queue("sick")
        with beside(lambda: sick.put(bytes(100), durable=True)):
            return p99_of_puts(store)


def beside_blocked() -> float:
    with folder() as path, penstock.open(f"{path}/store", settings=SETTINGS) as store, blocked():
        sick = store.queue("sick")
        sick.put(b"0", durable=True)
        time.sleep(2 * SETTINGS.dispatcher.stall_s)
        with beside(lambda: sick.put(bytes(100), durable=True)):
            return p99_of_puts(store)


def beside_heavy() -> float:
    with folder() as path, penstock.open(f"{path}/store", settings=SETTINGS) as store:
        sick, messages = store.queue("sick"), [bytes(100)] * SHARE
        with beside(lambda: sick.put_many(messages, durable=True)):
            return p99_of_puts(store)


@contextmanager
def beside(act: Callable[[], object]) -> Iterator[None]:
    """Call `act` again and again in a thread; after a refusal it waits as long as the error says."""
    done = threading.Event()

    def repeat() -> None:
        while not done.is_set():
            try:
                act()
            except PenstockError as error:
                done.wait(getattr(error, "retry_after_s", 0.0) or 0.01 if isinstance(error, RetryLater) else 0.01)

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
        Case(name=UNDISTURBED, run=undisturbed, peer_of=NAMES[0]),
        Case(name=NAMES[1], run=beside_heavy),
        Case(name=f"{UNDISTURBED} (again)", run=undisturbed, peer_of=NAMES[1]),
    ]
    goals = [Goal(ours=name, ratio=round(1 / 1.5, 2), gate=True) for name in NAMES]
    return run("partitions", cases, goals)


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
