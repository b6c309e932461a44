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

_DESCRIPTORS = "/dev/fd"


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
