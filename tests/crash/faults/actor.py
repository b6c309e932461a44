"""What an actor does to a store: a mixed load over all kinds of tables, drawn from a seed.

Every actor writes to keys of its own, so that what it knows of them is certain; queues, consumers and the tables
themselves are shared. The same actor works in the owner and through a connection.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from faults.attempts import Attempts
from faults.history import (
    COUNT,
    EPHEMERAL,
    EXPIRING,
    HOT,
    MARK,
    STREAM,
    WHOLE,
    WORK,
    Effect,
    Operation,
    Saw,
    Word,
    identify,
)
from faults.moment import TOTAL, WORK_TOTAL, find_tears, number_of
from faults.shim import Shim
from penstock.archive.chunk import ChunkIdentity
from penstock.errors import NotFound
from penstock.host.os_files import OsFileSystem
from penstock.lsm.rows import Columns
from penstock.lsm.writer import SstableWriter
from penstock.partition.reference import sealed
from penstock.queue.consumer import Consumer
from penstock.store.tables import StoreSnapshot, Tables

TABLES = {"a": 1, "b": 3}
QUEUES = {"q": 2, "r": 1}
NOTED_KEYS_MAX = 8  # keys that a reader of others' writes writes down


def make_tables(store: Tables) -> None:
    for name, shards in TABLES.items():
        store.kv(name, shards=shards)
    for name, shards in QUEUES.items():
        store.queue(name, shards=shards)


def scratch_of(actor: str) -> str:
    return f"t_{actor}"


class Actor(Attempts):
    """One who writes and reads."""

    def __init__(self, name: str, store: Tables, *, seed: str, shim: Shim, **options: Any) -> None:
        super().__init__(name, store, **options)
        self._chance = random.Random(seed)
        self._shim = shim
        self._expected: dict[tuple[str, str], str | None] = {}  # hot keys and counters of this process, where certain
        self._sent: dict[int, tuple[Operation, Word]] = {}  # by token
        self._last_mark = ""
        self._acknowledged: set[tuple[int, int]] = set()
        self._birth = 0
        self._kind = "kv"
        common: Mapping[Callable[[], Any], int] = {
            self.stream: 10, self.flush: 4, self.single: 10, self.whole: 4, self.batch: 6, self.tokened: 6,
            self.again: 4, self.append: 3, self.expiring: 3, self.ephemeral: 1, self.work: 4, self.take: 3,
            self.scratch: 4, self.snapshot: 2, self.scan: 2, self.read: 5, self.load: 1,
        }  # fmt: skip
        if self.client:
            common = {**common, self.peek: 3}
        self._acts, self._weights = list(common), list(common.values())

    def step(self) -> None:
        """Do one of all these, and heal if something failed."""
        self._chance.choices(self._acts, self._weights)[0]()
        self.heal()

    def prove(self) -> bool:
        """Whether the store works again, in all its parts."""
        words = [self.batch(), self.tokened(), self.append(), self.whole(durable=True), self.flush()]
        return all(word == "done" for word in words) and self.snapshot() == "done"

    # -- values

    def _text(self, number: int) -> str:
        size = self._chance.choice([0, 10, 100, 2_000, 6_000])
        return f"{self.name}.{number}.".ljust(size, "v")

    def _next(self) -> int:
        return self._number + 1

    def _hot_effect(self) -> Effect:
        table = self._chance.choice(list(TABLES))
        spot = self._chance.randrange(12)
        key, chance = f"{HOT}/{self.name}/{spot:02d}", self._chance.random()
        if chance < 0.4:
            return Effect("put", table, key, self._text(self._next()))
        if chance < 0.55:
            return Effect("delete", table, key)
        if chance < 0.65:
            return Effect("range", table, key, f"{HOT}/{self.name}/{spot + 4:02d}")
        return Effect("add", table, f"{COUNT}/{self.name}/{spot % 4}", amount=self._chance.randrange(1, 100))

    def _marks(self, number: int, tables: list[str], queues: list[str]) -> list[Effect]:
        """A mark and a count of it in each table, a message in each queue."""
        value = ",".join([*tables, *queues])
        effects = [Effect("put", table, f"{MARK}/{self.name}/{number:08d}", value) for table in tables]
        effects += [Effect("add", table, f"{TOTAL}/{self.name}", amount=1) for table in tables]
        return effects + [self._message(queue, number) for queue in queues]

    def _message(self, queue: str, number: int, part: int = 0) -> Effect:
        return Effect("message", queue, f"{self.name}", f"{identify(self.name, number, part)}|{self._text(number)}")

    # -- plain writes

    def stream(self) -> None:
        """Writes that nobody waits for."""
        for _ in range(self._chance.randrange(1, 8)):
            number = self._next()
            if self._chance.random() < 0.6:
                table = self._chance.choice(list(TABLES))
                effect = Effect("put", table, f"{STREAM}/{self.name}/{number:08d}", self._text(number))
            else:
                effect = self._message("r", number)
            operation = self.operation("stream", effects=[effect])
            self.attempt(operation, partial(perform, self.store, effect, durable=False), awaited=False)

    def flush(self) -> Word:
        return self.attempt(self.operation("flush"), lambda: self.store.flush(timeout_s=10.0) and None)

    def single(self) -> None:
        """One durable change of a key that changes often."""
        effect = self._hot_effect()
        operation = self.operation("single", effects=[effect])
        word = self.attempt(operation, lambda: perform(self.store, effect, durable=True))
        self._learn(operation, word)

    def whole(self, *, durable: bool | None = None) -> Word:
        """A put_many, over several shards."""
        number, count = self._next(), self._chance.randrange(2, 9)
        durable = self._chance.random() < 0.6 if durable is None else durable
        text = f"{count}." + self._text(number)
        keys = [f"{WHOLE}/{self.name}/{number:08d}/{part}" for part in range(count)]
        operation = self.operation("whole", effects=[Effect("put", "b", key, text) for key in keys])
        rows = {key.encode(): text.encode() for key in keys}
        return self.attempt(
            operation,
            lambda: self.store.kv("b", create=False).put_many(rows, durable=durable) and None,
            awaited=durable,
        )

    def expiring(self) -> None:
        table, spot = self._chance.choice(list(TABLES)), self._chance.randrange(6)
        ttl_s = self._chance.choice([0.0, 0.02, 0.3, 2.0, 3600.0])
        effect = Effect("put", table, f"{EXPIRING}/{self.name}/{spot}", self._text(self._next()), ttl_s=ttl_s)
        self.attempt(self.operation("single", effects=[effect]), lambda: perform(self.store, effect, durable=True))

    def ephemeral(self) -> None:
        """A merge into what expires, at times before it is written."""
        table, spot = self._chance.choice(list(TABLES)), self._chance.randrange(3)
        ttl_s = self._chance.choice([0.00001, 0.02, 0.5])
        effect = Effect("add", table, f"{EPHEMERAL}/{self.name}/{spot}", amount=1, ttl_s=ttl_s)
        self.attempt(self.operation("single", effects=[effect]), lambda: perform(self.store, effect, durable=True))

    def append(self) -> Word:
        operation = self.operation("append", effects=[self._message("q", self._next())])
        effect = operation.effects[0]

        def act() -> tuple[int, int]:
            queue = self.store.queue("q", create=False)
            position = queue.append(effect.value.encode(), key=effect.key.encode())
            return position.shard, position.sequence

        return self.attempt(operation, act)

    # -- batches

    def batch(self) -> Word:
        number = self._next()
        queues = ["q"] if self._chance.random() < 0.5 else []
        effects = self._marks(number, list(TABLES), queues)
        effects += [self._hot_effect() for _ in range(self._chance.randrange(4))]
        operation = self.operation("batch", effects=effects)
        word = self.attempt(operation, lambda: self._commit(operation))
        self._learn(operation, word)
        if word == "done":
            self._last_mark = effects[0].key
        return word

    def tokened(self) -> Word:
        number = self._next()
        queues = self._chance.choice([[], ["q"], ["q", "r"]])
        operation = self.operation("token", effects=self._marks(number, list(TABLES), queues), token=number)
        word = self.attempt(operation, lambda: self._commit(operation))
        self._sent[number] = operation, word
        return word

    def again(self) -> None:
        """Send a token again: one in doubt if there is one, or one that is known to be used."""
        doubtful = [token for token, (_, word) in self._sent.items() if word in ("unknown", "refused")]
        tokens = doubtful or list(self._sent)[-20:]
        if tokens:
            token = self._chance.choice(tokens)
            self.send_again(*self._sent[token])

    def send_again(self, first: Operation, outcome: Word) -> None:
        """Send an operation with a token again; `outcome` is what became of it."""
        assert first.token is not None
        operation = self.operation("again", effects=first.effects, token=first.token)
        word = self.attempt(operation, lambda: self._commit(operation))
        if word == "done" and outcome in ("done", "duplicate"):
            self.complain(f"token {first.token} was used, and is taken again")
        if word == "duplicate" and outcome == "refused":
            self.complain(f"token {first.token} was refused, and counts as used")
        if word in ("done", "duplicate"):
            self._sent[first.token] = first, "done"

    def _commit(self, operation: Operation) -> str | None:
        token = None if operation.token is None else (self.name, operation.token)
        with self.store.batch(token=token) as batch:
            for effect in operation.effects:
                perform(batch, effect)
        return "duplicate" if batch.duplicate else None

    def load(self) -> None:
        """Files that are built beside the store and taken in by a batch."""
        number = self._next()
        text = f"3.{self.name}.{number}"
        keys = [f"{WHOLE}/{self.name}/{number:08d}/{part}" for part in range(3)]
        operation = self.operation("load", effects=[Effect("put", "a", key, text) for key in keys], conditional=True)

        def act() -> None:
            staged = self.store.stage("a")[0]
            self._shim.name_staged(staged.file_name.removesuffix(".sst"))
            fs, root = OsFileSystem(), self.store.path
            identity = ChunkIdentity(store=self.store.identity, chunk_id=staged.chunk_id)
            writer = SstableWriter(fs, f"{root}/{staged.file_name}", identity)
            writer.append(Columns.of([key.encode() for key in keys], [text.encode()] * 3, lsns=0))
            writer.finish()
            with self.store.batch() as batch:
                batch.adopt("a", [sealed(fs, root, staged)])

        self.attempt(operation, act)

    # -- consumers

    def work(self) -> None:
        """Acknowledge messages together with their results."""
        consumer = self._consumer("worker")
        _, _, messages = self.call("get", lambda: consumer.get(max=self._chance.randrange(1, 6)))
        if not messages:
            return
        texts = [f"{WORK}/{message.shard}/{message.sequence}" for message in messages]
        effects = [Effect("put", "a", key, f"{self.name}.{self._next()}") for key in texts]
        effects.append(Effect("add", "a", WORK_TOTAL, amount=len(messages)))
        operation = self.operation("work", effects=effects, conditional=True)

        def act() -> None:
            with self.store.batch() as batch:
                for effect in effects:
                    perform(batch, effect)
                consumer.ack(messages, batch=batch)

        self.attempt(operation, act)

    def take(self) -> None:
        """Acknowledge messages on their own."""
        consumer = self._consumer("taker")
        _, _, messages = self.call("get", lambda: consumer.get(max=self._chance.randrange(1, 6)))
        if not messages:
            return
        positions = [(message.shard, message.sequence) for message in messages]
        for position in self._acknowledged.intersection(positions):
            self.complain(f"message {position} was acknowledged, and is delivered again")
        operation = self.operation("ack", messages=positions, conditional=True)
        if self.attempt(operation, lambda: consumer.ack(messages)) == "done":
            self._acknowledged.update(positions)

    def _consumer(self, name: str) -> Consumer:
        queue = self.store.queue("q", create=False)
        consumer: Consumer = queue.consumer(name, visibility_timeout_s=5.0)  # an owner that must yield waits for these
        return consumer

    # -- tables that come and go

    def scratch(self) -> None:
        name = scratch_of(self.name)
        if not self._birth or self._chance.random() < 0.3:
            self.attempt(self.operation("drop", table=name), lambda: self._drop(name))
            self._birth, self._kind = self._next(), self._chance.choice(["kv", "queue"])
            operation = self.operation("create", table=name, birth=self._birth)
            self.attempt(operation, lambda: self._create(name))
        key = f"f{self._next()}"
        effect = Effect("put", name, key, str(self._birth))
        self.attempt(
            self.operation("fill", effects=[effect], table=name, birth=self._birth), lambda: self._fill(effect)
        )

    def _create(self, name: str) -> None:
        getattr(self.store, self._kind)(name, shards=2)  # and no more: whether a table is empty is a read of its own

    def _drop(self, name: str) -> None:
        with suppress(NotFound):
            self.store.drop(name)

    def _fill(self, effect: Effect) -> None:
        if self._kind == "kv":
            table = self.store.kv(effect.table, create=False)
            table.put(effect.key.encode(), effect.value.encode(), durable=True)
        else:
            queue = self.store.queue(effect.table, create=False)
            queue.put(f"{effect.key} {effect.value}".encode(), durable=True)

    # -- reading

    def snapshot(self) -> Word:
        """One moment of everything."""

        def look() -> None:
            with self.store.snapshot() as snapshot:
                tables, queues = read_moment(snapshot)
            if self._last_mark and self._last_mark not in tables["a"]:
                self.complain(f"a snapshot does not hold {self._last_mark}, which is durable")
            for tear in find_tears(tables, queues):
                self.complain(f"a snapshot shows: {tear}")
            self._write_down(tables)

        return self.call("snapshot", look)[0]

    def _write_down(self, tables: Mapping[str, Mapping[str, str]]) -> None:
        for table, rows in tables.items():
            keys = [key for key in rows if key[0] in (MARK, STREAM)]
            if keys:
                self._history.write(Saw(self.name, table, sorted(keys)[-NOTED_KEYS_MAX:]))

    def scan(self) -> None:
        """A live table, which is one moment too."""

        def look() -> None:
            rows = read_rows(self.store.kv("b", create=False).scan())
            for tear in find_tears({"b": rows}, {}):
                self.complain(f"a scan shows: {tear}")

        self.call("scan", look)

    def peek(self) -> None:
        """What other actors write, as a client sees it: durable."""

        def look() -> None:
            for table in TABLES:
                rows = read_rows(self.store.kv(table, create=False).scan(prefix=b"s/"))
                keys = [key for key in rows if key.split("/")[1] != self.name]
                self._history.write(Saw(self.name, table, keys[-NOTED_KEYS_MAX:]))

        self.call("scan", look)

    def read(self) -> None:
        """Keys that this actor alone writes."""
        keys = list(self._expected)
        for table, key in self._chance.sample(keys, min(4, len(keys))):
            word, _, value = self.call("get", partial(self._get, table, key))
            text = None if value is None else value.decode("latin-1")
            if word == "done" and text != (expected := self._expected[table, key]):
                self.complain(f"get gives {_shorten(text)} for {key} of table {table}, not {_shorten(expected)}")

    def _get(self, table: str, key: str) -> bytes | None:
        value: bytes | None = self.store.kv(table, create=False).get(key.encode())
        return value

    def _learn(self, operation: Operation, word: Word) -> None:
        for effect in operation.effects:
            if effect.kind == "range":
                keys = [(table, key) for table, key in self._expected if effect.key <= key < effect.value]
                keys = [row_id for row_id in keys if row_id[0] == effect.table]
            else:
                keys = [(effect.table, effect.key)] if effect.key[0] in (HOT, COUNT) else []
            for row_id in keys:
                if word == "done":
                    self._learn_effect(row_id, effect)
                elif word == "unknown":
                    self._expected.pop(row_id, None)

    def _learn_effect(self, row_id: tuple[str, str], effect: Effect) -> None:
        if effect.kind == "put":
            self._expected[row_id] = effect.value
        elif effect.kind in ("delete", "range"):
            self._expected[row_id] = None
        elif row_id in self._expected:
            total = number_of(self._expected[row_id]) + effect.amount
            self._expected[row_id] = total.to_bytes(8, "little", signed=True).decode("latin-1")


def perform(tables: Any, effect: Effect, **options: Any) -> None:
    """Make a change in a store or a batch."""
    if effect.kind == "message":
        queue = tables.queue(effect.table)
        queue.put(effect.value.encode(), key=effect.key.encode() or None, **options)
        return
    table, key = tables.kv(effect.table), effect.key.encode()
    if effect.ttl_s:
        options["ttl_s"] = effect.ttl_s
    if effect.kind == "put":
        table.put(key, effect.value.encode(), **options)
    elif effect.kind == "delete":
        table.delete(key, **options)
    elif effect.kind == "range":
        table.delete_range(key, effect.value.encode(), **options)
    else:
        table.merge(key, effect.amount.to_bytes(8, "little", signed=True), operator="add_i64", **options)


def read_rows(pairs: Any) -> dict[str, str]:
    return {key.decode(): value.decode("latin-1") for key, value in pairs}


def read_moment(snapshot: StoreSnapshot) -> tuple[dict[str, dict[str, str]], dict[str, frozenset[str]]]:
    """The rows of all tables, and who the messages of all queues are."""
    tables = {name: read_rows(snapshot.kv(name).scan()) for name in TABLES}
    queues = {
        name: frozenset(
            payload.partition(b"|")[0].decode()
            for payload in snapshot.queue(name).to_arrow().column("payload").to_pylist()
        )
        for name in QUEUES
    }
    return tables, queues


def _shorten(text: str | None) -> str:
    return "absent" if text is None else repr(text[:40])
