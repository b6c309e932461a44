"""A message takes a few times its bytes, whatever is in it: counts are looked at before anything is made of them."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import google_crc32c
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import penstock
from penstock.client.connect import connect
from penstock.errors import Invalid, PenstockError
from penstock.kinds import QUERY_BYTES_MAX
from penstock.kv import section as kv_section
from penstock.partition.ledger_records import CONDITION_BYTES_MAX, Condition
from penstock.protocol import wire
from penstock.queue import section as queue_section
from penstock.queue.positions import ACK
from penstock.scheduler import wire as worker_wire
from penstock.server import work as work_module
from penstock.server.gateway import LOOKUP_BYTES_MAX, Gateway
from penstock.server.rights import LOCAL, Rights
from penstock.server.service import service_of
from penstock.store.store import Store

SIZE = 3 << 20  # of a hostile message
TIMES_MAX = 6
CONSTANT = 20 << 20  # what as many sections as are allowed take


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with penstock.open(tmp_path_factory.mktemp("hostile") / "store") as opened:
        opened.kv("users")
        opened.queue("events")
        yield opened


@pytest.fixture
def gateway(store: Store) -> Gateway:
    service = service_of(store)
    assert service is not None
    return service.gateway()


def sealed(body: bytes) -> bytes:
    return struct.pack("<I", google_crc32c.value(body)) + body


def array(count: int, item: bytes) -> bytes:
    """`count` times the same, as MessagePack."""
    return b"\xdd" + struct.pack(">I", count) + item * count


def binary(data: bytes) -> bytes:
    return b"\xc6" + struct.pack(">I", len(data)) + data


def message(name: str, *fields: bytes) -> bytes:
    return bytes([0x91 + len(fields), 0xA0 + len(name)]) + name.encode() + b"".join(fields)


EMPTY_GROUP = b"\x93\xc4\x00\xc2\x90"
EMPTY_SECTION = b"\x92\x00\xc4\x00"
FILE = b"\x92\x00\xa0"
FALSE, EMPTY_TEXT, ZERO = b"\xc2", b"\xa0", b"\x00"


def group(sections: bytes, condition: bytes = b"") -> bytes:
    return b"\x91\x93" + binary(condition) + FALSE + sections


def hostile() -> dict[str, bytes]:
    """Small in bytes, large when it is decoded: one for each place that has a count."""
    section_of_files = b"\x91\x93\x00\xc4\x00" + array(SIZE // len(FILE), FILE)
    many_groups = array(400, b"\x93\xc4\x00\xc2" + array(SIZE // 400 // len(EMPTY_SECTION), EMPTY_SECTION))
    return {
        "groups": message("Write", array(SIZE // len(EMPTY_GROUP), EMPTY_GROUP), FALSE),
        "sections": message("Write", group(array(SIZE // len(EMPTY_SECTION), EMPTY_SECTION)), FALSE),
        "sections of many groups": message("Write", many_groups, FALSE),
        "files": message("Write", group(section_of_files), FALSE),
        "keys": message("Lookup", EMPTY_TEXT, ZERO, array(SIZE // 2, b"\xc4\x00")),
        "results": message("FinishOffer", EMPTY_TEXT, array(SIZE // 2, b"\xc4\x00")),
        "nested": message("Write", b"\x91" * SIZE, FALSE),
        "a map": message("Write", b"\xdf" + struct.pack(">I", SIZE // 2) + b"\xa0\x80" * (SIZE // 2), FALSE),
        "declared only": message("Write", b"\xdd\xff\xff\xff\xff", FALSE) + bytes(SIZE),
        "keys declared only": message("Lookup", EMPTY_TEXT, ZERO, b"\xdd\xff\xff\xff\xff") + bytes(SIZE),
        "fields": b"\xdd" + struct.pack(">I", SIZE) + b"\xa5Write" + b"\xc4\x00" * (SIZE // 2),
        "a name": message("FindTable", b"\xdb" + struct.pack(">I", SIZE) + "\U0001f600".encode() * (SIZE // 4)),
        "a tag": b"\x92\xdb" + struct.pack(">I", SIZE) + b"x" * SIZE + b"\xa0",
        "not a message": b"\x80" * SIZE,
    }


def memory_of(act: Callable[[], object]) -> int:
    """The most memory that it took at a time."""
    tracemalloc.start()
    try:
        act()
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    return peak


def decode_all(data: bytes) -> None:
    request = wire.unpack_request(data)
    if isinstance(request, wire.ReceivedWrite):
        wire.groups_of(request)


@pytest.mark.parametrize("name", list(hostile()))
def test_counts_are_looked_at_before_decoding(name: str) -> None:
    data = sealed(hostile()[name])

    def act() -> None:
        with pytest.raises(Invalid):
            decode_all(data)

    assert memory_of(act) < TIMES_MAX * len(data) + CONSTANT


class LooseLookup(msgspec.Struct, array_like=True, tag="Lookup"):
    """What a decoder without limits makes of the same bytes."""

    snapshot: str
    partition: int
    keys: list[bytes]


class LooseSection(msgspec.Struct, array_like=True):
    partition: int
    payload: bytes
    files: list[Any] | None = None


class LooseGroup(msgspec.Struct, array_like=True):
    condition: bytes
    plain: bool
    sections: list[LooseSection]


class LooseWrite(msgspec.Struct, array_like=True, tag="Write"):
    groups: list[LooseGroup]
    again: bool


@pytest.mark.parametrize("name", ["groups", "sections", "sections of many groups", "files"])
def test_a_decoder_that_looks_afterwards_is_noticed(name: str) -> None:
    decoder, data = msgspec.msgpack.Decoder(LooseLookup | LooseWrite), hostile()[name]
    assert memory_of(lambda: decoder.decode(data)) > TIMES_MAX * len(data) + CONSTANT


# -- what is in a message as bytes


def test_what_the_parts_of_a_message_say_is_looked_at_too(
    store: Store, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sections, conditions and calls are decoded by their kinds: not before their memory was taken."""
    monkeypatch.setattr(work_module, "REQUEST_MEMORY_MAX", 32 << 20)
    users, events = store.port.table("users"), store.port.table("events")
    assert users is not None
    assert events is not None
    rows = kv_section._HEADER.pack(kv_section.PLAIN, SIZE // 8) + bytes(SIZE)
    ranges = kv_section._HEADER.pack(kv_section.RANGES, SIZE // 8) + bytes(SIZE)
    batches = queue_section._HEADER.pack(queue_section.MESSAGES, SIZE // 8) + bytes(SIZE)
    others = b"\x92\xc0" + array(SIZE // 4, b"\x92\xa0\xc4\x00")
    ack = events.table_id.to_bytes(8, "big") + b"\x92\xa1c\x91\x92\x00" + array(SIZE // 3, b"\x92\x01\x02")
    acks = msgspec.msgpack.encode(Condition(None, ((ACK, ack),)))
    leases = b"\x81\xa6leases" + array(SIZE // 4, b"\x93\x00\x01\x02")
    positions = b"\x81\xa9positions" + array(SIZE // 3, b"\x92\x00\x01")
    long_condition = encoded_write(b"\xc4" * (CONDITION_BYTES_MAX + 1))
    hostile_parts = {
        "rows": encoded_write(b"", wire.SentSection(users.table_id << 16, rows)),
        "ranges": encoded_write(b"", wire.SentSection(users.table_id << 16, ranges)),
        "batches": encoded_write(b"", wire.SentSection(events.table_id << 16, batches)),
        "conditions": encoded_write(others),
        "ranges of an acknowledgement": encoded_write(acks),
        "leases": wire.pack(wire.CallService(events.table_id, "nack", leases)),
        "positions": wire.pack(wire.CallService(events.table_id, "advance", positions)),
        "a long condition": long_condition,
    }
    for name, data in hostile_parts.items():

        def act(data: bytes = data) -> None:
            with pytest.raises(Invalid):
                answer = gateway.answer(data, LOCAL)
                fault = wire.unpack(answer, wire.Outcomes).outcomes[0].fault
                assert fault is not None
                raise wire.error_of(fault)

        assert memory_of(act) < TIMES_MAX * len(data) + CONSTANT, name


def encoded_write(condition: bytes, *sections: wire.SentSection) -> bytes:
    return wire.pack(wire.Write([wire.SentGroup(condition, False, list(sections))], False))


def test_large_requests_are_for_what_carries_data() -> None:
    small: list[Any] = [wire.FindTable("x" * wire.SMALL_BYTES_MAX), wire.FailOffer("x", "y" * wire.SMALL_BYTES_MAX)]
    for request in small:
        with pytest.raises(Invalid, match="send it in parts"):
            wire.unpack_request(wire.pack(request))
    with pytest.raises(Invalid, match="send it in parts"):
        wire.unpack_reading(wire.pack(wire.Scan("x", "", 1, bytes(wire.SMALL_BYTES_MAX), None, True)))
    query = wire.RunQuery("x", "", 1, "q", bytes(QUERY_BYTES_MAX), 1.0)
    assert wire.unpack_reading(wire.pack(query)) == query
    with pytest.raises(Invalid, match="bytes: at most"):
        wire.unpack_reading(wire.pack(wire.RunQuery("x", "", 1, "q", bytes(2 * QUERY_BYTES_MAX), 1.0)))
    large = bytes(2 * wire.RESULTS_BYTES_MAX)
    with pytest.raises(Invalid, match="send it in parts"):
        wire.unpack_request(wire.pack(wire.FinishOffer("x", [large])))
    for request in (
        wire.CallService(1, "append", large),
        wire.SendFile(1, 1, "x", 0, large),
        wire.WriteOffered("x", "y", 0, large),
        wire.Lookup("", 1, [large[:60_000]] * 500),
        wire.Write([wire.SentGroup(b"", True, [wire.SentSection(1, large)])], False),
    ):
        sent = wire.unpack_request(wire.pack(request))
        assert isinstance(sent, type(request))


def test_the_messages_of_workers_have_no_counts() -> None:
    """They are texts and bytes within a frame whose length is checked; a list would need a limit of its own."""
    kinds = {field.type for kind in worker_wire.Message.__args__ for field in msgspec.structs.fields(kind)}
    assert kinds <= {str, bytes, bool}


# -- anything


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.binary(max_size=20) | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=20,
)
names = st.sampled_from([kind.__name__ for kind in (*wire.OtherRequest.__args__, wire.Write)])


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=names, fields=st.lists(plain, max_size=6), cut=st.integers(0, 3))
def test_whatever_is_said_is_answered_or_refused(gateway: Gateway, name: str, fields: list[Any], cut: int) -> None:
    body = msgspec.msgpack.encode([name, *fields])
    for rights in (Rights(client="nobody"), Rights(client="writer", tables={"users": "write", "events": "write"})):
        try:
            gateway.answer(sealed(body[: len(body) - cut]), rights)
        except PenstockError as error:
            assert "\n" not in str(error)
    for budget in (*gateway._work.slots.values(), gateway._work.memory):
        assert not budget.taken


# -- answers


def test_a_lookup_is_bounded_by_the_bytes_of_its_answer(store: Store, gateway: Gateway, tmp_path: Path) -> None:
    users = store.kv("users")
    users.put_many({b"large%d" % n: bytes([n]) * (3 << 20) for n in range(10)}, durable=True)
    info = store.port.table("users")
    assert info is not None
    partition = info.table_id << 16
    again_and_again = wire.Lookup("", partition, [b"large1", b"small"] * 2_000)
    answers: list[bytes] = []
    peak = memory_of(lambda: answers.append(gateway.answer(wire.pack(again_and_again), LOCAL)))
    values = wire.unpack(answers[0], list[bytes | None])
    assert 0 < len(values) < 20
    assert len(answers[0]) <= LOOKUP_BYTES_MAX + (1 << 20)
    assert peak < 6 * LOOKUP_BYTES_MAX
    users.put(b"huge", bytes(40 << 20), durable=True)
    (only,) = wire.unpack(gateway.answer(wire.pack(wire.Lookup("", partition, [b"huge"] * 5)), LOCAL), list[bytes])
    assert len(only) == 40 << 20, "at least one, however large"
    with connect(store.path) as client:
        keys = [b"large%d" % (n % 10) for n in range(30)] + [b"none", b"huge"]
        replies = client.kv("users").multi_get(keys)
        expected = users.multi_get(keys)
        assert list(replies) == list(expected)
        assert replies == expected
    assert len(gateway._snapshots) == 0
