"""Errors of the operating system, turned into Penstock's: which file it was, and what to do about it.

Thread: any.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from penstock.errors import DiskFailed, DiskFull, Invalid, PenstockError, ProcessLimit, StoreLocked

_MISPLACED = (IsADirectoryError, NotADirectoryError, FileExistsError)
_NO_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM)
_WRONG_PATH = (errno.ENOENT, errno.ENAMETOOLONG, errno.ELOOP, errno.EPERM, errno.EACCES, errno.EROFS)


@contextmanager
def explained() -> Iterator[None]:
    """Let no bare `OSError` reach the caller: say which file it was, and what to do about it."""
    try:
        yield
    except PenstockError:  # some of them are an `OSError`, too
        raise
    except OSError as error:
        raise _explanation(error) from error


def _explanation(error: OSError) -> PenstockError:
    where, reason = error.filename or "a file of the store", error.strerror or str(error)
    if is_disk_full(error):
        return DiskFull(f"{where} has no room, the disk is full: free some space, then retry")
    if isinstance(error, _MISPLACED):
        return _misplaced(error)
    if error.errno == errno.ELOOP:
        return Invalid(f"{where} is a link that leads to itself: put back what it stands for")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return Invalid(f"{where} cannot be used ({reason}): let this user read and write the whole store")
    return DiskFailed(f"{where} cannot be used ({reason}): look at the disk, then retry")


@contextmanager
def typed(path: str) -> Iterator[None]:
    """Turn errors of the system on the way to a store into those of Penstock, by what to do about them."""
    try:
        yield
    except (PenstockError, TimeoutError):
        raise
    except _MISPLACED as error:
        raise _misplaced(error) from error
    except OSError as error:
        reason = f"{error.strerror or error} ({error.filename or path})"
        if error.errno in _NO_RESOURCES:
            raise ProcessLimit(
                f"{path} cannot be reached, nothing was changed: {reason}; close other files, sockets or processes"
            ) from error
        if is_disk_full(error):
            raise DiskFull(f"{path} cannot be opened, the disk is full: free some space") from error
        if error.errno in _WRONG_PATH:
            raise Invalid(f"{path} cannot be opened: {reason}; see to the folder, or give another path") from error
        raise StoreLocked(f"{path} could not be opened: {reason}; try again") from error


def _misplaced(error: OSError) -> Invalid:
    wanted = "file" if isinstance(error, IsADirectoryError) else "folder"
    return Invalid(f"{error.filename or 'something'} is in the place of a {wanted} of the store: move it elsewhere")


def is_disk_full(error: OSError) -> bool:
    """Whether an error says that space (or quota) ran out."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def ran_out_of_space(error: BaseException | None) -> bool:
    """Whether an error, or one that led to it, is a full disk."""
    while error is not None:
        if isinstance(error, DiskFull) or (isinstance(error, OSError) and is_disk_full(error)):
            return True
        error = error.__cause__
    return False
