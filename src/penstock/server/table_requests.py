"""Answers clients that describe, configure and drain tables, wait for their changes, or trigger tasks.

Thread: any.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.errors import Invalid, NotFound
from penstock.partition.ledger_records import TableInfo
from penstock.protocol import wire
from penstock.registry import check_name
from penstock.server.rights import ADMIN, READ
from penstock.server.work import Work
from penstock.store.store import Store
from penstock.store.table_description import TableDescription


class TableRequests:
    """The requests about tables as a whole."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._port = store.port

    @property
    def answers(self) -> dict[type, Callable[[Any, Work], Any]]:
        return {
            wire.AlterTable: self._alter,
            wire.ConfigureTable: self._configure,
            wire.DescribeTable: self._describe,
            wire.WaitForChange: self._wait_for_change,
            wire.DrainTable: self._drain,
            wire.ReactivateTable: self._reactivate,
            wire.TriggerTask: self._trigger,
            wire.ListTasks: self._list_tasks,
        }

    def _alter(self, request: wire.AlterTable, work: Work) -> TableInfo:
        info = self._administered(request.table, work)
        return info if info.options != request.before else self._port.alter(info, request.options)

    def _configure(self, request: wire.ConfigureTable, work: Work) -> TableInfo:
        info = self._administered(request.table, work)
        return info if info.storage != request.before else self._port.configure(info, request.storage)

    def _administered(self, table: int, work: Work) -> TableInfo:
        info = self._port.table_by_id(table)
        if info is None:
            raise NotFound(f"table {table} was dropped")
        work.rights.check(READ, info.name)  # first: without the right to read, a client must not learn a table's kind
        work.rights.check(ADMIN, info.name)
        return info

    def _describe(self, request: wire.DescribeTable, work: Work) -> TableDescription:
        work.rights.check(READ, check_name(request.name))
        return self._store.describe(request.name)

    def _wait_for_change(self, request: wire.WaitForChange, work: Work) -> TableDescription:
        work.rights.check(READ, check_name(request.name))
        if not 0 <= request.timeout_s <= wire.WAIT_S_MAX:
            raise Invalid(f"a wait lasts 0 to {wire.WAIT_S_MAX:g} s")
        return self._store.wait_for_change(request.name, request.after, timeout_s=request.timeout_s)

    def _drain(self, request: wire.DrainTable, work: Work) -> TableDescription:
        work.rights.check(ADMIN, check_name(request.name))
        return self._store.drain(request.name, timeout_s=request.timeout_s)

    def _reactivate(self, request: wire.ReactivateTable, work: Work) -> TableDescription:
        work.rights.check(ADMIN, check_name(request.name))
        return self._store.reactivate(request.name)

    def _trigger(self, request: wire.TriggerTask, work: Work) -> None:
        work.rights.check_everywhere(ADMIN)
        self._store.trigger(request.task)

    def _list_tasks(self, _: wire.ListTasks, work: Work) -> list[str]:
        work.rights.check_everywhere(READ)
        return self._store.tasks()
