"""A queue answers values, asked in the owner, and bytes, asked by clients, alike and by the same rules.

And what this process encoded is not decoded again when it is applied.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

import penstock
from penstock.errors import Invalid
from penstock.kv import section as kv_section
from penstock.queue import section as queue_section
from penstock.queue.calls import ConsumerPosition, QueueCall, QueueTotals, ShardBounds, encode_call

CALLS: list[tuple[str, QueueCall, Any]] = [
    ("bounds", QueueCall(), list[ShardBounds]),
    ("statistics", QueueCall(), QueueTotals),
    ("positions", QueueCall(consumer="c"), list[ConsumerPosition]),
    ("seek", QueueCall(shard=1, time_us=0), int),
    ("advance", QueueCall(positions=[(0, 1), (1, 1)], count=3), dict[int, int]),
    ("nack", QueueCall(consumer="c", leases=[(0, 1, 7)]), int),
]
WRONG = [
    ("seek", QueueCall(shard=2)),
    ("get", QueueCall(consumer="c" * 256, count=1)),
    ("get", QueueCall(consumer="c", count=-1)),
    ("get", QueueCall(consumer="c", count=1, timeout_s=1e9)),
    ("nack", QueueCall(consumer="c", leases=[(0, 1, -1)])),
    ("advance", QueueCall(positions=[(5, 1)])),
    ("nothing", QueueCall()),
]


@pytest.mark.parametrize(("name", "call", "reply"), CALLS)
def test_values_and_bytes_get_the_same_answer(tmp_path: Path, name: str, call: QueueCall, reply: Any) -> None:
    with penstock.open(str(tmp_path)) as store:
        queue = store.queue("q", shards=2)
        queue.put_many([b"m"] * 5, durable=True)
        queue.consumer("c").ack(queue.consumer("c").get(2))
        answer = queue._port.ask(queue._info, name, call, reply)
        data = queue._port.call(queue._info, name, encode_call(call))
        assert msgspec.msgpack.decode(data, type=reply) == answer


@pytest.mark.parametrize(("name", "call"), WRONG)
def test_values_and_bytes_are_refused_by_the_same_rules(tmp_path: Path, name: str, call: QueueCall) -> None:
    with penstock.open(str(tmp_path)) as store:
        queue = store.queue("q", shards=2)
        with pytest.raises(Invalid) as by_value:
            queue._port.ask(queue._info, name, call, int)
        with pytest.raises(Invalid) as by_bytes:
            queue._port.call(queue._info, name, encode_call(call))
        assert str(by_value.value) == str(by_bytes.value)


def test_what_this_process_encoded_is_not_decoded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(payload: bytes) -> None:
        raise AssertionError("a section was decoded")

    with penstock.open(str(tmp_path)) as store, monkeypatch.context() as patch:
        patch.setattr(kv_section, "decode", refuse)
        patch.setattr(queue_section, "decode", refuse)
        store.kv("k").put(b"a", b"1", durable=True)
        store.kv("k").delete_range(b"b", b"c", durable=True)
        queue = store.queue("q")
        queue.put(b"one", durable=True)
        queue.put_many([b"two", b"three"], durable=True)
        queue.trim(2, durable=True)
        with store.batch() as batch:
            batch.kv("k").put(b"d", b"2")
            batch.queue("q").put(b"four")
        assert dict(store.kv("k").scan()) == {b"a": b"1", b"d": b"2"}
        assert [message.payload for message in queue.read()] == [b"two", b"three", b"four"]
    with penstock.open(str(tmp_path)) as store:
        assert [message.payload for message in store.queue("q").read()] == [b"two", b"three", b"four"]
