"""Validation of the paths that users pass.

Thread: any. `absolute` reads links; the rest are pure functions.
"""

from __future__ import annotations

import os

from penstock.errors import Invalid


def path_text(path: object) -> str:
    """Return a path given as text or as a `Path`; `Invalid` for anything else (`str` would accept None)."""
    try:
        text = os.fspath(path)  # type: ignore[call-overload]
        if isinstance(text, str):
            os.fsencode(text)  # raises for half of a surrogate pair
            return str.__str__(text)
    except (TypeError, UnicodeEncodeError):
        pass
    description = ascii(path) if isinstance(path, (str, bytes)) else f"a value of the type {type(path).__name__}"
    raise Invalid(f"{description} is not a path: give a folder whose name is text")


def absolute(path: str) -> str:
    """Return an absolute path without links: one that means the same in every process, whatever its working folder."""
    if path and "\0" not in path:
        try:
            real = os.path.realpath(path).rstrip("/") or "/"
        except FileNotFoundError:
            raise Invalid(f"{path!r} is relative to a working folder that was deleted: give an absolute path") from None
        # LMDB takes no name with bytes that are not text.
        if not any("\ud800" <= character <= "\udfff" for character in real):
            return real
    raise Invalid(f"{path!r} is not a path: give a folder whose name is text")


def parent(path: str) -> str:
    """Return the folder of `path`."""
    return os.path.dirname(path) or "."
