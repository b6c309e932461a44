"""What of gRPC is left in a forked child, where its threads are gone: its destructors would wait for them for ever.

Thread: the child's only one.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import Any


def abandon(thing: Any) -> None:
    """In a forked child: let nothing that belongs to `thing` be run when this process ends."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))  # never given back: its destructor never runs
    for reference in weakref.getweakrefs(thing):
        if isinstance(reference.__callback__, weakref.finalize):  # nor what pyarrow does at the interpreter's exit
            reference.__callback__.detach()
