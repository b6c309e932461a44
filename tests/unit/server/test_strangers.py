"""Every request there is, for everybody there is: rights before effects, and nobody uses up what is another's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

import penstock
from penstock.errors import Backpressure, Closed, Invalid, PenstockError
from penstock.kv import section as kv_section
from penstock.partition.aside import Trouble
from penstock.partition.ledger_records import Condition, Verdict, encode_condition
from penstock.protocol import wire
from penstock.queue.calls import QueueCall, encode_call
from penstock.queue.positions import FORGET, SEEK, ForgetConsumer, Seek, argument
from penstock.server.gateway import Gateway
from penstock.server.rights import LOCAL, Rights, Tokens
from penstock.server.service import service_of
from penstock.store.reports import BackupReport
from penstock.store.store import Store

NOBODY = Rights(client="nobody")
READER = Rights(client="reader", tables={"users": "read", "events": "read"})
WRITER = Rights(client="writer", tables={"users": "write", "events": "write"})
ADMIN = Rights(client="admin", tables={"*": "admin"})
ALMOST = Rights(client="almost", tables={"*": "admin", "secrets": "read"})
ELSEWHERE = Rights(client="elsewhere", tables={"*": "read", "others": "write"})  # writes, but to neither of the tables


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with penstock.open(tmp_path / "store") as opened:
        opened.kv("users").put(b"a", b"1", durable=True)
        opened.queue("events")
        yield opened


@pytest.fixture
def gateway(store: Store) -> Gateway:
    service = service_of(store)
    assert service is not None
    return service.gateway()


def number(store: Store, name: str) -> int:
    info = store.port.table(name)
    assert info is not None
    return info.table_id


def rows(**values: bytes) -> bytes:
    section = kv_section.Rows()
    section.update({key.encode(): value for key, value in values.items()})
    return kv_section.encode(section)


def group(
    *sections: wire.SentSection, token: tuple[str, int] | None = None, others: Any = (), again: bool = False
) -> wire.Write:
    bound = encode_condition(Condition(token, others)) if token or others else b""
    return wire.Write([wire.SentGroup(bound, False, list(sections))], again)


def requests(store: Store) -> list[tuple[str, Any]]:
    """(the right that is needed, a request): every one there is, some in several forms."""
    users, events = number(store, "users"), number(store, "events")
    shard, options = users << 16, msgspec.msgpack.encode(["bytes"])
    put = wire.SentSection(shard, rows(a=b"2"))
    return [
        ("a token", wire.Hello()),
        ("a token", wire.ListTables()),
        ("a token", wire.ReadTime()),
        ("a token", wire.AskToken("p", 1)),
        ("a token", wire.CloseSnapshot("x")),
        ("a token", wire.CloseScan("x")),
        ("read", wire.FindTable("users")),
        ("read", wire.Lookup("", shard, [b"a"])),
        ("read", wire.LookupRow("", shard, b"a")),
        ("read", wire.CutPieces("", shard, 1)),
        ("read", wire.CutRanges("", [(shard, b"", None)], 1)),
        ("read", wire.PlanBatch(["users"])),
        ("read", wire.PlanBatch([], "events", "c", [(0, 1)])),
        ("a token", wire.PlanBatch([])),
        ("read", wire.Scan("s", "", shard, b"", None, True)),
        ("read", wire.Scan("s", "", shard, b"", None, False)),
        ("read", wire.ScanRanges("s", "", [(shard, b"", None)])),
        ("read", wire.RunQuery("s", "", shard >> 16, "select", b"", 5.0)),
        ("read something", wire.TakeSnapshot(5.0)),
        ("read something", wire.TakeSnapshot(5.0, "query")),
        ("read something", wire.ReadMetrics()),
        ("read something", wire.ReadStatistics()),
        ("read something", wire.AwaitView(0, 0.0)),
        ("read something", wire.AwaitView(1 << 62, 0.001)),
        ("read", wire.CallService(events, "bounds", b"")),
        ("read", wire.CallService(events, "statistics", b"")),
        ("read", wire.CallService(events, "positions", b"")),
        ("read", wire.CallService(events, "seek", b"")),
        ("read", wire.CallService(events, "advance", b"")),
        ("write", wire.CallService(events, "append", encode_call(QueueCall(payload=b"x")))),
        ("write", wire.CallService(events, "get", encode_call(QueueCall(consumer="c", count=1)))),
        ("write", wire.CallService(events, "get", encode_call(QueueCall(consumer="c", count=1, timeout_s=0.01)))),
        ("write", wire.CallService(events, "nack", encode_call(QueueCall(consumer="c")))),
        ("write", wire.CallService(events, "extend", encode_call(QueueCall(consumer="c")))),
        ("write", wire.CallService(events, "leave", encode_call(QueueCall(holder="x")))),
        ("read", wire.CallService(events, "consumers", b"")),
        ("write", wire.CallService(events, "no such call", b"")),
        ("write", wire.StageFiles(shard, 1, 5.0)),
        ("write", wire.SendFile(shard, 1, "x", 0, b"")),
        ("write", group(put)),
        ("write", group(put, token=("p", 1))),
        ("write", group(wire.SentSection(shard, b"", []))),
        ("write", group(others=((SEEK, argument(events, Seek("c", [(0, 1)], "leased"))),))),
        ("write", group(others=((FORGET, argument(events, ForgetConsumer("c", 1))),), token=("p", 2))),
        ("write something", group(token=("p", 3))),
        ("write something", group(token=("p", 1 << 62))),
        ("write something", group(token=("p", 3), again=True)),
        ("write something", group()),
        ("admin", wire.CreateTable("users", "kv", 1, options)),
        ("admin", wire.CreateTable("events", "queue", 1, b"")),
        ("admin", wire.ResumeTable("users")),
        ("admin", wire.KeepSnapshot("users")),
        ("admin", wire.RepairTable("users")),
        ("admin", wire.DropSnapshot("users")),
        ("admin", wire.AlterTable(events, b"", b"")),
        ("admin", wire.ConfigureTable(events, b"", b"")),
        ("read", wire.DescribeTable("users")),
        ("read", wire.WaitForChange("users", 0, 0.0)),
        ("admin", wire.DrainTable("users", 1.0)),
        ("admin", wire.ReactivateTable("users")),
        ("everything", wire.TriggerTask("flush")),
        ("read everything", wire.ListTasks()),
        ("admin", wire.CompactTable("users", 1.0)),
        ("a token", wire.ListTroubles()),
        ("admin", wire.RunJobs("users", 1.0)),
        ("read", wire.ListChunks("users")),
        ("read something", wire.ListJobs()),
        ("everything", wire.RetryJob(1)),
        ("read everything", wire.CheckStore()),
        ("everything", wire.ArchiveStore()),
        ("everything", wire.EvictFiles("users", 0)),
        ("everything", wire.RehydrateFiles("users")),
        ("everything", wire.VerifyArchive(None)),
        ("everything", wire.CollectArchive()),
        ("this machine", wire.BackupStore(store.path, None)),  # who may is told that this folder is the store's
        ("read", wire.WaitFor(0, [events], 0.0)),
        ("read", wire.ReadStorage(users)),
        ("everything", wire.RotateKeys()),
        ("everything", wire.TakeOffer(1)),
        ("everything", wire.KeepOffer("x")),
        ("everything", wire.FinishOffer("x", [])),
        ("everything", wire.FailOffer("x", "")),
        ("everything", wire.ReadOffered("x", "y", 0)),
        ("everything", wire.WriteOffered("x", "y", 0, b"")),
        ("admin", wire.DropTable("users")),  # the last: the table that is made again has another number
    ]


ALLOWED = {
    "a token": {"nobody", "reader", "writer", "almost", "elsewhere", ""},
    "read": {"reader", "writer", "almost", "elsewhere", ""},
    "read something": {"reader", "writer", "almost", "elsewhere", ""},
    "read everything": {"almost", "elsewhere", ""},
    "write": {"writer", "almost", ""},
    "write something": {"writer", "almost", "elsewhere", ""},
    "admin": {"almost", ""},
    "everything": {""},
    "this machine": {""},
}
NEEDS_NO_OTHER_TEST = {wire.JoinSnapshot, wire.More}  # of things that somebody holds: see below


def refused(gateway: Gateway, request: Any, rights: Rights) -> bool:
    """Whether a request is refused because of rights; other errors are none of this."""
    try:
        if isinstance(request, wire.Reading):
            list(gateway.page(wire.pack(request), rights)[1])
            return False
        answer = gateway.answer(wire.pack(request), rights)
        if isinstance(request, wire.Write):
            fault = wire.unpack(answer, wire.Outcomes).outcomes[0].fault
            if fault is not None:
                raise wire.error_of(fault)
    except PenstockError as error:
        return "does not give the right" in str(error) or "connect by its path" in str(error)
    return False


def violations(store: Store, gateway: Gateway) -> list[str]:
    """Who may do what he must not, or may not do what he should, or changes something all the same."""
    wrong = []
    for right, request in requests(store):
        for rights in (NOBODY, READER, ELSEWHERE, WRITER, ALMOST, LOCAL):
            store.flush()  # what the one before left behind is not this one's doing
            before = store._dispatcher.ledger.tree.lsn, len(gateway._snapshots), len(gateway._scans)
            is_refused = refused(gateway, request, rights)
            after = store._dispatcher.ledger.tree.lsn, len(gateway._snapshots), len(gateway._scans)
            if is_refused == (rights.client in ALLOWED[right]):
                wrong.append(f"{rights.client}: {request}")
            if is_refused and before != after:
                wrong.append(f"{rights.client} was refused, and changed something: {request}")
            store.kv("users")  # if it was dropped
    return wrong


def test_every_request_asks_for_its_right_first(store: Store, gateway: Gateway) -> None:
    kinds = {type(request) for _, request in requests(store)} | NEEDS_NO_OTHER_TEST
    assert kinds == {*get_args(wire.Request), *get_args(wire.Reading)}, "say here what a new request needs"
    assert violations(store, gateway) == []


@pytest.mark.parametrize("method", ["check", "check_anywhere", "check_everywhere"])
def test_a_right_that_is_not_looked_at_is_noticed(
    store: Store, gateway: Gateway, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(Rights, method, lambda *_: None)
    assert violations(store, gateway)


# -- tokens


def verdict(gateway: Gateway, token: tuple[str, int], rights: Rights, *sections: wire.SentSection) -> int:
    answer = gateway.answer(wire.pack(group(*sections, token=token)), rights)
    return wire.unpack(answer, wire.Outcomes).outcomes[0].verdict


def test_nobody_uses_up_the_tokens_of_another(store: Store, gateway: Gateway) -> None:
    others = [NOBODY, READER, ELSEWHERE, ADMIN, Rights(client="w2", tables=WRITER.tables)]
    put = wire.SentSection(number(store, "users") << 16, rows(a=b"2"))
    for used in (17, 18, 1 << 62):
        for rights in others:
            verdict(gateway, ("nightly", used), rights)
            verdict(gateway, ("writer\0nightly", used), rights)  # as the ledger writes it
            gateway.answer(wire.pack(group(token=("nightly", used), again=True)), rights)
    assert verdict(gateway, ("nightly", 17), WRITER, put) == Verdict.ACCEPTED
    assert verdict(gateway, ("nightly", 17), WRITER, put) == Verdict.DUPLICATE
    assert verdict(gateway, ("nightly", 18), LOCAL, put) == Verdict.ACCEPTED, "the store's own producers are others'"
    with store.batch(token=("nightly", 18)) as batch:
        batch.kv("users").put(b"a", b"3")
    assert batch.duplicate, "who opens the store and who comes to its socket share them"
    for rights, used in ((WRITER, True), (ELSEWHERE, False), (READER, False), (LOCAL, False)):
        answer = gateway.answer(wire.pack(wire.AskToken("nightly", 17)), rights)
        assert wire.unpack(answer, bool) is used, rights.client


def test_tokens_of_one_name_for_all_would_be_noticed(
    store: Store, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Rights, "own_token", lambda _, token: token)
    with pytest.raises(AssertionError):
        test_nobody_uses_up_the_tokens_of_another(store, gateway)


def test_producers_may_be_shared_by_saying_so(store: Store, gateway: Gateway) -> None:
    text = ""
    for name, line in (("a", 'producers = "team"'), ("b", 'producers = "team"'), ("c", 'producers = ""'), ("d", "")):
        text += f'[tokens.{name}]\nsha256 = "{"0" * 63}{name}"\nrights = {{ users = "write" }}\n{line}\n'
    rights_by_client = {rights.client: rights for _, rights in Tokens.parse(text)._listed}
    assert verdict(gateway, ("p", 1), rights_by_client["a"]) == Verdict.ACCEPTED
    assert verdict(gateway, ("p", 1), rights_by_client["b"]) == Verdict.DUPLICATE
    assert verdict(gateway, ("p", 1), rights_by_client["d"]) == Verdict.ACCEPTED
    with store.batch(token=("p", 1)) as batch:
        batch.kv("users").put(b"a", b"3")
    assert not batch.duplicate
    assert verdict(gateway, ("p", 1), rights_by_client["c"]) == Verdict.DUPLICATE
    for bad in ('producers = "a/b"', 'producers = "a\\u0000b"', f'producers = "{"x" * 101}"'):
        with pytest.raises(Invalid, match="name"):
            Tokens.parse(f'[tokens.a]\nsha256 = "{"0" * 64}"\nrights = {{}}\n{bad}\n')


# -- what clients hold


def take(gateway: Gateway, rights: Rights, query: str = "") -> str:
    return wire.unpack(gateway.answer(wire.pack(wire.TakeSnapshot(60.0, query)), rights), wire.SnapshotHandle).snapshot


def test_what_a_client_holds_is_its_own(store: Store, gateway: Gateway) -> None:
    store.kv("users").put_many({b"%05d" % n: bytes(2_000) for n in range(5_000)}, durable=True)
    scan = wire.Scan("mine", "", number(store, "users") << 16, b"", None, True)
    mine = take(gateway, WRITER)
    list(gateway.page(wire.pack(scan), WRITER)[1])
    for rights in (NOBODY, READER, ADMIN, LOCAL):
        gateway.answer(wire.pack(wire.CloseSnapshot(mine)), rights)
        gateway.answer(wire.pack(wire.CloseScan("mine")), rights)
        with pytest.raises(Closed):
            gateway.page(wire.pack(wire.More("mine")), rights)
    with pytest.raises(Invalid, match="already"):
        gateway.page(wire.pack(scan), READER)
    joined = wire.unpack(gateway.answer(wire.pack(wire.JoinSnapshot(mine)), NOBODY), wire.SnapshotHandle)
    assert joined.tables == [], "one who knows its name sees of it what he may read"
    assert list(gateway.page(wire.pack(wire.More("mine")), WRITER)[1])
    gateway.answer(wire.pack(wire.CloseSnapshot(mine)), WRITER)
    gateway.answer(wire.pack(wire.CloseScan("mine")), WRITER)
    assert len(gateway._snapshots) == len(gateway._scans) == 0


def test_nobody_uses_up_the_name_of_another_query(gateway: Gateway) -> None:
    theirs = take(gateway, READER, "app-1")
    gateway.answer(wire.pack(wire.CloseSnapshot(theirs)), READER)
    with pytest.raises(Closed):
        take(gateway, READER, "app-1")
    mine = take(gateway, WRITER, "app-1")
    assert take(gateway, WRITER, "app-1") == mine != theirs
    assert take(gateway, LOCAL, "app-1") != mine


def test_everybody_gets_a_few_of_what_others_have_taken(store: Store, gateway: Gateway) -> None:
    gateway._snapshots._count_max = 6
    for _ in range(6):
        take(gateway, WRITER)
    with pytest.raises(Backpressure):
        take(gateway, WRITER)
    for _ in range(4):
        take(gateway, READER)
    with pytest.raises(Backpressure):
        take(gateway, READER)
    shard = number(store, "users") << 16
    gateway._staged._each_max = 10
    gateway.answer(wire.pack(wire.StageFiles(shard, 10, 60.0)), WRITER)
    with pytest.raises(Backpressure, match="staged"):
        gateway.answer(wire.pack(wire.StageFiles(shard, 1, 60.0)), WRITER)
    gateway.answer(wire.pack(wire.StageFiles(shard, 10, 60.0)), ADMIN)


def test_a_client_that_went_away_leaves_nothing(store: Store, gateway: Gateway) -> None:
    """Also one that never began to read its answer."""
    store.kv("users").put_many({b"%05d" % n: bytes(2_000) for n in range(5_000)}, durable=True)
    shard = number(store, "users") << 16
    answers = [
        gateway.answering(wire.pack(wire.Lookup("", shard, [b"00001"])), READER),
        gateway.page(wire.pack(wire.Scan("s", "", shard, b"", None, True)), READER)[1],
    ]
    began = gateway.page(wire.pack(wire.Scan("t", "", shard, b"", None, True)), READER)[1]
    next(began)
    reading, memory = gateway._work.slots["reading"].taken, gateway._work.memory.taken
    assert reading["reader"] == 3
    assert memory["reader"] > 0
    del answers, began
    assert not reading
    assert not memory
    list(gateway.page(wire.pack(wire.More("s")), READER)[1])  # nobody uses it any more: it is there for the next


# -- what is told


def test_who_may_read_some_tables_does_not_learn_where_the_store_lies(store: Store, gateway: Gateway) -> None:
    hello = wire.pack(wire.Hello())
    for rights in (LOCAL, ADMIN, ELSEWHERE):
        assert wire.unpack(gateway.answer(hello, rights), wire.Owner).path == store.path
    for rights in (NOBODY, READER, WRITER):
        assert wire.unpack(gateway.answer(hello, rights), wire.Owner).path == ""
    errors = [
        penstock.errors.CorruptionError(f"{store.path}/tables/1/x.sst", 5, "it is torn"),
        penstock.errors.Invalid(f"{store.path} cannot be read"),
    ]
    for error in errors:
        fault = gateway.fault(error, READER)
        assert store.path not in f"{fault.message} {fault.detail} {wire.error_of(fault)}"
        assert store.path in gateway.fault(error, LOCAL).message


def test_a_client_hears_of_troubles_with_its_own_tables_only(
    store: Store, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    def troubles() -> list[Trouble]:
        return [Trouble(name, 0, f"{store.path}/tables is odd", 7) for name in ("users", "secrets", "ledger")]

    monkeypatch.setattr(store, "troubles", troubles)
    reader = Rights(client="some", tables={"users": "read"})
    for rights, expected in (
        (reader, [("users", "tables is odd")]),
        (LOCAL, [(t.table, t.reason) for t in troubles()]),
    ):
        answer = wire.unpack(gateway.answer(wire.pack(wire.ListTroubles()), rights), list[Trouble])
        assert [(trouble.table, trouble.reason) for trouble in answer] == expected


def test_a_backup_is_made_for_a_process_of_this_machine_alone(store: Store, gateway: Gateway, tmp_path: Path) -> None:
    """Over TCP not even an administrator of every table may name a folder for the owner to write to."""
    request = wire.pack(wire.BackupStore(str(tmp_path / "backups"), None))
    for rights in (NOBODY, ALMOST, ADMIN):
        with pytest.raises(Invalid, match="connect by its path, on that machine"):
            gateway.answer(request, rights)
        assert not (tmp_path / "backups").exists()
    assert wire.unpack(gateway.answer(request, LOCAL), BackupReport).number == 1


@pytest.mark.parametrize("name", ["Secrets", "secrets ", "", "_x", "9x", "a" * 64, "**", "secret*"])
def test_rights_are_for_names_that_tables_can_have(name: str) -> None:
    """A right for a name that no table has would be passed over, and "*" would give more than was meant."""
    with pytest.raises(Invalid, match="is not a table name"):
        Tokens.parse(f'[tokens.a]\nsha256 = "{"0" * 64}"\nrights = {{ "*" = "admin", "{name}" = "read" }}\n')
