"""A store with a series table and its rollup, written to, deleted from and rolled up until the process is killed.

Every write is a batch with a token: one sample of each of a few series at a time of its own. After an acknowledgement a
line `ack <number>` is printed. Rollup jobs run all the time, in a process of their own and in this one.
"""

from __future__ import annotations

import sys
import threading

import penstock
from penstock.log import LogSettings
from penstock.store.settings import StoreSettings
from penstock.store.store import Store, open_store

SETTINGS = StoreSettings(
    journal=LogSettings(segment_bytes=200_000, allocate_bytes=50_000, index_bytes=10_000), flush_interval_s=0.01
)
MINUTE_US = 60_000_000
T0 = 1_700_000_000_000_000 // (60 * MINUTE_US) * 60 * MINUTE_US


def create(store: Store) -> None:
    store.series("metrics", shards=2, options=penstock.SeriesOptions(bucket_s=3_600))
    rollup = penstock.Rollup(source="metrics", step_s=300)
    store.series("rolled", options=penstock.SeriesOptions(bucket_s=3_600, rollup=rollup))


def write(store: Store, number: int) -> None:
    with store.batch(token=("p", number)) as batch:
        metrics = batch.series("metrics")
        for host in "abc":
            metrics.write("cpu", float(number), {"host": host}, time=T0 + number * 7 * MINUTE_US)
        if number % 5 == 4:  # an earlier sample goes, and a whole series of an earlier hour
            metrics.delete('cpu{host="a"}', T0 + (number - 3) * 7 * MINUTE_US, T0 + (number - 3) * 7 * MINUTE_US + 1)


def main(root: str, first: int) -> None:
    store = open_store(root, settings=SETTINGS)
    create(store)

    def produce() -> None:
        number = first
        while True:
            write(store, number)
            print("ack", number, flush=True)
            number += 1

    def maintain() -> None:
        while True:
            store._scheduler.trigger("derived-tables")
            store._scheduler.trigger("derived-table-jobs")
            store.roll_up("rolled")
            store.checkpoint()
            threading.Event().wait(0.02)

    print("open", flush=True)
    for target in (produce, maintain):
        threading.Thread(target=target, daemon=True).start()
    threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
