"""Answers clients that use the archive of a store. What it costs and deletes concerns all tables: rights to all.

Thread: any.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.protocol import wire
from penstock.server.rights import ADMIN
from penstock.server.work import Work
from penstock.store.archive_settings import ArchiveReport, EvictReport, VerifyReport
from penstock.store.store import Store


class ArchiveRequests:
    """The requests about the archive."""

    def __init__(self, store: Store) -> None:
        self._store = store

    @property
    def answers(self) -> dict[type, Callable[[Any, Work], Any]]:
        return {
            wire.ArchiveStore: self._archive,
            wire.EvictFiles: self._evict,
            wire.RehydrateFiles: self._rehydrate,
            wire.VerifyArchive: self._verify,
            wire.CollectArchive: self._collect,
        }

    def _archive(self, _: wire.ArchiveStore, work: Work) -> ArchiveReport:
        work.rights.check_everywhere(ADMIN)
        return self._store.archive()

    def _evict(self, request: wire.EvictFiles, work: Work) -> EvictReport:
        work.rights.check_everywhere(ADMIN)
        return self._store.evict(request.name, local_bytes=request.local_bytes)

    def _rehydrate(self, request: wire.RehydrateFiles, work: Work) -> int:
        work.rights.check_everywhere(ADMIN)
        return self._store.rehydrate(request.name)

    def _verify(self, request: wire.VerifyArchive, work: Work) -> VerifyReport:
        work.rights.check_everywhere(ADMIN)
        return self._store.verify_archive(request.name)

    def _collect(self, _: wire.CollectArchive, work: Work) -> int:
        work.rights.check_everywhere(ADMIN)
        return self._store.collect_archive()
