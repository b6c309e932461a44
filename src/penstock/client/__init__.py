"""The client: a store that another process owns, with the API of an owned one. `penstock.connect` is in `connect`.

Nothing is imported before it is used: the owner's control socket needs a little of this package, not Arrow Flight.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_MOVED = {"wire": "penstock.protocol.wire", "place": "penstock.protocol.locator"}  # scripts import them from here


def __getattr__(name: str) -> Any:
    if name in _MOVED:
        return import_module(_MOVED[name])
    raise AttributeError(f"penstock.client has no {name!r}")
