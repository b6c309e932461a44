"""The store and table that Spark options name, this process's connection to the store, and a job's planned tables.

Planning, tasks and commits run in long-lived Python processes of Spark's, not in the driver: each keeps one connection
per store to its owner. They never become owners themselves.

Thread: any; `_lock` guards the connections.
"""

from __future__ import annotations

import difflib
import gc
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import cast

from pyspark import TaskContext

from penstock.client.building import building
from penstock.client.certificates import SCHEME
from penstock.client.connect import READS, Reads, connect
from penstock.client.store import RemoteStore
from penstock.errors import Invalid, NotFound
from penstock.host import threads
from penstock.host.os_files import OsFileSystem
from penstock.kinds import BuildContext, Kind
from penstock.partition.ledger_records import TableInfo
from penstock.protocol import wire
from penstock.registry import kind_named
from penstock.store.identity import read_uuid
from penstock.store.loading import LEASE_S

OPTIONS = ("path", "table", "token", "authority", "reads")  # of every reader and writer
_FILE = re.compile("^file:/+")  # Spark's form of a path in some statements
_lock = threads.lock("spark.stores")
_stores: dict[tuple[int, str, str], RemoteStore] = {}  # guarded by _lock; by process, path or address, token and reads
_frozen: set[int] = set()  # processes whose imports are excluded from garbage collection


@dataclass(frozen=True)
class TableRef:
    """A store, by its path or by the address of a server, and a table in it."""

    path: str
    table: str = ""
    token: str = ""  # of a server
    authority: str = ""  # a file with the certificate of the authority that signed the server's
    changes: bool = False  # whether the change feed of the table is meant
    reads: Reads = "leader"  # of a cluster: see `penstock.connect`

    @classmethod
    def of(cls, options: Mapping[str, str], *, table: bool = True) -> TableRef:
        """Return the store and table that a reader's or writer's options name; `Invalid` if they do not."""
        path = _FILE.sub("/", options.get("path", ""))
        if not path:
            raise Invalid(
                "say which store: .load('/absolute/path') or .option('path', '/absolute/path'); a table of Spark's "
                "catalog keeps no options, so make it a TEMPORARY VIEW"
            )
        if "://" in path and not path.startswith(SCHEME):
            raise Invalid(f"no store can be at {path}: give an absolute path, or {SCHEME}host:port of a server")
        if not path.startswith(SCHEME) and not os.path.isabs(path):
            raise Invalid(f"the path {path!r} is relative, and Spark's processes run elsewhere: give an absolute one")
        name = options.get("table", "")
        if table and not name:
            near = difflib.get_close_matches("table", options, 1)
            hint = f", which is not spelt {near[0]}" if near else ""
            raise Invalid(f"say which table of {path}: .option('table', 'name'){hint}")
        environment = os.environ if path.startswith(SCHEME) else {}
        token = options.get("token") or environment.get("PENSTOCK_TOKEN", "")
        authority = options.get("authority") or environment.get("PENSTOCK_AUTHORITY", "")
        changes = choice(options, "changes", ("false", "true")) == "true"
        reads = cast(Reads, choice(options, "reads", READS))
        return cls(path.rstrip("/"), name, token, authority, changes, reads)

    def store(self) -> RemoteStore:
        """Return this process's connection to the store."""
        key = threads.process_id(), self.path, self.token + self.reads
        with _lock:
            store = _stores.get(key)
            if store is None or _uuid(self.path) not in (None, store.uuid):  # the folder has another now
                store = _stores[key] = connect(
                    self.path, token=self.token or None, authority=self.authority or None, reads=self.reads
                )
                freeze_imports()
            return store

    def info(self) -> TableInfo:
        """Return the table; `NotFound`, with similar names, if it does not exist."""
        info = self.store().port.table(self.table)
        if info is None:
            raise self._unknown()
        return info

    def _unknown(self) -> NotFound:
        names = [info.name for info in self.store().port.tables() if info.name != self.table]
        near, listing = difflib.get_close_matches(self.table, names, 3), ", ".join(names[:10])
        hint = f"did you mean {' or '.join(near)}?" if near else f"it has {listing or 'none'}; make a new one first"
        return NotFound(f"there is no table {self.table} in {self.path}: {hint}")

    @property
    def root(self) -> str | None:
        """The store's folder, if this process sees it and it holds this store."""
        store = self.store()
        return store.path if store.port.shares_files and _uuid(store.path) == store.uuid else None

    def plan(self, names: Iterable[str] = (), *, source: str = "", consumer: str = "") -> BatchTables:
        """Return the tables that a batch writes to and the state of its source, in one request."""
        store, table_names = self.store(), list(names)
        plan = store.port.plan_batch(table_names, source=source, consumer=consumer, changes=self.changes)
        if source and plan.source is None:
            raise replace(self, table=source)._unknown()
        infos = {info.name: info for info in plan.tables}
        tables = {}
        for name in table_names:
            ref = replace(self, table=name, changes=False)
            if name not in infos:
                raise ref._unknown()
            tables[name] = PlannedTable(ref, infos[name], store.path, (store.identity, store.uuid), plan.time_us)
        return BatchTables(tables, plan.source)

    def source_state(
        self, start: Mapping[int, int] | None = None, rows_max: int = 0, bytes_max: int = 0, begin: str = ""
    ) -> wire.SourceState:
        """Return the state of a streamed table, and where a batch from `start` ends, in one request.

        Its position is where a stream with the option start=`begin` begins.
        """
        port = self.store().port
        state = port.plan_batch(
            [],
            source=self.table,
            start=start,
            rows_max=rows_max,
            bytes_max=bytes_max,
            begin=begin,
            changes=self.changes,
        ).source
        if state is None:
            raise self._unknown()
        return state

    def planned(self) -> PlannedTable:
        """Return the table, planned for a job that writes to it."""
        return self.plan([self.table]).tables[self.table]


@dataclass(frozen=True)
class PlannedTable:
    """A table when a job was planned. Tasks get it with their work: they prepare few rows without a request."""

    ref: TableRef
    info: TableInfo
    store_path: str  # as seen by the planner or the owner
    identity: tuple[bytes, bytes]  # of the store's files, and its UUID
    time_us: int  # the store's

    @property
    def kind(self) -> Kind:
        return kind_named(self.info.kind, self.info.name)


@dataclass(frozen=True)
class BatchTables:
    """The tables of a batch by name, and the state of its source."""

    tables: dict[str, PlannedTable]
    source: wire.SourceState | None


def check_options(options: Mapping[str, str], *more: str) -> None:
    """Raise `Invalid` for an unknown option: a misspelt one would be ignored silently."""
    spellings = {name.lower(): name for name in (*OPTIONS, *more)}
    for name in options:
        if name.lower() not in spellings:
            near = [spellings[match] for match in difflib.get_close_matches(name.lower(), spellings, 1)]
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(spellings.values())}"
            raise Invalid(f"there is no option {name}: {hint}")


def choice(options: Mapping[str, str], name: str, allowed: tuple[str, ...]) -> str:
    """Return an option that is one of the `allowed` words; by default the first."""
    value = options.get(name, allowed[0])
    if value not in allowed:
        raise Invalid(f"option {name} is {value!r}: use one of {', '.join(allowed)}")
    return value


def check_range(start: bytes, end: bytes | None) -> None:
    """Raise `Invalid` if `start` is above `end`."""
    if end is not None and start > end:
        raise Invalid(f"start ({start!r}) is above end ({end!r}): exchange them")


def query_name(function: str) -> str:
    """Return the name of this task's query, as reads of tables in the same query have it."""
    context = TaskContext.get()
    if context is None:
        raise Invalid(f"{function} runs in Spark's tasks")
    number, app = context.getLocalProperty("spark.sql.execution.id"), context.getLocalProperty("spark.app.id")
    return f"{function}-stage-{app}-{context.stageId()}" if number is None or app is None else f"{app}-{number}"


def freeze_imports() -> None:
    """Exclude imported modules from garbage collection, in a process that runs tasks.

    Spark collects garbage there after every task, which takes some 40 ms for the objects of Arrow and Spark.
    """
    process = threads.process_id()
    if process not in _frozen and TaskContext.get() is not None:
        _frozen.add(process)
        gc.collect()
        gc.freeze()


def _uuid(folder: str) -> bytes | None:
    """Return the UUID of the store in a folder; None if this process sees none."""
    return read_uuid(OsFileSystem(), folder)


def build_context(table: PlannedTable) -> AbstractContextManager[BuildContext]:
    """Return the context in which a task builds files. It calls the owner only when a file is begun."""
    freeze_imports()
    return building(lambda: table.ref.store().port, table.store_path, table.identity, table.time_us, LEASE_S)
