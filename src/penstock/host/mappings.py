"""Memory-mapped files that hold no descriptor, and a limit on their number.

Python's `mmap` keeps a copy of the descriptor while the mapping lives, and a store maps two files per sstable. So an
anonymous range is mapped first and the file is mapped over it by the C library: the `mmap` object has no descriptor,
and unmaps the range when its last view is gone.

A process may have a limited number of mappings (`vm.max_map_count`). Objects that can map their file again at any time
register (`Mappings.register`); when there are too many, the oldest are told to drop their mappings. Reads are not
recorded: that would cost each get more than mapping a file again now and then.

Thread: any.
Invariant: a range is unmapped when its last view is gone, never before.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import mmap
import os
import sys
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

import numpy as np

from penstock.errors import ProcessLimit
from penstock.host import threads

MAPS_MAX_DEFAULT = 65_530  # the default of Linux
_SHARE = 8  # with two files each, and up to two mappings a file, holders take half of the limit
HOLDERS_MIN = 16
HUGE_PAGE = 2 << 20
_MAP_FIXED = 0x10
_FAILED = ctypes.c_void_p(-1).value


class MappingHolder(Protocol):
    """An object whose mappings can be made again."""

    def forget(self) -> None:
        """Drop the mappings. Readers keep the views they have."""


def anonymous_memory(size: int) -> mmap.mmap:
    """Return zeroed memory that takes no space until it is written to, and is freed with its last view."""
    return mmap.mmap(-1, size)


def holders_max() -> int:
    """Return how many objects may hold mappings, from the system's limit."""
    return max(HOLDERS_MIN, _maps_max() // _SHARE)


@cache
def _maps_max() -> int:
    try:
        with open("/proc/sys/vm/max_map_count", "rb") as file:
            return int(file.read())
    except (OSError, ValueError):
        return MAPS_MAX_DEFAULT


class Mappings:
    """The registered holders of a process."""

    def __init__(self, limit: Callable[[], int] = holders_max) -> None:
        self._limit = limit
        self._numbers = itertools.count()
        self._dead: deque[int] = deque()  # of holders that were freed
        self._start()
        threads.after_fork(self, Mappings._start)

    def _start(self) -> None:
        self._lock = threads.lock("host.mappings")  # anew in a forked child, where the old one may be locked for good
        self._holders: OrderedDict[int, weakref.ref[MappingHolder]] = OrderedDict()  # guarded by _lock

    def register(self, holder: MappingHolder) -> None:
        """Record that `holder` has mappings now; the oldest holders drop theirs if there are too many."""
        number, dead = next(self._numbers), self._dead
        reference = weakref.ref(holder, lambda _: dead.append(number))  # no lock: objects are freed at any line
        with self._lock:
            self._holders[number] = reference
            over = max(0, self._purge() - self._limit())
        self._release_oldest(over)

    def release_some(self) -> bool:
        """Make the older half drop their mappings; return whether there were any."""
        with self._lock:
            count = (self._purge() + 1) // 2
        return self._release_oldest(count) > 0

    def _purge(self) -> int:
        while self._dead:
            self._holders.pop(self._dead.popleft(), None)
        return len(self._holders)

    def _release_oldest(self, count: int) -> int:
        with self._lock:
            oldest = [self._holders.popitem(last=False)[1] for _ in range(min(count, len(self._holders)))]
        for reference in oldest:
            holder = reference()
            if holder is not None:
                holder.forget()
        return len(oldest)


MAPPINGS = Mappings()


def map_file(fd: int, size: int, path: str) -> memoryview:
    """Map the first `size` bytes of a file, read-only. Requires: it is that long. The descriptor may then be closed."""
    while True:
        try:
            return memoryview(_map(fd, size))
        except OSError as error:
            if error.errno != errno.ENOMEM:
                raise
            if not MAPPINGS.release_some():
                raise ProcessLimit(
                    f"{path} cannot be mapped ({error.strerror}), nothing was changed: close stores or snapshots, or "
                    "raise the limit (sysctl vm.max_map_count)"
                ) from error


def _map(fd: int, size: int) -> Any:
    if sys.version_info >= (3, 13):  # the kernel aligns it by itself
        return mmap.mmap(fd, size, access=mmap.ACCESS_READ, trackfd=False)
    # An area of whole huge pages begins at a multiple of them (Linux 6.13), so that the kernel can map the file by such
    # pages: a scan of a file that is not in the processor's caches takes two thirds of the time.
    area_size = -(-size // HUGE_PAGE) * HUGE_PAGE if size >= HUGE_PAGE else size
    area = mmap.mmap(-1, area_size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ)
    address = np.frombuffer(area, np.uint8).ctypes.data
    placed = _library().mmap(address, size, mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, fd, 0)
    if placed != address:
        code = ctypes.get_errno()
        assert placed == _FAILED
        raise OSError(code, os.strerror(code))  # the kernel checks first, so the area is unchanged
    return memoryview(area)[:size]


@cache
def _library() -> Any:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
    ]  # fmt: skip
    return library
