"""A store that is built beside its folder, and renamed when it is complete: by a restore, and by a reattachment.

Thread: any.
Invariants: (1) a folder at the target is a whole store. (2) nothing that was there is replaced. (3) what an attempt
that ended early left is recognised by its lock file, and removed by the next one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from penstock.errors import Invalid, StoreLocked
from penstock.host.file_operations import make_dirs, remove_folder
from penstock.host.files import FileSystem
from penstock.host.paths import parent

LOCK = "LOCK"  # a store's own: held while the copy is incomplete


@contextmanager
def built_beside(fs: FileSystem, path: str, suffix: str, *, keep: Collection[str] = ()) -> Iterator[str]:
    """Yield an empty folder beside `path`, which must not exist or be empty; rename it to `path` at the end.

    `keep`: files that stay there from an attempt that ended early.
    """
    if fs.exists(path) and fs.listdir(path):
        raise Invalid(f"{path} is not empty: give a new folder, nothing is replaced")
    work = path + suffix
    if fs.exists(work) and fs.listdir(work) and not fs.exists(f"{work}/{LOCK}"):
        raise Invalid(f"{work} is in the way, and is not of an earlier attempt: move it elsewhere")
    make_dirs(fs, work)
    try:
        lock = fs.lock(f"{work}/{LOCK}")
    except StoreLocked:
        raise StoreLocked(f"{path} is being made by another process: wait for its end") from None
    try:
        fs.fsync_dir(work)  # the lock file first: without it, what a crash leaves would not be recognised
        for name in fs.listdir(work):  # of an attempt that ended early
            if name != LOCK and name not in keep:
                try:
                    fs.unlink(f"{work}/{name}")
                except (IsADirectoryError, PermissionError):  # some systems raise the second for a folder
                    remove_folder(fs, f"{work}/{name}")
        yield work
        if fs.exists(path):
            fs.rmdir(path)
        fs.rename(work, path)
        fs.fsync_dir(parent(path))
    finally:
        lock.release()
