"""Makes a store from its archive, after its disk was lost.

The manifest, the journal, the queues and the indexes of a run are fetched; sstables stay in the archive, evicted, until
they are read. The copy is built beside its target and renamed when it is complete (`new_store.py`). It gets a UUID of
its own, so it uploads under a prefix of its own; a note in the old prefix keeps the old store, should it live, from
deleting objects that both read.

Thread: any.
Invariants: (1) the archive is only read, except for that note. (2) a folder at the target is a whole store.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

import msgspec

from penstock.archive.objects import ObjectStore, parse_file_key
from penstock.archive.plain import TemporaryFile
from penstock.archive.transfer import fetch, fetch_as, verify_object
from penstock.errors import CorruptionError, Invalid, NotFound, UnsupportedVersion
from penstock.host.clock import Clock
from penstock.host.file_operations import remove_file
from penstock.host.files import FileSystem
from penstock.host.randomness import Random
from penstock.lsm.catalog import TableDetail
from penstock.manifest.engine import EngineOpener
from penstock.manifest.manifest import Manifest
from penstock.manifest.operations import ManifestOp, SetResidency
from penstock.manifest.records import ChunkEntryRecord, Evicted, RemoteArchived
from penstock.manifest.tables import CHUNKS
from penstock.partition.ledger_records import LEDGER_TABLE
from penstock.store.archive_run import RunListing, read_listing, run_numbers
from penstock.store.archive_url import write_archive_url
from penstock.store.identity import IDENTITY_BYTES, StoreIdentity, read_uuid, write_identity
from penstock.store.new_store import built_beside
from penstock.store.object_collection import HEIRS

HEIR = "heir"  # the UUID of a copy, while it is incomplete
REATTACHING = ".reattaching"  # behind the name of the target, while the copy is incomplete
OPERATIONS = 1_000  # of the manifest, in one commit
_UUID = re.compile("[0-9a-f]{32}")
_PATH = re.compile(r"[a-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*")


@dataclass(frozen=True, kw_only=True)
class ReattachReport:
    """A store that was made from an archive.

    >>> lsn = store.archive().lsn
    >>> penstock.reattach(store.archive_url, "again").lsn == lsn
    True
    """

    path: str
    store: str  # the UUID of the store that was archived
    number: int  # of the run
    lsn: int  # it holds everything up to here, in every table
    files: int  # that were fetched
    bytes: int
    evicted: int  # files that stay in the archive until they are read


class Reattachment:
    """One store that is being made."""

    def __init__(
        self,
        fs: FileSystem,
        objects: ObjectStore,
        *,
        clock: Clock,
        random: Random,
        engine: EngineOpener,
        stop: Callable[[], bool],
    ) -> None:
        self._fs = fs
        self._objects = objects
        self._clock = clock
        self._random = random
        self._engine = engine
        self._stop = stop
        self._fetched: dict[str, int] = {}  # bytes by path

    def run(self, path: str, store: str | None, number: int | None) -> ReattachReport:
        """Make the store at `path`, which must not exist or be empty."""
        listing = self._listing(self._find(store), number)
        with built_beside(self._fs, path, REATTACHING, keep=(HEIR, "STORE")) as work:  # both may name its UUID
            uuid = self._uuid(work)
            self._fetch_files(listing, work)
            evicted = self._evict_rows(work)
            self._objects.put_new(f"{listing.store}/{HEIRS}/{uuid.hex()}", b"")
            write_archive_url(self._fs, work, self._objects.url)
            write_identity(self._fs, work, StoreIdentity(bytes.fromhex(listing.identity), uuid))
            remove_file(self._fs, f"{work}/{HEIR}")
        return ReattachReport(
            path=path,
            store=listing.store,
            number=listing.number,
            lsn=listing.lsn,
            files=len(self._fetched),
            bytes=sum(self._fetched.values()),
            evicted=evicted,
        )

    def _find(self, store: str | None) -> str:
        """Return the UUID of the archived store, if there is only one, or if it is the requested one."""
        stores = [name for name in self._objects.folders() if _UUID.fullmatch(name)]
        chosen = [name for name in stores if store in (None, name)]
        if len(chosen) == 1:
            return chosen[0]
        if not chosen:
            others = (
                f"it has those of {', '.join(sorted(stores))}" if stores else "give the URL that a store archives to"
            )
            raise NotFound(f"{self._objects.url} has no archive of {'a store' if store is None else store}: {others}")
        archives = "; ".join(f"{name} ({self._newest(name)})" for name in sorted(chosen))
        raise Invalid(f"{self._objects.url} has the archives of {archives}: name one, by store= or --uuid")

    def _newest(self, store: str) -> str:
        """Say when the newest whole run of a store was made, which tells a lost store from its copies."""
        try:
            listing = self._listing(store, None)
            time = datetime.fromtimestamp(listing.time_us // 1_000_000, UTC)
        except (NotFound, CorruptionError, UnsupportedVersion, OverflowError, ValueError):
            return "no run can be read"  # named by store=, it says why
        return f"run {listing.number} of {time:%Y-%m-%d %H:%M:%S} UTC"

    def _listing(self, store: str, number: int | None) -> RunListing:
        whole = [each for each, is_whole in run_numbers(self._objects, store).items() if is_whole]
        matches = [each for each in whole if number in (None, each)]
        if not matches:
            missing = "no whole run" if number is None else f"no run {number}"
            raise NotFound(
                f"{self._objects.url} has {missing} of {store}: it has {', '.join(map(str, whole)) or 'none'}"
            )
        listing = read_listing(self._objects, store, matches[-1])
        for file in listing.files:
            if not _PATH.fullmatch(file.path):
                raise Invalid(f"run {listing.number} lists {file.path!r}, which is not the path of a file of a store")
        return listing

    def _uuid(self, work: str) -> bytes:
        """Return the UUID of the copy: that of an attempt that ended early, which may have left its note.

        A note of a copy that never came to be would keep the old store from collecting for ever.
        """
        name = f"{work}/{HEIR}"
        if self._fs.exists(name):
            file = self._fs.open(name)
            try:
                note = file.pread(IDENTITY_BYTES, 0)
            finally:
                file.close()
            if len(note) == IDENTITY_BYTES:
                return note
        elif (known_uuid := read_uuid(self._fs, work)) is not None:  # only the rename was missing
            return known_uuid
        out, uuid = TemporaryFile(self._fs, name), self._random.randbytes(IDENTITY_BYTES)
        try:
            out.file.pwrite(uuid, 0)
            out.publish()
        except BaseException:
            out.abort()
            raise
        return uuid

    def _fetch_files(self, listing: RunListing, work: str) -> None:
        for file in listing.files:
            target = f"{work}/{file.path}"
            fetch_as(self._fs, self._objects, file.object, target, file.size, file.checksum, self._stop)
            self._fetched[file.path] = file.size

    def _evict_rows(self, work: str) -> int:
        """Record each sstable that was not fetched as evicted; fetch those that opening needs."""
        evicted, operations = 0, list[ManifestOp]()
        with Manifest.open(f"{work}/manifest", fs=self._fs, clock=self._clock, engine=self._engine) as manifest:
            for key, row in manifest.read(lambda view: list(CHUNKS.scan(view))):
                if row.staged or row.file_name in self._fetched:
                    continue
                match row.residency:
                    case RemoteArchived(object=name, verified=True) | Evicted(object=name):
                        pass
                    case _:
                        raise CorruptionError(
                            row.file_name, 0, "neither the run nor its manifest names an object for this file"
                        )
                if key.db_id == LEDGER_TABLE or _has_ranges(row):
                    fetch(self._fs, self._objects, name, f"{work}/{row.file_name}", self._stop)
                    self._fetched[row.file_name] = row.size_bytes
                    continue
                if self._objects.size(name) != parse_file_key(name).size:
                    verify_object(self._objects, name, self._stop)  # raises: it is missing, or has another size
                if isinstance(row.residency, RemoteArchived):
                    operations.append(SetResidency(key, Evicted(name)))
                evicted += 1
            for start in range(0, len(operations), OPERATIONS):
                manifest.apply(operations[start : start + OPERATIONS])
        return evicted


def _has_ranges(row: ChunkEntryRecord) -> bool:
    """Whether opening the tree of a file needs its range deletes; unknown of encrypted tables, whose keys are away."""
    try:
        return msgspec.msgpack.decode(row.detail, type=TableDetail).has_ranges
    except msgspec.DecodeError:
        return False
