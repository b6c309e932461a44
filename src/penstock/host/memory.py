"""Returning freed memory from the C library to the system.

A store allocates and frees large buffers all the time. glibc keeps freed blocks in a heap per thread, so that a process
would hold several times the memory that its limits count. With another C library nothing is done.

Thread: any.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of malloc.h
_LARGE_BYTES = 1 << 20


@cache
def _library() -> Any:
    """Return glibc, set to map large blocks, which are unmapped when they are freed; None for another library."""
    try:
        library = ctypes.CDLL(None)
        library.mallopt(_MMAP_THRESHOLD, _LARGE_BYTES)
        library.malloc_trim  # noqa: B018 - raises if it is missing
    except (AttributeError, OSError, TypeError):
        return None
    return library


def map_large_blocks() -> None:
    """Make malloc map large blocks from now on, so that freeing one returns its memory."""
    _library()


def release_free_memory() -> None:
    """Return the free memory of all heaps to the system. Takes milliseconds; other threads run meanwhile."""
    library = _library()
    if library is not None:
        library.malloc_trim(0)
