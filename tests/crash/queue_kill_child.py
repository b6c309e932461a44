"""A store with everything real: producers, consumers and maintenance as threads, until the process is killed.

Lines tell what happened, in the order in which it did: `put <number>` when a message is durable, `got <consumer>
<shard> <sequence>` and `ack <consumer> <shard> <sequence>`. A consumer that was too slow must not be able to commit:
`late` if it could. The consumer `work` writes a result for each message with its acknowledgement, `audit` none.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

from penstock.errors import LeaseLost
from penstock.log import LogSettings
from penstock.partition.checkpoint import CheckpointSettings
from penstock.queue import QueueSettings
from penstock.store.settings import StoreSettings
from penstock.store.store import Store, open_store

SETTINGS = StoreSettings(
    journal=LogSettings(segment_bytes=100_000, allocate_bytes=50_000, index_bytes=10_000),
    checkpoint=CheckpointSettings(segments_max=1),
    kinds=(QueueSettings(file_bytes=20_000, allocate_bytes=4_096, index_bytes=1_024),),
    flush_interval_s=0.01,
)
SHARDS = 2
telling = threading.Lock()  # held while something happens and is told: lines have the order of what they tell


def tell(*words: object) -> None:
    print(*words, flush=True)


def produce(store: Store, number: int) -> None:
    """One message; again by its token if nobody knows what became of it."""
    payload = b"%d " % number + b"x" * (number % 300)
    store.queue("events").put(payload, key=b"%d" % (number % 7), token=("producer", number))


def result_key(message: Any) -> bytes:
    number: bytes = message.payload.split()[0]
    return b"result " + number


def commit(store: Store, consumer: Any, messages: list[Any]) -> None:
    """Results and acknowledgements in one batch."""
    with store.batch() as batch:
        for message in messages:
            batch.kv("results").merge(result_key(message), b"x", operator="append")
        consumer.ack(messages, batch=batch)


def work(store: Store) -> None:
    consumer = store.queue("events").consumer("work", visibility_timeout_s=1.0)
    while True:
        with telling:
            messages = consumer.get(4)
            for message in messages:
                tell("got", "work", message.shard, message.sequence)
        if not messages:
            threading.Event().wait(0.005)
            continue
        with telling:
            try:
                commit(store, consumer, messages)
            except LeaseLost:
                continue  # it was slow: somebody else will
            for message in messages:
                tell("ack", "work", message.shard, message.sequence)


def oversleep(store: Store) -> None:
    consumer = store.queue("events").consumer("work", visibility_timeout_s=0.05)
    while True:
        with telling:
            messages = consumer.get(2)
            for message in messages:
                tell("got", "work", message.shard, message.sequence)
        threading.Event().wait(0.1)
        with telling:
            try:
                if messages:
                    commit(store, consumer, messages)
                    tell("late")
            except LeaseLost:
                continue


def audit(store: Store) -> None:
    consumer = store.queue("events").consumer("audit", visibility_timeout_s=1.0)
    while True:
        with telling:
            messages = consumer.get(10)
            for message in messages:
                tell("got", "audit", message.shard, message.sequence)
            try:
                consumer.ack(messages)
            except LeaseLost:
                continue
            for message in messages:
                tell("ack", "audit", message.shard, message.sequence)
        threading.Event().wait(0.002)


def maintain(store: Store) -> None:
    while True:
        store.checkpoint()
        store._port.maintain()
        threading.Event().wait(0.05)


def main(root: str, first: int) -> None:
    store = open_store(root, settings=SETTINGS)
    store.queue("events", shards=SHARDS)
    store.kv("results")

    def feed() -> None:
        number = first
        while True:
            produce(store, number)
            with telling:
                tell("put", number)
            number += 1

    tell("open")
    for target in (feed, *(lambda act=act: act(store) for act in (work, work, oversleep, audit, maintain))):
        threading.Thread(target=target, daemon=True).start()
    threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
