"""What a store promises across crashes, as a scenario for `penstock.testing.explore`.

The history holds events in the order in which they were tried: `batch` (number, writes, token, time), `create` and
`drop` (number, name); `told` (number) when the world heard that all up to this event is durable, and `never` (number)
for one that was refused before it was taken in. So what may be missing after a crash is an end of the events: the
state found must be the one that some number of them leads to, in every table and for every token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from lsm_files import columns, puts
from scenario_user import ScenarioUser
from store_model import (
    SETTINGS,
    START_US,
    StoreModel,
    Token,
    Write,
    difference,
    number,
    open_simulated,
    perform,
    read_all,
    read_snapshot,
)

from penstock.archive.chunk import ChunkIdentity
from penstock.errors import PenstockError, TokenTooOld
from penstock.lsm.writer import SstableWriter
from penstock.partition.reference import sealed
from penstock.store.store import Store
from penstock.testing import FakeClock, History, SimulatedDisk, Violation


def play(history: History) -> tuple[StoreModel, list[tuple[int, Callable[[StoreModel], object]]]]:
    """The model of all that was told, and the events after it that may have happened."""
    never = {values[0] for word, *values in history.events if word == "never"}
    acknowledged = max([0, *(values[0] for word, *values in history.events if word == "told")])
    model, open_end = StoreModel(), []
    for word, *values in history.events:
        if word in ("told", "never", "time", "fed") or values[0] in never:
            continue
        step = _step(word, values)
        if values[0] <= acknowledged:
            step(model)
        else:
            open_end.append((values[0], step))
    return model, open_end


def _step(word: str, values: list[object]) -> Callable[[StoreModel], object]:
    if word == "create":
        return lambda model: model.create(values[1])  # type: ignore[arg-type]
    if word == "drop":
        return lambda model: model.drop(values[1])  # type: ignore[arg-type]
    return lambda model: model.batch(values[1], values[3], values[2])  # type: ignore[arg-type]


def time_of(history: History) -> int:
    times: list[int] = [values[0] for word, *values in history.events if word == "time"]
    return max([START_US, *times])


class StoreUser(ScenarioUser):
    """Somebody who uses kv tables."""

    def create(self, name: str, shards: int = 1) -> None:
        self._try("create", name, act=lambda: self.store.kv(name, shards=shards))

    def drop(self, name: str) -> None:
        self._try("drop", name, act=lambda: self.store.drop(name))

    def write(self, *writes: Write) -> None:
        """One after the other, acknowledged by one flush."""
        for write in writes:
            act = partial(self._put, write)
            self._try("batch", (write,), None, self.clock.time_us(), act=act, flush=False)
        self._flush()

    def _put(self, write: Write) -> None:
        perform(self.store.kv(write.table, create=False), write)

    def batch(self, writes: Sequence[Write], token: Token | None = None) -> None:
        self._try("batch", tuple(writes), token, self.clock.time_us(), act=lambda: self._batch(writes, token))

    def _batch(self, writes: Sequence[Write], token: Token | None) -> None:
        model, open_end = play(self.history)
        for _, step in open_end[:-1]:
            step(model)
        expected = "accepted" if token is None else model.verdict(token)
        with suppress(TokenTooOld), self.store.batch(token=token) as batch:
            for write in writes:
                perform(batch.kv(write.table), write)
        outcome = "duplicate" if batch.duplicate else "accepted"
        if expected != "too old" and outcome != expected:
            raise Violation(f"token {token} is told to be {outcome}, but was {expected}")

    def load(self, pairs: dict[str, dict[bytes, bytes]], token: Token) -> None:
        """A batch by reference: files are built as an executor would, then committed. To the model it is a batch."""
        writes = tuple(Write(table, "put", key, value) for table, rows in pairs.items() for key, value in rows.items())
        self._try("batch", writes, token, self.clock.time_us(), act=lambda: self._load(pairs, token))

    def _load(self, pairs: dict[str, dict[bytes, bytes]], token: Token) -> None:
        store = self.store
        with store.batch(token=token) as batch:
            for table, rows in pairs.items():
                staged = store.stage(table)[0]
                identity = ChunkIdentity(store=store.identity, chunk_id=staged.chunk_id)
                info = store.port.table(table)
                assert info is not None
                sealing = store._keys.files_of(info.table_id).sealing(0)
                writer = SstableWriter(store._fs, f"{store.path}/{staged.file_name}", identity, sealing=sealing)
                writer.append(columns(puts(rows)))
                writer.finish()
                batch.adopt(table, [sealed(store._fs, store.path, staged)])

    def _flush(self) -> None:
        try:
            self.store.flush()
        except (OSError, PenstockError):
            self._expect_fault()
            self._mend()
        self._acknowledge()

    def check(self) -> None:
        """What is seen now is what was written, durable or not. What failed is mended first: it is not shown."""
        for name in self.store.tables():
            self.store.resume(name)
        model, open_end = play(self.history)
        for _, step in open_end:
            step(model)
        compare(read_all(self.store), model, self.clock)


def compare(actual: dict[str, dict[bytes, bytes]], model: StoreModel, clock: FakeClock) -> None:
    expected = model.everything(clock.time_us())
    if actual != expected:
        raise Violation(f"the store holds otherwise than it was told (found, expected): {difference(actual, expected)}")


def rows(n: int, *tables: str) -> list[Write]:
    """A batch across tables: each has a mark of it, a counter, a log, a delete, and something that expires."""
    writes: list[Write] = []
    for name in tables:
        writes += [
            Write(name, "put", b"mark%02d" % n, b"%d" % n * 10),
            Write(name, "add_i64", b"count", number(1)),
            Write(name, "append", b"log", b"%d," % n),
            Write(name, "delete", b"mark%02d" % (n - 2)),
            Write(name, "put", b"short%d" % (n % 3), b"%d" % n, ttl_s=5.0),
        ]
        if n % 3 == 0:
            writes.append(Write(name, "delete_range", b"mark", b"mark%02d" % n))
            writes.append(Write(name, "add_i64", b"short%d" % (n % 2), number(n)))
    return writes


class StoreScenario:
    """Batches across three tables and everything that happens to their files meanwhile."""

    settings = SETTINGS

    def open(self, disk: SimulatedDisk, history: History) -> StoreUser:
        clock = FakeClock(time_us=time_of(history))
        return StoreUser(open_simulated(disk, clock, self.settings), history, clock)

    def run(self, disk: SimulatedDisk, history: History) -> None:
        user = self.open(disk, history)
        store = user.store
        user.create("a")
        user.create("b", shards=2)
        user.create("c")
        user.batch(rows(1, "a", "b", "c"))
        user.batch(rows(2, "a", "b"), Token("p", 1))
        user.maintain(lambda: flush_ledger(store))  # the ledger is further than the others
        user.write(*rows(3, "a"), Write("b", "add_i64", b"count", number(1)))
        user.batch(rows(4, "b", "c"), Token("p", 7))
        user.batch(rows(5, "a", "c"), Token("p", 3))  # out of order
        user.batch(rows(6, "a", "c"), Token("p", 7))  # a duplicate
        user.maintain(lambda: flush_table(store, "a"))  # a table is further than the ledger
        user.advance(3)
        user.batch(rows(6, "a", "b", "c"), Token("q", 5))
        user.maintain(store._checkpoint.run)
        user.check()
        user.batch(rows(7, "a", "c"), Token("p", 8))
        user.load({"a": {b"a1": b"loaded", b"zz": b"new"}, "c": {b"c1": b"loaded"}}, Token("p", 10))
        user.batch(rows(7, "a"), Token("p", 12))  # on top of what was loaded
        user.maintain(lambda: flush_table(store, "c"))
        user.maintain(lambda: store.compact("c"))
        user.drop("b")
        user.batch(rows(8, "a", "c"), Token("p", 8))
        user.create("b")
        user.advance(3)
        user.batch(rows(9, "a", "b", "c"), Token("p", 9))
        user.maintain(store._tasks.retry)  # removes what the drop left
        user.maintain(store.checkpoint)  # everything but the newest segment goes; laggards are spilled
        user.write(*rows(10, "b"))
        user.check()
        store.close()
        user = self.open(disk, history)
        user.check()
        user.batch(rows(11, "a", "b", "c"), Token("p", 11))
        user.maintain(user.store.checkpoint)
        user.maintain(lambda: user.store.compact("a"))
        user.maintain(user.store._collector.collect)
        user.batch(rows(12, "a", "b"), Token("p", 11))
        user.check()
        # It is not closed: the end of the run is one more place to crash.

    def resume(self, disk: SimulatedDisk, history: History) -> None:
        user = self.open(disk, history)
        try:
            self._find_end(user)
            self._submit_again(user)
            user.create("c")
            user.batch(rows(20, "c"), Token("resumed", len(history.events)))
            user.maintain(user.store.checkpoint)
            user.check()
            self._snapshot_agrees(user)
            user.store._tasks.retry()
            self._no_strays(user.store, disk)
        finally:
            user.store.close()

    def _find_end(self, user: StoreUser) -> None:
        """Find out how far the history went: all that was told, and then any number of what was only tried."""
        model, open_end = play(user.history)
        actual = read_all(user.store)
        states = [model]
        for _, step in open_end:
            states.append(states[-1].copy())
            step(states[-1])
        now_us = user.clock.time_us()
        fitting = [at for at, state in enumerate(states) if state.everything(now_us) == actual]
        if not fitting:
            wrong = difference(actual, states[0].everything(now_us))
            raise Violation(f"no end of the history leads to what is found: {wrong} after {len(open_end)} open events")
        for index, _ in open_end[fitting[-1] :]:
            user.history.note("never", index)
        if open_end[: fitting[-1]]:
            user.history.note("told", open_end[fitting[-1] - 1][0])

    def _submit_again(self, user: StoreUser) -> None:
        """Every token agrees with its data: `batch` itself compares the answer with the model."""
        for _, (writes, token) in tokens_of(user.history).items():
            alive = set(user.store.tables())
            user.batch([write for write in writes if write.table in alive], token)

    def _no_strays(self, store: Store, disk: SimulatedDisk) -> None:
        """Of a dropped table nothing is left."""
        alive = {"1", *(str(info.table_id) for info in store._ledger.tables())}
        strays = set(disk.listdir("/store/tables")) - alive
        if strays:
            raise Violation(f"folders of dropped tables are left: {sorted(strays)}")

    def _snapshot_agrees(self, user: StoreUser) -> None:
        model, _ = play(user.history)
        _, actual = read_snapshot(user.store)
        compare(actual, model, user.clock)


def tokens_of(history: History) -> dict[Token, tuple[Sequence[Write], Token]]:
    by_token: dict[Token, tuple[Sequence[Write], Token]] = {}
    for word, *values in history.events:
        if word == "batch" and values[2] is not None and values[2].producer in ("p", "q"):
            by_token.setdefault(values[2], (values[1], values[2]))
    return by_token


def flush_ledger(store: Store) -> None:
    store._maintenance.flush(store._ledger.tree)


def flush_table(store: Store, name: str) -> None:
    info = store._ledger.table(name)
    assert info is not None
    for tree, catalog in store._maintenance.trees():
        if catalog.db_id == info.table_id:
            store._maintenance.flush(tree)


class Short(StoreScenario):
    """Few steps, for what is tried many times over: a spill, verdicts that are read again, a drop."""

    def run(self, disk: SimulatedDisk, history: History) -> None:
        user = self.open(disk, history)
        user.create("a")
        user.create("c")
        user.batch(rows(1, "a", "c"), Token("p", 1))
        user.maintain(lambda: flush_ledger(user.store))
        user.batch(rows(2, "a", "c"), Token("p", 2))
        user.maintain(lambda: flush_table(user.store, "a"))
        user.batch(rows(3, "c"), Token("p", 2))
        user.batch(rows(3, "a", "c"), Token("p", 3))
        user.maintain(user.store.checkpoint)  # spills c, and what a has not stored
        user.batch(rows(4, "a", "c"), Token("p", 4))
        user.load({"a": {b"a1": b"loaded"}, "c": {b"c1": b"loaded"}}, Token("p", 5))


class Encrypted(Short):
    """The same, with every table encrypted."""

    settings = replace(SETTINGS, keys={1: b"k" * 32}, encrypt=True)
