"""The processes of a campaign: a nursery that forks owners, clients and readers, and what these do.

Starting Python and importing a store takes longer than a round. So one process does that, opens nothing, and forks.

Run as a script, under the shim: requests come as lines of JSON, answers go back the same way.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).parents[1]))

import msgspec
import pyarrow as pa
import pyarrow.flight

import penstock
from faults import bugs
from faults.actor import QUEUES, TABLES, Actor, make_tables, read_rows
from faults.attempts import HUNG, Watchdog
from faults.history import Dump, HistoryWriter, Message, Note, Operation, Violation, Word
from faults.shim import Shim
from penstock.errors import Backpressure, PenstockError, Restore
from penstock.log import LogSettings
from penstock.partition.checkpoint import CheckpointSettings
from penstock.queue.chain import QueueSettings
from penstock.store.settings import StoreSettings
from penstock.store.store import Store

SETTINGS = StoreSettings(  # small files: all of them end and are followed by others within a round
    memory_bytes_max=256 << 20,
    journal=LogSettings(segment_bytes=48_000, allocate_bytes=16_000, index_bytes=4_000),
    kinds=(QueueSettings(file_bytes=16_000, allocate_bytes=4_000, index_bytes=2_000),),
    checkpoint=CheckpointSettings(segments_max=1),
    flush_interval_s=0.02,
    reserve_bytes=64 << 10,
)
OPENINGS = 6  # with faults; then without


class Task(msgspec.Struct, frozen=True):
    """What a process is to do."""

    role: str  # "own", "use" or "read"
    root: str
    history: str  # files of this process
    stacks: str
    seed: str
    actors: list[str] = []
    first: int = 0  # the number before the first operation
    steps: int = 0  # of each actor
    kill_s: float | None = None  # after the opening
    ending: str = "heal"  # "heal": calm, then all must work; "close": with faults; "kill"
    faults_at_open: bool = False
    serves: bool = False  # until SIGTERM
    compacts: bool = False
    tokens: list[tuple[Operation, Word]] = []  # to be sent again by a reader
    dump: str = ""
    bug: str = ""  # see `bugs`


class Started(msgspec.Struct, frozen=True):
    """The answer to a task."""

    pid: int


class Ended(msgspec.Struct, frozen=True):
    """How a process ended: its exit code, or the negative of its signal."""

    pid: int
    code: int


def nurse() -> None:
    """Fork a process for each task; say how each ended when asked with its pid."""
    pa.array([b""]).to_numpy(zero_copy_only=False)  # imports pandas, if that is there
    tasks = msgspec.json.Decoder(Task | int)
    for line in sys.stdin.buffer:
        request = tasks.decode(line)
        answer: Started | Ended
        if isinstance(request, int):
            answer = Ended(request, os.waitstatus_to_exitcode(os.waitpid(request, 0)[1]))
        else:
            pid = os.fork()
            if not pid:
                _be(request)
            answer = Started(pid)
        sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
        sys.stdout.buffer.flush()


def _be(task: Task) -> NoReturn:
    code = 1
    with open(task.stacks, "a", buffering=1, encoding="utf-8") as stacks:
        os.dup2(stacks.fileno(), 1)
        os.dup2(stacks.fileno(), 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        faulthandler.enable(stacks)
        faulthandler.register(signal.SIGUSR1, stacks)
        history = HistoryWriter(task.history)
        try:
            bugs.seed(task.bug)
            _ROLES[task.role](task, history, Watchdog(history, stacks))
            code = 0
        except BaseException as error:
            traceback.print_exc(file=stacks)
            history.write(Violation(task.role, f"ended with {type(error).__name__}: {error}"))
    os._exit(code)


# -- an owner


class Owner:
    """A process that has the store open, with its own actors; perhaps it serves others too."""

    def __init__(self, task: Task, history: HistoryWriter, watchdog: Watchdog) -> None:
        self._task, self._history, self._watchdog = task, history, watchdog
        self._shim = Shim.of_this_process()
        self._stopped = threading.Event()

    def run(self) -> None:
        task = self._task
        signal.signal(signal.SIGTERM, lambda *_: self._stopped.set())
        if not task.faults_at_open:
            self._shim.calm()
        store = self._open()
        self._shim.arm()
        if task.kill_s is not None:
            _kill_after(task.kill_s)
        actors = [self._actor(name, store) for name in task.actors]
        self._history.write(Note("opened"))
        maintaining = threading.Thread(target=self._maintain, args=(store,), daemon=True)
        maintaining.start()
        _run_all(actors, task.steps)
        while task.serves and not self._stopped.wait(0.1):
            if actors:
                actors[0].step()
        self._stopped.set()
        self._end(store, actors, maintaining)

    def _actor(self, name: str, store: Store) -> Actor:
        return make_actor(name, store, self._task, self._history, self._watchdog, self._shim, client=False)

    def _open(self) -> Store:
        for count in range(OPENINGS + 1):
            if count == OPENINGS:
                self._shim.calm()
            self._watchdog.begin("open")
            try:
                store = penstock.open(self._task.root, settings=SETTINGS)
                try:
                    make_tables(store)
                    return store
                except (OSError, PenstockError) as error:
                    self._history.write(Note(f"tables could not be made: {type(error).__name__}"))
                    with suppress(OSError, PenstockError):
                        store.close()
            except (OSError, PenstockError) as error:
                note_failure(self._history, "could not be opened", error)
                if count == OPENINGS:
                    raise
            finally:
                self._watchdog.end()
        raise AssertionError("the store could not be opened without a fault")

    def _maintain(self, store: Store) -> None:
        """What the scheduler does, sooner."""
        count = 0
        while not self._stopped.wait(0.04):
            count += 1
            try:
                for tree, _ in store._maintenance.trees():
                    tree.freeze()
                store._wake("flush")
                store.checkpoint()
                if self._task.compacts and count % 8 == 0:
                    store.compact("a")
                    store.compact("b")
            except (OSError, PenstockError) as error:
                self._history.write(Note(f"maintenance: {type(error).__name__}"))

    def _end(self, store: Store, actors: list[Actor], maintaining: threading.Thread) -> None:
        if self._task.ending == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        maintaining.join()
        if self._task.ending == "heal":
            self._shim.calm()
            store = self._heal(store, actors)
        self._close(store)
        if self._task.ending == "close":
            self._shim.calm()
            store = self._open()
            for actor in actors:
                actor.reopened(store)
            self._prove(actors)
            self._close(store, well=True)

    def _heal(self, store: Store, actors: list[Actor]) -> Store:
        """Without faults, `recover` mends the store; if it does not, opening it again does."""
        if all(actor.heal_for_good(actor.prove) for actor in actors):
            return store
        self._history.write(Note("healed only by opening it again"))
        self._close(store)
        store = self._open()
        for actor in actors:
            actor.reopened(store)
        self._prove(actors)
        return store

    def _prove(self, actors: list[Actor]) -> None:
        for actor in actors:
            if not actor.prove():
                actor.complain("the store does not work, though nothing fails any more")

    def _close(self, store: Store, *, well: bool = False) -> None:
        self._watchdog.begin("close")
        try:
            store.close()
        except (OSError, PenstockError) as error:
            self._history.write(Note(f"close: {type(error).__name__}"))
            if well:
                raise
        finally:
            self._watchdog.end()


def note_failure(history: HistoryWriter, text: str, error: Exception) -> None:
    """A fault may keep a store from opening; but nothing is damaged, and nobody must be told to restore it."""
    history.write(Note(f"{text}: {type(error).__name__}"))
    if isinstance(error, Restore):
        history.write(Violation("opening", f"speaks of damage, and there is none: {error}"))


def make_actor(
    name: str, store: Any, task: Task, history: HistoryWriter, watchdog: Watchdog, shim: Shim, *, client: bool
) -> Actor:
    return Actor(
        name,
        store,
        seed=f"{task.seed} {name}",
        shim=shim,
        history=history,
        watchdog=watchdog,
        first=task.first,
        client=client,
    )


def _run_all(actors: list[Actor], steps: int) -> None:
    def run(actor: Actor) -> None:
        for _ in range(steps):
            actor.step()

    threads = [threading.Thread(target=run, args=(actor,)) for actor in actors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _kill_after(seconds: float) -> None:
    def kill() -> None:
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()


# -- a client


def use(task: Task, history: HistoryWriter, watchdog: Watchdog) -> None:
    """Work through connections, one for each actor; an owner is started if there is none."""
    shim = Shim.of_this_process()
    watchdog.begin("open", 90.0)
    actors = [
        make_actor(name, _connect(task, history, shim), task, history, watchdog, shim, client=True)
        for name in task.actors
    ]
    watchdog.end()
    if task.kill_s is not None:
        _kill_after(task.kill_s)
    history.write(Note("connected"))
    _run_all(actors, task.steps)
    shim.calm()
    for actor in actors:
        if not actor.heal_for_good(actor.prove):
            actor.complain("a client cannot write, though nothing fails any more")
    watchdog.begin("close")
    for actor in actors:
        actor.store.close()
    watchdog.end()


def _connect(task: Task, history: HistoryWriter, shim: Shim) -> Any:
    for count in range(OPENINGS + 1):
        if count == OPENINGS:
            shim.calm()
        try:
            store = penstock.connect(task.root, create=True, timeout_s=10.0)
            make_tables(store)
            return store
        except (OSError, PenstockError) as error:
            note_failure(history, "connect", error)
            if count == OPENINGS:
                raise
            time.sleep(0.5)  # an owner that failed needs a moment to recover
    raise AssertionError


# -- a reader


def read(task: Task, history: HistoryWriter, watchdog: Watchdog) -> None:
    """Write down all that is in the store, then send tokens again."""
    shim = Shim.of_this_process()
    watchdog.begin("open")
    store = penstock.open(task.root, settings=SETTINGS, timeout_s=20.0)
    watchdog.begin("dump", 60.0)
    dump = _dump(store)
    Path(task.dump).write_bytes(msgspec.json.encode(dump))
    watchdog.end()
    actors = {name: make_actor(name, store, task, history, watchdog, shim, client=False) for name in task.actors}
    for operation, outcome in task.tokens:
        actors[operation.actor].send_again(operation, outcome)
    if task.ending == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    watchdog.begin("close")
    store.close()
    watchdog.end()


def _dump(store: Store) -> Dump:
    dump = Dump(time.time(), tables={}, queues={}, delivered={})
    with store.snapshot() as snapshot:
        for name in snapshot.tables():
            if store._info(name).kind == "kv":
                dump.tables[name] = read_rows(snapshot.kv(name).scan())
                if (live := read_rows(store.kv(name).scan())).keys() - dump.tables[name].keys():
                    raise AssertionError(f"a scan of {name} shows keys that a snapshot does not: {len(live)} rows")
            else:
                rows = snapshot.queue(name).to_arrow().select(["shard", "sequence", "payload"]).to_pylist()
                dump.queues[name] = [
                    Message(row["shard"], row["sequence"], row["payload"].decode("latin-1")) for row in rows
                ]
    for name in ("worker", "taker") if "q" in dump.queues else ():
        dump.delivered[name] = _drain(store, name)
    dump.ended_s = time.time()
    return dump


def _drain(store: Store, name: str) -> list[tuple[int, int]]:
    consumer, positions = store.queue("q", create=False).consumer(name), list[tuple[int, int]]()
    while True:
        try:
            messages = consumer.get(max=4_096)
        except Backpressure:  # it was killed again and again, and has much to compact; the watchdog ends the wait
            time.sleep(0.1)
            continue
        if not messages:
            return positions
        positions += [(message.shard, message.sequence) for message in messages]


_ROLES = {
    "own": lambda task, history, watchdog: Owner(task, history, watchdog).run(),
    "use": use,
    "read": read,
}
__all__ = ["HUNG", "QUEUES", "TABLES", "Ended", "Started", "Task"]

if __name__ == "__main__":
    nurse()
