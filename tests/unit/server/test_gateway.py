"""What comes from outside is checked: rights, lengths, names, damage; and the owner goes on."""

from __future__ import annotations

import hashlib
import random
import socket
import struct
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import google_crc32c
import msgspec
import pyarrow as pa
import pyarrow.flight as flight
import pytest

import penstock
from penstock.client.connect import connect
from penstock.errors import Backpressure, Closed, Invalid, KindMismatch, NotFound, PenstockError
from penstock.host.waiting import pause
from penstock.kinds import Serviced
from penstock.kv import section as kv_section
from penstock.lsm.rows import KEY_BYTES_MAX, MERGE, NEVER, PUT, VALUE_BYTES_MAX
from penstock.partition.ledger_records import LEDGER, Condition, TableInfo, encode_condition
from penstock.protocol import locator, wire
from penstock.queue import section as queue_section
from penstock.queue.calls import QueueCall, encode_call
from penstock.queue.messages import Messages
from penstock.queue.positions import ACK, DELIVER, SEEK, Ack, Deliver, Seek, argument
from penstock.registry import known_kinds
from penstock.server import work as work_module
from penstock.server.gateway import Gateway
from penstock.server.leased_objects import LeasedObjects
from penstock.server.rights import LOCAL, Rights, Tokens
from penstock.server.service import service_of
from penstock.server.work import READING, WAITING, WRITING, OwnerLeaving
from penstock.store.store import Store
from penstock.testing import FakeClock


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with penstock.open(tmp_path / "store") as opened:
        opened.kv("users")
        opened.queue("events", shards=2)
        yield opened


@pytest.fixture
def gateway(store: Store) -> Gateway:
    service = service_of(store)
    assert service is not None
    return service.gateway()


@pytest.fixture
def line(store: Store) -> Iterator[flight.FlightClient]:
    service = service_of(store)
    assert service is not None
    with flight.FlightClient(service.location()) as client:
        yield client


def ask(gateway: Gateway, request: Any, rights: Rights = LOCAL) -> bytes:
    return gateway.answer(wire.pack(request), rights)


def partition(store: Store, name: str, shard: int = 0) -> int:
    info = store.port.table(name)
    assert info is not None
    return info.table_id << 16 | shard


def write(gateway: Gateway, *sections: wire.SentSection, condition: bytes = b"", rights: Rights = LOCAL) -> None:
    """Send one group; its error, if it is refused."""
    answer = ask(gateway, wire.Write([wire.SentGroup(condition, False, list(sections))], False), rights)
    fault = wire.unpack(answer, wire.Outcomes).outcomes[0].fault
    if fault is not None:
        raise wire.error_of(fault)


def rows(**values: bytes) -> bytes:
    section = kv_section.Rows()
    section.update({key.encode(): value for key, value in values.items()})
    return kv_section.encode(section)


# -- messages


def test_a_message_is_looked_at_before_it_is_decoded(gateway: Gateway) -> None:
    good = wire.pack(wire.FindTable("users"))
    draw = random.Random(3)
    for _ in range(500):
        bad = bytearray(good)
        bad[draw.randrange(len(bad))] ^= 1 << draw.randrange(8)
        with pytest.raises(Invalid, match="checksum"):
            gateway.answer(bytes(bad), LOCAL)
    for bad_length in (b"", b"1234", bytes(wire.MESSAGE_BYTES_MAX + 1)):
        with pytest.raises(Invalid, match="bytes"):
            gateway.answer(bad_length, LOCAL)
    for body in (b"\xc1", msgspec.msgpack.encode(["Fly"]), msgspec.msgpack.encode(["FindTable", 7]), b"\x90" * 100):
        with pytest.raises(Invalid, match="decode"):
            gateway.answer(struct.pack("<I", google_crc32c.value(body)) + body, LOCAL)
    assert gateway.answer(good, LOCAL)


@pytest.mark.parametrize(
    "request_",
    [
        wire.CreateTable("../x", "kv", 1, b""),
        wire.CreateTable("x", "graph", 1, b""),
        wire.CreateTable("x", "kv", 0, b""),
        wire.CreateTable("x", "kv", 5_000, b""),
        wire.CreateTable("x", "kv", 1, b"\xc1"),
        wire.CreateTable("x", "queue", 1, b"\x91\x93\xff\xff\xff"),
        wire.FindTable("../x"),
        wire.FindTable("x" * 64),
        wire.DropTable("/etc"),
        wire.Lookup("", 1 << 17, []),
        wire.Lookup("", 1 << 17, [b""] * (wire.KEYS_MAX + 1)),
        wire.CutPieces("", 2 << 16, 5),
        wire.CutPieces("", 2 << 16, 1 << 40),
        wire.CutRanges("", [], 5),
        wire.CutRanges("", [(2 << 16, b"", None)] * (wire.RANGES_MAX + 1), 5),
        wire.CutRanges("", [(2 << 16, b"", None)], 0),
        wire.CutRanges("", [(2 << 16, b"", None)], 1 << 40),
        wire.CutRanges("", [(2 << 16, b"", None)], 1, 2, 1),
        wire.CutRanges("", [(2 << 16, b"", None)], 1, -1, 1),
        wire.CutRanges("", [(2 << 16, b"", None), (3 << 16, b"", None)], 1),
        wire.PlanBatch(["../x"]),
        wire.PlanBatch(["users"] * (wire.TABLES_MAX + 1)),
        wire.PlanBatch([], "../x"),
        wire.PlanBatch([], "events", "", [(7, 1)]),
        wire.PlanBatch([], "events", "", [(0, 1 << 63)]),
        wire.PlanBatch([], "events", "", [(0, 1)], -1),
        wire.PlanBatch([], "events", "x" * 300),
        wire.StageFiles(2 << 16, 0, 5.0),
        wire.StageFiles(2 << 16, 1, float("nan")),
        wire.SendFile(2 << 16, 1, "../../../etc/passwd", 0, b"x"),
        wire.TakeSnapshot(0.0),
        wire.TakeSnapshot(1e9),
        wire.AskToken("", 1),
        wire.CallService(3, "append", b"\xc1"),
        wire.CallService(3, "append", encode_call(QueueCall(shard=7))),
        wire.CallService(3, "append", encode_call(QueueCall(payload=bytes(VALUE_BYTES_MAX + 1)))),
        wire.CallService(3, "append", encode_call(QueueCall(key=bytes(KEY_BYTES_MAX + 1)))),
        wire.CallService(3, "append", encode_call(QueueCall(time_us=1 << 62))),
        wire.CallService(3, "get", encode_call(QueueCall(consumer="c" * 300))),
        wire.CallService(3, "get", encode_call(QueueCall(consumer="c", count=1, timeout_s=float("nan")))),
        wire.CallService(3, "nack", encode_call(QueueCall(consumer="c", leases=[(9, 1, 1)]))),
        wire.CallService(3, "advance", encode_call(QueueCall(positions=[(2, 1)]))),
        wire.CallService(3, "fly", b""),
    ],
    ids=lambda request: type(request).__name__,
)
def test_requests_out_of_range_are_refused(gateway: Gateway, request_: Any) -> None:
    with pytest.raises(Invalid):
        ask(gateway, request_)


def test_a_table_without_a_service_takes_no_calls(gateway: Gateway) -> None:
    with pytest.raises(KindMismatch, match="table users is of the kind kv, which takes no calls"):
        ask(gateway, wire.CallService(2, "append", b""))


@pytest.mark.parametrize(
    "request_",
    [
        wire.Lookup("", 9 << 16, [b""]),
        wire.Lookup("", (2 << 16) + 1, [b""]),
        wire.Lookup("", LEDGER, [b"n"]),
        wire.StageFiles(9 << 16, 1, 5.0),
        wire.CutRanges("", [(2 << 16, b"", None), ((2 << 16) + 1, b"", None)], 1),
        wire.CallService(9, "append", b""),
        wire.CallService(1, "append", b""),
        wire.DropTable("nothing"),
    ],
    ids=lambda request: type(request).__name__,
)
def test_what_is_not_there_is_not_found(gateway: Gateway, request_: Any) -> None:
    with pytest.raises(NotFound):
        ask(gateway, request_)


# -- sections


def bad_kv_sections() -> Iterator[bytes]:
    good = rows(a=b"1", b=b"2")
    yield from (good[:-1], good + b"x", b"", b"\x07" + good[1:], good[:4] + b"\xff" * 4 + good[8:])
    yield rows(**{"k" * (KEY_BYTES_MAX + 1): b""})
    for ranges in ([(b"b", b"a")], [(b"a", b"a")], [(b"a", b"b" * (KEY_BYTES_MAX + 2))]):
        yield kv_section.encode(kv_section.Ranges(ranges))
    operations = [
        (1, b"x", NEVER),  # a delete with a value
        (2, b"b", NEVER),  # a range, as a row
        (9, b"", NEVER),  # no operator
        (16, b"short", NEVER),  # a number of 5 bytes
        (22, b"\xff", NEVER),  # no set
        (MERGE, b"", NEVER),  # a chain of nothing
        (MERGE, b"\x10\xff\xff\xff\xff", NEVER),  # a chain that is cut short
        (MERGE, (b"\x10\x08\0\0\0" + bytes(8)) * 1, NEVER),  # a chain of one
        (PUT, b"x", -1),
    ]
    for operation in operations:
        section = kv_section.Rows()
        section[b"a"] = operation
        section.plain = False
        yield kv_section.encode(section)


def bad_queue_sections() -> Iterator[bytes]:
    puts = queue_section.Puts()
    puts.add_many(Messages.of([b"abc", b"de"], [b"k", None], [1, 2]))
    good = queue_section.encode(puts)
    body = puts.bodies()[0]
    yield from (good[:-8], good + bytes(8), b"", b"\x05" + good[1:])

    def with_body(changed: bytes) -> bytes:
        return queue_section.encode(queue_section.Encoded([changed]))

    for at, value in ((0, b"\x01"), (16, b"\0"), (16, b"\x09"), (19, b"\x7f"), (20, b"\xff"), (22, b"\x01")):
        yield with_body(body[:at] + value + body[at + 1 :])
    for at in range(24, len(body), 4):  # offsets, bitmap and padding
        for value in (b"\xff\xff\xff\x7f", b"\xff\xff\xff\xff", b"\x00\x00\x00\x80"):
            changed = body[:at] + value + body[at + 4 :]
            try:
                part = queue_section.Encoded([changed])
            except Exception:
                continue
            yield queue_section.encode(part)
    yield with_body(body + b"trailing")
    yield queue_section._HEADER.pack(queue_section.TRIM, 0) + bytes(8)
    yield queue_section._HEADER.pack(queue_section.TRIM, 0) + b"\xff" * 8


def test_malformed_sections_never_reach_the_journal(store: Store, gateway: Gateway) -> None:
    refused = 0
    for payload in bad_kv_sections():
        with pytest.raises(Invalid):
            write(gateway, wire.SentSection(partition(store, "users"), payload))
        refused += 1
    for payload in bad_queue_sections():
        try:
            write(gateway, wire.SentSection(partition(store, "events"), payload))
        except Invalid:
            refused += 1
        else:  # other bytes of a payload, key or time are no harm: they must read back
            store.queue("events").to_arrow().validate(full=True)
    assert refused > 40
    with pytest.raises(Invalid):  # a good one beside a bad one
        write(
            gateway,
            wire.SentSection(partition(store, "users"), rows(a=b"1")),
            wire.SentSection(partition(store, "users"), b"bad"),
        )
    for number in (LEDGER, partition(store, "users") + 1, -1, 1 << 62):
        with pytest.raises((Invalid, NotFound)):
            write(gateway, wire.SentSection(number, rows(a=b"1")))
    assert list(store.kv("users").scan()) == []


def test_malformed_conditions_are_refused(store: Store, gateway: Gateway) -> None:
    table = partition(store, "events") >> 16
    bad = [
        b"\xc1",
        encode_condition(Condition(("", 1))),
        encode_condition(Condition(("p", -1))),
        encode_condition(Condition(None, (("nothing", bytes(8)),))),
        encode_condition(Condition(None, ((ACK, b""),))),
        encode_condition(Condition(None, ((ACK, table.to_bytes(8, "big") + b"\xc1"),))),
        encode_condition(Condition(None, ((ACK, argument(table, Ack("c", [(5, [(1, 2)])], [[1]]))),))),
        encode_condition(Condition(None, ((ACK, argument(table - 1, Ack("c", [(0, [(1, 2)])], [[1]]))),))),
        encode_condition(Condition(None, ((ACK, argument(77, Ack("c", [(0, [(1, 2)])], [[1]]))),))),
        encode_condition(Condition(None, ((SEEK, argument(table, Seek("", [(0, 1)], "leased"))),))),
        encode_condition(Condition(None, ((SEEK, argument(table, Seek("c", [(0, -1)], "leased"))),))),
        encode_condition(Condition(None, ((DELIVER, argument(table, Deliver("c", [(0, 1, [(1, 2)])]))),))),
    ]
    for condition in bad:
        with pytest.raises((Invalid, NotFound)):
            write(gateway, wire.SentSection(partition(store, "users"), rows(a=b"1")), condition=condition)
    with pytest.raises(Invalid, match="groups"):
        ask(gateway, wire.Write([wire.SentGroup(b"", True, [])] * (wire.GROUPS_MAX + 1), False))
    assert store.kv("users").get(b"a") is None
    store.kv("users").put(b"a", b"2", durable=True)  # the store goes on


def test_damage_under_a_good_checksum_breaks_nothing(tmp_path: Path) -> None:
    """Bits flipped by one who can make a checksum: refused, or taken as what they say; the store stays whole."""
    draw = random.Random(13)
    with penstock.open(tmp_path / "store") as store:
        users, events = store.kv("users"), store.queue("events")
        users.put(b"safe", b"1")
        service = service_of(store)
        assert service is not None
        gateway = service.gateway()
        puts = queue_section.Puts()
        puts.add_many(Messages.of([b"abc", b"", b"defg"], [b"k", None, b"l"], [1, -2, 3]))
        merged = kv_section.Rows()
        merged.plain = False
        merged.update({b"n": (16, bytes(8), NEVER), b"u": (22, b"\x01\0\0\0x", NEVER), b"d": (1, b"", NEVER)})
        sections = [
            wire.SentSection(partition(store, "users"), rows(a=b"1", bb=b"22")),
            wire.SentSection(partition(store, "users"), kv_section.encode(merged)),
            wire.SentSection(partition(store, "events"), queue_section.encode(puts)),
        ]
        condition = encode_condition(Condition(("client", 1)))
        body = msgspec.msgpack.encode(wire.Write([wire.SentGroup(condition, True, sections)], False))
        taken = 0
        for _ in range(1_500):
            bad = bytearray(body)
            for _ in range(draw.randint(1, 3)):
                bad[draw.randrange(len(bad))] ^= 1 << draw.randrange(8)
            with suppress(PenstockError):
                answer = gateway.answer(struct.pack("<I", google_crc32c.value(bytes(bad))) + bytes(bad), LOCAL)
                taken += wire.unpack(answer, wire.Outcomes).outcomes[0].fault is None
        assert taken > 0, "some of it says something that may be said"
        users.put(b"safe", b"2", durable=True)
        expected = users.to_arrow(), events.to_arrow()
    with penstock.open(tmp_path / "store") as again:
        tables = again.kv("users").to_arrow(), again.queue("events").to_arrow()
        assert [table.validate(full=True) for table in tables] == [None, None]
        assert [table.num_rows for table in tables] == [table.num_rows for table in expected]
        assert again.kv("users")[b"safe"] == b"2"


# -- rights


def test_rights_are_by_table(store: Store, gateway: Gateway) -> None:
    store.queue("graves")
    reader = Rights(client="reader", tables={"users": "read"})
    writer = Rights(client="writer", tables={"users": "write", "events": "write"})
    users, events = partition(store, "users"), partition(store, "events")
    ask(gateway, wire.Lookup("", users, [b"a"]), reader)
    write(gateway, wire.SentSection(users, rows(a=b"1")), rights=writer)
    listed = wire.unpack(ask(gateway, wire.ListTables(), reader), list[TableInfo])
    assert [info.name for info in listed] == ["users"]
    ack = encode_condition(Condition(None, ((ACK, argument(events >> 16, Ack("c", [(0, [(1, 2)])], [[1]]))),)))
    refused: list[tuple[Any, Rights]] = [
        (wire.Lookup("", events, [b"a"]), reader),
        (wire.FindTable("events"), reader),
        (wire.CreateTable("new", "kv", 1, msgspec.msgpack.encode(["bytes"])), writer),
        (wire.DropTable("users"), writer),
        (wire.StageFiles(users, 1, 5.0), reader),
        (wire.SendFile(users, 1, "x", 0, b""), reader),
        (wire.CallService(events >> 16, "bounds", b""), reader),
        (wire.CallService(events >> 16, "get", encode_call(QueueCall(consumer="c", count=1))), reader),
        (
            wire.CallService(
                events >> 16,
                "get",
                encode_call(QueueCall(consumer="c", count=1, deliveries_max=1, dead_letter="graves")),
            ),
            writer,
        ),
    ]
    for request, rights in refused:
        with pytest.raises(Invalid, match="does not give the right"):
            ask(gateway, request, rights)
    for condition, number in ((b"", users), (ack, users)):
        with pytest.raises(Invalid, match="does not give the right"):
            write(gateway, wire.SentSection(number, rows(a=b"2")), condition=condition, rights=reader)
    with pytest.raises(Invalid, match="does not give the right"):
        gateway.page(wire.pack(wire.Scan("s", "", events, b"", None, True)), reader)
    assert store.kv("users")[b"a"] == b"1"


def test_the_file_of_tokens() -> None:
    digest = hashlib.sha256(b"secret").hexdigest()
    tokens = Tokens.parse(f'[tokens.loader]\nsha256 = "{digest}"\nrights = {{ "*" = "read", events = "write" }}\n')
    rights = tokens.rights_of("secret")
    assert rights is not None
    assert rights.client == "loader"
    allowed = [rights.allows(right, table) for right in ("read", "write", "admin") for table in ("events", "users")]
    assert allowed == [True, True, True, False, False, False]
    assert tokens.rights_of("other") is None
    bad = [
        "",
        "[tokens]",
        "[tokens.a]\nsha256 = 5\nrights = {}",
        '[tokens.a]\nsha256 = "zz"\nrights = {}',
        '[tokens.a]\nsha256 = "abcd"\nrights = {}',
        f'[tokens.a]\nsha256 = "{digest}"\nrights = {{ x = "fly" }}',
        f'[tokens.a]\nsha256 = "{digest}"\nrights = {{}}\nextra = 1',
        "not toml",
    ]
    for text in bad:
        with pytest.raises(Invalid):
            Tokens.parse(text)


# -- limits


def test_an_object_keeps_the_owner_from_the_beginning_of_its_use() -> None:
    clock = FakeClock()
    objects: LeasedObjects[str] = LeasedObjects(len, noun="thing", clock=clock, count_max=3, each_max=2)
    objects.add("q", "query", client="a", lease_s=300.0, keeps_s=5.0)
    clock.advance(10)
    assert not objects.needed()
    with objects.use("q"):
        assert objects.needed(), "the owner yielded in the middle of a request, and the query lost its snapshot"


def test_what_clients_hold_is_limited_and_lapses() -> None:
    clock, closed = FakeClock(), list[str]()
    objects: LeasedObjects[str] = LeasedObjects(closed.append, noun="thing", clock=clock, count_max=3, each_max=2)
    for name in ("a", "b"):
        objects.add(name, name, client="x", lease_s=10.0)
    with pytest.raises(Backpressure):
        objects.add("c", "c", client="x", lease_s=10.0)
    objects.add("c", "c", client="y", lease_s=20.0)
    with pytest.raises(Backpressure):
        objects.check_room("z")
    clock.advance(8.0)
    with objects.use("a"), objects.use("a"):
        clock.advance(8.0)
        objects.sweep()
        assert closed == ["b"]  # `a` is in use
        objects.close("a", "x")
        with pytest.raises(Closed), objects.use("a"):
            pass
        assert closed == ["b"]
    assert closed == ["b", "a"]
    clock.advance(8.0)
    objects.sweep()
    assert closed == ["b", "a", "c"]
    with pytest.raises(Closed), objects.use("c"):
        pass
    objects.close("c", "y")
    assert len(objects) == 0


def test_consumers_that_wait_keep_nobody_out(store: Store, gateway: Gateway) -> None:
    """Neither the writer they wait for, nor an acknowledgement, nor readers; one more of them is told to retry."""
    limits = gateway._work.slots[WAITING]
    limits.each_max, limits.own = 3, 0
    asking = encode_call(QueueCall(consumer="c", count=1, timeout_s=20.0))
    table = partition(store, "events") >> 16
    waiting = wire.CallService(table, "get", asking)
    threads = [threading.Thread(target=ask, args=(gateway, waiting)) for _ in range(3)]
    for thread in threads:
        thread.start()
    while limits.taken[LOCAL.budget] < 3:
        pause(0.02)
    with pytest.raises(Backpressure, match="waiting"):
        ask(gateway, waiting)
    ask(gateway, wire.CallService(table, "get", encode_call(QueueCall(consumer="d", count=1))))  # does not wait
    ask(gateway, wire.ReadTime())
    puts = queue_section.Puts()
    puts.add_many(Messages.of([b"x"] * 3, None, None))
    write(gateway, wire.SentSection(partition(store, "events"), queue_section.encode(puts)))
    for thread in threads:
        thread.join(30.0)
    assert not limits.taken
    limits.each_max = 1
    for client in ("one", "other"):  # each has his own
        shortly = wire.CallService(table, "get", encode_call(QueueCall(consumer="c", count=1, timeout_s=0.01)))
        ask(gateway, shortly, Rights(client=client, tables={"events": "write"}))


def test_requests_at_work_are_limited(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_module, "MEMORY_WAIT_S", 0.01)
    waiting = wire.CallService(3, "get", encode_call(QueueCall(consumer="c", count=1, timeout_s=0.01)))
    putting = wire.CallService(3, "append", encode_call(QueueCall(payload=b"x")))
    slots = gateway._work.slots
    for limits, request in (
        (slots[WAITING], waiting),
        (slots[READING], wire.ReadTime()),
        (slots[WRITING], putting),
        (gateway._work.memory, wire.ReadTime()),
    ):
        total_max, each_max, limits.total_max = limits.total_max, limits.each_max, 0
        ask(gateway, request)  # what one has for oneself nobody takes away
        limits.each_max = 0
        with pytest.raises(Backpressure):
            ask(gateway, request)
        limits.total_max, limits.each_max, limits.own = total_max, each_max, 0
        ask(gateway, request)
        assert not limits.taken


def test_scans_and_snapshots_are_limited(store: Store, gateway: Gateway) -> None:
    number = partition(store, "users")
    store.kv("users").put_many({b"%05d" % n: bytes(2_000) for n in range(5_000)}, durable=True)
    gateway._snapshots._each_max = gateway._scans._each_max = 5
    for _ in range(5):
        ask(gateway, wire.TakeSnapshot(60.0))
    with pytest.raises(Backpressure):
        ask(gateway, wire.TakeSnapshot(60.0))
    for each in range(5):
        _, batches = gateway.page(wire.pack(wire.Scan(f"{each}", "", number, b"", None, True)), LOCAL)
        list(batches)
    with pytest.raises(Backpressure):
        gateway.page(wire.pack(wire.Scan("more", "", number, b"", None, True)), LOCAL)
    ask(gateway, wire.CloseScan("1"))
    _, batches = gateway.page(wire.pack(wire.Scan("more", "", number, b"", None, True)), LOCAL)
    with pytest.raises(Invalid, match="one at a time"):
        gateway.page(wire.pack(wire.More("more")), LOCAL)
    list(batches)
    gateway.close()
    assert len(gateway._scans) == 0
    store.close()  # files of snapshots stay until nothing removes them any more: their leases last
    assert len(gateway._snapshots) == 0
    with pytest.raises(OwnerLeaving):
        ask(gateway, wire.ReadTime())


# -- the transport


def test_errors_do_not_give_the_inside_away(
    store: Store, line: flight.FlightClient, gateway: Gateway, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("secret detail")

    monkeypatch.setitem(gateway._answers, wire.ReadTime, fail)
    with connect(store.path) as client, pytest.raises(PenstockError) as caught:
        client.port.time_us()
    assert "secret" not in str(caught.value)
    assert "error" in str(caught.value)
    assert "\n" not in str(caught.value)
    name = str(caught.value).rsplit(" ", 1)[1]
    assert any(name in record.getMessage() and record.exc_info for record in caplog.records)
    for body in (b"", b"junk", wire.pack(wire.FindTable("../x"))):
        with pytest.raises(flight.FlightError) as raw:
            list(line.do_action(flight.Action(wire.PROTOCOL, body)))
        assert "Traceback" not in str(raw.value)
    with pytest.raises(flight.FlightError, match="protocol"):
        list(line.do_action(flight.Action("0", b"")))


def test_clients_cannot_send_arrow(store: Store, line: flight.FlightClient) -> None:
    """Not even a bomb: a body of some kilobytes that would inflate to hundreds of megabytes is never read."""
    batch = pa.record_batch({"a": pa.array([bytes(50 << 20)])})
    descriptor = flight.FlightDescriptor.for_path("x")
    options = flight.FlightCallOptions(write_options=pa.ipc.IpcWriteOptions(compression="zstd"), timeout=20.0)
    with pytest.raises(pa.ArrowException):
        writer, reader = line.do_put(descriptor, batch.schema, options)
        with writer:
            writer.write_batch(batch)
            reader.read()
    with pytest.raises(pa.ArrowException):
        writer, exchanged = line.do_exchange(descriptor, options)
        with writer:
            writer.begin(batch.schema)
            writer.write_batch(batch)
            exchanged.read_chunk()
    for call in (
        lambda: list(line.list_flights()),
        lambda: line.get_flight_info(descriptor),
        lambda: line.get_schema(descriptor),
        lambda: list(line.list_actions()),
    ):
        with pytest.raises((flight.FlightError, OSError), match="not served"):
            call()
    assert store.tables() == ["events", "users"]


def test_many_idle_streams_hold_no_threads(store: Store, line: flight.FlightClient) -> None:
    store.kv("users").put_many({b"%05d" % n: bytes(2_000) for n in range(5_000)}, durable=True)
    list(line.do_action(flight.Action(wire.PROTOCOL, wire.pack(wire.Hello()))))
    before = len(list(Path("/proc/self/task").iterdir()))
    number, streams = partition(store, "users"), list[Any]()
    options = flight.FlightCallOptions(timeout=60.0)
    for each in range(250):
        with suppress(pa.ArrowException):
            streams.append(line.do_put(flight.FlightDescriptor.for_path("x"), pa.schema([]), options))
        with suppress(pa.ArrowException):
            streams.append(line.do_exchange(flight.FlightDescriptor.for_path("x"), options))
        with suppress(pa.ArrowException):
            scan = wire.Scan(f"idle{each}", "", number, b"", None, True)
            streams.append(line.do_get(flight.Ticket(wire.pack(scan)), options))
    answer = list(line.do_action(flight.Action(wire.PROTOCOL, wire.pack(wire.Hello())), options))
    assert wire.unpack(answer[0].body.to_pybytes(), wire.Owner).identity == store.identity
    during = len(list(Path("/proc/self/task").iterdir()))
    assert during - before < 300
    for stream in streams:
        with suppress(pa.ArrowException):
            stream[0].close() if isinstance(stream, tuple) else stream.cancel()


def test_a_client_that_is_stopped_does_not_keep_the_owner(tmp_path: Path) -> None:
    store = penstock.open(tmp_path / "store")
    for key in (b"a", b"b"):
        store.kv("users").put(key, bytes(40 << 20), durable=True)  # more than any buffer on the way holds
    service = service_of(store)
    assert service is not None
    line = flight.FlightClient(service.location())
    scan = wire.Scan("s", "", partition(store, "users"), b"", None, True)
    stream = line.do_get(flight.Ticket(wire.pack(scan)), flight.FlightCallOptions(timeout=3.0))
    pause(0.5)  # and nothing is read
    closing = threading.Thread(target=store.close)
    closing.start()
    closing.join(30.0)
    assert not closing.is_alive()
    with pytest.raises(pa.ArrowException):
        list(stream)
    line.close()


def test_a_gateway_that_yields_answers_nobody(store: Store, gateway: Gateway) -> None:
    handle = wire.unpack(ask(gateway, wire.TakeSnapshot(60.0)), wire.SnapshotHandle)
    assert "snapshot" in gateway.begin_yield()
    ask(gateway, wire.CloseSnapshot(handle.snapshot))
    assert gateway.begin_yield() == ""
    with pytest.raises(OwnerLeaving):
        ask(gateway, wire.Hello())
    with pytest.raises(OwnerLeaving):
        gateway.page(wire.pack(wire.More("x")), LOCAL)


def test_the_control_socket_outlives_nonsense() -> None:
    with (
        tempfile.TemporaryDirectory() as short,
        penstock.open(f"{short}/s") as store,
    ):  # the control socket is in its folder then
        _ring_badly(store)


def _ring_badly(store: Store) -> None:
    path = f"{store.path}/run/control"
    for question in (b"", b"junk\n", b'{"ask":"dance"}\n', b"x" * 200_000):
        with socket.socket(socket.AF_UNIX) as caller, suppress(OSError):
            caller.connect(path)
            caller.sendall(question)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(path)
        answer = locator.ask_owner(store.path, "serve", 10.0)
        assert answer is not None
        assert answer.location
    refused = locator.ask_owner(store.path, "yield", 10.0)
    assert refused is not None
    assert not refused.yields


def test_a_store_costs_no_flight_until_a_client_asks(tmp_path: Path) -> None:
    import subprocess
    import sys

    code = f"""if True:
        import sys, penstock
        with penstock.open({str(tmp_path / "store")!r}) as store:
            store.kv("users").put(b"a", b"1", durable=True)
            print(*(name for name in ("pyarrow.flight", "asyncio", "pandas") if name in sys.modules))
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=60)
    assert done.stdout.split() == []  # pandas comes with the first `pa.array`, and takes as long as all others together


def test_every_kind_says_which_calls_are_safe() -> None:
    serviced = [kind for kind in known_kinds() if isinstance(kind, Serviced)]
    assert serviced
    for kind in serviced:
        assert kind.read_only_calls <= kind.repeatable_calls
