"""What queues of a store promise across crashes, as scenarios for `penstock.testing.explore`.

The history holds events in the order in which they were tried, each with its number: `create` and `drop` (queue),
`put` (queue, shard, payloads, token), `trim` (queue, shard, before), `ack` (queue, consumer, messages, result); `told`
(number) when the world heard that all up to this event is durable, and `never` (number) for one that did not happen. So
the state found after a crash must be the one that some number of events leads to, in every queue: the same messages
under the same sequences, the same of them acknowledged, and each result once.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from queue_model import build, contents, machine_of, open_queues, staged_table
from scenario_user import ScenarioUser
from store_model import START_US

from penstock import ChangeOptions
from penstock.errors import LeaseLost, PenstockError
from penstock.feeds import maintain_feeds
from penstock.journal.partitions import shard_of
from penstock.queue.positions import decode_row, parse_row_key, rows_of
from penstock.queue.qmft import data_files
from penstock.store.store import Store
from penstock.testing import FakeClock, History, SimulatedDisk, Violation

SHARDS = {"a": 2, "b": 1}
KEYS = [next(b"%d" % n for n in range(99) if shard_of(b"%d" % n, 2) == shard) for shard in range(2)]
Position = tuple[int, int]  # shard, sequence


@dataclass
class Queues:
    """What queues hold, worked out one event after the other."""

    messages: dict[str, list[list[bytes]]] = field(default_factory=dict)  # by queue and shard, from sequence 1
    floors: dict[str, list[int]] = field(default_factory=dict)
    done: dict[tuple[str, str], set[Position]] = field(default_factory=dict)  # acknowledged, by queue and consumer
    results: dict[bytes, bytes] = field(default_factory=dict)
    tokens: set[tuple[str, int]] = field(default_factory=set)

    def copy(self) -> Queues:
        return Queues(
            {queue: [list(shard) for shard in shards] for queue, shards in self.messages.items()},
            {queue: list(floors) for queue, floors in self.floors.items()},
            {consumer: set(positions) for consumer, positions in self.done.items()},
            dict(self.results),
            set(self.tokens),
        )

    def play(self, word: str, *values: Any) -> None:
        getattr(self, "_" + word)(*values)

    def _create(self, queue: str) -> None:
        self.messages.setdefault(queue, [[] for _ in range(SHARDS[queue])])
        self.floors.setdefault(queue, [1] * SHARDS[queue])

    def _drop(self, queue: str) -> None:
        self.messages.pop(queue, None)
        self.floors.pop(queue, None)
        self.done = {key: positions for key, positions in self.done.items() if key[0] != queue}

    def _put(self, queue: str, shard: int, payloads: Sequence[bytes], token: tuple[str, int] | None) -> None:
        if token is None or token not in self.tokens:
            self.tokens |= set() if token is None else {token}
            self.messages[queue][shard] += payloads

    def _trim(self, queue: str, shard: int, before: int) -> None:
        following = len(self.messages[queue][shard]) + 1
        self.floors[queue][shard] = max(self.floors[queue][shard], min(before, following))

    def _ack(self, queue: str, consumer: str, positions: Sequence[Position], result: bytes) -> None:
        done = self.done.setdefault((queue, consumer), set())
        if not done & set(positions):
            done |= set(positions)
            self.results[result] = self.results.get(result, b"") + b"x"

    def live(self, queue: str) -> list[dict[int, bytes]]:
        return [
            {n: payload for n, payload in enumerate(shard, 1) if n >= floor}
            for shard, floor in zip(self.messages[queue], self.floors[queue], strict=True)
        ]

    def observation(self) -> dict[str, Any]:
        """As `observe` sees it."""
        observation: dict[str, Any] = {"results": self.results}
        for queue in sorted(self.messages):
            live = self.live(queue)
            nexts = [len(shard) + 1 for shard in self.messages[queue]]
            done = {
                consumer: sorted(position for position in positions if position[1] in live[position[0]])
                for (name, consumer), positions in self.done.items()
                if name == queue
            }
            observation[queue] = live, list(zip(self.floors[queue], nexts, strict=True)), _some(done)
        return observation


def _some(done: dict[str, list[Position]]) -> dict[str, list[Position]]:
    return {consumer: positions for consumer, positions in done.items() if positions}


def observe(store: Store) -> dict[str, Any]:
    """Everything that a user of queues can see."""
    observation: dict[str, Any] = {"results": dict(store.kv("results").scan())}
    for queue in sorted(set(store.tables()) - {"results"}):
        table = store.queue(queue)
        live = contents(table)
        done: dict[str, list[Position]] = {}
        info = store._ledger.table(queue)
        assert info is not None
        for key, row in store._port.ledger_rows(rows_of(info.table_id)):
            shard, consumer = parse_row_key(info.table_id, key)
            consumer_row = decode_row(row)
            flags = consumer_row.flags()
            done.setdefault(consumer, []).extend(
                (shard, n) for n in live[shard] if n < consumer_row.floor or flags[n - consumer_row.floor]
            )
        bounds = [(shard.first, shard.next) for shard in table.bounds()]
        observation[queue] = live, bounds, _some({consumer: sorted(positions) for consumer, positions in done.items()})
    return observation


def play(history: History) -> tuple[Queues, list[tuple[int, tuple[Any, ...]]]]:
    """The state of all that was told, and the events after it that may have happened."""
    never = {values[0] for word, *values in history.events if word == "never"}
    last_committed = max([0, *(values[0] for word, *values in history.events if word == "told")])
    model, open_end = Queues(), list[tuple[int, tuple[Any, ...]]]()
    for word, *values in history.events:
        if word in ("told", "never", "time", "fed") or values[0] in never:
            continue
        if values[0] <= last_committed:
            model.play(word, *values[1:])
        else:
            open_end.append((values[0], (word, *values[1:])))
    return model, open_end


class QueueUser(ScenarioUser):
    """Somebody who uses queues. After a failure of their files: reopen."""

    changes: bool | ChangeOptions = False

    def __init__(self, disk: SimulatedDisk, history: History) -> None:
        self.disk = disk
        times: list[int] = [values[0] for word, *values in history.events if word == "time"]
        clock = FakeClock(time_us=max([START_US, *times]))
        super().__init__(open_queues(disk, clock), history, clock)
        self.store.kv("results")

    def model(self) -> Queues:
        """The state if all that was tried happened."""
        model, open_end = play(self.history)
        for _, event in open_end:
            model.play(*event)
        return model

    # -- events

    def create(self, queue: str) -> None:
        self._try("create", queue, act=lambda: self.store.queue(queue, shards=SHARDS[queue], changes=self.changes))

    def drop(self, queue: str) -> None:
        self._try("drop", queue, act=lambda: self.store.drop(queue))

    def _payloads(self, sizes: Sequence[int]) -> list[bytes]:
        return [b"%d.%d:" % (self._count + 1, index) + b"x" * size for index, size in enumerate(sizes)]

    def put(
        self, queue: str, shard: int, *sizes: int, token: tuple[str, int] | None = None, flush: bool = True
    ) -> None:
        payloads = self._payloads(sizes)
        keys = [KEYS[shard]] * len(payloads)

        def act() -> None:
            self.store.queue(queue).put_many(payloads, keys=keys, token=token, durable=flush)

        self._try("put", queue, shard, payloads, token, act=act, flush=flush)

    def append(self, queue: str, shard: int, size: int) -> None:
        payload = self._payloads([size])[0]
        expected = len(self.model().messages[queue][shard]) + 1

        def act() -> None:
            where = self.store.queue(queue).append(payload, key=KEYS[shard])
            if where[:2] != (shard, expected):
                raise Violation(f"an append of {queue} was told {where}, and is message {expected} of shard {shard}")

        self._try("put", queue, shard, [payload], None, act=act)

    def trim(self, queue: str, shard: int, before: int) -> None:
        act = lambda: self.store.queue(queue).trim(before, shard=shard, durable=True)  # noqa: E731
        self._try("trim", queue, shard, before, act=act)

    def load(self, queue: str, shard: int, *sizes: int, token: tuple[str, int]) -> None:
        """Messages by reference: to the model they are a put."""
        payloads = self._payloads(sizes)

        def act() -> None:
            staged = self.store.stage(queue, shard, lease_s=1.0)[0]
            with self.store.batch(token=token) as batch:
                batch.adopt(queue, [build(self.disk, "/store", staged, staged_table(*payloads))], shard)

        self._try("put", queue, shard, payloads, token, act=act)

    def work(self, queue: str, consumer: str, count: int, acknowledge: int) -> None:
        """Get messages, acknowledge some with their result, and then once more, which must not count."""
        messages = self._get(queue, consumer, count)[:acknowledge]
        if messages:
            self._ack(queue, consumer, messages)
            self._ack(queue, consumer, messages)

    def _get(self, queue: str, consumer: str, count: int) -> list[Any]:
        try:
            messages = self.store.queue(queue).consumer(consumer, visibility_timeout_s=10).get(count)
        except (OSError, PenstockError):
            self._expect_fault()
            self._mend()
            return []
        done = self.model().done.get((queue, consumer), set())
        for message in messages:
            if (message.shard, message.sequence) in done:
                raise Violation(f"message {message.sequence} of {queue} comes again after its acknowledgement")
        return messages

    def _ack(self, queue: str, consumer: str, messages: list[Any]) -> None:
        positions = [(message.shard, message.sequence) for message in messages]
        result = f"{queue} {consumer} {positions}".encode()
        expected = not self.model().done.get((queue, consumer), set()) & set(positions)

        def act() -> None:
            happened = True
            try:
                with self.store.batch() as batch:
                    batch.kv("results").merge(result, b"x", operator="append")
                    self.store.queue(queue).consumer(consumer).ack(messages, batch=batch)
            except LeaseLost:
                happened = False
            if happened != expected:
                raise Violation(f"acknowledging {positions} of {queue} happened: {happened}, expected: {expected}")

        self._try("ack", queue, consumer, positions, result, act=act)

    def _mend(self) -> None:
        """After a failure of the journal: recover. Queue files that failed are only mended by opening them again."""
        super()._mend()
        partitions = self.store._dispatcher.partitions()
        if any(partition.failures or _is_poisoned(partition.machine) for partition in partitions):
            with suppress(OSError, PenstockError):
                self.store.close()
            self.store = open_queues(self.disk, self.clock)

    def check(self) -> None:
        """What is seen now is what was written."""
        self.store.flush()
        compare(observe(self.store), self.model())


def _is_poisoned(machine: Any) -> bool:
    return hasattr(machine, "queue") and machine.queue.statistics().poisoned


def compare(observation: dict[str, Any], model: Queues) -> None:
    expected = model.observation()
    if observation != expected:
        wrong = {name: (observation.get(name), expected.get(name)) for name in {*observation, *expected}}
        raise Violation(
            f"queues hold otherwise (found, expected): { {k: v for k, v in wrong.items() if v[0] != v[1]} }"
        )


def run_background(user: QueueUser) -> None:
    """What the background does: retention, files that nobody needs, dropped tables, abandoned files."""
    store = user.store
    maintain_feeds(store._port.tables(), store._port.machine_unless_late, store._port.submit, store._port.time_us)
    store._port.maintain()
    store._tasks.retry()
    store._staging.purge(info.table_id for info in store._ledger.tables())


class QueueStoreScenario:
    """Puts, rolls, acknowledgements, trims, checkpoints, staged files, a drop and a reopening."""

    user_type = QueueUser

    def run(self, disk: SimulatedDisk, history: History) -> None:
        user = self.user_type(disk, history)
        user.create("a")
        user.create("b")
        user.put("a", 0, 10, 300, token=("p", 1))
        user.put("b", 0, 40, 0, flush=False)
        user.put("a", 1, 500)
        user.append("a", 0, 600)
        user.put("a", 0, 900)  # rolls
        user.work("a", "c", 4, 2)
        user.trim("a", 0, 3)
        user.append("a", 0, 900)  # rolls: its files are synced past the trim, and nothing is stored yet
        user.put("a", 0, 900, token=("p", 1))  # a duplicate
        user.load("a", 1, 20, 700, token=("p", 2))
        user.maintain(user.store._checkpoint.run)
        user.work("b", "d", 1, 1)
        user.put("a", 1, 900)
        user.maintain(lambda: run_background(user))  # removes the first files
        user.maintain(user.store.checkpoint)
        user.put("b", 0, 30)
        user.work("a", "c", 2, 2)
        user.check()
        user.drop("b")
        user.create("b")
        user.append("b", 0, 5)
        user.maintain(lambda: run_background(user))
        user.store.close()
        user = self.user_type(disk, history)
        user.check()
        user.work("a", "c", 1, 1)
        user.append("a", 0, 50)
        user.trim("a", 1, 100)  # all of it
        user.load("a", 1, 900, token=("p", 3))
        user.maintain(lambda: run_background(user))
        user.maintain(user.store.checkpoint)
        user.put("a", 1, 1, 2, flush=False)
        user.check()
        # It is not closed: the end of the run is one more place to crash.

    def resume(self, disk: SimulatedDisk, history: History) -> None:
        user = self.user_type(disk, history)
        try:
            self.commit_and_wait(user)
            for queue in SHARDS:
                user.create(queue)
            self.no_missing(user)
            self.work_off(user)
            user.append("a", 0, 700)
            user.put("a", 1, 700)
            user.maintain(user.store.checkpoint)
            user.check()
            user.advance(10)
            run_background(user)
            self.no_strays(user)
            user.check()
        finally:
            user.store.close()

    def commit_and_wait(self, user: QueueUser) -> None:
        """Find out how far the history went: all that was told, and then any number of what was only tried."""
        model, open_end = play(user.history)
        observation, states = observe(user.store), [model]
        for _, event in open_end:
            states.append(states[-1].copy())
            states[-1].play(*event)
        fitting = [at for at, state in enumerate(states) if state.observation() == observation]
        if not fitting:
            raise Violation(
                f"no end of the history leads to what is found: {observation}, told was {model.observation()}"
            )
        for number, _ in open_end[fitting[-1] :]:
            user.history.note("never", number)
        if open_end[: fitting[-1]]:
            user.history.note("told", open_end[fitting[-1] - 1][0])

    def work_off(self, user: QueueUser) -> None:
        """Every message that is not acknowledged comes, and only those."""
        for queue, consumer in (("a", "c"), ("b", "d")):
            model, deliveries = user.model(), list[Any]()
            while messages := user._get(queue, consumer, 3):
                deliveries += messages
            done = model.done.get((queue, consumer), set())
            expected = {(shard, n) for shard, live in enumerate(model.live(queue)) for n in live} - done
            if {(message.shard, message.sequence) for message in deliveries} != expected:
                raise Violation(f"{consumer} gets {deliveries} of {queue}, expected {expected}")
            user._ack(queue, consumer, deliveries[:2])

    def no_missing(self, user: QueueUser) -> None:
        """Every file that a queue's manifest lists is there, read or not."""
        for queue, shards in SHARDS.items():
            for shard in range(shards):
                machine = machine_of(user.store, queue, shard)
                there = set(data_files(user.disk, machine._folder))
                missing = {entry.path for entry in machine.queue._view.files} - there
                if missing:
                    raise Violation(f"shard {shard} of {queue} lists files that are not there: {missing}")

    def no_strays(self, user: QueueUser) -> None:
        """Of what is gone no file is left. A staged one that has a row goes when the journal names it no more."""
        store, disk = user.store, user.disk
        alive = {"1", *(str(info.table_id) for info in store._ledger.tables())}
        strays = sorted(set(disk.listdir("/store/tables")) - alive)
        for queue, shards in SHARDS.items():
            for shard in range(shards):
                machine = machine_of(store, queue, shard)
                machine.store_now()
                machine.drop_files()
                folder = machine._folder
                view = machine.queue._view
                listed = {view.active.path, *(entry.path for entry in view.files)}
                strays += [path for path in data_files(disk, folder) if path not in listed]
                staged = {row.file_name for _, row in store._manifest.scan_chunks(machine._descriptor.table_id)}
                files = [f"{folder}/{name}" for name in disk.listdir(folder) if name.endswith(".arrow")]
                strays += [path for path in files if path.removeprefix("/store/") not in staged]
        if strays:
            raise Violation(f"files are left that nobody needs: {strays}")


class ShortQueueStore(QueueStoreScenario):
    """Few steps, for what is tried many times over: a roll past a trim, a staged file, stored files, dropped ones."""

    def run(self, disk: SimulatedDisk, history: History) -> None:
        user = self.user_type(disk, history)
        user.create("a")
        user.put("a", 0, 700, 5, 5)
        user.work("a", "c", 2, 1)
        user.trim("a", 0, 2)
        user.append("a", 0, 900)  # rolls
        user.load("a", 0, 600, token=("p", 2))  # rolls
        user.maintain(user.store.checkpoint)
        user.append("a", 0, 40)
        user.trim("a", 0, 4)
        user.maintain(lambda: run_background(user))
        user.work("a", "c", 3, 2)
        user.put("a", 0, 900)


class DroppedQueue(QueueStoreScenario):
    """A queue is dropped whose records are still in the journal, and its files are removed."""

    def run(self, disk: SimulatedDisk, history: History) -> None:
        user = self.user_type(disk, history)
        user.create("a")
        user.create("b")
        user.put("b", 0, 40, 900)
        user.put("b", 0, 900)
        user.load("b", 0, 20, token=("p", 7))
        user.work("b", "d", 2, 1)
        user.drop("b")
        user.maintain(lambda: run_background(user))
        user.create("b")
        user.append("b", 0, 5)
