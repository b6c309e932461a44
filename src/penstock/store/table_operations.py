"""What an owner does with a table as a whole, and with background tasks: describe, drain, wait for changes, trigger.

Thread: any.
"""

from __future__ import annotations

import math
from functools import partial

from penstock.arguments import seconds, text, whole
from penstock.errors import Invalid, WaitExpired
from penstock.host import threads
from penstock.host.file_errors import translate_os_errors
from penstock.kinds import partitions_of
from penstock.partition.ledger_records import TableInfo, TableStatus
from penstock.store.opening import OpenedParts
from penstock.store.table_description import TableDescription
from penstock.store.tables import DRAIN_S, GENERATION_MAX

LOOK_S = 1.0  # a waiter checks this often whether the store was closed


class TableOperations(OpenedParts):
    """The operations on tables that need the parts of an open store."""

    def describe(self, name: str) -> TableDescription:
        """Return how a table is stored, how far each shard is, and the gates of its jobs.

        >>> store.describe("users").kind
        'kv'
        """
        return self._registry.describe(self._info(name))

    def wait_for_change(self, name: str, after: int, *, timeout_s: float = 60.0) -> TableDescription:
        """Wait until the description of a table has a later generation than `after`; return it.

        Its options, or whether it drains, changed. `NotFound` as soon as it is dropped, `WaitExpired` after `timeout_s`
        seconds.

        >>> generation = store.describe("users").generation
        >>> options = store.alter("users", retention=penstock.RetentionPolicy())
        >>> changed = store.wait_for_change("users", generation - 1, timeout_s=10.0)
        """
        after, timeout_s = whole(after, "after", 0, GENERATION_MAX), seconds(timeout_s, "timeout_s", math.inf)
        info, deadline_s = self._info(name), self._clock.monotonic_s() + timeout_s

        def find() -> TableInfo:
            self._check_usable()
            return self._port._existing(info.table_id)

        while True:
            left_s = deadline_s - self._clock.monotonic_s()
            try:
                return self._registry.wait_for_change(find, after, max(0.0, min(left_s, LOOK_S)))
            except WaitExpired:
                if left_s <= LOOK_S:
                    raise WaitExpired(f"table {name} has not changed within {timeout_s:g} s: wait again") from None

    def drain(self, name: str, *, timeout_s: float = DRAIN_S) -> TableDescription:
        """Refuse new rows of a table, also after a restart, and put all that was written into its files.

        Reads, deletes and acknowledgements go on; writes raise `TableDraining`. Then it can be dropped, copied, or take
        writes again (`reactivate`). A write that another thread had begun may still be applied.

        >>> store.drain("users").status, store.reactivate("users").status
        ('draining', 'active')
        """
        info, timeout_s = self._info(name), seconds(timeout_s, "timeout_s", math.inf)
        self._check_writable()
        deadline_s = self._clock.monotonic_s() + timeout_s
        info = self._port.set_status(info, TableStatus.DRAINING)
        self._port.flush(None, timeout_s)
        with translate_os_errors():
            for partition in partitions_of(info):
                self._port.machine(partition, max(0.0, deadline_s - self._clock.monotonic_s()))
                threads.run_uninterrupted(partial(self._checkpoint.store, partition))
        return self._registry.describe(info)

    def reactivate(self, name: str) -> TableDescription:
        """Let a table that was drained take writes again.

        >>> store.reactivate("users").status
        'active'
        """
        info = self._info(name)
        self._check_writable()
        return self._registry.describe(self._port.set_status(info, TableStatus.ACTIVE))

    def trigger(self, task: str) -> None:
        """Run a background task now, even while it waits after a failure; once more if it is running.

        `store.tasks()` names them. `NotFound` if there is no such task, `Invalid` if the store has no background.

        >>> store.trigger(store.tasks()[0])
        """
        task = text(task, "task", 127)
        self._check_background()
        self._scheduler.trigger(task)

    def tasks(self) -> list[str]:
        """Return the names of the background tasks, for `trigger` and `StoreSettings(task_intervals_s=)`.

        >>> len(store.tasks()) > 1
        True
        """
        self._check_background()
        return sorted(self._scheduler.statistics().tasks)

    def _check_background(self) -> None:
        self._check_usable()
        if not self._started:
            raise Invalid(f"{self.path} was opened without background tasks: open it with background=True, to write")
