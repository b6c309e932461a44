"""`penstock.reattach`: a store from its archive, without an open one.

Thread: any.
"""

from __future__ import annotations

from pathlib import Path

from penstock.archive.object_urls import check_url, open_objects
from penstock.archive.retrying import RetryingObjects
from penstock.arguments import in_short, whole
from penstock.errors import Invalid
from penstock.host import threads
from penstock.host.clock import SystemClock
from penstock.host.file_errors import translate_os_errors
from penstock.host.os_files import OsFileSystem
from penstock.host.randomness import system_random
from penstock.manifest.environment import LmdbEngine
from penstock.protocol.folder import store_folder
from penstock.store.backup_folder import NUMBER_MAX
from penstock.store.reattach import Reattachment, ReattachReport


def reattach(url: str, path: str | Path, *, store: str | None = None, number: int | None = None) -> ReattachReport:
    """Make a store in `path`, which must not exist or be empty, from its archive at `url`: its disk was lost.

    It holds what the newest archive run holds (`number` names another). Its sstables stay in the archive until they are
    read. `store`: the UUID of the archived store, as hex digits, if the archive has several. The new store has a UUID
    of its own and never deletes what it inherited.

    >>> report = store.archive()
    >>> report = penstock.reattach(store.archive_url, "again")
    >>> with penstock.open("again") as again:
    ...     again.kv("users")[b"ada"]
    b'1815'
    """
    url, target = check_url(url), store_folder(path)
    if store is not None and not isinstance(store, str):
        raise Invalid(f"store is a UUID as 32 hex digits, not {in_short(store)}")
    number = None if number is None else whole(number, "number", 1, NUMBER_MAX)
    files, clock, random, cancelled = OsFileSystem(), SystemClock(), system_random(), list[bool]()
    objects = RetryingObjects(open_objects(url, files), clock=clock, random=random)
    work = Reattachment(files, objects, clock=clock, random=random, engine=LmdbEngine, stop=lambda: bool(cancelled))
    with translate_os_errors():
        return threads.run_uninterrupted(lambda: work.run(target, store, number), cancel=lambda: cancelled.append(True))
