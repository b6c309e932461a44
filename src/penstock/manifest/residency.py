"""Where the bytes of a chunk may go: the transitions of `ChunkResidency`.

    Local -> RemoteArchived(unverified) -> RemoteArchived(verified) -> Evicted -> RemoteArchived(verified)
      ^              |                            |
      +--------------+----------------------------+   its object is forgotten; the file is in the folder

Thread: pure functions.
Invariants: (1) an object counts only once it was read back. (2) the file leaves the folder only when it does. (3) the
key of the only copy is never dropped or changed (ADR 0004).
"""

from __future__ import annotations

from penstock.errors import Invalid
from penstock.manifest.records import ChunkEntryRecord, ChunkResidency, Evicted, Local, RemoteArchived


def check_residency(chunk: str, old: ChunkEntryRecord | None, new: ChunkResidency) -> None:
    """Raise `Invalid` unless a chunk may go from its row, or from none, to another residency."""
    before = None if old is None else old.residency
    if before == new:
        return
    if old is not None and old.staged and not isinstance(new, Local):
        raise Invalid(f"{chunk} is staged: it is archived once it is adopted")
    match before, new:
        case (None | RemoteArchived(), Local()):
            return
        case (Local(), RemoteArchived(verified=False)):
            return
        case (RemoteArchived(object=key, verified=False), RemoteArchived(object=same, verified=True)) if key == same:
            return
        case (RemoteArchived(object=key, verified=True), Evicted(object=same)) if key == same:
            return
        case (Evicted(object=key), RemoteArchived(object=same, verified=True)) if key == same:
            return
        case (_, Evicted()):
            raise Invalid(f"{chunk} cannot be evicted: it is not verified in the archive as {new.object!r}")
        case (Evicted(), _):
            raise Invalid(f"{chunk} is evicted: its row cannot lose the key {before.object!r}, which has the only copy")
        case _:
            raise Invalid(f"{chunk} cannot go from {_name(before)} to {_name(new)}")


def _name(residency: ChunkResidency | None) -> str:
    return "no row" if residency is None else repr(residency)
