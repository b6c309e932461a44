"""Every error Penstock raises, in a tree that follows the caller's next act.

    PenstockError
    ├── RetryLater            wait, then do the same again
    │   ├── Backpressure      a bounded queue or buffer is full
    │   └── DiskFull          no space; nothing was written; free some
    ├── FixTheCall            the call can never succeed as it is
    │   ├── Invalid           an argument is out of its range or of the wrong type
    │   └── NotFound          what was named is not there (any more)
    ├── Reopen                this object is finished; open a new one
    │   ├── Closed            it was closed
    │   ├── Poisoned          a write or an fsync failed; see its __cause__
    │   └── StoreLocked       another process owns the folder
    └── Restore               bytes on disk are not what was written
        ├── CorruptionError   says path and offset
        └── UnsupportedVersion  written by a newer Penstock

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


class FixTheCall(PenstockError):
    """The call is wrong and changed nothing."""


class Invalid(FixTheCall, ValueError):
    """An argument is out of its range or of the wrong type."""


class NotFound(FixTheCall, LookupError):
    """What was named is not there, or not there any more."""


class Reopen(PenstockError):
    """This object cannot go on; open (or recover) it anew."""


class Closed(Reopen):
    """The object was closed."""


class Poisoned(Reopen):
    """A write or an fsync failed, so nothing after it may be trusted."""


class StoreLocked(Reopen):
    """Another process owns the folder."""


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


class UnsupportedVersion(Restore):
    """The file was written by a newer version of its format."""
