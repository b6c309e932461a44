"""Every error Penstock raises, in a tree that follows the caller's next act.

    PenstockError
    ├── RetryLater            wait, then do the same again
    │   ├── Backpressure      a bounded queue or buffer is full
    │   ├── DiskFull          no space; nothing was written; free some
    │   ├── ProcessLimit      no descriptor or mapping is left; nothing was changed; close some, or raise the limit
    │   ├── DiskFailed        the system refused an operation on a file; see its __cause__, and look at the disk
    │   ├── ManifestFull      the manifest is at its size limit; reads and deletes go on
    │   ├── CommitFailed      the manifest's commit failed; nothing of it is there
    │   ├── OutcomeUnknown    it happened or it did not: look, or do it again under the same token
    │   ├── WaitExpired       the deadline came before what was waited for
    │   ├── UniqueJobAlreadyPending  a job of this table and kind is waiting already
    │   └── GateShut          another job of this table and kind is running, or must be repaired first
    ├── FixTheCall            the call can never succeed as it is
    │   ├── Invalid           an argument is out of its range or of the wrong type
    │   ├── NotFound          what was named is not there (any more)
    │   ├── KindMismatch      the table is of another kind or shape
    │   ├── TokenTooOld       the token is below the window that is remembered: nobody knows if it was used
    │   ├── LeaseLost         the lease ended and someone else has the work
    │   └── PositionConflict  somebody else moved the consumer: nothing was written
    ├── Reopen                this object is finished; open a new one
    │   ├── Closed            it was closed
    │   ├── Poisoned          a write or an fsync failed; see its __cause__
    │   ├── Lost              the epoch is of an earlier opening: nobody knows what became of it
    │   └── StoreLocked       another process owns the folder
    ├── PartitionPaused       applying to one table failed: remove the cause, then resume it
    └── Restore               bytes on disk are not what was written
        ├── CorruptionError   says path and offset
        │   └── ManifestCorrupted  a queue's manifest does not read; there is no fall-back
        ├── ManifestNotFound  a queue has data files, but no manifest that says which count
        └── UnsupportedVersion  written by a newer Penstock
            └── UnsupportedManifestVersion  the same, of a queue's manifest

A message is one line that says what happened, where, and what to do.
"""

from __future__ import annotations


class PenstockError(Exception):
    """Base of all errors that Penstock raises on purpose."""


class RetryLater(PenstockError):
    """Nothing changed; the same call may succeed later."""


class Backpressure(RetryLater):
    """A bounded buffer is full."""


class DiskFull(RetryLater):
    """Space could not be claimed; nothing was written."""


class ProcessLimit(RetryLater, OSError):
    """The process (or the machine) has no descriptor or mapping left; nothing was changed."""


class DiskFailed(RetryLater, OSError):
    """The system refused an operation on a file of the store; what was acknowledged is untouched."""


class ManifestFull(RetryLater):
    """The manifest reached its size limit; delete something or raise the limit."""


class CommitFailed(RetryLater):
    """A commit of the manifest failed as a whole; see its __cause__."""


class OutcomeUnknown(RetryLater):
    """The one retry after which something may have changed: it happened, or it did not."""

    def __init__(self, message: str, *, first: int = 0, last: int = 0, token: tuple[str, int] | None = None) -> None:
        super().__init__(message)
        self.first = first  # the epochs in doubt, both included; 0 where there are none
        self.last = last
        self.token = token  # under which it may be done again, if its writer gave one


class WaitExpired(RetryLater):
    """A deadline passed before what was waited for."""


class UniqueJobAlreadyPending(RetryLater):
    """At most one job of a table and kind waits at a time."""


class GateShut(RetryLater):
    """A job of this table and kind holds the gate: it is running, or it must be repaired first."""


class FixTheCall(PenstockError):
    """The call is wrong and changed nothing."""


class Invalid(FixTheCall, ValueError):
    """An argument is out of its range or of the wrong type."""


class NotFound(FixTheCall, LookupError):
    """What was named is not there, or not there any more."""


class KindMismatch(FixTheCall):
    """The table exists, but is of another kind or shape."""


class TokenTooOld(FixTheCall):
    """The token is older than what is remembered of its producer; it may or may not have been used."""


class LeaseLost(FixTheCall):
    """The lease is not held any more, so its work may not be completed."""


class PositionConflict(FixTheCall):
    """A stream's batch does not begin where its consumer is."""


class Reopen(PenstockError):
    """This object cannot go on; open (or recover) it anew."""


class Closed(Reopen):
    """The object was closed."""


class Poisoned(Reopen):
    """A write or an fsync failed, so nothing after it may be trusted."""


class Lost(Reopen):
    """The epoch is of an earlier opening; epochs live in memory only, so there is no answer."""


class StoreLocked(Reopen):
    """Another process owns the folder."""


class PartitionPaused(PenstockError):
    """One table's writes and snapshots are refused until it is resumed; the others go on."""


class Restore(PenstockError):
    """Bytes on disk are not what was written; restore them from a copy."""


class CorruptionError(Restore):
    """A checksum, a length or an order that was written is not there any more."""

    def __init__(self, path: str, offset: int, reason: str) -> None:
        super().__init__(f"{path} at byte {offset}: {reason}; restore this file from a copy")
        self.path = path
        self.offset = offset
        self.reason = reason

    def __reduce__(self) -> tuple[type, tuple[str, int, str]]:
        return (type(self), (self.path, self.offset, self.reason))


class ManifestCorrupted(CorruptionError):
    """The manifest of a queue is not what was written."""


class ManifestNotFound(Restore):
    """The manifest of a queue is missing although its data files are there."""

    def __init__(self, path: str) -> None:
        super().__init__(f"no manifest at {path}, although the queue has data: restore this file from a copy")
        self.path = path

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return (type(self), (self.path,))


class UnsupportedVersion(Restore):
    """The file was written by a newer version of its format."""


class UnsupportedManifestVersion(UnsupportedVersion):
    """The manifest of a queue has a version that this Penstock does not read."""
