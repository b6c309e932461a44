"""The asyncio form of a store: the same answers, an event loop that never stands still, and safe cancellation."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import penstock
from penstock import aio
from penstock.aio.bridge import THREADS_MAX, WAITING_MAX
from penstock.client.connection import Connection
from penstock.errors import Closed, Invalid, NotFound, WaitExpired
from penstock.partition.ledger_records import TableInfo
from penstock.store.tables import StoreSnapshot
from penstock.store.views import StoreView

Scenario = Callable[[aio.AsyncStore], Coroutine[Any, Any, None]]


@pytest.fixture(params=["open", "connect"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Scenario], None]:
    def in_loop(scenario: Scenario) -> None:
        async def main() -> None:
            opening = aio.open(tmp_path) if request.param == "open" else aio.connect(tmp_path, create=True)
            async with opening as store:
                await asyncio.wait_for(scenario(store), 60)

        asyncio.run(main())

    return in_loop


def test_a_store_is_opened_with_the_same_options() -> None:
    inner = {"fs", "clock", "random", "engine"}  # for tests of ours
    for sync, form in ((penstock.open, aio.open), (penstock.connect, aio.connect)):
        assert set(inspect.signature(sync).parameters) - inner == set(inspect.signature(form).parameters)


def test_a_store_that_was_not_entered_says_what_to_do(tmp_path: Path) -> None:
    opening: Any = aio.open(tmp_path)
    with pytest.raises(AttributeError, match="there is no kv before it is opened: use async with, or await it first"):
        opening.kv("users")


def test_tables(run: Callable[[Scenario], None]) -> None:
    async def scenario(store: aio.AsyncStore) -> None:
        users = await store.kv("users", shards=2)
        await users.put(b"ada", b"1815", durable=True)
        await users.put_many({b"%04d" % n: b"x" for n in range(2_500)})
        assert await users.get(b"ada") == b"1815"
        assert await users.multi_get([b"ada", b"eve"]) == [b"1815", None]
        await users.delete(b"ada")
        assert [key async for key, _ in users.scan()] == [b"%04d" % n for n in range(2_500)]
        assert sum([batch.num_rows async for batch in users.scan_arrow()]) == 2_500
        await store.flush()
        assert await store.tables() == ["users"]
        with pytest.raises(NotFound):
            await store.kv("others", create=False)
        with pytest.raises(Invalid):
            await users.put("ada", b"")  # type: ignore[arg-type]
        await store.drop("users")

    run(scenario)


def test_loads_and_maintenance(run: Callable[[Scenario], None], tmp_path: Path) -> None:
    async def scenario(store: aio.AsyncStore) -> None:
        await store.kv("prices", value="int64")
        rows = pa.table({"key": [b"apple", b"pear"], "value": [120, 90]})
        assert (await store.load("prices", rows, token=("nightly", 1))).rows == 2
        prepared = await store.prepare("prices", rows)
        async with store.batch(token=("nightly", 2)) as batch:
            assert await batch.load("prices", prepared) == 2
        assert (await store.compact("prices")).files_after == 1
        assert (await store.backup(tmp_path.parent / f"{tmp_path.name}-backups", keep=1)).number == 1
        assert (await store.check()).ok
        assert await store.troubles() == []
        await store.recover()

    run(scenario)


def test_a_batch_a_consumer_and_a_snapshot(run: Callable[[Scenario], None]) -> None:
    async def scenario(store: aio.AsyncStore) -> None:
        events, totals = await store.queue("events"), await store.kv("totals", value="int64")
        for _ in range(2):
            async with store.batch(token=("loader", 1)) as batch:
                batch.queue("events").put_many([b"a", b"b", b"c"])
        assert batch.duplicate
        consumer = events.consumer("worker")
        payloads = []
        async for message in consumer:
            async with store.batch() as batch:
                batch.kv("totals", value="int64").merge(message.payload, 1, operator="add_i64")
                await consumer.ack(message, batch=batch)
            payloads.append(message.payload)
            if len(payloads) == 3:
                break
        assert payloads == [b"a", b"b", b"c"]
        assert (await consumer.lag(), await consumer.position()) == (0, {0: 4})
        async with store.snapshot() as snapshot:
            await totals.put(b"a", 100, durable=True)
            assert await snapshot.kv("totals", value="int64").get(b"a") == 1
            assert len(await snapshot.queue("events").read()) == 3

    run(scenario)


NOT_AWAITED = {
    "AsyncStore": {"batch", "snapshot"},
    "AsyncBatch": {"kv", "queue", "series", "vector"},
    "AsyncSnapshot": {"kv", "queue", "series", "vector"},
    "AsyncQueueTable": {"consumer"},
}


@pytest.mark.parametrize("name", [name for name in aio.__all__ if name.startswith("Async")])
def test_what_is_awaited_follows_one_rule(name: str) -> None:
    """Every method is awaited, or iterated, but those that only make an object."""
    methods = {
        method: value
        for base in getattr(aio, name).__mro__
        for method, value in vars(base).items()
        if base.__module__.startswith("penstock.aio") and not method.startswith("_") and not isinstance(value, property)
    }
    plain = {
        method
        for method, value in methods.items()
        if not inspect.iscoroutinefunction(value) and not inspect.isasyncgenfunction(value)
    }
    assert plain == NOT_AWAITED.get(name, set())


def test_what_is_not_awaited_waits_for_nothing(
    run: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs in the thread of the event loop, so no request may be made there."""
    ask, read = Connection.ask_raw, Connection.read

    def checked(act: Any) -> Any:
        def call(*arguments: Any, **more: Any) -> Any:
            assert threading.current_thread() is not threading.main_thread(), "the event loop waits"
            return act(*arguments, **more)

        return call

    monkeypatch.setattr(Connection, "ask_raw", checked(ask))
    monkeypatch.setattr(Connection, "read", checked(read))

    async def scenario(store: aio.AsyncStore) -> None:
        events, users = await store.queue("events", headers=True), await store.kv("users", value="int64")
        await store.series("metrics")
        async with store.batch() as batch:
            counts = batch.kv("users", value="int64")
            counts.merge(b"k", 1, operator="add_i64")
            counts.put(b"l", 2, ttl_s=3600)
            counts.put(b"m", 2, if_absent=True)
            batch.queue("events").put(b"m", headers={"a": "b"})
            batch.series("metrics").write("cpu", 1.0)
            with pytest.raises(NotFound, match="there is no table others: create it before the batch"):
                batch.kv("others")
        consumer = events.consumer("worker")
        (message,) = await consumer.get(1, 30)
        assert message.headers == {"a": b"b"}
        async with store.snapshot() as snapshot:
            assert await snapshot.kv("users", value="int64").get(b"k") == 1
            assert len(await snapshot.queue("events").read()) == 1
            assert await snapshot.series("metrics").label_values("__name__") == ["cpu"]
            with pytest.raises(NotFound):
                snapshot.kv("others")
        assert await users.get(b"l") == 2
        begun = await store.batch()  # without a block
        begun.kv("users", value="int64").merge(b"k", 1, operator="add_i64")
        await begun.commit()
        assert await users.get(b"k") == 2
        with pytest.raises(Invalid, match="async with"):
            store.batch().kv("users")

    run(scenario)


def test_a_batch_that_fails_writes_nothing(run: Callable[[Scenario], None]) -> None:
    async def scenario(store: aio.AsyncStore) -> None:
        users = await store.kv("users")
        with pytest.raises(ZeroDivisionError):
            async with store.batch() as batch:
                batch.kv("users").put(b"ada", b"1")
                raise ZeroDivisionError
        assert await users.get(b"ada") is None

    run(scenario)


def test_the_loop_goes_on_while_calls_wait(run: Callable[[Scenario], None]) -> None:
    """Many consumers wait, more than there are threads, and writes still come through."""

    async def scenario(store: aio.AsyncStore) -> None:
        events, users = await store.queue("events"), await store.kv("users")
        waiting = [asyncio.create_task(events.consumer(f"c{n}").get(1, 30)) for n in range(2 * THREADS_MAX)]
        await asyncio.sleep(0.1)
        await users.put(b"ada", b"1", durable=True)
        assert not any(task.done() for task in waiting)
        await events.put(b"here", durable=True)
        for messages in await asyncio.gather(*waiting):
            assert [message.payload for message in messages] == [b"here"]

    run(scenario)


def test_a_get_among_many_that_wait_ends_by_its_own_deadline(run: Callable[[Scenario], None]) -> None:
    async def scenario(store: aio.AsyncStore) -> None:
        events = await store.queue("events")
        consumer = events.consumer("worker")
        for _ in range(WAITING_MAX):
            await consumer._threads.waiting.acquire()  # as if as many were waiting, and went on
        assert await consumer.get(1, 0.05) == []
        await events.put(b"here", durable=True)
        assert [message.payload for message in await consumer.get(1, 0.05)] == [b"here"]

    run(scenario)


def test_wrong_arguments_are_refused_as_everywhere(run: Callable[[Scenario], None]) -> None:
    async def scenario(store: aio.AsyncStore) -> None:
        await store.kv("users")
        consumer = (await store.queue("events")).consumer("worker")
        for wrong in ("1", None, float("nan"), -1, True):
            with pytest.raises(Invalid):
                await consumer.get(1, wrong)  # type: ignore[arg-type]
        with pytest.raises(Invalid):
            await consumer.get(0, 1)
        with pytest.raises(Invalid, match="batch is what store.batch"):
            await consumer.ack([], batch=5)  # type: ignore[arg-type]

    run(scenario)


def test_a_cancelled_get_loses_no_message(run: Callable[[Scenario], None]) -> None:
    async def scenario(store: aio.AsyncStore) -> None:
        events = await store.queue("events")
        consumer = events.consumer("worker", visibility_timeout_s=3600)
        got: list[bytes] = []
        for number in range(40):
            task = asyncio.create_task(consumer.get(1, 10))
            await asyncio.sleep(0.001 * (number % 5))
            await events.put(b"%d" % number, durable=True)
            task.cancel()
            try:
                messages = await task
            except asyncio.CancelledError:
                continue
            got += [message.payload for message in messages]
            await consumer.ack(messages)
        while messages := await consumer.get(100, 0):
            got += [message.payload for message in messages]
            await consumer.ack(messages)
        assert sorted(got) == sorted(b"%d" % number for number in range(40))

    run(scenario)


def test_a_cancelled_loop_over_messages_loses_none(run: Callable[[Scenario], None]) -> None:
    """`async for`, cancelled at every moment: what it has not handed out comes to the next one."""

    async def scenario(store: aio.AsyncStore) -> None:
        events = await store.queue("events")
        consumer = events.consumer("worker", visibility_timeout_s=3600)
        taken: list[bytes] = []

        async def work() -> None:
            async for message in consumer:
                taken.append(message.payload)
                await consumer.ack(message)

        for number in range(30):
            task = asyncio.create_task(work())
            await asyncio.sleep(0.0007 * (number % 7))
            await events.put(b"%d" % number, durable=True)
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
        rest = [message.payload for message in await consumer.get(100, 0)]
        assert sorted([*taken, *rest]) == sorted(b"%d" % number for number in range(30)), "each once"

    run(scenario)


def test_a_cancelled_write_has_ended(run: Callable[[Scenario], None]) -> None:
    """After the cancellation nothing is under way any more: what is there stays, and nothing comes later."""

    async def scenario(store: aio.AsyncStore) -> None:
        counts = await store.kv("counts", value="int64")
        for number in range(30):
            task = asyncio.create_task(counts.merge(b"n", 1, operator="add_i64", durable=True))
            await asyncio.sleep(0.0005 * (number % 7))
            task.cancel()
            task.cancel()
            await asyncio.wait([task])
            count = await counts.get(b"n", 0)
            await asyncio.sleep(0.002)
            assert await counts.get(b"n", 0) == count

    run(scenario)


def test_a_timeout_around_a_call(run: Callable[[Scenario], None]) -> None:
    async def scenario(store: aio.AsyncStore) -> None:
        consumer = (await store.queue("events")).consumer("worker")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await consumer.get(1, 3600)

    run(scenario)


def test_an_opening_that_is_cancelled_leaves_nobody_in(tmp_path: Path) -> None:
    async def main() -> None:
        for number in range(8):
            task = asyncio.create_task(aio.open(tmp_path)._open())
            await asyncio.sleep(0.004 * number)
            task.cancel()
            try:
                store = await task
            except asyncio.CancelledError:
                continue
            await store.close()

    asyncio.run(main())
    penstock.open(tmp_path).close()


def test_a_task_that_is_cancelled_at_the_end_closes_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cancellation comes before the call that closes has begun: it is made, or the folder would stay locked."""
    closed: list[StoreSnapshot] = []
    close = StoreSnapshot.close

    def counted(snapshot: StoreSnapshot) -> None:
        closed.append(snapshot)
        close(snapshot)

    monkeypatch.setattr(StoreSnapshot, "close", counted)

    async def cancelled_in(opening: Any) -> None:
        async with opening:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()

    async def in_snapshots() -> None:
        async with aio.open(tmp_path) as store:
            for _ in range(20):
                with pytest.raises(asyncio.CancelledError):
                    await asyncio.create_task(cancelled_in(store.snapshot()))

    for _ in range(20):
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(cancelled_in(aio.open(tmp_path)))
        penstock.open(tmp_path, timeout_s=0).close()
    asyncio.run(in_snapshots())
    assert len(closed) == 20


def test_a_scan_that_outlives_its_store_ends_in_silence(tmp_path: Path) -> None:
    async def main() -> list[Any]:
        reported: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
        store = await aio.open(tmp_path)
        numbers = await store.kv("numbers", value="int64")
        await numbers.put_many({b"%d" % number: number for number in range(3)})
        rows = numbers.scan()
        assert await anext(rows) == (b"0", 0)
        await store.close()
        await rows.aclose()  # type: ignore[attr-defined]
        return reported

    assert asyncio.run(main()) == []


def test_many_that_wait_for_others_leave_threads_for_writes(run: Callable[[Scenario], None]) -> None:
    async def scenario(store: aio.AsyncStore) -> None:
        users = await store.kv("users")
        view = await (await store.subscribe()).latest()
        generation = (await store.describe("users")).generation
        waiting = [
            asyncio.create_task(call)
            for _ in range(THREADS_MAX)
            for call in (
                (await store.subscribe()).wait_newer(timeout_s=50),
                store.wait_for(view.lsn + 1, timeout_s=50),
                store.wait_for_change("users", generation, timeout_s=50),
            )
        ]
        await asyncio.sleep(0.1)
        assert not any(task.done() for task in waiting)
        await users.put(b"ada", b"1", durable=True)
        assert await users.get(b"ada") == b"1"
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
        with pytest.raises(WaitExpired, match="wait_for_change: it did not happen within 0.01 s"):
            await store.wait_for_change("users", generation, timeout_s=0.01)
        with pytest.raises(Invalid):
            await store.wait_for(1, timeout_s=float("nan"))
        assert await store.wait_for(view.lsn, timeout_s=0) >= view.lsn

    run(scenario)


def test_a_wait_of_several_steps_is_for_the_same_tables_to_the_end(run: Callable[[Scenario], None]) -> None:
    async def scenario(store: aio.AsyncStore) -> None:
        await store.kv("users")
        requests: list[list[str]] = []

        def wait_for(lsn: int, tables: Sequence[TableInfo], timeout_s: float) -> int:
            requests.append([info.name for info in tables])
            raise WaitExpired("a table is late")

        store._sync._port.wait_for = wait_for  # type: ignore[method-assign]
        with pytest.raises(WaitExpired):
            await store.wait_for(1, tables=iter(["users"]), timeout_s=0.01)
        assert len(requests) > 1
        assert requests == [["users"]] * len(requests)

    run(scenario)


def test_a_view_that_comes_when_its_wait_is_cancelled_is_not_lost(run: Callable[[Scenario], None]) -> None:
    async def scenario(store: aio.AsyncStore) -> None:
        users, views = await store.kv("users"), await store.subscribe()
        begun, comes = threading.Event(), threading.Event()
        wait = views._sync._wait

        def wait_slowly(after: int, timeout_s: float) -> StoreView:
            begun.set()
            assert comes.wait(30)
            return wait(after, timeout_s)

        views._sync._wait = wait_slowly
        waiting = asyncio.create_task(views.wait_newer(timeout_s=50))
        await asyncio.to_thread(begun.wait, 30)
        epoch = await users.put(b"ada", b"1", durable=True)
        waiting.cancel()
        await asyncio.sleep(0)
        comes.set()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert (await views.wait_newer(timeout_s=0.5)).applied_epoch >= epoch

    run(scenario)


def test_a_closed_store(tmp_path: Path) -> None:
    async def main() -> None:
        store = await aio.open(tmp_path)
        users = await store.kv("users")
        await store.close()
        await store.close()
        with pytest.raises(Closed):
            await users.put(b"ada", b"1")
        with pytest.raises(Closed):
            await store.kv("users")

    asyncio.run(main())
    for thread in threading.enumerate():
        if thread.name.startswith("penstock-aio"):
            thread.join(30)
            assert not thread.is_alive()


def test_a_wait_that_is_not_undone_would_be_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The seeded bug: messages of a cancelled `get` are dropped."""
    monkeypatch.setattr(aio.AsyncConsumer, "_give_back", lambda self, messages: None)

    async def main() -> None:
        async with aio.open(tmp_path) as store:
            events = await store.queue("events")
            consumer = events.consumer("worker", visibility_timeout_s=3600)
            lost = 0
            for _ in range(50):
                await events.put(b"m", durable=True)
                task = asyncio.create_task(consumer.get(1, 10))
                while not task.done() and not store.sync.queue("events").consumer("worker").lag:
                    await asyncio.sleep(0)
                await asyncio.sleep(0)
                task.cancel()
                try:
                    await consumer.ack(await task)
                except asyncio.CancelledError:
                    lost += not await consumer.get(1, 0)
                    if lost:
                        return
            raise AssertionError("no message was lost")

    asyncio.run(main())
