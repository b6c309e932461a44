"""Translation of operating-system errors into Penstock's: which file failed, and what to do about it.

Thread: any.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from penstock.errors import CorruptionError, DiskFailed, DiskFull, Invalid, PenstockError, ProcessLimit, StoreLocked
from penstock.host import threads

_WRONG_TYPE = (IsADirectoryError, NotADirectoryError, FileExistsError)
_NO_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM)
_WRONG_PATH = (errno.ENOENT, errno.ENAMETOOLONG, errno.ELOOP)
_NO_ACCESS = (errno.EPERM, errno.EACCES, errno.EROFS)
_ACCESS = "give this user read and write access to the whole store, or read it with penstock.open(read_only=True)"


@contextmanager
def translate_os_errors() -> Iterator[None]:
    """Raise Penstock's error for an `OSError` in the block, naming the file and the remedy."""
    try:
        yield
    except PenstockError:  # some are subclasses of `OSError`
        raise
    except OSError as error:
        threads.raise_interrupt(error)
        raise _translated(error) from error


def _translated(error: OSError) -> PenstockError:
    where, reason = error.filename or "a file of the store", error.strerror or str(error)
    if is_disk_full(error):
        return DiskFull(f"{where} has no room, the disk is full: free some space, then retry")
    if error.errno in _NO_RESOURCES:
        return ProcessLimit(f"{where} cannot be used ({reason}): close other files or processes, or raise the limit")
    if isinstance(error, _WRONG_TYPE):
        return _wrong_type(error)
    if error.errno == errno.ELOOP:
        return Invalid(f"{where} is a link to itself: restore the file it should point to")
    if error.errno == errno.ENAMETOOLONG:
        return Invalid(f"{where[:80]} is too long a path ({len(where)} characters): give a shorter one")
    if error.errno in _NO_ACCESS:
        return Invalid(f"{where} cannot be used ({reason}): {_ACCESS}")
    return DiskFailed(f"{where} cannot be used ({reason}): check the disk, then retry")


@contextmanager
def translate_open_errors(path: str) -> Iterator[None]:
    """Raise Penstock's error for an `OSError` while a store is opened or its owner is contacted."""
    try:
        yield
    except (PenstockError, TimeoutError):
        raise
    except _WRONG_TYPE as error:
        raise _wrong_type(error) from error
    except OSError as error:
        threads.raise_interrupt(error)
        reason = f"{error.strerror or error} ({error.filename or path})"
        if error.errno in _NO_RESOURCES:
            raise ProcessLimit(
                f"{path} cannot be reached, nothing was changed: {reason}; close other files, sockets or processes"
            ) from error
        if is_disk_full(error):
            raise DiskFull(f"{path} cannot be opened, the disk is full: free some space") from error
        if error.errno in _NO_ACCESS:
            raise Invalid(f"{path} cannot be opened: {reason}; {_ACCESS}") from error
        if error.errno in _WRONG_PATH:
            raise Invalid(f"{path} cannot be opened: {reason}; fix the folder, or give another path") from error
        raise StoreLocked(f"{path} could not be opened: {reason}; try again") from error


def _wrong_type(error: OSError) -> Invalid:
    where, kind = error.filename or "a file", "folder"
    if isinstance(error, IsADirectoryError):
        kind = "file"
    elif isinstance(error, NotADirectoryError):  # it names the path that was requested: the file in its way is above
        above = where
        while above != os.path.dirname(above) and not os.path.isfile(above):
            above = os.path.dirname(above)
        where = above if os.path.isfile(above) else where
    return Invalid(f"{where} is not a {kind}, but the store needs one there: move it elsewhere, or give another path")


def unreadable(error: OSError, path: str) -> CorruptionError:
    """Return the damage that a failed read of a file means; raise errors that are about the process instead."""
    if isinstance(error, ProcessLimit) or error.errno in _NO_RESOURCES:
        raise error
    return CorruptionError(error.filename or path, 0, f"it cannot be read ({error.strerror or error})")


def is_disk_full(error: OSError) -> bool:
    """Return whether an error means that there is no space, within the quota and the limit of a file (`ulimit -f`)."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def ran_out_of_space(error: BaseException | None) -> bool:
    """Return whether an error or one of its causes is a full disk."""
    while error is not None:
        if isinstance(error, DiskFull) or (isinstance(error, OSError) and is_disk_full(error)):
            return True
        error = error.__cause__
    return False
