"""A store with every kind of file in it, and a process that opens damaged copies of it.

The process reads the name of a folder from each line of its input and answers with one line of JSON: `outcome` is
`error` (a PenstockError, with its text), `read` (with all that the store holds), or `other` (any other exception). Its
death is an answer, too.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

from penstock.errors import PenstockError
from penstock.log import LogSettings
from penstock.lsm.compaction import LevelLimits
from penstock.manifest import environment, examine, page_sums
from penstock.manifest.records import Codec, CompressionConfig
from penstock.partition import extent
from penstock.partition.checkpoint import CheckpointSettings
from penstock.partition.machine import SPILL, PartitionDescriptor
from penstock.partition.spill import SpillLog
from penstock.partition.storage_options import StorageOptions
from penstock.queue.chain import QueueSettings
from penstock.store.settings import StoreSettings
from penstock.store.shards import ShardOpener
from penstock.store.store import Store, open_store

SETTINGS = StoreSettings(
    background=False,
    serve=False,
    reserve_bytes=4_096,
    journal=LogSettings(segment_bytes=8_192, allocate_bytes=1_024, index_bytes=1_024),
    checkpoint=CheckpointSettings(segments_max=1),
    kinds=(QueueSettings(file_bytes=4_096, allocate_bytes=1_024, index_bytes=1_024),),
    keys={1: b"k" * 32},
)
LZ4 = StorageOptions(compression=CompressionConfig(Codec.LZ4))
ROWS_TABLES = ("flushed", "spilled", "sealed")
QUEUES = ("queue", "sealed_queue")
ROWS = 60
assert LevelLimits().level0_runs < 12  # so that the flushes below leave more than one file


def fill(store: Store, part: int) -> None:
    """Write to every table: rows in files, rows spilled, rows in the journal alone."""
    flushed, spilled = store.kv("flushed", shards=2), store.kv("spilled")
    queue = store.queue("queue", shards=2)
    store.kv("sealed", encrypted=True, storage=LZ4)
    store.queue("sealed_queue", encrypted=True, shards=2)
    for number in range(ROWS):
        key = b"%d-%03d" % (part, number)
        with store.batch(token=("flips", part * ROWS + number)) as batch:
            batch.kv("flushed").put(key, b"value of " + key * 5)
            batch.kv("spilled").put(key, b"spilled " + key * 5)
            batch.kv("flushed").merge(b"count", (1).to_bytes(8, "little"), operator="add_i64")
            batch.queue("queue").put(b"message " + key * 5, key=key)
            batch.kv("sealed").put(key, b"sealed " + key * 5)
            batch.queue("sealed_queue").put(b"sealed " + key * 5, key=key)
        if number % 20 == 10:
            _flush(store, "flushed")
            _flush(store, "sealed")
            store.checkpoint()
    flushed.delete_range(b"%d-050" % part, b"%d-055" % part, durable=True)
    spilled.delete(b"%d-001" % part, durable=True)
    queue.trim(3 + 5 * part, shard=0, durable=True)
    consumer = queue.consumer("reader")
    consumer.ack(consumer.get(max=7))
    flushed.put(b"%d-last" % part, b"in the journal alone", durable=True)


def _flush(store: Store, name: str) -> None:
    info = store._ledger.table(name)
    assert info is not None
    for tree, catalog in store._maintenance.trees():
        if catalog.db_id == info.table_id:
            store._maintenance.flush(tree)


def build(root: str, part: int, *, close: bool) -> None:
    """Fill a store; without `close` it is left as a killed process leaves it (the caller ends this one)."""
    store = open_store(root, settings=SETTINGS)
    fill(store, part)
    if part:
        _flush(store, "flushed")
        store.compact("flushed")
        store.compact("sealed")
        fill(store, part + 1)
        store._manifest.backup()
    if close:
        store.close()


def everything(store: Store) -> dict[str, Any]:
    """All that a user can see."""
    content: dict[str, Any] = {"tables": sorted(store.tables())}
    for name in ROWS_TABLES:
        table = store.kv(name, create=False)
        rows = dict(table.scan())
        content[name] = {key.decode("latin-1"): value.decode("latin-1") for key, value in rows.items()}
        content[f"{name} by key"] = [key.decode("latin-1") for key in rows if table.get(key) != rows[key]]
    for name in QUEUES:
        queue = store.queue(name, create=False)
        content[name] = [
            [(message.sequence, message.payload.decode("latin-1")) for message in queue.read(shard, 1)]
            for shard in range(2)
            if queue.bounds()[shard].next > 1
        ]
        content[f"{name} bounds"] = [(bounds.first, bounds.next) for bounds in queue.bounds()]
    queue = store.queue("queue", create=False)
    content["consumer"] = sorted(queue.consumer("reader").position.items())
    content["tokens"] = [number for number in range(5 * ROWS) if store._ledger.is_token_used("flips", number)]
    return content


def look(root: str) -> dict[str, Any]:
    """What an opening shows; and what was written and acknowledged there must be there after another one."""
    with open_store(root, settings=SETTINGS) as store:
        content = everything(store)
        for name in ROWS_TABLES:
            store.kv(name).put(b"later", b"kept", durable=True)
        for name in QUEUES:
            store.queue(name).put_many([b"later"], durable=True)
        ends = [bounds.next for name in QUEUES for bounds in store.queue(name).bounds()]
    with open_store(root, settings=SETTINGS) as store:
        values = [store.kv(name).get(b"later") for name in ROWS_TABLES]
        same = [bounds.next for name in QUEUES for bounds in store.queue(name).bounds()] == ends
        if values != [b"kept"] * len(ROWS_TABLES) or not same:
            content["later"] = f"what was acknowledged after the opening is gone: {values}, {same}"
    return content


def answer(root: str) -> dict[str, Any]:
    try:
        return {"outcome": "read", "seen": look(root)}
    except PenstockError as error:
        return {"outcome": "error", "text": f"{type(error).__name__}: {error}"}
    except BaseException:
        return {"outcome": "other", "text": traceback.format_exc()}


def _compare_pages_late() -> None:
    examine.OPENING_PAGES_MAX = page_sums.TABLE_PAGES_SMALL = 0


# Each leaves out one comparison. The suite must see it.
BUGS: dict[str, Callable[[], None]] = {
    "": lambda: None,
    "journal": lambda: setattr(extent.JournalExtent, "check", lambda self, end: None),
    "spill": lambda: setattr(ShardOpener, "open_spill", _unchecked_spill),
    "manifest": lambda: setattr(environment, "check_file", lambda *_: None),
    "large manifest": _compare_pages_late,  # not a bug: what is done for a large file
}


def _unchecked_spill(shards: ShardOpener, descriptor: PartitionDescriptor, *_: object) -> SpillLog:
    context, partition = shards._context, descriptor.partition
    folder = f"{context.root}/{descriptor.folder}{SPILL}"
    return SpillLog(context.fs, folder, random=context.random, identity=context.identity, partition=partition)


def main() -> None:
    if sys.argv[1] == "build":
        build(sys.argv[2], int(sys.argv[3]), close=sys.argv[4] == "close")
        sys.stdout.flush()
        os._exit(0)
    BUGS[sys.argv[2]]()
    for line in sys.stdin:
        print(json.dumps(answer(line.strip())), flush=True)


if __name__ == "__main__":
    main()
