"""What a forked child inherits and must not use: objects of C libraries, and its parent's sockets.

gRPC's destructors would wait forever for threads that do not exist in the child. A socket that a child has a copy of
stays open when the parent ends, and the other side would wait for an answer that never comes.

Thread: the child's only one, unless a function says otherwise.
"""

from __future__ import annotations

import ctypes
import os
import socket
import stat
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from penstock.errors import Closed
from penstock.host.open_files import OPEN_FILES

GRPC_DESCRIPTORS = 16  # it needs fewer to begin, and others may take some meanwhile
_DESCRIPTORS = "/dev/fd"


class _GrpcUse:
    """Whether gRPC was used by this process, and by the one it was forked from."""

    here = False
    before_fork = False

    @classmethod
    def inherit(cls) -> None:
        cls.before_fork = cls.before_fork or cls.here


def use_grpc() -> None:
    """Call before using gRPC; `Closed` in a child whose parent used it before the fork, `ProcessLimit` without room.

    The two share gRPC's epoll set, and the child lacks gRPC's threads: in experiments, calls of both hung past every
    deadline. gRPC's own fork support did not help.
    """
    if _GrpcUse.before_fork:
        raise Closed(
            "this process was forked from one that had connected to a store or served one, and gRPC does not survive "
            "that: start it by multiprocessing's 'spawn' or 'forkserver', or connect in the children only"
        )
    _check_room()
    _GrpcUse.here = True


def _check_room() -> None:
    """`ProcessLimit` if the process has too few descriptors left for gRPC, which would abort it."""
    taken: list[int] = []
    try:
        for _ in range(GRPC_DESCRIPTORS):
            taken.append(OPEN_FILES.with_descriptor(lambda: os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)))
    finally:
        for descriptor in taken:
            os.close(descriptor)


os.register_at_fork(after_in_child=_GrpcUse.inherit)


def abandon(thing: Any) -> None:
    """In a forked child: leak `thing`, so that neither its destructor nor its exit handlers run."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))  # never released: its destructor never runs
    for reference in weakref.getweakrefs(thing):
        if isinstance(reference.__callback__, weakref.finalize):  # pyarrow's, which run at exit
            reference.__callback__.detach()


def detach_sockets(belongs: Callable[[Any], bool]) -> None:
    """In a forked child: replace its copies of the parent's service sockets with /dev/null.

    `belongs` decides by a socket's own address. The descriptors stay in use, because the library that opened them would
    take a reused number for its socket.
    """
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    try:
        for descriptor in _descriptors():
            if descriptor != null and belongs(address_of(descriptor)):
                os.dup2(null, descriptor, inheritable=False)
    finally:
        os.close(null)


def address_of(descriptor: int) -> Any:
    """Return a socket's own address (a connection has its listener's); None if it is not a socket."""
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return None
        with socket.socket(fileno=os.dup(descriptor)) as copy:
            return copy.getsockname()
    except OSError:
        return None


def close_on_exec(path: str) -> None:
    """Set close-on-exec on the descriptors of a file that a library opened without it. Thread: any."""
    status = os.stat(path)
    for descriptor in _descriptors():
        with suppress(OSError):
            if os.path.samestat(os.fstat(descriptor), status):
                os.set_inheritable(descriptor, False)


def _descriptors() -> list[int]:
    try:
        return [int(name) for name in os.listdir(_DESCRIPTORS)]
    except OSError:  # the system does not have it
        return []
