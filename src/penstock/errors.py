"""Every error Penstock raises, in a tree by what the caller should do next.

    PenstockError
    ├── RetryLater            wait, then repeat the call
    │   ├── Backpressure      a bounded queue or buffer is full
    │   ├── DiskFull          no space; nothing was written; free some
    │   ├── ProcessLimit      no descriptor, mapping or thread is left; nothing was changed; raise the limit
    │   ├── DiskFailed        an operation on a file failed; see its __cause__, and check the disk
    │   ├── ManifestFull      the manifest is at its size limit; reads and deletes go on
    │   ├── ArchiveUnavailable  the object store of the archive does not answer, or refuses; nothing was changed
    │   ├── CommitFailed      a commit of the manifest failed as a whole
    │   ├── OutcomeUnknown    it may have happened or not: check, or repeat it with the same token
    │   ├── NotLeader         this member of a cluster takes no writes; nothing was written
    │   ├── WaitExpired       the deadline passed first
    │   ├── UniqueJobAlreadyPending  a job of this table and kind is already pending
    │   └── GateShut          another job of this table and kind is running, or must be repaired first
    ├── FixTheCall            the call can never succeed unchanged
    │   ├── Invalid           an argument is out of its range or of the wrong type
    │   ├── NotFound          the named object does not exist, or no longer
    │   ├── KindMismatch      the table is of another kind or shape
    │   ├── TokenTooOld       the token is below the window of its producer: it may have been used or not
    │   ├── ReadOnly          the store was opened to be read only; nothing was written
    │   ├── TableDraining     the table takes no new rows (`store.drain`); nothing was written
    │   ├── KeyMissing        the store is encrypted, and a key was not given: open it with `keys=`
    │   ├── WrongKey          a key was given, but not the one that the store was encrypted with
    │   ├── LeaseLost         the lease has ended, and the work may be another worker's
    │   ├── PositionConflict  another writer moved the consumer; nothing was written
    │   ├── ConditionFailed   another writer changed the row (`if_lsn`, `if_absent`); nothing was written
    │   └── StreamFailed      Spark failed on a batch, mostly in the batch function; nothing of it was written
    ├── Reopen                this object cannot be used any more; open it again
    │   ├── Closed            it was closed
    │   ├── Poisoned          a write or an fsync failed; see its __cause__
    │   ├── Lost              the epoch is of an earlier opening: its outcome is unknown
    │   └── StoreLocked       another process owns the folder, or this one does already
    ├── PartitionPaused       writes could not be applied to one table: remove the cause, then resume it
    └── Restore               bytes on disk are not what was written
        ├── CorruptionError   says path and offset
        │   └── ManifestCorrupted  a queue's manifest is damaged
        ├── ManifestNotFound  a queue has data files, but no manifest
        └── UnsupportedVersion  written by a newer Penstock
            └── UnsupportedManifestVersion  the same, of a queue's manifest

A message is one line that says what happened, where, and what to do.
"""

from __future__ import annotations


class PenstockError(Exception):
    """Base of all errors that Penstock raises on purpose. Its message is one line, whatever it quotes."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(_in_one_line(arg) if isinstance(arg, str) else arg for arg in args))


def _in_one_line(text: str) -> str:
    lines = text.splitlines()
    return text if len(lines) == 1 else " ".join(line.strip() for line in lines if line.strip())


class RetryLater(PenstockError):
    """Nothing changed; the same call may succeed later."""


class _ShardError(PenstockError):
    """Base of the errors that may be about one shard. The fields are 0 or empty if it is about none."""

    def __init__(  # noqa: PLR0917 - they are sent and pickled in this order
        self,
        message: str = "",
        partition: int = 0,
        table: str = "",
        shard: int = 0,
        state: str = "",
        limit: str = "",
        maximum: float = 0,
        value: float = 0,
        retry_after_s: float = 0.0,
    ) -> None:
        super().__init__(message)
        self.partition = partition  # the number of the shard in the store
        self.table = table
        self.shard = shard
        self.state = state  # of the shard: throttled, frozen or paused
        self.limit = limit  # the name of the setting that was reached, if one was
        self.maximum = maximum  # its value
        self.value = value  # what was measured
        self.retry_after_s = retry_after_s  # when it is worth trying again; 0: unknown

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        about = (self.partition, self.table, self.shard, self.state, self.limit, self.maximum, self.value)
        return (type(self), (str(self), *about, self.retry_after_s))


class Backpressure(_ShardError, RetryLater):
    """A bounded buffer is full. If it is a shard's, fields say which one, which limit, and when to retry."""


class DiskFull(RetryLater):
    """The disk has no space left; nothing was written."""


class ProcessLimit(RetryLater, OSError):
    """The process (or the machine) has no descriptor, mapping or thread left; nothing was changed."""


class DiskFailed(RetryLater, OSError):
    """An operation on a file of the store failed; acknowledged writes are not affected."""


class ManifestFull(RetryLater):
    """The manifest reached its size limit; delete something or raise the limit."""


class ArchiveUnavailable(RetryLater):
    """The object store of the archive did not answer within the deadline, or refused; nothing was changed."""


class CommitFailed(RetryLater):
    """A commit of the manifest failed as a whole; see its __cause__."""


class OutcomeUnknown(RetryLater):
    """The call may have taken effect or not: the only retryable error that can leave a change behind."""

    def __init__(self, message: str, *, first: int = 0, last: int = 0, token: tuple[str, int] | None = None) -> None:
        super().__init__(message)
        self.first = first  # the epochs in doubt, both included; 0 where there are none
        self.last = last
        self.token = token  # with which it may be repeated, if the caller passed one


class NotLeader(RetryLater):
    """This member of a cluster does not accept writes; `leader` names the one that does, if it is known."""

    def __init__(self, message: str = "", leader: str | None = None) -> None:
        super().__init__(message)
        self.leader = leader

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return (type(self), (str(self), self.leader))


class WaitExpired(RetryLater):
    """A deadline passed first."""


class UniqueJobAlreadyPending(RetryLater):
    """Another job of this table and kind is already pending."""


class GateShut(RetryLater):
    """A job of this table and kind holds the gate: it is running, or it must be repaired first."""


class FixTheCall(PenstockError):
    """The call is wrong and changed nothing."""


class Invalid(FixTheCall, ValueError):
    """An argument is out of its range or of the wrong type."""


class NotFound(FixTheCall, LookupError):
    """The named object does not exist, or no longer."""


class KindMismatch(FixTheCall):
    """The table exists, but is of another kind or shape."""


class TokenTooOld(FixTheCall):
    """The token is below the window of its producer; it may have been used or not."""


class ReadOnly(FixTheCall):
    """The store was opened with `read_only=True`, so it takes no writes."""


class TableDraining(FixTheCall):
    """The table is being drained: it takes no new rows. Nothing was written; write elsewhere, or reactivate it."""


class KeyMissing(FixTheCall, LookupError):
    """Encrypted bytes cannot be read or written, because their master key was not given (or not this version of it)."""


class WrongKey(FixTheCall):
    """A master key was given that is not the one with this version that the store was encrypted with."""


class LeaseLost(FixTheCall):
    """The lease has ended, so its work may not be completed."""


class PositionConflict(FixTheCall):
    """A stream's batch does not begin at its consumer's position."""


class ConditionFailed(FixTheCall):
    """A row is not as a conditional write expects it: nothing was written. Read the row again, then decide.

    `key` is the row's key, `lsn` its present LSN (0: it is absent), and `expected` the LSN that was given.
    """

    def __init__(self, key: bytes | str, expected: int, lsn: int) -> None:
        key_text = repr(key) if len(key) <= 80 else f"{key[:80]!r}..."
        present = f"{key_text} has LSN {lsn}" if lsn else f"{key_text} is absent"
        expectation = f"was expected at LSN {expected}" if expected else "was expected to be absent"
        super().__init__(f"{present} and {expectation}: read it with get_row, then decide again")
        self.key = key
        self.expected = expected
        self.lsn = lsn

    def __reduce__(self) -> tuple[type, tuple[bytes | str, int, int]]:
        return (type(self), (self.key, self.expected, self.lsn))


class StreamFailed(FixTheCall):
    """Spark could not run a batch of a stream; nothing of the batch was written."""


class Reopen(PenstockError):
    """This object cannot be used any more; open (or recover) it again."""


class Closed(Reopen):
    """The object was closed."""


class Poisoned(Reopen):
    """A write or an fsync failed, so nothing after it may be trusted."""


class Lost(Reopen):
    """The epoch is of an earlier opening; epochs are in memory only, so its outcome is unknown."""


class StoreLocked(Reopen):
    """Another process, or this one, has the folder open."""

    here = False  # whether it is this process
    read_only = False  # whether those who have it open only read it


class PartitionPaused(_ShardError):
    """Writes and snapshots of one table are refused until it is resumed; other tables are not affected.

    Fields say which shard, and whether it is paused (call `resume`) or frozen (its files do not answer; it goes on by
    itself when they do).
    """


class Restore(PenstockError):
    """Bytes on disk are not what was written; restore them from a copy."""


class CorruptionError(Restore):
    """A checksum, a length or an order is not what was written."""

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
