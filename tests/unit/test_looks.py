"""How objects look in a notebook, and what they say when they are sent to another process."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.errors import Invalid


@pytest.mark.parametrize("how", ["open", "connect"])
def test_looks(tmp_path: Path, how: str) -> None:
    penstock.open(tmp_path).close()
    store: Any = penstock.open(tmp_path) if how == "open" else penstock.connect(tmp_path)
    name = "Store" if how == "open" else "RemoteStore"
    users, events = store.kv("users"), store.queue("events", shards=2)
    docs, metrics = store.vector("docs", dimensions=2), store.series("metrics")
    with store.snapshot() as snapshot, store.batch(token=("loader", 1)) as batch:
        looks = {
            f"<{name} '{tmp_path}'>": store,
            "<KvTable 'users' of bytes>": users,
            "<QueueTable 'events', 2 shards>": events,
            "<Consumer 'c' of the queue 'events'>": events.consumer("c"),
            f"<{'StoreSnapshot' if how == 'open' else 'RemoteSnapshot'} at LSN {snapshot.lsn}>": snapshot,
            "<VectorTable 'docs': 2 dimensions, cosine>": docs,
            "<VectorReader 'docs': 2 dimensions, cosine>": snapshot.vector("docs"),
            repr(metrics): metrics,
            "<KvReader 'users' of bytes>": snapshot.kv("users"),
            "<QueueView 'events', 2 shards>": snapshot.queue("events"),
            "<StoreBatch, open, token ('loader', 1)>": batch,
        }
        for expected, thing in looks.items():
            assert repr(thing) == expected
            for send in (pickle.dumps, copy.copy, copy.deepcopy):
                with pytest.raises(Invalid, match=r"cannot be pickled: call penstock\.connect"):
                    send(thing)
    assert repr(batch) == "<StoreBatch, ended, token ('loader', 1)>"
    store.close()
    assert repr(store) == f"<{name} '{tmp_path}', closed>"


def test_messages_can_be_sent(tmp_path: Path) -> None:
    with penstock.open(tmp_path) as store:
        events = store.queue("events")
        events.put(b"m", durable=True)
        for message in (*events.read(), *events.consumer("c").get(1)):
            assert pickle.loads(pickle.dumps(message)) == message
            assert "b'm'" in repr(message)
