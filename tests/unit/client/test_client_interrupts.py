"""An interrupt at any point of the client leaves it usable: nothing is lost, nothing doubled, nobody locked out."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import interrupts
import pytest
from owner_processes import outcome

import penstock
from penstock.client.connect import connect
from penstock.client.flusher import RemoteFlusher
from penstock.client.store import RemoteStore
from penstock.errors import Closed, OutcomeUnknown, PenstockError
from penstock.host.os_files import OsFileSystem
from penstock.store.store import Store

# An interrupt may hit a finalizer, which can tell nobody, or leave a socket to the next finalizer.
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
POINTS_MAX = 3_000


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Store]:
    with penstock.open(tmp_path / "store") as store:
        yield store


@pytest.fixture
def store(owner: Store) -> Iterator[RemoteStore]:
    with connect(owner.path) as client:
        client.kv("counts", value="int64")
        client.kv("users").put_many({b"%d" % n: b"1" for n in range(50)}, durable=True)
        yield client


ROOT = f"{Path(penstock.__file__).parent}/"
REQUEST = {"client/port.py", "client/connection.py", "protocol/wire/codec.py"}  # what every request passes through
WRITE = {"client/port.py", "coordinator/coordinator.py", "coordinator/background.py", "coordinator/waiting.py"}


@pytest.fixture(autouse=True)
def _in_clients_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """In what a client consists of: the owner is in the same process, but does its work in other threads."""
    monkeypatch.setattr(interrupts, "_CODE", tuple(f"{ROOT}{name}/" for name in ("client", "protocol", "coordinator")))


def at_every_point(
    act: Callable[[int], Any], after: Callable[[int, bool, str], None], before: Callable[[], None] = lambda: None
) -> set[str]:
    """Do something again and again, interrupted at a later point each time, until it is not; in which modules it was.

    Each test names the modules it means to reach: a number of points would not say what is still covered when the code
    gets shorter.
    """
    modules: set[str] = set()
    ended = 0
    for number in range(POINTS_MAX):
        done: list[int] = []
        before()
        points = interrupts.interrupted_at(number + 1, lambda: done.append(act(number)))  # noqa: B023
        after(number, bool(done), interrupts.where[-1] if interrupts.where else "")
        if points <= number:
            assert done
            ended += 1  # by chance one run may be short: the client's other thread was quicker
            if ended == 3:
                return modules
            continue
        modules.add(interrupts.where[-1].removeprefix(ROOT).partition(":")[0])
    raise AssertionError("it has no end")


class Model:
    """What a counter may be: what was acknowledged, and what was attempted."""

    def __init__(self, store: RemoteStore, owner: Store) -> None:
        self._counts = store.kv("counts", value="int64")
        self._owner = owner
        self.sure = self.tried = 0

    def merge(self, *_: int) -> None:
        self.tried += 1
        self._counts.merge(b"n", 1, operator="add_i64", durable=True)
        self.sure += 1

    def check(self, where: str) -> None:
        """The client works, and the counter is what it may be; nothing is left to come."""
        assert outcome(self.merge) is None, where
        count = self._counts[b"n"]
        assert self.sure <= count <= self.tried, where
        assert self._owner.kv("counts", value="int64").get(b"n") == count, where
        self.sure = self.tried = count


def test_a_durable_write(store: RemoteStore, owner: Store) -> None:
    model = Model(store, owner)
    assert at_every_point(model.merge, lambda _, __, where: model.check(where)) >= WRITE


def test_a_batch_with_a_token(store: RemoteStore, owner: Store) -> None:
    numbers = itertools.count()

    def write(_: int) -> None:
        with store.batch(token=("p", next(numbers))) as batch:
            batch.kv("counts", value="int64").merge(b"batched", 1, operator="add_i64")

    def again(number: int, done: bool, where: str) -> None:
        with store.batch(token=("p", number)) as batch:  # as one who was interrupted does
            batch.kv("counts", value="int64").merge(b"batched", 1, operator="add_i64")
        assert batch.duplicate or not done
        assert store.kv("counts", value="int64")[b"batched"] == number + 1, where

    assert at_every_point(write, again) >= WRITE  # naming a table in a batch is no request


def test_a_batch_is_whole_or_not_there(store: RemoteStore, owner: Store) -> None:
    """One that is refused must not be taken for plain writes, which are taken apart."""
    store.kv("dropped")

    def write(number: int) -> None:
        batch = store.batch()
        batch.kv("users").put(b"b%d" % number, b"1")
        batch.kv("dropped").put(b"a", b"1")
        outcome(lambda: owner.drop("dropped"))  # in another thread, which is not interrupted
        try:
            batch.commit()
        except PenstockError:
            return

    def check(number: int, _: bool, where: str) -> None:
        while True:
            try:
                owner.kv("dropped")  # a client may believe for a second that it is there
                store.flush()
                break
            except PenstockError as error:  # what nobody was told of
                assert "dropped" in str(error), where
        assert store.kv("users").get(b"b%d" % number) is None, where

    # The request may be on its way already when the caller begins to wait: the background is not always asked.
    assert at_every_point(write, check) >= {"client/port.py", "coordinator/coordinator.py"}


def test_plain_writes_and_a_flush(store: RemoteStore, owner: Store) -> None:
    model = Model(store, owner)
    counts = store.kv("counts", value="int64")

    def write(_: int) -> None:
        model.tried += 1
        counts.merge(b"n", 1, operator="add_i64")
        store.flush()
        model.sure += 1

    assert at_every_point(write, lambda _, __, where: model.check(where)) >= WRITE


def test_a_message(store: RemoteStore, owner: Store) -> None:
    """An interrupted put may leave an empty section, which the owner would refuse."""
    queue = store.queue("interrupted", headers=True)

    def check(number: int, done: bool, where: str) -> None:
        outcome(store.flush)
        assert len(queue.read()) <= number + 1, where

    assert at_every_point(lambda _: queue.put(b"x", headers={"a": "1"}), check)


READS: dict[str, Callable[[RemoteStore], Any]] = {
    "get": lambda store: store.kv("users").get(b"1"),
    "scan": lambda store: len(list(store.kv("users").scan())),
    "part of a scan": lambda store: next(store.kv("users").scan()),
    "snapshot": lambda store: store.snapshot().close(),
    "tables": lambda store: store.tables(),
}


@pytest.mark.parametrize("name", READS)
def test_reads(store: RemoteStore, owner: Store, name: str) -> None:
    model = Model(store, owner)
    assert at_every_point(lambda _: READS[name](store), lambda _, __, where: model.check(where)) >= REQUEST


def test_a_line_that_must_be_found_again(store: RemoteStore, owner: Store) -> None:
    model = Model(store, owner)

    def read(_: int) -> None:
        store._connection._line = None
        store.kv("users").get(b"1")

    def check(_: int, __: bool, where: str) -> None:
        OsFileSystem().lock(f"{owner.path}/OPENING").release()
        model.check(where)

    assert at_every_point(read, check) >= REQUEST | {"client/connect.py", "protocol/locator.py"}


def test_connecting_and_closing(owner: Store) -> None:
    owner.kv("counts", value="int64")
    sure = tried = 0
    clients: list[RemoteStore] = []

    def use(_: int) -> None:
        nonlocal sure, tried
        client = connect(owner.path)
        clients.append(client)
        counts = client.kv("counts", value="int64")
        tried += 1
        counts.merge(b"n", 1, operator="add_i64")
        client.close()
        sure += 1

    def check(_: int, __: bool, where: str) -> None:
        nonlocal sure, tried
        OsFileSystem().lock(f"{owner.path}/OPENING").release()
        for client in clients:
            client.close()  # a second time, or the first that is not interrupted
        clients.clear()
        count = owner.kv("counts", value="int64").get(b"n", 0)
        assert sure <= count <= tried, where
        sure = tried = count

    modules = {"client/connect.py", "client/store.py", "client/flusher.py", "protocol/locator.py", "protocol/folder.py"}
    assert at_every_point(use, check) >= REQUEST | WRITE | modules
    assert sure > 0


def recover_at_every_point(owner: Store, store: RemoteStore) -> set[str]:
    """`recover` sends in its caller's thread, the only one that does."""
    counts, users, tried = store.kv("counts", value="int64"), store.kv("users"), 0

    def fail(*_: Any) -> None:
        raise Closed("for now")

    def write() -> None:
        nonlocal tried
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(RemoteFlusher, "_send_message", fail)
            for _ in range(3):
                counts.merge(b"n", 1, operator="add_i64")
                users.delete_range(b"x", b"y")
            tried += 3
            assert isinstance(outcome(store.flush), OutcomeUnknown)

    def check(_: int, __: bool, where: str) -> None:
        store.recover()
        assert not isinstance(outcome(store.flush), Exception), where
        assert counts.get(b"n") == tried == owner.kv("counts", value="int64").get(b"n"), where

    return at_every_point(lambda _: store.recover(), check, write)


def test_recovery(owner: Store, store: RemoteStore) -> None:
    modules = {"client/flusher.py", "client/connection.py", "coordinator/coordinator.py", "coordinator/executor.py"}
    assert recover_at_every_point(owner, store) >= modules


def test_a_message_that_is_forgotten_would_be_seen(
    owner: Store, store: RemoteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: what was sent and not answered gets new numbers, and happens twice."""
    send = RemoteFlusher._send_message

    def forget(flusher: RemoteFlusher, answer_s: float) -> PenstockError | None:
        flusher._message = ()
        return send(flusher, answer_s)

    monkeypatch.setattr(RemoteFlusher, "_send_message", forget)
    with pytest.raises(AssertionError):
        recover_at_every_point(owner, store)


def test_changes_a_barrier_and_a_subscription(store: RemoteStore, owner: Store) -> None:
    """None of them writes: the next one has all that there is, in order, and the owner keeps nothing open for them."""
    fed, views = store.kv("fed", changes=True), store.subscribe()
    fed.put_many({b"%d" % n: b"1" for n in range(20)}, durable=True)

    def read(number: int) -> None:
        assert fed.changes().to_arrow().num_rows >= 20
        store.wait_for(views.wait_newer(timeout_s=10).lsn, tables=["fed"])

    def check(number: int, _: bool, where: str) -> None:
        fed.put(b"n", b"again", durable=True)
        changes = fed.changes().to_arrow()
        assert changes["_change_type"].to_pylist() == ["insert"] * 21 + ["update_postimage"] * number, where
        assert changes["value"].to_pylist()[-1] == b"again", where
        lsn = changes["_commit_version"].to_pylist()[-1]
        assert store.wait_for(lsn, tables=["fed"]) >= lsn, where
        assert store.subscribe().latest().lsn >= lsn, where
        assert fed.changes(after=lsn).to_arrow().num_rows == 0, where

    assert at_every_point(read, check) >= REQUEST | {"client/reading.py"}


def test_two_threads_one_of_them_interrupted(store: RemoteStore, owner: Store) -> None:
    model, stop, problems, done = Model(store, owner), threading.Event(), list[Exception](), 0

    def work() -> None:
        nonlocal done
        users = store.kv("users")
        try:
            while not stop.is_set():
                users.put(b"other%d" % done, b"1", durable=True)
                done += 1
        except Exception as error:
            problems.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert at_every_point(model.merge, lambda _, __, where: model.check(where)) >= WRITE
    finally:
        stop.set()
        thread.join()
    assert problems == []
    assert all(owner.kv("users").get(b"other%d" % n) == b"1" for n in range(done))
