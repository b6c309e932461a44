"""The services that the owner runs for tables, each made on first use: see `kinds.Serviced`.

Thread: any; `_lock` guards the services. A service is made under a lock of its table alone, because that may wait for a
shard that is late; it is reentrant: a service may use the port, and so this, while it is made.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from penstock.host import threads
from penstock.host.threads import Mutex
from penstock.kinds import Host, Serviced, TableService
from penstock.partition.ledger_records import TableInfo
from penstock.registry import kind_named

logger = logging.getLogger(__name__)


class TableServices:
    """The running services of a store."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._lock = threads.lock("local.services")
        self._making: dict[int, Mutex] = {}  # guarded by _lock; by table
        self._services: dict[int, TableService] = {}  # guarded by _lock; by table
        self._dropped: set[int] = set()  # guarded by _lock; tables
        self.find = self._services.get  # a service that runs, or None, without the lock

    def of(self, info: TableInfo) -> TableService | None:
        """Return the service of a table, made on first use; None if its kind has none."""
        service, kind = self._services.get(info.table_id), kind_named(info.kind, info.name)
        if service is not None or not isinstance(kind, Serviced):
            return service
        with self._lock:
            making = self._making.setdefault(info.table_id, threads.rlock("local.service"))
        with making:
            service = self._services.get(info.table_id)
            if service is None and info.table_id not in self._dropped:
                service = kind.service(info, self._host)
                with self._lock:
                    if info.table_id not in self._dropped:
                        self._services[info.table_id] = service
                        return service
                service.close()  # dropped meanwhile
                return None
            return service

    def running(self) -> dict[int, TableService]:
        """Return the services by table."""
        with self._lock:
            return dict(self._services)

    def end(self, table_id: int, *, is_dropped: bool = True) -> None:
        """Close the service of a table that was dropped, or whose files were replaced: its next use makes another."""
        with self._lock:
            if is_dropped:
                self._dropped.add(table_id)
                self._making.pop(table_id, None)  # else two threads could make a service at once
            service = self._services.pop(table_id, None)
        if service is not None:
            service.close()

    def has_leases(self) -> bool:
        """Whether a client holds a lease that would be lost if this process ended."""
        return any(service.has_leases() for service in self.running().values())

    def maintain(self, tables: Iterable[TableInfo]) -> None:
        """Let the service of every table do its maintenance; a failing service does not stop the others."""
        for info in tables:
            try:
                service = self.of(info)
                if service is not None:
                    service.maintain()
            except Exception as error:  # any: it must not delay the other tables
                logger.warning("maintenance of table %s failed (%s): it is tried again", info.name, error)

    def close(self) -> None:
        """Close the services; each answers its waiters."""
        for service in self.running().values():
            service.close()
