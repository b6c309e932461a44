"""New files and folders outside a store, such as keys: never over existing ones, and private on request.

Thread: any.
Invariant: a private file is never readable by others, not even while it is written.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterable
from contextlib import suppress

PRIVATE_MODE, PUBLIC_MODE = 0o600, 0o644


def write_new_files(folder: str, files: Iterable[tuple[str, bytes, bool]]) -> None:
    """Write (name, content, is_private) into `folder`, which is created: all of them, or none after an error.

    `FileExistsError` if one of them exists.
    """
    os.makedirs(folder, exist_ok=True)
    written: list[str] = []
    try:
        for name, content, is_private in files:
            path = os.path.join(folder, name)
            mode = PRIVATE_MODE if is_private else PUBLIC_MODE
            fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, mode)
            written.append(path)
            with os.fdopen(fd, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(fd)
    except BaseException:
        for path in written:
            with suppress(OSError):
                os.unlink(path)
        raise


def others_can_read(path: str) -> bool:
    """Whether a file exists that users other than its owner may read."""
    try:
        return bool(os.stat(path).st_mode & 0o077)
    except (OSError, ValueError):
        return False


def temporary_folder(prefix: str) -> str:
    """Create a folder that this user alone can use; it is removed when the process ends."""
    folder = tempfile.mkdtemp(prefix=prefix)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
