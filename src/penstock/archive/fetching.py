"""Reads archived sstables in a process that is not the store's owner, such as a task of Spark.

The plan gives the URL of the archive and the key of the object; the credentials are those of this process'
environment. Fetched files stay in a folder of this process, up to a limit on their size, until it ends.

Thread: any.
"""

from __future__ import annotations

from functools import lru_cache

from penstock.archive.file_cache import FileCache
from penstock.archive.object_urls import open_objects
from penstock.archive.objects import INDEX, ObjectStore
from penstock.archive.retrying import RetryingObjects, RetrySettings
from penstock.archive.transfer import fetch, fetch_index
from penstock.host.clock import SystemClock
from penstock.host.os_files import OsFileSystem
from penstock.host.private_files import temporary_folder
from penstock.host.randomness import system_random

CACHE_BYTES_MAX = 1 << 30
REQUEST_S, RETRY = 60.0, RetrySettings(attempts_max=4, timeout_s=60.0)
_DATA, _INDEX = ".sst", ".idx"


@lru_cache(maxsize=16)
def _objects(url: str) -> ObjectStore:
    objects = open_objects(url, OsFileSystem(), request_timeout_s=REQUEST_S)
    return RetryingObjects(objects, clock=SystemClock(), random=system_random(), settings=RETRY)


@lru_cache(maxsize=1)
def _cache() -> FileCache:
    return FileCache(OsFileSystem(), temporary_folder("penstock-archive-"), CACHE_BYTES_MAX)


def fetched_table(url: str, key: str, path: str) -> tuple[str, str]:
    """Return the paths of an sstable and of its copy: `Sstable.open` takes them. Its index is beside the first one.

    `path` is the sstable's own; its index is fetched, too, if this process does not see it there.
    """
    files, objects = OsFileSystem(), _objects(url)
    has_index = files.exists(path.removesuffix(_DATA) + _INDEX)

    def fetch_both(target: str) -> None:
        fetch_index(files, objects, key, target + INDEX)
        fetch(files, objects, key, target)

    copy = _cache().path_of(key, fetch_both)
    return (path if has_index else copy + _DATA), copy
