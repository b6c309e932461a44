"""A store for tests of the console: every kind of table, with names, keys, labels and payloads that are scripts."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Any

import numpy as np

from penstock.feeds import stream_of
from penstock.kinds import BatchCounts
from penstock.server.rights import Tokens

SCRIPT = "<img src=x onerror=window.pwned=1><script>window.pwned=1</script>"
RIGHTS = {
    "admin": '{ "*" = "admin" }',
    "reader": '{ "*" = "read" }',
    "writer": '{ "*" = "read", events = "write" }',
    "part": '{ users = "read" }',
    "nothing": "{ }",
}


def tokens() -> Tokens:
    lines = [
        f'[tokens.{name}]\nsha256 = "{hashlib.sha256(name.encode()).hexdigest()}"\nrights = {rights}\n'
        for name, rights in RIGHTS.items()
    ]
    return Tokens.parse("".join(lines))


def letter(number: int, reason: str = "not a number") -> bytes:
    payload = b'{"order": %d}' % number
    fields = {"source": "events", "reason": reason, "shard": 0, "sequence": number, "payload": payload.decode()}
    return json.dumps({**fields, "payload_base64": base64.b64encode(payload).decode()}).encode()


def fill(store: Any) -> None:
    users = store.kv("users", value="json")
    users.put_many({b"user-%03d" % n: {"number": n, "name": f"user {n}"} for n in range(300)})
    users.put(SCRIPT.encode(), {"script": SCRIPT})
    store.kv("blobs").put_many({b"\x00\xff\x01": b"\xff\x00binary", b"text": SCRIPT.encode(), b"large": bytes(9_000)})
    store.kv("cities", key="utf8", value="int64").put("Zürich", 443_000)
    events = store.queue("events")
    events.put_many([b'{"order": %d}' % n for n in range(120)])
    events.put(SCRIPT.encode(), key=SCRIPT.encode(), durable=True)
    consumer = events.consumer("billing")
    consumer.ack(consumer.get(20, timeout_s=5.0))
    for consumer in ("spark", SCRIPT):
        for start, end in ((1, 41), (41, 101), (41, 101)):  # the last one twice: a duplicate
            with store.batch() as batch:
                info = store.port.table("events")
                batch.require(*stream_of(info).move(info, consumer, [(0, start, end)], BatchCounts(end - start - 3, 3)))
    store.queue("dead").put_many([letter(n, SCRIPT if n == 3 else "not a number") for n in range(5)])
    metrics = store.series("metrics")
    for host in ("a", "b", SCRIPT):
        metrics.write("cpu", 0.5, {"host": host})
    vectors = np.random.default_rng(1).normal(size=(60, 8)).astype(np.float32)
    names = [f"doc-{n}" for n in range(59)] + [SCRIPT]
    store.vector("docs", dimensions=8).upsert(names, vectors, [{"text": SCRIPT}] * 60)
    store.flush()
    store.compact("users")
