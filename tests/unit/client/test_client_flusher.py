"""What becomes of a client's write is done, not done or unknown, and what is said of it is true."""

from __future__ import annotations

import errno
import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from owner_processes import hurry, outcome

import penstock
from penstock import errors
from penstock.client import flusher
from penstock.client.connect import connect
from penstock.client.flusher import RemoteFlusher
from penstock.client.refusals import REFUSALS_MAX, Refusal, Refusals
from penstock.client.store import RemoteStore
from penstock.errors import (
    Backpressure,
    Closed,
    DiskFull,
    Invalid,
    LeaseLost,
    NotFound,
    OutcomeUnknown,
    PartitionPaused,
    PenstockError,
    Poisoned,
    WaitExpired,
)
from penstock.host.os_files import OsFile
from penstock.kv.kind import KvKind
from penstock.kv.section import Rows
from penstock.partition.ledger_records import Condition, Verdict, encode_condition
from penstock.protocol import wire
from penstock.server.rights import LOCAL
from penstock.server.service import service_of
from penstock.server.writes import GroupTaker
from penstock.store.port import LocalPort
from penstock.store.store import Store


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Store]:
    with penstock.open(tmp_path / "store") as store:
        yield store


@pytest.fixture
def store(owner: Store) -> Iterator[RemoteStore]:
    with connect(owner.path) as client:
        yield client


def count(store: Any, key: bytes = b"n") -> int:
    value: int = store.kv("counts", value="int64").get(key, 0)
    return value


# -- what the owner says, by what failed in it

CERTAIN = [
    NotFound,
    Invalid,
    PartitionPaused,
    LeaseLost,
    errors.ReadOnly,
    errors.KindMismatch,
    errors.TableDraining,
    errors.UnsupportedVersion,
]
PASSING = [
    Backpressure,
    errors.DiskFull,
    errors.DiskFailed,
    errors.ManifestFull,
    errors.CommitFailed,
    errors.NotLeader,
]
IN_DOUBT = [OutcomeUnknown, WaitExpired, Poisoned, PenstockError, ValueError, OSError]


def fail_once(
    monkeypatch: pytest.MonkeyPatch, method: str, error: type[Exception], *, after: bool = False, times: int = 1
) -> list[int]:
    """Let the owner's port fail for clients' threads; how often it did."""
    whole, failed = getattr(LocalPort, method), list[int]()

    def fail(port: LocalPort, *arguments: Any, **options: Any) -> Any:
        if len(failed) < times and threading.current_thread().name.startswith("Dummy"):  # of gRPC
            if after:
                whole(port, *arguments, **options)
            failed.append(1)
            raise error("it failed here")
        return whole(port, *arguments, **options)

    monkeypatch.setattr(LocalPort, method, fail)
    return failed


@pytest.mark.parametrize("error", CERTAIN)
def test_what_is_refused_never_happens(
    owner: Store, store: RemoteStore, monkeypatch: pytest.MonkeyPatch, error: type[PenstockError]
) -> None:
    counts = store.kv("counts", value="int64")
    failed = fail_once(monkeypatch, "submit", error, times=2)
    with pytest.raises(error, match="it failed here"):
        counts.merge(b"n", 1, operator="add_i64", durable=True)
    with pytest.raises(error, match="it failed here"), store.batch(token=("p", 1)) as batch:
        batch.kv("counts", value="int64").merge(b"n", 1, operator="add_i64")
    assert len(failed) == 2
    assert count(owner) == 0
    assert not owner.port.is_token_used(("p", 1))
    counts.merge(b"n", 1, operator="add_i64", durable=True)
    assert count(owner) == 1


@pytest.mark.parametrize("error", [*PASSING, Poisoned])
def test_what_may_pass_is_sent_again(
    owner: Store, store: RemoteStore, monkeypatch: pytest.MonkeyPatch, error: type[PenstockError]
) -> None:
    counts = store.kv("counts", value="int64")
    failed = fail_once(monkeypatch, "submit", error, times=3)
    counts.merge(b"n", 1, operator="add_i64", durable=True)
    assert len(failed) == 3
    assert count(owner) == count(store) == 1


def test_a_disk_that_stays_full_refuses_a_write_and_takes_the_delete_behind_it(
    owner: Store, store: RemoteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flusher, "BUSY_S", 0.2)
    rows = store.kv("rows")
    rows.put(b"old", b"", durable=True)
    owner._scheduler.stop_tasks()  # one of them would find that there is room
    owner.port.read_only = DiskFull("only deletes are taken")
    with pytest.raises(DiskFull, match="only deletes"):
        rows.put(b"new", b"", durable=True)
    rows.delete(b"old", durable=True)
    rows.put(b"later", b"")
    with pytest.raises(DiskFull, match="only deletes"):
        store.flush()
    assert list(rows) == list(owner.kv("rows")) == []
    owner.port.read_only = None
    rows.put(b"new", b"", durable=True)
    assert list(rows) == [b"new"]


@pytest.mark.parametrize("error", PASSING)
def test_a_batch_that_found_no_room_is_not_done(
    owner: Store, store: RemoteStore, monkeypatch: pytest.MonkeyPatch, error: type[PenstockError]
) -> None:
    store.kv("counts", value="int64")
    fail_once(monkeypatch, "submit", error)
    with pytest.raises(error), store.batch() as batch:
        batch.kv("counts", value="int64").merge(b"n", 1, operator="add_i64")
    assert count(owner) == 0


@pytest.mark.parametrize(
    ("method", "error"),
    [("wait_applied", error) for error in IN_DOUBT] + [("submit", error) for error in (Poisoned, ValueError, OSError)],
)
def test_what_is_in_doubt_is_sent_again_and_happens_once(
    owner: Store, store: RemoteStore, monkeypatch: pytest.MonkeyPatch, error: type[Exception], method: str
) -> None:
    """The owner fails after it took the write: what it says of that is not believed to be a refusal."""
    counts = store.kv("counts", value="int64")
    failed = fail_once(monkeypatch, method, error, after=True, times=3)
    counts.merge(b"n", 1, operator="add_i64", durable=True)
    with store.batch(token=("p", 1)) as batch:
        batch.kv("counts", value="int64").merge(b"n", 1, operator="add_i64")
    assert len(failed) > 1  # a second sending finds that the first one happened
    assert count(owner) == count(store) == 2


def test_every_error_has_its_place() -> None:
    """The control of the lists above: whoever adds an error says what it means for a write."""
    about_writes = {*CERTAIN, *PASSING, OutcomeUnknown, WaitExpired, Poisoned, PenstockError}
    others = {  # bases, and what neither submitting nor waiting raises
        errors.RetryLater, errors._ShardError, errors.FixTheCall, errors.Reopen, errors.Restore,
        errors.UniqueJobAlreadyPending, errors.GateShut, errors.ProcessLimit, errors.TokenTooOld,
        errors.PositionConflict, errors.Lost,
        errors.StoreLocked, Closed, errors.StreamFailed,
        errors.ArchiveUnavailable, errors.KeyMissing, errors.WrongKey,  # of opening, reading and altering
        errors.ConditionFailed,  # it names a row: test_kv_conditions has it through connect
        errors.CorruptionError, errors.ManifestCorrupted, errors.ManifestNotFound, errors.UnsupportedManifestVersion,
    }  # fmt: skip
    kinds = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, PenstockError)}
    assert kinds == about_writes | others


class Failing:
    """Lets the syncs of the journal fail from now on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
        self.left = times
        whole = OsFile.fdatasync

        def fdatasync(file: OsFile) -> None:
            if self.left and "/journal/" in file.path:
                self.left -= 1
                raise OSError(errno.EIO, "the disk failed")
            whole(file)

        monkeypatch.setattr(OsFile, "fdatasync", fdatasync)


def test_a_write_that_the_owner_writes_at_its_recovery_was_never_told_to_be_refused(
    owner: Store, store: RemoteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = store.kv("counts", value="int64")
    Failing(monkeypatch, 1)
    hurry(store, 1.5)
    error = outcome(lambda: counts.merge(b"n", 1, operator="add_i64", durable=True))
    assert type(error) is OutcomeUnknown  # a program owns it, and has not called recover()
    with connect(owner.path) as other:
        hurry(other, 1.0)
        error = outcome(lambda: other.kv("counts", value="int64").merge(b"n", 1, operator="add_i64", durable=True))
        assert type(error) is OutcomeUnknown
        owner.recover()
        for client in (store, other):
            hurry(client, 30.0)
            client.flush()
    assert count(owner) == 2


def test_a_refusal_that_was_too_quick_would_be_seen(
    owner: Store, store: RemoteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: with the error of a failed owner as a refusal, a write is told to be refused, and happens."""
    counts = store.kv("counts", value="int64")
    Failing(monkeypatch, 1)
    submit = LocalPort.submit

    def refuse(port: LocalPort, *arguments: Any) -> Any:
        try:
            return submit(port, *arguments)
        except Poisoned as error:
            raise PartitionPaused(str(error)) from error

    monkeypatch.setattr(LocalPort, "submit", refuse)
    monkeypatch.setattr(GroupTaker, "_end_earlier_sendings", lambda *_: None)
    with pytest.raises(PartitionPaused):
        counts.merge(b"n", 1, operator="add_i64", durable=True)
    owner.recover()
    assert count(owner) == 1


def test_while_a_sending_is_at_work_its_repetition_is_not_refused(
    owner: Store, store: RemoteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first sending hangs before it is submitted, the second finds the table paused."""
    store.kv("users")
    service, table = service_of(owner), owner.port.table("users")
    assert service is not None
    assert table is not None
    gateway = service.gateway()

    def take(group: wire.SentGroup, *more: wire.SentGroup, again: bool) -> list[wire.Outcome]:
        return wire.unpack(gateway.answer(wire.pack(wire.Write([group, *more], again)), LOCAL), wire.Outcomes).outcomes

    payload = KvKind().encode(Rows.of({b"a": b"1"}))
    group = wire.SentGroup(
        encode_condition(Condition(("p", 1))), True, [wire.SentSection(table.table_id << 16, payload)]
    )
    entered, go_on, submit = threading.Event(), threading.Event(), LocalPort.submit
    first = threading.current_thread()

    def wait(port: LocalPort, *arguments: Any) -> Any:
        if threading.current_thread() is first:
            raise PartitionPaused("for now")
        entered.set()
        assert go_on.wait(30.0)
        return submit(port, *arguments)

    monkeypatch.setattr(LocalPort, "submit", wait)
    results: list[Any] = []
    sending = threading.Thread(target=lambda: results.append(take(group, again=False)))
    sending.start()
    assert entered.wait(30.0)
    with pytest.raises(OutcomeUnknown, match="still running"):
        take(group, again=True)
    go_on.set()
    sending.join(30.0)
    assert results[0] == [wire.Outcome(Verdict.ACCEPTED)]
    assert take(group, again=True) == [wire.Outcome(Verdict.DUPLICATE, happened=True)]
    assert owner.kv("users")[b"a"] == b"1"
    other = wire.SentGroup(encode_condition(Condition(("p", 2))), True, group.sections)
    refused = take(other, other, again=False)  # nobody else has it: it is certain
    assert [outcome.fault is not None for outcome in refused] == [True]
    assert not gateway._taker._at_work


# -- who is told, and of what


def test_a_durable_write_is_told_of_itself_alone(owner: Store, store: RemoteStore) -> None:
    """In one batch: a table that was dropped, and one that was not. Its writer would write a merge a second time."""
    counts, dropped = store.kv("counts", value="int64"), store.kv("dropped")
    owner.drop("dropped")
    dropped.put(b"a", b"1")
    counts.merge(b"n", 1, operator="add_i64", durable=True)
    assert count(owner) == 1
    with pytest.raises(NotFound, match="dropped"):
        counts.merge(b"n", 1, operator="add_i64")  # nobody was told yet: this one is, and is not done
    with pytest.raises(NotFound, match="dropped"):
        dropped.put(b"a", b"1", durable=True)
    assert count(store) == 1


def test_of_a_table_with_both_nobody_knows(owner: Store, store: RemoteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """One batch has two groups of a table, and the owner takes one of them."""
    users = store.kv("users")
    submit, calls = LocalPort.submit, itertools.count()

    def every_second(port: LocalPort, *arguments: Any) -> Any:
        if threading.current_thread().name.startswith("Dummy") and next(calls) % 2:
            raise PartitionPaused("for now")
        return submit(port, *arguments)

    users.put(b"a", b"1")
    users.put_many({b"b": b"1", b"c": b"1"})
    users.delete_range(b"a", b"b")
    monkeypatch.setattr(LocalPort, "submit", every_second)
    with pytest.raises(OutcomeUnknown, match="for now") as caught:
        users.put(b"d", b"1", durable=True)
    assert caught.value.first < caught.value.last
    monkeypatch.undo()
    assert set(users) == {b"a", b"b", b"c", b"d"}  # the range was refused, and b"d" was not


def test_close_tells_what_was_refused(owner: Store) -> None:
    client = connect(owner.path)
    dropped = client.kv("dropped")
    owner.drop("dropped")
    dropped.put(b"a", b"1")
    with pytest.raises(NotFound, match="dropped"):
        client.close()
    client.close()


def test_no_refusal_is_forgotten() -> None:
    refusals = Refusals()
    for epoch in range(1, 3 * REFUSALS_MAX + 1):
        refusals.add(Refusal(2 * epoch, 2 * epoch, {epoch % 7: NotFound(f"{epoch}")}))
    for epoch in range(1, 3 * REFUSALS_MAX + 1):
        with pytest.raises((NotFound, OutcomeUnknown)):
            refusals.raise_for(2 * epoch, epoch % 7)
    refusals.raise_for(2 * epoch + 1, epoch % 7)  # of another batch
    refusals.raise_for(2 * epoch, (epoch + 1) % 7)  # of another table
    assert refusals.unraised  # of the oldest, which are one: whoever asked was told of one table
    with pytest.raises(OutcomeUnknown):
        refusals.raise_unraised()
    refusals.raise_unraised()
    assert not refusals.unraised


def test_a_flush_tells_of_all_before_it() -> None:
    refusals = Refusals()
    refusals.add(Refusal(1, 3, {2: NotFound("early")}))
    refusals.add(Refusal(4, 6, {3: Invalid("late")}))
    refusals.raise_for(5, 2)
    with pytest.raises(Invalid):
        refusals.raise_for(5, None)
    with pytest.raises(NotFound):
        refusals.raise_for(7, None)
    refusals.raise_for(7, None)


# -- tokens


def refuse_one_of_many(owner: Store, store: RemoteStore) -> list[int]:
    """A plain group with a dropped table in it, and 1,500 groups behind it; which rows did not come."""
    healthy, dropped, third = store.kv("kept"), store.kv("dropped"), store.kv("third")
    owner.drop("dropped")
    blocked = threading.Event()  # so that all of it is in one batch
    send, sent = RemoteFlusher._send_message, threading.Event()

    def hold(flushing: RemoteFlusher, *arguments: Any) -> Any:
        sent.set()
        assert blocked.wait(60.0)
        return send(flushing, *arguments)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(RemoteFlusher, "_send_message", hold)
        healthy.put(b"first", b"1")
        assert sent.wait(60.0)
        dropped.put(b"a", b"1")
        third.put(b"a", b"1")
        for n in range(1_500):
            healthy.delete_range(b"x", b"y")  # a group of its own
            healthy.put(b"%04d" % n, b"1")
    blocked.set()
    with pytest.raises((NotFound, OutcomeUnknown)):
        store.flush()
    assert store.kv("third").get(b"a") == b"1"
    rows = dict(healthy.items())
    return [n for n in range(1_500) if b"%04d" % n not in rows]


def test_a_refused_write_takes_no_later_one_with_it(owner: Store, store: RemoteStore) -> None:
    assert refuse_one_of_many(owner, store) == []


def number_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it was: groups get their numbers when they are encoded, and parts of a refused one come after them all."""
    outgoing, own = RemoteFlusher._outgoing, RemoteFlusher._own_condition
    numbered: dict[int, bytes] = {}
    current: list[Any] = []

    def encode(flushing: RemoteFlusher, group: Any) -> Any:
        one = outgoing(flushing, group)
        numbered[id(one)] = own(flushing, one.condition.others)
        current.append(one)  # keeps its id
        return one

    def form(flushing: RemoteFlusher) -> bool:
        message = tuple(flusher._first_message(flushing._queue))
        for one in message:
            condition = numbered.get(id(one)) or own(flushing, ())
            one.sent = wire.SentGroup(condition, one.plain, one.sections)
        flushing._message = message
        return True

    monkeypatch.setattr(RemoteFlusher, "_outgoing", encode)
    monkeypatch.setattr(RemoteFlusher, "_form_message", form)


def test_a_token_that_is_too_old_is_told(owner: Store, store: RemoteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """With numbers out of order writes are lost; then at least somebody is told."""
    number_early(monkeypatch)
    assert refuse_one_of_many(owner, store)
    errors = [error for refusal in store._port._refusals._refusals for error in refusal.errors.values()]
    assert any(type(error) is OutcomeUnknown and "remember" in str(error) for error in errors)


def test_a_verdict_that_nobody_looks_at_would_be_seen(
    owner: Store, store: RemoteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: both as it was, and a thousand rows are gone without a word."""
    number_early(monkeypatch)
    done = RemoteFlusher._done

    def accept(flushing: RemoteFlusher, one: Any, outcome: wire.Outcome, *, again: bool) -> None:
        done(flushing, one, wire.Outcome(Verdict.ACCEPTED), again=again)

    monkeypatch.setattr(RemoteFlusher, "_done", accept)
    assert len(refuse_one_of_many(owner, store)) > 300
    store.flush()


def test_a_group_that_does_not_fit_is_refused_and_the_others_go(
    owner: Store, store: RemoteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flusher, "GROUP_BYTES_MAX", 1_000)
    users = store.kv("users")
    with pytest.raises(Invalid, match="split it"), store.batch() as batch:
        batch.kv("users").put(b"large", bytes(2_000))
    users.put(b"small", b"1", durable=True)
    assert dict(owner.kv("users").items()) == {b"small": b"1"}


def test_a_group_that_cannot_be_encoded(owner: Store, store: RemoteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of ours is told; any other stops the client, and nothing is lost when it recovers."""
    users = store.kv("users")
    whole, fails = KvKind.encode, [NotFound("no"), RuntimeError("a bug")]

    def encode(part: Any) -> bytes:
        if fails and b"bad" in part:
            raise fails.pop(0)
        return whole(part)

    monkeypatch.setattr(KvKind, "encode", staticmethod(encode))
    with pytest.raises(NotFound, match="no"):
        users.put(b"bad", b"1", durable=True)
    with pytest.raises(OutcomeUnknown, match="a bug"):
        users.put(b"bad", b"2", durable=True)
    with pytest.raises(Poisoned):
        users.put(b"more", b"1")
    store.recover()
    assert owner.kv("users")[b"bad"] == b"2"


class BusyWriter:
    """A thread that puts rows until it is refused."""

    def __init__(self, table: Any, prefix: bytes) -> None:
        self.taken: list[bytes] = []
        self.refusal: PenstockError | None = None
        self._table, self._prefix, self._begun = table, prefix, threading.Event()
        self._thread = threading.Thread(target=self._write)
        self._thread.start()
        assert self._begun.wait(20)

    def _write(self) -> None:
        try:
            for row in itertools.count():
                key = b"%s%d" % (self._prefix, row)
                self._table.put(key, b"")
                self.taken.append(key)
                self._begun.set()
        except PenstockError as error:
            self.refusal = error

    def join(self) -> None:
        self._thread.join(20)
        assert not self._thread.is_alive()


def test_what_another_thread_was_told_before_the_end_is_sent(owner: Store) -> None:
    for number in range(10):
        client = connect(owner.path)
        writer = BusyWriter(client.kv("rows"), b"%d/" % number)
        client.close()
        writer.join()
        assert isinstance(writer.refusal, Closed)
        assert {key for key, _ in owner.kv("rows").scan(prefix=b"%d/" % number)} >= set(writer.taken)
