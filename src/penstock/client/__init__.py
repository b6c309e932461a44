"""The client: a store that another process owns, with the API of an owned one.

Nothing is imported before it is used: the owner's control socket needs a little of this package, not Arrow Flight.

Connecting:

    connect         `penstock.connect`: finds the owner of a folder, of an address or of a cluster
    starting        starts an owner if there is none, and waits for its report
    certificates    checks a server's certificate before gRPC connects
    store           the public classes `RemoteStore` and `RemoteSnapshot`

A write, a read or another request, on its way to the owner:

    port            the live port: writes gather in a coordinator of this process
    flusher         sends a batch of them to the owner, again until it is answered
    refusals        writes that the owner refused, kept until a call has raised the error
    reading         reads, of the live store or of a snapshot
    owner_requests  what the owner does or reports on request: maintenance, backups, archive, statistics
    building        where a client builds files for a bulk load
    connection      sends requests, and reconnects when the owner is lost
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_MOVED = {"wire": "penstock.protocol.wire", "place": "penstock.protocol.locator"}  # scripts import them from here


def __getattr__(name: str) -> Any:
    if name in _MOVED:
        return import_module(_MOVED[name])
    raise AttributeError(f"penstock.client has no {name!r}")
