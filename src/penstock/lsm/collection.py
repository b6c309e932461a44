"""Collection: deletes files of trees that are not listed, read or being written.

Thread: one at a time (`_lock`).
Invariants: (1) a file is deleted only if it is not listed, not about to be listed, and not in a version in use. (2) a
file older than this open of the store stays while a reader from before it may exist (`readers.py`); newer files can be
read only through a version of this process. (3) a file of this process that is unlisted and known only by its name is
deleted after a grace period, or when the store closes: it may be about to be listed. One of an earlier process
needs no grace period, only (2): ids are never reused.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass

from penstock.arguments import set_seconds
from penstock.errors import WaitExpired
from penstock.host import threads
from penstock.host.clock import Clock
from penstock.host.file_operations import remove_file
from penstock.host.files import FileSystem
from penstock.lsm.catalog import Catalog
from penstock.lsm.maintenance import Maintenance
from penstock.lsm.readers import ReaderLeases
from penstock.lsm.tree import Tree
from penstock.lsm.writer import index_path
from penstock.manifest.keys import ChunkKey, ComponentId
from penstock.manifest.manifest import Manifest

logger = logging.getLogger(__name__)

GRACE_S_MAX = 3650 * 86_400.0
_FILE = re.compile(r"([0-9]{20})\.[a-z]+(?:\.tmp)?")  # sstables, their indexes, and what loads staged


@dataclass(frozen=True, kw_only=True)
class CollectionSettings:
    """How long an unlisted file is left alone.

    >>> penstock.StoreSettings(collection=penstock.CollectionSettings(grace_s=60)).collection.grace_s
    60.0
    """

    grace_s: float = 60.0
    dropped_grace_s: float = 3_600.0  # how long descriptor, metrics and archived objects of a dropped table stay

    def __post_init__(self) -> None:
        set_seconds(self, ("grace_s", "dropped_grace_s"), GRACE_S_MAX)


class Collector:
    """Deletes unneeded files."""

    def __init__(
        self,
        maintenance: Maintenance,
        manifest: Manifest,
        *,
        fs: FileSystem,
        root: str,
        clock: Clock,
        settings: CollectionSettings | None = None,
    ) -> None:
        self._maintenance = maintenance
        self._manifest = manifest
        self._fs = fs
        self._root = root
        self._clock = clock
        self._settings = settings or CollectionSettings()
        self._lock = threads.lock("lsm.collector")
        self.readers = ReaderLeases(manifest, clock, self._settings.grace_s)
        self._last_old_id = manifest.generation(ComponentId.CHUNK_IDS)  # ids up to here are from before this open
        self._unlisted_since_s: dict[str, float] = {}  # guarded by _lock; by file name, when it was first seen

    def collect(self, *, closing: bool = False) -> int:
        """Delete unneeded files and return their number. `closing`: no file is about to be listed."""
        with self._lock:
            if self.readers.holders:
                return 0
            now_s = self._clock.monotonic_s()
            old_may_go = self.readers.may_remove()
            removed, unlisted_since_s = 0, {}
            for tree, catalog in self._maintenance.trees():
                for meta in tree.use.unread():
                    if old_may_go or meta.chunk_id > self._last_old_id:
                        for name in (meta.file_name, index_path(meta.file_name)):
                            removed += self._remove(name)
                        tree.use.removed(meta)
                for name in self._unlisted(tree, catalog):
                    since_s, chunk_id = self._unlisted_since_s.get(name, now_s), _chunk_id(name)
                    assert chunk_id is not None
                    if chunk_id <= self._last_old_id:
                        may_go = old_may_go
                    else:
                        may_go = closing or now_s - since_s >= self._settings.grace_s
                    if not may_go:
                        unlisted_since_s[name] = since_s
                    elif chunk_id not in tree.use.ids():  # checked again: it may be announced by now
                        removed += self._remove(name)
            self._unlisted_since_s = unlisted_since_s
            return removed

    def await_end(self, timeout_s: float) -> None:
        """Wait for a removal that is under way; `WaitExpired` if the file system does not respond."""
        if not self._lock.acquire(timeout=timeout_s):
            raise WaitExpired(f"{self._root}: unneeded files are being removed, and this takes too long: retry later")
        self._lock.release()

    def _unlisted(self, tree: Tree, catalog: Catalog) -> list[str]:
        # In this order: a new file is announced before it has a name, and until after it is listed.
        try:
            names = self._fs.listdir(f"{self._root}/{catalog.folder}")
        except FileNotFoundError:  # its table was dropped meanwhile: this must not keep the other trees' files
            return []
        in_use = tree.use.ids()
        return [
            f"{catalog.folder}/{name}"
            for name in names
            if (chunk_id := _chunk_id(name)) is not None
            and chunk_id not in in_use
            and self._manifest.get_chunk(ChunkKey(catalog.db_id, chunk_id)) is None
        ]

    def _remove(self, file_name: str) -> int:
        path = f"{self._root}/{file_name}"
        return int(self._fs.exists(path) and remove_file(self._fs, path))  # a file that stays is found unlisted later


def _chunk_id(name: str) -> int | None:
    """Return the chunk id in a file's name; None for files that are not ours."""
    match = _FILE.fullmatch(name.rsplit("/", 1)[-1])
    return None if match is None else int(match[1])
