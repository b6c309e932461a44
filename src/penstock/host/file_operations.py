"""File operations of several steps: durable renames, reserved space, folder trees.

They use only the protocols, so that crash tests see every step.

Thread: any.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterator

from penstock.errors import DiskFull
from penstock.host.file_errors import is_disk_full
from penstock.host.files import Buffer, File, FileSystem
from penstock.host.paths import parent

logger = logging.getLogger(__name__)
_ZEROS = bytes(1 << 20)


def write_fully(write_some: Callable[[memoryview, int], int], data: Buffer, offset: int) -> None:
    """Call `write_some(rest, offset)` until all of `data` is written."""
    rest = memoryview(data).cast("B")
    while rest:
        try:
            written = write_some(rest, offset)
        except InterruptedError:
            continue
        if written <= 0:
            raise OSError(errno.EIO, "a write made no progress")
        rest = rest[written:]
        offset += written


def read_fully(read_some: Callable[[int, int], bytes], size: int, offset: int) -> bytes:
    """Call `read_some(size, offset)` until `size` bytes are read or the file ends."""
    parts: list[bytes] = []
    while size > 0:
        try:
            part = read_some(size, offset)
        except InterruptedError:
            continue
        if not part:
            break
        parts.append(part)
        size -= len(part)
        offset += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def zero_fill(file: File, start: int, end: int) -> None:
    """Write zeros over [start, end): an fdatasync of written blocks need not commit a new file size or extent."""
    while start < end:
        size = min(end - start, len(_ZEROS))
        file.pwrite(memoryview(_ZEROS)[:size], start)
        start += size


def claim(file: File, claimed: int, end: int, size: int, step: int) -> int:
    """Reserve space for an append of `size` bytes at `end`; return the offset up to which space is reserved now.

    `claimed` is that offset so far. `DiskFull` if there is no space; nothing was written then. Small appends get
    zero-filled space ahead, in multiples of `step`, so that their fdatasync need not write a new file size. A large
    append would be written twice that way, so it gets its exact range.
    """
    needed = end + size
    if needed <= claimed:
        return claimed
    ahead = size * 8 < step
    target = -(-needed // step) * step if ahead else needed
    try:
        file.allocate(claimed, target - claimed)
        if ahead:
            zero_fill(file, claimed, target)
    except OSError as error:
        if not is_disk_full(error):
            raise
        if target > needed:  # the disk has no room for a whole step: reserve only what is needed
            return claim(file, claimed, end, size, 1)
        reason = "free some space" if error.errno != errno.EFBIG else "raise the limit of a file (ulimit -f)"
        raise DiskFull(f"{file.path} cannot grow by {size} bytes: {reason}, then retry") from error
    return target


def publish(fs: FileSystem, file: File, target: str) -> None:
    """Sync a file and rename it to `target`, durably: `target` is never seen incomplete."""
    file.fsync()  # before the rename: a name must never lead to missing bytes
    rename_durably(fs, file.path, target)


def rename_durably(fs: FileSystem, source: str, target: str) -> None:
    """Rename a synced file and make the new name durable. After an error either name may exist.

    On `ProcessLimit` nothing has changed: the folder is opened first.
    """
    with fs.folder(parent(target)) as folder:
        fs.rename(source, target)
        folder.fsync()


def make_dirs(fs: FileSystem, path: str) -> None:
    """Create a folder and its parents, durably.

    Existing folders are synced too: the process that created one may have died before its sync.
    """
    above = parent(path)
    if above == path:
        return
    make_dirs(fs, above)
    existed = fs.exists(path)
    if not existed:
        fs.mkdir(path)
    try:
        fs.fsync_dir(above)
    except OSError as error:
        # A folder that we may not read, or whose file system has no fsync, was not created by us.
        if not existed or error.errno not in (errno.EACCES, errno.EPERM, errno.EINVAL, errno.EROFS, errno.ENOTSUP):
            raise


def remove_file(fs: FileSystem, path: str) -> bool:
    """Unlink a file that is no longer needed; return whether it is gone. One that stays only costs space."""
    try:
        fs.unlink(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        logger.warning("%s could not be removed (%s): this is retried later", path, error)
        return False
    return True


def walk(fs: FileSystem, folder: str, below: str = "") -> Iterator[str]:
    """Yield the paths of all files below a folder, relative to it; none if there is no such folder."""
    try:
        names = sorted(fs.listdir(f"{folder}/{below}".rstrip("/")))
    except FileNotFoundError:
        return
    for name in names:
        try:
            yield from walk(fs, folder, f"{below}{name}/")
        except NotADirectoryError:
            yield f"{below}{name}"


def remove_folder(fs: FileSystem, path: str) -> None:
    """Remove a folder tree, if it exists. Not durable: repeat it after a crash."""
    if not fs.exists(path):
        return
    for name in fs.listdir(path):
        try:
            fs.unlink(f"{path}/{name}")
        except (IsADirectoryError, PermissionError):  # some systems raise the second for a folder
            remove_folder(fs, f"{path}/{name}")
    fs.rmdir(path)
