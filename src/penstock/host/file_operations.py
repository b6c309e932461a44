"""Operations on files that are more than one call: durable names, claimed space, folders.

They work on any `FileSystem`, so that crash tests see every step.

Thread: any.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable

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
    """Call `read_some(size, offset)` until `size` bytes are there or the file ends."""
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
    """Claim space for `size` bytes at `end` in a file that has it up to `claimed`; up to where it has it then.

    `DiskFull` if there is none, with nothing written. Small appends are given zero-filled room ahead, in steps, so that
    their fdatasync writes no new file size. A large one would pay twice for that, so it gets its exact range.
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
        if target > needed:  # the last bytes of a disk are for those who need no more than that
            return claim(file, claimed, end, size, 1)
        raise DiskFull(f"{file.path} cannot grow by {size} bytes: free some space, then retry") from error
    return target


def publish(fs: FileSystem, file: File, target: str) -> None:
    """Make `file` appear as `target`, whole or not at all, and for good."""
    file.fsync()  # before the rename: a name must never lead to missing bytes
    reveal(fs, file.path, target)


def reveal(fs: FileSystem, source: str, target: str) -> None:
    """Rename a synced file, for good. After an error it may be there under either name.

    But for `ProcessLimit`: the folder is opened first, so that nothing has changed then.
    """
    with fs.folder(parent(target)) as folder:
        fs.rename(source, target)
        folder.fsync()


def make_dirs(fs: FileSystem, path: str) -> None:
    """Make a folder and those above it, each durable in its parent.

    One that is there already is synced too: whoever made it may have died before that.
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
        # A folder that may be passed but not read, or that knows no fsync, is not of our making.
        if not existed or error.errno not in (errno.EACCES, errno.EPERM, errno.EINVAL, errno.EROFS, errno.ENOTSUP):
            raise


def remove_file(fs: FileSystem, path: str) -> bool:
    """Unlink a file that nobody needs; whether it is gone. One that stays takes space and does no other harm."""
    try:
        fs.unlink(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        logger.warning("%s could not be removed (%s): it is tried again later", path, error)
        return False
    return True


def remove_folder(fs: FileSystem, path: str) -> None:
    """Remove a folder and all that is in it, if it is there. Not durable: after a crash, do it again."""
    if not fs.exists(path):
        return
    for name in fs.listdir(path):
        try:
            fs.unlink(f"{path}/{name}")
        except (IsADirectoryError, PermissionError):  # the second is what some systems say of a folder
            remove_folder(fs, f"{path}/{name}")
    fs.rmdir(path)
