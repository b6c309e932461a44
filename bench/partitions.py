"""The p99 of durable puts to tables that are well, beside a table that hangs, takes ten times its share, or floods.

The load on the tables that are well is the same in every run: one thread puts a row every 1 / RATE s, in turn to four
tables, whatever the others do. A put that comes late because the one before was slow counts from when it was due. The
table `sick` gets its share from a second thread: a quarter of that rate. In the disturbed runs it hangs; or it gets ten
times its share; or its writer never waits for durability (told, without a goal). The second thread's pauses vary at
random: two fixed rates would meet at every tenth put in one run, and in the next never.
A figure is 1 / p99, so that more is better: within 1.5 times of the undisturbed p99 is a ratio of 0.67.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import penstock
from bench.harness import Case, Goal, folder, run, sized
from penstock.errors import PenstockError, RetryLater
from penstock.queue.machine import QueueMachine

PUTS = sized(1_000, 400)
ROUNDS = 9
RATE = 200.0  # puts a second to the tables that are well, together
TABLES = 4
SHARE = RATE / TABLES
NAMES = ("p99 of durable puts beside a blocked table", "p99 of durable puts beside a table with 10 times the writes")
FLOOD = "p99 of durable puts beside a writer that never waits"
UNDISTURBED = "p99 of durable puts, undisturbed"
SETTINGS = penstock.StoreSettings(dispatcher=penstock.DispatcherSettings(stall_s=2.0))


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
    for table in tables:
        table.put(b"first", b"", durable=True)
    begin = time.perf_counter()
    for number in range(PUTS):
        due = begin + number / RATE
        if time.perf_counter() - begin > 2 * PUTS / RATE:
            break  # far too slow: what there is says so
        if (early := due - time.perf_counter()) > 0:
            time.sleep(early)
        tables[number % TABLES].put(b"%d" % number, bytes(100), durable=True)
        times.append(time.perf_counter() - due)
    return 1 / sorted(times)[len(times) * 99 // 100]


def undisturbed() -> float:
    return measured(lambda sick: sick.put(bytes(100), durable=True), SHARE)


def beside_blocked() -> float:
    return measured(lambda sick: sick.put(bytes(100), durable=True), SHARE, hangs=True)


def beside_heavy() -> float:
    return measured(lambda sick: sick.put(bytes(100), durable=True), 10 * SHARE)


def beside_flood() -> float:
    return measured(lambda sick: sick.put(bytes(100)), None)


def measured(act: Callable[[Any], object], rate: float | None, *, hangs: bool = False) -> float:
    """Return 1 / p99 of the puts to the tables that are well, while `act` writes to `sick` at a rate (None: any)."""
    fault = blocked() if hangs else nullcontext()
    with folder() as path, penstock.open(f"{path}/store", settings=SETTINGS) as store, fault:
        sick = store.queue("sick")
        if hangs:
            sick.put(b"0", durable=True)
            time.sleep(2 * SETTINGS.dispatcher.stall_s)
        with beside(lambda: act(sick), rate):
            return p99_of_puts(store)


@contextmanager
def beside(act: Callable[[], object], rate: float | None) -> Iterator[None]:
    """Call `act` at a rate in a thread; after a refusal it waits as long as the error says."""
    done, chance = threading.Event(), random.Random(1)

    def repeat() -> None:
        due = time.perf_counter()
        while not done.is_set():
            try:
                act()
            except PenstockError as error:
                done.wait(getattr(error, "retry_after_s", 0.0) or 0.01 if isinstance(error, RetryLater) else 0.01)
            if rate is not None:
                pause = chance.uniform(0.5, 1.5) / rate
                due = max(due + pause, time.perf_counter() - 1 / rate)  # what it missed is not made up for
                if (early := due - time.perf_counter()) > 0:
                    time.sleep(early)

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
        Case(name=FLOOD, run=beside_flood),
        Case(name=f"{UNDISTURBED} (once more)", run=undisturbed, peer_of=FLOOD),
    ]
    goals = [Goal(ours=name, ratio=round(1 / 1.5, 2), gate=True) for name in NAMES]
    return run("partitions", cases, goals, rounds=ROUNDS)


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
