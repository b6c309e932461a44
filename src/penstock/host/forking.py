"""What a forked child inherits and must not use: objects of C libraries, and the sockets of its parent.

gRPC's destructors would wait for ever for threads that are gone. A socket that a child has a copy of stays open when
its parent ends: the other side would wait for an answer that nobody gives.

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

_DESCRIPTORS = "/dev/fd"


class _GrpcUse:
    """Whether gRPC was used: by this process, and by the one that it was forked from."""

    here = False
    before_fork = False

    @classmethod
    def inherit(cls) -> None:
        cls.before_fork = cls.before_fork or cls.here


def use_grpc() -> None:
    """Call before gRPC is used; `Closed` in a child that was forked after its parent had begun to.

    The two would share gRPC's epoll set, and the child lacks the threads that gRPC believes to have: in tries, calls of
    both hung past every deadline. gRPC's own support for forks did not help.
    """
    if _GrpcUse.before_fork:
        raise Closed(
            "this process was forked from one that had connected to a store or served one, and gRPC does not survive "
            "that: start it by multiprocessing's 'spawn' or 'forkserver', or connect in the children only"
        )
    _GrpcUse.here = True


os.register_at_fork(after_in_child=_GrpcUse.inherit)


def abandon(thing: Any) -> None:
    """In a forked child: let nothing that belongs to `thing` be run when this process ends."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))  # never given back: its destructor never runs
    for reference in weakref.getweakrefs(thing):
        if isinstance(reference.__callback__, weakref.finalize):  # nor what pyarrow does at the interpreter's exit
            reference.__callback__.detach()


def hang_up(belongs: Callable[[Any], bool]) -> None:
    """In a forked child: give up its copies of the sockets whose own address belongs to the parent's service.

    Each is replaced by /dev/null: the number must not come to mean something else to the library that opened it.
    """
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    try:
        for descriptor in _descriptors():
            if descriptor != null and belongs(address_of(descriptor)):
                os.dup2(null, descriptor, inheritable=False)
    finally:
        os.close(null)


def address_of(descriptor: int) -> Any:
    """The own address of a socket, which a connection has from its listener; None for anything else."""
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return None
        with socket.socket(fileno=os.dup(descriptor)) as copy:
            return copy.getsockname()
    except OSError:
        return None


def close_on_exec(path: str) -> None:
    """Keep from started programs the descriptors of a file that a library opened without saying so. Thread: any."""
    wanted = os.stat(path)
    for descriptor in _descriptors():
        with suppress(OSError):
            if os.path.samestat(os.fstat(descriptor), wanted):
                os.set_inheritable(descriptor, False)


def _descriptors() -> list[int]:
    try:
        return [int(name) for name in os.listdir(_DESCRIPTORS)]
    except OSError:  # a system without it: nothing can be found
        return []
