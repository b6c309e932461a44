"""Checks the folder that a user names for a store.

Likely mistakes are refused before anything is created: a URL, a file, and a folder with other files, which a store
would mix with its own. `~` is the user's home, as in a shell.

Thread: any.
"""

from __future__ import annotations

import os
import re

from penstock.errors import Invalid
from penstock.host.file_errors import translate_open_errors
from penstock.host.os_files import OsFileSystem
from penstock.host.paths import absolute, path_text

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")  # `//` becomes `/` in a Path
_IN_EVERY_FOLDER = frozenset({"lost+found"})
_STORE_FILES = frozenset({"LOCK", "OPENING", "RESERVE", "STORE", "TIME", "journal", "manifest", "run", "tables"})


def store_folder(path: object) -> str:
    """Return the absolute path of the folder; `Invalid` if `path` cannot be one."""
    text = path_text(path)
    if _URL.match(text):
        remedy = (
            "penstock.connect takes it" if text.startswith("penstock:") else "give its path, or penstock://host:port"
        )
        raise Invalid(f"{text} is a URL, and a store is opened in a folder of this machine: {remedy}")
    return absolute(os.path.expanduser(text))


def check_new_folder(folder: str) -> None:
    """Raise `Invalid` if no store may be created in `folder`. A folder that holds a store, or parts of one, passes."""
    if os.path.exists(f"{folder}/STORE"):
        return
    with translate_open_errors(folder):
        if os.path.exists(folder) and not os.path.isdir(folder):
            raise Invalid(f"{folder} is a file: move it away, or give a folder")
        names = set(OsFileSystem().listdir(folder)) if os.path.isdir(folder) else set()
    others = {name for name in names - _IN_EVERY_FOLDER if not name.startswith(".")}
    if others and not any(re.split("[.-]", name)[0] in _STORE_FILES for name in others):
        raise Invalid(f"{folder} holds other files ({min(others)}) and no store: give a new or an empty folder")
