"""A store with everything real, written to by several threads until the process is killed.

Every batch has a token and touches three tables alike: in each, `n` counts it and `mark` names it. After an
acknowledgement a line `ack <producer> <number>` is printed.
"""

from __future__ import annotations

import sys
import threading

from penstock.log import LogSettings
from penstock.partition.checkpoint import CheckpointSettings
from penstock.store.settings import StoreSettings
from penstock.store.store import Store, open_store

SETTINGS = StoreSettings(
    journal=LogSettings(segment_bytes=200_000, allocate_bytes=50_000, index_bytes=10_000),
    checkpoint=CheckpointSettings(segments_max=1),
    flush_interval_s=0.01,
)
TABLES = {"a": 1, "b": 2, "c": 1}
ONE = (1).to_bytes(8, "little")
printing = threading.Lock()


def write(store: Store, producer: str, number: int) -> bool:
    """Whether the token was used before."""
    with store.batch(token=(producer, number)) as batch:
        for name in TABLES:
            table = batch.kv(name)
            table.put(b"mark %s %08d" % (producer.encode(), number), b"%d" % number * 20)
            table.merge(b"n " + producer.encode(), ONE, operator="add_i64")
    return batch.duplicate


def main(root: str, first: int) -> None:
    store = open_store(root, settings=SETTINGS)
    for name, shards in TABLES.items():
        store.kv(name, shards=shards)

    def produce(producer: str) -> None:
        number = first
        while True:
            duplicate = write(store, producer, number)
            with printing:
                print("dup" if duplicate else "ack", producer, number, flush=True)
            number += 1

    def maintain() -> None:
        while True:
            store.checkpoint()
            for tree, _ in store._maintenance.trees():
                tree.freeze()
            store._wake("flush")
            threading.Event().wait(0.05)

    print("open", flush=True)
    for target, args in ((produce, ("p",)), (produce, ("q",)), (maintain, ())):
        threading.Thread(target=target, args=args, daemon=True).start()
    threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
