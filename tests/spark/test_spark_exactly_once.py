"""Every message counts once: drivers killed and paused, tasks tried again, checkpoints lost, answers lost."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from stream_driver import route_to

import penstock
import penstock.spark
from penstock.client.connection import Connection, GoneError
from penstock.errors import PositionConflict
from penstock.journal.partitions import shard_of
from penstock.partition import ledger
from penstock.partition.ledger_records import Verdict
from penstock.protocol import wire
from penstock.queue.calls import StreamTotals
from penstock.spark.streaming import start_option
from penstock.store.batch import StoreBatch
from penstock.store.store import Store

KEYS = [b"k%d" % number for number in range(17)]
BY_SHARD = [[key for key in KEYS if shard_of(key, 2) == shard] for shard in (0, 1)]
BOTH = pytest.mark.parametrize("tables", ["one", "several"])


class Input:
    """Messages that were put, and what must have become of them."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.events = store.queue("events", shards=2)
        store.queue("copied", shards=2)
        store.kv("totals", value="int64")
        store.kv("latest")
        store.queue("dead")
        store.series("seen", shards=2)
        store.vector("points", dimensions=2, metric="euclidean", shards=2)  # an id for each attempt
        self.put: list[tuple[bytes, bytes]] = []  # key, payload
        self.broken: list[bytes] = []  # payloads that the route `broken` fails on

    def feed(self, count: int, keys: list[bytes] = KEYS, size: int = 0) -> None:
        first = len(self.put)
        rows = [(keys[index % len(keys)], b"%d" % (first + index) + b"." * size) for index in range(count)]
        self.events.put_many([payload for _, payload in rows], keys=[key for key, _ in rows], durable=True)
        self.put += rows

    def totals(self) -> StreamTotals:
        """Return what the owner counted of consumer c."""
        (totals,) = [consumer.stream for consumer in self.events.consumers() if consumer.name == "c"]
        assert totals is not None
        return totals

    def feed_broken(self, count: int) -> None:
        payloads = [b"broken %d" % (len(self.broken) + number) for number in range(count)]
        self.events.put_many(payloads, keys=[KEYS[number % len(KEYS)] for number in range(count)], durable=True)
        self.broken += payloads

    def check(self, tables: str) -> None:
        letters = [message.payload for message in self.store.queue("dead").read()]
        assert Counter(map(penstock.spark.dead_letter_payload, letters)) == Counter(self.broken)
        for letter in map(json.loads, letters):
            assert letter["reason"].partition(" SQLSTATE")[0] == f"[USER_RAISED_EXCEPTION] refused: {letter['payload']}"
        copied = self.store.queue("copied").to_arrow()
        assert Counter(copied["payload"].to_pylist()) == Counter(payload for _, payload in self.put)
        assert dict(zip(copied["payload"].to_pylist(), copied["key"].to_pylist(), strict=True)) == {
            payload: key for key, payload in self.put
        }
        if tables != "one":
            assert dict(self.store.kv("totals").scan()) == Counter(key for key, _ in self.put)
            assert dict(self.store.kv("latest").scan()) == dict(self.put)
            messages = self.events.to_arrow().select(["shard", "sequence", "payload"]).to_pylist()
            for shard in (0, 1):
                samples = self.store.series("seen").select(f'seen{{shard="{shard}"}}')
                good = [one for one in messages if one["shard"] == shard and one["payload"] not in self.broken]
                assert sorted(samples["value"].to_pylist()) == sorted(one["sequence"] for one in good)
            points = self.store.vector("points").to_arrow().to_pylist()
            positions = [(round(x), round(y)) for x, y in (row["vector"] for row in points)]
            attributes = [json.loads(row["attributes"]) for row in points]
            assert [(attribute["shard"], attribute["sequence"]) for attribute in attributes] == positions
            assert sorted(positions) == sorted(
                (one["shard"], one["sequence"]) for one in messages if one["payload"] not in self.broken
            )
        assert self.events.consumer("c").lag == 0


@pytest.fixture
def inputs(store: Store) -> Input:
    return Input(store)


@dataclass(frozen=True)
class Stream:
    """A stream of a driver: its store, and where it holds still."""

    point: str
    tables: str
    inputs: Input
    checkpoint: Path


@pytest.fixture
def stream(tmp_path: Path) -> Iterator[Callable[[str, str], Stream]]:
    """Make a stream with a store of its own."""
    with ExitStack() as stores:

        def make(point: str, tables: str) -> Stream:
            store = stores.enter_context(penstock.open(tmp_path / f"{point}-{tables}"))
            return Stream(point, tables, Input(store), tmp_path / f"checkpoint-{point}-{tables}")

        yield make


def run(spark: Any, folder: str, checkpoint: Path, tables: str, **more: Any) -> penstock.spark.StreamProgress:
    """Run a stream over all that is there."""
    options = {"source": "events", "consumer": "c", "batch": route_to(tables), "available_now": True, **more}
    if tables == "broken":
        options["dead_letter"] = "dead"
    query = penstock.spark.stream(spark, folder, checkpoint=str(checkpoint), **options)
    return penstock.spark.wait(query, 250)


# -- checkpoints


@BOTH
def test_checkpoints_lost_and_restored(spark: Any, folder: str, inputs: Input, tmp_path: Path, tables: str) -> None:
    checkpoint, old = tmp_path / "checkpoint", tmp_path / "old"
    inputs.feed(500)
    progress = run(spark, folder, checkpoint, tables)
    assert (progress.rows_in, progress.lag, progress.skipped) == (500, 0, 0)
    inputs.check(tables)
    shutil.copytree(checkpoint, old)
    inputs.feed(300, BY_SHARD[0])
    run(spark, folder, checkpoint, tables)
    shutil.rmtree(checkpoint)
    inputs.feed(200)
    run(spark, folder, checkpoint, tables)
    inputs.check(tables)
    shutil.rmtree(checkpoint)
    shutil.copytree(old, checkpoint)  # it is behind by 400 messages in shard 0, and by 100 in shard 1
    inputs.feed(100, BY_SHARD[1])
    progress = run(spark, folder, checkpoint, tables, max_rows=150)
    assert progress.rows_in == 100
    assert progress.skipped > 0
    counted = inputs.totals()
    assert (counted.rows_in, counted.duplicates) == (1_100, progress.skipped)
    inputs.check(tables)
    assert run(spark, folder, checkpoint, tables).rows_in == 0
    inputs.check(tables)


def test_a_checkpoint_that_is_ahead(spark: Any, folder: str, inputs: Input, tmp_path: Path) -> None:
    """As after a store was restored from a copy: nothing is passed over in silence."""
    inputs.feed(50)
    run(spark, folder, tmp_path / "checkpoint", "one")
    inputs.events.consumer("c").forget()
    inputs.feed(50)
    with pytest.raises(PositionConflict, match="the checkpoint is ahead of consumer c"):
        run(spark, folder, tmp_path / "checkpoint", "one")


@BOTH
def test_without_the_condition_messages_count_twice(
    spark: Any, folder: str, inputs: Input, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tables: str
) -> None:
    """The negative control: these tests would see it."""
    monkeypatch.setattr(StoreBatch, "require", lambda *_: None)
    inputs.feed(100)
    run(spark, folder, tmp_path / "first", tables)
    run(spark, folder, tmp_path / "second", tables)
    assert inputs.store.queue("copied").statistics().messages == 200
    with pytest.raises(AssertionError):
        inputs.check(tables)


# -- tasks and answers


@BOTH
def test_tasks_that_are_tried_again(spark: Any, folder: str, inputs: Input, tmp_path: Path, tables: str) -> None:
    inputs.feed(4_000, size=1_000)  # so much that tasks write files
    failed = tmp_path / "failed"

    def fail_once(batches: Iterator[Any]) -> Iterator[Any]:
        from pyspark import TaskContext

        context = TaskContext.get()
        yield from batches
        if context is not None and context.partitionId() == 0 and context.attemptNumber() == 0:
            failed.touch()
            raise ValueError("this attempt fails after its rows")

    def route(frame: Any) -> dict[str, Any]:
        return route_to(tables)(frame.mapInArrow(fail_once, frame.schema))

    run(spark, folder, tmp_path / "checkpoint", tables, batch=route)
    assert failed.exists()
    inputs.check(tables)


@contextmanager
def lost_answer(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[wire.Write]]:
    """The connection is cut after the first write was sent and done."""
    send, lost = Connection.send_once, list[wire.Write]()

    def cut(self: Connection, request: Any, *more: Any, **others: Any) -> bytes:
        answer = send(self, request, *more, **others)
        if isinstance(request, wire.Write) and not lost:
            lost.append(request)
            raise GoneError("cut by the test", untouched=False)
        return answer

    with monkeypatch.context() as patched:
        patched.setattr(Connection, "send_once", cut)
        yield lost
    assert lost


@BOTH
@pytest.mark.parametrize("size", [0, 1_000])
def test_an_answer_that_is_lost(
    spark: Any, folder: str, inputs: Input, monkeypatch: pytest.MonkeyPatch, tables: str, size: int
) -> None:
    """The commit is sent again with the same files: it happened once, and says so."""
    inputs.feed(4_000, size=size)
    offsets = [inputs.events.offsets(start) for start in ("earliest", "latest")]
    read = spark.read.format("penstock").option("table", "events").option("splits", "2").load(folder)
    with lost_answer(monkeypatch) as lost:
        done = penstock.spark.commit(
            folder, route_to(tables)(read), consumer="c", source="events", start=offsets[0], end=offsets[1]
        )
    assert any(section.files for section in lost[0].groups[0].sections) == (size > 0)
    assert not done.duplicate
    assert done.rows["copied"] == 4_000
    inputs.check(tables)
    again = penstock.spark.commit(
        folder, route_to(tables)(read), consumer="c", source="events", start=offsets[0], end=offsets[1]
    )
    assert again.duplicate
    inputs.check(tables)
    counted = inputs.totals()  # what the connection sent again is the same commit, and no duplicate
    assert (counted.batches, counted.rows_in, counted.duplicates) == (1, 4_000, 1)
    assert counted.rows_out + counted.dead == sum(done.rows.values())


def test_commits_by_hand(spark: Any, folder: str, inputs: Input) -> None:
    """By position and by token: once, or not at all."""
    inputs.feed(100)
    read = spark.read.format("penstock").option("table", "events").load(folder)
    start, end = (inputs.events.offsets(name) for name in ("earliest", "latest"))
    half = {shard: (start[shard] + end[shard]) // 2 for shard in start}
    moves: dict[str, Any] = {"consumer": "c", "source": "events"}
    rows = {"copied": read.where("false").select("payload")}
    assert not penstock.spark.commit(folder, rows, **moves, start=start, end=half).duplicate
    with pytest.raises(PositionConflict, match="is not at the start of this batch"):
        penstock.spark.commit(folder, route_to("several")(read), **moves, start=start, end=end)
    assert inputs.store.queue("copied").statistics().messages == 0
    tables = {"copied": spark.sql("select X'61' payload")}
    duplicates = [
        penstock.spark.commit(folder, tables, token=("loader", number)).duplicate for number in (1, 2, 1, 2, 3)
    ]
    assert duplicates == [False, False, True, True, False]
    assert inputs.store.queue("copied").statistics().messages == 3
    assert penstock.spark.commit(folder, tables, token=("loader", 3)).rows == {}


@pytest.mark.parametrize(
    ("given_start", "given_end", "message"),
    [
        (None, None, "with a consumer, say source="),
        (0, 10, "sequences by shard, as in {0: 1, 1: 1}, not 0"),
        ({"0": 1}, {"0": 2}, "sequences by shard"),
        ({0: 1}, {1: 1}, "has the shards [0, 1]: name the same of them"),
        ({7: 1}, {7: 2}, "has the shards [0, 1]"),
        ({0: 0}, {0: 2}, "a batch of it cannot be [0, 2)"),
        ({0: 3}, {0: 2}, "a batch of it cannot be [3, 2)"),
        ({0: 1}, {0: 999}, "a batch of it cannot be [1, 999)"),  # what comes later would be passed over
    ],
)
def test_a_commit_from_and_to_nowhere(
    folder: str, inputs: Input, given_start: Any, given_end: Any, message: str
) -> None:
    inputs.feed(20)
    with pytest.raises(penstock.errors.Invalid, match=re.escape(message)):
        penstock.spark.commit(folder, {}, consumer="c", source="events", start=given_start, end=given_end)
    assert inputs.events.consumer("c").lag == 20


def test_tables_that_are_none(folder: str, inputs: Input) -> None:
    with pytest.raises(penstock.errors.Invalid, match="give DataFrames by table"):
        penstock.spark.commit(folder, [inputs], token=("a", 1))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"dead_letter": "events"}, "dead_letter is events, the source"),
        ({"batch": "route"}, "batch is 'route': give a function"),
        ({"max_rows": 0}, "option max_rows is '0'"),
    ],
)
def test_streams_that_cannot_be(
    spark: Any, folder: str, inputs: Input, tmp_path: Path, more: dict[str, Any], message: str
) -> None:
    with pytest.raises(penstock.errors.Invalid, match=message):
        run(spark, folder, tmp_path / "checkpoint", "one", **more)


# -- Spark's own sink


def copied_again(spark: Any, folder: str, inputs: Input, checkpoint: Path) -> Counter[bytes]:
    """What the sink has written when Spark was made to forget that it wrote the last batch."""

    def copy() -> None:
        reader = spark.readStream.format("penstock").option("table", "events").option("maxRows", "40")
        writer = reader.load(folder).select("key", "payload").writeStream.format("penstock").option("table", "copied")
        writer = writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True)
        writer.start(folder).awaitTermination()

    inputs.feed(100)
    copy()
    assert inputs.store.queue("copied").statistics().messages == 100
    last = max(
        (path for path in (checkpoint / "commits").iterdir() if path.name.isdigit()), key=lambda path: int(path.name)
    )
    last.unlink()
    (last.parent / f".{last.name}.crc").unlink()
    copy()
    inputs.feed(10)
    copy()
    return Counter(inputs.store.queue("copied").to_arrow()["payload"].to_pylist())


def test_the_sink_writes_a_batch_once(spark: Any, folder: str, inputs: Input, tmp_path: Path) -> None:
    """By the query's id and the batch's number."""
    assert copied_again(spark, folder, inputs, tmp_path / "c") == Counter(payload for _, payload in inputs.put)


def test_without_tokens_the_sink_writes_a_batch_twice(
    spark: Any, folder: str, inputs: Input, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control of the test above."""
    monkeypatch.setattr(ledger._LedgerChanges, "_use_token", lambda *_: Verdict.ACCEPTED)
    assert copied_again(spark, folder, inputs, tmp_path / "c") > Counter(payload for _, payload in inputs.put)


# -- drivers


class Driver:
    """A driver in a process group of its own, with some streams."""

    def __init__(self, tmp_path: Path, streams: list[Stream]) -> None:
        script = str(Path(__file__).with_name("stream_driver.py"))
        self._marks, self._streams = tmp_path / "marks", len(streams)
        self._marks.mkdir()
        stream_arguments = [[one.point, one.tables, one.inputs.store.path, str(one.checkpoint)] for one in streams]
        with (tmp_path / "stderr").open("w") as logged:
            self.process = subprocess.Popen(
                [sys.executable, script, str(self._marks), *chain(*stream_arguments)],
                stdout=subprocess.PIPE,
                stderr=logged,
                start_new_session=True,
                text=True,
            )

    def wait_until_still(self) -> None:
        deadline_s = time.monotonic() + 240
        while len(list(self._marks.iterdir())) < self._streams:
            assert self.process.poll() is None, "the driver ended by itself"
            assert time.monotonic() < deadline_s, "the driver did not come to its point"
            time.sleep(0.05)

    def signal(self, number: signal.Signals) -> None:
        os.killpg(self.process.pid, number)

    def let_go(self) -> None:
        self._marks.rename(self._marks.with_name("gone"))

    def end(self) -> list[str]:
        """What each stream said at its end."""
        output, _ = self.process.communicate(timeout=240)
        return list(json.loads(output.splitlines()[-1])["errors"])

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.signal(signal.SIGKILL)
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


def go_on(spark: Any, streams: list[Stream]) -> None:
    for one in streams:
        one.inputs.feed(100)
        one.inputs.feed_broken(1 if one.tables == "broken" else 0)
        run(spark, one.inputs.store.path, one.checkpoint, one.tables)
        one.inputs.check(one.tables)


@pytest.mark.parametrize(
    ("points", "checkpoint"),
    [
        (("writing", "committed"), "kept"),
        pytest.param(("staged",), "kept", marks=pytest.mark.campaign),
        pytest.param(("writing", "staged", "committed"), "deleted", marks=pytest.mark.campaign),
    ],
)
def test_a_driver_that_is_killed(
    spark: Any, stream: Callable[[str, str], Stream], tmp_path: Path, points: tuple[str, ...], checkpoint: str
) -> None:
    """With streams at every point: a driver takes longer to start than its streams."""
    streams = [stream(point, tables) for point in points for tables in ("one", "broken")]
    streams.append(stream("searched", "broken"))
    for one in streams:
        one.inputs.feed(4_000, size=1_000)  # so much that tasks write files
        if one.tables == "broken" and one.point != "writing":  # where the batch would fail before it writes
            one.inputs.feed_broken(3)
    with Driver(tmp_path, streams) as driver:
        driver.wait_until_still()
        for one in streams:
            before = one.inputs.store.queue("copied").statistics().messages
            assert before == (4_000 if one.point == "committed" else 0)
        driver.signal(signal.SIGKILL)
    if checkpoint == "deleted":
        for one in streams:
            shutil.rmtree(one.checkpoint)
    go_on(spark, streams)


def test_a_driver_that_wakes_beside_its_successor(
    spark: Any, stream: Callable[[str, str], Stream], tmp_path: Path
) -> None:
    """Of two streams, one has a checkpoint of its own, and one that of the driver in the other process."""
    streams = [stream("staged", "one"), stream("staged", "broken")]
    successors = [replace(streams[0], checkpoint=tmp_path / "other"), streams[1]]
    for one in streams:
        one.inputs.feed(1_000)
        one.inputs.feed_broken(2 if one.tables == "broken" else 0)
    with Driver(tmp_path, streams) as driver:
        driver.wait_until_still()
        driver.signal(signal.SIGSTOP)
        for one in successors:
            run(spark, one.inputs.store.path, one.checkpoint, one.tables, max_rows=600)
            one.inputs.check(one.tables)
        driver.let_go()
        driver.signal(signal.SIGCONT)
        for one in streams:
            one.inputs.feed(100)  # which the one that woke up would like to have
        assert [error.partition(" is")[0] for error in driver.end()] == ["PositionConflict: consumer c"] * 2
        for one in successors:
            run(spark, one.inputs.store.path, one.checkpoint, one.tables)
            one.inputs.check(one.tables)


@pytest.mark.campaign
def test_a_jvm_that_is_killed_is_one_line(spark: Any, stream: Callable[[str, str], Stream], tmp_path: Path) -> None:
    only = [stream("staged", "one")]
    only[0].inputs.feed(100)
    with Driver(tmp_path, only) as driver:
        driver.wait_until_still()
        for status in Path("/proc").glob("[0-9]*/stat"):
            name, _, fields = status.read_text().rpartition(")")
            if name.endswith("(java") and int(fields.split()[1]) == driver.process.pid:
                os.kill(int(status.parent.name), signal.SIGKILL)
        time.sleep(1)
        driver.let_go()
        (error,) = driver.end()
    assert error.startswith("StreamFailed: Spark's JVM has ended"), error
    assert "restart this program" in error
    assert "\n" not in error
    logged = (tmp_path / "stderr").read_text()
    assert "py4j" not in logged, logged
    assert "Traceback" not in logged, logged
    go_on(spark, only)


def test_offsets_as_an_option() -> None:
    assert json.loads(start_option({0: 1, 1: 5})) == {"0": 1, "1": 5}
