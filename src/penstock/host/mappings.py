"""Mappings of files: made without a descriptor of their own, and counted.

Python's `mmap` keeps a copy of the descriptor for as long as the mapping lives, and a store maps two files for each
sstable. So a range without a file is mapped first, and the file then laid over it by the C library: the `mmap` object
knows of no descriptor, and unmaps the range when the last view of it goes.

A process may have only so many mappings (`vm.max_map_count`). Whoever can map a file anew at any time says so
(`Mappings.hold`), and is asked to let go of its mappings when there are too many: the one that has had them longest.
Nothing is noted at a read: that would cost each get more than a mapping that is now and then made again.

Thread: any.
Invariant: a mapping is undone when its last view is gone, never before.
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

MAPS_MAX_DEFAULT = 65_530  # of Linux, where nothing else is said
_SHARE = 8  # a holder has two mappings: a quarter of the limit, and the rest is for others
HOLDERS_MIN = 16
_MAP_FIXED = 0x10
_FAILED = ctypes.c_void_p(-1).value


class MappingHolder(Protocol):
    """Has mappings that can be made again."""

    def forget(self) -> None:
        """Let go of them. Those who read go on with what they have."""


def holders_max() -> int:
    """How many may hold mappings, by the limit of this machine."""
    return max(HOLDERS_MIN, _maps_max() // _SHARE)


@cache
def _maps_max() -> int:
    try:
        with open("/proc/sys/vm/max_map_count", "rb") as file:
            return int(file.read())
    except (OSError, ValueError):
        return MAPS_MAX_DEFAULT


class Mappings:
    """Those of a process who hold mappings that can be made again."""

    def __init__(self, limit: Callable[[], int] = holders_max) -> None:
        self._limit = limit
        self._numbers = itertools.count()
        self._gone: deque[int] = deque()  # of holders that were freed
        self._start()
        threads.after_fork(self, Mappings._start)

    def _start(self) -> None:
        self._lock = threads.lock("host.mappings")  # in a forked child too: nobody there would release the old one
        self._holders: OrderedDict[int, weakref.ref[MappingHolder]] = OrderedDict()  # guarded by _lock

    def hold(self, holder: MappingHolder) -> None:
        """Note that it has mappings now; others may have to let go of theirs."""
        number, gone = next(self._numbers), self._gone
        reference = weakref.ref(holder, lambda _: gone.append(number))  # no lock: any line may free an object
        with self._lock:
            self._holders[number] = reference
            over = max(0, self._purge() - self._limit())
        self._let_go(over)

    def relieve(self) -> bool:
        """Have the older half let go; whether there was anyone."""
        with self._lock:
            count = (self._purge() + 1) // 2
        return self._let_go(count) > 0

    def _purge(self) -> int:
        while self._gone:
            self._holders.pop(self._gone.popleft(), None)
        return len(self._holders)

    def _let_go(self, count: int) -> int:
        with self._lock:
            oldest = [self._holders.popitem(last=False)[1] for _ in range(min(count, len(self._holders)))]
        for reference in oldest:
            holder = reference()
            if holder is not None:
                holder.forget()
        return len(oldest)


MAPPINGS = Mappings()


def map_file(fd: int, size: int, path: str) -> memoryview:
    """The first `size` bytes of a file, read-only. Requires: the file is that long. The descriptor may be closed."""
    while True:
        try:
            return memoryview(_map(fd, size))
        except OSError as error:
            if error.errno != errno.ENOMEM:
                raise
            if not MAPPINGS.relieve():
                raise ProcessLimit(
                    f"{path} cannot be mapped ({error.strerror}), nothing was changed: close stores or snapshots, or "
                    "raise the limit (sysctl vm.max_map_count)"
                ) from error


def _map(fd: int, size: int) -> Any:
    if sys.version_info >= (3, 13):
        return mmap.mmap(fd, size, access=mmap.ACCESS_READ, trackfd=False)
    area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ)
    address = np.frombuffer(area, np.uint8).ctypes.data
    placed = _library().mmap(address, size, mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, fd, 0)
    if placed != address:
        code = ctypes.get_errno()
        assert placed == _FAILED
        raise OSError(code, os.strerror(code))  # the kernel looks first: the area is as it was, and goes
    return area


@cache
def _library() -> Any:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
    ]  # fmt: skip
    return library
