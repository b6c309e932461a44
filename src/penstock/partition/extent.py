"""The first and last LSN of the journal, recorded in the manifest, so that the next open notices a missing end.

The journal's folder shows only the range of what is left of it. So a row of the manifest records what must exist:

    opened       the last LSN and the incarnation at open; nothing is proposed before this is committed
    released     the LSN below which the journal is not needed; committed before any segment is deleted
    closed       the last LSN at a clean close: the journal ends exactly there until the next open

After a crash the journal may end anywhere past the LSN at open, but never before an LSN that a partition has stored or
spilled: that was durable in the journal first.

Thread: one thread opens and closes; the checkpoint's calls `release`.
Invariant: whatever the row states was durable in the journal before the row was.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import msgspec

from penstock.errors import CorruptionError, PenstockError
from penstock.host.files import FileSystem
from penstock.host.randomness import Random
from penstock.log import Log, LogEnd, LogSettings
from penstock.manifest.engine import ReadView
from penstock.manifest.keys import ComponentId, WalStateKey
from penstock.manifest.manifest import Manifest
from penstock.manifest.records import WalStateRecord
from penstock.manifest.tables import WAL_STATE
from penstock.partition.ledger_records import LEDGER_TABLE

logger = logging.getLogger(__name__)

JOURNAL_KEY = WalStateKey(LEDGER_TABLE, 1)  # beside the ledger's own row; its `stored_lsn` is `released`


class _End(msgspec.Struct, frozen=True, array_like=True):
    last: int
    incarnation: int
    closed: bool
    was_idle: bool = False  # at a clean close: no job held a gate


def last_known(row: WalStateRecord) -> int:
    """Return the last LSN that the journal's row in the manifest knows of."""
    return msgspec.msgpack.decode(row.detail, type=_End).last if row.detail else 0


def highest_lsn(manifest: Manifest) -> int:
    """Return the highest LSN that the manifest knows of: the journal reached that far, durably."""
    return highest_known(manifest)[0]


def highest_known(manifest: Manifest) -> tuple[int, int]:
    """Return the highest LSN and the highest incarnation in the rows of all partitions."""

    def read(view: ReadView) -> tuple[int, int]:
        lsn = incarnation = 0
        for _, row in WAL_STATE.scan(view):
            lsn, incarnation = max(lsn, row.highest_lsn), max(incarnation, row.restart_epoch)
        return lsn, incarnation

    return manifest.read(read)


def sealed_segment(starts: Sequence[int]) -> int:
    """Return the first LSN of the newest sealed segment; 0 if there is none. `starts`: of all segments."""
    return starts[-2] if len(starts) > 1 else 0


class JournalExtent:
    """The manifest's record of the journal's range."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._log: Log | None = None  # set by `open_journal`
        self.is_idle: Callable[[], bool] = lambda: False  # called at a clean close: whether no job holds a gate
        self.was_idle = False  # whether none did at the close before this opening

    @property
    def released(self) -> int:
        """The journal is not needed up to this LSN."""
        row = self._manifest.get_wal_state(JOURNAL_KEY)
        return 0 if row is None else row.stored_lsn

    def check(self, end: LogEnd) -> None:
        """Raise `CorruptionError` if the journal lost its beginning or end, or if the manifest is an older copy."""
        row = self._manifest.get_wal_state(JOURNAL_KEY)
        manifest_end = msgspec.msgpack.decode(row.detail, type=_End) if row is not None and row.detail else None
        # What a partition stored before a clean close is below the end of the journal then.
        needed, incarnation = (
            (0, 0) if manifest_end is not None and manifest_end.closed else highest_known(self._manifest)
        )
        if manifest_end is not None and row is not None:
            self.was_idle = manifest_end.closed and manifest_end.was_idle
            needed = max(needed, manifest_end.last, row.last_sealed_segment - 1)
            incarnation = max(incarnation, manifest_end.incarnation)
        if end.incarnation < incarnation:
            raise CorruptionError(
                end.path,
                end.offset,
                f"this is the newest journal segment, of incarnation {end.incarnation}, "
                f"but the manifest knows of {incarnation}: the end of the journal is missing",
            )
        if end.last < needed:
            raise CorruptionError(
                end.path,
                end.offset,
                f"the journal ends at record {end.last}, but {needed} was durable: its end is missing",
            )
        if manifest_end is None or row is None:
            return
        if end.first > row.stored_lsn + 1:
            raise CorruptionError(
                end.path,
                0,
                f"the journal begins at record {end.first}, but {row.stored_lsn + 1} may be needed: "
                "its beginning is missing, or the manifest is an older copy",
            )
        if manifest_end.closed and end.last > manifest_end.last:
            raise CorruptionError(
                self._manifest.path,
                0,
                f"it says that the journal was closed at record {manifest_end.last}, but that holds {end.last}: "
                "the manifest is an older copy",
            )

    def open_journal(self, fs: FileSystem, folder: str, random: Random, settings: LogSettings, identity: bytes) -> Log:
        """Open the journal if it is complete; record its range before anything can be proposed."""
        log = Log.open(fs, folder, random=random, settings=settings, identity=identity, check_end=self.check)
        try:
            self._manifest.restart_epoch = log.incarnation
            self._commit(log, closed=False)
        except BaseException:
            log.close()
            raise
        self._log = log
        return log

    def release(self, below: int, sealed: int = 0) -> None:
        """Record that records below an LSN are not needed, before they are deleted; `sealed`: see `sealed_segment`."""
        generation = 1 + self._manifest.generation(ComponentId.WAL)
        last = below - 1
        self._put(
            WalStateRecord(last, last, last, last, last_sealed_segment=sealed, last_checkpoint_generation=generation)
        )

    def closed(self) -> None:
        """Record the end of the closed journal. If that fails, the next open can check less."""
        if self._log is None or not self._log.closed_cleanly:
            return
        try:
            self._commit(self._log, closed=True)
        except PenstockError as error:
            logger.warning("%s: the end of the journal was not recorded (%s)", self._manifest.path, error)

    def _commit(self, log: Log, *, closed: bool) -> None:
        dropped, last = log.first - 1, int(log.synced)
        detail = msgspec.msgpack.encode(_End(last, log.incarnation, closed, closed and self.is_idle()))
        sealed = sealed_segment(log.segment_starts())
        self._put(
            WalStateRecord(
                dropped,
                dropped,
                last,
                last,
                last_sealed_segment=sealed,
                restart_epoch=log.incarnation,
                detail=detail,
            )
        )

    def _put(self, record: WalStateRecord) -> None:
        txn = self._manifest.begin_write()
        txn.put_wal_state(JOURNAL_KEY, record)
        txn.bump_generation(ComponentId.WAL, 1)
        txn.commit()
