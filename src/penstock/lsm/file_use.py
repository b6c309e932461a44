"""Files of a tree that are needed although the manifest does not list them: not yet, or no longer.

A file is *announced* before it is written and withdrawn once it is listed, or never will be. A file that a compaction
replaced is *retired*: it is no longer listed, and is deleted when the last version that holds it is released.

Thread: any; `_lock` guards the sets. `_unread` is filled by finalizers, which may run in any thread and take no lock.
Invariant: a file that is neither listed nor in `ids` can be deleted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from penstock.host import threads
from penstock.lsm.version import FileMeta, TableFile


class FileUse:
    """The unlisted files of one tree."""

    def __init__(self) -> None:
        self._lock = threads.lock("lsm.file_use")
        self._announced: set[int] = set()  # guarded by _lock: chunk ids
        self._retired: set[int] = set()  # guarded by _lock: chunk ids
        self._unread: deque[FileMeta] = deque()  # retired files that no version holds

    def announce(self, chunk_ids: Iterable[int]) -> None:
        """Protect files that are about to be written, or to be unlisted, from collection."""
        with self._lock:
            self._announced.update(chunk_ids)

    def withdraw(self, chunk_ids: Iterable[int]) -> None:
        """End the protection of `announce`: the ids are listed now, or never will be."""
        with self._lock:
            self._announced.difference_update(chunk_ids)

    def retire(self, files: Iterable[TableFile]) -> None:
        """Mark files as no longer listed. Requires: the version without them is installed."""
        files = list(files)
        with self._lock:
            self._retired.update(file.meta.chunk_id for file in files)
        for file in files:
            file.retire(self._unread)

    def unread(self) -> list[FileMeta]:
        """Return the retired files without readers."""
        return list(self._unread)

    def removed(self, meta: FileMeta) -> None:
        """Forget a retired file: it was deleted, or collection will find it by its name."""
        self._unread.remove(meta)
        with self._lock:
            self._retired.discard(meta.chunk_id)

    def ids(self) -> set[int]:
        """Return the chunk ids of files that may be unlisted but are needed."""
        with self._lock:
            return self._announced | self._retired
