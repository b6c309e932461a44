"""Some threads of a process that compare and set registers of a store, and record what they asked and got.

python cas_child.py STORE WORKER THREADS ROUNDS     prints the history as JSON
"""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import Any

import penstock
from penstock.errors import ConditionFailed, RetryLater

KEYS = [b"x", b"y"]


def work(table: Any, worker: str, rounds: int, history: list[Any]) -> None:
    """Read a register, then set it to a new value if nobody else has; record both."""
    for number in range(rounds):
        key = KEYS[number % len(KEYS)]
        begin = time.monotonic_ns()
        row = table.get_row(key)
        history.append((key.decode(), begin, time.monotonic_ns(), "read", row and row.lsn, row and row.value, True))
        value, lsn = f"{worker}-{number}", 0 if row is None else row.lsn
        begin, done = time.monotonic_ns(), True
        end: float
        try:
            if number % 7 == 6 and row is not None:
                value = None  # type: ignore[assignment]
                table.delete(key, if_lsn=lsn)
            else:
                table.put(key, value, **({"if_lsn": lsn} if lsn else {"if_absent": True}))
            end = time.monotonic_ns()
        except ConditionFailed as error:
            assert error.key == key
            assert error.expected == lsn != error.lsn
            end, done = time.monotonic_ns(), False
        except RetryLater:
            end, done = float("inf"), None  # type: ignore[assignment]
        history.append((key.decode(), begin, end, "cas", lsn, value, done))


def run(store: Any, worker: str, threads: int, rounds: int) -> list[Any]:
    """Run the threads of one process and return what they recorded."""
    table, history = store.kv("registers", value="utf8"), list[Any]()
    workers = [
        threading.Thread(target=work, args=(table, f"{worker}.{number}", rounds, history)) for number in range(threads)
    ]
    for thread in workers:
        thread.start()
    for thread in workers:
        thread.join()
    return history


if __name__ == "__main__":
    with penstock.connect(sys.argv[1]) as connected:
        print(json.dumps(run(connected, sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))))
