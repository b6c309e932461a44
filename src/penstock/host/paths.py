"""Paths of stores as users give them, and as Penstock keeps them.

Thread: pure functions, but for `absolute`, which follows links.
"""

from __future__ import annotations

import os

from penstock.errors import Invalid


def path_text(path: object) -> str:
    """The path of a folder, from a text or a `Path`. `str` would make one of anything: a folder named None."""
    try:
        found = os.fspath(path)  # type: ignore[call-overload]
        if isinstance(found, str):
            os.fsencode(found)  # half of a surrogate pair is no name
            return str.__str__(found)
    except (TypeError, UnicodeEncodeError):
        pass
    shown = ascii(path) if isinstance(path, (str, bytes)) else f"a value of the type {type(path).__name__}"
    raise Invalid(f"{shown} is not a path: give a folder whose name is text")


def absolute(path: str) -> str:
    """A path as every process understands it, whatever its own folder is by then and wherever links lead by then."""
    if path and "\0" not in path:
        real = os.path.realpath(path).rstrip("/") or "/"
        if not any("\ud800" <= each <= "\udfff" for each in real):  # bytes that are not text: LMDB takes no such name
            return real
    raise Invalid(f"{path!r} is not a path: give a folder whose name is text")


def parent(path: str) -> str:
    """The folder that holds `path`."""
    return os.path.dirname(path) or "."
