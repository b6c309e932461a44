"""Memory that was freed and that the C library keeps: asking it to give it back.

A store makes large buffers all the time and frees them soon. glibc keeps such blocks for later, in a heap for each
thread, and a process would hold several times what its limits count. Elsewhere than on glibc nothing is done.

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
    """glibc, told once to map large blocks, so that they are gone when they are freed; None for another library."""
    try:
        library = ctypes.CDLL(None)
        library.mallopt(_MMAP_THRESHOLD, _LARGE_BYTES)
        library.malloc_trim  # noqa: B018 - whether it is there
    except (AttributeError, OSError, TypeError):
        return None
    return library


def expect_large_blocks() -> None:
    """Large blocks come and go from here on: keep none of them."""
    _library()


def release_unused() -> None:
    """Give back what is free in the heaps. It takes milliseconds; other threads run meanwhile."""
    library = _library()
    if library is not None:
        library.malloc_trim(0)
